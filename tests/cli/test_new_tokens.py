"""Tokens that a config adds: from a config as typed to what `surefit export` writes, and plain libraries read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.cli.conftest import Surefit
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surefit.nano import PATH as NANO

NEW = ["<call>", "</call>"]


def typed(folder: Path, tied: bool, spare: int = 0, **model: Any) -> Path:
    """A base by a config of the built-in model's, and a run that adds tokens; `spare`: rows behind the vocabulary."""
    torch.manual_seed(0)
    tokenizer, config = AutoTokenizer.from_pretrained(NANO), AutoConfig.from_pretrained(NANO)
    sizes = {"num_hidden_layers": 2, "tie_word_embeddings": tied, "vocab_size": len(tokenizer) + spare}
    for name, value in sizes.items():
        setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    base: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rows = [{"prompt": f"{n} + 1?", "completion": f"<call>{n + 1}</call>"} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"name_or_path": "base", "dtype": "float32", "add_tokens": NEW} | model
    (folder / "run.yaml").write_text(f"""\
model: {json.dumps(section)}
adapter: {{r: 2, alpha: 8, target_modules: [q_proj, v_proj]}}
data: {{train: rows.jsonl, eval: 0.25, max_length: 128}}
train: {{max_steps: 2, global_batch_size: 2, learning_rate: 1e-2, warmup: 0}}
hardware: {{gpu: cpu}}
output_dir: out
""")
    return folder / "run.yaml"


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.eval()(ids).logits
    return found


def done(surefit: Surefit, *words: object) -> None:
    answer = surefit(*words)
    assert answer.code == 0, answer.text


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
