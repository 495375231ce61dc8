"""The memory of a training run, found by running its real step on tensors that have no data.

The model is built on the meta device, its parameters become fake tensors, and `train.step.train_step` runs on them
under a `Recorder`. What that records is what a GPU's allocator would be asked for; `plan.allocator` says what it takes.
Nothing is downloaded, no weight is read, and a 70B model needs no more memory here than a small one.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from surefit.config.schema import AdapterSection
from surefit.model.adapter import add_adapter
from surefit.model.compat import checkpoint_activations, reads_masks_of_fake_tensors
from surefit.plan.allocator import CachingAllocator
from surefit.plan.cuda import HIDDEN, cuda_attention
from surefit.plan.trace import Allocation, Recorder, Trace
from surefit.train.optim import MasterAdamW
from surefit.train.step import mean_loss, train_step

PHASES = ("load", "first step", "step", "eval")
SHALLOW = (2, 3)
"""Layers of the two models that a deep one is extrapolated from; all layers of a decoder cost the same."""


@dataclass(frozen=True)
class Setting:
    """What decides the memory of a training step.

    Attributes:
        config: the model's architecture.
        dtype: of the weights: "float32" or "bfloat16".
        adapter: what is trained.
        rows: examples per micro batch; length: tokens of the longest, to which all are padded.
        padded: some are shorter, so attention needs a mask.
        micro_batches: per optimizer step. More than one keeps the gradients between them.
        checkpointing: activations are recomputed.
        cuda: the operators a GPU would run; else those of a CPU.
        attention: transformers' attn_implementation.
    """

    config: PretrainedConfig
    dtype: str
    adapter: AdapterSection
    rows: int
    length: int
    padded: bool = False
    micro_batches: int = 1
    checkpointing: bool = False
    cuda: bool = True
    attention: str = "sdpa"


@dataclass(frozen=True)
class Phase:
    """The fullest moment of a phase: bytes in tensors, and bytes the allocator holds from the driver."""

    name: str
    allocated: int
    reserved: int


@dataclass(frozen=True)
class Memory:
    """What a run needs on one device, without the CUDA context.

    Attributes:
        phases: in the order of the run.
        terms: what the fullest moment of a step consists of, in bytes; they add up to its `allocated`.
        peak: the operator, the module and the phase that make it the fullest.
        layers_simulated: how many of the model's layers were run; the others are extrapolated.
    """

    phases: tuple[Phase, ...]
    terms: dict[str, int]
    peak: Allocation
    layers_simulated: int

    @property
    def allocated(self) -> int:
        return max(phase.allocated for phase in self.phases)

    @property
    def reserved(self) -> int:
        return max(phase.reserved for phase in self.phases)


def simulate(setting: Setting, expandable: bool = False, extrapolate: bool = True) -> Memory:
    """The memory of every phase.

    Args:
        setting: what is trained, and on what.
        expandable: the allocator's `expandable_segments`.
        extrapolate: run 2 and 3 layers and extend the line, where the model has more than 8 like ones.
    """
    layers = setting.config.num_hidden_layers
    if not extrapolate or layers <= 8 or not _uniform(setting.config):
        return _measure(record(setting), expandable, layers)
    few, more = (_measure(record(_with_layers(setting, n)), expandable, n) for n in SHALLOW)
    return _extend(few, more, layers)


def record(setting: Setting) -> Trace:
    """The allocations of loading, two steps and one held-out batch."""

    def run(model: torch.nn.Module, recorder: Recorder) -> None:
        _run(model, setting, recorder)

    return record_run(_on_meta(setting), run, padded=setting.padded, cuda=setting.cuda)


def record_run(
    model: torch.nn.Module, run: Callable[[torch.nn.Module, Recorder], None], *, padded: bool, cuda: bool
) -> Trace:
    """The allocations of any code that trains a model on the meta device; its parameters are made in phase "load".

    Args:
        model: on meta, its adapter included.
        run: gets the model with fake parameters, and the recorder to name phases with.
        padded: what a look at the attention mask says.
        cuda: with the operators of a GPU.
    """
    recorder = Recorder(_Scalar(padded), HIDDEN if cuda else None)
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(reads_masks_of_fake_tensors())
        if cuda:
            stack.enter_context(cuda_attention())
        stack.enter_context(recorder)
        recorder.start("load")
        _materialise(model)
        recorder.tag((p for p in model.parameters() if not p.requires_grad), "weights")
        recorder.tag(model.buffers(), "weights")
        run(model, recorder)
        recorder.start("end")
    return recorder.trace


def _run(model: torch.nn.Module, setting: Setting, recorder: Recorder) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    recorder.tag(trained, "weights" if setting.adapter.kind == "full" else "adapter")
    model.train()
    if setting.checkpointing:
        checkpoint_activations(model)  # type: ignore[arg-type]
    optimizer = MasterAdamW(model)
    recorder.tag(optimizer.tensors().values(), "optimizer")
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda p: recorder.tag([p.grad], "gradients"))
    gc.collect()
    with recorder.naming(model):
        for phase in ("first step", "step"):
            recorder.start(phase)
            batches = [_batch(setting, recorder) for _ in range(setting.micro_batches)]
            train_step(model, batches, optimizer, 1.0)
            recorder.tag(optimizer.tensors().values(), "optimizer")
            del batches
        recorder.start("eval")
        mean_loss(model, [_batch(setting, recorder)])


def _batch(setting: Setting, recorder: Recorder) -> dict[str, torch.Tensor]:
    shape = (setting.rows, setting.length)
    batch = {key: torch.empty(shape, dtype=torch.long) for key in ("input_ids", "attention_mask", "labels")}
    recorder.tag(batch.values(), "batch")
    return batch


class _Scalar:
    """What code reads out of a fake tensor: whether nothing is padded, a loss, a count."""

    def __init__(self, padded: bool) -> None:
        self.padded = padded

    def __call__(self, dtype: torch.dtype) -> Any:
        if dtype == torch.bool:
            return not self.padded
        return 1.0 if dtype.is_floating_point else 1


def _on_meta(setting: Setting) -> torch.nn.Module:
    dtype = getattr(torch, setting.dtype)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(setting.config), dtype=dtype, attn_implementation=setting.attention
        )
        model.tie_weights()
        if setting.adapter.kind == "lora":
            model = add_adapter(model, setting.adapter)
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    # PEFT casts the factors to the type of the base layer, but not on meta.
                    parameter.data = parameter.data.to(dtype)
    assert isinstance(model, torch.nn.Module)
    return model


def _materialise(model: torch.nn.Module) -> None:
    """Give every parameter and buffer a fake storage; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        return made[id(tensor)]

    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = fake(tensor)  # type: ignore[assignment]


def _measure(trace: Trace, expandable: bool, layers: int) -> Memory:
    bounds = [*trace.phases, ("", len(trace.events))]
    allocator = CachingAllocator(expandable)
    blocks: dict[int, Any] = {}
    phases = []
    for (name, start), (_, end) in pairwise(bounds):
        if name not in PHASES:
            continue
        allocator.totals.peak_allocated = allocator.totals.allocated
        for event in trace.events[start:end]:
            if event > 0:
                blocks[event] = allocator.allocate(trace.allocations[event - 1].bytes)
            else:
                allocator.release(blocks.pop(-event))
        phases.append(Phase(name, allocator.totals.peak_allocated, allocator.totals.reserved))
    starts = dict(trace.phases)
    _, at = trace.peak(starts["first step"], starts["eval"])
    peak = trace.allocations[trace.events[at - 1] - 1]
    return Memory(tuple(phases), dict(trace.by_term(at, _term)), peak, layers)


def _term(number: int, allocation: Allocation) -> str:
    """What a storage that nobody tagged is for, from where it was made."""
    if not allocation.module or allocation.module.rpartition(".")[2] in ("lm_head", "embed_out"):
        return "loss"
    return "activations"


def _uniform(config: PretrainedConfig) -> bool:
    """Whether all layers are of one kind."""
    kinds = getattr(config, "layer_types", None)
    return kinds is None or len(set(kinds)) == 1


def _with_layers(setting: Setting, layers: int) -> Setting:
    config = copy.deepcopy(setting.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return replace(setting, config=config)


def _extend(few: Memory, more: Memory, layers: int) -> Memory:
    """The line through two depths, continued; in every phase and every term."""
    steps = layers - more.layers_simulated

    def line(a: int, b: int) -> int:
        return b + (b - a) * steps

    phases = tuple(
        Phase(a.name, line(a.allocated, b.allocated), line(a.reserved, b.reserved))
        for a, b in zip(few.phases, more.phases, strict=True)
    )
    first, second = Counter(few.terms), Counter(more.terms)
    terms = {name: line(first[name], second[name]) for name in second}
    return Memory(phases, terms, more.peak, more.layers_simulated)
