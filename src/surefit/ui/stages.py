"""The command-line stages that the pages use. `cli/ui.py` passes them in, so that the pages and the command line
cannot decide differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefit.config.schema import SureFitConfig
from surefit.core.errors import SureFitError

ForbiddenPaths = Callable[[SureFitConfig], Sequence[SureFitError]]
"""A config → errors for the paths in it that a page must not read."""


@dataclass(frozen=True)
class StageFunctions:
    """The functions behind the pages.

    Attributes:
        check: (text of a config, its name, the forbidden paths) → the content of check.json, and `skipped_text`: what
            was not checked, in words.
        runs: a directory → a row for each run in it, as in `surefit runs --json`.
        plan: a config file → the command whose last line of output is the content of plan.json.
        run: (a config file or a run directory, whether to resume) → the command that runs all stages.
        chat: (a run directory, its variants) → the command that reads messages and writes answers, as JSON lines.
    """

    check: Callable[[str, str, ForbiddenPaths], dict[str, Any]]
    runs: Callable[[Path], list[dict[str, Any]]]
    plan: Callable[[Path], list[str]]
    run: Callable[[str, bool], list[str]]
    chat: Callable[[str, Sequence[str]], list[str]]
