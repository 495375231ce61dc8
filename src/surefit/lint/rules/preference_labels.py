"""PRF010 to PRF012: KTO, which learns from labelled answers: the weights of both kinds, and the baseline's batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from surefit.facts.audit import AuditFacts
from surefit.facts.setup import Setup
from surefit.lint.rule import Finding, LintContext, rule

BALANCED = 1.0, 4 / 3
"""Range of λ_D n_D / (λ_U n_U) that the paper recommends (equation 8)."""
FEW_ROWS = 4
"""Rows from which a KL baseline says something: the least that TRL's documentation recommends per step."""
OF_A_MICRO_BATCH = ("trl", "python", "axolotl", "llamafactory", "swift")
"""Tools whose KTO takes the baseline from a micro batch, of all devices together."""
WITHOUT_ONE = ("python", "axolotl", "swift")
"""Tools whose mismatched answers are those of the same micro batch, so that one row has none. TRL raises an error, and
its files are checked for it by a rule of their own (CFG004)."""


@rule("PRF010", "label-imbalance", severity="warning")
def label_imbalance(context: LintContext, setup: Setup, audit: AuditFacts) -> Iterator[Finding]:
    """The weights of KTO do not fit the numbers of desirable and undesirable answers.

    ## What it does
    Computes λ_D n_D / (λ_U n_U) from the weights and the numbers of both labels, in a check of a sample of the rows. It
    fires where the 95 % interval of that number lies outside of 1 to 4/3.

    ## Why it is bad
    The larger kind outweighs the other: with nine desirable answers to one undesirable one, the model learns to copy
    the former, and hardly what to avoid.

    ## Example
    900 answers with a thumb up and 100 with a thumb down, both weights 1.

    ## Fix
    Raise the weight of the smaller kind as the finding says: with 900 and 100, `undesirable_weight: 9`.

    ## Evidence
    Ethayarajh et al. 2024 (arXiv 2402.01306), equation 8: λ_D n_D / (λ_U n_U) in [1, 4/3]; TRL 1.16 warns with the
    same numbers (trainer/kto_trainer.py).
    """
    observation = audit.observations.get("label_undesirable")
    if setup.objective != "kto" or observation is None or observation.rows in (0, observation.of):
        return
    bad, good = observation.rows, observation.of - observation.rows
    weights = setup.desirable_weight or 1.0, setup.undesirable_weight or 1.0
    ratio = weights[0] * good / (weights[1] * bad)
    half = 1.96 * math.sqrt(1 / good + 1 / bad)  # of the logarithm of the ratio of two counts
    if ratio * math.exp(half) >= BALANCED[0] and ratio * math.exp(-half) <= BALANCED[1]:
        return
    attribute, least, most = "desirable_weight", weights[1] * bad / good, BALANCED[1] * weights[1] * bad / good
    if ratio > BALANCED[1]:
        attribute = "undesirable_weight"
        least, most = weights[0] * good / (BALANCED[1] * bad), weights[0] * good / bad
    name = setup.name(attribute) if setup.tool != "surefit" else f"objective.{attribute}"
    yield Finding(
        field=attribute,
        message=f"of {observation.of:,} labelled answers {good:,} are desirable and {bad:,} undesirable: at weights "
        f"{weights[0]:g} and {weights[1]:g} the desirable ones weigh {ratio:.2g} times as much as the others, and 1 to "
        "1.33 times is recommended",
        help=f"write {name}: {(least + most) / 2:.2g} ({least:.3g} to {most:.3g})",
    )


@rule("PRF011", "one-row-for-the-baseline", severity="error")
def one_row_for_the_baseline(setup: Setup) -> Iterator[Finding]:
    """KTO runs with a batch of one.

    ## What it does
    Looks for `global_batch_size: 1` in SureFit, and in TRL, Axolotl and ms-swift, which uses TRL, for a micro batch of
    one row per device.

    ## Why it is bad
    KTO compares each answer with what the model prefers on average. TRL pairs each prompt with the answer of another
    row of the same micro batch: with one row, that is its own answer, the baseline equals the reward, and the loss is
    constant. TRL ends with an error.

    ## Example
    `per_device_train_batch_size: 1` with `gradient_accumulation_steps: 16` in TRL.

    ## Fix
    TRL: at least 4 rows per device. SureFit: 16 or more in all; micro batches may have one row, because the baseline is
    the whole batch's.

    ## Evidence
    TRL 1.16, trainer/kto_trainer.py: "Actual (not effective) batch size must be > 1. KTO will not work properly because
    the KL term will be equivalent to the implied reward."
    """
    if setup.objective != "kto":
        return
    if setup.tool == "surefit" and setup.global_batch == 1:
        yield Finding(
            field="global_batch",
            message="kto compares each answer with an average over the batch, and a batch of one has none",
            help="write 16 or more",
        )
    elif setup.tool in WITHOUT_ONE and setup.micro_batch == 1:
        yield Finding(
            field="micro_batch",
            message="a micro batch of one row: KTO's mismatched answers are those of the same micro batch",
            help="write 4 or more rows per device, with fewer accumulation steps",
        )


@rule("PRF012", "few-rows-for-the-baseline", severity="warning")
def few_rows_for_the_baseline(setup: Setup) -> Iterator[Finding]:
    """The baseline of KTO is estimated from very few rows.

    ## What it does
    Counts the rows from which the baseline is estimated: in SureFit the global batch, in the other tools a micro batch
    of all devices together. It fires below 4.

    ## Why it is bad
    The baseline decides how far each answer's reward is from the middle of the sigmoid. From two or three rows it is
    mostly noise, whatever the accumulation steps are.

    ## Example
    `per_device_train_batch_size: 2` with `gradient_accumulation_steps: 8` on one GPU.

    ## Fix
    More rows per device and fewer accumulation steps. In SureFit micro batches do not matter.

    ## Evidence
    TRL's documentation of KTO: a per-step batch size of at least 4, and "even if your effective batch size is large, if
    your per-step batch size is poor, then the KL estimate in KTO will be poor".
    """
    if setup.objective != "kto":
        return
    if setup.tool == "surefit":
        rows, field = setup.global_batch, "global_batch"
    elif setup.tool in OF_A_MICRO_BATCH and setup.micro_batch is not None:
        rows, field = setup.micro_batch * (setup.world_size or 1), "micro_batch"
    else:
        return
    if rows is not None and 1 < rows < FEW_ROWS:
        yield Finding(
            field=field,
            message=f"KTO's baseline is estimated from {rows} rows"
            + ("" if setup.tool == "surefit" or setup.world_size else " per device"),
            help="write 16 or more" if setup.tool == "surefit" else "write 4 or more rows per device",
        )
