"""What one of two real processes holds of weights, gradients and optimizer state, in every mode: bytes, into JSON.

`ranks_run.py OUT` in the environment that torchrun makes. Nothing here reads a plan.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import varlen_on_cpu  # noqa: F401 (registers the kernel)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, LlamaForCausalLM, Qwen3ForCausalLM

from surefit.config.modes import GROUPED, MODES
from surefit.config.schema import LoraSection, ParallelSection, TrainSection
from surefit.data.tokens.collate import collate_packed
from surefit.model.adapter import add_adapter
from surefit.model.attention import use_varlen
from surefit.parallel.engine import build_engine
from surefit.parallel.process_group import World, process_group
from surefit.train.loss import loss_sum
from surefit.train.optim import make_optimizer

# Widths and a vocabulary that two processes cannot share evenly, where a mode allows that.
SHAPE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 40, "intermediate_size": 102, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
KINDS = {"llama": ("LlamaForCausalLM", LlamaForCausalLM), "qwen3": ("Qwen3ForCausalLM", Qwen3ForCausalLM)}
SHARED = (*(mode for mode in MODES if mode != "single"), "fsdp+cp")
CASES = {
    f"{mode}-{family}-{kind}-{dtype}": (mode, family, kind, dtype)
    for mode in SHARED
    for family, kind, dtype in (("llama", "lora", "float32"), ("qwen3", "full", "bfloat16"))
}


def parallel_of(mode: str, processes: int) -> dict[str, Any]:
    """The section `parallel` of a mode in which all processes share what can be shared; `fsdp+cp`: fsdp, and tokens."""
    mode, _, beside = mode.partition("+")
    shared = beside or mode
    return {"mode": mode} | ({shared: processes} if shared in GROUPED else {})


def shape_of(mode: str, family: str) -> dict[str, Any]:
    return (
        SHAPE
        | {"tie_word_embeddings": family == "llama" and mode != "tp"}
        | ({"vocab_size": 132} if mode == "tp" else {})
    )


def build(mode: str, family: str, kind: str, dtype: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **shape_of(mode, family))
    model = KINDS[family][1](config).to(getattr(torch, dtype))
    if kind == "lora":
        return add_adapter(model, LoraSection(r=3))
    return model


def bytes_of(tensors: Any) -> int:
    """What lies in memory of some tensors; those that share it count once."""
    storages = {}
    for tensor in tensors:
        held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        # Freed parameters of a pipeline have the storage of a single number.
        if held.numel() and held.untyped_storage().nbytes() >= held.nbytes:
            storages[(held.untyped_storage()._cdata, held.storage_offset())] = held.nbytes
    return sum(storages.values())


def measured(world: World, mode: str, family: str, kind: str, dtype: str) -> dict[str, int]:
    engine = build_engine(ParallelSection.model_validate(parallel_of(mode, 2)), world)
    stage = MODES[mode.partition("+")[0]].zero_stage
    model = build(mode, family, kind, dtype)
    packed = mode.endswith("cp")
    if packed:
        use_varlen(model)
    model = engine.wrap(model).train()
    optimizer = engine.optimizer(model, partial(make_optimizer, train=TrainSection(weight_decay=0.1)))
    ids = torch.arange(1, 25).numpy()
    batches = [collate_packed([(ids, ids)]), collate_packed([(ids, ids)])] if packed else [_padded(ids), _padded(ids)]
    engine.run(model, batches, lambda m, batch: loss_sum(m, batch, stage != 3), 48, 1.0)
    found = {
        "parameters": bytes_of(_parameters(model, stage, optimizer)),
        "gradients": _gradients(model, stage, optimizer),
    }
    optimizer.step(1.0)
    if stage:
        states = [state[key] for state in optimizer._inner.state.values() for key in ("exp_avg", "exp_avg_sq")]
        states += optimizer.parts
        optimizer.runtime.destroy()
    else:
        states = [value for key, value in optimizer.tensors().items() if not key.startswith("step.")]
    return found | {"optimizer": bytes_of(states)}


def _padded(ids: Any) -> dict[str, torch.Tensor]:
    tokens = torch.from_numpy(ids)[None]
    return {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens,
        "loss_rows": torch.arange(23), "targets": tokens[0, 1:],
    }  # fmt: skip


def _parameters(model: torch.nn.Module, stage: int, optimizer: Any) -> list[torch.Tensor]:
    if stage == 3:
        return [parameter.ds_tensor for parameter in model.parameters()]
    if stage:
        flat = list(optimizer.zero.bit16_groups_flat)
        return flat + [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return list(model.parameters())


def _gradients(model: torch.nn.Module, stage: int, optimizer: Any) -> int:
    if stage == 3:
        return int(optimizer.zero.grad_partitions_flat_buffer.nbytes)
    if stage:
        return sum(gradient.nbytes for gradient in optimizer.gradients())
    return bytes_of(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    world = World.current()
    found: dict[str, Any] = {}
    with process_group(world, 2):
        for name, case in CASES.items():
            try:
                mine = measured(world, *case)
            except Exception as error:  # every case is tried, and a test says which failed
                mine = {"error": f"{type(error).__name__}: {error}"}
            every: list[Any] = [None] * world.size
            dist.all_gather_object(every, mine)
            found[name] = every
    if world.is_first:
        out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
