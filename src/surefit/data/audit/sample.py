"""Counting what detectors see, and the quick audit of a few rows that `surefit check` has time for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.core.errors import DataError
from surefit.core.sampling import evenly
from surefit.core.units import MIB, shortened
from surefit.data.audit.detectors import Detector, Sighting, detectors, file_detectors
from surefit.data.audit.detectors.conventions import NAMES
from surefit.data.read.sources import files_of, resolve_source
from surefit.facts.audit import AuditFacts, Observation

if TYPE_CHECKING:
    from surefit.data.read.load import Rows

EXAMPLES = 3
SAMPLE = 500
SMALL_FILE = 8 * MIB
"""Up to this size a check reads a file whole; `surefit audit` reads all."""


@dataclass
class Tally:
    """How often each thing was seen, and the first places.

    Attributes:
        counts: name → rows.
        first: name → the first (row number, what was seen there), at most `EXAMPLES`.
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, name: str, index: int, what: str) -> None:
        """Count one row; rows come in order."""
        self.counts[name] = self.counts.get(name, 0) + 1
        places = self.first.setdefault(name, [])
        if len(places) < EXAMPLES:
            places.append((index, shortened(what, 160)))

    def extend(self, sightings: Iterable[Sighting]) -> None:
        """Count what a detector saw."""
        for sighting in sightings:
            self.add(sighting.name, sighting.index, sighting.what)

    def merge(self, later: Tally) -> None:
        """Add the counts of rows after these."""
        for name, count in later.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
            self.first[name] = [*self.first.get(name, ()), *later.first[name]][:EXAMPLES]

    def observation(self, name: str, of: int, where: Callable[[int], str], detail: str = "") -> Observation:
        """What is known of one name."""
        places = tuple(f"{where(index)}: {what}" for index, what in self.first.get(name, ()))
        return Observation(self.counts.get(name, 0), of, places, detail)


def chosen_detectors(columns: Collection[str], recipe: str | None) -> list[Detector]:
    """The detectors that can see anything in rows with these columns."""
    return [detector for detector in detectors() if detector.applies(columns, recipe)]


def look_at_rows(looking: Sequence[Detector], numbered: Iterable[tuple[int, Mapping[str, Any]]]) -> Tally:
    """What the detectors see in rows given with their numbers."""
    tally = Tally()
    looks = [detector.look for detector in looking]
    for index, row in numbered:
        for look in looks:
            tally.extend(look(index, row))
    return tally


def detected(tally: Tally, looking: Sequence[Detector], of: int, where: Callable[[int], str]) -> dict[str, Observation]:
    """An observation for every name that was looked for, seen or not."""
    names = [name for detector in looking for name in detector.names]
    return {name: tally.observation(name, of, where) for name in names}


def file_observations(source: str, largest: int | None = None) -> dict[str, Observation]:
    """What the detectors of whole files see, also in files that cannot be read as rows.

    Args:
        source: as the config names it.
        largest: files over so many bytes are left out; None takes all.
    """
    try:
        found = resolve_source(source)
        files = [] if found.kind == "url" else list(map(Path, files_of(found)))
    except DataError:
        return {}
    files = [path for path in files if largest is None or path.stat().st_size <= largest]
    observations: dict[str, Observation] = {}
    for detector in file_detectors():
        for path in files:
            for name, seen in detector.look_at(path).items():
                observations[name] = _together(observations[name], seen) if name in observations else seen
    return observations


def _together(a: Observation, b: Observation) -> Observation:
    detail = "; ".join(part for part in (a.detail, b.detail) if part)
    return Observation(a.rows + b.rows, a.of + b.of, (*a.examples, *b.examples)[:EXAMPLES], detail)


def convention_detectors(columns: Collection[str], recipe: str | None) -> list[Detector]:
    """Return those of the detectors that see how something is written."""
    return [each for each in chosen_detectors(columns, recipe) if NAMES.intersection(each.names)]


def conventions_of(rows: Rows, recipe: str | None, limit: int = SAMPLE) -> dict[str, Observation]:
    """Return how up to `limit` rows, spread evenly, write what can be written in several ways."""
    numbers = evenly(len(rows), limit)
    sample = [(index, rows[index]) for index in numbers]
    columns = dict.fromkeys(name for _, row in sample for name in row)
    looking = convention_detectors(columns, recipe)
    return detected(look_at_rows(looking, sample), looking, len(sample), rows.where)


def sample_audit(rows: Rows, recipe: str | None, limit: int = SAMPLE) -> AuditFacts:
    """The row-level detectors on up to `limit` rows, spread evenly, and the whole files where they are small; no
    tokenizer, no numpy."""
    numbers = evenly(len(rows), limit)
    sample = [(index, rows[index]) for index in numbers]
    columns = dict.fromkeys(name for _, row in sample for name in row)
    looking = chosen_detectors(columns, recipe)
    observations = detected(look_at_rows(looking, sample), looking, len(sample), rows.where)
    observations |= file_observations(rows.source, SMALL_FILE)
    return AuditFacts(rows.source, rows.total, len(sample), observations)
