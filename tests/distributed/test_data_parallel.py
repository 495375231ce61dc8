"""DDP and FSDP2 in two real processes over gloo, against one process; one start each (tests/helpers/sharing.py)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import sharing
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.distributed

BOUND = 1e-5
"""Relative, in float32: the gradients are the same numbers, added up in another order."""


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, mode: str) -> Path:
    return tmp_path_factory.mktemp(mode)


@pytest.fixture(scope="module")
def two(folder: Path, mode: str) -> dict[str, Any]:
    return sharing.start(mode, folder)


@pytest.fixture(scope="module")
def one(folder: Path, two: dict[str, Any]) -> dict[str, Any]:
    return sharing.alone(folder / "base", folder / "alone")


@pytest.mark.parametrize("scenario", [name for name in sharing.SCENARIOS if name != "bfloat16"])
def test_twenty_steps_are_those_of_one_process(two: dict[str, Any], one: dict[str, Any], scenario: str) -> None:
    for key in ("loss", "norm", "held_out"):
        assert two[scenario][key] == pytest.approx(one[scenario][key], rel=BOUND), key
    assert len(two[scenario]["loss"]) == sharing.STEPS
    assert two[scenario]["tokens"] == one[scenario]["tokens"]


@pytest.mark.parametrize("scenario", list(sharing.QUANTIZED))
def test_over_quantised_weights_they_are_those_of_one_process(
    two: dict[str, Any], one: dict[str, Any], mode: str, scenario: str
) -> None:
    found = two.get(scenario)
    if mode == "ddp":
        assert found is not None
        for key in ("loss", "norm", "held_out"):
            assert found[key] == pytest.approx(one[scenario][key], rel=BOUND), key
        assert found["loss"] != pytest.approx(two["lora padded"]["loss"], rel=BOUND), "the base is quantised"
    else:
        assert found is None, "FSDP shards none: config/capabilities.py"


def test_in_bfloat16_they_are_so_up_to_its_rounding(two: dict[str, Any], one: dict[str, Any]) -> None:
    assert two["bfloat16"]["loss"] == pytest.approx(one["bfloat16"]["loss"], rel=2**-8)


def test_the_wrapper_is_the_one_that_was_asked_for(two: dict[str, Any], mode: str) -> None:
    """The types that are really there, and how many numbers a process holds: the losses would not tell them apart."""
    found = two["wrapped"]
    parts = {"ddp": 1, "fsdp": 2}[mode]
    assert found["held"] * parts == found["whole"]
    assert found["state"] * parts == found["whole"]
    if mode == "ddp":
        assert found["type"] == "DistributedDataParallel"
        assert found["kinds"] == ["Parameter"]
    else:
        assert found["type"] == "FSDPLossModule"
        assert found["layers"] == ["FSDPLlamaDecoderLayer"]
        assert found["kinds"] == ["DTensor"]


def test_resumed_in_the_same_mode_is_bit_identical(two: dict[str, Any]) -> None:
    assert two["again"] == two["full uneven"]


def test_one_process_resumes_what_two_have_saved(folder: Path, two: dict[str, Any], mode: str) -> None:
    """Checkpoints do not tell how many processes wrote them; another number of them is noted."""
    runs = folder / "runs"
    shutil.copytree(runs / "full-uneven", runs / "by-one")
    shutil.rmtree(runs / "by-one/checkpoints/step-20")
    shutil.rmtree(runs / "by-one/model")
    made = sharing.settings(folder / "base", runs / "by-one", **sharing.SCENARIOS["full uneven"])
    _, result = sharing.fit(made, None, resume=True)
    assert result.resumed_from == 10
    assert any(f"parallel.mode: {mode}, now single" in note for note in result.notes)
    assert sharing.outcome(made)["loss"] == pytest.approx(two["full uneven"]["loss"], rel=BOUND)


def test_the_adapter_is_one_that_plain_peft_reads(folder: Path, two: dict[str, Any], one: dict[str, Any]) -> None:
    theirs = load_file(folder / "runs/lora-padded/adapter/adapter_model.safetensors")
    ours = load_file(folder / "alone/lora-padded/adapter/adapter_model.safetensors")
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype
        assert (theirs[name] - tensor).abs().max() <= 1e-4, name
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    loaded = PeftModel.from_pretrained(base, folder / "runs/lora-padded/adapter")
    held = dict(loaded.named_parameters())
    for name, tensor in theirs.items():
        assert (held[name.replace(".weight", ".default.weight")] == tensor).all()


def test_the_whole_model_is_one_that_transformers_reads(folder: Path, two: dict[str, Any]) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder / "runs/full-uneven/model", dtype="auto")
    alone = AutoModelForCausalLM.from_pretrained(folder / "alone/full-uneven/model", dtype="auto")
    for (name, ours), theirs in zip(alone.named_parameters(), loaded.parameters(), strict=True):
        assert (ours - theirs).abs().max() <= 1e-4, name
