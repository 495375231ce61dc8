"""Scores, their differences and the answers behind them, as the page shows them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from surefit.core.sampling import evenly
from surefit.evaluate.answers import BASELINE, GRAMMAR, MODELS, base_of, shipped, training_order
from surefit.report.artefacts import Artefacts, Comparison, Decoding, Evaluation, Prediction, Score, SetSummary
from surefit.report.text import shorten

HELD_OUT = "eval"
MAX_SETS = 8
MAX_METRICS = 24
MAX_VARIANTS = 12
EXAMPLES = 5
EXAMPLE_SETS = 3
SHOWN_ANSWER = 1_200
"""Bytes of an answer; of a prompt the artefacts' own bound holds."""
PROMPT_TAIL = 320
"""Characters at the end of a prompt, where the question is, that are shown before it is opened."""


@dataclass(frozen=True)
class Row:
    """One metric of a set: its score for every variant and the paired comparison of base and tuned model."""

    metric: str
    primary: bool
    scores: dict[str, Score]
    comparison: Comparison | None

    @property
    def drawable(self) -> bool:
        """Whether the scores lie on the plot's axis from 0 to 1."""
        return bool(self.scores) and all(0 <= score.mean <= 1 for score in self.scores.values())


@dataclass(frozen=True)
class SetScores:
    """The scores of one set; `evaluations` has the variants whose own file is there, by name."""

    name: str
    n: int | None
    variants: list[str]
    rows: list[Row]
    comparisons: list[Comparison]
    evaluations: dict[str, Evaluation]

    @property
    def tuned(self) -> str | None:
        return tuned_of(self.variants)

    @property
    def primary(self) -> Row | None:
        return next((row for row in self.rows if row.primary), None)

    @property
    def decoding(self) -> str:
        """How the answers were generated; more than one way is said so."""
        ways: dict[str, list[str]] = {}
        for variant in self.variants:
            if variant in self.evaluations and not variant.startswith(BASELINE):
                way = _decoding(self.evaluations[variant].decoding)
                ways.setdefault(way, []).append(variant)
        ways.pop("", None)
        if len(ways) == 1:
            return next(iter(ways))
        return "; ".join(f"{', '.join(variants)}: {way}" for way, variants in ways.items())


@dataclass(frozen=True)
class Example:
    """A prompt that base and tuned model answered with different success."""

    where: str
    prompt: str
    tail: str
    gold: str | None
    base: str
    base_truncated: bool
    base_score: float
    tuned: str
    tuned_truncated: bool
    tuned_score: float


@dataclass(frozen=True)
class Examples:
    """Examples of one set, taken evenly from all that were won and all that were lost."""

    set: str
    tuned: str
    won: list[Example]
    lost: list[Example]
    won_total: int
    lost_total: int
    equal_total: int


def set_scores(found: Artefacts) -> list[SetScores]:
    """The held-out set first, then the others in the order of summary.json.

    Where there is a summary its scores are the ones to show: it left out what cannot be compared.
    """
    if found.summary:
        summaries = found.summary.sets
    else:
        names = dict.fromkeys(evaluation.set for evaluation in found.evaluations)
        summaries = {name: _unsummarised(name, found.evaluations) for name in names}
    ordered = sorted(summaries, key=lambda name: name != HELD_OUT)[:MAX_SETS]
    return [_one_set(name, summaries[name], found) for name in ordered]


def _unsummarised(name: str, evaluations: Sequence[Evaluation]) -> SetSummary:
    """What a set's files say of each variant alone."""
    of_set = [evaluation for evaluation in evaluations if evaluation.set == name]
    n = next((e.n for e in of_set if e.n is not None), None)
    return SetSummary(n=n, variants={e.variant: e.metrics for e in of_set})


def primary_metric(found: Artefacts) -> str | None:
    """The metric that decides whether training helped."""
    if found.summary:
        return found.summary.primary_metric
    return next((e.primary_metric for e in found.evaluations if e.primary_metric), None)


def _one_set(name: str, summary: SetSummary, found: Artefacts) -> SetScores:
    metrics = summary.variants
    variants = sorted(metrics, key=training_order)
    tuned = tuned_of(variants)
    primary = primary_metric(found)
    names = sorted(dict.fromkeys(m for variant in variants for m in metrics[variant]), key=lambda m: m != primary)
    rows = [
        Row(
            metric,
            metric == primary,
            {variant: metrics[variant][metric] for variant in variants if metric in metrics[variant]},
            find_comparison(summary.comparisons, metric, tuned),
        )
        for metric in names[:MAX_METRICS]
    ]
    files = {e.variant: e for e in found.evaluations if e.set == name and e.variant in variants}
    return SetScores(name, summary.n, variants[:MAX_VARIANTS], rows, summary.comparisons[: 3 * MAX_METRICS], files)


def _decoding(way: Decoding) -> str:
    if way.strategy is None:
        return ""
    beams = "" if way.num_beams is None else f" with {way.num_beams} beams"
    drawn = "" if way.temperature is None else f" at temperature {way.temperature:g}, {way.samples or 1} per prompt"
    grammar = " under a grammar" if way.constrained else ""
    limit = "" if way.max_new_tokens is None else f", at most {way.max_new_tokens:,} new tokens"
    return f"{way.strategy}{beams}{drawn}{grammar}{limit}"


def tuned_of(variants: Iterable[str]) -> str | None:
    """What ships, of the variants that a run can have: a name that someone else wrote into a summary is no path."""
    known = (variant for variant in variants if variant.removesuffix(GRAMMAR) in MODELS)
    return shipped(sorted(known, key=training_order))


def find_comparison(comparisons: Sequence[Comparison], metric: str, tuned: str | None) -> Comparison | None:
    """The comparison of the base with the tuned variant on `metric`."""
    return next((c for c in comparisons if tuned and (c.a, c.b, c.metric) == (base_of(tuned), tuned, metric)), None)


def examples(found: Artefacts, sets: Sequence[SetScores]) -> list[Examples]:
    """Won and lost prompts of the first sets that have answers of the base and of a tuned variant."""
    metric = primary_metric(found)
    groups = (_examples_of(found, scores.name, scores.tuned, metric) for scores in sets if scores.tuned and metric)
    return list(itertools.islice((group for group in groups if group is not None), EXAMPLE_SETS))


def _examples_of(found: Artefacts, name: str, tuned: str, metric: str) -> Examples | None:
    base = {p.index: p for p in found.predictions(name, base_of(tuned)) if metric in p.scores}
    pairs = [
        (base[after.index], after)
        for after in found.predictions(name, tuned)
        if after.index in base and metric in after.scores
    ]
    if not pairs:
        return None
    won = [pair for pair in pairs if pair[1].scores[metric] > pair[0].scores[metric]]
    lost = [pair for pair in pairs if pair[1].scores[metric] < pair[0].scores[metric]]
    return Examples(
        set=name,
        tuned=tuned,
        won=[_example(*won[i], metric) for i in evenly(len(won), EXAMPLES)],
        lost=[_example(*lost[i], metric) for i in evenly(len(lost), EXAMPLES)],
        won_total=len(won),
        lost_total=len(lost),
        equal_total=len(pairs) - len(won) - len(lost),
    )


def _example(base: Prediction, tuned: Prediction, metric: str) -> Example:
    gold = tuned.gold if tuned.gold is not None else base.gold
    return Example(
        where=tuned.where or f"row {tuned.index}",
        prompt=tuned.prompt,
        tail=_tail(tuned.prompt),
        gold=None if gold is None else shorten(gold, SHOWN_ANSWER),
        base=shorten(base.text, SHOWN_ANSWER),
        base_truncated=base.truncated,
        base_score=base.scores[metric],
        tuned=shorten(tuned.text, SHOWN_ANSWER),
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
