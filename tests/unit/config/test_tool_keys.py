"""Keys of other tools in a SureFit config: the error says how each is written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from surefit.config.load import _section_at, load_text
from surefit.config.tool_keys import _table, describe_tool_key
from surefit.core.errors import ConfigError
from surefit.importers.configs import load_tool_schema

ROOT = Path(__file__).parents[3]
VALID = "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: t.jsonl}\noutput_dir: runs/x\n"


def messages(text: str) -> dict[str | None, str]:
    with pytest.raises(ConfigError) as raised:
        load_text(text, Path("run.yaml"))
    problems = [raised.value, *raised.value.also]
    assert {problem.code for problem in problems} == {"E2018"}
    return {problem.field: problem.message for problem in problems}


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("load_in_4bit: true", "model.quantization: nf4"),
        ("bf16: true", "model.dtype: bfloat16"),
        ("lora_r: 8", "lora.r"),
        ("num_epochs: 3", "train.num_train_epochs"),
        ("gradient_accumulation_steps: 4", "train.global_batch_size"),
        ("cutoff_len: 2048", "data.max_length"),
        ("sample_packing: true", "data.packing"),
        ("disable_gradient_checkpointing: true", "train.gradient_checkpointing: false"),
        ("optimizer: paged_adamw", "train.optim: paged_adamw_32bit"),
        ("quantization_bit: 4", "model.quantization: nf4"),
        ("learning_rate: 1e-4", "train"),
        ("lr: 1e-4", "train.learning_rate"),
    ],
)
@pytest.mark.parametrize("section", ["", "telemetry"])
def test_load_text_names_the_key_here(line: str, written: str, section: str) -> None:
    """A key of another tool, at the top level and in a section, is an error that names SureFit's key and value."""
    text = VALID + (f"{section}: {{{line}}}\n" if section else f"{line}\n")
    key = line.partition(":")[0]
    assert written in messages(text)[f"{section}.{key}" if section else key]


def test_load_text_keeps_the_other_hints() -> None:
    """A key of another section and a misspelled key keep their hints; a key without an equivalent gets the reason."""
    found = messages(VALID + "train: {lora_alpha: 3, max_step: 4}\nadam_beta1: 0.9\n")
    assert "'lora'" in found["train.lora_alpha"]
    assert "'max_steps'" in found["train.max_step"]
    assert "adam_beta1 of transformers" in found["adam_beta1"]


@pytest.mark.parametrize("tool", ["trl", "axolotl", "llamafactory"])
def test_describe_tool_key_has_every_key(tool: str) -> None:
    schema = load_tool_schema(tool)
    keys = {key for key in (*schema.keys, *schema.known, *schema.gone, *schema.deprecated) if "." not in key}
    assert not {key for key in keys if not describe_tool_key(key, None)[1]}


def test_targets_are_keys_of_the_schema() -> None:
    targets = {describe_tool_key(name, None)[0] for name in _table()[1]} - {"", "output_dir", "recipe"}
    for target in targets:
        section, _, key = target.partition(".")
        fields = _section_at(section)
        assert fields is not None, target
        assert key in fields.model_fields, target


def test_table_is_read_at_an_unknown_key_only() -> None:
    _table.cache_clear()
    load_text(VALID, Path("run.yaml"))
    assert _table.cache_info().currsize == 0
    messages(VALID + "num_epochs: 3\n")
    assert _table.cache_info().currsize == 1


def test_table_is_that_of_the_importers() -> None:
    """scripts/keys_here.py would write the same file."""
    spec = importlib.util.spec_from_file_location("keys_here", ROOT / "scripts/keys_here.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = json.loads(script.text())
    assert (written["reasons"], written["keys"]) == _table()
