"""Tokenization of a range of rows into a shard: token arrays in a directory that is there in full or not at all.

DIR/shard-000123/input_ids.npy, supervised.npy, offsets.npy   as in the cache (data/tokens/cache.py)
                 heldout.jsonl   the held-out rows of the range
                 meta.json       the task it was made for, the hashes of the files, and the counts of the rows

`write_shard` depends only on its arguments and on the rows' file. So any caller writes the same bytes: one process,
several, or the tasks of an array job.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surefit.config.schema import DataSection
from surefit.core.errors import DataError, MachineError
from surefit.core.reading import read_json_file
from surefit.core.rundir import directory_atomic, file_sha256, is_full, write_json
from surefit.core.units import MIB
from surefit.data.read.file_io import file_extensions
from surefit.data.read.readers import LINE_READERS, RowWithPlace
from surefit.data.read.stream import RowRange, read_range, require_unchanged
from surefit.data.rows.layouts import HELD_OUT, Examples, bad_rows_error, prompt_position, row_converter, row_position
from surefit.data.rows.reasoning import convert_reasoning
from surefit.data.tokens.cache import ARRAYS, TokenizationStats
from surefit.data.tokens.dataset import encode_all
from surefit.data.tokens.tokenize import BATCH
from surefit.task import Example, TaskRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
"""Version of the shards, incremented when the same rows would become other shards."""
DTYPES: tuple[np.dtype[Any], ...] = (np.dtype("<i4"), np.dtype("u1"), np.dtype("<i8"))
"""Data types of `ARRAYS`."""
NAMED = 3
"""Unusable rows that are listed; further ones are only counted."""


@dataclass(frozen=True)
class ShardTask:
    """The input of one shard.

    Attributes:
        number: number of the shard, in the order of the rows.
        source: `data.train`, or a source of `data.mix`.
        columns: columns by which the layout of the source's rows is detected; the same for all its shards.
        rows: range of the rows.
        repeat: how often an epoch sees each row of the shard.
        share: share of the rows to use, chosen by the hash of each; 1 is all.
        first: whether it is the first task with these rows: it writes the held-out ones, and counts the bad ones.
        holds_out: whether the held-out rows are used for evaluation; otherwise they are left out.
    """

    number: int
    source: str
    columns: tuple[str, ...]
    rows: RowRange
    repeat: int = 1
    share: float = 1.0
    first: bool = True
    holds_out: bool = True


@dataclass(frozen=True)
class ShardContext:
    """The settings that all shards of a directory share.

    Attributes:
        section: `data` of the config.
        seed: `train.seed`, for the hashes that choose rows.
        recipe: the task.
        tokenizer: the model's.
        fingerprint: the hash of all settings and of the tokenizer.
        secret: positions of the prompts of `data.eval` if it is a file, which `data.mix` must not teach.
    """

    section: DataSection
    seed: int
    recipe: TaskRecipe
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    secret: frozenset[float] = frozenset()


def shard_path(directory: Path, number: int) -> Path:
    """Return the path of a shard."""
    return directory / f"shard-{number:06d}"


def read_complete_shard(directory: Path, task: ShardTask, fingerprint: str) -> dict[str, Any] | None:
    """Return meta.json of a shard that is there in full, made of these rows with these settings; else None.

    Sizes are compared, not the hashes: `find_damaged_file` compares those.
    """
    path = shard_path(directory, task.number)
    try:
        meta: dict[str, Any] = read_json_file(path / "meta.json")
        same = meta["task"] == task_to_json(task) and meta["fingerprint"] == fingerprint
        complete = all((path / name).stat().st_size == size for name, size in meta["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if same and complete else None


def task_to_json(task: ShardTask) -> dict[str, Any]:
    """Return a task in the form of meta.json."""
    described: dict[str, Any] = json.loads(json.dumps(asdict(task)))
    return described


def find_damaged_file(path: Path, meta: dict[str, Any]) -> str | None:
    """Return the first file of a shard whose content was changed after it was written."""
    return next((name for name, sha256 in meta["sha256"].items() if file_sha256(path / name) != sha256), None)


def shard_sha256(digests: Mapping[str, str]) -> str:
    """Return the hash of a shard from the hashes of its files."""
    return hashlib.sha256(json.dumps(dict(digests), sort_keys=True).encode()).hexdigest()


def source_sha256(rows: RowRange) -> str | None:
    """Return the hash of a range's bytes, or of its whole file if the range is not in bytes; None if it is not
    local."""
    if not os.path.exists(rows.file):
        return None
    if rows.stop is None or file_extensions(rows.file)[0] not in LINE_READERS:
        return file_sha256(Path(rows.file))
    digest = hashlib.sha256()
    with open(rows.file, "rb") as file:
        file.seek(rows.start)
        remaining = rows.stop - rows.start
        while remaining > 0 and (data := file.read(min(remaining, MIB))):
            digest.update(data)
            remaining -= len(data)
    return digest.hexdigest()


def write_shard(task: ShardTask, making: ShardContext, directory: Path) -> dict[str, Any]:
    """Tokenize a range of rows into a shard, a batch at a time; return its meta.json.

    An existing shard of this name is replaced: two processes that make the same shard at once write the same bytes.

    Raises:
        DataError: rows that cannot be used or are too long, unless the config leaves them out.
        MachineError: it cannot be written; nothing of it is left.
    """
    path = shard_path(directory, task.number)
    try:
        with directory_atomic(path) as temporary, require_unchanged([task.rows.file]):
            meta = _fill(temporary, task, making)
            write_json(temporary / "meta.json", meta)
    except MachineError as error:
        if not is_full(error):
            raise
        help_text = "free some space and run the same command again: complete shards are kept"
        raise MachineError(error.message, code=error.code, path=path, help=help_text) from error.__cause__
    return meta


def _fill(path: Path, task: ShardTask, making: ShardContext) -> dict[str, Any]:
    section, stats, too_long_errors = making.section, _ShardStats(), []
    with ExitStack() as stack:
        arrays = [
            stack.enter_context(_Growing(path / f"{name}.npy", dtype))
            for name, dtype in zip(ARRAYS, DTYPES, strict=True)
        ]
        held_out = stack.enter_context(open(path / HELD_OUT, "w", encoding="utf-8"))
        arrays[2].append([0])
        selected = _select_examples(task, making, stats, held_out)
        while batch := list(islice(selected, BATCH)):
            examples = Examples([example for example, _ in batch], [where for _, where in batch], [])
            refused: dict[int, DataError] | None = {} if section.bad_rows == "skip" else None
            cut: list[int] = []
            encoded = encode_all(
                examples, making.tokenizer, section.max_length, section.too_long, cut, refused, task.source
            )
            for token_examples, where in zip(encoded, examples.where, strict=True):
                stats.split += max(0, len(token_examples) - 1)
                for ids, supervised in token_examples:
                    if stats.counted(len(ids), supervised.count(True), section.max_length):
                        arrays[0].append(ids)
                        arrays[1].append(supervised)
                        arrays[2].append([stats.tokens])
                    elif len(ids) > section.max_length and section.too_long == "error":
                        problem = f"{len(ids):,} tokens, over max_length {section.max_length:,}"
                        too_long_errors.append(DataError(problem, code="E4112", path=where))
            stats.cut += len(cut)
            stats.problems += (refused or {}).values()
    if too_long_errors:
        way_out = f"set data.max_length to {stats.longest_of_all} or more, or data.too_long to drop"
        raise bad_rows_error(too_long_errors, stats.read, task.source, way_out)
    if stats.problems and section.bad_rows == "error":
        raise bad_rows_error(
            stats.problems, stats.read, task.source, "set data.bad_rows: skip to leave them out (counted)"
        )
    files = [f"{name}.npy" for name in ARRAYS] + [HELD_OUT]
    return {
        "format": FORMAT,
        "task": task_to_json(task),
        "fingerprint": making.fingerprint,
        "source_sha256": source_sha256(task.rows),
        "sizes": {name: (path / name).stat().st_size for name in files},
        "sha256": {name: file_sha256(path / name) for name in files},
        **stats.as_dict(task.first),
    }


def _select_examples(
    task: ShardTask, making: ShardContext, found: _ShardStats, held_out: Any
) -> Iterator[tuple[Example, str]]:
    """Yield the examples of a range to train on, each with its place; the others are written to `held_out` or
    counted."""
    section, seed = making.section, making.seed
    convert = row_converter(list(task.columns), task.source, making.recipe, section.format)
    limit = section.share or 0.0
    for placed_row in read_range(task.rows):
        where = found.at(placed_row)
        try:
            example = convert(placed_row.row)
        except DataError as error:
            problem = DataError(
                error.message,
                code=error.code,
                path=placed_row.path,
                line=placed_row.line,
                field=error.field,
                help=error.help,
            )
            found.problems.append(problem)
            continue
        prompt = prompt_position(example, seed) if limit or making.secret else 1.0
        if prompt < limit and task.holds_out:
            if task.first:
                held_out.write(json.dumps(_as_json(placed_row.row), ensure_ascii=False, default=str) + "\n")
            found.held_out += 1
        elif prompt < limit or (not task.holds_out and prompt in making.secret):
            found.leaked.append(where)
        elif task.share == 1 or row_position(example, seed) < task.share:
            found.conversations &= example.text is None
            yield convert_reasoning(example, section.thinking), where


def _as_json(value: Any) -> Any:
    """Return a row without the numbers that JSON lacks: Parquet writes a missing value as NaN."""
    if isinstance(value, dict):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class _ShardStats:
    """Counts of the rows by outcome, updated as they are read."""

    read: int = 0
    kept: int = 0
    long: int = 0
    unsupervised: int = 0
    split: int = 0
    cut: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    longest_of_all: int = 0
    held_out: int = 0
    conversations: bool = True
    places: list[str] = field(default_factory=list)
    problems: list[DataError] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)

    def at(self, placed: RowWithPlace) -> str:
        """Count a row; return its place in words."""
        where = placed.path if placed.line is None else f"{placed.path}:{placed.line}"
        self.places[1:] = [where]
        self.read += 1
        return where

    def counted(self, tokens: int, supervised: int, max_length: int) -> bool:
        """Count an example; return whether it is kept."""
        self.longest_of_all = max(self.longest_of_all, tokens)
        fits = tokens <= max_length
        if not fits or not supervised:
            self.long += not fits
            self.unsupervised += fits
            return False
        self.kept += 1
        self.tokens += tokens
        self.supervised += supervised
        self.longest = max(self.longest, tokens)
        self.lengths[1 << (tokens - 1).bit_length()] += 1
        return True

    def as_dict(self, first: bool) -> dict[str, Any]:
        """Return the entries for meta.json; rows that are left out are counted by the `first` task that reads them."""
        left_out = [f"{problem.where}: {problem.message}" for problem in self.problems]
        left_out = [*left_out, *(f"{where}: its prompt is held out" for where in self.leaked)] if first else []
        used = self.kept + self.long + self.unsupervised - self.split
        stats = TokenizationStats(
            rows=used + len(left_out),
            kept=self.kept,
            dropped_too_long=self.long,
            dropped_unsupervised=self.unsupervised,
            tokens=self.tokens,
            supervised_tokens=self.supervised,
            longest=self.longest,
            skipped=len(left_out),
            cut=self.cut,
            split=self.split,
        )
        return {
            "stats": asdict(stats),
            "held_out": self.held_out if first else 0,
            "lengths": {str(upto): self.lengths[upto] for upto in sorted(self.lengths)},
            "conversations": self.conversations,
            "skipped": left_out[:NAMED],
            "first": self.places[0] if self.places else None,
            "last": self.places[-1] if self.places else None,
        }


class _Growing:
    """A one-dimensional .npy file written as its values come; its length is written into the header at the end."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.file, self.dtype, self.count = path.open("wb"), dtype, 0
        self._header()

    def __enter__(self) -> _Growing:
        return self

    def __exit__(self, *error: object) -> None:
        with self.file:
            self.file.seek(0)
            self._header()

    def append(self, values: Sequence[int]) -> None:
        # bytes reads a list in a third of the time of Python's array, which is no slower than numpy.
        data = bytes(values) if self.dtype.itemsize == 1 else array(self.dtype.char, values)
        self.file.write(np.asarray(memoryview(data)).astype(self.dtype, copy=False).data)
        self.count += len(values)

    def _header(self) -> None:
        # numpy pads a header for the longest possible length, so the second one exactly replaces the first.
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, header)
