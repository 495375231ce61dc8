"""The verbs that are about no single run: init, doctor, explain, runs. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from surefit.core.errors import EXIT_ENVIRONMENT, EXIT_OK, ConfigError
from surefit.core.rundir import write_atomic

if TYPE_CHECKING:
    from surefit.cli.render import Output


def init(out: Output, recipe: str | None, output: Path | None, list_recipes: bool) -> int:
    """Write a starter config, or list the recipes."""
    from surefit import recipes
    from surefit.config.starter import starter

    if list_recipes or recipe is None:
        known = {name: recipes.get(name).citation for name in recipes.names()}
        out.table("Recipes", ["name", "what and where from"], [[name, text] for name, text in known.items()])
        out.result({"recipes": list(known)})
        return EXIT_OK
    text = starter(recipes.get(recipe).name)
    if output is None:
        out.say(text.rstrip("\n"))
    elif output.exists():
        raise ConfigError("there is a file of that name", path=output, help="choose another name, or delete it first")
    else:
        write_atomic(output, text)
        out.say(f"Wrote {output}. Next: surefit check {output}")
    out.result({"recipe": recipe, "path": str(output) if output else None, "config": text})
    return EXIT_OK


def doctor(out: Output) -> int:
    """What this machine has, and what is wrong with it."""
    from surefit.doctor.probes import probe_all

    probes = probe_all()
    out.table("", ["", "probe", "fact"], [[probe.verdict, probe.name, probe.fact] for probe in probes])
    for probe in probes:
        if probe.verdict != "ok" and probe.fix:
            out.say(f"{probe.name}: {probe.fix}")
    failed = [probe.name for probe in probes if probe.verdict == "fail"]
    out.result({"probes": [probe.as_dict() for probe in probes], "failed": failed})
    return EXIT_ENVIRONMENT if failed else EXIT_OK


def explain(out: Output, code: str | None, every: bool) -> int:
    """One rule's page, or the list of rules."""
    from surefit.lint.engine import all_rules, find_rule
    from surefit.lint.engine import explain as page_of

    if code is None and not every:
        raise ConfigError("which rule?", help="`surefit explain SCH001`, or `surefit explain --all` for the list")
    rules = all_rules() if code is None else (find_rule(code),)
    if code is None:
        out.table("Rules", ["code", "severity", "what it finds"], [[r.code, r.severity, r.summary] for r in rules])
    else:
        out.say(page_of(code).rstrip("\n"))
    keys = ("code", "name", "severity", "summary")
    out.result({"rules": [{key: getattr(r, key) for key in keys} | {"evidence": r.section("Evidence")} for r in rules]})
    return EXIT_OK


def runs(out: Output, directory: Path) -> int:
    """The run directories below `directory`."""
    from surefit.cli.runs import find_runs, summarise

    listed = [summarise(run) for run in find_runs(directory)]
    title = f"Runs in {directory}" if listed else f"No runs in {directory}"
    keys = ("run", "recipe", "model", "state_text", "steps_text", "score_text", "size_text", "changed_text")
    out.table(title, [key.removesuffix("_text") for key in keys], [[row[key] for key in keys] for row in listed])
    out.result({"runs": listed})
    return EXIT_OK
