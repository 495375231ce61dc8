"""`surefit merge` and `certify` of what other tools made: input that is not there, or not what it should be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.conftest import Surefit

from surefit import nano


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter's settings, which is all that is read before these errors."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = {"base_model_name_or_path": "surefit/nano", "peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("damaged", ["{", "[1]"])
def test_settings_that_cannot_be_read_are_named(surefit: Surefit, adapter: Path, damaged: str) -> None:
    (adapter / "adapter_config.json").write_text(damaged)
    answer = surefit("merge", adapter)
    assert answer.code == 2
    assert "adapter_config.json" in answer.stderr
    assert "help:" in answer.stderr


@pytest.mark.parametrize(("content", "why"), [(None, "cannot be read"), (b"\n \n", "no prompt"), (b"\xff", "UTF-8")])
def test_prompts_that_are_none(
    surefit: Surefit, adapter: Path, tmp_path: Path, content: bytes | None, why: str
) -> None:
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    answer = surefit("merge", adapter, "--prompts", file)
    assert answer.code == 2
    assert re.search(r"prompts\.txt: error\[E80(29|30)\] --prompts: ", answer.stderr)
    assert why in answer.stderr


def test_a_folder_without_a_model_is_not_certified(surefit: Surefit, adapter: Path, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    merged.mkdir()
    answer = surefit("certify", adapter, merged)
    assert answer.code == 2
    assert "merged: error[E8022] " in answer.stderr
    (merged / "config.json").write_text("{}")
    answer = surefit("certify", adapter, merged)
    assert "there is no *.safetensors" in answer.stderr
    answer = surefit("serve-check", merged)
    assert answer.code == 2
    assert "nor an export, nor a model" in answer.stderr


def test_runs_that_are_not_there(surefit: Surefit) -> None:
    answer = surefit("runs", "elsewhere")
    assert answer.stdout.splitlines()[0] == "No runs in elsewhere: there is no such directory"
    assert "surefit runs" in surefit("report", "runs/gone").stderr


def test_a_base_that_is_stored_quantised_is_refused_in_words(surefit: Surefit, adapter: Path, tmp_path: Path) -> None:
    """What unsloth's `-bnb-4bit` copies are: the original's config.json with a quantization_config."""
    base = tmp_path / "Tiny-Instruct-bnb-4bit"
    base.mkdir()
    config = json.loads((nano.PATH / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (base / "config.json").write_text(json.dumps(config))
    named = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(named))
    assert "warning[MRG005]" in surefit("check", adapter / "adapter_config.json").stdout
    done = surefit("merge", adapter)
    assert done.code == 2
    assert "has quantized files (bitsandbytes)" in done.stderr
    assert "--base ORIGINAL --trained-on nf4" in done.stderr, "nobody knows what it was made from"
    (tmp_path / "Tiny-Instruct").mkdir()
    assert f"--base {tmp_path}/Tiny-Instruct --trained-on nf4" in surefit("merge", adapter).stderr
    assert not (adapter / "merged").exists()
