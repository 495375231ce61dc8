"""Other tools' files: what reaches the config and the setup, what is left behind, and what is wrong with them."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from surefit.config.load import parse_yaml
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError
from surefit.facts.setup import Setup
from surefit.importers import MODULES, detect_tool, find_tool, read_tool_config
from surefit.importers.config_mapping import ConfigDraft, ToolSchema
from surefit.importers.result import ImportedConfig
from surefit.importers.write import to_config_yaml

EXAMPLES = Path(__file__).parent / "examples"
FILES = {
    "axolotl": "axolotl.yml", "llamafactory": "llamafactory.yaml", "trl": "trl.yaml", "accelerate": "accelerate.yaml",
    "deepspeed": "deepspeed.json", "peft": "adapter_config.json", "slurm": "job.sh",
    "openai": "openai.json", "swift": "swift.yaml",
}  # fmt: skip


def example(tool: str) -> ImportedConfig:
    return read_tool_config(EXAMPLES / FILES[tool])


def read_text(tmp_path: Path, text: str, name: str = "run.yaml", tool: str | None = None) -> ImportedConfig:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_tool_config(path, tool)


def table(tool: str) -> ToolSchema:
    found = importlib.import_module(f"surefit.importers.{MODULES[tool]}").TOOL
    assert isinstance(found, ToolSchema)
    return found


@pytest.mark.parametrize("tool", FILES)
def test_the_tool_is_recognised(tool: str) -> None:
    assert detect_tool(EXAMPLES / FILES[tool]) == tool
    assert example(tool).setup.tool == tool


SETUPS: dict[str, dict[str, Any]] = {
    "axolotl": {
        "base_model": "Qwen/Qwen2.5-3B-Instruct", "quantization": "nf4", "adapter": "lora", "lora_r": 32,
        "lora_alpha": 64.0, "target_modules": ("q_proj", "v_proj", "down_proj"), "max_length": 4096, "packing": False,
        "micro_batch": 2, "accumulation": 4, "warmup_share": 0.1, "attention": "flash_attention_2", "bf16": True,
        "reentrant": False, "trackers": ("wandb",), "eval_rows": True, "save_steps": None, "world_size": None,
    },
    "llamafactory": {
        "adapter": "lora", "lora_r": 8, "target_modules": ("all-linear",), "max_length": 2048, "overwrite": True,
        "dataloader_workers": 4, "eval_steps": 500, "eval_strategy": "steps", "trackers": (), "warmup_share": 0.1,
        "resume": None, "quantization": None,
    },
    "trl": {
        "weights_dtype": "bfloat16", "quantization": "nf4", "packing": True, "packing_strategy": "bfd",
        "loss_on": "assistant", "best_model": True, "best_metric": "eval_loss", "trackers": ("mlflow", "wandb"),
        "warmup_share": 0.03, "warmup_steps": None, "save_total_limit": 2, "adapter": "lora",
    },
    "swift": {
        "adapter": "lora", "lora_r": 16, "weights_dtype": "bfloat16", "micro_batch": 2, "accumulation": 8,
        "parallel": "zero2", "eval_strategy": "steps", "eval_steps": 50, "loss_on": "assistant",
        "attention": "flash_attention_2", "truncation_side": None, "save_total_limit": 2,
    },
    "accelerate": {
        "parallel": "fsdp", "processes": 1, "machines": 2, "bf16": True, "fsdp_version": 2, "on_cpu": False,
        "fsdp_state_dict": "SHARDED_STATE_DICT", "fsdp_offload": False, "fsdp_efficient_loading": True,
    },
    "deepspeed": {
        "parallel": "zero2", "cpu_offload": True, "bf16": True, "fp16": None, "warmup_steps": 100, "total_steps": 86,
        "micro_batch": 1, "accumulation": 8, "global_batch": 32, "world_size": 4, "learning_rate": None,
    },
    "peft": {
        "adapter": "lora", "base_model": "Qwen/Qwen2.5-0.5B-Instruct", "lora_r": 16, "lora_alpha": 32.0,
        "target_modules": ("q_proj", "v_proj"), "modules_to_save": None, "rslora": False,
    },
    "slurm": {"machines": 2, "processes_per_machine": 4, "gpus": 4},
}  # fmt: skip


@pytest.mark.parametrize("tool", SETUPS)
def test_the_setup_says_what_the_file_says(tool: str) -> None:
    found = example(tool)
    assert {name: getattr(found.setup, name) for name in SETUPS[tool]} == SETUPS[tool]
    assert found.problems == ()
    assert found.setup.unknown == ()
    assert not found.setup.gone


CONFIGS: dict[str, dict[str, Any]] = {
    "axolotl": {
        "model.name_or_path": "Qwen/Qwen2.5-3B-Instruct", "model.revision": "main", "model.dtype": "bfloat16",
        "train.method": "lora", "lora.r": 32, "lora.target_modules": ["q_proj", "v_proj", "down_proj"],
        "data.train": "rows.jsonl", "data.format": "messages", "data.eval": 0.05, "data.max_length": 4096,
        "train.num_train_epochs": 3.0, "train.learning_rate": 2e-4, "train.global_batch_size": 8,
        "train.warmup_steps": 0.1,
        "train.per_device_train_batch_size": 2, "train.weight_decay": 0.01, "train.seed": 7,
        "checkpoint.save_total_limit": 3, "output_dir": "./outputs/qlora", "model.quantization": "nf4",
        "data.packing": False, "speed.attention": "flash_attention_2", "telemetry.wandb": "online",
        "telemetry.wandb_project": "demo", "telemetry.mlflow_uri": None,
    },
    "swift": {
        "data.train": "rows.jsonl", "data.limit": 500, "data.eval": 0.05, "lora.r": 16, "lora.lora_alpha": 32.0,
        "lora.lora_dropout": 0.05, "train.global_batch_size": 16, "train.warmup_steps": 0.05, "train.weight_decay": 0.1,
        "train.learning_rate": 1e-4, "model.dtype": "bfloat16", "train.lr_scheduler_type": "cosine",
    },
    "llamafactory": {
        "data.train": "identity", "data.max_length": 2048, "lora.r": 8, "lora.lora_alpha": 16.0, "train.seed": 42,
        "train.global_batch_size": 8, "train.per_device_train_batch_size": 1, "train.lr_scheduler_type": "cosine",
        "checkpoint.save_steps": 500, "data.eval": 0.1, "model.trust_remote_code": True,
    },
    "trl": {
        "data.train": "rows.jsonl", "data.split": "train", "train.warmup_steps": 0.03, "train.global_batch_size": 16,
        "lora.lora_dropout": 0.05, "lora.lora_alpha": 16.0, "data.max_length": 2048, "train.num_train_epochs": 1.0,
        "checkpoint.save_steps": 200, "model.dtype": "bfloat16", "output_dir": "out/sft", "data.packing": True,
        "model.quantization": "nf4", "checkpoint.metric_for_best_model": "eval_loss",
        "speed.attention": "flash_attention_2",
        "telemetry.wandb": "online", "telemetry.mlflow_uri": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("tool", CONFIGS)
def test_the_file_maps_to_a_surefit_config(tool: str) -> None:
    loaded = example(tool).loaded
    assert loaded is not None
    got = {dotted: lookup(loaded.config, dotted) for dotted in CONFIGS[tool]}
    assert got == CONFIGS[tool]


def lookup(config: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("tool", ["accelerate", "deepspeed", "peft", "slurm"])
def test_a_part_of_a_run_maps_to_no_config(tool: str) -> None:
    assert example(tool).loaded is None


def test_lines_and_names_are_the_foreign_file_s() -> None:
    found = example("axolotl")
    assert found.loaded is not None
    text = (EXAMPLES / "axolotl.yml").read_text().splitlines()
    for dotted, line in found.loaded.lines.items():
        key = found.names[dotted].partition(" ")[0].rpartition(".")[2]
        assert text[line - 1].strip().lstrip("- ").startswith(f"{key}:"), (dotted, key, line)
    assert found.names["train.global_batch_size"] == "micro_batch_size × gradient_accumulation_steps"
    for place in found.setup.places.values():
        if place.line is not None:
            assert text[place.line - 1].strip().lstrip("- ").startswith(place.name.rpartition(".")[2])


def test_a_json_file_has_lines_too() -> None:
    places = example("deepspeed").setup.places
    assert (places["parallel"].name, places["parallel"].line) == ("zero_optimization.stage", 5)
    assert places["warmup_steps"].line == 11


@pytest.mark.parametrize("tool", MODULES)
def test_every_key_of_the_example_ends_in_one_place(tool: str) -> None:
    path = EXAMPLES / FILES[tool]
    tree, lines = parse_yaml(path.read_text().replace("\t", " "), path)
    draft = ConfigDraft(table(tool), path, tree, lines)
    ends_in_one_place(draft)


def ends_in_one_place(draft: ConfigDraft) -> None:
    found = draft.finished()
    ends = {
        "mapped": set(found.mapped),
        "lost": {lost.key for lost in found.lost},
        "gone": set(found.setup.gone),
        "unknown": set(found.setup.unknown),
        "wrong": {problem.field for problem in found.problems},
    }
    for key in draft.flat:
        assert [name for name, keys in ends.items() if key in keys].__len__() == 1, (key, ends)
    assert set().union(*ends.values()) == set(draft.flat)
    assert {lost.key for lost in found.judged} <= found.mapped
    assert {place.name for place in found.setup.places.values() if place.line} <= set(draft.lines)
    for dotted in found.loaded.lines if found.loaded else ():
        assert dotted in found.names


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 5), st.integers(), st.floats(), st.text(max_size=6),
    st.sampled_from(["auto", "yes", "no", "lora", "full", "steps", "2e-4", "8,", "bf16", "qlora", "sft", "dpo"]),
    st.lists(st.one_of(st.text(max_size=4), st.integers(), st.dictionaries(st.just("path"), st.text(max_size=4)))),
    st.dictionaries(st.sampled_from(["stage", "enabled", "fsdp_version", "use_reentrant", "x"]), st.integers(0, 4)),
)  # fmt: skip


@pytest.mark.parametrize("tool", MODULES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_key_of_any_file_ends_in_one_place(tool: str, data: st.DataObject) -> None:
    keys = table(tool)
    names = sorted({key.partition(".")[0] for key in (*keys.keys, *keys.known, *keys.gone)} | {"nonsense", "r.x"})
    require_each_key_once(tool, data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=12)))


@pytest.mark.parametrize("kind", [{}, {"peft_type": "LORA"}, {"peft_type": "IA3"}])
@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "layers_pattern", "rank_pattern"])
def test_a_wrong_pattern_ends_in_one_place(key: str, kind: dict[str, str]) -> None:
    require_each_key_once("peft", kind | {key: {"?": 4, "*": 8} if key == "rank_pattern" else "?"})


def require_each_key_once(tool: str, tree: dict[str, Any]) -> None:
    lines = {key: number for number, key in enumerate(tree, 1)}
    draft = ConfigDraft(table(tool), Path("any.yaml"), tree, lines)
    found = draft.finished()
    ends = [*found.mapped, *(one.key for one in found.lost), *found.setup.gone, *found.setup.unknown]
    ends += [str(problem.field) for problem in found.problems]
    assert sorted(ends) == sorted(draft.flat), "each key once"
    assert {one.key for one in found.judged} <= found.mapped


@pytest.mark.parametrize(
    ("text", "key", "line", "message", "help_text"),
    [
        ("base_model: a\nsequence_len: [262144]\n", "sequence_len", 2, "got [262144]", "without the brackets"),
        ("base_model: a\nsequence_len: 262144,\n", "sequence_len", 2, "the string '262144,'", "comma"),
        ("base_model: a\nmicro_batch_size: two\n", "micro_batch_size", 2, "a whole number", "without quotes"),
        ("base_model: a\nlora_r: 8.5\n", "lora_r", 2, "a whole number, got 8.5", "write"),
        ("base_model: a\nbf16: maybe\n", "bf16", 2, "true or false", "write"),
        ("base_model: a\nlearning_rate: .inf\n", "learning_rate", 2, "a number", "write"),
        ("model_name_or_path: a\ndataset_name: b\nmax_length: [262144]\n", "max_length", 3, "[262144]", "brackets"),
        ("model_name_or_path: a\ncutoff_len: true\n", "cutoff_len", 2, "a whole number, got true", "write"),
        ("model_name_or_path: a\nstage: sft\nquantization_bit: four\n", "quantization_bit", 3, "4, 8", "write"),
        ("distributed_type: FSDP\nnum_processes: [2]\n", "num_processes", 2, "a whole number", "brackets"),
        ("peft_type: LORA\nr: {}\n", "r", 2, "a whole number, got {}", "write"),
    ],
)
def test_a_wrong_value_is_a_problem_with_its_line(
    tmp_path: Path, text: str, key: str, line: int, message: str, help_text: str
) -> None:
    (problem,) = read_text(tmp_path, text).problems
    assert (problem.field, problem.line) == (key, line)
    assert message in problem.message
    assert help_text in str(problem.help)


def test_what_only_surefit_refuses_is_no_problem(tmp_path: Path) -> None:
    found = read_text(tmp_path, "base_model: a\nsequence_len: 4\ndatasets: [{path: b, type: alpaca}]\n")
    assert found.problems == ()
    assert found.setup.max_length == 4
    (why,) = (one.why for one in found.judged if one.key == "sequence_len")
    assert why == "SureFit expects a whole number (at least 8, at most 1,073,741,824)"
    assert found.loaded is not None


def test_gone_keys_say_what_to_write(tmp_path: Path) -> None:
    text = "model_name_or_path: a\ndataset_name: b\nwarmup_ratio: 0.1\nevaluation_strategy: steps\nmax_seq_length: 5\n"
    found = read_text(tmp_path, text)
    assert found.tool == "trl"
    assert set(found.setup.gone) == {"warmup_ratio", "evaluation_strategy", "max_seq_length"}
    assert "eval_strategy" in found.setup.gone["evaluation_strategy"]
    assert found.setup.places["max_seq_length"].line == 5
    assert read_text(tmp_path, text + "finetuning_type: lora\ncutoff_len: 8\n").setup.warmup_share == 0.1


def test_an_unknown_key_and_what_it_probably_means(tmp_path: Path) -> None:
    found = read_text(tmp_path, json.dumps({"peft_type": "LORA", "r": 8, "dropout": 0.1, "xyz": 1}), "a.json")
    assert found.setup.unknown == ("dropout",)
    assert found.setup.passed_over == ("xyz",)  # PEFT drops it with a warning
    assert found.setup.meant == {"dropout": "lora_dropout"}
    assert read_text(tmp_path, "peft_type: LOHA\nmodule_dropout: 0.1\n").setup.unknown == ()


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        ("base_model: a\nnum_epochs: 1\nlora_r: 8\nlora_alpha: 8\n", {"lora_r", "lora_alpha"}),
        ("dataset_name: b\nlora_r: 8\nbnb_4bit_quant_type: nf4\n", {"lora_r", "bnb_4bit_quant_type"}),
        ("model_name_or_path: a\nfinetuning_type: full\nlora_rank: 8\n", {"lora_rank"}),
        ("model_name_or_path: a\neval_steps: 10\nsave_steps: 10\nsave_strategy: epoch\n", {"eval_steps", "save_steps"}),
        ("model_name_or_path: a\npacking_strategy: wrapped\n", {"packing_strategy"}),
        ("distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}\n", {"fsdp_config"}),
    ],
)  # fmt: skip
def test_keys_without_effect(tmp_path: Path, text: str, ignored: set[str]) -> None:
    found = read_text(tmp_path, text)
    assert set(found.setup.ignored) == ignored
    assert ignored <= set(found.setup.places)


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("model_name_or_path: a\nfinetuning_type: lora\ndataset: b\ntemplate: qwen\n", "llamafactory"),
        ("model_name_or_path: a\ndataset_name: b\nlora_r: 8\n", "trl"),
        ("output_dir: a\nper_device_train_batch_size: 1\n", "trl"),
        ("base_model: a\nadapter: lora\nlora_r: 8\noutput_dir: c\nseed: 1\nwarmup_steps: 3\n", "axolotl"),
        ("base_model_name_or_path: a\npeft_type: LORA\nlora_alpha: 8\n", "peft"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n", "accelerate"),
        ('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}', "deepspeed"),
        ("model: {name_or_path: a}\ndata: {train: b}\ntrain: {}\noutput_dir: c\n", "surefit"),
        ("#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n", "slurm"),
        ("model: [wrong]\n", "surefit"),
    ],
)
def test_tools_are_told_apart(tmp_path: Path, text: str, tool: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert detect_tool(path) == tool


@pytest.mark.parametrize("text", ["", "[1, 2]", "hello", "foo: 1", "version: 2\nservices: {}\n"])
def test_what_is_no_config_is_refused_with_what_was_looked_for(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        detect_tool(path)
    assert "axolotl" in str(caught.value.help)
    assert "deepspeed" in str(caught.value.help)
    if text in ("", "hello"):
        assert find_tool(path) is None, "SureFit's own reader says what is wrong with it"
    else:
        with pytest.raises(ConfigError, match="not a file of a tool that SureFit knows"):
            find_tool(path)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(8)
)


@pytest.mark.parametrize(
    "data",
    [
        b"base_model: [1, 2\nmicro_batch_size: 1\n",
        b'{"zero_optimization": {"stage": 2',
        b"base_model: \xff\xfe\n",
        b"base_model: a\n" + b"x: 1\n" * 200_000,
        b"base_model: a\n" + BOMB.encode(),
        b"base_model: " + b"[" * 600,
        b"base_model: !!python/object:os.system a\n",
    ],
)
def test_a_file_that_does_not_parse_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        read_tool_config(path, "axolotl")
    assert find_tool(path) is None


def test_byte_order_mark_and_dos_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_bytes(b"\xef\xbb\xbf" + (EXAMPLES / "axolotl.yml").read_bytes().replace(b"\n", b"\r\n"))
    found = read_tool_config(path)
    assert found.loaded is not None
    assert found.loaded.config == example("axolotl").loaded.config  # type: ignore[union-attr]
    assert found.loaded.lines == example("axolotl").loaded.lines  # type: ignore[union-attr]


def test_yaml_1_1_words_are_understood(tmp_path: Path) -> None:
    text = "base_model: a\nbf16: yes\nsample_packing: Off\nlearning_rate: '2e-4'\nmicro_batch_size: '2'\n"
    setup = read_text(tmp_path, text).setup
    assert (setup.bf16, setup.packing, setup.learning_rate, setup.micro_batch) == (True, False, 2e-4, 2)


def test_a_run_without_answers_to_learn_from_maps_to_no_config(tmp_path: Path) -> None:
    assert read_text(tmp_path, "base_model: a\nrl: grpo\ndatasets: [{path: b}]\n").loaded is None
    assert read_text(tmp_path, "model_name_or_path: a\nstage: ppo\ndataset: b\noutput_dir: c\n").loaded is None
    assert read_text(tmp_path, "model_name_or_path: a\nmax_length: 64\n").loaded is None


def test_further_data_sets_are_mixed_in(tmp_path: Path) -> None:
    found = read_text(
        tmp_path, "base_model: a\ndatasets: [{path: b, type: alpaca}, {path: c/d, type: alpaca, split: x}]\n"
    )
    assert found.loaded is not None
    assert (found.loaded.config.data.train, found.loaded.config.data.mix) == ("b", {"c/d@x": 1.0})
    assert not found.rows_known, "the rows of the first are not all"
    assert "datasets" not in {one.key for one in (*found.judged, *found.lost)}
    assert "data.mix" not in to_config_yaml(read_text(tmp_path, "base_model: a\ndatasets: [{path: b, type: alpaca}]\n"))


@pytest.mark.parametrize(
    ("datasets", "why"),
    [
        ("[{path: b, type: alpaca}, {path: b, type: alpaca}]", "named once"),
        ("[{path: b, type: alpaca}, {path: c, type: mine.py}]", "not trained on"),
    ],
)
def test_data_sets_that_cannot_be_mixed_are_not_taken_for_one(tmp_path: Path, datasets: str, why: str) -> None:
    found = read_text(tmp_path, f"base_model: a\ndatasets: {datasets}\n")
    assert found.loaded is not None
    assert found.loaded.config.data.mix == {}
    assert not found.rows_known
    assert any(why in one.why and one.key == "datasets[1].path" for one in found.parts)


def test_llamafactory_finds_its_rows_through_dataset_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text('{\n\t"mine": {"file_name": "mine.json"}}')
    found = read_text(tmp_path, "model_name_or_path: a\nstage: sft\ndataset: mine\noutput_dir: o\n")
    assert found.loaded is not None
    assert (found.loaded.config.data.train, found.loaded.config.data.format) == ("data/mine.json", "alpaca")
    assert found.rows_known


def test_llamafactory_s_sets_one_behind_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    info = {"one": {"file_name": "one.json"}, "two": {"file_name": "two.json", "formatting": "sharegpt"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    for name in ("one", "two"):
        (tmp_path / f"data/{name}.json").write_text("[]")
    text = "model_name_or_path: a\nstage: sft\ndataset: one, two\noutput_dir: o\n"
    found = read_text(tmp_path, text)
    assert found.loaded is not None
    data = found.loaded.config.data
    assert (data.train, data.mix, data.format) == ("data/one.json", {"data/two.json": 1.0}, "auto")
    interleaved = read_text(tmp_path, text + "mix_strategy: interleave_under\ninterleave_probs: 0.5,0.5\n")
    assert interleaved.loaded is not None
    assert interleaved.loaded.config.data.mix == {}
    assert any("passes" in one.why for one in interleaved.judged)


TRL = "model_name_or_path: a\ndataset_name: b\noutput_dir: c\n"
AXOLOTL = "base_model: a\ndatasets: [{path: b, type: alpaca}]\n"
FACTORY = "model_name_or_path: a\nstage: sft\ndataset: b\noutput_dir: c\n"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (TRL + "packing: true\n", "data.packing", True),
        (TRL + "packing: false\n", "data.packing", False),
        (TRL + "attn_implementation: sdpa\n", "data.packing", False),
        (TRL + "attn_implementation: flash_attention_3\n", "speed.attention", "flash_attention_3"),
        (TRL + "attn_implementation: flex_attention\n", "speed.attention", "auto"),
        (TRL + "use_peft: true\nload_in_4bit: true\n", "model.quantization", "nf4"),
        (TRL + "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: fp4\n", "model.quantization", "none"),
        (TRL + "optim: paged_adamw_8bit\n", "train.optim", "paged_adamw_8bit"),
        (TRL + "optim: paged_adamw_32bit\n", "train.optim", "paged_adamw_32bit"),
        (TRL + "optim: adafactor\n", "train.optim", "adamw_torch"),
        (TRL + "lr_scheduler_type: warmup_stable_decay\n", "train.lr_scheduler_type", "warmup_stable_decay"),
        (TRL + "lr_scheduler_kwargs: {num_decay_steps: 40, min_lr_ratio: 0.1}\n", "train.decay_steps", 40),
        (TRL + "neftune_noise_alpha: 5\n", "train.neftune_noise_alpha", 5.0),
        (TRL + "neftune_noise_alpha: 0\n", "train.neftune_noise_alpha", None),
        (TRL + "eval_strategy: steps\nload_best_model_at_end: true\n", "checkpoint.metric_for_best_model", "eval_loss"),
        (
            TRL + "eval_strategy: steps\nload_best_model_at_end: true\nmetric_for_best_model: rouge\n",
            "checkpoint.metric_for_best_model",
            None,
        ),
        (TRL + "torch_compile: true\n", "speed.compile", True),
        (TRL + "fp16: true\n", "model.dtype", "float16"),
        (TRL + "datasets: []\n", "data.mix", {}),
        (AXOLOTL + "sample_packing: true\n", "data.packing", True),
        (AXOLOTL + "adapter: qlora\nload_in_4bit: true\n", "model.quantization", "nf4"),
        (AXOLOTL + "adapter: lora\nload_in_8bit: true\n", "model.quantization", "none"),
        (AXOLOTL + "optimizer: adamw_bnb_8bit\n", "train.optim", "adamw_8bit"),
        (
            AXOLOTL + "early_stopping_patience: 3\nsave_steps: 20\neval_steps: 10\nval_set_size: 0.1\n",
            "train.early_stopping_patience",
            3,
        ),
        (AXOLOTL + "eval_steps: 10\n", "train.eval_steps", 10),
        (TRL + "max_steps: 1000\nper_device_train_batch_size: 4\n", "train.num_train_epochs", 4000.0),
        (FACTORY + "max_steps: 50\nnum_train_epochs: 2\n", "train.num_train_epochs", 400.0),
        (AXOLOTL + "max_steps: 50\nnum_epochs: 2\nlearning_rate: 1e-4\n", "train.num_train_epochs", 2.0),
        (TRL + "eval_strategy: steps\neval_steps: 20\n", "train.eval_steps", 20),
        (TRL + "eval_strategy: epoch\neval_steps: 20\n", "train.eval_steps", None),
        (FACTORY + "enable_thinking: false\n", "model.chat_template_kwargs", {"enable_thinking": False}),
        (AXOLOTL + "gradient_checkpointing: offload\n", "train.gradient_checkpointing", "offload"),
        (
            AXOLOTL + "gradient_checkpointing: true\nactivation_offloading: true\n",
            "train.gradient_checkpointing",
            "offload",
        ),
        (AXOLOTL + "gradient_checkpointing: offload_disk\n", "train.gradient_checkpointing", "auto"),
        (AXOLOTL + "tiled_mlp: true\n", "speed.tiled_mlp", True),
        (AXOLOTL + "torch_compile: auto\n", "speed.compile", False),
        (AXOLOTL + "flash_attention: true\n", "speed.attention", "flash_attention_2"),
        (AXOLOTL + "adapter: lora\nlora_model_dir: old\n", "lora.start_from", "old"),
        (AXOLOTL + "lora_model_dir: old\n", "lora.start_from", None),
        (AXOLOTL + "adapter: lora\npeft_use_rslora: true\n", "lora.use_rslora", True),
        (AXOLOTL + "adapter: qlora\nload_in_4bit: true\npeft_use_dora: true\n", "lora.use_dora", True),
        (AXOLOTL + "peft_use_dora: true\n", "lora.use_dora", False),
        (TRL + "use_peft: true\nuse_rslora: true\n", "lora.use_rslora", True),
        (TRL + "use_peft: true\nuse_dora: true\n", "lora.use_dora", True),
        (TRL + "use_dora: true\n", "lora.use_dora", False),
        (FACTORY + "use_rslora: true\n", "lora.use_rslora", True),
        (FACTORY + "use_dora: true\n", "lora.use_dora", True),
        (FACTORY + "finetuning_type: full\nuse_dora: false\n", "lora.use_dora", False),
        (FACTORY + "neat_packing: true\n", "data.packing", True),
        (FACTORY + "quantization_bit: 4\n", "model.quantization", "nf4"),
        (FACTORY + "quantization_bit: 8\n", "model.quantization", "none"),
        (FACTORY + "flash_attn: fa2\n", "speed.attention", "flash_attention_2"),
        (FACTORY + "flash_attn: auto\n", "speed.attention", "auto"),
        (FACTORY + "early_stopping_steps: 4\n", "train.early_stopping_patience", 4),
        (FACTORY + "adapter_name_or_path: old\n", "lora.start_from", "old"),
        (FACTORY + "adapter_name_or_path: old,older\n", "lora.start_from", None),
    ],
)
def test_what_the_training_path_can_do_too(tmp_path: Path, text: str, key: str, value: Any) -> None:
    found = read_text(tmp_path, text)
    assert found.problems == ()
    assert found.loaded is not None
    assert lookup(found.loaded.config, key) == value
    tree, _ = parse_yaml(to_config_yaml(found), tmp_path / "b.yaml")
    assert SureFitConfig.model_validate(tree) == found.loaded.config


def test_several_adapters_are_lost_with_the_way_to_stack_them(tmp_path: Path) -> None:
    (lost,) = read_text(tmp_path, FACTORY + "adapter_name_or_path: old,older\n").lost
    assert (lost.key, "merge the others first" in lost.why) == ("adapter_name_or_path", True)


ROWS = "base_model: a\ndatasets:\n  - path: b\n    type: chat_template\n    "


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("split_thinking: true", "SureFit moves <think>…</think> out of the content"),
        ("template_thinking_key: reasoning_content", "under the name that the template reads"),
        ("field_thinking: reasoning", "SureFit reads reasoning under any of these names"),
        ("field_thinking: thoughts", "SureFit reads the columns by name"),
    ],
)
def test_what_axolotl_makes_of_reasoning(tmp_path: Path, line: str, words: str) -> None:
    found = read_text(tmp_path, ROWS + line + "\n")
    assert found.loaded is not None
    assert found.loaded.config.data.format == ("auto" if "thoughts" in line else "messages")
    key = f"datasets[0].{line.partition(':')[0]}"
    assert [words in one.why for one in found.parts if one.key == key] == [True]


def test_what_packing_means_is_said_beside_it(tmp_path: Path) -> None:
    assert "a batch still counts whole, separate examples" in to_config_yaml(
        read_text(tmp_path, TRL + "packing: true\n")
    )
    assert "a batch still counts whole, separate examples" not in to_config_yaml(
        read_text(tmp_path, TRL + "packing: false\n")
    )


def test_the_stage_of_a_deepspeed_file_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "base_model: a\nmicro_batch_size: 1\ndeepspeed: ds.json\n"
    assert read_text(tmp_path, text).setup.parallel is None
    (tmp_path / "ds.json").write_text('{\n\t"zero_optimization": {"stage": 3}\n}')
    assert read_text(tmp_path, text).setup.parallel == "zero3"


def test_a_secret_is_not_repeated(tmp_path: Path) -> None:
    found = read_text(tmp_path, "output_dir: a\nnum_train_epochs: 1\nhub_token: abcdef\n")
    (lost,) = found.lost
    assert (lost.key, lost.value) == ("hub_token", "(not shown)")


def fields_of(package: str, file: str, name: str) -> set[str]:
    """The fields of an installed dataclass, read from its source: importing it would take seconds."""
    spec = importlib.util.find_spec(package)
    assert spec
    assert spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8")
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    return {each.target.id for each in body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}


@pytest.mark.parametrize("tool", ["trl", "llamafactory"])
def test_the_trainer_s_arguments_are_those_of_the_installed_release(tool: str) -> None:
    """The list is data; where this fails, transformers has changed and the list is to be looked through."""
    now = fields_of("transformers", "training_args.py", "TrainingArguments")
    assert "learning_rate" in now
    assert {key for key in now if not table(tool).knows(key)} == set()
    if tool == "trl":
        assert not now & set(table(tool).gone)


def test_the_lora_keys_are_those_of_the_installed_release() -> None:
    now = fields_of("peft", "tuners/lora/config.py", "LoraConfig")
    assert "lora_alpha" in now
    assert {key for key in now if not table("peft").knows(key)} == set()


@pytest.mark.parametrize("tool", MODULES)
def test_tables_point_to_what_exists(tool: str) -> None:
    attributes = {field.name for field in fields(Setup)}
    config_keys = set(leaves_of(SureFitConfig))
    for key, to in table(tool).keys.items():
        assert to.setup is None or to.setup in attributes, key
        assert to.config is None or to.config in config_keys, key
    assert set(table(tool).defaults) <= config_keys


def leaves_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves_of(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("name", ["2e-4", "0x10", "one\ntwo", "null", "a # b", "it's"])
def test_an_import_reads_back_as_it_was(tmp_path: Path, name: str) -> None:
    """The dumper quotes by the rules of YAML 1.1, SureFit reads by those of 1.2."""
    config = {"base_model": name, "datasets": [{"path": name, "type": "alpaca"}], "optimizer": f"{name}\nx: 1"}
    found = read_text(tmp_path, json.dumps(config), "a.json")
    assert found.loaded is not None
    tree, _ = parse_yaml(to_config_yaml(found), tmp_path / "b.yaml")
    assert SureFitConfig.model_validate(tree) == found.loaded.config


@pytest.mark.parametrize(
    ("tool", "text", "telemetry", "kept", "left"),
    [
        ("trl", "report_to: [wandb, tensorboard]", {"wandb": "online", "tensorboard": True}, {"report_to"}, ""),
        ("trl", "report_to: none", {}, {"report_to"}, ""),
        ("trl", "report_to: mlflow", {}, set(), "report_to: MLflow's address"),
        ("trl", "report_to: [wandb, comet_ml]", {"wandb": "online"}, set(), "report_to: "),
        ("axolotl", "wandb_project: p\nwandb_mode: offline", {"wandb": "offline", "wandb_project": "p"},
         {"wandb_project", "wandb_mode"}, ""),
        ("axolotl", "wandb_project: p\nwandb_mode: disabled", {}, set(), "wandb_project: "),
        ("axolotl", "use_tensorboard: true", {"tensorboard": True}, {"use_tensorboard"}, ""),
        ("axolotl", "use_mlflow: true\nmlflow_tracking_uri: http://h:5000\nmlflow_experiment_name: e",
         {"mlflow_uri": "http://h:5000", "mlflow_experiment": "e"},
         {"use_mlflow", "mlflow_tracking_uri", "mlflow_experiment_name"}, ""),
        ("axolotl", "use_mlflow: true", {}, set(), "use_mlflow: MLflow's address"),
        ("axolotl", "mlflow_tracking_uri: http://me:hunter2@h", {}, set(), "mlflow_tracking_uri: "),
    ],
)  # fmt: skip
def test_trackers_become_telemetry(
    tmp_path: Path, tool: str, text: str, telemetry: dict[str, Any], kept: set[str], left: str
) -> None:
    start = {
        "trl": "model_name_or_path: m\ndataset_name: rows.jsonl\noutput_dir: out\nper_device_train_batch_size: 1\n",
        "axolotl": "base_model: m\nadapter: lora\ndatasets: [{path: rows.jsonl, type: chat_template}]\n",
    }[tool]
    found = read_text(tmp_path, start + text + "\n", tool=tool)
    assert found.loaded is not None
    section = found.loaded.config.telemetry
    assert section == type(section).model_validate(telemetry)
    without = [f"{lost.key}: {lost.why} {lost.value}" for lost in (*found.lost, *found.judged)]
    assert not kept & {each.partition(":")[0] for each in without}
    assert kept <= found.mapped
    assert not left or any(each.startswith(left) for each in without)
    assert not any("hunter2" in each for each in without)
