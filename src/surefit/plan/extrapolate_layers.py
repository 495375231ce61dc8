"""The trace of a deep model from the trace of a shallow one, by repeating the events of one of its middle layers.

All layers of a decoder request the same blocks from the allocator in the same order; only the first and the last differ
from the others. So a model of `SHALLOW` layers is run, and wherever its trace goes through the layers one after another
(forward, backward, update, the clearing of gradients), the part of the middle layer is inserted once for each missing
layer. A tensor that one layer makes and its neighbor frees keeps that relation. The result is a trace like any other:
it can be replayed, so reserved memory is not extrapolated but computed.

A storage whose size depends on the number of layers is left as it is: the stacked norms of clipping, a few hundred
bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from surefit.plan.trace import Trace

SHALLOW = 5
"""Layers to run: the first and the last are special, and the middle one's neighbors must be like it."""
MIDDLE = SHALLOW // 2
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def layer_of(module: str) -> int | None:
    """Return the first number in a module's dotted name.

    >>> layer_of("model.layers.3.mlp.experts.7"), layer_of("lm_head")
    (3, None)
    """
    match = _NUMBER.search(module)
    return int(match[1]) if match else None


@dataclass
class _Block:
    """Successive events of one layer; `layer` is None where they belong to none."""

    layer: int | None
    phase: int
    events: list[int] = field(default_factory=list)

    @property
    def made(self) -> list[int]:
        return [event for event in self.events if event > 0]


def extrapolate_trace(trace: Trace, layers: int) -> Trace | None:
    """Return the trace of `layers` like layers, from a trace of `SHALLOW`; None where its layers turn out not to be
    alike."""
    blocks = _blocks(trace)
    next_twin = _match_neighboring_layers(trace, blocks)
    if next_twin is None:
        return None
    return _TraceExtrapolator(trace, blocks, next_twin, layers).build()


def _blocks(trace: Trace) -> list[_Block]:
    """Split the events where another layer's allocation, or another phase, begins.

    A freed allocation belongs to the layer that runs, except where one sweep frees something of every layer.
    """
    layers = [layer_of(allocation.module) for allocation in trace.allocations]
    blocks: list[_Block] = []
    for phase, ((_, start), (_, end)) in enumerate(pairwise([*trace.phases, ("", len(trace.events))])):
        blocks.append(_Block(None, phase))
        for is_made, group in groupby(trace.events[start:end], key=lambda event: event > 0):
            events = list(group)
            sweep = not is_made and set(range(SHALLOW)) <= {layers[-event - 1] for event in events}
            for event in events:
                layer = layers[abs(event) - 1] if is_made or sweep else None
                if layer is not None and layer != blocks[-1].layer:
                    blocks.append(_Block(layer, phase))
                blocks[-1].events.append(event)
    return blocks


def _match_neighboring_layers(trace: Trace, blocks: list[_Block]) -> dict[int, int] | None:
    """Return the allocation of a layer next to the middle or the middle itself → the same one of the following layer.

    None where one of those three layers makes an allocation that its neighbor does not make.
    """
    following: dict[int, int] = {}
    for a, b in pairwise(blocks):
        if a.layer is None or b.layer is None or abs(a.layer - b.layer) != 1 or a.phase != b.phase:
            continue
        low, high = (a, b) if a.layer < b.layer else (b, a)
        if low.layer not in (MIDDLE - 1, MIDDLE):
            continue
        low_numbers, high_numbers = low.made, high.made
        sizes = [[trace.allocations[number - 1].bytes for number in side] for side in (low_numbers, high_numbers)]
        if sizes[0] != sizes[1]:
            return None
        following |= dict(zip(low_numbers, high_numbers, strict=True))
    return following


class _TraceExtrapolator:
    """Copier of a trace block by block, with the middle layer's blocks repeated for the missing layers."""

    def __init__(self, trace: Trace, blocks: list[_Block], following: dict[int, int], layers: int) -> None:
        self.old, self.new, self.more = trace, Trace(), layers - SHALLOW
        self.blocks = blocks
        self.following, self.preceding = following, {b: a for a, b in following.items()}
        self.layer = {number: block.layer for block in blocks for number in block.made}
        self.made: dict[tuple[int, int | None], int] = {}
        self.freed: set[int] = set()

    def build(self) -> Trace | None:
        phase = -1
        for block, layer in self._order():
            if block.phase != phase:
                phase = block.phase
                self.new.phases.append((self.old.phases[phase][0], len(self.new.events)))
            for event in block.events:
                if event > 0:
                    self._make(event, layer)
                elif not self._free(-event, block.layer, layer):
                    return None
        return self.new if self._same_lifetimes() else None

    def _order(self) -> Iterator[tuple[_Block, int | None]]:
        """Yield every block with the number of its layer in the deep model: copies go between the middle and the
        next."""
        copies = range(MIDDLE + 1, MIDDLE + 1 + self.more)
        before: _Block | None = None
        for block in self.blocks:
            if before is not None and before.phase == block.phase:
                if (before.layer, block.layer) == (MIDDLE, MIDDLE + 1):
                    yield from ((before, copy) for copy in copies)
                elif (before.layer, block.layer) == (MIDDLE + 1, MIDDLE):
                    yield from ((block, copy) for copy in reversed(copies))
            yield block, self._deep(block.layer)
            before = block

    def _deep(self, layer: int | None) -> int | None:
        return layer + self.more if layer is not None and layer > MIDDLE else layer

    def _make(self, number: int, layer: int | None) -> None:
        allocation = self.old.allocations[number - 1]
        if layer is not None and layer_of(allocation.module) is not None:
            module = _NUMBER.sub(lambda match: match[0].replace(match[1], str(layer)), allocation.module, count=1)
            allocation = replace(allocation, module=module)
        self.new.allocations.append(allocation)
        new = len(self.new.allocations)
        self.new.events.append(new)
        self.made[number, layer] = new
        if number in self.old.tags:
            self.new.tags[new] = self.old.tags[number]

    def _free(self, number: int, running: int | None, deep: int | None) -> bool:
        """Free the allocation of the running layer, or of its neighbor; False where there is no such allocation."""
        owner = self.layer[number]
        if owner is None or running is None or deep is None or abs(owner - running) > 1:
            new = self.made.get((number, self._deep(owner)))
        else:
            target_layer = deep + owner - running
            new = self.made.get((self._like(number, owner, target_layer), target_layer))
        if new is None or new in self.freed:
            return False
        self.freed.add(new)
        self.new.events.append(-new)
        return True

    def _like(self, number: int, owner: int, wanted: int) -> int:
        """Return the allocation of the shallow model that stands for `number` in another layer of the deep one."""
        source = min(wanted, max(MIDDLE, wanted - self.more))
        while owner < source:
            number, owner = self.following.get(number, 0), owner + 1
        while owner > source:
            number, owner = self.preceding.get(number, 0), owner - 1
        return number

    def _same_lifetimes(self) -> bool:
        """Return whether everything that the shallow model freed is freed in every layer, and nothing else."""
        freed = {-event for event in self.old.events if event < 0}
        return all((number in freed) == (new in self.freed) for (number, _), new in self.made.items())
