"""Resolution of data source names in the config (a file, a directory, a pattern, a URL, a sample, a data set on the
hub) to files. Nothing here reads a row.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any, Literal
from urllib.request import url2pathname

from surefit import samples
from surefit.core.errors import DataError, did_you_mean
from surefit.core.reading import read_json_file
from surefit.data.read.file_io import display_name, file_extensions, filesystem, is_url, remote_file_errors
from surefit.data.read.readers import ENDINGS, NAMED_ONLY

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?(@\S+)?")
"""owner/name, with an optional :configuration and an optional @split."""
SPLITS = {
    "train": ("train|trn", "training"),
    "test": ("test|tst", "testing"),
    "validation": ("val|validation|validate|eval|heldout|holdout", "valid|dev|devel|development|evaluation"),
}
"""Split → the words for it in names of files and directories, and the words that are as often a subject. A word counts
at the beginning or the end of a name."""
_SUBJECTS = re.compile(
    r"(unit|integration|regression|smoke|ab) test|test (cases?|generation|writing|driven|time|prep|plans?)( .*)?"
    r"|eval awareness"
)
"""Names in which a word for a split is a subject."""
_OF_SPLITS = r"(set|data|split|file|rows|examples)?"
_NO_NAME = re.compile(r"sets?|data|splits?|files?|rows|examples|parts?|shards?|.{1,2}|.*\d.*")
"""Words after the name of a split that are not part of a data set's name: sizes, numbers, languages."""
KINDS = ", ".join(ENDINGS)


@dataclass(frozen=True)
class RowSource:
    """The resolved `data.train`.

    Attributes:
        kind: kind of place that holds the rows.
        name: as the user wrote it.
        path: the file or directory; None for a pattern, a URL and the hub.
    """

    kind: Literal["file", "directory", "sample", "pattern", "url", "hub"]
    name: str
    path: Path | None = None


def is_local(text: str) -> bool:
    """Return whether rows can be read without the network; also True for a source that cannot be found."""
    try:
        return resolve_source(text).kind not in ("hub", "url")
    except DataError:
        return True


def resolve_source(text: str) -> RowSource:
    """Resolve a source name of the config, without reading anything.

    A name that starts with surefit/ is a sample; a name with a scheme is a URL; an existing path is a file or
    directory; a name with *, ? or [ is a pattern of files; a name of the form owner/name is on the hub
    (owner/name:config@split where a data set has several configurations or splits).

    Raises:
        DataError: it is none of these.
    """
    if sample := samples.find_sample(text):
        return RowSource("sample", text, sample)
    if text[:7].lower() == "file://":
        text = url2pathname(text[7:].removeprefix("localhost"))
    if is_url(text):
        return RowSource("url", text)
    path = Path(os.path.expanduser(text))
    if text.strip() and os.path.isdir(path):
        return RowSource("directory", text, path)
    if os.path.isfile(path):
        return RowSource("file", text, path)
    if text.startswith(samples.PREFIX):
        names = samples.list_samples()
        raise DataError(
            f"no sample named {text!r}{did_you_mean(text, names)}", code="E4115", help=f"there are {', '.join(names)}"
        )
    if os.path.exists(path):
        raise DataError(
            "not a regular file", code="E4116", path=path, help=f"name a file ({KINDS}) or a directory of them"
        )
    if glob.has_magic(text):
        return RowSource("pattern", text)
    if _looks_like_hub(text, path):
        return RowSource("hub", text)
    raise _missing(text, path)


def _looks_like_hub(text: str, path: Path) -> bool:
    """Return whether the name is owner/name, and `owner` is not a local folder: then the user meant a file in it."""
    return bool(HUB_ID.fullmatch(text)) and file_extensions(text)[0] not in ENDINGS and not os.path.isdir(path.parent)


def _missing(text: str, path: Path) -> DataError:
    hub = "a data set on the hub is written owner/name"
    if not text.strip():
        return DataError("no data is named", code="E4117", help=f"name a file ({KINDS}) or a directory; {hub}")
    if path.is_symlink():
        return DataError(f"a broken link to {os.readlink(path)}", code="E4700", path=path, help="name the file itself")
    help_text = f"relative paths start at the current directory; {hub}"
    if "$" in text:
        help_text = "a config's variables are not replaced: write the path itself, or --set data.train=$DIR/rows.jsonl"
    if text[0] in "\u201c\u201d\u201e\u2018\u2019'\"`":
        help_text = f"the quotes {text[0]} are a part of the name: write it without them"
    if not os.path.isdir(path.parent):
        return DataError(f"no such file: there is no directory {path.parent}", code="E4118", path=path, help=help_text)
    entries = [entry for entry in sorted(path.parent.glob("*")) if not entry.name.startswith(".")]
    siblings = [str(entry) for entry in entries if entry.is_dir() or file_extensions(entry.name)[0] in ENDINGS]
    # By their stems: a shared ending makes no two names alike.
    alike = [name for name in siblings if get_close_matches(path.stem, [Path(name).stem], 1)]
    return DataError(
        f"no such file or directory{did_you_mean(str(path), alike)}", code="E4119", path=path, help=help_text
    )


def list_source_files(source: RowSource, split: str = "train") -> list[str]:
    """Return the paths or URLs of a source's files in reading order; empty for the hub.

    Raises:
        DataError: there are none, or files of different splits. MachineError: a URL cannot be reached.
    """
    if source.kind == "url":
        return _remote_files(source.name)
    if source.kind == "pattern":
        return _matching(source.name, sorted(glob.glob(os.path.expanduser(source.name), recursive=True)))
    if source.path is None:
        return []
    if source.kind == "directory":
        return [str(file) for file in list_data_files(source.path, split)]
    return [str(source.path)]


def _remote_files(url: str) -> list[str]:
    """Return the files behind a URL: itself, the files that match its pattern, or the files of its directory."""
    pattern = glob.has_magic(display_name(url))
    if not pattern and file_extensions(url)[0] in ENDINGS:
        return [url]
    system, path = filesystem(url)
    if not pattern:
        path = f"{path.rstrip('/')}/*"
    with remote_file_errors(url):
        urls = sorted(system.unstrip_protocol(name) for name in system.glob(path))
    return _matching(url if pattern else f"{url}/*", urls)


def _matching(pattern: str, found: Sequence[str]) -> list[str]:
    """Return the data files among the matches of a pattern; a file type in `NAMED_ONLY` counts if the pattern names
    it."""
    named_ending = file_extensions(pattern)[0]
    files = [
        name
        for name in found
        if (_is_data(name) or (named_ending in NAMED_ONLY and file_extensions(name)[0] == named_ending))
        and (is_url(name) or os.path.isfile(name))
    ]
    if not files:
        problem = f"it matches {len(found)} names, none of them a data file" if found else "it matches no file"
        raise DataError(
            problem, code="E4120", path=display_name(pattern), help=f"data files are {KINDS}; ** enters directories"
        )
    _refuse_mixed_splits(pattern, _below_common(files))
    return files


def list_data_files(directory: Path, split: str = "train") -> list[Path]:
    """Return the data files of a directory in the order of their names; other files, such as READMEs, are left out.

    A directory from `Dataset.save_to_disk` is read by its own list of files, and in a `DatasetDict` the split's.

    Raises:
        DataError: there are none, or files of different splits.
    """
    names = sorted(entry.name for entry in directory.iterdir() if entry.is_file() and not entry.name.startswith("."))
    if "dataset_dict.json" in names:
        return list_data_files(_saved_split(directory, split))
    if "state.json" in names and "dataset_info.json" in names:
        return _saved_files(directory)
    files = [directory / name for name in names if _is_data(name)]
    texts = [name for name in names if file_extensions(name)[0] in NAMED_ONLY]
    if not files and texts:
        raise DataError(
            f"no data file in this directory, only text files: {', '.join(texts[:5])}",
            code="E4350",
            path=directory,
            help="name text files by a pattern, since a directory may also hold notes: "
            f"write {directory}/*{''.join(PurePath(texts[0]).suffixes[-1:])}",
        )
    if not files:
        contents = f"; it has {', '.join(names[:5])}" if names else ""
        help_text = f"data files are {KINDS}; for those in subdirectories write {directory}/**/*.jsonl"
        raise DataError(f"no data file in this directory{contents}", code="E4121", path=directory, help=help_text)
    _refuse_mixed_splits(directory, [file.name for file in files])
    return files


def _saved_split(directory: Path, split: str) -> Path:
    splits = _saved(directory / "dataset_dict.json", "splits")
    if split not in splits:
        raise DataError(
            f"this DatasetDict has no split {split!r}; it has {', '.join(map(str, splits))}",
            code="E4122",
            path=directory,
            field="data.split",
            help=f"set data.split, or name one of its directories: {directory}/SPLIT",
        )
    return directory / split


def _saved_files(directory: Path) -> list[Path]:
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in _saved(directory / "state.json")]
    files = [directory / PurePath(name).name for name in names if isinstance(name, str)]
    missing = [file.name for file in files if not file.is_file()]
    if not files or missing:
        problem = f"lacks {', '.join(missing[:3])}" if missing else "lists no data files"
        help_text = "write it again with Dataset.save_to_disk"
        raise DataError(
            f"this directory from Dataset.save_to_disk {problem}", code="E4123", path=directory, help=help_text
        )
    return files


def _saved(path: Path, key: str = "_data_files") -> list[Any]:
    try:
        value = read_json_file(path)
    except (OSError, ValueError) as error:
        help_text = "write it again with Dataset.save_to_disk"
        raise DataError(
            f"what Dataset.save_to_disk wrote cannot be read: {error}", code="E4124", path=path, help=help_text
        ) from None
    entries = value.get(key) if isinstance(value, dict) else None
    return entries if isinstance(entries, list) else []


def _is_data(name: str) -> bool:
    file = PurePath(name)
    ending = file_extensions(file.name)[0]
    return ending in ENDINGS and ending not in NAMED_ONLY and file.name.split(".")[0].lower() != "readme"


def _below_common(files: Sequence[str]) -> list[str]:
    """Return the paths of files below their common directory: names above it belong to no split."""
    paths = [PurePath(name).parts for name in files]
    common = next(
        (n for n, parts in enumerate(zip(*(path[:-1] for path in paths), strict=False)) if len(set(parts)) > 1),
        min(len(path) - 1 for path in paths),
    )
    return ["/".join(path[common:]) for path in paths]


def split_from_path(path: str) -> tuple[str | None, str, bool]:
    """Return the split in the name of a file or of a directory above it; the names without the word for it; and whether
    the word may be a subject.

    >>> split_from_path("alpaca_test_1k.jsonl"), split_from_path("dev/alpaca.jsonl"), split_from_path("contest-2.jsonl")
    (('test', 'alpaca', False), ('validation', '/alpaca', True), (None, 'contest', False))
    """
    *directories, file = path.split("/")
    names = [_words(name) for name in (*directories, file.removesuffix("".join(file_extensions(file))))]
    for place in reversed(range(len(names))):
        words = names[place]
        for index in dict.fromkeys((len(words) - 1, 0)) if words else ():
            for split, kinds in SPLITS.items():
                sure, unsure = (re.fullmatch(f"({kind}){_OF_SPLITS}", words[index]) for kind in kinds)
                if sure or unsure:
                    other_words = [*names[:place], words[:index] + words[index + 1 :], *names[place + 1 :]]
                    subject = bool(unsure or _SUBJECTS.fullmatch(" ".join(words)))
                    return split, "/".join(map("".join, other_words)), subject
    return None, "/".join(map("".join, names)), False


def _words(name: str) -> list[str]:
    """Return the words of a name, split at non-letters and at capitals, without the ones at its end that name
    nothing."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", re.sub(r"(?i)(held|hold)[_-]out", r"\1out", name))
    words = re.findall(r"[^\W_]+", spaced.lower())
    while len(words) > 1 and _NO_NAME.fullmatch(words[-1]):
        words.pop()
    return words


def _refuse_mixed_splits(place: str | Path, names: Iterable[str]) -> None:
    """Raise if the files mix splits: train.jsonl beside test.jsonl, rows.jsonl beside rows_test.jsonl, or rows.jsonl
    beside eval.jsonl would all be trained on. A word that may be a subject counts as a whole name, and beside the same
    name of another split."""
    by_name = {name: split_from_path(name) for name in names}
    splits: dict[str, str] = {}
    for name, (split, base_name, subject) in by_name.items():
        other_splits = {
            other_split
            for other_split, other_base, _ in by_name.values()
            if other_base == base_name and other_split != split
        }
        counts = split is not None and (not subject or not base_name.strip("/") or other_splits)
        splits.setdefault((split if counts else None) or "train", name)
    if len(splits) > 1:
        raise DataError(
            f"{'these files belong to' if isinstance(place, str) else 'this directory holds'} different splits: "
            f"{', '.join(splits.values())}",
            code="E4125",
            path=place,
            help="name the file to train on in data.train and the one to score on in data.eval; to train on all, "
            "name one in data.train and the others in data.mix",
        )
