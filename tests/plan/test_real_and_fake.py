"""The plan's tensors without data ask for the same memory as real ones: byte for byte, event for event."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from surefit.config.schema import LoraSection
from surefit.facts.experts import factor_shapes, summed_bytes
from surefit.model import quantize
from surefit.model.sdpa import gpu_assumed
from surefit.plan import building
from surefit.plan.building import build_model
from surefit.plan.simulate import record_training, run_training
from surefit.plan.step_config import StepConfig
from surefit.plan.trace import Recorder, Trace

TINY = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA = LlamaConfig(**TINY)
QWEN2 = Qwen2Config(**TINY | {"num_hidden_layers": 1}, tie_word_embeddings=True)
QWEN3_MOE = Qwen3MoeConfig(**TINY, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ROUTED = Qwen3MoeConfig(**QWEN3_MOE.to_diff_dict() | {"output_router_logits": True})
LORA = LoraSection(r=4, target_modules=["v_proj", "down_proj"])
DORA = LORA.model_copy(update={"use_dora": True})
EXPERTS = LoraSection(r=4, experts=True)
FULL = None
PADDED, SAME = True, False


def _setting(
    config: PretrainedConfig, adapter: LoraSection, dtype: str, checkpointing: bool, padded: bool,
    micro_batches: int, attention: str,
) -> StepConfig:  # fmt: skip
    return StepConfig(
        config, dtype, adapter, rows=2, length=24, padded=padded, micro_batches=micro_batches,
        checkpointing=checkpointing, cuda=False, attention=attention,
    )  # fmt: skip


SETTINGS = [
    _setting(LLAMA, LORA, "float32", False, SAME, 1, "sdpa"),
    _setting(LLAMA, LORA, "float32", True, PADDED, 2, "sdpa"),
    _setting(LLAMA, LORA, "bfloat16", True, SAME, 2, "sdpa"),
    _setting(LLAMA, LORA, "bfloat16", False, PADDED, 1, "eager"),
    _setting(LLAMA, DORA, "float32", False, SAME, 1, "sdpa"),
    _setting(LLAMA, DORA, "bfloat16", True, PADDED, 2, "sdpa"),
    _setting(LLAMA, FULL, "float32", False, PADDED, 1, "eager"),
    _setting(LLAMA, FULL, "float32", True, SAME, 1, "sdpa"),
    _setting(LLAMA, FULL, "bfloat16", False, SAME, 2, "sdpa"),
    _setting(LLAMA, FULL, "bfloat16", True, PADDED, 1, "sdpa"),
    _setting(QWEN2, LORA, "float32", False, PADDED, 2, "sdpa"),
    _setting(QWEN2, LORA, "bfloat16", True, PADDED, 1, "eager"),
    _setting(QWEN2, FULL, "float32", True, PADDED, 2, "sdpa"),
    _setting(QWEN2, FULL, "bfloat16", False, PADDED, 1, "sdpa"),
]


FIRST = SETTINGS[0]
PACKED = replace(FIRST, packed=True, attention=None)
SETTINGS += [
    replace(FIRST, chunked=False),
    replace(FIRST, supervised=0.3, padded=True),
    PACKED,
    replace(PACKED, dtype="bfloat16", rows=3, micro_batches=2, checkpointing=True),
    replace(PACKED, dtype="bfloat16", checkpointing="selective"),
    replace(PACKED, adapter=FULL, checkpointing="offload", tiled_mlp=True),
    replace(PACKED, adapter=LoraSection(r=4), fused_lora=True, micro_batches=2),
    replace(PACKED, adapter=LoraSection(r=4, lora_dropout=0.1), fused_lora=True, checkpointing="selective"),
    replace(FIRST, adapter=LoraSection(r=4), fused_lora=True, kernels=True, dtype="bfloat16"),
    replace(FIRST, adapter=FULL, kernels=True, checkpointing=True),
    replace(PACKED, adapter=LoraSection(r=4), quantization="fp8", dtype="bfloat16"),
    replace(PACKED, adapter=LoraSection(r=4), quantization="fp8", dtype="bfloat16", fused_lora=True),
    replace(FIRST, adapter=LoraSection(r=4), quantization="fp8", dtype="bfloat16", fused_lora=True, kernels=True),
    replace(PACKED, dtype="bfloat16", chunked=False, neftune=5.0),
    replace(FIRST, new_tokens=3),
    replace(FIRST, config=QWEN2, new_tokens=3, dtype="bfloat16", checkpointing=True, micro_batches=2),
    replace(PACKED, new_tokens=3, chunked=False, neftune=5.0),
    replace(FIRST, adapter=LoraSection(r=4), new_tokens=3, fused_lora=True, kernels=True),
    replace(FIRST, config=QWEN3_MOE, adapter=LoraSection(r=4, experts="with_router"), padded=True),
    replace(FIRST, config=QWEN3_MOE, adapter=EXPERTS),
    replace(FIRST, config=ROUTED, adapter=EXPERTS, padded=True, checkpointing=True),
    replace(FIRST, config=QWEN3_MOE, adapter=EXPERTS, dtype="bfloat16", checkpointing=True, micro_batches=2),
    replace(PACKED, config=QWEN3_MOE, adapter=EXPERTS, dtype="bfloat16", fused_lora=True, checkpointing="selective"),
    *(
        pytest.param(setting, marks=pytest.mark.skipif(not find_spec("bitsandbytes"), reason="no bitsandbytes"))
        for setting in (
            replace(PACKED, adapter=LoraSection(r=4), quantization="nf4", dtype="bfloat16"),
            replace(FIRST, adapter=LoraSection(r=4), quantization="nf4", fused_lora=True, checkpointing=True),
            replace(FIRST, adapter=LoraSection(r=4, use_dora=True), quantization="nf4", dtype="bfloat16"),
            replace(FIRST, adapter=FULL, optimizer="adamw_8bit"),
            replace(FIRST, adapter=FULL, optimizer="paged_adamw_32bit", dtype="bfloat16"),
        )
    ),
]


def _name(setting: StepConfig) -> str:
    plain = replace(FIRST, config=setting.config, adapter=setting.adapter, dtype=setting.dtype)
    differs = [
        f"{name}={value}" for name, value in vars(setting).items() if name != "config" and value != vars(plain)[name]
    ]
    lora = setting.adapter
    kind = "full" if lora is None else "dora" if lora.use_dora else "lora"
    adapter = f"{kind}{'-dropout' * bool(lora and lora.lora_dropout)}"
    return "-".join([setting.config.model_type, adapter, setting.dtype, *differs])


@pytest.fixture
def real() -> Callable[[StepConfig], Trace]:
    """real(setting) → the trace of the same run with random numbers in it."""

    def run(setting: StepConfig) -> Trace:
        torch.manual_seed(0)
        with patch.object(quantize, "_four_bit_on_meta", _four_bit):
            model, recorder = build_model(setting, "cpu"), Recorder()
        with recorder:
            recorder.start("load")
            recorder.tag((p for p in model.parameters() if not p.requires_grad), "weights")
            recorder.tag(model.buffers(), "weights")
            recorder.tag((tensor for *_, tensor in quantize.hidden_tensors(model)), "weights")
            run_training(model, setting, recorder)
            recorder.start("end")
        return recorder.trace

    return run


def _four_bit(layer: torch.nn.Linear) -> torch.nn.Module:
    """As transformers loads it."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    dtype = layer.weight.dtype
    made = Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=dtype, quant_type="nf4")
    made.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
    quantized: torch.nn.Module = made.to("cpu")
    return quantized


def _signed_sizes(trace: Trace) -> dict[str, list[int]]:
    """Phase → bytes of every allocation, and minus the bytes of whatever is freed, in order."""
    return {
        name: [(1 if event > 0 else -1) * trace.sizes[abs(event) - 1] for event in trace.events[start:end]]
        for (name, start), (_, end) in pairwise(trace.phases)
    }


@pytest.mark.parametrize("setting", SETTINGS, ids=_name)
def test_every_allocation_is_that_of_real_tensors(
    setting: StepConfig, real: Callable[[StepConfig], Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "TILE", setting.length // 3)
    if setting.fused_lora:  # as a GPU takes the products
        monkeypatch.setattr(quantize, "_multiplies_float8", lambda *_: True)
    with gpu_assumed() if setting.kernels else nullcontext():  # whose operators are the same everywhere
        expected, found = real(setting), record_training(setting)
    ours, theirs = _signed_sizes(found), _signed_sizes(expected)
    assert sum(ours.pop("load")) == sum(theirs.pop("load"))
    assert ours == theirs
    peaks = [
        [trace.peak(start, end)[0] for (_, start), (_, end) in pairwise(trace.phases)] for trace in (found, expected)
    ]
    assert peaks[0] == peaks[1]


def test_the_profiler_of_torch_sees_the_same_peak() -> None:
    """Everything that PyTorch's CPU allocator is asked for, kernels' own temporaries included."""
    setting = StepConfig(
        LlamaConfig(**TINY | {"vocab_size": 8192, "hidden_size": 128}), "float32", LORA, 4, 64, cuda=False, padded=True
    )
    assert _profiled(setting) == pytest.approx(record_training(setting).peak()[0], rel=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_experts_with_factors_take_is_foreseen(checkpointing: bool) -> None:
    """The sums of weights and factors, and a gradient of them: simulated, in closed form, and as torch's profiler sees
    it."""
    shape = TINY | {"hidden_size": 128, "num_hidden_layers": 4, "num_experts": 8, "moe_intermediate_size": 128}
    config = Qwen3MoeConfig(**shape, num_experts_per_tok=2, head_dim=16)
    stacks = {f"layers.{n}.experts.{name}": (8, width, 128) for n in range(4) for name, width in WIDTHS.items()}
    peaks = []
    for adapter in (LoraSection(r=4), EXPERTS):
        setting = StepConfig(config, "float32", adapter, 4, 32, cuda=False, checkpointing=checkpointing)
        peaks.append((_profiled(setting), record_training(setting).peak()[0]))
        assert peaks[-1][1] == pytest.approx(peaks[-1][0], rel=0.01)
    factors = sum(math.prod(shape) for _, *pair in factor_shapes(stacks, EXPERTS) for shape in pair)
    # Beside the sums: the factors, and their gradients, of which the last layer's are made first.
    least = summed_bytes(stacks, 4, checkpointing) + 4 * factors
    assert least <= peaks[1][1] - peaks[0][1] <= 1.15 * (least + 4 * factors)


WIDTHS = {"gate_up_proj": 256, "down_proj": 128}


def _profiled(setting: StepConfig) -> int:
    """The peak of a real run, kernels' own temporaries included."""
    model, recorder = build_model(setting, "cpu"), Recorder()
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run_training(model, setting, recorder)
    live = highest = sum(held.values())
    for size in _memory_events(profiler):
        live += size
        highest = max(highest, live)
    return highest


def _memory_events(profiler: profile) -> list[int]:
    """Bytes of every allocation, negative where it is freed, in the order of time."""
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
