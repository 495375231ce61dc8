"""How evenly each layer of a mixture used its experts in training: a heat map of layers and steps, and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from surefit.report.shapes import LayerUse, Metrics

MAX_COLUMNS = 60
LAST = 10
"""Steps at the end of the run of which dead experts are told: those that have tokens enough."""
NAMED = 5
"""Layers that are named one by one."""


@dataclass(frozen=True)
class LayerLoad:
    """A layer: the mean of the largest shares of each stretch of steps; None where a stretch has no such step."""

    layer: int
    shares: list[float | None]


@dataclass(frozen=True)
class ExpertLoad:
    """The heat map.

    Attributes:
        rows: in layer order.
        first, last: the steps of its two edges.
        most: the largest share in it, which is drawn darkest.
        sentences: what it says, in words.
    """

    rows: list[LayerLoad]
    first: int
    last: int
    most: float
    sentences: list[str]


def measure_expert_load(lines: Sequence[Metrics]) -> ExpertLoad | None:
    """The view of the steps that logged `expert_use`; None where none did."""
    steps = [(line.step, line.expert_use) for line in lines if line.expert_use]
    if not steps:
        return None
    columns = min(MAX_COLUMNS, len(steps))
    found: dict[int, list[list[float]]] = {}
    for place, (_, layers) in enumerate(steps):
        for use in layers:
            stretches = found.setdefault(use.layer, [[] for _ in range(columns)])
            stretches[place * columns // len(steps)].append(use.max_share)
    rows = [LayerLoad(layer, [fmean(each) if each else None for each in found[layer]]) for layer in sorted(found)]
    most = max(share for row in rows for share in row.shares if share is not None)
    return ExpertLoad(
        rows, steps[0][0], steps[-1][0], most, [_largest(steps), _dead([use for _, use in steps[-LAST:]])]
    )


def _largest(steps: Sequence[tuple[int, Sequence[LayerUse]]]) -> str:
    share, step, layer, size = max(
        (use.max_share, step, use.layer, use.experts) for step, uses in steps for use in uses
    )
    return (
        f"The largest share of a step's tokens that went to one expert was {share:.1%}, in layer {layer} at step "
        f"{step}; an even use of its {size} experts gives each {1 / size:.1%}."
    )


def _dead(steps: Sequence[Sequence[LayerUse]]) -> str:
    """Experts that took less than a tenth of an even share, at least so many in each of the last steps."""
    least: dict[int, int] = {}
    for use in chain.from_iterable(steps):
        if use.dead is not None:
            least[use.layer] = min(use.dead, least.get(use.layer, use.dead))
    if not least:
        return "A step has too few tokens to say which experts are dead."
    when = f"in each of the last {len(steps)} steps" if len(steps) > 1 else "in the last step"
    dead = sorted((-number, layer) for layer, number in least.items() if number)
    if not dead:
        return f"No layer had dead experts, which take less than a tenth of an even share, {when}."
    named = ", ".join(f"{-number} in layer {layer}" for number, layer in dead[:NAMED])
    more = f", and some in {len(dead) - NAMED} more layers" if len(dead) > NAMED else ""
    return f"Dead experts, which took less than a tenth of an even share, {when}: at least {named}{more}."
