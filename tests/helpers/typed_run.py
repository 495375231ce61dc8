"""A small random base on disk, and a run of two steps on it as a user types one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from surefit.nano import PATH as NANO

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import family_shapes

FILE = "model.safetensors"
ROWS = [{"prompt": f"{n} + 1?", "completion": str(n + 1)} for n in range(8)]


def save_base(
    kind: str | PreTrainedConfig, directory: Path, made_by: Any = AutoModelForCausalLM, spare: int = 0
) -> dict[str, torch.Tensor]:
    """A random model with the built-in model's tokenizer; its tensors.

    Args:
        kind: its config, or the family in benchmarks/family_shapes.py whose config it has.
        made_by: transformers' class.
        spare: rows of the embedding behind the vocabulary.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    config = family_shapes.config(kind) if isinstance(kind, str) else kind
    config.get_text_config().vocab_size = len(tokenizer) + spare
    made_by.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return load_file(directory / FILE)


def type_run(
    folder: Path, lora: str = "{}", rows: Sequence[dict[str, Any]] = ROWS, method: str = "lora", **model: Any
) -> Path:
    """The config of a run on the model in `folder`/base, and its rows.

    Args:
        lora: the section, as YAML; method: `train.method`; model: entries of that section beside the base and its type.
    """
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(f"""\
model: {json.dumps({"name_or_path": "base", "dtype": "float32"} | model)}
lora: {lora}
data: {{train: rows.jsonl, eval: 0.25, max_length: 128}}
train: {{method: {method}, max_steps: 2, global_batch_size: 2, learning_rate: 1e-2, warmup_steps: 0}}
hardware: {{gpu: cpu}}
output_dir: out
""")
    return folder / "run.yaml"


def done(surefit: Callable[..., Any], *words: object) -> None:
    """A verb that has to succeed."""
    answer = surefit(*words)
    assert answer.code == 0, answer.text


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of a model as plain libraries load it, outside training."""
    found: torch.Tensor = model.eval()(ids).logits
    return found
