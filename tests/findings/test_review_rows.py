"""Findings of the review of 2026-11-25, "V1-1" for its S1.1: what is read, rendered, measured and said of rows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from surefit import nano
from surefit.core.errors import ConfigError, DataError, ModelError
from surefit.core.limited import ExceedsLimit, TrialNotRun, run_limited
from surefit.core.units import bytes_of
from surefit.data.read import columnar
from surefit.data.read.columnar import require_no_bomb
from surefit.data.read.load import load_rows
from surefit.data.read.sources import list_source_files, resolve_source
from surefit.data.rows.layouts import Examples, split_eval, to_examples
from surefit.data.rows.messages import parse_tool_calls, parse_tools
from surefit.data.rows.rendered_turns import unclosed_thoughts
from surefit.data.rows.special_tokens import build_special_tokens
from surefit.data.rows.template_checks import TURNS, check_template
from surefit.data.tokens import dataset
from surefit.data.tokens.dataset import build_dataset, drop_untokenizable, eval_key
from surefit.data.tokens.lengths import sample_lengths
from surefit.data.tokens.light_template import LightTemplate
from surefit.data.tokens.tokenize import encode_turns
from surefit.data.tokens.turns import count_rendered_turns, truncate_conversation
from surefit.facts.audit import AuditFacts, Observation
from surefit.facts.template import render_chat_template
from surefit.facts.tokenizer import TokenizerFacts, tokenizer_facts
from surefit.lint.rules.audit_rendering import parts_left_out, turns_left_out
from surefit.recipes import get_recipe
from surefit.stages.checking import run_check
from surefit.stages.run_context import load_run_context
from surefit.task import Example

from .conftest import write_rows

SFT = get_recipe("chat")
TURN = "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
HEAD = "{% for m in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
PLAIN = HEAD + TURN + TAIL
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
THINKS = PLAIN.replace("{{ m.content }}", THOUGHT + "{{ m.content }}")
ONLY_LAST = THINKS.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}")
DATED = PLAIN.replace("{{ m.content }}", "{{ date_string }} {{ m.content }}")
LONG = "so we add the numbers and then check the result once more. " * 20
Said = dict[str, dict[str, Any]]


def model(template: str) -> Path:
    """surefit/nano with another chat template, in the folder of the test."""
    folder = Path("model")
    folder.mkdir(exist_ok=True)
    for file in nano.PATH.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder


def config_of(train: str, name: str = "surefit/nano", **more: Any) -> Path:
    section = {"train": train, "eval": 0.1, "max_length": 1024, "packing": False, **more.pop("data", {})}
    content = {
        "model": {"name_or_path": name}, "recipe": "chat", "data": section, "output_dir": "run", **more,
    }  # fmt: skip
    Path("config.yaml").write_text(json.dumps(content))  # JSON is YAML
    return Path("config.yaml")


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """What `check` finds: code → finding."""

    def found(rows: list[dict[str, Any]], name: str = "surefit/nano", **more: Any) -> Said:
        write_rows(Path("rows.jsonl"), rows)
        report = run_check(load_run_context(config_of("rows.jsonl", name, **more)))
        return {finding["code"]: finding for finding in report["findings"]}

    return found


def asked(number: int, answer: str, **more: Any) -> list[dict[str, Any]]:
    question = {"role": "user", "content": f"What is {number} plus {number}?"}
    return [question, {"role": "assistant", "content": answer, **more}]


def conversations(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"messages": asked(n, str(2 * n), **more)} for n in range(count)]


SEVERAL = [
    {"messages": [*asked(n, "x", reasoning=LONG * (n % 2)), *asked(n, "y", reasoning_content=LONG)]} for n in range(30)
]


@pytest.mark.parametrize(
    ("template", "rows"),
    [
        pytest.param(THINKS, conversations(40, reasoning_content=LONG), id="V1-1 own name"),
        pytest.param(THINKS, conversations(40, reasoning=LONG), id="V1-1 other name"),
        pytest.param(THINKS, conversations(40, thinking=LONG), id="V1-1 third name"),
        pytest.param(ONLY_LAST, SEVERAL, id="V1-1 rewrites earlier turns"),
        pytest.param(DATED, conversations(40), id="V1-1 date"),
        pytest.param(PLAIN, [{"text": "word " * n} for n in range(1, 40)], id="V1-1 plain text"),
        pytest.param(PLAIN, [{"prompt": f"{n}?", "completion": "z" * n} for n in range(1, 40)], id="V1-1 two columns"),
    ],
)
def test_sampled_lengths_are_those_of_training(template: str, rows: list[dict[str, Any]]) -> None:
    folder = model(template)
    loaded = load_rows(str(write_rows(Path("rows.jsonl"), rows)))
    config = load_run_context(config_of("rows.jsonl", str(folder))).loaded.config
    sampled = sample_lengths(loaded, SFT, config, tokenizer_facts(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stats = build_dataset(to_examples(loaded, SFT), tokenizer, max_length=10**6, cache=Path("cache")).stats
    assert sampled is not None
    assert sampled.longest == stats.longest
    assert sampled.mean == pytest.approx(stats.tokens / stats.kept)


@pytest.mark.parametrize(
    "unread", ["x" * 5_000, ["x" * 5_000], {"y": "x" * 5_000}], ids=["V1-2", "V1-2 list", "V1-2 object"]
)
def test_the_largest_rows_are_those_with_most_to_read(unread: Any) -> None:
    rows = [
        {"prompt": f"{n}?", "completion": "word " * (400 if n == 41 else 5), "metadata": unread if n % 2 == 0 else "x"}
        for n in range(2_000)
    ]
    loaded = load_rows(str(write_rows(Path("rows.jsonl"), rows)))
    config = load_run_context(config_of("rows.jsonl")).loaded.config
    sampled = sample_lengths(loaded, SFT, config, tokenizer_facts(nano.PATH))
    assert sampled is not None
    assert sampled.longest > 1_024


# ---------------------------------------------------------------- calls, sizes


OUTER = {
    "V1-4 beside the function": {"function": {"name": "look"}, "arguments": {"city": "Hue"}},
    "V1-4 args": {"function": {"name": "look"}, "args": {"city": "Hue"}},
    "V1-4 as text": {"function": {"name": "look"}, "arguments": '{"city": "Hue"}'},
    "V1-4 empty inside": {"function": {"name": "look", "arguments": ""}, "input": {"city": "Hue"}},
    "V1-4 empty outside": {"function": {"name": "look", "arguments": {"city": "Hue"}}, "arguments": {}},
}


@pytest.mark.parametrize("call", OUTER.values(), ids=OUTER)
def test_arguments_beside_the_function_are_the_calls(call: dict[str, Any]) -> None:
    (read,) = parse_tool_calls([{"id": "c1", "type": "function", **call}], "tool_calls")
    assert read == {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"city": "Hue"}}}


@pytest.mark.parametrize(
    ("call", "code", "field"),
    [
        pytest.param(
            {"function": {"name": "look", "arguments": {"city": "Hue"}}, "arguments": {"city": "Ulm"}},
            "E4323", "tool_calls[0].arguments", id="V1-4 two places",
        ),
        pytest.param(
            {"function": {"name": "look", "input": {"city": "Hue"}}, "args": {"city": "Ulm"}},
            "E4323", "tool_calls[0].args", id="V1-4 two names",
        ),
        pytest.param(
            {"function": {"name": "look"}, "kwargs": {"city": "Hue"}},
            "E4324", "tool_calls[0].kwargs", id="V1-4 unknown name",
        ),
        pytest.param(
            {"function": {"name": "look"}, "arguments": ["Hue"]}, "E4063", "tool_calls[0].arguments", id="V1-4 list"
        ),
    ],
)  # fmt: skip
def test_arguments_that_are_not_clear_are_an_error(call: dict[str, Any], code: str, field: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_tool_calls([call], "tool_calls")
    assert (caught.value.code, caught.value.field) == (code, field)


def test_keys_beside_the_function_are_named(says: Callable[..., Said]) -> None:
    """V1-4."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "Hue"}}, "outcome": "rain"}
    rows = [{"messages": asked(n, "", tool_calls=[call])} for n in range(40)]
    assert "tool_calls[].outcome" in says(rows)["AUD046"]["message"]


def test_a_schema_beside_a_tools_name_is_the_tools() -> None:
    """V1-4: templates write the function, and nothing that stands beside it."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    beside = {"parameters": schema, "description": "Looks."}
    tools = parse_tools([{"type": "function", "function": {"name": "look"}, **beside}])
    assert tools == [{"type": "function", "function": {"name": "look", **beside}}]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        pytest.param("1,500GB", 1_500 * 10**9, id="V1-5 thousands"),
        pytest.param("1_500GB", 1_500 * 10**9, id="V1-5 underscore"),
        pytest.param("1,234.5 MB", 1_234_500_000, id="V1-5 thousands and decimals"),
        pytest.param("1.5TB", 1_500 * 10**9, id="V1-5 decimals"),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["1,5TB", "1.5.2GB", "1,50GB", "1500,000GB", "1.500,5GB", ",5GB", "GB"])
def test_what_is_no_size_is_an_error(text: str) -> None:
    """V1-5: 1,5TB was 15 TB."""
    with pytest.raises(ValueError, match=r"1\.5TB"):
        bytes_of(text)
    write_rows(Path("rows.jsonl"), conversations(40))
    with pytest.raises(ConfigError) as caught:
        load_run_context(config_of("rows.jsonl", hardware={"disk": text}))
    assert caught.value.field == "hardware.disk"


# ---------------------------------------------------------------- what is tried in a process of its own


def arrow_file(text: str, rows: int, batches: int, compression: str | None = None) -> Path:
    schema = pa.schema([("text", pa.string())])
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile("rows.arrow", "wb") as file, pa.ipc.new_stream(file, schema, options=options) as writer:
        for _ in range(batches):
            writer.write_batch(pa.record_batch([pa.array([text] * rows)], schema))
    return Path("rows.arrow")


def test_a_large_arrow_file_is_left_to_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """V2-1: its map alone took more than the process might."""
    path = arrow_file("word " * 2_000, 1_000, 30)
    monkeypatch.setattr(columnar, "MEMORY", path.stat().st_size // 2)  # as 3 GiB are to a file of 6 GiB
    assert require_no_bomb(str(path), path.stat().st_size) in (0, pytest.approx(path.stat().st_size, rel=0.1))
    assert len(load_rows(str(path))) == 30_000


def test_a_batch_that_takes_all_memory_says_nothing_of_a_large_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """V2-1."""
    path = Path("rows.arrow")
    path.write_bytes(b"0" * 4_000_000)

    def exceeds(*arguments: Any, **more: Any) -> Any:
        raise ExceedsLimit("took more than 2 s")

    monkeypatch.setattr(columnar, "run_limited", exceeds)
    assert require_no_bomb(str(path), 4_000_000) == 0
    with pytest.raises(DataError) as caught:
        require_no_bomb(str(path), 3_000_000)
    assert caught.value.code == "E4653"


def test_a_small_arrow_file_of_many_rows_is_an_error() -> None:
    """V2-1: as before."""
    path = arrow_file("word " * 2_000, 2_000, 60, "zstd")
    assert path.stat().st_size < 2_000_000
    with pytest.raises(DataError) as caught:
        load_rows(str(path))
    assert caught.value.code in ("E4653", "E4654")


WIDE = PLAIN.replace("m.content", "m.content | wordwrap(60)")


def test_a_process_that_cannot_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """V2-2: Python's library was not found, and the template was at fault."""
    wrapper = Path("python").absolute()
    wrapper.write_text("#!/bin/sh\necho 'error while loading shared libraries: libpython3.12.so' >&2\nexit 127\n")
    wrapper.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(wrapper))
    with pytest.raises(TrialNotRun, match="libpython"):
        run_limited("math:factorial", 5)
    assert render_chat_template(WIDE + "{# one #}", asked(1, "2")).startswith("<|user|>")
    monkeypatch.setattr("sys.executable", str(wrapper) + "-gone")
    assert render_chat_template(WIDE + "{# two #}", asked(1, "2")).startswith("<|user|>")


def test_the_process_gets_the_environment_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """V2-2."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/python/lib")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert run_limited("os:getenv", "LD_LIBRARY_PATH") == "/opt/python/lib"
    assert run_limited("os:getenv", "HF_TOKEN") is None
    assert run_limited("os:getenv", "WANDB_API_KEY") is None


def test_a_limit_that_is_set_already_is_kept() -> None:
    """V2-2: `ulimit -v`, as schedulers set it, cannot be raised."""
    code = "from surefit.core.limited import run_limited; print(run_limited('math:factorial', 5))"
    command = f'ulimit -v 2500000; exec {sys.executable} -c "{code}"'
    ended = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "120", ended.stderr


def test_a_damaged_expression_of_a_tokenizer_is_an_error_of_the_model() -> None:
    """V2-3: it was an error that SureFit did not expect."""
    folder = model(PLAIN)
    content = (folder / "tokenizer.json").read_text()
    damaged = '"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a\\q+"}, "behavior": "Isolated"}, "normalizer"'
    (folder / "tokenizer.json").write_text(content.replace('"normalizer"', damaged, 1))
    with pytest.raises(ModelError) as caught:
        tokenizer_facts(folder)
    assert caught.value.code == "E2650"
    assert caught.value.path == str(folder / "tokenizer.json")


# ---------------------------------------------------------------- what is rendered and looked at

TOKENS = build_special_tokens(
    ["<s>", "</s>"], bos="<s>", eos="</s>", end_of_turn="</s>", padding=None, asked=("<s>?", "<s>?<a>"),
    templated=True, adds=False,
)  # fmt: skip
MANY = 20_000
SLOW = {
    "V2-4 line breaks": "Answer." + "\n" * MANY + "end",
    "V2-4 line breaks behind a thought": "<think>" + "\n" * MANY + "end",
    "V2-4 turns without an end": "hello " + "[INST] hi there\n" * MANY,
    "V2-4 foreign turns": "hello " + "<|im_start|>user\n hi there\n" * MANY,
    "V2-4 foreign turns of another kind": "hello " + "<|user|>\n hi" * MANY,
    "V2-4 tokens": "<|im_start|>" * MANY,
}


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_long_text_is_looked_at_in_time(text: str, role: str) -> None:
    """Each took seconds to minutes: the time grew with the square of the text."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    turns[role == "assistant"]["content"] = text
    example = Example(tuple(turns))
    start = time.process_time()
    list(TOKENS.sights(example))
    list(unclosed_thoughts(example))
    LightTemplate(TokenizerFacts(chat_template=PLAIN), {}).segments(example)
    assert time.process_time() - start < 1


LOOKS: dict[str, tuple[str, bool]] = {
    "V2-4 a prompt's head": ("[INST] What is 1+1?", True),
    "V2-4 a quoted head": ("Llama writes [INST] before a question.", False),
    "V2-4 an own head behind": ("Say: </s><|im_start|>user\n", False),
}


@pytest.mark.parametrize(("text", "rendered"), LOOKS.values(), ids=LOOKS)
def test_heads_of_turns(text: str, rendered: bool) -> None:
    example = Example(({"role": "user", "content": text}, {"role": "assistant", "content": "2"}))
    assert ("rendered_already" in dict(TOKENS.sights(example))) is rendered


@pytest.mark.parametrize("turns", [600, 1_200], ids=lambda turns: f"V2-5 {turns} turns")
def test_the_beginning_of_a_long_conversation_is_rendered(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    system = {"role": "system", "content": "Be brief in all that you say."}
    long = [turn for n in range(turns // 2) for turn in asked(n, f"{n} it is")]
    rows = [{"messages": [system, *long]}] + [{"messages": [system, *asked(n, str(n))]} for n in range(39)]
    examples = to_examples(load_rows(str(write_rows(Path("rows.jsonl"), rows))), SFT)
    counted: list[int] = []
    segments = LightTemplate.segments

    def counting(template: LightTemplate, example: Example) -> Any:
        counted.append(count_rendered_turns(example))
        return segments(template, example)

    monkeypatch.setattr(LightTemplate, "segments", counting)
    folder = model(DROPS)
    config = load_run_context(config_of("rows.jsonl", str(folder))).loaded.config
    looked = check_template(examples, tokenizer_facts(folder), config)
    assert looked.observations["turn_left_out"].rows == 40  # the long one among them
    assert sum(counted) < 2 * TURNS


def test_the_beginning_of_a_conversation() -> None:
    """V2-5: it ends with an answer, and has at least one."""
    example = Example(tuple(turn for n in range(50) for turn in asked(n, str(n))))
    assert count_rendered_turns(example) == sum(2 * n + 1 + 2 * n + 2 for n in range(50))
    for limit in (0, 3, 60, 1_000):
        shown = truncate_conversation(example, limit)
        assert shown.messages[-1]["role"] == "assistant"
        assert count_rendered_turns(shown) <= max(limit, 3)
    assert truncate_conversation(example, 10**6) is example
    unlearnt = Example(tuple({**turn, "weight": 0} for turn in example.messages))
    assert truncate_conversation(unlearnt, 3) is unlearnt  # nothing in it is cut


SWITCHES = (
    "{% set sys = messages[0].content if messages[0].role == 'system' else '' %}<|system|>\n"
    "Mode: {{ '/no_think' if '/no_think' in sys else '/think' }}\n"
    "{{ sys.replace('/no_think', '').replace('/think', '').rstrip() }}<|end|>\n"
) + PLAIN.replace(HEAD, "{% for m in messages if m.role != 'system' %}")
ESCAPES = PLAIN.replace("{{ m.content }}", "{{ m.content | e }}")
CALLS = PLAIN.replace(
    "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson | tojson }}{% endif %}"
)
QUOTED = 'He said: "it\'s <fine> & well" \\ and\nleft for é'


def with_system(text: str) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "system", "content": text}, *asked(n, str(2 * n))]} for n in range(100)]


def called(value: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "look", "arguments": {"words": value}}}
    return [{"messages": asked(n, "", tool_calls=[call])} for n in range(40)]


WRITTEN = {
    "V2-8 switch behind": (SWITCHES, with_system("You answer in one word. /no_think")),
    "V2-8 switch before": (SWITCHES, with_system("/think You answer in one word.")),
    "V2-8 switch inside": (SWITCHES, with_system("You answer /no_think in one word.\nNo more.")),
    "V2-8 switch alone": (SWITCHES, with_system("/no_think")),
    "V2-8 escaped": (ESCAPES, [{"messages": asked(n, QUOTED)} for n in range(40)]),
    "V2-8 JSON in JSON": (CALLS, called(QUOTED)),
}


@pytest.mark.parametrize(("template", "rows"), WRITTEN.values(), ids=WRITTEN)
def test_nothing_is_left_out(says: Callable[..., Said], template: str, rows: list[dict[str, Any]]) -> None:
    assert not {"AUD040", "AUD041"} & set(says(rows, str(model(template))))


CUTS = SWITCHES.replace(".rstrip()", ".replace('Be kind.', '')")
DROPS = PLAIN.replace(HEAD, "{% for m in messages if m.role != 'system' %}")
LOST_TEXTS = {
    "V2-8 a part": (CUTS, with_system("You answer in one word, always. Be kind. /no_think"), "AUD041"),
    "V2-8 all of it": (DROPS, with_system("You answer in one word. /no_think"), "AUD040"),
    "V2-8 all of it, its words elsewhere": (DROPS, with_system("Hear this: What is 1 plus 1?"), "AUD040"),
}


@pytest.mark.parametrize(("template", "rows", "code"), LOST_TEXTS.values(), ids=LOST_TEXTS)
def test_what_is_left_out_is_said(
    says: Callable[..., Said], template: str, rows: list[dict[str, Any]], code: str
) -> None:
    assert {"AUD040", "AUD041"} & set(says(rows, str(model(template)))) == {code}


@pytest.mark.parametrize(("rows", "code"), [(1, "AUD041"), (9, "AUD041"), (10, "AUD040")])
def test_few_rows_are_a_warning(rows: int, code: str) -> None:
    """V2-8: training does not stop at one row of a thousand."""
    audit = AuditFacts("rows.jsonl", 1_000, 1_000, {"turn_left_out": Observation(rows, 1_000, ("x",))})
    found = [rule.code for rule in (turns_left_out, parts_left_out) if list(rule.check(audit))]
    assert found == [code]


TEXTS = [f"Once upon a time number {n} there was a small town by the sea, and it rained." for n in range(40)]


def test_the_token_for_the_end_of_a_text_may_stand_there(says: Callable[..., Said]) -> None:
    """V2-9: it was taken for a conversation, and nothing is wrong: the token is there once either way."""
    assert not {"AUD043", "AUD044", "AUD045"} & set(says([{"text": text + "<|end|>"} for text in TEXTS]))
    tokenizer = AutoTokenizer.from_pretrained(nano.PATH)
    assert tokenizer.eos_token == "<|end|>"
    bare, ended = encode_turns(tokenizer, [Example(text=TEXTS[0]), Example(text=TEXTS[0] + "<|end|>")])
    assert bare == ended


@pytest.mark.parametrize(
    ("text", "adds", "names"),
    [
        pytest.param("<s>Once</s>", True, ["begun_twice"], id="V2-9 twice"),
        pytest.param("<s>Once</s>", False, [], id="V2-9 as AUD049 advises"),
        pytest.param("<s>Once", None, [], id="V2-9 not known"),
        pytest.param("Once</s>", True, [], id="V2-9 end"),
        pytest.param("Once</s> and twice", True, ["special_tokens"], id="V2-9 end inside"),
        pytest.param("<s>[INST] q [/INST] a</s>", False, ["rendered_text"], id="V2-9 Mistral's"),
    ],
)
def test_tokens_around_plain_text(text: str, adds: bool | None, names: list[str]) -> None:
    tokens = build_special_tokens(
        ["<s>", "</s>", "[INST]", "[/INST]"], bos="<s>", eos="</s>", end_of_turn=None, padding=None, asked=None,
        templated=True, adds=adds,
    )  # fmt: skip
    assert list(dict(tokens.sights(Example(text=text)))) == names


@pytest.mark.parametrize(("template", "name"), [("<s>", "rendered_already"), ("", "special_tokens")])
def test_bos_before_a_turn_is_twice_where_the_template_writes_it(template: str, name: str) -> None:
    """V3-5: the docstring said so, and nobody asked."""
    tokens = build_special_tokens(
        ["<s>", "</s>"], bos="<s>", eos="</s>", end_of_turn="</s>", padding=None,
        asked=(f"{template}?", f"{template}?<a>"), templated=True, adds=None,
    )  # fmt: skip
    example = Example(({"role": "user", "content": "<s>What?"}, {"role": "assistant", "content": "2"}))
    assert name in dict(tokens.sights(example))


# ---------------------------------------------------------------- rows that the template does not take

STRICT = PLAIN.replace(HEAD, HEAD + "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}")


def mixed_rows(count: int) -> Examples:
    """Every 100th row begins with a system message."""
    rows = [
        {"messages": [*([{"role": "system", "content": "Be brief."}] if n % 100 == 7 else []), *asked(n, str(2 * n))]}
        for n in range(count)
    ]
    return to_examples(load_rows(str(write_rows(Path("rows.jsonl"), rows))), SFT)


def test_rows_are_skipped_while_they_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """V2-6: everything was tokenised twice, and the second start took as long as the first."""
    examples, tokenizer = mixed_rows(600), AutoTokenizer.from_pretrained(model(STRICT))
    calls: list[int] = []

    def counting(tokenizer: Any, batch: Any) -> Any:
        calls.append(len(batch))
        return encode_turns(tokenizer, batch)

    monkeypatch.setattr(dataset, "encode_turns", counting)
    settings: dict[str, Any] = {"max_length": 1024, "bad_rows": "skip", "cache": Path("cache")}
    first = build_dataset(examples, tokenizer, **settings)
    assert sum(calls) == 600 + 2 * (256 - 3)  # two batches have such rows, and are made again without them
    calls.clear()
    again = build_dataset(examples, tokenizer, **settings)
    assert not calls
    for made in (first, again):
        assert list(made.refused) == [7, 107, 207, 307, 407, 507]
        assert (made.stats.rows, made.stats.kept, made.stats.skipped, len(made)) == (600, 594, 6, 594)
    kept = examples.without(again.refused)
    assert len(kept) == 594
    assert [line.partition(": ")[0] for line in kept.skipped] == [examples.where[n] for n in first.refused]
    # The same tokens as without those rows, and an error of all of them where they are not to be skipped.
    alone = build_dataset(kept, tokenizer, max_length=1024, cache=Path("other"))
    assert [ids.tolist() for ids, _ in alone] == [ids.tolist() for ids, _ in first]
    with pytest.raises(DataError) as caught:
        build_dataset(examples, tokenizer, max_length=1024, source="data.eval", cache=Path("cache"))
    assert (caught.value.code, caught.value.path) == ("E4022", "data.eval")


def test_all_rows_refused_is_an_error() -> None:
    """V2-6, V2-12."""
    examples, tokenizer = mixed_rows(600), AutoTokenizer.from_pretrained(model(STRICT))
    refused = examples.subset([n for n in range(600) if n % 100 == 7])
    with pytest.raises(DataError) as caught:
        build_dataset(refused, tokenizer, max_length=1024, bad_rows="skip", source="data.eval", cache=Path("cache"))
    assert (caught.value.code, caught.value.path) == ("E4022", "data.eval")
    with pytest.raises(DataError) as caught:
        drop_untokenizable(refused, tokenizer, "skip", "evaluate.extra_sets.old")
    assert (caught.value.code, caught.value.path) == ("E4022", "evaluate.extra_sets.old")


def test_a_held_out_row_is_reported_under_its_own_key() -> None:
    """V2-12: the rows of data.eval were called data.train's."""
    write_rows(Path("rows.jsonl"), conversations(40))
    for name, key in ((0.1, "data.train"), ("rows.jsonl", "data.eval")):
        config = load_run_context(config_of("rows.jsonl", data={"eval": name})).loaded.config
        assert eval_key(config.data) == key


# ---------------------------------------------------------------- names of files


@pytest.mark.parametrize(
    "names",
    [
        ("personal_development.jsonl", "training_tips.jsonl"),
        ("model_evaluation.jsonl", "strength_training.jsonl"),
        ("train_schedules.jsonl", "web_dev.jsonl"),
        ("a.jsonl", "child_development.jsonl"),
        ("alpaca.jsonl", "eval_awareness.jsonl"),
        ("business_development.jsonl", "employee-training.jsonl", "part.jsonl"),
        ("chat.jsonl", "unit_test.jsonl"),
        ("developer.jsonl", "training.jsonl"),
    ],
    ids=lambda names: f"V2-7 {names[-1]}",
)
def test_topics_are_no_splits(names: tuple[str, ...]) -> None:
    Path("rows").mkdir()
    for name in names:
        write_rows(Path("rows", name), [{"prompt": "a", "completion": "b"}])
    assert [Path(file).name for file in list_source_files(resolve_source("rows"))] == sorted(names)


@pytest.mark.parametrize(
    "names",
    [
        ("web_dev.jsonl", "web_train.jsonl"),
        ("unit.jsonl", "unit_test.jsonl"),
        ("alpaca.jsonl", "alpaca_development.jsonl"),
        ("rows.jsonl", "evaluation.jsonl"),
        ("rows.jsonl", "development-00000-of-00002.jsonl"),
        ("test.jsonl", "validation.jsonl"),
        ("my_training.jsonl", "my_validation.jsonl"),
        ("alpaca_train.jsonl", "dolly_test.jsonl"),
    ],
    ids=lambda names: f"V2-7-split {names[-1]}",
)
def test_splits_of_the_same_rows_are_told(names: tuple[str, ...]) -> None:
    Path("rows").mkdir()
    for name in names:
        write_rows(Path("rows", name), [{"prompt": name, "completion": "b"}])
    with pytest.raises(DataError) as caught:
        list_source_files(resolve_source("rows"))
    assert caught.value.code == "E4125"
    first, second = (f"rows/{name}" for name in sorted(names))
    # The advice, followed: both are trained on.
    found = load_run_context(config_of(first, data={"mix": {second: 1.0}, "eval": 0.5}))
    assert found.rows is not None
    assert [str(path) for rows in (found.rows, *found.mixed.values()) for path in rows.files] == [first, second]


# ---------------------------------------------------------------- one prompt


@pytest.mark.parametrize("count", [1, 2, 12, 19, 20, 40])
def test_rows_of_one_prompt_stop_check_as_they_stop_training(says: Callable[..., Said], count: int) -> None:
    """V2-11: fewer than 20 passed `check`."""
    rows = [{"prompt": "Write a tweet.", "completion": f"Tweet {n}."} for n in range(count)]
    found = says(rows, data={"eval": 0.5})
    errors = [finding for finding in found.values() if finding["severity"] == "error"]
    assert [finding["field"] for finding in errors] == ["data.eval"]
    examples = to_examples(load_rows("rows.jsonl"), SFT)
    with pytest.raises(DataError) as caught:
        split_eval(examples, 0.5, 1)
    assert caught.value.code == "E4351"
    assert "all 1 " not in caught.value.message
