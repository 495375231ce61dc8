"""`surefit chat` as its user meets it: one message, several lines, two models, a conversation saved as rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Answer, Surefit
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.core.errors import ConfigError, MachineError
from surefit.data.read.load import load_rows
from surefit.data.rows.layouts import to_examples
from surefit.data.rows.messages import is_trained_on
from surefit.generate.engine import Generation
from surefit.recipes import get_recipe
from surefit.stages import chatting
from surefit.stages.chatting import append_conversation
from surefit.stages.run_context import load_checked_run

SHORT = ("--max-new-tokens", "4")


@pytest.fixture
def chats(surefit: Surefit, tmp_path: Path) -> Path:
    """A config of a run on conversations with one system prompt."""
    system = {"role": "system", "content": "Be brief."}
    turns = [[("user", f"Hello {n}"), ("assistant", f"Hi {n}.")] for n in range(40)]
    rows = [{"messages": [system, *({"role": role, "content": text} for role, text in row)]} for row in turns]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(
        "recipe: chat\nmodel: {name_or_path: surefit/nano}\n"
        "data: {train: rows.jsonl, eval: 0.2, max_length: 128}\n"
        "train: {max_steps: 2, global_batch_size: 4, learning_rate: 5e-3}\n"
        "output_dir: runs/one\n",
        encoding="utf-8",
    )
    return path


def test_before_training_the_base_answers_and_says_so(surefit: Surefit, chats: Path) -> None:
    answer = surefit("chat", chats, "-p", "Hello 1", *SHORT, "--json")
    assert answer.code == 0, answer.text
    assert "nothing is trained yet" in answer.stderr
    assert answer.json["variants"] == ["base"]
    assert answer.json["system"] == "Be brief."
    ((turn,),) = (answer.json["turns"],)
    assert turn["answers"]["base"]["tokens"] <= 4
    plain = surefit("chat", chats, "-p", "Hello 1", *SHORT)
    assert plain.stdout == turn["answers"]["base"]["text"] + "\n"
    assert surefit("chat", chats, "-p", "x", "--compare").code == 2


def test_the_answer_is_that_of_predict(surefit: Surefit, chats: Path) -> None:
    asked = surefit("chat", chats, "--system", "", "-p", "Hello 1", *SHORT, "--json")
    settings = ("--set", "evaluate.max_new_tokens=4", "--json")
    predicted = surefit("predict", chats, "-p", "Hello 1", *settings)
    assert asked.json["turns"][0]["answers"]["base"]["text"] == predicted.json["answers"][0]["text"]


def test_base_and_adapter_side_by_side_each_continue_their_own(surefit: Surefit, chats: Path) -> None:
    assert surefit("train", chats).code == 0
    both = surefit("chat", chats, "--compare", "-p", "Hello 1", "-p", "Hello 2", *SHORT, "--json").json
    assert both["variants"] == ["base", "adapter"]
    for name in both["variants"]:
        one = surefit("chat", "runs/one", "--variant", name, "-p", "Hello 1", "-p", "Hello 2", *SHORT, "--json").json
        assert [turn["answers"][name] for turn in one["turns"]] == [turn["answers"][name] for turn in both["turns"]]


class Scripted:
    """Answers in place of a model: `answers` in turn, an error for an exception, cut where the text ends with …"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str | BaseException) -> None:
        left = list(answers)

        def generate(*_: object, on_text: object = None, **__: object) -> list[Generation]:
            answer = left.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return [Generation(answer, answer.endswith("…"), len(answer))]

        monkeypatch.setattr(chatting, "generate", generate)


def saved_rows(path: Path) -> list[list[dict[str, object]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("failure", [MachineError("no memory", code="E2077"), KeyboardInterrupt()])
def test_what_was_said_before_a_failure_is_saved(surefit, chats, tmp_path, monkeypatch, failure) -> None:
    Scripted(monkeypatch, "one", "two", failure)
    arguments = ["chat", str(chats), "--system", "", "--save", "said.jsonl"]
    done = CliRunner().invoke(app, arguments, input="Hello 1\nHello 2\nHello 3\n")
    assert done.exit_code == (130 if isinstance(failure, KeyboardInterrupt) else 3)
    (messages,) = saved_rows(tmp_path / "said.jsonl")
    assert [turn["content"] for turn in messages] == ["Hello 1", "one", "Hello 2", "two"]


def test_answers_that_the_limit_cut_are_not_saved_as_answers(surefit, chats, tmp_path, monkeypatch) -> None:
    Scripted(monkeypatch, "one", "two…", "three", "four…")
    arguments = ["chat", str(chats), "--system", "", "--save", "said.jsonl"]
    done = CliRunner().invoke(app, arguments, input="".join(f"Hello {n}\n" for n in range(4)))
    assert done.exit_code == 0, done.output
    (messages,) = saved_rows(tmp_path / "said.jsonl")
    assert [turn["content"] for turn in messages if turn["role"] == "assistant"] == ["one", "two…", "three"]
    assert [turn.get("weight") for turn in messages] == [None, None, None, 0, None, None]
    (row,) = to_examples(load_rows(str(tmp_path / "said.jsonl")), get_recipe("chat"), "auto", "error").examples
    assert [turn["content"] for turn in row.messages if is_trained_on(turn)] == ["one", "three"]


def test_a_conversation_of_cut_answers_alone_is_not_saved(surefit, chats, tmp_path, monkeypatch) -> None:
    Scripted(monkeypatch, "one…", "two…")
    done = CliRunner().invoke(app, ["chat", str(chats), "--save", "said.jsonl"], input="Hello 1\nHello 2\n")
    assert done.exit_code == 0, done.output
    assert "nothing saved" in done.stderr
    assert not (tmp_path / "said.jsonl").exists()


def test_lines_of_standard_input_and_commands(surefit, chats, tmp_path, monkeypatch) -> None:
    Scripted(monkeypatch, "one", "two", "three")
    lines = ("/save said.jsonl", "Hello 1", "Hello 2", "/save said.jsonl", "/system", "Hello 3", "/save said.jsonl",
             "/help", "/quit", "never asked")  # fmt: skip
    done = CliRunner().invoke(app, ["chat", str(chats), *SHORT], input="".join(f"{line}\n" for line in lines))
    answer = Answer(done.exit_code, done.stdout, done.stderr)
    assert answer.code == 0, answer.text
    assert "/reset" in answer.stderr
    saved = [json.loads(line)["messages"] for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [[turn["role"] for turn in messages] for messages in saved] == [
        ["system", "user", "assistant", "user", "assistant"],
        ["user", "assistant"],
    ]
    assert [messages[-2]["content"] for messages in saved] == ["Hello 2", "Hello 3"]
    rows = to_examples(load_rows(str(tmp_path / "said.jsonl")), get_recipe("chat"), "auto", "error")
    assert len(rows.examples) == 2, "the file is rows to train on"


def test_a_conversation_is_saved_into_no_other_file(surefit: Surefit, chats: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"a": 1}\n', encoding="utf-8")
    run = load_checked_run(chats, training=False)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name in ("rows.jsonl", "run.yaml", "other.json"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ConfigError) as raised:
            append_conversation(run, tmp_path / name, messages)
        assert raised.value.field == "/save"
        assert (tmp_path / name).read_bytes() == before
    (tmp_path / "new.jsonl").write_bytes(json.dumps({"messages": messages}).encode())  # without an end of line
    assert append_conversation(run, tmp_path / "new.jsonl", messages) == 2
    assert len((tmp_path / "new.jsonl").read_text().splitlines()) == 2
    with pytest.raises(ConfigError):
        append_conversation(run, tmp_path / "empty.jsonl", messages[:1])
    assert not (tmp_path / "empty.jsonl").exists()


def test_a_template_without_a_system_turn_is_an_error_of_the_message(surefit: Surefit, chats: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template += "{{ m.content }}{% endfor %}"
    chats.write_text(chats.read_text().replace("surefit/nano", "surefit/nano, chat_template: t.jinja"))
    (chats.parent / "t.jinja").write_text(template)
    answer = surefit("chat", chats, "--system", "Be brief.", "-p", "Hello", *SHORT)
    assert answer.code == 2
    assert "no system role" in answer.text
