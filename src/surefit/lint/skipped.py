"""The rules that a check could not run, and what they would have needed, in one clause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from surefit.core.units import plural

LATER_FACTS = {"BatchFacts", "JobScript"}
"""Facts that no config provides: `train` checks the batches, and a batch script is checked on its own."""
_NOUNS = {
    "ModelFacts": "the model", "DatasetFacts": "the dataset", "AuditFacts": "the dataset",
    "ExampleFacts": "the dataset",
    "EvalPromptFacts": "the dataset", "TokenizerFacts": "the tokenizer", "HardwareFacts": "the run's GPU",
    "StackFacts": "the run's environment",
}  # fmt: skip
"""Fact → what it is read from."""


Why = Literal["elsewhere", "unreadable", "unread"]
"""Why facts are missing: on another machine; here, but not readable; or not looked at in another tool's config."""


def skipped_text(skipped: Mapping[str, Sequence[str]], why: Why = "elsewhere") -> str:
    """Return how many checks were skipped, and why; the empty string if none was.

    Args:
        skipped: code of a rule → the facts that it lacked.
        why: why it was not looked at.

    >>> skipped_text({"LAB001": ["TokenizerFacts"], "DAT002": ["DatasetFacts"], "PCK009": ["BatchFacts"]})
    '2 checks skipped: the dataset and the tokenizer are not on this machine'
    >>> skipped_text({"DAT002": ["DatasetFacts"]}, "unreadable"), skipped_text({"MEM002": ["ResolvedConfig"]})
    ('1 check skipped: the dataset could not be read', '1 check skipped: this file describes no whole run')
    >>> skipped_text({})
    ''
    """
    lacking = [facts for facts in skipped.values() if not LATER_FACTS & set(facts)]
    if not lacking:
        return ""
    missing = {fact for facts in lacking for fact in facts}
    nouns = list(dict.fromkeys(noun for fact, noun in _NOUNS.items() if fact in missing))
    verbs = {
        "elsewhere": f"{'is' if len(nouns) == 1 else 'are'} not on this machine",
        "unreadable": "could not be read",
        "unread": f"{'was' if len(nouns) == 1 else 'were'} not looked at",
    }
    reasons = [f"{_join(nouns)} {verbs[why]}"] if nouns else []
    if "SureFitConfig" in missing or not nouns:
        reasons.append("this file describes no whole run")
    return f"{plural(len(lacking), 'check')} skipped: {', and '.join(reasons)}"


def _join(nouns: Iterable[str]) -> str:
    *first, last = nouns
    return f"{', '.join(first)} and {last}" if first else last
