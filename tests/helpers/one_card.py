"""One process that is connected to itself, over NCCL on a GPU or over gloo on a CPU: what one card can show of engines
that several processes need.

`one_card.py KIND FOLDER RESULT`; what must come out says tests/distributed/test_one_card.py.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sharing
import torch
import torch.distributed as dist
from tiny_run import save_base, training
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

from surefit.config.schema import LoraSection
from surefit.data.tokens.collate import collate_packed
from surefit.model.adapter import add_adapter
from surefit.model.checkpointing import enable_checkpointing
from surefit.parallel.ddp import DataParallel
from surefit.parallel.engine import Engine
from surefit.parallel.fsdp import FullySharded
from surefit.parallel.process_group import World
from surefit.train.optim import MasterAdamW
from surefit.train.step import train_step

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
SMALL = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
SCENARIOS = {
    "ddp lora": (DataParallel, sharing.SCENARIOS["lora padded"]),
    "ddp all weights": (DataParallel, sharing.SCENARIOS["full uneven"]),
    "ddp nf4": (DataParallel, sharing.QUANTIZED["lora nf4"]),
    "fsdp all weights": (FullySharded, sharing.SCENARIOS["full uneven"]),
}
if importlib.util.find_spec("bitsandbytes") is None:  # the others say as much without it
    del SCENARIOS["ddp nf4"]


def losses(base: Path, out: Path, kind: str, engine: Engine, changes: dict[str, Any]) -> list[float]:
    """Of twenty steps; the run is saved, and its result written, as any other."""
    made = sharing.settings(base, out, **changes)
    training(made, hardware=SimpleNamespace(kind=kind), engine=engine).fit()
    found: list[float] = sharing.outcome(made)["loss"]
    return found


def drawn(parameter: torch.Tensor, kind: str) -> torch.Tensor:
    """Values for a parameter, drawn on the device: one thread of a CPU takes minutes for eight billion."""
    made = torch.empty(parameter.shape, dtype=parameter.dtype, device=kind)
    return torch.nn.init.normal_(made, std=0.02) if made.dim() > 1 else torch.nn.init.ones_(made)


def sharded(kind: str) -> dict[str, Any]:
    """A model in shards, of which this process has all: 8 billion parameters on a GPU; and one step of it."""
    shape = LLAMA_8B if kind == "cuda" else SMALL
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.copy_(drawn(parameter, kind))
    # to_empty has emptied what no file holds: the rotary frequencies.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    ready = add_adapter(model, LoraSection(r=16))
    enable_checkpointing(ready, True)
    engine = FullySharded(World())
    wrapped = engine.wrap(ready.train())
    ids = torch.randint(2, shape["vocab_size"], (512,), generator=torch.Generator().manual_seed(0)).numpy()
    optimizer = MasterAdamW(wrapped, 0.0)
    optimizer.learning_rate = 1e-4
    result = train_step(wrapped, [collate_packed([(ids, ids)])], optimizer, 1.0, engine=engine)
    parameters = list(wrapped.parameters())
    return {
        "numbers": sum(parameter.numel() for parameter in parameters),
        "kinds": sorted({type(parameter).__name__ for parameter in parameters}),
        "devices": sorted({p.to_local().device.type for p in parameters if isinstance(p, DTensor)}),
        "root": type(engine.root).__name__,
        "loss": result.loss,
        "untrained": math.log(shape["vocab_size"]),
        "applied": result.applied,
        "peak": torch.cuda.max_memory_allocated() if kind == "cuda" else None,
    }


def main(kind: str, folder: str, result: str) -> None:
    out = Path(folder)
    if kind == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    backend = {"cuda": "nccl", "cpu": "gloo"}[kind]
    dist.init_process_group(backend, init_method=f"file://{out / 'meeting'}", rank=0, world_size=1)
    base = save_base(out / "base")
    found: dict[str, Any] = {"backend": dist.get_backend()}
    for number, (name, (engine, changes)) in enumerate(SCENARIOS.items()):
        shared = losses(base, out / f"shared-{number}", kind, engine(World()), changes)
        found[name] = {"shared": shared, "alone": losses(base, out / f"alone-{number}", kind, Engine(), changes)}
    found["sharded"] = sharded(kind)
    Path(result).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
