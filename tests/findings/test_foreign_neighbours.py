"""Neighbours of the findings about other tools' files: the same faults in other spellings, and sound files beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app


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
    assert "2e-4" not in found["SCH003", "learning_rate"]["help"]


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
    assert {("MOD008", "target_modules"), ("SCH003", "learning_rate"), ("CFG004", "eval_strategy")} == set(found)


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
