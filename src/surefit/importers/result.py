"""What reading another tool's config gives."""

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
    """A key that has no place in a SureFit config: its 1-based line, its value, and why."""

    key: str
    line: int | None
    value: Any
    why: str


@dataclass(frozen=True)
class ImportedConfig:
    """A config of another tool in SureFit's terms.

    Every key of the file ends in exactly one of `mapped`, `lost`, `setup.gone`, `setup.unknown`, or a problem. A
    nested key is written with dots; the entries of a list are one value.

    Attributes:
        tool: axolotl, llamafactory, trl, accelerate, deepspeed, peft, slurm, python or requirements.
        path: the file.
        setup: what the rules judge.
        loaded: the SureFit config that the file maps to, with the lines of the foreign file; None where it describes
            no whole supervised run.
        names: dotted SureFit key → the tool's key that sets it, or would if the file did.
        mapped: keys that reached the config or the setup.
        judged: those of them that only the rules look at, because SureFit's config has no place for them.
        lost: keys that nothing looks at.
        job: of a SLURM script, what it asks for and launches.
        problems: values that the tool itself cannot use, with file and line.
        rows_known: `loaded.config.data.train` is all that the tool would train on, row by row, laid out as SureFit
            reads it; otherwise nothing may be concluded from its rows.
        values: every key of the file, nested ones with dots → its value.
        lines: every key of the file, those in lists as `datasets[0].path` → its line.
        parts: what is lost inside values that reached the config.
        columns: what a script reads of its rows → (their file, the column).
        stack: the versions that a requirements file, or a shell script, asks for.
        judged_by: the releases of the libraries whose arguments a script was compared with; empty where there are none.
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
        """The line of a key of the file, or of the nearest one above it."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key)
