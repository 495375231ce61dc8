"""Two real processes, each with half of the layers, learn what one process learns."""

import pytest
from engine_steps import HELPERS, assert_the_same_steps, start

pytestmark = pytest.mark.distributed
SAME = (
    "lora", "lora_whole_logits", "full", "full_tied", "lora_tied", "packed", "one_micro_batch", "checkpointing",
    "qwen3",
)  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return start(HELPERS / "pipeline_run.py")


@pytest.mark.parametrize("name", SAME)
def test_twenty_steps_are_those_of_one_process(found, name):
    assert_the_same_steps(found[name])


def test_each_stage_holds_its_layers_and_no_others(found):
    (first, held_first), (last, held_last) = found["shards"]["stages"]
    assert first + last == [0, 1, 2, 3]
    assert first
    assert last
    for layer in range(4):
        part = [name for name in found["shards"]["names"] if f".layers.{layer}." in name]
        assert set(part) <= set(held_first if layer in first else held_last)
        assert not set(part) & set(held_last if layer in first else held_first)
    assert "base_model.model.model.embed_tokens.weight" in held_first
    assert "base_model.model.model.norm.weight" in held_last
    assert "base_model.model.lm_head.weight" in held_last
    assert len(held_first) + len(held_last) == len(found["shards"]["names"]), "nothing is held twice"


@pytest.mark.parametrize("name", ["resume_lora", "resume_full"])
def test_a_checkpoint_is_a_single_process_one(found, name):
    assert found[name]["resumed_equals_uninterrupted"]
    assert found[name]["single_goes_on"] <= 1e-5


def test_plain_peft_loads_the_adapter_key_for_key(found):
    assert found["resume_lora"]["adapter"] <= 1e-3
    assert found["resume_lora"]["adapter_logits"] <= 1e-3


def test_all_stages_reject_a_step_that_one_of_them_cannot_do(found):
    assert found["not_finite"] == [[False, True], [False, True]]


def test_a_model_without_a_plan_is_refused_by_name(found):
    assert "GPT2LMHeadModel" in found["no_plan"]
