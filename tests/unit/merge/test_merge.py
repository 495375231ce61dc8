"""A merge is kept when it is proved to be the trained model, and refused with the reason otherwise."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from surefit.core.errors import DataError, GateError, MachineError, ModelError
from surefit.core.rundir import read_json
from surefit.merge import merge as room
from surefit.merge import stream
from surefit.merge.adapter_file import Update
from surefit.merge.fold import fold_update, rounding_error
from surefit.merge.merge import merge_and_certify
from surefit.model.adapter import WEIGHTS
from surefit.model.identity import base_identity, named_tensors_sha256

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = ["float32", "bfloat16", "float16"]


def checks_of(certificate):
    return {check["name"]: check for check in certificate["checks"]}


def failed(certificate):
    return [check["name"] for check in certificate["checks"] if not check["passed"]]


def refused(merged, run, problem):
    """The merge is refused for `problem`; nothing of it is left but the certificate. Returns that."""
    with pytest.raises(GateError) as caught:
        merged(run)
    certificate = read_json(run.run.certificate)
    assert not certificate["passed"]
    assert re.search(problem, certificate["reason"]), certificate["reason"]
    assert caught.value.exit_code == 1
    assert caught.value.path == str(run.run.certificate)
    assert caught.value.help
    assert not [path for path in run.run.path.iterdir() if "merged" in path.name]
    return certificate


def change_factors(run, change):
    file = run.run.adapter / WEIGHTS
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_trained_adapter_is_merged_and_certified(trained, dtype, merged):
    run = trained(dtype=dtype)
    certificate = merged(run)
    assert certificate == read_json(run.run.certificate)
    assert certificate["passed"], failed(certificate)
    assert all(check["why"] for check in certificate["checks"])
    assert (certificate["prompts"], certificate["positions"], certificate["dtype"]) == (6, 240, dtype)
    assert certificate["base"] == {"name": str(run.base), "sha256": base_identity(run.base)}
    assert certificate["merged_sha256"] == base_identity(run.run.merged)
    checks = checks_of(certificate)
    assert checks["weights_off_disk"]["value"] == checks["weights_off_base"]["value"] == 0
    assert checks["merge_rounding"]["value"] <= 1
    assert checks["effect_kept"]["value"] > 0.9
    ratio = checks["reloaded_logit_error_mean"]["value"] / checks["reloaded_logit_error_mean"]["threshold"]
    assert 0.001 < ratio < 0.5, "the threshold is of the size of what happens, with room"


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_the_merged_model_answers_as_base_plus_adapter_loaded_without_surefit(trained, dtype, merged, held_out):
    run = trained(dtype=dtype)
    certificate = merged(run)
    kind = getattr(torch, dtype)
    base = AutoModelForCausalLM.from_pretrained(run.base, dtype=kind)
    adapter = PeftModel.from_pretrained(base, run.run.adapter, autocast_adapter_dtype=False).eval()
    saved = AutoModelForCausalLM.from_pretrained(run.run.merged, dtype=kind).eval()
    ids = torch.tensor(held_out)
    with torch.no_grad():
        theirs, ours = adapter(ids).logits.double(), saved(ids).logits.double()
        with adapter.disable_adapter():
            untrained = adapter(ids).logits.double()
    limit = checks_of(certificate)["reloaded_logit_error_mean"]
    assert float((theirs - ours).abs().mean()) == pytest.approx(limit["value"], rel=0.5)
    assert float((theirs - ours).abs().mean()) <= limit["threshold"]
    assert float((theirs - untrained).abs().mean()) > 3 * limit["threshold"], "the adapter does something"


def test_everything_a_server_needs_is_carried_over(trained, tiny_tokenizer, merged):
    run = trained()
    merged(run)
    tokenizer = AutoTokenizer.from_pretrained(run.run.merged)
    assert tokenizer.chat_template == tiny_tokenizer.chat_template
    assert tokenizer("sum 3 and 14").input_ids == tiny_tokenizer("sum 3 and 14").input_ids
    generation = json.loads((run.run.merged / "generation_config.json").read_text())
    assert (generation["do_sample"], generation["temperature"]) == (True, 0.6)
    end = tiny_tokenizer.convert_tokens_to_ids("<|end|>")
    assert generation["eos_token_id"] == [end, 4], "the end of a turn as well: a server would not stop otherwise"
    assert {path.suffix for path in run.run.merged.iterdir()} <= {".json", ".safetensors", ".jinja"}


def test_progress_reaches_the_end(trained, merged):
    steps = []
    merged(trained(), on_progress=lambda *step: steps.append(step))
    assert steps[0] == (0, 4, "checking the adapter")
    assert [done for done, _, _ in steps] == [0, 1, 2, 3, 4]


def test_merging_again_replaces_the_result(trained, merged):
    run = trained()
    first = merged(run)
    second = merged(run)
    assert second["passed"]
    assert second["merged_sha256"] == first["merged_sha256"]


# --- refused --------------------------------------------------------------------------------------


def test_zeroed_factors(trained, merged):
    run = trained()
    change_factors(
        run, lambda tensors: [t.zero_() for name, t in tensors.items() if "layers.1.mlp.up_proj.lora_B" in name]
    )
    certificate = refused(merged, run, r"adapter_complete .*layers\.1\.mlp\.up_proj: lora_B is all zero")
    assert failed(certificate) == ["adapter_complete"]
    assert certificate["merged_sha256"] is None


def test_a_missing_module(trained, merged):
    run = trained()
    change_factors(
        run, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.0.self_attn.q_proj" in name]
    )
    refused(merged, run, r"adapter_complete .*q_proj has no factors")


def test_nan_factors(trained, merged):
    run = trained()
    change_factors(run, lambda tensors: next(iter(tensors.values())).view(-1)[:1].fill_(float("nan")))
    assert failed(refused(merged, run, "has values that are not finite")) == ["adapter_complete"]


def test_factors_of_another_shape(trained, merged):
    run = trained()
    change_factors(
        run,
        lambda tensors: tensors.update(
            {name: t[:, :-1].contiguous() for name, t in tensors.items() if "o_proj.lora_A" in name}
        ),
    )
    refused(merged, run, r"adapter_complete .*factors for shape \(32, 31\)")


def test_factors_that_are_fine_but_not_those_that_were_trained(trained, merged):
    run = trained()
    change_factors(run, lambda tensors: next(iter(tensors.values())).mul_(1.01))
    assert failed(refused(merged, run, "adapter_as_trained")) == ["adapter_as_trained"]


def test_another_alpha_in_the_adapter(trained, merged):
    run = trained()
    file = run.run.adapter / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 8.0', '"lora_alpha": 16'))
    refused(merged, run, re.escape("adapter_scaling is 16/4, required == 8/4"))


def test_a_damaged_adapter_config(trained, merged):
    run = trained()
    (run.run.adapter / "adapter_config.json").write_text("{")
    refused(merged, run, "the adapter cannot be read")


def test_another_base(trained, make_tiny, merged):
    run = trained()
    model = AutoModelForCausalLM.from_pretrained(run.base)
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3  # the smallest revision
    model.save_pretrained(run.base, max_shard_size="40KB")
    certificate = refused(merged, run, "base_identity .* was trained from .*/base")
    assert failed(certificate) == ["base_identity"]


def test_another_vocabulary_under_the_same_weights(trained, merged):
    run = trained()
    file = run.base / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["merges"].pop()
    file.write_text(json.dumps(tokenizer))
    refused(merged, run, "base_identity")


def test_an_adapter_of_unknown_origin(trained, merged):
    run = trained()
    (run.run.adapter / "surefit.json").unlink()
    certificate = refused(merged, run, "the base model it was trained from is not recorded")
    assert certificate["checks"] == []


def half(update):
    return replace(update, scaling=update.scaling / 2)


def test_another_scaling_is_found_by_the_weights(trained, monkeypatch, merged):
    monkeypatch.setattr(stream, "fold_update", lambda matrix, update: fold_update(matrix, half(update)))
    assert failed(refused(merged, trained(), "merge_rounding")) == ["merge_rounding"]


def test_arithmetic_with_another_scaling_is_found_by_the_logits_alone(trained, monkeypatch, merged):
    run = trained()

    monkeypatch.setattr(stream, "fold_update", lambda matrix, update: fold_update(matrix, half(update)))
    monkeypatch.setattr(stream, "rounding_error", lambda base, update, new, _: rounding_error(base, half(update), new))
    names = failed(refused(merged, run, "reloaded_logit_error_mean"))
    assert set(names) == {
        f"reloaded_{name}" for name in ("logit_error_mean", "logit_error_worst", "kl_mean", "top1_agreement")
    }


def test_arithmetic_in_a_coarse_dtype_is_found(trained, monkeypatch, merged):
    run = trained()
    addmm = torch.addmm

    def as_with_tf32(base, one, two, alpha):
        coarse = [t.bfloat16().float() if t.dtype == torch.float32 else t for t in (one, two)]
        return addmm(base, *coarse, alpha=alpha)

    monkeypatch.setattr(torch, "addmm", as_with_tf32)
    assert failed(refused(merged, run, "merge_rounding")) == ["merge_rounding"]


def damaged_before_reloading(monkeypatch, damage):
    original = room.WeightFiles

    def read(directory):
        damage(directory)
        return original(directory)

    monkeypatch.setattr(room, "WeightFiles", read)


def test_a_truncated_shard(trained, monkeypatch, merged):
    run = trained()

    def cut(directory):
        file = sorted(directory.glob("*.safetensors"))[0]
        file.write_bytes(file.read_bytes()[:-1000])

    damaged_before_reloading(monkeypatch, cut)
    assert failed(refused(merged, run, "loads_from_disk is .*its header describes")) == ["loads_from_disk"]


def test_one_changed_bit_on_disk(trained, monkeypatch, merged):
    run = trained()

    def flip(directory):
        file = sorted(directory.glob("*.safetensors"))[0]
        data = bytearray(file.read_bytes())
        data[-2] ^= 1
        file.write_bytes(bytes(data))

    damaged_before_reloading(monkeypatch, flip)
    assert "weights_off_disk" in failed(refused(merged, run, "weights_off_disk is 1"))


def test_swapped_shards(trained, monkeypatch, merged):
    """Two files that have changed names: the index says what should be where."""
    run = trained()

    def swap(directory):
        one, two, *_ = sorted(directory.glob("*.safetensors"))
        between = directory / "between"
        one.rename(between)
        two.rename(one)
        between.rename(two)

    damaged_before_reloading(monkeypatch, swap)
    assert failed(refused(merged, run, "loads_from_disk is .*index")) == ["loads_from_disk"]


def test_a_config_that_does_not_survive(trained, monkeypatch, merged):
    """The weights are right, the model is not: only the logits of the reloaded model show it."""
    run = trained()

    def forget(directory):
        file = directory / "config.json"
        config = json.loads(file.read_text())
        config["rope_parameters"]["rope_theta"] = 50.0
        file.write_text(json.dumps(config))

    damaged_before_reloading(monkeypatch, forget)
    names = failed(refused(merged, run, "reloaded_"))
    assert "reloaded_logit_error_mean" in names
    assert not {name for name in names if name.startswith(("weights", "merge"))}


def test_an_update_below_the_step_of_the_dtype_is_not_certified(trained, merged):
    """The bfloat16 grid swallows it; the logit checks alone would call the merge perfect."""
    run = trained(dtype="bfloat16")
    change_factors(run, lambda tensors: [t.mul_(2.0**-9) for name, t in tensors.items() if "lora_B" in name])
    record = run.run.adapter / "surefit.json"
    text = json.loads(record.read_text())
    text["weights_sha256"] = named_tensors_sha256(load_file(run.run.adapter / WEIGHTS))
    record.write_text(json.dumps(text))
    assert failed(refused(merged, run, "effect_kept")) == ["effect_kept"]


# --- nothing half-written -------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["checked_adapter", "check_merged", "_check_weights", "_read_adapted"])
def test_an_interrupted_merge_leaves_what_was_there(trained, monkeypatch, when, merged):
    run = trained()
    before = merged(run)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(room._CertificateBuilder, when, interrupt)
    with pytest.raises(KeyboardInterrupt):
        merged(run)
    assert read_json(run.run.certificate) == before
    assert base_identity(run.run.merged) == before["merged_sha256"]
    assert [path.name for path in run.run.path.iterdir() if "merged" in path.name] == ["merged"]


def test_a_refused_merge_takes_the_earlier_result_away(trained, merged):
    run = trained()
    merged(run)
    change_factors(run, lambda tensors: next(iter(tensors.values())).mul_(1.01))
    refused(merged, run, "adapter_as_trained")


def test_a_full_disk_is_the_machines_error_and_nothing_is_left(trained, monkeypatch, merged):
    run = trained()

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream, "save_file", full)
    with pytest.raises(MachineError, match="No space left"):
        merged(run)
    assert not [path for path in run.run.path.iterdir() if "merged" in path.name or "certificate" in path.name]


def test_no_held_out_rows(trained):
    run = trained()
    with pytest.raises(DataError, match="no held-out rows"):
        merge_and_certify(run.config, None, run.run, [])


def test_a_base_that_is_gone(trained, merged):
    run = trained()
    shutil.rmtree(run.base)
    with pytest.raises(ModelError):
        merged(run)


# --- full fine-tunes ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_whole_model_is_certified_as_it_is_on_disk(trained, dtype, merged):
    run = trained("full", dtype)
    certificate = merged(run)
    assert certificate["passed"]
    assert [check["name"] for check in certificate["checks"]] == [
        "base_identity", "weights_as_trained", "weights_not_finite", "logits_not_finite", "trained_differs_from_base"
    ]  # fmt: skip
    assert certificate["merged_sha256"] == base_identity(run.run.model)
    assert certificate["adapter_sha256"] is None
    assert not run.run.merged.exists()


def test_a_whole_model_that_changed_after_training_is_refused_but_kept(trained, merged):
    run = trained("full")
    model = AutoModelForCausalLM.from_pretrained(run.run.model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(run.run.model)
    refused(merged, run, "weights_as_trained")
    assert run.run.model.exists()


def test_a_whole_model_cut_short_is_refused(trained, merged):
    run = trained("full")
    file = run.run.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert failed(refused(merged, run, "damaged")) == ["loads_from_disk"]


# --- the arithmetic -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_fold_is_the_correctly_rounded_sum(dtype, transposed):
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    stored = torch.randn((40, 1500) if transposed else (1500, 40), generator=generator).to(kind)
    matrix = stored.T if transposed else stored
    base = matrix.clone()
    a = torch.randn(4, 40, generator=generator).to(kind)
    b = torch.randn(1500, 4, generator=generator).to(kind)
    exact = base.double() + 0.3 * (b.double() @ a.double())
    update = Update(a, b, 0.3)
    fold_update(matrix, update)
    assert stored.dtype == kind
    assert rounding_error(base, update, matrix) <= 1
    assert (matrix == exact.to(kind)).double().mean() > (0.2 if dtype == "float32" else 0.999)
    assert ((matrix.double() - exact).abs() <= torch.finfo(kind).eps * (exact.abs() + 4)).all()
    assert rounding_error(base, Update(a, b, 0.31), matrix) > 1


def test_fold_reports_an_overflow():
    matrix = torch.full((2, 2), 6e4, dtype=torch.float16)
    base, update = matrix.clone(), Update(torch.ones(1, 2), torch.ones(2, 1), 3e4)
    fold_update(matrix, update)
    assert rounding_error(base, update, matrix) == float("inf")
