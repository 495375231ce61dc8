"""The manifest of an export: which files it has, and whether they are as they were written. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefit.core.errors import ModelError
from surefit.core.rundir import file_sha256, read_json

HUB, ADAPTER = "hub", "adapter"
"""Formats of an export that are copied as they are."""
MANIFEST, CARD, CERTIFICATE = "export.json", "README.md", "certificate.json"


def read_export(directory: Path) -> dict[str, Any]:
    """Read export.json of a directory, and check that every file matches it.

    Raises:
        ModelError: the directory is no export, or a file is missing or was changed.
    """
    if not (directory / MANIFEST).is_file():
        raise ModelError(
            f"this is not an export: there is no {MANIFEST}", code="E6014", path=directory, help="`surefit export RUN`"
        )
    manifest: dict[str, Any] = read_json(directory / MANIFEST)
    for name, entry in manifest["files"].items():
        file = directory / name
        inside = not Path(name).is_absolute() and file.resolve() == directory.resolve() / name  # no link, no ".."
        if not inside or not file.is_file():
            raise ModelError(
                f"{name} is listed in {MANIFEST} but is not a file here",
                code="E6015",
                path=directory,
                help="export it again",
            )
        if file.stat().st_size != entry["bytes"] or file_sha256(file) != entry["sha256"]:
            raise ModelError(
                f"{name} has changed since the export", code="E6016", path=directory, help="export it again"
            )
    return manifest
