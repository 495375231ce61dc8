"""The model in a GGUF file: its config.json as transformers would write it, and obstacles to its conversion."""

from __future__ import annotations

import struct
from typing import Any

from surefit.core.errors import ModelError
from surefit.facts.gguf import GgufHeader

BYTE_LEVEL = "gpt2"
"""The kind of tokenizer, as `tokenizer.ggml.model` names it, that SureFit can rebuild."""
KNOWN_SPLITS = ("smollm", "gpt-2", "llama-bpe", "qwen2")
"""Keys of `SPLITS` in facts/gguf_tokenizer.py, which is imported only where a tokenizer is needed."""
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Architectures that SureFit converts, named as transformers' model types → their classes there."""
_REQUIRED = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
_ANOTHER = "choose another file of the model, or its folder with config.json and *.safetensors"


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return the config.json of the model.

    Raises:
        ModelError: SureFit does not convert this architecture, or not without losing a part of it.
    """
    model_class = _model_class(header)
    _require_whole(header)
    sizes = {name: _whole(header, key) for name, key in _REQUIRED.items()}
    heads = sizes["num_attention_heads"]
    key_heads = header.of_model("attention.head_count_kv")
    head = header.of_model("attention.key_length") or header.of_model("rope.dimension_count")
    config = {
        "architectures": [model_class],
        "model_type": header.architecture,
        "attention_bias": False,
        "dtype": "float32",
        "hidden_act": "silu",
        **sizes,
        "num_key_value_heads": key_heads if isinstance(key_heads, int) else heads,
        "head_dim": head if isinstance(head, int) else sizes["hidden_size"] // heads,
        "vocab_size": _vocabulary(header),
        "rms_norm_eps": shortest(header.of_model("attention.layer_norm_rms_epsilon") or 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": header.of_model("rope.freq_base") or 10000.0},
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    roles = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return config | {name: header.token_id(role) for name, role in roles.items()}


def shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: GGUF holds 1e-5 as 9.999999747378752e-06.

    >>> shortest(9.999999747378752e-06)
    1e-05
    """
    single = struct.pack("<f", value)
    texts = (f"{value:.{digits}g}" for digits in range(1, 18))
    return next(float(text) for text in texts if struct.pack("<f", float(text)) == single)


def _model_class(header: GgufHeader) -> str:
    if not header.architecture:
        raise ModelError("general.architecture is missing", code="E2055", path=header.path, help=_ANOTHER)
    if header.architecture not in FAMILIES:
        raise ModelError(
            f"SureFit does not convert the architecture {header.architecture!r}",
            code="E2056",
            path=header.path,
            help=f"it converts {', '.join(FAMILIES)}; otherwise {_ANOTHER}",
        )
    return FAMILIES[header.architecture]


def _require_whole(header: GgufHeader) -> None:
    """Raise if a conversion would lose a part of the model."""
    parts = header.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        number = header.metadata.get("split.no")
        which = f"part {number + 1}" if isinstance(number, int) else "one part"
        raise ModelError(
            f"{which} of {parts} of a split model",
            code="E2057",
            path=header.path,
            help="join the parts: llama-gguf-split --merge FIRST-PART model.gguf",
        )
    kind = header.of_model("rope.scaling.type")
    if kind not in (None, "none") or "rope_freqs.weight" in header.tensors:
        raise ModelError(
            f"its positions are scaled ({kind or 'rope_freqs.weight'}), which a conversion would lose",
            code="E2058",
            path=header.path,
            help=_ANOTHER,
        )
    if not header.tokens:
        raise ModelError("has no tokenizer (tokenizer.ggml.tokens)", code="E2059", path=header.path, help=_ANOTHER)
    kind, split = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != BYTE_LEVEL or split not in KNOWN_SPLITS:
        raise ModelError(
            f"SureFit cannot rebuild its tokenizer ({kind} / {split}) exactly",
            code="E2060",
            path=header.path,
            help=f"it supports {BYTE_LEVEL} / {', '.join(KNOWN_SPLITS)}; otherwise {_ANOTHER}",
        )


def _whole(header: GgufHeader, key: str) -> int:
    value = header.of_model(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{header.architecture}.{key} is {value!r}; a whole number above zero is needed",
            code="E2061",
            path=header.path,
            help=_ANOTHER,
        )
    return value


def _vocabulary(header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding else 0
    if rows != len(header.tokens):
        raise ModelError(
            f"its tokenizer has {len(header.tokens):,} tokens, but its embedding has {rows:,} rows",
            code="E2062",
            path=header.path,
            help=_ANOTHER,
        )
    return rows
