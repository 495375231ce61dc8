"""Exports: only what belongs to a model, only with a certificate, and conversions measured against the merged model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.helpers.llama_writer import WRITER
from transformers import AutoModelForCausalLM

from surefit.config.schema import ModelSection
from surefit.core.errors import ConfigError, DataError, GateError, MachineError, ModelError
from surefit.core.rundir import file_sha256, read_json
from surefit.merge import quantised
from surefit.merge.export import (
    export_adapter,
    export_hub,
    export_quantized,
    load_certified_model,
    redact_certificate,
)
from surefit.merge.export_manifest import read_export
from surefit.merge.quantised import Conversion, find_converter, measure_conversion, require_convertible

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def card(certificate, directory):
    return f"# a card, {certificate['passed']}, {len(list(directory.iterdir()))} files\n"


@pytest.fixture
def ready(trained, merged):
    """A run that is trained, merged and certified."""
    run = trained()
    assert merged(run)["passed"]
    return run


@pytest.fixture
def conversion(ready):
    def of(format, **options):
        section = ModelSection(name_or_path=str(ready.run.merged), dtype="float32")
        return Conversion(format, ready.run.merged, section, ready.hardware, **options)

    return of


def test_a_hub_export_holds_the_model_and_nothing_else(ready, tmp_path):
    (ready.run.merged / "eval.predictions.jsonl").write_text('{"gold": "a row"}')
    (ready.run.merged / ".env").write_text("HF_TOKEN=x")
    (ready.run.merged / "optimizer.pt").write_bytes(b"x")
    manifest = export_hub(load_certified_model(ready.run), tmp_path / "out", card)
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {*manifest["files"], "export.json"}
    assert not there & {"eval.predictions.jsonl", ".env", "optimizer.pt"}
    assert {"config.json", "tokenizer.json", "README.md", "certificate.json"} <= there
    shards = list(ready.run.merged.glob("*.safetensors"))
    assert len(shards) > 1
    assert all(file_sha256(shard) == manifest["files"][shard.name]["sha256"] for shard in shards)
    assert read_export(tmp_path / "out") == manifest
    assert str(tmp_path) not in (tmp_path / "out/certificate.json").read_text()


def test_an_adapter_export_is_what_was_certified_and_plain_peft_reads_it(ready, tmp_path):
    base = ready.config.model.name_or_path
    manifest = export_adapter(load_certified_model(ready.run), "someone/base", tmp_path / "out", card)
    assert read_export(tmp_path / "out") == manifest
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= manifest["files"].keys()
    assert not manifest["files"].keys() & {"config.json", "model.safetensors", "surefit.json"}
    assert read_json(tmp_path / "out/adapter_config.json")["base_model_name_or_path"] == "someone/base"
    assert base not in (tmp_path / "out/adapter_config.json").read_text()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    whole = AutoModelForCausalLM.from_pretrained(ready.run.merged)
    ids = torch.arange(5, 25)[None]
    assert torch.allclose(model(ids).logits, whole(ids).logits, atol=1e-4)


def test_another_adapter_than_the_certified_one_is_refused(ready, tmp_path):
    file = ready.run.adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, file)
    with pytest.raises(GateError, match="does not match the merged, certified adapter"):
        export_adapter(load_certified_model(ready.run), "someone/base", tmp_path / "out", card)
    assert not (tmp_path / "out").exists()


def test_a_run_without_an_adapter_has_none_to_export(trained, merged, tmp_path):
    run = trained("full")
    assert merged(run)["passed"]
    with pytest.raises(ConfigError, match="all weights were trained"):
        export_adapter(load_certified_model(run.run), "someone/base", tmp_path / "out", card)


def test_nothing_is_exported_without_a_certificate(ready):
    certificate = read_json(ready.run.certificate)
    ready.run.certificate.write_text(json.dumps(certificate | {"passed": False, "reason": "it is broken"}))
    with pytest.raises(GateError, match="not certified: it is broken"):
        load_certified_model(ready.run)
    ready.run.certificate.unlink()
    with pytest.raises(GateError, match="has no certificate"):
        load_certified_model(ready.run)


def test_another_model_than_the_certified_one_is_refused(ready):
    file = min(ready.run.merged.glob("*.safetensors"))
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(GateError, match="does not match its certificate"):
        load_certified_model(ready.run)


def test_what_is_no_export_is_not_replaced(ready, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError) as caught:
        export_hub(load_certified_model(ready.run), tmp_path / "mine", card)
    assert caught.value.code == "E1604"
    assert (tmp_path / "mine/thesis.txt").exists()
    for _ in range(2):
        export_hub(load_certified_model(ready.run), tmp_path / "out", card)


def test_a_changed_or_missing_file_is_noticed(ready, tmp_path):
    out = tmp_path / "out"
    export_hub(load_certified_model(ready.run), out, card)
    (out / "README.md").write_text((out / "README.md").read_text().replace("True", "true"))
    with pytest.raises(ModelError, match=r"README\.md has changed since the export"):
        read_export(out)
    (out / "README.md").unlink()
    with pytest.raises(ModelError, match=r"README\.md is listed in export\.json"):
        read_export(out)
    with pytest.raises(ModelError, match="this is not an export"):
        read_export(tmp_path)


def test_nf4_is_made_and_measured(ready, conversion, held_out, tmp_path):
    pytest.importorskip("bitsandbytes")
    out = tmp_path / "out"
    manifest = export_quantized(load_certified_model(ready.run), conversion("nf4"), out, held_out, card)
    certificate = read_json(out / "certificate.json")
    measured = certificate["measured"]
    assert manifest["format"] == certificate["format"] == "nf4"
    assert certificate["against"] == "merged"
    assert certificate["merge"]["passed"]
    assert certificate["checks"][-1]["threshold"] <= measured["top1_agreement"] <= 1
    assert 0 < measured["logit_error_mean"] < measured["logit_error_max"]
    assert measured["kl_mean"] > 0
    assert read_json(out / "config.json")["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    before, after = (read_json(path / "generation_config.json") for path in (ready.run.merged, out))
    assert before == after


def test_what_is_measured_is_the_difference_itself(ready, conversion, held_out):
    """Not converted at all, the model differs from itself by nothing; with one layer changed, by that."""
    unchanged = conversion("int8")
    checks, measured = measure_conversion(unchanged, ready.run.merged, held_out)
    assert all(check.passed for check in checks)
    assert (measured["logit_error_max"], measured["top1_agreement"]) == (pytest.approx(0, abs=1e-5), 1)
    assert measured["positions"] == sum(len(row) for row in held_out)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [("zeroed", "logit_error_mean"), ("nan", "logits_not_finite"), ("missing", "tensors_missing")],
)
def test_a_broken_conversion_is_refused(ready, conversion, held_out, tmp_path, monkeypatch, damage, reason):
    def broken(conversion, directory):
        tensors = {n: t for file in conversion.source.glob("*.safetensors") for n, t in load_file(file).items()}
        name = "model.layers.0.mlp.down_proj.weight"
        match damage:
            case "zeroed":
                tensors = {n: torch.zeros_like(t) if "proj" in n else t for n, t in tensors.items()}
            case "nan":
                tensors[name][0, 0] = float("nan")
            case "missing":
                del tensors[name]
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr("surefit.merge.export.convert_model", broken)
    monkeypatch.setattr("surefit.merge.export.require_convertible", lambda conversion: None)
    with pytest.raises(GateError, match=reason):
        export_quantized(load_certified_model(ready.run), conversion("int8"), tmp_path / "out", held_out, card)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_torchao_formats(ready, conversion, held_out, tmp_path, format):
    pytest.importorskip("torchao", reason="the extra torchao is not installed")
    export_quantized(load_certified_model(ready.run), conversion(format), tmp_path / "out", held_out, card)
    measured = read_json(tmp_path / "out/certificate.json")["measured"]
    assert 0 < measured["logit_error_mean"] < 0.2 * measured["logit_deviation"]


@pytest.mark.parametrize(("format", "package"), [("nf4", "bitsandbytes"), ("int8", "torchao"), ("gguf", "gguf")])
def test_a_missing_package_is_named_before_anything_is_read(conversion, monkeypatch, format, package):
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=f"{package}, which is not installed") as found:
        require_convertible(conversion(format))
    assert found.value.help == f"pip install {package}"


def test_llama_cpp_is_found_or_not(monkeypatch, tmp_path):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    with pytest.raises(MachineError, match="which was not found"):
        find_converter(None)
    with pytest.raises(MachineError, match=r"there is no convert_hf_to_gguf\.py"):
        find_converter(tmp_path)
    (tmp_path / "convert_hf_to_gguf.py").touch()
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    assert find_converter(None) == tmp_path / "convert_hf_to_gguf.py"


def test_a_converter_that_fails_is_quoted(ready, conversion, held_out, tmp_path, monkeypatch):
    (tmp_path / "convert_hf_to_gguf.py").write_text("raise SystemExit('Model LlamaForNobody is not supported')")
    monkeypatch.setattr(quantised, "find_spec", lambda name: True)
    job = conversion("gguf", llama_cpp=tmp_path)
    with pytest.raises(MachineError, match="Model LlamaForNobody is not supported"):
        export_quantized(load_certified_model(ready.run), job, tmp_path / "out", held_out, card)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_the_converter_does_not_know_is_named(ready, conversion, held_out, tmp_path, monkeypatch):
    said = "NotImplementedError: BPE pre-tokenizer was not recognized - update get_vocab_base_pre()"
    (tmp_path / "convert_hf_to_gguf.py").write_text(f"raise SystemExit({said!r})")
    monkeypatch.setattr(quantised, "find_spec", lambda name: True)
    job = conversion("gguf", llama_cpp=tmp_path)
    with pytest.raises(MachineError) as found:
        export_quantized(load_certified_model(ready.run), job, tmp_path / "out", held_out, card)
    assert found.value.code == "E6985"
    assert "--format hub" in found.value.help
    assert not (tmp_path / "out").exists()


def test_a_package_that_the_converter_lacks_is_named(ready, conversion, held_out, tmp_path, monkeypatch):
    (tmp_path / "convert_hf_to_gguf.py").write_text("import sentencepieces_of_nobody")
    monkeypatch.setattr(quantised, "find_spec", lambda name: True)
    with pytest.raises(MachineError, match="needs sentencepieces_of_nobody, which is not installed") as found:
        export_quantized(
            load_certified_model(ready.run), conversion("gguf", llama_cpp=tmp_path), tmp_path / "out", held_out, card
        )
    assert found.value.help == "pip install sentencepieces_of_nobody"


def test_4_bits_need_the_library_of_llama_cpp(conversion, tmp_path, monkeypatch):
    (tmp_path / "convert_hf_to_gguf.py").touch()
    monkeypatch.setattr(quantised, "find_spec", lambda name: None if name == "llama_cpp" else name)
    require_convertible(conversion("gguf", llama_cpp=tmp_path))
    with pytest.raises(MachineError, match=r"llama\.cpp's library, which is not installed") as found:
        require_convertible(conversion("gguf", outtype="q4_k_m", llama_cpp=tmp_path))
    assert "pip install llama-cpp-python" in str(found.value.help)


@pytest.mark.slow
def test_gguf_is_read_again_and_measured(ready, conversion, held_out, tmp_path):
    pytest.importorskip("gguf", reason="llama.cpp's library gguf is not installed")
    (tmp_path / "convert_hf_to_gguf.py").write_text(WRITER)
    job = conversion("gguf", outtype="f16", llama_cpp=tmp_path)
    manifest = export_quantized(load_certified_model(ready.run), job, tmp_path / "out", held_out, card)
    assert "model.gguf" in manifest["files"]
    assert not [name for name in manifest["files"] if "safetensors" in name]
    measured = read_json(tmp_path / "out/certificate.json")["measured"]
    assert measured["logit_error_max"] < 1e-3
    wrong = tmp_path / "convert_hf_to_gguf.py"
    wrong.write_text(WRITER.replace(".swapaxes(1, 2)", ""))
    with pytest.raises(GateError, match="logit_error_mean"):
        export_quantized(load_certified_model(ready.run), replace(job), tmp_path / "other", held_out, card)


LIBRARY = """
import ctypes
from pathlib import Path
class llama_model_quantize_default_params(ctypes.Structure):
    _fields_ = [("ftype", ctypes.c_int)]
def llama_model_quantize(source, out, settings):
    if settings._obj.ftype != 15:
        return 1
    Path(out.decode()).write_bytes(Path(source.decode()).read_bytes())
    return 0
"""
"""In the place of the library: copies the file, and refuses another type than Q4_K_M."""


@pytest.mark.slow
def test_what_the_quantiser_made_is_the_only_file(ready, conversion, held_out, tmp_path, monkeypatch):
    """llama.cpp's own library makes it where it is installed: tests/numerics/test_real_model.py."""
    pytest.importorskip("gguf", reason="llama.cpp's library gguf is not installed")
    (tmp_path / "convert_hf_to_gguf.py").write_text(WRITER)
    (tmp_path / "llama_cpp.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(quantised, "find_spec", lambda name: True)
    job = conversion("gguf", outtype="q4_k_m", llama_cpp=tmp_path)
    manifest = export_quantized(load_certified_model(ready.run), job, tmp_path / "out", held_out, card)
    assert [name for name in manifest["files"] if name.endswith(".gguf")] == ["model.gguf"]
    assert "q4_k_m" in read_json(tmp_path / "out/certificate.json")["how"]
    (tmp_path / "llama_cpp.py").write_text(LIBRARY.replace("!= 15", "== 15"))
    with pytest.raises(MachineError, match="quantizer exited with status 1"):
        export_quantized(load_certified_model(ready.run), job, tmp_path / "other", held_out, card)
    assert not (tmp_path / "other").exists()


def test_no_prompts_no_certificate(ready, conversion, tmp_path):
    with pytest.raises(DataError, match="no held-out rows"):
        export_quantized(load_certified_model(ready.run), conversion("nf4"), tmp_path / "out", [], card)


def test_a_public_certificate_names_no_directory():
    said = {"base": {"name": "/home/me/base"}, "checks": [{"why": "from /srv/x/base with this hash", "value": 1}]}
    assert redact_certificate(said) == {
        "base": {"name": "base"},
        "checks": [{"why": "from base with this hash", "value": 1}],
    }
