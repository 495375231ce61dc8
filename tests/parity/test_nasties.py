"""Every malformed row that was collected from public data sets: a detector, a rule or a reader names it, or it is shown
to be harmless. The rows are not in this repository; the cases skip where the shared folder is not there."""

from __future__ import annotations

import ast
import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from surefit import recipes
from surefit.core.errors import DataError
from surefit.data.audit.detectors.vintage import MovieLens
from surefit.data.audit.sample import audit_sample, run_file_detectors
from surefit.data.read.load import load_rows
from surefit.data.rows.layouts import to_examples, to_prompts
from surefit.facts.audit import AuditFacts
from surefit.lint.engine import all_rules, run_rules
from surefit.lint.rule import LintContext
from surefit.metrics.tool_schema import function_document

DATA = Path(__file__).parents[2] / "../shared/data"
Rows = Sequence[dict[str, Any]]


def raw(task: str, number: int, source: str) -> str:
    """One collected row; `source` guards against a list that was reordered."""
    path = DATA / task / "nasties.jsonl"
    if not path.exists():
        pytest.skip("the shared rows are not here")
    row = json.loads(path.read_text(encoding="utf-8").splitlines()[number])
    assert source in row["source"]
    text = row["raw"]
    assert isinstance(text, str)
    return text


def shared(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip("the shared rows are not here")
    return path


@pytest.fixture
def codes(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """codes(rows | text, file name, recipe) → code → message: what the rules say of a file with this content."""

    def judge(content: Rows | str, name: str = "rows.jsonl", recipe: str | None = None) -> dict[str, str]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        path.write_text(text, encoding="utf-8", newline="")
        rows = load_rows(str(path))
        facts = audit_sample(rows, recipe, limit=len(rows))
        whole = AuditFacts(
            facts.source, facts.rows, facts.audited, {**facts.observations, **run_file_detectors(str(path))}
        )
        chosen = [rule for rule in all_rules() if rule.code.startswith("AUD")]
        found = run_rules(LintContext(config=None, path=path, audit=whole), chosen).findings
        return {finding.code: finding.message for finding in found}

    return judge


def with_question(task_row: str) -> dict[str, Any]:
    """A gold answer of the leaderboard joined with its question."""
    answer = json.loads(task_row)
    category = answer["id"].rsplit("_", 1)[0]
    for line in shared(f"function_calling/bfcl/BFCL_v4_{category}.json").read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        if question["id"] == answer["id"]:
            return question | answer
    pytest.skip(f"the question {answer['id']} is not among the shared rows")


# function calling


@pytest.mark.parametrize(
    ("number", "source", "function", "says"),
    [
        (0, "live_multiple_964-207-0", ("transfer_to_human_agent", "statement"), "AUD030"),
        (1, "live_multiple_862-181-3", ("Trains_1_FindTrains", "to"), "AUD030"),
    ],
    ids=["bfcl-live_multiple_964-207-0", "bfcl-live_multiple_862-181-3"],
)
def test_a_parameter_that_the_schema_lacks(
    codes: Any, number: int, source: str, function: tuple[str, str], says: str
) -> None:
    row = json.loads(raw("function_calling", number, source))
    try:
        row = with_question(json.dumps(row))
    except pytest.skip.Exception:  # the question is kept back: a schema as the collector describes it
        (arguments,) = row["ground_truth"][0].values()
        known = [name for name in arguments if name not in ("question", "journey_start_time")]
        properties = {name: {"type": "string"} for name in [*known, function[1]]}
        schema = {"type": "dict", "properties": properties, "required": [function[1]]}
        row["function"] = [{"name": function[0], "parameters": schema}]
    assert says in codes([row])


def test_bfcl_live_simple_112_68_0_no_value_is_acceptable(codes: Any) -> None:
    found = codes([json.loads(raw("function_calling", 2, "live_simple_112-68-0"))])
    assert "no value of 'acc_routing_start' of 'record' is acceptable" in found["AUD030"]


def test_bfcl_live_irrelevance_292_72_1_nine_user_turns_in_a_row(codes: Any) -> None:
    found = codes([json.loads(raw("function_calling", 3, "live_irrelevance_292-72-1"))])
    assert "9 user turns in a row" in found["AUD039"]


def test_bfcl_live_irrelevance_433_107_1_harmless_a_long_prompt_is_read_whole_and_counted_by_its_tokens(
    tmp_path: Path,
) -> None:
    row = json.loads(raw("function_calling", 4, "live_irrelevance_433-107-1"))
    mine = {"query": row["question"][0][0]["content"], "tools": row["function"], "answers": []}
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps(mine), encoding="utf-8")
    (example,) = to_examples(load_rows(str(path)), recipes.get_recipe("function_calling"))
    assert len(mine["query"]) > 10_000
    assert example.messages[1]["content"] == mine["query"]


def test_bfcl_format_sensitivity_is_one_object_and_no_rows(codes: Any, tmp_path: Path) -> None:
    start = raw("function_calling", 5, "format_sensitivity")
    whole = start[: start.rindex(",")] + "]\n}"  # the collector kept the first 300 characters
    assert "one object with 1 keys (simple_python)" in codes(whole, "BFCL_v4_format_sensitivity.json")["AUD037"]
    for text in (whole, start):  # named as rows, or cut off, the reader refuses it
        path = tmp_path / "rows.jsonl"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match="not valid JSON"):
            load_rows(str(path))


def test_glaive_tools_are_an_empty_list_harmless_as_the_template_is_then_given_no_tools(
    codes: Any, tmp_path: Path
) -> None:
    row = json.loads(raw("function_calling", 6, "glaive"))
    assert "AUD032" not in codes([row])
    (example,) = to_examples(load_rows(str(tmp_path / "rows.jsonl")), recipes.get_recipe("chat"))
    assert example.tools is None
    assert [m["content"] for m in example.messages] == [t["value"] for t in row["conversations"]][
        : len(example.messages)
    ]
    call = {"query": "?", "tools": "[]", "answers": "[]"}
    called = {"tools": [{"name": "f"}], "answers": [{"name": "f", "arguments": {}}], "query": "?"}
    assert "AUD032" in codes([call, call, called], recipe="function_calling")


def test_xlam_python_types_harmless_as_the_schema_reader_knows_them() -> None:
    parameter = json.loads(raw("function_calling", 7, "xLAM"))
    document = function_document({"name": "f", "parameters": {"n": parameter}})["parameters"]
    assert document == {"properties": {"n": {"type": "integer", "default": 10}}, "required": []}


# summaries of legal documents


def test_billml_row_is_named_for_its_long_summary_and_its_python_lists(codes: Any) -> None:
    row = json.loads(raw("legal_summarization", 0, "BillML"))
    full = json.loads(shared("legal_summarization/billml_bill_summary_us_10.jsonl").read_text("utf-8").splitlines()[0])
    assert full["id"] == row["id"]
    row |= {"text": full["text"], "summary": full["summary"]}
    assert "a summary of 387 characters of a text of 338" in codes([row])["AUD025"]
    python = {"prompt": "Which sections?", "completion": str(row["sections"])}
    assert "Python literals" in codes([python])["AUD026"]


def test_billml_109hconres353ih_boilerplate_in_the_summary(codes: Any) -> None:
    assert "boilerplate" in codes([{"summary": raw("legal_summarization", 1, "109hconres353ih")}])["AUD024"]


def test_manor_summaries_longer_than_their_texts(codes: Any) -> None:
    rows = json.loads(raw("legal_summarization", 2, "Manor"))
    longer = [len(row["reference_summary"]) > len(row["original_text"]) for row in rows]
    assert f"{sum(longer)} of {len(rows)} rows" in codes(rows)["AUD025"]


def test_cuad_cells_hold_python_lists(codes: Any) -> None:
    line = raw("legal_summarization", 3, "CUAD")
    with pytest.raises(DataError, match="header names"):
        codes(f"a,b\n{line}\n", "clauses.csv")  # lists with commas, not quoted: refused
    cell = "['8th day of May 2014', 'May 8, 2014']"
    assert cell in line
    table = io.StringIO()
    csv.writer(table).writerows([["prompt", "completion"], ["When?", cell]])
    assert "Python literals" in codes(table.getvalue(), "clauses.csv")["AUD026"]


def test_minilongbench_gold_is_a_list_of_one_text(codes: Any) -> None:
    prediction = ast.literal_eval(raw("legal_summarization", 4, "MiniLongBench"))
    assert prediction.startswith("\n\n")
    assert "lists of one string" in codes([{"origin_prompt": "Summarise: …", "gold": [prediction.strip()]}])["AUD027"]


def test_minilongbench_blank_lines_before_an_answer_harmless_as_they_are_kept_to_the_character(tmp_path: Path) -> None:
    prediction = ast.literal_eval(raw("legal_summarization", 4, "MiniLongBench"))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Summarise.", "completion": prediction}), encoding="utf-8")
    (example,) = to_examples(load_rows(str(path)), recipes.get_recipe("chat"))
    assert example.messages[-1]["content"] == prediction


# mathematics and code


@pytest.mark.parametrize("name", ["gpqa.jsonl", "math.jsonl"])
def test_cogumi_gpqa_and_math_are_questions_of_a_third_benchmark(codes: Any, name: str) -> None:
    row = raw("math_code", 0, "gpqa.jsonl")
    assert f"{name} holds 1 of 23 questions" in codes(row + "\n", name)["AUD036"]
    assert "AUD036" not in codes(row + "\n", "gsm8k_test.jsonl")


def answers(number: int, source: str) -> dict[str, Any]:
    return {"question": f"Question {number}", "answer": raw("math_code", number, source)}


def test_gsm8k_example_solutions_end_in_another_way_than_the_training_set(codes: Any) -> None:
    other, usual = answers(1, "example_model_solutions"), answers(4, "gsm8k")
    assert 'mark the final answer by ####, 3 by "A:"' in codes([usual] * 3 + [other] * 3)["AUD033"]
    assert "AUD033" not in codes([usual] * 3)


def test_gsm8k_thousands_separators(codes: Any) -> None:
    separated, plain = answers(2, "gsm8k train"), {"question": "?", "answer": "So.\n#### 70000"}
    assert "3 final answers have thousands separators, 3 have none" in codes([separated] * 3 + [plain] * 3)["AUD038"]


@pytest.mark.parametrize(
    ("number", "source"),
    [(3, "test row 319"), (4, "gsm8k")],
    ids=["a-calculator-note-that-is-no-number", "unicode-minus-division-euro"],
)
def test_gsm8k_harmless_here_as_text_is_taken_to_the_character_and_no_note_is_calculated(
    codes: Any, tmp_path: Path, number: int, source: str
) -> None:
    row = answers(number, source)
    assert codes([row]) == {}
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"prompt": row["question"], "completion": row["answer"]}), encoding="utf-8")
    (example,) = to_examples(load_rows(str(path)), recipes.get_recipe("chat"))
    assert example.messages[-1]["content"] == row["answer"]


@pytest.mark.parametrize(
    ("number", "source"),
    [(5, "MBPP 367"), (6, "MBPP 123")],
    ids=["367-tests-need-code-before-setup", "123-solution-takes-15-seconds"],
)
def test_mbpp_named_for_its_line_ends_harmless_otherwise_as_no_code_is_run_here(
    codes: Any, tmp_path: Path, number: int, source: str
) -> None:
    text = raw("math_code", number, source)
    assert "Windows line endings" in codes([json.loads(text)])["AUD023"]
    assert list(load_rows(str(tmp_path / "rows.jsonl"))) == [json.loads(text)]


def test_mbpp_equal_prompts_with_different_tests_are_one_prompt_to_the_split(tmp_path: Path) -> None:
    prompt, *tests = json.loads(raw("math_code", 7, "MBPP"))
    assert tests[0] != tests[1]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": str(each)}) + "\n" for each in tests))
    first, second = to_examples(load_rows(str(path)), recipes.get_recipe("chat"))
    assert first.prompt == second.prompt  # equal prompts stay on one side: data.rows.layouts.split_eval


def test_mbpp_line_ends_and_indentation_of_the_whole_file(codes: Any) -> None:
    found = codes(shared("math_code/mbpp/mbpp.jsonl").read_text(encoding="utf-8"), "mbpp.jsonl")
    assert {"AUD023", "AUD033"} <= set(found)
    assert "indent code by tabs" in found["AUD033"]


def test_humaneval_entry_points_repeat_harmless_as_rows_are_told_apart_by_their_content(tmp_path: Path) -> None:
    assert raw("math_code", 8, "HumanEval") == "HumanEval/64"
    path = shared("math_code/humaneval/HumanEval.jsonl")
    rows = load_rows(str(path))
    names = [row["entry_point"] for row in rows]
    assert len(set(names)) < len(names)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows), encoding="utf-8")
    asked = to_prompts(load_rows(str(prompts)), recipes.get_recipe("chat"))
    assert len({example.messages[0]["content"] for example in asked}) == len(rows)


# recommendation


@pytest.fixture
def movielens(tmp_path: Path) -> Callable[[str, str], dict[str, str]]:
    """movielens(folder, text) → name → what the ratings file of that content shows."""

    def look(folder: str, text: str) -> dict[str, str]:
        path = tmp_path / folder / "ratings.csv"
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8", newline="")
        return {name: seen.detail for name, seen in MovieLens().look_at(path).items()}

    return look


def official() -> str:
    with open(shared("recommendation/ml-latest-small/ratings.csv"), encoding="utf-8", newline="") as file:
        return file.read()


def test_movielens_rows_appended_by_a_web_application(movielens: Any) -> None:
    tail = raw("recommendation", 0, "python-pandas-web-film-app").splitlines()
    added = "\n".join(tail[2:]) + "\n"  # its first two rows are the last official ones
    found = movielens("ml-latest-small", official() + added)
    assert set(found) == {"movielens", "movielens_appended"}
    assert f"followed by {len(tail) - 2} more rows, with 3 new users" in found["movielens_appended"]


def test_movielens_users_shifted_by_1000(movielens: Any) -> None:
    first = raw("recommendation", 1, "allegrastrippoli")
    found = movielens("a", f"userId,movieId,rating,timestamp\n{first}\n")
    assert "is 1, here 1001" in found["movielens_shifted_users"]


def test_movielens_of_2016_under_the_name_of_2018(movielens: Any, codes: Any) -> None:
    found = movielens("b", raw("recommendation", 2, "gan-recommend"))
    assert "of October 2016 (671 users, 100,004 ratings)" in found["movielens_other_vintage"]
    assert "AUD035" in codes(raw("recommendation", 2, "gan-recommend"), "ratings.csv")


def test_movielens_titles_with_quotes_and_accents_harmless_as_csv_gives_them_back_exactly(
    codes: Any, tmp_path: Path
) -> None:
    text = raw("recommendation", 3, "movies.csv")
    assert codes("movieId,title,genres\n" + text, "movies.csv") == {}
    rows = list(load_rows(str(tmp_path / "movies.csv")))
    assert rows[2]["title"] == "11'09\"01 - September 11 (2002)"
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(row.values() for row in rows)
    assert table.getvalue().strip() == text.strip()


def test_the_recommender_s_wrong_decoding_of_the_titles_is_named(codes: Any) -> None:
    text = raw("recommendation", 3, "movies.csv").encode().decode("iso-8859-1")
    assert (
        "UTF-8 that was decoded with another encoding" in codes("movieId,title,genres\n" + text, "movies.csv")["AUD020"]
    )


# what is sound stays without a finding


SOUND = {
    "function_calling/xlam/xlam_60k_two_quoted_rows.jsonl": set(),
    "function_calling/xlam/xlam_shape_from_bfcl.jsonl": set(),
    "function_calling/glaive/glaive_toolcall_en_demo.jsonl": set(),
    "math_code/gsm8k/gsm8k_train.jsonl": {"AUD038"},
    "math_code/humaneval/HumanEval.jsonl": set(),
    "recommendation/ml-latest-small/movies.csv": set(),
    "recommendation/ml-latest-small/ratings.csv": set(),
    "legal_summarization/billml_bill_text_us_10.jsonl": set(),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_data_has_no_finding(name: str, tmp_path: Path) -> None:
    path = shared(name)
    rows = load_rows(str(path))
    facts = audit_sample(rows, "function_calling" if "xlam" in name else None, limit=min(len(rows), 5_000))
    whole = AuditFacts(facts.source, facts.rows, facts.audited, {**facts.observations, **run_file_detectors(str(path))})
    chosen = [rule for rule in all_rules() if rule.code.startswith(("AUD02", "AUD03"))]
    found = run_rules(LintContext(config=None, path=path, audit=whole), chosen).findings
    assert {finding.code for finding in found} == SOUND[name], found


def test_the_samples_of_surefit_have_no_finding() -> None:
    for name in ("function-calling-train", "function-calling-eval", "function-calling-old-tools"):
        facts = audit_sample(load_rows(f"surefit/{name}"), "function_calling", limit=3_000)
        chosen = [rule for rule in all_rules() if rule.code.startswith(("AUD02", "AUD03"))]
        assert run_rules(LintContext(config=None, path=Path(name), audit=facts), chosen).findings == []


def test_every_collected_row_has_a_case() -> None:
    counts = {"function_calling": 8, "legal_summarization": 5, "math_code": 9, "recommendation": 4}
    for task, count in counts.items():
        assert len(shared(f"{task}/nasties.jsonl").read_text(encoding="utf-8").splitlines()) == count
