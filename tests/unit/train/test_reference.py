"""What the stored reference rests on: a model without dropout, and the hash of what its numbers depend on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from surefit.core.errors import GateError
from surefit.parallel.process_group import World
from surefit.train import reference
from surefit.train.reference import StoredReference, reference_key, switch_off_dropout
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


def test_processes_that_read_the_same_pairs_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes in two groups, as under tp, cp and pp: each micro batch gets its own group's numbers."""
    batcher: Any = SimpleNamespace(examples=3, of_step=lambda step: [[0], [2], [1]], cut=lambda rows: [])
    nothing: Any = SimpleNamespace(examples=0, of_step=lambda step: [], cut=lambda rows: [])
    engine: Any = SimpleNamespace(data_size=2, data_rank=1, world=World(2, 4, 2, 4))
    stored = StoredReference(tmp_path / "r.safetensors", "key", batcher, nothing, 1, {}, engine)
    measured: list[list[int]] = []

    def measure(model: Any, name: str, micro: list[int], chunked: bool) -> Any:
        measured.append(micro)
        return np.full((len(micro), 2), -1.0 - (micro or [9])[0], np.float32)

    def gather(value: Any, world: World) -> list[Any]:
        first = (0, np.full((1, 2), (-1.0, -2.0)[len(measured) - 1], np.float32))
        return [first, first, value, value]

    monkeypatch.setattr(stored, "_measure", measure)
    monkeypatch.setattr(reference, "all_gather", gather)
    monkeypatch.setattr(reference, "run_on_rank0", lambda world, call: None)
    assert stored.compute(torch.nn.Linear(1, 1), True, lambda: False)
    assert measured == [[2], []]  # the second time there is none left for this group, which computes all the same
    assert stored.values["train"].tolist() == [[-1, -1], [-2, -2], [-3, -3]]


def test_numbers_that_are_not_finite_stop_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's are finite, and another's are not: each of them raises, and none waits for the others."""
    batcher: Any = SimpleNamespace(examples=2, of_step=lambda step: [[0], [1]], cut=lambda rows: [])
    nothing: Any = SimpleNamespace(examples=0, of_step=lambda step: [], cut=lambda rows: [])
    engine: Any = SimpleNamespace(data_size=2, data_rank=0, world=World(0, 2, 0, 2))
    stored = StoredReference(tmp_path / "r.safetensors", "key", batcher, nothing, 1, {}, engine)
    finite, infinite = np.zeros((1, 2), np.float32), np.full((1, 2), -np.inf, np.float32)
    monkeypatch.setattr(stored, "_measure", lambda *given: finite)
    monkeypatch.setattr(reference, "all_gather", lambda value, world: [value, (1, infinite)])
    with pytest.raises(GateError, match="example 1") as error:
        stored.compute(torch.nn.Linear(1, 1), True, lambda: False)
    assert error.value.code == "E5842"


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
