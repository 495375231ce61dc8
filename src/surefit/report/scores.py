"""Scores, their differences and the variants behind them, as the page shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from surefit.evaluate.answers import (
    BASELINE,
    GRAMMAR,
    MODELS,
    base_variant,
    checkpoint_step,
    select_tuned_variant,
    variant_sort_key,
)
from surefit.report.artefacts import Artefacts
from surefit.report.shapes import (
    ComparisonRecord,
    DecodingRecord,
    Evaluation,
    FitEffectRecord,
    FitRecord,
    ScoreRecord,
    SetSummary,
)

HELD_OUT = "eval"
MAX_SETS = 8
MAX_METRICS = 24
MAX_VARIANTS = 12
MAX_COMPARISONS = 72
MAX_CONTESTS = 10
HELPED = "Did training help?"
ALSO = "Did training change this score?"
Tone = Literal["good", "warning", "bad", "neutral"]
FIT_TONES: dict[str, Tone] = {
    "better": "good", "worse": "bad", "unclear": "neutral", "mixed": "warning", "wording": "warning",
    "unsure": "warning",
}  # fmt: skip
FIT_OUTCOMES = {
    "better": "fits better", "worse": "fits worse", "unclear": "no clear difference", "mixed": "mixed",
    "wording": "the wording only", "unsure": "the wording at least",
}  # fmt: skip


@dataclass(frozen=True)
class MetricRow:
    """One metric of a set: its score for every variant and the paired comparison of base and tuned model."""

    metric: str
    primary: bool
    scores: dict[str, ScoreRecord]
    comparison: ComparisonRecord | None

    @property
    def drawable(self) -> bool:
        """Return whether all scores fit the plot's axis from 0 to 1."""
        return bool(self.scores) and all(0 <= score.mean <= 1 for score in self.scores.values())


@dataclass(frozen=True)
class Contest:
    """Comparison of two variants by the primary metric, with the reader's `question` that it answers; `fit` where that
    metric is the likelihood, or shows less than the likelihood does."""

    question: str
    comparison: ComparisonRecord
    fit: FitEffectRecord | None = None

    @property
    def tone(self) -> Tone:
        if self.fit is not None and not self.fit.metric_text:
            return FIT_TONES[self.fit.outcome]
        return comparison_tone(self.comparison)

    @property
    def outcome(self) -> str:
        """Outcome in words, by the interval of the difference."""
        if self.fit is not None and not self.fit.metric_text:
            return FIT_OUTCOMES[self.fit.outcome]
        words = {"good": "better", "bad": "worse"}.get(self.tone, "no clear difference")
        return f"{words}; {FIT_OUTCOMES[self.fit.outcome]}" if self.fit is not None else words


def comparison_tone(comparison: ComparisonRecord) -> Tone:
    """Return good, bad or neutral: the 95 % interval of the difference is above zero, below zero, or contains it."""
    low, high = comparison.ci95
    if low > 0:
        return "good"
    return "bad" if high < 0 else "neutral"


@dataclass(frozen=True)
class SetScores:
    """The scores of one set.

    Attributes:
        n: number of rows.
        variants: variants without the run's checkpoints, which have their own section.
        comparisons: the paired comparisons that are shown.
        contests: the primary metric's comparisons of the tuned model with base, baselines and itself under a grammar.
        evaluations: variant → its evaluation file, if that exists.
        left_out: counts of variants, metrics and comparisons that are not shown because of the page's limits.
        unanswered: number of rows that are not scored because they have no gold answer.
        fit: how well the models fit the rows' answers; None where no likelihoods are measured.
    """

    name: str
    n: int | None
    variants: list[str]
    rows: list[MetricRow]
    comparisons: list[ComparisonRecord]
    contests: list[Contest]
    evaluations: dict[str, Evaluation]
    left_out: list[str]
    unanswered: int = 0
    fit: FitRecord | None = None

    @property
    def fit_effect(self) -> FitEffectRecord | None:
        """Return what training changed in how well the model fits the answers."""
        return find_fit_effect(self.fit, self.tuned)

    @property
    def tuned(self) -> str | None:
        return find_tuned_variant(self.variants)

    @property
    def primary(self) -> MetricRow | None:
        return next((row for row in self.rows if row.primary), None)

    @property
    def decoding(self) -> str:
        """Generation settings as text; if variants differ, with the variants of each."""
        variants_by_settings: dict[str, list[str]] = {}
        for variant in self.variants:
            if variant in self.evaluations and not variant.startswith(BASELINE):
                settings = _decoding(self.evaluations[variant].decoding)
                variants_by_settings.setdefault(settings, []).append(variant)
        variants_by_settings.pop("", None)
        if len(variants_by_settings) == 1:
            return next(iter(variants_by_settings))
        return "; ".join(f"{', '.join(variants)}: {settings}" for settings, variants in variants_by_settings.items())


def set_scores(found: Artefacts) -> list[SetScores]:
    """Return the scores of all sets, the held-out set first, then the others in the order of summary.json.

    If there is a summary, its scores are used: it omits scores that are not comparable.
    """
    if found.summary:
        summaries = found.summary.sets
    else:
        names = dict.fromkeys(evaluation.set for evaluation in found.evaluations)
        summaries = {name: _unsummarised(name, found.evaluations) for name in names}
    ordered = sorted(summaries, key=lambda name: name != HELD_OUT)[:MAX_SETS]
    return [_one_set(name, summaries[name], found) for name in ordered]


def _unsummarised(name: str, evaluations: Sequence[Evaluation]) -> SetSummary:
    """Build a set's summary from the files of its variants, without comparisons."""
    of_set = [evaluation for evaluation in evaluations if evaluation.set == name]
    n = next((e.n for e in of_set if e.n is not None), None)
    return SetSummary(n=n, variants={e.variant: e.metrics for e in of_set})


def primary_metric(found: Artefacts, name: str = HELD_OUT) -> str | None:
    """Return the metric that decides on a set whether training helped."""
    if found.summary:
        scored = found.summary.sets.get(name)
        return (scored.primary_metric if scored else None) or found.summary.primary_metric
    named = sorted((e for e in found.evaluations if e.primary_metric), key=lambda e: e.set != name)
    return named[0].primary_metric if named else None


def _one_set(name: str, summary: SetSummary, found: Artefacts) -> SetScores:
    metrics = summary.variants
    variants = sorted((variant for variant in metrics if checkpoint_step(variant) is None), key=variant_sort_key)
    tuned = find_tuned_variant(variants)
    primary = primary_metric(found, name)
    names = sorted(dict.fromkeys(m for variant in variants for m in metrics[variant]), key=lambda m: m != primary)
    rows = [
        MetricRow(
            metric,
            metric == primary,
            {variant: metrics[variant][metric] for variant in variants if metric in metrics[variant]},
            find_comparison(summary.comparisons, metric, tuned),
        )
        for metric in names[:MAX_METRICS]
    ]
    shown = _with_tuned(variants, tuned)
    comparisons = [c for c in summary.comparisons if checkpoint_step(c.a) is None and checkpoint_step(c.b) is None]
    return SetScores(
        name,
        summary.n,
        shown,
        rows,
        comparisons[:MAX_COMPARISONS],
        list(_contests(comparisons, primary, tuned, HELPED if name == HELD_OUT else ALSO, summary.fit))
        if primary and tuned
        else [],
        {e.variant: e for e in found.evaluations if e.set == name and e.variant in variants},
        [
            f"{count:,} {what}"
            for count, what in (
                (len(variants) - len(shown), "more variants"),
                (len(names) - MAX_METRICS, "more metrics"),
                (len(comparisons) - MAX_COMPARISONS, "more paired comparisons"),
            )
            if count > 0
        ],
        summary.unanswered,
        summary.fit,
    )


def _with_tuned(variants: Sequence[str], tuned: str | None) -> list[str]:
    """Return the first variants up to the limit, always with the tuned one."""
    shown = list(variants[:MAX_VARIANTS])
    return [*shown[:-1], tuned] if tuned and tuned not in shown else shown


def find_fit_effect(fit: FitRecord | None, tuned: str | None) -> FitEffectRecord | None:
    """Return the effect of training on the fit of free-text answers, the base against the tuned variant."""
    pair = (base_variant(tuned), tuned) if tuned else None
    return next((effect for effect in fit.effects if (effect.a, effect.b) == pair), None) if fit else None


def _contests(
    compared: Sequence[ComparisonRecord], metric: str, tuned: str, helped: str, fit: FitRecord | None
) -> Iterator[Contest]:
    """Yield the comparisons that answer a reader's first questions: is it better than the base, than no model at all,
    and than without the grammar?"""
    by_pair = {(c.a, c.b): c for c in compared if c.metric == metric}
    plain, grammar = tuned.removesuffix(GRAMMAR), tuned.removesuffix(GRAMMAR) + GRAMMAR
    questions = [(helped, base_variant(tuned), tuned)]
    questions += [(_question(a), a, b) for a, b in by_pair if b == tuned and is_baseline(a)]
    if tuned != grammar:
        questions += [(f"{helped.rstrip('?')} when a grammar constrains both?", "base" + GRAMMAR, grammar)]
    questions += [("Does a grammar help the tuned model?", plain, grammar)]
    for question, a, b in questions[:MAX_CONTESTS]:
        if (a, b) in by_pair:
            effect = find_fit_effect(fit, b) if fit and a == base_variant(b) else None
            told = effect is not None and fit is not None and (fit.decides or effect.metric_text)
            yield Contest(question, by_pair[a, b], effect if told else None)


def _question(baseline: str) -> str:
    name = baseline.removeprefix(BASELINE)
    return f"How far is it from {name}?" if is_ceiling(baseline) else f"Is it better than {name}?"


def is_ceiling(variant: str) -> bool:
    """Return whether a baseline is a reduced form of the gold answer: a ceiling, which need not be beaten."""
    return variant.startswith(f"{BASELINE}gold-")


def is_baseline(variant: str) -> bool:
    """Return whether a variant is a recipe's baseline, which needs no model."""
    return variant.startswith(BASELINE)


def variant_style(variant: str) -> tuple[str, bool]:
    """Return how a variant is drawn: its kind, for shape and color, and whether it is hollow, for a grammar."""
    plain = variant.removesuffix(GRAMMAR)
    kind = "baseline" if is_baseline(variant) else plain if plain in ("base", "adapter") else "tuned"
    return kind, variant.endswith(GRAMMAR)


def _decoding(way: DecodingRecord) -> str:
    if way.strategy is None:
        return ""
    beams = "" if way.num_beams is None else f" with {way.num_beams} beams"
    sampling = "" if way.temperature is None else f" at temperature {way.temperature:g}, {way.samples or 1} per prompt"
    grammar = " under a grammar" if way.constrained else ""
    limit = "" if way.max_new_tokens is None else f", at most {way.max_new_tokens:,} new tokens"
    return f"{way.strategy}{beams}{sampling}{grammar}{limit}"


def find_tuned_variant(variants: Iterable[str]) -> str | None:
    """Return the tuned variant among the known ones: other names in a summary are ignored, since names become paths."""
    known_variants = (variant for variant in variants if variant.removesuffix(GRAMMAR) in MODELS)
    return select_tuned_variant(sorted(known_variants, key=variant_sort_key))


def find_comparison(comparisons: Sequence[ComparisonRecord], metric: str, tuned: str | None) -> ComparisonRecord | None:
    """Return the comparison of the base with the tuned variant on `metric`; None if there is none."""
    return next(
        (c for c in comparisons if tuned and (c.a, c.b, c.metric) == (base_variant(tuned), tuned, metric)), None
    )
