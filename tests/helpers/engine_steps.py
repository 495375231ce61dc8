"""What scripts of tests/distributed share: tiny models, batches, steps by any engine, and what comes out of them."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from surefit.checkpoint import manager
from surefit.config.schema import LoraSection
from surefit.core.errors import SureFitError
from surefit.data.tokens.collate import collate, collate_packed
from surefit.model.adapter import add_adapter
from surefit.model.checkpointing import enable_checkpointing
from surefit.model.fused_lora import fuse_lora
from surefit.model.tiling import tile_mlps
from surefit.parallel.engine import SINGLE
from surefit.parallel.process_group import World, broadcast_from_rank0, process_group
from surefit.train.optim import MasterAdamW
from surefit.train.step import mean_loss, train_step

HELPERS = Path(__file__).parent
STEPS = 20
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 16, "attention_dropout": 0.0, "use_cache": False,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "dtype": "float32",
}  # fmt: skip


def start(script, processes=2, timeout=300):
    """Run a script in several processes over gloo; returns what rank 0 wrote to the file named by its argument."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        running = [
            subprocess.Popen(
                [sys.executable, script, result],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ
                | {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
                | {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                | {"GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(processes)
        ]
        try:
            said = [process.communicate(timeout=timeout)[0] for process in running]
        finally:
            for process in running:
                process.kill()
        assert "unwaited collective" not in "".join(said), "their results would be kept forever"
        assert [process.returncode for process in running] == [0] * processes, "\n".join(said)
        return json.loads(result.read_text(encoding="utf-8"))


def tell(scenarios):
    """One of these processes: `scenarios(world, folder)`, and what came out of them told by rank 0.

    Args:
        scenarios: returns a value that JSON can hold by name; what stands under "later" in `resume_lora` is called when
            the processes have parted.
    """
    torch.set_num_threads(1)
    world = World.current()
    with tempfile.TemporaryDirectory() as folder:
        with process_group(world, 2.0):
            found = scenarios(world, Path(broadcast_from_rank0(folder if world.is_first else None, world)))
        if world.is_first:
            found["resume_lora"] |= found["resume_lora"].pop("later")()
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


def refused(engine, change=lambda model: None, **model):
    """What an engine says of a model that it does not take."""
    ready = prepared(lora=True, **model)
    change(ready)
    try:
        engine.wrap(ready)
    except SureFitError as error:
        return str(error)
    return None


def tiny(family="llama", tied=False, **sizes):
    """A model with random weights, the same in every process."""
    config = AutoConfig.for_model(family, **SIZES | {"tie_word_embeddings": tied} | sizes)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than usual, so that the loss depends on every layer
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def prepared(lora, checkpointing=False, fused=False, tile=None, experts=False, new_tokens=(), **model):
    """The model with LoRA factors, or to be trained whole; in training mode. `tile`: rows of a tile of its MLPs;
    `new_tokens`: rows of the vocabulary that are trained beside the factors."""
    ready = tiny(**model)
    if lora:
        section = LoraSection(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", experts=experts)
        ready = add_adapter(ready, section, new_tokens=new_tokens)
    if fused:
        fuse_lora(ready)
    enable_checkpointing(ready, checkpointing)
    if tile:
        assert tile_mlps(ready, tile)
    return ready.train()


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = 5 + int(torch.randint(12, (), generator=generator))
        ids = torch.randint(2, 128, (length,), generator=generator).numpy()
        labels = ids.copy()
        labels[: 1 + number % 3] = -100
        found.append((ids, labels))
    return found


def micro_batches(step, packed=False, count=2):
    """Uneven ones: 2 rows, but the last has 1. Every second step has the same, so that they are learnt."""
    found = rows(2 * count - 1, 100 + step % 2)
    parts = [found[start : start + 2] for start in range(0, len(found), 2)]
    return [collate_packed(part) if packed else collate(part, 0) for part in parts]


def optimizer_of(model):
    optimizer = MasterAdamW(model, 0.01)
    # All weights at 3e-3 learn the rows by heart, and relative to the loss that is left processors round differently.
    optimizer.learning_rate = 3e-3 if any("lora_" in name for name, _ in model.named_parameters()) else 1e-3
    return optimizer


def train(model, optimizer, steps, batches=micro_batches, **how):
    """[loss, gradient norm] of every step."""
    results = [train_step(model, batches(step), optimizer, 1.0, **how) for step in steps]
    return [[result.loss, result.grad_norm] for result in results]


def held_out(model, engine=SINGLE, **how):
    return mean_loss(model, own([micro_batches(0)[0], micro_batches(1)[1]], engine), engine=engine, **how)[0]


def own(batches, engine):
    """Of the micro batches of a step, those of this process."""
    return batches[engine.data_rank :: engine.data_size]


def difference(found, expected):
    """The largest difference, relative to the expected number, or to the largest of its tensor."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
        return max(
            float((found[name].float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-12))
            for name, wanted in expected.items()
        )
    pairs = zip(torch.tensor(found).flatten(), torch.tensor(expected).flatten(), strict=True)
    return max(float((a - b).abs() / b.abs()) for a, b in pairs)


def learnt(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def same_path(make_engine, batches=micro_batches, chunked=True, **model):
    """Train with the engine and in one process; the differences, measured on rank 0."""
    engine = make_engine()
    shared = engine.wrap(prepared(**model))
    optimizer = optimizer_of(shared)
    mine = lambda step: own(batches(step), engine)  # noqa: E731
    found = train(shared, optimizer, range(STEPS), mine, engine=engine, chunked=chunked)
    evaluated = held_out(shared, engine=engine, chunked=chunked)
    weights = engine.whole(optimizer.parameters)
    if not engine.world.is_first:
        return {}
    alone = prepared(**model)
    expected = train(alone, optimizer_of(alone), range(STEPS), batches)
    return {
        "loss": difference([loss for loss, _ in found], [loss for loss, _ in expected]),
        "norm": difference([norm for _, norm in found], [norm for _, norm in expected]),
        "held_out": difference(evaluated, held_out(alone)),
        "weights": difference(weights, learnt(alone)),
        "fell": expected[0][0] - expected[-1][0],
    }


def saved_and_resumed(make_engine, folder, lora, **model):
    """Ten steps, a checkpoint as one process writes it, ten more in fresh objects; and in one process."""
    engine = make_engine()
    shared = engine.wrap(prepared(lora, **model))
    optimizer = optimizer_of(shared)
    train(shared, optimizer, range(STEPS // 2), engine=engine)
    weights, states = engine.whole(optimizer.parameters), engine.whole(optimizer.tensors())
    if engine.world.is_first:
        manager.save_checkpoint(folder, 10, manager.CheckpointState(weights, states, {}))
    torch.distributed.barrier()
    going_on = train(shared, optimizer, range(STEPS // 2, STEPS), engine=engine)
    again_engine = make_engine()
    again = again_engine.wrap(prepared(lora, **model))
    resumed = optimizer_of(again)
    state = manager.load_checkpoint(folder / "step-10")
    manager.restore_weights(
        manager.CheckpointState(again_engine.shares(state.weights, resumed.parameters), {}, {}),
        resumed.parameters,
        folder,
    )
    resumed.load_tensors(again_engine.shares(state.optimizer, resumed.parameters))
    after = train(again, resumed, range(STEPS // 2, STEPS), engine=again_engine)
    final = again_engine.whole(resumed.parameters)
    if not engine.world.is_first:
        return {}
    alone = prepared(lora, **model)
    own = optimizer_of(alone)
    manager.restore_weights(state, own.parameters, folder)
    own.load_tensors(state.optimizer)
    expected = train(alone, own, range(STEPS // 2, STEPS))
    found = {
        "resumed_equals_uninterrupted": after == going_on,
        "single_goes_on": difference([loss for loss, _ in after], [loss for loss, _ in expected]),
    }
    if lora:
        again.save_pretrained(str(folder / "adapter"), state_dict=final, save_embedding_layers=False)
        found["later"] = partial(adapter_loads, alone, folder / "adapter", model)
    return found


def adapter_loads(alone, adapter, model):
    """Plain PEFT must load the adapter, key for key, and give the same logits. For a process that is alone: PEFT 0.19
    cannot load anything beside transformers 5.17 in one that is connected to others."""
    base = tiny(**model)
    loaded = PeftModel.from_pretrained(base, str(adapter))
    wanted = get_peft_model_state_dict(alone, save_embedding_layers=False)
    found = get_peft_model_state_dict(loaded, save_embedding_layers=False)
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        logits = [each.eval()(ids).logits for each in (loaded, alone)]
    return {"adapter": difference(found, wanted), "adapter_logits": float((logits[0] - logits[1]).abs().max())}


def assert_the_same_steps(differences):
    """Twenty steps of several processes against those of one, as `same_path` compares them."""
    assert differences["fell"] > 0.5, "it learns"
    assert differences["loss"] <= 1e-5
    assert differences["held_out"] <= 1e-5
    assert differences["norm"] <= 1e-4
    assert differences["weights"] <= 1e-3, "Adam divides tiny gradients by themselves"
