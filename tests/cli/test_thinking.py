"""Rows with reasoning on a template that forgets it: one row, several examples, in every stage that counts them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import Surefit

from surefit.core.rundir import read_json

TEMPLATE = Path(__file__).parents[1] / "unit" / "model" / "thinking.jinja"


@pytest.fixture
def thinking(tmp_path: Path) -> Path:
    """Forty rows of two answers with reasoning."""
    shutil.copy(TEMPLATE, tmp_path / "thinking.jinja")
    rows = []
    for n in range(40):
        turns = []
        for more in (1, 2):
            turns.append({"role": "user", "content": f"{n} + {more}?"})
            turns.append({"role": "assistant", "reasoning": f"count from {n}", "content": str(n + more)})
        rows.append(json.dumps({"messages": turns}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(
        "recipe: chat\n"
        "model: {name_or_path: surefit/nano, chat_template: thinking.jinja}\n"
        "data: {train: rows.jsonl, eval: 0.5, max_length: 256}\n"
        "train: {global_batch_size: 4}\n"
        "checkpoint: {save_steps: 2}\n"
        "evaluate: {max_new_tokens: 8, max_examples: 2}\n"
        "output_dir: runs/one\n",
        encoding="utf-8",
    )
    return path


def test_show_numbers_the_examples_of_a_row(surefit: Surefit, thinking: Path) -> None:
    shown = surefit("check", thinking, "--show", "1")
    assert "rows.jsonl:1, example 2 of 2 (the template rewrites earlier turns)" in shown.text
    assert shown.stdout.count("⟦<think>\ncount from 0\n</think>\n\n") == 2
    last = surefit("check", thinking, "--show", "1", "--set", "data.thinking=only_last")
    assert "rows.jsonl:1: the loss falls" in last.text
    assert last.stdout.count("⟦<think>") == 1
    dropped = surefit("check", thinking, "--show", "1", "--set", "data.thinking=drop")
    assert "count from" not in dropped.stdout
    assert "TPL010" in dropped.text


def test_every_stage_counts_examples(surefit: Surefit, thinking: Path) -> None:
    audited = surefit("audit", thinking, "--json").json
    assert (audited["usable"], audited["examples"]) == (40, 80)
    plan = surefit("plan", thinking, "--quick", "--json")
    assert plan.code == 0, plan.text
    assert plan.json["steps"]["rows"] == 80
    trained = surefit("train", thinking, "--json", "--set", "train.max_steps=2")
    assert trained.code == 0, trained.text
    rows = trained.json["rows"]
    assert rows["split"] == rows["rows"]
    assert rows["kept"] == 2 * rows["rows"]
    observations = read_json(Path("runs/one/batch_audit.json"))["observations"]
    assert observations["misplaced_mask"]["of"] > 0
    assert {name: seen["rows"] for name, seen in observations.items() if seen["rows"]} == {}
    for switches in ("{}", "{enable_thinking: false}"):
        asked = ("--variant", "adapter", "--set", f"evaluate.chat_template_kwargs={switches}")
        scored = surefit("evaluate", "runs/one", *asked)
        assert scored.code == 0, scored.text


def test_a_run_is_resumed_only_with_the_same_examples(surefit: Surefit, thinking: Path) -> None:
    whole = surefit("train", thinking, "--json", "--set", "train.max_steps=4")
    assert whole.code == 0, whole.text
    other = surefit("train", thinking, "--resume", "--set", "train.max_steps=4", "--set", "data.thinking=only_last")
    assert other.code != 0
    assert "data.train" in other.text


GLM = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_without_an_end_of_turn_the_next_turns_token_is_learnt(surefit: Surefit, thinking: Path) -> None:
    Path("thinking.jinja").write_text(GLM)
    row = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    others = [[{"role": "user", "content": f"{n}+{n}?"}, row[1]] for n in range(3, 10)]
    Path("rows.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in (row, *others)))
    shown = surefit("check", thinking, "--show", "1")
    assert shown.code == 0, shown.text
    assert "<|user|>2+2?<|assistant|>⟦4<|user|>⟧" in shown.stdout
    assert "TPL002" not in shown.text
    Path("thinking.jinja").write_text(GLM.replace("'<|' + m.role + '|>' +", "'\\n' + m.role + ': ' +"))
    assert "TPL002" in surefit("check", thinking).text


def said(surefit: Surefit, config: Path, **turn: object) -> str:
    """What `check --show 1` says of a row whose answer has these entries."""
    row = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"} | turn]
    Path("rows.jsonl").write_text((json.dumps({"messages": row}) + "\n") * 8)
    return surefit("check", config, "--show", "1").text


@pytest.mark.parametrize(
    ("value", "kind"),
    [(5, "a number"), ({"a": 1}, "an object"), (True, "true or false"), ([7], "a number is not supported")],
)
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_is_no_text_is_refused(
    surefit: Surefit, thinking: Path, name: str, value: object, kind: str
) -> None:
    text = " ".join(said(surefit, thinking, **{name: value}).split())
    place = f"messages[1].{name}" + ("[0]" if isinstance(value, list) else "")
    assert re.search(rf"rows\.jsonl:1: error\[E\d+\] {re.escape(place)}:", text)
    assert kind in text


THOUGHT = "⟦<think>\nt\n</think>\n\n4"


@pytest.mark.parametrize(
    "turn",
    [
        {"reasoning": ["t"]},
        {"thinking": [{"type": "text", "text": "t"}]},
        {"content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "4"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}, {"type": "text", "text": "4"}]},
        {"content": [{"type": "reasoning", "value": "t"}, {"type": "text", "value": "4"}]},
    ],
)
def test_parts_that_hold_reasoning_are_read(surefit: Surefit, thinking: Path, turn: dict[str, object]) -> None:
    assert THOUGHT in said(surefit, thinking, **turn)


def test_no_reasoning_is_none(surefit: Surefit, thinking: Path) -> None:
    plain = said(surefit, thinking)
    assert "⟦" in plain
    assert [said(surefit, thinking, reasoning_content=nothing) for nothing in ("", None)] == [plain, plain]


def test_parts_of_a_user_hold_no_reasoning(surefit: Surefit, thinking: Path) -> None:
    for part in ({"type": "thinking", "thinking": "secret"}, {"type": "reasoning", "text": "secret"}):
        asked = {"role": "user", "content": [part, {"type": "text", "text": "2+2?"}]}
        row = [asked, {"role": "assistant", "content": "4"}]
        Path("rows.jsonl").write_text((json.dumps({"messages": row}) + "\n") * 8)
        said = " ".join(surefit("check", thinking).text.split())
        assert f"messages[0].content[0]: parts of type '{part['type']}' are not supported" in said
        assert "images" not in said
