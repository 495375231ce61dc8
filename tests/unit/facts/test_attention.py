"""What config.json says of a model's attention: its needs, and whether its documents can share a row."""

from typing import Any

import pytest

from surefit.facts import attention
from surefit.facts.architecture import dimensions
from surefit.facts.attention import AttentionNeeds, attention_layers, attention_needs, kernel_obstacle, packing_obstacle


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "qwen3_next"}, "recurrent layers"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "xglm"}, "its own attention code"),
        ({"model_type": "gpt_neox_japanese"}, "its own attention code"),
        ({"model_type": "llama4_text"}, "chunks"),
        ({"model_type": "new", "alibi": True}, "ALiBi"),
        ({"model_type": "new", "attention_chunk_size": 8192}, "chunks"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"model_type": "new", "layer_types": ["conv", "full_attention", "conv"]}, r"2 layers of it \(conv\)"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, r"1 layer of it \(mamba\)"),
        ({"model_type": "seer", "text_config": {"model_type": "qwen3_5_text", "hidden_size": 8}}, "recurrent"),
    ],
)
def test_what_cannot_be_packed_and_why(config: dict[str, Any], says: str) -> None:
    obstacle = packing_obstacle(config)
    assert obstacle is not None
    assert obstacle.startswith(f"{config['model_type']} cannot be packed: ")
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(obstacle)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"]},
        {"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]},
        {},
    ],
)
def test_what_nothing_is_known_against(config: dict[str, Any]) -> None:
    assert packing_obstacle(config) is None


def test_every_type_in_the_tables_is_one_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    tables = (
        attention.RECURRENT,
        attention.ALIBI,
        attention.OWN_ATTENTION,
        attention.OTHER_ATTENTION.keys(),
        attention.SINKS,
        attention.SOFTCAP.keys(),
    )
    later = {"axk2", "deepseek_v32", "hy_v4", "flint", "granite_swa", "granitemoe_swa", "inkling2_text", "lfm3"}
    later |= {"qwen4_exp", "qwen4_exp_text", "bailing_hybrid", "kimi_linear"}
    names = {name for table in tables for name in table}
    assert names - set(CONFIG_MAPPING_NAMES) <= later, "only what came after 5.17 may be unknown"
    assert not attention.RECURRENT & attention.OWN_ATTENTION


@pytest.mark.parametrize(
    ("family", "settings", "needs"),
    [
        ("llama", {"hidden_size": 512, "num_attention_heads": 8}, AttentionNeeds(64)),
        ("gemma2", {"head_dim": 256}, AttentionNeeds(256, softcap=50.0, sliding_window=4096)),
        ("gemma2", {"head_dim": 256, "attn_logit_softcapping": None}, AttentionNeeds(256, sliding_window=4096)),
        ("gpt_oss", {}, AttentionNeeds(64, sinks=True, sliding_window=128)),
        ("qwen2", {"hidden_size": 512, "num_attention_heads": 8, "use_sliding_window": False}, AttentionNeeds(64)),
        ("mistral", {"sliding_window": 4096}, AttentionNeeds(128, sliding_window=4096)),
        ("gpt2", {}, AttentionNeeds(64)),
        ("deepseek_v3", {}, AttentionNeeds(192)),
    ],
)
def test_needs_are_those_of_the_config_that_transformers_writes(
    family: str, settings: dict[str, Any], needs: AttentionNeeds
) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family](**settings).to_dict()
    assert attention_needs(config) == needs
    assert attention_layers(config) == CONFIG_MAPPING[family](**settings).num_hidden_layers


@pytest.mark.parametrize("written", [{"num_layers": 28}, {"num_layers": 28, "num_hidden_layers": 56}])
def test_layers_that_attend_twice_are_counted_once_as_layers(written: dict[str, int]) -> None:
    """`num_hidden_layers` as LongCat's class in transformers 5.17 writes it; later ones write `num_layers` alone."""
    config = {"model_type": "longcat_flash", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99} | written
    assert attention_layers(config) == 56
    assert dimensions(config, "config.json").num_layers == 28


@pytest.mark.parametrize(
    ("needs", "dtype", "capability", "says"),
    [
        (AttentionNeeds(128), "bfloat16", (8, 0), None),
        (AttentionNeeds(128, sliding_window=512), "float16", (9, 0), None),
        (AttentionNeeds(128), "bfloat16", None, "no GPU"),
        (AttentionNeeds(128), "float16", (7, 5), "compute capability 7.5, the kernel needs 8.0"),
        (AttentionNeeds(128), "float32", (9, 0), "not in float32"),
        (AttentionNeeds(80), "bfloat16", (9, 0), None),
        (AttentionNeeds(36), "bfloat16", (9, 0), "heads of width 36"),
        (AttentionNeeds(512), "bfloat16", (9, 0), "heads of width 512"),
        (AttentionNeeds(256, softcap=50.0), "bfloat16", (9, 0), "a softcap of 50"),
        (AttentionNeeds(64, sinks=True), "bfloat16", (9, 0), None),
    ],
)
def test_where_the_kernel_runs(needs: AttentionNeeds, dtype: str, capability: Any, says: str | None) -> None:
    found = kernel_obstacle(needs, dtype=dtype, capability=capability)
    assert (found is None) if says is None else says in (found or "")
