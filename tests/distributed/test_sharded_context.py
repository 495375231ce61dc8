"""Real processes that share the tokens of every example and the weights learn what one process learns.

Two that share both; and four, in two groups that share tokens, over all of which the weights are sharded.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import sharing
from engine_steps import HELPERS, assert_the_same_steps
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from sharded_context_run import RUNS
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.distributed
BOUND = 1e-5
STEPS = {
    2: ("lora padded recomputed", "lora packed fused", "full packed tiled", "full padded tied whole logits"),
    4: ("lora packed fused", "full padded tied whole logits", "full packed in two replicas"),
}


@pytest.fixture(scope="module", params=[2, 4])
def processes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, processes: int) -> Path:
    return tmp_path_factory.mktemp(f"of-{processes}")


@pytest.fixture(scope="module")
def many(folder: Path, processes: int) -> dict[str, Any]:
    return sharing.start("fsdp", folder, processes, script=HELPERS / "sharded_context_run.py")


def test_twenty_steps_are_those_of_one_process(many: dict[str, Any], processes: int) -> None:
    for name in STEPS[processes]:
        assert_the_same_steps(many[name])


@pytest.mark.parametrize("name", RUNS)
def test_whole_runs_are_those_of_one_process(many: dict[str, Any], folder: Path, name: str) -> None:
    """With held-out rows, and micro batches that do not divide."""
    made = sharing.settings(folder / "base", folder / "alone" / name, **sharing.SCENARIOS[name])
    sharing.fit(made, None)
    one = sharing.outcome(made)
    assert len(one["loss"]) == sharing.STEPS
    for key in ("loss", "norm", "held_out"):
        assert many[name][key] == pytest.approx(one[key], rel=BOUND), key
    assert many[name]["tokens"] == one["tokens"]


def test_the_weights_are_in_shards_and_the_tokens_shared(many: dict[str, Any], processes: int) -> None:
    found = many["wrapped"]
    assert many["engine"] == ["ShardedContext", processes // 2]
    assert found["type"] == "FSDPLossModule"
    assert found["layers"] == ["FSDPLlamaDecoderLayer"]
    assert found["kinds"] == ["DTensor"]
    assert found["held"] * processes == found["whole"]
    assert found["state"] * processes == found["whole"]
    assert found["attention"] == "torch_varlen"


def test_a_state_that_tokens_hand_on_is_found_in_shards(many: dict[str, Any]) -> None:
    assert "llama cannot be trained with context parallelism" in many["state"]


def test_resumed_in_the_same_mode_is_bit_identical(many: dict[str, Any]) -> None:
    assert many["again"] == many["full uneven"]


def test_one_process_resumes_what_they_have_saved(many: dict[str, Any], folder: Path) -> None:
    runs = folder / "runs"
    shutil.copytree(runs / "full-uneven", runs / "by-one")
    shutil.rmtree(runs / "by-one/checkpoints/step-20")
    shutil.rmtree(runs / "by-one/model")
    made = sharing.settings(folder / "base", runs / "by-one", **sharing.SCENARIOS["full uneven"])
    _, result = sharing.fit(made, None, resume=True)
    assert result.resumed_from == 10
    assert any("parallel.cp: 2, now 1" in note for note in result.notes)
    assert sharing.outcome(made)["loss"] == pytest.approx(many["full uneven"]["loss"], rel=BOUND)


def test_the_adapter_is_one_that_plain_peft_reads(many: dict[str, Any], folder: Path) -> None:
    held = load_file(folder / "runs/lora-padded/adapter/adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(base, folder / "runs/lora-padded/adapter"))
    assert held.keys() == loaded.keys()
    assert all((loaded[name] == tensor).all() for name, tensor in held.items())
    assert all(tensor.any() for name, tensor in held.items())
