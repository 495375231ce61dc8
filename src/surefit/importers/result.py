"""The result of reading another tool's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefit.config.load import LoadedConfig
from surefit.core.errors import SureFitError
from surefit.facts.job_script import JobScript
from surefit.facts.setup import Setup
from surefit.facts.stack import StackFacts


@dataclass(frozen=True)
class UnmappedKey:
    """A key that SureFit's config cannot express, with its 1-based line, its value, and the reason."""

    key: str
    line: int | None
    value: Any
    why: str


@dataclass(frozen=True)
class ImportedConfig:
    """A config of another tool in SureFit's terms.

    Every key of the file is in exactly one of `mapped`, `lost`, `setup.gone`, `setup.unknown`, or a problem. A nested
    key is written with dots; the entries of a list are one value.

    Attributes:
        tool: axolotl, llamafactory, swift, trl, accelerate, deepspeed, peft, openai, slurm, python or
            requirements.
        path: the file.
        setup: the facts that the rules check.
        loaded: the SureFit config that the file maps to, with the lines of the other tool's file; None if the file does
            not describe a complete supervised run.
        names: dotted SureFit key → the tool's key that sets it, or whose default it is.
        mapped: keys that are mapped to the config or the setup.
        judged: the mapped keys that only the rules read, because SureFit's config cannot express them.
        lost: keys that nothing reads.
        job: the requests and launches of a SLURM script; None for other files.
        problems: values that the tool itself cannot use, with file and line.
        rows_known: whether `loaded.config.data.train` is all that the tool would train on, row by row, in a layout that
            SureFit reads; if not, its rows tell nothing about the run.
        values: every key of the file, nested ones with dots → its value.
        lines: every key of the file, list entries as `datasets[0].path` → its line.
        parts: what is lost inside values of mapped keys.
        columns: name of a row's column in a script → (file of the rows, column).
        stack: the versions that a requirements file or a shell script requires.
        judged_by: the library releases that a script's arguments were checked against; empty if none were.
    """

    tool: str
    path: Path
    setup: Setup
    loaded: LoadedConfig | None
    names: dict[str, str]
    lost: tuple[UnmappedKey, ...]
    job: JobScript | None
    problems: tuple[SureFitError, ...]
    mapped: frozenset[str] = frozenset()
    judged: tuple[UnmappedKey, ...] = ()
    rows_known: bool = True
    values: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[UnmappedKey, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)
    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    stack: StackFacts | None = None
    judged_by: str = ""

    def line(self, key: str) -> int | None:
        """Return the line of a key of the file, or of its nearest parent with a line."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key)
