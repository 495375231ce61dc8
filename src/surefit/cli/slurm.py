"""The verb `slurm`: check, the arithmetic of the processes, the batch script; with --submit the job. Torch-free.

Two jobs can be made of a run: the one that trains it, and an array of tasks that score its checkpoints.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli.training import findings_said
from surefit.config.load import load_config
from surefit.config.schema import Config
from surefit.core.errors import EXIT_OK, ConfigError
from surefit.core.rundir import RunDir, read_json, write_atomic, write_json
from surefit.launch.slurm import ARRAY_LOG, ENDED, LOG, BatchJob, job_states, render, render_array, submit
from surefit.stages.checking import checked, require_no_errors
from surefit.stages.prepare import gather

if TYPE_CHECKING:
    from surefit.cli.render import Output


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for.

    Attributes:
        nodes, per_node: machines and processes on each; as in the config if not said (of an array's tasks: one).
        submit: hand the script to sbatch.
        output: write it there instead.
        interface: the network interface to talk over.
        array: of an array job, "TASKS" or "TASKS%AT_ONCE".
    """

    nodes: int | None = None
    per_node: int | None = None
    submit: bool = False
    output: Path | None = None
    interface: str | None = None
    array: str | None = None


def slurm(out: Output, target: Path, overrides: Sequence[str], wishes: Wishes) -> int:
    """The job that trains: print the script, write it to a file, or submit it from the run directory."""
    overrides = _with_machines(load_config(target, overrides).config, overrides, wishes.nodes, wishes.per_node)
    job = _job(out, target, overrides, wishes)
    script = render(job)
    _say_what_to_know(out, job)
    run = RunDir(job.run)
    places = {
        "nodes": job.nodes, "processes_per_node": job.per_node, "processes": job.processes,
    }  # fmt: skip
    return _deliver(out, script, wishes, run.job_script, run.slurm, job.run / LOG, places)


def evaluation_array(out: Output, target: Path, overrides: Sequence[str], wishes: Wishes) -> int:
    """The array job that scores every checkpoint, after the job that trains where that one has not ended."""
    training = _job(out, target, overrides, wishes)
    hardware = training.config.hardware.model_copy(update={"nodes": wishes.nodes or 1, "count": wishes.per_node or 1})
    job = replace(training, config=training.config.model_copy(update={"hardware": hardware}))
    run, section = RunDir(job.run), job.config.checkpoint
    there = len(list(run.checkpoints.glob("step-*")))
    kept = section.save_total_limit + (section.best_total_limit if section.keep_best else 0)
    after = _training_job(run)
    waits = after is not None or not there
    tasks, at_once = _tasks(wishes.array, max(there, kept) if waits else there)
    script = render_array(job, tasks, at_once, after)
    if waits:
        out.note(f"training keeps {kept} checkpoints (checkpoint.save_total_limit): those are scored")
    if after:
        out.note(f"job {after} trains this run: the tasks start when it has ended")
    places = {
        "tasks": tasks, "after": after, "nodes": job.nodes, "processes_per_node": job.per_node,
        "processes": job.processes,
    }  # fmt: skip
    return _deliver(out, script, wishes, run.eval / "job.sbatch", run.eval_array, job.run / ARRAY_LOG, places)


def _tasks(array: str | None, usual: int) -> tuple[int, int | None]:
    """(tasks, how many at once).

    Raises:
        ConfigError: not of the form TASKS or TASKS%AT_ONCE.
    """
    if array is None:
        return usual, None
    found = re.fullmatch(r"([1-9]\d{0,5})(?:%([1-9]\d{0,5}))?", array)
    if not found:
        raise ConfigError(
            f"--array {array} says neither how many tasks nor how many at once",
            help="--array 8 is eight tasks, --array 8%2 two of them at a time",
        )
    return int(found[1]), int(found[2]) if found[2] else None


def _training_job(run: RunDir) -> str | None:
    """The job that trains this run, if we submitted one and it may still go on."""
    number = str(read_json(run.slurm).get("job_id", "")) if run.slurm.exists() else ""
    state = job_states([number]).get(number)
    return number if state is not None and state not in ENDED else None


def _job(out: Output, target: Path, overrides: Sequence[str], wishes: Wishes) -> BatchJob:
    """The run, checked, as a job."""
    found = gather(target, overrides)
    for line in found.adopted.lines():
        out.note(line)
    with findings_said(out):
        require_no_errors(checked(found))
    assert found.resolved  # what keeps it from being resolved is a finding
    return BatchJob(
        config=found.resolved.config,
        config_file=target.absolute(),
        run=found.run.path.absolute(),
        directory=Path.cwd(),
        overrides=overrides,
        interface=wishes.interface,
    )


def _deliver(
    out: Output, script: str, wishes: Wishes, own: Path, record: Path, log: Path, places: Mapping[str, Any]
) -> int:
    """Print the script, write it to a file, or submit it.

    Args:
        own: where a script that is submitted lies.
        record: the file that remembers its job.
        log: of the job, with SLURM's %j or %A in its name.
        places: what the result says of the processes.
    """
    result: dict[str, Any] = {"script": script, "path": None, "job_id": None, **places}
    if wishes.submit or wishes.output:
        path = own if wishes.output is None else wishes.output
        RunDir(log.parent).create()  # SLURM writes the output there, and makes no folder
        write_atomic(path, script)
        result["path"] = str(path)
        if wishes.submit:
            result["job_id"] = number = submit(path)
            output = str(log.with_name(log.name.replace("%j", number).replace("%A", number)))
            write_json(record, {"job_id": number, "submitted": time.time(), "output": output, **places})
            out.say(f"Submitted job {number}; its output: {output}", "green")
        else:
            out.say(f"Wrote {path}; submit it with: sbatch {path}")
    else:
        out.say(script.rstrip("\n"))
        out.note("nothing was written: -o FILE writes the script, --submit hands it to sbatch")
    out.result(result)
    return EXIT_OK


def _with_machines(config: Config, overrides: Sequence[str], nodes: int | None, per_node: int | None) -> list[str]:
    """The overrides, with the numbers of the command line where the config says others: the run records them."""
    asked = {"nodes": nodes, "count": per_node}
    now = {"nodes": config.hardware.nodes, "count": config.hardware.count}
    return [*overrides, *(f"hardware.{key}={n}" for key, n in asked.items() if n is not None and n != now[key])]


def _say_what_to_know(out: Output, job: BatchJob) -> None:
    if job.config.hardware.gpu == "auto":
        out.note("hardware.gpu is auto: the check looked at this machine; name the GPU of the nodes, e.g. h100")
    if (job.run / "checkpoints").exists():
        out.note(f"{job.run} holds checkpoints: the job continues that run")
