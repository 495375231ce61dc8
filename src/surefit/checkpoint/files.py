"""The checkpoints of a run as files: which there are, and whether each is complete. Torch-free: no tensor is read.

checkpoint/manager.py writes them and describes their format.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefit.core.reading import read_json_file
from surefit.core.rundir import file_sha256

WEIGHTS, OPTIMIZER, TRAINER, MANIFEST = "weights.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json"
FORMAT, IN_PARTS = 1, 2
"""Formats of the manifest; the second is a checkpoint in parts, which versions that do not know it skip."""
MANIFEST_BYTES = 64 * 1024**2
KINDS = ("weights", "optimizer")
"""Kinds of files with tensors in a checkpoint in parts."""
_NAME = re.compile(r"step-(\d+)")


def file_names(kind: str, of: int) -> list[str]:
    """Return the file names of one of `KINDS`, by process number."""
    return [f"{kind}-{number:05}-of-{of:05}.safetensors" for number in range(1, of + 1)]


def list_steps(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of everything named like a checkpoint, complete or not, the oldest first."""
    if not directory.is_dir():
        return []
    matches = ((match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)))
    return sorted((int(match[1]), path) for match, path in matches)


def find_checkpoint_damage(path: Path, hashes: bool) -> str | None:
    """Describe what is wrong with a checkpoint; None where it is complete.

    Args:
        path: the checkpoint's directory.
        hashes: also read every file and compare its hash; otherwise names and sizes only.
    """
    try:
        manifest = read_json_file(path / MANIFEST, MANIFEST_BYTES)
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        required_files = _required(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    if required_files is None or not required_files <= files.keys():
        return f"{MANIFEST} was not written by this version of SureFit"
    for name, (size, sha256) in files.items():
        file = path / name
        if Path(name).name != name or not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, but the manifest says {size}"
        if hashes and file_sha256(file) != sha256:
            return f"the content of {name} has changed since it was written"
    return None


def _required(manifest: Mapping[str, Any]) -> set[str] | None:
    """Return the files that a checkpoint must have; None where its format is unknown."""
    if manifest["format"] == FORMAT:
        return {WEIGHTS, OPTIMIZER, TRAINER}
    if manifest["format"] == IN_PARTS:
        return {TRAINER}.union(*(file_names(kind, manifest["parts"]) for kind in KINDS))
    return None


def checkpoint_weights_sha256(path: Path) -> str | None:
    """Return an identifier of a checkpoint's weights: the sha256 of their file from the manifest, or the sha256 of the
    `sha256sum` lines of their files; None where the checkpoint is missing or damaged.
    """
    try:
        manifest = read_json_file(path / MANIFEST, MANIFEST_BYTES)
        files = manifest["files"]
        if manifest["format"] == FORMAT:
            digest: str = files[WEIGHTS]["sha256"]
            return digest
        lines = [f"{files[name]['sha256']}  {name}\n" for name in file_names("weights", manifest["parts"])]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return hashlib.sha256("".join(lines).encode()).hexdigest()
