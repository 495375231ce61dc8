"""`surefit retrieve`: reviews in, ranker rows out; what it says to a person and to a script."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tests.cli.conftest import Surefit

from surefit.retrieval import fitting, retrievers


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    lines = [
        {"user_id": f"u{user}", "parent_asin": f"p{(user + step) % 12}", "timestamp": 1000 * step}
        for user in range(30)
        for step in range(7)
    ]
    path = tmp_path / "Beauty.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trained_retriever_with_its_baselines(
    surefit: Surefit, reviews: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = partial(fitting.FitSettings, most_steps=20, every=10, batch=8)
    monkeypatch.setattr(fitting, "FitSettings", short)
    answer = surefit("retrieve", reviews, "-o", "rows", "--candidates", "6", "--json")
    assert answer.code == 0, answer.text
    assert answer.json["data"]["users"] == 30
    assert answer.json["retriever"]["name"] == retrievers.DEFAULT
    assert answer.json["retriever"]["best_step"] in (10, 20)
    assert sorted(path.name for path in Path("rows").iterdir()) == [
        "candidates.jsonl", "manifest.json", "retriever.pt", "test.jsonl", "train.jsonl", "valid.jsonl",
    ]  # fmt: skip
    again = surefit("retrieve", reviews, "-o", "rows", "--candidates", "6")
    assert "step 20 was best" in again.text or "step 10 was best" in again.text
    assert "right items are among the 6 candidates" in again.text


def test_a_counting_one_needs_no_training(surefit: Surefit, reviews: Path) -> None:
    answer = surefit("retrieve", reviews, "-o", "rows", "--retriever", "markov", "--candidates", "5")
    assert answer.code == 0, answer.text
    assert "Beauty: 210 events" in answer.text
    assert not Path("rows/retriever.pt").exists()


def test_so_many_titles_of_a_history_are_shown_as_are_asked_for(surefit: Surefit, reviews: Path) -> None:
    for asked, shown in (
        (["--history", "3"], 3),
        ([], 5),
    ):  # a user has seven events, of which the last two are asked for
        assert surefit("retrieve", reviews, "-o", "rows", "--retriever", "popularity", *asked).code == 0
        rows = [json.loads(line) for line in Path("rows/valid.jsonl").read_text().splitlines()]
        assert {len(row["history"]) for row in rows} == {shown}
    first = rows[0]["history"]
    surefit("retrieve", reviews, "-o", "rows", "--retriever", "popularity", "--history", "3")
    assert json.loads(Path("rows/valid.jsonl").read_text().splitlines()[0])["history"] == first[-3:]
    assert surefit("retrieve", reviews, "-o", "rows", "--history", "0").code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing", "-o", "rows"], "no such file"),
        (["Beauty.jsonl", "-o", "rows", "--retriever", "sasrec"], "there is no retriever"),
        (["Beauty.jsonl", "-o", "rows", "--core", "50"], "no user and no item"),
        (["Beauty.jsonl"], "--output"),
    ],
)
def test_what_cannot_be_done(surefit: Surefit, reviews: Path, arguments: list[str], said: str) -> None:
    answer = surefit("retrieve", *arguments)
    assert answer.code == 2
    assert said in answer.text
    assert "Traceback" not in answer.text
