"""The rows of a run's sources, which several stages need: each source is read once before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefit.data.read.load import Rows
    from surefit.data.rows.layouts import Examples


class RunSources:
    """Reads each source once, and keeps the rows until training has tokenized them; afterwards it keeps none.

    Attributes:
        held_out: the held-out examples, once training has selected them; merging compares and evaluating scores on
            them.
    """

    def __init__(self) -> None:
        self.held_out: Examples | None = None
        self._rows: dict[tuple[str, str], Rows] = {}
        self._keeps = True

    def load_rows(self, source: str, *, split: str = "train") -> Rows:
        """Return the rows of a source, like `data.read.load.load_rows`."""
        from surefit.data.read.load import load_rows

        rows = self._rows.get((source, split)) or load_rows(source, split=split)
        if self._keeps:
            self._rows[source, split] = rows
        return rows

    def forget(self, sources: Iterable[str]) -> None:
        """Forget the rows of these sources."""
        names = set(sources)
        self._rows = {key: rows for key, rows in self._rows.items() if key[0] not in names}

    def close(self, others: Iterable[Rows | None] = ()) -> None:
        """Forget all rows, and what they and the `others` were converted to, and keep no more."""
        for rows in (*self._rows.values(), *others):
            if rows is not None:
                rows.conversions.clear()
        self._rows.clear()
        self._keeps = False
