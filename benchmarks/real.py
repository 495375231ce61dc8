"""What a real pretrained model gains from SureFit, task by task, on real rows: the table of docs/real.md.

    python benchmarks/real.py [--task NAME …] [--data DIR] [--out runs/real] [--model NAME] [--quick]
    python benchmarks/real.py --report [--out runs/real] [--write docs/real.md]

Per task a config and its rows are written into OUT/NAME, and then SureFit's own commands run on them as a user would
type them, each in a process of its own: check, train, merge, evaluate (base and merged), report, and `plan --against`
the run. Beside them base and merged model read a passage of plain English that is nothing like the task: what the
fine-tuning cost in old abilities (benchmarks/real_text.py). Time is wall clock, memory each process's own maximum.

Resumable: a stage that ended well is not run again (OUT/NAME/stages.jsonl, forgotten when the config, the rows or the
model change), and a task that is through has its line in OUT/results.jsonl. `--again` forgets both.

Needs the data directory that the project's developers share (`--data`); tasks whose files are not there are left out,
and said. `--quick` is a miniature of two steps and a few answers, for tests: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from real_report import report, write_into
from real_tasks import COMMON, Task, tasks, write_rows

from surefit.core.errors import SureFitError
from surefit.core.rundir import RunDir, append_jsonl, read_json, read_jsonl, write_atomic
from surefit.core.units import duration_text
from surefit.evaluate.answers import BASELINE

ROOT = Path(__file__).resolve().parents[1]
MODEL = "surefit/smollm2-135m-instruct"
QUICK = {"train": {"max_steps": 2, "global_batch_size": 4}, "evaluate": {"max_new_tokens": 8}}
MINUTES = {"check": 0.1, "train": 7, "merge": 0.5, "evaluate": 6, "report": 0.2, "against": 0.5, "text": 1}
"""What the stages take on two cores, for the time that is left; measured 2026-11-22, and rough."""


class StageFailed(Exception):
    """A command ended with another code than 0."""


@dataclass(frozen=True)
class Place:
    """Where a task lies and what it runs on.

    Attributes:
        folder: OUT/NAME.
        fingerprint: of everything that its figures depend on beside the machine.
    """

    folder: Path
    fingerprint: str

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "run")

    @property
    def stages(self) -> Path:
        return self.folder / "stages.jsonl"

    def done(self) -> dict[str, dict[str, Any]]:
        """The stages that ended well, by name."""
        lines = read_jsonl(self.stages) if self.stages.exists() else []
        return {line["stage"]: line for line in lines if line["fingerprint"] == self.fingerprint}


def main() -> int:
    arguments = parsed()
    if arguments.report:
        return say_report(arguments)
    known = tasks(arguments.data)
    names = arguments.task or list(known)
    if unknown := [name for name in names if name not in known]:
        print(f"no task {unknown[0]!r}: choose from {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for number, name in enumerate(names, start=1):
        print(f"== {number}/{len(names)} {name}", file=sys.stderr)
        try:
            outcome = run_task(known[name], arguments)
        except (StageFailed, SureFitError) as error:
            print(f"   {name} failed: {error}", file=sys.stderr)
            failed.append(name)
            continue
        print(f"   {outcome}", file=sys.stderr)
    say_report(arguments)
    return 1 if failed else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", help="only this one (repeatable)")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/real")
    parser.add_argument("--model", default=MODEL, help="another base model, a directory or an id")
    parser.add_argument("--quick", action="store_true", help="two steps and a few answers, for tests")
    parser.add_argument("--again", action="store_true", help="forget what was done")
    parser.add_argument("--report", action="store_true", help="only print the table of what is there")
    parser.add_argument("--write", type=Path, help="with --report: into this page, between its markers")
    return parser.parse_args()


def say_report(arguments: argparse.Namespace) -> int:
    results = arguments.out / "results.jsonl"
    if not results.exists():
        print(f"nothing is done yet in {arguments.out}", file=sys.stderr)
        return 1
    text = report(read_jsonl(results))
    if arguments.write:
        write_into(arguments.write, text)
    else:
        print(text)
    return 0


# One task


def run_task(task: Task, arguments: argparse.Namespace) -> str:
    """Prepare, run what is not done, write the result's line; what came of it, in words."""
    if missing := [name for name in task.files if not (arguments.data / name).exists()]:
        return f"left out: {arguments.data / missing[0]} is not there"
    out = arguments.out.resolve()
    folder = out / task.name
    folder.mkdir(parents=True, exist_ok=True)
    if task.retrieve and not (folder / "retrieved/manifest.json").exists():
        source, *options = task.retrieve
        command = ["retrieve", str(arguments.data / source), "--output", str(folder / "retrieved"), *options]
        timed(surefit(*command), folder / "retrieve.log")
    sets = task.prepare(arguments.data, folder, arguments.quick)
    place = prepared(task, sets, folder, arguments)
    results = out / "results.jsonl"
    if place.fingerprint in {line["fingerprint"] for line in (read_jsonl(results) if results.exists() else [])}:
        return "done before"
    start = time.monotonic()
    for stage, command in commands(place, arguments).items():
        run_stage(stage, command, place)
    append_jsonl(results, result(task, sets, place, arguments))
    return f"done in {duration_text(time.monotonic() - start)}: {place.run.report}"


def prepared(task: Task, sets: Mapping[str, Any], folder: Path, arguments: argparse.Namespace) -> Place:
    """Rows and config, written; the stages of another fingerprint forgotten."""
    paths = write_rows(sets, folder)
    config = config_of(task, paths, arguments.model, folder / "run", arguments.quick)
    text = yaml.safe_dump(config, sort_keys=False)
    write_atomic(folder / "config.yaml", text)
    rows = "".join(sha256(path.read_bytes()).hexdigest() for path in paths.values())
    place = Place(folder, sha256((text + rows).encode()).hexdigest()[:16])
    if arguments.again:
        forget(arguments.out.resolve() / "results.jsonl", place.fingerprint)
    if place.stages.exists() and (arguments.again or not place.done()):
        place.stages.unlink()
    return place


def forget(results: Path, fingerprint: str) -> None:
    lines = [line for line in (read_jsonl(results) if results.exists() else []) if line["fingerprint"] != fingerprint]
    write_atomic(results, "".join(json.dumps(line) + "\n" for line in lines))


def config_of(task: Task, paths: Mapping[str, Path], model: str, run: Path, quick: bool) -> dict[str, Any]:
    """The config of a task, as a user would write it."""
    layers = [COMMON, task.config, *([QUICK] if quick else [])]
    sections = {name: {} for layer in layers for name in layer}
    for layer in layers:
        for name, values in layer.items():
            sections[name] |= values
    sections["model"]["name_or_path"] = model
    sections["data"] |= {"train": str(paths["train"]), "eval": str(paths["eval"])}
    if also := {name: str(path) for name, path in paths.items() if name not in ("train", "eval")}:
        sections["evaluate"]["extra_sets"] = also
    return {"recipe": task.name, **sections, "output_dir": str(run)}


def surefit(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "surefit", *arguments, "--json"]


def commands(place: Place, arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Stage → what is typed."""
    config, run = str(place.config), str(place.run.path)
    text = [sys.executable, str(ROOT / "benchmarks/real_text.py"), run, "--data", str(arguments.data)]
    return {
        "check": surefit("check", config),
        "train": surefit("train", config, "--overwrite"),
        "merge": surefit("merge", config),
        "evaluate": surefit("evaluate", config, "--variant", "base", "--variant", "merged"),
        "report": surefit("report", config),
        "against": surefit("plan", config, "--against", run),
        "text": [*text, *(["--quick"] if arguments.quick else [])],
    }


def run_stage(stage: str, command: Sequence[str], place: Place) -> None:
    """Run a stage that is not done, and note that it is."""
    if stage in place.done():
        return
    left = sum(minutes for name, minutes in MINUTES.items() if name not in place.done())
    print(f"   {stage} (about {left:.0f} min of this task left)", file=sys.stderr)
    found = timed(command, place.folder / f"{stage}.log")
    append_jsonl(place.stages, {"stage": stage, "fingerprint": place.fingerprint, **found})


def timed(command: Sequence[str], log: Path) -> dict[str, Any]:
    """Run a command to its end: its result (the object on its last line), its seconds and its peak of memory.

    What it says while it works goes on to our stderr, what it prints into `log`.

    Raises:
        StageFailed: it ended with another code than 0.
    """
    start = time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen(list(command), stdout=out)
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            child.kill()
            raise
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise StageFailed(f"`{' '.join(command[1:])}` ended with {child.returncode}; what it printed: {log}")
    last = log.read_text(encoding="utf-8").strip().rpartition("\n")[2]
    return {
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "result": json.loads(last),
    }


# What came of it


def result(task: Task, sets: Mapping[str, Any], place: Place, arguments: argparse.Namespace) -> dict[str, Any]:
    """The line of a task."""
    done = place.done()
    steps = [line for line in read_jsonl(place.run.metrics) if "loss" in line]
    held_out = [line["eval_loss"] for line in read_jsonl(place.run.metrics) if "eval_loss" in line]
    trained = sum(line["seconds"] for line in steps)
    tokens = sum(line["tokens"] for line in steps)
    scored = scored_sets(place.run, task.baseline)
    if task.rejudge:
        scored |= task.rejudge(sets, place.run.path)
    return {
        "task": task.name, "fingerprint": place.fingerprint, "model": arguments.model, "quick": arguments.quick,
        "sets": scored, "limits": task.limits, "text_loss": done["text"]["result"],
        "train_rows": len(sets["train"]), "steps": len(steps), "tokens": tokens, "train_seconds": round(trained, 1),
        "tokens_per_second": round(statistics.median(line["tokens"] / line["seconds"] for line in steps), 1),
        "loss": [steps[0]["loss"], steps[-1]["loss"]],
        "held_out_loss": held_out[-1] if held_out else None,
        "certificate": read_json(place.run.certificate)["passed"], "against": against(done["against"]["result"]),
        "memory_plan": memory_plan(place.run),
        "rss_bytes": {name: line["peak_rss_bytes"] for name, line in done.items()},
        "stage_seconds": {name: line["seconds"] for name, line in done.items()},
        "stage_cpu_seconds": {name: line["cpu_seconds"] for name, line in done.items()},
        "machine": {"processor": processor(), "cores": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS")},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }  # fmt: skip


def scored_sets(run: RunDir, baseline: str | None) -> dict[str, Any]:
    """Per set base, merged and their paired difference on the primary metric; and against a baseline of the recipe."""
    summary = read_json(run.eval_summary)
    metric = summary["primary_metric"]
    pairs = [("", "base")] + ([(f" against the {baseline}", BASELINE + baseline)] if baseline else [])
    found = {}
    for name, scored in summary["sets"].items():
        variants = scored["variants"]
        for suffix, before in pairs:
            lines = [line for line in scored["comparisons"] if (line["a"], line["b"]) == (before, "merged")]
            for line in (line for line in lines if line["metric"] == metric):
                found[name + suffix] = {
                    "metric": metric, "base": variants[before][metric]["mean"],
                    "tuned": variants["merged"][metric]["mean"], "difference": line["difference"],
                    "ci95": line["ci95"], "wins": line["wins"], "losses": line["losses"], "n": scored["n"],
                    "others": others(variants, before, metric),
                }  # fmt: skip
    return found


def others(variants: Mapping[str, Any], before: str, metric: str) -> dict[str, list[float]]:
    """The other metrics, before and after."""
    after = variants["merged"]
    return {
        name: [variants[before][name]["mean"], value["mean"]]
        for name, value in after.items()
        if name != metric and isinstance(value, dict) and "mean" in value and name in variants[before]
    }


def against(compared: Mapping[str, Any]) -> dict[str, Any]:
    """What `surefit plan --against` says, by what it speaks of."""
    return {row["what"]: {key: row[key] for key in ("planned", "actual", "error")} for row in compared["rows"]}


def memory_plan(run: RunDir) -> dict[str, Any]:
    """What the plan promised for the training's memory and what the process held."""
    estimate = (read_json(run.plan).get("estimate") or {}).get("training", {})
    phases: dict[str, int] = {}
    for event in read_jsonl(run.events):
        for name, figures in event.get("phases", {}).items():
            phases[name] = max(phases.get(name, 0), figures.get("resident", 0))
    return {
        "low": estimate.get("low_bytes"), "high": estimate.get("high_bytes"), "actual": max(phases.values(), default=0),
    }  # fmt: skip


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return named or platform.processor() or platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())
