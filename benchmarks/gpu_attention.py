"""What attention's kernels do and cost on a GPU: cuDNN's against the others, by themselves and in decoding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

NAN_LENGTHS = (640, 704, 768)
"""The middle one is 64 beyond a multiple of 128."""
SHAPES = (1000, 1008, 1016, 1024, 1032, 1040, 1048, 1056)
WIDTHS, LENGTHS, TOKENS = (64, 128), (2048, 8192, 32_768), 32_768
HEADS, KEY_HEADS = 32, 8
NEW_TOKENS = 64
NO_KERNEL = "No available kernel"
SECONDS = 0.5


@contextmanager
def only(*kernels: str) -> Iterator[None]:
    """Let scaled_dot_product_attention choose among these: cudnn, flash, efficient, math."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    names = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
    with sdpa_kernel([getattr(SDPBackend, names[kernel]) for kernel in kernels]):
        yield


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def non_finite(length: int) -> dict[str, Any]:
    """Numbers of grad_q that are not finite, with a mask and a log-sum-exp below -89 (pytorch#196678)."""
    found: dict[str, int | None] = {}
    for kernel in ("cudnn", "efficient"):
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, 1, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        query, key = query * 0.1, key * 0.1
        query[..., 0], key[..., 0] = 1.0, -120 * math.sqrt(64)
        query.requires_grad_()
        mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
        try:
            with only(kernel):
                out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            out.backward(torch.randn_like(out))
        except RuntimeError as error:
            if NO_KERNEL not in str(error):
                raise
            found[kernel] = None
            continue
        assert query.grad is not None
        found[kernel] = int((~query.grad.isfinite()).sum())
    return {"non_finite": found, "numbers": length * 64}


def new_shapes(cudnn: bool) -> dict[str, Any]:
    """Milliseconds of the first and the second call of each of eight lengths, forward and backward, with a mask."""
    kernel, first, second = "cudnn" if cudnn else "efficient", [], []
    with only(kernel):
        for length in (512, *SHAPES):  # the first one starts the library
            mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
            shape = (4, HEADS, length, 64)
            tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
            for times in (first, second):
                start = now()
                F.scaled_dot_product_attention(*tensors, attn_mask=mask).sum().backward()
                times.append(round(1000 * (now() - start), 3))
    return {"first_ms": first[1:], "second_ms": second[1:]}


def decode(job: dict[str, Any], cudnn: bool) -> dict[str, Any]:
    """64 greedy tokens for two rows, one of them padded: twice, since cuDNN plans what it meets for the first time."""
    from throughput_stack import Job, random_model

    model = random_model(Job(job)).eval()
    device = next(model.parameters()).device
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    prompt = torch.randint(3, 500, (2, 48), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(prompt)
    mask[1, :7] = 0
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    seconds = []
    try:
        warm = torch.ones_like(prompt[:, :16])
        model.generate(warm, attention_mask=warm, pad_token_id=0, max_new_tokens=4, do_sample=False)
        for _ in range(2):
            start = now()
            model.generate(prompt, attention_mask=mask, pad_token_id=0, **options)
            seconds.append(round(now() - start, 3))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    return {"tokens": NEW_TOKENS, "first_seconds": seconds[0], "second_seconds": seconds[1]}


def rates_wanted(gpu: bool) -> Iterator[tuple[int, int, str]]:
    """(head dimension, tokens of a row, kernel)."""
    for width in WIDTHS:
        for length in LENGTHS if gpu else (64,):
            for kernel in ("varlen", "flash", "cudnn") if gpu else ("math",):
                yield width, length, kernel


def rate(width: int, length: int, kernel: str, gpu: bool) -> dict[str, Any]:
    """FLOP/s of causal attention without a mask: forward 4 · T² · width / 2 per head, backward 2.5 times that."""
    rows = TOKENS // length if gpu else 1
    run, tensors = _call(width, length, kernel, rows, "cuda" if gpu else "cpu")
    try:
        out = run()
    except RuntimeError as error:
        if NO_KERNEL not in str(error):
            raise
        return {"unavailable": str(error)[:200]}
    gradient = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, tensors, gradient, retain_graph=True)

    with torch.no_grad():
        forward_seconds = _seconds(run, SECONDS if gpu else 0.01)
    backward_seconds = _seconds(backward, SECONDS if gpu else 0.01)
    flops = rows * HEADS * 2.0 * length * length * width
    return {
        "forward_seconds": forward_seconds, "backward_seconds": backward_seconds,
        "forward_flops": flops / forward_seconds, "backward_flops": 2.5 * flops / backward_seconds,
    }  # fmt: skip


def _call(width: int, length: int, kernel: str, rows: int, device: str) -> tuple[Callable[[], Any], list[Any]]:
    """(the forward pass, what it reads): varlen is what packed training runs, the others one kernel of torch's."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = [(rows, heads, length, width) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    if kernel == "varlen":
        shapes = [(1, heads, rows * length, width) for _, heads, _, _ in shapes]
    tensors = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    if kernel == "varlen":
        return _varlen(tensors, rows, length), tensors

    def run() -> Any:
        with only(kernel):
            return F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

    return run, tensors


def _varlen(tensors: list[Any], rows: int, length: int) -> Callable[[], Any]:
    from surefit.model.varlen import varlen_attention

    starts = torch.arange(rows + 1, device=tensors[0].device, dtype=torch.int32) * length
    documents: dict[str, Any] = {"cu_seq_lens_q": starts, "max_length_q": length, "document_lengths": rows * (length,)}
    module = torch.nn.Module()
    return lambda: varlen_attention(module, *tensors, None, **documents)[0]


def _seconds(work: Callable[[], Any], least: float) -> float:
    """Of one call, the best of five trials."""
    work()
    start = now()
    work()
    calls = max(1, int(least / 5 / max(now() - start, 1e-6)))
    trials = []
    for _ in range(5):
        start = now()
        for _ in range(calls):
            work()
        trials.append((now() - start) / calls)
    return min(trials)
