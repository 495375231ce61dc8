"""BAT: the number of examples in an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator

from surefit.config.by_rows import SHORT_RUN, SMALLEST_BATCH, SMALLEST_LABELLED_BATCH, choose_global_batch_size
from surefit.config.schema import SureFitConfig
from surefit.core.units import plural
from surefit.facts.dataset import DatasetFacts
from surefit.facts.setup import Setup
from surefit.lint.rule import ConfigFix, Finding, LintContext, rule

FEWEST_PER_EPOCH = 10
"""An epoch should have at least this many optimizer steps."""


@rule("BAT001", "micro-batch-does-not-divide", severity="error", suppressible=False)
def micro_batch_does_not_divide(config: SureFitConfig) -> Iterator[Finding]:
    """The micro batch does not divide the global batch.

    ## What it does
    Checks that `global_batch_size` is a multiple of `per_device_train_batch_size`.

    ## Why it is bad
    The number of micro batches per optimizer step would not be an integer. Tools that round it train with a different
    batch size, and a different number of steps, than the config says.

    ## Example
    `global_batch_size: 64` with `per_device_train_batch_size: 24`.

    ## Fix
    Choose a divisor, or leave `per_device_train_batch_size` at auto.

    ## Evidence
    A published report on LLM ranking on two GPUs did not divide its batch by the number of devices and trained with
    twice the batch it reported.
    """
    train = config.train
    micro, global_batch = train.per_device_train_batch_size, train.global_batch_size
    if isinstance(micro, int) and isinstance(global_batch, int) and global_batch % micro:
        divisors = [n for n in range(1, min(global_batch, micro) + 1) if global_batch % n == 0]
        yield Finding(
            field="train.per_device_train_batch_size",
            message=f"a micro batch of {micro} does not divide the global batch of {global_batch}",
            help=f"write {divisors[-1]}, or leave it at auto",
            fix=ConfigFix("train.per_device_train_batch_size", "auto"),
        )


@rule(
    "BAT002",
    "batch-larger-than-data",
    severity="warning",
)
def batch_larger_than_data(context: LintContext, config: SureFitConfig, dataset: DatasetFacts) -> Iterator[Finding]:
    """The global batch is more than a tenth of the rows.

    ## What it does
    Compares `global_batch_size` with the number of rows in an epoch, including `data.mix`. A batch that holds not all
    rows is left alone in runs that `max_steps` ends, and in those of fewer than 50 steps, which SCH011 reports.

    ## Why it is bad
    An epoch has fewer than ten steps, in the extreme a single step on all rows. With the usual one to three epochs the
    model hardly changes, and the gradient lacks the noise that helps it generalize.

    ## Example
    `global_batch_size: 64` with 240 rows: four steps per epoch.

    ## Fix
    Set `global_batch_size` to auto (a fiftieth of the rows, from 4 to 64), or lower it.

    ## Evidence
    A common mistake with small hand-made data sets: the batch size is copied from a large one, and the loss curve has
    three points. OpenAI's fine-tuning guide sets the batch to about 0.2 % of the examples by default.
    """
    global_batch, rows = config.train.global_batch_size, dataset.epoch_rows
    smallest = SMALLEST_LABELLED_BATCH if config.objective.labelled else SMALLEST_BATCH
    if not rows or not isinstance(global_batch, int) or global_batch <= max(smallest, rows / FEWEST_PER_EPOCH):
        return
    steps = context.resolved.total_steps if context.resolved else None
    if global_batch <= rows and (config.train.max_steps is not None or steps is None or steps < SHORT_RUN):
        return  # a trial, or SCH011
    where = f"{dataset.source} and data.mix" if config.data.mix else dataset.source
    # Other tools have no auto.
    help_text = f"write {choose_global_batch_size(rows, smallest=smallest)}" + (
        ", or auto" if not context.is_foreign else ""
    )
    data_text = f"the {plural(rows, 'row')} in {where}"
    if global_batch > rows:
        message = f"the global batch of {global_batch} exceeds {data_text}: an epoch is one optimizer step"
    else:
        per_epoch = plural(math.ceil(rows / global_batch), "optimizer step")
        message = f"the global batch of {global_batch} is more than a tenth of {data_text}: an epoch has {per_epoch}"
    yield Finding(field="train.global_batch_size", message=message, help=help_text)


@rule("BAT003", "batch-arithmetic", severity="error")
def batch_arithmetic(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The global batch is not micro batch × accumulation × processes.

    ## What it does
    Multiplies the three and compares the product with the config's global batch. If one of them is not set, checks that
    the others divide the global batch.

    ## Why it is bad
    DeepSpeed stops at the start of the run. Tools that do not check train with a different batch than the config says,
    and so with a different number of steps and a different best learning rate.

    ## Example
    `train_batch_size: 64` with a micro batch of 4, accumulation 8 and one process: 32.

    ## Fix
    Change one of the numbers; with DeepSpeed in transformers write "auto" for all three.

    ## Evidence
    deepspeedai/DeepSpeed#6914 ("train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 8
    != 2 * 1 * 1"); a published report on LLM ranking on two GPUs trained with twice the batch it reported.
    """
    global_batch, micro, accumulation, world_size = (
        setup.global_batch,
        setup.micro_batch,
        setup.accumulation,
        setup.world_size,
    )
    if not global_batch or not micro or setup.parallel == "dp":
        return
    name = setup.name("global_batch")
    if accumulation and world_size and micro * accumulation * world_size != global_batch:
        yield Finding(
            field="global_batch",
            message=f"{micro} per device × {accumulation} accumulated × {_processes(world_size)} is "
            f"{micro * accumulation * world_size}, but {name} is {global_batch}",
            help=_batch_help(global_batch, micro, accumulation, world_size),
        )
    elif (
        context.config is None
        and not (accumulation and world_size)
        and global_batch % (micro * (accumulation or world_size or 1))
    ):
        unit = micro * (accumulation or world_size or 1)
        factor = f"{accumulation} accumulated" if accumulation else _processes(world_size or 1)
        yield Finding(
            field="global_batch",
            message=f"{name} {global_batch} cannot be made from {micro} per device × {factor}: {unit} does not divide "
            "it",
            help=f"write a multiple of {unit}",
        )


def _processes(count: int) -> str:
    return f"{count:,} process{'' if count == 1 else 'es'}"


def _batch_help(whole: int, micro: int, steps: int, world: int) -> str:
    if whole % (micro * world) == 0:
        return f"accumulate {whole // (micro * world)} micro batches, or write {micro * steps * world}"
    return f"write {micro * steps * world}, or choose numbers whose product is {whole}"


@rule("BAT004", "batch-not-divided-by-gpus", severity="warning")
def batch_not_divided_by_gpus(setup: Setup) -> Iterator[Finding]:
    """One process drives several GPUs, and each GPU gets a whole micro batch.

    ## What it does
    Under torch.nn.DataParallel, counts the examples of a step: micro batch × GPUs × accumulation.

    ## Why it is bad
    transformers multiplies `per_device_train_batch_size` by the number of visible GPUs, so a step has two or four times
    the examples that the config suggests. DataParallel also copies the model in every step and gathers all outputs on
    the first GPU, which runs out of memory first.

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
    examples = micro * gpus * (setup.accumulation or 1) if micro else None
    if examples is None or examples != setup.global_batch:
        stated_batch = f", but {setup.name('global_batch')} is {setup.global_batch}" if setup.global_batch else ""
        per_gpu = (
            f"each gets {micro} examples, a step has {examples}{stated_batch}"
            if micro
            else "each gets a whole micro batch"
        )
        yield Finding(
            field="micro_batch" if micro else "gpus",
            message=f"one process on {gpus} GPUs: {per_gpu}",
            help=f"start {gpus} processes and divide the accumulation by {gpus}",
        )


@rule("BAT005", "device-batch-times-gpus", severity="warning")
def device_batch_times_gpus(setup: Setup) -> Iterator[Finding]:
    """The script multiplies the per-device batch by the number of devices.

    ## What it does
    Looks, in a Python script, for `torch.cuda.device_count()` as a factor of `per_device_train_batch_size`.

    ## Why it is bad
    The Trainer multiplies by the number of devices again. Four GPUs process sixteen times the examples of one, not four
    times: the memory per GPU grows with the number of GPUs, and the tuned learning rate no longer fits.

    ## Example
    `per_device_train_batch_size=4 * torch.cuda.device_count()`.

    ## Fix
    Write the batch of one device. To keep the global batch the same on any number of devices, divide
    `gradient_accumulation_steps` by it.

    ## Evidence
    A published report on LLM ranking on two GPUs scaled its micro batch "with GPUs", and reported half the actual
    batch.
    """
    if setup.micro_batch_times_gpus:
        yield Finding(
            field="micro_batch_times_gpus",
            message=f"{setup.name('micro_batch_times_gpus')} is multiplied by the number of GPUs, but the Trainer "
            "multiplies by it again",
            help="write the batch of one device, and divide the accumulation by the number of devices",
        )
