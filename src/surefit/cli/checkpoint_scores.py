"""`evaluate --all-checkpoints`: the score of every checkpoint, the best one, and how certain that choice is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefit.cli.intervals import interval_text, points_text
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK
from surefit.core.rundir import RunDir
from surefit.core.units import plural
from surefit.evaluate.curve import describe_best_checkpoint
from surefit.stages.evaluating import load_eval_sets, require_held_out
from surefit.stages.run_context import CheckedRun

if TYPE_CHECKING:
    from surefit.parallel.process_group import World


def score_all_checkpoints(out: Output, run: CheckedRun, *, dry_run: bool = False, world: World | None = None) -> int:
    """Score each checkpoint on the held-out rows. The run is not locked, because training may go on meanwhile.

    Args:
        dry_run: only list the checkpoints.
        world: the processes that share the rows, of which this is one; the first alone writes and prints.
    """
    require_held_out(run.resolved.config, "--all-checkpoints")
    if dry_run:
        return _dry_run(out, run)
    from surefit.evaluate.checkpoints import score_checkpoints
    from surefit.parallel.process_group import World, run_on_rank0

    world = world or World()
    held_out = run_on_rank0(world, lambda: load_eval_sets(run)["eval"])
    with out.progress("evaluating") as on_progress:
        scores = score_checkpoints(run.resolved.config, run.recipe, run.hardware, run.run, held_out, on_progress, world)
    if world.is_first:
        say_checkpoints(out, scores, run.run)
        out.result(scores)
    return EXIT_OK


def _dry_run(out: Output, run: CheckedRun) -> int:
    from surefit.checkpoint.files import list_steps

    checkpoints = [path.name for _, path in list_steps(run.run.checkpoints)]
    scored = [name for name in checkpoints if (run.run.eval / "eval" / f"{name}.json").exists()]
    rows = len(load_eval_sets(run)["eval"])
    out.say(
        f"{plural(len(checkpoints), 'checkpoint')}, {plural(rows, 'held-out row')}: {', '.join(checkpoints) or 'none'}"
    )
    if scored:
        out.say(f"Scored before, and kept where still comparable: {', '.join(scored)}")
    out.result({"checkpoints": checkpoints, "scored": scored, "rows": rows})
    return EXIT_OK


def say_checkpoints(out: Output, found: dict[str, Any], run: RunDir) -> None:
    """Print a table of checkpoints by step, the best one in words, and the checkpoints that were passed over."""
    points, best, metric = found["checkpoints"], found["best"], found["metric"]
    for text in found["passed_over"]:
        out.note(f"passed over: {text}")
    for text in found["left_out"]:
        out.note(f"not comparable, so left out: {text}")
    if not points:
        out.say("No checkpoint has been scored")
        return
    leads = {
        comparison["variant"]: points_text(comparison["difference"], comparison["interval"])
        for comparison in best["over"]
    }
    rows = [["base", interval_text(found["base"]), "-", "-", "-"]] if found["base"] else []
    for point in points:
        name = point["variant"] + ("" if point["there"] else " (deleted)")
        counts = [f"{point[key]:,}" for key in ("truncated", "unparsed")]
        rows.append([name, interval_text(point), *counts, leads.get(point["variant"], "best")])
    columns = ["checkpoint", metric, "cut off", "unparsed", "lead of the best, points"]
    out.table(f"{found['set']}: {plural(found['n'], 'row')}, {metric} with 95 % intervals", columns, rows)
    out.say(describe_best_checkpoint(best))
    out.say(f"Drawn in {run.eval / 'checkpoints.svg'}")
