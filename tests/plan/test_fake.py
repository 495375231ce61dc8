"""Tensors without data that are answered faster leave the trace and the operators that PyTorch's own leave."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3Config

from surefit.config.schema import LoraSection
from surefit.plan import simulate
from surefit.plan.fake import FakeMode
from surefit.plan.operations import Operations
from surefit.plan.step_config import StepConfig
from surefit.plan.time import _count
from surefit.plan.trace import Trace

CONFIG = Qwen3Config(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
SLOW = pytest.mark.slow
PACKED = StepConfig(CONFIG, "bfloat16", LoraSection(r=4, lora_dropout=0.1), 2, 40, packed=True, micro_batches=2)


def _all(setting: StepConfig) -> tuple[Trace, Trace, tuple[Operations, Operations]]:
    return simulate.record_training(setting), simulate.record_merge(setting), _count(setting)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(replace(PACKED, fused_lora=True, checkpointing="selective"), id="fused", marks=SLOW),
        pytest.param(
            replace(PACKED, packed=False, padded=True, dtype="float32", cuda=False), id="padded-cpu", marks=SLOW
        ),
        pytest.param(replace(PACKED, adapter=None, checkpointing="offload"), id="full", marks=SLOW),
        pytest.param(replace(PACKED, quantization="fp8", capability=(9, 0), tiled_mlp=True), id="fp8-tiled"),
    ],
)
def test_a_shorter_key_changes_nothing(setting: StepConfig) -> None:
    quick = _all(setting)
    with patch.object(simulate, "FakeMode", FakeTensorMode):
        FakeTensorMode.cache_clear()
        assert _all(setting) == quick


def test_what_an_answer_depends_on_is_in_the_key() -> None:
    """Each of these was answered before with another type, shape or place in memory."""
    with FakeMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 6, dtype=torch.bfloat16)
        assert (x * 2).dtype == torch.bfloat16
        assert (torch.empty(4, 6, dtype=torch.int64) * 2).dtype == torch.int64
        assert (torch.empty(4, 6, dtype=torch.int64) * 2.0).dtype == torch.float32
        assert (x.t() + 0).stride() == (1, 6)
        assert (x[1:] + 0).shape == (3, 6)
        assert x[1:].storage_offset() == 6
        assert x[:, 2:].untyped_storage()._cdata == x.untyped_storage()._cdata
        first, second = x.split([2, 4], dim=1)
        assert (first.shape, second.shape, second.storage_offset()) == ((4, 2), (4, 4), 2)
        with torch.inference_mode():
            assert (x + 0).is_inference()
        assert not (x + 0).is_inference()


def test_parts_whose_sizes_are_data_are_even() -> None:
    with FakeMode(allow_non_fake_inputs=True):
        parts = torch.empty(10, 3).split_with_sizes([1, 1, 1, 1])
        assert [len(part) for part in parts] == [2, 3, 2, 3]
        assert [len(part) for part in torch.empty(10, 3).split_with_sizes([9, 1])] == [9, 1]


def test_one_of_many_masks_marks_its_even_share() -> None:
    with FakeMode(allow_non_fake_inputs=True):
        experts = torch.empty(4, 2, 10, dtype=torch.int64)  # experts × choices × tokens: each token has two
        assert experts[1].nonzero().shape == (5, 2)
        assert torch.empty(7).nonzero().shape == (7, 1)
        assert torch.empty(0).nonzero().shape == (0, 1)
