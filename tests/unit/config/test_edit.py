"""Editing a config changes what was asked for and no other character."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefit.config.edit import edit_text, write_edited
from surefit.config.load import load_config, parse_yaml, read_config_text
from surefit.core.errors import MachineError

PATH = Path("run.yaml")
TEXT = """\
# What this run is for
recipe: chat   # general
model:
    name_or_path: "surefit/nano"   # quoted, indented by four

data: {train: 'a.jsonl',eval: 0.5,  max_length: 256}   # spaces as they are
train:
    method: full
    warmup_steps:    100        # too long
    # about the batch
    global_batch_size: 8

    num_train_epochs: 2.0e+0
lora:
  target_modules:
  - q_proj
  -   v_proj
  # behind the list
  lora_alpha: 3.0
lint:
  ignore:
    SCH001: |
      two
      lines
output_dir: runs/x"""


@pytest.mark.parametrize(
    ("key", "value", "old", "new"),
    [
        ("train.warmup_steps", 0.03, "warmup_steps:    100        # too", "warmup_steps:    0.03        # too"),
        ("data.eval", "held out.jsonl", "eval: 0.5,  max", "eval: held out.jsonl,  max"),
        ("data.max_length", None, "0.5,  max_length: 256}", "0.5}"),
        ("data.train", None, "{train: 'a.jsonl',eval", "{eval"),
        ("train.global_batch_size", None, "    global_batch_size: 8\n", ""),
        ("lora.target_modules", None, "  target_modules:\n  - q_proj\n  -   v_proj\n", ""),
        ("lora.target_modules", "all-linear", "- q_proj\n  -   v_proj\n  # behind the list\n  ", None),
        ("lint.ignore.SCH001", None, "lint:\n  ignore:\n    SCH001: |\n      two\n      lines\n", ""),
        ("output_dir", "runs/yes", "output_dir: runs/x", "output_dir: runs/yes"),
        ("train.seed", 7, "    num_train_epochs: 2.0e+0\n", "    num_train_epochs: 2.0e+0\n    seed: 7\n"),
        ("data.split", "on", "max_length: 256}", "max_length: 256, split: 'on'}"),
        ("hardware.gpu", "cpu", "output_dir: runs/x", "output_dir: runs/x\nhardware: {gpu: cpu}\n"),
        ("train.nothing", None, "", ""),
    ],
)
def test_one_change(key: str, value: Any, old: str, new: str | None) -> None:
    edited = edit_text(TEXT, {key: value}, PATH)
    if new is None:
        assert edited.text == TEXT
        assert "by hand" in edited.refused[key]
    else:
        assert TEXT.count(old) == 1 or not old
        assert edited.text == (TEXT.replace(old, new) if old else TEXT)
        assert edited.done == [key]


def test_changes_follow_one_another_and_keep_the_line_ends() -> None:
    text = TEXT.replace("\n", "\r\n")
    edited = edit_text(text, {"train.warmup_steps": 0.03, "train.seed": 7, "lora.lora_alpha": None}, PATH)
    assert edited.refused == {}
    assert edited.text.count("\n") == edited.text.count("\r\n") == text.count("\r\n")
    assert "    seed: 7\r\n" in edited.text


SHARED = """\
model: {name_or_path: surefit/nano}
data: {train: a.jsonl, max_length: &n 256}
train: &t
  global_batch_size: 8
  seed:
evaluate: {max_new_tokens: *n}
checkpoint: {save_steps: *n}
output_dir: runs/x
"""


@pytest.mark.parametrize("key", ["data.max_length", "evaluate.max_new_tokens"])
def test_a_value_that_an_anchor_shares_is_not_changed(key: str) -> None:
    edited = edit_text(SHARED, {key: 512}, PATH)
    assert edited.text == SHARED
    assert "by hand" in edited.refused[key]


def test_a_use_of_an_anchor_can_be_taken_out_and_an_anchor_that_nobody_uses_stays() -> None:
    edited = edit_text(SHARED, {"checkpoint.save_steps": None, "train.global_batch_size": 4, "train.seed": 3}, PATH)
    assert edited.refused == {}
    assert "checkpoint" not in edited.text
    assert "train: &t\n  global_batch_size: 4\n  seed: 3\n" in edited.text


def test_the_file_keeps_its_mark_its_mode_and_its_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    os.chmod(real, 0o640)
    link.symlink_to(real)
    write_edited(link, edit_text(read_config_text(link), {"train.warmup_steps": 0.5}, link).text)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert real.read_bytes() == b"\xef\xbb\xbf" + TEXT.replace("100 ", "0.5 ").encode()
    assert load_config(link).config.train.warmup_steps == 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.yaml", "real.yaml"]


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(MachineError, match="cannot write") as caught:
        write_edited(path, "other")
    assert "nothing was changed" in (caught.value.help or "")
    assert path.read_text() == TEXT


KEYS = [
    "train.warmup_steps",
    "data.eval",
    "lora.r",
    "model.dtype",
    "lint.ignore.SCH001",
    "checkpoint.save_steps",
    "x.y.z",
]
SECTIONS = st.dictionaries(
    st.sampled_from(["train", "data", "adapter", "lint"]),
    st.dictionaries(
        st.sampled_from(["warmup", "eval", "r", "alpha"]), st.integers() | st.text("a #:,{}'\n", max_size=4)
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(
    SECTIONS, st.booleans(), st.dictionaries(st.sampled_from(KEYS), st.none() | st.integers(0, 9) | st.text(max_size=3))
)
def test_whatever_is_changed_only_that_is_changed(tree: dict[str, Any], flow: bool, changes: dict[str, Any]) -> None:
    import yaml

    text = yaml.safe_dump({"output_dir": "x", **tree}, default_flow_style=flow, allow_unicode=True)
    before, _ = parse_yaml(text, PATH)
    edited = edit_text(text, changes, PATH)
    after, _ = parse_yaml(edited.text, PATH)
    touched = {key.partition(".")[0] for key in edited.done}
    assert {k: v for k, v in after.items() if k not in touched} == {k: v for k, v in before.items() if k not in touched}
    assert set(edited.done) | set(edited.refused) == set(changes)
    assert edited.done or edited.text == text
