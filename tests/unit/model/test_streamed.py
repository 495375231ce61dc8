"""A model that runs from its files answers bit for bit as the one in memory, and holds nothing afterwards."""

from __future__ import annotations

import json
from functools import partial

import families
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from surefit.config.schema import ModelSection
from surefit.core.errors import ModelError
from surefit.merge import certify
from surefit.model.layerwise_forward import LayerwiseModel, WeightFiles

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [9, 3, 4, 30, 31, 32, 33]])


def saved(folder, family, **changes):
    families.build(family, **changes).save_pretrained(folder, max_shard_size="20KB")
    return ModelSection(name_or_path=str(folder), dtype="bfloat16")


def filled(module) -> bool:
    return all(parameter.untyped_storage().nbytes() > 2 for parameter in module.parameters())


@pytest.mark.parametrize("family", families.FAMILIES)
@torch.no_grad()
def test_it_answers_as_the_model_in_memory(tmp_path, family) -> None:
    section = saved(tmp_path, family)
    streamed = LayerwiseModel(section, tmp_path, "cpu")
    if reason := streamed.why_not():
        assert "in another form" in reason
        return
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with streamed.running(streamed.model):
        found = streamed.model(input_ids=IDS, use_cache=False).logits
    assert torch.equal(found, whole(input_ids=IDS, use_cache=False).logits)
    assert all(parameter.untyped_storage().nbytes() == 2 for parameter in streamed.model.parameters())


@pytest.mark.parametrize("family", families.FAMILIES)
@torch.no_grad()
def test_its_head_computes_the_logits_of_some_positions_later(tmp_path, family) -> None:
    """From the decoder's states, with the family's own scale and softcap, as in a forward pass of the whole model."""
    streamed = LayerwiseModel(saved(tmp_path, family), tmp_path, "cpu")
    if streamed.why_not():
        return
    rows = [[5, 6, 7, 8, 9, 10, 11], [9, 3, 4, 30]]
    running = partial(streamed.running, streamed.model, 0.01)
    with running():
        expected = torch.cat(certify.read_logits(streamed.model, rows, "cpu"))
    source = certify.read_states(streamed.model, rows, "cpu", running)
    assert (source.positions, source.vocabulary) == expected.shape
    found = torch.cat([source.read(start, min(start + 3, 11)) for start in range(0, 11, 3)])
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_most_families_run_from_their_files(tmp_path) -> None:
    """Those that do not are mixtures whose experts transformers puts together while it loads them."""
    not_streamed = {
        family
        for family in families.FAMILIES
        if LayerwiseModel(saved(tmp_path / family, family), tmp_path / family, "cpu").why_not()
    }
    assert len(not_streamed) <= 4, not_streamed


@torch.no_grad()
def test_only_one_layer_is_there_at_a_time(tmp_path) -> None:
    section = saved(tmp_path, "llama", num_hidden_layers=3)
    streamed = LayerwiseModel(section, tmp_path, "cpu")
    seen = []
    for layer in streamed.model.model.layers:
        layer.register_forward_hook(lambda *_: seen.append([filled(other) for other in streamed.model.model.layers]))
    with streamed.running(streamed.model):
        streamed.model(input_ids=IDS, use_cache=False)
    assert seen == [[True, False, False], [False, True, False], [False, False, True]]


def test_a_parameter_in_the_place_of_one_that_was_let_go_is_not_taken_for_it(tmp_path) -> None:
    """What PEFT reads while it loads an adapter becomes real; the hollow parameter before it must keep its id."""
    section = saved(tmp_path / "base", "llama")
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(families.build("llama"), adapter).save_pretrained(tmp_path / "adapter")
    streamed = LayerwiseModel(section, tmp_path / "base", "cpu")
    names = [name for name, _ in streamed.model.named_parameters()]
    adapted = streamed.with_adapter(tmp_path / "adapter", names)
    adapted.later = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(1)) for _ in range(1000))
    with streamed.running(adapted):
        assert not [name for name, module in adapted.named_modules() if module._forward_pre_hooks]


def test_a_tensor_that_is_not_where_the_index_says(tmp_path) -> None:
    saved(tmp_path, "llama")
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    one, *_, other = index["weight_map"]
    places = index["weight_map"]
    places[one], places[other] = places[other], places[one]
    file.write_text(json.dumps(index))
    with pytest.raises(ModelError, match="contrary to the index"):
        WeightFiles(tmp_path)


def test_a_config_of_no_causal_language_model(tmp_path) -> None:
    section = saved(tmp_path, "llama")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="cannot build a model"):
        LayerwiseModel(section, tmp_path, "cpu")
