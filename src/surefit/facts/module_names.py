"""Names of the linear layers and of the decoder layer's class in well-known models, by the model's name alone.

For models that are not on this machine. A name that matches several entries, or none, has no result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HEADS = frozenset({
    "lm_head", "embed_out", "score", "classifier", "embed_tokens", "embed_in", "wte", "wpe", "out_proj_head",
    "word_embeddings", "shared", "embed_positions", "output",
})  # fmt: skip
"""Names of embeddings and heads, which PEFT adapts as well."""


@dataclass(frozen=True)
class Layers:
    """The linear layers of a type of model, by the last part of their names, and the class of its decoder layers."""

    linear: frozenset[str]
    layer_class: str


_TABLE = json.loads((Path(__file__).parent / "module_names.json").read_text(encoding="utf-8"))
LAYERS: Mapping[str, Layers] = {
    kind: Layers(frozenset(entry["linear"].split()), entry["layer_class"]) for kind, entry in _TABLE.items()
}
"""`model_type` of a config.json → its layers, as transformers 5.23 names them (compared by tests/findings)."""
NAMES: tuple[tuple[str, str], ...] = tuple((kind, entry["names"]) for kind, entry in _TABLE.items())
"""(`model_type`, pattern of its models' names)."""
OTHERS = re.compile(r"vl\b|vision|omni|audio|multimodal|moe|-a\d+b|mamba|distill-(?!qwen|llama)|-onnx|tiny-random")
"""In names of models whose layers differ from what the rest of the name suggests."""
DISTILLED = re.compile(r"distill-(qwen|llama)")
LAYER_CLASSES = frozenset(layers.layer_class for layers in LAYERS.values())


def type_in_name(name: str) -> str | None:
    """Return the `model_type` that a model's name on the hub indicates.

    >>> type_in_name("EleutherAI/pythia-410m"), type_in_name("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")
    ('gpt_neox', 'qwen2')
    >>> type_in_name("Qwen/Qwen2.5-VL-7B-Instruct"), type_in_name("./out/final"), type_in_name("a/b")
    (None, None, None)
    """
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return None  # a folder may hold any model
    leaf = name.rpartition("/")[2].lower()
    if distilled := DISTILLED.search(leaf):
        return "qwen2" if distilled[1] == "qwen" else "llama"
    types = {kind for kind, pattern in NAMES if re.search(pattern, leaf)}
    return types.pop() if len(types) == 1 and not OTHERS.search(leaf) else None


def layers_of(name: str | None, model_type: str | None = None) -> Layers | None:
    """Return the layers of a model, by its type where that is known and by its name otherwise."""
    return LAYERS.get(model_type or (type_in_name(name) if name else None) or "")
