"""Rewards of held-out pairs from log-probabilities that `surefit evaluate` has read, and what training did to them.

The reward of an answer is what the objective compares (docs/preferences.md): of dpo β times the log-probability against
the reference, of ipo and sigmoid_norm the same per token, of orpo and simpo β times the mean log-probability of its
tokens. The reference is the base variant, which is the model before the first step; in a run that continues an adapter
it is not, and the numbers that the run stored are taken. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any

import safetensors.numpy
from safetensors import SafetensorError

from surefit.config.schema import ObjectiveSection, SureFitConfig, decided
from surefit.core.rundir import RunDir
from surefit.evaluate.answers import BASELINE, GRAMMAR, base_variant, checkpoint_step
from surefit.evaluate.paired import ScoreRows
from surefit.evaluate.stats import MeanInterval, bootstrap_mean
from surefit.facts.pair_scores import REWARD_ACCURACY
from surefit.task import Scores

LOG_PROBS = ("_chosen_log_prob", "_rejected_log_prob")
"""Row scores: log-probability of each answer, in nats summed over its tokens."""
TOKENS = ("_chosen_tokens", "_rejected_tokens")
REWARDS = ("_chosen_reward", "_rejected_reward")
MARGIN = "_reward_margin"
WORDS = "_answer_words"
"""Row score: words of the generated answer."""
_LISTS = {"chosen_log_prob": LOG_PROBS[0], "rejected_log_prob": LOG_PROBS[1], "chosen_reward": REWARDS[0],
          "rejected_reward": REWARDS[1], "reward_margin": MARGIN,
          "answer_words": WORDS}  # fmt: skip
"""Key of the summary → row score."""


def add_rewards(objective: ObjectiveSection, rows: ScoreRows, reference: ScoreRows | None) -> list[Scores]:
    """Return the scores of each row with the rewards of its answers, where they can be told.

    Args:
        objective: resolved.
        reference: scores of the same rows, with the log-probabilities of the reference; not needed by an objective
            without one.
    """
    if not objective.has_reference:
        return [_with_rewards(objective, row, {}) for row in rows]
    if reference is None:
        return list(map(dict, rows))
    return [_with_rewards(objective, row, before) for row, before in zip(rows, reference, strict=True)]


def _with_rewards(objective: ObjectiveSection, row: Scores, before: Scores) -> Scores:
    needed = before if objective.has_reference else row
    if any(name not in row or name not in needed for name in LOG_PROBS):
        return dict(row)
    per_token = not objective.has_reference or objective.loss_type != "sigmoid"
    rewards = [
        decided(objective.beta) * (row[value] - before.get(value, 0.0)) / (row[count] if per_token else 1)
        for value, count in zip(LOG_PROBS, TOKENS, strict=True)
    ]
    margin = rewards[0] - rewards[1]
    accuracy = 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0
    told = {REWARD_ACCURACY: accuracy, MARGIN: margin}
    return {**row, **told, **dict(zip(REWARDS, rewards, strict=True))}


def stored_reference(config: SureFitConfig, run: RunDir, rows: ScoreRows) -> list[Scores] | None:
    """Return the log-probabilities that the run stored of its held-out pairs before the first step; None where they
    cannot be matched with these rows: only a part of the held-out rows, or no such file."""
    places = [place for place, row in enumerate(rows) if LOG_PROBS[0] in row]
    try:
        stored = safetensors.numpy.load_file(run.reference)["eval"]
    except (OSError, KeyError, SafetensorError):
        return None
    if len(stored) != len(places) or config.evaluate.max_examples is not None:
        return None
    found: list[Scores] = [{} for _ in rows]
    for place, pair in zip(places, stored.tolist(), strict=True):
        if not any(map(math.isnan, pair)):
            found[place] = dict(zip(LOG_PROBS, pair, strict=True))
    return found


def summarize_pairs(config: SureFitConfig, variants: Mapping[str, ScoreRows]) -> dict[str, Any] | None:
    """Return what the models do with a set's pairs, for eval/summary.json; None where no pair was read.

    {"variants": variant → {reward_accuracy, reward_margin, chosen_log_prob, …: {mean, ci95, n}}, "sentences"}.
    """
    told = {name: rows for name, rows in variants.items() if any(LOG_PROBS[0] in row for row in rows)}
    if not told:
        return None
    documents: dict[str, dict[str, Any]] = {}
    for name, rows in told.items():
        columns = {key: [row[score] for row in rows if score in row] for key, score in _LISTS.items()}
        documents[name] = {key: _mean(values).document() for key, values in columns.items() if values}
        if shares := [row[REWARD_ACCURACY] for row in rows if REWARD_ACCURACY in row]:
            documents[name][REWARD_ACCURACY] = bootstrap_mean(shares).document()
    tuned = [
        name
        for name in told
        if not name.startswith((BASELINE, "base")) and checkpoint_step(name) is None and not name.endswith(GRAMMAR)
    ]
    sentences = [
        sentence
        for name in tuned
        for sentence in _sentences(name, told[name], told.get(base_variant(name)), documents[name])
    ]
    if config.objective.has_reference and any(REWARD_ACCURACY not in documents[name] for name in tuned):
        sentences.append(f"without the reference's log-probabilities there are no rewards: {_why_none(config)}")
    return {"variants": documents, "sentences": sentences}


def _why_none(config: SureFitConfig) -> str:
    if config.lora.start_from is None:
        return "score base, too"
    return "the run stored those of all its held-out rows, and of no others"


def _sentences(name: str, rows: ScoreRows, base: ScoreRows | None, found: Mapping[str, Any]) -> list[str]:
    """Return what is said of a trained model: rewards, both log-probabilities apart, and the length of its answers."""
    sentences = []
    if REWARD_ACCURACY in found:
        accuracy, margin = found[REWARD_ACCURACY], found["reward_margin"]
        low, high = (100 * value for value in accuracy["ci95"])
        sentences.append(
            f"{name} prefers the chosen answer in {100 * accuracy['mean']:.1f} % of {accuracy['n']:,} held-out pairs "
            f"[{low:.1f}, {high:.1f}]; rewards: chosen {found['chosen_reward']['mean']:+.3f}, rejected "
            f"{found['rejected_reward']['mean']:+.3f}, margin {margin['mean']:+.3f} "
            f"[{margin['ci95'][0]:+.3f}, {margin['ci95'][1]:+.3f}]"
        )
    if base is None:
        return sentences
    chosen, rejected = (_change(base, rows, value) for value in LOG_PROBS)
    if chosen and rejected:
        text = "; ".join(
            f"{side} answers {change[0]:.1f} → {change[1]:.1f} ({change[2]:+.1f} [{change[3]:+.1f}, {change[4]:+.1f}])"
            for side, change in (("chosen", chosen), ("rejected", rejected))
        )
        sentences.append(f"log-probability of the {text}")
        if chosen[4] < 0 and rejected[4] < 0:
            sentences[-1] += (
                ": both fell, so the model forgets the chosen answers, too (lower the learning rate, or set "
                "objective.sft_weight)"
            )
    if words := _change(base, rows, WORDS):
        sentences.append(
            f"generated answers have {words[0]:.1f} → {words[1]:.1f} words on average "
            f"({words[2]:+.1f} [{words[3]:+.1f}, {words[4]:+.1f}])"
        )
    return sentences


def _change(base: ScoreRows, rows: ScoreRows, name: str) -> tuple[float, float, float, float, float] | None:
    """Return (mean before, mean after, difference, low, high) over the rows that both have; None without any."""
    pairs = [(old[name], new[name]) for old, new in zip(base, rows, strict=True) if name in old and name in new]
    if not pairs:
        return None
    before, after = [old for old, _ in pairs], [new for _, new in pairs]
    change = _mean([new - old for old, new in pairs])
    return math.fsum(before) / len(pairs), math.fsum(after) / len(pairs), change.mean, change.low, change.high


def _mean(values: Sequence[float]) -> MeanInterval:
    """Return the mean of quantities that have no bounds, with its 95 % interval from the standard error: the bootstrap
    of `stats` is for scores in [0, 1]. A single value has no interval: both ends are the value."""
    mean = math.fsum(values) / len(values)
    half = 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return MeanInterval(mean, mean - half, mean + half, len(values))


def reference_rows(
    config: SureFitConfig, run: RunDir, name: str, variant: str, rows: ScoreRows, base: Sequence[Scores] | None
) -> Sequence[Scores] | None:
    """Return the reference's scores of the same rows for a variant's rewards; None where they are not known.

    Args:
        name: the set; the run stored the log-probabilities of its held-out rows alone.
        base: the base variant's scores, if it was scored.
    """
    if config.lora.start_from is not None:
        return stored_reference(config, run, rows) if name == "eval" else None
    return rows if variant.removesuffix(GRAMMAR) == "base" else base
