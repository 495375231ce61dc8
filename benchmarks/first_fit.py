"""The config that `surefit init --data` writes, planned by simulation: six card sizes × six model sizes.

    python benchmarks/first_fit.py [--sizes GB,GB] [--models NAME,NAME] [--words N] [--json FILE]

For each cell `init` writes a config for the same 200 chats and a card of which only the memory is given (`--gpu 24GB`),
and `plan` simulates it. Where `init` writes none, because the model does not fit, the first model that it proposes
instead is written and simulated. A cell is good if what was written fits by simulation; the exit code is 1 if one is
not. The models are Qwen2.5's shapes, as config.json files alone: nothing is downloaded, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from surefit.config.load import load_text
from surefit.core.errors import ConfigError, SureFitError
from surefit.core.gc_pause import pause_gc
from surefit.core.units import GIB
from surefit.stages.planning import build_run_plan
from surefit.stages.run_context import load_checked_run
from surefit.stages.starting import StartingConfig, build_starting_config

CARDS = (8, 12, 16, 24, 48, 80)
SHAPES = {
    # name: hidden size, layers, heads, key heads, MLP width, vocabulary, whether the embedding is the head
    "0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "3B": (2048, 36, 16, 2, 11_008, 151_936, True),
    "7B": (3584, 28, 28, 4, 18_944, 152_064, False),
    "14B": (5120, 48, 40, 8, 13_824, 152_064, False),
    "32B": (5120, 64, 40, 8, 27_648, 152_064, False),
}
"""Qwen2.5's sizes, from the config.json files of Qwen/Qwen2.5-*-Instruct."""
ROWS = 200


def write_model(folder: Path, name: str) -> Path:
    """Write a model folder with a config.json alone."""
    hidden, layers, heads, key_heads, width, vocabulary, tied = SHAPES[name]
    path = folder / f"qwen2.5-{name.lower()}"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
                "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": key_heads,
                "intermediate_size": width, "vocab_size": vocabulary, "max_position_embeddings": 32_768,
                "tie_word_embeddings": tied, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                "dtype": "bfloat16", "initializer_range": 0.02,
            }
        )
    )  # fmt: skip
    return path


def write_rows(path: Path, words: int) -> None:
    """Write chats of up to `words` words, the shortest a tenth of that."""
    choose = random.Random(0)
    vocabulary = [f"{a}{b}{c}" for a in "bdfgklm" for b in ("ala", "eno", "ito", "ora") for c in ("", "n", "s")]
    with open(path, "w", encoding="utf-8") as file:
        for number in range(ROWS):
            size = choose.randint(words // 10, words)
            question, answer = (" ".join(choose.choices(vocabulary, k=size // 2)) for _ in range(2))
            turns = [{"role": "user", "content": f"{number} {question}?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")


def simulate(draft: StartingConfig, folder: Path) -> dict[str, Any]:
    """Return the plan, by simulation, of the config that `init` wrote."""
    with pause_gc():
        return build_run_plan(load_checked_run(load_text(draft.text, folder / "run.yaml")))


def judge_cell(rows: Path, model: Path, size: int) -> dict[str, Any]:
    """Return what `init` wrote for a model and a card, and whether that fits by simulation."""
    cell: dict[str, Any] = {"written": True}
    try:
        draft = build_starting_config(str(rows), str(model), f"{size}GB")
    except ConfigError as error:
        cell |= {"written": False, "said": error.message}
        try:
            draft = build_starting_config(str(rows), None, f"{size}GB")
        except SureFitError as nothing:
            return cell | {"good": True, "text": f"none: {nothing.message}"}
    plan = simulate(draft, rows.parent)
    estimate, values = plan["estimate"], draft.values
    good = estimate["how"] == "simulation" and estimate["verdict"] == "fits"
    how = "4 bits" if values.get("model.quantization") == "nf4" else "16 bits"
    needed = f"{estimate['high_bytes'] / GIB:.1f} GiB"
    instead = "" if cell["written"] else f"{values['model.name_or_path'].partition('/')[2]}, "
    verdict = "" if good else f"{estimate['verdict']} by {estimate['how']}, "
    return cell | {"good": good, "plan": plan, "config": draft.text, "text": f"{verdict}{instead}{how}, {needed}"}


def main() -> int:
    """Print the table; return 1 if a written config does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, CARDS)))
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--words", type=int, default=400, help="words of the longest chat")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sizes, names = [int(size) for size in asked.sizes.split(",")], asked.models.split(",")
    start, cells = time.process_time(), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_rows(folder / "chats.jsonl", asked.words)
        models = {name: write_model(folder, name) for name in names}
        print(f"| model | {' | '.join(f'{size} GB' for size in sizes)} |", flush=True)
        print(f"|---|{'---|' * len(sizes)}", flush=True)
        for name in names:
            row = [judge_cell(folder / "chats.jsonl", models[name], size) for size in sizes]
            cells |= {f"{name} on {size} GB": cell for size, cell in zip(sizes, row, strict=True)}
            texts = [cell["text"] if cell["written"] else f"does not fit; {cell['text']}" for cell in row]
            print(f"| {name} | {' | '.join(texts)} |", flush=True)
    bad = [name for name, cell in cells.items() if not cell["good"]]
    print(f"\n{len(cells) - len(bad)} of {len(cells)} fit by simulation, in {time.process_time() - start:.0f} s of "
          f"processor time{': not ' + ', '.join(bad) if bad else ''}")  # fmt: skip
    if asked.json:
        asked.json.write_text(json.dumps(cells, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
