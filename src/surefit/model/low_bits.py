"""The conversion of a model published in FP8 or MXFP4 into a plain one: dequantized once, kept in the cache.

Each weight is scale × number, computed in float32 and rounded once to the dtype of the model. For MXFP4 in bfloat16
nothing is rounded: both factors are powers of two, or have two bits.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from surefit.core.errors import MachineError, ModelError
from surefit.core.lock import hold_lock
from surefit.core.progress import emit_progress_line
from surefit.core.rundir import directory_atomic, disk_errors, remove_leftovers, write_json
from surefit.core.units import bytes_text, duration_text
from surefit.facts import low_bits
from surefit.facts.low_bits import LowBitFormat
from surefit.facts.model import read_model_config
from surefit.facts.safetensors import INDEX, TensorHeader, read_header, read_weights, weight_files

FIELD = "model.name_or_path"
ROOM = "set SUREFIT_CACHE to a directory that you may write to, with space for the dequantized model"
FILE_BYTES = 4 * 2**30
"""Most bytes of one written file, and so of the memory for writing it."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of FP4 by their lower three bits; the fourth is the sign (OCP Microscaling Formats 1.0, section 5.3.3)."""
TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_one_thread = threading.Lock()
"""Lock between threads, since a directory's lock belongs to a whole process."""


def dequantized_directory(directory: Path) -> Path:
    """Return the directory itself, or for a model stored in FP8 or MXFP4 its dequantized copy, made atomically where it
    does not exist yet.

    Raises:
        ModelError: the model's files are damaged, or hold something that cannot be dequantized.
        MachineError: the cache cannot be written, or is full.
    """
    if not (directory / "config.json").is_file():
        return directory
    config = read_model_config(directory)
    stored, files = low_bits.detect_low_bit_format(config), weight_files(directory)
    if stored is None or not files:
        return directory
    target = low_bits.dequantized_copy_directory(directory)
    try:
        with _one_thread:
            if not _is_whole(target):
                with hold_lock(target.parent / ".lock", "dequantising", wait=True):
                    if not _is_whole(target):
                        _make_room(target)
                        _convert(directory, files, config, stored, target)
    except MachineError as error:
        raise MachineError(
            error.message, code=error.code, path=error.path or target.parent, field=FIELD, help=ROOM
        ) from error
    return target


def _is_whole(target: Path) -> bool:
    """Return whether a copy has all its weights and its config.json; a copy with deleted files is made again."""
    try:
        return (target / "config.json").is_file() and read_weights(target) is not None
    except ModelError:
        return False


def _make_room(target: Path) -> None:
    """Remove the leftovers of a killed process, and copies that were made before the model's files changed."""
    remove_leftovers(target.parent)
    for stale in target.parent.iterdir():
        if stale.is_dir():
            emit_progress_line(f"removing {stale}: the files it was made from have changed or are gone")
            shutil.rmtree(stale, ignore_errors=True)


def _convert(directory: Path, files: list[Path], config: dict[str, Any], stored: LowBitFormat, target: Path) -> None:
    headers = {file: read_header(file) for file in files}
    tensors = {name: tensor for file_tensors in headers.values() for name, tensor in file_tensors.items()}
    if problem := low_bits.dequantization_obstacle(config, tensors):
        raise ModelError(
            f"its {stored.method} weights cannot be dequantized: {problem}", code="E5062",
            path=directory, field=FIELD, help="use a bfloat16 copy of the model",
        )  # fmt: skip
    plain = low_bits.dequantized_headers(stored, tensors)
    needed, free = sum(tensor.bytes for tensor in plain.values()), shutil.disk_usage(target.parent).free
    if free < needed:
        raise MachineError(
            f"the dequantized model needs {bytes_text(needed)}, but only {bytes_text(free)} are free", code="E5063",
            path=target.parent,
        )  # fmt: skip
    emit_progress_line(
        f"dequantizing {directory.name} ({stored.method}) to {bytes_text(needed)}, once; later runs use the result"
    )
    started = time.monotonic()
    reading = _Reading(headers, stored)
    with directory_atomic(target) as temporary, disk_errors():
        for file in directory.iterdir():
            if file.suffix in low_bits.ALONGSIDE and file.name not in ("config.json", INDEX):
                shutil.copyfile(file, temporary / file.name)
        write_json(temporary / "config.json", low_bits.dequantized_config(config))
        written: dict[str, str] = {}
        for number, names in enumerate(_groups(plain), 1):
            name = f"model-{number:05d}.safetensors"
            save_file(
                {tensor_name: reading.read(tensor_name) for tensor_name in names},
                temporary / name,
                metadata={"format": "pt"},
            )
            written |= dict.fromkeys(names, name)
        write_json(temporary / INDEX, {"metadata": {"total_size": needed}, "weight_map": written})
    emit_progress_line(f"dequantized in {duration_text(time.monotonic() - started)}; kept in {target}")


def _groups(tensors: Mapping[str, TensorHeader]) -> list[list[str]]:
    """Return the names of the tensors of each file to write."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in sorted(tensors.items()):
        if groups[-1] and size + tensor.bytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.bytes
    return groups


class _Reading:
    """Reader of the files' tensors, dequantized one at a time."""

    def __init__(self, headers: Mapping[Path, Mapping[str, TensorHeader]], stored: LowBitFormat) -> None:
        self.stored = stored
        self.place = {name: file for file, names in headers.items() for name in names}
        self.tensors = {name: tensor for file_tensors in headers.values() for name, tensor in file_tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return the weight with this name, as `dequantized_headers` describes it."""
        dtype = TYPES[self.stored.dtype]
        if name not in self.tensors:
            return from_mxfp4(self._stored(f"{name}_blocks"), self._stored(f"{name}_scales"), dtype)
        weight = self._stored(name)
        if self.tensors[name].dtype != "F8_E4M3":
            return weight
        scale = low_bits.scale_tensor_name(name, self.tensors)
        assert scale is not None
        return from_fp8(weight, self._stored(scale), self.stored.block, dtype)

    def _stored(self, name: str) -> torch.Tensor:
        with safe_open(self.place[name], framework="pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]


def from_fp8(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return W (…, outputs, inputs) = weight · scale, each block of weights with its own; the last may be partial.

    Args:
        weight: float8_e4m3fn.
        scales: one number, (…, outputs, 1), or one number per block: (…, ⌈outputs / rows⌉, ⌈inputs / columns⌉).
        block: (rows, columns) of a block.
    """
    scales = scales.float()
    if scales.numel() > 1 and scales.shape != (*weight.shape[:-1], 1):
        assert block is not None
        for dimension, size in zip((-2, -1), block, strict=True):
            scales = scales.repeat_interleave(size, dimension).narrow(dimension, 0, weight.shape[dimension])
    elif scales.numel() == 1:
        scales = scales.reshape(())
    return weight.float().mul_(scales).to(dtype)


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return W (experts, inputs, outputs) of packed blocks (experts, outputs, n, 16) and scales (experts, outputs, n),
    uint8.

    A byte holds two weights, the earlier in its lower half; inputs = 32 n.
    """
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    experts, outputs, groups, _ = blocks.shape
    weights = torch.empty(experts, low_bits.PER_SCALE * groups, outputs, dtype=dtype)
    for expert, packed, exponent in zip(weights, blocks, scales, strict=True):  # float32 needs eight times the bytes
        numbers = torch.stack([values[(packed & 15).long()], values[(packed >> 4).long()]], dim=-1).flatten(-2)
        scaled = torch.ldexp(numbers, exponent.int().sub_(127).unsqueeze(-1)).flatten(-2)
        expert.copy_(scaled.transpose(-1, -2))
    return weights
