"""The verb `train`: print its result, or the findings that stopped it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from surefit.core.errors import EXIT_OK
from surefit.core.units import duration_text, plural
from surefit.stages import training
from surefit.stages.checking import CheckFailed
from surefit.stages.run_context import CheckedRun

if TYPE_CHECKING:
    from surefit.cli.render import Output
    from surefit.parallel.process_group import World


def train_and_show(out: Output, run: CheckedRun, *, world: World | None = None, **wishes: Any) -> int:
    """Check, then train; of several processes, only rank 0 prints.

    Args:
        wishes: options of `surefit.stages.training.train_run`.
    """
    with show_findings_on_failure(out):
        result = training.train_run(run, out, world=world, **wishes)
    if world is None or world.is_first:
        _say_how_it_ended(out, result)
        out.result(result)
    return EXIT_OK


@contextlib.contextmanager
def show_findings_on_failure(out: Output) -> Iterator[None]:
    """Print the findings of a check that stops the verb; with --json they are in the error."""
    try:
        yield
    except CheckFailed as error:
        if not out.as_json:
            out.findings(error.findings)
            error.also = ()
        raise


def _say_how_it_ended(out: Output, result: dict[str, Any]) -> None:
    if result["dry_run"]:
        out.say(f"Ready: {plural(result['total_steps'], 'optimizer step')}; nothing was written")
        return
    held_out, rejected = result["eval_loss"], result["rejected"]
    out.say(
        f"Trained {plural(result['steps'], 'step')} in {duration_text(result['seconds'])}: loss {result['loss']:.4f}"
        + (f", held-out loss {held_out:.4f}" if held_out is not None else "")
        + (f", {plural(rejected, 'step')} rejected" if rejected else "")
        + f" → {result['output']}"
    )
