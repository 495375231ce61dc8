"""Run the command line with a limit on the memory it may allocate: `limited.py MIB ARGUMENTS…`; or limit a process that
something else runs in (`limit`).

The limit is on what comes beyond the imports, which alone take more than a small run. Linux counts every private
writable mapping against RLIMIT_DATA; address space (RLIMIT_AS) would not do, since torch reserves much that it never
touches.
"""

from __future__ import annotations

import importlib
import resource
import sys
from pathlib import Path

import torch

from surefit.core import env

MODULES = (
    "cli.run",
    "cli.processes",
    "cli.render",
    "stages.run_context",
    "stages.checking",
    "stages.evaluating",
    "stages.merging",
    "stages.planning",
    "stages.reporting",
    "stages.training",
    "data.rows.layouts",
    "data.tokens.dataset",
    "data.tokens.tokenize",
    "evaluate.in_training",
    "model.prepare",
    "plan.build_plan",
    "train.loop",
)


def mapped() -> int:
    """Bytes that the limit counts."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024


def limit(mib: int) -> None:
    """Let this process allocate so much from now on."""
    env.quiet_libraries()
    torch.set_num_threads(1)
    for name in MODULES:
        importlib.import_module(f"surefit.{name}")
    (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()  # starts autograd's thread
    allowed = mapped() + mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def main(mib: int, *arguments: str) -> None:
    limit(mib)
    from surefit.cli.app import app

    app(list(arguments))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
