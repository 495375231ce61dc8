"""The audit of every row: chunks are looked at in as many processes as there are cores, then put together.

Chunks are of one size whatever the number of processes, and are put together in the order of the rows: so is every
number and every example in the result.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from surefit.core import env, processes
from surefit.core.progress import OnProgress, silent
from surefit.data.audit import chunk
from surefit.data.audit.chunk import Looker, Question, Seen
from surefit.data.audit.sample import Tally, chosen_detectors, detected
from surefit.data.load import Rows
from surefit.data.near_duplicates import near_duplicates, near_matches
from surefit.facts.audit import AuditFacts, Observation
from surefit.facts.dataset import DatasetFacts, dataset_facts

CHUNK = 1000
"""Rows that one process looks at in one go."""
START_SECONDS, ROW_SECONDS, CHARACTER_SECONDS = 4.0, 1.2e-4, 2.5e-7
"""What a process costs before its first row (it imports transformers), a row, and a character of it; measured. They
only decide how many processes are worth their start."""
ROUND_TRIPS = 200
"""Rows on which the template's round trip is tried."""


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        facts: the observations.
        dataset: the facts that a check takes from a sample, from all rows.
        sha256: of the files.
        content_sha256: of the rows as canonical JSON, whatever file holds them.
        unit: what lengths are counted in, "tokens" or "characters".
        given: of each usable row, the length of what is not learnt.
        learnt: of each usable row, the length of what is.
        scripts: writing system → its letters in what users and assistant say.
        scored: name of a scored set → its source, rows and leaks.
        workers: processes that looked.
    """

    facts: AuditFacts
    dataset: DatasetFacts
    sha256: str
    content_sha256: str
    unit: str
    given: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.int32]
    scripts: Mapping[str, int]
    scored: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    workers: int = 1


def audit(
    rows: Rows,
    question: Question,
    *,
    scored: Mapping[str, Rows] | None = None,
    expected: Sequence[str] | None = (),
    workers: int = 1,
    on_progress: OnProgress = silent,
) -> Audit:
    """Look at every row.

    Args:
        rows: the training rows.
        question: what to look at; `columns`, `target`, `every` and `prompts` are filled in here.
        scored: name → rows of the sets that a model is scored on, to be compared with the training rows.
        expected: the recipe's columns; None for several tasks (`dataset_facts`).
        workers: processes at most; small sets are looked at in this one.
        on_progress: called with the rows done.

    Raises:
        DataError: the columns do not fit the recipe.
        ModelError: the tokenizer cannot be loaded or has no chat template.
    """
    sample = dataset_facts(rows.source, rows, rows.where, expected=expected)
    every = max(1, len(rows) // ROUND_TRIPS)
    question = replace(question, columns=tuple(rows.columns), target=sample.target, every=every, prompts=bool(scored))
    workers = max(1, min(workers, int(_expected_seconds(rows) / START_SECONDS)))
    scored = scored or {}
    total = len(rows) + sum(map(len, scored.values()))
    with _rows_kept():
        seen = _joined(list(_looked_at(rows, question, workers, lambda done: on_progress(done, total, "rows"))))
        texts = _Texts(rows, question)
        leaks: dict[str, _Leaks] = {}
        for name, others in scored.items():
            about = replace(question, columns=tuple(others.columns), source=others.source)
            leaks[name] = _leaks(_joined(list(_looked_at(others, about))), _Texts(others, about), seen, texts)
            on_progress(total, total, name)
        observations = _observations(rows, question, seen, texts) | _leak_observations(leaks, rows, scored)
    return Audit(
        facts=AuditFacts(rows.source, len(rows), len(rows), observations, question.max_length),
        dataset=_of_all_rows(sample, rows, seen, observations["duplicate"].rows),
        sha256=rows.sha256,
        content_sha256=hashlib.sha256(seen.rows).hexdigest(),
        unit="tokens" if question.tokenizer else "characters",
        given=seen.given[seen.given >= 0],
        learnt=seen.learnt[seen.learnt >= 0],
        scripts=dict(seen.scripts.most_common()),
        scored={name: _scored_entry(others, leaks[name]) for name, others in scored.items()},
        workers=workers,
    )


def _expected_seconds(rows: Rows) -> float:
    """What looking at all rows will take one process, by the length of a few."""
    some = rows.sample(50)
    characters = sum(len(chunk.row_text(row)) for row in some) / max(1, len(some))
    return len(rows) * (ROW_SECONDS + CHARACTER_SECONDS * characters)


@contextlib.contextmanager
def _rows_kept() -> Iterator[None]:
    """Spare the garbage collector the rows, which stay anyway: searching them again and again costs a fifth more."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# Looking, in this process or in several


def _looked_at(
    rows: Rows, question: Question, workers: int = 1, on_rows: Callable[[int], None] = lambda done: None
) -> Iterator[Seen]:
    """What each chunk shows, in order."""
    starts = range(0, len(rows), CHUNK)
    if workers == 1:
        looker = Looker(question)
        for start in starts:
            yield looker.look(start, rows[start : start + CHUNK])
            on_rows(min(start + CHUNK, len(rows)))
        return
    with processes.pool(workers, _start, (question,)) as pool:
        try:
            waiting = [pool.submit(_look, start, rows[start : start + CHUNK]) for start in starts]
            for start, future in zip(starts, waiting, strict=True):
                yield future.result()
                on_rows(min(start + CHUNK, len(rows)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_looker: list[Looker] = []
"""In a worker process: what answers its question."""


def _start(question: Question) -> None:
    env.quiet_libraries()
    env.one_tokenizer_thread()
    _looker.append(Looker(question))


def _look(start: int, rows: list[dict[str, Any]]) -> Seen:
    return _looker[-1].look(start, rows)


def _joined(parts: Sequence[Seen]) -> Seen:
    tally, scripts = Tally(), Counter[str]()
    for part in parts:
        tally.merge(part.tally)
        scripts.update(part.scripts)
    arrays = ("contents", "targets", "given", "learnt", "keys", "prompts", "prompt_keys")
    together = {name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays}
    rows, tried = b"".join(part.rows for part in parts), sum(part.tried for part in parts)
    return Seen(tally=tally, rows=rows, scripts=scripts, tried=tried, **together)


class _Texts:
    """What the rows say, made again for the few that are compared word by word."""

    def __init__(self, rows: Rows, question: Question) -> None:
        self._rows = rows
        self._convert = chunk.converter(question)

    def whole(self, index: int) -> str:
        """What is compared between the rows of a set."""
        row = self._rows[index]
        return chunk.said(self._convert(row), chunk.BOTH) if self._convert else chunk.row_text(row)

    def prompt(self, index: int) -> str:
        """What is compared between the sets."""
        row = self._rows[index]
        return chunk.said(self._convert(row), chunk.USER) if self._convert else chunk.row_text(row)


# Judging all rows together


def _observations(rows: Rows, question: Question, seen: Seen, texts: _Texts) -> dict[str, Observation]:
    count = len(rows)
    looking = chosen_detectors(question.columns, question.recipe_name)
    found = detected(seen.tally, looking, count, rows.where)
    usable = int((seen.given >= 0).sum())
    of = {"unusable_row": count} if question.recipe else {}
    of |= dict.fromkeys(("null_target", "blank_target"), count) if question.target else {}
    if question.recipe:
        of["mask_inside_prompt"] = usable
    if question.tokenizer:
        of |= dict.fromkeys(("no_supervised_token", "few_supervised_tokens"), usable)
        of["template_round_trip"] = seen.tried
    if question.max_length is not None and question.tokenizer:
        of["over_max_length"] = usable
    for name, possible in of.items():
        found[name] = seen.tally.observation(name, possible, rows.where, _detail(name, question, seen))
    if question.target:
        found["constant_target"] = _constant(seen)
    return found | _repeated(rows, seen, texts)


def _detail(name: str, question: Question, seen: Seen) -> str:
    if name != "over_max_length" or question.max_length is None:
        return ""
    lengths = (seen.given + seen.learnt)[seen.given >= 0].astype(np.int64)
    long = lengths[lengths > question.max_length]
    if not len(long):
        return ""
    return (
        f"{int(long.sum()):,} of {int(lengths.sum()):,} tokens are in those rows; the longest has {int(long.max()):,}"
    )


def _constant(seen: Seen) -> Observation:
    """All rows, where they have one and the same answer; a single row is no pattern."""
    count = len(seen.targets)
    constant = count > 1 and len(np.unique(seen.targets)) == 1
    return Observation(count if constant else 0, count)


def _repeated(rows: Rows, seen: Seen, texts: _Texts) -> dict[str, Observation]:
    first, repeats = _first_of_equals(seen.contents)
    exact = Tally()
    for index in np.flatnonzero(repeats):
        exact.add("duplicate", int(index), f"the same as {rows.where(int(first[index]))}")
    near = Tally()
    for pair in near_duplicates(seen.keys, texts.whole, lambda index: bool(repeats[index])):
        near.add("near_duplicate", pair.index, f"{pair.similarity:.0%} the same as {rows.where(pair.earlier)}")
    return {
        "duplicate": exact.observation("duplicate", len(rows), rows.where),
        "near_duplicate": near.observation("near_duplicate", len(rows), rows.where),
    }


def _first_of_equals(values: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """(for each value the number of the first equal to it, whether that is another one)."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    first_of_each = first[inverse.reshape(-1)]
    return first_of_each, first_of_each != np.arange(len(values))


def _of_all_rows(sample: DatasetFacts, rows: Rows, seen: Seen, duplicates: int) -> DatasetFacts:
    """The sample's facts with the counts of all rows."""
    counts, first = seen.tally.counts, seen.tally.first
    bad = [index for name in ("null_target", "blank_target") for index, _ in first.get(name, ())]
    return replace(
        sample,
        sample=len(rows),
        target_null=counts.get("null_target", 0),
        target_blank=counts.get("blank_target", 0),
        target_distinct=len(np.unique(seen.targets)),
        first_bad=rows.where(min(bad)) if bad else None,
        duplicates=duplicates,
    )


# The scored sets against the training rows


@dataclass(frozen=True)
class _Leaks:
    """Rows of a scored set → the training row they are in, and how near: 1 where the whole prompt is the same."""

    exact: dict[int, int]
    near: dict[int, tuple[int, float]]


def _leaks(scored: Seen, scored_texts: _Texts, train: Seen, train_texts: _Texts) -> _Leaks:
    prompts, first = np.unique(train.prompts, return_index=True)
    place = np.minimum(np.searchsorted(prompts, scored.prompts), len(prompts) - 1)
    same = (prompts[place] == scored.prompts) & (scored.prompts != b"")
    exact = {int(n): int(first[place[n]]) for n in np.flatnonzero(same)}
    keys = np.where(same[:, None], np.uint64(0), scored.prompt_keys)
    matches = near_matches(keys, scored_texts.prompt, train.prompt_keys, train_texts.prompt)
    return _Leaks(exact, {match.index: (match.earlier, match.similarity) for match in matches})


def _leak_observations(leaks: Mapping[str, _Leaks], rows: Rows, scored: Mapping[str, Rows]) -> dict[str, Observation]:
    if not leaks:
        return {}
    exact, near = Tally(), Tally()
    places: list[str] = []
    for name, found in leaks.items():
        others = scored[name]
        for index, train in sorted(found.exact.items()):
            exact.add("leak_exact", len(places), f"the prompt of {rows.where(train)}")
            places.append(others.where(index))
        for index, (train, similarity) in sorted(found.near.items()):
            near.add("leak_near", len(places), f"{similarity:.0%} the prompt of {rows.where(train)}")
            places.append(others.where(index))
    of = sum(len(others) for others in scored.values())
    detail = "; ".join(
        f"{name}: {len(leaks[name].exact):,} the same and {len(leaks[name].near):,} nearly, of {len(others):,}"
        for name, others in scored.items()
    )
    return {
        "leak_exact": exact.observation("leak_exact", of, places.__getitem__, detail),
        "leak_near": near.observation("leak_near", of, places.__getitem__, detail),
    }


def _scored_entry(rows: Rows, leaks: _Leaks) -> dict[str, Any]:
    return {
        "source": rows.source,
        "rows": len(rows),
        "sha256": rows.sha256,
        "leak_exact": len(leaks.exact),
        "leak_near": len(leaks.near),
    }
