"""Observations of an audit of a data set, in numbers that rules can judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Observation:
    """Frequency of one pattern that was looked for in the rows.

    Attributes:
        rows: rows that show it.
        of: rows that could have shown it.
        examples: the first few, each as "file:line" or "row N", with a description of the fault.
        detail: facts beyond the numbers.
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
    """Results of an audit of a data set.

    Attributes:
        source: the data set as the user wrote it.
        rows: number of all rows.
        audited: rows that were examined.
        observations: name → its frequency; a name that is missing was not looked for.
        max_length: the limit that the token lengths were compared with; None without a config.
        conventions: config key of the other sources of a run (`data.mix.SOURCE`, `data.eval`,
            `evaluate.extra_sets.NAME`) → how their rows are written (data/audit/detectors/conventions.py).
        others: the same keys → observations of their rows once the chat template has rendered them.
    """

    source: str
    rows: int
    audited: int
    observations: Mapping[str, Observation] = field(default_factory=dict)
    max_length: int | None = None
    conventions: Mapping[str, Mapping[str, Observation]] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, Observation]] = field(default_factory=dict)

    def seen(self, name: str) -> Observation | None:
        """Return an observation that at least one row shows, or None."""
        observation = self.observations.get(name)
        return observation if observation and observation.rows else None
