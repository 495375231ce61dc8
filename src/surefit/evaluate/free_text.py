"""Which metric decides, and what training did to how well the model fits the rows' answers.

Torch-free. The one place that decides between exact match and likelihood, and that words the outcome. Where another
metric decides, the likelihood stands beside it: a metric that shows no clear change does not say that training had no
effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from surefit.evaluate.answers import CUT, GRAMMAR, Answers
from surefit.evaluate.paired import ScoreRows
from surefit.evaluate.stats import PairedDifference, paired_aggregates, paired_bootstrap
from surefit.facts.free_text import LIKELIHOOD, SHORT_ANSWER, median_words
from surefit.facts.thinking import strip_reasoning
from surefit.task import Example, Scores, TaskRecipe, mean_scores

LOSS, OTHER_LOSS = "_answer_loss", "_other_prompt_loss"
"""Row scores that are no metrics: nats per token of the answer behind its own prompt, and behind another row's."""
SHARE = "prompt_share"

FitOutcome = Literal["better", "worse", "unclear", "mixed", "wording", "unsure"]
"""How a model fits the answers, compared with another one; "wording": better, but no more because of their prompts;
"unsure": better, and these rows do not tell whether because of their prompts."""
NO_MORE = 0.05
"""Growth of the prompt's share that no longer counts: "wording" is only said where the interval ends below it. With 20
rows, a true growth of 4 points has an interval that holds zero in two of three samples."""
LEAST_CHANGE = 0.005
"""Change of the mean loss, as a share of it, from which there is one to speak of: with enough rows a few steps' change
in the third digit is no chance, and no effect either."""
PHRASES: dict[FitOutcome, str] = {
    "better": "fits your answers better",
    "worse": "fits your answers worse",
    "unclear": "shows no clear difference in how well it fits your answers",
    "mixed": "fits some of your answers better and others much worse",
    "wording": "learned the wording of your answers, not what they say about the prompt",
    "unsure": "fits the wording of your answers better; too few rows tell whether it also follows the prompt",
}
"""What a sentence says of the second model. None of them is "better": a likely answer need not be a good one."""


SHOW_MORE = "what would show more"
"""Begins the list of `evaluate.show_more`."""


@dataclass(frozen=True)
class MetricChoice:
    """The metric that decides, as the primary metric of `recipe`, and why.

    Attributes:
        words: the median number of words of the answers; None where their length decides nothing.
        reason: a sentence; empty likewise.
    """

    recipe: TaskRecipe
    words: float | None = None
    reason: str = ""

    @property
    def by_likelihood(self) -> bool:
        """Return whether the likelihood decides."""
        return self.recipe.primary_metric == LIKELIHOOD


def choose_metric(recipe: TaskRecipe, examples: Sequence[Example], server: bool = False) -> MetricChoice:
    """Choose between the likelihood of the answers and the recipe's own primary metric, by the answers' length.

    A run of several tasks keeps the mean of the tasks' own metrics, with the likelihood beside them.

    Args:
        examples: the rows of one set: each set is decided by its own answers.
        server: whether the trained model answers behind a server, which gives no likelihood of a given text.
    """
    answers = (strip_reasoning(example.completion) for example in examples if example.completion)
    is_free = recipe.free_text and recipe.aggregate is mean_scores and not recipe.parts
    words = median_words(answers) if is_free else None
    if words is None:
        return MetricChoice(recipe)
    other = recipe.primary_metric.replace("_", " ")
    length = f"the median answer has {words:g} words"
    if words <= SHORT_ANSWER:
        return MetricChoice(
            recipe,
            words,
            f"{other} decides: {length}, and answers of up to {SHORT_ANSWER} words can be matched word for word",
        )
    if server:
        reason = (
            f"{other} can hardly move for answers this long ({length}); run `surefit evaluate RUN` to judge by "
            "likelihood"
        )
        return MetricChoice(recipe, words, reason)
    reason = f"likelihood decides: {length}, and above {SHORT_ANSWER} {other} hardly moves"
    return MetricChoice(replace(recipe, primary_metric=LIKELIHOOD), words, reason)


def choose_metric_of_scores(
    recipe: TaskRecipe, lines: Sequence[Mapping[str, Any]], scores: Sequence[ScoreRows]
) -> MetricChoice:
    """Choose as `choose_metric`, from the lines of a predictions file; without likelihoods the recipe's own metric.

    Args:
        lines: one per row, with its `gold` answer.
        scores: the scores of the rows, of each side.
    """
    examples = [Example(completion=line["gold"]) for line in lines if isinstance(line.get("gold"), str)]
    measured = all(any(LIKELIHOOD in row for row in rows) for rows in scores)
    return choose_metric(recipe, examples, server=not measured)


@dataclass(frozen=True)
class FitEffect:
    """Difference between two models in how well they fit the answers.

    Attributes:
        a, b: the models' variants.
        loss_a, loss_b: mean loss in nats per token of the answer.
        change: b's loss minus a's, with its 95 % interval.
        prompt_a, prompt_b: the share of the loss behind another row's prompt that the row's own prompt removes; None
            where no row has another prompt.
        prompt_change: b's share minus a's, with its interval.
        n: rows whose answers both models were read on.
        metric_text: that another metric, which decides, shows no clear change; empty where the likelihood decides, or
            that metric is clear.
    """

    a: str
    b: str
    outcome: FitOutcome
    loss_a: float
    loss_b: float
    change: tuple[float, float, float]
    prompt_a: float | None = None
    prompt_b: float | None = None
    prompt_change: tuple[float, float, float] | None = None
    n: int | None = None
    metric_text: str = ""

    @property
    def headline(self) -> str:
        """Return the outcome as a headline, with what the metric says that decides."""
        if self.metric_text:
            return f"{self.metric_text}; the trained model {PHRASES[self.outcome]}"
        return f"The trained model {PHRASES[self.outcome]}"

    @property
    def sentence(self) -> str:
        """Return the outcome in a sentence with both models' names and the numbers."""
        other = f"than {self.a}" if self.outcome in ("better", "worse") else f"(against {self.a})"
        numbers = "; ".join(text for text in (self.loss_text, self.prompt_text) if text)
        metric = f"{self.metric_text}; " if self.metric_text else ""
        return f"{metric}{self.b} {PHRASES[self.outcome]} {other}: {numbers}"

    @property
    def loss_text(self) -> str:
        """Return the change of the loss in numbers."""
        difference, low, high = self.change
        return (
            f"mean loss per token of the answers {self.loss_a:.2f} → {self.loss_b:.2f} "
            f"({difference:+.2f} [{low:+.2f}, {high:+.2f}]), perplexity {_perplexity(self.loss_a)} → "
            f"{_perplexity(self.loss_b)}"
        )

    @property
    def prompt_text(self) -> str:
        """Return what the change of the prompt's share says; empty where it is not known."""
        if self.prompt_a is None or self.prompt_b is None or self.prompt_change is None:
            return ""
        difference, low, high = (100 * value for value in self.prompt_change)
        text = (
            f"with its own prompt an answer's loss is {_lower(self.prompt_b)} than with another row's "
            f"({self.a}: {_lower(self.prompt_a)}; {difference:+.0f} points [{low:+.0f}, {high:+.0f}])"
        )
        if self.outcome != "wording":
            return text
        return f"{text}: no more of the answer follows from the prompt than before" + (
            "" if difference <= 0 else ", as far as these rows can tell"
        )

    def document(self) -> dict[str, Any]:
        """Return the effect as eval/summary.json and `--json` show it."""
        texts = {name: getattr(self, name) for name in ("headline", "sentence", "loss_text", "prompt_text")}
        intervals = {
            "change": list(self.change),
            "prompt_change": None if self.prompt_change is None else list(self.prompt_change),
        }  # lists, so that a caller in Python gets what the file and `--json` hold
        return asdict(self) | intervals | texts


def _lower(share: float) -> str:
    """Return by how much a loss is lower, which may be negative.

    >>> _lower(0.56), _lower(-0.02)
    ('56 % lower', '2 % higher')
    """
    percent = round(100 * share)
    return f"{-percent} % higher" if percent < 0 else f"{percent} % lower"


def _perplexity(loss: float) -> str:
    if loss > math.log(1e6):
        return "over a million"
    value = math.exp(loss)
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def measure_fit_effect(a: str, b: str, before: ScoreRows, after: ScoreRows) -> FitEffect | None:
    """Compare how well two models fit the same answers; None where a side has no likelihoods.

    Likelihood and loss must not contradict each other: where one rises and the other falls by more than chance, the
    effect is mixed. Where only one is clear, it counts. A gain is the wording's alone unless the share of the loss that
    the row's own prompt removes has grown by more than chance, too: shuffled answers raise the likelihood, but not that
    share.
    """
    likelihoods = zip(map(_likelihoods, before), map(_likelihoods, after), strict=True)
    pairs = [(old, new) for old, new in likelihoods if LOSS in old and LOSS in new]
    if not pairs:
        return None
    likelihood, gain = _paired(pairs, LIKELIHOOD, 1.0), _paired(pairs, LOSS, -1.0)
    losses = [math.fsum(pair[side][LOSS] for pair in pairs) / len(pairs) for side in (0, 1)]
    verdicts = {likelihood.verdict, gain.verdict}
    outcome: FitOutcome = (
        "mixed" if verdicts >= {"better", "worse"} else "better" if "better" in verdicts
        else "worse" if "worse" in verdicts else "unclear"
    )  # fmt: skip
    if outcome != "mixed" and abs(losses[1] - losses[0]) < LEAST_CHANGE * losses[0]:
        outcome = "unclear"
    change = (-gain.difference, -gain.high, -gain.low)
    prompted = [pair for pair in pairs if OTHER_LOSS in pair[0] and OTHER_LOSS in pair[1]]
    if not prompted:
        return FitEffect(a, b, outcome, losses[0], losses[1], change, n=len(pairs))
    old_rows, new_rows = ([pair[side] for pair in prompted] for side in (0, 1))
    share = paired_aggregates(old_rows, new_rows, _share_of_prompt)[SHARE]
    if outcome == "better" and share[1] <= 0:
        outcome = "wording" if share[2] <= NO_MORE else "unsure"
    shares = [_share_of_prompt(rows)[SHARE] for rows in (old_rows, new_rows)]
    return FitEffect(a, b, outcome, losses[0], losses[1], change, shares[0], shares[1], share, len(pairs))


def _paired(pairs: Sequence[tuple[Scores, Scores]], name: str, sign: float) -> PairedDifference:
    return paired_bootstrap([sign * old[name] for old, _ in pairs], [sign * new[name] for _, new in pairs])


def _likelihoods(row: Scores) -> Scores:
    """Return a row's likelihood and losses without the prefix of its task.

    >>> _likelihoods({"chat.answer_likelihood": 0.5, "_chat.answer_loss": 0.7, "chat.exact_match": 0.0})
    {'answer_likelihood': 0.5, '_answer_loss': 0.7}
    """
    names = {name: name.rpartition(".")[2].removeprefix("_") for name in row}
    plain = {name: f"_{last}" if name.startswith("_") else last for name, last in names.items()}
    return {plain[name]: value for name, value in row.items() if plain[name] in (LIKELIHOOD, LOSS, OTHER_LOSS)}


def drop_likelihoods(rows: ScoreRows) -> list[Scores]:
    """Return the scores without likelihoods and the losses behind them."""
    return [{name: value for name, value in row.items() if not _likelihoods({name: value})} for row in rows]


def unlike_readings(a: Answers, b: Answers) -> str:
    """Return why the likelihoods of two sides cannot be compared; empty where they can.

    A loss per token depends on the tokens: other vocabularies cut an answer into other pieces. Other limits matter
    where one of them cut an answer.
    """
    if not (a.read_with and b.read_with):
        return ""
    if a.read_with["tokenizer"] != b.read_with["tokenizer"]:
        return "their tokenizers differ, so that their losses per token are of other tokens"
    limits = (a.read_with["max_length"], b.read_with["max_length"])
    if limits[0] != limits[1] and (a.read_with[CUT] or b.read_with[CUT]):
        return f"answers were read up to data.max_length, which is {limits[0]} and {limits[1]}"
    return ""


def _share_of_prompt(rows: Sequence[Scores]) -> Scores:
    """Return 1 − (loss behind the own prompt) / (loss behind another row's prompt), of all rows: Theil's uncertainty
    coefficient of the answer given its prompt, from cross-entropies.

    A ratio and no difference: as a model learns the wording, both losses fall, and their difference with them, also
    where the model knows better than before which answer belongs to which prompt.
    """
    own, other = (math.fsum(row[name] for row in rows) for name in (LOSS, OTHER_LOSS))
    return {SHARE: 1 - own / other if other > 0 else 0.0}


def describe_fit(
    choice: MetricChoice,
    variants: Mapping[str, ScoreRows],
    estimates: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
    comparisons: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any] | None:
    """Return a set's entry `fit` in eval/summary.json: the losses of all variants, and what training changed; None
    where no likelihoods are measured.

    Args:
        estimates: variant → metric → its mean, and comparisons: as in eval/summary.json. With them an effect says what
            the metric shows that decides.
    """
    plain = {name: [_likelihoods(row) for row in rows] for name, rows in variants.items()}
    measured = {name: [row for row in rows if LOSS in row] for name, rows in plain.items()}
    losses = {name: math.fsum(row[LOSS] for row in rows) / len(rows) for name, rows in measured.items() if rows}
    if choice.words is None and not losses:
        return None
    bases = [name for name in losses if name.removesuffix(GRAMMAR) == "base"]
    found = [
        measure_fit_effect(base, name, variants[base], variants[name])
        for base in bases
        for name in losses
        if name not in bases and name.endswith(GRAMMAR) == base.endswith(GRAMMAR)
    ]
    effects = [effect for effect in found if effect is not None]
    if not choice.by_likelihood and estimates is not None:
        effects = [_beside(choice.recipe.primary_metric, e, variants, estimates, comparisons) for e in effects]
    return {
        "median_words": choice.words,
        "decides": choice.by_likelihood,
        "reason": choice.reason,
        "losses": losses,
        "effects": [effect.document() for effect in effects],
    }


def _beside(
    metric: str,
    effect: FitEffect,
    variants: Mapping[str, ScoreRows],
    estimates: Mapping[str, Mapping[str, Mapping[str, Any]]],
    comparisons: Sequence[Mapping[str, Any]],
) -> FitEffect:
    """Return the effect with what the metric says that decides, where that metric shows no clear change."""
    pair = next((c for c in comparisons if (c["a"], c["b"], c["metric"]) == (effect.a, effect.b, metric)), None)
    if pair is None:
        return effect
    means = (estimates[effect.a][metric]["mean"], estimates[effect.b][metric]["mean"])
    rows = (variants[effect.a], variants[effect.b])
    return beside_metric(effect, metric, tuple(pair["ci95"]), means, rows)


def beside_metric(
    effect: FitEffect,
    metric: str,
    interval: tuple[float, float],
    means: tuple[float, float],
    rows: tuple[ScoreRows, ScoreRows],
    *,
    between_runs: bool = False,
) -> FitEffect:
    """Return the effect with what the deciding metric says, if that is unclear and the effect is not.

    >>> rows = [{"exact_match": 0.0}] * 40
    >>> effect = FitEffect("base", "merged", "better", 2.0, 1.0, (-1.0, -1.1, -0.9))
    >>> beside_metric(effect, "exact_match", (-0.1, 0.1), (0.0, 0.0), (rows, rows)).metric_text
    'No clear change of exact match (0 of 40 before and after)'
    """
    if effect.outcome == "unclear" or interval[0] > 0 or interval[1] < 0:
        return effect
    old, new = (_score_text(metric, *side) for side in zip(means, rows, strict=True))
    name = metric.replace("_", " ")
    if between_runs:
        values = f"{old} in both" if old == new else f"{old} and {new}"
        return replace(effect, metric_text=f"No clear difference in {name} ({values})")
    values = f"{old} before and after" if old == new else f"{old} before, {new} after"
    return replace(effect, metric_text=f"No clear change of {name} ({values})")


def _score_text(metric: str, mean: float, rows: ScoreRows) -> str:
    """Return a score as "3 of 40" where rows are right or wrong, else as a percentage."""
    values = [row[metric] for row in rows if metric in row]
    if values and {*values} <= {0.0, 1.0}:
        return f"{sum(values):.0f} of {len(values):,}"
    return f"{100 * mean:.1f} %"
