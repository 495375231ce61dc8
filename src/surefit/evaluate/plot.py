"""A comparison as an SVG plot: every metric's difference with its interval, and the rows won and lost. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from surefit.core.svg import WIDTH, document
from surefit.core.units import truncate_text

LEFT, RIGHT, ROW, TOP = 190, 150, 30, 64
BETTER, WORSE, OPEN, TIE = "#0072b2", "#d55e00", "#6b6b6b", "#d9d9d9"
"""Blue and vermilion of Okabe and Ito's palette, distinguishable with any color vision."""


def draw_forest_plot(compared: dict[str, Any]) -> str:
    """Draw the differences of all metrics with their intervals, as SVG.

    Args:
        compared: result of `compare_answers`.
    """
    metrics = compared["metrics"]
    bottom = TOP + len(metrics) * ROW
    title = f"{truncate_text(compared['b'], 40)} against {truncate_text(compared['a'], 40)}: {compared['n']:,} rows"
    subtitle = "difference with its 95 % interval; right of the line is better"
    counts = _counts(metrics[compared["metric"]], compared["metric"], bottom + 52)
    return document(title, bottom + 112, [*_forest(metrics, bottom), *counts], subtitle)


def _forest(metrics: dict[str, Any], bottom: int) -> Iterator[str]:
    largest = max(abs(end) for result in metrics.values() for end in (*result["ci95"], result["difference"]))
    scale = (WIDTH - LEFT - RIGHT) / 2 / (largest * 1.05 or 1.0)
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    yield f'<line x1="{middle:.1f}" y1="{TOP - 8}" x2="{middle:.1f}" y2="{bottom}" stroke="#999999"/>'
    for number, (name, result) in enumerate(metrics.items()):
        y = TOP + number * ROW + ROW // 2
        low, high = result["ci95"]
        colour = BETTER if low > 0 else WORSE if high < 0 else OPEN
        x, left, right = (middle + value * scale for value in (result["difference"], low, high))
        yield f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(truncate_text(name, 26))}</text>'
        yield f'<line x1="{left:.1f}" y1="{y}" x2="{right:.1f}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
        yield f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{colour}"/>'
        text = f"{100 * result['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        yield f'<text x="{WIDTH - RIGHT + 12}" y="{y + 4}">{text}</text>'


def _counts(found: dict[str, Any], metric: str, y: int) -> Iterator[str]:
    rows = found["wins"] + found["ties"] + found["losses"]
    yield f'<text x="12" y="{y - 12}" font-weight="bold">rows by {escape(metric)}</text>'
    x, width = 12.0, WIDTH - 24
    for name, colour, text in (("wins", BETTER, "#ffffff"), ("ties", TIE, "#000000"), ("losses", WORSE, "#ffffff")):
        part = width * found[name] / max(1, rows)
        yield f'<rect x="{x:.1f}" y="{y}" width="{part:.1f}" height="26" fill="{colour}"/>'
        if part > 24:
            yield f'<text x="{x + 6:.1f}" y="{y + 18}" fill="{text}">{found[name]:,}</text>'
        x += part
    legend = f"{found['wins']:,} won, {found['ties']:,} tied, {found['losses']:,} lost"
    yield f'<text x="12" y="{y + 44}">{legend}</text>'
