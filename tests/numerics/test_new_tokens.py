"""Rows of new tokens: their gradients are those of whole matrices, and nothing else of these is changed, by training or
by merging; PEFT and transformers alone answer the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from surefit.checkpoint.files import list_steps
from surefit.config.schema import SureFitConfig
from surefit.core.errors import GateError
from surefit.core.rundir import RunDir, read_json
from surefit.evaluate.variants import CheckpointModel
from surefit.merge.merge import merge_and_certify
from surefit.model.fused_lora import fuse_lora
from surefit.model.kernels import use_kernels
from surefit.model.load import load_model
from surefit.model.prepare import prepare_for_training
from surefit.model.saved import load_adapted
from surefit.model.sdpa import gpu_assumed
from surefit.model.tokenizer import load_tokenizer, new_tokens
from surefit.model.vocabulary import resize_vocabulary
from surefit.train.loss import loss_sum

pytestmark = pytest.mark.usefixtures("one_thread")
OLD = tiny_run.VOCABULARY
NEW = ["<call>", ":ARG0-of", "</call>"]
IDS = [OLD, OLD + 1, OLD + 2]


def settings(
    folder: Path, kind: str = "lora", tied: bool = True, dtype: str = "float32", **changes: Any
) -> SureFitConfig:
    base = tiny_run.save_base(folder / "base", tie_word_embeddings=tied, max_position_embeddings=64)
    config = tiny_run.config(base, folder / "run", kind, dtype, adapter={"lora_dropout": 0.0}, **changes)
    return config.model_copy(update={"model": config.model.model_copy(update={"add_tokens": NEW})})


def batch() -> dict[str, torch.Tensor]:
    """New tokens in the text, one of them twice, and as targets."""
    ids = torch.tensor([[5, 64, 9, 65, 64, 7, 66, 3], [65, 2, 2, 8, 66, 31, 12, 64]])
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14])
    return {"input_ids": ids, "loss_rows": rows, "targets": ids.flatten()[rows + 1]}


def prepared(config: SureFitConfig, fused: bool = False) -> PeftModel:
    model, _ = prepare_for_training(load_model(config.model, tiny_run.CPU), config, tiny_run.CPU)
    assert isinstance(model, PeftModel)
    if fused:
        fuse_lora(model)
    return model.train()


def trained_rows(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {
        name.split(".")[-4]: parameter for name, parameter in model.named_parameters() if "trainable_tokens" in name
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_with_fused_kernels_they_are_those_without(tmp_path: Path, tied: bool, fused: bool) -> None:
    """The kernels' operators, which compute in PyTorch here, replace norms, MLPs and positions, and no end."""
    config, found = settings(tmp_path, tied=tied), []
    for kernels in (False, True):
        model = prepared(config, fused)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
        if kernels:
            assert all(use_kernels(model)), "norms, MLPs and rope"
        with gpu_assumed((9, 0)):
            loss = loss_sum(model, batch(), chunked=True)
            loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad} | {"loss": loss})
    assert sum("trainable_tokens" in name for name in found[0]) == (1 if tied else 2)
    for name, expected in found[0].items():
        error = (found[1][name] - expected).norm() / expected.norm()
        assert error < 1e-5, name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_whole_matrices(tmp_path: Path, tied: bool, chunked: bool, fused: bool) -> None:
    config = settings(tmp_path, tied=tied)
    model = prepared(config, fused).double()
    loss = loss_sum(model, batch(), chunked)
    loss.backward()
    whole: Any = LlamaForCausalLM.from_pretrained(config.model.name_or_path, dtype=torch.float32)
    resize_vocabulary(whole, new_tokens(config.model))
    whole = whole.double()
    given = batch()
    logits = whole(given["input_ids"]).logits.flatten(0, 1)[given["loss_rows"]]
    expected = F.cross_entropy(logits, given["targets"], reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    matrices = {"embed_tokens": whole.model.embed_tokens, "lm_head": whole.lm_head}
    rows = trained_rows(model)
    assert rows.keys() == ({"embed_tokens"} if tied else matrices.keys())
    for name, parameter in rows.items():
        wanted = matrices[name].weight.grad[IDS]
        assert wanted.any(dim=1).all()
        error = (parameter.grad - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-6  # without chunks the softmax is in float32


@pytest.mark.parametrize("tied", [False, True])
def test_answers_are_those_of_pefts_own_layer(tmp_path: Path, tied: bool) -> None:
    config = settings(tmp_path, tied=tied)
    model = prepared(config).eval()
    for parameter in trained_rows(model).values():
        parameter.data.normal_()
    model.save_pretrained(tmp_path / "adapter")
    base = load_model(config.model, tiny_run.CPU)
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False).eval()
    # float64: the two sum in different orders, and rows drawn like these give logits of tens.
    model, plain = model.double(), plain.double()
    with torch.no_grad():
        ours, theirs = (each(batch()["input_ids"]).logits for each in (model, plain))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        with model.disable_adapter(), plain.disable_adapter():
            ours, theirs = (each(batch()["input_ids"]).logits for each in (model, plain))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def train(config: SureFitConfig) -> RunDir:
    """Rows in which every third token is a new one."""
    rows = [(ids.copy(), labels.copy()) for ids, labels in tiny_run.rows()]
    for number, (ids, labels) in enumerate(rows):
        ids[1::3] = OLD + number % len(NEW)
        labels[labels != -100] = ids[labels != -100]
    training = tiny_run.training(config, rows)
    training.data = replace(training.data, tokenizer=load_tokenizer(config.model))
    training.fit()
    return RunDir(Path(config.output_dir))


def sequences() -> list[list[int]]:
    return [[3 + number, 64, 9, 65, 30, 66, number] for number in range(8)]


def ends(directory: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if "embed_tokens" in name or "lm_head" in name}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_old_rows_stay_bit_for_bit_and_libraries_answer_alone(tmp_path: Path, tied: bool, dtype: str) -> None:
    config = settings(tmp_path, tied=tied, dtype=dtype)
    run = train(config)
    assert merge_and_certify(config, tiny_run.CPU, run, sequences())["passed"]
    before, after = ends(tmp_path / "base"), ends(run.merged)
    assert before.keys() == after.keys()
    new = new_tokens(config.model)
    assert new is not None
    for name, old in before.items():
        old = old.to(after[name].dtype)
        assert after[name].shape == (OLD + len(NEW), 32)
        assert torch.equal(after[name][:OLD], old)
        assert (after[name][IDS] != new.into(old)[IDS]).any(dim=1).all(), "they have not been trained"
    merged = AutoModelForCausalLM.from_pretrained(run.merged)
    tokenizer = AutoTokenizer.from_pretrained(run.merged)
    assert merged.config.vocab_size == OLD + len(NEW)
    assert merged.config.tie_word_embeddings == tied
    assert tokenizer.convert_tokens_to_ids(NEW) == IDS
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=getattr(torch, dtype))
    plain.resize_token_embeddings(len(AutoTokenizer.from_pretrained(run.adapter)))
    beside = PeftModel.from_pretrained(plain, run.adapter, autocast_adapter_dtype=False).eval()
    ours = load_adapted(config.model, run.adapter, tiny_run.CPU)
    prompt = {"input_ids": torch.tensor([[5, 64, 9, 65]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    answers = [model.generate(**prompt, **given).tolist() for model in (ours, beside)]
    assert answers[0] == answers[1]
    with torch.no_grad():
        logits = [model.eval()(prompt["input_ids"]).logits.float() for model in (ours, beside, merged)]
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(logits[2], logits[0], rtol=0, atol=1e-5 if dtype == "float32" else 5e-2)


def test_a_checkpoint_is_the_adapter(tmp_path: Path) -> None:
    config = settings(tmp_path, tied=False)
    run = train(config)
    _, path = list_steps(run.checkpoints)[-1]
    at_step = CheckpointModel(config, tiny_run.CPU, run)
    assert at_step.become(path)
    saved = load_adapted(config.model, run.adapter, tiny_run.CPU)
    found, wanted = trained_rows(at_step.model), trained_rows(saved)
    assert found.keys() == wanted.keys() == {"embed_tokens", "lm_head"}
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_whole_matrices_are_trained_without_an_adapter(tmp_path: Path) -> None:
    config = settings(tmp_path, kind="full", tied=False)
    run = train(config)
    assert merge_and_certify(config, tiny_run.CPU, run, sequences())["passed"]
    assert all(tensor.shape == (OLD + len(NEW), 32) for tensor in ends(run.model).values())
    before, after = ends(tmp_path / "base"), ends(run.model)
    assert all((after[name][:OLD] != before[name]).any() for name in before)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lost", ["embedding", "one row", "head"])
def test_an_adapter_without_its_rows_is_refused(tmp_path: Path, tied: bool, lost: str) -> None:
    if tied and lost == "head":
        pytest.skip("a tied head has no rows of its own")
    config = settings(tmp_path, tied=tied)
    run = train(config)
    weights, described = run.adapter / "adapter_model.safetensors", run.adapter / "adapter_config.json"
    tensors, about = load_file(weights), read_json(described)
    module = "lm_head" if lost == "head" else "model.embed_tokens"
    (name,) = (name for name in tensors if f"{module}.token_adapter" in name)
    if lost == "one row":
        tensors[name] = tensors[name][:-1].contiguous()
        about["trainable_token_indices"][module].pop()
    else:
        del tensors[name], about["trainable_token_indices"][module]
    save_file(tensors, weights, metadata={"format": "pt"})
    described.write_text(json.dumps(about))
    with pytest.raises(GateError, match=f"{module} does not have the rows of all 3 new tokens"):
        merge_and_certify(config, tiny_run.CPU, run, sequences())
    assert not run.merged.exists()


@pytest.mark.parametrize("quantization", ["nf4", "fp8"])
def test_beside_quantised_weights(tmp_path: Path, quantization: str) -> None:
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    config = settings(tmp_path, tied=False, dtype="bfloat16")
    model = config.model.model_copy(update={"quantization": quantization})
    config = config.model_copy(update={"model": model})
    run = train(config)
    assert merge_and_certify(config, tiny_run.CPU, run, sequences())["passed"]
    before, after = ends(tmp_path / "base"), ends(run.merged)
    assert all(torch.equal(after[name][:OLD], before[name].bfloat16()) for name in before)
