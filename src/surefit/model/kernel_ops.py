"""The operators that have a fused kernel: on a GPU Liger's or our own, elsewhere the same arithmetic in PyTorch.

The device of the first argument decides which of the two runs, and only here. The forms in PyTorch are the reference
that the kernels are tested against. Operators of `torch.library`, so the compiler and a plan see each as one call, with
its arguments and its results.

RMS norm and rope are Liger's (github.com/linkedin/Liger-Kernel); its SwiGLU overwrites the forward pass's saved tensors
with the gradients, which is not possible in an operator that may be called twice. `triton_swiglu` has our own, for that
and because Liger has none that adds LoRA's part.
"""

from __future__ import annotations

from typing import Any

import torch

from surefit.facts.activations import MOST_RANK as MOST_RANK


def _fused(x: torch.Tensor) -> bool:
    return x.is_cuda


@torch.library.custom_op(
    "surefit::rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, float eps, float offset, bool whole) -> (Tensor, Tensor)",
)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (offset + weight) · x / √(mean(x²) + eps), in float32.

    Args:
        x: (…, n), of the weight's dtype.
        weight: (n).
        whole: compute the product with the weight in float32 as well (Gemma), not after rounding to x's dtype (Llama).

    Returns:
        (…, n), and for the backward pass the 1 / √… of each row, float32.
    """
    if _fused(x):
        from liger_kernel.ops.rms_norm import rms_norm_forward

        y, _, scale, *_ = rms_norm_forward(x.contiguous(), weight, eps, offset, _casting(whole), None)
        return y, scale
    copy = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(copy.pow(2).mean(-1, keepdim=True) + eps)
    normal = copy * scale
    y = (normal * (offset + weight.to(copy.dtype))).to(x.dtype) if whole else normal.to(x.dtype) * (offset + weight)
    return y, scale.flatten()


@rms_norm.register_fake
def _(x: Any, weight: Any, eps: float, offset: float, whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1], dtype=dtype)


@torch.library.custom_op(
    "surefit::rms_norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor weight, Tensor scale, float offset, bool whole, bool trained)"
    " -> (Tensor, Tensor)",
)
def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offset: float, whole: bool,
    trained: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of x and, where it is `trained`, of the weight; else an empty tensor in its place."""
    if _fused(x):
        from liger_kernel.ops.rms_norm import rms_norm_backward
        from liger_kernel.ops.utils import calculate_settings

        block, warps = calculate_settings(x.shape[-1])
        rows = x.contiguous().view(-1, x.shape[-1])
        dx, dw = rms_norm_backward(
            dy.contiguous(), rows, weight, scale, offset, _casting(whole), block, warps, False, None, trained
        )
        return dx.view(x.shape), dw if trained else weight.new_empty(0)
    copy, factor = x.to(scale.dtype), scale.view(*x.shape[:-1], 1)
    normal, through = copy * factor, dy.to(scale.dtype) * (offset + weight.to(scale.dtype))
    dx = factor * (through - normal * (through * normal).mean(-1, keepdim=True))
    dw = (dy.to(scale.dtype) * normal).flatten(0, -2).sum(0) if trained else weight.new_empty(0)
    return dx.to(x.dtype), dw.to(weight.dtype)


@_rms_norm_backward.register_fake
def _(
    dy: Any, x: Any, weight: Any, scale: Any, offset: float, whole: bool, trained: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if trained else 0)


def _casting(whole: bool) -> int:
    """Return Liger's number for the place where it rounds: 0 is Llama's way, 1 Gemma's (`_str_to_casting_mode`)."""
    return 1 if whole else 0


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _, offset, whole = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.offset, ctx.whole = offset, whole
    ctx.set_materialize_grads(False)  # else a row of zeros is made each time for the gradient of the scales


def _norm_gradients(ctx: Any, dy: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None, None, None
    x, weight, scale = ctx.saved_tensors
    trained = ctx.needs_input_grad[1]
    dx, dw = _rms_norm_backward(dy, x, weight, scale, ctx.offset, ctx.whole, trained)
    return dx, dw if trained else None, None, None, None


rms_norm.register_autograd(_norm_gradients, setup_context=_keep_norm)


@torch.library.custom_op(
    "surefit::rope",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor cos, Tensor sin, bool back) -> (Tensor, Tensor)",
)
def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions; `back`: in the opposite direction, for their gradients.

    Args:
        q: (batch, heads, tokens, width); k: the same with its own number of heads.
        cos, sin: (batch or 1, tokens, width), whose second halves are their first.

    Returns:
        The same shapes, laid out as (batch, tokens, heads, width).
    """
    if _fused(q):
        from liger_kernel.ops.rope import rope_backward, rope_forward

        # Liger rotates in place.
        q, k = (
            states.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) for states in (q, k)
        )
        rotated = rope_backward(q, k, cos, sin) if back else rope_forward(q, k, cos, sin)
        return rotated[0], rotated[1]
    cos, sin = cos[:, None], (-sin if back else sin)[:, None]
    q, k = (states * cos + _half_turned(states) * sin for states in (q, k))
    return _by_tokens(q), _by_tokens(k)


@rope.register_fake
def _(q: Any, k: Any, cos: Any, sin: Any, back: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(states.new_empty(states.transpose(1, 2).shape).transpose(1, 2) for states in (q, k))


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _by_tokens(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _keep_rope(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[2:4])
    ctx.back = inputs[4]


def _rope_gradients(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[Any, ...]:
    return *rope(dq, dk, *ctx.saved_tensors, not ctx.back), None, None, None


rope.register_autograd(_rope_gradients, setup_context=_keep_rope)


@torch.library.custom_op(
    "surefit::swiglu",
    mutates_args=(),
    schema="(Tensor gate, Tensor up, Tensor? low, Tensor[] b, float[] scalings) -> Tensor",
)
def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    low: torch.Tensor | None,
    b: list[torch.Tensor],
    scalings: list[float],
) -> torch.Tensor:
    """Compute silu(g) · u, where g and u are gate and up, each with its LoRA part added: s · low Bᵀ, for which nothing
    of the size of g is written. Sums and products in float32.

    Autograd differentiates it without factors; with them `fused_lora` does.

    Args:
        gate, up: (…, width); with factors (rows, width).
        low: A x of both, (rows, r_gate + r_up); None without factors.
        b: B of gate and of up, (width, r) each; or none.
        scalings: s of gate and of up; or none.
    """
    if _fused(gate):
        from surefit.model import triton_swiglu

        return triton_swiglu.forward(gate, up, low, b, scalings)
    g, u = _with_factors(gate, up, low, b, scalings)
    return (torch.nn.functional.silu(g) * u).to(gate.dtype)


@swiglu.register_fake
def _(gate: Any, up: Any, low: Any, b: Any, scalings: Any) -> torch.Tensor:
    return gate.new_empty(gate.shape)  # type: ignore[no-any-return]


@torch.library.custom_op(
    "surefit::swiglu_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor gate, Tensor up, Tensor? low, Tensor[] b, float[] scalings) -> (Tensor, Tensor)",
)
def swiglu_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    low: torch.Tensor | None,
    b: list[torch.Tensor],
    scalings: list[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `swiglu`'s g and u, which are the gradients of gate and up; g and u are recomputed."""
    if _fused(gate):
        from surefit.model import triton_swiglu

        return triton_swiglu.backward(dy, gate, up, low, b, scalings)
    g, u = _with_factors(gate, up, low, b, scalings)
    dy, sigmoid = dy.to(g.dtype), torch.sigmoid(g)
    slope = sigmoid * (1 + g * (1 - sigmoid))
    return (dy * u * slope).to(gate.dtype), (dy * g * sigmoid).to(up.dtype)


@swiglu_backward.register_fake
def _(dy: Any, gate: Any, up: Any, low: Any, b: Any, scalings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _with_factors(
    gate: torch.Tensor, up: torch.Tensor, low: torch.Tensor | None, b: list[torch.Tensor], scalings: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    compute_dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(compute_dtype), up.to(compute_dtype)
    if low is None:
        return g, u
    parts = torch.split(low.to(compute_dtype), [factor.shape[1] for factor in b], dim=1)
    g, u = (
        base + scaling * (part @ factor.to(compute_dtype).T)
        for base, part, factor, scaling in zip((g, u), parts, b, scalings, strict=True)
    )
    return g, u


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, low, _, _ = inputs
    assert low is None, "fused_lora differentiates it with factors"
    ctx.save_for_backward(gate, up)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return *swiglu_backward(dy, *ctx.saved_tensors, None, [], []), None, [], []


swiglu.register_autograd(_gradients, setup_context=_keep_inputs)
