"""The verbs that concern no single run: init, doctor, explain, runs. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from surefit.config.starter import OWN_ROWS
from surefit.core.errors import EXIT_ENVIRONMENT, EXIT_OK, ConfigError
from surefit.core.output import output_file
from surefit.core.rundir import write_atomic
from surefit.core.units import shell_quote

if TYPE_CHECKING:
    from surefit.cli.render import Output
    from surefit.doctor.probe import Probe, Verdict


def init_command(out: Output, recipe: str | None, output: Path | None, list_recipes: bool) -> int:
    """Write a starter config, or list the recipes."""
    from surefit import recipes
    from surefit.config.starter import starter_config

    if list_recipes or recipe is None:
        citations = {name: recipes.get_recipe(name).citation for name in recipes.list_recipes()}
        out.table("Recipes", ["name", "what and where from"], [[name, text] for name, text in citations.items()])
        out.result({"recipes": list(citations)})
        return EXIT_OK
    text = starter_config(recipes.get_recipe(recipe).name)
    print_or_write_config(out, text, output)
    out.result({"recipe": recipe, "path": str(output) if output else None, "config": text})
    return EXIT_OK


def print_or_write_config(
    out: Output, config: str, output: Path | None, inputs: Mapping[str, Path] | None = None
) -> None:
    """Print a config, or write it to a new file.

    Args:
        inputs: the files it was made from, by name.
    """
    if output is None:
        out.say(config.rstrip("\n"))
    else:
        write_atomic(output_file(output, inputs), config)
        first = f"name your rows in data.train, now {OWN_ROWS}; then " if f"train: {OWN_ROWS}\n" in config else ""
        out.say(f"Wrote {output}. Next: {first}surefit check {shell_quote(output)}")


def doctor_command(out: Output, script: bool = False, script_file: Path | None = None) -> int:
    """Report this machine's hardware and software and their problems; with `script`, the commands that fix them."""
    from surefit.doctor.probes import run_probes
    from surefit.doctor.script import fix_script

    if script_file is not None:
        if not script:
            raise ConfigError(
                f"what is to be done with {script_file}?",
                code="E1023",
                path=script_file,
                help="surefit doctor --fix-script FILE writes a new file",
            )
        output_file(script_file, option="FILE")
    probes = run_probes(further=[installed_stack_probes])
    text = fix_script(probes) if script else None
    if text and script_file is None:
        out.say(text.rstrip("\n"))
    else:
        out.table("", ["", "probe", "fact"], [[probe.verdict, probe.name, probe.fact] for probe in probes])
        for probe in probes:
            if probe.verdict != "ok" and probe.fix:
                out.say(f"{probe.name}: {probe.fix}")
    if text and script_file is not None:
        write_atomic(script_file, text)
        out.say(f"Wrote {script_file}. Read it, then: source {script_file}")
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


def explain_command(out: Output, code: str | None, every: bool) -> int:
    """Print one rule's page, or the list of rules."""
    from surefit.lint.engine import all_rules, find_rule
    from surefit.lint.engine import explain_rule as page_of

    if code is None and not every:
        raise ConfigError(
            "which rule?", code="E1024", help="`surefit explain SCH001`, or `surefit explain --all` for the list"
        )
    rules = all_rules() if code is None else (find_rule(code),)
    if code is None:
        out.table("Rules", ["code", "severity", "what it finds"], [[r.code, r.severity, r.summary] for r in rules])
    else:
        out.say(page_of(code).rstrip("\n"))
    keys = ("code", "name", "severity", "summary")
    out.result({"rules": [{key: getattr(r, key) for key in keys} | {"evidence": r.section("Evidence")} for r in rules]})
    return EXIT_OK


def list_runs_command(out: Output, directory: Path) -> int:
    """List the run directories below `directory`."""
    from surefit.cli.runs import find_runs, summarize_runs

    rows = summarize_runs(find_runs(directory))
    keys = ["run", "recipe", "model", "state_text", "steps_text", "score_text", "size_text", "changed_text"]
    if any(row["job_text"] != "-" for row in rows):
        keys.insert(keys.index("state_text") + 1, "job_text")
    if rows:
        names = [key.removesuffix("_text") for key in keys]
        out.table(f"Runs in {directory}", names, [[row[key] for key in keys] for row in rows])
    else:
        out.say(f"No runs in {directory}{'' if directory.is_dir() else ': there is no such directory'}")
    out.result({"runs": rows})
    return EXIT_OK
