"""The float8 kernels in Triton's interpreter, on a CPU, against PyTorch's operators: bit for bit for the same scales.

    TRITON_INTERPRET=1 python tests/helpers/float8_interpreted.py

prints a JSON object: case → how many results differ. The interpreter of Triton 3.9 cuts off what a 16- or 8-bit number
cannot hold, where a GPU rounds to the nearest, ties to even: PyTorch's conversion takes its place here. Can go when it
rounds. What is tested is all around the conversion, and on a GPU the conversion too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import triton.language as tl
from triton.runtime import interpreter

from surefit.model import float8_ops, triton_float8
from surefit.model.quantize import to_float8

SHAPES = [(1, 5), (3, 100), (65, 130), (2, 1500)]
TARGETS = {"bf16": (torch.bfloat16, torch.int16), "fp8e4nv": (torch.float8_e4m3fn, torch.uint8)}


def mend() -> None:
    convert: Any = interpreter._convert_float

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.name not in TARGETS:
            return convert(data, source, target, mode)
        exact = data if source == tl.float32 else convert(data, source, tl.float32, mode).view(numpy.float32)
        dtype, stored = TARGETS[target.name]
        return torch.from_numpy(exact.reshape(data.shape)).to(dtype).view(stored).numpy()

    interpreter._convert_float = rounding  # type: ignore[attr-defined]


def differing(found: torch.Tensor, expected: torch.Tensor) -> int:
    same = found.view(torch.uint8) == expected.view(torch.uint8)
    return int((~same).sum())


def cases(device: str) -> Iterator[tuple[str, int]]:
    generator = torch.Generator().manual_seed(0)
    every = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    rounded = torch.cat([torch.tensor([448.0], dtype=torch.bfloat16), every[every <= 448], -every[every <= 448]])
    inputs = {"every number up to 448": rounded[None]}
    for count, width in SHAPES:
        numbers = torch.randn(count, width, generator=generator) * torch.logspace(-20, 20, count)[:, None]
        numbers[0, :3] = 0
        inputs[f"{count} × {width}"] = numbers.bfloat16()
    for name, x in inputs.items():
        x = x.to(device)
        q, scale = triton_float8.launch_rows_kernel(x)
        torch.testing.assert_close(scale, float8_ops.quantize_rows(x)[1], rtol=2e-7, atol=0)
        yield f"rows, {name}", differing(q, torch.div(x, scale, out=torch.empty_like(x)).to(float8_ops.FP8))
        stored, of_stored = to_float8(x)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            found = triton_float8.launch_weights_kernel(stored, of_stored, dtype)
            yield (
                f"weights in {dtype}, {name}",
                differing(found, float8_ops.dequantize_weights(stored, of_stored, dtype)),
            )
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F].view(float8_ops.FP8)[None].to(device)  # without the two for "not a number"
    one = torch.ones(1, 1, device=device)
    yield "every code", differing(triton_float8.launch_weights_kernel(codes, one, torch.float32), codes.float())


if __name__ == "__main__":
    mend()
    print(json.dumps(dict(cases("cpu"))))
