"""A checkpoint in parts: each process of a run writes the shards it holds, and no process ever holds all of it.

    weights-00001-of-00004.safetensors     flat ranges of the trained parameters, by their names
    optimizer-00001-of-00004.safetensors   the same of the optimizer's tensors

Each file's metadata give the range and whole shape of every tensor in it. All ranges together cover each tensor exactly
once; a reader loads whole tensors, one at a time, or any range (parallel/shard_ranges.py).

While a checkpoint is written, each process leaves a record beside its files once they are on the disk. The first
process commits when all records exist (`manager.commit_sharded_checkpoint`): until then the directory has a temporary
name, and does not count as a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from surefit.checkpoint.files import KINDS, file_names
from surefit.core.errors import MachineError, ModelError
from surefit.core.rundir import file_sha256, fsync_file, read_json, write_json
from surefit.parallel.shard_ranges import FlatRange, ShardedTensors

RANGES = "ranges"
"""Key of the metadata: {name: [offset, *whole shape]} as JSON."""


@dataclass(frozen=True)
class CheckpointShard:
    """The part of a checkpoint that one process holds.

    Attributes:
        number: the process's number, from 0.
        of: the number of processes.
        ranges: tensor name → offset of the part in the flattened tensor, and the shape of the whole tensor.
    """

    number: int
    of: int
    ranges: Mapping[str, tuple[int, tuple[int, ...]]]


def build_checkpoint_shard(
    number: int, of: int, weights: Mapping[str, FlatRange], optimizer: Mapping[str, FlatRange]
) -> CheckpointShard:
    """Describe the parts that a process holds."""
    flat_ranges = [*weights.items(), *optimizer.items()]
    ranges = {name: (flat.offset, flat.shape) for name, flat in flat_ranges}
    assert len(ranges) == len(flat_ranges), "a weight has the name of an optimizer's tensor"
    return CheckpointShard(number, of, ranges)


def shard_values(held: Mapping[str, FlatRange]) -> dict[str, torch.Tensor]:
    """Return the values of the parts, 1-d."""
    return {name: flat.values for name, flat in held.items()}


def write_checkpoint_shard(
    directory: Path, part: CheckpointShard, tensors: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Write this process's files into a directory shared by all processes, flush them, and leave the record.

    Args:
        directory: the directory that the first process made.
        part: description of `tensors`.
        tensors: tensors by `KINDS`: 1-d, contiguous, on the CPU.

    Raises:
        MachineError: this process does not see the directory.
        OSError, SafetensorError: the write failed; the files are deleted.
    """
    if not directory.is_dir():
        raise MachineError(
            "the first process created this directory for a checkpoint, but this process does not see it",
            code="E5004",
            path=directory,
            help="all machines of a run must see the same output_dir",
        )
    files = {kind: directory / file_names(kind, part.of)[part.number] for kind in KINDS}
    try:
        for kind, file in files.items():
            ranges = {name: (offset, *shape) for name, (offset, shape) in part.ranges.items() if name in tensors[kind]}
            save_file(dict(tensors[kind]), file, {RANGES: json.dumps(ranges, separators=(",", ":"))})
            fsync_file(file)
        record = {file.name: shard_manifest_entry(file) for file in files.values()}
        write_json(_record(directory, part.number), record)
    except BaseException:
        for file in files.values():
            with contextlib.suppress(OSError):
                file.unlink()
        raise


def shard_manifest_entry(file: Path) -> dict[str, Any]:
    """Return a file's entry in the manifest."""
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}


def has_all_records(directory: Path, of: int) -> bool:
    """Return whether every process has left its record."""
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    return all(_record(directory, number).name in names for number in range(of))


def collect_records(directory: Path, of: int) -> dict[str, dict[str, Any]]:
    """Return the manifest entries of all files from the records, and delete the records."""
    files: dict[str, dict[str, Any]] = {}
    for number in range(of):
        files |= read_json(_record(directory, number))
    for number in range(of):
        _record(directory, number).unlink()
    return files


def _record(directory: Path, number: int) -> Path:
    return directory / f"part-{number + 1:05}.json"


class _Piece(NamedTuple):
    first: int
    last: int
    file: Any


class MergedShards(ShardedTensors):
    """Whole tensors of one of `KINDS`, read from memory-mapped files when they are accessed.

    Raises:
        ModelError: the ranges do not cover each tensor exactly once.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        self._shapes: dict[str, torch.Size] = {}
        for path in files:
            file: Any = safe_open(path, "pt")
            for name, (offset, *shape) in json.loads(file.metadata()[RANGES]).items():
                count = file.get_slice(name).get_shape()[0]
                self._pieces.setdefault(name, []).append(_Piece(offset, offset + count, file))
                self._shapes[name] = torch.Size(shape)
        for name, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece[:2])
            ends = [0, *(piece.last for piece in pieces)]
            if [piece.first for piece in pieces] != ends[:-1] or ends[-1] != math.prod(self._shapes[name]):
                raise ModelError(
                    f"the parts of {name} do not cover it exactly once",
                    code="E5005",
                    path=files[0].parent,
                    help="choose another checkpoint",
                )

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        return self.part(name, 0, math.prod(shape)).view(shape)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def part(self, name: str, offset: int, count: int) -> torch.Tensor:
        """Return a range of a flattened tensor; if it lies in one file, as a view of the mapped pages, not read yet."""
        last = offset + count
        slices = [
            piece.file.get_tensor(name)[max(offset - piece.first, 0) : last - piece.first]
            for piece in self._pieces[name]
            if max(piece.first, offset) < min(piece.last, last)
        ]
        if not slices:
            first: torch.Tensor = self._pieces[name][0].file.get_tensor(name)
            return first[:0]
        return slices[0] if len(slices) == 1 else torch.cat(slices)
