"""Models in FP8 and MXFP4 made into plain ones: the values that the formats define and that transformers computes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from low_bits_files import FILE, edit, write_compressed_tensors, write_fp8, write_gpt_oss
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from surefit.core.env import hub_cache
from surefit.core.errors import MachineError, ModelError
from surefit.facts.low_bits import dequantization_obstacle
from surefit.facts.model import model_facts
from surefit.facts.safetensors import read_weights
from surefit.model import low_bits
from surefit.model.tokenizer import model_path
from surefit.nano import PATH as NANO


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.mark.parametrize("block", [16, 48])
def test_each_block_of_fp8_is_multiplied_by_its_scale(block: int, tmp_path: Path) -> None:
    meant = write_fp8(tmp_path / "base", block)
    plain = AutoModelForCausalLM.from_pretrained(model_path(str(tmp_path / "base")), dtype="auto").state_dict()
    assert meant
    for name, weight in meant.items():
        assert torch.equal(plain[name], weight.to(plain[name].dtype)), name


def test_each_output_of_compressed_tensors_is_multiplied_by_its_scale(tmp_path: Path) -> None:
    meant = write_compressed_tensors(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(model_path(str(tmp_path / "base")), dtype="auto").state_dict()
    for name, weight in meant.items():
        assert torch.equal(plain[name], weight.to(plain[name].dtype)), name


def test_mxfp4_is_what_transformers_dequantises(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "base")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(model_path(str(tmp_path / "base")), dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("write", [write_fp8, write_compressed_tensors, write_gpt_oss])
def test_check_knows_the_model_that_will_be_loaded(write, tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "base")
    facts = model_facts(str(tmp_path / "base"))
    assert not cache.exists()
    held = read_weights(Path(model_path(str(tmp_path / "base"))))
    assert held is not None
    assert facts.quantization is None
    assert facts.unreadable is None
    assert facts.dequantized_from in ("fp8", "compressed-tensors", "mxfp4")
    assert facts.weight_bytes == sum(tensor.bytes for tensor in held.values())
    assert facts.parameters == sum(tensor.elements for tensor in held.values())


def test_it_is_made_once_and_again_where_the_files_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    write_fp8(base)
    first = model_path(str(base))
    with monkeypatch.context() as patched:
        patched.setattr(low_bits, "_convert", lambda *_: pytest.fail("it was dequantised again"))
        assert model_path(str(base)) == first
    os.utime(base / FILE, ns=(0, 0))
    assert model_path(str(base)) != first


def test_nothing_is_left_of_what_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fp8(tmp_path / "base")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(low_bits, "save_file", full)
        with pytest.raises((MachineError, OSError)):
            model_path(str(tmp_path / "base"))
    assert list((tmp_path / "cache").rglob("*.json")) == []
    assert Path(model_path(str(tmp_path / "base")), FILE.replace("model", "model-00001")).is_file()


def test_a_plain_model_is_left_alone(cache: Path) -> None:
    assert model_path(str(NANO)) == str(NANO)
    assert not cache.exists()


def without_scales(base: Path) -> None:
    save_file(
        {name: tensor for name, tensor in load_file(base / FILE).items() if not name.endswith("_inv")}, base / FILE
    )


def other_blocks(base: Path) -> None:
    edit(base, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})


def experts_in_fp4(base: Path) -> None:
    edit(base, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16], "expert_dtype": "fp4"})


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (without_scales, "is F8_E4M3, with no scale"),
        (other_blocks, "does not fit a weight of shape"),
        (experts_in_fp4, "as DeepSeek-V4 is published"),
    ],
)
def test_what_cannot_be_dequantised_is_refused_with_the_reason(breaks, words: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_fp8(base)
    breaks(base)
    assert words in str(model_facts(str(base)).unreadable)
    with pytest.raises(ModelError, match="cannot be dequantized") as caught:
        model_path(str(base))
    assert words in caught.value.message


def stacked(base: Path) -> dict[str, torch.Tensor]:
    """Experts of a layer in one tensor, in FP8 with a scale per block; what they stand for."""
    low = torch.randn(2, 24, 40).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, 3) + 0.5
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(load_file(base / FILE) | {name: low, f"{name}_scale_inv": scales}, base / FILE)
    whole = scales.repeat_interleave(16, 1)[:, :24].repeat_interleave(16, 2)[:, :, :40]
    return {name: (low.float() * whole).to(torch.bfloat16)}


def test_a_stack_of_experts_in_fp8_has_its_scales_behind_its_own_name(tmp_path: Path) -> None:
    write_fp8(tmp_path / "base")
    meant = stacked(tmp_path / "base")
    written = load_file(Path(model_path(str(tmp_path / "base")), "model-00001.safetensors"))
    assert not any("scale" in name for name in written)
    for name, weights in meant.items():
        assert torch.equal(written[name], weights)


def test_a_copy_of_changed_files_takes_the_place_of_the_old_one(tmp_path: Path, cache: Path) -> None:
    base = tmp_path / "base"
    write_fp8(base)
    first = Path(model_path(str(base)))
    (base / "README.md").write_text("other words")
    assert Path(model_path(str(base))) == first
    os.utime(base / FILE, ns=(0, 0))
    second = Path(model_path(str(base)))
    assert [found.parent for found in (cache / "dequantized").rglob("config.json")] == [second]
    next(second.glob("*.safetensors")).unlink()  # somebody made room by hand
    assert Path(model_path(str(base))) == second
    assert read_weights(second)


def test_of_a_downloaded_model_the_files_in_the_cache_are_dequantised(tmp_path: Path) -> None:
    write_fp8(tmp_path / "base")
    repository = hub_cache() / "models--Org--Model-FP8"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("c0ffee")
    shutil.copytree(tmp_path / "base", repository / "snapshots/c0ffee")
    facts = model_facts("Org/Model-FP8")
    assert (facts.dequantized_from, facts.quantization) == ("fp8", None)
    plain = Path(model_path("Org/Model-FP8"))
    assert read_weights(plain)
    (repository / "snapshots/c0ffee" / FILE).unlink()
    assert (model_facts("Org/Model-FP8").dequantized_from, model_facts("Org/Model-FP8").quantization) == (None, "fp8")


def test_each_revision_of_a_downloaded_model_keeps_its_copy(tmp_path: Path) -> None:
    """A run that names the older one may be at work."""
    write_fp8(tmp_path / "base")
    for commit in ("c0ffee", "decade"):
        shutil.copytree(tmp_path / "base", hub_cache() / "models--Org--Model-FP8/snapshots" / commit)
    copies = [Path(model_path("Org/Model-FP8", commit)) for commit in ("c0ffee", "decade")]
    assert copies[0] != copies[1]
    assert all(map(read_weights, copies))


def test_a_cache_without_room_or_permission_is_said_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fp8(tmp_path / "base")
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as patched:
        patched.setenv("SUREFIT_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(MachineError) as refused:
            model_path(str(tmp_path / "base"))
    assert "SUREFIT_CACHE" in str(refused.value.help)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 990, 10))  # type: ignore[attr-defined]
    with pytest.raises(MachineError, match="10 B are free") as refused:
        model_path(str(tmp_path / "base"))
    assert "SUREFIT_CACHE" in str(refused.value.help)


def test_what_no_download_would_help_is_said_of_the_config_alone() -> None:
    deepseek_v4 = {"quantization_config": {"quant_method": "fp8", "expert_dtype": "fp4"}}
    integers = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
    assert "FP4" in str(dequantization_obstacle(deepseek_v4, {}))
    assert "pack-quantized" in str(dequantization_obstacle(integers, {}))
    assert dequantization_obstacle({"quantization_config": {"quant_method": "mxfp4"}}, {}) is None
    assert dequantization_obstacle({"quantization_config": {"quant_method": "gptq"}}, {}) is None
