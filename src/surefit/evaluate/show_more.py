"""What would let the deciding metric show an effect that the likelihood of the answers shows already. Torch-free.

Only what the run's own numbers support is named: more rows where some answers changed, more steps where the held-out
loss was still falling, a larger model where hardly an answer is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from surefit.core.errors import DataError
from surefit.core.rundir import RunDir, read_json, read_jsonl
from surefit.core.units import count_text
from surefit.evaluate.answers import base_variant, select_tuned_variant

FALLING = 0.01
"""Share by which the last held-out loss must be below the one before for training to count as unfinished."""
ALMOST_NONE = 0.05
"""Score up to which a model counts as too small for the task, before and after training."""
LARGE = 8e9
"""Parameters above which no larger model is proposed."""
MOST_ROWS = 20_000
POWER_FACTOR = (1.96 + 0.84) / 1.96
"""Half of a 95 % interval times this is the difference that four of five test sets of this size detect."""


def suggest_more(scored: Mapping[str, Any], fit: Mapping[str, Any], run: RunDir, max_new_tokens: int) -> list[str]:
    """Return what would show more, each as a noun with its reason; empty where the deciding metric is clear, or nothing
    is known to help.

    Args:
        scored: a set's entry in eval/summary.json; fit: its entry `fit`.
        max_new_tokens: limit of the generated answers.
    """
    tuned = select_tuned_variant(scored["variants"])
    pair = (base_variant(tuned), tuned) if tuned else None
    effect = next((e for e in fit["effects"] if (e["a"], e["b"]) == pair), None)
    if effect is None or not effect["metric_text"]:
        return []
    metric = scored["primary_metric"]
    change = next(c for c in scored["comparisons"] if (c["a"], c["b"], c["metric"]) == (*pair, metric))  # type: ignore[misc]
    rows = change["wins"] + change["losses"] + change["ties"]
    truncated = scored["answers"][tuned]["truncated"]
    texts: list[str | None] = []
    if 2 * truncated >= rows:
        limit = f"{truncated:,} of {rows:,} answers were cut at {max_new_tokens:,} tokens"
        texts.append(f"a higher evaluate.max_new_tokens ({limit})")
    elif effect["outcome"] not in ("worse", "mixed"):
        means = [scored["variants"][name][metric]["mean"] for name in (effect["a"], tuned)]
        texts.append(_larger_model(means, run))
    if effect["outcome"] not in ("worse", "mixed"):
        texts.append(_more_steps(run))
    return [text for text in (*texts, _more_rows(change, rows)) if text]


def _more_rows(change: Mapping[str, Any], rows: int) -> str | None:
    """Return how many rows would show a difference as large as the one found; None where hardly an answer changed, or
    that many are out of reach."""
    difference, (low, high) = change["difference"], change["ci95"]
    if change["wins"] + change["losses"] < 2 or not difference:
        return None
    needed = rows * (POWER_FACTOR * (high - low) / 2 / difference) ** 2
    if not rows < needed <= MOST_ROWS:
        return None
    count = round(needed, -1 if needed < 1000 else -2)
    return f"more rows to score (about {count:,.0f}, if the true difference is {100 * difference:+.1f} points)"


def _more_steps(run: RunDir) -> str | None:
    losses: Sequence[float] = []
    with contextlib.suppress(DataError):
        losses = [line["eval_loss"] for line in read_jsonl(run.metrics) if line.get("eval_loss") is not None]
    if len(losses) < 2 or losses[-1] > min(losses) or losses[-1] > (1 - FALLING) * losses[-2]:
        return None
    return f"more steps (the held-out loss was still falling at the end: {losses[-2]:.2f} → {losses[-1]:.2f})"


def _larger_model(means: Sequence[float], run: RunDir) -> str | None:
    parameters: Any = None
    with contextlib.suppress(DataError, KeyError, TypeError):
        parameters = read_json(run.plan)["model"]["parameters"]
    if not isinstance(parameters, int) or parameters > LARGE or max(means) > ALMOST_NONE:
        return None
    return f"a larger model (this one has {count_text(parameters)} parameters and gets hardly an answer right)"
