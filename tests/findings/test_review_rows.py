"""Findings of the review of 2026-11-25, "V1-1" for its S1.1: what is read, rendered, measured and said of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from surefit import nano
from surefit.data.dataset import build_dataset
from surefit.data.formats import to_examples
from surefit.data.lengths import sampled_lengths
from surefit.data.load import load_rows
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


@pytest.mark.parametrize("unread", ["x" * 5_000, ["x" * 5_000], {"y": "x" * 5_000}], ids=["V1-2", "V1-2 list", "V1-2 object"])
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
