"""The verb `demo`: the whole pipeline, offline, with the main figures on one screen.

It trains the built-in model, or with `--real` a pretrained one; the two configs of `surefit.samples` define what is
trained and scored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefit import samples
from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, ConfigError
from surefit.core.output import json_lines_with, output_file
from surefit.core.packaging import require_extra
from surefit.core.rundir import RunDir, read_json, read_jsonl, write_atomic
from surefit.core.sampling import evenly_spaced
from surefit.core.units import duration_text, plural
from surefit.evaluate.answers import PREDICTIONS

if TYPE_CHECKING:
    from surefit.stages.run_context import CheckedRun

FOLDER = Path(samples.__file__).parent
NO_TOOL = "no_tool"
"""The set of requests that no tool on offer fits, scored apart so that calls are not gained at their expense."""
LEADERBOARD = "leaderboard"
CATEGORY = "live_simple"
LEADERBOARD_ROWS = 16
"""Number of requests of the leaderboard's users that `--data` adds: a minute and a half of generation."""
SHORT = 1_000
"""Maximum number of characters of such a request with its tool, so that it is no longer than the training rows."""

VARIANTS = ("base", "merged")
"""Models that are scored: the certificate already shows that the adapter answers like the merged model."""


@dataclass(frozen=True)
class ShownScore:
    """How the output shows the scores of an evaluation set.

    Attributes:
        label: what is scored, in the table.
        metric: the recipe's metric.
        interval: what the line with the interval of the difference is called; None for no such line.
    """

    label: str
    metric: str = "exact_match"
    interval: str | None = None


@dataclass(frozen=True)
class Demo:
    """One of the two demos.

    Attributes:
        config: its config file.
        model: the model's name for people.
        sets: evaluation set → how it is shown.
        about: training and evaluation data, in one line.
    """

    config: Path
    model: str
    sets: dict[str, ShownScore]
    about: str


BUILT_IN = Demo(
    FOLDER / "demo.yaml",
    "the built-in model",
    {
        "eval": ShownScore("new tools: exact match", interval="gain on the new tools"),
        "old_tools": ShownScore("old tools: exact match"),
    },
    "six new tools from generated requests; scored on other calls of them, and on tools that the model knew before",
)
REAL = Demo(
    FOLDER / "demo-real.yaml",
    "SmolLM2-135M-Instruct",
    {
        "eval": ShownScore("tools never seen: exact match", interval="gain on tools never seen"),
        NO_TOOL: ShownScore("no tool fits: no call", "irrelevance", "change where no tool fits"),
        LEADERBOARD: ShownScore("leaderboard users: AST", "ast", "gain on the leaderboard's requests"),
    },
    "520 requests written by hand, 37 groups of tools; scored on 119 requests to nine other groups of tools, none of "
    "which is in a training row; no tool fits 32 of these, and the model is to call none",
)
CONFIG = BUILT_IN.config


@verb
def demo(
    out: Output,
    output_dir: Annotated[
        str | None, typer.Option(help="The run directory; an earlier demo is replaced. runs/demo, or runs/demo-real.")
    ] = None,
    real: Annotated[bool, typer.Option("--real", help="Teach SmolLM2-135M-Instruct, a pretrained model.")] = False,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --real: score the leaderboard's requests in DIR, too.")
    ] = None,
) -> int:
    """Teach a model new tools: the whole pipeline, offline, in minutes on a CPU."""
    from surefit.cli.run import run_all_stages
    from surefit.stages.run_context import load_checked_run

    if data is not None and not real:
        raise typer.BadParameter("--data needs --real")
    require_extra("train")
    start = time.monotonic()
    chosen = REAL if real else BUILT_IN
    out.note(f"config: {chosen.config}")
    out.note(f"taught: {chosen.about}")
    changes = [f"output_dir={output_dir}"] if output_dir else []
    rows = Path(f"{output_dir or 'runs/demo-real'}-{LEADERBOARD}.jsonl")
    if data is not None:
        output_file(rows, {"the leaderboard's files": data}, earlier=json_lines_with("query", "tools", "answers"))
        write_leaderboard(data, rows)
        changes.append(f"evaluate.extra_sets={json.dumps({LEADERBOARD: str(rows)})}")
        out.note(f"scored as well: {LEADERBOARD_ROWS} requests of the Berkeley leaderboard's users, from {data}")
    run = replace(load_checked_run(chosen.config, changes), verb="run")
    _require_demo(run)
    code = run_all_stages(out.without_result(), run, resume=False, overwrite=True, variants=VARIANTS)
    result = summarize_demo(run.run, chosen, time.monotonic() - start)
    if data is not None:
        result["sets"][LEADERBOARD] = score_leaderboard(data, rows, run.run)
    _say(out, chosen, result)
    out.next_step(["chat", run.run.path])
    out.result(result)
    return EXIT_OK if code == EXIT_OK and result["certificate"] else EXIT_FINDINGS


def _require_demo(run: CheckedRun) -> None:
    """Raise if the run in the run directory is no demo: it is not replaced.

    Raises:
        ConfigError: another model or other rows are in it.
    """
    from surefit.config.load import load_config

    resolved = run.run.resolved
    if resolved.exists():
        config, earlier = run.resolved.config, load_config(resolved).config
        if (earlier.model, earlier.data.train) != (config.model, config.data.train):
            raise ConfigError(
                "the run that is there is no earlier demo",
                code="E1606",
                path=run.run.path,
                field="--output-dir",
                help="choose another --output-dir",
            )


def write_leaderboard(data: Path, place: Path) -> None:
    """Write short requests of the leaderboard's users as rows for the recipe `function_calling`.

    Raises:
        DataError: `data` has no such files.
    """
    from surefit.metrics.bfcl_files import read_category, row_from_question

    questions = read_category(data / "function_calling/bfcl", CATEGORY).values()
    rows = [row_from_question(question) for question in questions if len(question["question"]) == 1]
    short_rows = [row for row in rows if len(row["query"]) + len(row["tools"]) <= SHORT]
    sampled_rows = evenly_spaced(short_rows, LEADERBOARD_ROWS)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(place, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in sampled_rows))


def score_leaderboard(data: Path, place: Path, run: RunDir) -> dict[str, Any]:
    """Return the leaderboard's scores of base and merged model, in the form of a set in `summarize_demo`."""
    from surefit.evaluate.stats import paired_bootstrap
    from surefit.metrics.bfcl_files import read_category, score_bfcl_answer

    questions = read_category(data / "function_calling/bfcl", CATEGORY)
    questions_by_index = [questions[row["id"]] for row in read_jsonl(place)]
    values = []
    for variant in ("base", "merged"):
        lines = read_jsonl(run.eval / LEADERBOARD / f"{variant}{PREDICTIONS}")
        values.append([score_bfcl_answer(questions_by_index[line["index"]], line["text"], CATEGORY) for line in lines])
    pair = paired_bootstrap(values[0], values[1])
    base, tuned = (sum(variant_values) / len(variant_values) for variant_values in values)
    scores = {"base": base, "tuned": tuned, "gain": pair.difference, "ci95": [pair.low, pair.high]}
    return scores | {"n": len(values[0]), "metric": "ast"}


def _say(out: Output, chosen: Demo, result: dict[str, Any]) -> None:
    sets: dict[str, Any] = result["sets"]
    rows = [
        [chosen.sets[name].label, *_shares(scores), f"{100 * scores['gain']:+.1f} points"]
        for name, scores in sets.items()
    ]
    out.table(f"What {chosen.model} learned", ["", "base", "fine-tuned", "difference"], rows)
    for name, scores in sets.items():
        if label := chosen.sets[name].interval:
            out.say(f"{label}: {_interval(scores['ci95'])} points (95 % interval, {scores['n']} prompts)")
    passed, steps = "passed" if result["certificate"] else "FAILED", plural(result["steps"], "optimizer step")
    out.say(f"certificate: {passed} · {steps} · {duration_text(result['seconds'])}")
    out.say(f"the page that explains it: {result['report']}", "bold")


def summarize_demo(run: RunDir, chosen: Demo, seconds: float) -> dict[str, Any]:
    """Return the object that `surefit demo --json` prints; shares are in [0, 1]."""
    summary = read_json(run.eval_summary)
    sets = {}
    for name, set_summary in summary["sets"].items():
        metric = chosen.sets[name].metric
        comparison = next(
            p for p in set_summary["comparisons"] if (p["a"], p["b"], p["metric"]) == ("base", "merged", metric)
        )
        sets[name] = {
            "base": set_summary["variants"]["base"][metric]["mean"],
            "tuned": set_summary["variants"]["merged"][metric]["mean"],
            "gain": comparison["difference"],
            "ci95": comparison["ci95"],
            "n": set_summary["n"],
            "metric": metric,
        }
    steps = [line["step"] for line in read_jsonl(run.metrics) if "loss" in line]
    return {
        **sets["eval"],
        "steps": max(steps),
        "seconds": round(seconds, 1),
        "certificate": read_json(run.certificate)["passed"],
        "report": str(run.report),
        "sets": sets,
    }


def _shares(scored: dict[str, Any]) -> list[str]:
    return [f"{100 * scored[name]:.1f} %" for name in ("base", "tuned")]


def _interval(bounds: Sequence[float]) -> str:
    return " to ".join(f"{100 * bound:+.1f}" for bound in bounds)
