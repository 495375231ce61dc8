"""Formats scores, differences and times for the page."""

from __future__ import annotations

import re
import time

from markupsafe import Markup, escape

from surefit.core.units import bytes_text, duration_text

NBSP = "\N{NO-BREAK SPACE}"
MINUS = "\N{MINUS SIGN}"
SHA256 = re.compile(r"[0-9a-f]{64}")


def drop_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON and file names can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def ticked(text: str) -> Markup:
    """Convert text to HTML, with the parts between backticks as code.

    >>> ticked("`surefit calibrate` < 1 minute")
    Markup('<code>surefit calibrate</code> &lt; 1 minute')
    """
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def shorten_text(text: str, limit: int) -> str:
    """Return `text`, or its beginning and end with the number of omitted characters between them.

    Args:
        text: any text.
        limit: largest number of bytes in the page, where `&` is five and a Chinese character three.

    >>> shorten_text("abcdefghij", 4), shorten_text("\'" * 9, 20)
    ('ab [\u2026 6 characters left out \u2026] ij', "\'\' [\u2026 5 characters left out \u2026] \'\'")
    """
    if len(text) <= limit and _page_bytes(text) <= limit:
        return text
    head, tail = text[: limit // 2], text[-(limit // 2) :]
    while (size := _page_bytes(head)) > limit // 2:
        head = head[: len(head) * (limit // 2) // size]
    while (size := _page_bytes(tail)) > limit // 2:
        tail = tail[len(tail) - len(tail) * (limit // 2) // size :]
    left_out = len(text) - len(head) - len(tail)
    return f"{head} [\u2026 {left_out:,} characters left out \u2026] {tail}"


def _page_bytes(text: str) -> int:
    return len(escape(text).encode())


def readable_metric(name: str) -> str:
    """Return a metric's readable name: exact_match is exact match, math_reasoning.answered math reasoning: answered."""
    return name.replace("_", " ").replace(".", ": ", 1)


def percent(value: float) -> str:
    """Format a score in [0, 1] as a percentage; another score unchanged.

    >>> percent(0.915).replace(NBSP, " "), percent(27.31)
    ('91.5 %', '27.31')
    """
    return f"{100 * value:.1f}{NBSP}%" if 0 <= value <= 1 else f"{value:.4g}"


def points(value: float) -> str:
    """Format a difference of two scores in percentage points, with its sign.

    >>> points(-0.085).replace(NBSP, " ")
    '\u22128.5 points'
    """
    return f"{signed(value)}{NBSP}{'points' if abs(value) <= 1 else ''}".rstrip()


def interval(low: float, high: float) -> str:
    """Format the interval of a difference.

    >>> interval(-0.125, 0.04).replace(NBSP, " ")
    '\u221212.5 to +4.0'
    """
    return f"{signed(low)} to {signed(high)}"


def signed(value: float) -> str:
    """Format a difference of scores times 100, to one decimal; zero has no sign."""
    text = f"{100 * value:+.1f}" if abs(value) <= 1 else f"{value:+.4g}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", MINUS)


def format_value(measured: object) -> str:
    """Format a measured number with at least four digits, a dash for None, the beginning of a hash; other values
    unchanged.

    >>> format_value(3.8123e-06), format_value(73112.4), format_value(1), format_value(None)
    ('3.812e-06', '73,112', '1', '\u2013')
    """
    if measured is None:
        return "\N{EN DASH}"
    if not isinstance(measured, float):
        text = str(measured)
        return f"{text[:8]}\N{HORIZONTAL ELLIPSIS}" if SHA256.fullmatch(text) else text
    return f"{measured:,.0f}" if 1e3 <= abs(measured) < 1e15 else f"{measured:.4g}"


def quantity(measured: float | None, unit: str) -> str:
    """Format bytes, seconds or a count for readers; a dash if unknown.

    >>> quantity(1536, "bytes"), quantity(90, "seconds"), quantity(0.0123, "seconds"), quantity(1200, "steps")
    ('1.5 KiB', '1 min 30 s', '12.3 ms', '1,200')
    """
    if measured is None:
        return "\N{EN DASH}"
    if unit == "bytes":
        return bytes_text(measured)
    if unit == "seconds":
        return duration_text(measured) if measured >= 0.1 else f"{1000 * measured:.3g} ms"
    return f"{measured:,.0f}"


def utc(seconds: float) -> str:
    """Format seconds since 1970 as a date and time; a number out of range as itself.

    >>> utc(1_800_000_000)
    '2027-01-15 08:00:00'
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g}"
