"""One of two processes of tests/distributed/test_pipeline.py: every scenario, one after the other."""

from functools import partial

import torch
from engine_steps import micro_batches, optimizer_of, prepared, refused, same_path, saved_and_resumed, tell

from surefit.parallel.pipeline_parallel import Pipeline
from surefit.train.step import train_step


def shards(world):
    model = prepared(lora=True)
    names = [name for name, _ in model.named_parameters()]
    engine = Pipeline(world, 2)
    wrapped = engine.wrap(model)
    held = [name for name, p in wrapped.named_parameters() if p.untyped_storage().nbytes() >= p.nbytes]
    everyone = [None] * world.size
    torch.distributed.all_gather_object(everyone, [list(engine.layers), held])
    return {"names": names, "stages": everyone, "shapes": [list(p.shape) for p in wrapped.parameters()]}


def not_finite(world):
    """A weight of the last stage is infinite: no stage may update."""
    engine = Pipeline(world, 2)
    model = engine.wrap(prepared(lora=True))
    optimizer = optimizer_of(model)
    if engine.is_last:
        with torch.no_grad():
            model.get_base_model().model.layers[3].mlp.down_proj.base_layer.weight.fill_(float("inf"))
    before = [p.detach().clone() for p in optimizer.parameters.values()]
    result = train_step(model, micro_batches(0), optimizer, 1.0, engine=engine)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, optimizer.parameters.values(), strict=True))
    everyone = [None] * world.size
    torch.distributed.all_gather_object(everyone, [result.applied, unchanged])
    return everyone


def scenarios(world, folder):
    make = partial(Pipeline, world, 2)
    return {
        "shards": shards(world),
        "lora": same_path(make, partial(micro_batches, count=4), lora=True),
        "lora_whole_logits": same_path(make, lora=True, chunked=False),
        "full": same_path(make, lora=False),
        "full_tied": same_path(make, lora=False, tied=True),
        "lora_tied": same_path(make, lora=True, tied=True),
        "packed": same_path(make, partial(micro_batches, packed=True), lora=True),
        "one_micro_batch": same_path(make, partial(micro_batches, count=1), lora=True),
        "checkpointing": same_path(make, lora=True, checkpointing=True),
        "qwen3": same_path(make, lora=False, family="qwen3"),
        "resume_lora": saved_and_resumed(make, folder / "lora", lora=True),
        "resume_full": saved_and_resumed(make, folder / "full", lora=False, tied=True),
        "not_finite": not_finite(world),
        "no_plan": refused(make(), family="gpt2"),
    }


if __name__ == "__main__":
    tell(scenarios)
