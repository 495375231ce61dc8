"""The entry `scoring` of plan.json, the time of scoring. Torch is imported where there is something to simulate."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from surefit.config.resolve import ResolvedConfig
from surefit.core.gc_pause import pause_gc
from surefit.facts.eval_prompts import EvalPromptFacts
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import ModelFacts
from surefit.plan.loading import import_libraries
from surefit.plan.step_time_cache import device_rates_for


def build_scoring_plan(
    resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts, scored: EvalPromptFacts, usual: int
) -> dict[str, Any] | None:
    """Return the entry `scoring`; None where the device's speed or the number of prompts is not known, where a server
    answers, and where the model's own code does not run on tensors without data.

    Args:
        usual: tokens of a prompt where they are not known.
    """
    rates = device_rates_for(hardware)
    if rates is None:
        return None
    with pause_gc():
        import_libraries()
        from surefit.plan.scoring_time import estimate_scoring_time

        try:
            scoring = estimate_scoring_time(resolved, model, hardware, scored, usual, rates)
        except Exception:  # a model's own code may do anything with tensors that hold no data
            return None
    if scoring is None:
        return None
    return {
        "sets": [asdict(prompt_set) for prompt_set in scored.sets],
        "variants": list(scoring.variants),
        "ways": scoring.ways,
        "samples": resolved.config.evaluate.samples,
        "answers": scoring.answers,
        "answer_tokens_low": scoring.tokens.low,
        "answer_tokens_high": scoring.tokens.high,
        "loading_seconds": scoring.loading,
        "seconds_low": scoring.loading + scoring.answering.low,
        "seconds_high": scoring.loading + scoring.answering.high,
        "in_training": _in_training(resolved, scoring),
        "rates": scoring.source,
    }


def _in_training(resolved: ResolvedConfig, found: Any) -> dict[str, Any] | None:
    """Return the time of scoring one checkpoint, and all of them; None where none is scored, or the steps are not
    known."""
    save_steps, checkpoint_time = resolved.config.checkpoint.save_steps, found.in_training
    if checkpoint_time is None or resolved.total_steps is None:
        return None
    assert isinstance(save_steps, int)
    checkpoints = math.ceil(resolved.total_steps / save_steps)
    return {
        "checkpoints": checkpoints,
        "seconds_low": checkpoint_time.low,
        "seconds_high": checkpoint_time.high,
        "total_seconds_low": checkpoints * checkpoint_time.low,
        "total_seconds_high": checkpoints * checkpoint_time.high,
    }
