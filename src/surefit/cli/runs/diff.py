"""The verb `runs diff`: the differences of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.intervals import interval_text
from surefit.cli.render import Output
from surefit.cli.runs.run_facts import read_primary_scores, require_run, training_data_facts
from surefit.cli.runs.summary import read_or_default
from surefit.core.errors import EXIT_OK
from surefit.core.rundir import RunDir, read_json
from surefit.core.units import plural, shell_quote


@verb
def diff(
    out: Output,
    a: Annotated[Path, typer.Argument(metavar="A", help="A run directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
) -> int:
    """Show the differences of two runs: settings, data, environment, scores."""
    first, second = require_run(a), require_run(b)
    differences = {
        "settings": _differing(_settings(first), _settings(second)),
        "data": _differing(training_data_facts(first), training_data_facts(second)),
        "environment": _differing(_environment(first), _environment(second)),
        "scores": _differing(_scores(first), _scores(second)),
    }
    for name, lines in differences.items():
        rows = [[key, *(_format_setting(value) for value in values)] for key, values in lines.items()]
        if rows:
            out.table(
                f"{name.capitalize()}: {plural(len(rows), 'difference')}", ["", str(first.path), str(second.path)], rows
            )
        else:
            out.say(f"{name.capitalize()}: the same", "bold")
    if differences["scores"]:
        out.say(
            f"Whether that is more than chance: surefit compare {shell_quote(first.path)} {shell_quote(second.path)}"
        )
    out.result({"a": str(first.path), "b": str(second.path), **differences})
    return EXIT_OK


def _format_setting(value: Any) -> str:
    text = "-" if value is None else str(value)
    return f"{text[:12]}…" if len(text) == 64 and text.isalnum() else text


def _differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    keys = list(dict.fromkeys([*a, *b]))
    return {key: [a.get(key), b.get(key)] for key in keys if a.get(key) != b.get(key)}


def _settings(run: RunDir) -> dict[str, Any]:
    from surefit.config.load import load_config
    from surefit.config.resolve import iter_config_values

    return {key: value for key, value in iter_config_values(load_config(run.resolved).config) if key != "output_dir"}


def _environment(run: RunDir) -> dict[str, Any]:
    recorded = read_or_default(lambda: read_json(run.environment), {}) if run.environment.exists() else {}
    host = {
        key: recorded.get(key) for key in ("surefit", "python", "platform", "cpu_count", "threads") if key in recorded
    }
    gpus = [gpu.get("name") if isinstance(gpu, dict) else str(gpu) for gpu in recorded.get("gpus", [])]
    return host | {"gpus": ", ".join(map(str, gpus)) or "none"} | dict(recorded.get("packages", {}))


def _scores(run: RunDir) -> dict[str, Any]:
    return {f"{s['set']}, {s['variant']}: {s['metric']}": interval_text(s) for s in read_primary_scores(run)}
