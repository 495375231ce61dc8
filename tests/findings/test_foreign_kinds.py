"""Kinds of faults in other tools' files, tried on files other than those of benchmarks/breakages.

Each has a sound neighbour, for which nothing may be said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.facts.module_names import LAYERS, type_in_name
from surefit.facts.sbatch_syntax import find_syntax_faults
from surefit.facts.shell import options_alone
from surefit.importers.releases import minimum_python, requirements_of
from surefit.importers.turn_markers import marker_of_model


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / ".git").mkdir()  # nothing above belongs to the project


def check(**files: str) -> list[dict[str, Any]]:
    """The findings of `surefit check` on the first file; an underscore pair stands for the dot of a name."""
    names = [name.replace("__", ".").replace("_in_", "/") for name in files]
    for name, text in zip(names, files.values(), strict=True):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    answer = CliRunner().invoke(app, ["check", names[0], "--json"])
    said = json.loads(answer.stdout.strip().splitlines()[-1])
    return list(said.get("findings", [said]))


def found(**files: str) -> set[tuple[str, int | None]]:
    """(code or error's code, line) of errors and warnings."""
    return {
        (each.get("error") or each["code"], each.get("line")) for each in check(**files) if each["severity"] != "info"
    }


def codes(**files: str) -> set[str]:
    return {code for code, _ in found(**files)}


# ---------------------------------------------------------------- SLURM and shell scripts

JOB = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=16
{options}
{before}
torchrun --standalone --nproc_per_node=2 train_sft.py \\
    --epochs 2 \\
    --rank 8
"""


def job(options: str = "#SBATCH --mem=64G", before: str = "set -e") -> str:
    return JOB.format(options=options, before=before)


def test_a_sound_job_has_no_finding() -> None:
    assert found(job__sbatch=job()) == set()


@pytest.mark.parametrize(
    ("option", "fires"),
    [
        ("--mem=512", True), ("--mem=512M", True), ("--mem-per-cpu=64", True), ("--mem-per-gpu=800M", True),
        ("--mem=0", False), ("--mem=4000", False), ("--mem-per-cpu=4G", False), ("--mem=1T", False),
    ],
)  # fmt: skip
def test_memory_is_read_with_its_unit(option: str, fires: bool) -> None:
    assert (("SLM042", 6) in found(job__sbatch=job(f"#SBATCH {option}"))) is fires


@pytest.mark.parametrize(
    ("option", "before", "fires"),
    [
        ("--output=runs/%j/log.txt", "set -e", True), ("--error=/scratch/logs/%j.err", "mkdir -p /scratch/logs", True),
        ("--output=absent/%j.out", "set -e", True), ("--output=there/%j.out", "set -e", False),
        ("--output=/scratch/logs/%j.out", "set -e", False), ("--output=%x-%j.out", "mkdir -p out", False),
    ],
)  # fmt: skip
def test_the_folder_of_a_log_has_to_be_there(option: str, before: str, fires: bool) -> None:
    Path("there").mkdir()
    assert (("SLM043", 6) in found(job__sbatch=job(f"#SBATCH {option}", before))) is fires


@pytest.mark.parametrize(
    ("before", "fires"),
    [
        ("export CUDA_VISIBLE_DEVICES=1", True), ("CUDA_VISIBLE_DEVICES=2,3", True),
        ("export CUDA_VISIBLE_DEVICES=0,1", False), ("export CUDA_VISIBLE_DEVICES=$MINE", False),
    ],
)  # fmt: skip
def test_visible_devices_are_counted(before: str, fires: bool) -> None:
    assert (("SLM044", 7) in found(job__sbatch=job(before=before))) is fires


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("torchrun a.py\n  --rank 8\n", [2]), ("torchrun a.py \\\n# note\n  --rank 8\n", [3]),
        ("torchrun a.py \\\n\n  --rank 8\n", [3]), ("torchrun a.py \\\n  --rank 8\n", []),
        ("ARGS=(\n  --rank 8\n)\n", []), ("ARGS='\n--rank 8'\n", []), ("cat <<END\n--rank 8\nEND\n", []),
        ('case "$1" in\n  --rank) r=8 ;;\n  -a|--all)\n ;;\nesac\n', []),
        ("f() {\n  torchrun a.py\n  --rank 8\n}\n", []),
    ],
)  # fmt: skip
def test_a_line_that_begins_with_an_option_has_to_continue_one(text: str, lines: list[int]) -> None:
    assert [line for line, _ in options_alone(text)] == lines


@pytest.mark.parametrize(
    ("launch", "code"),
    [
        ("deepspeed --include localhost:0,1 --exclude localhost:1 train.py", "SLM046"),
        ("deepspeed --num_nodes 2 --include worker-0:0 train.py", "SLM046"),
        ("accelerate launch --use_fsdp --multi_gpu train.py", "SLM046"),
        ("accelerate launch --multi_gpu --num_processes 1 train.py", "SLM046"),
        ("torchrun --standalone --nnodes=3 --nproc_per_node=2 train.py", "SLM046"),
    ],
)
def test_launchers_do_not_take_these_options_together(launch: str, code: str) -> None:
    assert (code, 2) in found(run__sh=f"#!/bin/bash\n{launch}\n")


@pytest.mark.parametrize("launch", ["deepspeed --num_gpus 2 train.py", "accelerate launch --multi_gpu train.py"])
def test_launchers_take_these(launch: str) -> None:
    assert "SLM046" not in codes(run__sh=f"#!/bin/bash\n{launch}\n")


def test_more_machines_than_nodes_are_waited_for() -> None:
    several = "srun torchrun --nnodes=4 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=$HOST:29500"
    text = job().replace("torchrun --standalone --nproc_per_node=2", several)
    assert ("SLM007", 8) in found(job__sbatch=text)
    assert "SLM007" not in codes(
        job__sbatch=text.replace("#SBATCH --nodes=1", "#SBATCH --array=0-3\n#SBATCH --nodes=1")
    )
    assert "SLM007" not in codes(job__sbatch=text.replace("--nnodes=4", "--nnodes=4 --node_rank=$1"))


@pytest.mark.parametrize(
    ("array", "wrong"), [("7-3", True), ("0-9:0", True), ("1-4%0", True), ("0-9", False), ("1,3-5:2%2", False)]
)
def test_the_bounds_of_an_array(array: str, wrong: bool) -> None:
    assert bool(list(find_syntax_faults(f"#!/bin/bash\n#SBATCH --array={array}\n"))) is wrong


# ---------------------------------------------------------------- requirements


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("axolotl==0.9.2\ntransformers==4.46.3\n", "transformers"), ("llamafactory==0.9.3\ntrl==0.24.0\n", "trl"),
        ("unsloth==2026.10.9\npeft==0.13.0\n", "peft"),
    ],
)  # fmt: skip
def test_pinned_tools_ask_for_other_releases(text: str, field: str) -> None:
    said = check(requirements__txt=text)
    assert [(each["code"], each["field"]) for each in said if each["severity"] != "info"] == [("STK005", field)]


def test_a_tool_with_the_releases_it_asks_for_is_sound() -> None:
    assert codes(requirements__txt="axolotl==0.19.0\ntrl==1.9.0\npeft==0.20.0\ntransformers==5.16.1\n") == set()
    assert codes(requirements__txt="axolotl==0.0.1\ntrl==1.9.0\n") == set()  # not in the table


def test_a_release_between_two_asks_for_what_both_do() -> None:
    asked = requirements_of("unsloth", "2026.9.1")  # between 2026.8.22 and 2026.10.9
    assert any(text.startswith("bitsandbytes") for text in asked)
    assert not requirements_of("axolotl", "9.0.0")


CONDA = "name: e\nchannels: [conda-forge]\ndependencies:\n  - {python}\n  - pip\n  - pip:\n    - {pin}\n"


@pytest.mark.parametrize(
    ("python", "pin", "fires"),
    [
        ("python=3.9", "transformers==5.2.0", True), ("python<3.9", "peft>=0.17", True),
        ("python=3.10", "transformers==5.2.0", False), ("python>=3.8", "peft>=0.17", False),
        ("python=3.8", "trl>=0.9", False),
    ],
)  # fmt: skip
def test_the_python_that_is_asked_for(python: str, pin: str, fires: bool) -> None:
    assert (("E3950", 4) in found(environment__yml=CONDA.format(python=python, pin=pin))) is fires


def test_the_python_of_a_project() -> None:
    project = '[project]\nname = "a"\nrequires-python = "==3.8.*"\ndependencies = ["accelerate>=1.2"]\n'
    assert ("E3950", 3) in found(pyproject__toml=project)
    assert "E3950" not in codes(pyproject__toml=project.replace("==3.8.*", ">=3.8"))
    assert minimum_python("accelerate", ">=1.2") == "3.9"


def test_where_conda_looks_for_packages() -> None:
    body = "name: e\ndependencies:\n  - pytorch=2.6\n"
    assert ("E3951", 4) in found(environment__yml=f"{body}packages:\n  - trl==0.15.2\n")
    assert ("E3952", 4) in found(environment__yml=f"{body}  - pip: trl==0.15.2\n")
    assert not codes(environment__yml=f"{body}  - pip: [trl==0.15.2]\nvariables: {{A: b}}\n") & {"E3951", "E3952"}


# ---------------------------------------------------------------- models by name

TRL = """model_name_or_path: {model}
dtype: bfloat16
use_peft: true
lora_r: 8
lora_alpha: 16
lora_target_modules: {targets}
dataset_name: trl-lib/Capybara
output_dir: runs/a
max_length: 1024
learning_rate: 1.0e-4
num_train_epochs: 1
"""


@pytest.mark.parametrize(
    ("model", "targets", "fires"),
    [
        ("openai-community/gpt2", "[q_proj, v_proj]", True), ("tiiuae/falcon-7b", "[q_proj, k_proj]", True),
        ("microsoft/Phi-3-mini-4k-instruct", "[q_proj, v_proj]", True), ("facebook/opt-350m", "[c_attn, c_proj]", True),
        ("bigscience/bloom-560m", "[query_key_value, dense]", False), ("a/b", "[q_proj, v_proj]", False),
        ("google/gemma-2-2b", "[q_proj, qkv_proj]", False), ("facebook/opt-350m", "[query_key_value]", True),
        ("a/b", "[query_key_value]", True), ("a/b", "all-linear", False),
    ],
)  # fmt: skip
def test_target_modules_by_the_name_of_the_model(model: str, targets: str, fires: bool) -> None:
    assert (("MOD028", 6) in found(sft__yaml=TRL.format(model=model, targets=targets))) is fires


def test_the_class_of_layers_by_the_name_of_the_model() -> None:
    config = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: {}\n"
        "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 2\n"
    )
    rest = {
        "go__sh": "accelerate launch --config_file fsdp.yaml tune.py\n",
        "tune__py": 'from trl import SFTTrainer\nSFTTrainer(model="google/gemma-2-2b", train_dataset=rows).train()\n',
    }
    assert ("PAR024", 6) in found(fsdp__yaml=config.format("Qwen2DecoderLayer"), **rest)
    assert "PAR024" not in codes(fsdp__yaml=config.format("Gemma2DecoderLayer"), **rest)
    assert "PAR024" not in codes(fsdp__yaml=config.format("MyLayer"), **rest)
    assert "PAR024" not in codes(fsdp__yaml=config.format("Qwen2DecoderLayer"), go__sh="echo\n")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(LAYERS))
def test_the_names_of_layers_are_those_of_transformers(model_type: str) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModel
    from transformers.pytorch_utils import Conv1D

    small = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "vocab_size": 64, "intermediate_size": 32, "pad_token_id": 0,
    }  # fmt: skip
    known = vars(CONFIG_MAPPING[model_type]())
    config = CONFIG_MAPPING[model_type](**{name: value for name, value in small.items() if name in known})
    with torch.device("meta"):
        model = AutoModel.from_config(config, trust_remote_code=False)
    linear = {
        name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, torch.nn.Linear | Conv1D)
    }
    classes = {type(each).__name__ for each in model.modules()}
    assert linear & LAYERS[model_type].linear, linear
    assert LAYERS[model_type].layer_class in classes
    assert not {name for name in linear - LAYERS[model_type].linear if "proj" in name and "rotary" not in name}


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama"), ("Qwen/Qwen3-8B", "qwen3"), ("Qwen/Qwen3-30B-A3B", None),
        ("Qwen/Qwen2.5-VL-7B-Instruct", None), ("tiiuae/Falcon3-7B-Base", "llama"), ("microsoft/phi-2", "phi"),
        ("microsoft/phi-4", "phi3"), ("google/flan-t5-base", "t5"), ("./llama-3", None),
        ("EleutherAI/gpt-j-6b", "gptj"),
    ],
)  # fmt: skip
def test_types_in_names(name: str, model_type: str | None) -> None:
    assert type_in_name(name) == model_type


# ---------------------------------------------------------------- DeepSpeed, Accelerate, TRL, Axolotl, LLaMA-Factory


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ("distributed_type: DEEPSPEED\nmixed_precision: bf16\n", "mixed_precision"),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\n", "gradient_clipping"),
        ("mixed_precision: bf16\nnum_processes: 2\n", "distributed_type"),
    ],
)
def test_accelerate_stops_at(config: str, key: str) -> None:
    text = f"compute_environment: LOCAL_MACHINE\n{config}machine_rank: 0\nnum_machines: 1\n"
    section = "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    section += "  gradient_clipping: 1.0\n" if key == "gradient_clipping" else ""
    text += "" if key == "distributed_type" else section
    said = check(accelerate__yaml=text, ds__json='{"zero_optimization": {"stage": 2}}')
    assert any(key in f"{each['field']} {each['message']}" for each in said if each["severity"] == "error"), said


@pytest.mark.parametrize(("key", "value"), [("stage3_max_live_parameters", -1), ("reduce_bucket_size", 0)])
def test_sizes_of_deepspeed(key: str, value: int) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 3, key: value}}
    assert [each["field"] for each in check(ds__json=json.dumps(config))] == [f"zero_optimization.{key}"]


@pytest.mark.parametrize(
    ("deepspeed", "lines", "field"),
    [
        ('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}', "fp16: true\n", "fp16"),
        ('{"gradient_accumulation_steps": 8, "zero_optimization": {"stage": 2}}', "fp16: true\n", "deepspeed"),
        ('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}', "bf16: true\n", None),
    ],
)
def test_the_defaults_of_the_trainer_have_to_agree_with_deepspeed(deepspeed: str, lines: str, field: str) -> None:
    text = "model_name_or_path: a/b\nstage: sft\ndo_train: true\nfinetuning_type: full\ndataset: x\ntemplate: qwen\n"
    text += f"output_dir: o\nmax_steps: 10\ndeepspeed: ds.json\n{lines}"
    said = {each["field"] for each in check(train__yaml=text, ds__json=deepspeed) if each["severity"] == "error"}
    assert said == ({field} if field else set())


PINS = "trl=={trl}\ntransformers=={transformers}\n"


OLD = PINS.format(trl="0.15.2", transformers="4.49.0")
NEW = PINS.format(trl="1.16.0", transformers="5.23.0")


@pytest.mark.parametrize(
    ("old", "pins", "found_at"),
    [
        (True, OLD, set()), (True, NEW, {("ARG001", 2), ("ARG001", 9)}), (True, "datasets==3.0.0\n", {("ARG001", 2)}),
        (False, OLD, {("E3017", 2), ("E3017", 9)}), (False, NEW, set()), (False, "datasets==3.0.0\n", set()),
    ],
)  # fmt: skip
def test_trl_is_judged_by_the_releases_that_are_pinned(old: bool, pins: str, found_at: set[tuple[str, int]]) -> None:
    text = TRL.format(model="a/b", targets="all-linear")
    if old:
        text = text.replace("dtype:", "torch_dtype:").replace("max_length:", "max_seq_length:")
    said = {each for each in found(sft__yaml=text, requirements__txt=pins) if each[0] in ("ARG001", "E3017")}
    assert said >= found_at if found_at else not said


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("loss_type: [sigmoid, sft]\nloss_weights: [1.0]\n", "loss_weights"),
        ("loss_type: exo_pair\nlabel_smoothing: 0\n", "label_smoothing"),
        ("generation_batch_size: 16\nsteps_per_generation: 2\n", "steps_per_generation"),
    ],
)
def test_trl_does_not_take_together(lines: str, key: str) -> None:
    text = "model_name_or_path: a/b\ndataset_name: x/prefs\noutput_dir: o\nbeta: 0.1\n"
    assert key in {each["field"] for each in check(dpo__yaml=text + lines) if each["severity"] == "error"}
    sound = "loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.1]\n"
    assert "loss_weights" not in {each["field"] for each in check(dpo__yaml=text + sound)}


AXOLOTL = """base_model: a/b
datasets:
  - path: {path}
    type: chat_template
{entry}
sequence_len: 1024
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 0.0001
optimizer: adamw_torch
output_dir: o
{lines}
"""


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("rl: kto\nremove_unused_columns: false\ndpo_loss_weights: [1.0]", "dpo_loss_weights"),
        ("rl: dpo\ndpo_loss_type: [sigmoid, sft]\ndpo_loss_weights: [1.0]", "dpo_loss_weights"),
        ("rl: grpo\ntrl:\n  num_generations: 1", "num_generations"),
        ("rl: grpo\ntrl:\n  num_generations: 3", "num_generations"),
        ("rl: simpo\nwarmup_ratio: 0.1", "warmup_ratio"),
        ("relora: true\njagged_restart_steps: 9\ndeepspeed: d.json", "relora"),
        ("cut_cross_entropy: true\nliger_cross_entropy: true", "liger_cross_entropy"),
    ],
)  # fmt: skip
def test_axolotl_does_not_take_together(lines: str, key: str) -> None:
    said = check(config__yml=AXOLOTL.format(path="x/y", entry="", lines=lines))
    assert any(key in f"{each['field']} {each['message']}" for each in said if each["severity"] == "error"), said


def test_groups_that_a_step_holds_are_sound() -> None:
    lines = "rl: grpo\ntrl:\n  num_generations: 4"
    said = check(config__yml=AXOLOTL.format(path="x/y", entry="", lines=lines))
    assert not any("num_generations" in each["message"] for each in said)


TURNS = '{"chat": [{"speaker": "human", "content": "a"}, {"speaker": "helper", "content": "b"}]}\n'


@pytest.mark.parametrize(
    ("entry", "fires"),
    [
        ("roles_to_train: [assistant]", True), ("roles_to_train: [helper]", False),
        ("roles_to_train: [assistant]\n    roles: {assistant: [helper], user: [human]}", False),
    ],
)  # fmt: skip
def test_roles_to_train_are_those_of_the_rows(entry: str, fires: bool) -> None:
    whole = f"    field_messages: chat\n    message_property_mappings: {{role: speaker, content: content}}\n    {entry}"
    said = check(config__yml=AXOLOTL.format(path="rows.jsonl", entry=whole, lines=""), rows__jsonl=TURNS)
    assert ("datasets[0].roles_to_train" in {each["field"] for each in said}) is fires


FACTORY = """model_name_or_path: a/b
stage: {stage}
do_train: true
finetuning_type: lora
lora_target: all
dataset: mine
dataset_dir: .
template: qwen
output_dir: o
max_steps: 10
bf16: true
"""
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CHATS = json.dumps([{"talk": TALK, "q": "x", "a": "y", "b": "z"}])
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


@pytest.mark.parametrize(
    ("stage", "entry", "fires"),
    [
        ("rm", {"columns": {"prompt": "q", "chosen": "a", "rejected": "b"}}, True),
        ("rm", {"ranking": True, "columns": {"prompt": "q", "chosen": "a"}}, True),
        ("rm", {"ranking": True, "columns": {"prompt": "q", "chosen": "a", "rejected": "b"}}, False),
        ("sft", {"ranking": True, "columns": {"prompt": "q", "chosen": "a", "rejected": "b"}}, True),
        ("kto", {"columns": {"prompt": "q", "response": "a"}}, True),
        ("sft", {"formatting": "sharegpt", "columns": {"messages": "talk"}}, True),
        ("sft", {"formatting": "openai", "columns": {"messages": "talk"}, "tags": {"role_tag": "role"}}, True),
        ("sft", {"formatting": "openai", "columns": {"messages": "talk"}, "tags": TAGS}, False),
        ("sft", {"formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": TAGS | {"user_tag": "x"}}, True),
    ],
)  # fmt: skip
def test_entries_of_llama_factory(stage: str, entry: dict[str, Any], fires: bool) -> None:
    info = json.dumps({"mine": {"file_name": "chats.json", **entry}})
    said = check(train__yaml=FACTORY.format(stage=stage), dataset_info__json=info, chats__json=CHATS)
    errors = {each["field"] for each in said if each["severity"] == "error"}
    assert errors == ({"dataset"} if fires else set()), said


def test_arguments_of_generation_do_nothing_in_training() -> None:
    said = check(train__yaml=FACTORY.format(stage="pt") + "max_new_tokens: 64\npref_beta: 0.2\n")
    assert {("ARG003", 12), ("ARG003", 13)} <= {(each["code"], each["line"]) for each in said}
    assert ("ARG003", 12) not in found(train__yaml=FACTORY.format(stage="dpo") + "pref_beta: 0.2\n")


# ---------------------------------------------------------------- Python scripts

HEAD = """from datasets import load_dataset
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer,
    DataCollatorForLanguageModeling, DataCollatorWithPadding, EarlyStoppingCallback, Trainer, TrainingArguments)
from trl import DPOConfig, DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2")
model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
raw = load_dataset("some/rows", split="train")
"""


def errors(body: str, head: str = HEAD, **files: str) -> set[str]:
    """The fields of the errors in a script."""
    return {each["field"] for each in check(train__py=head + body, **files) if each["severity"] == "error"}


def warnings(body: str, head: str = HEAD) -> set[str]:
    return {each["code"] for each in check(train__py=head + body) if each["severity"] == "warning"}


TOKENIZED = 'rows = raw.map(lambda row: tokenizer(row["text"]), remove_columns=["text"])\n'
SOUND = TOKENIZED + "Trainer(model=model, train_dataset=rows, data_collator={}).train()\n"


@pytest.mark.parametrize(
    ("collator", "field"),
    [
        ("DataCollatorForLanguageModeling(tokenizer)", "mlm"),
        ("DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=True)", "mlm"),
        ("DataCollatorForLanguageModeling(tokenizer, False)", None),
        ("DataCollatorWithPadding(tokenizer)", "data_collator"), ("None", None),
    ],
)  # fmt: skip
def test_collators_of_a_decoder(collator: str, field: str | None) -> None:
    assert errors(SOUND.format(collator)) == ({field} if field else set())


def test_collators_of_other_models_are_left_alone() -> None:
    encoder = HEAD.replace("model = AutoModelForCausalLM", "model = AutoModelForMaskedLM")
    assert errors(SOUND.format("DataCollatorForLanguageModeling(tokenizer)"), encoder) == set()
    assert errors("Trainer(model=model, train_dataset=raw).train()\n") == set()  # may have labels already
    assert errors(TOKENIZED + "Trainer(model=model, train_dataset=rows).train()\n") == {"data_collator"}


@pytest.mark.parametrize(
    ("body", "fires"),
    [
        ("ref = model\nDPOTrainer(model, ref_model=ref, train_dataset=raw)\n", True),
        ("KTOTrainer(model=model, ref_model=model, train_dataset=raw)\n", True),
        ("import copy\nDPOTrainer(model, ref_model=copy.deepcopy(model), train_dataset=raw)\n", False),
        ("DPOTrainer(model, ref_model=None, train_dataset=raw)\n", False),
    ],
)
def test_a_reference_that_is_the_model(body: str, fires: bool) -> None:
    assert ("ref_model" in errors(body)) is fires


@pytest.mark.parametrize(
    ("steps", "trainer", "column"),
    [
        ('raw.remove_columns(["rejected", "score"])', "RewardTrainer", "rejected"),
        ('raw.rename_column("prompt", "question")', "GRPOTrainer", "prompt"),
        ('raw.select_columns(["prompt", "chosen"]).shuffle(seed=1)', "DPOTrainer", "rejected"),
        ('raw.rename_column("chosen", "good").rename_column("good", "chosen")', "DPOTrainer", None),
        ('raw.remove_columns(["chosen"]).map(make)', "DPOTrainer", None),
        ('raw.map(lambda row: {"chosen": row["a"]}, remove_columns=["a"])', "DPOTrainer", None),
    ],
)
def test_columns_that_a_trainer_reads(steps: str, trainer: str, column: str | None) -> None:
    assert errors(f"rows = {steps}\n{trainer}(model=model, train_dataset=rows)\n") == ({column} if column else set())


@pytest.mark.parametrize(
    ("body", "fires"),
    [
        ('model = PeftModel.from_pretrained(model, "out")\nmodel = prepare_model_for_kbit_training(model)\n', True),
        ("model.add_adapter(LoraConfig(r=8))\nmodel = prepare_model_for_kbit_training(model)\n", True),
        ("model = prepare_model_for_kbit_training(model)\nmodel = get_peft_model(model, LoraConfig(r=8))\n", False),
    ],
)
def test_preparing_a_model_freezes_its_adapter(body: str, fires: bool) -> None:
    said = errors(body + "SFTTrainer(model=model, train_dataset=raw).train()\n")
    assert ("prepare_model_for_kbit_training" in said) is fires


def test_an_adapter_is_added_once() -> None:
    body = "model = get_peft_model(model, LoraConfig(r=8))\n{}SFTTrainer(model=model, {}train_dataset=raw).train()\n"
    assert errors(body.format("", "peft_config=LoraConfig(r=8), ")) == {"peft_config"}
    assert errors(body.format("", "")) == set()
    old = {"requirements__txt": "trl==0.15.2\ntransformers==4.49.0\n"}
    assert "peft_config" not in errors(body.format("", "peft_config=LoraConfig(r=8), "), **old)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("", "eval_strategy"), ('eval_strategy="no"', "eval_strategy"),
        ('eval_strategy="epoch"', "metric_for_best_model"),
        ('eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True', None),
        ("eval_strategy=chosen", None),
    ],
)  # fmt: skip
def test_early_stopping_needs_evaluations(arguments: str, field: str | None) -> None:
    body = (
        f'args = TrainingArguments("o", {arguments})\n'
        + TOKENIZED
        + (
            "Trainer(model=model, args=args, train_dataset=rows, eval_dataset=x,\n"
            "    callbacks=[EarlyStoppingCallback(2)],\n"
            "    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)).train()\n"
        )
    )
    assert errors(body) == ({field} if field else set())


def test_the_best_checkpoint_needs_a_metric_that_is_computed() -> None:
    body = (
        'args = TrainingArguments("o", eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,\n'
        '    metric_for_best_model="{}")\nTrainer(model=model, args=args, train_dataset=raw, eval_dataset=x{})\n'
    )
    assert errors(body.format("f1", "")) == {"metric_for_best_model"}
    assert errors(body.format("f1", ", compute_metrics=score")) == set()
    assert errors(body.format("eval_loss", "")) == set()


@pytest.mark.parametrize(
    ("value", "fires"), [('"latest"', True), ('"false"', True), ("True", False), ('"o/last"', False)]
)
def test_a_checkpoint_is_a_folder_or_a_switch(value: str, fires: bool) -> None:
    said = errors(f"SFTTrainer(model=model, train_dataset=raw).train(resume_from_checkpoint={value})\n")
    assert said == ({"resume_from_checkpoint"} if fires else set())


def test_packing_takes_no_collator() -> None:
    body = 'SFTTrainer(model=model, args=SFTConfig("o", packing={}), train_dataset=raw, data_collator=mine).train()\n'
    assert errors(body.format("True")) == {"packing"}
    assert errors(body.format('True, packing_strategy="wrapped"')) == set()
    assert errors(body.format("False")) == set()


UNSLOTH = """from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template, train_on_responses_only
from trl import SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("{model}", load_in_4bit=True{more})
{template}
def texts(rows):
    return {{"text": [tokenizer.apply_chat_template(each, tokenize=False) for each in rows["turns"]]}}
trainer = SFTTrainer(model=model, train_dataset=rows.map(texts, batched=True))
trainer = train_on_responses_only(trainer, instruction_part="x", response_part="{marker}")
"""


@pytest.mark.parametrize(
    ("model", "template", "marker", "field"),
    [
        ("unsloth/gemma-2-2b-it", "", "<|im_start|>assistant\\n", "response_part"),
        ("unsloth/gemma-2-2b-it", "", "<start_of_turn>model\\n", None),
        (
            "unsloth/Llama-3.1-8B",
            'tokenizer = get_chat_template(tokenizer, "chatml")',
            "<|assistant|>",
            "response_part",
        ),
        ("unsloth/Llama-3.1-8B", 'tokenizer = get_chat_template(tokenizer, "chatml")', "<|im_start|>assistant", None),
        ("unsloth/Llama-3.1-8B", 'tokenizer = get_chat_template(tokenizer, "lama-3")', "Answer", "chat_template"),
        ("unsloth/Llama-3.1-8B", "", "<|im_start|>assistant\\n", None),
    ],
)
def test_templates_and_markers_of_unsloth(model: str, template: str, marker: str, field: str | None) -> None:
    body = UNSLOTH.format(model=model, template=template, marker=marker, more="")
    assert errors(body, "") == ({field} if field else set())


def test_unsloth_loads_in_one_width() -> None:
    values = {"model": "unsloth/gemma-2-2b-it", "template": "", "marker": "<start_of_turn>model"}
    assert errors(UNSLOTH.format(**values, more=", load_in_8bit=True"), "") == {"load_in_8bit"}
    assert errors(UNSLOTH.format(**values, more=", load_in_8bit=False"), "") == set()
    assert marker_of_model("google/gemma-2-2b") is None


@pytest.mark.parametrize(
    ("lines", "fires"),
    [
        ('tokenizer.add_tokens(["<a>", "<b>"])', True), ('tokenizer.add_tokens("<a>")', True),
        ('tokenizer.add_special_tokens({"additional_special_tokens": ["<a>"]})', True),
        ('tokenizer.add_special_tokens({"pad_token": "<pad>"})', True),
        ("tokenizer.add_tokens(['<a>'])\nmodel.resize_token_embeddings(len(tokenizer))", False),
        ('tokenizer.add_special_tokens({"pad_token": "<|endoftext|>"})', False), ("tokenizer.add_tokens([])", False),
    ],
)  # fmt: skip
def test_new_tokens_need_rows(lines: str, fires: bool) -> None:
    assert ("MOD030" in warnings(f"{lines}\nSFTTrainer(model=model, train_dataset=raw).train()\n")) is fires


def test_a_few_new_tokens_fit_where_rows_are_spare() -> None:
    head = HEAD.replace("openai-community/gpt2", "Qwen/Qwen2.5-1.5B")
    body = "tokenizer.add_tokens([f'<{{i}}>' for i in range({})])\nSFTTrainer(model=model, train_dataset=raw)\n"
    assert "MOD030" not in warnings(body.format(40), head)
    assert "MOD030" in warnings(body.format(4000), head)


def test_the_tokenizer_of_another_model() -> None:
    head = HEAD.replace(
        'AutoModelForCausalLM.from_pretrained("openai-community/gpt2")',
        'AutoModelForCausalLM.from_pretrained("google/gemma-2-2b")',
    )
    body = "SFTTrainer(model=model, train_dataset=raw).train()\n"
    assert "MOD029" in warnings(body, head.replace("openai-community/gpt2", "Qwen/Qwen2.5-7B"))
    assert "MOD029" not in warnings(body, head.replace("openai-community/gpt2", "google/gemma-2-2b-it"))
    assert "MOD029" not in warnings(body, head)  # a family that no name tells
    assert "MOD029" in codes(
        config__yml=AXOLOTL.format(path="x/y", entry="", lines="tokenizer_config: Qwen/Qwen2.5-7B").replace(
            "a/b", "google/gemma-2-2b"
        )
    )


@pytest.mark.parametrize(
    ("function", "fires"),
    [
        ('ids["labels"] = [list(x) for x in ids["input_ids"]]', True), ('ids["labels"] = ids["input_ids"][:]', True),
        ('ids["labels"] = [-100 if x == pad else x for x in ids["input_ids"]]', False),
    ],
)  # fmt: skip
def test_padding_in_the_labels(function: str, fires: bool) -> None:
    body = f'def encode(row):\n    ids = tokenizer(row["text"], padding="max_length")\n    {function}\n    return ids\n'
    body += "rows = raw.map(encode)\nTrainer(model=model, train_dataset=rows{}).train()\n"
    assert ("LAB022" in warnings(body.format(""))) is fires
    assert "LAB022" not in warnings(
        body.format(", data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)")
    )


CLASSIFIER = HEAD.replace(
    'AutoModelForCausalLM.from_pretrained("openai-community/gpt2")',
    'AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased"{})',
)


@pytest.mark.parametrize(
    ("rows", "outputs", "fires"),
    [
        ('load_dataset("ag_news", split="train")', ", num_labels=3", True), ('load_dataset("glue", "mnli")', "", True),
        ('load_dataset("dair-ai/emotion")', ", num_labels=6", False), ('load_dataset("glue", "sst2")', "", False),
        ('load_dataset("json", data_files="own.jsonl", split="train")', ", num_labels=3", True),
        ('load_dataset("json", data_files="own.jsonl", split="train")', ", num_labels=5", False),
        ('load_dataset("ag_news")', ", num_labels=count", False), ('load_dataset("unknown/set")', "", False),
    ],
)  # fmt: skip
def test_as_many_outputs_as_classes(rows: str, outputs: str, fires: bool) -> None:
    Path("own.jsonl").write_text("".join(json.dumps({"text": "a", "label": label}) + "\n" for label in range(5)))
    head = CLASSIFIER.format(outputs).replace('load_dataset("some/rows", split="train")', rows)
    assert ("num_labels" in errors("Trainer(model=model, train_dataset=raw).train()\n", head)) is fires


def test_epochs_beside_steps_do_nothing() -> None:
    body = 'SFTTrainer(model=model, args=SFTConfig("o", max_steps={}, num_train_epochs=2), train_dataset=raw).train()\n'
    assert "ARG003" in warnings(body.format(30))
    assert "ARG003" not in warnings(body.format(-1))


BESIDE = {
    "setup__py": 'from setuptools import setup\nsetup(install_requires=["trl==0.15.2", "transformers==4.49.0"])\n',
    "Pipfile": '[packages]\ntrl = "==0.15.2"\ntransformers = {version = "==4.49.0"}\n',
}


@pytest.mark.parametrize("name", sorted(BESIDE))
def test_releases_are_looked_for_in_setup_py_and_in_a_pipfile(name: str) -> None:
    body = 'SFTTrainer(model=model, args=SFTConfig("o", max_seq_length=512), train_dataset=raw).train()\n'
    assert "ARG001" in codes(train__py=HEAD + body)
    Path("other").mkdir()
    assert "ARG001" not in codes(other_in_train__py=HEAD + body, **{f"other_in_{name}": BESIDE[name]})


@pytest.mark.parametrize(
    ("line", "fires"),
    [
        ('tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2", pad_token="<|endoftext|>")', True),
        ('tokenizer.add_special_tokens({"pad_token": tokenizer.eos_token})', True),
        ('tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2", pad_token="<|pad|>")', False),
        ('tokenizer.add_special_tokens({"pad_token": "<|endofprompt|>"})', False),
    ],
)
def test_padding_with_the_end_token_in_other_words(line: str, fires: bool) -> None:
    from surefit.importers.python_conflicts import find_eos_padding
    from surefit.importers.python_source import parse_script

    Path("train.py").write_text(HEAD + line + "\n")
    assert (find_eos_padding(parse_script(Path("train.py"))) == HEAD.count("\n") + 1) is fires
