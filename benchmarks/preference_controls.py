"""Controls of preferences, on the built-in model: what must not be learned, and what length alone explains.

python benchmarks/preference_controls.py [--seeds 10] [--json]

random: the same pairs with labels drawn by chance, once per seed, other pairs and other labels each time. Nothing that
holds for the held-out pairs can be learned, so that the 95 % interval of their accuracy leaves out one half about once
in twenty runs. All are counted; exits with 1 if that many leave it out as chance gives less than once in a hundred.

polite: both answers have as many words (scripts/preference_rows.py), so that the rule is not about length. The AUC of
the answers' tokens says what length alone tells; one half is nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import numpy as np
import preference_rows
import tiny_run
import torch

from surefit.core.rundir import read_jsonl
from surefit.data.rows.layouts import read_splits
from surefit.data.tokens.dataset import build_dataset
from surefit.evaluate.pairs import HeldOutPairs, summarize_held_out_pairs
from surefit.model.tokenizer import load_tokenizer, model_path
from surefit.stages.run_context import load_checked_run

PAIRS, HELD_OUT = 160, 0.5
RARE = 0.01


def most_misses(seeds: int, share: float = 0.05, rare: float = RARE) -> int:
    """Return how many of so many runs may leave out one half: more happen by chance in fewer than `rare` cases.

    >>> most_misses(10), most_misses(100)
    (2, 11)
    """
    left = 1.0
    for misses in range(seeds + 1):
        left -= math.comb(seeds, misses) * share**misses * (1 - share) ** (seeds - misses)
        if left < rare:
            return misses
    return seeds


def train(folder: Path, rule: str, seed: int, shuffle: bool) -> tuple[HeldOutPairs, float]:
    """Train on pairs of a rule; return the held-out pairs' result, and the AUC of length alone on all pairs."""
    rows = preference_rows.RULES[rule](PAIRS, seed, shuffle)
    folder.mkdir()
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = {
        "recipe": "chat", "model": {"name_or_path": "surefit/nano", "dtype": "float32"},
        "objective": {"name": "dpo", "beta": 0.1},
        "data": {"train": str(folder / "pairs.jsonl"), "eval": HELD_OUT, "max_length": 256},
        "train": {
            "learning_rate": 1e-3, "global_batch_size": 16, "num_train_epochs": 3,
            "per_device_train_batch_size": 16, "gradient_checkpointing": False, "seed": seed,
        },
        "lora": {"r": 8, "target_modules": "all-linear"},
        "hardware": {"gpu": "cpu"}, "output_dir": str(folder / "run"),
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    run = load_checked_run(folder / "config.yaml")
    config = run.resolved.config
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"name_or_path": model_path("surefit/nano")})}
    )
    tokenizer = load_tokenizer(config.model)
    parts = read_splits(config.data, run.recipe, config.train.seed, run.rows, run.mixed)
    tokens = [build_dataset(part, tokenizer, max_length=256, paired=True) for part in parts]
    train_rows, eval_rows = ([data[number] for number in range(len(data))] for data in tokens)
    torch.manual_seed(seed)
    tiny_run.training(config, train_rows, eval_rows).fit()
    found = summarize_held_out_pairs(*(read_jsonl(folder / "run" / f"{name}.jsonl") for name in ("metrics", "events")))
    assert found is not None
    lengths = np.array([int((labels != -100).sum()) for _, labels in [*train_rows, *eval_rows]]).reshape(-1, 2)
    return found, length_auc(lengths[:, 0], lengths[:, 1])


def length_auc(chosen: np.ndarray, rejected: np.ndarray) -> float:
    """Return the share of (chosen, rejected) of all pairs in which the chosen answer is longer, a tie counting half."""
    longer = chosen[:, None] - rejected[None, :]
    return float((longer > 0).mean() + 0.5 * (longer == 0).mean())


def measure(seeds: int) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(seeds):
            found, _ = train(Path(name) / f"random-{number}", "shorter", number, True)
            rows.append({"seed": number, "accuracy": found.accuracy, "low": found.low, "high": found.high})
            print(f"random labels, seed {number}: {found.accuracy:.1%} [{found.low:.0%}, {found.high:.0%}]", flush=True)
        polite, auc = train(Path(name) / "polite", "polite", 0, False)
        shorter, shorter_auc = train(Path(name) / "shorter", "shorter", 0, False)
    missed = sum(not row["low"] <= 0.5 <= row["high"] for row in rows)
    return {
        "random": rows, "held_out": int(PAIRS * HELD_OUT), "contain_one_half": seeds - missed, "missed": missed,
        "most_missed": most_misses(seeds), "passed": missed <= most_misses(seeds),
        "polite": {"accuracy": polite.accuracy, "low": polite.low, "high": polite.high, "length_auc": auc},
        "shorter": {"accuracy": shorter.accuracy, "low": shorter.low, "high": shorter.high, "length_auc": shorter_auc},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(asked.seeds)
    if asked.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['contain_one_half']} of {asked.seeds} intervals contain one half ({found['most_missed']} may not)"
        )
        for rule in ("polite", "shorter"):
            each = found[rule]
            print(
                f"{rule}: {each['accuracy']:.1%} [{each['low']:.0%}, {each['high']:.0%}], "
                f"AUC of length alone {each['length_auc']:.3f}"
            )
    return int(not found["passed"])


if __name__ == "__main__":
    sys.exit(main())
