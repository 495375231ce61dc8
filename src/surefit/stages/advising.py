"""Changes after which a run fits, for check and plan: searched for only where it does not. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefit.core.errors import SureFitError

if TYPE_CHECKING:
    from surefit.config.load import LoadedConfig
    from surefit.config.resolve import ResolvedConfig
    from surefit.facts.fit_advice import FitAdvice
    from surefit.facts.hardware import HardwareFacts
    from surefit.facts.model import ModelFacts
    from surefit.plan.planner import Planner
    from surefit.stages.run_context import CheckedRun, RunContext


def advise_where_too_large(
    loaded: LoadedConfig | None,
    resolved: ResolvedConfig | None,
    model: ModelFacts | None,
    hardware: HardwareFacts | None,
    found: RunContext | None = None,
) -> FitAdvice | None:
    """Return the changes after which a run fits, where even the least that it can need does not; else None.

    Args:
        found: the run, whose rows are measured.
    """
    from surefit.facts.memory_formula import fullest_moment_bytes
    from surefit.facts.memory_per_rank import memory_terms
    from surefit.plan.find_advice import find_advice

    if loaded is None or resolved is None or model is None or hardware is None or hardware.memory_bytes is None:
        return None
    terms = memory_terms(resolved, model, hardware.compute_capability)
    if fullest_moment_bytes(terms) <= hardware.memory_bytes:
        return None
    if found is None:
        return find_advice(loaded, model, hardware)
    return find_advice(loaded, model, hardware, _longest(found), counted=found.counted)


def _longest(found: RunContext) -> int | None:
    """Return the tokens of the longest sampled row; None where rows or tokenizer are not on this machine."""
    from surefit.data.tokens.lengths import sample_lengths
    from surefit.facts.tokenizer import facts_of_tokenizer

    if found.rows is None or found.recipe is None or found.model is None or found.loaded.config.data.mix:
        return None
    try:
        lengths = sample_lengths(found.rows, found.recipe, found.loaded.config, facts_of_tokenizer(found.model))
    except SureFitError:
        return None
    return lengths.longest if lengths else None


def advise_on_plan(run: CheckedRun, planner: Planner, *, simulate: bool) -> FitAdvice:
    """Return the changes after which a planned run fits.

    Args:
        simulate: confirm changes of settings by simulation.
    """
    from surefit.plan.find_advice import find_advice
    from surefit.plan.memory_interval import judge_fit

    def confirm(resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts) -> bool:
        try:
            return judge_fit(planner.simulated(resolved, hardware), hardware.memory_bytes) == "fits"
        except Exception:  # a model's own code may do anything with tensors that hold no data
            return True

    longest = planner.lengths.longest if planner.lengths.known in ("all", "sample") else None
    return find_advice(
        run.loaded, run.model, run.hardware, longest, confirm if simulate else None, counted=run.gathered.counted
    )
