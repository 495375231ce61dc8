"""From a data set to the ranker's rows: what they promise, and that recipe and manifest agree on every score."""

from __future__ import annotations

import json
import math
from random import Random

import pytest

from surefit.core.errors import ConfigError
from surefit.core.rundir import file_sha256, read_json
from surefit.recipes.rec_ranking import RECIPE
from surefit.retrieval.candidates import RankerRows, cut_title
from surefit.retrieval.interactions import build_interactions
from surefit.retrieval.sources import read_events
from surefit.retrieval.stage import RetrievalOptions, run_retrieval
from surefit.task import mean_scores

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def movielens(tmp_path_factory):
    """Forty people and thirty-two films, each person from one half of them."""
    directory = tmp_path_factory.mktemp("ml")
    draw, lines = Random(3), ["userId,movieId,rating,timestamp"]
    for user in range(1, 41):
        films = draw.sample(range(1, 17), 9) if user % 2 else draw.sample(range(17, 33), 9)
        lines += [f"{user},{film},4.0,{1000 + place // 2}" for place, film in enumerate(films)]
    (directory / "ratings.csv").write_text("\n".join(lines) + "\n")
    titles = [f"{film},Film {film} (19{film + 50}),Drama" for film in range(1, 33)]
    (directory / "movies.csv").write_text("\n".join(["movieId,title,genres", *titles]) + "\n")
    return directory


@pytest.fixture(scope="module")
def written(movielens, tmp_path_factory):
    output = tmp_path_factory.mktemp("rows")
    run_retrieval(RetrievalOptions(movielens, output, "window5", train_rows=100, candidates=8))
    return output


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_training_rows_have_one_right_answer_and_no_film_that_was_taken(movielens, written):
    interactions = build_interactions(read_events(movielens))
    taken = {
        str(user): [interactions.titles[item] for item in history]
        for user, history in zip(interactions.users, interactions.trained, strict=True)
    }
    rows = lines_of(written / "train.jsonl")
    assert len(rows) == 100
    letters = set()
    for row in rows:
        right = row["candidates"]["ABCDEFGH".index(row["answer"])]
        letters.add(row["answer"])
        seen = taken[row["user"]]
        assert seen[: seen.index(right)] == row["history"]
        assert len(set(row["candidates"])) == 8
        assert not (set(row["candidates"]) - {right}) & set(seen)
        assert RECIPE.to_example(row).completion == row["answer"]
    assert letters == set("ABCDEFGH")
    assert list(RankerRows(interactions, 8).train(100)) == rows
    assert len(list(RankerRows(interactions, 8).train(10_000))) == 40 * 6, "every place but the first of each"


def test_the_recipe_finds_the_retrievers_own_scores(written):
    """What is below the candidates counts in neither at k of at most their number."""
    manifest = read_json(written / "manifest.json")
    for split in ("valid", "test"):
        examples = [RECIPE.to_example(row) for row in lines_of(written / f"{split}.jsonl")]
        found = mean_scores([RECIPE.score(e, RECIPE.baselines["retriever"](e)) for e in examples])
        for metric, value in manifest["scores"][split].items():
            assert math.isclose(found[metric], value), (split, metric)
        assert manifest["within_candidates"][split] == sum(e.completion is not None for e in examples)


def test_rows_and_candidates_say_the_same(written):
    candidates = [line for line in lines_of(written / "candidates.jsonl") if line["split"] == "test"]
    for line, row in zip(candidates, lines_of(written / "test.jsonl"), strict=True):
        assert str(line["user"]) == row["user"]
        assert [f"Film {item} " in title for item, title in zip(line["items"], row["candidates"], strict=True)] == [
            True
        ] * 8
        assert line["scores"] == sorted(line["scores"], reverse=True)
        assert line["rank"] == row["rank"]
        if row["answer"]:
            assert line["items"]["ABCDEFGH".index(row["answer"])] == line["target"]
            assert row["rank"] == 1 + "ABCDEFGH".index(row["answer"])
        else:
            assert row["rank"] > 8


def test_the_manifest_knows_its_files(movielens, written):
    manifest = read_json(written / "manifest.json")
    assert manifest["data"]["users"] == 40
    assert manifest["data"]["files"]["ratings.csv"] == file_sha256(movielens / "ratings.csv")
    assert manifest["written"]["test"] == {"rows": 40, "sha256": file_sha256(written / "test.jsonl")}
    assert manifest["retriever"]["name"] == "window5"
    assert set(manifest["baselines"]) == {"popularity", "markov", "window5"}
    assert manifest["baselines"]["window5"] == manifest["scores"]["test"]


def test_the_same_call_writes_the_same_bytes(movielens, written, tmp_path):
    again = run_retrieval(RetrievalOptions(movielens, tmp_path, "window5", train_rows=100, candidates=8))
    assert again["written"] == read_json(written / "manifest.json")["written"]
    other = run_retrieval(RetrievalOptions(movielens, tmp_path, "window5", train_rows=100, candidates=8, seed=1))
    assert other["written"]["train"] != again["written"]["train"]
    assert other["written"]["test"] == again["written"]["test"]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"retriever": "lru"}, "did you mean 'lrurec'"), ({"candidates": 1}, "1 candidates"), ({"candidates": 27}, "27")],
)
def test_what_cannot_be_asked_for(movielens, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        RetrievalOptions(movielens, tmp_path, **change)


def test_long_titles_are_cut_between_words():
    title = "Those Magnificent Men in Their Flying Machines or How I Flew from London to Paris in 25 Hours 11 Minutes"
    assert len(cut_title(title)) <= 96
    assert cut_title(title).endswith(" 25 Hours…") or cut_title(title).endswith("…")
    assert title.startswith(cut_title(title)[:-1])
    assert cut_title("x" * 200) == "x" * 95 + "…"
