"""What the stored reference rests on: a model without dropout, and the hash of what its numbers depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from surefit.train.reference import reference_key, switch_off_dropout
from surefit.train.sampler import DatasetFingerprint

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
FAMILIES = {
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 32, "attention_dropout": 0.3},
    "falcon": {"hidden_dropout": 0.3, "attention_dropout": 0.3, "new_decoder_architecture": False},
    "starcoder2": {
        "intermediate_size": 32,
        "num_key_value_heads": 1,
        "residual_dropout": 0.3,
        "embedding_dropout": 0.3,
    },
}


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(AutoConfig.for_model(family, **SMALL, **FAMILIES[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_off_wherever_a_family_keeps_it(family: str) -> None:
    model, tokens = tiny(family), torch.arange(4, 20)[None]
    with torch.no_grad():
        eval_logits = model.eval()(tokens).logits
        assert not torch.equal(model.train()(tokens).logits, eval_logits)
        assert switch_off_dropout(model) > 0
        assert torch.equal(model(tokens).logits, eval_logits)
    assert switch_off_dropout(model) == 0


def test_a_new_factor_is_no_other_reference() -> None:
    rows = DatasetFingerprint(np.zeros(0, np.int64), "0" * 64)

    def key(seed: int, b: float = 0.0) -> str:
        base = tiny("opt")
        torch.manual_seed(seed)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.data[0, 0] = b
        return reference_key(model, "float32", rows, rows)

    assert key(1) == key(2)
    assert key(1, 0.5) != key(1)
    assert key(1, 0.5) != key(2, 0.5)
