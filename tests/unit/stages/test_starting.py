"""`surefit init --data`: a short config for the rows, valid as written, with a reason for every value."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from surefit.config.load import load_text
from surefit.core.errors import ConfigError, DataError
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.plan.memory_interval import closed_form_estimate, judge_fit
from surefit.stages.run_context import load_run_context
from surefit.stages.starting import StartingConfig, build_starting_config, choose_run_name

WORDS = [f"{a}{b}" for a in "bdfgklmnprstvz" for b in ("ala", "eno", "ito", "ora", "une")]
PAIRS = [
    (f"Where is {word}?", f"{word.title()} is in {word[::-1]}, north of {WORDS[-n - 1]}.")
    for n, word in enumerate(WORDS)
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chats(role: str = "role", content: str = "content", user: str = "user", assistant: str = "assistant"):
    return [[{role: user, content: q}, {role: assistant, content: a}] for q, a in PAIRS]


LAYOUTS = {
    "messages": [{"messages": turns} for turns in chats()],
    "sharegpt": [{"conversations": turns} for turns in chats("from", "value", "human", "gpt")],
    "prompt and completion": [{"prompt": q, "completion": a} for q, a in PAIRS],
    "alpaca": [{"instruction": q, "output": a} for q, a in PAIRS],
    "dolly": [{"instruction": q, "context": "", "response": a, "category": "qa"} for q, a in PAIRS],
    "question and answer": [{"question": q, "answer": a} for q, a in PAIRS],
    "ms-swift": [{"query": q, "response": a} for q, a in PAIRS],
    "input and output": [{"id": n, "input": q, "output": a} for n, (q, a) in enumerate(PAIRS)],
    "dialog": [{"dialog": turns} for turns in chats("speaker", "text", "customer", "agent")],
    "conversation": [{"conversation": turns} for turns in chats("from", "value", "human", "gpt")],
    "from and value in messages": [{"messages": turns} for turns in chats("from", "value", "human", "gpt")],
    "role and content in conversations": [{"conversations": turns} for turns in chats()],
    "customer and agent in messages": [{"messages": turns} for turns in chats(user="customer", assistant="agent")],
    "Vertex AI": [
        {
            "contents": [
                {"role": role, "parts": [{"text": text}]} for role, text in zip(("user", "model"), p, strict=True)
            ]
        }
        for p in PAIRS
    ],
    "Bedrock": [
        {
            "messages": [{"role": "user", "content": [{"text": q}]}, {"role": "assistant", "content": [{"text": a}]}],
            "schemaVersion": "bedrock-conversation-2024",
            "system": [{"text": "S"}],
        }
        for q, a in PAIRS
    ],
    "text-bison": [{"input_text": q, "output_text": a} for q, a in PAIRS],
    "text": [{"text": f"{q} {a}"} for q, a in PAIRS],
    "GSM8K": [{"question": q, "answer": f"{a}\n#### {n}"} for n, (q, a) in enumerate(PAIRS)],
}
RECIPES = {"GSM8K": "math_reasoning"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_config_is_short_valid_and_reads_the_rows(tmp_path, monkeypatch, layout):
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "rows.jsonl", LAYOUTS[layout])
    draft = build_starting_config(source, "surefit/nano", "cpu")
    assert len(draft.text.splitlines()) <= 17
    assert all(line.why for line in draft.lines)
    assert draft.values["recipe"] == RECIPES.get(layout, "chat")
    context = load_run_context(load_text(draft.text, tmp_path / "run.yaml"))
    assert context.problems == ()
    assert context.resolved is not None
    assert context.resolved.total_steps is not None
    assert context.resolved.total_steps >= 100
    assert context.rows is not None
    assert len(context.rows) == len(PAIRS)


def hh(question: str, answer: str) -> str:
    return f"\n\nHuman: {question}\n\nAssistant: {answer}"


PREFERENCES: dict[str, list[dict[str, Any]]] = {
    "pairs": [{"prompt": q, "chosen": a, "rejected": f"not {a}"} for q, a in PAIRS],
    "HH-RLHF": [{"chosen": hh(q, a), "rejected": hh(q, f"not {a}")} for q, a in PAIRS],
    "other names": [{"query": q, "response_chosen": a, "response_rejected": f"not {a}"} for q, a in PAIRS],
    "UltraFeedback": [
        {"instruction": q, "completions": [{"response": a, "overall_score": 9}, {"response": "?", "overall_score": 1}]}
        for q, a in PAIRS
    ],
}


@pytest.mark.parametrize("layout", PREFERENCES)
def test_pairs_of_answers_get_a_preference_objective_and_no_rate_of_sft(tmp_path, monkeypatch, layout):
    monkeypatch.chdir(tmp_path)
    draft = build_starting_config(write(tmp_path / "rows.jsonl", PREFERENCES[layout]), "surefit/nano", "cpu")
    assert (draft.values["recipe"], draft.values["objective"]) == ("chat", "dpo")
    assert "train.learning_rate" not in draft.values
    assert all(line.why for line in draft.lines)
    context = load_run_context(load_text(draft.text, tmp_path / "run.yaml"))
    assert context.problems == ()
    assert context.recipe is not None
    assert context.recipe.pairs


def test_a_column_named_completions_is_not_taken_for_scored_answers(tmp_path):
    rows = [{"prompt": q, "completion": a, "completions": [a]} for q, a in PAIRS]
    draft = build_starting_config(write(tmp_path / "rows.jsonl", rows), "surefit/nano", "cpu")
    assert "objective" not in draft.values


def test_a_tie_among_scored_answers_is_named_with_its_row(tmp_path):
    rows = copy.deepcopy(PREFERENCES["UltraFeedback"])
    rows[1]["completions"][1]["overall_score"] = 9
    with pytest.raises(DataError) as caught:
        build_starting_config(write(tmp_path / "rows.jsonl", rows), "surefit/nano", "cpu")
    assert (caught.value.code, caught.value.line) == ("E4827", 2)
    assert "remove the row" in (caught.value.help or "")


def test_the_reason_for_one_pass_over_pairs_reads_as_one_sentence(tmp_path):
    draft = build_starting_config(write(tmp_path / "rows.jsonl", PREFERENCES["pairs"]), "surefit/nano", "cpu")
    (why,) = [line.why for line in draft.lines if line.key == "train.num_train_epochs"]
    assert re.fullmatch(r"\d+ steps: a second pass .*", why)


@pytest.mark.parametrize("gpu", ["4090", "h100", "t4", "v100-16", "l40s"])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-7B-Instruct"])
def test_what_is_said_to_fit_fits_by_the_formula(tmp_path, gpu, model):
    draft = build_starting_config(write(tmp_path / "rows.jsonl", LAYOUTS["messages"]), model, gpu)
    context = load_run_context(load_text(draft.text, tmp_path / "run.yaml"))
    assert context.resolved is not None
    hardware = hardware_facts(gpu)
    estimate = closed_form_estimate(context.resolved, model_facts(model), hardware)
    assert estimate is not None
    assert draft.verdict == judge_fit(estimate, hardware.memory_bytes) == "fits"


@pytest.mark.parametrize("gpu", ["t4", "v100-16"])
def test_a_model_that_does_not_fit_is_an_error_that_names_those_that_do(tmp_path, gpu):
    source = write(tmp_path / "rows.jsonl", LAYOUTS["messages"])
    with pytest.raises(ConfigError) as raised:
        build_starting_config(source, "Qwen/Qwen3-32B", gpu)
    assert raised.value.field == "--model"
    proposed = str(raised.value.help).removeprefix("these fit: ").partition(";")[0].split(", ")
    assert len(proposed) == 3
    assert {build_starting_config(source, name, gpu).verdict for name in proposed} == {"fits"}


@pytest.mark.parametrize(("gpu", "proposed"), [("12GB", "Qwen/Qwen2.5-7B-Instruct"), ("24GB", "Qwen/Qwen3-14B")])
def test_a_size_is_enough_and_the_largest_model_with_room_is_proposed(tmp_path, gpu, proposed):
    draft = build_starting_config(write(tmp_path / "rows.jsonl", LAYOUTS["messages"]), None, gpu)
    assert draft.values["hardware.gpu"] == gpu
    assert draft.values["model.name_or_path"] == proposed
    assert draft.values["model.quantization"] == "nf4"
    assert (draft.verdict, draft.roomy) == ("fits", True)


def test_a_tight_config_is_simulated(tmp_path, monkeypatch):
    source = write(tmp_path / "rows.jsonl", LAYOUTS["messages"])
    asked = []

    def simulated(planner, resolved, hardware):
        asked.append(resolved.config.model.quantization)
        return closed_form_estimate(resolved, planner.model, hardware_facts("8GB"))  # whatever it says

    monkeypatch.setattr("surefit.plan.planner.Planner.simulated", simulated)
    build_starting_config(source, "Qwen/Qwen2.5-7B-Instruct", "24GB")
    assert asked == [], "there is room"
    draft = build_starting_config(source, "Qwen/Qwen3-32B", "26GB")
    assert asked == ["nf4"]
    assert not draft.roomy


@pytest.mark.parametrize("gpu", ["0GB", "12MB", "9999"])
def test_a_card_that_does_not_exist_is_an_error(tmp_path, gpu):
    with pytest.raises(ConfigError) as raised:
        build_starting_config(write(tmp_path / "rows.jsonl", LAYOUTS["messages"]), None, gpu)
    assert raised.value.field == "hardware.gpu"


def test_without_a_model_the_largest_with_room_is_written_and_others_are_named(tmp_path):
    source = write(tmp_path / "rows.jsonl", LAYOUTS["messages"])
    proposed: dict[str, StartingConfig] = {gpu: build_starting_config(source, None, gpu) for gpu in ("t4", "h100")}
    for draft in proposed.values():
        assert draft.verdict == "fits"
        assert draft.roomy
        assert draft.proposals[0][0] == draft.values["model.name_or_path"]
        assert 2 <= len(draft.proposals) <= 3
    sizes = [float(draft.proposals[0][1].rstrip("B")) for draft in proposed.values()]
    assert sizes[0] <= sizes[1]


def test_rows_that_nothing_reads_are_errors(tmp_path):
    with pytest.raises(DataError) as raised:
        build_starting_config(write(tmp_path / "rows.jsonl", [{"a": 1, "b": 2}] * 3), "surefit/nano", "cpu")
    assert raised.value.field == "data.format"
    with pytest.raises(DataError):
        build_starting_config(
            write(tmp_path / "bad.jsonl", [{"prompt": "x", "completion": ""}] * 3), "surefit/nano", "cpu"
        )
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises((DataError, ConfigError)):
        build_starting_config(str(tmp_path / "empty.jsonl"), "surefit/nano", "cpu")


def test_a_longer_row_gets_room_within_the_context(tmp_path):
    rows = [
        *LAYOUTS["messages"],
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 300}]},
    ]
    draft = build_starting_config(write(tmp_path / "rows.jsonl", rows), "surefit/nano", "cpu")
    assert draft.values["data.max_length"] >= 600


def test_the_agent_is_the_assistant_and_it_is_said(tmp_path):
    rows = [{"log": [*turns, {"speaker": "customer", "text": "Bye"}, {"speaker": "agent", "text": f"Bye {n}"}]}
            for n, turns in enumerate(chats("speaker", "text", "customer", "agent"))]  # fmt: skip
    draft = build_starting_config(write(tmp_path / "rows.jsonl", rows), "surefit/nano", "cpu")
    assert draft.values["data.roles"] == {"user": "customer", "assistant": "agent"}
    assert "agent is the assistant" in draft.seen[0]


def test_unknown_speakers_are_not_guessed(tmp_path):
    rows = [{"log": turns} for turns in chats("speaker", "text", "Ann", "Bo")]
    with pytest.raises(DataError) as raised:
        build_starting_config(write(tmp_path / "rows.jsonl", rows), "surefit/nano", "cpu")
    assert raised.value.field == "data.roles"


def test_a_recipe_that_does_not_read_the_rows_is_an_error(tmp_path):
    source = write(tmp_path / "rows.jsonl", LAYOUTS["messages"])
    with pytest.raises(DataError):
        build_starting_config(source, "surefit/nano", "cpu", "function_calling")


def test_a_run_gets_a_directory_that_no_other_config_and_no_run_has(tmp_path: Path) -> None:
    names = [choose_run_name(tmp_path, "rows.jsonl.gz", for_config=for_config) for for_config in (True, False)]
    assert names == ["rows", "rows"]
    (tmp_path / "rows.yaml").write_text("a: 1\n")
    names = [choose_run_name(tmp_path, "rows.csv", for_config=for_config) for for_config in (True, False)]
    assert names == ["rows-2", "rows"]
    (tmp_path / "other.yml").write_text("model: x\noutput_dir: 'runs//rows'  # mine\n")
    (tmp_path / "odd.yaml").write_bytes(b"\xff\0")
    assert choose_run_name(tmp_path, "rows.csv", for_config=False) == "rows-2"
    (tmp_path / "runs" / "rows-2").mkdir(parents=True)
    assert choose_run_name(tmp_path, "rows.csv", for_config=True) == "rows-3"


@pytest.mark.parametrize(("rows", "is_long"), [(40_000, True), (900, False)])
def test_a_long_run_says_how_to_see_a_result_sooner(tmp_path, rows, is_long):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"Say {n}.", "completion": f"It is {n}."}) + "\n" for n in range(rows))
    )
    draft = build_starting_config(str(path), "surefit/nano", "auto", name="mine", simulate=False)
    options = "--set train.max_steps=100 --set output_dir=runs/mine-first-look"
    assert (options in " ".join(draft.seen)) is is_long
