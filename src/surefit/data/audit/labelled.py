"""Audit of labelled answers: how many are desirable, whether labels contradict each other, and how much length says.

Needs neither a tokenizer nor numpy, so that a check's sample and the audit of all rows count alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from surefit.data.audit.pairs import answer_hash, prompt_hash, turn_content
from surefit.data.audit.sample import DetectorTally
from surefit.metrics.auc import area_under_curve, auc_interval
from surefit.task import Example, Message

if TYPE_CHECKING:
    from surefit.data.rows.layouts import Examples
    from surefit.facts.audit import Observation

UNDESIRABLE, CONTRADICTION, LONGER = "label_undesirable", "label_contradiction", "label_longer"
"""Observations: rows with an undesirable answer; rows with an earlier row's prompt and answer and the other label; and,
of all pairs of a desirable and an undesirable answer, those in which the desirable one is longer."""


class LabelFacts(NamedTuple):
    """Hashes of a row's prompt and answer, the answer's characters, and its label."""

    prompt: bytes
    answer: bytes
    length: int
    desirable: bool


def label_facts(example: Example) -> list[LabelFacts]:
    """Return what is compared between labelled answers; none of a row without a label. Of a pair, which kto reads as
    two labelled answers, `audit.pairs` says more."""
    if example.desirable is None:
        return []
    turn: Message = example.messages[-1]
    return [LabelFacts(prompt_hash(example), answer_hash(turn), len(turn_content(turn)), example.desirable)]


def observe_all_labels(rows: Sequence[tuple[int, LabelFacts]], where: Callable[[int], str]) -> dict[str, Observation]:
    """Return the observations of all labelled answers together; none without any.

    Args:
        rows: number of the row and its facts, in order.
        where: number of a row → its place.
    """
    if not rows:
        return {}
    tally, seen = DetectorTally(), dict[tuple[bytes, bytes], dict[bool, int]]()
    for index, facts in rows:
        labels = seen.setdefault((facts.prompt, facts.answer), {})
        if (other := labels.get(not facts.desirable)) is not None:
            name = "desirable" if facts.desirable else "undesirable"
            tally.add(CONTRADICTION, index, f"the same answer as {where(other)}, here {name}, there not")
        labels.setdefault(facts.desirable, index)
        if not facts.desirable:
            tally.add(UNDESIRABLE, index, "an undesirable answer")
    observations = {name: tally.observation(name, len(rows), where) for name in (UNDESIRABLE, CONTRADICTION)}
    good, bad = ([float(facts.length) for _, facts in rows if facts.desirable is kind] for kind in (True, False))
    return observations | (_length_observation(good, bad) if good and bad else {})


def _length_observation(good: Sequence[float], bad: Sequence[float]) -> dict[str, Observation]:
    from surefit.facts.audit import Observation

    auc, pairs = area_under_curve(good, bad), len(good) * len(bad)
    low, high = auc_interval(auc, len(good), len(bad))
    detail = (
        f"AUC of length alone {auc:.2f} ({low:.2f} to {high:.2f}), {len(good):,} desirable and {len(bad):,} undesirable"
    )
    return {LONGER: Observation(round(auc * pairs), pairs, (), detail)}


def observe_labels(examples: Examples) -> dict[str, Observation]:
    """Return the observations on a sample of labelled answers; none where no example is one."""
    rows: Iterable[tuple[int, LabelFacts]] = (
        (number, facts) for number, example in enumerate(examples) for facts in label_facts(example)
    )
    return observe_all_labels([*rows], examples.where.__getitem__)
