"""Every layout of rows with no chat template, one, or several by name, through every stage of a run.

What a conversation is rendered as is taken from transformers' own `apply_chat_template`, never from this project.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit import nano
from surefit.cli.app import app

CALL = {"type": "function", "function": {"name": "ring", "arguments": {"who": "Ada"}}}
PARAMETERS = {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}
TOOL = {"type": "function", "function": {"name": "ring", "description": "Call", "parameters": PARAMETERS}}
XLAM_TOOL = '[{"name": "ring", "description": "Call", "parameters": {"who": {"description": "Name", "type": "str"}}}]'


def messages(n: int) -> dict[str, Any]:
    return {"messages": [turn("user", f"Say the number {n}."), turn("assistant", f"It is {n}.")]}


def with_tools(n: int) -> dict[str, Any]:
    asked = [turn("user", f"Ring Ada, {n} times."), turn("assistant", "") | {"tool_calls": [CALL]}]
    return {"messages": [*asked, turn("tool", f"done {n}"), turn("assistant", f"Rang {n} times.")], "tools": [TOOL]}


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def sharegpt(n: int) -> dict[str, Any]:
    pairs = (("human", f"Say the number {n}."), ("gpt", f"It is {n}."))
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


def xlam(n: int) -> dict[str, Any]:
    answers = json.dumps([{"name": "ring", "arguments": {"who": f"person {n}"}}])
    return {"query": f"Ring person {n}", "tools": XLAM_TOOL, "answers": answers}


LAYOUTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "messages": messages,
    "messages_tools": with_tools,
    "prompt_completion": lambda n: {"prompt": f"Say the number {n}.", "completion": f"It is {n}."},
    "alpaca": lambda n: {"instruction": f"Say the number {n}.", "output": f"It is {n}."},
    "sharegpt": sharegpt,
    "text": lambda n: {"text": f"Chapter {n} begins where the last one ended, and goes on."},
    "tokens": lambda n: {"input_ids": [20 + n, 30, 31, 32, 33, 34, 35, 1]},
    "function_calling": xlam,
}
CONTINUED = ("text", "tokens")
TOOL_USE = "[tools]" + (Path(nano.PATH) / "chat_template.jinja").read_text(encoding="utf-8")
DEFAULT = (
    "[plain]{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEMPLATES = ("none", "one", "named_files", "named_list")
CASES = [(layout, template) for layout in LAYOUTS for template in TEMPLATES]
CONFIG = """recipe: {recipe}
model: {{name_or_path: base, dtype: float32}}
data: {{train: rows.jsonl, eval: 0.3, max_length: 256}}
train: {{max_steps: 2, global_batch_size: 2}}
evaluate: {{max_new_tokens: 4, max_examples: 2}}
hardware: {{gpu: cpu}}
output_dir: run
"""


def write_base(directory: Path, template: str) -> None:
    """The packaged model with these chat templates."""
    shutil.copytree(nano.PATH, directory, ignore=shutil.ignore_patterns("*.py", "__pycache__", "README.md"))
    single = directory / "chat_template.jinja"
    if template == "one":
        return
    single.unlink()
    if template == "named_files":
        (directory / "additional_chat_templates").mkdir()
        single.write_text(DEFAULT, encoding="utf-8")
        (directory / "additional_chat_templates/tool_use.jinja").write_text(TOOL_USE, encoding="utf-8")
    elif template == "named_list":
        path = directory / "tokenizer_config.json"
        named = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOL_USE}]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write_run(place: Path, layout: str, template: str, rows: int = 40) -> None:
    write_base(place / "base", template)
    (place / "rows.jsonl").write_text("".join(json.dumps(LAYOUTS[layout](n)) + "\n" for n in range(rows)))
    recipe = "function_calling" if layout == "function_calling" else "chat"
    (place / "run.yaml").write_text(CONFIG.format(recipe=recipe))


def surefit(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """A verb with `--json`: its exit code, its last line, and all that it said."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    last = result.stdout.strip().splitlines()[-1:] or ["{}"]
    return result.exit_code, json.loads(last[0]) if last[0].startswith("{") else {}, result.output


def codes(document: dict[str, Any], severity: str) -> set[str]:
    return {found["code"] for found in document["findings"] if found["severity"] == severity}


def rendered(place: Path, messages: list[dict[str, Any]], tools: Any, asks: bool = False) -> list[int]:
    """The ids that transformers makes of a conversation."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=asks, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def first_example(place: Path) -> Any:
    from surefit.data.rows.layouts import to_examples
    from surefit.stages.run_context import load_checked_run

    run = load_checked_run(Path("run.yaml"))
    assert run.rows is not None
    return to_examples(run.rows, run.recipe)[0]


@pytest.mark.parametrize(("layout", "template"), CASES, ids=[f"D1-D2-{a}-{b}" for a, b in CASES])
def test_check_and_tokens(place: Path, layout: str, template: str) -> None:
    """No false error, one where no template can write the conversations, and the ids that transformers makes."""
    from surefit.config.schema import ModelSection
    from surefit.data.tokens.tokenize import encode_turns
    from surefit.model.tokenizer import load_tokenizer

    write_run(place, layout, template)
    code, document, said = surefit("check", "run.yaml")
    impossible = template == "none" and layout not in CONTINUED
    assert codes(document, "error") == ({"MOD006"} if impossible else set()), said
    if impossible:
        assert code == 1
        return
    shown, _, said = surefit("check", "run.yaml", "--show", "1")
    assert (shown, code) == (0, 0), said
    example = first_example(place)
    tokenizer = load_tokenizer(ModelSection(name_or_path="base"))
    ((ids, learnt),) = encode_turns(tokenizer, [example])[0]
    if layout == "tokens":
        assert ids == LAYOUTS["tokens"](0)["input_ids"]
    elif layout == "text":
        assert ids == [*tokenizer(LAYOUTS["text"](0)["text"]).input_ids, tokenizer.eos_token_id]
    else:
        assert ids == rendered(place, list(example.messages), example.tools)
        named = template.startswith("named")
        tools = layout == "messages_tools"
        assert tokenizer.decode(ids).startswith(("[tools]" if tools else "[plain]") if named else "<|")
        first = [message["role"] for message in example.messages].index("assistant")
        given = rendered(place, list(example.messages[:first]), example.tools, asks=True)
        assert learnt.index(True) == len(given)


@pytest.mark.parametrize("key", ["data.mix", "data.eval", "evaluate.extra_sets"], ids=["D1-mix", "D1-eval", "D1-also"])
def test_conversations_beside_plain_text_need_a_template(place: Path, key: str) -> None:
    """The check says what training, or scoring, would stop at."""
    write_run(place, "text", "none")
    (place / "chat.jsonl").write_text("".join(json.dumps(messages(n)) + "\n" for n in range(40)))
    change = {
        "data.mix": "data.mix={chat.jsonl: 1}",
        "data.eval": "data.eval=chat.jsonl",
        "evaluate.extra_sets": "evaluate.extra_sets={old: chat.jsonl}",
    }
    code, document, said = surefit("check", "run.yaml", "--set", change[key])
    (found,) = [each for each in document["findings"] if each["severity"] == "error"]
    assert (code, found["error"], found["field"].startswith(key)) == (1, "E4352", True), said


def test_a_column_beside_the_text_makes_no_conversation(place: Path) -> None:
    write_run(place, "text", "none")
    rows = [LAYOUTS["text"](n) | {"prompt": "where it is from"} for n in range(40)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert codes(surefit("check", "run.yaml")[1], "error") == set()


def walk(place: Path, layout: str, template: str) -> Iterator[tuple[str, bool]]:
    """The stages of a run in order, and whether each did what it should."""
    from transformers import AutoTokenizer

    impossible = template == "none" and layout not in CONTINUED
    own = AutoTokenizer.from_pretrained(place / "base").chat_template
    code, document, _ = surefit("check", "run.yaml")
    yield "check", code == int(impossible)
    yield "plan", surefit("plan", "run.yaml", "--quick")[0] == 0
    code, document, _ = surefit("train", "run.yaml")
    if impossible:
        yield "train", (code, document.get("code"), Path("run/adapter").exists()) == (1, "E8042", False)
        return
    yield "train", (code, AutoTokenizer.from_pretrained("run/adapter").chat_template) == (0, own)
    code, document, _ = surefit("merge", "run")
    yield "merge", (code, AutoTokenizer.from_pretrained("run/merged").chat_template) == (0, own)
    code, document, _ = surefit("evaluate", "run")
    if layout in CONTINUED:
        yield "evaluate", (code, document.get("code")) == (2, "E7019")
    else:
        yield "evaluate", code == 0 and _asked_as_trained(place, layout)
    yield (
        "predict",
        surefit("predict", "run", "rows.jsonl")[1].get("n") == len((place / "rows.jsonl").read_text().splitlines()),
    )
    yield "audit", surefit("audit", "run.yaml")[0] == 0
    exported = surefit("export", "run", "--format", "adapter")[0]
    yield "export", (exported, AutoTokenizer.from_pretrained("run/export/adapter").chat_template) == (0, own)


def _asked_as_trained(place: Path, layout: str) -> bool:
    """Whether the first held-out row was asked with what transformers renders of it."""
    from transformers import AutoTokenizer

    line = json.loads((place / "run/eval/eval/merged.predictions.jsonl").read_text().splitlines()[0])
    number = int(line["where"].rpartition(":")[2]) - 1
    row = LAYOUTS[layout](number)
    if "messages" not in row:
        return True
    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    asked = rendered(place, row["messages"][:-1], row.get("tools"), asks=True)
    return str(line["prompt"]) == tokenizer.decode(asked)


def fails(place: Path, layout: str, template: str) -> tuple[Counter[str], list[str]]:
    write_run(place, layout, template, rows=12)
    done: Counter[str] = Counter()
    wrong = []
    for stage, right in walk(place, layout, template):
        done[stage] += 1
        wrong += [] if right else [f"{layout} × {template}: {stage}"]
    return done, wrong


@pytest.mark.parametrize(
    ("layout", "template"), [("text", "none"), ("messages_tools", "named_files")], ids=["D1-text", "D2-named"]
)
def test_a_run_to_its_end(place: Path, layout: str, template: str) -> None:
    assert fails(place, layout, template)[1] == []


@pytest.mark.slow
def test_every_layout_with_every_template_through_every_stage(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: Counter[str] = Counter()
    wrong: list[str] = []
    for layout, template in CASES:
        own = place / f"{layout}-{template}"
        own.mkdir()
        monkeypatch.chdir(own)
        stages, failed = fails(own, layout, template)
        done += stages
        wrong += failed
    with capsys.disabled():
        print(f"\n{len(CASES)} runs, {sum(done.values())} stages, {len(wrong)} wrong:", dict(done))
    assert wrong == []
    assert sum(done.values()) == 6 * 3 + 26 * 8
