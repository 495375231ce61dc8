"""SLURM: a batch script."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from surefit.facts.job_script import read_job_script, setup_of_job
from surefit.foreign.requirements import stack_of_installs
from surefit.foreign.result import Foreign


def read_script(path: Path) -> Foreign:
    """What a batch script asks for, and what it launches.

    Raises:
        ConfigError: the file cannot be read.
    """
    job = read_job_script(path)
    stack, places = stack_of_installs(job.installs, path)
    setup = setup_of_job(job)
    return Foreign(
        "slurm", path, replace(setup, places={**places, **setup.places}), None, {}, (), job, (), stack=stack
    )  # fmt: skip
