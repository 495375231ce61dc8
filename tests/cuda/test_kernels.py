"""The fused kernels: their numbers in Triton's interpreter and on a GPU, and their machine code for GPUs not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

HELPERS = Path(__file__).parents[1] / "helpers"
LIMITS = {"torch.float32": 1e-6, "torch.float16": 1e-3, "torch.bfloat16": 1e-2}
"""Of the error relative to float64: four to seven roundings of the type."""
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or find_spec("liger_kernel") is None,
    reason="Triton or Liger is not installed: the extra `kernels`",
)


def assert_small(found: dict[str, list[float]]) -> None:
    assert len(found) == 72
    assert {name: errors for name, errors in found.items() if not max(errors) <= LIMITS[name.partition(":")[0]]} == {}


@pytest.mark.slow
def test_in_the_interpreter_they_compute_what_pytorch_does() -> None:
    done = subprocess.run(
        [sys.executable, str(HELPERS / "triton_interpreted.py")],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert_small(json.loads(done.stdout))


@pytest.mark.slow
def test_in_the_interpreter_float8_is_the_same_bit_for_bit() -> None:
    done = subprocess.run(
        [sys.executable, str(HELPERS / "float8_interpreted.py")],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 21
    assert not any(found.values()), found


@pytest.mark.gpu
def test_on_a_gpu_float8_is_the_same_bit_for_bit() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8 arithmetic")
    import float8_interpreted

    found = dict(float8_interpreted.cases("cuda"))
    assert len(found) == 21
    assert not any(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_no_register_is_spilled(capability: int) -> None:
    import triton_ahead as ahead

    for kernel in ahead.kernels("bf16", capability):
        found = ahead.compiled(kernel, capability, "bf16")
        assert found.spilled == 0, kernel.name
        assert found.shared <= ahead.SHARED_LIMIT[capability] * 1024, kernel.name
        assert found.registers * 32 * kernel.warps <= 65_536, f"{kernel.name}: no block fits a multiprocessor"


@pytest.mark.slow
def test_turing_would_spill_which_is_one_reason_to_leave_it_out() -> None:
    import triton_ahead as ahead

    found = {kernel.name: ahead.compiled(kernel, 75, "fp16") for kernel in ahead.kernels("fp16", 75)}
    assert max(each.spilled for each in found.values()) > 0


@pytest.mark.gpu
def test_on_a_gpu_they_compute_what_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton_interpreted

    monkeypatch.setattr(triton_interpreted, "DEVICE", "cuda")
    monkeypatch.setattr("surefit.model.kernel_ops._fused", lambda x: x.dtype != torch.float64)
    assert_small(triton_interpreted.every_case())


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_a_step_is_the_same_with_and_without(compiled: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from surefit.config.schema import LoraSection
    from surefit.model.adapter import add_adapter
    from surefit.model.compile import compile_layers
    from surefit.model.fused_lora import fuse_lora
    from surefit.model.kernels import use_kernels

    shape = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1,
    )  # fmt: skip
    ids = torch.arange(200, device="cuda").view(2, 100)
    results: list[list[torch.Tensor]] = []
    for kernels in (False, True):
        torch.manual_seed(0)
        model: Any = add_adapter(LlamaForCausalLM(shape).to("cuda", torch.bfloat16), LoraSection(r=16))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        fuse_lora(model)
        if kernels:
            assert use_kernels(model) == (5, 2, 2)
            if compiled:
                compile_layers(model)
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        results.append([out.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for with_kernels, without in zip(results[1], results[0], strict=True):
        assert (with_kernels - without).float().norm() <= 0.05 * without.float().norm()
