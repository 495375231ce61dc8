"""Whether the model may ship: one answer, and its conditions: certificate, gate, scores, damage elsewhere, findings.

The verdict above them has the scores: no condition repeats those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from surefit.core.units import plural
from surefit.report.artefacts import Artefacts
from surefit.report.scores import HELD_OUT, Contest, SetScores, Tone, is_baseline, is_ceiling
from surefit.report.text import interval, points, readable_metric
from surefit.report.verdict import Effect

State = Literal["yes", "no", "unknown", "note"]


@dataclass(frozen=True)
class ShipCondition:
    """One condition of shipping: yes and no decide, unknown leaves the answer open, a note only informs."""

    state: State
    text: str

    @property
    def tone(self) -> Tone:
        tones: dict[State, Tone] = {"yes": "good", "no": "bad", "unknown": "neutral", "note": "warning"}
        return tones[self.state]

    @property
    def word(self) -> str:
        return {"yes": "yes", "no": "no", "unknown": "not known", "note": "note"}[self.state]


@dataclass(frozen=True)
class ShipDecision:
    """The answer in a few words, and its conditions."""

    tone: Tone
    answer: str
    conditions: list[ShipCondition]


def decide_shipping(found: Artefacts, changes: Sequence[Effect], sets: Sequence[SetScores]) -> ShipDecision:
    """Decide by the artefacts alone: unmeasured properties never count in favor of shipping."""
    conditions = [
        _certificate(found),
        _helped(changes),
        *_gate(found),
        *_baselines(sets),
        *_damage(changes),
        *_findings(found),
    ]
    states = {condition.state for condition in conditions}
    if "no" in states:
        return ShipDecision("bad", "No", conditions)
    if "unknown" in states:
        return ShipDecision("neutral", "Not yet: information is missing", conditions)
    if "note" in states:
        return ShipDecision("warning", "Yes, if the notes are acceptable", conditions)
    return ShipDecision("good", "Yes", conditions)


def _certificate(found: Artefacts) -> ShipCondition:
    certificate = found.certificate
    if certificate is None:
        return ShipCondition("unknown", "The weights have no certificate: the merge stage has not verified them.")
    if certificate.passed:
        return ShipCondition(
            "yes",
            "The certificate passed: the weights on disk match training. This page does not read them again.",
        )
    return ShipCondition("no", f"The weights failed their certificate: {certificate.reason.rstrip('.')}.")


def _helped(changes: Sequence[Effect]) -> ShipCondition:
    main = next((change for change in changes if change.set == HELD_OUT), None)
    if main is None or main.comparison is None:
        return ShipCondition("unknown", "It was not compared with the base on held-out prompts.")
    if main.fit is not None and main.fit_decides:
        state: State = {"better": "yes", "worse": "no"}.get(main.fit.outcome, "note")  # type: ignore[assignment]
        return ShipCondition(state, f"{main.fit.headline}{' than the base' if state != 'note' else ''}.")
    match main.tone:
        case "good":
            return ShipCondition("yes", "It is better than the base on held-out prompts.")
        case "bad":
            return ShipCondition("no", "It is worse than the base on held-out prompts.")
        case _ if main.beside:
            return ShipCondition("note", f"{main.beside.headline}.")
        case _:
            return ShipCondition("note", "It shows no clear difference from the base on held-out prompts.")


def _gate(found: Artefacts) -> Iterator[ShipCondition]:
    gate = found.summary.gate if found.summary else None
    if gate is not None and gate.passed:
        yield ShipCondition("yes", "The score gate passed.")
    elif gate is not None:
        title = "The score gate is undecided" if gate.undecided else "The score gate did not pass"
        yield ShipCondition("unknown" if gate.undecided else "no", f"{title}: {gate.reason.rstrip('.')}.")
    elif found.summary is not None:
        yield ShipCondition("note", "The config sets no score gate (evaluate.gate).")


def _baselines(sets: Sequence[SetScores]) -> Iterator[ShipCondition]:
    """Yield a note for every baseline that the model does not beat, since a baseline needs no model."""
    held_out = next((scores for scores in sets if scores.name == HELD_OUT), None)
    for contest in held_out.contests if held_out else ():
        if is_baseline(contest.comparison.a) and not is_ceiling(contest.comparison.a) and contest.tone != "good":
            yield ShipCondition("note", f"It does not beat {_against(contest)}.")


def _against(contest: Contest) -> str:
    low, high = contest.comparison.ci95
    difference = points(contest.comparison.difference)
    return f"the {contest.comparison.a.replace(':', ' ', 1)}: {difference} (interval {interval(low, high)})"


def _damage(changes: Sequence[Effect]) -> Iterator[ShipCondition]:
    other_sets = [change for change in changes if change.set != HELD_OUT and change.comparison is not None]
    worse = [change for change in other_sets if change.fell]
    for change in worse:
        what = f"{readable_metric(change.metric)} on {change.set}"
        if change.fit_phrase:
            what = f"on {change.set}, {change.fit_phrase}"
        yield ShipCondition("note", f"Regression on another task: {what}.")
    if other_sets and not worse:
        names = ", ".join(change.set for change in other_sets)
        yield ShipCondition("yes", f"No significant regression on {names}.")
    elif not other_sets:
        yield ShipCondition("note", "Regressions on other tasks were not measured: evaluate.extra_sets is empty.")


def _findings(found: Artefacts) -> Iterator[ShipCondition]:
    if found.check is None:
        return
    errors = sum(finding.severity == "error" for finding in found.check.findings)
    if errors:
        yield ShipCondition(
            "note", f"The check found {plural(errors, 'error')} in config or data, listed under Findings."
        )
    accepted = sum(finding.severity == "error" for finding in found.check.suppressed)
    if accepted:
        yield ShipCondition(
            "note", f"{plural(accepted, 'error')} of the check was suppressed by the config, with a reason."
        )
