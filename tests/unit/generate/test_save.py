"""A saved model ends its answers, and keeps what its base's generation config says, sensible or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from surefit import nano
from surefit.generate.engine import stop_token_ids
from surefit.generate.save import save_model


@pytest.mark.parametrize("own", [{"temperature": 0.6, "top_p": 0.9, "eos_token_id": 0}, None])
def test_the_base_s_settings_and_the_stop_tokens(tmp_path: Path, own: dict[str, object] | None) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    base.mkdir()
    if own is not None:
        (base / "generation_config.json").write_text(json.dumps(own))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(nano.PATH), AutoTokenizer.from_pretrained(nano.PATH)
    model.generation_config = config = GenerationConfig(temperature=0.6, do_sample=False, eos_token_id=0)
    save_model(model, tokenizer, base, saved)
    written = json.loads((saved / "generation_config.json").read_text())
    assert written == {**(own or {}), "eos_token_id": [0, tokenizer.eos_token_id]}
    assert written["eos_token_id"] == stop_token_ids(model, tokenizer)
    assert model.generation_config is config
    assert AutoModelForCausalLM.from_pretrained(saved).generation_config.eos_token_id == written["eos_token_id"]
