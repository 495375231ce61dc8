"""A day on a GPU machine without a network: every measurement that needs one, in the order of its worth.

    python benchmarks/gpu_day.py --out DIR [--stage NAME,…] [--minutes 25] [--list] [--json] [--miniature]
    python benchmarks/gpu_day.py --report DIR

Python needs torch, transformers and PEFT there; the folder gpu-kit beside this file has the rest (`make gpu-kit`, where
there is a network). Each stage runs in a process of its own with a time limit. As it ends, a line goes to
DIR/day.jsonl; what a stage measures goes to DIR/items.jsonl at once. A stage that fails is one line, and the next runs.

Call it again with the same DIR and it goes on: what has a line is not run again. A stage that the end of the minutes
stopped goes on in the time it has left; one that was killed is run once more, and marked. To run one again, take its
line out. Exit code: 0 if every stage ended or was skipped, 1 if one failed, 3 if the minutes ended first.

`--miniature` is the same day on a CPU, with tiny models: it shows that the machinery works, and measures nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import gpu_day_report
import gpu_site
from gpu_lines import append, lines

HERE = Path(__file__).resolve().parent

SKIPPED = LEFT = 3
"""A stage's exit code that means "skipped"; its last line of output says why. The day's, that stages are left."""
RUNS = 2
"""How often a stage is begun that ends without a line."""
TAIL = 20
RESERVE_SECONDS = 5.0
"""Kept back for ending, of the minutes."""
MARK = "SUREFIT_GPU_DAY"
"""Set in everything that a day starts, to the day's folder: so that what is left of a killed one can be found."""


@dataclass(frozen=True)
class Stage:
    """One measurement, or several that belong together.

    Attributes:
        limit: seconds; it is ended then. least: it is not begun with fewer left.
        command: its program; empty for the stage of this name in gpu_stages.py.
    """

    name: str
    what: str
    limit: float
    least: float = 45.0
    command: tuple[str, ...] = ()


STAGES = (
    Stage("environment", "what is installed; `surefit doctor`, its attempts on the GPU included", 120),
    Stage("tests", "the tests marked gpu, file by file", 360),
    Stage("attention", "which kernel runs; cuDNN: NaN, the cost of a new shape, decoding with and without", 180),
    Stage("calibration", "rates of products, copies and launches, and of attention itself", 240),
    Stage(
        "lora-1b",
        "LoRA on 1B, eager, with fused kernels and compiled: tokens/s, memory, the 25 costliest operators",
        300,
    ),
    Stage("lora-8b", "the same on 8B", 360),
    Stage("qlora-7b", "LoRA over NF4 on 7B, eager and with fused kernels", 300),
    Stage("trl", "TRL beside it, tuned, on 1B and 8B", 300),
    Stage("dpo", "dpo with LoRA on 1B and 8B beside TRL's DPOTrainer: tokens/s, memory, the reference", 300),
    Stage("qlora-dpo", "dpo over NF4 on 7B: its stored reference and the first batch at ln 2", 240),
    Stage("dpo-plan", "`train` with dpo on 7B in NF4: memory and time, planned and measured", 600, 150),
    Stage("shared", "dpo on 1B: pairs with their prompt once, and as two documents", 240),
    Stage("plan", "twelve configurations against predictions made beforehand", 480),
    Stage("first-run", "`init --data`, then `run`, with 7B in NF4: memory and time, planned and measured", 600, 150),
    Stage("long", "one step of 200,000 tokens on 4B, selective checkpoints", 300, 120),
)


class Ended(Exception):
    """Somebody asked this process to end."""


def main() -> int:
    asked = arguments()
    if asked.report:
        print(gpu_day_report.text(asked.report))
        return 0
    stages = chosen(asked)
    if asked.list:
        print(listing(stages, asked.out))
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    day = Day(asked.out.resolve(), asked.kit.resolve(), asked.minutes, asked.miniature)
    with alone(asked.out):
        try:
            left = day.run(stages)
        except Ended:
            return 128 + signal.SIGTERM
    found = {line["stage"]: line for line in lines(asked.out / "day.jsonl")}
    summary = {
        "stages": [found[stage.name] for stage in stages if stage.name in found],
        "left": left, "seconds": round(time.monotonic() - day.began, 1),
    }  # fmt: skip
    print(json.dumps(summary) if asked.json else listing(stages, asked.out), flush=True)
    if any(line["status"] == "failed" for line in summary["stages"]):
        return 1
    return LEFT if left else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the lines go, and what is made on the way")
    parser.add_argument("--stage", action="append", default=[], metavar="NAME,…", help="these alone")
    parser.add_argument("--minutes", type=float, default=25.0, help="it ends within them")
    parser.add_argument("--kit", type=Path, default=HERE / "gpu-kit", help="the folder that `make gpu-kit` fills")
    parser.add_argument("--list", action="store_true", help="name the stages, and what became of them")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--miniature", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--report", type=Path, metavar="DIR", help="the tables for docs/gpu.md, goals beside them")
    parser.add_argument("--stages", type=Path, help=argparse.SUPPRESS)  # other stages, for the tests: a JSON file
    asked = parser.parse_args()
    if not (asked.out or asked.report or asked.list):
        parser.error("say where: --out DIR")
    return asked


def chosen(asked: argparse.Namespace) -> list[Stage]:
    stages = STAGES
    if asked.stages:
        rows = json.loads(asked.stages.read_text(encoding="utf-8"))
        stages = tuple(Stage(**{**row, "command": tuple(row["command"])}) for row in rows)
    wanted = [name for names in asked.stage for name in names.split(",") if name]
    unknown = sorted(set(wanted) - {stage.name for stage in stages})
    if unknown:
        raise SystemExit(f"no stage is called {', '.join(unknown)}: {', '.join(stage.name for stage in stages)}")
    return [stage for stage in stages if not wanted or stage.name in wanted]


def listing(stages: list[Stage], out: Path | None) -> str:
    """The stages, one a line, with what became of each."""
    found = {line["stage"]: line for line in lines(out / "day.jsonl")} if out else {}
    rows = []
    for stage in stages:
        line = found.get(stage.name)
        state = f"{line['status']}, {line['seconds']:.0f} s" if line else f"at most {stage.limit:.0f} s"
        said = line["reason"] if line and line["reason"] else stage.what
        rows.append(f"{stage.name:<14}{state:<18}{said}")
    return "\n".join(rows)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Only one day at a time works in a folder."""
    with (out / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"{out}: another gpu_day.py is at work in it") from None
        yield


class Day:
    """One call of the driver.

    Attributes:
        began, deadline: of the monotonic clock; nothing runs beyond the deadline.
    """

    def __init__(self, out: Path, kit: Path, minutes: float, miniature: bool) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + 60 * minutes - min(RESERVE_SECONDS, 6 * minutes)
        self.out, self.kit, self.miniature = out, kit, miniature

    def run(self, stages: list[Stage]) -> list[str]:
        """Every stage that has no line yet; the names of those that are left."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)
        end_leftovers(self.out)
        wheels = gpu_site.unpack(self.kit, self.out / "site")
        (self.out / "kit.json").write_text(json.dumps(wheels, indent=1) + "\n", encoding="utf-8")
        (self.out / "logs").mkdir(exist_ok=True)
        done = {line["stage"] for line in lines(self.out / "day.jsonl")}
        waiting = [stage for stage in stages if stage.name not in done]
        while waiting and self.left() >= waiting[0].least and self.run_one(waiting[0]):
            waiting.pop(0)
        return [stage.name for stage in waiting]

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def run_one(self, stage: Stage) -> bool:
        """Whether the stage has its line now; without one the minutes are over, and it goes on another time."""
        before = [line for line in lines(self.out / "started.jsonl") if line["stage"] == stage.name]
        paused = [line["spent"] for line in before if line["event"] == "paused"]
        run = len(before) - 2 * len(paused) + 1
        if run > RUNS:
            self.note(stage, "failed", 0.0, "it was killed each time", run - 1, [])
            return True
        limit = max(1.0, stage.limit - sum(paused))
        append(self.out / "started.jsonl", {"stage": stage.name, "event": "started", "date": now()})
        print(f"{stage.name}: {'again, ' if run > 1 else ''}at most {min(limit, self.left()):.0f} s", file=sys.stderr)
        start = time.monotonic()
        logs = [self.out / "logs" / f"{stage.name}.{kind}" for kind in ("out", "err")]
        sizes = [log.stat().st_size if log.exists() else 0 for log in logs]
        try:
            code = self.child(stage, min(limit, self.left()), logs)
        except Ended:
            self.pause(stage, start)
            raise
        spent = time.monotonic() - start
        if code is None and spent < limit - 0.5:
            self.pause(stage, start)
            return False
        said, complained = (
            log.read_bytes()[size:].decode(errors="replace") for log, size in zip(logs, sizes, strict=True)
        )
        status, reason = outcome(code, stage.limit, said, complained)
        self.note(stage, status, spent + sum(paused), reason, run, complained.splitlines()[-TAIL:])
        return True

    def child(self, stage: Stage, limit: float, logs: list[Path]) -> int | None:
        """The exit code of a stage, None if it was ended at the limit. Nothing that it started is left."""
        own = [str(HERE / "gpu_stages.py"), stage.name, "--out", str(self.out), "--kit", str(self.kit)]
        command = list(stage.command) or [sys.executable, *own, *(["--miniature"] if self.miniature else [])]
        with logs[0].open("ab") as output, logs[1].open("ab") as errors:
            process = subprocess.Popen(
                command, cwd=HERE.parent, env=self.environment(), stdin=subprocess.DEVNULL, stdout=output,
                stderr=errors, start_new_session=True, preexec_fn=_die_with_the_driver,
            )  # fmt: skip
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                end_leftovers(self.out)

    def environment(self) -> dict[str, str]:
        paths = [str(HERE.parent / "src"), str(self.out / "site"), os.environ.get("PYTHONPATH", "")]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1", MARK: str(self.out),
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
            "SUREFIT_CACHE": str(self.out / "cache"), **({"CUDA_VISIBLE_DEVICES": ""} if self.miniature else {}),
        }  # fmt: skip

    def pause(self, stage: Stage, start: float) -> None:
        spent = time.monotonic() - start
        append(self.out / "started.jsonl", {"stage": stage.name, "event": "paused", "spent": spent, "date": now()})

    def note(self, stage: Stage, status: str, seconds: float, reason: str, run: int, tail: list[str]) -> None:
        line: dict[str, Any] = {"stage": stage.name, "status": status, "seconds": round(seconds, 2), "reason": reason}
        line |= {"run": run, "again": run > 1, "stderr": tail if status == "failed" else [], "date": now()}
        append(self.out / "day.jsonl", line)
        print(f"{stage.name}: {status}, {seconds:.0f} s {reason}".rstrip(), file=sys.stderr)


def outcome(code: int | None, limit: float, said: str, complained: str) -> tuple[str, str]:
    """(status, reason) of a stage by its exit code and the ends of its output."""
    last = (said.strip().splitlines() or [""])[-1][:300]
    if code == 0:
        return "ended", ""
    if code == SKIPPED:
        return "skipped", last or "no reason given"
    if code is None:
        return "failed", f"not done after {limit:.0f} s"
    error = (complained.strip().splitlines() or [last or "no message"])[-1][:300]
    return "failed", f"exit {code}: {error}" if code > 0 else f"signal {-code}: {error}"


def end_leftovers(out: Path) -> None:
    """Kill what a day in this folder has started and not ended: children of children, and those of a killed day."""
    mark = f"{MARK}={out}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def _die_with_the_driver() -> None:
    """A stage whose driver was killed must not go on holding the GPU (prctl, PR_SET_PDEATHSIG)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _end(number: int, frame: object) -> NoReturn:
    raise Ended


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
