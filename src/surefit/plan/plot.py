"""The plan as a picture: the memory of every phase and the terms of the fullest moment, as SVG. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from surefit.core.svg import WIDTH, document
from surefit.core.units import bytes_text

LEFT, BAR, GAP = 110, 26, 12
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
"""Okabe and Ito's colors, distinguishable with any color vision."""


def plan_svg(planned: dict[str, Any]) -> str:
    """Return the plan as an SVG.

    Args:
        planned: the content of plan.json, simulated.
    """
    estimate, device = planned["estimate"], planned["device"]
    phases, peak = estimate["phases"], estimate["peak"]
    capacity = device["memory_bytes"]
    largest = max([*(phase["reserved_bytes"] for phase in phases), capacity or 0])
    scale = (WIDTH - LEFT - 20) / largest
    height = 96 + (len(phases) + 1) * (BAR + GAP) + 20 * len(peak["terms"])
    lines = [*_phases(phases, scale), *_terms(peak["terms"], scale, 64 + len(phases) * (BAR + GAP))]
    if capacity is not None:
        lines += _limit(LEFT + capacity * scale, 64 + (len(phases) + 1) * (BAR + GAP), bytes_text(capacity))
    ranks = planned["ranks"]
    devices = device["name"] if ranks is None else f"one of {ranks['processes']} × {device['name']}, {ranks['which']}"
    title = f"{planned['model']['name']} on {devices}: {estimate['verdict']}"
    return document(title, height, lines)


def _phases(phases: list[dict[str, Any]], scale: float) -> Iterator[str]:
    """Yield, per phase, the bar of the allocator's memory, and in it the bar of the tensors."""
    for row, phase in enumerate(phases):
        y = 48 + row * (BAR + GAP)
        reserved, allocated = phase["reserved_bytes"], phase["allocated_bytes"]
        yield f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(phase["name"])}</text>'
        yield _bar(LEFT, y, reserved * scale, "#c8d6e0")
        yield _bar(LEFT, y, allocated * scale, PALETTE[0])
        text = f"{bytes_text(allocated)} in tensors, {bytes_text(reserved)} reserved"
        yield f'<text x="{LEFT + 6}" y="{y + 17}" stroke="#ffffff" stroke-width="3" paint-order="stroke">{text}</text>'


def _terms(terms: list[dict[str, Any]], scale: float, top: float) -> Iterator[str]:
    """Yield the fullest moment as one bar, and a line that names each part."""
    yield f'<text x="{LEFT - 8}" y="{top + 17}" text-anchor="end">peak</text>'
    x = float(LEFT)
    for number, term in enumerate(terms):
        colour, width = PALETTE[number % len(PALETTE)], term["bytes"] * scale
        yield _bar(x, top, width, colour)
        x += width
        y = top + BAR + 18 + 20 * number
        yield _bar(LEFT, y - 10, 12, colour, 12)
        yield f'<text x="{LEFT + 20}" y="{y}">{escape(term["term"])}: {bytes_text(term["bytes"])}</text>'


def _limit(x: float, bottom: float, text: str) -> Iterator[str]:
    yield f'<line x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="{bottom:.0f}" stroke="#d55e00" stroke-dasharray="4 3"/>'
    yield f'<text x="{x - 4:.1f}" y="40" text-anchor="end" fill="#a33c00">the device has {text}</text>'


def _bar(x: float, y: float, width: float, colour: str, height: int = BAR) -> str:
    return f'<rect x="{x:.1f}" y="{y:.0f}" width="{max(0.5, width):.1f}" height="{height}" fill="{colour}"/>'
