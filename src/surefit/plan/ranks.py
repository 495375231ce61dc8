"""A simulation of one process of several: the engine that `train` uses, in a world of other processes that do not
exist.

torch's "fake" process group has any number of processes in one: every collective returns at once, with its inputs
unchanged, and allocates the same memory as a real one. So DDP, `fully_shard`, tensor-parallel matrices, shared tokens
and the pipeline run as they are, on tensors without data, and the recorder sees the requests that one GPU's allocator
would receive. DeepSpeed reads the values of its buffers, so ZeRO is only calculated (`facts/memory_per_rank.py`).

Parts of torch's or our own code are replaced: comparisons of the processes' weights and trial runs, which need data;
the division of a shared batch's tokens, which is counted instead; and resized storages, which no dispatch mode sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp_group
import torch.nn.parallel.distributed as torch_ddp
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from surefit.config.modes import MODES
from surefit.config.schema import ParallelSection
from surefit.core.errors import MachineError
from surefit.facts.sharding import ShardingLayout
from surefit.model.varlen import ContextShard, PackedDocuments
from surefit.parallel import context_parallel, ddp, pipeline_parallel, tensor_parallel
from surefit.parallel.engine import Engine, build_engine
from surefit.parallel.process_group import World
from surefit.plan.trace import HOST, Recorder

GATHERED, REDUCED, BUCKETS, RECEIVED = "gathered weights", "reduction", "gradient buckets", "received states"


class RankRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A recorder for sharded tensors: of a `DTensor` only the local shard counts.

    Attributes:
        purpose: the tag of current allocations.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.purpose: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor unwraps itself, and the operators on its local tensors come here
        return super().__torch_dispatch__(func, types, args, kwargs)

    def tag(self, tensors: Any, what: str) -> None:
        super().tag(map(_to_local_tensor, tensors), what)

    def _note(self, tensor: torch.Tensor, op: str, module: str) -> None:
        super()._note(_to_local_tensor(tensor), op, module)

    def _allocate(self, *arguments: Any) -> int:
        number = super()._allocate(*arguments)
        if self.purpose is not None:
            self.trace.tags[number] = self.purpose
        return number

    def number_is_zero(self) -> None:
        """Read every int64 scalar as 0: a pipeline reads numbers of micro batches, which are alike, and the first is
        always present."""
        scalar = self._scalar
        assert scalar is not None
        self._scalar = lambda dtype, op: 0 if dtype == torch.int64 else scalar(dtype, op)

    @contextmanager
    def doing(self, purpose: str) -> Iterator[None]:
        outer, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = outer

    def on_host(self) -> None:
        """Tag all allocations so far as host memory."""
        self.trace.tags.update(dict.fromkeys(range(1, len(self.trace.allocations) + 1), HOST))

    def on_device(self, model: torch.nn.Module) -> None:
        """Remove the host tag from the model's current tensors, which are on the device."""
        for tensor in (*model.parameters(), *model.buffers()):
            number = self._live.get(_to_local_tensor(tensor).untyped_storage()._cdata)
            if number is not None and self.trace.tags.get(number) == HOST:
                del self.trace.tags[number]

    def resized(self, tensor: torch.Tensor) -> None:
        """Record that a storage has released its memory, or got it again."""
        storage = tensor.untyped_storage()
        number = self._live.pop(storage._cdata, None)
        if number is not None:
            self._watched.pop(number, None)
            self.trace.events.append(-number)
        if storage.nbytes():
            self._note(tensor, "gather", "")


def _to_local_tensor(tensor: torch.Tensor | None) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@contextmanager
def fake_process_group_engine(sharing: ShardingLayout) -> Iterator[Engine]:
    """Yield the engine of one process in a world whose other processes do not exist.

    Raises:
        MachineError: this process is already connected to real ones.
    """
    if dist.is_initialized():
        raise MachineError("this process is already one of several, so it cannot simulate another rank", code="E8004")
    dist.init_process_group("fake", store=FakeStore(), rank=sharing.rank, world_size=sharing.processes)
    try:
        yield _engine(sharing)
    finally:
        dist.destroy_process_group()


def _engine(sharing: ShardingLayout) -> Engine:
    mode = MODES[sharing.mode]
    if mode.deepspeed:
        raise MachineError(
            f"{sharing.mode} cannot be simulated: DeepSpeed reads the values of its tensors",
            code="E8005",
        )
    sizes = {sharing.mode: sharing.size} if mode.grouped else {"dp_replicate": sharing.processes // sharing.size}
    section = ParallelSection.model_validate({"mode": sharing.mode, "cp": sharing.tokens} | sizes)
    return build_engine(section, World(sharing.rank, sharing.processes, sharing.rank, sharing.processes))


def wrap_without_comparing(engine: Engine, model: torch.nn.Module, recorder: Recorder) -> torch.nn.Module:
    """Return `engine.wrap` of a model, without the checks that compare values."""
    if engine.world.size == 1:
        return engine.wrap(model)
    assert isinstance(recorder, RankRecorder)
    if MODES[engine.name].loads_on_host:
        recorder.on_host()
    with ExitStack() as stack:
        for owner, name, replacement in _UNCOMPARED:
            stack.enter_context(patch.object(owner, name, replacement))
        if engine.name == "ddp":
            stack.enter_context(recorder.doing(BUCKETS))
        model = engine.wrap(model)
    if isinstance(engine, ddp.DataParallel):
        assert engine.ddp is not None
        engine.ddp.reducer = _Reducer(engine.ddp.reducer)  # type: ignore[assignment]
    recorder.on_device(model)
    return model


def _nothing(*_: Any, **__: Any) -> None:
    return None


_UNCOMPARED: tuple[tuple[Any, str, Any], ...] = (
    (torch_ddp, "_verify_param_shape_across_processes", lambda *_, **__: True),
    (torch_ddp, "_sync_module_states", _nothing),
    (context_parallel, "require_packable", _nothing),
    (context_parallel.SharedTokens, "_require_shareable", _nothing),
    (pipeline_parallel._Parts, "require_exact", _nothing),
    (tensor_parallel, "_hidden", _nothing),
    (tensor_parallel, "_require_same", _nothing),
    (torch.nn.Module, "to", lambda module, *_, **__: module),
)


class _Reducer:
    """DDP's reducer without its bucket rebuild, which after the first step would agree with the other ranks on another
    order."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def patch_collectives(recorder: Recorder, engine: Engine) -> Iterator[None]:
    """Replace, while a shared step runs, the parts that the fake group leaves out and those that the recorder would not
    see."""
    assert isinstance(recorder, RankRecorder)
    if engine.name == "pp":
        recorder.number_is_zero()
    with ExitStack() as stack:
        for owner, name, replacement in (
            (ddp, "_sum", _return_bucket),
            (context_parallel, "shard_micro_batch", _fake_context_shard),
            (fsdp_param, "alloc_storage", _with_recorded_resize(fsdp_param.alloc_storage, recorder, GATHERED)),
            (fsdp_group, "alloc_storage", _with_recorded_resize(fsdp_param.alloc_storage, recorder, GATHERED)),
            (fsdp_param, "free_storage", _with_recorded_resize(fsdp_param.free_storage, recorder, GATHERED)),
            *(
                (owner, name, _with_purpose(getattr(owner, name), recorder, purpose))
                for owner, name, purpose in (
                    (fsdp_group.FSDPParamGroup, "unshard", GATHERED),
                    (fsdp_group.FSDPParamGroup, "wait_for_unshard", GATHERED),
                    (fsdp_group, "foreach_reduce", REDUCED),
                    (PipelineStage, "_prepare_forward_infra", RECEIVED),
                    (PipelineStage, "_prepare_backward_infra", RECEIVED),
                    # DTensor finds the shape of a result by running the operator on tensors without data.
                    (ShardingPropagator, "_propagate_tensor_meta_non_cached", HOST),
                )
            ),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield


def _with_recorded_resize(resize: Callable[[torch.Tensor], None], recorder: RankRecorder, purpose: str) -> Any:
    def resized(tensor: torch.Tensor) -> None:
        before = tensor.untyped_storage().nbytes()
        resize(tensor)
        if tensor.untyped_storage().nbytes() != before:
            with recorder.doing(purpose):
                recorder.resized(tensor)

    return resized


def _with_purpose(function: Callable[..., Any], recorder: RankRecorder, purpose: str) -> Any:
    def called(*arguments: Any, **keywords: Any) -> Any:
        with recorder.doing(purpose):
            return function(*arguments, **keywords)

    return called


def _return_bucket(state: Any, bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_return_bucket.__annotations__ = ddp._sum.__annotations__  # DDP compares types, not their names


def _fake_context_shard(
    batch: Any, rank: int, size: int, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> tuple[dict[str, Any], ContextShard]:
    """Return a rank's part of a micro batch as in context parallelism, from the lengths of its documents alone."""
    rows, length = batch["input_ids"].shape
    lengths = batch["document_lengths"] if "document_lengths" in tuple(batch) else (length,) * rows
    pieces = context_parallel.split_documents_across_ranks(lengths, size)
    tokens_per_rank = [sum(piece.last - piece.first for piece in ranges) for ranges in pieces]
    count = 1 + max(tokens_per_rank)
    key_lengths = [piece.last - piece.document for piece in pieces[rank]]
    supervised = -(-len(batch["targets"]) * tokens_per_rank[rank] // sum(lengths))
    ids, loss_rows = (torch.zeros(shape, dtype=torch.int64) for shape in ((1, count), (supervised,)))
    part: dict[str, Any] = {
        "input_ids": ids, "position_ids": torch.zeros_like(ids),
        "loss_rows": loss_rows, "targets": torch.zeros_like(loss_rows),
    }  # fmt: skip
    names = tuple(batch)
    if "answer_targets" in names:
        answers = len(batch["answer_targets"])
        each, more = divmod(supervised, answers)
        part |= {name: batch[name] for name in ("answer_targets", "reference_log_probs") if name in names}
        part["own_targets"] = tuple(each + (answer < more) for answer in range(answers))
    padding = count - tokens_per_rank[rank]
    queries = _documents([*(piece.last - piece.first for piece in pieces[rank]), padding])
    order = torch.zeros(sum(key_lengths) + padding, dtype=torch.int64)
    return part, ContextShard(queries, _documents([*key_lengths, padding]), order, gather)


def _documents(lengths: list[int]) -> PackedDocuments:
    return PackedDocuments(torch.zeros(len(lengths) + 1, dtype=torch.int32), tuple(lengths), max(lengths))
