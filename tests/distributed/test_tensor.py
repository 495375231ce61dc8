"""Two real processes, each with half of every matrix, learn what one process learns."""

import pytest
from engine_steps import HELPERS, assert_the_same_steps, start

pytestmark = pytest.mark.distributed
SAME = (
    "lora", "full", "full_whole_logits", "full_tied", "lora_tied", "packed", "checkpointing", "qwen3", "biases", "phi3",
)  # fmt: skip
QUERY, OUTPUT = (f"layers.0.self_attn.{name}_proj" for name in "qo")


@pytest.fixture(scope="module")
def found():
    return start(HELPERS / "tensor_run.py")


@pytest.mark.parametrize("name", SAME)
def test_twenty_steps_are_those_of_one_process(found, name):
    assert_the_same_steps(found[name])


def test_matrices_are_cut_and_factors_with_them(found):
    cut = found["shards_lora"]["cut"]
    base = "base_model.model.model."
    assert cut[f"{base}{QUERY}.base_layer.weight"] == ["S(0)", [64, 64], [32, 64]]
    assert cut[f"{base}{QUERY}.lora_A.default.weight"] == ["R", [4, 64], [4, 64]]
    assert cut[f"{base}{QUERY}.lora_B.default.weight"] == ["S(0)", [64, 4], [32, 4]]
    assert cut[f"{base}{OUTPUT}.base_layer.weight"] == ["S(1)", [64, 64], [64, 32]]
    assert cut[f"{base}{OUTPUT}.lora_A.default.weight"] == ["S(1)", [4, 64], [4, 32]]
    assert cut[f"{base}{OUTPUT}.lora_B.default.weight"] == ["R", [64, 4], [64, 4]]
    assert cut["base_model.model.lm_head.weight"] == ["S(0)", [128, 64], [64, 64]]
    assert all("norm" in name or "embed_tokens" in name for name in found["shards_lora"]["plain"]), "frozen and whole"


def test_everything_trained_is_a_dtensor(found):
    full = found["shards_full"]
    assert full["plain"] == []
    assert full["cut"]["model.norm.weight"] == ["R", [64], [64]]
    assert full["cut"]["model.layers.3.mlp.down_proj.weight"] == ["S(1)", [64, 96], [64, 48]]


@pytest.mark.parametrize("name", ["resume_lora", "resume_full"])
def test_a_checkpoint_is_a_single_process_one(found, name):
    assert found[name]["resumed_equals_uninterrupted"]
    assert found[name]["single_goes_on"] <= 1e-5


def test_plain_peft_loads_the_adapter_key_for_key(found):
    assert found["resume_lora"]["adapter"] <= 1e-3
    assert found["resume_lora"]["adapter_logits"] <= 1e-3


@pytest.mark.parametrize(
    ("name", "text"),
    [("no_plan", "GPTBigCodeForCausalLM"), ("odd_heads", "1 key heads")],
)
def test_what_would_not_be_exact_is_refused(found, name, text):
    assert text in found[name]
