"""The optimizers: AdamW with float32 master weights, its moments in 32 or 8 bits, in GPU memory or paged to the host.

The gradient norm and gradient clipping are here too: a step multiplies the masters' copies of the gradients by it.
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
    """Build the optimizer that `train.optim` names, over every parameter of `model` that requires a gradient.

    Args:
        masters: False for an engine that creates sharded masters itself (parallel/zero.py) and replaces the
            parameters in `inner` by them.

    Raises:
        ConfigError: bitsandbytes is needed and not installed.
    """
    if train.optim in BitsAndBytesAdamW.CLASSES:
        assert masters, "config/capabilities.py: no 8-bit or paged state in shares"
        return BitsAndBytesAdamW(model, train.weight_decay, train.optim)
    return MasterAdamW(model, train.weight_decay, masters)


class MasterOptimizer(ABC):
    """Optimizer that updates float32 master copies of the parameters that are trained in a lower precision.

    bfloat16 keeps 8 bits of a number, so a weight of 0.02 moves in steps of 0.0001: an update of 1e-5 added to it
    directly is always rounded away. Here the update goes into a float32 master copy, and the model's weight is the
    rounded master: 4 bytes per trained parameter that is not float32, beside the moments.

    Weight decay is decoupled and skips norm weights and biases (every one-dimensional tensor, and names that end in
    "bias"). Set `learning_rate` before each `step`.

    Args:
        model: all of its parameters that require a gradient are trained.
        weight_decay: share of the weight that is subtracted per unit of learning rate.
        masters: False updates the parameters themselves, whatever their dtype.
    """

    def __init__(self, model: torch.nn.Module, weight_decay: float = 0.0, masters: bool = True) -> None:
        self.learning_rate = 0.0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: p if p.dtype == torch.float32 or not masters else p.detach().float()
            for name, p in self._parameters.items()
        }

    def _groups(self, weight_decay: float, names: Iterable[str]) -> list[ParamGroup]:
        """Return parameter groups of the named masters: one with weight decay, one without."""
        named_masters = [(name, self._masters[name]) for name in names]
        decayed = [master for name, master in named_masters if is_decayed(name, master)]
        not_decayed = [master for name, master in named_masters if not is_decayed(name, master)]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    @property
    @abstractmethod
    def inner(self) -> Sequence[torch.optim.Optimizer]:
        """Torch optimizers that update the masters."""

    @abstractmethod
    def _state(self) -> dict[str, torch.Tensor]:
        """Return the state of the inner optimizers, as `KEY.PARAMETER_NAME`."""

    @abstractmethod
    def _restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the state that `_state` returned."""

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by their names in the model."""
        return self._parameters

    def step(self, factor: float = 1.0) -> None:
        """Update every parameter that has a gradient.

        Args:
            factor: every gradient is multiplied by it first, in float32: `clip_factor`, divided by the loss scale.
                Gradients of float32 parameters are multiplied in place, the others in the masters' copies.
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
        """Copy every gradient to its master, in float32; in a few operators, since a LoRA has hundreds of tensors."""
        pairs = [(p.grad, master) for p, master in self._copies() if p.grad is not None]
        if pairs:
            float32_gradients = [torch.empty_like(gradient, dtype=torch.float32) for gradient, _ in pairs]
            torch._foreach_copy_(_held(float32_gradients), _held([gradient for gradient, _ in pairs]))
            for (_, master), gradient in zip(pairs, float32_gradients, strict=True):
                master.grad = gradient
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(_held(gradients), factor)

    def _copies(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return (parameter, master) for every parameter with a separate master tensor."""
        pairs = [(parameter, self._masters[name]) for name, parameter in self._parameters.items()]
        return [(parameter, master) for parameter, master in pairs if parameter is not master]

    def zero_grad(self) -> None:
        """Drop the gradients of the model's parameters."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything that the next step depends on besides the weights, as `KEY.PARAMETER_NAME`."""
        masters = {
            f"master.{name}": master for name, master in self._masters.items() if master is not self._parameters[name]
        }
        return masters | self._state()

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the state that `tensors` returned; a parameter that was never updated has no moments in it."""
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    master.copy_(tensors[f"master.{name}"])
            self._restore(tensors)


class MasterAdamW(MasterOptimizer):
    """AdamW of torch (Loshchilov & Hutter 2019): 8 bytes of moments per trained parameter.

    The update is fused, one pass over the weights, on CPU and GPU alike; it is elementwise, so equal gradients give
    equal bits.
    """

    KEYS = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, model: torch.nn.Module, weight_decay: float = 0.0, masters: bool = True) -> None:
        super().__init__(model, weight_decay, masters)
        # foreach and fused exclude each other; both are set, so that the choice is the same in every torch version.
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
                # Not load_state_dict: it may cast the tensors.
                self._adamw.state[master] = {
                    key: tensors[f"{key}.{name}"].to(master.device, copy=True) for key in self.KEYS
                }


class BitsAndBytesAdamW(MasterOptimizer):
    """AdamW of bitsandbytes (Dettmers et al. 2022): moments in 8 bits, in paged memory, or both.

    8 bits: 2.03 bytes of moments per parameter, in blocks of 256 with one scale each. Parameters of fewer than 4,096
    elements keep 32 bits, the default of bitsandbytes, and so do embeddings, since the paper found that their rare rows
    need them. Paged: the moments of parameters of at least 100,000 elements lie in memory that the driver moves between
    host and GPU when GPU memory runs out.

    Each parameter is updated by a separate kernel launch: no gain for LoRA, since its moments are small.

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
    """Names of bitsandbytes' classes: (for most parameters, for embeddings)."""
    SHARED: ClassVar = {"qmap1": "dynamic", "qmap2": "udynamic"}
    """Code books of the 8-bit state, shared by all parameters: key in the state → name in the optimizer."""

    def __init__(self, model: torch.nn.Module, weight_decay: float, kind: str) -> None:
        super().__init__(model, weight_decay)
        module = _bitsandbytes(kind)
        embeddings = _embeddings(model)
        other_names = [name for name, p in self._parameters.items() if id(p) not in embeddings]
        embedding_names = [name for name, p in self._parameters.items() if id(p) in embeddings]
        self._optimizers = [
            _make_bitsandbytes_optimizer(getattr(module, name), groups)
            for name, names in zip(self.CLASSES[kind], (other_names, embedding_names), strict=True)
            if (groups := self._groups(weight_decay, names))
        ]

    @property
    def inner(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    def _state(self) -> dict[str, torch.Tensor]:
        names = {id(master): name for name, master in self._masters.items()}
        tensors = {}
        for optimizer in self._optimizers:
            for master, state in optimizer.state.items():
                for key, value in state.items():
                    name = f"qmap.{self.SHARED[key]}" if key in self.SHARED else f"{key}.{names[id(master)]}"
                    tensors[name] = torch.as_tensor(value)
        return tensors

    def _restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names = {id(master): name for name, master in self._masters.items()}
        for optimizer in self._optimizers:
            maps = {name: tensors[f"qmap.{name}"] for name in self.SHARED.values() if f"qmap.{name}" in tensors}
            optimizer.name2qmap.update({name: value.clone() for name, value in maps.items()})
            for g, group in enumerate(optimizer.param_groups):
                for p, master in enumerate(group["params"]):
                    if f"step.{names[id(master)]}" in tensors:
                        # bitsandbytes allocates the tensors itself, so that paged ones are paged again.
                        optimizer.init_state(group, master, g, p)
                        self._fill(optimizer.state[master], names[id(master)], tensors)

    def _fill(self, state: dict[str, Any], name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        for key, value in state.items():
            if key == "step":
                state[key] = int(tensors[f"step.{name}"])
            elif key not in self.SHARED:
                value.copy_(tensors[f"{key}.{name}"])


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to matrices, not to norm weights and biases."""
    return parameter.ndim >= 2 and not name.endswith("bias")


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm over all gradients, 0-d float32 on their device, accumulated in at least float32 whatever their
    dtype.

    `torch.nn.utils.clip_grad_norm_` computes in the gradients' dtype: 8 bits of the norm in bfloat16, and infinity from
    65,504 on in float16. For float32 gradients both give the same bits.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    # A CPU adds sequentially: over 4 million bfloat16 numbers float32 loses the 4th digit. A GPU does not.
    lossy = any(gradient.is_cpu and gradient.dtype != torch.float32 for gradient in gradients)
    dtype = torch.float64 if lossy else torch.float32
    norms: Sequence[torch.Tensor] = torch._foreach_norm(gradients, 2, dtype=dtype)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(tuple(norms)))
    return total.float()


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor, at most 1, that scales the gradients down to `max_norm`.

    In float32 arithmetic, the bits of `torch.nn.utils.clip_grad_norm_`.

    >>> clip_factor(0.5, 1.0), round(clip_factor(4.0, 1.0), 5)
    (1.0, 0.25)
    """
    unit = np.float32(1)
    return float(min(unit, unit / (np.float32(norm) + np.float32(1e-6)) * np.float32(max_norm)))


def _held(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return the part of each tensor that this process holds: the tensor, or its shard if FSDP has sharded it
    (torch.distributed.tensor).

    For elementwise operators, which give the same result on shards: not all of torch's operators on lists of tensors
    accept sharded ones.
    """
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def _embeddings(model: torch.nn.Module) -> set[int]:
    """Return the ids of all parameters of embedding modules, tied heads included."""
    return {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}


def _make_bitsandbytes_optimizer(kind: Any, groups: list[ParamGroup]) -> Any:
    """Build a bitsandbytes optimizer with real code books: it reads their values, which the fake tensors of a plan
    lack."""
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
            f"the optimizer {kind} needs bitsandbytes, which cannot be imported: {error}",
            code="E5109",
            field="train.optim",
            help=f"{install_extra('quant')}; or use adamw",
        ) from error
