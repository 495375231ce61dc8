"""The jobs of `slurm`: check the run and print its batch script; with --submit, submit the job. Torch-free.

A run can have a job for each of its stages, submitted one after the other or all at once, and an array job whose tasks
score its checkpoints.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surefit.cli.findings import show_findings_on_failure
from surefit.cli.render import Output
from surefit.config.inputs import input_files
from surefit.config.load import load_config
from surefit.config.schema import SureFitConfig
from surefit.core import env
from surefit.core.errors import EXIT_OK, ConfigError, MachineError
from surefit.core.output import output_file, text_with
from surefit.core.rundir import RunDir, read_json, write_atomic, write_json
from surefit.core.units import GIB
from surefit.launch.slurm import (
    ARRAY_LOG,
    ENDED,
    LOG,
    BatchJob,
    JobStage,
    check_submission,
    dependency_options,
    job_states,
    render_script,
    submit,
)
from surefit.stages.checking import require_no_errors, run_check
from surefit.stages.run_context import load_run_context

if TYPE_CHECKING:
    from surefit.stages.run_context import RunContext

STAGES: tuple[JobStage, ...] = ("train", "merge", "evaluate")
"""The stages that are jobs, in their order. The stages before them take seconds, and so does the report."""


ENVIRONMENT_RULES = ("TRK001", "TRK007", "MOD005")
"""Findings about variables and logins, which are no errors here but stop the job when it starts."""
TASK_BYTES = 4 * GIB
"""Bytes of rows that a task of `--prepare` tokenizes, by default."""


@dataclass(frozen=True)
class SlurmOptions:
    """Options of `slurm`.

    Attributes:
        nodes, per_node: nodes, and processes per node; None: as in the config (for array tasks: one).
        submit: submit the script with sbatch.
        output: file for the script instead.
        interface: the network interface for communication.
        array: of an array job, "TASKS" or "TASKS%AT_ONCE".
    """

    nodes: int | None = None
    per_node: int | None = None
    submit: bool = False
    output: Path | None = None
    interface: str | None = None
    array: str | None = None


@dataclass(frozen=True)
class _Stage:
    """A stage of the run as a job: its script, and the paths of script, record and output."""

    name: str
    job: BatchJob
    script: str

    @property
    def own(self) -> Path:
        """Path of the script that is submitted."""
        return RunDir(self.job.run).stage_script(self.name)

    @property
    def record(self) -> Path:
        """File that records its job."""
        return RunDir(self.job.run).stage_job(self.name)


def submit_stages(
    out: Output, target: Path, overrides: Sequence[str], stage: JobStage | Literal["run"], options: SlurmOptions
) -> int:
    """Print the batch script of a stage, write it to a file, or submit it from the run directory.

    Args:
        stage: one of `STAGES`, or `run` for all of them, each after the one before it.
    """
    if stage == "run":
        return _all_stages(out, target, overrides, options)
    stage_job = _stage(out, target, overrides, stage, options)
    if stage == "train":
        _say_what_to_know(out, stage_job.job)
    after = _find_awaited_job(stage_job.job.run, stage)
    if after:
        out.note(f"job {after} comes before: this one starts when that has succeeded")
    facts = {"stage": stage, "after": after, **stage_job.job.places}
    return _deliver(
        out, stage_job.job, stage_job.script, options, stage_job.own, stage_job.record, stage_job.job.run / LOG, facts
    )


def _all_stages(out: Output, target: Path, overrides: Sequence[str], options: SlurmOptions) -> int:
    """Print, write or submit a job for each stage; the command line's nodes and GPUs are for training."""
    jobs = [_stage(out, target, overrides, name, options if name == "train" else SlurmOptions()) for name in STAGES]
    _say_what_to_know(out, jobs[0].job)
    folder = options.output
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError(
            "is a file; three scripts need a folder", code="E1049", path=folder, help="name a folder, or a new one"
        )
    results: list[dict[str, Any]] = []
    for stage in jobs:
        number, after = None, results[-1]["job_id"] if results else None
        path = stage.own if folder is None else folder / f"{stage.name}.sbatch"
        if options.submit or folder:
            _write(stage.job.run / LOG, path, stage.script, stage.job)
        else:
            out.say(stage.script.rstrip("\n") + "\n")
        facts = {"stage": stage.name, "after": after, **stage.job.places}
        if options.submit:
            number = _submit_next(path, stage.name, results)
            _remember(out, stage.record, number, stage.job.run / LOG, facts)
        script_path = str(path) if options.submit or folder else None
        results.append({"script": stage.script, "path": script_path, "job_id": number, **facts})
    if folder:
        out.say(f"Wrote {', '.join(result['path'] for result in results)}; submit them with:")
        paths = [Path(result["path"]) for result in results]
        for line in _by_hand(paths):
            out.say(line)
        for path in paths:
            _say_whether_accepted(out, path)
    elif not options.submit:
        out.note("nothing was written: -o FOLDER writes the three scripts, --submit queues them one after the other")
    out.result({"jobs": results})
    return EXIT_OK


def _by_hand(paths: Sequence[Path]) -> list[str]:
    """Return the shell lines that submit the scripts one after the other.

    >>> _by_hand([Path("train.sbatch"), Path("merge.sbatch")])
    ['job=$(sbatch --parsable train.sbatch)', \
'job=$(sbatch --parsable --dependency=afterok:${job%;*} --kill-on-invalid-dep=yes merge.sbatch)']
    """
    dependencies = ["", *[" ".join(dependency_options("${job%;*}")) + " "] * (len(paths) - 1)]
    return [
        f"job=$(sbatch --parsable {option}{shlex.quote(str(path))})"
        for option, path in zip(dependencies, paths, strict=True)
    ]


def _submit_next(path: Path, stage: str, before: Sequence[Mapping[str, Any]]) -> str:
    """Submit a stage as a job that starts after the stage before it.

    Raises:
        MachineError: sbatch fails; the message has the jobs that are queued already.
    """
    try:
        return submit(path, before[-1]["job_id"] if before else None)
    except MachineError as error:
        if not before:
            raise
        queued = " ".join(result["job_id"] for result in before)
        raise MachineError(
            error.message,
            code=error.code,
            path=error.path,
            help=f"queued before it: {queued} (`scancel {queued}` takes that back); fix it, and add the rest with "
            f"`surefit slurm CONFIG --stage {stage} --submit`, which waits for what is queued",
        ) from error


def _stage(out: Output, target: Path, overrides: Sequence[str], name: JobStage, options: SlurmOptions) -> _Stage:
    """Return a stage as a job with its machines: training as in the config, the other stages with one GPU."""
    if name == "train":
        overrides = _with_machines(load_config(target, overrides).config, overrides, options.nodes, options.per_node)
        job = _job(out, target, overrides, options)
    elif name == "merge" and options.per_node == 0:
        job = _with_scoring_machines(
            _job(out, target, [*overrides, "hardware.gpu=cpu"], options), replace(options, per_node=1)
        )
    else:
        job = _with_scoring_machines(_job(out, target, overrides, options), options)
    return _Stage(name, job, render_script(job, name))


def _with_scoring_machines(job: BatchJob, options: SlurmOptions) -> BatchJob:
    """Return the job with the nodes and devices of the options, by default one device, instead of the training
    machines."""
    hardware = job.config.hardware.model_copy(update={"nodes": options.nodes or 1, "count": options.per_node or 1})
    return replace(job, config=job.config.model_copy(update={"hardware": hardware}))


def _find_awaited_job(run: Path, stage: JobStage) -> str | None:
    """Return the job of the nearest earlier stage that was submitted and may still run, or None."""
    earlier_stages = STAGES[: STAGES.index(stage)]
    job_numbers = (_find_active_job(RunDir(run).stage_job(name)) for name in reversed(earlier_stages))
    return next((number for number in job_numbers if number), None)


def submit_evaluation_array(out: Output, target: Path, overrides: Sequence[str], options: SlurmOptions) -> int:
    """Make the array job that scores every checkpoint, after the training job if that has not ended."""
    job = _with_scoring_machines(_job(out, target, overrides, options), options)
    run, section = RunDir(job.run), job.config.checkpoint
    existing = len(list(run.checkpoints.glob("step-*")))
    kept_count = section.save_total_limit + (section.best_total_limit if section.metric_for_best_model else 0)
    after = _find_active_job(run.slurm)
    waits = after is not None or not existing
    tasks, at_once = _tasks(options.array, max(existing, kept_count) if waits else existing)
    script = render_script(job, "checkpoints", tasks=tasks, at_once=at_once, after=after)
    if waits:
        out.note(f"training keeps {kept_count} checkpoints (checkpoint.save_total_limit): those are scored")
    if after:
        out.note(f"job {after} trains this run: the tasks start when it has ended")
    facts = {"tasks": tasks, "after": after, **job.places}
    return _deliver(out, job, script, options, run.eval / "job.sbatch", run.eval_array, job.run / ARRAY_LOG, facts)


def submit_prepare_array(out: Output, target: Path, overrides: Sequence[str], options: SlurmOptions) -> int:
    """Make the array job that writes the shards of `data.tokenized`, on CPUs alone."""
    from surefit.stages.tokenize_shards import source_files, tokenized_directory

    loaded = load_config(target, overrides)
    tokenized_directory(loaded.config)
    hardware = loaded.config.hardware.model_copy(update={"gpu": "cpu", "nodes": 1, "count": 1})
    config = loaded.config.model_copy(update={"hardware": hardware})
    run = RunDir(Path(config.output_dir).absolute())
    job = BatchJob(config, target.absolute(), run.path, Path.cwd(), overrides, interface=options.interface)
    size = sum(file["bytes"] for file in source_files(config))
    tasks, at_once = _tasks(options.array, max(1, -(-size // TASK_BYTES)))
    script = render_script(job, "prepare", tasks=tasks, at_once=at_once)
    facts = {"tasks": tasks, "after": None, "nodes": 1, "processes_per_node": 1, "processes": 1}
    script_path, record = run.stage_script("prepare"), run.stage_job("prepare")
    return _deliver(out, job, script, options, script_path, record, job.run / ARRAY_LOG, facts)


def _tasks(array: str | None, usual: int) -> tuple[int, int | None]:
    """Return (number of tasks, number that run at once).

    Raises:
        ConfigError: not of the form TASKS or TASKS%AT_ONCE.
    """
    if array is None:
        return usual, None
    match = re.fullmatch(r"([1-9]\d{0,5})(?:%([1-9]\d{0,5}))?", array)
    if not match:
        raise ConfigError(
            f"--array {array} says neither how many tasks nor how many at once",
            code="E1050",
            help="--array 8 is eight tasks, --array 8%2 two of them at a time",
        )
    return int(match[1]), int(match[2]) if match[2] else None


def _find_active_job(record: Path) -> str | None:
    """Return the recorded job's number if it may still run, else None."""
    number = str(read_json(record).get("job_id", "")) if record.exists() else ""
    state = job_states([number]).get(number)
    return number if state is not None and state not in ENDED else None


def _job(out: Output, target: Path, overrides: Sequence[str], options: SlurmOptions) -> BatchJob:
    """Check the run, and return it as a job."""
    run_context = load_run_context(target, overrides)
    for line in run_context.adopted.lines():
        out.note(line)
    report = run_check(run_context)
    with show_findings_on_failure(out):
        require_no_errors(report)
    assert run_context.resolved  # anything that prevents resolving is an error finding
    return BatchJob(
        config=run_context.resolved.config,
        config_file=target.absolute(),
        run=run_context.run.path.absolute(),
        directory=Path.cwd(),
        overrides=overrides,
        interface=options.interface,
        missing=tuple(_missing_variables(run_context, report)),
    )


def _missing_variables(found: RunContext, report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the job needs and this environment lacks; the job inherits this environment."""
    for finding in report["findings"]:
        if finding["code"] in ENVIRONMENT_RULES:
            yield f"{finding['code']}: {finding['message']}"
    model = found.model
    # For a GPU of another machine, the check leaves this to that machine, and the job runs there.
    runs_elsewhere = found.hardware is not None and found.hardware.source != "detected"
    if model and model.gated and not model.has_weights and runs_elsewhere and env.hub_token() is None:
        yield f"{model.name} is gated, and no HF_TOKEN is set here: the job could not download it"


def _deliver(
    out: Output,
    job: BatchJob,
    script: str,
    options: SlurmOptions,
    own: Path,
    record: Path,
    log: Path,
    places: Mapping[str, Any],
) -> int:
    """Print the script, write it to a file, or submit it.

    Args:
        job: the job of the script.
        own: path of a submitted script.
        record: the file that records its job.
        log: the job's output, with SLURM's %j or %A in its name.
        places: fields of the result about the processes.
    """
    result: dict[str, Any] = {"script": script, "path": None, "job_id": None, **places}
    if options.submit or options.output:
        path = own if options.output is None else options.output
        _write(log, path, script, job)
        result["path"] = str(path)
        # An array script has its dependency in its header; the scripts of the stages get theirs from sbatch's options.
        after = places.get("after") if "stage" in places else None
        if options.submit:
            result["job_id"] = number = submit(path, after)
            _remember(out, record, number, log, places)
        else:
            dependency = "".join(f"{option} " for option in dependency_options(after)) if after else ""
            out.say(f"Wrote {path}; submit it with: sbatch {dependency}{path}")
            _say_whether_accepted(out, path)
    else:
        out.say(script.rstrip("\n"))
        out.note("nothing was written: -o FILE writes the script, --submit hands it to sbatch")
    out.result(result)
    return EXIT_OK


def _write(log: Path, path: Path, script: str, job: BatchJob) -> None:
    """Write a batch script, and make the run directory.

    Raises:
        ConfigError: another file of that name is there, or it is one that the run reads.
    """
    output_file(path, input_files(job.config, job.config_file), earlier=text_with("# Written by SureFit", "#SBATCH"))
    RunDir(log.parent).create()  # SLURM writes the output there, and makes no folder
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, script)


def _say_whether_accepted(out: Output, script: Path) -> None:
    if answer := check_submission(script):
        out.note(f"sbatch --test-only {script}: {answer}")


def _remember(out: Output, record: Path, number: str, log: Path, places: Mapping[str, Any]) -> None:
    output = str(log.with_name(log.name.replace("%j", number).replace("%A", number)))
    write_json(record, {"job_id": number, "submitted": time.time(), "output": output, **places})
    stage_text = f" ({places['stage']})" if "stage" in places else ""
    out.say(f"Submitted job {number}{stage_text}; its output: {output}", "green")


def _with_machines(
    config: SureFitConfig, overrides: Sequence[str], nodes: int | None, per_node: int | None
) -> list[str]:
    """Return the overrides, with the command line's counts if they differ from the config's: the run records
    overrides."""
    counts = {"nodes": nodes, "count": per_node}
    config_values = {"nodes": config.hardware.nodes, "count": config.hardware.count}
    return [
        *overrides,
        *(f"hardware.{key}={n}" for key, n in counts.items() if n is not None and n != config_values[key]),
    ]


def _say_what_to_know(out: Output, job: BatchJob) -> None:
    if job.config.hardware.gpu == "auto":
        out.note("hardware.gpu is auto: the check looked at this machine; name the GPU of the nodes, e.g. h100")
    for line in job.missing:
        out.note(line)
    if (job.run / "checkpoints").exists():
        out.note(f"{job.run} holds checkpoints: the job continues that run")
