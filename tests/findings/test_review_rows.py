"""Findings of the review of 2026-11-25, "V1-1" for its S1.1: what is read, rendered, measured and said of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from surefit import nano
from surefit.core.errors import ConfigError, DataError, ModelError
from surefit.core.limited import ExceedsLimit, NotTried, run_limited
from surefit.core.units import bytes_of
from surefit.data import columnar
from surefit.data.columnar import require_no_bomb
from surefit.data.dataset import build_dataset
from surefit.data.formats import to_examples
from surefit.data.lengths import sampled_lengths
from surefit.data.load import load_rows
from surefit.data.messages import tool_calls, tool_list
from surefit.facts.template import render
from surefit.facts.tokenizer import tokenizer_facts
from surefit.recipes import get
from surefit.stages.checking import checked
from surefit.stages.prepare import gather

from .conftest import write_rows

SFT = get("sft")
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


def model(template: str, **tokens: str) -> Path:
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
        "model": {"name_or_path": name}, "recipe": "sft", "data": section, "output_dir": "run", **more,
    }  # fmt: skip
    Path("config.yaml").write_text(json.dumps(content))  # JSON is YAML
    return Path("config.yaml")


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """What `check` finds: code → finding."""

    def found(rows: list[dict[str, Any]], name: str = "surefit/nano", **more: Any) -> Said:
        write_rows(Path("rows.jsonl"), rows)
        report = checked(gather(config_of("rows.jsonl", name, **more)))
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
    config = gather(config_of("rows.jsonl", str(folder))).loaded.config
    sampled = sampled_lengths(loaded, SFT, config, tokenizer_facts(folder))
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
    config = gather(config_of("rows.jsonl")).loaded.config
    sampled = sampled_lengths(loaded, SFT, config, tokenizer_facts(nano.PATH))
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
    (read,) = tool_calls([{"id": "c1", "type": "function", **call}], "tool_calls")
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
        tool_calls([call], "tool_calls")
    assert (caught.value.code, caught.value.field) == (code, field)


def test_keys_beside_the_function_are_named(says: Callable[..., Said]) -> None:
    """V1-4."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "Hue"}}, "outcome": "rain"}
    rows = [{"messages": asked(n, "", tool_calls=[call])} for n in range(40)]
    assert "tool_calls[].outcome" in says(rows)["AUD046"]["message"]


def test_a_schema_beside_a_tools_name_is_the_tools() -> None:
    """V1-4: templates write the function, and nothing that stands beside it."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = tool_list(
        [{"type": "function", "function": {"name": "look"}, "parameters": schema, "description": "Looks."}]
    )
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
        gather(config_of("rows.jsonl", hardware={"disk": text}))
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
        raise ExceedsLimit("takes more than 2 s")

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
    with pytest.raises(NotTried, match="libpython"):
        run_limited("math:factorial", 5)
    assert render(WIDE + "{# one #}", asked(1, "2")).startswith("<|user|>")
    monkeypatch.setattr("sys.executable", str(wrapper) + "-gone")
    assert render(WIDE + "{# two #}", asked(1, "2")).startswith("<|user|>")


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
