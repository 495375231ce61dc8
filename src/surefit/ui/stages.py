"""What the pages need of the command line's stages. They are handed in (`cli/serving.py`), so that nothing is decided
here that the command line would decide otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefit.config.schema import Config
from surefit.core.errors import SureFitError

ForbiddenPaths = Callable[[Config], Sequence[SureFitError]]
"""A config → what of it must not be looked at from a page."""


@dataclass(frozen=True)
class StageFunctions:
    """The functions behind the pages.

    Attributes:
        check: (text of a config, its name, what must not be looked at) → the content of check.json.
        runs: a directory → a row for each run in it, as `surefit runs --json` has them.
        plan: a config file → the command whose last line of output is the content of plan.json.
    """

    check: Callable[[str, str, ForbiddenPaths], dict[str, Any]]
    runs: Callable[[Path], list[dict[str, Any]]]
    plan: Callable[[Path], list[str]]
