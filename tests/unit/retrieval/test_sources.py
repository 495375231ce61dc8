"""Real layouts and real malformed rows of recommendation data sets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from surefit.core.errors import DataError
from surefit.retrieval.interactions import build_interactions
from surefit.retrieval.sources import detect_movielens_release, read_events, readable_title

SHARED = Path(__file__).parents[3] / "../shared/data/recommendation"
RATINGS = "userId,movieId,rating,timestamp\r\n1,1,4.0,964982703\r\n1,3,4.0,964981247\r\n2,1,5.0,964982224\r\n"
MOVIES = 'movieId,title,genres\r\n1,Toy Story (1995),Animation\r\n3,"Misérables, Les (1995)",Drama\r\n'


@pytest.fixture
def movielens(tmp_path):
    (tmp_path / "ratings.csv").write_bytes(RATINGS.encode())
    (tmp_path / "movies.csv").write_bytes(MOVIES.encode())
    return tmp_path


def broken(directory, line):
    """The directory with one more line of ratings."""
    with open(directory / "ratings.csv", "ab") as file:
        file.write(line)
    return directory


def test_carriage_returns_and_accents(movielens):
    events = read_events(movielens)
    assert (events.users, events.items, events.times) == ([1, 1, 2], [1, 3, 1], [964982703, 964981247, 964982224])
    assert events.titles == {1: "Toy Story (1995)", 3: "Les Misérables (1995)"}
    assert [path.name for path in events.files] == ["ratings.csv", "movies.csv"]
    assert read_events(movielens / "ratings.csv").users == events.users


def test_movielens_1m_and_100k_are_latin_1(tmp_path):
    (tmp_path / "ratings.dat").write_bytes(b"1::1193::5::978300760\n2::661::3::978302109\r\n")
    (tmp_path / "movies.dat").write_bytes("1193::Misérables, Les (1995)::Drama\n661::X (1996)::War\n".encode("latin-1"))
    events = read_events(tmp_path)
    assert (events.users, events.items) == ([1, 2], [1193, 661])
    assert events.titles[1193] == "Les Misérables (1995)"

    old = tmp_path / "ml-100k"
    old.mkdir()
    (old / "u.data").write_text("196\t242\t3\t881250949\n186\t302\t3\t891717742\n")
    (old / "u.item").write_bytes("242|Kolya (1996)|24-Jan-1997||\n302|L.A. Confidential (1997)|é\n".encode("latin-1"))
    assert read_events(old / "u.data").titles == {242: "Kolya (1996)", 302: "L.A. Confidential (1997)"}
    (old / "u.item").unlink()
    with pytest.raises(DataError, match=r"u\.item is not in the same folder"):
        read_events(old)


REVIEW = {"reviewerID": "A1", "asin": "B001", "unixReviewTime": 1400000000, "overall": 5.0, "reviewText": "x"}
NEWER = {"user_id": "U1", "asin": "C0", "parent_asin": "P0", "timestamp": 1588615855070, "rating": 5.0}


@pytest.mark.parametrize(("review", "user", "item"), [(REVIEW, "A1", "B001"), (NEWER, "U1", "P0")])
@pytest.mark.parametrize("ending", [".json", ".jsonl.gz"])
def test_reviews_old_and_new_compressed_or_not(tmp_path, review, user, item, ending):
    opened = gzip.open if ending.endswith("gz") else open
    path = tmp_path / f"reviews_Beauty_5{ending}"
    with opened(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps(review) + "\n\n" + json.dumps(review) + "\n")
    (tmp_path / "meta_Beauty.json").write_text(json.dumps({"asin": item, "title": " A  crème "}) + "\n")
    (tmp_path / "meta_Games.json").write_text(json.dumps({"asin": item, "title": "wrong"}) + "\n")
    events = read_events(tmp_path)
    assert (events.users, events.items) == ([user, user], [item, item])
    assert events.titles == {item: "A crème"}
    assert "repeat an earlier item" in events.notes[0]
    assert detect_movielens_release(tmp_path) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"610,168252,5.0\r\n", "3 values where user, item, rating and time are expected"),
        (b"610,168252,5.0,1493846352,x\r\n", "5 values"),
        (b"x,168252,5.0,1493846352\r\n", "must be whole numbers"),
        (b"1,2,five,1493846352\r\n", "the rating a number"),
        (b"1,2,50,1493846352\r\n", "above 5"),
        (b"1,-2,5,1493846352\r\n", "below 0"),
        (b"1,2,5,nan\r\n", "whole numbers"),
        (b"1,2,nan,1493846352\r\n", "above 5"),
        (b'1,2,"5,1493846352\r\n', "cannot be read"),
        (b"\xff\xfe\x00\r\n", "cannot be read"),
    ],
)
def test_a_damaged_row_is_named(movielens, line, message):
    with pytest.raises(DataError, match=message) as caught:
        read_events(broken(movielens, line))
    assert str(caught.value.path).endswith("ratings.csv")
    assert caught.value.line == 5 or "cannot be read" in message
    assert caught.value.help


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{'reviewerID': 'A1'}\n", "a Python dict"),
        ("a.json", '{"reviewerID": "A1"\n', "not a JSON object"),
        ("a.json", "[1]\n", "not a JSON object"),
        ("a.json", '{"reviewer": 1}\n', "a review has the columns 'reviewer'"),
        ("a.json", json.dumps(REVIEW | {"asin": None}), "must be strings"),
        ("a.json", json.dumps(REVIEW | {"unixReviewTime": "09 13, 2009"}), "must be a whole number"),
        ("a.json", "", "no events"),
        ("a.json.gz", "not compressed", "cannot be read"),
        ("a.txt", "1 2 3", "an unknown layout"),
        ("ratings.csv", "1,1,4.0,964982703\n", "the first line is '1,1,4.0,964982703'"),
        ("ratings.csv", RATINGS, "movies.csv is not in the same folder"),
    ],
)
def test_other_files_say_what_is_wrong(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_events(tmp_path / name)
    assert caught.value.help


def test_a_directory_must_hold_one_data_set(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_events(tmp_path / "missing")
    with pytest.raises(DataError, match="no ratings or reviews in this directory, but nothing"):
        read_events(tmp_path)
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(REVIEW))
    with pytest.raises(DataError, match="several data sets"):
        read_events(tmp_path)


def test_another_release_under_the_name_is_said(movielens):
    """The 2016 file of that name: its first row, from the shared list of nasty ones."""
    renamed = movielens.rename(movielens.with_name("ml-latest-small"))
    (renamed / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n")
    (renamed / "movies.csv").write_text("movieId,title,genres\n31,Dangerous Minds (1995),Drama\n")
    assert "671 users, 100,004 ratings" in (detect_movielens_release(renamed) or "")
    assert "2016" in read_events(renamed).notes[0]


@pytest.mark.parametrize(
    ("title", "readable"),
    [
        ("City of Lost Children, The (Cité des enfants perdus, La) (1995)", "The City of Lost Children (1995)"),
        ("11'09\"01 - September 11 (2002)", "11'09\"01 - September 11 (2002)"),
        ("(500) Days of Summer (2009)", "(500) Days of Summer (2009)"),
        ("Babylon 5", "Babylon 5"),
        ("Avventura, L' (Adventure, The) (1960)", "L'Avventura (1960)"),
        ("Fawlty Towers (1975–1979)", "Fawlty Towers (1975)"),
    ],
)
def test_titles_as_a_person_says_them(title, readable):
    assert readable_title(title) == readable


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data are not here")
def test_ml_latest_small_is_the_published_data_set():
    events = read_events(SHARED / "ml-latest-small")
    assert events.notes == ()
    assert "2018" in (detect_movielens_release(SHARED / "ml-latest-small") or "")
    counts = build_interactions(events).counts()
    assert (counts["users"], counts["items"], counts["interactions"]) == (610, 3650, 90274)
    assert (counts["mean_length"], counts["users_with_tied_last_two"]) == (147.99, 91)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data are not here")
def test_rows_that_somebody_appended_are_noted(tmp_path):
    nasties = [json.loads(line) for line in (SHARED / "nasties.jsonl").read_text(encoding="utf-8").splitlines()]
    appended = next(row["raw"] for row in nasties if "web app" in row["why_nasty"])
    whole = (SHARED / "ml-latest-small/ratings.csv").read_text()
    tail = appended.replace("\r\n", "\n").split("\n", 2)[2]
    (tmp_path / "ratings.csv").write_text(whole + tail + "\n")
    (tmp_path / "movies.csv").write_bytes((SHARED / "ml-latest-small/movies.csv").read_bytes())
    note = read_events(tmp_path).notes[0]
    assert "13 more rows" in note
    assert "new users" in note
