"""Judgment of free-text answers: which metric decides, and what training did to how well the model fits them.

Torch-free. The one place that decides between exact match and likelihood, and that words the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from surefit.evaluate.answers import GRAMMAR
from surefit.evaluate.paired import ScoreRows
from surefit.evaluate.stats import PairedDifference, paired_aggregates, paired_bootstrap
from surefit.facts.free_text import LIKELIHOOD, SHORT_ANSWER, median_words
from surefit.facts.thinking import strip_reasoning
from surefit.task import Example, Scores, TaskRecipe, mean_scores

LOSS, OTHER_LOSS = "_answer_loss", "_other_prompt_loss"
"""Row scores that are no metrics: nats per token of the answer behind its own prompt, and behind another row's."""
SHARE = "prompt_share"
READ_COUNTS = CUT, UNREAD = ("answers_cut", "answers_unread")
"""Counts of a variant's record: answers of which only the beginning was read, and answers of which nothing was."""

FitOutcome = Literal["better", "worse", "unclear", "mixed", "wording", "unsure"]
"""How a model fits the answers, compared with another one; "wording": better, but no more because of their prompts;
"unsure": better, and these rows do not tell whether because of their prompts."""
NO_MORE = 0.05
"""Growth of the prompt's share that no longer counts: "wording" is only said where the interval ends below it. With 20
rows, a true growth of 4 points has an interval that holds zero in two of three samples."""
PHRASES: dict[FitOutcome, str] = {
    "better": "fits your answers better",
    "worse": "fits your answers worse",
    "unclear": "shows no clear difference in how well it fits your answers",
    "mixed": "fits some of your answers better and others much worse",
    "wording": "learned the wording of your answers, not what they say about the prompt",
    "unsure": "fits the wording of your answers better; too few rows tell whether it also follows the prompt",
}
"""What a sentence says of the second model. None of them is "better": a likely answer need not be a good one."""


@dataclass(frozen=True)
class MetricChoice:
    """The metric that decides, as the primary metric of `recipe`, and why.

    Attributes:
        words: the median number of words of the answers; None where the recipe's answers are no free text.
        reason: a sentence; empty likewise.
    """

    recipe: TaskRecipe
    words: float | None = None
    reason: str = ""


def choose_metric(recipe: TaskRecipe, examples: Sequence[Example], server: bool = False) -> MetricChoice:
    """Choose between the likelihood of the answers and the recipe's own primary metric, by the answers' length.

    A run of several tasks keeps the mean of the tasks' own metrics, with the likelihood beside them.

    Args:
        examples: the held-out rows.
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
            f"{other} decides: {length}, and answers of up to {SHORT_ANSWER} can be matched word for word",
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

    @property
    def headline(self) -> str:
        """Return the outcome as a headline."""
        return f"The trained model {PHRASES[self.outcome]}"

    @property
    def sentence(self) -> str:
        """Return the outcome in a sentence with both models' names and the numbers."""
        other = f"than {self.a}" if self.outcome in ("better", "worse") else f"(against {self.a})"
        numbers = "; ".join(text for text in (self.loss_text, self.prompt_text) if text)
        return f"{self.b} {PHRASES[self.outcome]} {other}: {numbers}"

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
            f"a row's own prompt removes {_percent(self.prompt_a)} → {_percent(self.prompt_b)} of the loss that its "
            f"answer has behind another row's prompt ({difference:+.0f} points [{low:+.0f}, {high:+.0f}])"
        )
        if self.outcome != "wording":
            return text
        return f"{text}: no more of the answer follows from the prompt than before" + (
            "" if difference <= 0 else ", as far as these rows can tell"
        )

    def document(self) -> dict[str, Any]:
        """Return the effect as eval/summary.json and `--json` show it."""
        texts = {name: getattr(self, name) for name in ("headline", "sentence", "loss_text", "prompt_text")}
        return asdict(self) | texts


def _percent(share: float) -> str:
    return f"{round(100 * share)} %"


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
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if LOSS in old and LOSS in new]
    if not pairs:
        return None
    likelihood, gain = _paired(pairs, LIKELIHOOD, 1.0), _paired(pairs, LOSS, -1.0)
    losses = [math.fsum(pair[side][LOSS] for pair in pairs) / len(pairs) for side in (0, 1)]
    verdicts = {likelihood.verdict, gain.verdict}
    outcome: FitOutcome = (
        "mixed" if verdicts >= {"better", "worse"} else "better" if "better" in verdicts
        else "worse" if "worse" in verdicts else "unclear"
    )  # fmt: skip
    change = (-gain.difference, -gain.high, -gain.low)
    prompted = [pair for pair in pairs if OTHER_LOSS in pair[0] and OTHER_LOSS in pair[1]]
    if not prompted:
        return FitEffect(a, b, outcome, losses[0], losses[1], change)
    old_rows, new_rows = ([pair[side] for pair in prompted] for side in (0, 1))
    share = paired_aggregates(old_rows, new_rows, _share_of_prompt)[SHARE]
    if outcome == "better" and share[1] <= 0:
        outcome = "wording" if share[2] <= NO_MORE else "unsure"
    shares = [_share_of_prompt(rows)[SHARE] for rows in (old_rows, new_rows)]
    return FitEffect(a, b, outcome, losses[0], losses[1], change, shares[0], shares[1], share)


def _paired(pairs: Sequence[tuple[Scores, Scores]], name: str, sign: float) -> PairedDifference:
    return paired_bootstrap([sign * old[name] for old, _ in pairs], [sign * new[name] for _, new in pairs])


def _share_of_prompt(rows: Sequence[Scores]) -> Scores:
    """Return 1 − (loss behind the own prompt) / (loss behind another row's prompt), of all rows: Theil's uncertainty
    coefficient of the answer given its prompt, from cross-entropies.

    A ratio and no difference: as a model learns the wording, both losses fall, and their difference with them, also
    where the model knows better than before which answer belongs to which prompt.
    """
    own, other = (math.fsum(row[name] for row in rows) for name in (LOSS, OTHER_LOSS))
    return {SHARE: 1 - own / other if other > 0 else 0.0}


def describe_fit(choice: MetricChoice, variants: Mapping[str, ScoreRows]) -> dict[str, Any] | None:
    """Return a set's entry `fit` in eval/summary.json: the losses of all variants, and what training changed; None
    where the recipe's answers are no free text."""
    if choice.words is None:
        return None
    measured = {name: [row for row in rows if LOSS in row] for name, rows in variants.items()}
    losses = {name: math.fsum(row[LOSS] for row in rows) / len(rows) for name, rows in measured.items() if rows}
    bases = [name for name in losses if name.removesuffix(GRAMMAR) == "base"]
    effects = [
        measure_fit_effect(base, name, variants[base], variants[name])
        for base in bases
        for name in losses
        if name not in bases and name.endswith(GRAMMAR) == base.endswith(GRAMMAR)
    ]
    return {
        "median_words": choice.words,
        "decides": choice.recipe.primary_metric == LIKELIHOOD,
        "reason": choice.reason,
        "losses": losses,
        "effects": [effect.document() for effect in effects if effect is not None],
    }
