"""The fused kernels in Triton's interpreter, on a CPU, against the same operators in float64.

    TRITON_INTERPRET=1 python tests/helpers/triton_interpreted.py

prints a JSON object: kernel, dtype and shape → the error of each result and gradient, relative to its norm. Needs the
extra `kernels`. The variable has to be there before Triton is imported, hence a process of its own.

The interpreter of Triton 3.9 computes with bfloat16 as if its bits were integers, gives kernels floats as
Python's, which have no `.to`, and has none of the device library's functions, of which Liger takes rsqrt. All three are
set right here; can go when it does so itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from liger_kernel.ops import rms_norm
from triton.runtime import interpreter

from surefit.model import kernel_ops

ROWS_AND_WIDTHS = [(1, 5), (3, 100), (7, 129), (65, 130), (130, 257)]
RANKS = [(), (1, 1), (3, 5), (16, 16), (100, 7)]
HEADS = [(1, 1, 1, 2), (2, 3, 1, 16), (1, 7, 2, 80), (2, 5, 4, 64)]
"""Batch, tokens, key heads (three times as many query heads) and the width of a head."""
DEVICE = "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _float32(handle: Any) -> Any:
    if handle.dtype.scalar.name != "bf16":
        return handle
    values = (handle.data.astype(numpy.uint32) << 16).view(numpy.float32)
    return interpreter.TensorHandle(values, tl.float32)


@triton.jit
def rsqrt(x):
    return tl.rsqrt(x)


def mend() -> None:
    builder: Any = interpreter.InterpreterBuilder
    dot, binary, convert = builder.create_dot, builder.binary_op, interpreter._implicit_cvt

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, _float32(a), _float32(b), *others)

    def binary_op(self: Any, left: Any, right: Any, operator: Any) -> Any:
        if left.dtype.scalar.name != "bf16":
            return binary(self, left, right, operator)
        result = numpy.asarray(operator(_float32(left).data, _float32(right).data))
        rounded = torch.from_numpy(result).bfloat16().view(torch.int16).numpy().view(numpy.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    def implicit(arg: Any) -> Any:
        if type(arg) is not float:
            return convert(arg)
        handle = interpreter.TensorHandle(numpy.array([arg], dtype=numpy.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    rms_norm.rsqrt = rsqrt
    builder.create_dot, builder.binary_op, interpreter._implicit_cvt = create_dot, binary_op, implicit


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def compare(run: Callable[..., Any], tensors: list[torch.Tensor], dtype: torch.dtype) -> list[float]:
    """Errors of `run`'s results, and of its gradients where it has any, for the same numbers in `dtype`."""
    results: list[list[torch.Tensor]] = []
    for kind in (dtype, torch.float64):
        given = [tensor.to(DEVICE, dtype).to(kind).requires_grad_() for tensor in tensors]
        out = [result for result in run(*given) if result.is_floating_point()]
        again = torch.Generator().manual_seed(1)
        weights = [torch.randn(result.shape, generator=again).to(DEVICE, dtype).to(kind) for result in out]
        pairs = [(result, weight) for result, weight in zip(out, weights, strict=True) if result.requires_grad]
        grads: tuple[torch.Tensor, ...] = ()
        if pairs:
            grads = torch.autograd.grad([r for r, _ in pairs], given, [w for _, w in pairs], allow_unused=True)
        results.append([*(result.detach() for result in out), *(grad for grad in grads if grad is not None)])
    assert len(results[0]) == len(results[1])
    return [error(found, expected) for found, expected in zip(*results, strict=True)]


def cases(dtype: torch.dtype) -> Iterator[tuple[str, list[float]]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    for rows, width in ROWS_AND_WIDTHS:
        for offset, whole in ((0.0, False), (1.0, True), (0.0, True)):

            def norm(x: Any, weight: Any, offset: float = offset, whole: bool = whole) -> Any:
                return kernel_ops.rms_norm(x, weight, 1e-5, offset, whole)[:1]

            name = f"RMS norm {'whole' if whole else 'rounded'} {offset:g}+w, {rows} × {width}"
            yield name, compare(norm, [normal(rows, width), normal(width)], dtype)
    for batch, tokens, heads, width in HEADS:
        q, k = (normal(batch, tokens, count, width).transpose(1, 2) for count in (3 * heads, heads))
        angle = normal(batch, tokens, width // 2).repeat(1, 1, 2)

        def turned(q: Any, k: Any, angle: torch.Tensor = angle) -> Any:
            cos, sin = (each.to(DEVICE, dtype).to(q.dtype) for each in (angle.cos(), angle.sin()))
            return kernel_ops.rope(q, k, cos, sin, False)

        yield f"rope, {batch} × {tokens}, {3 * heads} and {heads} heads of {width}", compare(turned, [q, k], dtype)
    for (rows, width), ranks in zip(ROWS_AND_WIDTHS, RANKS, strict=True):
        scalings = [0.5, 2.0][: len(ranks)]
        tensors = [normal(rows, width), normal(rows, width), normal(rows, width)]
        if ranks:
            tensors += [normal(rows, sum(ranks)), *(0.3 * normal(width, rank) for rank in ranks)]

        def gated(dy: Any, gate: Any, up: Any, *factors: Any, scalings: list[float] = scalings) -> Any:
            low, b = (factors[0], list(factors[1:])) if factors else (None, [])
            with torch.no_grad():
                backward = kernel_ops.swiglu_backward(dy, gate, up, low, b, scalings)
                if low is not None:
                    return kernel_ops.swiglu(gate, up, low, b, scalings), *backward
            return kernel_ops.swiglu(gate, up, None, [], []), *backward

        yield f"SwiGLU, {rows} × {width}, ranks {ranks}", compare(gated, tensors, dtype)


def every_case() -> dict[str, list[float]]:
    return {f"{dtype}: {name}": errors for dtype in DTYPES for name, errors in cases(dtype)}


def main() -> None:
    mend()
    kernel_ops._fused = lambda x: x.dtype != torch.float64
    print(json.dumps(every_case()))


if __name__ == "__main__":
    main()
