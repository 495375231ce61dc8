"""The stage `plan`: predicts a run's memory, time and disk space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefit.core.errors import DataError, SureFitError
from surefit.facts.disk import disk_advice
from surefit.stages.advising import advise_on_plan
from surefit.stages.run_context import CheckedRun, examples_per_row, load_example_lengths

if TYPE_CHECKING:
    from surefit.facts.eval_prompts import EvalPromptFacts
    from surefit.plan.planner import ExampleLengths, Planner


def build_run_plan(
    run: CheckedRun, *, quick: bool = False, needs_rows: bool = False, advise: bool = False
) -> dict[str, Any]:
    """Return the content of plan.json.

    Args:
        quick: estimate by arithmetic alone, without a simulation.
        needs_rows: raise if all sampled rows are dropped.
        advise: search for changes after which it fits, where it may not.

    Raises:
        DataError: they are.
    """
    from surefit.plan.build_plan import build_plan
    from surefit.plan.planner import Planner
    from surefit.plan.summary import headline

    examples_per = examples_per_row(run.resolved.config, run.recipe, run.model, run.rows)
    rows = None if run.row_count is None else round(examples_per * run.row_count)
    lengths, prompt_facts = (
        require_rows_left(run) if needs_rows else load_example_lengths(run),
        load_run_eval_prompts(run),
    )
    planner = Planner(run.model, lengths, stored=True)
    plan = build_plan(run.resolved, run.model, run.hardware, rows, quick=quick, planner=planner, scored=prompt_facts)
    return plan | {"headline": headline(plan), "advice": _advice(run, planner, plan, quick) if advise else None}


def _advice(run: CheckedRun, planner: Planner, plan: dict[str, Any], quick: bool) -> dict[str, Any] | None:
    """Return what to change where the run does not fit for certain; None where it does."""
    estimate = plan["estimate"]
    short_of_disk = next((text for text in plan["does_not_fit"] if text.startswith("disk: ")), None)
    if estimate is not None and estimate["verdict"] in ("does not fit", "too close to call"):
        advice = advise_on_plan(run, planner, simulate=not quick)
        options = [{"kind": option.kind, "changes": dict(option.changes)} for option in advice.options]
        return {"text": advice.text(), "options": options}
    return {"text": disk_advice(run.resolved, run.model, run.hardware), "options": []} if short_of_disk else None


def require_rows_left(run: CheckedRun) -> ExampleLengths:
    """Return the lengths of the rows.

    Raises:
        DataError: no row remains, because all sampled ones are longer than `data.max_length`.
    """
    lengths, data = load_example_lengths(run), run.resolved.config.data
    if lengths.shortest is not None and lengths.shortest > data.max_length and not data.cuts:
        raise DataError(
            f"no row is left to train on: the rows have {lengths.shortest:,} to {lengths.longest:,} tokens "
            f"({lengths.source}), but max_length is {data.max_length:,}",
            code="E8701",
            field="data.max_length",
            help=f"set data.max_length to {lengths.longest} or more, as far as the model's context allows",
        )
    return lengths


def load_run_eval_prompts(run: CheckedRun) -> EvalPromptFacts | None:
    """Return the facts of the evaluation prompts; None where they cannot be read, which the check reports."""
    from surefit.data.rows.sampling import sample_examples
    from surefit.facts.tokenizer import facts_of_tokenizer
    from surefit.stages.eval_prompts import load_eval_prompt_facts

    section = run.resolved.config.data
    try:
        train = None
        if run.rows is not None and isinstance(section.eval, float):
            train = sample_examples(run.rows, run.recipe, section)
        tokenizer = facts_of_tokenizer(run.model)
        return load_eval_prompt_facts(
            run.resolved.config,
            run.recipe,
            run.rows,
            train,
            tokenizer,
            run.mixed,
            counted=True,
            sources=run.gathered.sources,
        )[0]
    except SureFitError:
        return None
