"""The verb `slurm`: check, the arithmetic of the processes, the batch script; with --submit the job. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli.checking import checked
from surefit.cli.prepare import gather
from surefit.cli.training import stop_at_errors
from surefit.config.load import load_config
from surefit.config.schema import Config
from surefit.core.errors import EXIT_OK
from surefit.core.rundir import RunDir, write_atomic, write_json
from surefit.launch.slurm import LOG, Job, render, submit

if TYPE_CHECKING:
    from surefit.cli.render import Output


def slurm(
    out: Output,
    target: Path,
    overrides: Sequence[str],
    *,
    nodes: int | None,
    per_node: int | None,
    submit: bool,
    output: Path | None,
    interface: str | None,
) -> int:
    """Print the script, write it to `output`, or submit it from the run directory."""
    overrides = _with_machines(load_config(target, overrides).config, overrides, nodes, per_node)
    found = gather(target, overrides)
    stop_at_errors(out, checked(found))
    assert found.resolved  # what keeps it from being resolved is a finding
    run = RunDir(found.run.path.absolute())
    job = Job(
        config=found.resolved.config,
        config_file=target.absolute(),
        run=run.path,
        directory=Path.cwd(),
        overrides=overrides,
        interface=interface,
    )
    script = render(job)
    _say_what_to_know(out, job, run)
    result: dict[str, Any] = {
        "script": script, "path": None, "job_id": None, "nodes": job.nodes, "processes_per_node": job.per_node,
        "processes": job.processes,
    }  # fmt: skip
    if submit or output:
        path = run.job_script if output is None else output
        run.create()  # SLURM writes the output there, and makes no folder
        write_atomic(path, script)
        result["path"] = str(path)
        if submit:
            result["job_id"] = _submit(run, path, result)
            out.say(f"Submitted job {result['job_id']}; its output: {_log(run, result['job_id'])}", "green")
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


def _say_what_to_know(out: Output, job: Job, run: RunDir) -> None:
    if job.config.hardware.gpu == "auto":
        out.note("hardware.gpu is auto: the check looked at this machine; name the GPU of the nodes, e.g. h100")
    if run.checkpoints.exists():
        out.note(f"{run.path} holds checkpoints: the job continues that run")


def _submit(run: RunDir, path: Path, result: dict[str, Any]) -> str:
    number = submit(path)
    kept = {key: result[key] for key in ("nodes", "processes_per_node", "processes")}
    write_json(run.slurm, {"job_id": number, "submitted": time.time(), "output": _log(run, number), **kept})
    return number


def _log(run: RunDir, number: str) -> str:
    return str(run.path / LOG.replace("%j", number))
