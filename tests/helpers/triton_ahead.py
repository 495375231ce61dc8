"""Triton kernels compiled for GPUs that are not here: registers, spilled bytes and shared memory.

    python tests/helpers/triton_ahead.py

prints the table of docs/kernels.md. Needs the extra `kernels`, and no GPU: Triton brings NVIDIA's assembler.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from liger_kernel.ops import rms_norm, rope
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from surefit.model import triton_float8, triton_swiglu

CAPABILITIES = (75, 80, 89, 90, 100)
SHARED_LIMIT = {75: 64, 80: 163, 89: 99, 90: 227, 100: 227}
"""KiB of shared memory that a block of threads may have (CUDA C++ Programming Guide, technical specifications)."""
WIDTHS = {"1b": (2048, 8192, 32, 8, 64), "8b": (4096, 14336, 32, 8, 128)}
"""Hidden size, MLP, query heads, key heads and the width of a head."""
STRIDES_AND_COUNTS = "i32"
FLOAT8 = {
    "rows_kernel": {"q": "*fp8e4nv", "scale": "*fp32", "x": "*bf16"},
    "weights_kernel": {"w": "*bf16", "q": "*u8", "scale": "*fp32"},
}
"""The pointers of kernels whose numbers are not all of one type."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Kernel(NamedTuple):
    name: str
    function: Any
    constants: dict[str, Any]
    warps: int


class Compiled(NamedTuple):
    """Registers per thread; bytes of local memory per thread, where spilled registers go; bytes of shared memory of a
    block."""

    registers: int
    spilled: int
    shared: int


def kernels(dtype: str, capability: int) -> Iterator[Kernel]:
    """Every kernel as a step starts it there, by the shapes of `WIDTHS`."""
    element = {"fp16": triton.language.float16, "bf16": triton.language.bfloat16}[dtype]
    for model, (hidden, _, heads, key_heads, width) in WIDTHS.items():
        block, warps = rms_norm.calculate_settings(hidden)
        norm = {"casting_mode": 0, "elementwise_affine": True, "BLOCK_SIZE": block}
        yield Kernel(f"RMS norm, {model}", rms_norm._rms_norm_forward_kernel, norm, warps)
        back = norm | {"X_dtype": element, "COMPUTE_DW": False, "dW_ptr": None}
        yield Kernel(f"RMS norm backward, {model}", rms_norm._rms_norm_backward_kernel, back, warps)
        turn = {
            "bs": 1, "cos_bs": 1, "n_qh": heads, "n_kh": key_heads, "hd": width, "pad_n_qh": heads,
            "pad_n_kh": key_heads, "pad_hd": width, "pad_rd": width, "rd": width, "BLOCK_SIZE": heads,
        }  # fmt: skip
        for back_name, backward in (("", False), (" backward", True)):
            yield Kernel(f"rope{back_name}, {model}", rope._triton_rope, turn | {"BACKWARD_PASS": backward}, 4)
    yield Kernel("weights from float8", triton_float8.weights_kernel, {"BLOCK": triton_float8.BLOCK},
                 triton_float8.WARPS)  # fmt: skip
    if capability >= 89:
        for model, (_, mlp, *_) in WIDTHS.items():
            row = triton.next_power_of_2(mlp)
            name = f"rows to float8, {model}"
            yield Kernel(name, triton_float8.rows_kernel, {"BLOCK": row}, triton_float8.num_warps_for_block(row))
    for rank in (0, 16, 128):
        block = {
            "ROWS": triton_swiglu.ROWS, "COLUMNS": triton_swiglu.COLUMNS,
            "STEP": triton_swiglu.rank_block_size([rank] if rank else []),
        }  # fmt: skip
        for name, function in (
            ("", triton_swiglu.forward_kernel),
            (" backward", triton_swiglu.backward_kernel),
        ):
            yield Kernel(f"SwiGLU{name}, rank {rank}", function, block, triton_swiglu.WARPS)


def compiled(kernel: Kernel, capability: int, dtype: str) -> Compiled:
    """What the machine code of one kernel takes, built as a launch with these arguments builds it."""
    names = kernel.function.arg_names
    types = FLOAT8.get(kernel.function.fn.__name__, {})
    signature = {
        name: "constexpr" if name in kernel.constants else types.get(name) or _type(name, dtype) for name in names
    }
    # A launch says of pointers and of sizes that are multiples of 16 that they are.
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if _aligned(signature[name])}
    source = ASTSource(kernel.function, signature, constexprs=kernel.constants, attrs=divisible)
    target = GPUTarget("cuda", capability, 32)
    built = triton.compile(source, target=target, options={"num_warps": kernel.warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {what: int(number) for what, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return Compiled(found["REG"], found["STACK"] + found["LOCAL"], int(built.metadata.shared))


def _type(name: str, dtype: str) -> str:
    if name in ("cos", "sin", "y", "dy", "gate", "up", "low", "gate_b", "up_b", "d_gate", "d_up"):
        return f"*{dtype}"
    if name.endswith("_ptr"):
        return "*fp32" if name == "RSTD_ptr" else f"*{dtype}"
    return "fp32" if name in ("eps", "offset") or name.endswith("_scaling") else STRIDES_AND_COUNTS


def _aligned(kind: str) -> bool:
    return kind.startswith("*") or kind == STRIDES_AND_COUNTS


def dtype_of(capability: int) -> str:
    """What a run computes in there."""
    return "bf16" if capability >= 80 else "fp16"


def main() -> None:
    print(f"Triton {triton.__version__}: registers per thread / bytes spilled / bytes of shared memory")
    for kernel in kernels("bf16", CAPABILITIES[-1]):
        row = []
        for capability in CAPABILITIES:
            dtype = dtype_of(capability)
            same = next((each for each in kernels(dtype, capability) if each.name == kernel.name), None)
            if same is None:
                continue
            found = compiled(same, capability, dtype)
            row.append(f"sm_{capability} {found.registers}/{found.spilled}/{found.shared}")
        print(f"{kernel.name}: {', '.join(row)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
