"""CKP: saving checkpoints, and resuming from them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from surefit.facts.setup import Setup
from surefit.lint.rule import Finding, LintContext, rule

MANY = 5
"""Number of checkpoints that needs no limit."""
KEEP_ALL = {"trl", "llamafactory", "python"}
"""Tools that keep every checkpoint by default."""
TRANSFORMERS = {"trl", "llamafactory", "axolotl", "python"}
"""Tools whose checkpoints are written by transformers' Trainer."""


@rule("CKP001", "resume-and-overwrite", severity="warning")
def resume_and_overwrite(setup: Setup) -> Iterator[Finding]:
    """The run is to be resumed, and its directory to be overwritten.

    ## What it does
    Looks for both switches in another tool's config.

    ## Why it is bad
    They contradict each other. Scripts read them differently: some empty the directory, checkpoints included, some
    start over without looking for one, some resume after all.

    ## Example
    `resume_from_checkpoint: true` with `overwrite_output_dir: true`.

    ## Fix
    Take `overwrite_output_dir` out; transformers 5 no longer knows it.

    ## Evidence
    huggingface/transformers#9776 ("if `--overwrite_output_dir` is passed, the folder is destroyed"),
    hiyouga/LlamaFactory#721 (it is not resumed), huggingface/transformers#41323 (the switch is retired).
    """
    if setup.resume and setup.overwrite:
        yield Finding(
            field="overwrite",
            message=f"{setup.name('resume')} continues a run, and {setup.name('overwrite')} clears its directory",
            help=f"take {setup.name('overwrite')} out",
        )


@rule("CKP002", "no-limit-on-checkpoints", severity="warning")
def no_limit_on_checkpoints(setup: Setup) -> Iterator[Finding]:
    """Every checkpoint is kept, and there will be many.

    ## What it does
    If the config of a tool that keeps all checkpoints sets no limit, counts those of the whole run, and fires above
    five.

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
    """The run is to be resumed from checkpoints that hold no optimizer state.

    ## What it does
    Looks for `save_only_model` in a run that is set to resume, or in a batch job that is requeued.

    ## Why it is bad
    The optimizer, the schedule and the random state start over: the resumed run is a different run, with a jump in the
    loss where it was interrupted.

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
            message=f"{setup.name('save_only_model')} leaves the optimizer out of the checkpoints, and the run is to "
            f"be {'resumed' if setup.resume else 'requeued'} from them",
            help=f"switch {setup.name('save_only_model')} off, and lower save_total_limit if the disk is small",
        )


@rule("CKP004", "checkpoint-not-atomic", severity="info")
def checkpoint_not_atomic(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The run could resume from a checkpoint that was only half written.

    ## What it does
    Fires once if a tool built on transformers' Trainer is set to resume from its last checkpoint, or runs in a batch
    job that is requeued.

    ## Why it is bad
    The Trainer writes into the final directory, file by file. A kill during a save (the time limit, a full disk) leaves
    a directory that looks like the newest checkpoint, and the resumed run dies on it.

    ## Example
    `resume_from_checkpoint: true` in a job with a time limit.

    ## Fix
    Before resuming, delete a last checkpoint without `trainer_state.json`: it is written last. SureFit writes
    checkpoints under another name and renames them when they are whole.

    ## Evidence
    Measured with transformers 5.23: killed during a save, it resumes from the half-written checkpoint and stops.
    huggingface/transformers#35782, huggingface/transformers#35525.
    """
    requeued = bool(context.job and "requeue" in context.job.options)
    if setup.tool in TRANSFORMERS and (setup.resume or requeued):
        tool = "transformers" if setup.tool == "python" else setup.tool
        yield Finding(
            field="resume",
            message=f"{tool} does not write checkpoints atomically, and the last one is resumed even if it is "
            "half written",
            help="before resuming, delete a last checkpoint that has no trainer_state.json",
        )
