"""The SDPA choice: kernels that torch's `scaled_dot_product_attention` runs on a GPU, for plan, training and doctor.

For torch 2.11 to 2.13, which behave alike: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (`select_sdp_backend`
and its `check_…` functions) and transformers/sdp_utils_cpp.h, which the wheel contains. torch 2.14 differs: its
efficient kernel supports grouped heads (github.com/pytorch/pytorch/pull/191085). Not yet tried on a GPU; tests/cuda
compares it with those conditions, written out once more.

Kernels in the order in which torch tries them:

- cudnn: first on Hopper and on data-center Blackwell (cuDNN above 9.15, which torch 2.11's wheels contain). Off, see
  `OFF`.
- flash: FlashAttention 2; no mask, 16 bits.
- efficient: supports masks and float32, but needs a key head for every query head. Where flash does not run, grouped
  heads are repeated for it: `kernel_needs_repeated_kv`.
- math: matrix products that hold all logits, in float32: memory that grows with the square of the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

Capability = tuple[int, int]
Kernel = Literal["cudnn", "flash", "efficient", "math"]
HALF, BOTH_HALVES = ("float16",), ("float16", "bfloat16")
NEWEST = (12, 1)
"""Last compute capability that flash and efficient support: `check_sm_version<…, sm121>`."""

OFF: dict[Kernel, str] = {"cudnn": "github.com/pytorch/pytorch/issues/196678"}
"""Kernels that are switched off when CUDA is started (`model/sdpa.py`), and why.

cuDNN before 9.26, which no torch up to 2.13 contains: gradients of queries are NaN with a mask, lengths of 64 beyond a
multiple of 128 and very negative logits, on Hopper; greedy answers silently differ on Blackwell with fewer than 8 key
heads (github.com/pytorch/pytorch/issues/193893); every new shape costs about a second, and generation has one per token
(github.com/modelscope/FunASR/issues/3704). Mask-free causal attention of fixed shape has no such fault, and is faster
(github.com/huggingface/transformers/pull/48163), but the switch is per process, and no step knows beforehand that all
its batches are of that kind: it is off everywhere. To be checked again with a torch that contains 9.26.
"""


class AttentionCall(NamedTuple):
    """Properties of an attention call that determine its kernel.

    Attributes:
        capability: compute capability of the GPU.
        dtype: dtype of queries, keys and values, such as "bfloat16".
        width, value_width: width of a head of queries and keys, and of a head of values.
        masked: a mask is passed; causal attention needs none.
        grouped: fewer key heads than query heads, and `enable_gqa`.
        trained: there will be a backward pass.
        uneven: causal, with a different number of keys than queries.
        dropout: dropout of the attention weights.
    """

    capability: Capability
    dtype: str
    width: int
    value_width: int
    masked: bool = False
    grouped: bool = False
    trained: bool = True
    uneven: bool = False
    dropout: bool = False


@dataclass(frozen=True)
class KernelSupport:
    """Conditions under which a kernel runs.

    Attributes:
        oldest, newest: first and last GPUs, as compute capabilities.
        dtypes: dtypes of the tensors.
        masked, grouped, uneven: whether it supports such calls.
        widest: largest width of a head; None: any.
        multiple: number that a head's width must be a multiple of.
        alike: values must be as wide as keys.
        untrained: widths above the first up to the second have no backward pass; with dropout none above the first.
        share: share of the rate of matrix products that its forward pass reaches, with heads of 128; see
            `share_of_products`.
    """

    kernel: Kernel
    oldest: Capability
    newest: Capability
    dtypes: tuple[str, ...]
    masked: bool
    grouped: bool
    uneven: bool
    share: float
    widest: int | None = None
    multiple: int = 1
    alike: bool = False
    untrained: tuple[int, int] | None = None

    def takes(self, call: AttentionCall) -> bool:
        return (
            self.oldest <= call.capability <= self.newest
            and call.dtype in self.dtypes
            and (self.masked or not call.masked)
            and (self.grouped or not call.grouped)
            and (self.uneven or not call.uneven)
            and (self.widest is None or max(call.width, call.value_width) <= self.widest)
            and not (call.width % self.multiple or call.value_width % self.multiple)
            and not (self.alike and call.width != call.value_width)
            and not (call.trained and self._has_no_backward(call))
        )

    def _has_no_backward(self, call: AttentionCall) -> bool:
        if self.untrained is None:
            return False
        above, up_to = self.untrained
        return call.width > above and (call.width <= up_to or call.dropout)


def _flash(
    oldest: Capability, newest: Capability, share: float, untrained: tuple[int, int] | None = None
) -> KernelSupport:
    """Return the row of FlashAttention 2: `can_use_flash_attention`; attention.cpp pads widths to multiples of 8."""
    return KernelSupport(
        "flash", oldest, newest, BOTH_HALVES, masked=False, grouped=True, uneven=False, share=share, widest=256,
        alike=True, untrained=untrained,
    )  # fmt: skip


def _efficient(oldest: Capability, newest: Capability, dtypes: tuple[str, ...], multiple: int) -> KernelSupport:
    """Return the row of the efficient kernel: `can_use_mem_efficient_attention`; `multiple` is
    `minimum_gemm_alignment`."""
    return KernelSupport(
        "efficient", oldest, newest, dtypes, masked=True, grouped=False, uneven=True, share=0.35, multiple=multiple
    )


NO_BACKWARD = (192, 224)
"""`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`"""
AMPERE_RATE, HOPPER_RATE = 0.7, 0.45
"""Share of the rate of matrix products that FlashAttention 2 reaches. Its authors give 50 to 73 % of the peak on an
A100 (arXiv:2307.08691) and 35 % on an H100, whose own instructions it does not use (arXiv:2407.08608); products reach
70 to 90 %. The efficient kernel is assumed to be half as fast as on an A100, cuDNN's to be twice as fast as on an H100.
All of this is assumed until `surefit calibrate` has measured the card."""
BACKWARD_SHARE, NARROW, NARROW_SHARE = 0.8, 64, 0.75
"""Factors on these rates: for the backward pass, and for heads of up to 64; assumed as well."""
KERNELS: tuple[KernelSupport, ...] = (
    # `check_prefer_cudnn_attention`, `can_use_cudnn_attention`; head widths above 128 came with cuDNN 9.22.
    KernelSupport(
        "cudnn", (9, 0), (10, 9), BOTH_HALVES, masked=True, grouped=True, uneven=True, share=0.9, widest=128, multiple=8
    ),
    _flash((8, 0), (8, 5), AMPERE_RATE),
    _flash((8, 6), (8, 9), AMPERE_RATE, NO_BACKWARD),
    _flash((9, 0), (11, 9), HOPPER_RATE),
    _flash((12, 0), NEWEST, AMPERE_RATE, NO_BACKWARD),
    _efficient((8, 0), NEWEST, BOTH_HALVES, 8),
    _efficient((8, 0), NEWEST, ("float32",), 4),
    _efficient((7, 0), (7, 9), HALF, 8),  # `use_tensor_cores`: 16 bits alone, and no bfloat16 before Ampere
    _efficient((5, 0), (6, 9), HALF, 1),
    _efficient((5, 0), (7, 9), ("float32",), 1),
)
"""In the order in which torch tries them; calls that no row supports, and float64, run in math."""


@cache
def select_kernel(call: AttentionCall, off: frozenset[Kernel] = frozenset(OFF)) -> Kernel:
    """Return the kernel that a call runs in.

    Args:
        off: kernels that are switched off.

    >>> select_kernel(AttentionCall((7, 5), "float16", 128, 128, grouped=True))
    'math'
    """
    return next((row.kernel for row in KERNELS if row.kernel not in off and row.takes(call)), "math")


def kernel_needs_repeated_kv(call: AttentionCall) -> bool:
    """Return whether keys and values are to be repeated for a call with grouped heads: grouped it would run in the
    kernel that holds all logits, and with a key head for every query head it runs in another.

    >>> calls = [AttentionCall(card, "float16", 128, 128) for card in ((7, 5), (8, 0))]
    >>> kernel_needs_repeated_kv(calls[0]), kernel_needs_repeated_kv(calls[1])
    (True, False)
    """
    return select_kernel(call._replace(grouped=True)) == "math" != select_kernel(call._replace(grouped=False))


def share_of_products(kernel: str, capability: Capability, *, backward: bool = False, width: int = 128) -> float:
    """Return an attention kernel's rate where none was measured, as a share of the rate of matrix products in its
    dtype; 1 for a kernel that is not in the table.

    An H200 with products at 690 TFLOP/s: 0.45 × 690 = 310 forward and 0.8 × 310 = 248 backward with heads of 128; with
    heads of 64 three quarters of both, 233 and 186.

    >>> round(690 * share_of_products("flash", (9, 0), backward=True, width=64))
    186
    """
    rows = (row.share for row in KERNELS if row.kernel == kernel and row.oldest <= capability <= row.newest)
    share = next(rows, None)
    if share is None:
        return 1.0
    return share * (BACKWARD_SHARE if backward else 1.0) * (NARROW_SHARE if width <= NARROW else 1.0)


def describe_kernels(capability: Capability) -> str:
    """Describe the kernels on a GPU for each training dtype, for heads of a multiple of 8 up to 192.

    >>> describe_kernels((8, 0))
    'bfloat16, float16: flash, efficient with a mask; float32: efficient, grouped key heads repeated'
    """
    by_words: dict[str, list[str]] = {}
    for dtype in ("bfloat16", "float16", "float32"):
        by_words.setdefault(_in_words(AttentionCall(capability, dtype, 128, 128)), []).append(dtype)
    parts = [f"{', '.join(dtypes)}: {words}" for words, dtypes in by_words.items()]
    for kernel, reason in OFF.items():
        if any(row.kernel == kernel and row.oldest <= capability <= row.newest for row in KERNELS):
            parts.append(f"{kernel} is off ({reason})")
    return "; ".join(parts)


def _in_words(call: AttentionCall) -> str:
    unmasked, padded = select_kernel(call), select_kernel(call._replace(masked=True))
    if unmasked == padded == "math":
        return "math, which holds all logits"
    kernels = unmasked if unmasked == padded else f"{unmasked}, {padded} with a mask"
    return kernels + (", grouped key heads repeated" if kernel_needs_repeated_kv(call) else "")
