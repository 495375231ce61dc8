"""The generators live in scripts/nano, which is no package: they import each other by bare name."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts" / "nano"


@pytest.fixture(scope="session")
def corpus() -> ModuleType:
    return _script("corpus")


@pytest.fixture(scope="session")
def make_samples() -> ModuleType:
    return _script("make_samples")


def _script(name: str) -> ModuleType:
    import importlib

    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))
