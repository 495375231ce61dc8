"""The optimizers: AdamW with float32 masters, its moments in 32 or 8 bits, on the GPU or in pages of the host.

The norm of the gradients and the factor that clips them live here too: a step multiplies the masters' copies of the
gradients by it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from surefit.config.schema import TrainSection
from surefit.core.errors import ConfigError
from surefit.core.packaging import install_extra

BETAS = (0.9, 0.999)
EPSILON = 1e-8
ParamGroup = dict[str, Any]


def make_optimizer(model: torch.nn.Module, train: TrainSection, masters: bool = True) -> MasterOptimizer:
    """The optimizer that `train.optim` names, over everything in `model` that requires a gradient.

    Args:
        masters: False for an engine that makes the masters itself, in shares (parallel/zero.py), and puts them in the
            place of the parameters in `inner`.

    Raises:
        ConfigError: bitsandbytes is needed and not installed.
    """
    if train.optim in BitsAndBytesAdamW.CLASSES:
        assert masters, "config/capabilities.py: no 8-bit or paged state in shares"
        return BitsAndBytesAdamW(model, train.weight_decay, train.optim)
    return MasterAdamW(model, train.weight_decay, masters)


class MasterOptimizer(ABC):
    """An optimizer that updates float32 copies of whatever is trained in a lower precision.

    bfloat16 keeps 8 bits of a number, so a weight of 0.02 moves in steps of 0.0001: an update of 1e-5 added to it
    directly is rounded away, every time. Here the update reaches a float32 master copy, and the model's own weight is
    the master rounded: 4 bytes per trained parameter that is not float32, beside the moments.

    Weight decay is decoupled and leaves norm weights and biases (everything with one dimension, and names that end in
    "bias") alone. Set `learning_rate` before each `step`.

    Args:
        model: its parameters that require a gradient are the ones trained.
        weight_decay: share of the weight taken off per unit of learning rate.
        masters: False updates the parameters themselves, whatever their type.
    """

    def __init__(self, model: torch.nn.Module, weight_decay: float = 0.0, masters: bool = True) -> None:
        self.learning_rate = 0.0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: p if p.dtype == torch.float32 or not masters else p.detach().float()
            for name, p in self._parameters.items()
        }

    def _groups(self, weight_decay: float, names: Iterable[str]) -> list[ParamGroup]:
        """The masters of some parameters, those that decay apart from those that do not."""
        chosen = [(name, self._masters[name]) for name in names]
        decayed = [master for name, master in chosen if is_decayed(name, master)]
        others = [master for name, master in chosen if not is_decayed(name, master)]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    @property
    @abstractmethod
    def inner(self) -> Sequence[torch.optim.Optimizer]:
        """What updates the masters."""

    @abstractmethod
    def _state(self) -> dict[str, torch.Tensor]:
        """What the inner optimizers keep, as `KEY.PARAMETER_NAME`."""

    @abstractmethod
    def _restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what `_state` returned."""

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by their names in the model."""
        return self._parameters

    def step(self, factor: float = 1.0) -> None:
        """Update every parameter that has a gradient.

        Args:
            factor: every gradient is multiplied by it first, in float32: `clip_factor`, divided by the loss scale.
                Those of float32 parameters are multiplied in place, those of others in the masters' copies.
        """
        self._hand_over_gradients(factor)
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
            optimizer.step()
        if copies := self._copies():
            with torch.no_grad():
                torch._foreach_copy_(_held([parameter for parameter, _ in copies]), _held([m for _, m in copies]))
            for _, master in copies:
                master.grad = None

    def _hand_over_gradients(self, factor: float) -> None:
        """Give every master its gradient, in float32; all in a few operators, since a LoRA has hundreds of tensors."""
        given = [(p.grad, master) for p, master in self._copies() if p.grad is not None]
        if given:
            wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient, _ in given]
            torch._foreach_copy_(_held(wide), _held([gradient for gradient, _ in given]))
            for (_, master), gradient in zip(given, wide, strict=True):
                master.grad = gradient
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(_held(gradients), factor)

    def _copies(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """The parameters that have a master of their own, and it."""
        pairs = [(parameter, self._masters[name]) for name, parameter in self._parameters.items()]
        return [(parameter, master) for parameter, master in pairs if parameter is not master]

    def zero_grad(self) -> None:
        """Drop the gradients of the model's parameters."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything the next step depends on besides the weights, as `KEY.PARAMETER_NAME`."""
        masters = {
            f"master.{name}": master for name, master in self._masters.items() if master is not self._parameters[name]
        }
        return masters | self._state()

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `tensors` returned; a parameter that had no update yet has no moments there."""
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    master.copy_(tensors[f"master.{name}"])
            self._restore(tensors)


class MasterAdamW(MasterOptimizer):
    """AdamW (Loshchilov & Hutter 2019) of torch: 8 bytes of moments per trained parameter.

    The update runs fused, one pass over the weights, on CPU and GPU alike; it is elementwise, so the same gradients
    give the same bits.
    """

    KEYS = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, model: torch.nn.Module, weight_decay: float = 0.0, masters: bool = True) -> None:
        super().__init__(model, weight_decay, masters)
        # foreach and fused exclude each other; both said, so that no version of torch chooses for us.
        self._adamw = torch.optim.AdamW(
            self._groups(weight_decay, self._masters), lr=0.0, betas=BETAS, eps=EPSILON, foreach=False, fused=True
        )

    @property
    def inner(self) -> Sequence[torch.optim.Optimizer]:
        return [self._adamw]

    def _state(self) -> dict[str, torch.Tensor]:
        return {
            f"{key}.{name}": value
            for name, master in self._masters.items()
            for key, value in self._adamw.state[master].items()
        }

    def _restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, master in self._masters.items():
            if f"step.{name}" in tensors:
                # Not load_state_dict: it may cast what it is given.
                self._adamw.state[master] = {
                    key: tensors[f"{key}.{name}"].to(master.device, copy=True) for key in self.KEYS
                }


class BitsAndBytesAdamW(MasterOptimizer):
    """AdamW of bitsandbytes (Dettmers et al. 2022): moments in 8 bits, in paged memory, or both.

    8 bits: 2.03 bytes of moments per parameter, in blocks of 256 with one scale each. Parameters of fewer than 4,096
    numbers keep 32 bits, as bitsandbytes has it, and so do embeddings, whose rare rows the paper found to need them.
    Paged: the moments of parameters of 100,000 numbers and more lie in memory that the driver moves between host and
    GPU when the GPU's runs out.

    Each parameter is updated by a kernel of its own: no gain for LoRA, whose moments are small.

    Args:
        kind: adamw_8bit, paged_adamw_32bit or paged_adamw_8bit.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """

    CLASSES: ClassVar = {
        "adamw_8bit": ("AdamW8bit", "AdamW32bit"),
        "paged_adamw_32bit": ("PagedAdamW32bit", "PagedAdamW32bit"),
        "paged_adamw_8bit": ("PagedAdamW8bit", "PagedAdamW32bit"),
    }
    """The names of bitsandbytes' classes: for most parameters, and for embeddings."""
    SHARED: ClassVar = {"qmap1": "dynamic", "qmap2": "udynamic"}
    """Which 8-bit code stands for which number: a key of the state → its name in the optimizer. One for all."""

    def __init__(self, model: torch.nn.Module, weight_decay: float, kind: str) -> None:
        super().__init__(model, weight_decay)
        module = _bitsandbytes(kind)
        embeddings = _embeddings(model)
        most = [name for name, p in self._parameters.items() if id(p) not in embeddings]
        rest = [name for name, p in self._parameters.items() if id(p) in embeddings]
        self._optimizers = [
            _make_bitsandbytes_optimizer(getattr(module, name), groups)
            for name, names in zip(self.CLASSES[kind], (most, rest), strict=True)
            if (groups := self._groups(weight_decay, names))
        ]

    @property
    def inner(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    def _state(self) -> dict[str, torch.Tensor]:
        names = {id(master): name for name, master in self._masters.items()}
        found = {}
        for optimizer in self._optimizers:
            for master, state in optimizer.state.items():
                for key, value in state.items():
                    name = f"qmap.{self.SHARED[key]}" if key in self.SHARED else f"{key}.{names[id(master)]}"
                    found[name] = torch.as_tensor(value)
        return found

    def _restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names = {id(master): name for name, master in self._masters.items()}
        for optimizer in self._optimizers:
            maps = {name: tensors[f"qmap.{name}"] for name in self.SHARED.values() if f"qmap.{name}" in tensors}
            optimizer.name2qmap.update({name: value.clone() for name, value in maps.items()})
            for g, group in enumerate(optimizer.param_groups):
                for p, master in enumerate(group["params"]):
                    if f"step.{names[id(master)]}" in tensors:
                        # bitsandbytes itself makes the tensors, so paged ones are paged again.
                        optimizer.init_state(group, master, g, p)
                        self._fill(optimizer.state[master], names[id(master)], tensors)

    def _fill(self, state: dict[str, Any], name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        for key, value in state.items():
            if key == "step":
                state[key] = int(tensors[f"step.{name}"])
            elif key not in self.SHARED:
                value.copy_(tensors[f"{key}.{name}"])


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to norm weights and biases."""
    return parameter.ndim >= 2 and not name.endswith("bias")


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm over all gradients, 0-d float32 on their device, added up in at least float32 whatever their type.

    `torch.nn.utils.clip_grad_norm_` computes in the gradients' own type: 8 bits of the norm in bfloat16, and infinity
    from 65,504 on in float16. For float32 gradients the bits are the same as there.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    # A CPU adds up one number after the other: of 4 million bfloat16 ones, float32 loses the 4th digit. A GPU does not.
    lossy = any(gradient.is_cpu and gradient.dtype != torch.float32 for gradient in gradients)
    dtype = torch.float64 if lossy else torch.float32
    norms: Sequence[torch.Tensor] = torch._foreach_norm(gradients, 2, dtype=dtype)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(tuple(norms)))
    return total.float()


def clip_factor(norm: float, max_norm: float) -> float:
    """What the gradients are multiplied by to bring them down to `max_norm`: at most 1.

    In float32 arithmetic, the bits of `torch.nn.utils.clip_grad_norm_`.

    >>> clip_factor(0.5, 1.0), round(clip_factor(4.0, 1.0), 5)
    (1.0, 0.25)
    """
    one = np.float32(1)
    return float(min(one, one / (np.float32(norm) + np.float32(1e-6)) * np.float32(max_norm)))


def _held(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """What of each tensor this process holds: itself, or its shard of one that FSDP has cut (torch.distributed.tensor).

    Elementwise, so that it is the same whole or in shards; the few operators that take many tensors at once do not all
    take sharded ones.
    """
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def _embeddings(model: torch.nn.Module) -> set[int]:
    """The ids of all parameters that embedding modules hold, tied heads among them."""
    return {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}


def _make_bitsandbytes_optimizer(kind: Any, groups: list[ParamGroup]) -> Any:
    """A bitsandbytes optimizer. It reads the values of its 8-bit code, which the fake tensors of a plan have not."""
    with unset_fake_temporarily():
        optimizer = kind(groups, lr=0.0, betas=BETAS, eps=EPSILON)
        codes = {name: code.tolist() for name, code in optimizer.name2qmap.items()}
    optimizer.name2qmap = {name: torch.tensor(code) for name, code in codes.items()}
    return optimizer


def _bitsandbytes(kind: str) -> Any:
    try:
        return importlib.import_module("bitsandbytes.optim")
    except ImportError as error:
        raise ConfigError(
            f"the optimizer {kind} is one of bitsandbytes, which cannot be imported here: {error}",
            code="E5109",
            field="train.optim",
            help=f"{install_extra('quant')}; or use adamw",
        ) from error
