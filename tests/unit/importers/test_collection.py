"""The collection of maintained configs: none is called broken that its own tool takes, and no key is lost untold."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from surefit.cli.other_tools import run_applicable_rules
from surefit.core.errors import ConfigError
from surefit.importers import UNKNOWN, detect_tool, read_tool_config
from surefit.importers.write import to_config_yaml
from surefit.lint.engine import all_rules

ROOT = Path(__file__).parents[3]
COLLECTION = ROOT.parent / "shared/data/foreign_configs"
needs_collection = pytest.mark.skipif(
    not COLLECTION.is_dir(), reason="the collection of other tools' configs is not beside the repository"
)


@lru_cache(maxsize=1)
def benchmark() -> ModuleType:
    path = ROOT / "benchmarks/foreign_configs.py"
    spec = importlib.util.spec_from_file_location("foreign_configs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["foreign_configs"] = module
    spec.loader.exec_module(module)
    return module


def index(every: int) -> list[dict[str, str]]:
    lines = (COLLECTION / "index.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][::every]


@needs_collection
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_maintained_files_are_not_called_broken(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    results = [benchmark().judged(COLLECTION, entry) for entry in index(every)]
    wrong = {one.file: one.errors for one in results if one.wrong}
    assert len(wrong) <= max(1, len(results) // 100), wrong
    assert not [one.file for one in results if one.tool == "other" and one.errors], "other people's files"
    lost = {one.file: one.lost for one in results if one.lost}
    assert not lost, "every key that is set stands in the config or in its comments"


OTHERS = {
    "compose.yaml": "services:\n  web:\n    image: nginx\n    ports: [80]\nversion: '3'\n",
    "mergekit.yaml": "base_model: a/b\nmerge_method: ties\ndtype: bfloat16\nmodels: []\nparameters: {t: 1}\n",
    "package.json": '{"name": "x", "version": "1.0.0", "scripts": {"test": "y"}, "dependencies": {}}',
    "swift.yaml": "model: a/b\ntuner_type: lora\nlora_rank: 8\ndataset: [x]\nlr: 1e-4\nmicro_batch_size: 1\n",
    "train.yaml": "lr: 0.1\nepochs: 3\nbatch: 64\noutput_dir: here\n",
    "v1.yaml": "model: a/b\nmodel_class: llm\ndist_config: {name: fsdp2}\noutput_dir: o\ncutoff_len: 2048\n",
    "megatron.yaml": "model_name_or_path: a\nfinetuning_type: full\ntemplate: qwen3\ntensor_model_parallel_size: 2\n",
    "ds_TEMPLATE.json": '{\n "train_batch_size": GB_SIZE,\n "zero_optimization": {"stage": ${stage}}\n}',
    "rows.json": '[{"instruction": "a", "output": "b"}]',
    "schedule.json": '{"optimizer_kwargs": {"lr": 0.001}}',
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_people_s_files_are_said_to_be_others(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(OTHERS[name])
    with pytest.raises(ConfigError, match=UNKNOWN):
        detect_tool(tmp_path / name)


LEFT_OUT = {
    "a part of a split": (
        "base_model: a\ndatasets: [{path: b, type: alpaca, split: 'train[:1%]'}]\n",
        ["# datasets[0].split: train[:1%]: data.split names a whole split"],
    ),
    "a schedule": (
        "base_model: a\ndatasets: [{path: b, type: alpaca}]\nlr_scheduler: polynomial\n",
        ["# lr_scheduler: polynomial: SureFit's schedules are"],
    ),
    "a second set": (
        "base_model: a\ndatasets: [{path: b, type: alpaca}, {path: c, type: oasst}]\n",
        ["# datasets[1].path: c: not trained on", "# datasets[1].type: oasst: SureFit reads the layouts"],
    ),
    "columns": (
        "base_model: a\ndatasets: [{path: b, type: {field_instruction: q, field_output: a}}]\n",
        ["# datasets[0].type: {field_instruction: q, field_output: a}: SureFit reads the layouts"],
    ),
    "a column of messages": (
        "base_model: a\ndatasets: [{path: b, type: chat_template, field_messages: turns}]\n",
        ["# datasets[0].field_messages: turns: SureFit reads the columns by name"],
    ),
    "a pattern": (
        "base_model: a\nadapter: lora\ndatasets: [{path: b, type: alpaca}]\nlora_target_modules: 'model.*.q_proj'\n",
        ["# lora_target_modules: model.*.q_proj: PEFT", "lora.target_modules stays SureFit's default"],
    ),
    "a switch that is off": (
        "base_model: a\ndatasets: [{path: b, type: alpaca}]\nload_in_8bit: false\nbf16: auto\n",
        ["# load_in_8bit: false: turned off", "# bf16: auto: turned off, or SureFit's default"],
    ),
    "rows of another name": (
        "model_name_or_path: a\nstage: sft\ndataset: identity,alpaca\nmax_samples: 10\noutput_dir: o\n",
        ["# dataset[1]: alpaca: data/dataset_info", "# max_samples: 10: SureFit trains on all rows"],
    ),
    "a launcher": (
        "model_name_or_path: a\ndataset_name: b\noutput_dir: o\nnum_processes: 4\n",
        ["# num_processes: 4: TRL passes it to `accelerate launch`"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_changes_the_training_is_told_where_it_is_lost(what: str, tmp_path: Path) -> None:
    text, comments = LEFT_OUT[what]
    (tmp_path / "run.yaml").write_text(text)
    written = to_config_yaml(read_tool_config(tmp_path / "run.yaml"))
    for comment in comments:
        assert comment in written, written


def test_a_schedule_that_cannot_be_said_does_not_become_the_tool_s_default(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: a\ndataset_name: b\noutput_dir: o\nlr_scheduler_type: polynomial\n")
    found = read_tool_config(path)
    assert found.loaded is not None
    assert "train.lr_scheduler_type" not in found.names
    assert "linear" not in to_config_yaml(found).split("# Not carried over")[0]


def test_a_mixture_without_an_adapter_trains_every_weight(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: a\noutput_dir: o\nlearning_rate: 1e-5\ndatasets: [{path: b}]\n")
    found = read_tool_config(path)
    assert found.loaded is not None
    assert found.loaded.config.train.method == "full"


@pytest.mark.parametrize(
    "line", ["beta: 0.1\nloss_type: hinge", "max_prompt_length: 8", "num_generations: 8", "reward_weights: [1.0]"]
)
def test_other_trainers_of_trl_are_known_and_not_imported_as_supervised(line: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model_name_or_path: a\ndataset_name: b\noutput_dir: o\nlearning_rate: 1e-5\n{line}\n")
    found = read_tool_config(path)
    assert found.tool == "trl"
    assert found.loaded is None
    assert found.setup.unknown == () == found.setup.passed_over


def codes(path: Path, text: str) -> dict[str, int | None]:
    path.write_text(text)
    return {
        finding.code: finding.line
        for finding in run_applicable_rules(read_tool_config(path), all_rules())[0].findings
        if finding.severity != "info"
    }


AXOLOTL = """base_model: {model}
datasets: [{{path: b, type: {kind}}}]
sequence_len: 512
micro_batch_size: 1
gradient_accumulation_steps: 1
learning_rate: 1.0e-4
adapter: lora
"""


def model(folder: Path) -> Path:
    """A base model: a config, and a tokenizer without a chat template."""
    from surefit.facts.model import catalogue

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(catalogue()["Qwen/Qwen3-0.6B"]["config"]))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("kind", "more", "needs_one"),
    [
        ("alpaca", "", False),
        ("completion", "", False),
        ("chat_template", "", True),
        ("chat_template", "chat_template: llama3\n", False),
        ("chat_template", "chat_template: tokenizer_default_fallback_chatml\n", False),
        ("chat_template", "processor_type: AutoProcessor\n", False),
        ("chat_template", "tokenizer_use_mistral_common: true\n", False),
    ],
)
def test_a_template_is_missed_only_where_the_tool_takes_the_model_s_own(
    kind: str, more: str, needs_one: bool, tmp_path: Path
) -> None:
    text = AXOLOTL.format(model=model(tmp_path / "base"), kind=kind) + more
    assert ("MOD006" in codes(tmp_path / "run.yaml", text)) == needs_one


def test_llamafactory_s_template_writes_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"model_name_or_path: {model(tmp_path / 'base')}\nstage: sft\ndataset: identity\ntemplate: llama3\n"
    assert "MOD006" not in codes(tmp_path / "run.yaml", text)


def test_a_text_as_target_modules_is_a_pattern_and_no_list(tmp_path: Path) -> None:
    base = model(tmp_path / "base")
    text = AXOLOTL.format(model=base, kind="alpaca") + "lora_target_modules: 'model.layers.[0-9]+.self_attn.q_proj'\n"
    assert "MOD008" not in codes(tmp_path / "run.yaml", text)
    assert "MOD008" in codes(tmp_path / "run.yaml", text.replace("'model.layers.[0-9]+.self_attn.q_proj'", "[q_prj]"))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "target_modules": ".*q_proj"}')
    assert read_tool_config(tmp_path / "adapter_config.json").setup.target_modules is None


ALL = "[mlp.experts.gate_up_proj, mlp.experts.down_proj]"


@pytest.mark.parametrize(
    ("names", "carried"),
    [
        (ALL, True),
        ("[experts.up_proj, experts.down_proj]", True),
        ("[mlp.experts.down_proj]", False),
        ("['23.mlp.experts.gate_up_proj', '23.mlp.experts.down_proj']", False),
        ("[mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.gate.weight]", "with_router"),
        ("[mlp.gate.weight]", False),
    ],
)
def test_stacks_of_experts_are_all_carried_over_or_named_as_lost(
    names: str, carried: bool | str, tmp_path: Path
) -> None:
    own = {
        "axolotl": AXOLOTL.format(model="a/b", kind="alpaca"),
        "trl": "model_name_or_path: a/b\ndataset_name: c/d\nuse_peft: true\noutput_dir: o\n",
    }
    for tool, text in own.items():
        path = tmp_path / f"{tool}.yaml"
        path.write_text(f"{text}lora_target_parameters: {names}\n")
        found = read_tool_config(path)
        assert found.tool == tool
        assert found.loaded is not None
        assert found.loaded.config.lora.experts == carried
        lost = {one.key: one.why for one in found.lost}
        assert ("lora_target_parameters" in lost) is not bool(carried)
        assert carried or "all experts of every layer" in lost["lora_target_parameters"]
    adapter = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "target_parameters": yaml.safe_load(names)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    assert (
        "target_parameters" in {one.key for one in read_tool_config(tmp_path / "adapter_config.json").lost}
    ) is not bool(carried)


def test_without_an_adapter_they_have_no_effect(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        f"base_model: a/b\ndatasets: [{{path: c, type: alpaca}}]\nlora_target_parameters: {ALL}\n"
    )
    found = read_tool_config(tmp_path / "run.yaml")
    assert "lora_target_parameters" in found.setup.ignored
    assert found.loaded is not None
    assert found.loaded.config.lora.experts is False


def test_a_list_for_several_models_is_no_fault(tmp_path: Path) -> None:
    text = AXOLOTL.format(model=model(tmp_path / "base"), kind="alpaca")
    assert "MOD008" not in codes(tmp_path / "run.yaml", text + "lora_target_modules: [q_proj, in_proj, embed_tokens]\n")
    assert "MOD008" in codes(tmp_path / "run.yaml", text + "lora_target_modules: [in_proj, query]\n")
    assert "MOD008" in codes(tmp_path / "run.yaml", text + "lora_target_modules: [q_prj, v_proj]\n")


def test_noise_of_other_machines_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model nobody knows here, and a tracker of a tool that is not installed here."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    text = AXOLOTL.format(model="no/body", kind="alpaca") + "trust_remote_code: true\nwandb_project: x\n"
    assert not {"MOD004", "TRK001"} & set(codes(tmp_path / "run.yaml", text))


TOLD = [
    ("axolotl", "gptq_groupsize: 128\n", {"ARG004": 8}),
    ("axolotl", "evaluation_strategy: steps\n", {"ARG005": 8}),
    ("axolotl", "context_parapllel_size: 2\n", {"ARG002": 8}),
    ("axolotl", "flash_attn_rms_norm: true\n", {"ARG001": 8}),
    ("axolotl", "flash_attn_rms_norm: false\n", {}),
    ("axolotl", "max_packed_sequence_len:\n", {}),
    ("axolotl", "lr_scheduler: cosin\n", {"CFG004": 8}),
    ("axolotl", "warmup_steps: 3\nwarmup_ratio: 0.1\n", {"CFG004": 9}),
    ("axolotl", "deepspeed: zero9.json\n", {"ARG006": 8}),
    ("axolotl", "deepspeed: elsewhere/zero9.json\n", {}),
]


@pytest.mark.parametrize(("tool", "more", "wanted"), TOLD)
def test_what_is_said_of_a_key(
    tool: str, more: str, wanted: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert codes(tmp_path / "run.yaml", AXOLOTL.format(model="no/body", kind="alpaca") + more) == wanted


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('{\n "zero_optimization": {\n  "stage": 2,\n }\n}', 3, "a comma after the last entry"),
        ('{\n "train_batch_size": 8\n "bf16": {"enabled": true}\n}', 2, "expecting ',' delimiter after this line"),
        ('{\n "train_batch_size": 8,\n "bf16": {"enabled": True}\n}', 3, "Expecting value"),
    ],
)
def test_json_is_read_as_json(text: str, line: int, problem: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match="not valid JSON") as caught:
        detect_tool(tmp_path / "ds.json")
    assert (caught.value.line, problem in caught.value.message) == (line, True)


def test_columns_that_the_rows_do_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    text = """base_model: no/body
datasets:
  - path: rows.jsonl
    type:
      field_instruction: questions
      field_output: answer
"""
    assert codes(tmp_path / "run.yaml", text) == {"CFG004": 5}
    assert codes(tmp_path / "run.yaml", text.replace("questions", "question")) == {}
