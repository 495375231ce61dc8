"""Neighbours of the findings about other tools' files: the same faults in other spellings, and sound files beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.core.errors import ConfigError
from surefit.importers import detect_tool
from surefit.importers.reasons import unmapped_reason


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / ".git").mkdir()  # nothing above belongs to the project


def check(name: str, text: str, **beside: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(code, field) → finding of `surefit check` on a file with this text."""
    Path(name).write_text(text, encoding="utf-8")
    for other, content in beside.items():
        Path(other.replace("__", ".")).write_text(content, encoding="utf-8")
    result = CliRunner().invoke(app, ["check", name, "--json"])
    report = json.loads(result.stdout.strip().splitlines()[-1])
    return {(each["code"], each["field"]): each for each in report["findings"]}


SCRIPT = """from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import {name}Config, {name}Trainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B-Instruct")
args = {name}Config(output_dir="o", learning_rate=5e-6)
peft = LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
{name}Trainer(model=model, args=args, train_dataset=rows, peft_config=peft).train()
"""
AXOLOTL = """base_model: Qwen/Qwen2.5-7B-Instruct
datasets: [{path: x/y, type: chatml.intel}]
adapter: lora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 0.000005
bf16: auto
output_dir: ./out
"""
FACTORY = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: {stage}
do_train: true
finetuning_type: lora
lora_target: q_proj,v_proj
dataset: d
template: qwen
cutoff_len: 2048
output_dir: saves
learning_rate: 5.0e-6
bf16: true
"""
TRL = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
dataset_name: {rows}
learning_rate: 5.0e-6
use_peft: true
lora_r: 16
num_train_epochs: 1
output_dir: o
"""


@pytest.mark.parametrize(
    ("name", "text", "low"),
    [
        *(
            pytest.param("t.py", SCRIPT.format(name=name), name == "SFT", id=f"N1-{name}")
            for name in ("SFT", "DPO", "GRPO", "KTO", "Reward")
        ),
        pytest.param("a.yml", AXOLOTL, True, id="N1-axolotl"),
        pytest.param("a.yml", AXOLOTL + "rl: dpo\n", False, id="N1-axolotl-dpo"),
        pytest.param("a.yml", AXOLOTL + "reward_model: true\n", False, id="N1-axolotl-reward"),
        *(
            pytest.param("f.yaml", FACTORY.format(stage=stage), stage == "sft", id=f"N1-llamafactory-{stage}")
            for stage in ("sft", "dpo", "kto", "rm")
        ),
        pytest.param("t.yaml", TRL.format(rows="trl-lib/Capybara"), True, id="N1-trl"),
        pytest.param("t.yaml", TRL.format(rows="trl-lib/Capybara") + "beta: 0.1\n", False, id="N1-trl-beta"),
        pytest.param("t.yaml", TRL.format(rows="a/b") + "loss_type: [sigmoid]\n", False, id="N1-trl-loss"),
        pytest.param("t.yaml", TRL.format(rows="trl-lib/ultrafeedback_binarized"), False, id="N1-trl-pairs"),
    ],
)
def test_low_rates_are_judged_by_the_stage(name: str, text: str, low: bool) -> None:
    assert (("SCH004", "learning_rate") in check(name, text)) is low


def test_a_high_rate_for_preferences_gets_no_advice_for_answers() -> None:
    found = check("t.py", SCRIPT.format(name="DPO").replace("5e-6", "2e-1"))
    assert "2e-4" not in found["PRF001", "learning_rate"]["help"]


NAMED = """from peft import LoraConfig
from trl import {name}Config, {name}Trainer
args = {name}Config(output_dir="o", learning_rate=2e-1, eval_strategy="steps")
peft = LoraConfig(r=8, target_modules=["query_key_value"])
{name}Trainer({model}, args=args, train_dataset=rows, peft_config=peft).train()
"""


@pytest.mark.parametrize("model", ['"Qwen/Qwen3-0.6B"', 'model="Qwen/Qwen3-0.6B"'], ids=["N9", "N3"])
@pytest.mark.parametrize("name", ["SFT", "DPO", "Reward"])
def test_a_model_by_its_name_is_the_runs_model(name: str, model: str) -> None:
    found = check("t.py", NAMED.format(name=name, model=model))
    rate = "PRF001" if name == "DPO" else "SCH003"
    assert {("MOD008", "target_modules"), (rate, "learning_rate"), ("CFG004", "eval_strategy")} == set(found)


def test_a_named_model_beside_a_judge_is_the_one_that_is_trained() -> None:
    text = NAMED.format(name="SFT", model='"Qwen/Qwen3-0.6B"').replace(
        "args =",
        'from transformers import AutoModelForCausalLM\njudge = AutoModelForCausalLM.from_pretrained("gpt2")\nargs =',
    )
    assert "Qwen3-0.6B" in check("t.py", text)["MOD008", "target_modules"]["message"]


LOAD = """from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", {argument})
"""


@pytest.mark.parametrize(
    ("argument", "asked", "gone"),
    [
        pytest.param("load_in_4bit=True", "", "load_in_4bit", id="N4-4bit"),
        pytest.param("load_in_8bit=args.small", "", "load_in_8bit", id="N4-8bit-computed"),
        pytest.param("use_flash_attention_2=True", "", "use_flash_attention_2", id="N4-flash"),
        pytest.param("use_auth_token=True", "transformers==5.0.0\n", "use_auth_token", id="N4-token"),
        pytest.param("load_in_4bit=True", "transformers==4.57.1\n", None, id="N4-pinned"),
        pytest.param("load_in_4bit=True", "trl==0.12.2\n", None, id="N4-left-open"),
        pytest.param("load_in_4bit=True, trust_remote_code=True", "", None, id="N4-own-code"),
        pytest.param("low_cpu_mem_usage=True, torch_dtype='auto'", "", None, id="N4-taken"),
    ],
)
def test_arguments_of_from_pretrained_that_are_gone(argument: str, asked: str, gone: str | None) -> None:
    found = check("t.py", LOAD.format(argument=argument), **({"requirements__txt": asked} if asked else {}))
    assert {field for code, field in found if code == "ARG001"} == ({gone} if gone else set())


PARSED = """from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer
(args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
SFTTrainer("Qwen/Qwen3-0.6B", args=args, train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("asked", "gone"),
    [
        pytest.param("", {"--warmup_ratio", "--logging_dir"}, id="N5"),
        pytest.param("transformers==4.57.1\n", set(), id="N5-pinned"),
    ],
)
def test_arguments_of_a_launch_line_that_are_gone(asked: str, gone: set[str]) -> None:
    line = "python train.py --output_dir out --warmup_ratio 0.03 --logging_dir x --learning_rate 2e-4\n"
    beside = {"train__py": PARSED} | ({"requirements__txt": asked} if asked else {})
    found = check("run.sh", line, **beside)
    assert {field for code, field in found if code == "ARG001"} == gone
    assert all("slurm" not in finding["message"] for finding in found.values())


UNSLOTH = """from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Meta-Llama-3.1-8B-Instruct", load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules={targets}, lora_alpha=16)
SFTTrainer(model=model, args=SFTConfig(output_dir="o", learning_rate=2e-4), train_dataset=rows).train()
"""
ONE = TRL.format(rows="a/b").replace("5.0e-6", "2.0e-4")


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        pytest.param("t.yaml", ONE + "lora_target_modules: [query_key_value]\n", "lora_target_modules", id="N7-list"),
        pytest.param("t.yaml", ONE + "lora_target_modules: query_key_value\n", "lora_target_modules", id="N7-text"),
        pytest.param("t.yaml", ONE + "lora_target_modules: [q_proj]\n", "lora_target_modules", id="N7-never-matches"),
        pytest.param("t.yaml", ONE + "lora_target_modules: ['.*q_proj']\n", None, id="N7-pattern"),
        pytest.param("t.yaml", ONE + "lora_target_modules: [all-linear]\n", None, id="N7-all"),
        pytest.param("t.yaml", ONE + "lora_target_modules: [q_proj, v_proj]\n", None, id="N7-two"),
        pytest.param(
            "t.py", SCRIPT.format(name="SFT").replace('["q_proj", "v_proj"]', '"q_proj"'), "target_modules",
            id="N7-script",
        ),
        pytest.param("u.py", UNSLOTH.format(targets=["query_key_value"]), "target_modules", id="N8"),
        pytest.param("u.py", UNSLOTH.format(targets=["q_proj", "v_proj"]), None, id="N8-sound"),
    ],
)  # fmt: skip
def test_target_modules_that_match_nothing(name: str, text: str, field: str | None) -> None:
    assert {shown for code, shown in check(name, text) if code == "MOD008"} == ({field} if field else set())


def test_a_deprecated_argument_of_a_script_names_its_class() -> None:
    text = (
        "from transformers import TrainingArguments\n"
        "args = TrainingArguments(output_dir='o', evaluation_strategy='steps', eval_steps=5)\n"
    )
    found = check("t.py", text, requirements__txt="transformers==4.46.3\n")
    assert found["ARG005", "evaluation_strategy"]["message"].endswith("TrainingArguments")


GRPO = """from trl import GRPOConfig
args = GRPOConfig(output_dir="o", {arguments})
"""
GRPO_YAML = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
dataset_name: trl-lib/tldr
reward_funcs: [accuracy_reward]
num_generations: 8
per_device_train_batch_size: 2
output_dir: o
"""
ACCELERATE = "accelerate launch --num_processes {count} t.py\n"


@pytest.mark.parametrize(
    ("name", "text", "launch", "code"),
    [
        pytest.param(
            "t.py", GRPO.format(arguments="per_device_train_batch_size=2, num_generations=8"), "", "ARG024", id="N6"
        ),
        pytest.param("t.py", GRPO.format(arguments="per_device_train_batch_size=2"), "", "ARG024", id="N6-default"),
        pytest.param("t.py", GRPO.format(arguments="per_device_train_batch_size=n"), "", None, id="N6-computed"),
        pytest.param("t.py", GRPO.format(arguments="num_generations=8"), "", None, id="N6-sound"),
        pytest.param(
            "t.py", GRPO.format(arguments="per_device_train_batch_size=2, gradient_accumulation_steps=4"), "", None,
            id="N6-accumulated",
        ),
        pytest.param("t.py", GRPO.format(arguments="generation_batch_size=12"), "", "CFG004", id="N6-given"),
        pytest.param(
            "t.py", GRPO.format(arguments="per_device_train_batch_size=2"), ACCELERATE.format(count=4), None,
            id="N6-four-processes",
        ),
        pytest.param(
            "t.py", GRPO.format(arguments="per_device_train_batch_size=2"), ACCELERATE.format(count=3), "CFG004",
            id="N6-three-processes",
        ),
        pytest.param(
            "t.py", "from unsloth import FastLanguageModel\n" + GRPO.format(arguments="per_device_train_batch_size=1"),
            "", None, id="N6-unsloth",
        ),
        pytest.param("t.yaml", GRPO_YAML, "", "ARG024", id="N6-yaml"),
        pytest.param("t.yaml", GRPO_YAML + "gradient_accumulation_steps: 4\n", "", None, id="N6-yaml-sound"),
        pytest.param("t.yaml", GRPO_YAML + "num_processes: 4\n", "", None, id="N6-yaml-processes"),
        pytest.param("t.yaml", GRPO_YAML + "num_processes: 3\n", "", "CFG004", id="N6-yaml-three"),
    ],
)  # fmt: skip
def test_generation_batches_of_whole_groups(name: str, text: str, launch: str, code: str | None) -> None:
    found = check(name, text, **({"run__sh": launch} if launch else {}))
    assert {found for found, field in found if field == "num_generations"} == ({code} if code else set())


CONDA = "name: x\ndependencies:\n  - python=3.11\n{entries}"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param("  - pip:\n    - transformers=4.46.3\n", {("CFG004", None)}, id="N10-alone"),
        pytest.param("  - pip:\n    - peft==0.13.2\n    - trl=0.12.2\n", {("CFG004", None)}, id="N10-beside"),
        pytest.param("  - pytorch=2.4.1\n  - torchvision=0.15.2\n", {("STK004", "torchvision")}, id="N10-torchvision"),
        pytest.param("  - pytorch=2.4.1\n  - torchvision=0.19.1\n", set(), id="N10-sound"),
        pytest.param(
            "  - transformers=4.46.3\n  - tokenizers=0.13.3\n", {("STK005", "tokenizers")}, id="N10-tokenizers"
        ),
        pytest.param("  - tzdata=2024a\n  - numpy=1.26.*\n  - pip:\n    - -e .\n", set(), id="N10-conda-only"),
        pytest.param("  - peft\n  - pip:\n    - git+https://example.org/x.git\n    - -r r.txt\n", set(), id="N10-url"),
    ],
)
def test_conda_environments(entries: str, expected: set[tuple[str, str | None]]) -> None:
    found = check("environment.yml", CONDA.format(entries=entries))
    assert set(found) == expected


@pytest.mark.parametrize("deepspeed", [True, False], ids=["N2b", "N2b-without"])
def test_an_absent_deepspeed_file_is_not_judged(deepspeed: bool) -> None:
    text = AXOLOTL.replace("adapter: lora\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\n", "")
    text = text.replace("bf16: auto", "bf16: true").replace("0.000005", "0.00001")
    found = check("a.yml", text + ("deepspeed: deepspeed_configs/zero3_bf16.json\n" if deepspeed else ""))
    assert (("PRC006", "learning_rate") in found) is not deepspeed


def test_a_dockerfile_is_no_config() -> None:
    Path("Dockerfile").write_text("# cuda\nFROM nvidia/cuda:12.4.1-devel-ubuntu22.04\nRUN pip install trl\n")
    Path("job").write_text("ARG BASE=x\nFROM python:3.12 AS base\nRUN pip install trl\n")
    for name in ("Dockerfile", "job"):
        with pytest.raises(ConfigError) as caught:
            detect_tool(Path(name))
        assert caught.value.code == "E3901"
        assert CliRunner().invoke(app, ["check", name]).exit_code == 2


@pytest.mark.parametrize("key", ["iam_role_name", "profile", "pytorch_version", "image_uri", "region"])
def test_keys_for_sagemaker_have_one_reason(key: str) -> None:
    assert unmapped_reason(key) == unmapped_reason("ec2_instance_type")
