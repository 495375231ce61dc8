"""Files that are known by what is in them. Made-up ratings here; the real ones are in tests/parity/test_nasties.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefit.data.audit.detectors import vintage
from surefit.data.audit.detectors.vintage import (
    Benchmarks,
    MovieLens,
    MovieLensRelease,
    SingleObjects,
    hash_normalized_text,
)

SMALL = MovieLensRelease("ml-latest-small", 4, 12, ("1", "7", "3.5", "900000007"), "2018")
HEADER = "userId,movieId,rating,timestamp\n"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vintage, "CURRENT", SMALL)
    monkeypatch.setattr(
        vintage, "MOVIELENS_RELEASES", (SMALL, MovieLensRelease("ml-100k", 9, 99, ("5", "5", "1", "800000000")))
    )


def ratings(shift: int = 0) -> str:
    lines = [f"{user + shift},{7 + 3 * n},3.5,{900000007 + n}" for user in range(1, 5) for n in range(3)]
    return HEADER + "\n".join(lines) + "\n"


def look(path: Path, text: str) -> dict[str, str]:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, newline="")
    return {name: seen.detail or seen.examples[0] for name, seen in MovieLens().look_at(path).items()}


@pytest.mark.usefixtures("small")
def test_a_release_under_its_own_name(tmp_path: Path) -> None:
    for end in ("\n", "\r\n"):
        found = look(tmp_path / "ml-latest-small" / "ratings.csv", ratings().replace("\n", end))
        assert list(found) == ["movielens"]
        assert found["movielens"].endswith("ml-latest-small of 2018 (4 users, 12 ratings)")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("folder", "text", "name", "says"),
    [
        ("ml-100k", ratings(), "movielens_other_vintage", "named ml-100k, but it is ml-latest-small of 2018"),
        (
            "data",
            ratings() + "5,9,3.0,990000000\n1,9,4.0,990000001\n",
            "movielens_appended",
            "followed by 2 more rows, with 1 ",
        ),
        ("data", ratings(1000), "movielens_shifted_users", "is 1, here 1001"),
        ("data", ratings().replace("2,7,3.5", "2,7,35"), "movielens_corrupt_rows", "ratings.csv:5: 2,7,35,900000007"),
        ("ml-latest-small", HEADER + "1,7,3.5,900000007\n", "movielens_other_vintage", "a part of it"),
        ("ml-1m", HEADER + "1,2,3.5,700000007\n", "movielens_other_vintage", "no release of that name has this number"),
    ],
)
def test_what_was_done_to_a_release(tmp_path: Path, folder: str, text: str, name: str, says: str) -> None:
    found = look(tmp_path / folder / "ratings.csv", text)
    assert set(found) == {"movielens", name}
    assert says in found[name]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("text", ["", "a,b,c,d\n1,2,3,4\n", "1,2,3,4\n", '{"a": 1}\n', "\x00\xff"])
def test_other_files_are_none_of_its_business(tmp_path: Path, text: str) -> None:
    assert look(tmp_path / "data" / "ratings.csv", text) == {}


def test_of_a_large_file_only_the_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vintage, "_SMALL", 10)
    monkeypatch.setattr(vintage, "MOVIELENS_RELEASES", (SMALL,))
    assert look(tmp_path / "data" / "ratings.csv", ratings())["movielens"].startswith(
        "ratings.csv: 12 ratings: ml-latest-small"
    )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for detector in (MovieLens(), Benchmarks(), SingleObjects()):
        assert detector.look_at(tmp_path / "none.json") == {}


def test_benchmark_questions_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vintage, "GSM8K_TEST", frozenset({hash_normalized_text("How many ducks  are there?")}))
    rows = [{"question": "Another one?"}, {"question": "how many Ducks are there?\n"}, [], "x", {"question": 3}]
    for name, expected in (
        ("math.jsonl", {"gsm8k_test", "mislabelled_benchmark"}),
        ("gsm8k_test.jsonl", {"gsm8k_test"}),
    ):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "not json\n")
        found = Benchmarks().look_at(path)
        assert set(found) == expected
        assert found["gsm8k_test"].examples == (f"{name}:2",)


@pytest.mark.parametrize(
    ("text", "single"),
    [
        ('{\n "a": [1],\n "b": 2\n}', True),
        ('{"a": 1}\n{"a": 2}\n', False),
        ('{"a": 1}', False),
        ('[\n {"a": 1}\n]', False),
        ('{\n "a": ', False),
    ],
)
def test_one_object_over_many_lines(tmp_path: Path, text: str, single: bool) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    assert bool(SingleObjects().look_at(path)) is single
