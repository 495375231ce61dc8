"""Detectors of known files: MovieLens releases, benchmark questions under another name, one large JSON object.

Counts and first rows are from GroupLens' own files and READMEs (https://grouplens.org/datasets/movielens/).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from surefit.facts.audit import Observation

_SMALL = 32 * 2**20
"""Bytes of the largest ratings file that is parsed; in a larger one only the lines are counted."""
_LOOKED_AT = 2_000
"""Rows of a JSON Lines file that are compared with the known questions: more than GSM8K's test set has."""


@dataclass(frozen=True)
class MovieLensRelease:
    """A release of MovieLens: its name in paths, its counts, and (user, movie, rating, time) of its first row."""

    name: str
    users: int
    ratings: int
    first: tuple[str, str, str, str] | None = None
    year: str = ""

    @property
    def title(self) -> str:
        """Name for messages, with the counts."""
        counts = f"{self.users:,} users, {self.ratings:,} ratings"
        return f"{self.name}{f' of {self.year}' if self.year else ''} ({counts})"


CURRENT = MovieLensRelease("ml-latest-small", 610, 100_836, ("1", "1", "4.0", "964982703"), "2018")
MOVIELENS_RELEASES = (
    CURRENT,
    MovieLensRelease("ml-latest-small", 671, 100_004, ("1", "31", "2.5", "1260759144"), "October 2016"),
    MovieLensRelease("ml-latest-small", 668, 105_339, None, "January 2016"),
    MovieLensRelease("ml-latest-small", 718, 100_234, None, "2015"),
    MovieLensRelease("ml-100k", 943, 100_000, ("196", "242", "3", "881250949")),
    MovieLensRelease("ml-1m", 6_040, 1_000_209, ("1", "1193", "5", "978300760")),
    MovieLensRelease("ml-10m", 71_567, 10_000_054, ("1", "122", "5", "838985046")),
    MovieLensRelease("ml-20m", 138_493, 20_000_263, ("1", "2", "3.5", "1112486027")),
    MovieLensRelease("ml-25m", 162_541, 25_000_095, ("1", "296", "5.0", "1147880044")),
    MovieLensRelease("ml-32m", 200_948, 32_000_204, ("1", "17", "4.0", "944249077")),
)
_NAMED = re.compile(r"(?:ml|movielens)[-_ ]?(latest[-_]small|100k|1m|10m|20m|25m|32m)(?![a-z0-9])", re.IGNORECASE)
_HEADER = re.compile(rb"\"?user_?id\"?(?:,|\t|::)\"?(?:movie|item)_?id\"?(?:,|\t|::)\"?rating\"?", re.IGNORECASE)
_ROW = re.compile(rb"(\d+)(,|\t|::)(\d+)\2([0-5](?:\.[05])?)\2(\d{6,10})\s*")


@dataclass
class _Survey:
    """Counts and first row of a ratings file, from one reading."""

    rows: int = 0
    users: set[bytes] = field(default_factory=set)
    first: tuple[str, str, str, str] | None = None
    corrupt: list[str] = field(default_factory=list)
    users_at: dict[int, int] = field(default_factory=dict)


class MovieLens:
    """Ratings files: which release they are, and later changes to them."""

    names = (
        "movielens",
        "movielens_other_vintage",
        "movielens_appended",
        "movielens_shifted_users",
        "movielens_corrupt_rows",
    )

    def look_at(self, path: Path) -> dict[str, Observation]:
        """Return the observations of a MovieLens ratings file; empty for any other file."""
        try:
            with open(path, "rb") as file:
                survey = _survey(file, path)
        except OSError:
            return {}
        return dict(_check_release(survey, path)) if survey and survey.rows else {}


def _survey(file: BinaryIO, path: Path) -> _Survey | None:
    header = file.readline()
    start = _ROW.fullmatch(header)
    if not _HEADER.match(header.removeprefix(b"\xef\xbb\xbf")) and not (start and _by_first_row(_fields(start))):
        return None
    if start:
        file.seek(0)
    survey = _Survey()
    if path.stat().st_size > _SMALL:
        first = file.readline()
        match = _ROW.fullmatch(first)
        survey.first = _fields(match) if match else None
        survey.rows = 1 + sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))
        return survey
    _read(file, survey, path, 1 if start else 2)
    return survey


def _read(file: BinaryIO, survey: _Survey, path: Path, number: int) -> None:
    release_sizes = {vintage.ratings for vintage in MOVIELENS_RELEASES}
    users, fullmatch = survey.users, _ROW.fullmatch
    for line, data in enumerate(file, start=number):
        match = fullmatch(data)
        if match is None:
            if data.strip():
                survey.rows += 1
                survey.corrupt.append(f"{path.name}:{line}: {data[:40].decode('utf-8', 'replace').strip()}")
            continue
        survey.rows += 1
        users.add(match[1])
        if survey.first is None:
            survey.first = _fields(match)
        if survey.rows in release_sizes:
            survey.users_at[survey.rows] = len(users)


def _fields(found: re.Match[bytes]) -> tuple[str, str, str, str]:
    user, _, movie, rating, time = (part.decode() for part in found.groups())
    return user, movie, rating, time


def _by_first_row(first: tuple[str, str, str, str] | None) -> MovieLensRelease | None:
    """Return the release with this first row; the user's number is not compared, because copies shift it."""
    return next((v for v in MOVIELENS_RELEASES if first and v.first and v.first[1:] == first[1:]), None)


def _check_release(survey: _Survey, path: Path) -> Iterator[tuple[str, Observation]]:
    rows, users = survey.rows, len(survey.users)
    by_counts = (release for release in MOVIELENS_RELEASES if release.ratings == rows and users in (0, release.users))
    vintage = next(by_counts, None) or _by_first_row(survey.first)
    counts = f"{rows:,} ratings" + (f" of {users:,} users" if users else "")
    title = vintage.title if vintage else "no known release"
    yield "movielens", Observation(rows, rows, (), f"{path.name}: {counts}: {title}")
    if survey.corrupt:
        yield "movielens_corrupt_rows", Observation(len(survey.corrupt), rows, tuple(survey.corrupt[:3]))
    mismatch = _other_vintage(vintage, rows, path)
    if mismatch:
        yield "movielens_other_vintage", Observation(rows, rows, (), mismatch)
    if vintage is None:
        return
    if rows > vintage.ratings and survey.users_at.get(vintage.ratings) == vintage.users:
        added, strangers = rows - vintage.ratings, users - vintage.users
        description = f"{vintage.title} is followed by {added:,} more rows, with {strangers:,} new users"
        yield "movielens_appended", Observation(added, rows, (), description)
    if vintage.first and survey.first and survey.first[0] != vintage.first[0]:
        description = f"the first user of {vintage.title} is {vintage.first[0]}, here {survey.first[0]}"
        yield "movielens_shifted_users", Observation(rows, rows, (), description)


def _other_vintage(vintage: MovieLensRelease | None, rows: int, path: Path) -> str:
    """Return what contradicts the name in the path, or says that the release was replaced; "" where nothing does."""
    match = _NAMED.search("/".join(path.absolute().parts[-3:]))
    name = f"ml-{match[1].lower().replace('_', '-')}" if match else ""
    if vintage is None:
        return f"named {name}, with {rows:,} ratings: no release of that name has this number" if name else ""
    if name and name != vintage.name:
        return f"named {name}, but it is {vintage.title}"
    if vintage.name == CURRENT.name and vintage is not CURRENT:
        return f"this is {vintage.title}; published results are on {CURRENT.title}"
    if name and rows < vintage.ratings:
        return f"{rows:,} ratings of {vintage.title}: a part of it"
    return ""


class Benchmarks:
    """Questions of GSM8K's test set, recognized by their hashes, in files of any name."""

    names = ("gsm8k_test", "mislabelled_benchmark")

    def look_at(self, path: Path) -> dict[str, Observation]:
        """Look at the first rows of a JSON Lines file; empty for other files."""
        if path.suffix.lower() != ".jsonl":
            return {}
        places, rows = [], 0
        try:
            with open(path, "rb") as file:
                for rows, line in zip(range(1, _LOOKED_AT + 1), file, strict=False):
                    if _question_hash(line) in GSM8K_TEST:
                        places.append(f"{path.name}:{rows}")
        except OSError:
            return {}
        if not places:
            return {}
        description = (
            f"{path.name} holds {len(places)} of {len(GSM8K_TEST)} questions known to be from GSM8K's test set"
        )
        observation = Observation(len(places), rows, tuple(places[:3]), description)
        rightly_named = "gsm" in path.stem.lower() or "gsm" in path.absolute().parent.name.lower()
        return (
            {"gsm8k_test": observation}
            if rightly_named
            else {"gsm8k_test": observation, "mislabelled_benchmark": observation}
        )


def _question_hash(line: bytes) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    values = (row.get(name) for name in ("question", "problem", "prompt", "query")) if isinstance(row, dict) else ()
    text = next((value for value in values if isinstance(value, str)), None)
    return hash_normalized_text(text) if text else ""


def hash_normalized_text(text: str) -> str:
    """Return the first 16 digits of the SHA-256 of a text in lower case with single spaces."""
    return hashlib.sha256(" ".join(text.split()).lower().encode("utf-8", "surrogatepass")).hexdigest()[:16]


GSM8K_TEST = frozenset({
    "f78edc10aba75fbb", "bf86614a1138628d", "92e8af667512936f", "ed4128cfa1c0840d", "04eba02b7581f412",
    "0e6a8729d4afd641", "16dcfb16923e8511", "1eeb0a7925ecf049", "8da83e8036f47259", "8d9a111d8ff5ad36",
    "05cdea90d15f2bf7", "9af2777b259abc19", "cb7776636ef78858", "a13555d615c05773", "3ed3e70f90154c2d",
    "049f9941fec78697", "1d68df7d1f42cad0", "9e2740af7cf53038", "d7e1ea5b5388a122", "9e38f7649a41fa29",
    "24616b0b8499d055", "df9d44585a723f56", "cd124dc79ae8f6b7",
})  # fmt: skip
"""`hash_normalized_text` of 23 of its 1,319 questions, from the first to the last."""


class SingleObjects:
    """One object over many lines where a file of rows was meant."""

    names = ("single_object",)

    def look_at(self, path: Path) -> dict[str, Observation]:
        """Look at `.json` files of up to 32 MiB; for a `.jsonl` file of this kind the reader raises an error."""
        if path.suffix.lower() != ".json":
            return {}
        try:
            with open(path, "rb") as file:
                first = file.readline().strip()
                if not first.removeprefix(b"\xef\xbb\xbf").startswith(b"{") or path.stat().st_size > _SMALL:
                    return {}
                following = file.read()
            if not following.strip() or isinstance(_loaded(first), dict):
                return {}
            value = _loaded(first + b"\n" + following)
        except OSError:
            return {}
        if not isinstance(value, dict):
            return {}
        keys = ", ".join(list(value)[:3])
        description = f"{path.name} is one object with {len(value)} keys ({keys}{', …' if len(value) > 3 else ''})"
        return {"single_object": Observation(1, 1, (str(path),), description)}


def _loaded(data: bytes) -> object:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None


FILE_DETECTORS = (MovieLens(), Benchmarks(), SingleObjects())
