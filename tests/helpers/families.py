"""Small random models of many decoder families, by transformers' own configs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 64
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "phi": {},
    "phi3": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"head_dim": None},
    "starcoder2": {},
    "stablelm": {},
    "smollm3": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "nemotron": {},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
}


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of the family with random weights, in evaluation mode."""
    shape = {key: value for key, value in (SHAPE | FAMILIES[family] | changes).items() if value is not None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
        # Wide enough for logits that differ, and for gradients above rounding.
        for parameter in model.parameters():
            parameter.data.mul_(3.0) if parameter.ndim > 1 else parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
