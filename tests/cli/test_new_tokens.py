"""Tokens that a config adds: from a config as typed to what `surefit export` writes, and plain libraries read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.cli.conftest import Surefit
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typed_run import done, logits, save_base, type_run

from surefit.nano import PATH as NANO

NEW = ["<call>", "</call>"]


def typed(folder: Path, tied: bool, spare: int = 0) -> Path:
    """A base by a config of the built-in model's, and a run that adds tokens; `spare`: rows behind the vocabulary."""
    config = AutoConfig.from_pretrained(NANO)
    config.num_hidden_layers, config.tie_word_embeddings = 2, tied
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    save_base(config, folder / "base", spare=spare)
    rows = [{"prompt": f"{n} + 1?", "completion": f"<call>{n + 1}</call>"} for n in range(8)]
    return type_run(folder, "{r: 2, lora_alpha: 8, target_modules: [q_proj, v_proj]}", rows, add_tokens=NEW)


@pytest.mark.parametrize(
    ("tied", "spare"),
    [(True, 0), pytest.param(False, 0, marks=pytest.mark.slow), pytest.param(True, 64, marks=pytest.mark.slow)],
)
def test_exports_have_the_tokens_and_their_rows(tied: bool, spare: int, surefit: Surefit, tmp_path: Path) -> None:
    config = typed(tmp_path, tied, spare)
    for verb in ("train", "merge"):
        done(surefit, verb, config)
    done(surefit, "export", config)
    done(surefit, "export", config, "--format", "adapter")
    hub, beside = tmp_path / "out/export/hub", tmp_path / "out/export/adapter"
    tokenizer = AutoTokenizer.from_pretrained(hub)
    assert AutoTokenizer.from_pretrained(beside).get_vocab() == tokenizer.get_vocab()
    first = len(AutoTokenizer.from_pretrained(NANO))
    assert tokenizer.convert_tokens_to_ids(NEW) == [first, first + 1]
    ids = torch.tensor([tokenizer.encode("<call>3</call> 4", add_special_tokens=False)])
    assert ids[0, 0] == first
    whole = AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32)
    assert len(whole.get_input_embeddings().weight) == first + max(spare, len(NEW)) == whole.config.vocab_size
    assert whole.config.tie_word_embeddings == tied
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    base.resize_token_embeddings(max(len(tokenizer), base.get_input_embeddings().num_embeddings))
    tuned = PeftModel.from_pretrained(base, str(beside), autocast_adapter_dtype=False)
    torch.testing.assert_close(logits(whole, ids), logits(tuned, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("form", "package"), [("nf4", "bitsandbytes"), ("int8", "torchao")])
def test_conversions_have_the_rows(form: str, package: str, tied: bool, surefit: Surefit, tmp_path: Path) -> None:
    pytest.importorskip(package)
    config = typed(tmp_path, tied)
    for verb in ("train", "merge"):
        done(surefit, verb, config)
    done(surefit, "export", config, "--format", form)
    made = tmp_path / "out/export" / form
    first = len(AutoTokenizer.from_pretrained(NANO))
    assert AutoTokenizer.from_pretrained(made).convert_tokens_to_ids(NEW) == [first, first + 1]
    merged = load_file(tmp_path / "out/merged/model.safetensors")
    converted = AutoModelForCausalLM.from_pretrained(made)
    matrix = converted.get_input_embeddings().weight.float()  # no format quantises it
    torch.testing.assert_close(matrix, merged["model.embed_tokens.weight"], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("section", ["parallel: {mode: fsdp}", "parallel: {mode: pp, pp: 2}", "speed: {compile: true}"])
def test_what_new_tokens_do_not_go_with(section: str, surefit: Surefit, tmp_path: Path) -> None:
    config = typed(tmp_path, tied=True)
    config.write_text(config.read_text() + section + "\n")
    answer = surefit("check", config)
    assert answer.code == 1
    assert "error[MOD014]" in answer.text
