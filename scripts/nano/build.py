"""Builds the embedded base model `surefit/nano` from nothing: `python scripts/nano/build.py [--out DIR]`.

Everything is derived from the seeds below, with a fixed number of threads and deterministic kernels, so that a second
build on the same machine gives the same bytes. Another kind of processor rounds differently and gives another hash.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from corpus import TASKS, Message, evaluation_rows, second_rows, training_rows
from surefit.core.rundir import write_atomic
from surefit.core.units import duration_text
from tokenizer import VOCAB_SIZE, train_tokenizer
from training import Rates, batches, encode, generations, new_model, render, train

PACKAGE_FOLDER = Path(__file__).resolve().parents[2] / "src" / "surefit" / "nano"
CARD = Path(__file__).parent / "card.md"
SEED, EVALUATION_SEED = 1, 2
THREADS = 2
STEPS, SECOND_STEPS, BATCH = 2500, 300, 32
FIRST, SECOND = Rates(muon=0.02, adamw=5e-3, warmup=100), Rates(muon=0.01, adamw=3e-3, warmup=30)
SECOND_SEEDS = 77, 5
TOKENIZER_ROWS = 6000
EVALUATED = 200
LONGEST_ANSWER = 96


def main() -> None:
    """Builds, scores and writes the folder; the old one stays untouched until the new files are complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PACKAGE_FOLDER, help="folder to write (default: the package's)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"optimizer steps of the first phase (default: {STEPS})"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        scores, parameters = build(folder, arguments.steps)
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        (folder / "README.md").write_text(card(scores, digest, arguments.steps, parameters))
        arguments.out.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            write_atomic(arguments.out / path.name, path.read_bytes())
    print(f"sha256 of model.safetensors: {digest}")
    print(f"built {arguments.out} in {duration_text(time.monotonic() - began)}")


def build(folder: Path, steps: int) -> tuple[dict[str, float], int]:
    """Trains tokenizer and model and saves both in `folder`; returns the saved model's score on each task, its size."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    print(f"generating {steps * BATCH} conversations", flush=True)
    rows = list(islice(training_rows(SEED), steps * BATCH))
    tokenizer = train_tokenizer(turn["content"] for row in rows[:TOKENIZER_ROWS] for turn in row)
    model = new_model(tokenizer)
    print(f"training {model.num_parameters()} parameters", flush=True)
    learn(model, tokenizer, rows, FIRST)
    second_phase(model, tokenizer)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scores = {task: score(saved, tokenizer, evaluation_rows(task, EVALUATED, EVALUATION_SEED), task) for task in TASKS}
    return scores, saved.num_parameters()


def second_phase(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Words as words. The weights are rounded as a saved model's are, so the phase can be run again from one."""
    model.to(torch.bfloat16).to(torch.float32)
    learn(model, tokenizer, list(islice(second_rows(*SECOND_SEEDS), SECOND_STEPS * BATCH)), SECOND)


def learn(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[list[Message]], rates: Rates) -> None:
    """One pass over `rows` with progress."""
    data = batches(encode(tokenizer, rows), BATCH, SEED)
    train(model, data, rates, lambda *progress: show(len(data), *progress))


def show(steps: int, done: int, loss: float, seconds: float) -> None:
    """One line of progress with the time that is left."""
    left = seconds / done * (steps - done)
    print(f"step {done}/{steps}  loss {loss:.4f}  {duration_text(seconds)}, {duration_text(left)} left", flush=True)


def score(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[list[Message]], task: str) -> float:
    """Share of held-out prompts whose greedy answer is the gold answer to the letter."""
    prompts = [render(tokenizer, row[:-1], prompt=True) for row in rows]
    answers = generations(model, tokenizer, prompts, LONGEST_ANSWER)
    share = sum(answer == row[-1]["content"] for answer, row in zip(answers, rows, strict=True)) / len(rows)
    print(f"{task}: {share:.3f} of {len(rows)} held-out answers exactly right", flush=True)
    return share


def card(scores: dict[str, float], digest: str, steps: int, parameters: int) -> str:
    """The model card, with the scores and the hash of this build."""
    table = "\n".join(f"| {task} | {share:.3f} |" for task, share in scores.items())
    values = {"scores": table, "evaluated": EVALUATED, "sha256": digest, "rows": steps * BATCH, "steps": steps}
    values |= {"second_rows": SECOND_STEPS * BATCH, "second_steps": SECOND_STEPS, "batch": BATCH}
    values |= {"vocabulary": VOCAB_SIZE, "parameters": f"{parameters / 1e6:.2f}"}
    return CARD.read_text().format(**values)


if __name__ == "__main__":
    main()
