"""The failures of the published projects that stood in a Python script or in a requirements file, each on its line.

The scripts are written for these tests, in the manner of the reports. A comment `#! CODE` marks what has to be found:
nothing else may be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.facts import hardware

Said = set[tuple[str, int]]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Said, Said]]:
    """said(text, name) → what `surefit check` finds as (code, line), and what the text's marks ask for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "detect_gpus", list)

    def run(text: str, name: str = "train.py") -> tuple[Said, Said]:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, ["check", name, "--json"])
        report = json.loads(result.stdout.strip().splitlines()[-1])
        assert all(finding["path"] == name for finding in report["findings"])
        errors = any(finding["severity"] == "error" for finding in report["findings"])
        assert result.exit_code == errors
        return {(finding["code"], finding["line"]) for finding in report["findings"]}, marked(text)

    return run


def marked(text: str) -> Said:
    """(code, line) of each `#! CODE CODE`."""
    found = ((number, re.search(r"#! (.*)", line)) for number, line in enumerate(text.splitlines(), 1))
    return {(code, number) for number, match in found if match for code in match[1].split()}


RANKER = '''"""Ranks twenty candidates with a language model in 4 bits."""

import argparse

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments
from transformers.data.processors.utils import InputFeatures  #! ARG007
from transformers.file_utils import ModelOutput

parser = argparse.ArgumentParser()
parser.add_argument("--base", default="meta-llama/Llama-2-7b-hf")
parser.add_argument("--lora_r", type=int, default=8)
args = parser.parse_args()
num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 1

bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_use_double_quant=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained(
    args.base,
    quantization_config=bnb_config,
    device_map="auto",  #! PAR002
)
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
model = get_peft_model(model, LoraConfig(r=args.lora_r, lora_alpha=32, lora_dropout=0.05))  #! PRC003
tokenizer = AutoTokenizer.from_pretrained(args.base)
hf_args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4 * num_gpus,  #! BAT005
    gradient_accumulation_steps=4,
    max_steps=11_056,
    save_steps=4_000,
    save_total_limit=2,
    evaluation_strategy="steps",  #! ARG001
    eval_steps=500,
    bf16=True,
    optim="paged_adamw_8bit",  #! MEM008
    deepspeed={"zero_optimization": {"stage": 2}},
    report_to="wandb",  #! TRK001
)
trainer = Trainer(
    model=model,
    args=hf_args,
    eval_dataset=held_out,
    tokenizer=tokenizer,  #! ARG001
)
trainer.train()
'''


def test_the_ranker(said) -> None:
    found, asked = said(RANKER)
    assert found == asked


def test_the_ranker_as_it_should_be(said) -> None:
    text = RANKER.replace("4 * num_gpus", "4").replace("evaluation_strategy", "eval_strategy")
    text = text.replace("    tokenizer=tokenizer", "    processing_class=tokenizer").replace('"wandb"', '"none"')
    text = text.replace('    device_map="auto",', "").replace("0.05))", "0.05), autocast_adapter_dtype=False)")
    text = text.replace("paged_adamw_8bit", "adamw_torch")
    found, _ = said(text.replace("from transformers.data.processors.utils import InputFeatures", ""))
    assert found == set()


def test_a_variable_answers_the_tracker_s_question(said) -> None:
    text = RANKER.replace("import argparse", 'import argparse\nimport os\n\nos.environ["WANDB_MODE"] = "offline"')
    found, asked = said(text)
    assert asked - found == {("TRK001", 46)}


@pytest.mark.parametrize("micro", ["4 * torch.cuda.device_count()", "max(1, num_gpus) * 4", "own.micro"])
def test_a_batch_per_device_times_the_devices(said, micro: str) -> None:
    text = RANKER.replace("hf_args =", "own = args\nown.micro = 4 * num_gpus\nhf_args =")
    found, asked = said(text.replace("4 * num_gpus,", f"{micro},"))
    assert found == asked


QUANTISED = '''"""Distils answers into an adapter, and merges it."""

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

BASE = "meta-llama/Meta-Llama-3.1-8B-Instruct"
SAVE_STEPS = 1000
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(BASE, quantization_config=quantization)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="checkpoints",
        max_steps=28_000,
        save_steps=SAVE_STEPS,  #! CKP002
        bf16=True,
    ),
    peft_config=LoraConfig(r=64, lora_alpha=16, target_modules="all-linear"),
)
trainer.train()
merged = trainer.model.merge_and_unload()  #! MRG001
merged.save_pretrained("merged")
'''


def test_an_adapter_merged_into_its_four_bit_base(said) -> None:
    found, asked = said(QUANTISED)
    assert found == asked


def test_a_model_whose_name_says_that_it_is_stored_in_four_bits(said) -> None:
    text = """from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit")
merged = PeftModel.from_pretrained(base, "adapter").merge_and_unload()  #! MRG001
"""
    found, asked = said(text, "merge.py")
    assert found == asked


def test_a_merge_into_the_original_base(said) -> None:
    """The base is loaded anew, in 16 bits: another model than the one that was trained, which is said and no error."""
    again = """\
base = AutoModelForCausalLM.from_pretrained(BASE, torch_dtype=torch.bfloat16)
model = PeftModel.from_pretrained(base, "checkpoints/checkpoint-28000")
merged = model.merge_and_unload()"""
    text = QUANTISED.replace("merged = trainer.model.merge_and_unload()", again).replace(
        "save_steps=SAVE_STEPS,", "save_steps=SAVE_STEPS, save_total_limit=2,"
    )
    found, _ = said(text)
    assert {code for code, _ in found} == {"MRG002"}


def test_what_merges_cannot_be_told_is_not_judged(said) -> None:
    branch = "quantization_config=quantization if args.qlora else None"
    found, _ = said(QUANTISED.replace("quantization_config=quantization", branch).replace("save_steps=SAVE_STEPS,", ""))
    assert found == set()


PARSER = '''"""A 7B parser on one card of 24 GB."""

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

MODEL_NAME = "Qwen/Qwen2.5-7B-Instruct"
model = AutoModelForCausalLM.from_pretrained(
    MODEL_NAME,
    device_map="auto",
    max_memory={0: "14GB", "cpu": "50GB"},  #! MEM003
    torch_dtype=torch.float16,  #! PRC002
)
model.gradient_checkpointing_enable()
trainer = Trainer(model=model, args=TrainingArguments("out", max_steps=900, save_total_limit=2))
trainer.train()
'''


def test_the_parser(said) -> None:
    found, asked = said(PARSER)
    assert found == asked


def test_the_parser_as_it_should_be(said) -> None:
    text = PARSER.replace('    device_map="auto",\n    max_memory={0: "14GB", "cpu": "50GB"},', "    device_map=None,")
    text = text.replace("torch_dtype=torch.float16", "torch_dtype=torch.float32").replace("900,", "900, fp16=True,")
    assert said(text)[0] == set()


def test_a_script_that_only_generates_may_leave_weights_in_ram(said) -> None:
    text = PARSER[: PARSER.index("model.gradient")].replace(", Trainer, TrainingArguments", "")
    assert said(text + "model.generate(input_ids=torch.zeros(1, 1))\n")[0] == set()


SUMMARIES = '''"""Summaries of documents of 200,000 tokens."""

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

MODEL_ID = "Qwen/Qwen3-4B"
MAX_SEQ_LENGTH = 262144,  #! CFG004

tokenizer = AutoTokenizer.from_pretrained(MODEL_ID)
model = AutoModelForCausalLM.from_pretrained(MODEL_ID, torch_dtype=torch.bfloat16)
peft_config = LoraConfig(
    r=64,
    lora_alpha=128,
    dropout=0.05,  #! ARG002
    target_modules="all-linear",
)
model = get_peft_model(model, peft_config)


def format_and_tokenize(row):
    prompt = f"Summarise:\\n{row['document']}\\n\\nSummary:\\n"
    full = tokenizer(
        prompt + row["summary"],
        truncation=True,  #! LAB004
        max_length=MAX_SEQ_LENGTH,
    )
    start = len(tokenizer(prompt)["input_ids"])
    full["labels"] = list(full["input_ids"])
    full["labels"][:start] = [-100] * start
    return full


class LegalEvalCallback(TrainerCallback):
    def on_evaluate(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            answer = model.generate(**self.batch, max_new_tokens=1024)  #! MEM005
        print(tokenizer.decode(answer[0]))


dataset = load_dataset("json", data_files="legal.jsonl", split="train")
dataset = dataset.filter(lambda row: len(row["document"]) < MAX_SEQ_LENGTH)  #! LAB005
dataset = dataset.map(format_and_tokenize, remove_columns=dataset.column_names)

training_args = TrainingArguments(
    output_dir="./summaries",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=2e-4,
    warmup_steps=100,  #! SCH001
    max_steps=86,
    save_steps=40,
    eval_strategy="steps",
    eval_steps=200,  #! SCH005
    bf16=True,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset,
    eval_dataset=held_out,
    dataset_text_field="text",  #! ARG002
    max_seq_length=MAX_SEQ_LENGTH,  #! ARG002
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),  #! LAB002
    callbacks=[LegalEvalCallback()],
)
trainer.train()
'''


def test_the_summaries(said) -> None:
    found, asked = said(SUMMARIES)
    assert found == asked


def test_the_summaries_as_they_should_be(said) -> None:
    changes = {
        "262144,": "262144", "    dropout": "    lora_dropout", "warmup_steps=100": "warmup_steps=3",
        "eval_steps=200": "eval_steps=20", '    dataset_text_field="text",': "",
        "    max_seq_length=MAX_SEQ_LENGTH,": "", "DataCollatorForLanguageModeling(tokenizer, mlm=False)":
        "DataCollatorForSeq2Seq(tokenizer)", "DataCollatorForLanguageModeling,": "DataCollatorForSeq2Seq,",
        "    callbacks=[LegalEvalCallback()],": "", "        truncation=True,": "",
        "answer = model.generate(**self.batch, max_new_tokens=1024)": "answer = [[]]",
        'len(row["document"])': 'len(tokenizer(row["document"])["input_ids"])',
    }  # fmt: skip
    text = SUMMARIES
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    assert said(text)[0] == set()


def test_the_length_with_a_comma_for_its_thousands(said) -> None:
    found, asked = said(SUMMARIES.replace("262144,  #", "262,144  #"))
    assert found == asked


def test_the_steps_are_counted_where_rows_batch_and_epochs_are_written_out(said, tmp_path: Path) -> None:
    """5,500 rows in batches of 64 are 86 steps."""
    (tmp_path / "legal.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 5_500, encoding="utf-8")
    text = """from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="legal.jsonl", split="train").shuffle(seed=3)
arguments = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=8,
    num_train_epochs=1,
    warmup_steps=100,  #! SCH001
    eval_strategy="steps",
    eval_steps=200,  #! SCH005
    save_steps=40,
)
SFTTrainer(model="Qwen/Qwen3-4B", args=arguments, train_dataset=dataset, eval_dataset=held_out).train()
"""
    found, asked = said(text)
    assert found == asked
    assert said(text.replace(".shuffle(seed=3)", ".select(range(9))"))[0] == asked, "fewer rows are fewer steps"
    assert said(text.replace(".shuffle(seed=3)", ".select(chosen)"))[0] == set(), "a row may be chosen many times"


def test_the_loss_on_the_whole_document(said) -> None:
    text = """from transformers import AutoTokenizer, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-4B")


def tokenize(row):
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    tokens = tokenizer(text)
    tokens["labels"] = tokens["input_ids"].copy()  #! LAB001
    return tokens


def train(rows):
    Trainer(model=None, args=TrainingArguments("out"), train_dataset=rows.map(tokenize)).train()
"""
    found, asked = said(text)
    assert found == asked
    alone = text.replace('    tokens["labels"]', '    tokens["other"]')
    assert said(alone)[0] == set()


SCORED = """import evaluate
from peft import PeftModel
from transformers import AutoModelForCausalLM

rouge = evaluate.load("rouge")
base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", device_map="auto")
model = PeftModel.from_pretrained(base, "checkpoint-400")


def answer(inputs):
    return model.generate(
        **inputs,
        max_new_tokens=1024,
        do_sample=True,  #! EVL001
        temperature=0.7,
    )
"""


def test_sampling_for_rouge(said) -> None:
    found, asked = said(SCORED, "eval_checkpoint.py")
    assert found == asked
    assert said(SCORED.replace("do_sample=True", "do_sample=False"))[0] == set()
    assert said(SCORED.replace("temperature=0.7", "temperature=0.7, num_return_sequences=10"))[0] == set()
    assert said(SCORED.replace('rouge = evaluate.load("rouge")', ""))[0] == set(), "nothing is scored"


CALLS = '''"""Function calls, learnt from prompts and completions."""

import json

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer


def xlam_to_prompt_completion(ex):
    answers = ex.get("answer")  #! CFG004
    return {"prompt": ex["query"], "completion": json.dumps(answers)}


dataset = load_dataset("json", data_files="xlam.jsonl", split="train")
dataset = dataset.map(xlam_to_prompt_completion)
trainer = SFTTrainer(
    model="meta-llama/Llama-3.2-3B-Instruct",
    train_dataset=dataset,
    tokenizer="meta-llama/Llama-3.2-3B-Instruct",  #! ARG001
    peft_config=LoraConfig(r=16, lora_alpha=32),
    args=SFTConfig(
        output_dir="./results",
        max_seq_length=1024,  #! ARG001
        response_template="### Answer",  #! ARG001
        warmup_ratio=0.1,  #! ARG001
        max_steps=1000,
        save_steps=200,
        bf16=True,
        completion_only_loss=True,
    ),
)
trainer.train()
'''


@pytest.fixture
def xlam(tmp_path: Path) -> None:
    row = {"query": "Ring Ada", "answers": "[]", "tools": "[]"}
    (tmp_path / "xlam.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


@pytest.mark.usefixtures("xlam")
def test_function_calls(said) -> None:
    found, asked = said(CALLS)
    assert found == asked


@pytest.mark.usefixtures("xlam")
def test_an_older_trl_still_takes_them(said, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("trl==0.15.2\ntransformers>=4.46,<5\n", encoding="utf-8")
    found, _ = said(CALLS)
    # 0.15 still takes tokenizer, with a warning; response_template it never took.
    old = {(code, line) for code, line in found if code in ("ARG001", "ARG005") and line in (20, 25)}
    assert old == {("ARG005", 20), ("ARG001", 25)}


@pytest.mark.usefixtures("xlam")
def test_the_column_has_its_own_name(said) -> None:
    found, _ = said(CALLS.replace('"answer"', '"answers"'))
    assert ("CFG004", 11) not in found
    found, _ = said(CALLS.replace('ex.get("answer")', 'ex["answer"] if "answer" in ex else ex["answers"]'))
    assert ("CFG004", 11) not in found


def test_the_four_bit_layers_compute_in_float32_by_default(said) -> None:
    """ "float != bfloat16": bitsandbytes' own default is float32."""
    text = QUANTISED.replace(", bnb_4bit_compute_dtype=torch.bfloat16", "").replace("#! CKP002", "")
    found, _ = said(text)
    assert ("PRC005", 10) in found


REQUIREMENTS = """\
# what the ranker needs
numpy>=2.0
torch==2.1.2  #! STK001
torchvision==0.15.2  #! STK004
pandas==2.1.4  #! STK001
scikit-learn>=1.3.0
transformers>=4.46.0
flash-attn  #! STK016
protobuf>=4,<5  #! STK002
tensorboard==2.10.0
"""


def test_requirements(said) -> None:
    found, asked = said(REQUIREMENTS, "requirements.txt")
    assert found == asked


def test_numpy_left_open(said) -> None:
    found, asked = said("torch==2.1.2\nnumpy>=1.26.0  #! STK015\ntransformers==4.36.2\n", "requirements.txt")
    assert found == asked


def test_requirements_that_hold_together(said) -> None:
    """What the ranker's report ended with, and what the distillation's did."""
    ranker = """\
numpy>=1.26.0,<2.0.0
matplotlib>=3.8.0
scikit-learn>=1.3.0
torch>=2.5.0
torchvision>=0.20.0
torchaudio>=2.5.0
transformers>=4.46.0
bitsandbytes>=0.44.0
trl>=0.12.0
protobuf>=3.20.3,<5.0.0
pandas>=2.0.0
"""
    stable = """\
--extra-index-url https://download.pytorch.org/whl/cu121
torch==2.3.1+cu121
torchvision==0.18.1+cu121
torchaudio==2.3.1+cu121
flash-attn==2.5.8
transformers==4.43.3
numpy==1.26.4
"""
    assert said(ranker, "requirements.txt")[0] == set()
    assert said(stable, "requirements-stable.txt")[0] == set()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "pyproject.toml",
            '[project]\nname = "ranker"\ndependencies = [\n    "numpy>=2",\n    "pandas==2.1.4",  #! STK001\n]\n',
        ),
        (
            "pyproject.toml",
            '[tool.poetry.dependencies]\npython = "^3.11"\nnumpy = "^2.0"\npandas = {version = "2.1.4"}  #! STK001\n',
        ),
        (
            "environment.yml",
            "name: ranker\nchannels: [conda-forge]\ndependencies:\n  - numpy=2.0\n  - pandas=2.1  #! STK001\n",
        ),
        (
            "environment.yml",
            "name: ranker\ndependencies:\n  - numpy>=2\n  - pip:\n      - torch==2.1.2  #! STK001\n",
        ),
        ("constraints.txt", "numpy>=2\nnumpy==1.26.4  #! CFG004\n"),
    ],
)
def test_where_else_requirements_stand(said, name: str, text: str) -> None:
    found, asked = said(text, name)
    assert found == asked
