"""TensorBoard: event files below the run directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from surefit.config.trackers import TRACKERS
from surefit.core.rundir import RunDir
from surefit.telemetry.numbers import FINAL_STEP, numbers_of

FINAL = ".final"
"""Suffix of the name of the file with the final numbers."""


class TensorBoard:
    """A sink that writes event files.

    Args:
        run: the run directory.
    """

    def __init__(self, run: RunDir) -> None:
        self.folder = run.path / TRACKERS["tensorboard"].leaves
        self._params: Mapping[str, Any] = {}
        self._writer: Any = None

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Keep the settings: the file begins with the first line, whose step is where a resumed run continues."""
        self._params = params

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the numbers, and flush them to disk."""
        writer = self._writer = self._writer or self._opened(records[0])
        for record in records:
            for key, value in numbers_of(record).items():
                writer.add_scalar(key, value, record["step"], walltime=record["time"])
        writer.flush()

    def finish(self, status: str) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def conclude(
        self, numbers: Mapping[str, float], files: Sequence[Path], examples: Sequence[Mapping[str, str]]
    ) -> None:
        """Write numbers and table into a file of their own, which replaces an earlier one. TensorBoard cannot show
        files."""
        from torch.utils.tensorboard import SummaryWriter

        for earlier in self.folder.glob(f"events.out.*{FINAL}"):
            earlier.unlink()
        writer: Any = SummaryWriter(str(self.folder), filename_suffix=FINAL)
        for key, value in numbers.items():
            writer.add_scalar(key, value, FINAL_STEP)
        if examples:
            writer.add_text("examples", _markdown(examples), FINAL_STEP)
        writer.close()

    def _opened(self, first: Mapping[str, Any]) -> Any:
        """Return a writer that invalidates earlier files' values of steps that are repeated."""
        from torch.utils.tensorboard import SummaryWriter

        # A held-out line may come first, for a step whose own line stays.
        purged = first["step"] + (0 if "loss" in first else 1)
        earlier = self.folder.exists()
        writer: Any = SummaryWriter(str(self.folder), purge_step=purged if earlier else None)
        rows = "".join(f"| {key} | {value} |\n" for key, value in self._params.items())
        writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", first["step"])
        return writer


def _markdown(rows: Sequence[Mapping[str, str]]) -> str:
    lines: list[Iterable[str]] = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    """Return a text in one line, in which nothing ends the cell or is read as HTML."""
    return escape(" ".join(text.split()), quote=False).replace("|", "&#124;")
