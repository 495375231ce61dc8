"""The doctor in good and in broken environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefit.config.trackers import TRACKERS
from surefit.doctor import probes
from surefit.doctor.probe import Probe
from surefit.doctor.probes import run_probes

TOKEN = "hf_" + "s3cr3t" * 5


def named(found: Iterator[Probe] | list[Probe], name: str) -> Probe:
    return next(probe for probe in found if probe.name == name)


@pytest.mark.slow
def test_every_probe_has_a_fact_and_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    found = run_probes()
    names = {probe.name for probe in found}
    assert {"python", "surefit", "gpu", "torch works", "cpu", "memory", "working directory", "model cache"} <= names
    assert {"hub token", "offline mode", "clock", "text encoding", "run folder", "port", "variables"} <= names
    assert {"attention sdpa", "attention flex", "attention varlen", "gloo", "nccl"} <= names
    for probe in found:
        assert probe.fact
        if probe.verdict != "info":  # what is optional needs no way out
            assert (probe.fix is not None) == (probe.verdict != "ok")
    assert TOKEN not in json.dumps([probe.as_dict() for probe in found])
    assert named(found, "hub token").fact == "set"
    assert named(found, "torch works").verdict == named(found, "gloo").verdict == "ok"
    assert named(found, "attention sdpa").fact == "runs"


def test_a_probe_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Probe]:
        yield Probe("first", "fine")
        raise RuntimeError(f"no {TOKEN}")

    monkeypatch.setattr(probes, "GROUPS", (broken, probes.clock_probes))
    found = run_probes()
    assert named(found, "broken").verdict == "warn"
    assert TOKEN not in named(found, "broken").fact
    assert named(found, "clock").verdict == "ok"


def test_versions_against_the_tested_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"surefit": "0.1.0", "torch": "2.13.0+cpu", "transformers": "4.57.0"}
    wanted = ["torch<2.14,>=2.11", "transformers>=5.17", "peft>=0.19", 'wandb>=0.28; extra == "wandb"']
    monkeypatch.setattr(probes, "installed_version", installed.get)
    monkeypatch.setattr(probes.metadata, "requires", lambda name: wanted)
    found = {probe.name: probe for probe in probes.package_probes()}
    assert set(found) == {"surefit", "transformers", "peft", "packages"}
    assert found["packages"].fact == "1 in the tested ranges: torch 2.13.0+cpu"
    assert (found["transformers"].verdict, found["transformers"].fix) == ("warn", "pip install 'transformers>=5.17'")
    assert found["transformers"].is_command
    assert (found["peft"].verdict, found["peft"].fact) == ("fail", "not installed (needs >=0.19)")


def test_packages_of_the_core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "numpy>=2",
        'torch<2.14; extra == "train"',
        'surefit[data]; extra == "train"',
        'sympy; extra == "metrics"',
    ]
    monkeypatch.setattr(probes.metadata, "requires", lambda name: wanted)
    installed = {"surefit": "0.1.0", "numpy": "2.4.6", "sympy": "1.13"}
    monkeypatch.setattr(probes, "installed_version", installed.get)
    assert [probe.name for probe in probes.package_probes()] == ["surefit", "packages"]
    installed |= {"torch": "2.15.0"}
    found = {probe.name: probe.verdict for probe in probes.package_probes()}
    assert found == {"surefit": "ok", "torch": "warn", "packages": "ok"}
    del installed["sympy"]
    found = {probe.name: probe.verdict for probe in probes.package_probes()}
    assert found["sympy"] == "fail", "what trains brings it"


def test_a_python_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_metadata", lambda field: ">=3.99")
    assert named(probes.python_probes(), "python").verdict == "fail"


def test_little_memory_and_no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "ram_bytes", lambda: 2 * 2**30)
    assert named(probes.machine_probes(), "memory").verdict == "warn"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert named(probes.hub_probes(), "hub token").fact.startswith("not set")
    assert named(probes.hub_probes(), "offline mode").verdict == "warn"


def test_a_clock_in_the_past_and_another_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    future = tmp_path / "__init__.py"
    future.touch()
    os.utime(future, (4e9, 4e9))
    monkeypatch.setattr(probes.surefit, "__file__", str(future))
    assert named(probes.clock_probes(), "clock").verdict == "warn"
    monkeypatch.setattr(probes.locale, "getpreferredencoding", lambda do_setlocale: "ISO-8859-1")
    assert named(probes.text_encoding_probes(), "text encoding").verdict == "warn"


def test_what_fused_kernels_need_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "missing_for_kernels", lambda: "liger-kernel")
    assert "off on a GPU: liger-kernel is missing" in named(probes.kernel_probes(), "fused kernels").fact
    monkeypatch.setattr(probes, "missing_for_kernels", lambda: None)
    monkeypatch.setattr(probes, "installed_version", {"liger-kernel": "0.8.5", "triton": "3.9.0"}.get)
    assert named(probes.kernel_probes(), "fused kernels").fact == "liger-kernel 0.8.5, triton 3.9.0"


def test_trackers_are_said_to_be_set_up_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "installed_version", {"wandb": "0.28.0"}.get)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    wandb = named(probes.tracker_probes(), "tracker wandb")
    assert ("would prompt for a key" in wandb.fact, wandb.verdict, wandb.fix) == (True, "info", None)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123456789\n")
    assert named(probes.tracker_probes(), "tracker wandb").fact == "0.28.0, set up"
    assert named(probes.tracker_probes(), "tracker wandb").verdict == "ok"
    assert named(probes.tracker_probes(), "tracker mlflow").fact == "not installed"
    monkeypatch.setitem(TRACKERS, "mlflow", replace(TRACKERS["mlflow"], packages=()))
    assert named(probes.tracker_probes(), "tracker mlflow").fact == "not set up: it logs below ./mlruns"


def test_only_variables_that_steer_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("WANDB_API_KEY", TOKEN)
    fact = named(probes.environment_variable_probes(), "variables").fact
    assert "CUDA_LAUNCH_BLOCKING=1" in fact
    assert "WANDB_API_KEY" not in fact


def doctor(*options: str, **environment: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, *options, "-m", "surefit", "doctor", "--json"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def facts_of(result: dict[str, Any]) -> dict[str, str]:
    return {probe["name"]: probe["fact"] for probe in result["probes"]}


def test_it_runs_in_an_interpreter_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: undefined symbol')\n")
    code, result = doctor(PYTHONPATH=str(tmp_path))
    assert code == 3
    assert result["failed"] == ["torch works"]
    assert "undefined symbol" in facts_of(result)["torch works"]
    assert "attention sdpa" not in facts_of(result)


def test_it_runs_where_torch_is_not_installed_and_the_rest_does_not_fit(tmp_path: Path) -> None:
    for folder in {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))}:
        for entry in folder.iterdir():
            if not entry.name.startswith(("torch", "__pycache__")) and not (tmp_path / entry.name).exists():
                (tmp_path / entry.name).symlink_to(entry)
    old = tmp_path / "pandas_old" / "scikit_learn-1.3.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: scikit-learn\nVersion: 1.3.0\n\nText.\n")
    source = Path(probes.surefit.__file__).parents[1]
    # -S leaves the real site-packages out: what remains is the folder of links.
    code, result = doctor("-S", PYTHONPATH=os.pathsep.join([str(old.parent), str(tmp_path), str(source)]))
    assert code == 3
    assert facts_of(result)["torch works"] == "not installed"
    assert "scikit-learn 1.3.0 was built for NumPy 1" in facts_of(result)["STK001"]
    assert {"torch works", "STK001"} <= set(result["failed"])
