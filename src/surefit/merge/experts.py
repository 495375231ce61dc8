"""Factors of stacks of experts: as updates of the model's parameters, and of the tensors in the base's files.

PEFT saves the factors of all experts of a stack in two matrices, under the module that holds the stack. Most files hold
the experts one by one, and transformers stacks them while it loads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from surefit.facts.all_linear import ends_with
from surefit.facts.experts import wrappers
from surefit.merge.adapter_file import AdapterFile, Update, build_incomplete_error, rank_and_scaling
from surefit.model.compat import stacked_from_files
from surefit.model.experts import expert_stacks, of_each, router_stacks
from surefit.model.layerwise_forward import WeightFiles


def add_expert_updates(adapter: AdapterFile, model: PreTrainedModel) -> AdapterFile:
    """Return the adapter with an update for every stack that has factors, under its parameter's name; a router's under
    its layer's.

    Args:
        model: the base; its weights are not read.

    Raises:
        GateError: factors that belong to no stack of experts, or not for all of its experts.
    """
    targets = adapter.config.get("target_parameters") or ()
    routers = router_stacks(model)
    stacks = expert_stacks(model) | routers
    targeted = {name: shape for name, shape in stacks.items() if any(ends_with(name, target) for target in targets)}
    stack_by_module = {module: name for name, module in wrappers(targeted).items()}
    if missing := sorted(stack_by_module.keys() - adapter.wrapped.keys()):
        raise build_incomplete_error(adapter.directory, f"{stack_by_module[missing[0]]} has no factors")
    updates = {}
    for module, (a, b) in adapter.wrapped.items():
        if module not in stack_by_module:
            raise build_incomplete_error(adapter.directory, f"{module} has factors, but no matching stack of experts")
        name = stack_by_module[module]
        experts, outputs, inputs = targeted[name]
        rank, scaling = rank_and_scaling(adapter.config, name)
        if (a.shape, b.shape) != ((experts * rank, inputs), (outputs, rank * experts)):
            raise build_incomplete_error(
                adapter.directory,
                f"{name} has factors {tuple(a.shape)} and {tuple(b.shape)} where {experts} experts of {outputs} × "
                f"{inputs} need {(experts * rank, inputs)} and {(outputs, rank * experts)}",
            )
        if name in routers:
            updates[module] = Update(a, b, scaling)
        else:
            updates[name] = Update(*of_each(a, b, experts), scaling)
    return replace(adapter, updates={**adapter.updates, **updates}, wrapped={})


def split_expert_updates(adapter: AdapterFile, model: PreTrainedModel, weights: WeightFiles) -> AdapterFile:
    """Return the adapter with one update per tensor of the files, in place of the updates of stacks that no file
    holds."""
    if not any(update.a.ndim == 3 for update in adapter.updates.values()):
        return adapter
    stored = stacked_from_files(model, weights.names)
    updates: dict[str, Update] = {}
    for name, update in adapter.updates.items():
        if name not in stored:
            updates[name] = update
            continue
        for a, b, parts in zip(update.a, update.b, stored[name], strict=True):
            heights = [weights.read(part).shape[0] for part in parts]
            for part, rows in zip(parts, torch.split(b, heights), strict=True):
                updates[part.removesuffix(".weight")] = Update(a, rows, update.scaling)
    return replace(adapter, updates=updates)
