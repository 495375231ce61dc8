"""AUD090 to AUD092: findings of an audit in labelled answers, as kto reads them."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.facts.audit import AuditFacts
from surefit.lint.rule import Finding, rule
from surefit.lint.rules.audit import first_text, one_sided, rows_text

FEW_PAIRS = 625
"""Pairs of a desirable and an undesirable answer, 25 by 25, from which length is judged."""
TELLS = 0.7
"""AUC of length from which length tells the label."""


@rule("AUD090", "one-kind-of-label", severity="error")
def one_kind_of_label(audit: AuditFacts) -> Iterator[Finding]:
    """All labelled answers have the same label.

    ## What it does
    Counts the labels of the rows, in a check those of a sample.

    ## Why it is bad
    kto learns from the difference between desirable and undesirable answers: with one kind it only makes all answers
    more likely, or less. Training ends with an error.

    ## Example
    A log of answers that users marked with a thumb up, from which the others were filtered.

    ## Fix
    Add answers of the other kind; to learn from good answers alone, write `objective: sft`.

    ## Evidence
    Ethayarajh et al. 2024 (arXiv 2402.01306), equation 7: the loss has a term for each kind.
    """
    observation = audit.observations.get("label_undesirable")
    if observation and observation.of > 1 and observation.rows in (0, observation.of):
        kind, other = ("desirable", "undesirable") if observation.rows == 0 else ("undesirable", "desirable")
        yield Finding(
            field="data.train",
            message=f"all of {observation.of:,} labelled answers that were looked at are {kind}",
            help=f"add {other} answers" + ("; or write objective: sft" if kind == "desirable" else ""),
        )


@rule("AUD091", "contradictory-labels", severity="warning")
def contradictory_labels(audit: AuditFacts) -> Iterator[Finding]:
    """The same answer to the same prompt is labelled both as desirable and as undesirable.

    ## What it does
    Compares prompt and answer of all labelled answers, and counts the rows whose label is the opposite of an earlier
    row's.

    ## Why it is bad
    The two gradients point in opposite directions, and cancel out but for noise.

    ## Example
    Two users who judge the same answer, both written down.

    ## Fix
    Keep the majority's label, or neither row.

    ## Evidence
    Ethayarajh et al. 2024 (arXiv 2402.01306), equation 7: at equal weights the two terms of one answer have gradients
    of opposite sign and equal size.
    """
    observation = audit.seen("label_contradiction")
    if observation:
        yield Finding(
            field="data.train",
            message=f"{rows_text(observation)} have the answer of an earlier row with the other label"
            f"{first_text(observation)}",
            help="keep the majority's label, or neither row",
        )


@rule("AUD092", "length-tells-the-label", severity="warning")
def length_tells_the_label(audit: AuditFacts) -> Iterator[Finding]:
    """The length of an answer tells whether it is desirable.

    ## What it does
    Computes the area under the curve (AUC) of length alone: the probability that a desirable answer has more characters
    than an undesirable one. It fires above 0.7 or below 0.3, from 25 answers of each kind on.

    ## Why it is bad
    A model can satisfy the labels by its length alone: it learns to write longer answers (or shorter ones), and the
    held-out AUC looks good without anything else learned.

    ## Example
    Thumbs up for long answers of one model, thumbs down for short ones of another.

    ## Fix
    If length is not what you want to teach, remove rows until both kinds are about as long. Compare the length of the
    answers before and after.

    ## Evidence
    Park et al. 2024 (arXiv 2403.19159) and Singhal et al. 2023 (arXiv 2310.03716): much of what training on preferences
    gains on common data is length.
    """
    observation = audit.observations.get("label_longer")
    if observation and (side := one_sided(observation, FEW_PAIRS, TELLS)):
        word, share = side
        yield Finding(
            field="data.train",
            message=f"a desirable answer is {word} than an undesirable one with a probability of {share:.0%}: length "
            "alone tells the label",
            help="balance both kinds by length, unless length is what you want to teach",
            evidence=observation.detail,
        )
