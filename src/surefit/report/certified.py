"""The certificate in words: the question of each check, and the overall statement about the merged model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefit.report.shapes import CertificateCheck, CertificateRecord
from surefit.report.text import format_value, percent, readable_metric

MAX_CHECKS = 40
IDENTITY = "Is it the right adapter, on the right base?"
WEIGHTS = "Are the weights what they should be?"
ANSWERS = "Does it answer as the trained model did?"
OTHERS = "Other checks"
QUESTIONS: dict[str, tuple[str, str]] = {
    "base_identity": (IDENTITY, "Is the base the one that the adapter was trained on?"),
    "base_recorded": (IDENTITY, "Is it recorded which base the adapter was trained on?"),
    "adapter_scaling": (IDENTITY, "Is the adapter scaled as the run was configured?"),
    "adapter_complete": (IDENTITY, "Has every layer its factors, all finite and trained?"),
    "adapter_as_trained": (IDENTITY, "Is the adapter's file what training held in memory?"),
    "weights_as_trained": (IDENTITY, "Are the weights on disk what training held in memory?"),
    "loads_from_disk": (WEIGHTS, "Can the files be read back?"),
    "weights_off_disk": (WEIGHTS, "Do the files hold the merged weights bit for bit?"),
    "weights_off_base": (WEIGHTS, "Is what the adapter left alone still the base's?"),
    "weights_not_finite": (WEIGHTS, "Is every weight a finite number?"),
    "merge_rounding": (WEIGHTS, "Is each weight as exact as its number format allows?"),
    "logit_error_mean": (ANSWERS, "On average, are its predictions as near as rounding allows?"),
    "logit_error_worst": (ANSWERS, "In the worst case, are its predictions as near as rounding allows?"),
    "logit_error_max": (ANSWERS, "In the worst case, are its predictions as near as rounding allows?"),
    "logits_not_finite": (ANSWERS, "Is every prediction a finite number?"),
    "kl_mean": (ANSWERS, "Are its probabilities for the next token the same?"),
    "top1_agreement": (ANSWERS, "Does it choose the same next token?"),
    "effect_kept": (ANSWERS, "Is what was learnt still there after rounding?"),
    "trained_differs_from_base": (ANSWERS, "Does it answer otherwise than the base?"),
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
        return [f"These weights were refused. {reasons or certificate.reason}.", *_into(certificate)]
    return [*_same_answers(certificate), *_into(certificate)]


def _same_answers(certificate: CertificateRecord) -> list[str]:
    agreement = _of_disk(certificate.checks, "top1_agreement")
    worst, largest = _of_disk(certificate.checks, "logit_error_worst"), _of_disk(certificate.checks, "logit_error_max")
    sentences = []
    if agreement is not None and isinstance(agreement.value, float | int):
        where = f" at {certificate.positions:,} places" if certificate.positions else ""
        rows = f" in {certificate.prompts:,} examples" if certificate.prompts else ""
        sentences.append(
            f"Read back from disk, the model chose the same next token as base and adapter together in "
            f"{percent(float(agreement.value))} of cases{where}{rows}."
        )
    if worst is not None:
        sentences.append(
            f"Place by place it is off by {format_value(worst.value)} times what rounding does; "
            f"{format_value(worst.threshold)} times would be allowed."
        )
    elif largest is not None:
        sentences.append(
            f"The largest difference of a prediction (logit) is {format_value(largest.value)}; "
            f"rounding alone would allow {format_value(largest.threshold)}."
        )
    return sentences


def _of_disk(checks: Sequence[CertificateCheck], name: str) -> CertificateCheck | None:
    return next((check for check in checks if check.name in (f"reloaded_{name}", f"on_disk_{name}")), None)


def _into(certificate: CertificateRecord) -> list[str]:
    """Describe the weights that the adapter was merged into, if they are not the plain base."""
    sentences = []
    if certificate.quantization != "none":
        sentences.append(
            f"It was trained on a base in {certificate.quantization}, and merged into the {certificate.into} weights."
        )
    if certificate.base_recorded is False:
        sentences.append(
            "The adapter does not say which base it was trained on: that the base is right is an assumption."
        )
    return sentences
