"""SCH and BAT: the arithmetic of steps, batches and learning rates."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.resolve import Resolved, warmup_steps
from surefit.config.schema import Config
from surefit.core.units import count_text
from surefit.facts.dataset import DatasetFacts
from surefit.facts.model import ModelFacts
from surefit.lint.rule import Finding, LintContext, rule

TINY = 20_000_000
LORA_RANGE = (1e-5, 5e-3)
FULL_MAXIMUM = 1e-4


@rule("SCH001", "warmup-never-ends", severity="error", needs=(Resolved,))
def warmup_never_ends(context: LintContext, resolved: Resolved) -> Iterator[Finding]:
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
    total, warmup = resolved.total_steps, resolved.config.train.warmup
    if total is None or (warmup < 1 and total == 1):
        return
    steps = warmup_steps(total, warmup)
    if steps >= total:
        yield Finding(
            field="train.warmup",
            message=f"the warmup takes {steps:,} steps and the run has {total:,}: "
            f"the learning rate never reaches {resolved.config.train.learning_rate:g}",
            help="write the warmup as a share of the run, warmup: 0.03",
        )


@rule("SCH002", "checkpoint-never-comes", severity="warning", needs=(Resolved,))
def checkpoint_never_comes(context: LintContext, resolved: Resolved) -> Iterator[Finding]:
    """Checkpoints and held-out losses are spaced wider than the run is long.

    ## What it does
    Compares `checkpoint.every` with the optimizer steps of the run.

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
    if total is not None and isinstance(every, int) and every > total:
        yield Finding(
            field="checkpoint.every",
            message=f"the first checkpoint and held-out loss would come at step {every:,} of a run of {total:,}",
            help="leave checkpoint.every at auto (a quarter of the run), or set it lower",
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


@rule("BAT001", "micro-batch-does-not-divide", severity="error", needs=(Config,))
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
