"""The learning-rate schedule: the learning rate of every step."""

from __future__ import annotations

import math

from surefit.config.resolve import warmup_steps


def learning_rate(step: int, total_steps: int, peak: float, schedule: str, warmup: float, decay: float = 0.2) -> float:
    """Return the learning rate of an optimizer step: a pure function, so that a resumed run needs nothing but the step.

    With W warmup steps it is `peak × (step + 1) / (W + 1)` before step W and `peak` at step W. After that it decays
    along a half cosine or a line that would reach 0 at `total_steps`, one past the last step; constant_with_warmup
    stays at the peak, and constant is at the peak from step 0. warmup_stable_decay (Hu et al. 2024) stays at the peak
    until D steps are left, and decays linearly over these: `peak × (total_steps − step) / D`. No step is wasted on a
    rate of 0.

    These are the schedules of transformers at `step + 1`, with W + 1 warmup steps and `total_steps + 1` in all, since
    in transformers they start, and warmup_stable_decay ends, with a step at 0.

    >>> [round(learning_rate(s, 8, 1.0, "linear", 3), 4) for s in range(8)]
    [0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2]
    >>> [round(learning_rate(s, 4, 1.0, "cosine", 0), 4) for s in range(4)]
    [1.0, 0.8536, 0.5, 0.1464]

    One warmup step of ten, and D = ⌈10 × 0.4⌉ = 4: full rate up to step 6, then 4/4, 3/4, 2/4 and 1/4 of it.

    >>> [learning_rate(s, 10, 1.0, "warmup_stable_decay", 1, 0.4) for s in range(10)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]

    Args:
        step: 0 for the first step.
        total_steps: optimizer steps of the whole run.
        peak: the rate after warmup.
        schedule: `train.lr_scheduler_type`.
        warmup: number of warmup steps; below 1, a share of all steps.
        decay: D, likewise; for warmup_stable_decay only. If the run is too short for both, the decay starts where the
            warmup ends.
    """
    if schedule == "constant":
        return peak
    warmup_count = warmup_steps(total_steps, warmup)
    if step < warmup_count:
        return peak * (step + 1) / (warmup_count + 1)
    if schedule == "constant_with_warmup":
        return peak
    remaining, after_warmup = total_steps - step, max(1, total_steps - warmup_count)
    if schedule == "warmup_stable_decay":
        return peak * min(1.0, remaining / max(1, min(warmup_steps(total_steps, decay), after_warmup)))
    progress = (step - warmup_count) / after_warmup
    return peak * (1 - progress) if schedule == "linear" else peak * 0.5 * (1 + math.cos(math.pi * progress))
