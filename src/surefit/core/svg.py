"""Frame of every figure: an SVG that needs no library to draw and no script to display."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from surefit.core.errors import ConfigError
from surefit.core.output import output_file, text_with

WIDTH = 720
ATTRIBUTES = 'font-family="sans-serif" font-size="13" role="img">'
"""End of the first line of every figure."""


def picture_file(path: Path, inputs: Mapping[str, Path]) -> Path:
    """Return `path` if a figure may be written there.

    Args:
        path: the file given as `--plot`.
        inputs: files that the command reads, by name.

    Raises:
        ConfigError: it does not end in .svg, is an input, or is no figure of ours.
    """
    if path.suffix != ".svg":
        raise ConfigError(
            f"plots are saved as SVG, not as {path.suffix or 'a file without a suffix'}",
            code="E1031",
            path=path,
            field="--plot",
            help=f"--plot {path.with_suffix('.svg')}; any browser opens it",
        )
    return output_file(path, inputs, earlier=text_with(ATTRIBUTES), option="--plot")


def document(title: str, height: int, lines: Iterable[str], under: str | None = None) -> str:
    """Return a figure `WIDTH` pixels wide with a title and an optional line under it; both are escaped."""
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
