"""Two processes share optimizer steps through DeepSpeed; what they find is written as JSON.

    torchrun --nproc-per-node 2 zero_script.py OUT

Each scenario trains the same tiny model as one process does beforehand, step by step on the same global batches.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny_run
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from surefit.checkpoint import manager
from surefit.config.modes import ZERO
from surefit.config.schema import SureFitConfig
from surefit.data.tokens.collate import collate
from surefit.model.prepare import prepare_for_training
from surefit.parallel.engine import SINGLE
from surefit.parallel.process_group import World, barrier, process_group
from surefit.parallel.zero import Zero
from surefit.train.optim import make_optimizer
from surefit.train.step import StepResult, mean_loss, train_step

STEPS, MICRO = 20, 2
ROWS = tiny_run.rows(48)
NO_PERSISTENCE = {
    "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}
}


def settings(out: Path, mode: str, kind: str, **parallel: Any) -> SureFitConfig:
    config = tiny_run.config(Path("unused"), out, kind, global_batch_size=12, per_device_train_batch_size=MICRO,
                             weight_decay=0.1)  # fmt: skip
    tree = config.model_dump()
    tree["lora"]["lora_dropout"] = 0.0
    tree["parallel"] |= {"mode": mode, "deepspeed_config": str(out / "user.json")} | parallel.pop("parallel", {})
    for section, changes in parallel.items():
        tree[section] |= changes
    return SureFitConfig.model_validate(tree)


def batches(step: int, rank: int, size: int) -> list[Any]:
    """Micro batches of 2 rows; their number changes from step to step, the global batch does not depend on `size`."""
    count = 8 if step % 3 else 12
    chosen = [ROWS[(step * 7 + place) % len(ROWS)] for place in range(count)]
    micros = [chosen[at : at + MICRO] for at in range(0, count, MICRO)]
    return [collate(micro, 0) for micro in micros[rank::size]]


class Run:
    """A model, an engine and its optimizer."""

    def __init__(self, config: SureFitConfig, world: World | None) -> None:
        base = tiny_run.llama(hidden_size=40, intermediate_size=51, tie_word_embeddings=config.train.method == "lora")
        model, _ = prepare_for_training(base.to(getattr(torch, config.model.dtype)), config, tiny_run.CPU)
        self.config, self.engine = config, SINGLE if world is None else Zero(world, config.parallel)
        self.model = self.engine.wrap(model).train()
        self.optimizer = self.engine.optimizer(self.model, partial(make_optimizer, train=config.train))
        self.losses: list[float] = []

    def step(self, step: int) -> StepResult:
        self.optimizer.learning_rate = 1e-2 * (1 - step / 40)
        mine = batches(step, self.engine.data_rank, self.engine.data_size)
        chunked = self.config.speed.chunked_loss
        result = train_step(self.model, mine, self.optimizer, 0.5, chunked=chunked, engine=self.engine)
        assert result.applied
        self.losses.append(result.loss)
        return result

    def train(self, first: int = 0, last: int = STEPS) -> Run:
        for step in range(first, last):
            self.step(step)
        return self

    def state(self) -> manager.CheckpointState:
        return manager.CheckpointState(self.engine.whole(self.optimizer.parameters), self.optimizer.tensors(), {})

    def resume(self, path: Path) -> Run:
        state = manager.load_checkpoint(path)
        shares = self.engine.shares(state.weights, self.optimizer.parameters)
        manager.restore_weights(manager.CheckpointState(shares, {}, {}), self.optimizer.parameters, path)
        self.optimizer.load_tensors(state.optimizer)
        return self

    def held_out(self) -> float:
        found = mean_loss(self.model, batches(5, self.engine.data_rank, self.engine.data_size), engine=self.engine)
        assert found is not None
        return found[0]

    def close(self) -> None:
        if isinstance(self.engine, Zero):
            self.optimizer.runtime.destroy()


def apart(one: Any, other: Any) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def distance(one: Any, other: Any) -> float:
    """The largest difference of two sets of tensors, against the largest number of each."""
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    pairs = [(one[name].detach().float(), other[name].detach().float()) for name in one]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)


ALONE: dict[tuple[str, str], tuple[Run, manager.CheckpointState]] = {}


def alone(config: SureFitConfig) -> tuple[Run, manager.CheckpointState]:
    """What one process with everything makes of the same steps; it does not depend on how others share them."""
    key = (config.train.method, config.model.dtype)
    if key not in ALONE:
        run = Run(config, None).train()
        ALONE[key] = run, run.state()
    return ALONE[key]


def compare(world: World, out: Path, name: str, mode: str, kind: str, **changes: Any) -> dict[str, Any]:
    """20 steps, against one process."""
    config = settings(out, mode, kind, **changes)
    single, one = alone(config)
    zero = Run(config, world)
    shapes = {key: list(p.shape) for key, p in zero.model.named_parameters()}
    zero.train(last=10)
    half = zero.state()
    if world.is_first:
        manager.save_checkpoint(out / name, 10, half)
    zero.train(first=10)
    whole, held_out = zero.state(), zero.held_out()
    held = sum(part.numel() for part in zero.optimizer.parts)
    zero.close()
    found = {
        "loss": apart(zero.losses, single.losses), "held_out": apart([held_out], [single.held_out()]),
        "losses": zero.losses, "shapes": shapes, "held": held,
        "trained": sum(p.numel() for p in one.weights.values()),
    }  # fmt: skip
    if world.is_first:
        found |= {
            "weights": distance(whole.weights, one.weights), "optimizer": distance(whole.optimizer, one.optimizer),
            "keys": sorted(whole.optimizer) == sorted(one.optimizer),
        }  # fmt: skip
        if kind == "lora":
            found["peft"] = loads(config, whole.weights, out / f"{name}-adapter.safetensors")
    return found | resumed(world, config, out / name / "step-10", zero.losses[10:], whole, single.losses[10:])


def resumed(
    world: World,
    config: SureFitConfig,
    path: Path,
    losses: list[float],
    whole: manager.CheckpointState,
    single: list[float],
) -> dict[str, Any]:
    """Go on from step 10, in the same mode and in one process alone."""
    barrier(world)
    again = Run(config, world).resume(path).train(first=10)
    state = again.state()
    again.close()
    other = Run(config, None).resume(path).train(first=10, last=15)
    found = {"resumed_losses": again.losses == losses, "resumed_alone": apart(other.losses, single[:5])}
    if world.is_first:
        found["resumed_bits"] = all(torch.equal(state.weights[key], whole.weights[key]) for key in whole.weights)
    return found


def short(world: World, out: Path, mode: str, kind: str, **changes: Any) -> dict[str, Any]:
    """10 steps, against one process."""
    config = settings(out, mode, kind, **changes)
    single, _ = alone(config)
    zero = Run(config, world).train(last=10)
    zero.close()
    return {"loss": apart(zero.losses, single.losses[:10])}


def loads(config: SureFitConfig, weights: Any, path: Path) -> list[Any]:
    """Save an adapter under PEFT's names and put it into a fresh plain model: (missing, unexpected, output moved)."""
    save_file({name.replace(".default", ""): tensor for name, tensor in weights.items()}, path)
    base = tiny_run.llama(hidden_size=40, intermediate_size=51, tie_word_embeddings=True)
    ids = torch.arange(1, 9)[None]
    before = base(input_ids=ids).logits.detach().clone()
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    assert isinstance(model, PeftModel)
    result = set_peft_model_state_dict(model, load_file(path))
    missing = [name for name in result.missing_keys if "lora" in name]
    saved = get_peft_model_state_dict(model)
    moved = float((model(input_ids=ids).logits - before).abs().max())
    merged = model.merge_and_unload()(input_ids=ids).logits
    return [missing, list(result.unexpected_keys), moved, len(saved), float((merged - before).abs().max())]


def rejected(world: World, out: Path, mode: str, **changes: Any) -> dict[str, Any]:
    """A loss that one process alone finds not finite: nobody updates, and the next step is as if it had not been."""
    config = settings(out, mode, "lora", **changes)
    run = Run(config, world)
    found: dict[str, Any] = {}
    for when in (0, 3):
        run.train(first=when and 1, last=when)
        before = run.state()
        first = next(p for name, p in run.model.named_parameters() if p.requires_grad)
        bad = first.register_hook(lambda g: g * math.nan) if world.rank == 1 else None
        result = train_step(run.model, batches(9, world.rank, 2), run.optimizer, 0.5, engine=run.engine)
        if bad is not None:
            bad.remove()
        after = run.state()
        same = all(torch.equal(before.weights[key], after.weights[key]) for key in before.weights)
        same &= all(torch.equal(before.optimizer[key], after.optimizer[key]) for key in before.optimizer)
        found[f"after_{when}"] = [result.applied, math.isfinite(result.loss), math.isfinite(result.grad_norm), same]
        if when == 0:
            run.step(0)
    run.train(first=3, last=6)
    run.close()
    clean = Run(config, world).train(last=6)
    clean.close()
    return found | {"as_if_not": run.losses == clean.losses}


def scenarios(world: World, out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for mode in ZERO:
        for kind in ("lora", "full"):
            yield f"{mode}-{kind}", compare(world, out, f"{mode}-{kind}", mode, kind)
        yield f"{mode}-rejected", rejected(world, out, mode)
        yield f"{mode}-offload", short(world, out, mode, "full", parallel={"offload": True})
        yield f"{mode}-bf16", short(world, out, mode, "lora", model={"dtype": "bfloat16"})
    yield "zero2-offload-rejected", rejected(world, out, "zero2", parallel={"offload": True})
    yield "zero3-recompute", short(world, out, "zero3", "full", train={"gradient_checkpointing": True})


def main(out: Path) -> None:
    torch.set_num_threads(1)
    world = World.current()
    with process_group(world, 2):
        if world.is_first:
            (out / "user.json").write_text(json.dumps(NO_PERSISTENCE))
        barrier(world)
        for name, found in scenarios(world, out):
            (out / f"rank{world.rank}-{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
