"""Readers of recommendation data sets' files, as `Events`.

MovieLens in its three layouts (ratings.csv with movies.csv, ratings.dat with movies.dat, u.data with u.item), and
reviews in the format of Amazon's data sets: one JSON object per line, from 2014 and 2018 (reviewerID, asin,
unixReviewTime) or 2023 (user_id, parent_asin, timestamp), compressed or not, with the titles in a meta… file beside it.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from surefit.core.errors import DataError, did_you_mean
from surefit.core.units import plural, truncate_text
from surefit.data.audit.detectors.vintage import MovieLens
from surefit.retrieval.interactions import Events, Key

_WANTED = (
    "name MovieLens (ratings.csv, ratings.dat or u.data; its titles are found next to it), a file of reviews "
    "(.json, .jsonl, also .gz), or the directory that holds one of them"
)
_REVIEW_FILE = re.compile(r"\.(json|jsonl)(\.gz)?$", re.IGNORECASE)
_REVIEW_COLUMNS = (("reviewerID", "asin", "unixReviewTime"), ("user_id", "parent_asin", "timestamp"))
"""User, item and time: until 2018 in seconds, in 2023 in milliseconds; only their order is used."""
_YEAR = re.compile(r"\s*\((\d{4})(?:[-–]\d{0,4})?\)\s*$")
_ARTICLE = re.compile(r"^(.*), (The|A|An|Les|Le|La|L'|Der|Die|Das|El|Los|Las|Il)$", re.IGNORECASE)


def read_events(data: Path) -> Events:
    """Read a data set.

    Args:
        data: a file of events, or the directory it is in.

    Returns:
        Its events in the order of the file. `notes` lists what is unusual about it: another release than its name says,
        rows that somebody appended, one user taking one item twice.

    Raises:
        DataError: no such file or layout, or a row that cannot be read, with its line.
    """
    path = _events_file(data)
    reader = _MOVIELENS.get(path.name.lower())
    events = reader(path) if reader else _reviews(path)
    if not events.users:
        raise DataError(
            "there are no events in this file", code="E7145", path=path, help="check that the download is complete"
        )
    repeated = len(events.users) - len(set(zip(events.users, events.items, strict=True)))
    notes = [*_vintage_notes(path)] if reader else []
    if repeated:
        notes.append(f"{plural(repeated, 'event')} repeat an earlier item of the same user: never a right answer")
    return Events(events.name, events.users, events.items, events.times, events.titles, events.files, tuple(notes))


def detect_movielens_release(data: Path) -> str | None:
    """Return which MovieLens release this is, by its counts and its first row; None for other data."""
    observation = MovieLens().look_at(_events_file(data)).get("movielens")
    return observation.detail if observation else None


def _events_file(data: Path) -> Path:
    if data.is_file():
        return data
    if not data.is_dir():
        siblings = [str(entry) for entry in data.parent.glob("*")] if data.parent.is_dir() else []
        raise DataError(
            f"no such file or directory{did_you_mean(str(data), siblings)}", code="E7146", path=data, help=_WANTED
        )
    files = sorted(entry for entry in data.iterdir() if entry.is_file())
    movielens = [entry for entry in files if entry.name.lower() in _MOVIELENS]
    candidates = movielens or [entry for entry in files if _REVIEW_FILE.search(entry.name) and not _is_meta(entry)]
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        names = ", ".join(entry.name for entry in files[:5]) or "nothing"
        raise DataError(f"no ratings or reviews in this directory, but {names}", code="E7147", path=data, help=_WANTED)
    names = ", ".join(entry.name for entry in candidates[:5])
    raise DataError(f"several data sets in one directory: {names}", code="E7148", path=data, help="name one file")


def _is_meta(path: Path) -> bool:
    return path.name.lower().startswith("meta")


def _vintage_notes(path: Path) -> Iterator[str]:
    """Yield the data passport's findings on the same file, except errors that `read_events` raises itself."""
    for name, observation in MovieLens().look_at(path).items():
        if name not in ("movielens", "movielens_corrupt_rows") and observation.detail:
            yield observation.detail


def _comma_rows(path: Path) -> Events:
    """Read ratings.csv: userId,movieId,rating,timestamp, in UTF-8, either line ending."""
    with _opened(path) as file:
        reader = csv.reader(file, strict=True)
        _require_header(next(reader, []), ["userid", "movieid", "rating", "timestamp"], path)
        events = _rated(((reader.line_num, row) for row in reader if row), path)
    titles_path = path.with_name("movies.csv")
    titles: dict[Key, str] = {}
    if titles_path.is_file():
        with _opened(titles_path) as file:
            reader = csv.reader(file, strict=True)
            _require_header(next(reader, []), ["movieid", "title"], titles_path)
            titles = _titled(((reader.line_num, row) for row in reader if row), titles_path)
    return _movielens(path, events, titles_path, titles)


def _double_colons(path: Path) -> Events:
    """Read ratings.dat: UserID::MovieID::Rating::Timestamp; movies.dat in Latin-1."""
    titles_path = path.with_name("movies.dat")
    return _separated(path, "::", titles_path)


def _tabs(path: Path) -> Events:
    """Read u.data: user, item, rating, time; u.item in Latin-1, its fields between bars."""
    return _separated(path, "\t", path.with_name("u.item"), "|")


def _separated(path: Path, separator: str, titles_at: Path, title_separator: str | None = None) -> Events:
    with _opened(path, "latin-1") as file:
        events = _rated(_split(file, separator), path)
    titles: dict[Key, str] = {}
    if titles_at.is_file():
        with _opened(titles_at, "latin-1") as file:
            titles = _titled(_split(file, title_separator or separator), titles_at)
    return _movielens(path, events, titles_at, titles)


def _split(file: TextIO, separator: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, line.rstrip("\r\n").split(separator)


def _rated(rows: Iterator[tuple[int, list[str]]], path: Path) -> tuple[list[Key], list[Key], list[int]]:
    users: list[Key] = []
    items: list[Key] = []
    times: list[int] = []
    for line, row in rows:
        if len(row) != 4:
            raise _bad_row(f"{len(row)} values where user, item, rating and time are expected", row, path, line)
        try:
            user, item, rating, time = int(row[0]), int(row[1]), float(row[2]), int(row[3])
        except ValueError:
            problem = "user, item and time must be whole numbers and the rating a number"
            raise _bad_row(problem, row, path, line) from None
        if user < 0 or item < 0 or time < 0 or not 0 <= rating <= 5:
            raise _bad_row("a number below 0, or a rating above 5", row, path, line)
        users.append(user)
        items.append(item)
        times.append(time)
    return users, items, times


def _titled(rows: Iterator[tuple[int, list[str]]], path: Path) -> dict[Key, str]:
    titles: dict[Key, str] = {}
    for line, row in rows:
        if len(row) < 2 or not row[0].isdigit():
            raise _bad_row("expected a film's number and its title", row, path, line)
        titles[int(row[0])] = readable_title(row[1])
    return titles


def _movielens(
    path: Path, events: tuple[list[Key], list[Key], list[int]], titles_at: Path, titles: dict[Key, str]
) -> Events:
    if not titles:
        raise DataError(
            f"there are ratings but no titles: {titles_at.name} is not in the same folder",
            code="E7149",
            path=path,
            help=f"copy {titles_at.name} of the same release there: a language model ranks titles, not numbers",
        )
    return Events(path.resolve().parent.name, *events, titles, (path, titles_at))


def readable_title(title: str) -> str:
    """Return a film's title in spoken form: the article in front, without its other names, with its year.

    >>> readable_title("City of Lost Children, The (Cité des enfants perdus, La) (1995)")
    'The City of Lost Children (1995)'
    >>> readable_title("Babylon 5"), readable_title("(500) Days of Summer (2009)")
    ('Babylon 5', '(500) Days of Summer (2009)')
    """
    match = _YEAR.search(title)
    year = f" ({match[1]})" if match else ""
    name = title[: match.start()] if match else title
    name = re.sub(r"(?<=\S)\s*\([^()]*\)", "", name).strip()
    article = _ARTICLE.match(name)
    if article:
        name = f"{article[2]}{'' if article[2].endswith(chr(39)) else ' '}{article[1]}"
    return " ".join(f"{name}{year}".split()) or title.strip()


_MOVIELENS: dict[str, Callable[[Path], Events]] = {
    "ratings.csv": _comma_rows,
    "ratings.dat": _double_colons,
    "u.data": _tabs,
}


def _reviews(path: Path) -> Events:
    if not _REVIEW_FILE.search(path.name):
        raise DataError(f"{path.name} has an unknown layout", code="E7150", path=path, help=_WANTED)
    users: list[Key] = []
    items: list[Key] = []
    times: list[int] = []
    columns: tuple[str, str, str] | None = None
    for line, row in _objects(path):
        columns = columns or _columns(row, path, line)
        user, item, time = (row.get(name) for name in columns)
        if not isinstance(user, str) or not isinstance(item, str) or not user or not item:
            raise _bad_row(f"{columns[0]} and {columns[1]} must be strings", row, path, line)
        if isinstance(time, bool) or not isinstance(time, int) or time < 0:
            raise _bad_row(f"{columns[2]} must be a whole number, the time of the review", row, path, line)
        users.append(user)
        items.append(item)
        times.append(time)
    metas = [entry for entry in sorted(path.parent.iterdir()) if _is_meta(entry) and _REVIEW_FILE.search(entry.name)]
    meta = _meta_of(path, metas)
    titles = _meta_titles(meta) if meta else {}
    return Events(path.name.split(".")[0], users, items, times, titles, (path, meta) if meta else (path,))


def _columns(row: dict[str, Any], path: Path, line: int) -> tuple[str, str, str]:
    for columns in _REVIEW_COLUMNS:
        if all(name in row for name in columns):
            return columns
    names = ", ".join(map(repr, list(row)[:6])) or "none"
    expected = " or ".join(", ".join(columns) for columns in _REVIEW_COLUMNS)
    raise DataError(
        f"a review has the columns {names}", code="E7151", path=path, line=line, help=f"expected are {expected}"
    )


def _meta_of(path: Path, metas: list[Path]) -> Path | None:
    """Return the file of titles whose name shares most words with the reviews' ("meta_Beauty.json" for
    "reviews_Beauty_5.json").
    """
    words = set(re.split(r"[^A-Za-z]+", path.name)) - {"", "json", "jsonl", "gz", "reviews", "meta"}
    shared = [(len(words & set(re.split(r"[^A-Za-z]+", meta.name))), meta) for meta in metas]
    best = max(shared, default=(0, None), key=lambda pair: pair[0])
    return best[1] if best[0] or len(metas) == 1 else None


def _meta_titles(path: Path) -> dict[Key, str]:
    titles: dict[Key, str] = {}
    for _, row in _objects(path):
        key, title = row.get("parent_asin") or row.get("asin"), row.get("title")
        if isinstance(key, str) and isinstance(title, str) and title.strip():
            titles[key] = " ".join(title.split())
    return titles


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON object of every line."""
    with _opened(path) as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError):
                is_python = text.startswith("{'")
                problem = "a Python dict, not JSON" if is_python else "not a JSON object on one line"
                raise _bad_row(problem, text, path, line) from None
            if not isinstance(row, dict):
                raise _bad_row("not a JSON object", text, path, line)
            yield line, row


@contextlib.contextmanager
def _opened(path: Path, encoding: str = "utf-8-sig") -> Iterator[TextIO]:
    """Open a text file, compressed or not; reading errors become a DataError that names the file."""
    open_file = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with open_file(path, "rt", encoding=encoding, newline="") as file:
            yield file
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"cannot be read: {error}", code="E7152", path=path, help="check that the download is complete"
        ) from None


def _require_header(header: list[str], wanted: list[str], path: Path) -> None:
    names = [name.strip().lower().replace("_", "") for name in header]
    if names[: len(wanted)] != wanted:
        raise DataError(
            f"the first line is {truncate_text(','.join(header))!r}", code="E7153", path=path, line=1,
            help=f"MovieLens' own first line begins with {','.join(wanted)}: check that the download is complete",
        )  # fmt: skip


def _bad_row(problem: str, row: Any, path: Path, line: int) -> DataError:
    return DataError(
        f"{problem}: {truncate_text(row if isinstance(row, str) else repr(row))}",
        code="E7154",
        path=path,
        line=line,
        help="the file is damaged: download it again, or correct or remove that line",
    )
