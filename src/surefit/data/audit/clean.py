"""A cleaned copy of a data set without the rows that the audit's findings remove, and the list of the removed rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from surefit.core.errors import DataError
from surefit.core.rundir import file_atomic
from surefit.data.audit.chunk import AuditJob
from surefit.data.audit.near_duplicates import find_near_duplicates, match_near_duplicates
from surefit.data.audit.whole import AuditableRows, MergedStats, first_equal_rows, iterate_duplicates
from surefit.data.read.file_io import file_extensions
from surefit.data.read.sources import RowSource

REASONS = ("empty", "over_max_length", "leak_exact", "leak_near", "duplicate", "near_duplicate")
"""Observations that remove a row; where a row shows several, the first is the reason."""


@dataclass(frozen=True)
class RemovedRow:
    """A row that is left out of the cleaned copy.

    Attributes:
        reason: one of `REASONS`.
        what: what was seen, with the place of the other row where there is one.
    """

    reason: str
    what: str


class Removals(dict[int, RemovedRow]):
    """Row number → why the row is removed. Memory grows with the removed rows only."""

    def find(self, question: AuditJob, train: MergedStats, scored: Mapping[str, MergedStats]) -> None:
        """Choose the rows to remove, from the stats of an audit."""
        self._unfit(question, train)
        for stats in scored.values():
            self._leaks(train, stats)
        for index, earlier in iterate_duplicates(first_equal_rows(train)):
            self._add(index, "duplicate", f"the same as {train.spool.where(earlier)}")
        # One row of each near-duplicate group stays, so rows removed for another reason must not stand for their group.
        for near in find_near_duplicates(train.keys, train.texts, self.__contains__):
            description = f"{near.similarity:.0%} the same as {train.spool.where(near.earlier)}"
            self._add(near.index, "near_duplicate", description)

    def _add(self, index: int, reason: str, what: str) -> None:
        self.setdefault(index, RemovedRow(reason, what))

    def _unfit(self, question: AuditJob, train: MergedStats) -> None:
        limit = question.max_length if question.tokenizer else None
        for start, block in train.empty.blocks():
            for index in (np.flatnonzero(block) + start).tolist():
                self._add(index, "empty", "there is no answer, or no text")
        for start, block in train.longest.blocks() if limit is not None else ():
            for place in np.flatnonzero(block > limit).tolist():
                self._add(start + place, "over_max_length", f"{int(block[place]):,} tokens, max_length {limit:,}")

    def _leaks(self, train: MergedStats, scored: MergedStats) -> None:
        """Remove every training row whose prompt is the same as, or similar to, an evaluation row's prompt."""
        prompts = scored.prompts.read(0, len(scored.prompts))
        place = {prompt: scored.spool.where(n) for n, prompt in reversed([*enumerate(prompts.tolist())]) if prompt}
        scored_prompts = np.array(list(place), prompts.dtype)
        for start, block in train.prompts.blocks():
            for index in np.flatnonzero(np.isin(block, scored_prompts)).tolist():
                self._add(start + index, "leak_exact", f"the prompt of {place[block[index].item()]}")
        for near in match_near_duplicates(train.prompt_keys, train.asked, scored.prompt_keys, scored.asked):
            description = f"{near.similarity:.0%} the prompt of {scored.spool.where(near.earlier)}"
            self._add(near.index, "leak_near", description)

    def counts(self) -> dict[str, int]:
        """Return reason → rows."""
        counts = Counter(removed.reason for removed in self.values())
        return {reason: counts[reason] for reason in REASONS if counts[reason]}


def clean_path(source: RowSource, out: Path | None) -> Path:
    """Return the path of the cleaned copy: `out`, or beside the source file or directory.

    Raises:
        DataError: there is no default path, or it is one that holds the source itself.
    """
    if out is None and source.path is not None:
        name = source.path.name.removesuffix(file_extensions(source.path.name)[1])
        name = name.removesuffix(Path(name).suffix) if source.kind != "directory" else name
        out = (Path() if source.kind == "sample" else source.path.parent) / f"{name}.clean.jsonl"
    if out is None:
        raise DataError(
            "the copy has no default path", code="E4001", path=source.name, help="name a path: --clean-copy FILE.jsonl"
        )
    if out.suffix != ".jsonl":
        raise DataError(
            "the copy is written as JSON Lines", code="E4002", path=out, help="give it the extension .jsonl"
        )
    if source.kind == "directory" and source.path is not None and out.resolve().parent == source.path.resolve():
        raise DataError(
            "the copy would be read as part of its own source", code="E4003", path=out, help="choose another directory"
        )
    return out


def removed_path(out: Path) -> Path:
    """Return the path of the list of removed rows."""
    return out.with_name(f"{out.stem}.removed.jsonl")


def write_clean(rows: AuditableRows, removals: Removals, out: Path) -> None:
    """Write the copy and, beside it, the list; whole or not at all, and never over a source file.

    Raises:
        DataError: `out` is one of the source's files.
        MachineError: it cannot be written.
    """
    for path in (out, removed_path(out)):
        if path.exists() and any(path.samefile(file) for file in rows.files):
            raise DataError(
                "the copy would replace its own source",
                code="E4004",
                path=path,
                help="choose another file: --clean-copy FILE",
            )
    with ExitStack() as stack:
        kept_file, removed_file = (stack.enter_context(file_atomic(path)) for path in (out, removed_path(out)))
        for line, removed in _lines(rows, removals):
            (removed_file if removed else kept_file).write(line)


def _lines(rows: AuditableRows, removals: Removals) -> Iterator[tuple[bytes, bool]]:
    for number, (row, path, line) in enumerate(rows.placed()):
        removal = removals.get(number)
        if removal is None:
            record = row
        else:
            record = {"file": path, "line": line, "row": number + 1, "reason": removal.reason, "what": removal.what}
        yield json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n", removal is not None
