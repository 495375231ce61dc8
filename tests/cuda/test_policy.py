"""The table of attention kernels against torch's own conditions, and against torch where there is a GPU to ask."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_conditions import Params, select_sdp_backend

from surefit.facts.sdpa import AttentionCall, describe_kernels, kernel_needs_repeated_kv, select_kernel

CAPABILITIES = [
    (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1),
    (13, 0),
]  # fmt: skip
DTYPES = ["float16", "bfloat16", "float32", "float64"]
WIDTHS = [
    (12, 12), (20, 20), (64, 64), (128, 128), (192, 128), (200, 200), (224, 224), (240, 240), (256, 256), (264, 264),
]  # fmt: skip


def params_of(call: AttentionCall) -> Params:
    """The call as tensors without data."""
    dtype = getattr(torch, call.dtype)
    keys = 9 if call.uneven else 7
    query = torch.empty(2, 4, 7, call.width, dtype=dtype)
    key = torch.empty(2, 2 if call.grouped else 4, keys, call.width, dtype=dtype)
    value = torch.empty(2, 2 if call.grouped else 4, keys, call.value_width, dtype=dtype)
    mask = torch.empty(2, 1, 7, keys, dtype=torch.bool) if call.masked else None
    causal = call.uneven or not call.masked
    return Params(
        query, key, value, mask, 0.1 if call.dropout else 0.0, causal, call.grouped, call.capability, call.trained
    )


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_table_is_torch_s_own_choice(capability: tuple[int, int]) -> None:
    with FakeTensorMode():
        for dtype, (width, values), *switches in itertools.product(DTYPES, WIDTHS, *5 * [(False, True)]):
            call = AttentionCall(capability, dtype, width, values, *switches)
            params = params_of(call)
            assert select_kernel(call) == select_sdp_backend(params), call
            assert select_kernel(call, frozenset()) == select_sdp_backend(params, cudnn_enabled=True), call


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_heads_are_repeated_where_it_keeps_a_call_from_the_math_kernel(capability: tuple[int, int]) -> None:
    for dtype, (width, values) in itertools.product(DTYPES, WIDTHS):
        call = AttentionCall(capability, dtype, width, values)
        grouped, whole = select_kernel(call._replace(grouped=True)), select_kernel(call)
        assert kernel_needs_repeated_kv(call) == (grouped == "math" and whole == "efficient"), call


@pytest.mark.parametrize(
    ("capability", "dtype", "alone", "padded", "repeated"),
    [
        ((7, 5), "float16", "efficient", "efficient", True),
        ((7, 5), "float32", "efficient", "efficient", True),
        ((7, 5), "bfloat16", "math", "math", False),
        ((8, 0), "bfloat16", "flash", "efficient", False),
        ((8, 9), "bfloat16", "flash", "efficient", False),
        ((9, 0), "bfloat16", "flash", "efficient", False),
        ((9, 0), "float32", "efficient", "efficient", True),
    ],
)
def test_what_the_usual_gpus_run(
    capability: tuple[int, int], dtype: str, alone: str, padded: str, repeated: bool
) -> None:
    call = AttentionCall(capability, dtype, 128, 128)
    assert (select_kernel(call), select_kernel(call._replace(masked=True)), kernel_needs_repeated_kv(call)) == (
        alone,
        padded,
        repeated,
    )


def test_without_the_switch_hopper_would_take_cudnn() -> None:
    call = AttentionCall((9, 0), "bfloat16", 128, 128, masked=True)
    assert (select_kernel(call, frozenset()), select_kernel(call)) == ("cudnn", "efficient")


def test_in_words() -> None:
    assert describe_kernels((9, 0)) == (
        "bfloat16, float16: flash, efficient with a mask; float32: efficient, grouped key heads repeated; "
        "cudnn is off (github.com/pytorch/pytorch/issues/196678)"
    )
    assert describe_kernels((7, 5)) == (
        "bfloat16: math, which holds all logits; float16, float32: efficient, grouped key heads repeated"
    )
    assert "cudnn" not in describe_kernels((8, 9))


def test_it_has_been_read_for_the_torch_that_is_here() -> None:
    """Read the source of a newer one before this moves: 2.14's efficient kernel takes grouped heads."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert (2, 11) <= version <= (2, 13)
    header = Path(torch.__file__).parent / "include/ATen/native/transformers/sdp_utils_cpp.h"
    if header.is_file():
        assert "template <bool supports_gqa, bool requires_same_num_heads=true>" in header.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be asked: the test below does")
def test_a_build_for_cpus_cannot_be_asked() -> None:
    """Why the conditions are written out: it refuses every fused kernel to tensors of a GPU."""
    with FakeTensorMode():
        query = torch.empty(1, 4, 16, 64, device="cuda", dtype=torch.float16)
        params = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, True, False)
        assert not torch.backends.cuda.can_use_flash_attention(params)
        assert not torch.backends.cuda.can_use_efficient_attention(params)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_says_the_same(dtype: str) -> None:
    asked = torch.backends.cuda
    for (width, values), masked, grouped in itertools.product(WIDTHS, (False, True), (False, True)):
        call = AttentionCall(torch.cuda.get_device_capability(), dtype, width, values, masked, grouped, trained=False)
        params = params_of(call)
        tensors = [tensor.cuda() for tensor in params[:3]]
        mask = params.attn_mask.cuda() if masked else None
        real = asked.SDPAParams(*tensors, mask, 0.0, params.is_causal, grouped)
        found = "flash" if asked.can_use_flash_attention(real) else "math"
        if found == "math" and asked.can_use_efficient_attention(real):
            found = "efficient"
        assert select_kernel(call) == found, call
