"""Expert load of each layer of a mixture in training: a heat map of layers and steps, and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from surefit.report.shapes import LayerUse, Metrics

MAX_COLUMNS = 60
LAST = 10
"""Number of steps at the end of the run that the sentence about dead experts covers."""
NAMED = 5
"""Largest number of layers that are listed individually."""


@dataclass(frozen=True)
class LayerLoad:
    """A row of the heat map: the layer's mean of the largest shares in each stretch of steps; None for a stretch
    without such steps."""

    layer: int
    shares: list[float | None]


@dataclass(frozen=True)
class ExpertLoad:
    """Heat map of the expert load.

    Attributes:
        rows: one per layer, in layer order.
        first, last: the first and the last step.
        most: the largest share, which is drawn darkest.
        sentences: the findings in words.
    """

    rows: list[LayerLoad]
    first: int
    last: int
    most: float
    sentences: list[str]


def measure_expert_load(lines: Sequence[Metrics]) -> ExpertLoad | None:
    """Build the heat map from the steps that logged `expert_use`; None if no step did."""
    steps = [(line.step, line.expert_use) for line in lines if line.expert_use]
    if not steps:
        return None
    columns = min(MAX_COLUMNS, len(steps))
    shares_by_layer: dict[int, list[list[float]]] = {}
    for index, (_, layers) in enumerate(steps):
        for use in layers:
            stretches = shares_by_layer.setdefault(use.layer, [[] for _ in range(columns)])
            stretches[index * columns // len(steps)].append(use.max_share)
    rows = [
        LayerLoad(layer, [fmean(stretch) if stretch else None for stretch in shares_by_layer[layer]])
        for layer in sorted(shares_by_layer)
    ]
    largest_share = max(share for row in rows for share in row.shares if share is not None)
    return ExpertLoad(
        rows, steps[0][0], steps[-1][0], largest_share, [_largest(steps), _dead([use for _, use in steps[-LAST:]])]
    )


def _largest(steps: Sequence[tuple[int, Sequence[LayerUse]]]) -> str:
    share, step, layer, size = max(
        (use.max_share, step, use.layer, use.experts) for step, uses in steps for use in uses
    )
    return (
        f"The largest share of a step's tokens routed to one expert was {share:.1%}, in layer {layer} at step "
        f"{step}; an even load on its {size} experts is {1 / size:.1%} each."
    )


def _dead(steps: Sequence[Sequence[LayerUse]]) -> str:
    """Describe the experts that got less than a tenth of an even share: the smallest number per layer over the last
    steps."""
    fewest: dict[int, int] = {}
    for use in chain.from_iterable(steps):
        if use.dead is not None:
            fewest[use.layer] = min(use.dead, fewest.get(use.layer, use.dead))
    if not fewest:
        return "A step has too few tokens to detect dead experts."
    when = f"in each of the last {len(steps)} steps" if len(steps) > 1 else "in the last step"
    dead = sorted((-number, layer) for layer, number in fewest.items() if number)
    if not dead:
        return f"No layer had dead experts (less than a tenth of an even share) {when}."
    listed = ", ".join(f"{-number} in layer {layer}" for number, layer in dead[:NAMED])
    and_more = f", and some in {len(dead) - NAMED} more layers" if len(dead) > NAMED else ""
    return f"Dead experts (less than a tenth of an even share) {when}: at least {listed}{and_more}."
