"""The verb `run`: all stages in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from surefit.cli.check import check_and_show
from surefit.cli.evaluate import evaluate_and_show
from surefit.cli.exits import verb
from surefit.cli.merge import merge_run_and_show
from surefit.cli.options import Adapt, Gpus, Overrides, Overwrite, Resume, Target
from surefit.cli.plan import say_plan
from surefit.cli.render import Output
from surefit.cli.report import report_run_and_show
from surefit.cli.train import train_and_show
from surefit.core.errors import EXIT_OK
from surefit.core.packaging import require_extra
from surefit.core.rundir import RunDir, read_json, read_jsonl

if TYPE_CHECKING:
    from surefit.stages.run_context import CheckedRun


@verb
def run(
    out: Output,
    config: Target,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    adapt: Adapt = False,
    gpus: Gpus = None,
) -> int:
    """Run all stages in order: check, plan, train, merge, evaluate, report; stop at the first that fails."""
    from surefit.cli.processes import launch_training, local_process_count, with_process_count
    from surefit.stages.run_context import load_checked_run

    require_extra("train")
    changes = with_process_count(config, overrides, gpus)
    prepared = dataclasses.replace(load_checked_run(config, changes, resume=resume), verb="run")
    if local_process_count(prepared) == 1:
        return run_all_stages(out, prepared, resume=resume, overwrite=overwrite, adapt=adapt)

    def train_them(resume: bool, overwrite: bool) -> int:
        return launch_training(out, prepared, config, changes, {"--adapt": adapt}, resume=resume, overwrite=overwrite)

    return run_all_stages(out, prepared, resume=resume, overwrite=overwrite, training=train_them)


def run_all_stages(
    out: Output,
    prepared: CheckedRun,
    *,
    resume: bool,
    overwrite: bool,
    adapt: bool = False,
    training: Callable[[bool, bool], int] | None = None,
    variants: Sequence[str] | None = None,
) -> int:
    """Run all stages in order; the first that fails stops the rest, except that a failed gate still gets its report.

    With `resume`, training and merging that have finished are not repeated.

    Args:
        training: trains, called with `resume` and `overwrite`; by default this process, which with `adapt` lowers its
            memory use if memory runs out.
        variants: models to score; by default all of the run's kind.
    """
    from surefit.stages.planning import build_run_plan

    stage_output = out.without_result()
    planned: dict[str, Any] = {}

    def plan() -> int:
        planned.update(build_run_plan(prepared, advise=True))
        return say_plan(stage_output, planned, verbose=None)

    stages: dict[str, Callable[[], int]] = {
        "check": lambda: check_and_show(stage_output, prepared.gathered),
        "plan": plan,
        "train": lambda: (
            training(resume, overwrite)
            if training
            else train_and_show(
                stage_output, prepared, resume=resume, overwrite=overwrite, adapt=adapt, planned=planned
            )
        ),
        "merge": lambda: merge_run_and_show(stage_output, prepared),
        "evaluate": lambda: _evaluate_stage(stage_output, prepared, variants),
        "report": lambda: report_run_and_show(stage_output, prepared.run),
    }
    exit_code = EXIT_OK
    for number, (stage, run_stage) in enumerate(stages.items(), start=1):
        is_done = resume and stage in ("train", "merge") and _is_stage_finished(prepared.run, stage)
        out.heading(f"{number}/{len(stages)} {stage}{': done before' if is_done else ''}")
        code = EXIT_OK if is_done else run_stage()
        exit_code = max(exit_code, code)
        if code != EXIT_OK and stage != "evaluate":
            break
    scores = read_json(prepared.run.eval_summary) if prepared.run.eval_summary.exists() else None
    if exit_code == EXIT_OK:
        out.next_step(["chat", prepared.run.path], ["export", prepared.run.path])
    out.result(
        {"run": str(prepared.run.path), "exit_code": exit_code, "report": str(prepared.run.report), "scores": scores}
    )
    return exit_code


def _evaluate_stage(out: Output, prepared: CheckedRun, variants: Sequence[str] | None) -> int:
    """Evaluate as `evaluate` does, unless there is nothing to score.

    That is the case if nothing is held out (EVL031) or no row has a gold answer (EVL010), which the check has reported.
    """
    from surefit.stages.planning import load_run_eval_prompts

    prompts = load_run_eval_prompts(prepared)
    variants = variants or _variants_without_merged(out, prepared)
    if prompts is None or not prompts.nothing_to_score or prepared.resolved.config.evaluate.gate:
        return evaluate_and_show(out, prepared, variants)
    if prepared.resolved.config.data.holds_nothing_out:
        reason = "nothing is held out (data.eval is 0), and no other set has an answer to compare with"
    else:
        reason = "no held-out row has an answer to compare with; the loss on them was measured in training"
    out.say(f"left out: {reason}")
    return EXIT_OK


def _variants_without_merged(out: Output, prepared: CheckedRun) -> Sequence[str] | None:
    """Return the variants to score where the GPU does not hold the merged model; None for all, as where a gate needs
    them."""
    from surefit.facts.generation import merged_weights_too_large

    config, hardware = prepared.resolved.config, prepared.hardware
    if config.evaluate.gate or not merged_weights_too_large(config, prepared.model, hardware):
        return None
    out.paragraph(
        f"left out: the merged model, whose weights in {config.model.dtype} do not fit {hardware.name}; base and "
        "adapter are scored, quantized as in training"
    )
    return ("base", "adapter")


def _is_stage_finished(directory: RunDir, stage: str) -> bool:
    """Return whether the stage's last event is that it finished, and its output exists."""
    from surefit.stages.events import is_trained, latest_event

    event = latest_event(read_jsonl(directory.events), stage)
    has_output = is_trained(directory) if stage == "train" else directory.certificate.exists()
    return event is not None and event["event"] == "finished" and has_output
