"""The template rules through real model folders: nothing here is stated, everything is read from files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefit import nano
from surefit.lint.engine import run_rules

TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


@pytest.fixture
def codes(gather, tmp_path: Path) -> Callable[..., set[str]]:
    """codes(change, **row) → the codes found for a copy of surefit/nano that `change` has edited."""

    def look(change: Callable[[Path], None] = lambda folder: None, max_length: int = 512, **row: Any) -> set[str]:
        folder = tmp_path / "model"
        shutil.copytree(nano.PATH, folder)
        change(folder)
        rows = [
            {"messages": [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": str(2 * n)}]}
            | row
            for n in range(120)
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
        config = tmp_path / "run.yaml"
        config.write_text(
            f"model: {{name_or_path: model}}\ndata: {{train: rows.jsonl, eval: 0.2, max_length: {max_length}}}\n"
            "train: {global_batch_size: 2, num_train_epochs: 2}\noutput_dir: runs/x\n"
        )
        return {finding.code for finding in run_rules(gather(config)).findings}

    return look


def edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_the_model_as_it_is_passes(codes) -> None:
    assert codes(tools=[TOOL]) == set()


def test_a_template_without_tools(codes) -> None:
    def change(folder: Path) -> None:
        text = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        (folder / "chat_template.jinja").write_text(text)

    assert codes(change, tools=[TOOL]) == {"TPL005"}


def test_a_template_that_ends_no_turn(codes) -> None:
    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        )

    assert codes(change) == {"TPL002"}


def test_a_padding_token_behind_the_embedding(codes) -> None:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content["added_tokens"].append({**content["added_tokens"][0], "id": 1536, "content": "[PAD]"})
        path.write_text(json.dumps(content), encoding="utf-8")
        edit(folder, "tokenizer_config.json", pad_token="[PAD]")

    assert codes(change) == {"TPL006"}


def test_rows_over_the_limit(codes) -> None:
    turns = [{"role": "user", "content": "seven and eight are how many"}, {"role": "assistant", "content": "fifteen"}]
    assert {"LAB010"} <= codes(max_length=8, messages=turns)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("packing: true\npacking_strategy: wrapped\nattn_implementation: flash_attention_2", "PCK002"),
        ("packing: true\npacking_strategy: bfd\nattn_implementation: sdpa", "PCK001"),
        ("completion_only_loss: true\ntruncation_mode: keep_start\nmax_length: 1024", "LAB004"),
    ],
)
def test_what_a_config_of_trl_says_reaches_the_rules(lines: str, code: str, gather, tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(f"model_name_or_path: surefit/nano\ndataset_name: some/rows\n{lines}\noutput_dir: out\n")
    found = [finding for finding in run_rules(gather(path)).findings if finding.code == code]
    assert len(found) == 1
    assert found[0].line in (3, 4, 5)
