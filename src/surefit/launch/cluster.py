"""Tasks on the machines of a Ray cluster. Ray schedules them, and repeats tasks whose process or machine is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from surefit.core import env
from surefit.core.errors import MachineError
from surefit.core.packaging import install_extra
from surefit.core.rundir import machine_errors

Job = TypeVar("Job")
Result = TypeVar("Result")

WAITING = 4096
"""Number of tasks that Ray gets at a time: `ray.wait` checks every one of them."""


def run_on_ray(function: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[Result]:
    """Yield `function(job)` for every job, each on one core of the cluster, in the order of completion.

    The cluster is the one that RAY_ADDRESS names or that runs on this machine; without one, this machine becomes a
    cluster until all jobs are done. Each task works in the caller's directory, which every machine must see under the
    same path.

    Args:
        function: a function of an importable module, repeatable with the same result: a task whose process is lost runs
            again, three times (`max_retries`, Ray's default).

    Raises:
        MachineError: Ray is not installed, or a task is lost for the fourth time. Otherwise the errors of `function`.
    """
    env.set_defaults({"RAY_USAGE_STATS_ENABLED": "0"})  # a local Ray would send usage statistics to its developers
    try:
        import ray
    except ImportError as error:
        problem = f"--engine ray needs a package that is not installed: {env.first_line(error)}"
        raise MachineError(problem, code="E5006", help=install_extra("scale")) from None
    with env.safe_path_for_children():
        context = ray.init(log_to_driver=False, logging_level="error")
    remaining = iter(jobs)
    # Ray reports lost processes on stdout, which is reserved for the result.
    with redirect_stdout(sys.stderr), context:
        submit = partial(ray.remote(max_retries=3)(_work).remote, function, os.getcwd())
        waiting = [submit(job) for job in islice(remaining, WAITING)]
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            try:
                yield ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                help_text = "run the same command again: complete shards are kept"
                raise MachineError(f"a task was lost: {env.first_line(error)}", code="E5007", help=help_text) from None
            waiting += [submit(job) for job in islice(remaining, 1)]


def _work(function: Callable[[Any], Result], directory: str, job: Any) -> Result:
    env.one_tokenizer_thread()
    with machine_errors(Path(directory)):
        os.chdir(directory)
    return function(job)
