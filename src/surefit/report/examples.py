"""Rows that base and tuned model answered with different success, side by side, as many as the page can bear."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import escape

from surefit.core.sampling import evenly_spaced_indices
from surefit.evaluate.answers import base_variant
from surefit.report.artefacts import Artefacts
from surefit.report.scores import SetScores, primary_metric
from surefit.report.shapes import PredictionRecord
from surefit.report.text import shorten_text

Kind = Literal["won", "lost", "wrong", "right"]
KINDS: dict[Kind, str] = {"won": "Won", "lost": "Lost", "wrong": "Still not right", "right": "Still right"}
SHOWN: dict[Kind, int] = {"won": 20, "lost": 20, "wrong": 10, "right": 5}
"""At most so many of a kind and set; taken evenly from all of them."""
EXAMPLE_SETS = 3
BUDGET = 700_000
"""Bytes of the page that all examples together may take."""
FRAME = 1_600
"""Bytes of the elements around an example's texts."""
SHOWN_ANSWER = 1_200
"""Bytes of an answer; of a prompt the artefacts' own bound holds."""
PROMPT_TAIL = 320
"""Characters at the end of a prompt, where the question is, that are shown before it is opened."""
HEADLINE = 110
"""Characters of the line that stands for a closed example."""
MARKER = re.compile(r"<\|?/?[A-Za-z_]+\|?>|\[/?INST\]|<s>|</s>")
"""What chat templates put around turns."""
ROLE = re.compile(r"^(user|assistant|system|model)\b ?", re.IGNORECASE)


@dataclass(frozen=True)
class ComparedAnswers:
    """A prompt and what base and tuned model made of it; scores are those of the primary metric."""

    kind: Kind
    where: str
    prompt: str
    tail: str
    headline: str
    gold: str | None
    base: str
    base_truncated: bool
    base_score: float
    tuned: str
    tuned_truncated: bool
    tuned_score: float

    @property
    def size(self) -> int:
        """Bytes in the page."""
        texts = (self.prompt, self.tail, self.headline, self.gold or "", self.base, self.tuned, 4 * self.where)
        return FRAME + sum(len(escape(text).encode()) for text in texts)


@dataclass(frozen=True)
class ComparedSet:
    """Examples of one set. `totals` counts all rows of each kind, shown or not."""

    set: str
    base: str
    tuned: str
    shown: list[ComparedAnswers]
    totals: dict[Kind, int]

    @property
    def equal(self) -> int:
        return self.totals["wrong"] + self.totals["right"]


def select_compared_sets(found: Artefacts, sets: Sequence[SetScores]) -> list[ComparedSet]:
    """Of the first sets that have answers of the base and of a tuned variant: what fits, every kind and set alike."""
    metric = primary_metric(found)
    named = ((scores.name, scores.tuned) for scores in sets if scores.tuned and metric)
    groups = (_examples_of(found, name, tuned, metric) for name, tuned in named if tuned and metric)
    candidates = list(itertools.islice((group for group in groups if group is not None), EXAMPLE_SETS))
    return _within_budget(candidates)


def _examples_of(found: Artefacts, name: str, tuned: str, metric: str) -> ComparedSet | None:
    base = {p.index: p for p in found.predictions(name, base_variant(tuned)) if metric in p.scores}
    pairs = [
        (base[after.index], after)
        for after in found.predictions(name, tuned)
        if after.index in base and metric in after.scores
    ]
    if not pairs:
        return None
    best = max(1.0, *(max(before.scores[metric], after.scores[metric]) for before, after in pairs))
    by_kind: dict[Kind, list[tuple[PredictionRecord, PredictionRecord]]] = {kind: [] for kind in KINDS}
    for before, after in pairs:
        by_kind[_kind(before.scores[metric], after.scores[metric], best)].append((before, after))
    chosen = [
        [_example(kind, *of_kind[i], metric) for i in evenly_spaced_indices(len(of_kind), SHOWN[kind])]
        for kind, of_kind in by_kind.items()
    ]
    totals = {kind: len(of_kind) for kind, of_kind in by_kind.items()}
    return ComparedSet(name, base_variant(tuned), tuned, list(_in_turn(chosen)), totals)


def _kind(base: float, tuned: float, best: float) -> Kind:
    if tuned != base:
        return "won" if tuned > base else "lost"
    return "right" if tuned >= best else "wrong"


def _in_turn(lists: Sequence[Sequence[ComparedAnswers]]) -> Iterator[ComparedAnswers]:
    for column in itertools.zip_longest(*lists):
        yield from (item for item in column if item is not None)


def _within_budget(groups: Sequence[ComparedSet]) -> list[ComparedSet]:
    """The same groups without the examples that no longer fit, each having the same share; kinds in order."""
    kept = []
    for group in groups:
        room = BUDGET // len(groups)
        shown = []
        for example in group.shown:
            room -= example.size
            if room < 0:
                break
            shown.append(example)
        shown.sort(key=lambda example: list(KINDS).index(example.kind))
        kept.append(ComparedSet(group.set, group.base, group.tuned, shown, group.totals))
    return kept


def _example(kind: Kind, base: PredictionRecord, tuned: PredictionRecord, metric: str) -> ComparedAnswers:
    gold = tuned.gold if tuned.gold is not None else base.gold
    return ComparedAnswers(
        kind=kind,
        where=tuned.where or f"row {tuned.index}",
        prompt=tuned.prompt,
        tail=_tail(tuned.prompt),
        headline=last_turn(tuned.prompt),
        gold=None if gold is None else shorten_text(gold, SHOWN_ANSWER),
        base=shorten_text(base.text, SHOWN_ANSWER),
        base_truncated=base.truncated,
        base_score=base.scores[metric],
        tuned=shorten_text(tuned.text, SHOWN_ANSWER),
        tuned_truncated=tuned.truncated,
        tuned_score=tuned.scores[metric],
    )


def _tail(prompt: str) -> str:
    """The end of a prompt, from a line's beginning where there is one."""
    if len(prompt) <= PROMPT_TAIL:
        return prompt
    tail = prompt[-PROMPT_TAIL:]
    _, newline, whole_lines = tail.partition("\n")
    return "… " + (whole_lines if newline and len(whole_lines) > PROMPT_TAIL // 4 else tail)


def last_turn(prompt: str, limit: int = HEADLINE) -> str:
    """The last turn of a prompt in one line, without the markers of a chat template; its end where it is long."""
    turns = [" ".join(turn.split()) for turn in MARKER.split(prompt[-8 * limit :])]
    turns = [ROLE.sub("", turn) for turn in turns if turn]
    line = next((turn for turn in reversed(turns) if turn), "")
    return line if len(line) <= limit else f"… {line[-limit:]}"
