"""LoRA beside the experts of a mixture-of-experts model: number of factors, and memory of computing with them.

transformers 5 holds a layer's experts in stacks. `lora.experts` puts factors beside each, by PEFT's
`target_parameters`: r for every expert. PEFT computes with W + scaling · B A of the whole stack, at every call.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from surefit.config.schema import LoraSection
from surefit.facts.all_linear import is_expert

Stack = tuple[int, int, int]
"""(experts, outputs, inputs)."""
_PROJECTION = re.compile(r"(^|\.)experts\.(gate_up_proj|up_proj|down_proj)$")
_ROUTER = re.compile(r"(^|\.)(gate|router)\.weight$")
_ALONE = re.compile(r"^(.*\bexperts)\.(\d+)\.(\w+)\.weight$")
_STACKED_AS = {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj",
    "down_proj": "down_proj", "w2": "down_proj",
}  # fmt: skip
"""A lone expert's matrix → the stack it becomes a part of."""
NO_STACKS = frozenset({"jetmoe"})
"""Model types whose experts are modules of another kind."""


def experts_of(target_parameters: Any) -> bool | Literal["with_router"]:
    """Return the value of `lora.experts` for an adapter with these `target_parameters`.

    >>> experts_of(None), experts_of(["experts.down_proj"]), experts_of(["experts.down_proj", "mlp.gate.weight"])
    (False, True, 'with_router')
    """
    names = target_parameters if isinstance(target_parameters, list) else ()
    return "with_router" if any(_ROUTER.search(str(name)) for name in names) else bool(names)


def is_stack(parameter: str, dimensions: int) -> bool:
    """Return whether a parameter of a model is a stack of routed experts that PEFT can put factors beside.

    >>> is_stack("model.layers.0.mlp.experts.down_proj", 3), is_stack("model.layers.0.mlp.shared_experts.down_proj", 3)
    (True, False)
    """
    return dimensions == 3 and bool(_PROJECTION.search(parameter))


def find_expert_stacks(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Stack]:
    """Return the stacks of experts in a checkpoint: name → (experts, outputs, inputs); empty where the rows of gate and
    up alternate in the files (Inkling): transformers sorts them while it loads, and no merge sorts them back.

    Args:
        tensors: name → shape, the experts in stacks or one by one. A stack's own two widths may be in either order: the
            number of factors depends on their sum.

    >>> find_expert_stacks({f"experts.{n}.{part}_proj.weight": (6, 4) for n in range(2) for part in ("gate", "up")})
    {'experts.gate_up_proj': (2, 12, 4)}
    >>> find_expert_stacks({"mlp.experts.w13_weight": (2, 12, 4), "mlp.experts.w2_weight": (2, 4, 6)})
    {}
    """
    stacks: dict[str, Stack] = {}
    if any(name.endswith("experts.w13_weight") for name in tensors):
        return stacks
    for name, shape in tensors.items():
        if len(shape) == 3 and is_expert(name, 3) and not name.endswith("bias"):
            stacks[name] = (shape[0], shape[1], shape[2])
        elif len(shape) == 2 and (match := _ALONE.match(name)) and match[3] in _STACKED_AS:
            stack = f"{match[1]}.{_STACKED_AS[match[3]]}"
            experts, outputs, _ = stacks.get(stack, (0, 0, 0))
            outputs += shape[0] if int(match[2]) == 0 else 0
            stacks[stack] = (max(experts, int(match[2]) + 1), outputs, shape[1])
    return stacks


def lone_numbers(tensors: Mapping[str, Sequence[int]]) -> int:
    """Return how many numbers of a checkpoint belong to experts' matrices that are stored one by one and stacked when
    read: they are copied, while the pages of the file stay in memory.

    >>> lone_numbers({"experts.0.up_proj.weight": (6, 4), "experts.down_proj": (2, 4, 6), "lm_head.weight": (9, 4)})
    24
    """
    matches = ((_ALONE.match(name), shape) for name, shape in tensors.items() if len(shape) == 2)
    return sum(math.prod(shape) for match, shape in matches if match and match[3] in _STACKED_AS)


def routers(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Stack]:
    """Return the matrices that choose among experts, each as a stack of one: name → (1, experts, inputs).

    Args:
        tensors: name → shape, of a checkpoint or a model. A router is beside its experts.

    >>> layer = {"mlp.gate.weight": (8, 16), "mlp.experts.0.up_proj.weight": (32, 16), "mixer.gate.weight": (4, 16)}
    >>> routers(layer)
    {'mlp.gate.weight': (1, 8, 16)}
    """
    owners = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    return {
        name: (1, shape[0], shape[1])
        for name, shape in tensors.items()
        if len(shape) == 2 and (match := _ROUTER.search(name)) and name[: match.start()] in owners
    }


def wrappers(parameters: Iterable[str]) -> dict[str, str]:
    """Stack → the module in which PEFT keeps its factors: several on one module are wrapped one in the other.

    Args:
        parameters: the stacks with factors, in the order in which their module has them.

    >>> wrappers(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    {'mlp.experts.gate_up_proj': 'mlp.experts.base_layer', 'mlp.experts.down_proj': 'mlp.experts'}
    """
    names = list(parameters)
    owners = [name.rpartition(".")[0] for name in names]
    return {
        name: owner + ".base_layer" * owners[index + 1 :].count(owner)
        for index, (name, owner) in enumerate(zip(names, owners, strict=True))
    }


def factor_shapes(
    stacks: Mapping[str, Stack], adapter: LoraSection, routers: Mapping[str, Stack] | None = None
) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Yield (stack, shape of its A, shape of its B), as PEFT holds the factors of all its experts; nothing without
    `experts`. The routers' shapes follow where `experts` includes them.

    Qwen3-30B-A3B, r = 16: 48 layers × 128 experts × 16 × (2,048 + 1,536 + 768 + 2,048) factors.

    >>> stacks = {"gate_up_proj": (128, 1536, 2048), "down_proj": (128, 2048, 768)}
    >>> shapes = factor_shapes(stacks, LoraSection(experts=True))
    >>> 48 * sum(math.prod(a) + math.prod(b) for _, a, b in shapes)
    629145600
    """
    targets = dict(routers or {}) if adapter.experts == "with_router" else {}
    if adapter.experts:
        # Gate and up before down, as modules have them: PEFT's names depend on the order.
        targets = dict(sorted(stacks.items(), reverse=True)) | targets
    for name, (experts, outputs, inputs) in targets.items():
        yield name, (experts * adapter.r, inputs), (outputs, experts * adapter.r)


def summed_bytes(stacks: Mapping[str, Stack], number: int, recomputed: bool) -> int:
    """Return the bytes of the sums W + scaling · B A in the backward pass, and of the gradient of one of them.

    A layer keeps its sums for its backward pass, which makes a gradient of the size of one. Qwen3-30B-A3B in bfloat16,
    recomputed: a layer's stacks, 128 × (1,536 + 768) × 2,048 numbers, and a gradient of two thirds of them.

    >>> layer = {"layers.0.experts.gate_up_proj": (128, 1536, 2048), "layers.0.experts.down_proj": (128, 2048, 768)}
    >>> summed_bytes(layer, 2, recomputed=True) / 2**30
    1.875

    Args:
        number: bytes of a weight.
        recomputed: gradient checkpointing is on: one layer's sums exist at a time.
    """
    layers: dict[str, int] = defaultdict(int)
    for name, shape in stacks.items():
        layers[name.rpartition(".")[0]] += math.prod(shape)
    kept_numbers = max(layers.values(), default=0) if recomputed else sum(layers.values())
    return number * (kept_numbers + max(map(math.prod, stacks.values()), default=0))
