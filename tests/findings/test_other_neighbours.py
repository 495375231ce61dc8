"""Neighbours of findings about splits, adapters and samples, as an independent test tried them."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tests.cli.conftest import call as surefit
from tests.findings.conftest import write_rows
from transformers import AutoModelForCausalLM

from surefit import nano
from surefit.config.schema import LoraSection, ModelSection
from surefit.core.errors import ConfigError, DataError
from surefit.data.read.sources import list_source_files, resolve_source
from surefit.data.rows import template_checks
from surefit.model.adapter import add_adapter, load_initial_adapter
from surefit.model.load import load_model

ROW: dict[str, object] = {"prompt": "a", "completion": "b"}


def write_all(names: tuple[str, ...]) -> None:
    for name in names:
        path = Path("rows", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, [ROW])


@pytest.mark.parametrize(
    "names",
    [
        ("rows.jsonl", "test.jsonl"),
        ("data.jsonl", "eval.jsonl"),
        ("rows.jsonl", "valid.jsonl"),
        ("rows.jsonl", "dev.jsonl"),
        ("gsm8k.jsonl", "gsm8k_test_1k.jsonl"),
        ("train.jsonl", "validate.jsonl"),
        ("alpaca_cleaned.jsonl", "alpaca_holdout.jsonl"),
        ("alpaca_cleaned.jsonl", "alpaca_held_out.jsonl"),
        ("dolly.jsonl", "alpaca.jsonl", "hold-out.jsonl"),
        ("rows-00000-of-00001.jsonl", "TEST-00000-of-00001.jsonl"),
        ("math.jsonl", "squadTest.jsonl"),
        ("math.jsonl", "testset_v2.jsonl"),
        ("math.jsonl", "test_gsm8k.jsonl"),
        ("math.jsonl", "squad_validation_en.jsonl"),
    ],
    ids=lambda names: f"N1-9-{names[-1]}",
)
def test_a_file_named_for_a_split_beside_others_is_not_read(names: tuple[str, ...]) -> None:
    write_all(names)
    for source in ("rows", "rows/*.jsonl"):
        with pytest.raises(DataError) as raised:
            list_source_files(resolve_source(source))
        assert raised.value.code == "E4125"
        assert names[-1] in raised.value.message


@pytest.mark.parametrize(
    "names",
    [
        ("contest.jsonl", "rows.jsonl"),
        ("latest.jsonl", "rows.jsonl"),
        ("devices.jsonl", "rows.jsonl"),
        ("unit_test_generation.jsonl", "rows.jsonl"),
        ("unit_tests.jsonl", "unit_test.jsonl", "rows.jsonl"),
        ("test_cases_a.jsonl", "test_cases_b.jsonl", "rows.jsonl"),
        ("test_generation.jsonl", "rows.jsonl"),
        ("valid_sql.jsonl", "rows.jsonl"),
        ("game_dev.jsonl", "web-development.jsonl", "cooking.jsonl"),
        ("lm_eval_harness.jsonl", "rows.jsonl"),
        ("test-1.jsonl", "test-2.jsonl"),
        ("alpaca_test.jsonl", "dolly_test.jsonl"),
        ("eval.jsonl", "validation-extra.jsonl"),
        ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"),
        ("train_a.jsonl", "extra.jsonl"),
        ("test.jsonl",),
    ],
    ids=lambda names: f"N1-9-not-{names[0]}",
)
def test_subjects_and_whole_splits_are_read(names: tuple[str, ...]) -> None:
    write_all(names)
    assert [Path(file).name for file in list_source_files(resolve_source("rows"))] == sorted(names)


def test_a_directory_named_for_a_split_beside_others() -> None:
    """N1-9 for a pattern that enters directories."""
    write_all(("a.jsonl", "test/b.jsonl"))
    with pytest.raises(DataError) as raised:
        list_source_files(resolve_source("rows/**/*.jsonl"))
    assert raised.value.code == "E4125"
    assert len(list_source_files(resolve_source("rows/test"))) == 1


CONFIG = """recipe: chat
model: {{name_or_path: surefit/nano}}
lora: {{r: 4, lora_alpha: 8{adapter}}}
data: {{train: rows.jsonl, eval: 0.2, max_length: 256}}
train: {{max_steps: {steps}, global_batch_size: 4}}
hardware: {{gpu: cpu}}
output_dir: run
"""


def write_config(adapter: str = "", steps: int = 1) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"Say {n}.", "completion": f"It is {n}."} for n in range(60)]
    write_rows(Path("rows.jsonl"), rows)
    Path("run.yaml").write_text(CONFIG.format(adapter=adapter, steps=steps))


def checked(*more: str) -> dict[str, dict[str, Any]]:
    document = surefit("check", "run.yaml", "--json", *more).json
    return {f["code"] + " " + str(f["field"]): f for f in document["findings"] if f["severity"] == "error"}


def save_adapter(place: Path, name: str = "default", **settings: Any) -> None:
    """Save what PEFT makes of the built-in model, each factor with values."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(nano.PATH)
    lora = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(base, lora, adapter_name=name)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if ".lora_" in key:
                value.normal_(std=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(place))


NEVER = {"q_proj": ["q_proj"], "all": "all-linear"}


@pytest.mark.parametrize("written", NEVER)
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["v_proj", "embed_tokens"], "use_rslora": True},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
    ids=["N1-6-embedding", "N1-6-rslora", "N1-6-embedding-alone", "N1-6-head"],
)
def test_adapters_with_factors_on_the_vocabulary_are_to_be_merged(settings: dict[str, Any], written: str) -> None:
    save_adapter(Path("first"), **settings)
    rslora = ", use_rslora: true" if settings.get("use_rslora") else ""
    targets = json.dumps(NEVER[written])
    write_config(f", start_from: first, target_modules: {targets}{rslora}")
    found = checked()
    assert list(found) == ["ADP005 lora.start_from"]
    assert "start_from" in found["ADP005 lora.start_from"]["help"]


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["model.layers.1.self_attn.q_proj"]},
        {"target_modules": ["model.layers.1.self_attn.q_proj"]},
    ],
    ids=["N1-6-layers", "N1-6-expression", "N1-6-excluded", "N1-6-full-name"],
)
def test_what_check_says_of_other_layers_can_be_followed(settings: dict[str, Any]) -> None:
    save_adapter(Path("first"), **settings)
    write_config(", start_from: first")
    found = checked()
    assert list(found) == ["ADP005 lora.target_modules"]
    wanted = re.search(r"target_modules: (\[.*\])", found["ADP005 lora.target_modules"]["help"])
    assert wanted is not None
    write_config(f", start_from: first, target_modules: {wanted[1]}")
    assert checked() == {}
    answer = surefit("train", "run.yaml", "--json")
    assert answer.code == 0, answer.text
    first, second = (load_file(Path(place, "adapter_model.safetensors")).keys() for place in ("first", "run/adapter"))
    assert first == second


@pytest.mark.parametrize(
    ("settings", "targets", "wanted"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, ["q_proj"], None),
        ({"target_modules": ["q_proj", "lm_head"]}, ["q_proj"], None),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, ["q_proj"], ["model.layers.0.self_attn.q_proj"]),
        ({"target_modules": ["q_proj", "v_proj"]}, ["q_proj"], ["q_proj", "v_proj"]),
    ],
    ids=["N1-6-embedding", "N1-6-head", "N1-6-layers", "N1-6-endings"],
)
def test_training_gives_the_same_advice(settings: dict[str, Any], targets: list[str], wanted: list[str] | None) -> None:
    """The model is known only now: a config that nobody checked."""
    save_adapter(Path("first"), **settings)
    base = ModelSection(name_or_path="surefit/nano", dtype="float32")
    section = LoraSection(r=4, lora_alpha=8, target_modules=targets)
    model = add_adapter(load_model(base, SimpleNamespace(kind="cpu")), section)
    with pytest.raises(ConfigError) as raised:
        load_initial_adapter(model, Path("first"), base)
    assert raised.value.code in ("E5029", "E5750")
    named = re.search(r"target_modules: \[(.*)\]", raised.value.help or "")
    assert (named[1].split(", ") if named else None) == wanted


def test_an_adapter_with_a_name_of_its_own_is_found_below() -> None:
    """N1-12: PEFT saves it in a directory of that name."""
    save_adapter(Path("named"), "mine", target_modules=["q_proj"])
    base = ("--base", nano.PATH, "--output", "whole")
    for command in (("merge", "named", *base), ("merge", "named")):
        answer = surefit(*command)
        assert answer.code != 0
        assert "named/mine" in answer.text
    assert "E1850" in surefit("merge", "named", *base).text
    assert "E1850" not in surefit("merge", "named/mine", *base).text, "the help, followed"
    assert "named/mine" in surefit("merge", "named/mine", "--base", nano.PATH, "--with", "named").text
    write_config(", start_from: named")
    assert list(checked()) == ["ADP005 lora.start_from"]
    assert "mine/" in checked()["ADP005 lora.start_from"]["message"]


def test_the_base_does_not_answer_in_place_of_an_adapter_that_is_gone() -> None:
    """N1-12, and what the help says."""
    write_config(steps=2)
    ask = ("predict", "run", "--prompt", "Say 3.", "--set", "evaluate.max_new_tokens=4", "--json")
    assert surefit("predict", "run.yaml", *ask[2:]).json["variant"] == "base", "nothing is trained: the base it is"
    assert surefit("train", "run.yaml").code == 0
    assert surefit(*ask).json["variant"] == "adapter"
    shutil.rmtree("run/adapter")
    refused = surefit(*ask)
    assert (refused.code != 0, "E1851" in refused.text) == (True, True)
    for variant in ("step-2", "base"):
        assert variant in refused.text
        assert surefit(*ask, "--variant", variant).json["variant"] == variant
    again = surefit("train", "run", "--resume")
    assert again.code == 0, again.text
    assert surefit(*ask).json["variant"] == "adapter"


@pytest.mark.parametrize(
    ("turns", "least", "most"),
    [
        (2, template_checks.LEAST, template_checks.LEAST),
        (10, template_checks.LEAST, template_checks.LEAST),
        (100, 1, template_checks.LEAST - 1),
    ],
    ids=["N1-15", "N1-15-turns", "N1-15-very-long"],
)
def test_a_busy_machine_looks_at_as_many_rows(
    turns: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N1-15: no time at all, which a busy machine comes near to."""
    monkeypatch.setattr(template_checks, "SECONDS", -1.0)
    write_config()
    talk = [{"role": ("user", "assistant")[n % 2], "content": f"Say {n}."} for n in range(turns)]
    write_rows(Path("rows.jsonl"), [{"messages": talk} for _ in range(60)])
    answer = surefit("check", "run.yaml", "--json")
    rendered = answer.json["rendered"]
    assert rendered["of"] == 60
    assert least <= rendered["rows"] <= most
    assert f"{rendered['rows']} of 60" in surefit("check", "run.yaml").text


def test_all_rows_are_looked_at_where_there_is_time() -> None:
    """N1-15: nothing is said then."""
    write_config()
    answer = surefit("check", "run.yaml", "--json")
    assert answer.json["rendered"]["rows"] in (60, answer.json["rendered"]["of"])
