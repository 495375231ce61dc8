"""What plan.json says of the time that scoring takes. Torch is imported where there is something to simulate."""

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
    """The entry "scoring"; None where the device's speed or the number of prompts is not known, where a server answers,
    and where the model's own code does not run on tensors without data.

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
            found = estimate_scoring_time(resolved, model, hardware, scored, usual, rates)
        except Exception:  # a model's own code may do anything with tensors that hold no data
            return None
    if found is None:
        return None
    return {
        "sets": [asdict(each) for each in scored.sets],
        "variants": list(found.variants),
        "ways": found.ways,
        "samples": resolved.config.evaluate.samples,
        "answers": found.answers,
        "answer_tokens_low": found.tokens.low,
        "answer_tokens_high": found.tokens.high,
        "loading_seconds": found.loading,
        "seconds_low": found.loading + found.answering.low,
        "seconds_high": found.loading + found.answering.high,
        "in_training": _in_training(resolved, found),
        "rates": found.source,
    }


def _in_training(resolved: ResolvedConfig, found: Any) -> dict[str, Any] | None:
    """What one checkpoint takes, and all of them; None where none is scored, or the steps are not known."""
    every, each = resolved.config.checkpoint.save_steps, found.in_training
    if each is None or resolved.total_steps is None:
        return None
    assert isinstance(every, int)
    checkpoints = math.ceil(resolved.total_steps / every)
    return {
        "checkpoints": checkpoints,
        "seconds_low": each.low,
        "seconds_high": each.high,
        "total_seconds_low": checkpoints * each.low,
        "total_seconds_high": checkpoints * each.high,
    }
