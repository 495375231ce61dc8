"""SCH and BAT: the arithmetic of steps, batches and learning rates."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.resolve import Resolved
from surefit.config.schema import Config
from surefit.core.units import count_text
from surefit.facts.dataset import DatasetFacts
from surefit.facts.model import ModelFacts
from surefit.facts.setup import Setup
from surefit.lint.rule import Finding, Fix, LintContext, rule

TINY = 20_000_000
LORA_RANGE = (1e-5, 5e-3)
FULL_MAXIMUM = 1e-4
SHORT_RUN = 50
"""Optimizer steps below which a run is a trial, and needs no checkpoint on the way."""


@rule("SCH001", "warmup-never-ends", severity="error", needs=(Setup,))
def warmup_never_ends(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The warmup is as long as the run, or longer.

    ## What it does
    Counts the optimizer steps of the run (rows, epochs, global batch, max_steps) and of the warmup.

    ## Why it is bad
    The learning rate is still rising when the run ends: it never reaches the value in the config, and the schedule that
    was chosen never begins.

    ## Example
    `warmup: 100` for 5,500 rows in batches of 64: the run has 86 steps.

    ## Fix
    Give the warmup as a share, `warmup: 0.03`, or train for more steps.

    ## Evidence
    A published report on summarising legal documents with Qwen3-4B trained 86 steps with `warmup_steps=100`.
    """
    total, steps = _total_steps(context, setup), setup.warmup_steps
    if total is None or steps is None or total == 1 or steps < total:
        return
    own = setup.tool == "surefit"
    peak = f"{setup.learning_rate:g}" if setup.learning_rate else "its peak"
    yield Finding(
        field="warmup_steps",
        message=f"the warmup takes {steps:,} steps and the run has {total:,}: the learning rate never reaches {peak}",
        help="write the warmup as a share of the run, warmup: 0.03" if own else "warm up over 3 % of the run",
        fix=Fix("train.warmup", 0.03) if own else None,
    )


def _total_steps(context: LintContext, setup: Setup) -> int | None:
    """Optimizer steps of the run, as far as anything says."""
    if setup.total_steps is not None or setup.tool == "surefit":
        return setup.total_steps
    return setup.max_steps or (context.resolved.total_steps if context.resolved else None)


@rule("SCH002", "checkpoint-never-comes", severity="warning", needs=(Resolved, Setup))
def checkpoint_never_comes(context: LintContext, resolved: Resolved, setup: Setup) -> Iterator[Finding]:
    """Checkpoints and held-out losses are spaced wider than the run is long.

    ## What it does
    Compares `checkpoint.every` with the optimizer steps of the run. Other tools set the two apart: SCH005 and SCH006.

    ## Why it is bad
    Until the last step nothing is saved and the held-out loss is never measured: a crash loses everything, and
    overfitting is not seen.

    ## Example
    `every: 200` in a run of 86 steps.

    ## Fix
    Leave `checkpoint.every` at auto (a quarter of the run), or set it below the number of steps.

    ## Evidence
    A published report on summarising legal documents evaluated every 200 steps of a run of 86: no evaluation ever ran,
    and nobody noticed.
    """
    total, every = resolved.total_steps, resolved.config.checkpoint.every
    if setup.tool == "surefit" and total is not None and isinstance(every, int) and every > total:
        yield Finding(
            field="checkpoint.every",
            message=f"the first checkpoint and held-out loss would come at step {every:,} of a run of {total:,}",
            help="leave checkpoint.every at auto (a quarter of the run), or set it lower",
            fix=Fix("checkpoint.every", "auto"),
        )


@rule(
    "SCH003",
    "learning-rate-high",
    severity="warning",
    needs=(
        Config,
        ModelFacts,
    ),
)
def learning_rate_high(context: LintContext, config: Config, model: ModelFacts) -> Iterator[Finding]:
    """The learning rate is above what pretrained models take.

    ## What it does
    Flags more than 5e-3 for LoRA and more than 1e-4 for full training. Models under 20 million parameters are exempt:
    the rate a model takes falls as it gets wider (Yang et al. 2022, arXiv 2203.03466), and small ones train well at
    rates that ruin a large one. So is a model whose size is not known.

    ## Why it is bad
    The first steps after warmup destroy what the model knew. The loss often still looks reasonable, because the model
    learns the training rows' form anew.

    ## Example
    `adapter.kind: full` with LoRA's customary `learning_rate: 2e-4`.

    ## Fix
    Start at 2e-4 for LoRA, at 1e-5 for full training.

    ## Evidence
    LoRA's best rate is about ten times that of full training (Biderman et al. 2024, arXiv 2405.09673; Schulman et al.,
    "LoRA Without Regret", 2025).
    """
    rate, lora = config.train.learning_rate, config.adapter.kind == "lora"
    limit = LORA_RANGE[1] if lora else FULL_MAXIMUM
    if model.parameters is not None and model.parameters >= TINY and rate > limit:
        yield Finding(
            field="train.learning_rate",
            message=f"learning_rate {rate:g} is high for {'LoRA on' if lora else 'training all of'} a model of "
            f"{count_text(model.parameters)} parameters: above {limit:g} what it knows is usually lost",
            help=f"start at {'2e-4' if lora else '1e-5'}",
        )


@rule(
    "SCH004",
    "learning-rate-low",
    severity="warning",
    needs=(
        Config,
        ModelFacts,
    ),
)
def learning_rate_low(context: LintContext, config: Config, model: ModelFacts) -> Iterator[Finding]:
    """The learning rate is so low that a LoRA adapter hardly moves.

    ## What it does
    Flags less than 1e-5 for LoRA. Models under 20 million parameters are exempt: their range is another one (SCH003).

    ## Why it is bad
    The factor B starts at zero and has to grow before the adapter does anything. At such a rate the run ends first; the
    merged model is the base model, and the evaluation says "no difference".

    ## Example
    `adapter.kind: lora` with full training's customary `learning_rate: 2e-6`.

    ## Fix
    Start at 2e-4.

    ## Evidence
    LoRA's best rate is about ten times that of full training (Biderman et al. 2024, arXiv 2405.09673; Schulman et al.,
    "LoRA Without Regret", 2025).
    """
    rate, limit = config.train.learning_rate, LORA_RANGE[0]
    big = model.parameters is not None and model.parameters >= TINY
    if big and config.adapter.kind == "lora" and rate < limit:
        yield Finding(
            field="train.learning_rate",
            message=f"learning_rate {rate:g} is below {limit:g}: at that rate a LoRA adapter hardly leaves zero",
            help="start at 2e-4",
        )


@rule("SCH005", "eval-never-fires", severity="warning", needs=(Setup,))
def eval_never_fires(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The held-out rows are not measured while the run lasts.

    ## What it does
    In another tool's config: compares the steps between two evaluations with the steps of the run, and looks for
    held-out rows beside an evaluation that is switched off. SureFit's own config: see SCH002.

    ## Why it is bad
    There is no held-out loss to stop by and none to choose a checkpoint by. Newer releases of transformers measure once
    after the last step, older ones not at all.

    ## Example
    `eval_steps: 200` in a run of 86 steps.

    ## Fix
    Evaluate some four to ten times per run.

    ## Evidence
    A published report on summarising legal documents evaluated every 200 steps of a run of 86: no evaluation ever ran,
    and nobody noticed.
    """
    total, every = _total_steps(context, setup), setup.eval_steps
    if setup.tool == "surefit":
        return
    if setup.eval_strategy == "no":
        if setup.eval_rows and not setup.best_model:
            yield Finding(
                field="eval_strategy",
                message="held-out rows are given, and the evaluation while training is switched off",
                help="measure them every few steps, or leave them out",
            )
    elif setup.eval_strategy != "epoch" and total and every and every > total:
        yield Finding(
            field="eval_steps",
            message=f"the first evaluation would come at step {every:,} of a run of {total:,}",
            help=f"write {max(1, total // 4)} or less",
        )


@rule("SCH006", "save-never-fires", severity="warning", needs=(Setup,))
def save_never_fires(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """No checkpoint is written before the run is over.

    ## What it does
    In another tool's config: compares the steps between two checkpoints with the steps of the run, where that has at
    least 50. SureFit's own config: see SCH002.

    ## Why it is bad
    A crash, a full disk or the cluster's time limit loses the whole run.

    ## Example
    `save_steps: 500`, the default of transformers, in a run of 86 steps.

    ## Fix
    Save some four times per run.

    ## Evidence
    The default of `save_steps` is 500 (https://huggingface.co/docs/transformers/main_classes/trainer), and a published
    report on summarising legal documents trained for 86 steps on four GPUs.
    """
    total, every = _total_steps(context, setup), setup.save_steps
    if setup.tool == "surefit" or setup.save_strategy not in (None, "steps"):
        return
    if total and every and total >= SHORT_RUN and every > total:
        yield Finding(
            field="save_steps",
            message=f"the first checkpoint would come at step {every:,} of a run of {total:,}",
            help=f"write {max(1, total // 4)} or less",
        )


@rule("SCH007", "best-model-out-of-step", severity="error", needs=(Setup,))
def best_model_out_of_step(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The best checkpoint is wanted, but checkpoints and evaluations do not coincide.

    ## What it does
    Where the best model is loaded at the end: checks that saving and evaluating follow the same strategy, and that
    every checkpoint falls on an evaluation.

    ## Why it is bad
    A checkpoint that was never measured cannot be the best: transformers stops at the start of the run with a
    `ValueError`.

    ## Example
    `load_best_model_at_end: true`, `eval_steps: 200`, `save_steps: 500`.

    ## Fix
    Make `save_steps` a multiple of `eval_steps`, under the same strategy.

    ## Evidence
    `TrainingArguments.__post_init__` of transformers 5.23: "requires the save and eval strategy to match" and "the
    saving steps to be a round multiple of the evaluation steps".
    """
    saves, evals = setup.save_strategy, setup.eval_strategy
    if not setup.best_model or saves == "best":
        return
    if saves and evals and saves != evals:
        yield Finding(
            field="best_model",
            message=f"the best checkpoint is to be loaded, and {setup.name('save_strategy')} is {saves} while "
            f"{setup.name('eval_strategy')} is {evals}",
            help=f"write {saves if saves != 'no' else 'steps'} for both",
        )
    elif (
        "epoch" not in (saves, evals) and setup.save_steps and setup.eval_steps and setup.save_steps % setup.eval_steps
    ):
        yield Finding(
            field="save_steps",
            message=f"a checkpoint every {setup.save_steps:,} steps does not fall on an evaluation every "
            f"{setup.eval_steps:,}, and the best checkpoint is to be loaded",
            help=f"save every {-(-setup.save_steps // setup.eval_steps) * setup.eval_steps:,} steps",
        )


@rule("SCH008", "two-warmups", severity="warning", needs=(Setup,))
def two_warmups(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The warmup is given twice, as steps and as a share.

    ## What it does
    Looks for a number of warmup steps beside a share of the run.

    ## Why it is bad
    One of the two has no effect: transformers takes the steps. Whoever changes the share later changes nothing.

    ## Example
    `warmup_steps: 100` with `warmup_ratio: 0.03`.

    ## Fix
    Keep one of them.

    ## Evidence
    https://huggingface.co/docs/transformers/v4.57.0/main_classes/trainer: `warmup_steps` overrides any effect of
    `warmup_ratio`.
    """
    if setup.warmup_steps and setup.warmup_share:
        yield Finding(
            field="warmup_share",
            message=f"{setup.name('warmup_share')} {setup.warmup_share:g} has no effect beside "
            f"{setup.name('warmup_steps')} {setup.warmup_steps:,}",
            help="take one of the two out",
        )


@rule("BAT001", "micro-batch-does-not-divide", severity="error", needs=(Config,), suppressible=False)
def micro_batch_does_not_divide(context: LintContext, config: Config) -> Iterator[Finding]:
    """The micro batch does not divide the global batch.

    ## What it does
    Checks that `global_batch_size` is a multiple of `per_device_train_batch_size`.

    ## Why it is bad
    The number of micro batches per optimizer step would not be whole. Tools that round it train with another batch size
    than the config says, and with another number of steps.

    ## Example
    `global_batch_size: 64` with `per_device_train_batch_size: 24`.

    ## Fix
    Choose a divisor, or leave `per_device_train_batch_size` at auto.

    ## Evidence
    A published report on LLM ranking on two GPUs did not divide its batch by the number of devices and trained with
    twice the batch it reported.
    """
    train = config.train
    micro, whole = train.per_device_train_batch_size, train.global_batch_size
    if isinstance(micro, int) and whole % micro:
        divisors = [n for n in range(1, min(whole, micro) + 1) if whole % n == 0]
        yield Finding(
            field="train.per_device_train_batch_size",
            message=f"a micro batch of {micro} does not divide the global batch of {whole}",
            help=f"write {divisors[-1]}, or leave it at auto",
            fix=Fix("train.per_device_train_batch_size", "auto"),
        )


@rule(
    "BAT002",
    "batch-larger-than-data",
    severity="warning",
    needs=(
        Config,
        DatasetFacts,
    ),
)
def batch_larger_than_data(context: LintContext, config: Config, dataset: DatasetFacts) -> Iterator[Finding]:
    """One optimizer step would take more rows than there are.

    ## What it does
    Compares `global_batch_size` with the number of training rows.

    ## Why it is bad
    Every epoch is a single step on all rows. With the usual one to three epochs the model hardly moves, and the
    gradient has no noise left that helps it generalise.

    ## Example
    `global_batch_size: 64` with 40 rows.

    ## Fix
    Lower `global_batch_size`, so that an epoch has at least some twenty steps, or raise `epochs`.

    ## Evidence
    Small hand-made data sets with the batch size of a large one; the loss curve has three points.
    """
    whole = config.train.global_batch_size
    if whole > dataset.rows > 0:
        yield Finding(
            field="train.global_batch_size",
            message=f"a batch of {whole} is more than the {dataset.rows} rows in {dataset.source}: "
            "an epoch is one optimizer step",
            help=f"write {max(1, dataset.rows // 20)} or less, or collect more rows",
        )


@rule("BAT003", "batch-arithmetic", severity="error", needs=(Setup,))
def batch_arithmetic(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The global batch is not what micro batch, accumulation and processes multiply to.

    ## What it does
    Multiplies them and compares with the global batch that the config states. Where one of them is not stated, checks
    that the others divide the global batch.

    ## Why it is bad
    DeepSpeed stops at the start of the run. Tools that do not check train with another batch than the config says, and
    so with another number of steps and another best learning rate.

    ## Example
    `train_batch_size: 64` with a micro batch of 4, accumulation 8 and one process: 32.

    ## Fix
    Change one of the numbers; with DeepSpeed under transformers write "auto" for all three.

    ## Evidence
    deepspeedai/DeepSpeed#6914 ("train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 8
    != 2 * 1 * 1"); a published report on LLM ranking on two GPUs trained with twice the batch it reported.
    """
    whole, micro, steps, world = setup.global_batch, setup.micro_batch, setup.accumulation, setup.world_size
    if not whole or not micro or setup.parallel == "dp":
        return
    name = setup.name("global_batch")
    if steps and world and micro * steps * world != whole:
        yield Finding(
            field="global_batch",
            message=f"{micro} per device × {steps} accumulated × {_processes(world)} is {micro * steps * world}, and "
            f"{name} says {whole}",
            help=_batch_help(whole, micro, steps, world),
        )
    elif context.config is None and not (steps and world) and whole % (micro * (steps or world or 1)):
        unit = micro * (steps or world or 1)
        of = f"{steps} accumulated" if steps else _processes(world or 1)
        yield Finding(
            field="global_batch",
            message=f"{name} {whole} cannot be made of {micro} per device × {of}: {unit} does not divide it",
            help=f"write a multiple of {unit}",
        )


def _processes(count: int) -> str:
    return f"{count:,} process{'' if count == 1 else 'es'}"


def _batch_help(whole: int, micro: int, steps: int, world: int) -> str:
    if whole % (micro * world) == 0:
        return f"accumulate {whole // (micro * world)} micro batches, or write {micro * steps * world}"
    return f"write {micro * steps * world}, or choose numbers whose product is {whole}"


@rule("BAT004", "batch-not-divided-by-gpus", severity="warning", needs=(Setup,))
def batch_not_divided_by_gpus(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """One process drives several GPUs, and each of them gets the whole micro batch.

    ## What it does
    Under torch.nn.DataParallel, counts the examples of a step: micro batch × GPUs × accumulation.

    ## Why it is bad
    transformers multiplies `per_device_train_batch_size` with the visible GPUs without asking, so a step sees two or
    four times the examples that the config seems to say. DataParallel also copies the model in every step and gathers
    all outputs on the first GPU, which runs out of memory first.

    ## Example
    `python train.py` on two T4s with a micro batch of 4 and accumulation 4: 32 examples per step, not 16.

    ## Fix
    Start one process per GPU (`accelerate launch --num_processes 2`) and divide the accumulation by their number.

    ## Evidence
    A published report on LLM ranking on two GPUs did not divide its batch by the number of GPUs.
    huggingface/transformers#4493: `train_batch_size` differs from the per-device size under `nn.DataParallel`.
    """
    gpus, micro = setup.gpus, setup.micro_batch
    if setup.parallel != "dp" or not gpus or gpus < 2:
        return
    seen = micro * gpus * (setup.accumulation or 1) if micro else None
    if seen is None or seen != setup.global_batch:
        meant = f", and {setup.name('global_batch')} says {setup.global_batch}" if setup.global_batch else ""
        each = f"each gets {micro} examples, a step sees {seen}{meant}" if micro else "each gets a whole micro batch"
        yield Finding(
            field="micro_batch" if micro else "gpus",
            message=f"one process on {gpus} GPUs: {each}",
            help=f"start {gpus} processes and divide the accumulation by {gpus}",
        )
