"""What each process of tests/distributed/test_context.py runs: every scenario, shared and alone, into JSON.

`context_run.py OUT TOKENS [SCENARIO …]`, in the environment that torchrun would make. TOKENS is how many processes
share a row.
"""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import families
import numpy as np
import torch
import varlen_on_cpu  # noqa: F401 (registers the kernel)
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from surefit.core.errors import SureFitError
from surefit.data.tokens.collate import collate, collate_packed
from surefit.model import varlen
from surefit.model.attention import require_packable, use_varlen
from surefit.model.checkpointing import enable_checkpointing
from surefit.model.fused_lora import fuse_lora
from surefit.model.sdpa import gpu_assumed
from surefit.model.tiling import tile_mlps
from surefit.parallel.context_parallel import ContextParallel
from surefit.parallel.engine import SINGLE, Engine
from surefit.parallel.process_group import World, process_group
from surefit.train.loss import loss_sum, supervised_tokens
from surefit.train.optim import MasterAdamW
from surefit.train.step import mean_loss, train_step

STEPS = 20
LENGTHS = ((23, 1, 40, 2, 7), (61, 3, 9))
"""Of the documents of each micro batch: as short as can be, most of them across the border of two processes."""
SCENARIOS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, whole logits": {"chunked": False},
    "qwen3, padded": {"family": "qwen3", "packed": False},
    "mistral, window of 4": {"family": "mistral", "sliding_window": 4},
    "mistral, window of 4, padded": {"family": "mistral", "sliding_window": 4, "packed": False},
    "gemma2, softcap": {"family": "gemma2", "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "phi3, rotary factors by the longest position": {
        "family": "phi3",
        "original_max_position_embeddings": 59,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": 59,
        },
    },
    "qwen3, LoRA": {"family": "qwen3", "lora": True},
    "LoRA, checkpointing": {"lora": True, "checkpointing": True},
    "LoRA, selective checkpointing, padded": {"lora": True, "checkpointing": "selective", "packed": False},
    "LoRA, fused, tiled, checkpoints on the host": {"lora": True, "fused": True, "checkpointing": "offload", "tile": 7},
    "mixture of experts": {"family": "qwen3_moe"},
}  # fmt: skip


def build(family: str = "llama", lora: bool = False, **changes: Any) -> Any:
    """The same in every process, and every time."""
    model = families.build(family, **changes)
    for parameter in model.parameters():
        parameter.data.div_(2.0)
    if lora:
        torch.manual_seed(1)
        linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=linear, init_lora_weights=False))
    return model.train()


def prepared(settings: dict[str, Any]) -> Any:
    own = {"packed", "chunked", "checkpointing", "fused", "tile"}
    model = build(**{name: value for name, value in settings.items() if name not in own})
    if settings.get("packed", True):
        use_varlen(model)
        require_packable(model)
    if settings.get("fused"):
        fuse_lora(model)
    enable_checkpointing(model, settings.get("checkpointing", False))
    if "tile" in settings:
        assert tile_mlps(model, settings["tile"])
    return model


def batches(step: int, packed: bool, lengths: Sequence[Sequence[int]] = LENGTHS) -> list[dict[str, Any]]:
    """The global batch of a step: tokens that count up, the first third of each document not supervised."""
    rng = np.random.default_rng(step)
    made = []
    for micro in lengths:
        documents = [3 + (rng.integers(61) + np.arange(length)) % (families.VOCABULARY - 3) for length in micro]
        items = [(ids, np.where(np.arange(len(ids)) < len(ids) // 3, -100, ids)) for ids in documents]
        made.append(collate_packed(items) if packed else collate(items, 0))
    return made


def trained(engine: Engine, settings: dict[str, Any]) -> dict[str, Any]:
    """Gradients of the first step, the losses and norms of all, the held-out loss at the end."""
    packed, chunked = settings.get("packed", True), settings.get("chunked", True)
    model = engine.wrap(prepared(settings)).train()
    first = mine(engine, batches(0, packed))
    supervised = int(engine.total(sum(map(supervised_tokens, first))))
    engine.run(model, first, lambda m, batch: loss_sum(m, batch, chunked), supervised, 1.0)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer = MasterAdamW(model)
    optimizer.learning_rate = 3e-3
    optimizer.zero_grad()
    results = [
        train_step(model, mine(engine, batches(step, packed)), optimizer, 1.0, chunked=chunked, engine=engine)
        for step in range(STEPS)
    ]
    held_out = mean_loss(model, mine(engine, batches(STEPS, packed)), chunked=chunked, engine=engine)
    return {
        "gradients": gradients, "loss": [result.loss for result in results], "held_out": held_out,
        "norm": [result.grad_norm for result in results], "tokens": results[0].tokens,
        "supervised": results[0].supervised_tokens, "weights": fingerprint(model),
    }  # fmt: skip


def fingerprint(model: torch.nn.Module) -> str:
    """Of all weights, to the last bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def mine(engine: Engine, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of this process's share of the examples."""
    return micro_batches[engine.data_rank :: engine.data_size]


def compared(shared: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """The largest relative differences of two runs."""
    assert shared["gradients"].keys() == alone["gradients"].keys()
    assert (shared["tokens"], shared["supervised"]) == (alone["tokens"], alone["supervised"])
    gradients = {
        name: float((shared["gradients"][name] - gradient).norm() / max(float(gradient.norm()), 1e-6))
        for name, gradient in alone["gradients"].items()
    }
    series = {
        name: max(abs(a - b) / abs(b) for a, b in zip(shared[name], alone[name], strict=True))
        for name in ("loss", "norm", "held_out")
    }
    fell = alone["loss"][-1] - alone["loss"][0]
    return {
        "gradient": max(gradients.values()),
        "worst": max(gradients, key=gradients.__getitem__),
        "fell": fell,
        **series,
    }


class Live(TorchDispatchMode):
    """The bytes of tensors made inside that are still there, and the most of them at any time; without the model's."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        held = (*model.parameters(), *model.buffers())
        self._known = {tensor.untyped_storage()._cdata for tensor in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    for value in result if isinstance(result, list | tuple) else (result,):
        if isinstance(value, torch.Tensor):
            yield value


def memory(engine: Engine, checkpointing: bool) -> dict[str, int]:
    """Bytes of one forward and backward pass over a long document, with LoRA, and with what a GPU's kernel keeps."""
    # As in large models, keys are narrow beside the hidden states: each process has those of all.
    shape = {"num_hidden_layers": 6, "num_key_value_heads": 1, "hidden_size": 256, "intermediate_size": 768}
    settings = {"lora": True, "checkpointing": checkpointing, "max_position_embeddings": 512, **shape}
    kept = {}

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        loss = loss_sum(model, batch, True)
        kept["bytes"] = live.now
        return loss

    with gpu_assumed(), patch.object(varlen, "_DTYPES", (torch.float32,)):
        model = engine.wrap(prepared(settings)).train()
        with Live(model) as live:
            engine.run(model, batches(0, True, [(512,)]), loss_of, 1, 1.0)
    return {"kept": kept["bytes"], "peak": live.peak}


def refusals(world: World, size: int) -> dict[str, str]:
    def refused(action: Any) -> str:
        try:
            action()
        except SureFitError as error:
            return str(error)
        return "nothing"

    engine = ContextParallel(world, size)
    blind = families.build("llama")
    # What a model with a state of its own would do, were it missing in the tables: a token reads the one before it.
    blind.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0] + args[0].roll(1, 1), *args[1:]))
    use_varlen(blind)
    return {
        "groups": refused(lambda: ContextParallel(world, world.size + 1)),
        "alibi": refused(lambda: engine.wrap(families.build("bloom"))),
        "state": refused(lambda: engine.wrap(blind)),
    }


def main(out: str, size: str, *names: str) -> None:
    torch.set_num_threads(1)
    world = World.current()
    found: dict[str, Any] = {}
    with process_group(world, 2):
        engine = ContextParallel(world, int(size))
        chosen = names or tuple(SCENARIOS)
        shared = [trained(engine, SCENARIOS[name]) for name in chosen]
        if not names:
            found["refused"] = refusals(world, int(size))
            found["memory"] = {on: memory(engine, on == "checkpointed") for on in ("plain", "checkpointed")}
    # Each process holds some of the runs against one of its own, alone.
    for name, result in list(zip(chosen, shared, strict=True))[world.rank :: world.size]:
        found[name] = compared(result, trained(SINGLE, SCENARIOS[name]))
    if not names:
        found["memory alone"] = {on: memory(SINGLE, on == "checkpointed") for on in ("plain", "checkpointed")}
    found["weights"] = {name: result["weights"] for name, result in zip(chosen, shared, strict=True)}
    Path(out, f"{world.rank}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
