"""What an audit looks for in single rows and in whole files, one module per kind of damage.

A detector only says what it sees and where; the engine (`surefit.data.audit`) counts, and the rules judge.
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
"""The modules of this folder, in the order their detectors look. Each has `DETECTORS`, `FILE_DETECTORS`, or both."""


@dataclass(frozen=True)
class DetectorMatch:
    """One row that shows one thing.

    Attributes:
        name: of the observation.
        index: the row's number, as it was handed to `look`.
        what: what is wrong there, in the row's own words.
    """

    name: str
    index: int
    what: str


class Detector(Protocol):
    """Looks at one row at a time. `names` are the observations it can make."""

    names: tuple[str, ...]

    def applies(self, columns: Collection[str], recipe: str | None) -> bool:
        """Whether rows with these columns, trained on with this recipe (None: not known), can show any of it."""
        ...

    def look(self, index: int, row: Mapping[str, Any]) -> Iterable[DetectorMatch]:
        """What this row shows: at most one sighting per name. Pure, quick, and never raising whatever the row holds."""
        ...


class FileDetector(Protocol):
    """Looks at a whole file. `names` are the observations it can make."""

    names: tuple[str, ...]

    def look_at(self, path: Path) -> dict[str, Observation]:
        """What the file shows, by name; nothing for a file that cannot be read."""
        ...


@lru_cache(maxsize=1)
def load_detectors() -> tuple[Detector, ...]:
    """Every row-level detector."""
    return _collected("DETECTORS")


@lru_cache(maxsize=1)
def load_file_detectors() -> tuple[FileDetector, ...]:
    """Every detector of whole files."""
    return _collected("FILE_DETECTORS")


def _collected(attribute: str) -> tuple[Any, ...]:
    modules = (import_module(f"{__name__}.{name}") for name in MODULES)
    return tuple(one for module in modules for one in getattr(module, attribute, ()))
