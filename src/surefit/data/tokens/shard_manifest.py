"""Prepared data: the manifest of a directory of shards, and its rows, read when they are used.

The manifest is written last and has the number of rows and tokens, so that a run of any size starts at once; a shard is
opened when the first of its rows is needed.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from surefit.core.errors import DataError
from surefit.core.rundir import file_sha256, read_json
from surefit.core.units import GIB, bytes_text
from surefit.data.rows.layouts import HELD_OUT
from surefit.data.tokens.cache import ARRAYS, MASKED, TokenizationStats
from surefit.data.tokens.shards import DTYPES, shard_path, shard_sha256

MANIFEST = "manifest.json"
MAX_OPEN_SHARDS = 128
"""Shards that are mapped at once: three files each, and Linux usually allows 1,024 open files."""
MEND = "write it with `surefit prepare CONFIG`, which keeps complete shards"


@dataclass(frozen=True)
class ShardManifest:
    """All shards of a directory.

    Attributes:
        settings: config key → setting that the shards depend on.
        fingerprint: the hash of these settings and of the tokenizer.
        tokenizer: the hash of the tokenizer alone (`cache.tokenizer_digest`).
        shards: for each shard in order: rows, tokens, longest, repeat, sha256 (of its files' hashes).
        stats: stats of all rows, each counted as often as an epoch sees it.
        lengths: upper limit of tokens, a power of two → examples.
        held_out: rows of `heldout.jsonl`.
        conversations: no row is plain text.
        skipped: the first rows that could not be used, with the reason.
        files: the sources: path, bytes and modification time.
    """

    settings: Mapping[str, Any]
    fingerprint: str
    tokenizer: str
    shards: Sequence[Mapping[str, Any]]
    stats: TokenizationStats
    lengths: Mapping[str, int]
    held_out: int
    conversations: bool
    skipped: Sequence[str]
    files: Sequence[Mapping[str, Any]]

    @property
    def sha256(self) -> str:
        """Hash of all rows that an epoch sees."""
        shards = [[shard["sha256"], shard["repeat"]] for shard in self.shards]
        return hashlib.sha256(json.dumps(shards).encode()).hexdigest()


def read_shard_manifest(directory: Path) -> ShardManifest:
    """Read the manifest of prepared data.

    Raises:
        DataError: there is none, or it is damaged; with the command that makes it.
    """
    if not (directory / MANIFEST).is_file():
        shard_count = sum(1 for _ in directory.glob("shard-*")) if directory.is_dir() else 0
        problem = f"unfinished: {shard_count:,} shards, but no manifest" if shard_count else "there is no prepared data"
        raise DataError(problem, code="E4108", path=directory, field="data.tokenized", help=MEND)
    try:
        values = read_json(directory / MANIFEST)
        if damage := _manifest_problem(values):
            raise DataError(f"this manifest is damaged: {damage}", code="E4651")
        return ShardManifest(**{**values, "stats": TokenizationStats(**values["stats"])})
    except (DataError, TypeError, KeyError) as error:
        reason = error.message if isinstance(error, DataError) else "not a manifest"
        raise DataError(reason, code="E4109", path=directory / MANIFEST, field="data.tokenized", help=MEND) from None


COUNTS = {"rows": 0, "tokens": 0, "longest": 0, "repeat": 1}
"""Key of a shard's entry → the least valid value."""


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**40


def _manifest_problem(values: Any) -> str | None:
    """Return the first invalid entry of a manifest; None if all are valid."""
    if not isinstance(values, dict) or not isinstance(values.get("stats"), dict):
        return "it is not an object with stats"
    shards = values.get("shards")
    if not isinstance(shards, list) or not shards:
        return "it names no shards"
    for number, shard in enumerate(shards):
        wrong = [
            key for key, least in COUNTS.items() if not isinstance(shard, dict) or not _is_count(shard.get(key), least)
        ]
        if wrong or type(shard.get("sha256")) is not str:
            return f"{[*wrong, 'sha256'][0]} of shard {number} has the wrong type"
    rows = sum(shard["rows"] * shard["repeat"] for shard in shards)
    wrong = [f"stats.{key}" for key, value in values["stats"].items() if not _is_count(value)]
    lengths = values.get("lengths")
    if not isinstance(lengths, dict) or not all(key.isdecimal() and _is_count(value) for key, value in lengths.items()):
        wrong.append("lengths")
    kinds: dict[str, type] = {
        "settings": dict, "fingerprint": str, "tokenizer": str, "conversations": bool, "skipped": list, "files": list,
    }  # fmt: skip
    wrong += [key for key, kind in kinds.items() if type(values.get(key)) is not kind]
    if not _is_count(values.get("held_out")):
        wrong.append("held_out")
    if wrong:
        return f"{wrong[0]} is not a possible value"
    if rows != values["stats"].get("kept"):
        return f"its shards have {rows:,} rows, and stats.kept is {values['stats'].get('kept'):,}"
    return None


def find_wrong_size(directory: Path, manifest: ShardManifest) -> str | None:
    """Return the first shard whose files do not have the size for the manifest's counts; opens none of them."""
    for number, shard in enumerate(manifest.shards):
        path = shard_path(directory, number)
        counts = (shard["tokens"], shard["tokens"], shard["rows"] + 1)
        for name, dtype, count in zip(ARRAYS, DTYPES, counts, strict=True):
            try:
                header_bytes = (path / f"{name}.npy").stat().st_size - count * dtype.itemsize
            except OSError:
                return f"{path.name} has no {name}.npy"
            if not 0 < header_bytes <= HEADER:
                return f"{path.name}/{name}.npy does not have the size of {count:,} numbers"
    return None


HEADER = 4096
"""Maximum bytes of the header of an .npy file; numpy's has 128."""
AT_ONCE = 2 * GIB
"""Bytes of shards whose hashes are compared before the first step: one to four seconds."""
HASHED = 16 * GIB
"""Bytes of shards whose hashes one process compares; `surefit prepare --verify` compares all."""


@dataclass(frozen=True)
class _Shard:
    """One shard's arrays, memory-mapped."""

    ids: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]


class ShardedTokens(Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]):
    """The rows of prepared data, with the interface of `cache.TokenDataset`.

    Rows that an epoch sees twice are there twice. Memory does not grow with the rows: it holds where each shard begins,
    and the maps of the `MAX_OPEN_SHARDS` shards that were used last.

    Attributes:
        path: the directory.
        stats: counts of the rows by outcome.
        sha256: hash of all rows, from the hashes in the manifest.
    """

    desirable = None
    """No labels: `surefit prepare` writes answers to be learned."""

    def __init__(self, path: Path, manifest: ShardManifest | None = None) -> None:
        manifest = manifest or read_shard_manifest(path)
        self.path, self.manifest, self.stats, self.sha256 = path, manifest, manifest.stats, manifest.sha256
        self.rows = np.array([shard["rows"] for shard in manifest.shards], np.int64)
        repeats = np.array([shard["repeat"] for shard in manifest.shards], np.int64)
        self._ends = np.cumsum(self.rows * repeats)
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._compared: set[int] = set()
        self._hashed = 0

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def lengths(self) -> ShardedLengths:
        """Tokens of each row, read on access."""
        return ShardedLengths(self)

    def __getitem__(self, index: Any) -> Any:
        """Return (input_ids, labels) of one row, int64; labels are -100 where the loss does not fall.

        Raises:
            DataError: its shard is missing or damaged.
        """
        shard, row = self.place(index)
        start, end = shard.offsets[row : row + 2]
        ids = shard.ids[start:end].astype(np.int64)
        return ids, np.where(shard.supervised[start:end] == 1, ids, MASKED)

    def place(self, index: int) -> tuple[_Shard, int]:
        """Return a row's shard, and its number there."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        number = int(np.searchsorted(self._ends, index, side="right"))
        first_row = int(self._ends[number - 1]) if number else 0
        return self.shard(number), (index - first_row) % int(self.rows[number])

    def shard(self, number: int) -> _Shard:
        """Return a shard's arrays; closes the least recently used shard if too many are open."""
        if number not in self._open:
            self._open[number] = self._mapped(number)
            if len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def _mapped(self, number: int) -> _Shard:
        path, entry = shard_path(self.path, number), self.manifest.shards[number]
        sizes = (entry["tokens"], entry["tokens"], entry["rows"] + 1)
        try:
            arrays = [np.load(path / f"{name}.npy", mmap_mode="r") for name in ARRAYS]
        except (OSError, ValueError, EOFError) as error:
            problem = "missing" if isinstance(error, FileNotFoundError) else "damaged"
            raise DataError(
                f"this shard is {problem}", code="E4110", path=path, field="data.tokenized", help=MEND
            ) from None
        for array, size, dtype in zip(arrays, sizes, DTYPES, strict=True):
            if array.shape != (size,) or array.dtype != dtype:
                problem = "this shard does not match the manifest"
                raise DataError(problem, code="E4111", path=path, field="data.tokenized", help=MEND)
        if not self._as_written(number):
            raise DataError(
                "this shard was changed after it was written", code="E4652", path=path, field="data.tokenized",
                help="delete its directory, then run `surefit prepare CONFIG`, which keeps the other shards",
            )  # fmt: skip
        return _Shard(*arrays)

    def _as_written(self, number: int) -> bool:
        """Return whether a shard's files have the hashes of the manifest, up to `HASHED` bytes in all, and its offsets
        increase. Checked once per shard, and read instead of mapped: pages read through a map stay in memory."""
        if number in self._compared:
            return True
        self._compared.add(number)
        path = shard_path(self.path, number)
        offsets = np.load(path / "offsets.npy")
        if offsets[0] != 0 or offsets[-1] != self.manifest.shards[number]["tokens"] or (np.diff(offsets) <= 0).any():
            return False
        names = [*(f"{name}.npy" for name in ARRAYS), HELD_OUT]
        size = sum((path / name).stat().st_size for name in names if (path / name).exists())
        if self._hashed + size > HASHED:
            return True
        self._hashed += size
        try:
            digests = {name: file_sha256(path / name) for name in names}
        except OSError:
            return False
        return bool(shard_sha256(digests) == self.manifest.shards[number]["sha256"])

    def compare(self) -> str | None:
        """Compare the hashes of all shards, up to `HASHED` bytes per start; return what remains to be compared.

        Raises:
            DataError: a shard is missing or was changed.
        """
        if self.bytes <= AT_ONCE:
            for number in range(len(self.manifest.shards)):
                self.shard(number)
            return None
        if self.bytes <= HASHED:
            return "each shard's hash is checked when it is opened"
        return (
            f"only the hashes of the first {bytes_text(HASHED)} of shards are checked when they are opened, of "
            f"{bytes_text(self.bytes)}: surefit prepare CONFIG --verify checks all"
        )

    @property
    def bytes(self) -> int:
        """Bytes of the arrays of all shards."""
        return sum(5 * shard["tokens"] + 8 * (shard["rows"] + 1) for shard in self.manifest.shards)


class ShardedLengths(Sequence[int]):
    """Tokens of each row of `ShardedTokens`, read on access; otherwise like a numpy array."""

    def __init__(self, rows: ShardedTokens) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """Return the tokens of one row, int, or of a list or array of rows, an int64 array. Shards are opened in
        order."""
        if isinstance(index, (int, np.integer)):
            shard, row = self._rows.place(int(index))
            return int(shard.offsets[row + 1] - shard.offsets[row])
        rows = np.asarray(index, np.int64)
        lengths = np.empty(rows.shape, np.int64)
        for place in np.argsort(rows, axis=None):
            lengths.flat[place] = self[int(rows.flat[place])]
        return lengths

    def max(self) -> int:
        """Return the tokens of the longest row."""
        longest: int = max(shard["longest"] for shard in self._rows.manifest.shards)
        return longest

    def longest(self, count: int) -> list[int]:
        """Return the numbers of the `count` longest rows, or of all if there are fewer, the longest first.

        Only shards are opened whose longest row may be among them.
        """
        shards = self._rows.manifest.shards
        heap: list[tuple[int, int]] = []  # (tokens, -row), the smallest first
        for number in sorted(range(len(shards)), key=lambda n: -shards[n]["longest"]):
            if len(heap) == count and shards[number]["longest"] < heap[0][0]:
                break
            end, rows = int(self._rows._ends[number]), int(self._rows.rows[number])
            begin = end - rows * shards[number]["repeat"]
            lengths = np.diff(self._rows.shard(number).offsets)
            for row in np.argsort(-lengths, kind="stable")[:count]:
                for copy in range(begin, end, rows):
                    item = (int(lengths[row]), -(copy + int(row)))
                    if len(heap) < count:
                        heapq.heappush(heap, item)
                    else:
                        heapq.heappushpop(heap, item)
        return [-row for _, row in sorted(heap, reverse=True)]


def held_out_file(directory: Path) -> Path:
    """Return the file of the held-out rows of all shards."""
    return directory / HELD_OUT
