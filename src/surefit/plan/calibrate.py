"""Measurement of a device in under two minutes: products, attention, copies, the cost of a launch, CUDA's own memory.

Written for CUDA and for CPUs alike, and so far run on CPUs only: no figure of a GPU has been measured with it yet.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from shutil import which

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from surefit.core.units import MIB
from surefit.facts.hardware import detect_gpus
from surefit.facts.sdpa import KERNELS
from surefit.plan.operations import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, OperatorCounter
from surefit.plan.profile import HEADS_WIDE, DeviceProfile, attention_key, cpu_name
from surefit.plan.trace import Recorder

Progress = Callable[[str], None]
TOKENS = {"cpu": 1024, "cuda": 8192}
"""Rows of the products: a micro batch of this many tokens, through square layers of these widths."""
WIDTHS = {"cpu": (64, 128, 256, 512, 1024, 2048), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384)}
COPIES = {"cpu": (1, 8, 64), "cuda": (1, 8, 64, 512, 2048)}
"""MiB of the tensor that is copied."""
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "float16", "bfloat16")}
SPREAD = 0.02
"""Standard deviation of the numbers multiplied: zeros would cost a GPU less power, and so run faster."""
MEASURE_SECONDS = 0.5
"""Seconds for each figure, divided over `TRIALS` trials."""
TRIALS = 5
SLOWEST_SECONDS = 1.5
"""Seconds of one product after which wider layers are left out."""
LENGTHS = {"cpu": (128, 512), "cuda": (512, 2048, 8192)}
HEADS = {"cpu": 2, "cuda": 16}
"""Attention heads: attention runs over TOKENS in examples of `LENGTHS` tokens."""
BACKENDS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cpu": "FLASH_ATTENTION"}
"""torch's names of the attention kernels whose rates training needs."""
TINY_LAYERS, TINY_WIDTH = 8, 8
"""Size of the model that launches are measured with: transformers' own, since its Python is most of the running code.
Plain layers of torch took two thirds of its time per kernel."""


def calibrate_device(progress: Progress = lambda text: None, measure_seconds: float | None = None) -> DeviceProfile:
    """Measure the first GPU that PyTorch sees, or else this CPU with the threads PyTorch uses.

    Args:
        progress: called with the name of each measurement.
        measure_seconds: seconds to measure each figure for; MEASURE_SECONDS by default.
    """
    start = time.perf_counter()
    seconds_per_figure = measure_seconds or MEASURE_SECONDS
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    used_before = _driver_used_bytes() if kind == "cuda" else None
    context = _context_bytes(used_before) if kind == "cuda" else None
    workspace = _workspace_bytes() if kind == "cuda" else None
    matmul = {}
    for dtype in DTYPES[kind]:
        progress(f"matrix products in {dtype}")
        matmul[dtype] = _products(kind, getattr(torch, dtype), seconds_per_figure)
    attention = {}
    for kernel, dtype in _attention_kernels(kind):
        progress(f"attention: {kernel} in {dtype}")
        attention.update(_attention(kind, kernel, dtype, seconds_per_figure))
    progress("copies")
    copy = [_copy(kind, mib * MIB, seconds_per_figure) for mib in COPIES[kind]]
    progress("launches")
    launch = _launch_seconds(kind, seconds_per_figure)
    return DeviceProfile(
        device=torch.cuda.get_device_name() if kind == "cuda" else cpu_name(torch.get_num_threads()),
        kind=kind,
        threads=torch.get_num_threads() if kind == "cpu" else None,
        torch=torch.__version__,
        driver=next((card.driver for card in detect_gpus()), None) if kind == "cuda" else None,
        matmul=matmul,
        copy=copy,
        launch=launch,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory if kind == "cuda" else None,
        context_bytes=context,
        workspace_bytes=workspace,
        seconds=time.perf_counter() - start,
        attention=attention,
    )


def _products(kind: str, dtype: torch.dtype, measure_seconds: float) -> list[tuple[float, float]]:
    """Return (FLOP, FLOP/s) of TOKENS × width times width × width."""
    curve = []
    for width in WIDTHS[kind]:
        x = (torch.randn(TOKENS[kind], width, device=kind) * SPREAD).to(dtype)
        weight = (torch.randn(width, width, device=kind) * SPREAD).to(dtype)
        seconds = _seconds(lambda x=x, weight=weight: torch.mm(x, weight), kind, measure_seconds)  # type: ignore[misc]
        flops = 2.0 * TOKENS[kind] * width * width
        curve.append((flops, flops / seconds))
        if seconds > SLOWEST_SECONDS:
            break
    return curve


def _attention_kernels(kind: str) -> list[tuple[str, str]]:
    """Return the (kernel, dtype) pairs that run on this device and are not switched off."""
    if kind == "cpu":
        return [("cpu", dtype) for dtype in DTYPES["cpu"]]
    capability = torch.cuda.get_device_capability()
    rows = [row for row in KERNELS if row.kernel in BACKENDS and row.oldest <= capability <= row.newest]
    return [(row.kernel, dtype) for row in rows for dtype in row.dtypes]


def _attention(kind: str, kernel: str, dtype: str, measure_seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Return (FLOP, FLOP/s) over the examples' lengths, forward and backward, causal and without a mask. The FLOP are
    counted as in `plan.operations`: for TOKENS in rows of a length, 2 × products × TOKENS × length × heads × width /
    2."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for width, length in itertools.product(HEADS_WIDE, LENGTHS[kind]):
        shape = (TOKENS[kind] // length, HEADS[kind], length, width)
        query, key, value = (
            torch.randn(shape, device=kind).to(getattr(torch, dtype)).requires_grad_() for _ in range(3)
        )
        flops = float(TOKENS[kind] * length * HEADS[kind] * width)
        with sdpa_kernel(getattr(SDPBackend, BACKENDS[kernel])):
            run = partial(scaled_dot_product_attention, query, key, value, is_causal=True)
            out = run()
            backward = partial(torch.autograd.grad, out, (query, key, value), torch.randn_like(out), retain_graph=True)
            for work, products in ((torch.no_grad()(run), FORWARD_PRODUCTS), (backward, BACKWARD_PRODUCTS)):
                name = attention_key(kernel, work is backward, width, dtype)
                seconds = _seconds(work, kind, measure_seconds)
                curves.setdefault(name, []).append((products * flops, products * flops / seconds))
    return curves


def _copy(kind: str, size: int, measure_seconds: float) -> tuple[float, float]:
    """Return (bytes, bytes/s) of a copy, with reads and writes both counted, as `operations.Operation` does."""
    source = torch.randn(size // 4, device=kind)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), kind, measure_seconds)
    return 2.0 * size, 2.0 * size / seconds


def _launch_seconds(kind: str, measure_seconds: float) -> float:
    """Return the seconds per kernel of a Llama so small that its arithmetic is negligible: transformers' Python,
    autograd and the launch."""
    shape = LlamaConfig(
        vocab_size=TINY_WIDTH, hidden_size=TINY_WIDTH, intermediate_size=TINY_WIDTH, num_hidden_layers=TINY_LAYERS,
        num_attention_heads=1, num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    model: torch.nn.Module = LlamaForCausalLM(shape)
    model.to(kind)
    ids = torch.zeros((1, TINY_WIDTH), dtype=torch.long, device=kind)

    def step() -> None:
        model(input_ids=ids).logits.sum().backward()

    recorder, tally = Recorder(), OperatorCounter({"step"})
    recorder.watch = tally.note
    with recorder:
        recorder.start("step")
        step()
    kernels = sum(times * operation.kernels for operation, times in tally.operations.items())
    return _seconds(step, kind, measure_seconds) / kernels


def _seconds(work: Callable[[], object], kind: str, measure_seconds: float) -> float:
    """Return the seconds of one call: the fastest trial of many calls each, after a warm-up; a disturbance can only
    slow it down."""
    work()
    once = _time_calls(work, 1, kind)
    calls = max(1, int(measure_seconds / TRIALS / max(once, 1e-7)))
    return min(_time_calls(work, calls, kind) for _ in range(TRIALS))


def _time_calls(work: Callable[[], object], calls: int, kind: str) -> float:
    _synchronize(kind)
    start = time.perf_counter()
    for _ in itertools.repeat(None, calls):
        work()
    _synchronize(kind)
    return (time.perf_counter() - start) / calls


def _synchronize(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def _driver_used_bytes() -> int | None:
    """Return the bytes in use on the first GPU according to the driver, before this process touches it."""
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        result = subprocess.run(
            [which("nvidia-smi") or "nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        return int(result.stdout.splitlines()[0]) * MIB
    return None


def _context_bytes(used_before: int | None) -> int | None:
    """Return the device bytes of a context with PyTorch's kernels; right only while nothing else starts or ends on the
    GPU."""
    if used_before is None:
        return None
    torch.zeros(1, device="cuda").add_(1)
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - used_before - torch.cuda.memory_reserved())


def _workspace_bytes() -> int:
    """Return the bytes that cuBLAS keeps of PyTorch's memory from its first product on."""
    x = torch.randn(512, 512, device="cuda", dtype=torch.float16)
    before = torch.cuda.memory_allocated()
    result = torch.mm(x, x)
    torch.cuda.synchronize()
    return max(0, torch.cuda.memory_allocated() - before - result.nbytes)
