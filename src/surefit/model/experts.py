"""LoRA beside the experts of a mixture: the stacks of experts that get factors, and PEFT's layout of these.

transformers holds a layer's experts in stacks, experts × outputs × inputs, or experts × inputs × outputs. PEFT wraps
the module of a stack (`ParamWrapper`, by `target_parameters`) and computes, at every call, with the whole stack W +
scaling · B A. Its A has the factors of all experts one below the other, experts · r × inputs; its B has them side by
side, outputs × r · experts, the experts of a rank next to each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch.nn.utils.rnn import pad_sequence

from surefit.facts.experts import is_stack, routers

Stacks = dict[str, tuple[int, int, int]]
"""Stack's full dotted name → (experts, outputs, inputs)."""


def expert_stacks(model: torch.nn.Module) -> Stacks:
    """Return the stacks of routed experts in a base model, in the order in which PEFT wraps them."""
    stacks = {}
    for name, parameter in model.named_parameters():
        if is_stack(name, parameter.ndim):
            experts, outputs, inputs = parameter.shape
            swapped = is_transposed(model.get_submodule(name.rpartition(".")[0]))
            stacks[name] = (experts, inputs, outputs) if swapped else (experts, outputs, inputs)
    return stacks


def router_stacks(model: torch.nn.Module) -> Stacks:
    """Return the matrices of a base model that route tokens to experts, each as a stack of one."""
    return routers({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})


def wrapped_stacks(model: torch.nn.Module) -> Stacks:
    """Return the stacks of a model with an adapter that have factors, in that order too, under their names in the base
    model."""
    stacks: list[tuple[str, tuple[int, int, int]]] = []
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            shape = module.num_experts, int(module.out_features or 0), int(module.in_features or 0)
            stacks.append((f"{name.replace('.base_layer', '')}.{module.parameter_name}", shape))
    return dict(reversed(stacks))  # the last stack of a module is the outermost


def is_transposed(module: torch.nn.Module) -> bool:
    """Return whether PEFT treats a module's stacks as experts × inputs × outputs."""
    return bool(getattr(module, "is_transposed", False))


def of_each(a: torch.Tensor, b: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PEFT's factors of a stack, (experts · r, inputs) and (outputs, r · experts), as (experts, r, inputs) and
    (experts, outputs, r): views."""
    return a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)


def find_expert_problems(factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
    """Return the faults of single experts, in words.

    An expert that received no token in training has a B of zeros in every stack of its layer, and its initial A. If A
    is zero, or B is zero in one stack and not in another, the expert has lost factors.

    Args:
        factors: stack → its factors from `of_each`.
    """
    problems: list[str] = []
    used: dict[str, dict[str, torch.Tensor]] = {}
    for name, (a, b) in factors.items():
        layer = name.rpartition(".")[0]
        used.setdefault(layer, {})[name] = b.flatten(1).any(1)
        problems += [
            f"expert {n} of {name} has no factors" for n in (~a.flatten(1).any(1)).nonzero().flatten().tolist()
        ]
    for stacks in used.values():
        # A LongCat's stacks have different numbers of experts: its zero-computation experts have no down_proj.
        used_anywhere = pad_sequence(list(stacks.values()), batch_first=True).any(0)
        problems += [
            f"expert {n} of {name} has a lora_B of zeros, although it was trained"
            for name, used_experts in stacks.items()
            for n in (used_anywhere[: len(used_experts)] & ~used_experts).nonzero().flatten().tolist()
        ]
    return problems
