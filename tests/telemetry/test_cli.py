"""Telemetry from the command line: what `surefit check` and `surefit train` make of the section."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.cli.conftest import call, config, surefit

from surefit.core.rundir import RunDir

__all__ = ["config", "surefit"]  # fixtures
SHORT = ("--set", "train.max_steps=2", "--set", "checkpoint.save_steps=2")


def asked(*settings: str) -> tuple[str, ...]:
    return tuple(part for setting in settings for part in ("--set", f"telemetry.{setting}"))


@pytest.mark.slow
def test_training_writes_event_files_and_takes_its_target_away(surefit: object, config: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("prometheus_client")
    answer = call("train", config, *SHORT, *asked("tensorboard=true", "prometheus_port=0"))
    assert answer.code == 0, answer.text
    assert "failed" not in answer.text
    run = RunDir(Path("runs/one"))
    assert len(list((run.path / "tensorboard").glob("events.out.tfevents.*"))) == 1
    assert not (run.path / "prometheus-target.json").exists()
    assert call("train", config, *SHORT, "--overwrite").code == 0
    assert not (run.path / "tensorboard").exists()


def test_a_missing_package_stops_before_the_model_is_loaded(
    surefit: object, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import surefit.model.load as load

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the model was loaded"))
    answer = call("train", config, *SHORT, *asked("prometheus_port=0"))
    assert answer.code == 3
    assert "'.[prometheus]'" in answer.text


def test_an_address_without_http_is_refused(surefit: object, config: Path) -> None:
    """MLflow would take it for a folder, and say so only when training has begun."""
    for address in ("127.0.0.1:5000", "tracker.internal:5000/mlflow"):
        answer = call("check", config, *asked(f"mlflow_uri={address}"))
        assert answer.code == 2
        assert f"http://{address}" in answer.text
    assert call("check", config, *asked("mlflow_uri=sqlite:///mlflow.db")).code == 0


def test_a_password_in_the_address_is_refused_without_being_shown(surefit: object, config: Path) -> None:
    answer = call("train", config, *asked("mlflow_uri=http://me:hunter2@127.0.0.1:1"))
    assert answer.code == 2
    assert "MLFLOW_TRACKING_PASSWORD" in answer.text
    assert "hunter2" not in answer.text
