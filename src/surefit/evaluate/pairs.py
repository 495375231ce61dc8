"""What a run on preferences did to the held-out pairs, from its metrics.jsonl. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from surefit.core.rundir import PAIRS_AT_START
from surefit.core.units import plural
from surefit.evaluate.stats import bootstrap_mean

Outcome = Literal["learned", "both fell", "unclear", "reversed"]
HEADLINES: dict[Outcome, str] = {
    "learned": "The trained model prefers the chosen answers",
    "both fell": "The preference is learned, but the chosen answers became less likely, too",
    "unclear": "The trained model shows no clear preference",
    "reversed": "The trained model prefers the rejected answers",
}


@dataclass(frozen=True)
class HeldOutPairs:
    """The held-out pairs at the newest measurement.

    Attributes:
        step: optimizer step after which they were measured.
        pairs: their number.
        accuracy: share in which the chosen answer has the higher reward, a tie counting half; low, high: its 95 %
            interval.
        log_probs: mean log-probability of the chosen and of the rejected answers, in nats, summed over tokens.
        start: `log_probs` before the first step; None for an objective without a reference.
    """

    step: int
    pairs: int
    accuracy: float
    low: float
    high: float
    log_probs: tuple[float, float]
    start: tuple[float, float] | None = None

    @property
    def outcome(self) -> Outcome:
        """Return what was learned. Before the first step every reward is 0 against a reference, so that the accuracy is
        one half."""
        if self.high < 0.5:
            return "reversed"
        if self.low <= 0.5:
            return "unclear"
        return "both fell" if self.start is not None and self.log_probs[0] < self.start[0] else "learned"

    @property
    def text(self) -> str:
        """Return the accuracy and the log-probabilities as one sentence each."""
        share = f"In {100 * self.accuracy:.1f} % of {plural(self.pairs, 'held-out pair')}"
        before = "; 50 % before training, where all rewards are 0" if self.start is not None else ""
        interval = f"95 % interval {100 * self.low:.0f} to {100 * self.high:.0f} %{before}"
        accuracy = f"{share} the chosen answer has the higher reward ({interval})."
        names = ("chosen", "rejected")
        starts = self.start if self.start is not None else (None, None)
        parts = [
            f"of the {name} answers {end:.4g}" if start is None else f"of the {name} answers {start:.4g} → {end:.4g}"
            for name, start, end in zip(names, starts, self.log_probs, strict=True)
        ]
        return f"{accuracy} Mean log-probability {', '.join(parts)}."


def summarize_held_out_pairs(
    lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> HeldOutPairs | None:
    """Return the newest measurement of held-out pairs; None where the run has none.

    Args:
        lines: of metrics.jsonl; events: of events.jsonl.
    """
    line = next((line for line in reversed(lines) if "eval_rewards/accuracies" in line), None)
    if line is None or not line.get("eval_pairs"):
        return None
    pairs, accuracy = int(line["eval_pairs"]), float(line["eval_rewards/accuracies"])
    right = round(accuracy * pairs * 2) / 2
    scores = [1.0] * int(right) + [0.5] * (right % 1 > 0) + [0.0] * int(pairs - right)
    interval = bootstrap_mean(np.array(scores))
    log_probs = (float(line["eval_logps/chosen"]), float(line["eval_logps/rejected"]))
    event = next((event for event in reversed(events) if event.get("event") == PAIRS_AT_START), None)
    start = None if event is None else (float(event["chosen"]), float(event["rejected"]))
    return HeldOutPairs(int(line["step"]), pairs, accuracy, interval.low, interval.high, log_probs, start)
