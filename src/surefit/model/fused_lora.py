"""LoRA in fewer passes: the same arithmetic as PEFT's, as matrix products that add to their output in place.

PEFT computes `W x + s · B (A x)` as three products, a multiplication and an addition, each with its own output. Here
`B (A x)` is added into `W x` by the product itself (GEMM's own `alpha` and `beta`), and projections that read the same
input share one product with their `A`s joined and one gradient of that input.

Only the class of PEFT's own layers changes: saving, merging, disabling the adapter and every case that is not plain
LoRA stay PEFT's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.lora.layer import LoraLayer
from torch.autograd.function import once_differentiable

from surefit.model.kernel_ops import MOST_RANK, swiglu, swiglu_backward
from surefit.model.lora_products import add_lora_outputs, backward_through_lora_b, lora_linear_products, stack_lora_a
from surefit.model.quantize import Float8Linear, frozen_matrix, is_four_bit, linear_products

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of siblings that read the same tensor. A guess, which each call checks."""


def fuse_lora(model: PeftModel) -> int:
    """Let the plain LoRA layers of `model` compute in fewer passes, in place; return how many do.

    A layer is plain where it has one active adapter without bias, DoRA or another variant, over a frozen `nn.Linear`,
    `Float8Linear` or bitsandbytes' `Linear4bit`. `unfused_layers` names the others. Siblings in `SAME_INPUT` become a
    group. Hooks on `lora_A` and `lora_B` themselves are not called any more.
    """
    for module in model.modules():
        kind = _fused_class(type(module))
        if kind is not None and _obstacle(module) is None:
            module.__class__ = kind
    for parent in model.modules():
        for names in SAME_INPUT:
            members = [getattr(parent, name, None) for name in names]
            _group([member for member in members if is_fused(member)])
    return sum(map(is_fused, model.modules()))


def unfused_layers(model: PeftModel) -> dict[str, str]:
    """Return the LoRA layers that are not fused: dotted name → reason."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {name: _obstacle(layer) or "not fused" for name, layer in layers.items() if not is_fused(layer)}


def is_fused(module: object) -> bool:
    return isinstance(module, torch.nn.Module) and type(module).__module__ == __name__


class _Products(torch.autograd.Function):
    """Wᵢ x + bᵢ + sᵢ Bᵢ Aᵢ x for projections i of the same x.

    Saved for the backward pass: x, the A x (rank numbers per row and projection: less to read than x, from which they
    could be recomputed) and, with dropout, its mask of a byte per number of x. Nothing of the size of the output.
    Quantized weights are dequantized again for the backward pass, one at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bases: Sequence[torch.nn.Linear],
        scalings: Sequence[float],
        drop: float,
        *factors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Compute the projections of x (rows, inputs), each (rows, outputsᵢ). factors: A₁ (r₁, inputs), B₁ (outputs₁,
        r₁), A₂, …"""
        a, b = factors[::2], factors[1::2]
        dropped, mask = torch.native_dropout(x, drop, True) if drop else (x, None)
        low = dropped @ stack_lora_a(a).T
        del dropped
        ctx.save_for_backward(x, mask, low, *factors)
        ctx.bases, ctx.scalings, ctx.drop = bases, scalings, drop
        ctx.set_materialize_grads(False)
        return tuple(add_lora_outputs(linear_products(bases, x), low, a, b, scalings))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, mask, low, *factors = ctx.saved_tensors
        dx, gradients = _backward(ctx, grads, x, mask, low, factors)
        return dx, None, None, None, *gradients


def _backward(
    ctx: Any,
    grads: Sequence[torch.Tensor | None],
    x: torch.Tensor,
    mask: torch.Tensor | None,
    low: torch.Tensor,
    factors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Return the gradient of x, where it needs one, and the gradients of A₁, B₁, A₂, …, from the projections'
    gradients."""
    a, b = factors[::2], factors[1::2]
    d_low, d_b = backward_through_lora_b(grads, low, a, b, ctx.scalings)
    d_a = torch.split(d_low.T @ _masked(x, mask, ctx.drop), [len(factor) for factor in a])
    dx = None
    if ctx.needs_input_grad[0]:
        dx = _masked(d_low @ stack_lora_a(a), mask, ctx.drop)
        for dy, base in zip(grads, ctx.bases, strict=True):
            if dy is not None:
                dx.addmm_(dy, frozen_matrix(base).to(dy.dtype))
    unused = [dy is None for dy in grads]
    pairs = [(None, None) if skip else pair for skip, *pair in zip(unused, d_a, d_b, strict=True)]
    return dx, [gradient for pair in pairs for gradient in pair]


class _Gated(torch.autograd.Function):
    """silu(g) · u, where g and u are two projections of the same x, without dropout.

    Saved: x, the A x, and the bases' outputs; g and u themselves are never written (`kernel_ops.swiglu`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bases: Sequence[torch.nn.Linear],
        scalings: Sequence[float],
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the gated product of x (rows, inputs): (rows, outputs). factors: A and B of the gate, A and B of
        up."""
        low = x @ stack_lora_a(factors[::2]).T
        gate, up = (product() for product in linear_products(bases, x))
        ctx.save_for_backward(x, low, gate, up, *factors)
        ctx.bases, ctx.scalings, ctx.drop = bases, scalings, 0.0
        return swiglu(gate, up, low, factors[1::2], scalings)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, low, gate, up, *factors = ctx.saved_tensors
        grads = swiglu_backward(dy, gate, up, low, factors[1::2], ctx.scalings)
        dx, gradients = _backward(ctx, grads, x, None, low, factors)
        return dx, None, None, *gradients


def gated_mlp(gate: torch.nn.Module, up: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Return silu(gate(x)) · up(x) from one kernel, LoRA included, for x (…, inputs); None where `swiglu` of the two
    projections is needed: layers that are not plain, or have dropout, or are compiled, since the compiler fuses them
    itself."""
    layers: list[Any] = [gate, up]
    if torch.compiler.is_compiling() or not all(is_fused(layer) and _plain_for(layer, x) for layer in layers):
        return None
    a, b, scalings = zip(*map(_factors, layers), strict=True)
    if any(map(_drop, layers)) or max(map(len, a)) > MOST_RANK:
        return None
    rows, factors = x.reshape(-1, x.shape[-1]), [factor for pair in zip(a, b, strict=True) for factor in pair]
    product = _Gated.apply(rows, [layer.base_layer for layer in layers], scalings, *factors)  # type: ignore[no-untyped-call]
    return product.view(*x.shape[:-1], product.shape[-1])  # type: ignore[no-any-return]


def _masked(tensor: torch.Tensor, mask: torch.Tensor | None, drop: float) -> torch.Tensor:
    """Return `tensor` after dropout with this mask: its backward pass is the same product."""
    return tensor if mask is None else torch.ops.aten.native_dropout_backward(tensor, mask, 1 / (1 - drop))


def _run(layers: Sequence[Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs of plain layers, each (…, outputs), for x (…, inputs)."""
    rows, bases = x.reshape(-1, x.shape[-1]), [layer.base_layer for layer in layers]
    a, b, scalings = zip(*map(_factors, layers), strict=True)
    if not torch.compiler.is_compiling():
        factors = [factor for pair in zip(a, b, strict=True) for factor in pair]
        outputs = _Products.apply(rows, bases, scalings, _drop(layers[0]), *factors)  # type: ignore[no-untyped-call]
    elif all(type(base) is torch.nn.Linear for base in bases):
        # Not `_Products`: traced by torch 2.11 its gradients come out as zeros, without an error (2.13's are right).
        drop = _drop(layers[0])
        dropped = torch.nn.functional.dropout(rows, drop) if drop else None
        weights, biases = [base.weight for base in bases], [base.bias for base in bases]
        outputs = lora_linear_products(rows, dropped, weights, biases, list(a), list(b), list(scalings))[:-1]
    else:
        outputs = [_compilable_forward(layer, rows) for layer in layers]
    return [output.view(*x.shape[:-1], output.shape[-1]) for output in outputs]


def _factors(layer: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return a layer's A, its B, and the scaling of their product."""
    name = layer.active_adapters[0]
    return layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name])


def _compilable_forward(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the same sum over a quantized base, in operators that torch.compile differentiates and fuses itself."""
    a, b, scaling = _factors(layer)
    low = torch.nn.functional.linear(layer.lora_dropout[layer.active_adapters[0]](rows), a)
    return torch.addmm(layer.base_layer(rows), low, b.T, alpha=scaling)


class _Group:
    """Projections that read the same tensor: the first that is called computes all, the others take their result.

    A result is returned once, to a call with the very tensor it was computed from, unchanged since, in the same
    gradient mode and with unchanged factors. A member called with another tensor while its result is ready shows that
    these projections do not read the same input, and so do results not fetched twice in a row (once can be an exception
    in between): from then on each projection computes its own. Results left by an exception are held until the next
    call.
    """

    def __init__(self, members: Sequence[torch.nn.Module]) -> None:
        self.members = list(members)
        self.apart = False
        self._unfetched = 0
        self._clear()

    def _clear(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._x: torch.Tensor | None = None
        self._ready: dict[torch.nn.Module, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without results, which belong to one forward pass (copies and pickles of the model)."""
        return {"members": self.members, "apart": self.apart}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["members"])  # type: ignore[misc]
        self.apart = state["apart"]

    def output(self, member: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the output of `member`, plain for this x."""
        if self.apart or not all(_plain_for(sibling, x) and not _drop(sibling) for sibling in self.members):
            return _run([member], x)[0]
        key = self._state(x)
        if x is self._x and key == self._key and member in self._ready:
            return self._fetch(member)
        if self._ready:
            self._unfetched += 1
            self.apart = member in self._ready or self._unfetched > 1
            self._clear()
            if self.apart:
                return _run([member], x)[0]
        self._x, self._key = x, key
        self._ready = dict(zip(self.members, _run(self.members, x), strict=True))
        return self._fetch(member)

    def _fetch(self, member: torch.nn.Module) -> torch.Tensor:
        result = self._ready.pop(member)
        if not self._ready:
            self._clear()
            self._unfetched = 0
        return result

    def _state(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Return everything that a result depends on besides x itself.

        The compiler does not track versions: in a compiled model, x must not change in place between siblings.
        """
        if torch.compiler.is_compiling():
            return (torch.is_grad_enabled(),)
        factors = [f for member in self.members for f in (*member.lora_A.values(), *member.lora_B.values())]  # type: ignore[operator]
        versions = [_version(x), *(_version(factor.weight) for factor in factors)]
        scalings = [tuple(member.scaling.values()) for member in self.members]  # type: ignore[operator]
        return (torch.is_grad_enabled(), *versions, *scalings)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _group(members: list[Any]) -> None:
    if len(members) > 1:
        group = _Group(members)
        for member in members:
            member.fused_group = group


def disable_projection_groups(model: torch.nn.Module) -> None:
    """Let each projection compute its own output. The compiler silently leaves a checkpoint eager in which a module
    changes its state (torch 2.13: no side effects in `torch.utils.checkpoint`)."""
    for module in model.modules():
        group: _Group | None = getattr(module, "fused_group", None)
        if group is not None:
            group.apart = True


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return the output, or None where PEFT must compute it."""
    if not _plain_for(layer, x):
        return None
    group: _Group | None = getattr(layer, "fused_group", None)
    return _run([layer], x)[0] if group is None else group.output(layer, x)


class FusedLinear(PeftLinear):
    """PEFT's LoRA layer over a linear layer, fused."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        fused = None if args or kwargs else _forward(self, x)
        return super().forward(x, *args, **kwargs) if fused is None else fused


@functools.cache
def _four_bit_class() -> type[torch.nn.Module]:
    """Return `FusedLinear4bit`, made on first use: its base exists only where bitsandbytes is installed."""
    from peft.tuners.lora.bnb import Linear4bit as PeftLinear4bit

    class FusedLinear4bit(PeftLinear4bit):
        """PEFT's LoRA layer over a 4-bit layer, fused."""

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            fused = None if args or kwargs else _forward(self, x)
            return super().forward(x, *args, **kwargs) if fused is None else fused

    FusedLinear4bit.__qualname__ = "FusedLinear4bit"  # where pickle looks for it, by __getattr__
    return FusedLinear4bit


def __getattr__(name: str) -> Any:
    if name == "FusedLinear4bit":
        return _four_bit_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _fused_class(kind: type) -> type[torch.nn.Module] | None:
    if kind is PeftLinear:
        return FusedLinear
    if (kind.__module__, kind.__name__) == ("peft.tuners.lora.bnb", "Linear4bit"):
        return _four_bit_class()
    return None


def _obstacle(layer: Any) -> str | None:
    """Return why this LoRA layer is not plain at present, or None."""
    adapters = layer.active_adapters if isinstance(layer, LoraLayer) else []
    if len(adapters) != 1 or adapters[0] not in getattr(layer, "lora_A", {}):
        return "it does not have exactly one active adapter"
    name, base = adapters[0], layer.base_layer
    if layer.lora_variant or layer.lora_bias.get(name) or type(layer.lora_dropout[name]) not in _DROPOUTS:
        return "it is a variant of LoRA"
    if not (type(base) in (torch.nn.Linear, Float8Linear) or is_four_bit(base)) or layer.fan_in_fan_out:
        return f"its base layer is a {type(base).__name__}"
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return "its base layer is trained"
    return None


_DROPOUTS = (torch.nn.Identity, torch.nn.Dropout)


def _plain_for(layer: Any, x: torch.Tensor) -> bool:
    """Return whether the fused form computes PEFT's result for this input, at present."""
    if layer.disable_adapters or layer.merged or _obstacle(layer) is not None:
        return False
    name, base = layer.active_adapters[0], layer.base_layer
    types = {x.dtype, layer.lora_A[name].weight.dtype, layer.lora_B[name].weight.dtype}
    if type(base) is torch.nn.Linear:
        types.add(base.weight.dtype)
    return len(types) == 1 and not torch.is_autocast_enabled(x.device.type)


def _drop(layer: Any) -> float:
    """Return the current dropout probability."""
    dropout = layer.lora_dropout[layer.active_adapters[0]]
    return float(dropout.p) if isinstance(dropout, torch.nn.Dropout) and dropout.training else 0.0
