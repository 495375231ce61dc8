"""An interpreter in which only the core's packages are installed: the others are there, and are not found.

`sitecustomize` hides them in a Python process and in all that it starts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
HIDE = '''
import json, os, sys
from importlib import metadata
from importlib.machinery import PathFinder

class Visible:
    """Finds what PathFinder finds, but for the hidden packages."""
    names = frozenset(json.loads(os.environ["HIDDEN_MODULES"]))

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.names else self.finder.find_spec(name, path, target)

sys.meta_path = [Visible(finder) if finder is PathFinder else finder for finder in sys.meta_path]
hidden = frozenset(json.loads(os.environ["HIDDEN_DISTRIBUTIONS"]))
from_name = metadata.Distribution.from_name.__func__

def visible_from_name(cls, name):
    if name.lower().replace("_", "-") in hidden:
        raise metadata.PackageNotFoundError(name)
    return from_name(cls, name)

metadata.Distribution.from_name = classmethod(visible_from_name)
'''


def core_distributions() -> set[str]:
    """What `pip install` of the core brings, SureFit itself left out, in the versions that are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names: set[str] = set()
    pending = list(project["dependencies"])
    while pending:
        requirement = Requirement(pending.pop())
        name = normal(requirement.name)
        extras = ["", *requirement.extras]
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if name not in names:
            names.add(name)
            pending += [line for line in metadata.requires(name) or () if not re.search(r"\bextra *==", line)]
    return names


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def light_environment(folder: Path, **more: str) -> dict[str, str]:
    """The variables of a process that finds the core's packages alone; `folder` gets its sitecustomize."""
    (folder / "sitecustomize.py").write_text(HIDE)
    core = core_distributions() | {"surefit"}
    modules = {
        module for module, owners in metadata.packages_distributions().items() if core.isdisjoint(map(normal, owners))
    }
    hidden = {normal(found.metadata["Name"]) for found in metadata.distributions()} - core
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    variables = {"HIDDEN_MODULES": json.dumps(sorted(modules)), "HIDDEN_DISTRIBUTIONS": json.dumps(sorted(hidden))}
    return os.environ | {"PYTHONPATH": path} | variables | more


def run_light(folder: Path, *arguments: object, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `surefit ARGUMENTS` in `folder`."""
    command = [sys.executable, "-m", "surefit", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
