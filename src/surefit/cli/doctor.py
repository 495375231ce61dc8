"""The verb `doctor`: this machine's hardware and software, and their problems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.core.errors import EXIT_ENVIRONMENT, EXIT_OK, ConfigError
from surefit.core.output import output_file
from surefit.core.rundir import write_atomic

if TYPE_CHECKING:
    from surefit.doctor.probe import Probe, Verdict


@verb
def doctor(
    out: Output,
    file: Annotated[Path | None, typer.Argument(help="With --fix-script: write it here, not to stdout.")] = None,
    fix_script: Annotated[bool, typer.Option("--fix-script", help="Write the commands that fix it.")] = False,
) -> int:
    """Look at this machine: what is there, what is wrong, how to fix it."""
    from surefit.doctor.probes import run_probes
    from surefit.doctor.script import fix_script as render_script

    if file is not None:
        if not fix_script:
            raise ConfigError(
                f"what is to be done with {file}?",
                code="E1023",
                path=file,
                help="surefit doctor --fix-script FILE writes a new file",
            )
        output_file(file, option="FILE")
    probes = run_probes(further=[installed_stack_probes])
    text = render_script(probes) if fix_script else None
    if text and file is None:
        out.say(text.rstrip("\n"))
    else:
        out.table("", ["", "probe", "fact"], [[probe.verdict, probe.name, probe.fact] for probe in probes])
        for probe in probes:
            if probe.verdict != "ok" and probe.fix:
                out.say(f"{probe.name}: {probe.fix}")
    if text and file is not None:
        write_atomic(file, text)
        out.say(f"Wrote {file}. Read it, then: source {file}")
    if not fix_script:
        fixable = any(probe.is_command for probe in probes if probe.verdict != "ok")
        out.next_step(["doctor", "--fix-script"] if fixable else ["init", "--list"])
    failed = [probe.name for probe in probes if probe.verdict == "fail"]
    out.result({"probes": [probe.as_dict() for probe in probes], "failed": failed, "script": text})
    return EXIT_ENVIRONMENT if failed else EXIT_OK


def installed_stack_probes() -> Iterator[Probe]:
    """Yield the findings of the STK rules about the installed packages, as for a run that uses all of them."""
    from surefit.doctor.probe import Probe
    from surefit.facts.hardware import hardware_facts
    from surefit.facts.setup import Setup
    from surefit.facts.stack import stack_facts
    from surefit.lint.engine import all_rules, run_rules
    from surefit.lint.rule import LintContext

    stack = stack_facts()
    everything = Setup(tool="trl" if "trl" in stack.versions else "surefit", trackers=("all",))
    context = LintContext(None, Path(), setup=everything, hardware=hardware_facts(), stack=stack)
    # STK012 checks SureFit's own version ranges, which the doctor checks package by package.
    rules = [rule for rule in all_rules() if rule.code.startswith("STK") and rule.code != "STK012"]
    findings = run_rules(context, rules).findings
    for finding in findings:
        command = re.fullmatch(r"pip install '[^']+'", finding.help or "") is not None
        verdict: Verdict = "fail" if finding.severity == "error" else "warn"
        yield Probe(finding.code, finding.message, verdict, finding.help, command)
    if not findings:
        yield Probe("installed stack", "the packages fit each other")
