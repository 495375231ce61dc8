"""Names of models that are known, and variables that a job would miss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app

CONFIG = """recipe: function_calling
model: {{name_or_path: {name}}}
data: {{train: surefit/function-calling-train, eval: surefit/function-calling-eval, max_length: 256}}
train: {{per_device_train_batch_size: 1, max_steps: 2}}
hardware: {{gpu: {gpu}}}
output_dir: runs/example
{more}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SUREFIT_CACHE", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HF_TOKEN_PATH", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(place: Path, name: str = "surefit/nano", gpu: str = "cpu", more: str = "") -> None:
    (place / "run.yaml").write_text(CONFIG.format(name=name, gpu=gpu, more=more))


def surefit(*arguments: str) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    return result.exit_code, json.loads(result.stdout.strip().splitlines()[-1]), result.output


def findings(code: str) -> list[dict[str, Any]]:
    return [found for found in surefit("check", "run.yaml")[1]["findings"] if found["code"] == code]


SMALL = ("unsloth/Llama-3.2-1B-Instruct", "unsloth/llama-3.2-1b-instruct", "META-LLAMA/Llama-3.2-1B-instruct")


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "unsloth/Meta-Llama-3.1-8B-Instruct",
        "unsloth/Llama-3.1-8B",
        "qwen/qwen3-0.6b",
        "unsloth/Qwen3-4B",
        "unsloth/TinyLlama-1.1B-Chat-v1.0",
        *SMALL,
    ],
    ids=lambda name: f"TA3-{name}",
)
def test_other_names_of_known_models_have_the_same_config(place: Path, name: str) -> None:
    """What the simulation builds is of the model's own shape; the hub, which is out of reach, is not asked."""
    from surefit.facts.model import known_model, model_facts
    from surefit.plan.step_config import load_pretrained_config

    facts, entry = model_facts(name), known_model(name)
    assert entry is not None
    config = load_pretrained_config(facts)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (
        facts.hidden_size,
        facts.num_layers,
        entry["config"]["vocab_size"],
    )


def test_the_plan_of_another_name_is_simulated(place: Path) -> None:
    sizes = []
    for name in ("meta-llama/Llama-3.2-1B-Instruct", SMALL[1]):
        write(place, name, gpu="h100")
        code, planned, output = surefit("plan", "run.yaml")
        assert code == 0, output
        sizes.append((planned["estimate"]["low_bytes"], planned["estimate"]["high_bytes"]))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("name", "copy"),
    [
        ("meta-llama/Llama-3.2-1B-Instruct", "unsloth/Llama-3.2-1B-Instruct"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "unsloth/Llama-3.1-8B-Instruct"),
        ("meta-llama/Llama-2-7b-hf", None),
    ],
    ids=["TA13", "TA13-former-name", "TA13-no-copy"],
)
def test_the_copy_without_a_gate_is_named(place: Path, name: str, copy: str | None) -> None:
    write(place, name, gpu="auto")
    (found,) = findings("MOD005")
    assert ("unsloth/" in found["help"]) == (copy is not None)
    if copy is None:
        return
    assert found["help"].endswith(copy)
    write(place, copy, gpu="auto")
    assert findings("MOD005") == []


def test_a_missing_address_is_said_before_the_job(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place, more="telemetry: {mlflow_uri: env}")
    assert [(found["field"], found["severity"]) for found in findings("TRK007")] == [
        ("telemetry.mlflow_uri", "warning")
    ]
    code, _, output = surefit("slurm", "run.yaml")
    assert (code, output.count("TRK007")) == (0, 1)
    code, said, _ = surefit("train", "run.yaml")
    assert (code, said["field"]) == (3, "telemetry.mlflow_uri")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert findings("TRK007") == []
    assert "TRK007" not in surefit("slurm", "run.yaml")[2]


def test_an_address_in_the_env_file_counts(place: Path) -> None:
    write(place, more="telemetry: {mlflow_uri: env}")
    (place / ".env").write_text("MLFLOW_TRACKING_URI=sqlite:///mlflow.db\n")
    assert findings("TRK007") == []


def test_a_job_for_a_gated_model_needs_a_token(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place, "meta-llama/Llama-3.2-1B-Instruct", gpu="h100")
    code, _, output = surefit("slurm", "run.yaml")
    assert (code, "HF_TOKEN" in output) == (0, True), output
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    assert "HF_TOKEN is set" not in surefit("slurm", "run.yaml")[2]
