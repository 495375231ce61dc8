"""Header of a GGUF file: metadata, vocabulary and tensors. No weight is read, no package is needed.

A file is "GGUF", a version, two counts, the metadata, the list of tensors, then their data, aligned
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). It is untrusted input, so every count and length in it is
compared with the bytes that are left before anything is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from surefit.core.errors import ModelError, os_help
from surefit.core.units import bytes_text

MAGIC = b"GGUF"
SUFFIX = ".gguf"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
"""ggml's limit of a tensor's dimensions, GGML_MAX_DIMS."""
ALIGNMENT = 32
KEPT = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are matched whole in a text."""
DAMAGED = "download the file again: it is incomplete or damaged"

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
}  # fmt: skip
"""ggml's number of a type → (name, values per block, bytes per block), for the types that the package gguf
dequantizes."""


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the header: `kind` in ggml's names (F32, Q4_1, …), `shape` in torch's order."""

    kind: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        path: the file.
        bytes: its size.
        metadata: key → value. Of arrays of texts only the tokenizer's are kept, of the others the length.
        tensors: ggml's name → tensor.
    """

    path: Path
    bytes: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def quantization(self) -> str:
        """Type that most of the weights have."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.elements * (len(tensor.shape) > 1)
        return max(sizes, key=lambda kind: sizes[kind]) if sizes else "none"

    @property
    def tokens(self) -> list[str]:
        """Vocabulary in the order of the ids; empty where the file has none."""
        return self.metadata.get("tokenizer.ggml.tokens") or []

    def of_model(self, key: str) -> Any:
        """Return a value under the architecture's own prefix, such as `block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def token_id(self, role: str) -> int | None:
        """Return the id of bos, eos, unknown or padding; None where the file names none."""
        number = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        return number if isinstance(number, int) and 0 <= number < len(self.tokens) else None


def is_gguf(path: Path) -> bool:
    """Return whether a file is a GGUF file by its name or by its first bytes."""
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        ModelError: no GGUF file, of another version or byte order, damaged, or shorter than its header promises.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", code="E2045", path=path, help="check the path") from None
    return _read(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, size: int, mtime_ns: int) -> GgufHeader:
    try:
        with open(path, "rb") as file:
            if size == 0:
                raise _not_gguf(path, b"", size)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).header()
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", code="E2046", path=path, help=os_help(error)) from None


def _not_gguf(path: Path, start: bytes, size: int) -> ModelError:
    if start == b"version ":
        advice = "run `git lfs pull` in the model's folder"
        return ModelError("a Git LFS pointer, not the weights", code="E2047", path=path, help=advice)
    problem = f"not a GGUF file: it has {bytes_text(size)} and does not start with GGUF"
    return ModelError(
        problem, code="E2048", path=path, help="name a .gguf file, or the folder with config.json and *.safetensors"
    )


class _Reader:
    """A read position in the file that only moves forward, and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def damaged(self, what: str) -> ModelError:
        return ModelError(
            f"the GGUF header is damaged at byte {self.at:,}: {what}", code="E2049", path=self.path, help=DAMAGED
        )

    def room(self, count: int, width: int, what: str) -> None:
        if count * width > self.size - self.at:
            raise self.short(what)

    def short(self, what: str) -> ModelError:
        return ModelError(
            f"the file ends within its header: {bytes_text(self.size)}, and {what} at byte {self.at:,} needs more",
            code="E2050",
            path=self.path,
            help=DAMAGED,
        )

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        width = struct.calcsize(f"<{code}")
        self.room(count, width, f"{count:,} × {width} bytes" if count > 1 else f"a number of {width} bytes")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += count * width
        return values

    def number(self, code: str) -> int:
        return int(self.numbers(code)[0])

    def texts(self, count: int, keep: bool = True) -> list[str]:
        """Read `count` texts, or skip them where `keep` is false. One loop: a vocabulary has 100,000 of them."""
        self.room(count, 8, f"a list of {count:,} strings")
        length_at, data, at, size = _LENGTH.unpack_from, self.data, self.at, self.size
        texts = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if keep:
                    texts.append(data[start:at].decode())
                if at > size:
                    raise struct.error
        except struct.error:
            self.at = min(at, size)
            raise self.short("a text") from None
        except UnicodeDecodeError:
            self.at = at
            raise self.damaged("a string that is not UTF-8") from None
        self.at = at
        return texts

    def text(self) -> str:
        return self.texts(1)[0]

    def header(self) -> GgufHeader:
        start = self.data[: min(8, self.size)]
        if start[:4] != MAGIC:
            raise _not_gguf(self.path, start, self.size)
        self.at = 4
        version = self.number("I")
        if version not in VERSIONS:
            raise self._other_version(version)
        tensors, entries = self.number("Q"), self.number("Q")
        self.room(entries, 13, f"a list of {entries:,} settings")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self.text()
            if key in metadata:
                raise self.damaged(f"{key} occurs twice")
            metadata[key] = self.value(self.number("I"), keep=key in KEPT)
        self.room(tensors, 24, f"a list of {tensors:,} tensors")
        tensor_table = self.tensors(tensors)
        self.check_data(metadata.get("general.alignment", ALIGNMENT), tensor_table)
        return GgufHeader(
            self.path, self.size, metadata, {name: tensor for name, (tensor, _, _) in tensor_table.items()}
        )

    def _other_version(self, version: int) -> ModelError:
        if version & 0xFFFF == 0:
            return ModelError(
                "a GGUF file for big-endian machines",
                code="E2051",
                path=self.path,
                help="download the model's little-endian file",
            )
        return ModelError(
            f"GGUF version {version}; SureFit reads {' and '.join(map(str, VERSIONS))}",
            code="E2052",
            path=self.path,
            help="convert the model again with a current llama.cpp",
        )

    def value(self, kind: int, keep: bool = False) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.damaged(f"a setting of the unknown type {kind}")
        item_type, count = self.number("I"), self.number("Q")
        if item_type in _SCALARS:
            return list(self.numbers(_SCALARS[item_type], count))
        if item_type != _STRING:
            raise self.damaged(f"an array of the unknown type {item_type}")
        texts = self.texts(count, keep)
        return texts if keep else count

    def tensors(self, count: int) -> dict[str, tuple[GgufTensor, int, int]]:
        """Read name → (tensor, offset of its data, its bytes)."""
        entries: dict[str, tuple[GgufTensor, int, int]] = {}
        for _ in range(count):
            name, dimensions = self.text(), self.number("I")
            if name in entries:
                raise self.damaged(f"the tensor {name} occurs twice")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self.damaged(f"the tensor {name} has {dimensions} dimensions")
            shape = tuple(reversed(self.numbers("Q", dimensions)))
            kind, offset = self.number("I"), self.number("Q")
            if kind not in _TYPES:
                raise ModelError(
                    f"the tensor {name} is of ggml's type {kind}, which cannot be dequantized",
                    code="E2053",
                    path=self.path,
                    help=f"choose a file with only {', '.join(entry[0] for entry in _TYPES.values())}",
                )
            text, block, width = _TYPES[kind]
            if 0 in shape or shape[-1] % block:
                raise self.damaged(f"the tensor {name} of shape {shape} cannot be {text}")
            entries[name] = GgufTensor(text, shape), offset, math.prod(shape) // block * width
        return entries

    def check_data(self, alignment: object, tensors: dict[str, tuple[GgufTensor, int, int]]) -> None:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"an alignment of {alignment}")
        start = -(-self.at // alignment) * alignment
        required_size = max((start + offset + size for _, offset, size in tensors.values()), default=start)
        if any(offset % alignment for _, offset, _ in tensors.values()):
            raise self.damaged("a tensor that does not start where it must")
        if required_size > self.size:
            raise ModelError(
                f"the file has {self.size:,} bytes, but its header describes {required_size:,}",
                code="E2054",
                path=self.path,
                help=DAMAGED,
            )
