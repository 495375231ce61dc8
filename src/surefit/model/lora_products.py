"""The matrix products of fused LoRA, and the operator in which torch.compile runs them.

The compiler writes a new result for every `addmm_` that it traces, and reads the term it adds to from another tensor: a
copy of each projection's output, forward, and of each gradient of x, backward. It does not trace into an operator, so
the products add in place there as they do without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]


def add_lora_outputs(
    bases: Sequence[Callable[[], torch.Tensor]], low: torch.Tensor, a: Tensors, b: Tensors, scalings: Sequence[float]
) -> list[torch.Tensor]:
    """Return each base's output, (rows, outputsᵢ), with its sᵢ Bᵢ Aᵢ x added in place; `low` (rows, ranks) has the A
    x."""
    return [
        base().addmm_(part, up.T, alpha=scaling)
        for base, part, up, scaling in zip(bases, split_lora_a_outputs(low, a), b, scalings, strict=True)
    ]


def backward_through_lora_b(
    grads: Sequence[torch.Tensor | None], low: torch.Tensor, a: Tensors, b: Tensors, scalings: Sequence[float]
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the gradient of `low`, and of each B; for a projection without a gradient zeros, and None."""
    d_low, d_b = [], []
    for dy, up, part, scaling in zip(grads, b, split_lora_a_outputs(low, a), scalings, strict=True):
        d_low.append(torch.zeros_like(part) if dy is None else (dy @ up).mul_(scaling))
        d_b.append(None if dy is None else (dy.T @ part).mul_(scaling))
    return torch.cat(d_low, dim=1) if len(d_low) > 1 else d_low[0], d_b


def split_lora_a_outputs(low: torch.Tensor, a: Tensors) -> tuple[torch.Tensor, ...]:
    """Return the columns of A x that belong to each projection."""
    return torch.split(low, [len(factor) for factor in a], dim=1)


def stack_lora_a(a: Tensors) -> torch.Tensor:
    return torch.cat(tuple(a)) if len(a) > 1 else a[0]


@torch.library.custom_op(
    "surefit::lora",
    mutates_args=(),
    schema="(Tensor x, Tensor? dropped, Tensor[] weights, Tensor?[] biases, Tensor[] a, Tensor[] b, float[] scalings)"
    " -> Tensor[]",
)
def lora_linear_products(
    x: torch.Tensor,
    dropped: torch.Tensor | None,
    weights: Tensors,
    biases: Sequence[torch.Tensor | None],
    a: Tensors,
    b: Tensors,
    scalings: Sequence[float],
) -> list[torch.Tensor]:
    """Compute Wᵢ x + bᵢ + sᵢ Bᵢ Aᵢ x for frozen projections i of the same x (rows, inputs): (rows, outputsᵢ) each.

    The last result is `low` (rows, ranks), the A x, only for the backward pass.

    Args:
        dropped: x after dropout, for the factors; None without dropout.
        weights: Wᵢ (outputsᵢ, inputs), and biases (outputsᵢ): neither gets a gradient.
        a: Aᵢ (rankᵢ, inputs).
        b: Bᵢ (outputsᵢ, rankᵢ).
        scalings: sᵢ.
    """
    low = (x if dropped is None else dropped) @ stack_lora_a(a).T
    bases = [partial(torch.nn.functional.linear, x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return [*add_lora_outputs(bases, low, a, b, scalings), low]


@lora_linear_products.register_fake
def _(x: Any, dropped: Any, weights: Any, biases: Any, a: Any, b: Any, scalings: Any) -> list[torch.Tensor]:
    return [x.new_empty(x.shape[0], width) for width in [*(len(weight) for weight in weights), sum(map(len, a))]]


@torch.library.custom_op(
    "surefit::lora_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor x, Tensor? dropped, Tensor low, Tensor[] weights, Tensor[] a, Tensor[] b,"
    " float[] scalings, bool through) -> Tensor[]",
)
def _gradients(
    grads: Tensors,
    x: torch.Tensor,
    dropped: torch.Tensor | None,
    low: torch.Tensor,
    weights: Tensors,
    a: Tensors,
    b: Tensors,
    scalings: Sequence[float],
    through: bool,
) -> list[torch.Tensor]:
    """Return the gradients of each B and of all A (ranks, inputs); `through`: of x, and of `dropped` where there is
    one."""
    d_low, d_b = backward_through_lora_b(grads, low, a, b, scalings)
    gradients = [*(gradient for gradient in d_b if gradient is not None), d_low.T @ (x if dropped is None else dropped)]
    if through:
        d_dropped = d_low @ stack_lora_a(a)
        # Where x itself went through the factors, everything is summed in one tensor.
        dx = grads[0] @ weights[0] if dropped is not None else d_dropped.addmm_(grads[0], weights[0])
        for dy, weight in zip(grads[1:], weights[1:], strict=True):
            dx.addmm_(dy, weight)
        gradients += [dx] if dropped is None else [dx, d_dropped]
    return gradients


@_gradients.register_fake
def _(
    grads: Any, x: Any, dropped: Any, low: Any, weights: Any, a: Any, b: Any, scalings: Any, through: bool
) -> list[torch.Tensor]:
    input_gradients = [torch.empty_like(tensor) for tensor in (x, dropped) if tensor is not None] if through else []
    return [*(factor.new_empty(factor.shape) for factor in b), x.new_empty(low.shape[1], x.shape[1]), *input_gradients]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, dropped, weights, biases, a, b, scalings = inputs
    ctx.save_for_backward(x, dropped, output[-1], *weights, *a, *b)
    ctx.scalings, ctx.through = scalings, any(ctx.needs_input_grad[:2])
    ctx.no_biases = None if None in biases else [None] * len(biases)


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    x, dropped, low, *matrices = ctx.saved_tensors
    count = len(ctx.scalings)
    weights, a, b = matrices[:count], matrices[count : 2 * count], matrices[2 * count :]
    gradients = _gradients(grads[:-1], x, dropped, low, weights, a, b, ctx.scalings, ctx.through)
    d_b, d_a, input_gradients = gradients[:count], gradients[count], [*gradients[count + 1 :], None, None]
    d_dropped = None if dropped is None else input_gradients[1]
    return input_gradients[0], d_dropped, [None] * count, ctx.no_biases, [*d_a.split([len(f) for f in a])], d_b, None


lora_linear_products.register_autograd(_backward, setup_context=_keep)
