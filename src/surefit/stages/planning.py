"""The stage `plan`: what a run needs of memory, time and disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefit.core.errors import SureFitError
from surefit.stages.prepare import Prepared, examples_per_row, lengths_of

if TYPE_CHECKING:
    from surefit.facts.scored import ScoredFacts


def planned_run(run: Prepared, *, quick: bool = False) -> dict[str, Any]:
    """The content of plan.json.

    Args:
        quick: by arithmetic alone; nothing is simulated.
    """
    from surefit.plan.document import planned

    each = examples_per_row(run.resolved.config, run.recipe, run.model, run.rows)
    rows = None if run.row_count is None else round(each * run.row_count)
    lengths, scored = lengths_of(run), scored_of(run)
    return planned(run.resolved, run.model, run.hardware, rows, quick=quick, lengths=lengths, scored=scored)


def scored_of(run: Prepared) -> ScoredFacts | None:
    """What the model will be asked; None where that cannot be read, which the check says."""
    from surefit.data.formats import to_examples
    from surefit.facts.tokenizer import facts_of_tokenizer
    from surefit.stages.scored import SAMPLED_ROWS, scored_facts

    section = run.resolved.config.data
    try:
        train = None
        if run.rows is not None and isinstance(section.eval, float):
            train = to_examples(run.rows.sample(SAMPLED_ROWS), run.recipe, section.format, section.bad_rows)
        tokenizer = facts_of_tokenizer(run.model)
        return scored_facts(run.resolved.config, run.recipe, run.rows, train, tokenizer, run.mixed, counted=True)[0]
    except SureFitError:
        return None
