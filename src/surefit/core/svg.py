"""What every picture has around it: an SVG that needs no library to be drawn and no script to be shown."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

WIDTH = 720


def document(title: str, height: int, lines: Iterable[str], under: str | None = None) -> str:
    """A picture `WIDTH` wide with a title and, where given, a line under it; both may hold anything."""
    title = escape(title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="sans-serif" font-size="13" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            f'<text x="12" y="26" font-size="16" font-weight="bold">{title}</text>',
            *([f'<text x="12" y="46" fill="#555555">{escape(under)}</text>'] if under else []),
            *lines,
            "</svg>\n",
        ]
    )
