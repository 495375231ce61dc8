"""Findings F A3 to F B20, P R2, P R4, R11 and RF8: other tools' configs as their users have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefit.cli.other_tools import build_lint_context
from surefit.core.errors import ConfigError
from surefit.facts.families import family_of, family_of_template
from surefit.importers import detect_tool, read_tool_config
from surefit.importers.write import to_config_yaml
from surefit.lint.engine import run_rules

AXOLOTL = """base_model: Qwen/Qwen2.5-7B-Instruct
datasets: [{path: org/d, type: alpaca}]
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
"""
RATE = "learning_rate: 2e-4\n"
FACTORY = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
do_train: true
finetuning_type: lora
dataset: alpaca
template: qwen
output_dir: out
per_device_train_batch_size: 1
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 2
"""
TRL = "model_name_or_path: Qwen/Qwen2.5-7B-Instruct\ndataset_name: org/d\noutput_dir: out\n"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def findings(text: str, name: str = "run.yaml") -> dict[str, tuple[str, str]]:
    """Field → (severity, code)."""
    path = Path(name)
    path.write_text(text, encoding="utf-8")
    context, _ = build_lint_context(read_tool_config(path))
    return {one.field: (one.severity, one.code) for one in run_rules(context).findings}


def write_info(info: dict[str, object], folder: str = "data") -> None:
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")


WARNING, ERROR = ("warning", "ARG003"), ("error", "CFG004")
CASES = [
    pytest.param(
        ACCELERATE + "  offload_param_device: cpu\n", "deepspeed_config.offload_param_device", WARNING, id="FA3"
    ),
    pytest.param(ACCELERATE + "  zero3_init_flag: true\n", "deepspeed_config.zero3_init_flag", WARNING, id="FA4"),
    pytest.param(
        ACCELERATE + "  train_batch_size: 8\n", "deepspeed_config.train_batch_size", ("warning", "ARG004"), id="FA10"
    ),
    pytest.param(AXOLOTL + RATE + "adapter: lora\n", "adapter", ("warning", "ARG023"), id="FA7"),
    pytest.param(FACTORY + "stage: sft\n", "stage", ERROR, id="FA7-omegaconf"),
    pytest.param(FACTORY + "eval_strategy: steps\n", "eval_strategy", ERROR, id="FB2"),
    pytest.param(FACTORY + "do_eval: true\n", "do_eval", ERROR, id="FB2-do_eval"),
    pytest.param(AXOLOTL + "learning_rate: 2e4\n", "learning_rate", ERROR, id="FB4"),
    pytest.param(AXOLOTL + RATE + "weight_decay: 10\n", "weight_decay", ("warning", "ARG024"), id="FB4-decay"),
    pytest.param(
        FACTORY + "quantization_bit: 4\nquantization_method: bitsandbytes\n", "quantization_method", ERROR, id="FB5"
    ),
    pytest.param(FACTORY.replace("stage: sft", "stage: SFT"), "stage", ERROR, id="FB7"),
    pytest.param(FACTORY.replace("type: lora", "type: LoRA"), "finetuning_type", ERROR, id="FB7-lora"),
    pytest.param(AXOLOTL.replace("adapter: lora", "adapter: LoRA") + RATE, "adapter", ERROR, id="FB7-axolotl"),
    pytest.param(FACTORY.replace("template: qwen", "template: llama3"), "template", ("warning", "TPL028"), id="FB8"),
    pytest.param(AXOLOTL + RATE + "chat_template: llama3\n", "chat_template", ("warning", "TPL028"), id="FB8-axolotl"),
    pytest.param(
        FACTORY + "quantization_bit: 8\ndeepspeed: {zero_optimization: {stage: 3}}\n",
        "quantization_bit",
        ERROR,
        id="FB9",
    ),
    pytest.param(
        FACTORY + "deepspeed: {train_micro_batch_size_per_gpu: 8}\n",
        "per_device_train_batch_size",
        ERROR,
        id="FB9-batch",
    ),
    pytest.param(AXOLOTL + RATE + "val_set_size: 0\nevals_per_epoch: 4\n", "evals_per_epoch", WARNING, id="FB11"),
    pytest.param(
        AXOLOTL + RATE + "val_set_size: 0\nload_best_model_at_end: true\n",
        "load_best_model_at_end",
        WARNING,
        id="FB11-best",
    ),
    pytest.param(
        AXOLOTL + RATE + 'special_tokens: {eos_token: "</s>"}\n',
        "special_tokens.eos_token",
        ("warning", "TPL029"),
        id="FB14",
    ),
    pytest.param(
        AXOLOTL.replace("Qwen/Qwen2.5-7B-Instruct", "org/x-8B") + "learning_rate: 0.2\n",
        "learning_rate",
        ("warning", "SCH003"),
        id="FB18",
    ),
    pytest.param(AXOLOTL + RATE + "early_stopping_patience: 3\n", "early_stopping_patience", ERROR, id="FB19"),
    pytest.param(
        AXOLOTL + RATE + "special_tokens: {eot_tokens: [x]}\n", "special_tokens.eot_tokens", WARNING, id="FB20"
    ),
    pytest.param(AXOLOTL + RATE + "load_in_4bit: true\n", "load_in_4bit", WARNING, id="FB5-axolotl"),
    pytest.param(TRL + "max_prompt_length: 512\n", "max_prompt_length", ("error", "ARG001"), id="PR2"),
]


@pytest.mark.parametrize(("text", "field", "expected"), CASES)
def test_a_users_config_gets_its_finding(text: str, field: str, expected: tuple[str, str]) -> None:
    assert findings(text).get(field) == expected


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(ACCELERATE, id="FA3"),
        pytest.param(FACTORY + "eval_strategy: steps\nval_size: 0.1\n", id="FB2"),
        pytest.param(FACTORY + "quantization_bit: 4\nquantization_method: bnb\n", id="FB5"),
        pytest.param(FACTORY.replace("template: qwen", "template: chatml"), id="FB8"),
        pytest.param(FACTORY + "deepspeed: {train_micro_batch_size_per_gpu: auto}\n", id="FB9"),
        pytest.param(AXOLOTL + RATE, id="FB4"),
        pytest.param(TRL + "beta: 0.1\n", id="PR2"),
    ],
)
def test_the_same_config_without_its_fault_gets_no_error(text: str) -> None:
    assert [code for severity, code in findings(text).values() if severity == "error"] == []


@pytest.mark.parametrize("name", ["my_data", pytest.param("alpaca_", id="FB3-slip")])
def test_a_set_that_the_list_of_data_sets_does_not_have(name: str) -> None:
    """FB3."""
    write_info({"alpaca": {"file_name": "rows.json"}})
    Path("data/rows.json").write_text("[]", encoding="utf-8")
    assert findings(FACTORY.replace("dataset: alpaca", f"dataset: {name}"))["dataset"] == ERROR
    assert "dataset" not in findings(FACTORY)


@pytest.mark.parametrize(
    "entry",
    [
        {"file_name": "gone.json"},
        {"file_name": "rows.json", "formatting": "sharegtp"},
        {"file_name": "rows.json", "columns": {"promt": "q"}},
        {},
    ],
)
def test_an_entry_that_llamafactory_cannot_use(entry: dict[str, object]) -> None:
    """FB3."""
    write_info({"alpaca": entry})
    Path("data/rows.json").write_text("[]", encoding="utf-8")
    assert findings(FACTORY)["dataset"] == ERROR


def test_optional_columns_of_a_type_of_its_own_may_be_missing() -> None:
    """FA5: field_instruction must be there, field_system need not."""
    Path("d.jsonl").write_text('{"q": "1+1?", "a": "2"}\n', encoding="utf-8")
    kind = "{field_instruction: q, field_output: a, field_system: system, system_prompt: Be brief.}"
    text = AXOLOTL.replace("{path: org/d, type: alpaca}", f"{{path: d.jsonl, type: {kind}}}") + RATE
    assert not [field for field in findings(text) if field.startswith("datasets")]
    assert findings(text.replace("field_instruction: q", "field_instruction: p"))["datasets[0].type.field_instruction"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("recipe: TrainFinetuneRecipeForNextTokenPrediction\nmodel: {x: 1}\n", id="PR4-nemo"),
        pytest.param("model: {_target_: a.b}\noptimizer: {_target_: c.d, lr: 1}\n", id="PR4-target"),
        pytest.param("base: a/b\ntask: sft\ndata: {train: x}\ntraining: {lr: 2e-5}\n", id="PR4-soup"),
        pytest.param("model: {_component_: torchtune.models.llama3}\nepochs: 1\n", id="PR4-torchtune"),
        pytest.param("model: {model_name: a/b}\ndata: {train: {datasets: []}}\ntraining: {}\n", id="PR4-oumi"),
        pytest.param("train_type: lora\nmodel: a/b\ndataset: [x]\nlr: 1e-4\n", id="PR4-megatron-swift"),
    ],
)
def test_configs_of_other_tools_are_not_ours(text: str) -> None:
    Path("x.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        detect_tool(Path("x.yaml"))
    assert caught.value.code == "E3002"


def test_flat_keys_of_a_newcomer_are_no_trl_file() -> None:
    """RF8."""
    Path("x.yaml").write_text("model_name: a/b\nlora_r: 16\nlearning_rate: 2e-4\noutput_dir: out\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        detect_tool(Path("x.yaml"))
    assert caught.value.code == "E3550"
    assert {"model.name_or_path", "lora.r", "train.learning_rate"} <= set(
        caught.value.help.replace(";", " ").replace(")", " ").split()
    )


def test_several_keys_of_a_script_of_its_own_are_no_slips() -> None:
    """FA9."""
    own = "use_lora: true\nmodel_dir: x\nprompt_file: y\nn_workers: 3\n"
    assert not [
        one
        for one in findings(
            TRL + "num_train_epochs: 1\nlearning_rate: 1e-4\nbf16: true\nuse_peft: true\nlora_r: 8\n" + own
        ).values()
        if one[0] == "error"
    ]


def test_import_writes_tokens_frequencies_and_what_is_held_out() -> None:
    """R11 and section C."""
    rows = [{"instruction": f"a{i}", "input": "", "output": f"b{i}"} for i in range(80)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = AXOLOTL.replace("org/d", "d.jsonl") + RATE + 'tokens: ["<call>"]\nsaves_per_epoch: 2\n'
    Path("x.yml").write_text(text, encoding="utf-8")
    loaded = read_tool_config(Path("x.yml")).loaded
    assert loaded is not None
    assert loaded.config.model.add_tokens == ["<call>"]
    assert loaded.config.checkpoint.save_steps == 80 // 8 // 2
    assert "  eval: 0.0  #" in to_config_yaml(read_tool_config(Path("x.yml")))
    Path("x.yml").write_text(text + "val_set_size: 0\n", encoding="utf-8")
    assert "  eval: 0.0  #" in to_config_yaml(read_tool_config(Path("x.yml")))


def test_families_of_names() -> None:
    """FB8: a distilled model takes the template of the one that it was distilled from."""
    assert family_of("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B") == "DeepSeek"
    assert family_of("org/mistral-to-qwen") is None
    assert family_of("openlm-research/open_llama_3b_v2") is None, "3b is its size"
    assert family_of("meta-llama/Llama-3.2-3B") == "Llama 3"
    assert family_of_template("qwen_25") == "Qwen"
