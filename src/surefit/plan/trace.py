"""A recorder of the allocations of PyTorch code, on real tensors or fake ones.

A dispatch mode sees every operator below autograd. It notes each storage when an operator first returns it and when its
last reference is gone, so the trace holds the requests to a device allocator, in order.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from surefit.plan.allocator import ROUNDING

T = TypeVar("T")
HOST = "meta"
"""Device, and tag, of the tensors that stand for the host's memory where a GPU is simulated on fake CPU tensors."""

HiddenTemporaries = Callable[[tuple[Any, ...], dict[str, Any]], list[int]]
"""(args, kwargs) of an operator → bytes of the temporaries that its CUDA kernel allocates inside."""
ReplayCallback = Callable[[], object]
OperatorWatch = Callable[[str, Any, tuple[Any, ...], dict[str, Any], Any], ReplayCallback | None]
"""(phase, operator, args, kwargs, result): called after every operator; the callback that it returns is called wherever
that operator is repeated (`Recorder.repeating`)."""

TEMPORARY = "temporaries"
"""Tag of the results that an operator outside of the model computes from weights and gradients, and of the temporaries
inside a kernel."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One storage: its bytes as rounded by the allocator, and its origin."""

    bytes: int
    op: str
    phase: str
    module: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class _Part:
    """Record of a piece of code: its events, the number of allocations before them, the module it worked on, and the
    callbacks that report it to the watch again."""

    module: str
    first: int
    events: list[int]
    again: list[ReplayCallback]


@dataclass
class Trace:
    """Allocations in the order they were made.

    Attributes:
        allocations: each storage once.
        events: `+i` where allocation i - 1 is made, `-i` where it is freed.
        phases: (phase, position in `events` where it starts), in order.
        tags: allocation number → its use, where the caller named one.
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    tags: dict[int, str] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        return [allocation.bytes for allocation in self.allocations]

    def peak(self, start: int = 0, end: int | None = None) -> tuple[int, int]:
        """Return (bytes, position just after it) of the fullest moment between two positions."""
        live = highest = 0
        peak_position = start
        for position, event in enumerate(self.events[:end]):
            size = self.allocations[abs(event) - 1].bytes
            live += size if event > 0 else -size
            if position >= start and live > highest:
                highest, peak_position = live, position + 1
        return highest, peak_position

    def live_at(self, position: int) -> list[int]:
        """Return the numbers of the allocations that are alive just before `events[position]`."""
        alive: dict[int, None] = {}
        for event in self.events[:position]:
            if event > 0:
                alive[event] = None
            else:
                alive.pop(-event, None)
        return list(alive)

    def without(self, tag: str) -> Trace:
        """Return the trace without the events of allocations that have this tag."""
        dropped = {number for number, name in self.tags.items() if name == tag}
        if not dropped:
            return self
        positions = list(accumulate((abs(event) not in dropped for event in self.events), initial=0))
        phases = [(name, positions[start]) for name, start in self.phases]
        return replace(self, events=[event for event in self.events if abs(event) not in dropped], phases=phases)

    def by_term(self, position: int, term: Callable[[int, Allocation], str]) -> Counter[str]:
        """Return the bytes alive at a position by term: the tag, or the name that `term` returns."""
        terms: Counter[str] = Counter()
        for number in self.live_at(position):
            allocation = self.allocations[number - 1]
            terms[self.tags.get(number) or term(number, allocation)] += allocation.bytes
        return terms


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records allocations into `trace` while it is active.

    Args:
        scalar: returns the value that is read out of a fake tensor (`.item()`), from its dtype and the operator that
            made it; None for real tensors.
        hidden: operator name → the temporaries of its CUDA kernel.
        matmuls, workspace: before the first of these operators in a pass (forward, backward) this many bytes are
            allocated for good.

    Attributes:
        watch: called for every operator, where it is set.
    """

    def __init__(
        self,
        scalar: Callable[[torch.dtype, str], Any] | None = None,
        hidden: dict[str, HiddenTemporaries] | None = None,
        matmuls: frozenset[str] = frozenset(),
        workspace: int = 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.watch: OperatorWatch | None = None
        self.phase = ""
        self._module: list[str] = []
        self._forward_of: dict[int, str] = {}
        self._scalar, self._hidden = scalar, hidden or {}
        self._matmuls, self._workspace = matmuls, workspace
        self._workspaces: set[bool] = set()
        self._live: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._repeated: dict[Hashable, _Part] = {}
        self._again: list[ReplayCallback] = []

    def start(self, phase: str) -> None:
        """Begin a phase: allocations from now on belong to it."""
        self.phase = phase
        self.trace.phases.append((phase, len(self.trace.events)))

    def tag(self, tensors: Iterable[torch.Tensor | None], what: str) -> None:
        """Name the use of tensors; tensors not seen yet count as allocated now."""
        for tensor in tensors:
            if tensor is None:
                continue
            self._note(tensor, "given", "")
            number = self._live.get(_storage(tensor))
            if number is not None and self.trace.tags.get(number, TEMPORARY) == TEMPORARY:
                self.trace.tags[number] = what

    @contextlib.contextmanager
    def inside(self, module: str) -> Iterator[None]:
        """Assign allocations in this block to the module of this name, as in its forward pass."""
        self._module.append(module)
        try:
            yield
        finally:
            self._module.pop()

    @contextlib.contextmanager
    def naming(self, model: torch.nn.Module) -> Iterator[None]:
        """Note for each allocation the module whose forward pass it belongs to, in the backward pass as well."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._module.append(name)))
            handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def repeating(self, key: Hashable, module: str, run: Callable[[], object]) -> None:
        """Record the allocations of `run` for a module; where a run with an equal key left nothing alive in the same
        phase, repeat its events instead of running.

        Args:
            key: everything that decides which operators run and which allocations are made.
            module: the module of its tensors.
        """
        key = self.phase, key
        if key in self._repeated:
            return self._repeat(self._repeated[key], module)
        first, start, callbacks = len(self.trace.allocations), len(self.trace.events), len(self._again)
        run()
        events = self.trace.events[start:]
        if set(events) == {-event for event in events}:  # nothing stays alive, as a first workspace would
            self._repeated[key] = _Part(module, first, events, self._again[callbacks:])

    def repeat_keeping(self, run: Callable[[], T], times: int) -> list[T]:
        """Record this many runs whose results all stay alive until the end of the trace.

        Where the second run has freed only what it has made, its events are repeated instead of running the others.

        Returns:
            The results of the runs that were not repeated.
        """
        results = [run()]
        if times > 1:
            first, start, callbacks = len(self.trace.allocations), len(self.trace.events), len(self._again)
            results.append(run())
            part = _Part("", first, self.trace.events[start:], self._again[callbacks:])
            if all(-event > first for event in part.events if event < 0):
                for _ in range(times - 2):
                    self._repeat(part, "")
            else:
                results += [run() for _ in range(times - 2)]
        return results

    def _repeat(self, part: _Part, module: str) -> None:
        shift = len(self.trace.allocations) - part.first
        for event in part.events:
            if event > 0:
                allocation = self.trace.allocations[event - 1]
                self.trace.allocations.append(
                    replace(allocation, module=module) if allocation.module == part.module else allocation
                )
                if event in self.trace.tags:
                    self.trace.tags[event + shift] = self.trace.tags[event]
            self.trace.events.append(event + shift if event > 0 else event - shift)
        for callback in part.again:
            callback()

    def _leave(self) -> None:
        self._module.pop()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing compiles while this records, and hiding each call from the compiler takes as long as
        the call itself."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls: autograd reads the device of every gradient
        kwargs = kwargs or {}
        if self._scalar is not None and func is torch.ops.aten._local_scalar_dense.default:
            if self.watch is not None:
                self.watch(self.phase, func, args, kwargs, None)
            return self._scalar(args[0].dtype, self._made_by(args[0]))
        name, module = func.__name__, self._where()
        self._open_workspace(func._overloadpacket.__name__)
        temporaries = [
            self._allocate(size, name, module, (size,), "uint8") for size in self._temporaries(func, args, kwargs)
        ]
        self.trace.tags.update(dict.fromkeys(temporaries, TEMPORARY))
        out = func(*args, **kwargs)
        for position, leaf in enumerate((out,) if isinstance(out, torch.Tensor) else tree_leaves(out)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, name, module) if module else self._note_outside(leaf, name, args, position)
        self.trace.events.extend(-number for number in temporaries)
        if self.watch is not None:
            self._again += filter(None, [self.watch(self.phase, func, args, kwargs, out)])
        return out

    def _made_by(self, tensor: torch.Tensor) -> str:
        number = self._live.get(_storage(tensor))
        return self.trace.allocations[number - 1].op.partition(".")[0] if number is not None else ""

    def _open_workspace(self, op: str) -> None:
        """Allocate the workspace that stays, at each thread's first matrix product."""
        backward = torch._C._current_autograd_node() is not None
        if op in self._matmuls and backward not in self._workspaces:
            self._workspaces.add(backward)
            number = self._allocate(self._workspace, op, "", (self._workspace,), "uint8")
            self.trace.tags[number] = "workspace"

    def _temporaries(self, func: Any, args: Any, kwargs: Any) -> list[int]:
        hidden = self._hidden.get(func._overloadpacket.__name__)
        return hidden(args, kwargs) if hidden else []

    def _note_outside(self, tensor: torch.Tensor, op: str, args: tuple[Any, ...], position: int) -> None:
        """Note the result of an operator outside of the model under the module of its first argument, or of the
        matching item of the list there. A result computed from weights and gradients is temporary, until the caller
        tags it."""
        first = args[0] if args else None
        if isinstance(first, list | tuple):
            first = first[position] if position < len(first) else None
        owner = self._live.get(_storage(first)) if isinstance(first, torch.Tensor) else None
        if owner is None:
            return self._note(tensor, op, "")
        before = len(self.trace.allocations)
        self._note(tensor, op, self.trace.allocations[owner - 1].module)
        if owner in self.trace.tags and len(self.trace.allocations) > before:
            self.trace.tags[before + 1] = TEMPORARY

    def _note(self, tensor: torch.Tensor, op: str, module: str) -> None:
        key = _storage(tensor)
        if key in self._live or tensor.device.type == HOST:
            return
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // ROUNDING) * ROUNDING
        if size == 0:
            return
        number = self._allocate(size, op, module, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        self._live[key] = number

        def note_freed(_: Any) -> None:
            if self._live.get(key) == number:
                del self._live[key]
            self._watched.pop(number, None)
            self.trace.events.append(-number)

        self._watched[number] = weakref.ref(storage, note_freed)

    def _allocate(self, size: int, op: str, module: str, shape: tuple[int, ...], dtype: str) -> int:
        self.trace.allocations.append(Allocation(size, op, self.phase, module, shape, dtype))
        number = len(self.trace.allocations)
        self.trace.events.append(number)
        return number

    def _where(self) -> str:
        """Return the innermost module in the forward pass; in the backward pass the one whose operator is
        differentiated."""
        if self._module:
            # The node that autograd makes for this operator has the number before the next one.
            self._forward_of[torch._C._autograd._get_sequence_nr() - 1] = self._module[-1]
            return self._module[-1]
        node = torch._C._current_autograd_node()
        return self._forward_of.get(node._sequence_nr(), "") if node is not None else ""


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
