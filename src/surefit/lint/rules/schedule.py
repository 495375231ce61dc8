"""SCH: the arithmetic of steps and learning rates."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.by_objective import PAIR_EPOCHS
from surefit.config.by_rows import (
    EPOCHS,
    MOST_EPOCHS,
    SHORT_RUN,
    SMALLEST_BATCH,
    SMALLEST_LABELLED_BATCH,
    choose_epochs,
    choose_global_batch_size,
)
from surefit.config.resolve import ResolvedConfig, count_due_steps, epoch_rows, optimizer_steps, warmup_steps
from surefit.config.schema import SureFitConfig
from surefit.core.units import count_text, plural
from surefit.facts.dataset import DatasetFacts
from surefit.facts.families import size_in_name
from surefit.facts.model import ModelFacts
from surefit.facts.setup import Setup
from surefit.lint.rule import ConfigFix, Finding, LintContext, rule

TINY = 20_000_000
ADAPTERS = ("lora", "dora")
LORA_RANGE = (1e-5, 5e-3)
FULL_MAXIMUM = 1e-4
PREFERENCES = ("dpo", "kto", "simpo", "orpo")
"""Objectives whose learning rates PRF001 knows."""


@rule("SCH001", "warmup-never-ends", severity="error")
def warmup_never_ends(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The warmup is as long as the run, or longer.

    ## What it does
    Counts the optimizer steps of the run (rows, epochs, global batch, max_steps) and of the warmup.

    ## Why it is bad
    The learning rate is still rising when the run ends: it never reaches the configured value, and the decay never
    begins.

    ## Example
    `warmup_steps: 100` for 5,500 rows in batches of 64: the run has 86 steps.

    ## Fix
    Set the warmup as a share, `warmup_steps: 0.03`, or train for more steps.

    ## Evidence
    A published report on summarizing legal documents with Qwen3-4B trained 86 steps with `warmup_steps=100`.
    """
    total, steps = _total_steps(context, setup), setup.warmup_steps
    if total is None or steps is None or total == 1 or steps < total:
        return
    is_surefit = setup.tool == "surefit"
    peak = f"{setup.learning_rate:g}" if setup.learning_rate else "its peak"
    yield Finding(
        field="warmup_steps",
        message=f"the warmup has {steps:,} steps, but the run has {_count(setup, total)}: the learning rate never "
        f"reaches {peak}",
        help="set the warmup as a share of the run, warmup_steps: 0.03"
        if is_surefit
        else "warm up over 3 % of the run",
        fix=ConfigFix("train.warmup_steps", 0.03) if is_surefit else None,
    )


def _total_steps(context: LintContext, setup: Setup) -> int | None:
    """Return the run's optimizer steps; None if they are not known."""
    if setup.total_steps is not None or setup.tool == "surefit":
        return setup.total_steps
    return setup.max_steps or (context.resolved.total_steps if context.resolved else None)


def _count(setup: Setup, total: int) -> str:
    return f"at most {total:,}" if setup.steps_at_most else f"{total:,}"


@rule("SCH002", "checkpoint-never-comes", severity="warning")
def checkpoint_never_comes(resolved: ResolvedConfig, setup: Setup) -> Iterator[Finding]:
    """The run ends before the first checkpoint and held-out loss.

    ## What it does
    Compares `checkpoint.save_steps` with the optimizer steps of the run. Other tools configure the two separately: see
    SCH005 and SCH006.

    ## Why it is bad
    Nothing is saved and no held-out loss is measured until the last step: a crash loses everything, and overfitting
    goes unnoticed.

    ## Example
    `save_steps: 200` in a run of 86 steps.

    ## Fix
    Set `checkpoint.save_steps` to auto (a quarter of the run), or to less than the number of steps.

    ## Evidence
    A published report on summarizing legal documents evaluated every 200 steps of a run of 86: no evaluation ever ran,
    which went unnoticed.
    """
    total, save_steps = resolved.total_steps, resolved.config.checkpoint.save_steps
    if setup.tool == "surefit" and total is not None and isinstance(save_steps, int) and save_steps > total:
        yield Finding(
            field="checkpoint.save_steps",
            message=f"the first checkpoint and held-out loss would come at step {save_steps:,} of a run of {total:,}",
            help="set checkpoint.save_steps to auto (a quarter of the run), or lower it",
            fix=ConfigFix("checkpoint.save_steps", "auto"),
        )


@rule(
    "SCH003",
    "learning-rate-high",
    severity="warning",
)
def learning_rate_high(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The learning rate is higher than pretrained models tolerate.

    ## What it does
    Flags more than 5e-3 for LoRA and more than 1e-4 for full training. Models under 20 million parameters are exempt:
    the rate that a model tolerates decreases with its width (Yang et al. 2022, arXiv 2203.03466), and small models
    train well at rates that ruin a large one. Models whose size is in neither their files nor their name (8B) are
    exempt too. For DPO, IPO, KTO, SimPO and ORPO see PRF001.

    ## Why it is bad
    The first steps after warmup destroy what the model knew. The loss often still looks reasonable, because the model
    quickly learns the format of the training rows.

    ## Example
    `train.method: full` with `learning_rate: 2e-4`, which is usual for LoRA.

    ## Fix
    Start at 2e-4 for LoRA, at 1e-5 for full training.

    ## Evidence
    LoRA's best rate is about ten times that of full training (Biderman et al. 2024, arXiv 2405.09673; Schulman et al.,
    "LoRA Without Regret", 2025).
    """
    rate, is_full, model = setup.learning_rate, setup.adapter == "full", context.model
    limit = FULL_MAXIMUM if is_full else LORA_RANGE[1]
    parameters = (model.parameters if model else None) or size_in_name(setup.base_model or "")
    if setup.objective in PREFERENCES:
        return
    if parameters is not None and parameters >= TINY and rate is not None and rate > limit:
        method = "training all of" if is_full else "LoRA on" if setup.adapter in ADAPTERS else "fine-tuning"
        yield Finding(
            field="learning_rate",
            message=f"learning_rate {rate:g} is high for {method} a model of "
            f"{count_text(parameters)} parameters: above {limit:g} what it knows is usually lost",
            help="start at the default of the trainer: those for preferences and rewards are lower than for answers"
            if setup.preferences
            else f"start at {'1e-5' if is_full else '2e-4'}",
        )


@rule(
    "SCH004",
    "learning-rate-low",
    severity="warning",
)
def learning_rate_low(setup: Setup, model: ModelFacts) -> Iterator[Finding]:
    """The learning rate is so low that a LoRA adapter hardly changes.

    ## What it does
    Flags less than 1e-5 for LoRA. Models under 20 million parameters are exempt: their range differs (SCH003). So are
    runs that learn from preferences or rewards (DPO, KTO, GRPO …), where such rates are usual.

    ## Why it is bad
    The factor B starts at zero and has to grow before the adapter has an effect. At such a rate the run ends first: the
    merged model is practically the base model, and the evaluation finds no difference.

    ## Example
    `train.method: lora` with `learning_rate: 2e-6`, which is usual for full training.

    ## Fix
    Start at 2e-4.

    ## Evidence
    LoRA's best rate is about ten times that of full training (Biderman et al. 2024, arXiv 2405.09673; Schulman et al.,
    "LoRA Without Regret", 2025).
    """
    rate, limit = setup.learning_rate, LORA_RANGE[0]
    is_large = model.parameters is not None and model.parameters >= TINY
    if is_large and not setup.preferences and setup.adapter in ADAPTERS and rate is not None and rate < limit:
        yield Finding(
            field="learning_rate",
            message=f"learning_rate {rate:g} is below {limit:g}: at that rate a LoRA adapter hardly leaves zero",
            help="start at 2e-4",
        )


@rule("SCH005", "eval-never-fires", severity="warning")
def eval_never_fires(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The held-out rows are never evaluated during the run.

    ## What it does
    In another tool's config, compares the evaluation interval with the steps of the run, and looks for held-out rows
    whose evaluation is switched off. For SureFit's own config, see SCH002.

    ## Why it is bad
    Without a held-out loss there is no early stopping and no best checkpoint. Newer releases of transformers evaluate
    once after the last step, older ones not at all.

    ## Example
    `eval_steps: 200` in a run of 86 steps.

    ## Fix
    Evaluate four to ten times per run.

    ## Evidence
    A published report on summarizing legal documents evaluated every 200 steps of a run of 86: no evaluation ever ran,
    which went unnoticed.
    """
    total, eval_steps = _total_steps(context, setup), setup.eval_steps
    if setup.tool == "surefit":
        return
    if setup.eval_strategy == "no":
        if setup.eval_rows and not setup.best_model:
            yield Finding(
                field="eval_strategy",
                message="the config has held-out rows, but the evaluation during training is switched off",
                help="evaluate them every few steps, or remove them",
            )
    elif setup.eval_strategy != "epoch" and total and eval_steps and eval_steps > total:
        yield Finding(
            field="eval_steps",
            message=f"the first evaluation would come at step {eval_steps:,} of a run of {_count(setup, total)}",
            help=f"write {max(1, total // 4)} or less",
        )


@rule("SCH006", "save-never-fires", severity="warning")
def save_never_fires(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """No checkpoint is written before the run is over.

    ## What it does
    In another tool's config, compares the checkpoint interval with the steps of the run, if the run has at least 50.
    For SureFit's own config, see SCH002.

    ## Why it is bad
    A crash, a full disk or the cluster's time limit loses the whole run.

    ## Example
    `save_steps: 500`, the default of transformers, in a run of 86 steps.

    ## Fix
    Save about four times per run.

    ## Evidence
    The default of `save_steps` is 500 (https://huggingface.co/docs/transformers/main_classes/trainer), and a published
    report on summarizing legal documents trained for 86 steps on four GPUs.
    """
    total, save_steps = _total_steps(context, setup), setup.save_steps
    if setup.tool == "surefit" or setup.save_strategy not in (None, "steps"):
        return
    if total and save_steps and total >= SHORT_RUN and save_steps > total:
        yield Finding(
            field="save_steps",
            message=f"the first checkpoint would come at step {save_steps:,} of a run of {_count(setup, total)}",
            help=f"write {max(1, total // 4)} or less",
        )


@rule("SCH007", "best-model-out-of-step", severity="error")
def best_model_out_of_step(setup: Setup) -> Iterator[Finding]:
    """The best checkpoint should be loaded, but checkpoints and evaluations do not coincide.

    ## What it does
    If the best model is loaded at the end, checks that saving and evaluating have the same strategy, and that every
    checkpoint coincides with an evaluation.

    ## Why it is bad
    A checkpoint without an evaluation cannot be the best: transformers raises a `ValueError` at the start of the run.

    ## Example
    `load_best_model_at_end: true`, `eval_steps: 200`, `save_steps: 500`.

    ## Fix
    Make `save_steps` a multiple of `eval_steps`, with the same strategy.

    ## Evidence
    `TrainingArguments.__post_init__` of transformers 5.23: "requires the save and eval strategy to match" and "the
    saving steps to be a round multiple of the evaluation steps".
    """
    save_strategy, eval_strategy = setup.save_strategy, setup.eval_strategy
    if not setup.best_model or save_strategy == "best":
        return
    if save_strategy and eval_strategy and save_strategy != eval_strategy:
        yield Finding(
            field="best_model",
            message=f"the best checkpoint should be loaded, but {setup.name('save_strategy')} is {save_strategy} and "
            f"{setup.name('eval_strategy')} is {eval_strategy}",
            help=f"write {save_strategy if save_strategy != 'no' else 'steps'} for both",
        )
    elif (
        "epoch" not in (save_strategy, eval_strategy)
        and setup.save_steps
        and setup.eval_steps
        and setup.save_steps % setup.eval_steps
    ):
        yield Finding(
            field="save_steps",
            message=f"a checkpoint every {setup.save_steps:,} steps does not coincide with an evaluation every "
            f"{setup.eval_steps:,}, but the best checkpoint should be loaded",
            help=f"save every {-(-setup.save_steps // setup.eval_steps) * setup.eval_steps:,} steps",
        )


@rule("SCH008", "two-warmups", severity="warning")
def two_warmups(setup: Setup) -> Iterator[Finding]:
    """The warmup is set twice, as steps and as a share.

    ## What it does
    Looks for warmup steps and a warmup share in the same config.

    ## Why it is bad
    One of the two has no effect: transformers uses the steps, so changing the share changes nothing.

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
            message=f"{setup.name('warmup_share')} {setup.warmup_share:g} has no effect: the run uses "
            f"{setup.name('warmup_steps')} {setup.warmup_steps:,}",
            help="remove one of the two",
        )


@rule("SCH009", "patience-never-runs-out", severity="warning")
def patience_never_runs_out(config: SureFitConfig, resolved: ResolvedConfig, setup: Setup) -> Iterator[Finding]:
    """The run has too few measurements for early stopping to take effect.

    ## What it does
    Counts the measurements of the run: one per `checkpoint.save_steps` steps, for the held-out loss also one per
    `train.eval_steps` steps, and one at the end. The first sets the best value; then `early_stopping_patience`
    measurements without an improvement have to follow before the last.

    ## Why it is bad
    The run always trains to its end, although the config says otherwise.

    ## Example
    `early_stopping_patience: 3` with `save_steps: auto`, a quarter of the run, so there are four measurements.

    ## Fix
    Lower `checkpoint.save_steps`, or the patience; for the held-out loss, set `train.eval_steps`.

    ## Evidence
    A published report on summarizing legal documents evaluated every 200 steps of a run of 86 steps, which went
    unnoticed.
    """
    patience, total, save_steps = (
        config.train.early_stopping_patience,
        resolved.total_steps,
        resolved.config.checkpoint.save_steps,
    )
    if setup.tool != "surefit" or patience is None or total is None or not isinstance(save_steps, int):
        return
    if config.data.holds_nothing_out:
        return  # EVL032 reports that nothing is measured
    by_loss = config.checkpoint.metric_for_best_model in (None, *config.objective.always_measured)
    eval_steps = config.train.eval_steps if by_loss else None
    measurements = count_due_steps(total, save_steps, eval_steps)
    if patience + 1 >= measurements:
        interval, field = (
            max(1, (total - 1) // (patience + 1)),
            "train.eval_steps" if by_loss else "checkpoint.save_steps",
        )
        yield Finding(
            field="train.early_stopping_patience",
            message=f"a patience of {patience} needs {patience + 1} measurements before the last, but the run has "
            f"{measurements}, one every {min(save_steps, eval_steps or save_steps):,} of {total:,} steps",
            help=f"write {field}: {interval} or less" if total > patience + 1 else "remove it",
        )


@rule("SCH010", "no-stable-phase", severity="warning")
def no_stable_phase(config: SureFitConfig, resolved: ResolvedConfig) -> Iterator[Finding]:
    """With warmup_stable_decay, warmup and decay leave no stable phase.

    ## What it does
    Counts the steps of the warmup, of the decay and of the run.

    ## Why it is bad
    Without the stable phase the schedule is a triangle: the rate is at its peak for one step. The decay is shortened to
    the steps after the warmup, so it differs from the config. (For a warmup as long as the run, see SCH001.)

    ## Example
    `lr_scheduler_type: warmup_stable_decay` with `decay_steps: 500` in a run of 300 steps.

    ## Fix
    Lower `train.decay_steps`: a tenth to a fifth of the run is usual.

    ## Evidence
    Hu et al. 2024 (MiniCPM, arXiv 2404.06395), who proposed it, decay over the last tenth of the steps.
    """
    total, train = resolved.total_steps, config.train
    if train.lr_scheduler_type != "warmup_stable_decay" or total is None:
        return
    rising, falling = warmup_steps(total, train.warmup_steps), warmup_steps(total, train.decay_steps)
    if rising < total <= rising + falling:
        yield Finding(
            field="train.decay_steps",
            message=f"{rising:,} steps of warmup and {falling:,} of decay leave none of {total:,} at the peak rate",
            help="write decay_steps: 0.2, or less",
        )


@rule("SCH011", "few-steps", severity="warning")
def few_steps(context: LintContext, setup: Setup, dataset: DatasetFacts) -> Iterator[Finding]:
    """The run has fewer than 50 optimizer steps.

    ## What it does
    Counts the optimizer steps of the run (rows, epochs, global batch). Runs with `max_steps` are left alone: they are
    meant to be short.

    ## Why it is bad
    An adapter begins at zero and moves by about the learning rate per step: after a few steps the model answers as
    before, and the loss curve does not show it.

    ## Example
    240 rows with one epoch in batches of 64: four steps.

    ## Fix
    Set `num_train_epochs` and `global_batch_size` to auto, which choose both by the number of rows, or write smaller
    batches and more epochs.

    ## Evidence
    OpenAI's "Data preparation and analysis for chat model fine-tuning" (cookbook.openai.com, 2023) raises the epochs
    until small sets are seen 100 times in batches of one. 240 rows with all defaults trained four steps and passed a
    check without this rule.
    """
    total, rows = _total_steps(context, setup), dataset.epoch_rows
    if total is None or total >= SHORT_RUN or setup.max_steps is not None or not rows:
        return
    if context.config is not None and (divided := dataset.divided) is not None:
        rows = max(1, epoch_rows(context.config, divided, rows - divided) or 0)
    labelled, pairs = setup.objective == "kto", setup.objective is not None
    batch = choose_global_batch_size(rows, smallest=SMALLEST_LABELLED_BATCH if labelled else SMALLEST_BATCH)
    epochs = PAIR_EPOCHS[0] if pairs else choose_epochs(rows, batch)
    steps = optimizer_steps(rows, epochs, batch, None)
    if steps <= total:
        what = "answers" if labelled else "pairs"
        advice = f"collect more {f'{what}: they are learned in one pass' if pairs else 'rows'}"
    elif pairs:
        advice = f"write {context.name('global_batch')}: {batch} ({steps:,} steps)"
    else:
        advice = f"for {plural(rows, 'row')} write {context.name('epochs')}: {epochs} "
        if setup.tool == "surefit":
            advice += f"and {context.name('global_batch')}: {batch} ({steps:,} steps), or auto for both"
        else:
            advice += f"with {batch} examples per step ({steps:,} steps)"
    yield Finding(
        field="epochs",
        message=f"the run has {_count(setup, total)} optimizer step{'' if total == 1 else 's'}: too few to learn much",
        help=advice,
    )


@rule("SCH012", "many-epochs", severity="warning")
def many_epochs(context: LintContext, setup: Setup, dataset: DatasetFacts) -> Iterator[Finding]:
    """Every row is seen more than ten times.

    ## What it does
    Counts the passes over the rows: `num_train_epochs`, or fewer where `max_steps` ends the run. Models under 20
    million parameters, which learn a task from scratch, and runs with early stopping are exempt.

    ## Why it is bad
    The model learns the rows by heart: the training loss goes to zero, and answers to other prompts get worse.

    ## Example
    `num_train_epochs: 50` with 300 rows.

    ## Fix
    Train for three to five epochs (auto chooses by the rows), or set `early_stopping_patience`.

    ## Evidence
    Muennighoff et al. 2023 (arXiv 2305.16264): repeated data is worth less with every pass, and almost nothing after
    some sixteen. OpenAI's rule for fine-tuning stops raising the epochs of small sets at 25.
    """
    epochs, rows, batch = setup.epochs, dataset.epoch_rows, setup.global_batch
    if epochs is None or not rows or (context.config and context.config.train.early_stopping_patience):
        return
    if setup.max_steps is not None:
        if batch is None:
            return
        epochs = min(epochs, setup.max_steps * batch / rows)
    parameters = (context.model.parameters if context.model else None) or size_in_name(setup.base_model or "")
    if epochs > MOST_EPOCHS and (parameters is None or parameters >= TINY):
        yield Finding(
            field="epochs",
            message=f"every row is seen {epochs:,.0f} times: beyond ten passes a model learns its rows by heart",
            help=f"train for {EPOCHS} to {EPOCHS + 2} epochs"
            + (", or set train.early_stopping_patience" if setup.tool == "surefit" else ""),
        )
