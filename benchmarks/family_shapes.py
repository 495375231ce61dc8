"""Every decoder that transformers knows, small: a config of a few thousand parameters by the family's own class.

`config("qwen3_moe")` sets what nearly every config class has under some name (`SHAPE`), and `OWN` what one family needs
beside it so that its numbers agree with each other. Everything else is the class's default, so that each model is
built as the published ones are.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 264
"""256 bytes, and a few tokens for the ends of things."""
PAD, BOS, EOS = 0, 1, 2
WIDTH, HEADS, LAYERS, EXPERTS, CONTEXT = 32, 4, 2, 4, 128
HEAD, INNER = WIDTH // HEADS, 48

_NAMES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (VOCABULARY, ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size")),
    (PAD, ("pad_token_id", "decoder_start_token_id")),
    (BOS, ("bos_token_id",)),
    (EOS, ("eos_token_id",)),
    (WIDTH, (
        "hidden_size", "d_model", "n_embd", "embedding_size", "embedding_dim", "emb_dim", "attention_hidden_size",
        "lru_width", "input_embedding_size", "output_embedding_size", "word_embed_proj_dim", "out_hidden_size",
    )),
    (LAYERS, (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks",
        "num_decoder_layers", "num_encoder_layers", "depth", "num_layers_per_stack", "conf_num_hidden_layers",
    )),
    (HEADS, (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
        "attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads", "mamba_n_heads",
        "mamba_num_heads", "linear_num_heads", "swa_num_attention_heads", "n_mamba_heads", "linear_num_value_heads",
        "index_n_heads", "conf_num_attention_heads",
    )),
    (2, (
        "num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads", "linear_num_key_heads",
        "num_global_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k",
        "mamba_n_groups", "n_groups", "top_k_experts",
    )),
    (1, (
        "n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers", "n_shared_experts",
        "num_shared_experts", "moe_num_shared_experts", "num_nextn_predict_layers",
    )),
    (HEAD, (
        "head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_d_head", "mamba_head_dim",
        "linear_head_dim", "swa_head_dim", "linear_key_head_dim", "linear_value_head_dim", "dim_head", "d_head", "d_kv",
        "kv_channels", "attention_head_dim", "query_pre_attn_scalar", "global_head_dim", "attention_head_size",
        "time_step_rank", "mamba_dt_rank", "laurel_rank", "hidden_size_per_layer_input", "index_topk", "rotary_dim",
    )),
    (16, (
        "q_lora_rank", "kv_lora_rank", "mamba_d_state", "state_size", "ssm_state_size", "index_head_dim", "o_lora_rank",
        "chunk_size", "mamba_chunk_size", "block_size", "sliding_window", "sliding_window_size", "local_attention",
        "attention_window_size", "window_size", "hc_lowrank", "adapter_rank", "router_hidden_size", "index_block_size",
    )),
    (INNER, (
        "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim", "d_ff",
        "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim",
        "dim_ff", "dff", "d_inner", "ffn_hidden_size", "expert_ffn_hidden_size", "shared_intermediate_size",
        "dense_intermediate_size", "intermediate_size_mlp", "feed_forward_size", "vocab_projection_size",
    )),
    (EXPERTS, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")),
    (CONTEXT, (
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "model_max_length",
        "max_target_positions", "max_source_positions",
    )),
)  # fmt: skip
SHAPE = {name: value for value, names in _NAMES for name in names}
IMAGES = ":images"
"""After the name of a family: its model that takes images, whole, with language alone to learn."""
VISION = (
    "aya_vision",
    "cohere2_vision",
    "gemma3",
    "gemma4",
    "glm4v",
    "internvl",
    "lfm2_vl",
    "llama4",
    "llava",
    "mistral3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen4_exp",
    "smolvlm",
)
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")
"""Settings with an entry for each layer."""
_MAMBA = {"mamba_d_head": 2 * WIDTH // HEADS}
_ATTENTION = ("sliding_attention", "full_attention")
_ZAMBA = {
    "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 2 * WIDTH,
    "attention_head_dim": 2 * WIDTH // HEADS,
}  # fmt: skip
_INDEXED = {
    "indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 64,
    "indexer_compress_ratio": 2,
}  # fmt: skip
_MROPE = {
    "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
}  # of half a head
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]} | _MAMBA,
    "falcon_h1": {"mamba_d_ssm": 2 * WIDTH} | _MAMBA,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]} | _MAMBA,
    "mamba2": {"head_dim": 2 * WIDTH // HEADS},
    "blt": {
        "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [2, 3],
        "encoder_config": {"hidden_size_global": WIDTH}, "decoder_config": {"hidden_size_global": WIDTH},
    },
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _ATTENTION},
        "layer_types": list(_ATTENTION),
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0}},
    "glm4v": _MROPE,
    "qwen2_vl": _MROPE | {"vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 4}},
    "qwen2_5_vl": _MROPE,
    "gemma4": {"vision_config": {"position_embedding_size": 64}},  # whose class makes none of its own accord
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hrm_text": {"num_hidden_layers": 2 * 2 * (3 + 1)},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16]},
    "roc_bert": {"shape_vocab_size": VOCABULARY, "shape_embed_dim": 16, "pronunciation_embed_dim": 16},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def families() -> list[str]:
    """The model types that the installed transformers has under `AutoModelForCausalLM`, and `VISION` with images."""
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *(f"{name}{IMAGES}" for name in VISION)]


def config(family: str) -> PreTrainedConfig:
    """The small config of a family.

    Raises:
        Exception: whatever its class raises, where these numbers do not suit it.
    """
    family = family.removesuffix(IMAGES)
    made: PreTrainedConfig = _small(CONFIG_MAPPING[family], OWN.get(family, {}))
    return made


def _small(kind: Any, own: dict[str, Any]) -> Any:
    default = kind()
    has = default.to_dict()
    values = {name: SHAPE[name] for name in has if name in SHAPE}
    if "kv_lora_rank" in values:  # multi-head latent attention: keys and values for every head
        values["num_key_value_heads"] = HEADS
    values |= _one_layer_of_each(has)
    for name in kind.sub_configs:
        made = getattr(default, name, None)
        if made is not None or name in own:
            values[name] = _small(kind.sub_configs[name] if made is None else type(made), own.get(name, {}))
    return kind(**(own | values | {name: value for name, value in own.items() if name not in kind.sub_configs}))


def _one_layer_of_each(has: dict[str, Any]) -> dict[str, Any]:
    """As many layers as there are kinds of them, two at least."""
    lists = {name: list(dict.fromkeys(has[name])) for name in LISTS if has.get(name)}
    count = max([LAYERS, *map(len, lists.values())])
    found = {name: [kinds[layer % len(kinds)] for layer in range(count)] for name, kinds in lists.items()}
    return found | {"num_hidden_layers": count} if lists else {}
