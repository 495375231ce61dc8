"""What a run on labelled answers did to the held-out ones, from its metrics.jsonl. Torch-free.

The sign of a single answer's reward says little: it is relative to the reference, not to another answer, and a model
may have made all answers likelier. So the two kinds are reported separately, and judged by their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefit.core.rundir import PAIRS_AT_START
from surefit.evaluate.pairs import Outcome
from surefit.metrics.auc import auc_interval

HEADLINES: dict[Outcome, str] = {
    "learned": "The trained model prefers the desirable answers",
    "both fell": "The preference is learned, but the desirable answers became less likely, too",
    "unclear": "The trained model shows no clear preference",
    "reversed": "The trained model prefers the undesirable answers",
}
ONE_KIND = "No preference was measured: the held-out answers have one label only"


@dataclass(frozen=True)
class HeldOutLabels:
    """The held-out labelled answers at the newest measurement.

    Attributes:
        step: optimizer step after which they were measured.
        desirable, undesirable: their numbers.
        auc: probability that a desirable answer has a higher reward than an undesirable one, equal rewards counting
            half; low, high: its 95 % interval. None without answers of both kinds.
        rewards: mean reward of the desirable and of the undesirable answers; None for a kind that there is not.
        log_probs: their mean log-probabilities, in nats, summed over tokens.
        start: `log_probs` before the first step; None where it was not noted.
    """

    step: int
    desirable: int
    undesirable: int
    auc: float | None
    low: float
    high: float
    rewards: tuple[float | None, float | None]
    log_probs: tuple[float | None, float | None]
    start: tuple[float, float] | None = None

    @property
    def outcome(self) -> Outcome:
        """Return what was learned. Before the first step every reward is 0, so that the AUC is one half."""
        if self.auc is None or self.low <= 0.5 <= self.high:
            return "unclear"
        if self.high < 0.5:
            return "reversed"
        end = self.log_probs[0]
        return "both fell" if self.start is not None and end is not None and end < self.start[0] else "learned"

    @property
    def headline(self) -> str:
        """Return the outcome as a headline."""
        return ONE_KIND if self.auc is None else HEADLINES[self.outcome]

    @property
    def text(self) -> str:
        """Return the order of the rewards, the rewards and the log-probabilities as one sentence each."""
        counts = f"{self.desirable:,} desirable and {self.undesirable:,} undesirable held-out answers"
        if self.auc is None:
            order = f"{counts}: how well rewards tell them apart needs both kinds; raise data.eval."
        else:
            order = (
                f"Of {counts} a desirable one has the higher reward with a probability of {100 * self.auc:.1f} % (AUC; "
                f"95 % interval {100 * self.low:.0f} to {100 * self.high:.0f} %; 50 % before training, where all "
                "rewards are 0)."
            )
        rewards = _both(self.rewards, (None, None), "+.3g")
        log_probs = _both(self.log_probs, self.start or (None, None), ".4g")
        return f"{order} Mean reward {rewards}. Mean log-probability {log_probs}."


def _both(ends: Sequence[float | None], starts: Sequence[float | None], form: str) -> str:
    """Return the numbers of the desirable and the undesirable answers, each with its start where it is known."""
    parts = []
    for name, start, end in zip(("desirable", "undesirable"), starts, ends, strict=True):
        if end is not None:
            change = f"{start:{form}} → {end:{form}}" if start is not None else f"{end:{form}}"
            parts.append(f"of the {name} ones {change}")
    return ", ".join(parts)


def summarize_held_out_labels(
    lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> HeldOutLabels | None:
    """Return the newest measurement of held-out labelled answers; None where the run has none.

    Args:
        lines: of metrics.jsonl; events: of events.jsonl.
    """
    line = next((line for line in reversed(lines) if line.get("eval_desirable") is not None), None)
    if line is None:
        return None
    desirable, undesirable = int(line["eval_desirable"]), int(line["eval_undesirable"])
    auc = line.get("eval_rewards/auc")
    low, high = (0.0, 1.0) if auc is None else auc_interval(float(auc), desirable, undesirable)
    rewards, log_probs = (
        (line.get(f"eval_{name}/chosen"), line.get(f"eval_{name}/rejected")) for name in ("rewards", "logps")
    )
    event = next((event for event in reversed(events) if event.get("event") == PAIRS_AT_START), None)
    start = None if event is None else (float(event["chosen"]), float(event["rejected"]))
    return HeldOutLabels(int(line["step"]), desirable, undesirable, auc, low, high, rewards, log_probs, start)
