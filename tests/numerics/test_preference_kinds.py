"""Pairs over weights of 4, 8 and 16 bits and with experts, in one process: the reference is the start of the run."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import tiny_run
import torch
from safetensors.numpy import load_file

from surefit.config.schema import ObjectiveSection
from surefit.core.errors import GateError
from surefit.core.rundir import read_jsonl
from surefit.data.tokens.collate import collate, describe_pairs
from surefit.model.adapter import add_adapter
from surefit.model.load import load_model
from surefit.train import loss, reference
from surefit.train.objectives.pairs import PairObjective
from surefit.train.optim import MasterAdamW
from surefit.train.reference import reference_key
from surefit.train.sampler import DatasetFingerprint
from surefit.train.step import train_step

pytestmark = pytest.mark.usefixtures("one_thread")
DPO = {"name": "dpo", "beta": 0.1}
LN_2 = math.log(2)


def settings(base: Path, out: Path, quantization: str = "none", **changes: Any) -> Any:
    made = tiny_run.config(base, out, objective=DPO, **({"max_steps": 4} | changes))
    return made.model_copy(update={"model": made.model.model_copy(update={"quantization": quantization})})


def first_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "first_batch.json").read_text())
    return found


def require(quantization: str) -> None:
    if quantization == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes: the extra quantize")


@pytest.mark.parametrize("quantization", ["nf4", "fp8"])
def test_over_quantized_weights_the_run_starts_at_ln_2(tmp_path: Path, quantization: str) -> None:
    require(quantization)
    base = tiny_run.save_base(tmp_path / "base")
    tiny_run.training(settings(base, tmp_path / "whole", max_steps=1)).fit()
    tiny_run.training(settings(base, tmp_path / "run", quantization)).fit()
    first = first_of(tmp_path / "run")
    assert first["passed"]
    assert first["offset"] < 1e-6
    assert first["loss"] == pytest.approx(LN_2, abs=1e-6)
    losses = [line["loss"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < LN_2 - 0.01
    # The reference is the quantized model's, not that of the weights it was made from.
    whole, quantized = (load_file(tmp_path / name / "reference.safetensors")["train"] for name in ("whole", "run"))
    assert np.nanmax(np.abs(whole - quantized)) > 1e-3


@pytest.mark.parametrize("quantization", ["nf4", "fp8"])
def test_the_scales_of_quantized_weights_are_part_of_the_key(tmp_path: Path, quantization: str) -> None:
    """Weights twice as large have the same 4 or 8 bits."""
    require(quantization)
    rows = DatasetFingerprint(np.zeros(0, np.int64), "0" * 64)
    keys, bits = [], []
    for factor in (1.0, 1.0, 2.0):
        model = tiny_run.llama()
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.data.mul_(factor)
        base = tmp_path / f"base {len(keys)}"
        model.save_pretrained(base)
        loaded = load_model(settings(base, tmp_path, quantization).model, tiny_run.CPU)
        keys.append(reference_key(loaded, "float32", rows, rows))
        bits.append([p.detach().view(torch.uint8) for p in loaded.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(bits[0], bits[2], strict=True))
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_in_bfloat16_the_rewards_are_0_at_the_start(tmp_path: Path, kind: str, packing: bool) -> None:
    """The reference and the check see the same tensors in the same chunks, so that 16 bits round alike."""
    base = tiny_run.save_base(tmp_path / "base")
    tiny_run.training(settings(base, tmp_path / "run", dtype="bfloat16", kind=kind, packing=packing, max_steps=1)).fit()
    first = first_of(tmp_path / "run")
    assert first["passed"]
    assert first["offset"] < 1e-5
    assert first["loss"] == pytest.approx(LN_2, abs=1e-5)


def test_the_check_computes_the_logits_in_the_chunks_of_the_loss(monkeypatch: Any) -> None:
    """In 16 bits a product of another size may round otherwise."""
    model, sizes = tiny_run.llama().bfloat16(), []
    rows = tiny_run.pairs(4)
    batch = collate(rows, 0) | describe_pairs(rows, None)
    monkeypatch.setattr(loss, "chunk_rows", lambda *given: (sizes.append(given), 7)[1])
    with torch.no_grad():
        losses = loss.token_losses(model, batch, True)[0]
    assert torch.allclose(losses.double(), loss.exact_token_losses(model, batch, True), 0, 1e-5)
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]


def test_in_bfloat16_another_reference_is_noticed(tmp_path: Path, monkeypatch: Any) -> None:
    base = tiny_run.save_base(tmp_path / "base")
    inner = reference.StoredReference._measure
    monkeypatch.setattr(reference.StoredReference, "_measure", lambda self, *given: inner(self, *given) + 0.25)
    with pytest.raises(GateError) as error:
        tiny_run.training(settings(base, tmp_path / "run", dtype="bfloat16", max_steps=1)).fit()
    assert error.value.code == "E5840"
    assert first_of(tmp_path / "run")["offset"] > 0.02


def test_numbers_that_were_rounded_otherwise_are_computed_again(tmp_path: Path) -> None:
    """Before the first step; a run that has taken steps with them keeps them. In bfloat16 a token of a pretrained model
    is up to 0.2 nats off in a batch of another shape."""
    base, out = tiny_run.save_base(tmp_path / "base"), tmp_path / "run"
    tiny_run.training(settings(base, out, dtype="bfloat16", max_steps=2, every=2)).fit()
    stored = load_file(out / "reference.safetensors")["train"]
    other = {"per_device_train_batch_size": 1}
    # Steps were taken with these numbers.
    resumed = tiny_run.training(settings(base, out, dtype="bfloat16", max_steps=2, every=2, **other)).fit(resume=True)
    assert not any("computed again" in note for note in resumed.notes)
    assert np.array_equal(load_file(out / "reference.safetensors")["train"], stored, equal_nan=True)
    # A run that was ended in the pass, and starts again with smaller micro batches.
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "reference.safetensors").write_bytes((out / "reference.safetensors").read_bytes())
    again = tiny_run.training(settings(base, tmp_path / "new", dtype="bfloat16", **other)).fit(resume=True)
    assert any("other micro batches" in note for note in again.notes)
    assert first_of(tmp_path / "new")["offset"] < 1e-5


@pytest.mark.parametrize("coefficient", [None, 0.0, 5.0], ids=["off", "on, of no weight", "on"])
def test_experts_learn_from_pairs_beside_the_routers_loss(coefficient: float | None) -> None:
    """The router's loss of a micro batch counts with its pairs, and is reported beside the objective's loss."""
    aux = {} if coefficient is None else {"output_router_logits": True, "router_aux_loss_coef": coefficient}
    base = families.build("qwen3_moe", **aux)
    section = settings(Path("base"), Path("run")).lora
    model = add_adapter(base, section).train()
    rows = tiny_run.pairs(6)
    batches = [
        collate(part, 0) | describe_pairs(part, np.full((len(part) // 2, 2), -20.0)) for part in (rows[:8], rows[8:])
    ]
    optimizer = MasterAdamW(model)
    optimizer.learning_rate = 1e-2
    objective = PairObjective(ObjectiveSection.model_validate(DPO))
    results = [train_step(model, batches, optimizer, 1e9, objective=objective) for _ in range(3)]
    assert results[-1].loss < results[0].loss or coefficient == 5.0
    if coefficient is None:
        assert results[0].router_loss is None
        return
    assert results[0].router_loss is not None
    with torch.no_grad():
        fresh = add_adapter(families.build("qwen3_moe", **aux), section).train()
        parts = [float(fresh(**{k: b[k] for k in ("input_ids", "attention_mask")}).aux_loss) for b in batches]
    assert results[0].router_loss == pytest.approx(coefficient * (4 * parts[0] + 2 * parts[1]) / 6, rel=1e-5)
