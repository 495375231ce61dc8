"""Layers that `all-linear` leaves out: experts, which are no linear layers, and layers that text gives no gradient.

**Experts.** transformers 5 computes with one stack of matrices per layer (`mlp.experts.gate_up_proj`, experts × outputs
× inputs) where version 4 had a linear layer per expert and projection. Many checkpoints still hold the experts one by
one (`mlp.experts.7.gate_proj.weight`), and are stacked while they are loaded. `lora.experts` puts factors beside the
stacks (facts/experts.py).

PEFT reads adapters of those versions: in the model types below it reads the old names, wherever they stand in
`target_modules` and as a part of `all-linear`, as names of the stacks. A linear layer of such a name (a shared
expert's, or of a layer without experts) can then have no factors of its own, and an adapter that names it would be
misread.

**Without a gradient** are, in a model that also reads images or sound, the layers for images and sound, and an indexer,
which chooses keys. Factors there would stay zero, and `model.adapter.completeness` raises for such an adapter.

**No matrix product** is what a router computes (its output is a choice), nor DeepSeek-V4's grouped `o_a_proj`. The
weight of a state-space layer's `dt_proj`, and of Gemma 3n's `correction_coefs`, is read around the layer, so that
factors beside it would do nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NO_GRADIENT = re.compile(
    r"(^|\.)(vision_|visual|audio_|image_|connector|embed_vision|embed_audio|multi_modal|embed_tokens_extend|indexer)"
)
_NO_PRODUCT = re.compile(r"(^|\.)(router|router\.classifier|gate|o_a_proj|dt_proj|correction_coefs)$")
_ONE_OF_MANY = re.compile(r"(^|\.)experts\.(\d+|mlp)\.")
_STACKS = ("experts", "input_linear", "output_linear")
_GATED = frozenset({"gate", "gate_proj", "up_proj", "down_proj"})
_MIXTRAL = frozenset({"gate", "w1", "w2", "w3"})
OLD_NAMES: Mapping[str, frozenset[str]] = dict.fromkeys(("minimax", "minimax_m2", "mixtral"), _MIXTRAL) | dict.fromkeys(
    (
        "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe",
        "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe",
        "longcat_flash", "mellum", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe",
        "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "solar_open",
    ),
    _GATED,
)  # fmt: skip
"""Model type → the last parts of layer names that PEFT reads as stacks of experts; from PEFT 0.21 with transformers
5.23 (`convert_peft_config_for_transformers`)."""


def is_expert(tensor: str, dimensions: int) -> bool:
    """Return whether a tensor of a checkpoint is a routed expert's, stored alone or in a stack.

    >>> is_expert("model.layers.0.mlp.experts.7.up_proj.weight", 2), is_expert("layers.0.mlp.experts.down_proj", 3)
    (True, True)
    >>> is_expert("model.layers.0.mlp.shared_experts.up_proj.weight", 2)
    False
    """
    return bool(_ONE_OF_MANY.search(tensor)) or (dimensions == 3 and any(part in _STACKS for part in tensor.split(".")))


def is_product(layer: str) -> bool:
    """Return whether a layer of this dotted name, if it is a linear one, computes x Wᵀ and nothing else.

    >>> is_product("model.layers.0.mlp.gate_proj"), is_product("model.layers.0.mlp.gate")
    (True, False)
    """
    return not _NO_PRODUCT.search(layer)


_ZAMBA = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
REFUSED: Mapping[str, frozenset[str]] = dict.fromkeys(
    ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), frozenset({"out_proj"})
) | {
    "inkling2_text": frozenset({"weight_proj"}),
    "laguna": frozenset({"gate_proj", "up_proj", "down_proj"}),
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA | {"gate_up_proj"},
}
"""Model type → layers that can have no factors of their own.

`out_proj`: PEFT raises, because the fused kernel of a state-space layer bypasses it. Inkling 2, Laguna: when PEFT reads
an adapter, it renames these once more (`mlp.shared_expert.` also matches `mlp.shared_experts.`), and drops their
factors silently. Zamba: one block's matrices serve several layers, and cannot hold the sum with each layer's
factors.
"""

CONV1D = frozenset({"gpt2", "openai-gpt"})
"""Model types whose matrices, inputs × outputs, are in no linear layers (transformers' Conv1D): none is quantized."""

FUSED_IN_FILES = frozenset({"hrm_text"})
"""Model types whose files hold one matrix for several layers (query, key, value and gate), which transformers splits
while it loads: factors beside the parts cannot be merged into the whole."""


def closed_to_lora(model_type: str, layer: str) -> bool:
    """Return whether a layer of this model type can have no factors (`REFUSED`), or PEFT reads its name as experts'."""
    empty: frozenset[str] = frozenset()
    return layer.rpartition(".")[2] in OLD_NAMES.get(model_type, empty) | REFUSED.get(model_type, empty)


def without_gradient(layer: str) -> bool:
    """Return whether a layer gets no gradient from text, by its dotted name.

    >>> without_gradient("model.vision_tower.layers.0.q_proj"), without_gradient("model.layers.0.self_attn.q_proj")
    (True, False)
    """
    return bool(_NO_GRADIENT.search(layer))


def is_quantizable(layer: str) -> bool:
    """Return whether a linear layer of this dotted name may be quantized: text passes through it, and it is a matrix
    product and nothing else. Layers for images and sound keep their stored precision, and so does an indexer, which
    chooses keys.

    >>> [is_quantizable(f"model.{name}") for name in ("layers.0.mlp.up_proj", "vision_tower.fc1", "layers.0.dt_proj")]
    [True, False, False]
    """
    # Gemma 3n clamps its prediction_coefs in place.
    return is_product(layer) and not without_gradient(layer) and not layer.endswith("prediction_coefs")


def ends_with(name: str, target: str) -> bool:
    """Return whether a dotted module name is `target` or ends with it, part by part, as PEFT matches them."""
    return name == target or name.endswith(f".{target}")
