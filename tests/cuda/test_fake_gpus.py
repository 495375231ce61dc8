"""What a model calls on each generation of GPU, on tensors of a GPU without data, and what its plan simulates for it.

Forward passes alone, with autograd's graph (tests/helpers/cuda_without_gpu.py says why); the backward pass is seen in
the plan, whose tensors lie on a CPU.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_without_gpu import tensors_of_gpus
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch_conditions import Params, select_sdp_backend
from transformers import GptOssConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations import sdpa_attention

from surefit.config.load import load_text
from surefit.config.schema import LoraSection
from surefit.facts.hardware import hardware_facts
from surefit.model import compat, sdpa
from surefit.model.attention import use_varlen
from surefit.model.compat import reads_masks_of_fake_tensors
from surefit.model.prepare import prepare_for_training
from surefit.model.varlen import counting_attention
from surefit.plan.memory_interval import closed_form_estimate
from surefit.plan.simulate import record_training, simulate_memory
from surefit.plan.step_config import StepConfig
from surefit.plan.step_config import build_step_config as planned_setting
from surefit.stages.run_context import load_checked_run

LAYERS, HEADS, KEYS, LENGTH = 2, 4, 2, 48
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    num_key_value_heads=KEYS, head_dim=32, max_position_embeddings=4096,
)  # fmt: skip
GPUS = [(7, 5), (8, 0), (8, 9), (9, 0)]
OPERATORS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_safe_softmax": "math",
    "_varlen_attn": "varlen",
}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", compat._USE_GQA)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


class Seen(TorchDispatchMode):
    """Counts the kernels for packed rows, and answers what code reads out of a mask."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.kernels: Counter[tuple[str, int]] = Counter()
        self.operators: set[str] = set()
        self.padded = padded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        self.operators.add(str(func))
        if name == "_local_scalar_dense":
            return not self.padded
        if name == "_varlen_attn":
            self.kernels["varlen", args[1].shape[1]] += 1
        return func(*args, **kwargs or {})


@contextmanager
def gpu(capability: tuple[int, int], padded: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Inside, tensors are a GPU's. `Seen.kernels` counts (kernel by torch's conditions, key heads) of each call."""
    seen, real = Seen(padded), F.scaled_dot_product_attention

    def choose(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
               scale: Any = None, enable_gqa: bool = False) -> torch.Tensor:  # fmt: skip
        assert q.is_cuda
        enabled = torch.backends.cuda.cudnn_sdp_enabled()
        trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
        call = Params(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa, capability, trained)
        seen.kernels[select_sdp_backend(call, cudnn_enabled=enabled), k.shape[1]] += 1
        return real(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    with monkeypatch.context() as patched, tensors_of_gpus(), FakeTensorMode(), torch.device("cuda"):
        patched.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patched.setattr(F, "scaled_dot_product_attention", choose)
        with reads_masks_of_fake_tensors(), seen:
            yield seen


def model_of(dtype: torch.dtype) -> LlamaForCausalLM:
    """In training mode. Built on meta, for no GPU's generator is here to draw weights."""
    with unset_fake_temporarily(), torch.device("meta"):
        model = LlamaForCausalLM(copy.deepcopy(CONFIG)).to(dtype).train()
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                module._parameters[name] = torch.nn.Parameter(torch.empty(tensor.shape, dtype=dtype))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    assert all(tensor.is_cuda for tensor in model.state_dict().values())
    return model


def padded(rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# Per layer: the kernel, and the key heads that it is given.
EFFICIENT, FLASH = ("efficient", HEADS), ("flash", KEYS)
EXPECTED = {
    ((7, 5), torch.float16): EFFICIENT,
    ((7, 5), torch.bfloat16): ("math", KEYS),
    ((7, 5), torch.float32): EFFICIENT,
    **{(each, torch.bfloat16): FLASH for each in GPUS[1:]},
    **{(each, torch.float32): EFFICIENT for each in GPUS[1:]},
}
CASES = pytest.mark.parametrize(("capability", "dtype"), EXPECTED, ids=str)


@CASES
def test_equal_lengths(capability: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa.start_cuda()
    with gpu(capability, False, monkeypatch) as seen:
        model_of(dtype)(**padded(), use_cache=False)
    assert seen.kernels == {EXPECTED[capability, dtype]: LAYERS}


@CASES
def test_padded(capability: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa.start_cuda()
    with gpu(capability, True, monkeypatch) as seen:
        model_of(dtype)(**padded(), use_cache=False)
    kernel = "math" if (capability, dtype) == ((7, 5), torch.bfloat16) else "efficient"
    assert seen.kernels == {(kernel, HEADS): LAYERS}


def packed() -> dict[str, Any]:
    starts = torch.empty(3, dtype=torch.int32)
    return {
        "input_ids": torch.zeros(1, LENGTH, dtype=torch.long),
        "position_ids": torch.zeros(1, LENGTH, dtype=torch.long),
        "cu_seq_lens_q": starts,
        "max_length_q": 40,
        "document_lengths": (40, LENGTH - 40),
    }


@CASES
def test_packed(capability: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa.start_cuda()
    with gpu(capability, False, monkeypatch) as seen, counting_attention() as calls:
        model = model_of(dtype)
        use_varlen(model)
        model(**packed(), use_cache=False)
    expected = EXPECTED[capability, dtype]
    if expected == FLASH:
        assert seen.kernels == {("varlen", KEYS): LAYERS}
        assert (calls.kernel, calls.exact) == (LAYERS, 0)
    else:
        assert seen.kernels == {expected: 2 * LAYERS}, "one call per document and layer"


@CASES
@pytest.mark.parametrize("short", [False, True], ids=["equal prompts", "padded prompts"])
def test_a_token_is_generated(
    capability: Any, dtype: torch.dtype, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdpa.start_cuda()
    with gpu(capability, short, monkeypatch) as seen, torch.no_grad():
        model = model_of(dtype).eval()
        cache = model(**padded(), use_cache=True).past_key_values
        seen.kernels.clear()
        mask = torch.ones(2, LENGTH + 1, dtype=torch.long)
        model(input_ids=torch.zeros(2, 1, dtype=torch.long), attention_mask=mask, past_key_values=cache)
    bfloat_on_turing = (capability, dtype) == ((7, 5), torch.bfloat16)
    kernels = {kernel for kernel, _ in seen.kernels}
    assert sum(seen.kernels.values()) == LAYERS
    assert kernels == {"math" if bfloat_on_turing else "flash" if not short and dtype != torch.float32
                       and capability != (7, 5) else "efficient"}  # fmt: skip


@pytest.mark.parametrize("capability", GPUS, ids=str)
def test_as_the_libraries_are_turing_and_float32_would_hold_all_logits(
    capability: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Hopper's padded batches would run in cuDNN's kernel: what would be if CUDA were started without SureFit."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    low = torch.float16 if capability == (7, 5) else torch.bfloat16
    kernels = []
    for dtype, short in ((low, False), (torch.float32, False), (low, True)):
        with gpu(capability, short, monkeypatch) as seen:
            model_of(dtype)(**padded(), use_cache=False)
        kernels.append({kernel for kernel, _ in seen.kernels})
    hopper = capability == (9, 0)
    alone = "math" if capability == (7, 5) else "cudnn" if hopper else "flash"
    assert kernels == [{alone}, {"math"}, {"cudnn" if hopper else "efficient"}]


@pytest.mark.parametrize("capability", GPUS[1:], ids=str)
def test_where_flash_runs_nothing_is_added(capability: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not str(func).startswith("prim.device"):  # a question, not an operator
                self.names.append(str(func))
            return func(*args, **kwargs or {})

    found = []
    for start in (False, True):
        if start:
            sdpa.start_cuda()
        with gpu(capability, False, monkeypatch), Named() as named:
            model_of(torch.bfloat16)(**padded(), use_cache=False)
        found.append(named.names)
    assert found[0] == found[1]


# -- the plan ---------------------------------------------------------------------------------------------------------


def planned(setting: StepConfig) -> set[str]:
    """The attention kernels of a simulated training step."""
    found = set()

    def watch(phase: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        found.add(func._overloadpacket.__name__)

    record_training(setting, watch)
    return {OPERATORS[name] for name in found & OPERATORS.keys()}


def setting_of(capability: Any, dtype: torch.dtype, **changes: Any) -> StepConfig:
    name = str(dtype).removeprefix("torch.")
    adapter = LoraSection(r=4, target_modules=["q_proj", "v_proj"])
    shape = {"config": CONFIG, "rows": 2, "length": LENGTH, "capability": capability}
    return StepConfig(dtype=name, adapter=adapter, **shape | changes)


@CASES
def test_the_plan_runs_the_same_kernels(capability: Any, dtype: torch.dtype) -> None:
    expected = EXPECTED[capability, dtype][0]
    assert planned(setting_of(capability, dtype)) == {expected}
    assert planned(setting_of(capability, dtype, padded=True)) == {"math" if expected == "math" else "efficient"}
    assert planned(setting_of(capability, dtype, packed=True)) == {"varlen" if expected == "flash" else expected}


GPT_OSS = GptOssConfig(
    vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=HEADS,
    num_key_value_heads=KEYS, head_dim=32, num_local_experts=2, num_experts_per_tok=1, sliding_window=16,
)  # fmt: skip


@pytest.mark.parametrize(("capability", "dtype"), [(GPUS[0], torch.float16), (GPUS[-1], torch.bfloat16)], ids=str)
def test_sinks_are_planned_in_the_kernel_where_it_runs(capability: Any, dtype: torch.dtype) -> None:
    """Elsewhere in the formula, which has no kernel of its own."""
    flash = EXPECTED[capability, dtype][0] == "flash"
    found = planned(setting_of(capability, dtype, packed=True, config=GPT_OSS))
    assert found == ({"varlen"} if flash else set())
    held = [
        simulate_memory(setting_of(capability, dtype, packed=True, rows=1, length=length, config=GPT_OSS), merge=False)
        for length in (512, 2048)
    ]
    short, long = (each.terms["activations"] for each in held)
    assert (long < 4.5 * short) == flash, "logits of all pairs of positions grow sixteenfold"


H100_CONFIG = """model: {name_or_path: surefit/nano, dtype: bfloat16}
train: {method: full}
data: {train: surefit/function-calling-train, packing: false, max_length: 2048}
hardware: {gpu: h100}
output_dir: unused
"""


@pytest.mark.parametrize("missing", [None, "triton"])
def test_auto_has_decided_about_fused_kernels_for_the_plan_and_for_training(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators that training calls on a GPU are those that the plan runs, and both estimates count them."""
    for module in ("surefit.config.resolve", "surefit.model.kernels"):
        monkeypatch.setattr(f"{module}.missing_for_kernels", lambda: missing)
    # A GPU of this machine: beside another's, packages are not looked for.
    here = replace(hardware_facts("h100"), source="detected")
    monkeypatch.setattr("surefit.facts.hardware.hardware_facts", lambda *given: here)
    auto, on, off = (
        load_checked_run(load_text(H100_CONFIG, Path("run.yaml"), [f"speed.kernels={kernels}"]))
        for kernels in ("auto", True, False)
    )
    assert auto.resolved.config.speed.kernels is (missing is None)
    same, other = (on, off) if missing is None else (off, on)
    closed = [closed_form_estimate(run.resolved, run.model, run.hardware) for run in (auto, same, other)]
    assert closed[0] == closed[1]
    assert closed[0] != closed[2]

    in_plan: Counter[str] = Counter()

    def watch(phase: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        in_plan[str(func)] += phase == "first step"

    record_training(planned_setting(auto.resolved, auto.model, auto.hardware), watch)
    with gpu((9, 0), True, monkeypatch) as seen:
        model = model_of(torch.bfloat16)
        with torch.device("cpu"):  # where new tensors are made in training
            model, _ = prepare_for_training(model, auto.resolved.config, auto.hardware)
        model(**padded(), use_cache=False)
    fused = {f"surefit.{name}.default" for name in ("rms_norm", "rope", "swiglu")}
    trained = {name for name in seen.operators if name in fused}
    assert trained == {name for name in in_plan if name in fused} == (fused if missing is None else set())


def activations(length: int, capability: Any, dtype: torch.dtype) -> int:
    """What is held at the loss, the fullest moment with this vocabulary: what the layers keep."""
    config = copy.deepcopy(CONFIG)
    config.vocab_size = 8192
    setting = setting_of(capability, dtype, rows=1, length=length, chunked=False, config=config)
    found = simulate_memory(setting, merge=False)
    assert found.peak.module.endswith("lm_head") or not found.peak.module
    return found.terms["activations"]


@CASES
def test_only_the_math_kernel_s_memory_grows_with_the_square(capability: Any, dtype: torch.dtype) -> None:
    """Heads × length² numbers in float32 are kept per layer, or next to nothing beside the tokens."""
    short, long = (activations(length, capability, dtype) for length in (256, 1024))
    if EXPECTED[capability, dtype][0] == "math":
        assert long - 4 * short == pytest.approx(LAYERS * 4 * HEADS * (1024**2 - 4 * 256**2), rel=0.01)
    else:
        assert long == pytest.approx(4 * short, rel=0.01)


def test_repeated_heads_are_in_the_plan() -> None:
    """Keys and values of all query heads, kept per layer until the backward pass: 2 bytes × 2 × (4 - 2) heads × 32."""
    turing, ampere = (activations(1024, each, torch.float16) for each in GPUS[:2])
    assert turing - ampere == pytest.approx(LAYERS * 1024 * 2 * 2 * (HEADS - KEYS) * 32, rel=0.02)
