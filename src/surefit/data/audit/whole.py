"""The audit of every row: chunks are audited in parallel processes, then merged.

Chunks have one size whatever the number of processes, and are merged in the order of the rows: so every number and
every example in the result is the same for any number of processes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from surefit.core import env, processes
from surefit.core.progress import OnProgress, ignore_progress
from surefit.data.audit import chunk
from surefit.data.audit.chunk import DIGEST, AuditJob, ChunkAuditor, ChunkStats
from surefit.data.audit.labelled import LabelFacts, observe_all_labels
from surefit.data.audit.lengths import LengthCounts
from surefit.data.audit.near_duplicates import find_near_duplicates, match_near_duplicates
from surefit.data.audit.pairs import IDENTICAL, NEAR, SWAPPED, TRUNCATED, PairFacts, observe_all_pairs
from surefit.data.audit.sample import (
    SAMPLE,
    DetectorTally,
    build_observations,
    select_convention_detectors,
    select_detectors,
)
from surefit.data.read.disk_columns import Column, Spool, SpooledKeys, open_spool
from surefit.data.read.load import Rows
from surefit.data.read.readers import RowWithPlace, count_characters
from surefit.data.rows.template_checks import NAMES as RENDERINGS
from surefit.facts.audit import AuditFacts, Observation
from surefit.facts.dataset import DatasetFacts, dataset_facts

CHUNK = 1000
"""Rows that one process audits in one call."""
CHUNK_CHARACTERS = 32_000_000
"""Characters in a chunk's rows from which the chunk is complete, even with fewer rows."""
START_SECONDS, ROW_SECONDS, CHARACTER_SECONDS = 4.0, 1.2e-4, 2.5e-7
"""Seconds that a process costs before its first row (it imports transformers), per row, and per character of a row;
measured. They only decide how many processes are worth their start."""
ROUND_TRIPS = 200
"""Rows on which the template's round trip is tried."""


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Attributes:
        facts: the observations.
        dataset: the facts that a check takes from a sample, from all rows.
        sha256: SHA-256 of the files.
        content_sha256: SHA-256 of the rows as canonical JSON, whatever file holds them.
        unit: unit of lengths, "tokens" or "characters".
        usable: rows that can be used.
        given: lengths of the part without a label, per token example (`chunk.ChunkStats`).
        learnt: lengths of the supervised part, per token example.
        whole: lengths of both parts together, per token example.
        scripts: writing system → its letters in the turns of users and assistant.
        languages: language → rows whose users and assistant write it (`languages.detect_language`).
        scored: name of an evaluation set → its source, rows and leaks.
        workers: processes used.
    """

    facts: AuditFacts
    dataset: DatasetFacts
    sha256: str
    content_sha256: str
    unit: str
    usable: int
    given: LengthCounts
    learnt: LengthCounts
    whole: LengthCounts
    scripts: Mapping[str, int]
    languages: Mapping[str, int]
    scored: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    workers: int = 1


class AuditableRows(Protocol):
    """Rows that can be iterated more than once: in memory, or streamed from their files."""

    source: str
    files: tuple[Path, ...]

    def __len__(self) -> int: ...

    @property
    def sha256(self) -> str:
        """SHA-256 of the files."""

    @property
    def columns(self) -> list[str]:
        """Columns that any row has."""

    def placed(self) -> Iterator[RowWithPlace]:
        """Iterate over the rows in order."""

    def sample(self, limit: int) -> Rows:
        """Return up to `limit` rows, spread evenly."""


def audit_rows(
    rows: AuditableRows,
    question: AuditJob,
    *,
    scored: Mapping[str, AuditableRows] | None = None,
    mixed: Mapping[str, AuditableRows] | None = None,
    expected: Sequence[str] | None = (),
    workers: int = 1,
    on_progress: OnProgress = ignore_progress,
    and_then: Callable[[AuditJob, MergedStats, Mapping[str, MergedStats]], None] | None = None,
) -> AuditResult:
    """Audit every row.

    Args:
        rows: the training rows.
        question: what to look at; `columns`, `target`, `every` and `prompts` are filled in here.
        scored: name → rows of the evaluation sets, which are compared with the training rows.
        mixed: name → further training rows, which are rendered only.
        expected: the recipe's columns; None for several tasks (`dataset_facts`).
        workers: the most processes to use; small sets are audited in this process.
        on_progress: called with the number of rows done.
        and_then: called with all that was gathered, from the training rows and each evaluation set, while the spools
        exist.

    Raises:
        DataError: the columns do not fit the recipe.
        ModelError: the tokenizer cannot be loaded or has no chat template.
    """
    sample_rows = rows.sample(SAMPLE)
    sample = replace(dataset_facts(rows.source, sample_rows, sample_rows.where, expected=expected), rows=len(rows))
    sample = replace(sample, epoch_rows=len(rows), divided=len(rows))
    every = max(1, len(rows) // ROUND_TRIPS)
    question = replace(question, columns=tuple(rows.columns), target=sample.target, every=every, prompts=bool(scored))
    max_workers, workers = workers, _count_useful_workers(workers, rows)
    scored, mixed = scored or {}, mixed or {}
    total = len(rows) + sum(map(len, (*scored.values(), *mixed.values())))
    with ExitStack() as stack, _pause_gc():

        def gather(source: AuditableRows, workers: int = 1, **changes: Any) -> MergedStats:
            stats = MergedStats(stack.enter_context(open_spool()))
            job = replace(question, columns=tuple(source.columns), source=source.source, **changes)
            for part in _audit_chunks(source.placed(), stats.spool, job, workers):
                stats.add(part)
            return stats

        train_stats = MergedStats(stack.enter_context(open_spool()))
        for part in _audit_chunks(rows.placed(), train_stats.spool, question, workers):
            train_stats.add(part)
            on_progress(len(train_stats), total, "rows")
        scored_stats = {}
        for name, other_rows in scored.items():
            scored_stats[name] = gather(other_rows)
            on_progress(total, total, name)
        mixed_stats = {
            name: gather(other_rows, _count_useful_workers(max_workers, other_rows), prompts=False)
            for name, other_rows in mixed.items()
        }
        leaks = {name: _leaks(stats, train_stats) for name, stats in scored_stats.items()}
        observations = _observations(question, train_stats) | _leak_observations(leaks, scored_stats, train_stats.spool)
        several_tasks = expected is None  # each task has its own ways of writing
        if and_then:
            and_then(question, train_stats, scored_stats)
        return AuditResult(
            facts=AuditFacts(
                rows.source,
                len(rows),
                len(rows),
                observations,
                question.max_length,
                {}
                if several_tasks
                else {name: _conventions(question, scored[name], stats) for name, stats in scored_stats.items()},
                {name: _renderings(stats) for name, stats in (mixed_stats | scored_stats).items()}
                if question.tokenizer
                else {},
            ),
            dataset=_with_full_counts(sample, train_stats, observations["duplicate"].rows),
            sha256=rows.sha256,
            content_sha256=train_stats.sha256.hexdigest(),
            unit="tokens" if question.tokenizer else "characters",
            usable=train_stats.usable,
            given=train_stats.given,
            learnt=train_stats.learnt,
            whole=train_stats.whole,
            scripts=dict(train_stats.scripts.most_common()),
            languages=dict(train_stats.languages.most_common()),
            scored={name: _scored_entry(other_rows, leaks[name]) for name, other_rows in scored.items()},
            workers=workers,
        )


def _count_useful_workers(workers: int, rows: AuditableRows) -> int:
    """Return how many processes are worth their start."""
    return max(1, min(workers, int(_expected_seconds(rows) / START_SECONDS)))


def _expected_seconds(rows: AuditableRows) -> float:
    """Return the seconds that one process needs for all rows, estimated from the length of 50."""
    sample_rows = rows.sample(50)
    characters = sum(len(chunk.row_text(row)) for row in sample_rows) / max(1, len(sample_rows))
    return len(rows) * (ROW_SECONDS + CHARACTER_SECONDS * characters)


@contextlib.contextmanager
def _pause_gc() -> Iterator[None]:
    """Exclude the rows from garbage collection: they stay anyway, and repeated scans cost a fifth more time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# Auditing chunks, in this process or in several


def _audit_chunks(
    placed: Iterable[RowWithPlace], spool: Spool, question: AuditJob, workers: int = 1
) -> Iterator[ChunkStats]:
    """Yield the stats of each chunk, in order; a few chunks per process are in memory."""
    if workers == 1:
        auditor = ChunkAuditor(question)
        for start, rows in _chunks(placed, spool):
            yield auditor.look(start, rows)
        return
    with processes.pool(workers, _start_worker, (question,)) as pool:
        try:
            futures: deque[Future[ChunkStats]] = deque()
            for start, rows in _chunks(placed, spool):
                futures.append(pool.submit(_audit_chunk, start, rows))
                if len(futures) > 3 * workers:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _chunks(placed: Iterable[RowWithPlace], spool: Spool) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (number of the first row, rows) of `CHUNK` rows, or of fewer where they are long."""
    start, chunk_rows, size = 0, [], 0
    for placed_row in placed:
        spool.place(placed_row)
        chunk_rows.append(placed_row.row)
        size += count_characters(placed_row.row)
        if len(chunk_rows) == CHUNK or size > CHUNK_CHARACTERS:
            yield start, chunk_rows
            start, chunk_rows, size = start + len(chunk_rows), [], 0
    if chunk_rows:
        yield start, chunk_rows


_worker_auditor: list[ChunkAuditor] = []
"""The worker process's auditor, made once."""


def _start_worker(question: AuditJob) -> None:
    env.quiet_libraries()
    env.one_tokenizer_thread()
    _worker_auditor.append(ChunkAuditor(question))


def _audit_chunk(start: int, rows: list[dict[str, Any]]) -> ChunkStats:
    return _worker_auditor[-1].look(start, rows)


class MergedStats:
    """The stats of all chunks together: counts in memory, values that are compared between rows in a spool."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.tally, self.scripts, self.tried, self.usable = DetectorTally(), Counter[str](), 0, 0
        self.languages: Counter[str] = Counter()
        self.sha256 = hashlib.sha256()
        self.given, self.learnt, self.whole = LengthCounts(), LengthCounts(), LengthCounts()
        self.contents, self.targets = spool.column("contents", DIGEST), spool.column("targets", np.uint64)
        self.prompts, self.empty = spool.column("prompts", DIGEST), spool.column("empty", np.bool_)
        self.longest = spool.column("longest", np.int32)
        self.keys, self.prompt_keys = SpooledKeys(spool, "keys"), SpooledKeys(spool, "prompt_keys")
        self.texts, self.asked = spool.texts("texts"), spool.texts("asked")
        self.pairs: list[tuple[int, PairFacts]] = []
        self.labels: list[tuple[int, LabelFacts]] = []

    def __len__(self) -> int:
        return len(self.contents)

    def add(self, part: ChunkStats) -> None:
        """Add the next chunk."""
        self.tally.merge(part.tally)
        self.scripts.update(part.scripts)
        self.languages.update(part.languages)
        self.tried += part.tried
        self.sha256.update(part.rows)
        self.usable += int(np.count_nonzero(part.longest >= 0))
        self.given.add(part.given)
        self.learnt.add(part.learnt)
        self.whole.add(part.given + part.learnt)
        self.pairs += part.pairs
        self.labels += part.labels
        for name in ("contents", "targets", "prompts", "empty", "longest", "keys", "prompt_keys", "texts", "asked"):
            getattr(self, name).append(getattr(part, name))


# Observations on all rows together


def _observations(question: AuditJob, seen: MergedStats) -> dict[str, Observation]:
    count, where = len(seen), seen.spool.where
    detectors = select_detectors(question.columns, question.recipe_name)
    observations = build_observations(seen.tally, detectors, count, where)
    usable = seen.usable
    totals = {"unusable_row": count} if question.recipe else {}
    totals |= dict.fromkeys(("null_target", "blank_target"), count) if question.target else {}
    if question.recipe:
        totals["mask_inside_prompt"] = usable
    if question.tokenizer:
        totals |= dict.fromkeys(("no_supervised_token", "few_supervised_tokens"), usable)
        totals["template_round_trip"] = seen.tried
        totals |= dict.fromkeys(RENDERINGS, usable)
    if question.max_length is not None and question.tokenizer:
        totals["over_max_length"] = usable
    for name, total in totals.items():
        observations[name] = seen.tally.observation(name, total, where, _detail(name, question, seen))
    if question.target:
        observations["constant_target"] = _observe_constant_target(seen)
    labels = observe_all_labels(seen.labels, seen.spool.where)
    return observations | _observe_duplicates(seen) | _observe_pairs(question, seen) | labels


def _observe_pairs(question: AuditJob, seen: MergedStats) -> dict[str, Observation]:
    """Return the observations on pairs of answers; none where the rows are no pairs."""
    if not seen.pairs:
        return {}
    measured = question.tokenizer is not None and question.max_length is not None
    names = (IDENTICAL, NEAR, SWAPPED, *((TRUNCATED,) if measured else ()))
    one_by_one = {name: seen.tally.observation(name, len(seen.pairs), seen.spool.where) for name in names}
    return one_by_one | observe_all_pairs(seen.pairs, seen.spool.where)


def _renderings(seen: MergedStats) -> dict[str, Observation]:
    """Return the observations on another source's rows after rendering, and on its unusable rows."""
    observations = {name: seen.tally.observation(name, seen.usable, seen.spool.where) for name in RENDERINGS}
    return observations | {UNUSABLE: seen.tally.observation(UNUSABLE, len(seen), seen.spool.where)}


UNUSABLE = "unusable_row"


def _conventions(question: AuditJob, rows: AuditableRows, seen: MergedStats) -> dict[str, Observation]:
    """Return the ways of writing in the rows of an evaluation set."""
    detectors = select_convention_detectors(rows.columns, question.recipe_name)
    return build_observations(seen.tally, detectors, len(seen), seen.spool.where)


def _detail(name: str, question: AuditJob, seen: MergedStats) -> str:
    if name != "over_max_length" or question.max_length is None:
        return ""
    rows, tokens, longest = seen.whole.over(question.max_length)
    if not rows:
        return ""
    return f"{tokens:,} of {seen.whole.total:,} tokens are in those rows; the longest has {longest:,}"


def _observe_constant_target(seen: MergedStats) -> Observation:
    """Return all rows as the observation where they have one and the same answer; a single row is no pattern."""
    count = len(seen.targets)
    constant = count > 1 and _distinct(seen.targets) == 1
    return Observation(count if constant else 0, count)


def _distinct(hashes: Column) -> int:
    return sum(len(np.unique(values)) for _, values in hashes.parts())


def _observe_duplicates(seen: MergedStats) -> dict[str, Observation]:
    where, count = seen.spool.where, len(seen)
    exact, near = DetectorTally(), DetectorTally()
    first = first_equal_rows(seen)
    for index, earlier in iterate_duplicates(first):
        exact.add("duplicate", index, f"the same as {where(earlier)}")
    for pair in find_near_duplicates(seen.keys, seen.texts, lambda index: bool(first.read(index, index + 1)[0])):
        near.add("near_duplicate", pair.index, f"{pair.similarity:.0%} the same as {where(pair.earlier)}")
    return {
        "duplicate": exact.observation("duplicate", count, where),
        "near_duplicate": near.observation("near_duplicate", count, where),
    }


def first_equal_rows(seen: MergedStats) -> Column:
    """Return for each row the number of the first row equal to it, plus 1; 0 for that first row itself."""
    first_numbers = seen.spool.column("first", np.int64)
    if len(first_numbers):
        return first_numbers
    pairs = seen.spool.ordered(len(seen))
    for places, values in seen.contents.parts():
        _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
        earlier = places[first[inverse.reshape(-1)]]
        later = earlier != places
        pairs.add(places[later], earlier[later] + 1)
    for places, earlier in pairs:
        start = len(first_numbers)
        stretch = np.zeros(min(pairs.stretch, len(seen) - start), np.int64)
        stretch[places - start] = earlier
        first_numbers.append(stretch)
    return first_numbers


def iterate_duplicates(first: Column) -> Iterator[tuple[int, int]]:
    """Yield (row that equals an earlier one, the first such row), from the result of `first_equal_rows`."""
    for start, block in first.blocks():
        for place in np.flatnonzero(block).tolist():
            yield start + place, int(block[place]) - 1


def _with_full_counts(sample: DatasetFacts, seen: MergedStats, duplicates: int) -> DatasetFacts:
    """Return the sample's facts with the counts of all rows."""
    counts, first = seen.tally.counts, seen.tally.first
    bad_rows = [index for name in ("null_target", "blank_target") for index, _ in first.get(name, ())]
    return replace(
        sample,
        sample=len(seen),
        target_null=counts.get("null_target", 0),
        target_blank=counts.get("blank_target", 0),
        target_distinct=_distinct(seen.targets),
        first_bad=seen.spool.where(min(bad_rows)) if bad_rows else None,
        duplicates=duplicates,
    )


# The evaluation sets against the training rows


@dataclass(frozen=True)
class _Leaks:
    """Leaked rows of an evaluation set.

    Attributes:
        exact: row → training row with the same prompt.
        near: row → (training row with a similar prompt, similarity).
    """

    exact: dict[int, int]
    near: dict[int, tuple[int, float]]


def _leaks(scored: MergedStats, train: MergedStats) -> _Leaks:
    prompts = scored.prompts.read(0, len(scored.prompts))
    scored_prompts = np.unique(prompts[prompts != b""])
    first: dict[bytes, int] = {}
    for start, block in train.prompts.blocks():
        for place in np.flatnonzero(np.isin(block, scored_prompts)).tolist():
            first.setdefault(bytes(block[place]), start + place)
    exact = {n: first[prompt] for n, prompt in enumerate(prompts.tolist()) if prompt in first}
    matches = match_near_duplicates(scored.prompt_keys, scored.asked, train.prompt_keys, train.asked)
    near = {match.index: (match.earlier, match.similarity) for match in matches if match.index not in exact}
    return _Leaks(exact, near)


def _leak_observations(
    leaks: Mapping[str, _Leaks], scored: Mapping[str, MergedStats], spool: Spool
) -> dict[str, Observation]:
    if not leaks:
        return {}
    exact, near = DetectorTally(), DetectorTally()
    places: list[str] = []
    for name, set_leaks in leaks.items():
        where = scored[name].spool.where
        for index, row in sorted(set_leaks.exact.items()):
            exact.add("leak_exact", len(places), f"the prompt of {spool.where(row)}")
            places.append(where(index))
        for index, (row, similarity) in sorted(set_leaks.near.items()):
            near.add("leak_near", len(places), f"{similarity:.0%} the prompt of {spool.where(row)}")
            places.append(where(index))
    of = sum(map(len, scored.values()))
    detail = "; ".join(
        f"{name}: {len(leaks[name].exact):,} the same and {len(leaks[name].near):,} nearly, of {len(stats):,}"
        for name, stats in scored.items()
    )
    return {
        "leak_exact": exact.observation("leak_exact", of, places.__getitem__, detail),
        "leak_near": near.observation("leak_near", of, places.__getitem__, detail),
    }


def _scored_entry(rows: AuditableRows, leaks: _Leaks) -> dict[str, Any]:
    return {
        "source": rows.source,
        "rows": len(rows),
        "sha256": rows.sha256,
        "leak_exact": len(leaks.exact),
        "leak_near": len(leaks.near),
    }
