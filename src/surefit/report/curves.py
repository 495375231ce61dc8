"""The curves of metrics.jsonl, thinned so that the page stays small and no peak is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefit.report.artefacts import Event, Metrics

MAX_POINTS = 2_000
"""Points per curve; longer curves keep the lowest and the highest point of every stretch."""
MAX_MARKS = 50
TABLE_ROWS = 12

Point = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """One line of a chart: its points in step order and the CSS colour variable it is drawn in."""

    label: str
    colour: str
    points: list[Point]
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """One chart: what it shows, in a sentence, and its curves."""

    name: str
    title: str
    caption: str
    curves: list[Curve]

    def data(self) -> dict[str, object]:
        """What the page's script draws: all steps, and for each curve a value or null at every one of them."""
        steps = sorted({step for curve in self.curves for step, _ in curve.points})
        series = []
        for curve in self.curves:
            values = dict(curve.points)
            y = [float(f"{values[step]:.6g}") if step in values else None for step in steps]
            series.append({"label": curve.label, "colour": curve.colour, "dots": curve.dots, "y": y})
        return {"name": self.name, "x": steps, "series": series}


@dataclass(frozen=True)
class Mark:
    """A step at which something happened: `kind` is rejected or resumed."""

    step: int
    kind: str


@dataclass(frozen=True)
class Training:
    """What happened while training: totals, charts, marks and some steps as a table.

    Attributes:
        steps: optimizer steps logged, rejected ones included.
        last_step: the number of the last one.
        seconds: the sum of the steps' wall seconds.
        tokens: the sum of the steps' tokens, padding left out.
        peak_memory: the highest memory any step reported, in bytes.
        rejected: the steps whose update was not applied.
        thinned: there are more steps than the charts show points.
    """

    steps: int
    last_step: int
    seconds: float | None
    tokens: float | None
    peak_memory: float | None
    rejected: list[int]
    thinned: bool
    charts: list[Chart]
    marks: list[Mark]
    table: list[Metrics]


def training(lines: Sequence[Metrics], events: Sequence[Event]) -> Training | None:
    """The view of metrics.jsonl; None where no optimizer step is logged."""
    steps = _by_step([line for line in lines if line.eval_loss is None])
    if not steps:
        return None
    held_out = _by_step([line for line in lines if line.eval_loss is not None])
    rejected = [line.step for line in steps if line.rejected]
    resumed = [event.step for event in events if event.event == "resumed" and event.step is not None]
    marks = [Mark(step, "rejected") for step in rejected] + [Mark(step, "resumed") for step in resumed]
    return Training(
        steps=len(steps),
        last_step=steps[-1].step,
        seconds=_total([line.seconds for line in steps]),
        tokens=_total([line.tokens for line in steps]),
        peak_memory=max((line.memory_bytes for line in steps if line.memory_bytes is not None), default=None),
        rejected=rejected,
        thinned=len(steps) > MAX_POINTS,
        charts=[chart for chart in _charts(steps, held_out) if any(curve.points for curve in chart.curves)],
        marks=sorted(marks[-MAX_MARKS:], key=lambda mark: mark.step),
        table=_sample(steps, held_out),
    )


def _by_step(lines: Sequence[Metrics]) -> list[Metrics]:
    """In step order; of two lines for the same step the later one counts."""
    return [line for _, line in sorted({line.step: line for line in lines}.items())]


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None


def _charts(steps: Sequence[Metrics], held_out: Sequence[Metrics]) -> list[Chart]:
    loss, held = _points(steps, "loss"), _points(held_out, "eval_loss")
    rate, norm, speed = (_points(steps, name) for name in ("learning_rate", "grad_norm", "tokens_per_second"))
    losses = [
        Curve("training loss", "--series-1", thin(loss)),
        Curve("held-out loss", "--series-2", thin(held), dots=True),
    ]
    return [
        Chart(
            "loss",
            "Loss",
            " ".join([_from_to("Training loss", loss), _lowest("Held-out loss", held)]).strip(),
            [curve for curve in losses if curve.points],
        ),
        Chart(
            "learning_rate",
            "Learning rate",
            _highest("The learning rate", rate),
            [Curve("learning rate", "--series-1", thin(rate))],
        ),
        Chart(
            "grad_norm",
            "Gradient norm",
            _highest("The gradient norm, before clipping,", norm),
            [Curve("gradient norm", "--series-1", thin(norm))],
        ),
        Chart(
            "tokens_per_second",
            "Tokens per second",
            _median("Half of the steps ran at", speed),
            [Curve("tokens per second", "--series-1", thin(speed))],
        ),
    ]


def _points(lines: Sequence[Metrics], name: str) -> list[Point]:
    values = [(line.step, getattr(line, name)) for line in lines]
    return [(step, value) for step, value in values if value is not None and math.isfinite(value)]


def _from_to(what: str, points: Sequence[Point]) -> str:
    if not points:
        return ""
    (first, start), (last, end) = points[0], points[-1]
    return f"{what}: {start:.4g} at step {first}, {end:.4g} at step {last}."


def _lowest(what: str, points: Sequence[Point]) -> str:
    if not points:
        return ""
    step, value = min(points, key=lambda point: point[1])
    last = "the last measurement" if points[-1][0] == step else f"{points[-1][1]:.4g} at the last measurement"
    return f"{what}: lowest {value:.4g} at step {step}, {last}."


def _highest(what: str, points: Sequence[Point]) -> str:
    if not points:
        return ""
    step, value = max(points, key=lambda point: point[1])
    return f"{what} was highest, {value:.4g}, at step {step}."


def _median(what: str, points: Sequence[Point]) -> str:
    if not points:
        return ""
    values = sorted(value for _, value in points)
    return f"{what} {values[len(values) // 2]:,.0f} tokens per second or more."


def _sample(steps: Sequence[Metrics], held_out: Sequence[Metrics]) -> list[Metrics]:
    """A few steps, evenly spaced and with the last one, each with the held-out loss measured there."""
    measured = {line.step: line.eval_loss for line in held_out}
    gaps = max(1, min(TABLE_ROWS, len(steps)) - 1)
    chosen = dict.fromkeys(i * (len(steps) - 1) // gaps for i in range(gaps + 1))
    return [steps[i].model_copy(update={"eval_loss": measured.get(steps[i].step)}) for i in chosen]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: the first, the last, and the lowest and highest of equal stretches between them.

    >>> thin([(0, 0.0), (1, 9.0), (2, 1.0), (3, -5.0), (4, 1.0), (5, 2.0)], limit=4)
    [(0, 0.0), (1, 9.0), (3, -5.0), (5, 2.0)]
    """
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    stretches = limit // 2 - 1
    kept = {points[0], points[-1]}
    for i in range(stretches):
        stretch = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        kept.add(min(stretch, key=lambda point: point[1]))
        kept.add(max(stretch, key=lambda point: point[1]))
    return sorted(kept)
