"""The hashes change with what makes a model another one, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from surefit.config.schema import ModelSection
from surefit.core.errors import GateError, ModelError
from surefit.model.identity import (
    adapter_identity,
    base_directory,
    base_identity,
    named_tensors_sha256,
    read_record,
    tensor_sha256,
    write_record,
)


@pytest.fixture
def base(tmp_path, tiny_base):
    return shutil.copytree(tiny_base, tmp_path / "base")


def edit_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_library_that_wrote_the_config_and_the_chat_template_do_not_matter(base):
    before = base_identity(base)
    edit_config(base, transformers_version="4.0.0", _name_or_path="elsewhere")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "generation_config.json").unlink()
    assert base_identity(base) == before


@pytest.mark.parametrize("what", ["config", "weights", "shard names", "vocabulary"])
def test_what_makes_it_another_model_matters(base, what):
    before = base_identity(base)
    shards = sorted(base.glob("*.safetensors"))
    if what == "config":
        edit_config(base, rms_norm_eps=1e-5)
    elif what == "weights":
        data = bytearray(shards[0].read_bytes())
        data[-1] ^= 1
        shards[0].write_bytes(bytes(data))
    elif what == "shard names":
        shards[0].rename(base / "spare")
        shards[1].rename(shards[0])
        (base / "spare").rename(shards[1])
    else:
        (base / "tokenizer.json").write_text((base / "tokenizer.json").read_text() + "\n")
    assert base_identity(base) != before


def test_no_readable_config_is_the_models_fault(base):
    (base / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"no readable config\.json"):
        base_identity(base)


def test_tensors_differ_by_value_shape_and_dtype():
    tensor = torch.arange(6, dtype=torch.float32)
    same = torch.arange(12, dtype=torch.float32)[:6]
    assert tensor_sha256(tensor) == tensor_sha256(same)
    others = [tensor.view(2, 3), tensor.bfloat16(), tensor.long(), tensor + 1, torch.tensor(0.0), torch.empty(0)]
    assert len({tensor_sha256(other) for other in [tensor, *others]}) == 7
    assert tensor_sha256(tensor.view(2, 3).T) == tensor_sha256(tensor.view(2, 3).T.contiguous())


def test_named_tensors_are_hashed_by_name_not_by_order():
    a, b = torch.zeros(2), torch.ones(2)
    assert named_tensors_sha256({"a": a, "b": b}) == named_tensors_sha256({"b": b, "a": a})
    assert named_tensors_sha256({"a": a, "b": b}) != named_tensors_sha256({"a": b, "b": a})


def test_an_adapter_is_its_config_and_its_weights(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    before = adapter_identity(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert adapter_identity(tmp_path) == before
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 16}')
    assert adapter_identity(tmp_path) != before


@pytest.mark.parametrize("damage", ["a pipe", "a dangling link"])
def test_an_adapter_file_that_cannot_be_read_is_named(tmp_path, damage):
    file = tmp_path / "adapter_model.safetensors"
    if damage == "a pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("nowhere")
    with pytest.raises(ModelError, match="cannot be read") as caught:
        adapter_identity(tmp_path)
    assert caught.value.path == str(file)


def test_a_record_names_the_base_and_what_was_trained(tmp_path, base):
    tensors = {"w": torch.ones(3)}
    write_record(tmp_path, ModelSection(name_or_path=str(base)), tensors)
    assert read_record(tmp_path) == {
        "base": {"name": str(base), "sha256": base_identity(base)},
        "weights_sha256": named_tensors_sha256(tensors),
    }


@pytest.mark.parametrize("content", [None, "{", "[]", '{"base": {"name": "x"}}'])
def test_a_record_that_is_missing_or_damaged_is_a_gate(tmp_path, content):
    if content is not None:
        (tmp_path / "surefit.json").write_text(content)
    with pytest.raises(GateError, match="the base model it was trained from is not recorded"):
        read_record(tmp_path)


def test_the_built_in_model_and_the_hub_cache_are_found(tmp_path, monkeypatch):
    assert (base_directory(ModelSection(name_or_path="surefit/nano")) / "model.safetensors").exists()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    section = ModelSection(name_or_path="someone/model")
    with pytest.raises(ModelError, match="not in the local cache"):
        base_directory(section)
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    reference = tmp_path / "models--someone--model" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("abc")
    assert base_directory(section) == snapshot
