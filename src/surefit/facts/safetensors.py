"""Headers of safetensors files: names, types and shapes of the tensors, without reading a single weight.

A file is 8 bytes (little-endian length of the header), the header (JSON), then the data
(https://github.com/huggingface/safetensors#format). Only the header is read.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefit.core.errors import ModelError, os_help
from surefit.core.reading import open_file, parse_json, read_json_file
from surefit.core.units import truncate_text

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit: https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs."""
MAX_DIMENSIONS = 8
"""Largest number of dimensions of a tensor; weights have up to five."""
DOWNLOAD_AGAIN = "download the file again: it is incomplete or damaged"


@dataclass(frozen=True)
class TensorHeader:
    """One entry of a header: `dtype` in safetensors' names (BF16, F32, U8, …), `shape`, its size in bytes, and the
    offset of its end in the data."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    end: int = field(default=0, compare=False)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Read the tensors' headers of one file, by name.

    Raises:
        ModelError: not a safetensors file, damaged, or shorter than its header promises; names the file.
    """
    try:
        size = path.stat().st_size
        with open_file(path) as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise _damaged(path, start, size)
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", code="E2087", path=path, help=os_help(error)) from None
    tensors = parse_header(raw, path)
    expected_size = 8 + length + max((tensor.end for tensor in tensors.values()), default=0)
    if size != expected_size:
        raise ModelError(
            f"the file has {size:,} bytes, but its header describes {expected_size:,}",
            code="E2088",
            path=path,
            help=DOWNLOAD_AGAIN,
        )
    if problem := _layout_problem(tensors):
        raise ModelError(f"the safetensors header is damaged: {problem}", code="E2655", path=path, help=DOWNLOAD_AGAIN)
    return tensors


BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Type → bits of one number: https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs."""


def _layout_problem(tensors: Mapping[str, TensorHeader]) -> str | None:
    """Return a fault that the library would not accept: an unknown type, a size that does not match the shape, or
    tensors that overlap or leave a gap."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].end - item[1].bytes, item[1].end)):
        if tensor.dtype not in BITS:
            return f"{truncate_text(name, 100)} has the unknown type {tensor.dtype!r:.40}"
        if tensor.elements * BITS[tensor.dtype] != tensor.bytes * 8:
            shape = truncate_text(str(list(tensor.shape)), 60)
            return f"{truncate_text(name, 100)} of shape {shape} in {tensor.dtype} has {tensor.bytes:,} bytes"
        if tensor.end - tensor.bytes != end:
            return f"{truncate_text(name, 100)} does not begin where the one before ends ({end:,})"
        end = tensor.end
    return None


def _damaged(path: Path, start: bytes, size: int) -> ModelError:
    if start == b"version ":
        return ModelError(
            "a Git LFS pointer, not the weights",
            code="E2089",
            path=path,
            help="run `git lfs pull` in the model's folder",
        )
    return ModelError(
        f"not a safetensors file ({size:,} bytes, no readable header)", code="E2090", path=path, help=DOWNLOAD_AGAIN
    )


def parse_header(raw: bytes, path: Path) -> dict[str, TensorHeader]:
    """Parse header JSON to tensors; `__metadata__` is left out. An invalid header raises a `ModelError`."""
    try:
        header = parse_json(raw)
        metadata = header.get("__metadata__")
        if metadata is not None and set(map(type, metadata.values())) - {str}:
            raise ValueError("__metadata__ must map names to strings")
        return {name: _tensor(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise ModelError("the safetensors header is damaged", code="E2091", path=path, help=DOWNLOAD_AGAIN) from None


def _tensor(entry: Mapping[str, Any]) -> TensorHeader:
    begin, end = map(_number, entry["data_offsets"])
    shape = tuple(map(_number, entry["shape"]))
    if begin > end or len(shape) > MAX_DIMENSIONS:
        raise ValueError("offsets or shape out of range")
    if type(entry["dtype"]) is not str:
        raise ValueError("the type is not a string")
    return TensorHeader(entry["dtype"], shape, end - begin, end)


def _number(value: Any) -> int:
    """Check and return a size in the format's type: unsigned, 64 bits."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is not a size")
    return value


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that hold a model's weights; empty where there are none.

    Raises:
        ModelError: the index is damaged, or names files that do not exist.
    """
    if (directory / INDEX).is_file():
        return _indexed_files(directory)
    return [directory / SINGLE] if (directory / SINGLE).is_file() else []


def read_weight_index(directory: Path) -> dict[str, str]:
    """Read the index as tensor → file name; empty where there is none.

    Raises:
        ModelError: the index is damaged.
    """
    index = directory / INDEX
    if not index.is_file():
        return {}
    try:
        return {name: Path(file).name for name, file in read_json_file(index)["weight_map"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ModelError("not a valid index of weight files", code="E2092", path=index, help=DOWNLOAD_AGAIN) from None


def _indexed_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    files = [directory / name for name in sorted(set(read_weight_index(directory).values()))]
    missing = [file.name for file in files if not os.path.isfile(file)]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(files)} weight files are missing: "
            + ", ".join(truncate_text(name, 100) for name in missing[:3])
            + (" …" if len(missing) > 3 else ""),
            code="E2093",
            path=index,
            help="finish the download: every file in the index is needed",
        )
    return files


def read_weights(directory: Path) -> dict[str, TensorHeader] | None:
    """Read the headers of all of a model's weight files, by name; None where the folder holds no safetensors weights.

    Raises:
        ModelError: a file is missing or damaged, or holds other tensors than the index says.
    """
    files = weight_files(directory)
    if not files:
        return None
    headers = {file.name: read_header(file) for file in files}
    for name, shard in read_weight_index(directory).items():
        if name not in headers[shard]:
            raise ModelError(
                f"{truncate_text(name, 100)} is not in {shard}, contrary to the index",
                code="E2094",
                path=directory / INDEX,
                help="files were exchanged or truncated: download or save the model again",
            )
    return {name: tensor for header in headers.values() for name, tensor in header.items()}
