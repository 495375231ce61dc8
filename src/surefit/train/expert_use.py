"""How evenly a mixture uses its experts while it trains: what metrics.jsonl says of it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from surefit.facts.experts import is_stack


class ExpertUse:
    """Counts the tokens that each layer of a model in training sends to each of its experts, padding among them.

    A model whose experts are not told which of them were chosen (Llama 4's, which all read something) is not counted.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._counts: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            stacks = [tensor for key, tensor in own.items() if is_stack(f"experts.{key}", tensor.ndim)]
            if stacks:
                module.register_forward_pre_hook(partial(self._count, name, len(stacks[0])))

    def _count(self, name: str, experts: int, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        chosen = next((each for each in args[1:] if isinstance(each, torch.Tensor) and each.dtype == torch.int64), None)
        if chosen is None or not module.training:
            return
        if name not in self._counts:
            self._counts[name] = torch.zeros(experts, device=chosen.device)
        flat = chosen.flatten()
        self._counts[name].scatter_add_(0, flat, torch.ones((), device=flat.device).expand(flat.shape))

    def taken(self) -> dict[str, float]:
        """What was counted since the last call: of the layers the smallest entropy of the tokens' shares, as a part of
        what an even use has, and the largest share; empty without experts."""
        if not self._counts:
            return {}
        counts = torch.stack(list(self._counts.values()))
        self._counts.clear()
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        entropy = torch.special.entr(shares).sum(1).min() / math.log(max(2, counts.shape[1]))
        least, most = torch.stack([entropy, shares.max()]).tolist()
        return {"expert_entropy": least, "expert_max_share": most}
