"""Mixtures of experts: which of their weights are no linear layers, so that `all-linear` does not reach them.

transformers 5 computes with one stack of matrices per layer (`mlp.experts.gate_up_proj`, experts × outputs × inputs)
where version 4 had a linear layer per expert and projection. Many checkpoints still hold the experts one by one
(`mlp.experts.7.gate_proj.weight`), and are stacked while they are loaded.

PEFT reads adapters of those days: in the model types below it takes the old names, wherever they stand in
`target_modules` and as a part of `all-linear`, for the stacks. A linear layer of such a name (a shared expert's, or of
a layer without experts) can then have no factors of its own, and an adapter that names it would be read as another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
"""Model type → the last parts of layer names that PEFT takes for stacks of experts; by PEFT 0.21 with transformers 5.23
(`convert_peft_config_for_transformers`)."""


def is_expert(tensor: str, dimensions: int) -> bool:
    """Whether a tensor of a checkpoint is a routed expert's, stored alone or in a stack.

    >>> is_expert("model.layers.0.mlp.experts.7.up_proj.weight", 2), is_expert("layers.0.mlp.experts.down_proj", 3)
    (True, True)
    >>> is_expert("model.layers.0.mlp.shared_experts.up_proj.weight", 2)
    False
    """
    return bool(_ONE_OF_MANY.search(tensor)) or (dimensions == 3 and any(part in _STACKS for part in tensor.split(".")))


def taken_for_experts(model_type: str, layer: str) -> bool:
    """Whether PEFT takes a layer's name, or the end of one, for stacks of experts in models of this type."""
    return layer.rpartition(".")[2] in OLD_NAMES.get(model_type, ())
