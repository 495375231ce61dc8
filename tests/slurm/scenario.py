"""What must hold on a real SLURM: `tests/slurm/run` brings one up and runs this (`scenario.py [RESULT.json]`).

A run that is told to stop saves, is requeued, resumes and ends with the weights of a run that nobody disturbed: as one
process, and as two processes on two nodes. A run that fails and a run that is cancelled are not started again. Merging
and scoring that were queued with it start when it has succeeded, not when it is requeued, and never where it failed.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 40
TOLD_AFTER = 5
"""Steps after which a run is told to stop."""
TOOLS = '[{"name": "ring", "description": "Call", "parameters": {"who": {"description": "Name", "type": "str"}}}]'
CONFIG = """\
recipe: function_calling
model: {{name_or_path: surefit/nano}}
lora: {{r: 8}}
data: {{train: {folder}/rows.jsonl, eval: 0.2, max_length: 256}}
train:
  {{max_steps: {steps}, num_train_epochs: 50, global_batch_size: 8, per_device_train_batch_size: 2,
   learning_rate: 5e-3}}
hardware: {{gpu: cpu}}
checkpoint: {{save_steps: 15}}
slurm: {{time: "10:00", cpus_per_gpu: 1, signal_seconds: 60}}
output_dir: {folder}/{name}
"""


class Cluster:
    """Runs in one folder, through `surefit slurm` and SLURM's own commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        answers = [json.dumps([{"name": "ring", "arguments": {"who": f"person {n}"}}]) for n in range(60)]
        rows = [{"query": f"Ring person {n}", "tools": TOOLS, "answers": answer} for n, answer in enumerate(answers)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def submit(self, name: str, nodes: int) -> str:
        """The number of the job that trains run `name`."""
        arguments = ["--nodes", str(nodes), "--gpus-per-node", "1", "--interface", "lo"]
        return str(self.surefit("slurm", self.config(name), *arguments, "--submit")["job_id"])

    def submit_all(self, name: str) -> dict[str, str]:
        """The number of the job of each stage of run `name`, all queued at once."""
        answer = self.surefit("slurm", self.config(name), "--stage", "run", "--submit")
        return {job["stage"]: str(job["job_id"]) for job in answer["jobs"]}

    def config(self, name: str) -> str:
        config = self.folder / f"{name}.yaml"
        config.write_text(CONFIG.format(folder=self.folder, name=name, steps=STEPS), encoding="utf-8")
        return str(config)

    def surefit(self, *arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "surefit", *arguments, "--json"]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, timeout=120)
        if answer.returncode:
            raise SystemExit(f"{command}: exit code {answer.returncode}\n{answer.stdout}{answer.stderr}")
        value: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        return value

    def job(self, number: str) -> dict[str, str]:
        """SLURM's own record of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", _slurm("scontrol", "show", "job", number)))

    def score(self, name: str) -> str:
        """The number of the array job of two tasks that scores the checkpoints of run `name`."""
        arguments = ["slurm", str(self.folder / f"{name}.yaml"), "--evaluate", "--array", "2"]
        return str(self.surefit(*arguments, "--submit")["job_id"])

    def lines(self, name: str, file: str) -> list[dict[str, Any]]:
        path = self.folder / name / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def resolved(self, name: str) -> str:
        path = self.folder / name / "resolved.yaml"
        return path.read_text() if path.exists() else ""

    def log(self, name: str) -> str:
        return "\n".join(path.read_text() for path in (self.folder / name).glob("slurm-*.out"))

    def wait(self, name: str, number: str, what: str, done: Callable[[], bool], seconds: float = 300) -> None:
        """Until it is so; the job's output where it never is."""
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                raise SystemExit(f"{name}: not {what} after {seconds:.0f} s\n{self.job(number)}\n{self.log(name)}")
            time.sleep(0.3)

    def wait_for_steps(self, name: str, number: str, steps: int = TOLD_AFTER) -> None:
        self.wait(name, number, f"at step {steps}", lambda: len(self.lines(name, "metrics.jsonl")) >= steps)

    def wait_for_end(self, name: str, number: str) -> dict[str, str]:
        """The record of a job that will not run again."""
        ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
        hurried = False

        def done() -> bool:
            nonlocal hurried
            job = self.job(number)
            if job["JobState"] == "PENDING" and job["Restarts"] != "0" and not hurried:
                # SLURM lets a requeued job wait for two minutes: what happens then is not about that. Not at once:
                # within the second of the requeue slurmd answers "Job credential revoked", and the job has failed.
                command = ["scontrol", "update", f"JobId={number}", "StartTime=now+5"]
                hurried = subprocess.run(command, capture_output=True, timeout=30).returncode == 0
            return job["JobState"] in ends

        self.wait(name, number, "over", done)
        return self.job(number)

    def outcome(self, name: str, record: dict[str, str]) -> dict[str, Any]:
        """What is left of a run."""
        adapter = self.folder / name / "adapter" / "adapter_model.safetensors"
        return {
            "state": record["JobState"],
            "restarts": int(record["Restarts"]),
            "weights": hashlib.sha256(adapter.read_bytes()).hexdigest() if adapter.exists() else None,
            "events": [line["event"] for line in self.lines(name, "events.jsonl") if line["stage"] == "train"],
            "losses": [line["loss"] for line in self.lines(name, "metrics.jsonl") if "loss" in line],
            "mode": re.findall(r"^  mode: (\w+)", self.resolved(name), re.MULTILINE),
            "log": self.log(name),
        }


def _slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def requeued(cluster: Cluster, nodes: int) -> dict[str, Any]:
    """An undisturbed run, and one that gets the signal that SLURM sends near the end of a job's time."""
    found: dict[str, Any] = {}
    for kind in ("undisturbed", "told"):
        name = f"{kind}-{nodes}"
        number = cluster.submit(name, nodes)
        if kind == "told":
            cluster.wait_for_steps(name, number)
            _slurm("scancel", "--batch", "--signal=USR1", number)
        found[kind] = cluster.outcome(name, cluster.wait_for_end(name, number))
    return found | {"script": (cluster.folder / name / "job.sbatch").read_text()}


def scored(cluster: Cluster, name: str) -> dict[str, Any]:
    """The checkpoints of a run, scored by an array of two tasks on two nodes, which share them out."""
    number = cluster.score(name)
    waiting = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}

    def shown() -> dict[str, Any]:
        runs = cluster.surefit("runs", str(cluster.folder))["runs"]
        found: dict[str, Any] = next(run["eval_job"] for run in runs if Path(run["run"]).name == name)
        return found

    cluster.wait(name, number, "scored", lambda: not waiting & shown()["states"].keys())
    summary = json.loads((cluster.folder / name / "eval" / "checkpoints.json").read_text(encoding="utf-8"))
    checkpoints = sorted(path.name for path in (cluster.folder / name / "checkpoints").glob("step-*"))
    return {"job": shown(), "number": number, "summary": summary, "checkpoints": checkpoints, "log": cluster.log(name)}


def cancelled(cluster: Cluster) -> dict[str, Any]:
    number = cluster.submit("cancelled", nodes=1)
    cluster.wait_for_steps("cancelled", number)
    running = cluster.surefit("runs", str(cluster.folder))["runs"]
    _slurm("scancel", number)
    found = cluster.outcome("cancelled", cluster.wait_for_end("cancelled", number))
    shown = {Path(row["run"]).name: row["job"] for row in running if row["job"]}
    return {**found, "shown": shown["cancelled"], "number": number}


def judged(cluster: Cluster) -> dict[str, str]:
    """What is printed about a script that is only written: one that can run here, and one for another partition."""
    found = {}
    for kind, partition in (("possible", "main"), ("impossible", "other")):
        command = [sys.executable, "-m", "surefit", "slurm", cluster.config(kind), "-o", f"{kind}.sbatch"]
        command += ["--set", f"slurm.partition={partition}"]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=cluster.folder, timeout=120)
        found[kind] = " ".join((answer.stdout + answer.stderr).split())
    return found


def failing(cluster: Cluster) -> dict[str, Any]:
    """Its rows are gone when it starts."""
    blocker = _slurm(
        "sbatch", "--parsable", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 60"
    ).strip()
    number = cluster.submit("failing", nodes=1)
    config = cluster.folder / "failing.yaml"
    config.write_text(config.read_text().replace("rows.jsonl", "gone.jsonl"), encoding="utf-8")
    _slurm("scancel", blocker)
    return cluster.outcome("failing", cluster.wait_for_end("failing", number))


def chained(cluster: Cluster) -> dict[str, Any]:
    """Train, merge and evaluate, queued at once; training is told to stop, and requeued, before it is done."""
    jobs = cluster.submit_all("chained")
    cluster.wait_for_steps("chained", jobs["train"])
    _slurm("scancel", "--batch", "--signal=USR1", jobs["train"])
    cluster.wait("chained", jobs["train"], "requeued", lambda: cluster.job(jobs["train"])["Restarts"] != "0")
    between = {stage: cluster.job(number) for stage, number in jobs.items() if stage != "train"}
    records = {stage: cluster.wait_for_end("chained", number) for stage, number in jobs.items()}
    summary = cluster.folder / "chained" / "eval" / "summary.json"
    return {
        "between": {stage: [record["JobState"], record["Reason"]] for stage, record in between.items()},
        "states": {stage: record["JobState"] for stage, record in records.items()},
        "events": [[line["stage"], line["event"]] for line in cluster.lines("chained", "events.jsonl")],
        "scored": sorted(json.loads(summary.read_text())["sets"]["eval"]["variants"]) if summary.exists() else None,
        "log": cluster.log("chained"),
    }


def broken_chain(cluster: Cluster) -> dict[str, str]:
    """The states of the three jobs where training fails: its rows are gone when it starts."""
    blocker = _slurm(
        "sbatch", "--parsable", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 60"
    ).strip()
    jobs = cluster.submit_all("broken")
    config = cluster.folder / "broken.yaml"
    config.write_text(config.read_text().replace("rows.jsonl", "gone.jsonl"), encoding="utf-8")
    _slurm("scancel", blocker)
    return {stage: cluster.wait_for_end("broken", number)["JobState"] for stage, number in jobs.items()}


def main(result: str | None = None) -> int:
    with tempfile.TemporaryDirectory(prefix="surefit-slurm-runs-") as folder:
        cluster = Cluster(Path(folder))
        found = {
            "one": requeued(cluster, nodes=1),
            "scored": scored(cluster, "told-1"),
            "judged": judged(cluster),
            "cancelled": cancelled(cluster),
            "failing": failing(cluster),
            "chained": chained(cluster),
            "broken": broken_chain(cluster),
            "two": requeued(cluster, nodes=2),
        }
    if result:
        Path(result).write_text(json.dumps(found), encoding="utf-8")
    for name in ("one", "two"):
        told, undisturbed = found[name]["told"], found[name]["undisturbed"]
        same = told["weights"] == undisturbed["weights"] is not None
        print(f"{name}: {told['state']} after {told['restarts']} restart, {'the same' if same else 'OTHER'} weights")
    print(*(f"{name}: {found[name]['state']}, {found[name]['restarts']} restarts" for name in ("cancelled", "failing")))
    print(
        *(
            f"{name}: {', '.join(states.values())}"
            for name, states in (("chained", found["chained"]["states"]), ("broken", found["broken"]))
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
