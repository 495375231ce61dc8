"""Pairs with their prompt once: the same losses, gradients, references and runs as with two documents per pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from surefit.config.schema import ObjectiveSection
from surefit.core.errors import ConfigError
from surefit.core.rundir import read_jsonl
from surefit.data.tokens.collate import collate_packed, describe_pairs
from surefit.data.tokens.shared_prompts import collate_shared
from surefit.model import attention
from surefit.train.batches import MicroBatcher
from surefit.train.loss import exact_token_losses, token_losses
from surefit.train.objectives.pairs import PairObjective, sum_answers
from surefit.train.optim import MasterAdamW
from surefit.train.step import measure, train_step

pytestmark = pytest.mark.usefixtures("one_thread")
SECTIONS = {
    "sigmoid": {"name": "dpo", "beta": 0.1},
    "rpo": {"name": "dpo", "beta": 0.1, "sft_weight": 0.7},
    "ipo": {"name": "dpo", "loss_type": "ipo", "beta": 0.1},
    "sigmoid_norm": {"name": "dpo", "loss_type": "sigmoid_norm", "beta": 5.0},
    "orpo": {"name": "orpo", "beta": 0.1},
    "simpo": {"name": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.5},
}
PAIRS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base")


def objective(name: str) -> PairObjective:
    return PairObjective(ObjectiveSection.model_validate(SECTIONS[name]))


def model_of(kind: str) -> torch.nn.Module:
    model: Any = tiny_run.llama(attn_implementation=attention.NAME)
    if kind == "lora":
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return model.train()


def batches() -> tuple[dict[str, Any], dict[str, Any]]:
    """The same pairs as two documents each, and with their prompt once."""
    rows = tiny_run.pairs(PAIRS)
    beside = describe_pairs(rows, np.random.default_rng(5).normal(-25, 6, (PAIRS, 2)).astype(np.float32))
    return collate_packed(rows) | beside, collate_shared(rows) | beside


def of_step(name: str, model: torch.nn.Module, batch: Any, chunked: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    optimizer = MasterAdamW(model)
    kept: dict[str, torch.Tensor] = {}
    optimizer.step = lambda factor=1.0: kept.update(  # type: ignore[method-assign]
        {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    )
    result = train_step(model, [batch], optimizer, 1e9, chunked=chunked, objective=objective(name))
    assert result.applied
    return result, kept


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "all logits"])
def test_loss_and_gradients_are_those_of_two_documents(
    name: str, kind: str, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefit.train.loss.chunk_rows", lambda *sizes: 7)  # several chunks
    two, once = batches()
    assert once["input_ids"].numel() < two["input_ids"].numel()
    model = model_of(kind)
    (result, found), (expected, gradients) = (of_step(name, model, batch, chunked) for batch in (once, two))
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.supervised_tokens == expected.supervised_tokens
    assert result.tokens == once["input_ids"].numel()
    for metric, value in expected.metrics.items():
        assert result.metrics[metric] == pytest.approx(value, rel=1e-6, abs=1e-6)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for key, gradient in gradients.items():
        assert float((found[key] - gradient).abs().max()) <= 1e-6 * max(1.0, scale), key


def test_each_answer_is_read_as_if_alone() -> None:
    """In float64, where nothing but rounding of the last digits is left."""
    model, rows = tiny_run.llama(attn_implementation=attention.NAME).double().eval(), tiny_run.pairs(PAIRS)
    batch = collate_shared(rows) | describe_pairs(rows, None)
    with torch.no_grad():
        found = sum_answers(-token_losses(model, batch, False)[0], batch).log_probs.flatten()
        for (ids, labels), log_prob in zip(rows, found, strict=True):
            logits = model(torch.as_tensor(ids)[None]).logits[0].float().log_softmax(-1)
            alone = sum(logits[n - 1, ids[n]] for n in range(1, len(ids)) if labels[n] != -100)
            assert float(log_prob) == pytest.approx(float(alone), abs=1e-5)
        exact = sum_answers(-exact_token_losses(model, batch, True), batch).log_probs.flatten()
        two = collate_packed(rows) | describe_pairs(rows, None)
        expected = sum_answers(-exact_token_losses(model, two, True), two).log_probs.flatten()
    assert torch.allclose(exact, expected, rtol=0, atol=1e-12)


def test_held_out_pairs_measure_the_same() -> None:
    two, once = batches()
    model = model_of("lora")
    expected, found = (measure(model, [batch], objective=objective("rpo")) for batch in (two, once))
    assert expected is not None
    assert found is not None
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)


def test_the_last_token_of_a_prompt_predicts_both_answers() -> None:
    prompt, chosen, rejected = [5, 6, 7], [8, 9], [10]
    items = [(np.array(prompt + tail), np.array([-100] * 3 + tail)) for tail in (chosen, rejected)]
    batch = collate_shared(items)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 8, 9, 10]]
    assert (batch["loss_rows"].tolist(), batch["targets"].tolist()) == ([2, 3, 2], [8, 9, 10])
    assert batch["key_order"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5]
    assert (batch["cu_seq_lens_q"].tolist(), batch["document_lengths"]) == ([0, 5, 6], (5, 1))
    assert (batch["cu_seq_lens_k"].tolist(), batch["key_lengths"]) == ([0, 5, 9], (5, 4))
    checked = attention.share_prompt_ids([torch.as_tensor(ids) for ids, _ in items], 3)  # what a model is tested with
    for name, value in checked.items():
        assert torch.equal(value, batch[name]) if isinstance(value, torch.Tensor) else value == batch[name], name


@pytest.mark.parametrize("why", ["another prompt", "too short a prompt"])
def test_a_prompt_that_is_not_shared_stays_in_both_documents(why: str) -> None:
    answers = (np.arange(20, 23), np.arange(30, 33)) if why == "another prompt" else (np.arange(40), np.arange(40))
    prompts = ([5, 6, 7], [5, 9, 7]) if why == "another prompt" else ([5], [5])
    items = [
        (np.concatenate([prompt, tail]), np.concatenate([[-100] * len(prompt), tail]))
        for prompt, tail in zip(prompts, answers, strict=True)
    ]
    shared, packed = collate_shared(items), collate_packed(items)
    assert shared["document_lengths"] == shared["key_lengths"] == packed["document_lengths"]
    for name in ("input_ids", "position_ids", "labels", "loss_rows", "targets"):
        assert torch.equal(shared[name], packed[name])


def batcher(base: Path, shared: bool, **changes: Any) -> MicroBatcher:
    rows = tiny_run.pairs(24)
    lengths = np.array([len(ids) for ids, _ in rows])
    config = tiny_run.config(base, base, objective=SECTIONS["sigmoid"], packing=True, shared=shared, **changes)
    return MicroBatcher(rows, lengths, config, 0)


def test_the_sampler_counts_a_shared_prompt_once(base: Path) -> None:
    two, once = batcher(base, False), batcher(base, True)
    assert sorted(pair for micro in once.of_step(0) for pair in micro) == sorted(
        pair for micro in two.of_step(0) for pair in micro
    )
    assert len(once.of_step(0)) <= len(two.of_step(0))
    for micro in once.of_step(0):
        batch = once.make(micro)
        assert batch["input_ids"].numel() == sum(int(once.lengths[pair]) for pair in micro) <= once.capacity
        saved = sum(once.shared_prompts([micro]))
        assert batch["input_ids"].numel() + saved == sum(once.document_lengths([micro])) > batch["input_ids"].numel()
    assert two.shared_prompts(two.of_step(0)) == []
    assert once.make([])["answer_targets"] == ()


def test_prompts_are_never_shared_by_padded_batches(base: Path) -> None:
    config = tiny_run.config(base, base, objective=SECTIONS["sigmoid"], shared=True)
    rows = tiny_run.pairs(8)
    made = MicroBatcher(rows, np.array([len(ids) for ids, _ in rows]), config, 0).make([0, 1])
    assert "key_order" not in made
    assert len(made["input_ids"]) == 4


def run(base: Path, out: Path, shared: bool, **changes: Any) -> list[dict[str, Any]]:
    config = tiny_run.config(base, out, objective=SECTIONS["rpo"], packing=True, shared=shared, max_steps=8, **changes)
    tiny_run.training(config).fit()
    return read_jsonl(out / "metrics.jsonl")


def test_a_run_learns_what_a_run_of_two_documents_learns(base: Path, tmp_path: Path) -> None:
    expected, found = (run(base, tmp_path / str(shared), shared) for shared in (False, True))
    for name in ("loss", "grad_norm", "rewards/margins", "logps/chosen", "eval_loss", "eval_rewards/accuracies"):
        ours, theirs = ([line[name] for line in lines if name in line] for lines in (found, expected))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), name
    stored, alone = (load_file(tmp_path / str(shared) / "reference.safetensors") for shared in (True, False))
    for name in ("train", "eval"):
        assert np.allclose(stored[name], alone[name], rtol=0, atol=2e-5, equal_nan=True)
    first = json.loads((tmp_path / "True" / "first_batch.json").read_text())
    assert first["passed"]
    assert first["offset"] < 1e-6
    tokens = [sum(line["tokens"] for line in lines if "grad_norm" in line) for lines in (found, expected)]
    assert tokens[0] < 0.95 * tokens[1]


def test_killed_and_resumed_equals_uninterrupted(base: Path, tmp_path: Path) -> None:
    straight = run(base, tmp_path / "straight", True)

    class Killed(BaseException):
        pass

    def kill(progress: Any) -> None:
        if progress.step == 6:
            raise Killed

    settings = tiny_run.config(
        base, tmp_path / "killed", objective=SECTIONS["rpo"], packing=True, shared=True, max_steps=8
    )
    with pytest.raises(Killed):
        tiny_run.training(settings, on_progress=kill).fit()
    tiny_run.training(settings).fit(resume=True)
    times = ("seconds", "tokens_per_second", "mfu", "disk_free_bytes")
    lines = [
        [{key: value for key, value in line.items() if key not in times} for line in made]
        for made in (straight, read_jsonl(tmp_path / "killed" / "metrics.jsonl"))
    ]
    assert lines[0] == lines[1]
    ours, theirs = (
        load_tensors(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("straight", "killed")
    )
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_run_may_be_resumed_with_two_documents(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path, objective=SECTIONS["rpo"], packing=True, shared=True, max_steps=8)
    job = tiny_run.training(settings, on_progress=lambda progress: progress.step == 4)
    job.fit()
    other = settings.model_copy(update={"speed": settings.speed.model_copy(update={"shared_prompts": False})})
    result = tiny_run.training(other).fit(resume=True)
    assert result.counters.step == 8
    assert any("speed.shared_prompts: True, now False" in note for note in result.notes)


@pytest.mark.parametrize("setting", ["dropout", "noise", "compiled"])
def test_what_cannot_be_combined_is_refused(base: Path, tmp_path: Path, setting: str) -> None:
    changed = tiny_run.config(base, tmp_path, objective=SECTIONS["orpo"], packing=True, shared=True)
    section, update = {
        "dropout": ("lora", {"lora_dropout": 0.05}),
        "noise": ("train", {"neftune_noise_alpha": 5.0}),
        "compiled": ("speed", {"compile": True}),
    }[setting]
    changed = changed.model_copy(update={section: getattr(changed, section).model_copy(update=update)})
    with pytest.raises(ConfigError) as error:
        tiny_run.training(changed)
    assert error.value.field == "speed.shared_prompts"
