"""The rules that a check could not run, and what they would have needed, in one clause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from surefit.core.units import plural

LATER_FACTS = {"BatchFacts", "JobScript"}
"""Facts that no config provides: `train` checks the batches, and a batch script is checked on its own."""
DATA_FACTS = ("DatasetFacts", "AuditFacts", "ExampleFacts", "EvalPromptFacts")
_NOUNS = {
    "ModelFacts": "the model", **dict.fromkeys(DATA_FACTS, "the dataset"), "TokenizerFacts": "the tokenizer",
    "HardwareFacts": "the run's GPU", "StackFacts": "the run's environment",
}  # fmt: skip
"""Fact → what it is read from."""


Why = Literal["elsewhere", "unreadable", "unread"]
"""Why facts are missing: on another machine; here, but not readable; or not looked at."""
_REASONS: dict[Why, tuple[str, str]] = {
    "unreadable": ("could not be read", "could not be read"),
    "elsewhere": ("is not on this machine", "are not on this machine"),
    "unread": ("was not looked at", "were not looked at"),
}
"""Reason → its words after one noun, and after several."""


def skipped_text(skipped: Mapping[str, Sequence[str]], why: Why | Mapping[str, Why] = "elsewhere") -> str:
    """Return how many checks were skipped, and why; the empty string if none was.

    Args:
        skipped: code of a rule → the facts that it lacked.
        why: why they were not looked at, for all facts or by fact; what is read from the same source has one reason.

    >>> skipped_text({"LAB001": ["TokenizerFacts"], "DAT002": ["DatasetFacts"], "PCK009": ["BatchFacts"]})
    '2 checks skipped: the dataset and the tokenizer are not on this machine'
    >>> skipped_text({"DAT002": ["DatasetFacts"]}, "unreadable"), skipped_text({"MEM002": ["SureFitConfig"]})
    ('1 check skipped: the dataset could not be read', '1 check skipped: this file describes no whole run')
    >>> skipped_text({"A": ["ModelFacts"], "B": ["DatasetFacts"]}, {"ModelFacts": "unreadable"})
    '2 checks skipped: the model could not be read, and the dataset is not on this machine'
    >>> skipped_text({"MEM002": ["ResolvedConfig"]}), skipped_text({})
    ('1 check skipped: the config has errors', '')
    """
    lacking = [facts for facts in skipped.values() if not LATER_FACTS & set(facts)]
    if not lacking:
        return ""
    missing = {fact for facts in lacking for fact in facts}
    nouns: dict[str, Why] = {}
    for fact, noun in _NOUNS.items():
        if fact in missing:
            nouns.setdefault(noun, why if isinstance(why, str) else why.get(fact, "elsewhere"))
    reasons = []
    for reason, words in _REASONS.items():
        if named := [noun for noun, its_reason in nouns.items() if its_reason == reason]:
            reasons.append(f"{_join(named)} {words[len(named) > 1]}")
    if "SureFitConfig" in missing or (not nouns and "ResolvedConfig" not in missing):
        reasons.append("this file describes no whole run")
    elif not nouns:
        reasons.append("the config has errors")
    return f"{plural(len(lacking), 'check')} skipped: {', and '.join(reasons)}"


def _join(nouns: Iterable[str]) -> str:
    *first, last = nouns
    return f"{', '.join(first)} and {last}" if first else last
