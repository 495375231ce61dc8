"""A trial of the features of the installed PyTorch on this machine.

`surefit doctor` runs this file as a script, in a process that may crash or hang. It must not import SureFit, which may
be missing from the interpreter. Each line of its output is one JSON object, written at once: {"try": name} before an
attempt and {"name", "ok", "detail"} after it, so that an attempt without a result is the one that the process died of.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

TOLERANCE = 0.05
"""Largest difference between an attention in bfloat16 and the textbook formula in float32, on values of about 1."""
SHAPE = (2, 4, 128, 64)
"""Rows, heads, tokens and head dimension of the attention that is tried."""


def main() -> None:
    """Try everything, the cheapest and most informative first."""
    if not attempt("torch", describe_torch_build):
        return
    for name, action in (
        ("sdpa", sdpa),
        *((f"sdpa {name}", lambda name=name: sdpa(name)) for name in gpu_kernels()),
        ("gloo", lambda: collective("gloo", "cpu")),
        ("nccl", nccl),
        ("varlen", varlen),
        ("flex", flex),
        *([("flash-attn", flash_attn)] if importlib.util.find_spec("flash_attn") else []),
    ):
        attempt(name, action)


def attempt(name: str, action: Callable[[], Any]) -> bool:
    """Run `action` and report what it returns, or the last line of its error."""
    print_record({"try": name})
    try:
        detail, ok = action(), True
    except Exception as error:
        # Any error is a valid result of the attempt.
        lines = str(error).strip().splitlines() or [""]
        detail, ok = f"{type(error).__name__}: {lines[0]}"[:200], False
    print_record({"name": name, "ok": ok, "detail": detail})
    return ok


def print_record(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def describe_torch_build() -> dict[str, Any]:
    """Return version and build, and whether there is a GPU for it."""
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "available": torch.cuda.is_available(),
        "gpus": torch.cuda.device_count(),
    }


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_kernels() -> tuple[str, ...]:
    """Return the kernels behind sdpa that are tried one by one."""
    return ("flash", "cudnn", "efficient") if device() == "cuda" else ()


def inputs() -> tuple[Any, Any, Any]:
    """Return query, key and value, each of `SHAPE`, in bfloat16."""
    import torch

    torch.manual_seed(0)
    query, key, value = torch.randn(3, *SHAPE, device=device(), dtype=torch.bfloat16).unbind()
    return query, key, value


def against_reference(found: Any, query: Any, key: Any, value: Any) -> str:
    """Compare a causal attention's result, of `SHAPE`, with softmax(QKᵀ/√d)V in float32."""
    import torch

    scores = query.float() @ key.float().transpose(-1, -2) / SHAPE[-1] ** 0.5
    future = torch.ones(SHAPE[2], SHAPE[2], dtype=torch.bool, device=scores.device).triu(1)
    expected = scores.masked_fill(future, float("-inf")).softmax(-1) @ value.float()
    error = (found.float() - expected).abs().max().item()
    if not error < TOLERANCE:
        raise ValueError(f"runs, but its result is off by {error:.2g}")
    return "runs"


def sdpa(kernel: str | None = None) -> str:
    """Try torch's own attention; on a GPU also one kernel of it."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    query, key, value = inputs()
    names = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
    if kernel is None:
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in a run (model/sdpa.py); cuDNN is tried by itself below
        return against_reference(scaled_dot_product_attention(query, key, value, is_causal=True), query, key, value)
    with sdpa_kernel(getattr(SDPBackend, names[kernel])):
        return against_reference(scaled_dot_product_attention(query, key, value, is_causal=True), query, key, value)


def flex() -> str:
    """Try attention with a mask in Python; uncompiled here, which takes one second instead of twenty."""
    import warnings

    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = inputs()
    tokens = SHAPE[2]
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=device())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = flex_attention(query, key, value, block_mask=mask)
    return against_reference(result, query, key, value) + ", uncompiled"


def varlen() -> str:
    """Try torch's attention over packed documents; GPUs only."""
    if device() == "cpu":
        return "not for CPUs"
    import torch
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = inputs()
    rows, heads, tokens, width = SHAPE
    q, k, v = (states.transpose(1, 2).reshape(rows * tokens, heads, width) for states in (query, key, value))
    ends = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device="cuda")
    result = varlen_attn(q, k, v, ends, ends, tokens, tokens, window_size=(-1, 0))
    assert isinstance(result, torch.Tensor)
    return against_reference(result.reshape(rows, tokens, heads, width).transpose(1, 2), query, key, value)


def flash_attn() -> str:
    """Try the package of that name, where it is installed; GPUs only."""
    if device() == "cpu":
        return "not for CPUs"
    module = importlib.import_module("flash_attn")
    query, key, value = inputs()
    transposed = [states.transpose(1, 2) for states in (query, key, value)]
    return against_reference(module.flash_attn_func(*transposed, causal=True).transpose(1, 2), query, key, value)


def nccl() -> str:
    """Try collectives between GPUs."""
    import torch.distributed as dist

    if device() == "cpu":
        return "not for CPUs"
    if not dist.is_nccl_available():
        raise RuntimeError("this build of torch has no NCCL")
    return collective("nccl", "cuda")


def collective(backend: str, where: str) -> str:
    """Run one all-reduce in a group of this process alone: the library loads, and finds a network interface."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.ones(1, device=where)
        dist.all_reduce(tensor)
        if tensor.item() != 1:
            raise ValueError(f"the sum over one process is {tensor.item()}")
    finally:
        dist.destroy_process_group()
    return "runs"


if __name__ == "__main__":
    main()
