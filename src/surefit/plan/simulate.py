"""The memory of a training run, found by running its real step on tensors that have no data.

The model is built on the meta device, its parameters become fake tensors, and `train.step.train_step` runs on them
under a `Recorder`. Its trace holds the requests that a GPU's allocator would receive; `plan.allocator` computes the
memory that they occupy. Nothing is downloaded, no weight is read, and a 70B model needs no more host memory here than a
small one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from surefit.config.schema import TrainSection
from surefit.core.malloc import SMALL_THRESHOLD, SMALL_TRIM, THRESHOLD, TRIM
from surefit.model.attention import packing_disagreement
from surefit.model.compat import reads_masks_of_fake_tensors
from surefit.model.quantize import hidden_tensors
from surefit.parallel.engine import SINGLE, Engine
from surefit.plan.allocator import CachingAllocator
from surefit.plan.building import apply_training_options, build_micro_batch, build_model, materialize_parameters
from surefit.plan.cuda import (
    HIDDEN_TEMPORARIES,
    MATMULS,
    cublas_thread_workspace_bytes,
    cuda_context_bytes,
    emulate_cuda_operators,
    page_optimizer_states,
)
from surefit.plan.extrapolate_layers import SHALLOW, extrapolate_trace
from surefit.plan.fake import FakeMode
from surefit.plan.malloc import Malloc
from surefit.plan.merging import merge_reads_files, run_merge
from surefit.plan.ranks import RankRecorder, fake_process_group_engine, patch_collectives, wrap_without_comparing
from surefit.plan.step_config import CacheKey, StepConfig, require_sizes
from surefit.plan.trace import HOST, Allocation, OperatorWatch, Recorder, Trace
from surefit.train import loss
from surefit.train.objectives.build import build_objective
from surefit.train.optim import MasterOptimizer, make_optimizer
from surefit.train.scaling import LossScale
from surefit.train.step import CROSS_ENTROPY, measure, train_step

OnModel = Callable[[torch.nn.Module, Recorder], None]
TRAINED = ("first step", "step", "save")
"""Phases after loading, in order."""
DEEP = 8
"""Largest number of layers of a model that is run whole."""


@dataclass(frozen=True)
class PhasePeak:
    """The fullest moment of a phase: bytes in tensors, and bytes that the allocator holds from the driver, or on a CPU
    from the system."""

    name: str
    allocated: int
    reserved: int

    @property
    def fragmentation(self) -> int:
        """Bytes that the allocator holds and no tensor uses, at the latest when the phase ends."""
        return self.reserved - self.allocated


@dataclass(frozen=True)
class SimulatedMemory:
    """Memory that a run needs on one device.

    Attributes:
        phases: in the order of the run. `merge` is in its own process, one for all ranks, with its own allocator.
        terms: bytes at the fullest moment of a step by their use; they add up to its `allocated`. "unsplit" is the
            memory that the allocator gives a tensor beyond its size because the rest of the block is too small to split
            off.
        peak: the allocation that makes it the fullest, with its operator, module and phase.
        layers_simulated: number of the model's layers that were run; the trace of the others repeats theirs.
        context: bytes of the CUDA context beside the allocator; 0 on a CPU.
        kept: the phases on a CPU where malloc keeps freed memory, as in a small process (`core.malloc`); else empty.
    """

    phases: tuple[PhasePeak, ...]
    terms: dict[str, int]
    peak: Allocation
    layers_simulated: int
    context: int = 0
    kept: tuple[PhasePeak, ...] = ()

    @property
    def allocated(self) -> int:
        return max(phase.allocated for phase in self.phases)

    @property
    def reserved(self) -> int:
        return max(phase.reserved for phase in self.phases)

    @property
    def fragmentation(self) -> int:
        """Bytes that the allocator holds beyond the fullest moment of the tensors."""
        return self.reserved - self.allocated


def simulate_memory(
    setting: StepConfig, expandable: bool = False, extrapolate: bool = True, merge: bool = True
) -> SimulatedMemory:
    """Return the memory of every phase.

    Args:
        setting: the training step, and the device.
        expandable: the allocator's `expandable_segments`.
        extrapolate: run a few layers and repeat their trace, where the model has more than `DEEP` layers that are
            alike.
        merge: simulate also the process that merges.

    Raises:
        ConfigError, ModelError: numbers that no run can have.
    """
    require_sizes(setting)
    training, layers = _trace(setting, record_training, extrapolate)
    replay: Callable[[Trace], list[PhasePeak]] = _replay_on_cpu
    if setting.cuda:
        replay = partial(_replay, expandable=expandable)
    phases = [phase for phase in replay(training) if phase.name != "end"]
    kept = [] if setting.cuda else [phase for phase in _replay_kept(training) if phase.name != "end"]
    if merge:
        merging, _ = _trace(setting, record_merge, extrapolate)
        merged = [phase for phase in replay(merging) if phase.name == "merge"]
        phases, kept = [*phases, *merged], [*kept, *merged] if kept else []
    starts = dict(training.phases)
    steps_end = starts["save"] if setting.cuda else starts.get("eval", starts["end"])
    tensors, peak_position = training.peak(starts["first step"], steps_end)
    terms = dict(training.by_term(peak_position, _term))
    if unsplit := max(phase.allocated for phase in phases if phase.name in ("first step", "step")) - tensors:
        terms["unsplit"] = unsplit
    return SimulatedMemory(
        tuple(phases),
        terms,
        training.allocations[training.events[peak_position - 1] - 1],
        layers,
        cuda_context_bytes(setting.capability) if setting.cuda else 0,
        tuple(kept),
    )


@lru_cache(maxsize=256)
def simulate_memory_cached(known: CacheKey) -> SimulatedMemory:
    """Return `simulate_memory`, computed once for settings that need the same memory."""
    return simulate_memory(known.setting)


def _trace(setting: StepConfig, run: Callable[[StepConfig], Trace], extrapolate: bool) -> tuple[Trace, int]:
    """Return the trace of the whole model, and the number of layers it was recorded from."""
    if extrapolate and setting.layers > DEEP and setting.uniform:
        deep = extrapolate_trace(run(setting.with_layers(SHALLOW)), setting.layers)
        if deep is not None:
            return deep, SHALLOW
    return run(setting), setting.layers


def record_training(setting: StepConfig, watch: OperatorWatch | None = None) -> Trace:
    """Return the allocations of loading, two steps, a checkpoint and one held-out batch; on a CPU the checkpoint comes
    between the steps if `setting.saves_between`, because its copy stays.

    `watch` is called for every operator. With it the first step is only an update, from gradients of zero: the
    operators of the second step are the same.
    """

    def run(model: torch.nn.Module, recorder: Recorder, engine: Engine = SINGLE) -> None:
        recorder.watch = watch
        run_training(model, setting, recorder, whole=watch is None, engine=engine)

    if setting.sharing is None:
        return _record(setting, run)

    def run_shared(model: torch.nn.Module, recorder: Recorder) -> None:
        with patch_collectives(recorder, engine):
            run(model, recorder, engine)

    # Outside of the fake mode: ranks are read from real tensors.
    with fake_process_group_engine(setting.sharing) as engine:
        return _record(setting, run_shared)


def record_merge(setting: StepConfig) -> Trace:
    """Return the allocations of `merge.merge` alone, which one process runs; the rows it reads differ in length."""
    setting = replace(setting, packed=False, padded=True, sharing=None)
    load = partial(materialize_parameters, weights=not merge_reads_files(setting), quantises=setting.cuda)
    return _record(setting, lambda model, recorder: run_merge(model, setting, recorder), load)


def _record(setting: StepConfig, run: OnModel, load: OnModel | None = None) -> Trace:
    load = load or partial(materialize_parameters, quantises=setting.cuda)
    return record_run(
        build_model(setting, "meta"), run, padded=setting.padded, cuda=setting.cuda, capability=setting.capability,
        kind=Recorder if setting.sharing is None else RankRecorder, load=load,
    )  # fmt: skip


def record_run(
    model: torch.nn.Module,
    run: OnModel,
    *,
    padded: bool,
    cuda: bool,
    capability: tuple[int, int] = (8, 0),
    kind: type[Recorder] = Recorder,
    load: OnModel = materialize_parameters,
) -> Trace:
    """Return the allocations of any code that trains a model on the meta device; its parameters are made in phase
    "load".

    Args:
        model: on the meta device, its adapter included.
        run: called with the model with fake parameters, and the recorder to name phases with.
        padded: whether the attention mask reads as padded.
        cuda: with the operators of a GPU, of this compute capability.
        kind: class of the recorder.
        load: makes the model's parameters.
    """
    recorder = (
        kind(_Scalar(padded), HIDDEN_TEMPORARIES, MATMULS, cublas_thread_workspace_bytes(capability))
        if cuda
        else kind(_Scalar(padded))
    )
    with ExitStack() as stack:
        stack.enter_context(FakeMode(allow_non_fake_inputs=True))
        stack.enter_context(reads_masks_of_fake_tensors())
        if cuda:
            stack.enter_context(emulate_cuda_operators(capability))
        stack.enter_context(_repeated_chunks(recorder))
        stack.enter_context(recorder)
        recorder.start("load")
        load(model, recorder)
        recorder.tag((p for p in model.parameters() if not p.requires_grad), "weights")
        recorder.tag(model.buffers(), "weights")
        recorder.tag((tensor for *_, tensor in hidden_tensors(model)), "weights")
        run(model, recorder)
        recorder.start("end")
    # A copy: the model's tensors are freed when it is garbage collected, which is no part of the run.
    return replace(recorder.trace, events=list(recorder.trace.events)).without(HOST)


def _repeated_chunks(recorder: Recorder) -> AbstractContextManager[Any]:
    """Repeat the events of the first chunk of a loss for later chunks that do the same, and do not run these: the trace
    is the same event for event, and a simulation takes a third of its time less."""
    add_chunk = loss.add_chunk

    def add(
        head: Any, rows: slice, targets: torch.Tensor, hidden: torch.Tensor, out: Any, trained: Any, total: Any,
        sums: list[Any], coefficients: Any = None,
    ) -> None:  # fmt: skip
        kinds = (out is None, [new is None for new in sums], total.dim(), coefficients is None)
        key = (rows.stop - rows.start, hidden.shape[1:], hidden.dtype, *kinds)
        run = partial(add_chunk, head, rows, targets, hidden, out, trained, total, sums, coefficients)
        recorder.repeating(repr(key), "", run)

    return patch.object(loss, "add_chunk", add)


def run_training(
    model: torch.nn.Module, setting: StepConfig, recorder: Recorder, whole: bool = True, engine: Engine = SINGLE
) -> None:
    """Run the steps of `train.loop` with a model on its device, real or fake; the caller records. `whole`: also the
    first step and a checkpoint."""
    mapped_pages = torch.empty(setting.mapped, dtype=torch.uint8)
    recorder.tag([mapped_pages], "weight files")
    scratch = torch.empty(setting.products, dtype=torch.uint8)
    recorder.tag([scratch], "matrix products")
    if whole and setting.cuda and setting.packed and engine.loading_device("cuda") == "cuda":
        _prove_packable(model, recorder)
    model.train()
    apply_training_options(model, setting)
    model = wrap_without_comparing(engine, model, recorder)
    trained = [p for p in model.parameters() if p.requires_grad]
    recorder.tag(trained, "weights" if setting.adapter is None else "adapter")
    recorder.tag((p for p in model.parameters() if not p.requires_grad), "weights")
    optimizer = engine.optimizer(model, partial(make_optimizer, train=TrainSection(optim=setting.optimizer)))  # type: ignore[arg-type]
    if setting.cuda:
        page_optimizer_states(optimizer, recorder)
    recorder.tag(optimizer.tensors().values(), "optimizer")
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda p: recorder.tag([p.grad], "gradients")
        )
    scaling = LossScale() if setting.dtype == "float16" else None
    objective = CROSS_ENTROPY if setting.objective is None else build_objective(setting.objective)
    with recorder.naming(model):
        if not whole:
            _first_update(trained, optimizer)
        copies: list[torch.Tensor] = []
        saves_between = not setting.cuda and setting.saves_between
        for phase in (("first step", "save", "step") if saves_between else TRAINED) if whole else ("step",):
            recorder.start(phase)
            if phase == "save":
                copies = _copy_for_checkpoint(setting, [*trained, *optimizer.tensors().values()], recorder)
                continue
            batches = [build_micro_batch(setting, recorder) for _ in range(setting.micro_batches)]
            train_step(
                model, batches, optimizer, 1.0,
                chunked=setting.chunked, scaling=scaling, engine=engine, objective=objective,
            )  # fmt: skip
            recorder.tag(optimizer.tensors().values(), "optimizer")
            del batches
        if setting.evaluates:
            recorder.start("eval")
            rows, length, shared = setting.eval_shape or (setting.rows, setting.length, setting.shared)
            held_out = build_micro_batch(replace(setting, rows=rows, length=length, shared=shared), recorder)
            measure(model, [held_out], chunked=setting.chunked, engine=engine, objective=objective)
        del copies


def _prove_packable(model: Any, recorder: Recorder) -> None:
    """Run the check of `model.prepare` before training on packed batches: two short documents, through products that
    open the forward pass's cuBLAS workspace. `model.prepare` reports a model that does not support it."""
    with recorder.naming(model), suppress(TypeError, ValueError, LookupError, AttributeError, RuntimeError):
        packing_disagreement(model)


def _copy_for_checkpoint(setting: StepConfig, tensors: list[torch.Tensor], recorder: Recorder) -> list[torch.Tensor]:
    """Return the copies that a checkpoint keeps on the device: none on a GPU, where it is copied to the host; on a CPU
    `checkpoint.snapshot` keeps its copy for the next."""
    copies = [tensor.detach().contiguous() if setting.cuda else tensor.detach().clone() for tensor in tensors]
    if setting.cuda:
        return []
    recorder.tag(copies, "checkpoint's copy")
    return copies


def _first_update(trained: list[torch.nn.Parameter], optimizer: MasterOptimizer) -> None:
    """Run an update from gradients of zero, which makes the optimizer's moments."""
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


class _Scalar:
    """Values that code reads out of a fake tensor: whether nothing is padded, whether dropout spares a module, a
    count."""

    def __init__(self, padded: bool) -> None:
        self.padded = padded

    def __call__(self, dtype: torch.dtype, op: str) -> Any:
        if dtype != torch.bool:
            return 1.0 if dtype.is_floating_point else 1
        if op == "any":  # is anything not a number?
            return False
        # Is a random number above the probability of dropping a module? Else: is the mask all ones?
        return op in ("gt", "ge") or not self.padded


def _replay(trace: Trace, expandable: bool) -> list[PhasePeak]:
    """Return the allocator's totals of each phase, in order."""
    allocator = CachingAllocator(expandable)
    blocks: dict[int, Any] = {}
    phases = []
    for (name, start), (_, end) in pairwise([*trace.phases, ("", len(trace.events))]):
        allocator.totals.peak_allocated = allocator.totals.allocated
        for event in trace.events[start:end]:
            if event > 0:
                blocks[event] = allocator.allocate(trace.allocations[event - 1].bytes)
            else:
                allocator.release(blocks.pop(-event))
        phases.append(PhasePeak(name, allocator.totals.peak_allocated, allocator.totals.reserved))
    return phases


def _replay_kept(trace: Trace) -> list[PhasePeak]:
    """Return the totals of each phase on a CPU, in a process that keeps small blocks when they are freed."""
    return _replay_on_cpu(trace, SMALL_THRESHOLD, SMALL_TRIM)


def _replay_on_cpu(trace: Trace, threshold: int = THRESHOLD, trim: int = TRIM) -> list[PhasePeak]:
    """Return the totals of each phase on a CPU, where freed memory goes back to the system: `reserved` is the maximum
    of the phase, not of all phases up to it."""
    malloc, live = Malloc(threshold, trim), 0
    blocks: dict[int, Any] = {}
    phases = []
    for (name, start), (_, end) in pairwise([*trace.phases, ("", len(trace.events))]):
        malloc.peak, highest = malloc.resident, live
        for event in trace.events[start:end]:
            size = trace.allocations[abs(event) - 1].bytes
            live += size if event > 0 else -size
            highest = max(highest, live)
            if event > 0:
                blocks[event] = malloc.allocate(size)
            else:
                malloc.release(blocks.pop(-event))
        phases.append(PhasePeak(name, highest, malloc.peak))
    return phases


def _term(number: int, allocation: Allocation) -> str:
    """Return the use of a storage without a tag, from the module that made it."""
    if not allocation.module or allocation.module.rpartition(".")[2] in ("lm_head", "embed_out"):
        return "loss"
    return "activations"
