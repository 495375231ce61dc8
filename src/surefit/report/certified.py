"""The certificate in words: the question of each check, and the overall statement about the merged model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefit.report.shapes import CertificateCheck, CertificateRecord
from surefit.report.text import format_value, percent, readable_metric

MAX_CHECKS = 40
IDENTITY = "Adapter and base"
WEIGHTS = "Merged weights"
ANSWERS = "Predictions of the merged model"
OTHERS = "Other checks"
QUESTIONS: dict[str, tuple[str, str]] = {
    "base_identity": (IDENTITY, "Is it the base that the adapter was trained on?"),
    "base_recorded": (IDENTITY, "Does the adapter record its base?"),
    "adapter_scaling": (IDENTITY, "Is the adapter's scale the configured one?"),
    "adapter_complete": (IDENTITY, "Does every target layer have finite, trained factors?"),
    "adapter_as_trained": (IDENTITY, "Does the adapter's file match the trained factors in memory?"),
    "weights_as_trained": (IDENTITY, "Do the weights on disk match the trained weights in memory?"),
    "loads_from_disk": (WEIGHTS, "Can the files be read back?"),
    "weights_off_disk": (WEIGHTS, "Do the files match the merged weights bit for bit?"),
    "weights_off_base": (WEIGHTS, "Are all other weights unchanged from the base?"),
    "weights_not_finite": (WEIGHTS, "Is every weight finite?"),
    "merge_rounding": (WEIGHTS, "Is each weight as precise as its dtype allows?"),
    "logit_error_mean": (ANSWERS, "Is the mean logit error within rounding?"),
    "logit_error_worst": (ANSWERS, "Is the largest logit error within rounding?"),
    "logit_error_max": (ANSWERS, "Is the largest logit error within rounding?"),
    "logits_not_finite": (ANSWERS, "Are all logits finite?"),
    "kl_mean": (ANSWERS, "Are the next-token probabilities the same?"),
    "top1_agreement": (ANSWERS, "Does it predict the same next token?"),
    "effect_kept": (ANSWERS, "Does the trained update survive rounding?"),
    "trained_differs_from_base": (ANSWERS, "Does it differ from the base?"),
}
WHERE = {"reloaded_": "read back from disk", "in_memory_": "before it was written", "on_disk_": "read back from disk"}


@dataclass(frozen=True)
class CheckQuestion:
    """A check as a reader's question; `where` says which copy of the model was checked."""

    question: str
    where: str
    check: CertificateCheck


@dataclass(frozen=True)
class CheckGroup:
    """Checks that answer one larger question."""

    title: str
    asked: list[CheckQuestion]

    @property
    def failed(self) -> int:
        return sum(not asked.check.passed for asked in self.asked)


def group_checks(certificate: CertificateRecord) -> list[CheckGroup]:
    """Group the checks by topic, failed ones first."""
    groups: dict[str, list[CheckQuestion]] = {IDENTITY: [], WEIGHTS: [], ANSWERS: [], OTHERS: []}
    for check in certificate.checks[:MAX_CHECKS]:
        title, question = _asked(check)
        groups[title].append(question)
    return [
        CheckGroup(title, sorted(question, key=lambda entry: entry.check.passed))
        for title, question in groups.items()
        if question
    ]


def _asked(check: CertificateCheck) -> tuple[str, CheckQuestion]:
    prefix = next((prefix for prefix in WHERE if check.name.startswith(prefix)), "")
    title, question = QUESTIONS.get(check.name.removeprefix(prefix), (OTHERS, readable_metric(check.name)))
    return title, CheckQuestion(question, WHERE.get(prefix, ""), check)


def describe_certificate(certificate: CertificateRecord) -> list[str]:
    """Summarize the certificate for readers who are not engineers."""
    failed = [check for check in certificate.checks if not check.passed]
    if not certificate.passed:
        reasons = "; ".join(f"{_asked(check)[1].question} No: {check.why.rstrip('.')}" for check in failed[:3])
        return [f"The certificate failed. {reasons or certificate.reason}.", *_into(certificate)]
    return [*_same_answers(certificate), *_into(certificate)]


def _same_answers(certificate: CertificateRecord) -> list[str]:
    agreement = _of_disk(certificate.checks, "top1_agreement")
    worst, largest = _of_disk(certificate.checks, "logit_error_worst"), _of_disk(certificate.checks, "logit_error_max")
    sentences = []
    if agreement is not None and isinstance(agreement.value, float | int):
        where = f" at {certificate.positions:,} positions" if certificate.positions else ""
        rows = f" in {certificate.prompts:,} examples" if certificate.prompts else ""
        sentences.append(
            f"Reloaded from disk, the model predicts the same next token as base and adapter together in "
            f"{percent(float(agreement.value))} of cases{where}{rows}."
        )
    if worst is not None:
        sentences.append(
            f"Its largest error at a position is {format_value(worst.value)} times the rounding error; "
            f"{format_value(worst.threshold)} times is allowed."
        )
    elif largest is not None:
        sentences.append(
            f"The largest logit difference is {format_value(largest.value)}; "
            f"rounding allows {format_value(largest.threshold)}."
        )
    return sentences


def _of_disk(checks: Sequence[CertificateCheck], name: str) -> CertificateCheck | None:
    return next((check for check in checks if check.name in (f"reloaded_{name}", f"on_disk_{name}")), None)


def _into(certificate: CertificateRecord) -> list[str]:
    """Describe the weights that the adapter was merged into, if they are not the plain base."""
    sentences = []
    if certificate.quantization != "none":
        sentences.append(
            f"The adapter was trained on a base in {certificate.quantization} and merged into the "
            f"{certificate.into} weights."
        )
    if certificate.base_recorded is False:
        sentences.append("The adapter does not record its base: that this is the right base is an assumption.")
    return sentences
