"""Installation of SureFit and its extras: it is on no package index, so from its clone and with the tested versions,
or from its wheel. Errors for packages that are missing or broken. The hash of what is installed."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb

from surefit.core.errors import MachineError

INSTALL = "pip install -c constraints.txt"
"""Command to run in the clone. On an index, the name would be somebody else's package."""
EXTRAS = {
    "data": {
        "aiohttp": "rows at a web address",
        "datasets": "data sets of the hub",
        "py3langid": "detecting the language of rows",
        "pyarrow": "Parquet, Arrow and zstd files",
    },
    "metrics": {
        "amr": "scores of AMR graphs",
        "penman": "AMR graphs",
        "rouge_score": "ROUGE scores",
        "sympy": "comparing formulas",
    },
    "train": dict.fromkeys(
        ("torch", "transformers", "peft", "accelerate", "safetensors"), "everything that loads a model"
    ),
}
"""Extra → the modules that it adds to the core, and what needs each; `train` installs the other two as well."""
_DISTRIBUTIONS = {"amr": "smatch", "rouge_score": "rouge-score"}
"""Module → package, where the names differ."""


def install_extra(extra: str, *, upgrade: bool = False) -> str:
    """Return the command that installs an extra, and where to run it.

    >>> install_extra("quant")
    "in the clone of SureFit: pip install -c constraints.txt '.[quant]'"
    """
    flag = " --upgrade" if upgrade else ""
    if (wheel := _installed_wheel()) is not None:
        return f"pip install{flag} {shlex.quote(f'{wheel}[{extra}]')}"
    return f"in the clone of SureFit: {INSTALL}{flag} '.[{extra}]'"


def _installed_wheel() -> Path | None:
    """Return the wheel file that SureFit was installed from, if it was and the file still exists."""
    from importlib import metadata  # 30 modules that `surefit --help` does not need
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(metadata.distribution("surefit").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None
    address = urlsplit(str(origin.get("url", "")))
    path = Path(unquote(address.path))
    return path if address.scheme == "file" and path.suffix == ".whl" and path.is_file() else None


# Packages that are missing or broken


def require_extra(extra: str) -> None:
    """Raise if a package of one of `EXTRAS` is not installed; none is imported.

    Raises:
        MachineError: with the missing packages and the command that installs them.
    """
    if missing := [name for name in EXTRAS[extra] if not is_installed(name)]:
        raise _missing_error(extra, missing)


def require_import(module: str, path: str | Path | None = None) -> None:
    """Import a module of an extra, for the caller's own import statement after it.

    Args:
        path: the file that needs it, for the message.

    Raises:
        MachineError: it is missing or broken.
    """
    try:
        import_module(module)
    except (ImportError, OSError) as error:
        problem = explain_import_error(error)
        if problem is None:
            raise
        problem.path = None if path is None else str(path)
        raise problem from error


def explain_import_error(error: BaseException) -> MachineError | None:
    """Return the error for a package of an extra that is missing or cannot be imported; None for any other error.

    A shared library that is missing (an ImportError, or an OSError where torch loads it) comes from the module that was
    being imported: the innermost one of an extra's package.
    """
    for cause in _causes(error):
        module = cause.name.partition(".")[0] if isinstance(cause, ImportError) and cause.name else ""
        if isinstance(cause, ModuleNotFoundError) and (extra := _extra_of(module)) and not is_installed(module):
            missing = [name for name in EXTRAS[extra] if not is_installed(name)] if extra == "train" else [module]
            return _missing_error(extra, missing)
        if isinstance(cause, ImportError | OSError) and (broken := _imported_package(cause)):
            return _broken_error(broken, cause)
        if isinstance(cause, ImportError) and _extra_of(module):
            return _broken_error(module, cause)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions that led to an error, the first one first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        imported = isinstance(current, ImportError | OSError) and not current.__suppress_context__
        current = current.__cause__ or (current.__context__ if imported else None)
    yield from reversed(chain)


def _imported_package(error: BaseException) -> str | None:
    """Return the package of an extra whose module was being imported when the error was raised."""
    modules = [
        str(frame.f_globals.get("__name__", "")).partition(".")[0]
        for frame, _ in walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    return next((name for name in reversed(modules) if _extra_of(name)), None)


def _extra_of(module: str) -> str | None:
    return next((extra for extra, names in EXTRAS.items() if module in names), None)


def is_installed(module: str) -> bool:
    """Return whether a module is found, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _missing_error(extra: str, modules: list[str]) -> MachineError:
    names = [_DISTRIBUTIONS.get(name, name) for name in modules]
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    state = "are not installed; they are" if len(names) > 1 else "is not installed; it is"
    return MachineError(
        f"{listed} {state} needed for {EXTRAS[extra][modules[0]]}",
        code="E1090",
        help=install_extra(extra),
    )


def _broken_error(module: str, error: BaseException) -> MachineError:
    from importlib import metadata

    package = _DISTRIBUTIONS.get(module, module)
    try:
        version = f" {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        version = ""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return MachineError(
        f"{package}{version} is installed but cannot be imported: {reason}",
        code="E1091",
        help=f"`surefit doctor` says what fits this machine; to install it again, pip uninstall {package}, then "
        f"{install_extra(_extra_of(module) or 'train')}",
    )


CODE_SUFFIXES = (".py", ".json", ".jinja", ".yaml")
"""Endings of the files that decide what SureFit does: its modules, and the tables and chat templates beside them."""


@cache
def code_sha256() -> str:
    """Return the hash of SureFit's modules and tables and of the names of all packages, which include their versions:
    with another version a row may become another example, and a step may need other memory."""
    root, digest = Path(__file__).parents[1], hashlib.sha256(sys.version.encode())
    for name in sorted({entry.name for directory in sys.path for entry in Path(directory).glob("*.dist-info")}):
        digest.update(f"{name}\n".encode())
    for path in sorted(path for path in root.rglob("*") if path.suffix in CODE_SUFFIXES):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
