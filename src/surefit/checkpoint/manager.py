"""Checkpoints that are complete or absent, and the checkpoint format.

A checkpoint is a directory `step-N` with tensors as safetensors, everything else as JSON (nothing that could run code),
and a manifest with the size and SHA-256 of each file:

    weights.safetensors    the trained parameters by their names in the model
    optimizer.safetensors  the optimizer's tensors
    trainer.json           the counters, and the settings that must be the same on resume
    manifest.json          step, versions, {file: {bytes, sha256}}

Where several processes hold shards, each of them writes its own, and the first two are files of parts
(checkpoint/shards.py); `load_checkpoint` returns whole tensors of either format.

A checkpoint is filled under a temporary name, flushed to the disk and renamed: a reader, a crash or a full disk never
sees an incomplete one. One process at a time writes to a run directory (core/lock.py).
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from surefit import __version__
from surefit.checkpoint import shards
from surefit.checkpoint.files import (
    FORMAT,
    IN_PARTS,
    KINDS,
    MANIFEST,
    MANIFEST_BYTES,
    OPTIMIZER,
    TRAINER,
    WEIGHTS,
    file_names,
    find_checkpoint_damage,
    list_steps,
)
from surefit.core.errors import ModelError
from surefit.core.reading import read_json_file
from surefit.core.rundir import (
    directory_atomic,
    disk_errors,
    machine_errors,
    put_in_place,
    read_json,
    remove_leftovers,
    write_json,
)
from surefit.core.units import KIB

ENTRY = 100
"""Bytes of a tensor's entry in a safetensors header besides its name, rounded up."""
OTHER_FILES = 16 * KIB
"""Bytes of trainer.json, manifest.json, two headers' beginnings and the slack of four files' last blocks, rounded
up.
"""


@dataclass(frozen=True)
class CheckpointState:
    """Content of a checkpoint.

    Attributes:
        weights: the trained parameters by name.
        optimizer: the optimizer's tensors by name.
        trainer: counters and settings, as JSON can hold them.
        part: for the 1-d parts that one process holds, their place in the whole tensors; None for whole tensors.
    """

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    trainer: Mapping[str, Any]
    part: shards.CheckpointShard | None = None


@dataclass(frozen=True)
class LatestCheckpoint:
    """The newest complete checkpoint.

    Attributes:
        path: its directory; None where there is no complete one.
        step: the number of optimizer steps before it.
        skipped: newer checkpoints that are damaged, each with its fault.
    """

    path: Path | None = None
    step: int = 0
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def save_checkpoint(directory: Path, step: int, state: CheckpointState) -> Path:
    """Write the checkpoint of one step and return its directory; replace an older one of the same step.

    Raises:
        MachineError: the disk is full or may not be written to; what was there before is untouched.
    """
    remove_leftovers(directory)
    path = directory / f"step-{step}"
    with directory_atomic(path) as temporary, disk_errors():
        save_file(_on_cpu(state.weights), temporary / WEIGHTS)
        save_file(_on_cpu(state.optimizer), temporary / OPTIMIZER)
        write_json(temporary / TRAINER, dict(state.trainer))
        files = {file.name: shards.shard_manifest_entry(file) for file in sorted(temporary.iterdir())}
        manifest = {"format": FORMAT, "step": step, "versions": versions(), "files": files}
        write_json(temporary / MANIFEST, manifest)
    return path


def begin_sharded_checkpoint(directory: Path, step: int) -> Path:
    """Make an empty directory for the parts of one step's checkpoint, under a name that does not count as a complete
    one and was never used before: a process of a killed run may still be writing into an older one.

    Raises:
        MachineError: the disk is full or may not be written to.
    """
    remove_leftovers(directory)
    temporary = directory / f".step-{step}.{time.time_ns()}.tmp"
    with machine_errors(temporary):
        temporary.mkdir(parents=True)
    return temporary


def write_part(temporary: Path, state: CheckpointState) -> None:
    """Write one process's part into the directory of `begin_sharded_checkpoint`, and a record that it is on the disk.

    Raises:
        MachineError: the disk is full or may not be written to; nothing of this part is left.
    """
    assert state.part is not None
    tensors = {"weights": _on_cpu(state.weights), "optimizer": _on_cpu(state.optimizer)}
    with machine_errors(temporary), disk_errors():
        shards.write_checkpoint_shard(temporary, state.part, tensors)


def commit_sharded_checkpoint(temporary: Path, step: int, state: CheckpointState) -> Path:
    """Commit the parts and records of all processes as one checkpoint and return its path; one process calls it.

    Raises:
        MachineError: the disk is full or may not be written to; what was there before is untouched.
    """
    assert state.part is not None
    path = temporary.with_name(f"step-{step}")
    with machine_errors(path):
        files = shards.collect_records(temporary, state.part.of)
        write_json(temporary / TRAINER, dict(state.trainer))
        files[TRAINER] = shards.shard_manifest_entry(temporary / TRAINER)
        manifest = {"format": IN_PARTS, "parts": state.part.of, "step": step, "versions": versions(), "files": files}
        write_json(temporary / MANIFEST, manifest)
        put_in_place(temporary, path)
    return path


def load_checkpoint(path: Path) -> CheckpointState:
    """Read a checkpoint that `latest_complete` found, onto the CPU. In a checkpoint in parts, a tensor is put together
    when it is accessed.

    Raises:
        OSError, SafetensorError: it does not exist any more.
    """
    if not any(path.glob("weights-*-of-*.safetensors")):
        return CheckpointState(load_file(path / WEIGHTS), load_file(path / OPTIMIZER), read_json(path / TRAINER))
    of = read_json_file(path / MANIFEST, MANIFEST_BYTES)["parts"]
    weights, optimizer = (shards.MergedShards([path / name for name in file_names(kind, of)]) for kind in KINDS)
    return CheckpointState(weights, optimizer, read_json(path / TRAINER))


def latest_complete(directory: Path) -> LatestCheckpoint:
    """Find the newest checkpoint whose every file matches its manifest, hashes included."""
    skipped: list[tuple[Path, str]] = []
    for step, path in reversed(list_steps(directory)):
        fault = find_checkpoint_damage(path, hashes=True)
        if fault is None:
            return LatestCheckpoint(path, step, skipped)
        skipped.append((path, fault))
    return LatestCheckpoint(skipped=skipped)


def delete_old_checkpoints(
    directory: Path, keep: int, newest: int | None = None, best: Collection[int] = ()
) -> list[Path]:
    """Delete all complete checkpoints but the newest `keep` and the best.

    Damaged ones are not counted and not touched. A deleted one is renamed first: a reader never sees half of it.

    Args:
        directory: the directory of the checkpoints.
        keep: at least 1: the newest complete one is never deleted.
        newest: the step that was just written. The run skipped later checkpoints and is about to replace them: they are
            not counted.
        best: further steps to keep.

    Returns:
        Paths that should have been deleted but could not be.
    """
    assert keep >= 1
    older = [(step, path) for step, path in list_steps(directory) if newest is None or step <= newest]
    complete = [(step, path) for step, path in older if find_checkpoint_damage(path, hashes=False) is None]
    surplus = [path for step, path in complete[:-keep] if step not in best]
    for path in surplus:
        with contextlib.suppress(OSError):
            path.rename(path.with_name(f".{path.name}.{os.getpid()}.tmp"))
    return remove_leftovers(directory) + [path for path in surplus if path.exists()]


def versions() -> dict[str, Any]:
    """Return what the bits of a training run depend on besides its config: versions, threads, device."""
    packages = {name: metadata.version(name) for name in ("torch", "transformers", "peft", "safetensors")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "surefit": __version__,
        "python": platform.python_version(),
        **packages,
        "threads": torch.get_num_threads(),
        "device": device,
    }


def restore_weights(state: CheckpointState, parameters: Mapping[str, torch.nn.Parameter], path: Path) -> None:
    """Copy a checkpoint's weights into the model's trained parameters.

    Raises:
        ModelError: the checkpoint's parameters are not the model's.
    """
    for name in sorted(parameters.keys() | state.weights.keys()):
        parameter_here, saved = parameters.get(name), state.weights.get(name)
        if (
            parameter_here is None
            or saved is None
            or parameter_here.shape != saved.shape
            or parameter_here.dtype != saved.dtype
        ):
            raise ModelError(
                f"{name} is {_describe(saved)} in the checkpoint and {_describe(parameter_here)} in the model",
                code="E5003",
                path=path,
                help="resume with the config of the run, or start again in another output_dir",
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state.weights[name])


def _describe(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}


def estimate_checkpoint_bytes(state: CheckpointState) -> int:
    """Estimate the bytes of a checkpoint's files, within a few bytes per tensor: the tensors and their header
    entries.
    """
    tensors = [*state.weights.items(), *state.optimizer.items()]
    entries = 1 if state.part is None else 2  # a sharded checkpoint's metadata repeats each entry
    return OTHER_FILES + sum(tensor.nbytes + entries * (len(name) + ENTRY) for name, tensor in tensors)


def changed_versions(path: Path) -> list[str]:
    """List how versions, threads and device differ from a checkpoint's, as `torch: 2.11.0, now 2.13.0`."""
    saved_versions, current_versions = read_json(path / MANIFEST)["versions"], versions()
    return [
        f"{name}: {saved_versions.get(name)}, now {current_versions[name]}"
        for name in current_versions
        if saved_versions.get(name) != current_versions[name]
    ]
