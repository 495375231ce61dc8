"""SureFit fine-tunes language models and gets it right the first time.

From Python (docs/python.md): `surefit.Config`, `check`, `plan`, `train`, `merge`, `evaluate`, `compare`, `report`, and
the errors of `surefit.core.errors`. They are imported when they are first used: `import surefit` itself costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from surefit.api import Config, check, compare, evaluate, merge, plan, report, train
    from surefit.core.errors import (
        ConfigError,
        DataError,
        GateError,
        Interrupted,
        MachineError,
        ModelError,
        SureFitError,
    )
    from surefit.stages.checking import CheckFailed

__all__ = [
    "CheckFailed",
    "Config",
    "ConfigError",
    "DataError",
    "GateError",
    "Interrupted",
    "MachineError",
    "ModelError",
    "SureFitError",
    "check",
    "compare",
    "evaluate",
    "merge",
    "plan",
    "report",
    "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` at its first use (PEP 562)."""
    if name in _ROOMS:
        return import_module(f"surefit.{name}")
    if name in __all__:
        return getattr(import_module(f"surefit.{_MODULES.get(name, 'api')}"), name)
    raise AttributeError(f"module 'surefit' has no attribute {name!r}")


_MODULES = {
    **dict.fromkeys(
        ("ConfigError", "DataError", "GateError", "Interrupted", "MachineError", "ModelError", "SureFitError"),
        "core.errors",
    ),
    "CheckFailed": "stages.checking",
}  # fmt: skip
"""Module of each name of `__all__` that is not in `api`."""
_ROOMS = ("evaluate", "merge", "plan", "report", "train")
"""Packages with the name of their stage."""


class Stage(ModuleType):
    """A package that is its stage's function, too: `surefit.train(config)`, and `surefit.train.loop` as ever."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._function(*arguments, **named)

    @property
    def _function(self) -> Any:
        return getattr(import_module("surefit.api"), self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(self._function)


def callable_as_stage(name: str) -> None:
    """Make the package of this name callable (Python's data model, "Customizing module attribute access")."""
    sys.modules[name].__class__ = Stage
