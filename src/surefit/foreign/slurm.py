"""SLURM: a batch script."""

from __future__ import annotations

from pathlib import Path

from surefit.facts.job_script import read_job_script, setup_of_job
from surefit.foreign.result import Foreign


def read_script(path: Path) -> Foreign:
    """What a batch script asks for, and what it launches.

    Raises:
        ConfigError: the file cannot be read.
    """
    job = read_job_script(path)
    return Foreign("slurm", path, setup_of_job(job), None, {}, (), job, ())
