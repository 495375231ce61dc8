"""INT: failures of rules, which the engine itself reports."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.lint.rule import Finding, rule


@rule("INT001", "rule-failed", severity="warning", suppressible=False)
def rule_failed() -> Iterator[Finding]:
    """One of SureFit's rules failed, so one thing was not checked.

    ## What it does
    Stands in for a rule that raised an exception. The engine reports it, and all other rules still run.

    ## Why it is bad
    What that rule looks for may be there, undetected.

    ## Example
    A column whose values are of a type that the rule's author did not think of.

    ## Fix
    Report it with the config: it is a bug in SureFit.

    ## Evidence
    Checkers that stop at their first internal error report nothing at all, which reads like "all is well".
    """
    yield from ()
