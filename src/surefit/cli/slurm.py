"""The verb `slurm`. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from surefit.cli.exits import verb
from surefit.cli.options import ConfigFile, Overrides
from surefit.cli.render import Output


@verb
def slurm(
    out: Output,
    config: ConfigFile,
    overrides: Overrides = None,
    stage: Annotated[
        Literal["train", "merge", "evaluate", "run"],
        typer.Option(help="What the job does; run is a job for each of them, one after the other."),
    ] = "train",
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines; default: hardware.nodes, or 1.")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus-per-node", min=0, help="GPUs on each; default: hardware.count, or 1.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it to sbatch.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it here; of a run, a folder.")] = None,
    interface: Annotated[str | None, typer.Option(help="The network interface to talk over, e.g. ib0.")] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Instead an array job that scores checkpoints.")] = False,
    prepare: Annotated[bool, typer.Option("--prepare", help="Instead an array job that makes data.tokenized.")] = False,
    array: Annotated[
        str | None, typer.Option(metavar="TASKS[%AT_ONCE]", help="Tasks of an array job, and how many run at once.")
    ] = None,
) -> int:
    """Check the run and print the batch script of a job that saves, requeues itself and resumes until it is done."""
    if array and not (evaluate or prepare):
        raise typer.BadParameter("--array needs --evaluate or --prepare")
    if evaluate + prepare + (stage != "train") > 1:
        raise typer.BadParameter("--stage, --evaluate and --prepare cannot be combined: give one of them")
    if gpus == 0 and (evaluate or stage != "merge"):
        raise typer.BadParameter("--gpus-per-node 0 is for --stage merge; elsewhere set hardware.gpu: cpu")
    if stage == "merge" and ((nodes or 1) > 1 or (gpus or 1) > 1):
        raise typer.BadParameter("a merge is one process: --stage merge takes one node, and one GPU or none")
    if submit and output:
        raise typer.BadParameter("--submit writes job.sbatch into the run directory; --output is without it")
    from surefit.cli.slurm_jobs import SlurmOptions, submit_evaluation_array, submit_prepare_array, submit_stages

    changes, options = overrides or (), SlurmOptions(nodes, gpus, submit, output, interface, array)
    if evaluate:
        return submit_evaluation_array(out, config, changes, options)
    if prepare:
        return submit_prepare_array(out, config, changes, options)
    return submit_stages(out, config, changes, stage, options)
