"""The curves of metrics.jsonl, thinned so that the page stays small and no peak is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefit.report.expert_use import ExpertLoad, measure_expert_load
from surefit.report.shapes import Event, Metrics
from surefit.report.text import readable_metric

MAX_POINTS = 2_000
"""Largest number of points per curve; longer curves keep the lowest and the highest point of every stretch."""
MAX_MARKS = 50
MAX_SCORES = 6
GIB = 2**30
SERIES = tuple(f"--series-{number}" for number in range(1, 9))
"""Colors of the curves in one chart, as named in page.css."""
TABLE_ROWS = 12
RESOURCES = ("memory", "disk")
FLAT = 0.01
"""Relative range below which a chart of a resource is left out: the numbers on its axis would hardly differ."""

Point = tuple[int, float]


@dataclass(frozen=True)
class ChartCurve:
    """One curve of a chart: its points in step order and its CSS color variable."""

    label: str
    colour: str
    points: list[Point]
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """One chart: its title, a caption in one sentence, and its curves."""

    name: str
    title: str
    caption: str
    curves: list[ChartCurve]

    @property
    def is_flat(self) -> bool:
        """Return whether the chart shows nothing: memory or free disk space that hardly changed."""
        values = [value for curve in self.curves for _, value in curve.points]
        return self.name in RESOURCES and max(values) - min(values) < FLAT * abs(max(values))

    def data(self) -> dict[str, object]:
        """Return the data for the page's script: all steps, and for each curve a value or null at every step."""
        steps = sorted({step for curve in self.curves for step, _ in curve.points})
        series = []
        for curve in self.curves:
            values = dict(curve.points)
            y = [float(f"{values[step]:.6g}") if step in values else None for step in steps]
            series.append({"label": curve.label, "colour": curve.colour, "dots": curve.dots, "y": y})
        return {"name": self.name, "x": steps, "series": series}


@dataclass(frozen=True)
class Mark:
    """A step with an event: `kind` is rejected or resumed."""

    step: int
    kind: str


@dataclass(frozen=True)
class TrainingCurves:
    """The training run as the page shows it: totals, charts, marks and a table of some steps.

    Attributes:
        steps: number of logged optimizer steps, rejected ones included.
        last_step: number of the last step.
        seconds: sum of the steps' wall-clock seconds.
        tokens: sum of the steps' tokens, without padding.
        peak_memory: highest memory that any step reported, in bytes.
        rejected: numbers of the steps with an update that was not applied.
        thinned: whether there are more steps than the charts show points.
        experts: load of the experts of a mixture.
        flat: captions of the charts that are left out, because their axis would repeat one number.
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
    experts: ExpertLoad | None = None
    flat: tuple[str, ...] = ()


def build_training_curves(lines: Sequence[Metrics], events: Sequence[Event]) -> TrainingCurves | None:
    """Build the curves of metrics.jsonl; None if no optimizer step is logged."""
    steps, held_out = split_metrics(lines)
    if not steps:
        return None
    rejected = [line.step for line in steps if line.rejected]
    resumed = [event.step for event in events if event.event == "resumed" and event.step is not None]
    charts = [chart for chart in _charts(steps, held_out) if any(curve.points for curve in chart.curves)]
    marks = [Mark(step, "rejected") for step in rejected] + [Mark(step, "resumed") for step in resumed]
    return TrainingCurves(
        steps=len(steps),
        last_step=steps[-1].step,
        seconds=_total([line.seconds for line in steps]),
        tokens=_total([line.tokens for line in steps]),
        peak_memory=max((line.memory_bytes for line in steps if line.memory_bytes is not None), default=None),
        rejected=rejected,
        thinned=len(steps) > MAX_POINTS,
        charts=[chart for chart in charts if not chart.is_flat],
        marks=sorted(marks[-MAX_MARKS:], key=lambda mark: mark.step),
        table=_sample(steps, held_out),
        experts=measure_expert_load(steps),
        flat=tuple(chart.caption for chart in charts if chart.is_flat),
    )


def _in_gib(lines: Sequence[Metrics], name: str) -> list[Point]:
    return [(step, value / GIB) for step, value in extract_points(lines, name)]


def _by_step(lines: Sequence[Metrics]) -> list[Metrics]:
    """Sort by step; of two lines for the same step the later one counts."""
    return [line for _, line in sorted({line.step: line for line in lines}.items())]


def _total(values: Sequence[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return math.fsum(known_values) if known_values else None


def _charts(steps: Sequence[Metrics], held_out: Sequence[Metrics]) -> list[Chart]:
    loss, held_out_loss = extract_points(steps, "loss"), extract_points(held_out, "eval_loss")
    rate, norm, speed, mfu = (
        extract_points(steps, name) for name in ("learning_rate", "grad_norm", "tokens_per_second", "mfu")
    )
    memory, free = (_in_gib(steps, name) for name in ("memory_bytes", "disk_free_bytes"))
    losses = [
        ChartCurve("training loss", SERIES[0], thin_points(loss)),
        ChartCurve("held-out loss", SERIES[1], thin_points(held_out_loss), dots=True),
    ]
    captions = " ".join([_from_to("Training loss", loss), _lowest("Held-out loss", held_out_loss)]).strip()
    return [
        Chart("loss", "Loss", captions, [curve for curve in losses if curve.points]),
        *_preferences(steps),
        *_scores(held_out),
        _single("learning_rate", "Learning rate", _highest("The learning rate", rate), rate),
        _single("grad_norm", "Gradient norm", _highest("The gradient norm, before clipping,", norm), norm),
        _single("tokens_per_second", "Tokens per second", _median("Median speed:", speed), speed),
        _single("memory", "Memory, GiB", _highest("The device memory, in GiB,", memory), memory),
        _single("disk", "Free disk space, GiB", _lowest("Free disk space, in GiB", free), free),
        _single("mfu", "Model FLOPs utilization", _highest("The model FLOPs utilization", mfu), mfu),
    ]


def _single(name: str, title: str, caption: str, points: list[Point]) -> Chart:
    return Chart(name, title, caption, [ChartCurve(title.lower().partition(",")[0], SERIES[0], thin_points(points))])


def _preferences(steps: Sequence[Metrics]) -> list[Chart]:
    """Chart rewards and log-probabilities of both answers, apart: a margin also grows where both fall."""
    charts = []
    for name, title, keys in (
        ("rewards", "Rewards", ("rewards/chosen", "rewards/rejected", "rewards/margins")),
        ("logps", "Log-probability of the answers, nats", ("logps/chosen", "logps/rejected")),
    ):
        found = [(key.partition("/")[2].removesuffix("s"), extract_points(steps, key)) for key in keys]
        caption = " ".join(_from_to(f"{title.partition(',')[0]}, {side}", points) for side, points in found if points)
        curves = [
            ChartCurve(side, SERIES[number], thin_points(points))
            for number, (side, points) in enumerate(found)
            if points
        ]
        charts += [Chart(name, title, caption, curves)] if curves else []
    return charts


def _scores(held_out: Sequence[Metrics]) -> list[Chart]:
    """Chart the task's scores at every measurement, if they were measured during training."""
    names = dict.fromkeys(name for line in held_out for name in line.model_extra or ())
    curves = [
        (readable_metric(name), extract_points(held_out, name)) for name in names if not name.startswith(("eval_", "_"))
    ]
    plotted = [(name, points) for name, points in curves if points and name not in ("epoch", "time")][:MAX_SCORES]
    caption = " ".join(f"{name}: highest {max(value for _, value in points):.4g}." for name, points in plotted)
    lines = [
        ChartCurve(name, SERIES[number], thin_points(points), dots=True)
        for number, (name, points) in enumerate(plotted)
    ]
    return [Chart("scores", "Scores during training", caption, lines)] if lines else []


def extract_points(lines: Sequence[Metrics], name: str) -> list[Point]:
    """Return (step, value) of every line that has a finite number under `name`."""
    values = [(line.step, getattr(line, name, None)) for line in lines]
    return [(step, value) for step, value in values if isinstance(value, int | float) and math.isfinite(value)]


def split_metrics(lines: Sequence[Metrics]) -> tuple[list[Metrics], list[Metrics]]:
    """Return the optimizer steps, and the measurements of the held-out loss, each in step order."""
    steps = _by_step([line for line in lines if line.eval_loss is None])
    return steps, _by_step([line for line in lines if line.eval_loss is not None])


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
    return f"{what} {values[len(values) // 2]:,.0f} tokens per second."


def _sample(steps: Sequence[Metrics], held_out: Sequence[Metrics]) -> list[Metrics]:
    """Select some evenly spaced steps, including the last, each with the held-out loss measured at it."""
    loss_by_step = {line.step: line.eval_loss for line in held_out}
    gaps = max(1, min(TABLE_ROWS, len(steps)) - 1)
    indices = dict.fromkeys(i * (len(steps) - 1) // gaps for i in range(gaps + 1))
    return [steps[i].model_copy(update={"eval_loss": loss_by_step.get(steps[i].step)}) for i in indices]


def thin_points(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Keep at most `limit` points: the first, the last, and the lowest and highest of equal stretches between them.

    >>> thin_points([(0, 0.0), (1, 9.0), (2, 1.0), (3, -5.0), (4, 1.0), (5, 2.0)], limit=4)
    [(0, 0.0), (1, 9.0), (3, -5.0), (5, 2.0)]
    """
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    stretches = limit // 2 - 1
    kept_points = {points[0], points[-1]}
    for i in range(stretches):
        stretch = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        kept_points.add(min(stretch, key=lambda point: point[1]))
        kept_points.add(max(stretch, key=lambda point: point[1]))
    return sorted(kept_points)
