"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from surefit.config.resolve import warmup_steps

BETAS = (0.9, 0.999)
EPSILON = 1e-8
STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


class MasterAdamW:
    """AdamW (Loshchilov & Hutter 2019) that updates float32 copies of whatever is trained in a lower precision.

    bfloat16 keeps 8 bits of a number, so a weight of 0.02 moves in steps of 0.0001: an update of 1e-5 added to it
    directly is rounded away, every time. Here the update reaches a float32 master copy, and the model's own weight is
    the master rounded. Memory per trained parameter: 8 bytes of moments, and 4 of master where it is not float32.

    Weight decay is decoupled and leaves norm weights and biases (everything with one dimension, and names that end in
    "bias") alone. The update runs fused, one pass over the weights, on CPU and GPU alike; it is elementwise, so the
    same gradients give the same bits.

    Set `learning_rate` before each `step`.

    Args:
        model: its parameters that require a gradient are the ones trained.
        weight_decay: share of the weight taken off per unit of learning rate.
    """

    def __init__(self, model: torch.nn.Module, weight_decay: float = 0.0) -> None:
        self.learning_rate = 0.0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: p if p.dtype == torch.float32 else p.detach().float() for name, p in self._parameters.items()
        }
        decayed = [master for name, master in self._masters.items() if is_decayed(name, master)]
        others = [master for name, master in self._masters.items() if not is_decayed(name, master)]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        # foreach and fused exclude each other; both said, so that no version of torch chooses for us.
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=BETAS, eps=EPSILON, foreach=False, fused=True
        )

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by their names in the model."""
        return self._parameters

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        copies = [(p, self._masters[name]) for name, p in self._parameters.items() if self._masters[name] is not p]
        for parameter, master in copies:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self._adamw.step()
        with torch.no_grad():
            for parameter, master in copies:
                parameter.copy_(master)
                master.grad = None

    def zero_grad(self) -> None:
        """Drop the gradients of the model's parameters."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything the next step depends on besides the weights, as `KEY.PARAMETER_NAME`."""
        found = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                found[f"master.{name}"] = master
            found |= {f"{key}.{name}": value for key, value in self._adamw.state[master].items()}
        return found

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `tensors` returned; a parameter that had no update yet has no moments there."""
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    master.copy_(tensors[f"master.{name}"])
                if f"step.{name}" in tensors:
                    # Not load_state_dict: it may cast what it is given.
                    self._adamw.state[master] = {
                        key: tensors[f"{key}.{name}"].to(master.device, copy=True) for key in STATE_KEYS
                    }


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to norm weights and biases."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def learning_rate(step: int, total_steps: int, peak: float, schedule: str, warmup: float) -> float:
    """The learning rate of an optimizer step: a pure function, so that a resumed run needs nothing but the step.

    With W warmup steps it is `peak × (step + 1) / (W + 1)` before step W and `peak` at step W. From there on it falls
    along a half cosine or a line that would reach 0 at `total_steps`, one past the last step; constant stays at peak.
    No step is wasted on a rate of 0.

    >>> [round(learning_rate(s, 8, 1.0, "linear", 3), 4) for s in range(8)]
    [0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2]
    >>> [round(learning_rate(s, 4, 1.0, "cosine", 0), 4) for s in range(4)]
    [1.0, 0.8536, 0.5, 0.1464]

    Args:
        step: 0 for the first step.
        total_steps: of the whole run.
        peak: the rate after warmup.
        schedule: cosine, linear or constant.
        warmup: see `config.resolve.warmup_steps`.
    """
    rising = warmup_steps(total_steps, warmup)
    if step < rising:
        return peak * (step + 1) / (rising + 1)
    done = (step - rising) / max(1, total_steps - rising)
    if schedule == "constant":
        return peak
    return peak * (1 - done) if schedule == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))
