"""Features that a model's attention needs, and whether it can keep packed documents apart, from config.json alone.

Evidence for the tables: every decoder that transformers 5.17 and 5.23 have under `AutoModelForCausalLM` (189 names in
5.23) was built small and passed to `model.attention.require_packable`, which compares two packed documents with each of
them alone and counts the layers that read the document boundaries; docs/packing.md has the result. `require_packable`
runs on the user's own model before training too: for a type that is missing here it raises there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefit.core.units import plural
from surefit.facts.architecture import TWICE, text_section

KERNEL_CAPABILITY = (8, 0)
KERNEL_DTYPES = ("bfloat16", "float16")
KERNEL_WIDTH = 256
"""Requirements of `torch.nn.attention.varlen`: FlashAttention 2 as torch builds it (flash_api.cpp checks for sm80, the
dtype, and a head width of at most 256 and a multiple of 8). It supports no softcap and no dropout; sinks follow it."""

WITHIN_A_DOCUMENT = frozenset({"full_attention", "sliding_attention", "attention"})
"""Entries of `layer_types` whose layers attend only to the keys that the attention function allows. All others in
transformers' ALLOWED_LAYER_TYPES carry a state, convolve, choose keys by an index, or cut the row in chunks."""

_TABLE = json.loads((Path(__file__).parent / "attention.json").read_text(encoding="utf-8"))
RECURRENT = frozenset(_TABLE["recurrent"])
"""Measured: no layer, or not every layer, read the document boundaries; where every layer did (falcon_h1, zaya), the
logits were off by 0.06 to 0.4; the gated delta rule itself raises for packed rows (olmo_hybrid, qwen3_next, qwen3_5,
qwen4_exp). From their code, as the small model was not built: bamba, lfm2_moe, mamba2, nemotron_h, zamba, zamba2."""

ALIBI = frozenset({"bloom", "mpt"})
"""Positions are a bias over the whole row, and `position_ids` is not an argument."""

OWN_ATTENTION = frozenset(_TABLE["own_attention"])
"""Model types whose code does not use transformers' AttentionInterface (`get_interface` does not occur in it), so that
`set_attn_implementation` has no effect on them."""

OTHER_ATTENTION: dict[str, str] = _TABLE["other_attention"]
"""Type → why. Measured: `require_packable` raises for each."""

SHARES_PROMPTS = frozenset(
    {
        "cohere",
        "cohere2",
        "deepseek_v3",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
"""Types whose layers pass all that they are given on to the attention function, so that two answers can read one
prompt. Tested: loss and gradients equal those of each answer alone (tests/numerics/test_packing.py). StableLM and
Nemotron pass the positions only, which is enough to pack and not for this."""

SINKS = frozenset({"flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "openai_privacy_filter"})
"""Types whose code passes `s_aux` to the attention function."""
SOFTCAP = {"gemma2": 50.0, "vaultgemma": 50.0}
"""Types whose code passes `softcap`, and its value where config.json has none (`attn_logit_softcapping`)."""


@dataclass(frozen=True)
class AttentionNeeds:
    """Features that a model needs from its attention kernel.

    Attributes:
        head_width: width of a head of queries and keys.
        softcap: the logits are softcap · tanh(logits / softcap).
        sinks: a learned logit in addition to the keys', without a value.
        sliding_window: tokens back that a token sees in some of the layers, itself included.
    """

    head_width: int
    softcap: float | None = None
    sinks: bool = False
    sliding_window: int | None = None


def attention_needs(config: Mapping[str, Any]) -> AttentionNeeds:
    """Return the attention features that a model needs, by its config.json."""
    section = text_section(config)
    kind = str(section.get("model_type", ""))
    softcap = section.get("attn_logit_softcapping", SOFTCAP[kind]) if kind in SOFTCAP else None
    window = section.get("sliding_window") if section.get("use_sliding_window", True) else None
    return AttentionNeeds(_head_width(section), softcap or None, kind in SINKS, window or None)


def attention_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers attend: all, in a model that can be packed."""
    section = text_section(config)
    if section.get("model_type") in TWICE:
        return 2 * int(section.get("num_layers") or 0)
    keys = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return next((int(section[key]) for key in keys if section.get(key)), 0)


def packing_obstacle(config: Mapping[str, Any]) -> str | None:
    """Return why the documents of a row could not be kept apart in this model; None where no obstacle is known.

    >>> packing_obstacle({"model_type": "llama"})
    >>> packing_obstacle({"model_type": "mamba"})
    'mamba cannot be packed: its recurrent layers carry a state from each document into the next'
    """
    section = text_section(config)
    kinds = [str(part["model_type"]) for part in (config, section) if part.get("model_type")]
    reason = next((reason for kind in kinds if (reason := _by_type(kind))), None) or _by_keys(config, section)
    return f"{kinds[0] if kinds else 'this model'} cannot be packed: {reason}" if reason else None


def shares_prompts(config: Mapping[str, Any]) -> bool:
    """Return whether two answers behind one prompt are known to be exact in this model."""
    return str(text_section(config).get("model_type", "")) in SHARES_PROMPTS and packing_obstacle(config) is None


def kernel_obstacle(needs: AttentionNeeds, *, dtype: str, capability: tuple[int, int] | None) -> str | None:
    """Return why torch's variable-length kernel does not run a packed batch; then each document is attended to alone.

    Args:
        needs: features that the model needs.
        dtype: dtype of the computation, such as "bfloat16".
        capability: the GPU's compute capability; None on a CPU.
    """
    width = needs.head_width
    if capability is None:
        return "no GPU"
    if capability < KERNEL_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}, the kernel needs {KERNEL_CAPABILITY[0]}.0"
    if dtype not in KERNEL_DTYPES:
        return f"the kernel computes in 16 bits, not in {dtype}"
    if width > KERNEL_WIDTH or width % 8:
        return f"heads of width {width}: the kernel supports multiples of 8 up to {KERNEL_WIDTH}"
    if needs.softcap:
        return f"a softcap of {needs.softcap:g} in the attention, which the kernel does not support"
    return None


def _by_type(kind: str) -> str | None:
    if kind in RECURRENT:
        return "its recurrent layers carry a state from each document into the next"
    if kind in ALIBI:
        return "its positions (ALiBi) count through the whole row"
    if kind in OWN_ATTENTION:
        return "its own attention code does not support document boundaries"
    return OTHER_ATTENTION.get(kind)


def _by_keys(config: Mapping[str, Any], section: Mapping[str, Any]) -> str | None:
    """Return the obstacle of a type that no table lists, from the layers that its config.json describes."""
    if config.get("is_encoder_decoder"):
        return "an encoder and a decoder read each example"
    kinds = section.get("layer_types")
    if other_kinds := sorted({str(kind) for kind in kinds or ()} - WITHIN_A_DOCUMENT):
        count = sum(kind in other_kinds for kind in kinds or ())
        return f"{plural(count, 'layer')} of it ({', '.join(other_kinds)}) attend across document boundaries"
    if section.get("alibi"):
        return _by_type("mpt")
    if section.get("attention_chunk_size"):
        return OTHER_ATTENTION["llama4"]
    return None


def _head_width(section: Mapping[str, Any]) -> int:
    if section.get("qk_rope_head_dim"):  # multi-head latent attention: a part with positions and one without
        return int(section["qk_rope_head_dim"]) + int(section.get("qk_nope_head_dim") or 0)
    if section.get("head_dim"):
        return int(section["head_dim"])
    hidden = section.get("hidden_size") or section.get("n_embd") or section.get("d_model") or 0
    heads = section.get("num_attention_heads") or section.get("n_head") or section.get("n_heads") or 1
    return int(hidden) // int(heads)
