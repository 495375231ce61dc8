"""Make sixty mistakes of a first hour, run the real commands on them, and print what a user reads, as Markdown.

python benchmarks/first_mistakes.py [--only 3,17] [--output FILE]

Each mistake is made in a temporary directory of its own, without a network. A reader judges whether each answer says
what is wrong, where, and what to do. The script itself only fails where a command ends with a traceback or as a bug
(exit 4).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

MODEL = "surefit/nano"
CHATS = [
    [
        {"role": "user", "content": f"Where is parcel {n}?"},
        {"role": "assistant", "content": f"Parcel {n} is in depot {n % 7}."},
    ]
    for n in range(60)
]
ROWS = "".join(json.dumps({"messages": messages}) + "\n" for messages in CHATS)
CONFIG = f"""recipe: chat
model: {{name_or_path: {MODEL}}}
data: {{train: rows.jsonl, eval: 0.2, max_length: 256}}
lora: {{r: 8}}
train: {{learning_rate: 1e-3, num_train_epochs: 6, global_batch_size: 4}}
output_dir: runs/one
"""
FLAT = f"model_name: {MODEL}\nlora_r: 16\nlearning_rate: 2e-4\noutput_dir: out\n"
HF = f"""model: {{name_or_path: {MODEL}}}
data: {{train: rows.jsonl, eval: 0.2}}
train:
  num_train_epochs: 3
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 8
  bf16: true
  evaluation_strategy: steps
  logging_steps: 10
  report_to: wandb
output_dir: runs/one
"""
AXOLOTL = f"""base_model: {MODEL}
datasets: [{{path: rows.jsonl, type: chat_template}}]
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 0.0002
sequence_len: 256
"""
LLAMAFACTORY = f"""model_name_or_path: {MODEL}
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity
template: llama3
cutoff_len: 256
output_dir: saves/one
per_device_train_batch_size: 1
learning_rate: 1.0e-4
num_train_epochs: 3.0
"""


@dataclass(frozen=True)
class Mistake:
    """A mistake: what the user did, the command, and the files that differ from a config and rows that are right."""

    title: str
    command: str
    files: dict[str, str] = field(default_factory=dict)
    config: str = CONFIG
    """run.yaml."""
    shown: str = ""
    """The line or file in which the mistake is, for the reader."""


def wrong(title: str, right: str, mistake: str, command: str = "check run.yaml", **files: str) -> Mistake:
    """Return a mistake in one place of the config."""
    assert right in CONFIG, right
    named = {name.replace("_", "."): text for name, text in files.items()}
    return Mistake(title, command, named, CONFIG.replace(right, mistake), mistake)


def rows(title: str, *columns: dict[str, object], command: str = "check run.yaml") -> Mistake:
    """Return a mistake in the rows."""
    text = "".join(json.dumps(row) + "\n" for row in columns)
    return Mistake(title, command, {"rows.jsonl": text}, shown=f"rows.jsonl: {text.splitlines()[0]}" if text else "")


MISTAKES = [
    wrong("a misspelled key", "learning_rate", "learnig_rate"),
    wrong("a number with a letter too much", "1e-3", "2e-4x"),
    wrong("a data file that is not there", "rows.jsonl", "row.jsonl"),
    wrong("a gated 8B model without a token", MODEL, "meta-llama/Llama-3.1-8B-Instruct"),
    Mistake("a trailing comma in a row", "check run.yaml", {"rows.jsonl": ROWS.replace('."}]}\n', '."}],}\n', 1)},
            shown='rows.jsonl: … "Parcel 0 is in depot 0."}],}'),
    Mistake("a misspelled role", "check run.yaml", {"rows.jsonl": ROWS.replace('"assistant"', '"asistant"', 1)},
            shown='rows.jsonl: {"role": "asistant", …}'),
    rows("an empty file of rows"),
    wrong("an open brace", "lora: {r: 8}", "lora: {r: 8"),
    wrong("a tab for indentation", "lora: {r: 8}", "lora:\n\tr: 8"),
    wrong("a base model without a chat template", MODEL, "Qwen/Qwen2.5-0.5B"),
    wrong("a GPU with a space in its name", "output_dir", "hardware: {gpu: RTX 4090}\noutput_dir"),
    Mistake("a config that is not there", "check ran.yaml"),
    Mistake("--set without the section", "check run.yaml --set learning_rate=1e-4"),
    Mistake("--set without =", "check run.yaml --set train.max_steps 5"),
    Mistake("merge before training", "merge run.yaml"),
    Mistake("evaluate before training", "evaluate run.yaml"),
    Mistake("export before training", "export run.yaml"),
    Mistake("an unknown rule", "explain SCH999"),
    Mistake("a comparison of runs that are not there", "compare runs/one runs/two"),
    Mistake("a run that is not there", "runs show runs/first"),
    wrong("a model directory that is not there", MODEL, "./models/llama"),
    Mistake("import of a file that describes no run", "import ds.json",
            {"ds.json": json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4})}),
    Mistake("train with an Axolotl config", "train axolotl.yaml", {"axolotl.yaml": AXOLOTL}, shown=AXOLOTL),
    wrong("a number in quotes", "num_train_epochs: 6", 'num_train_epochs: "3"'),
    Mistake("an unknown GPU", "plan run.yaml --gpu rtx9999"),
    wrong("quantization as other tools write it", MODEL + "}", MODEL + ", quantization: 4bit}"),
    Mistake("no argument", "train"),
    Mistake("a report of a run that is not there", "report runs/one"),
    Mistake("train with a hub id in place of a config", "train Qwen/Qwen2.5-0.5B-Instruct"),
    wrong("a hub data set without a network", "rows.jsonl", "tatsu-lab/alpaca"),
    Mistake("the Trainer's arguments in the config", "check run.yaml", config=HF, shown=HF),
    Mistake("a LLaMA-Factory config", "check lf.yaml", {"lf.yaml": LLAMAFACTORY}, shown=LLAMAFACTORY),
    wrong("load_in_4bit", MODEL + "}", MODEL + ", load_in_4bit: true}"),
    wrong("an unknown recipe", "recipe: chat", "recipe: instruct"),
    wrong("no output_dir", "output_dir: runs/one\n", ""),
    Mistake("the verb finetune", "finetune run.yaml"),
    Mistake("--lr", "train run.yaml --lr 1e-4"),
    Mistake("rows given to check", "check rows.jsonl"),
    rows("rows with the columns input and output",
         *({"input": f"Where is {n}?", "output": f"In {n}."} for n in range(60))),
    rows("preference rows",
         *({"prompt": f"Where is {n}?", "chosen": f"In depot {n}.", "rejected": "No."} for n in range(60))),
    wrong("lora_r", "lora: {r: 8}", "lora: {lora_r: 8}"),
    wrong("a list of files in data.train", "train: rows.jsonl", "train: [rows.jsonl, more.jsonl]"),
    Mistake("a config without sections", "check run.yaml", config=FLAT, shown=FLAT),
    rows("rows with the columns question and answer",
         *({"question": f"Where is {n}?", "answer": f"In {n}."} for n in range(60))),
    Mistake("--gpu 4090", "plan run.yaml --quick --gpu 4090"),
    Mistake("--gpu rtx4081", "plan run.yaml --quick --gpu rtx4081"),
    wrong("a hold-out that is too small", "eval: 0.2", "eval: 0.02"),
    wrong("all weights of a 70B model on one card", f"{{name_or_path: {MODEL}}}",
          "{name_or_path: meta-llama/Llama-3.3-70B-Instruct}\nhardware: {gpu: rtx4090}",
          "check run.yaml --set train.method=full"),
    Mistake("predict before training", 'predict run.yaml -p "Where is parcel 3?"'),
    wrong("typographic quotes", "train: rows.jsonl", "train: “rows.jsonl”"),
    Mistake("a config and rows with Windows line ends and a byte order mark", "check run.yaml",
            {"rows.jsonl": "\ufeff" + ROWS.replace("\n", "\r\n")}, "\ufeff" + CONFIG.replace("\n", "\r\n")),
    Mistake("a directory in place of a config", "check configs", {"configs/run.yaml": CONFIG}),
    wrong("~ in a path", "rows.jsonl", "~/data/rows.jsonl"),
    wrong("an environment variable in a path", "rows.jsonl", "${DATA}/rows.jsonl"),
    Mistake("two configs", "check run.yaml other.yaml", {"other.yaml": CONFIG}),
    wrong("a negative learning rate", "1e-3", "-1e-3"),
    wrong("no epochs", "num_train_epochs: 6", "num_train_epochs: 0"),
    wrong("a number of rows as data.eval", "eval: 0.2", "eval: 10"),
    wrong("target_modules without brackets", "r: 8}", "r: 8, target_modules: q_proj,v_proj}"),
    Mistake("a text in place of a config", "check README.md",
            {"README.md": "# My model\n\nTrain: see *below*.\n- one\n"}),
]  # fmt: skip


def run(mistake: Mistake) -> tuple[int, str]:
    """Return the exit code and the output of a mistake's command, in a new directory, on a terminal of 100 columns."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file, text in {"run.yaml": mistake.config, "rows.jsonl": ROWS, **mistake.files}.items():
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_text(text, encoding="utf-8", newline="")
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "100", "SUREFIT_CACHE": str(directory / "cache")}
        environment["HF_HOME"] = str(directory / "hub")
        # A shell, because a user's quotes are removed by one.
        command = f"{sys.executable} -m surefit {mistake.command}"
        done = subprocess.run(
            command, shell=True, cwd=directory, env=environment, text=True, timeout=600, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout.replace(f"{name}/", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="numbers of mistakes, such as 3,17")
    parser.add_argument("--output", type=Path, help="write here instead of to stdout")
    options = parser.parse_args()
    chosen = {int(number) for number in options.only.split(",") if number}
    parts, bugs = ["# Sixty mistakes of a first hour\n"], []
    for number, mistake in enumerate(MISTAKES, start=1):
        if chosen and number not in chosen:
            continue
        code, output = run(mistake)
        shown = f"```\n{mistake.shown.strip()}\n```\n\n" if mistake.shown.strip() else ""
        answer = f"```console\n$ surefit {mistake.command}\n{output.strip()}\n```\n"
        parts.append(
            f"## {number}. {mistake.title[0].upper()}{mistake.title[1:]}\n\n{shown}{answer}\nexit code {code}\n"
        )
        if code == 4 or "Traceback" in output:
            bugs.append(number)
    text = "\n".join(parts)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text)
    if bugs:
        print(f"a traceback or a bug: {', '.join(map(str, bugs))}", file=sys.stderr)
    return 1 if bugs else 0


if __name__ == "__main__":
    raise SystemExit(main())
