"""Random models of 12 families in three sizes, made on this machine, for `plan_real.py`.

A size is what a Llama of that shape has; another family's parameters differ with its experts. All have the built-in
model's tokenizer, and a vocabulary that is larger than it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# width, MLP width, layers, heads of 64, key and value heads, vocabulary
SIZES = {
    "20M": (512, 1536, 6, 8, 4, 1600),
    "120M": (768, 2304, 12, 12, 4, 16_000),
    "500M": (1280, 3840, 20, 20, 4, 32_000),
}
# what one family needs beside it, from (MLP width, MLP width of one of many experts)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {},
    "olmo2": {},
    "phi3": {},
    "granite": {},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": "expert"},
    "glm4_moe": {
        "moe_intermediate_size": "expert", "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
    "qwen3_moe": {"moe_intermediate_size": "expert", "num_experts": 32, "num_experts_per_tok": 4},
    "qwen3_next": {
        "moe_intermediate_size": "expert", "shared_expert_intermediate_size": "expert", "num_experts": 16,
        "num_experts_per_tok": 4, "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}  # fmt: skip
"""Twelve and Llama, which the plan was fitted to."""


def shape(family: str, size: str) -> dict[str, Any]:
    """What the family's config class is called with."""
    width, inner, layers, heads, key_heads, vocabulary = SIZES[size]
    expert = inner // 6
    extra = {key: expert if value == "expert" else value for key, value in FAMILIES[family].items()}
    return {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": 64, "max_position_embeddings": 4096,
    } | extra  # fmt: skip


def make(family: str, size: str, folder: Path) -> Path:
    """The folder of the model, saved there if it is not yet."""
    target = folder / f"{family}-{size}"
    if (target / "tokenizer.json").exists():
        return target
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from surefit import nano

    tokenizer = AutoTokenizer.from_pretrained(nano.PATH)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **shape(family, size) | ids)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
