"""The audit of every row: chunks are looked at in as many processes as there are cores, then put together.

Chunks are of one size whatever the number of processes, and are put together in the order of the rows: so is every
number and every example in the result.
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
from surefit.data.audit.lengths import LengthCounts
from surefit.data.audit.near_duplicates import find_near_duplicates, match_near_duplicates
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
"""Rows that one process looks at in one go."""
CHUNK_CHARACTERS = 32_000_000
"""Of its rows, after which a chunk has no more."""
START_SECONDS, ROW_SECONDS, CHARACTER_SECONDS = 4.0, 1.2e-4, 2.5e-7
"""What a process costs before its first row (it imports transformers), a row, and a character of it; measured. They
only decide how many processes are worth their start."""
ROUND_TRIPS = 200
"""Rows on which the template's round trip is tried."""


@dataclass(frozen=True)
class AuditResult:
    """What an audit found.

    Attributes:
        facts: the observations.
        dataset: the facts that a check takes from a sample, from all rows.
        sha256: of the files.
        content_sha256: of the rows as canonical JSON, whatever file holds them.
        unit: what lengths are counted in, "tokens" or "characters".
        usable: rows that can be used.
        given: of each token example, the length of what is not learnt (`chunk.ChunkStats`).
        learnt: of each token example, the length of what is.
        whole: of each token example, the lengths of both together.
        scripts: writing system → its letters in what users and assistant say.
        languages: language → rows in which users and assistant speak it (`languages.language_of`).
        scored: name of a scored set → its source, rows and leaks.
        workers: processes that looked.
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
    """Rows that can be gone through more than once: in memory, or streamed from their files."""

    source: str
    files: tuple[Path, ...]

    def __len__(self) -> int: ...

    @property
    def sha256(self) -> str:
        """Of the files."""

    @property
    def columns(self) -> list[str]:
        """Every column that any row has."""

    def placed(self) -> Iterator[RowWithPlace]:
        """The rows in order."""

    def sample(self, limit: int) -> Rows:
        """Some of them, spread evenly."""


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
    """Look at every row.

    Args:
        rows: the training rows.
        question: what to look at; `columns`, `target`, `every` and `prompts` are filled in here.
        scored: name → rows of the sets that a model is scored on, to be compared with the training rows.
        mixed: name → further training rows, which are rendered only.
        expected: the recipe's columns; None for several tasks (`dataset_facts`).
        workers: processes at most; small sets are looked at in this one.
        on_progress: called with the rows done.
        and_then: called with all that was gathered, of the training rows and of each scored set, while it is there.

    Raises:
        DataError: the columns do not fit the recipe.
        ModelError: the tokenizer cannot be loaded or has no chat template.
    """
    few = rows.sample(SAMPLE)
    sample = replace(dataset_facts(rows.source, few, few.where, expected=expected), rows=len(rows))
    sample = replace(sample, epoch_rows=len(rows), divided=len(rows))
    every = max(1, len(rows) // ROUND_TRIPS)
    question = replace(question, columns=tuple(rows.columns), target=sample.target, every=every, prompts=bool(scored))
    most, workers = workers, _count_useful_workers(workers, rows)
    scored, mixed = scored or {}, mixed or {}
    total = len(rows) + sum(map(len, (*scored.values(), *mixed.values())))
    with ExitStack() as stack, _pause_gc():
        seen = MergedStats(stack.enter_context(open_spool()))
        for part in _audit_chunks(rows.placed(), seen.spool, question, workers):
            seen.add(part)
            on_progress(len(seen), total, "rows")
        theirs = {}
        for name, others in scored.items():
            about = replace(question, columns=tuple(others.columns), source=others.source)
            theirs[name] = MergedStats(stack.enter_context(open_spool()))
            for part in _audit_chunks(others.placed(), theirs[name].spool, about):
                theirs[name].add(part)
            on_progress(total, total, name)
        added = {}
        for name, others in mixed.items():
            about = replace(question, columns=tuple(others.columns), source=others.source, prompts=False)
            added[name] = MergedStats(stack.enter_context(open_spool()))
            for part in _audit_chunks(others.placed(), added[name].spool, about, _count_useful_workers(most, others)):
                added[name].add(part)
        leaks = {name: _leaks(whole, seen) for name, whole in theirs.items()}
        observations = _observations(question, seen) | _leak_observations(leaks, theirs, seen.spool)
        several = expected is None  # each task has ways of its own
        if and_then:
            and_then(question, seen, theirs)
        return AuditResult(
            facts=AuditFacts(
                rows.source,
                len(rows),
                len(rows),
                observations,
                question.max_length,
                {} if several else {name: _conventions(question, scored[name], seen) for name, seen in theirs.items()},
                {name: _renderings(whole) for name, whole in (added | theirs).items()} if question.tokenizer else {},
            ),
            dataset=_with_full_counts(sample, seen, observations["duplicate"].rows),
            sha256=rows.sha256,
            content_sha256=seen.sha256.hexdigest(),
            unit="tokens" if question.tokenizer else "characters",
            usable=seen.usable,
            given=seen.given,
            learnt=seen.learnt,
            whole=seen.whole,
            scripts=dict(seen.scripts.most_common()),
            languages=dict(seen.languages.most_common()),
            scored={name: _scored_entry(others, leaks[name]) for name, others in scored.items()},
            workers=workers,
        )


def _count_useful_workers(workers: int, rows: AuditableRows) -> int:
    """Return how many processes are worth their start."""
    return max(1, min(workers, int(_expected_seconds(rows) / START_SECONDS)))


def _expected_seconds(rows: AuditableRows) -> float:
    """What looking at all rows will take one process, by the length of a few."""
    some = rows.sample(50)
    characters = sum(len(chunk.row_text(row)) for row in some) / max(1, len(some))
    return len(rows) * (ROW_SECONDS + CHARACTER_SECONDS * characters)


@contextlib.contextmanager
def _pause_gc() -> Iterator[None]:
    """Spare the garbage collector the rows, which stay anyway: searching them again and again costs a fifth more."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# Looking, in this process or in several


def _audit_chunks(
    placed: Iterable[RowWithPlace], spool: Spool, question: AuditJob, workers: int = 1
) -> Iterator[ChunkStats]:
    """What each chunk shows, in order; a few chunks for each process are in memory."""
    if workers == 1:
        looker = ChunkAuditor(question)
        for start, rows in _chunks(placed, spool):
            yield looker.look(start, rows)
        return
    with processes.pool(workers, _start_worker, (question,)) as pool:
        try:
            waiting: deque[Future[ChunkStats]] = deque()
            for start, rows in _chunks(placed, spool):
                waiting.append(pool.submit(_audit_chunk, start, rows))
                if len(waiting) > 3 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _chunks(placed: Iterable[RowWithPlace], spool: Spool) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(number of the first row, rows) of `CHUNK` rows, or of fewer where they are long."""
    start, held, size = 0, [], 0
    for found in placed:
        spool.place(found)
        held.append(found.row)
        size += count_characters(found.row)
        if len(held) == CHUNK or size > CHUNK_CHARACTERS:
            yield start, held
            start, held, size = start + len(held), [], 0
    if held:
        yield start, held


_worker_auditor: list[ChunkAuditor] = []
"""In a worker process: what answers its question."""


def _start_worker(question: AuditJob) -> None:
    env.quiet_libraries()
    env.one_tokenizer_thread()
    _worker_auditor.append(ChunkAuditor(question))


def _audit_chunk(start: int, rows: list[dict[str, Any]]) -> ChunkStats:
    return _worker_auditor[-1].look(start, rows)


class MergedStats:
    """What all chunks show together: counts in memory, what is compared between rows in a spool."""

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

    def __len__(self) -> int:
        return len(self.contents)

    def add(self, part: ChunkStats) -> None:
        """The next chunk."""
        self.tally.merge(part.tally)
        self.scripts.update(part.scripts)
        self.languages.update(part.languages)
        self.tried += part.tried
        self.sha256.update(part.rows)
        self.usable += int(np.count_nonzero(part.longest >= 0))
        self.given.add(part.given)
        self.learnt.add(part.learnt)
        self.whole.add(part.given + part.learnt)
        for name in ("contents", "targets", "prompts", "empty", "longest", "keys", "prompt_keys", "texts", "asked"):
            getattr(self, name).append(getattr(part, name))


# Judging all rows together


def _observations(question: AuditJob, seen: MergedStats) -> dict[str, Observation]:
    count, where = len(seen), seen.spool.where
    looking = select_detectors(question.columns, question.recipe_name)
    found = build_observations(seen.tally, looking, count, where)
    usable = seen.usable
    of = {"unusable_row": count} if question.recipe else {}
    of |= dict.fromkeys(("null_target", "blank_target"), count) if question.target else {}
    if question.recipe:
        of["mask_inside_prompt"] = usable
    if question.tokenizer:
        of |= dict.fromkeys(("no_supervised_token", "few_supervised_tokens"), usable)
        of["template_round_trip"] = seen.tried
        of |= dict.fromkeys(RENDERINGS, usable)
    if question.max_length is not None and question.tokenizer:
        of["over_max_length"] = usable
    for name, possible in of.items():
        found[name] = seen.tally.observation(name, possible, where, _detail(name, question, seen))
    if question.target:
        found["constant_target"] = _observe_constant_target(seen)
    return found | _observe_duplicates(seen)


def _renderings(seen: MergedStats) -> dict[str, Observation]:
    """Return what is seen of another source's rows once they are rendered, and those that cannot be used."""
    found = {name: seen.tally.observation(name, seen.usable, seen.spool.where) for name in RENDERINGS}
    return found | {UNUSABLE: seen.tally.observation(UNUSABLE, len(seen), seen.spool.where)}


UNUSABLE = "unusable_row"


def _conventions(question: AuditJob, rows: AuditableRows, seen: MergedStats) -> dict[str, Observation]:
    """Return how the rows of a scored set write what can be written in several ways."""
    looking = select_convention_detectors(rows.columns, question.recipe_name)
    return build_observations(seen.tally, looking, len(seen), seen.spool.where)


def _detail(name: str, question: AuditJob, seen: MergedStats) -> str:
    if name != "over_max_length" or question.max_length is None:
        return ""
    rows, tokens, longest = seen.whole.over(question.max_length)
    if not rows:
        return ""
    return f"{tokens:,} of {seen.whole.total:,} tokens are in those rows; the longest has {longest:,}"


def _observe_constant_target(seen: MergedStats) -> Observation:
    """All rows, where they have one and the same answer; a single row is no pattern."""
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
    """For each row the number of the first equal to it, plus 1; 0 where it is that one itself."""
    found = seen.spool.column("first", np.int64)
    if len(found):
        return found
    pairs = seen.spool.ordered(len(seen))
    for places, values in seen.contents.parts():
        _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
        earlier = places[first[inverse.reshape(-1)]]
        later = earlier != places
        pairs.add(places[later], earlier[later] + 1)
    for places, earlier in pairs:
        start = len(found)
        stretch = np.zeros(min(pairs.stretch, len(seen) - start), np.int64)
        stretch[places - start] = earlier
        found.append(stretch)
    return found


def iterate_duplicates(first: Column) -> Iterator[tuple[int, int]]:
    """(a row that equals an earlier one, the first such), given `first_equal_rows`."""
    for start, block in first.blocks():
        for place in np.flatnonzero(block).tolist():
            yield start + place, int(block[place]) - 1


def _with_full_counts(sample: DatasetFacts, seen: MergedStats, duplicates: int) -> DatasetFacts:
    """The sample's facts with the counts of all rows."""
    counts, first = seen.tally.counts, seen.tally.first
    bad = [index for name in ("null_target", "blank_target") for index, _ in first.get(name, ())]
    return replace(
        sample,
        sample=len(seen),
        target_null=counts.get("null_target", 0),
        target_blank=counts.get("blank_target", 0),
        target_distinct=_distinct(seen.targets),
        first_bad=seen.spool.where(min(bad)) if bad else None,
        duplicates=duplicates,
    )


# The scored sets against the training rows


@dataclass(frozen=True)
class _Leaks:
    """Rows of a scored set → the training row they are in, and how near: 1 where the whole prompt is the same."""

    exact: dict[int, int]
    near: dict[int, tuple[int, float]]


def _leaks(scored: MergedStats, train: MergedStats) -> _Leaks:
    prompts = scored.prompts.read(0, len(scored.prompts))
    wanted = np.unique(prompts[prompts != b""])
    first: dict[bytes, int] = {}
    for start, block in train.prompts.blocks():
        for place in np.flatnonzero(np.isin(block, wanted)).tolist():
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
    for name, found in leaks.items():
        where = scored[name].spool.where
        for index, row in sorted(found.exact.items()):
            exact.add("leak_exact", len(places), f"the prompt of {spool.where(row)}")
            places.append(where(index))
        for index, (row, similarity) in sorted(found.near.items()):
            near.add("leak_near", len(places), f"{similarity:.0%} the prompt of {spool.where(row)}")
            places.append(where(index))
    of = sum(map(len, scored.values()))
    detail = "; ".join(
        f"{name}: {len(leaks[name].exact):,} the same and {len(leaks[name].near):,} nearly, of {len(others):,}"
        for name, others in scored.items()
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
