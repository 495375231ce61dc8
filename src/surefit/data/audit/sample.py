"""Counts of what the detectors match, and the quick audit of a few rows that `surefit check` has time for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.core.errors import DataError
from surefit.core.sampling import evenly_spaced_indices
from surefit.core.units import MIB, truncate_text
from surefit.data.audit.detectors import Detector, DetectorMatch, load_detectors, load_file_detectors
from surefit.data.audit.detectors.conventions import NAMES
from surefit.data.read.sources import list_source_files, resolve_source
from surefit.facts.audit import AuditFacts, Observation

if TYPE_CHECKING:
    from surefit.data.read.load import Rows

EXAMPLES = 3
SAMPLE = 500
SMALL_FILE = 8 * MIB
"""Bytes of the largest file that a check reads whole; `surefit audit` reads every file."""


@dataclass
class DetectorTally:
    """The number of rows that match each detector name, and the first places.

    Attributes:
        counts: name → rows.
        first: name → the first (row number, what was seen there), at most `EXAMPLES`.
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, name: str, index: int, what: str) -> None:
        """Count one row; rows must come in order."""
        self.counts[name] = self.counts.get(name, 0) + 1
        places = self.first.setdefault(name, [])
        if len(places) < EXAMPLES:
            places.append((index, truncate_text(what, 160)))

    def extend(self, sightings: Iterable[DetectorMatch]) -> None:
        """Count the matches of a detector."""
        for match in sightings:
            self.add(match.name, match.index, match.what)

    def merge(self, later: DetectorTally) -> None:
        """Add the counts of the rows that come after the rows counted so far."""
        for name, count in later.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
            self.first[name] = [*self.first.get(name, ()), *later.first[name]][:EXAMPLES]

    def observation(self, name: str, of: int, where: Callable[[int], str], detail: str = "") -> Observation:
        """Return the observation of one name: its rows, of how many, and the first places."""
        places = tuple(f"{where(index)}: {text}" for index, text in self.first.get(name, ()))
        return Observation(self.counts.get(name, 0), of, places, detail)


def select_detectors(columns: Collection[str], recipe: str | None) -> list[Detector]:
    """Return the detectors that can match in rows with these columns."""
    return [detector for detector in load_detectors() if detector.applies(columns, recipe)]


def run_detectors(looking: Sequence[Detector], numbered: Iterable[tuple[int, Mapping[str, Any]]]) -> DetectorTally:
    """Run the detectors on numbered rows and return the tally."""
    tally = DetectorTally()
    looks = [detector.look for detector in looking]
    for index, row in numbered:
        for look in looks:
            tally.extend(look(index, row))
    return tally


def build_observations(
    tally: DetectorTally, looking: Sequence[Detector], of: int, where: Callable[[int], str]
) -> dict[str, Observation]:
    """Return an observation for every name that was looked for, also for names without a match."""
    names = [name for detector in looking for name in detector.names]
    return {name: tally.observation(name, of, where) for name in names}


def run_file_detectors(source: str, largest: int | None = None) -> dict[str, Observation]:
    """Run the detectors of whole files, which also work on files that cannot be read as rows.

    Args:
        source: as the config names it.
        largest: bytes; larger files are left out. None reads all.
    """
    try:
        resolved = resolve_source(source)
        files = [] if resolved.kind == "url" else list(map(Path, list_source_files(resolved)))
    except DataError:
        return {}
    files = [path for path in files if largest is None or path.stat().st_size <= largest]
    observations: dict[str, Observation] = {}
    for detector in load_file_detectors():
        for path in files:
            for name, observation in detector.look_at(path).items():
                observations[name] = (
                    _merge_observations(observations[name], observation) if name in observations else observation
                )
    return observations


def _merge_observations(a: Observation, b: Observation) -> Observation:
    detail = "; ".join(part for part in (a.detail, b.detail) if part)
    return Observation(a.rows + b.rows, a.of + b.of, (*a.examples, *b.examples)[:EXAMPLES], detail)


def select_convention_detectors(columns: Collection[str], recipe: str | None) -> list[Detector]:
    """Return the detectors that compare ways of writing."""
    return [detector for detector in select_detectors(columns, recipe) if NAMES.intersection(detector.names)]


def _observe_sample(
    rows: Rows, recipe: str | None, limit: int, select: Callable[[Collection[str], str | None], list[Detector]]
) -> dict[str, Observation]:
    """Run the detectors that `select` chooses by columns and recipe on up to `limit` rows, spread evenly."""
    sample = [(index, rows[index]) for index in evenly_spaced_indices(len(rows), limit)]
    detectors = select(dict.fromkeys(name for _, row in sample for name in row), recipe)
    return build_observations(run_detectors(detectors, sample), detectors, len(sample), rows.where)


def observe_conventions(rows: Rows, recipe: str | None) -> dict[str, Observation]:
    """Return the ways of writing in a sample of the rows."""
    return _observe_sample(rows, recipe, SAMPLE, select_convention_detectors)


def audit_sample(rows: Rows, recipe: str | None, limit: int = SAMPLE) -> AuditFacts:
    """Run the row-level detectors on a sample of the rows, and the file detectors on small files; no tokenizer, no
    numpy."""
    observations = _observe_sample(rows, recipe, limit, select_detectors) | run_file_detectors(rows.source, SMALL_FILE)
    return AuditFacts(rows.source, rows.total, min(limit, len(rows)), observations)
