"""What an audit found in a data set, in numbers that rules can judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Observation:
    """One thing that was looked for, and how often it was there.

    Attributes:
        rows: rows that show it.
        of: rows that could have shown it.
        examples: the first few, each as "file:line" or "row N", with what is wrong there.
        detail: what the numbers alone do not say.
    """

    rows: int
    of: int
    examples: tuple[str, ...] = ()
    detail: str = ""

    @property
    def share(self) -> float:
        """`rows / of`; 0 where nothing could have shown it."""
        return self.rows / self.of if self.of else 0.0


@dataclass(frozen=True)
class AuditFacts:
    """A data set as an audit saw it.

    Attributes:
        source: as the user wrote it.
        rows: all rows.
        audited: rows that were looked at.
        observations: name → what was seen; a name that is missing was not looked for.
        max_length: the limit that the token lengths were judged by; None where there is no config.
        conventions: config key of the other sources of a run (`data.mix.SOURCE`, `data.eval`,
            `evaluate.extra_sets.NAME`) → how their rows are written (data/audit/detectors/conventions.py).
        others: the same keys → what is seen of their rows once the chat template has rendered them.
    """

    source: str
    rows: int
    audited: int
    observations: Mapping[str, Observation] = field(default_factory=dict)
    max_length: int | None = None
    conventions: Mapping[str, Mapping[str, Observation]] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, Observation]] = field(default_factory=dict)

    def seen(self, name: str) -> Observation | None:
        """An observation that at least one row shows, or None."""
        found = self.observations.get(name)
        return found if found and found.rows else None
