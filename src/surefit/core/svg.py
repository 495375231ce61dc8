"""What every picture has around it: an SVG that needs no library to be drawn and no script to be shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from surefit.core.errors import ConfigError
from surefit.core.output import output_file, text_with

WIDTH = 720
ATTRIBUTES = 'font-family="sans-serif" font-size="13" role="img">'
"""What the first line of every picture ends in."""


def picture_file(path: Path, inputs: Mapping[str, Path]) -> Path:
    """Return `path` if a picture may be written there.

    Args:
        path: the file, as `--plot` names it.
        inputs: what the command reads, by name.

    Raises:
        ConfigError: it does not end in .svg, is an input, or is no picture of ours.
    """
    if path.suffix != ".svg":
        raise ConfigError(
            f"a plot is written as SVG, not as {path.suffix or 'a file without a suffix'}",
            code="E1031",
            path=path,
            field="--plot",
            help=f"--plot {path.with_suffix('.svg')}; any browser opens it",
        )
    return output_file(path, inputs, earlier=text_with(ATTRIBUTES), option="--plot")


def document(title: str, height: int, lines: Iterable[str], under: str | None = None) -> str:
    """A picture `WIDTH` wide with a title and, where given, a line under it; both may hold anything."""
    title = escape(title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f"{ATTRIBUTES}",
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            f'<text x="12" y="26" font-size="16" font-weight="bold">{title}</text>',
            *([f'<text x="12" y="46" fill="#555555">{escape(under)}</text>'] if under else []),
            *lines,
            "</svg>\n",
        ]
    )
