"""One of two processes of tests/distributed/test_tensor.py: every scenario, one after the other."""

from functools import partial

from engine_steps import micro_batches, prepared, refused, same_path, saved_and_resumed, tell
from torch.distributed.tensor import DTensor

from surefit.parallel.tensor_parallel import TensorParallel


def shards(world, **model):
    """Placement, whole and local shape of every parameter that is a DTensor; the names of those that are plain."""
    wrapped = TensorParallel(world, 2).wrap(prepared(**model))
    named = dict(wrapped.named_parameters())
    cut = {
        name: [str(p.placements[0]), list(p.shape), list(p.to_local().shape)]
        for name, p in named.items()
        if isinstance(p, DTensor)
    }
    return {"cut": cut, "plain": [name for name in named if name not in cut]}


def scenarios(world, folder):
    make = partial(TensorParallel, world, 2)
    return {
        "shards_lora": shards(world, lora=True),
        "shards_full": shards(world, lora=False),
        "lora": same_path(make, num_hidden_layers=2, lora=True),
        "full": same_path(make, num_hidden_layers=2, lora=False),
        "full_whole_logits": same_path(make, num_hidden_layers=2, lora=False, chunked=False),
        "full_tied": same_path(make, num_hidden_layers=2, lora=False, tied=True),
        "lora_tied": same_path(make, num_hidden_layers=2, lora=True, tied=True),
        "packed": same_path(make, partial(micro_batches, packed=True), num_hidden_layers=2, lora=True),
        "checkpointing": same_path(make, num_hidden_layers=2, lora=True, checkpointing=True),
        "qwen3": same_path(make, num_hidden_layers=2, lora=False, family="qwen3"),
        "biases": same_path(make, num_hidden_layers=2, lora=True, family="qwen2"),
        "phi3": same_path(make, num_hidden_layers=2, lora=True, family="phi3"),
        "resume_lora": saved_and_resumed(make, folder / "lora", num_hidden_layers=2, lora=True),
        "resume_full": saved_and_resumed(make, folder / "full", num_hidden_layers=2, lora=False, tied=True),
        "no_plan": refused(make(), family="gpt_bigcode"),
        "odd_heads": refused(make(), num_key_value_heads=1),
    }


if __name__ == "__main__":
    tell(scenarios)
