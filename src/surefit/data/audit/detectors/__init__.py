"""Detectors of damage in single rows and in whole files, one module per kind of damage.

A detector only reports what it matches and where; the engine (`surefit.data.audit`) counts, and the rules judge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from surefit.facts.audit import Observation

MODULES: tuple[str, ...] = ("text", "targets", "tools", "conventions", "vintage")
"""This folder's modules, in the order in which their detectors run; each has `DETECTORS`, `FILE_DETECTORS`, or both."""


@dataclass(frozen=True)
class DetectorMatch:
    """A match of one observation in one row.

    Attributes:
        name: name of the observation.
        index: the row's number, as passed to `look`.
        what: what is wrong there, in the row's own words.
    """

    name: str
    index: int
    what: str


class Detector(Protocol):
    """A detector that looks at one row at a time. `names` are the observations that it can make."""

    names: tuple[str, ...]

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Return whether rows with these columns and this recipe (None: not known) can match any of `names`."""
        ...

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """Return the row's matches, at most one per name. Pure and quick, and raises nothing whatever the row holds."""
        ...


class FileDetector(Protocol):
    """A detector that looks at a whole file. `names` are the observations that it can make."""

    names: tuple[str, ...]

    def look_at(self, path: Path) -> dict[str, Observation]:
        """Return the file's observations by name; empty for a file that cannot be read."""
        ...


@lru_cache(maxsize=1)
def load_detectors() -> tuple[Detector, ...]:
    """Return every row-level detector."""
    return _collected("DETECTORS")


@lru_cache(maxsize=1)
def load_file_detectors() -> tuple[FileDetector, ...]:
    """Return every detector of whole files."""
    return _collected("FILE_DETECTORS")


def _collected(attribute: str) -> tuple[Any, ...]:
    modules = (import_module(f"{__name__}.{name}") for name in MODULES)
    return tuple(detector for module in modules for detector in getattr(module, attribute, ()))
