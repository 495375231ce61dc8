"""A training run that takes a second: a random Llama of 20 thousand parameters on rows of random tokens.

Imported by the tests; run as a script (`tiny_run.py BASE OUT [--resume] [--pairs]`) where a test needs a process that
it can kill. The script prints each finished step, of pairs also each other phase, and exits as the command line does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from surefit.config.schema import SureFitConfig
from surefit.core.errors import SureFitError
from surefit.core.rundir import RunDir
from surefit.model.load import load_model
from surefit.model.prepare import prepare_for_training
from surefit.train.inputs import Callbacks, TrainingData, TrainingEnvironment
from surefit.train.loop import Trainer

VOCABULARY = 64
CPU: Any = SimpleNamespace(kind="cpu")
Row = tuple[np.ndarray, np.ndarray]


def llama_config(**changes: Any) -> LlamaConfig:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(shape | changes))


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(llama_config(**changes))


def save_base(directory: Path, **changes: Any) -> Path:
    """A model directory with tokenizer."""
    llama(**changes).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def tokenizer() -> PreTrainedTokenizerFast:
    words = {str(number): number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="0")


def rows(count: int = 24, seed: int = 0) -> list[Row]:
    """Rows of 4 to 20 tokens, each counting up from a random start; the first third is not supervised."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(rng.integers(4, 21))
        ids = 1 + (int(rng.integers(0, VOCABULARY)) + np.arange(length)) % (VOCABULARY - 1)
        labels = np.where(np.arange(length) < length // 3, -100, ids)
        made.append((ids, labels))
    return made


def pairs(count: int = 24, seed: int = 0) -> list[Row]:
    """Pairs, two rows each, chosen and rejected: the same prompt, then counting up or counting down, of 2 to 10
    tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt = 1 + (int(rng.integers(0, VOCABULARY)) + np.arange(int(rng.integers(2, 7)))) % (VOCABULARY - 1)
        for direction in (1, -1):
            answer = 1 + (prompt[-1] - 1 + direction * np.arange(1, int(rng.integers(3, 11)))) % (VOCABULARY - 1)
            ids = np.concatenate([prompt, answer])
            made.append((ids, np.where(np.arange(len(ids)) < len(prompt), -100, ids)))
    return made


class Labelled(list[Row]):
    """Rows of one answer each, with their labels."""

    @property
    def desirable(self) -> np.ndarray:
        """Whether each answer counts up."""
        steps = [ids[labels != -100] for ids, labels in self]
        return np.array([(step[1] - step[0]) % (VOCABULARY - 1) == 1 for step in steps], bool)


def labelled(count: int = 24, seed: int = 0) -> Labelled:
    """Labelled answers: those of `pairs` in another order, a third of the rejected ones left out."""
    answers = [row for number, row in enumerate(pairs(count, seed)) if number % 6 != 5]
    return Labelled(answers[place] for place in np.random.default_rng(seed).permutation(len(answers))[:count])


def config(
    base: Path,
    out: Path,
    kind: str = "lora",
    dtype: str = "float32",
    every: int = 4,
    packing: bool = False,
    checkpoint: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
    objective: Mapping[str, Any] | None = None,
    shared: bool = False,
    **train: Any,
) -> SureFitConfig:
    settings = {
        "num_train_epochs": 4.0,
        "global_batch_size": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "gradient_checkpointing": False,
    }
    return SureFitConfig.model_validate(
        {
            "model": {"name_or_path": str(base), "dtype": dtype},
            "lora": {"r": 4, "lora_dropout": 0.0 if objective else 0.1} | dict(adapter or {}),
            "objective": dict(objective or {"name": "sft"}),
            # At most 20 tokens in a row, so that a bin of 4 × 16 holds a few of them.
            "data": {"train": "unused", "packing": packing, "max_length": 16},
            "train": settings | {"method": kind} | train,
            "speed": {
                "attention": "torch_varlen" if packing else "sdpa", "fused_lora": False, "tiled_mlp": False,
                "shared_prompts": shared,
            },
            "checkpoint": {"save_steps": every} | dict(checkpoint or {}),
            "output_dir": str(out),
        }
    )  # fmt: skip


def training(
    settings: SureFitConfig,
    train_rows: list[Row] | None = None,
    eval_rows: list[Row] | None = None,
    hardware: Any = CPU,
    **given: Any,
) -> Trainer:
    """The run that `settings` describe: 12 steps over 24 rows, held-out loss on 6 others.

    Args:
        given: fields of `TrainingEnvironment` and of `Callbacks`.
    """
    device = given["engine"].loading_device(hardware.kind) if "engine" in given else None
    model, _ = prepare_for_training(load_model(settings.model, hardware, device), settings, hardware)
    make_rows: Any = pairs if settings.objective.paired else labelled if settings.objective.labelled else rows
    train_rows = make_rows() if train_rows is None else train_rows
    eval_rows = make_rows(6, seed=1) if eval_rows is None else eval_rows
    run = RunDir(Path(settings.output_dir))
    data = TrainingData(tokenizer(), train_rows, eval_rows)
    place = {field.name: given.pop(field.name) for field in fields(TrainingEnvironment) if field.name in given}
    return Trainer(model, data, settings, run, TrainingEnvironment(**place), Callbacks(**given))


def main(base: str, out: str, *flags: str) -> int:
    torch.set_num_threads(1)
    try:
        changes: Any = {"objective": {"name": "dpo", "beta": 0.1}, "max_steps": 8} if "--pairs" in flags else {}
        training(
            config(Path(base), Path(out), **changes),
            on_progress=lambda progress: print("step", progress.step, flush=True),
            on_phase=lambda name, step, total: print("phase", name, flush=True) if "--pairs" in flags else None,
        ).fit(resume="--resume" in flags)
    except SureFitError as error:
        print(error, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
