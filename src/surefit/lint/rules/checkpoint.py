"""CKP: saving checkpoints, and resuming from them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from surefit.facts.setup import Setup
from surefit.lint.rule import Finding, LintContext, rule

MANY = 5
"""Number of checkpoints that needs no limit."""
KEEP_ALL = {"trl", "llamafactory", "swift", "python"}
"""Tools that keep every checkpoint by default."""
TRANSFORMERS = {"trl", "llamafactory", "axolotl", "swift", "python"}
"""Tools whose checkpoints are written by transformers' Trainer."""


@rule("CKP001", "resume-and-overwrite", severity="warning")
def resume_and_overwrite(setup: Setup) -> Iterator[Finding]:
    """The config resumes the run and overwrites its directory.

    ## What it does
    Looks for both switches in another tool's config.

    ## Why it is bad
    They contradict each other. Scripts treat them differently: some delete the directory with its checkpoints, some
    start over without looking for a checkpoint, some resume.

    ## Example
    `resume_from_checkpoint: true` with `overwrite_output_dir: true`.

    ## Fix
    Remove `overwrite_output_dir`; transformers 5 no longer has it.

    ## Evidence
    huggingface/transformers#9776 ("if `--overwrite_output_dir` is passed, the folder is destroyed"),
    hiyouga/LlamaFactory#721 (the run does not resume), huggingface/transformers#41323 (the switch is removed).
    """
    if setup.resume and setup.overwrite:
        yield Finding(
            field="overwrite",
            message=f"{setup.name('resume')} resumes a run, but {setup.name('overwrite')} clears its directory",
            help=f"remove {setup.name('overwrite')}",
        )


@rule("CKP002", "no-limit-on-checkpoints", severity="warning")
def no_limit_on_checkpoints(setup: Setup) -> Iterator[Finding]:
    """Every checkpoint is kept, and the run writes many.

    ## What it does
    If the tool keeps all checkpoints and the config sets no limit, counts the checkpoints of the whole run, and fires
    above five.

    ## Why it is bad
    The disk fills hours into the run, in the middle of a save.

    ## Example
    `save_steps: 1000` in a run of 28,000 steps, without `save_total_limit`.

    ## Fix
    `save_total_limit: 2`.

    ## Evidence
    A published report on distilling Llama-3.1-8B lost its run at step 9,000, twice, to "No space left on device": nine
    checkpoints of 3 GB.
    """
    count = _checkpoints(setup)
    if setup.tool in KEEP_ALL and setup.save_total_limit is None and count > MANY:
        yield Finding(
            field="save_steps",
            message=f"all {count:,} checkpoints of the run are kept: no save_total_limit is set",
            help="write save_total_limit: 2",
        )


def _checkpoints(setup: Setup) -> int:
    """Return the number of checkpoints of the whole run; 0 if the config does not determine it."""
    total = setup.total_steps or setup.max_steps
    if setup.save_strategy == "epoch":
        return math.ceil(setup.epochs or 0) if setup.max_steps is None else 0
    if setup.save_strategy in (None, "steps") and total and setup.save_steps:
        return math.ceil(total / setup.save_steps)
    return 0


@rule("CKP003", "save-only-model-cannot-resume", severity="warning")
def save_only_model_cannot_resume(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The run resumes from checkpoints without optimizer state.

    ## What it does
    Looks for `save_only_model` in a run that is configured to resume, or in a batch job that is requeued.

    ## Why it is bad
    The optimizer, the schedule and the random state start over: the resumed run differs from an uninterrupted one, and
    its loss jumps at the interruption.

    ## Example
    `save_only_model: true` with `resume_from_checkpoint: true`.

    ## Fix
    Save everything and keep fewer checkpoints.

    ## Evidence
    https://huggingface.co/docs/transformers/main_classes/trainer: "when this is true, you won't be able to resume
    training from checkpoint".
    """
    requeued = bool(context.job and "requeue" in context.job.options)
    if setup.save_only_model and (setup.resume or requeued):
        yield Finding(
            field="save_only_model",
            message=f"{setup.name('save_only_model')} leaves the optimizer state out of the checkpoints, but the run "
            f"is {'resumed' if setup.resume else 'requeued'} from them",
            help=f"switch {setup.name('save_only_model')} off, and lower save_total_limit if the disk is small",
        )


@rule("CKP004", "checkpoint-not-atomic", severity="info")
def checkpoint_not_atomic(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The run could resume from a partially written checkpoint.

    ## What it does
    Fires once if a tool built on transformers' Trainer is configured to resume from its last checkpoint, or runs in a
    batch job that is requeued.

    ## Why it is bad
    The Trainer writes into the final directory, file by file. An interrupted save (the time limit, a full disk) leaves
    a directory that looks like the newest checkpoint, and the resumed run crashes on it.

    ## Example
    `resume_from_checkpoint: true` in a job with a time limit.

    ## Fix
    Before resuming, delete the last checkpoint if it has no `trainer_state.json`, which is written last. SureFit writes
    a checkpoint under a temporary name and renames it when it is complete.

    ## Evidence
    Measured with transformers 5.23: killed during a save, it resumes from the partially written checkpoint and stops.
    huggingface/transformers#35782, huggingface/transformers#35525.
    """
    requeued = bool(context.job and "requeue" in context.job.options)
    if setup.tool in TRANSFORMERS and (setup.resume or requeued):
        tool = "transformers" if setup.tool == "python" else setup.tool
        yield Finding(
            field="resume",
            message=f"{tool} does not write checkpoints atomically, so the run could resume "
            "from a partially written one",
            help="before resuming, delete the last checkpoint if it has no trainer_state.json",
        )
