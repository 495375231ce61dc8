"""The sample sets: the same bytes every time, held-out calls really held out, new tools really new."""

import json
import re
from itertools import islice

import pytest

from surefit import samples

TRAIN, EVAL, OLD = "function-calling-train", "function-calling-eval", "function-calling-old-tools"
AMR = ("amr-train", "amr-eval", "amr-tiny-train", "amr-tiny-eval")


def rows_of(name):
    return [json.loads(line) for line in samples.find_sample(f"surefit/{name}").read_text().splitlines()]


def calls_in(rows):
    return {json.dumps(call, sort_keys=True) for row in rows for call in json.loads(row["answers"])}


@pytest.fixture(scope="module")
def sets():
    return {name: rows_of(name) for name in (TRAIN, EVAL, OLD)}


def test_resolve_knows_the_shipped_names_and_no_others():
    assert {f"surefit/{name}" for name in (TRAIN, EVAL, OLD, *AMR)} <= set(samples.list_samples())
    assert samples.find_sample("surefit/function-calling-trian") is None
    assert samples.find_sample("function-calling-train") is None


def test_regenerated_sets_have_the_same_bytes(make_samples, tmp_path):
    for path in make_samples.write_samples(tmp_path):
        assert path.read_bytes() == samples.find_sample(f"surefit/{path.stem}").read_bytes(), path.stem


def test_sizes(sets):
    assert len(sets[TRAIN]) == 3000
    assert len(sets[EVAL]) >= 250
    assert len(sets[OLD]) >= 200
    assert sum(path.stat().st_size for path in samples.list_samples().values()) < 5.5 * 2**20


def test_no_evaluated_call_is_trained_on(sets, corpus):
    pretrained = (
        call
        for row in islice(corpus.training_rows(seed=1), 5000)
        if row[0]["content"].startswith(corpus.FUNCTION_CALLING_SYSTEM)
        for call in json.loads(row[2]["content"])
    )
    trained = calls_in(sets[TRAIN]) | {json.dumps(call, sort_keys=True) for call in pretrained}
    assert not trained & (calls_in(sets[EVAL]) | calls_in(sets[OLD]))
    assert all(corpus.is_held_out(json.loads(call)) for call in calls_in(sets[EVAL]) | calls_in(sets[OLD]))


def test_new_tools_share_no_name_argument_or_phrasing_with_the_old(corpus):
    def traits(tools):
        return (
            {tool.name for tool in tools},
            {p.name for tool in tools for p in tool.params},
            {phrasing for tool in tools for phrasing in tool.phrasings},
        )

    for old, new in zip(traits(corpus.OLD_TOOLS), traits(corpus.NEW_TOOLS), strict=True):
        assert not old & new


def test_every_gold_call_fits_a_tool_on_offer(sets):
    types = {"int": int, "str": str, "List[int]": list}
    for row in (row for rows in sets.values() for row in rows):
        offered = {tool["name"]: tool["parameters"] for tool in json.loads(row["tools"])}
        for call in json.loads(row["answers"]):
            schema = offered[call["name"]]
            for name, value in call["arguments"].items():
                assert type(value) is types[schema[name]["type"].removesuffix(", optional")]
            required = {name for name, param in schema.items() if "optional" not in param["type"]}
            assert required <= call["arguments"].keys() <= schema.keys()


def test_replay_share_and_irrelevant_rows_are_as_the_readme_says(sets, corpus):
    old_names = {tool.name for tool in corpus.OLD_TOOLS}
    answers = [json.loads(row["answers"]) for row in sets[TRAIN]]
    replay = sum(bool(calls) and calls[0]["name"] in old_names for calls in answers) / sum(map(bool, answers))
    assert 0.15 <= replay <= 0.25
    for rows in sets.values():
        assert 0.05 <= sum(row["answers"] == "[]" for row in rows) / len(rows) <= 0.15


def test_no_evaluated_summary_line_is_trained_on():
    train, scored = (
        {line for row in rows_of(f"summaries-{part}") for line in row["summary"].splitlines()}
        for part in ("train", "eval")
    )
    assert len(scored) > 100
    assert not train & scored


REQUESTS = ("requests-train", "requests-eval", "requests-no-tool")
IN_WORDS = {
    "a": 1, "an": 1, "one": 1, "two": 2, "double": 2, "three": 3, "third": 3, "four": 4, "five": 5, "six": 6,
    "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "dozen": 12,
}  # fmt: skip
SAID_OTHERWISE = {"two hours": 120, "quarter of an hour": 15, "half an hour": 30, "mute": 0, "full blast": 100}
"""Numbers that a request says without a digit or a word for the number itself."""


def test_sizes_of_the_hand_written_sets():
    train, scored, no_tool = map(rows_of, REQUESTS)
    assert (len(train), len(scored), len(no_tool)) == (520, 87, 32)
    assert 0.25 <= sum(row["answers"] == "[]" for row in train) / len(train) <= 0.3
    assert all(row["answers"] != "[]" for row in scored)
    assert all(row["answers"] == "[]" for row in no_tool)
    assert {len(json.loads(row["answers"])) for row in train} == {0, 1, 2, 3}
    assert len({row["id"] for row in train + scored + no_tool}) == 639


def test_no_tool_and_no_request_of_the_hand_written_evaluation_is_trained_on():
    def traits(rows):
        return {tool["name"] for row in rows for tool in json.loads(row["tools"])}, [
            row["query"].lower() for row in rows
        ]

    train, scored, no_tool = map(rows_of, REQUESTS)
    (tools, queries), (held_tools, held_queries) = traits(train), traits(scored + no_tool)
    assert not tools & held_tools
    assert len({*queries, *held_queries}) == len(queries) + len(held_queries)


def test_a_hand_written_call_fits_its_tool():
    types = {"int": int, "float": (int, float), "str": str, "bool": bool, "list": list}
    for row in (row for name in REQUESTS for row in rows_of(name)):
        offered = {tool["name"]: tool["parameters"] for tool in json.loads(row["tools"])}
        for call in json.loads(row["answers"]):
            parameters, arguments = offered[call["name"]], call["arguments"]
            required = {name for name, spec in parameters.items() if not spec["type"].endswith(", optional")}
            assert required <= arguments.keys() <= parameters.keys(), row["query"]
            for name, value in arguments.items():
                kind = parameters[name]["type"].removesuffix(", optional")
                assert isinstance(value, types[kind]), (row["query"], name)
                assert isinstance(value, bool) == (kind == "bool"), (row["query"], name)


def test_the_values_of_a_hand_written_request_stand_in_it():
    """So that one answer is right: texts to the letter, but for case; numbers may be words."""
    for row in (row for name in REQUESTS for row in rows_of(name)):
        query = row["query"].lower()
        numbers = {float(digits) for digits in re.findall(r"\d+(?:\.\d+)?", query)}
        numbers |= {IN_WORDS[word] for word in re.findall(r"[a-z]+", query) if word in IN_WORDS}
        numbers |= {number for text, number in SAID_OTHERWISE.items() if text in query}
        for value in (value for call in json.loads(row["answers"]) for value in call["arguments"].values()):
            for single in value if isinstance(value, list) else [value]:
                if isinstance(single, str):
                    assert single.lower() in query, (row["query"], single)
                elif not isinstance(single, bool):
                    assert single in numbers, (row["query"], single)
