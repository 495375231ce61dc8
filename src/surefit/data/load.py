"""Where rows come from: a file, a directory of files, a sample that ships with SureFit, or a data set on the hub.

Nothing here needs torch or transformers; `pyarrow` and `datasets` are loaded only for what they alone can read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from surefit import samples
from surefit.core.errors import DataError, did_you_mean
from surefit.core.rundir import file_sha256
from surefit.core.sampling import evenly
from surefit.data.readers import NAMED_ONLY, READERS, Placed

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?(@\S+)?")
"""owner/name, with an optional :configuration and an optional @split."""
SPLIT_WORD = re.compile(r"(train|test|valid|validation|val|dev|eval)(?![a-z])", re.IGNORECASE)
KINDS = ", ".join(READERS)


@dataclass(frozen=True)
class Source:
    """What `data.train` means.

    Attributes:
        kind: where the rows are.
        name: as the user wrote it.
        path: the file or directory; None on the hub.
    """

    kind: Literal["file", "directory", "sample", "hub"]
    name: str
    path: Path | None = None


class Rows(Sequence[dict[str, Any]]):
    """Rows in memory that know where they were read.

    Attributes:
        source: as the user wrote it.
        files: the files they were read from; empty for the hub.
        sha256: hash of the files' bytes (of a single file: what `sha256sum` prints), or of the hub's rows.
    """

    def __init__(self, source: str, placed: Sequence[Placed], files: Sequence[Path], sha256: str) -> None:
        self.source = source
        self.files = tuple(files)
        self.sha256 = sha256
        self._placed = placed

    def __len__(self) -> int:
        return len(self._placed)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [placed.row for placed in self._placed[index]]
        return self._placed[index].row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (placed.row for placed in self._placed)

    def sample(self, limit: int) -> Rows:
        """Up to `limit` rows, spread evenly, that still know where they were read."""
        chosen = [self._placed[n] for n in evenly(len(self), limit)]
        return Rows(self.source, chosen, self.files, self.sha256)

    def place(self, index: int) -> tuple[str, int | None]:
        """(file, 1-based line), or ("file row N", None) where rows have no lines of their own."""
        return self._placed[index].path, self._placed[index].line

    def where(self, index: int) -> str:
        """`file:line`, or `file row N`."""
        path, line = self.place(index)
        return path if line is None else f"{path}:{line}"

    @property
    def columns(self) -> list[str]:
        """Every column that any row has, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self for name in row))


def is_local(text: str) -> bool:
    """Whether rows can be read without the network. True as well for what cannot be found at all."""
    try:
        return resolve_source(text).kind != "hub"
    except DataError:
        return True


def resolve_source(text: str) -> Source:
    """Decide what a name in the config means, without reading anything.

    A name that starts with surefit/ is a sample; what exists on this machine is a file or directory; what looks like
    owner/name is on the hub (owner/name:config@split where a data set has several configurations or splits).

    Raises:
        DataError: it is none of these.
    """
    if sample := samples.resolve(text):
        return Source("sample", text, sample)
    path = Path(os.path.expanduser(text))
    if text.strip() and os.path.isdir(path):
        return Source("directory", text, path)
    if os.path.isfile(path):
        return Source("file", text, path)
    if text.startswith(samples.PREFIX):
        known = samples.available()
        raise DataError(f"no sample named {text!r}{did_you_mean(text, known)}", help=f"there are {', '.join(known)}")
    if os.path.exists(path):
        raise DataError("not a regular file", path=path, help=f"name a file ({KINDS}) or a directory of them")
    if _looks_like_hub(text, path):
        return Source("hub", text)
    raise _missing(text, path)


def _looks_like_hub(text: str, path: Path) -> bool:
    """owner/name, unless `owner` is a folder here: then the user meant a file in it."""
    return bool(HUB_ID.fullmatch(text)) and path.suffix.lower() not in READERS and not os.path.isdir(path.parent)


def _missing(text: str, path: Path) -> DataError:
    hub = "a data set on the hub is written owner/name"
    if not text.strip():
        return DataError("no data is named", help=f"name a file ({KINDS}) or a directory; {hub}")
    help_text = f"paths start at the directory you run in; {hub}"
    if not os.path.isdir(path.parent):
        return DataError(f"no such file: there is no directory {path.parent}", path=path, help=help_text)
    siblings = [str(entry) for entry in sorted(path.parent.glob("*")) if not entry.name.startswith(".")]
    return DataError(f"no such file or directory{did_you_mean(str(path), siblings)}", path=path, help=help_text)


def load_rows(source: str, *, split: str = "train") -> Rows:
    """Read every row.

    Args:
        source: a file, a directory, a surefit/… sample or a hub id.
        split: which split of a hub data set, unless its name says it.

    Raises:
        DataError: missing, empty or malformed, with file, line and column.
        MachineError: the hub cannot be reached.
    """
    found = resolve_source(source)
    if found.kind == "hub":
        from surefit.data.hub import hub_rows

        placed, sha256 = hub_rows(source, split)
        return Rows(source, placed, (), sha256)
    assert found.path is not None
    try:
        files = data_files(found.path) if found.kind == "directory" else [found.path]
        placed = [one for file in files for one in _read(file)]
        sha256 = _sha256(files)
    except OSError as error:
        path = error.filename or found.path
        raise DataError(f"cannot be read: {error.strerror or error}", path=path, help="check its permissions") from None
    if found.kind == "sample":
        # Where the package is installed says nothing about the row, and places are written into artefacts.
        placed = [one._replace(path=source) for one in placed]
    return Rows(source, placed, files, sha256)


def _read(file: Path) -> list[Placed]:
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        ending = f"the ending {file.suffix!r}" if file.suffix else "no ending"
        raise DataError(f"a data file with {ending} cannot be read", path=file, help=f"{KINDS} can")
    if file.stat().st_size == 0:
        raise DataError("the file is empty", path=file, help="was it written completely?")
    placed = list(reader(file))
    if not placed:
        raise DataError("the file holds no rows", path=file, help="was it written completely?")
    return placed


def data_files(directory: Path) -> list[Path]:
    """The data files of a directory in the order of their names; other files, READMEs for one, are not data.

    Raises:
        DataError: there are none, or files of different splits.
    """
    names = sorted(entry.name for entry in directory.iterdir() if entry.is_file() and not entry.name.startswith("."))
    if "state.json" in names and "dataset_info.json" in names:
        raise DataError(
            "this directory was written by Dataset.save_to_disk",
            path=directory,
            help="write the data set with Dataset.to_parquet or to_json, and name that file",
        )
    files = [directory / name for name in names if _is_data(Path(name))]
    if not files:
        found = f"; it has {', '.join(names[:5])}" if names else ""
        raise DataError(f"no data file in this directory{found}", path=directory, help=f"data files are {KINDS}")
    _refuse_mixed_splits(directory, files)
    return files


def _is_data(name: Path) -> bool:
    ending = name.suffix.lower()
    return ending in READERS and ending not in NAMED_ONLY and name.stem.lower() != "readme"


def _refuse_mixed_splits(directory: Path, files: list[Path]) -> None:
    """train.jsonl beside test.jsonl: reading both would train on the test rows."""
    words: dict[str, str] = {}
    for file in files:
        if match := SPLIT_WORD.match(file.name):
            words.setdefault(match[1].lower(), file.name)
    if len(words) > 1:
        raise DataError(
            f"this directory holds different splits: {', '.join(words.values())}",
            path=directory,
            help="name the file to train on in data.train and the one to score on in data.eval",
        )


def _sha256(files: Sequence[Path]) -> str:
    digests = [file_sha256(file) for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
