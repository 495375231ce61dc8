"""Rows that base and tuned model answered with different success, side by side, up to the page's size limit."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from markupsafe import Markup, escape

from surefit.core.sampling import evenly_spaced
from surefit.evaluate.answers import base_variant
from surefit.facts.free_text import is_likelihood
from surefit.report.artefacts import Artefacts
from surefit.report.scores import SetScores, primary_metric
from surefit.report.shapes import PredictionRecord
from surefit.report.text import shorten_text

Kind = Literal["won", "lost", "wrong", "right"]
KINDS: dict[Kind, str] = {"won": "Won", "lost": "Lost", "wrong": "Still wrong", "right": "Still right"}
SHOWN: dict[Kind, int] = {"won": 20, "lost": 20, "wrong": 10, "right": 5}
"""Largest number of examples of a kind and set, evenly spaced over all of them."""
EXAMPLE_SETS = 3
BUDGET = 700_000
"""Largest number of bytes of all examples in the page."""
FRAME = 1_600
"""Bytes of the HTML elements around an example's texts."""
SHOWN_ANSWER = 1_200
"""Largest number of bytes of an answer; prompts have the limit of artefacts.py."""
PROMPT_TAIL = 320
"""Number of characters at the end of a prompt, where the question is, that are shown before it is expanded."""
HEADLINE = 110
"""Largest number of characters of the line that represents a collapsed example."""
MARKER = re.compile(r"<\|?/?[A-Za-z_]+\|?>|\[/?INST\]|<s>|</s>")
"""Matches the markers that chat templates put around turns."""
WORD = re.compile(r"\s+|\w+|[^\w\s]")
ROLE = re.compile(r"^(user|assistant|system|model)\b ?", re.IGNORECASE)


@dataclass(frozen=True)
class ComparedAnswers:
    """A prompt with the answers of base and tuned model; scores are of the primary metric. In the marked answers, words
    that the gold answer does not have in this order are marked."""

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
    def gain(self) -> float:
        """Difference of the scores, negative where training made the answer worse."""
        return self.tuned_score - self.base_score

    @property
    def base_marked(self) -> Markup:
        return mark_differences(self.base, self.gold)

    @property
    def tuned_marked(self) -> Markup:
        return mark_differences(self.tuned, self.gold)

    @property
    def size(self) -> int:
        """Number of bytes in the page."""
        texts = (self.prompt, self.tail, self.headline, self.gold or "", 4 * self.where)
        answers = (self.base_marked, self.tuned_marked)
        return FRAME + sum(len(text.encode()) for text in (*map(escape, texts), *answers))


@dataclass(frozen=True)
class ComparedSet:
    """Examples of one set. `totals` counts all rows of each kind, shown or not; `metric` decides which are won."""

    set: str
    base: str
    tuned: str
    metric: str
    shown: list[ComparedAnswers]
    totals: dict[Kind, int]

    @property
    def by_likelihood(self) -> bool:
        """Return whether a score is the likelihood of the expected answer, and none of the generated one."""
        return is_likelihood(self.metric)

    @property
    def equal(self) -> int:
        return self.totals["wrong"] + self.totals["right"]


def select_compared_sets(found: Artefacts, sets: Sequence[SetScores]) -> list[ComparedSet]:
    """Select examples from the first sets that have answers of the base and of a tuned variant, within the page's
    budget, balanced over kinds and sets."""
    metrics = {scores.name: primary_metric(found, scores.name) for scores in sets}
    tuned_by_set = ((scores.name, scores.tuned, metrics[scores.name]) for scores in sets)
    groups = (_examples_of(found, name, tuned, metric) for name, tuned, metric in tuned_by_set if tuned and metric)
    candidates = list(itertools.islice((group for group in groups if group is not None), EXAMPLE_SETS))
    return _within_budget(candidates)


def _examples_of(found: Artefacts, name: str, tuned: str, metric: str) -> ComparedSet | None:
    before, after = (found.predictions(name, variant) for variant in (base_variant(tuned), tuned))
    return compare_predictions(name, (base_variant(tuned), tuned), (before, after), metric)


def compare_predictions(
    name: str, sides: tuple[str, str], predictions: tuple[list[PredictionRecord], list[PredictionRecord]], metric: str
) -> ComparedSet | None:
    """Select examples of two sides that answered the same set; None if no row was answered by both."""
    base = {p.index: p for p in predictions[0] if metric in p.scores}
    pairs = [(base[p.index], p) for p in predictions[1] if p.index in base and metric in p.scores]
    if not pairs:
        return None
    best = max(1.0, *(max(before.scores[metric], after.scores[metric]) for before, after in pairs))
    by_kind: dict[Kind, list[tuple[PredictionRecord, PredictionRecord]]] = {kind: [] for kind in KINDS}
    for before, after in pairs:
        by_kind[_kind(before.scores[metric], after.scores[metric], best)].append((before, after))
    examples_by_kind = [
        [_example(kind, *row, metric) for row in _select(kind, of_kind, metric)] for kind, of_kind in by_kind.items()
    ]
    totals = {kind: len(of_kind) for kind, of_kind in by_kind.items()}
    return ComparedSet(name, *sides, metric, list(_in_turn(examples_by_kind)), totals)


def _select(
    kind: Kind, pairs: Sequence[tuple[PredictionRecord, PredictionRecord]], metric: str
) -> list[tuple[PredictionRecord, PredictionRecord]]:
    """Return the pairs of a kind to show: of the lost ones the worst, of the others some, evenly spaced."""
    if kind == "lost":
        return sorted(pairs, key=lambda pair: pair[1].scores[metric] - pair[0].scores[metric])[: SHOWN[kind]]
    return evenly_spaced(pairs, SHOWN[kind])


def _kind(base: float, tuned: float, best: float) -> Kind:
    if tuned != base:
        return "won" if tuned > base else "lost"
    return "right" if tuned >= best else "wrong"


def _in_turn(lists: Sequence[Sequence[ComparedAnswers]]) -> Iterator[ComparedAnswers]:
    for column in itertools.zip_longest(*lists):
        yield from (item for item in column if item is not None)


def _within_budget(groups: Sequence[ComparedSet]) -> list[ComparedSet]:
    """Drop the examples that exceed the budget, of which each group has the same share; the worst first: what
    training lost, by how much, then what is still wrong or right, then what it won."""
    trimmed = []
    for group in groups:
        budget_left = BUDGET // len(groups)
        shown = []
        for example in group.shown:
            budget_left -= example.size
            if budget_left < 0:
                break
            shown.append(example)
        shown.sort(key=lambda example: (example.gain, example.tuned_score))
        trimmed.append(replace(group, shown=shown))
    return trimmed


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


def mark_differences(answer: str, gold: str | None) -> Markup:
    """Return an answer as HTML, with the words marked that the gold answer does not have at this place.

    >>> str(mark_differences("we replace it <now>", "we repair it"))
    'we <mark>replace</mark> it<mark> &lt;now&gt;</mark>'
    """
    if gold is None or answer == gold:
        return escape(answer)
    words, expected = (WORD.findall(text) for text in (answer, gold))
    blocks = difflib.SequenceMatcher(None, expected, words, autojunk=False).get_matching_blocks()
    parts, end = [], 0
    for block in blocks:
        if different := "".join(words[end : block.b]):
            parts.append(Markup("<mark>{}</mark>").format(different))
        end = block.b + block.size
        parts.append(escape("".join(words[block.b : end])))
    return Markup("").join(parts)


def _tail(prompt: str) -> str:
    """Return the end of a prompt, from the beginning of a line if possible."""
    if len(prompt) <= PROMPT_TAIL:
        return prompt
    tail = prompt[-PROMPT_TAIL:]
    _, newline, whole_lines = tail.partition("\n")
    return "… " + (whole_lines if newline and len(whole_lines) > PROMPT_TAIL // 4 else tail)


def last_turn(prompt: str, limit: int = HEADLINE) -> str:
    """Return the last turn of a prompt in one line, without the markers of a chat template; only its end if it is
    long."""
    turns = [" ".join(turn.split()) for turn in MARKER.split(prompt[-8 * limit :])]
    turns = [ROLE.sub("", turn) for turn in turns if turn]
    line = next((turn for turn in reversed(turns) if turn), "")
    return line if len(line) <= limit else f"… {line[-limit:]}"
