"""The scores of a run's checkpoints as an SVG plot and as a sentence. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from surefit.core.svg import WIDTH, document
from surefit.core.units import plural, truncate_text
from surefit.evaluate.plot import BETTER, OPEN, TIE, WORSE

LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 64, 24, 64, 300, 352
GRID = 5
"""Largest number of horizontal grid lines, not counting the lowest."""


def draw_checkpoint_curve(found: Mapping[str, Any]) -> str:
    """Draw the scores of all checkpoints with their intervals, as SVG.

    Args:
        found: the content of eval/checkpoints.json, with at least one checkpoint.
    """
    points, best = found["checkpoints"], found["best"]["variant"]
    title = f"{truncate_text(found['metric'], 40)} by checkpoint: {found['n']:,} rows"
    significant = found["best"]["more_than_chance"]
    text = {None: "the only one", True: "its lead is significant", False: "its lead may be due to chance"}[significant]
    subtitle = f"95 % intervals; the best is {best}, {text}" + ("; dashed: the base" if found["base"] else "")
    return document(
        title, HEIGHT, [*_axes(found), *_base(found), *_line(found), *_marks(points, best, found)], subtitle
    )


def _ticks(found: Mapping[str, Any]) -> tuple[list[float], int]:
    """Return round tick values that cover all intervals, and their decimals; scores that hardly differ do not fill the
    axis."""
    bounds = [end for estimate in (*found["checkpoints"], *filter(None, [found["base"]])) for end in estimate["ci95"]]
    spare = max(0.0, 0.1 - (max(bounds) - min(bounds))) / 2
    low, high = min(bounds) - spare, max(bounds) + spare
    power = math.floor(math.log10((high - low) / GRID))
    for step in (10.0**power * factor for factor in (1, 2, 5, 10)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= GRID:
            break
    return [number * step for number in range(first, last + 1)], max(0, -math.floor(math.log10(step) + 1e-9))


def _y(found: Mapping[str, Any], value: float) -> float:
    ticks, _ = _ticks(found)
    low, high = ticks[0], ticks[-1]
    return BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)


def _x(points: Sequence[Mapping[str, Any]], step: int) -> float:
    first, last = points[0]["step"], points[-1]["step"]
    inside = WIDTH - LEFT - RIGHT - 24
    return LEFT + 12 + (inside * (step - first) / (last - first) if last > first else inside / 2)


def _axes(found: Mapping[str, Any]) -> Iterator[str]:
    ticks, decimals = _ticks(found)
    for value in ticks:
        y = _y(found, value)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{TIE}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.{decimals}f}</text>'
    points, last_label_x = found["checkpoints"], -float("inf")
    for point in points:
        x = _x(points, point["step"])
        if x - last_label_x >= 48:  # far enough that two labels do not touch
            yield f'<text x="{x:.1f}" y="{BOTTOM + 20}" text-anchor="middle">{point["step"]:,}</text>'
            last_label_x = x
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{BOTTOM + 42}" text-anchor="middle">optimizer steps</text>'


def _base(found: Mapping[str, Any]) -> Iterator[str]:
    if found["base"]:
        y = _y(found, found["base"]["mean"])
        ends = f'x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"'
        yield f'<line {ends} stroke="{OPEN}" stroke-dasharray="5 4"/>'


def _line(found: Mapping[str, Any]) -> Iterator[str]:
    points = found["checkpoints"]
    coordinates = " ".join(f"{_x(points, p['step']):.1f},{_y(found, p['mean']):.1f}" for p in points)
    yield f'<polyline points="{coordinates}" fill="none" stroke="{BETTER}" stroke-opacity="0.4"/>'


def _marks(points: Sequence[Mapping[str, Any]], best: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the SVG marks of the checkpoints; hollow if the checkpoint was deleted."""
    for point in points:
        colour = WORSE if point["variant"] == best else BETTER
        x, y = _x(points, point["step"]), _y(found, point["mean"])
        low, high = (_y(found, end) for end in point["ci95"])
        yield f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{colour}" stroke-width="2"/>'
        fill = colour if point["there"] else "#ffffff"
        text = escape(f"{point['variant']}: {point['mean']:.3f} [{point['ci95'][0]:.3f}, {point['ci95'][1]:.3f}]")
        circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{colour}" stroke-width="2">'
        yield f"{circle}<title>{text}</title></circle>"


def describe_best_checkpoint(best: Mapping[str, Any]) -> str:
    """Describe which checkpoint is best, and whether its lead is significant.

    >>> over = [{"variant": "step-10", "more_than_chance": True}, {"variant": "step-30", "more_than_chance": False}]
    >>> describe_best_checkpoint({"variant": "step-20", "confidence": 0.975, "over": over})
    'step-20 has the best score of 3, but no clear lead over step-30 (2 comparisons, intervals of 97.5 %)'
    """
    over = best["over"]
    if not over:
        return f"{best['variant']} is the only checkpoint with a score"
    basis = f"({plural(len(over), 'comparison')}, intervals of {100 * best['confidence']:.3g} %)"
    rivals = [comparison["variant"] for comparison in over if not comparison["more_than_chance"]]
    if not rivals:
        return f"{best['variant']} is the best of {len(over) + 1}, by a significant margin {basis}"
    return f"{best['variant']} has the best score of {len(over) + 1}, but no clear lead over {_some(rivals)} {basis}"


def _some(names: Sequence[str], limit: int = 8) -> str:
    and_more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + and_more
