"""Fused kernels for the matching parts of a model, found by their computation and not by their name.

A norm, an MLP or a rotation is tried on a few random numbers: where its result matches the kernel's own formula, its
class is changed to one whose forward pass calls `kernel_ops` for tensors on a GPU; everything else stays as it is.
"""

from __future__ import annotations

import copy
import functools
import itertools
import types
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer
from torch.nn.functional import linear, silu
from torch.utils._python_dispatch import _disable_current_modes

from surefit.config.resolve import missing_for_kernels
from surefit.core.errors import MachineError
from surefit.core.packaging import install_extra
from surefit.model import fused_lora
from surefit.model.kernel_ops import rms_norm, rope, swiglu
from surefit.model.quantize import Float8Linear
from surefit.model.sdpa import on_gpu

MOST_UNEQUAL = 0.02
"""Share of 16-bit results that may differ from the formula's by their rounding; where the weight is multiplied before
instead of after rounding, a third do."""
WIDTHS = (24, 40)
"""Input and inner width of the MLP that is tried."""
TYPES = (torch.float32, torch.float16, torch.bfloat16)


class RmsNormSpec(NamedTuple):
    """Parameters of (offset + weight) · x / √(mean(x²) + eps); `whole` as in `kernel_ops.rms_norm`."""

    eps: float
    offset: float
    whole: bool


class GatedMlpNames(NamedTuple):
    """Names of the linear layers of down(silu(gate(x)) · up(x))."""

    gate: str
    up: str
    down: str


class FusedModuleCounts(NamedTuple):
    """Numbers of modules that use a kernel."""

    norms: int
    mlps: int
    rotations: int


def require_kernels() -> None:
    """Raise if the packages of the fused kernels are not installed.

    Raises:
        MachineError: Liger or Triton is not installed.
    """
    if missing := missing_for_kernels():
        raise MachineError(
            f"the fused kernels need {missing}, which is not installed",
            code="E5055",
            field="speed.kernels",
            help=f"{install_extra('kernels')}; or set speed.kernels: false",
        )


def use_kernels(model: torch.nn.Module) -> FusedModuleCounts:
    """Let every part of `model` that a kernel matches use that kernel, in place; names and weights stay as they are.

    Call it after the adapter is added and fused, and before forward passes are wrapped. On a CPU the model computes as
    before.
    """
    counts = dict.fromkeys(FusedModuleCounts._fields, 0)
    with _disable_current_modes():  # a plan's modes: the trials here are no part of a run
        for module in model.modules():
            if isinstance(module, Float8Linear):
                module.one_pass = True
            if "forward" in vars(module):
                continue
            kind: Any = type(module)
            if (norm := find_rms_norm(module)) is not None:
                module.surefit_norm, module.__class__, counter = norm, _norm_class(kind), "norms"  # type: ignore[assignment]
            elif (gates := find_gated_mlp(module)) is not None:
                module.surefit_gates, module.__class__, counter = gates, _mlp_class(kind), "mlps"  # type: ignore[assignment]
            elif (name := find_rope_function(kind)) is not None:
                module.__class__, counter = _attention_class(kind, name), "rotations"
            else:
                continue
            counts[counter] += 1
    return FusedModuleCounts(**counts)


def find_rms_norm(module: torch.nn.Module) -> RmsNormSpec | None:
    """Return the RMS norm that a module computes, if it is one with a vector of weights and a number for eps."""
    weight = module._parameters.get("weight")
    numbers = [value for value in vars(module).values() if type(value) is float]
    if weight is None or weight.ndim != 1 or len(module._parameters) > 1 or module._modules or len(numbers) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(module)
    for eps, offset, whole in itertools.product(numbers, (0.0, 1.0), (False, True)):
        form = RmsNormSpec(eps, offset, whole)
        if all(_same_norm(probe, form, dtype, generator) for dtype in (torch.float32, torch.bfloat16)):
            return form
    return None


def _same_norm(probe: torch.nn.Module, form: RmsNormSpec, dtype: torch.dtype, generator: torch.Generator) -> bool:
    """Return whether a module computes the form's numbers, for rows so small that eps counts as well."""
    x = torch.randn(8, 256, generator=generator) * torch.logspace(-4, 1, 8)[:, None]
    weight = torch.nn.Parameter(torch.randn(256, generator=generator).to(dtype), requires_grad=False)
    probe._parameters = {"weight": weight}
    result = _answer(type(probe).forward, probe, x.to(dtype))
    expected = rms_norm(x.to(dtype), weight, *form)[0]
    if result is None or result.dtype != dtype or result.shape != expected.shape:
        return False
    if dtype == torch.float32:
        return torch.allclose(result, expected, rtol=1e-5, atol=1e-6)
    return bool((result != expected).float().mean() < MOST_UNEQUAL)


def find_gated_mlp(module: torch.nn.Module) -> GatedMlpNames | None:
    """Return the linear layers of a gated MLP with silu, if the module is one and has no other weights."""
    linears = {name: child for name, child in module._modules.items() if _is_linear(child)}
    other_children = [child for name, child in module._modules.items() if name not in linears and child is not None]
    if len(linears) != 3 or module._parameters or any(True for child in other_children for _ in child.parameters()):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, WIDTHS[0], generator=generator)
    for names in itertools.permutations(linears):
        gate, up, down = (linears[name] for name in names)
        if _shape(gate) != _shape(up) or _shape(gate) != _shape(down)[::-1]:
            continue
        weights = {}
        for name, (inputs, outputs) in zip(names, (WIDTHS, WIDTHS, WIDTHS[::-1]), strict=True):
            weights[name] = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        probe = copy.copy(module)
        probe._modules = {**module._modules, **{name: _linear(weight) for name, weight in weights.items()}}
        result = _answer(type(probe).forward, probe, x)
        gate_w, up_w, down_w = weights.values()
        expected = linear(silu(linear(x, gate_w)) * linear(x, up_w), down_w)
        if result is not None and result.shape == x.shape and torch.allclose(result, expected, rtol=1e-4, atol=1e-5):
            return GatedMlpNames(*names)
    return None


def _is_linear(module: torch.nn.Module | None) -> bool:
    return isinstance(module, torch.nn.Linear | LoraLayer) and hasattr(module, "in_features")


def _shape(layer: Any) -> tuple[int, int]:
    return layer.in_features, layer.out_features


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    outputs, inputs = weight.shape
    layer = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


@cache
def find_rope_function(kind: type[torch.nn.Module]) -> str | None:
    """Return the global name by which the forward pass of a class calls rope on its queries and keys, if it does."""
    forward = kind.forward
    if not isinstance(forward, types.FunctionType):
        return None
    candidates = ((name, forward.__globals__.get(name)) for name in forward.__code__.co_names)
    return next((name for name, value in candidates if isinstance(value, types.FunctionType) and _rotates(value)), None)


@cache
def _rotates(function: types.FunctionType) -> bool:
    """Return whether function(q, k, cos, sin) rotates pairs of numbers, half a head apart."""
    if function.__code__.co_varnames[:4] != ("q", "k", "cos", "sin"):
        return False
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2))
    angle = torch.randn(2, 5, 4, generator=generator).repeat(1, 1, 2)
    result = _answer(function, q, k, angle.cos(), angle.sin())
    expected = rope(q, k, angle.cos(), angle.sin(), False)
    return isinstance(result, tuple) and list(map(_same, result, expected)) == [True, True]


def _same(found: Any, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected, 1e-5)


def _answer(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of an unknown function with these arguments; None where it fails, since it may need others."""
    with suppress(Exception), torch.no_grad():
        return function(*args)
    return None


@cache
def _norm_class(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not on_gpu(x) or x.dtype not in TYPES or x.dtype != self.weight.dtype:
            return kind.forward(self, x)  # type: ignore[no-any-return]
        return rms_norm(x, self.weight, *self.surefit_norm)[0]  # type: ignore[no-any-return]

    return _with_forward(kind, forward)


@cache
def _mlp_class(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not on_gpu(x) or x.dtype not in TYPES:
            return kind.forward(self, x)  # type: ignore[no-any-return]
        gate, up, down = (getattr(self, name) for name in self.surefit_gates)
        product = fused_lora.gated_mlp(gate, up, x)
        return down(swiglu(gate(x), up(x), None, [], []) if product is None else product)  # type: ignore[no-any-return]

    return _with_forward(kind, forward)


@cache
def _attention_class(kind: type[torch.nn.Module], name: str) -> type[torch.nn.Module]:
    """Return a class with the same code, in which one global name refers to the kernel: the original module stays as it
    is."""
    plain: Any = kind.forward
    original_rope = plain.__globals__[name]

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        alike = q.dtype == k.dtype == cos.dtype and cos.ndim == 3 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if args or kwargs or not alike or not on_gpu(q) or q.dtype not in TYPES:
            return original_rope(q, k, cos, sin, *args, **kwargs)
        return rope(q, k, cos, sin, False)

    names = {**plain.__globals__, name: rotate}
    forward = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    return _with_forward(kind, forward)


def _with_forward(kind: type[torch.nn.Module], forward: Any) -> type[torch.nn.Module]:
    """Return a subclass with its base's name: other packages rely on that name."""
    attributes = {
        "forward": functools.wraps(kind.forward)(forward),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), attributes)
