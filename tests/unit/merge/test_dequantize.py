"""An adapter beside a quantised base is merged into the weights that base computes with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from surefit.core.errors import GateError
from surefit.core.rundir import read_json
from surefit.merge.dequantize import build_dequantizer, use_stored_weight
from surefit.model.load import load_model
from surefit.model.quantize import frozen_matrix, quantized_layers
from surefit.model.saved import load_saved

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["nf4", "fp8"])
def quantised(request, trained):
    """A trained run whose base is quantised from here on."""
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    run = trained(dtype="float32")
    model = run.config.model.model_copy(update={"quantization": request.param})
    return replace(run, config=run.config.model_copy(update={"model": model}))


def test_the_weights_are_those_the_quantised_model_computes_with(quantised) -> None:
    """Bit for bit, layer by layer, from the base's files alone."""
    section = quantised.config.model
    plain = load_model(section.model_copy(update={"quantization": "none"}), quantised.hardware)
    frozen = build_dequantizer(plain, section.quantization)
    model = load_model(section, quantised.hardware)
    names = quantized_layers(plain)
    assert len(names) == 14, "seven linear layers in each of two"
    for name, parameter in plain.named_parameters():
        layer = name.removesuffix(".weight")
        if layer in names:
            assert torch.equal(frozen(name, parameter), frozen_matrix(model.get_submodule(layer))), name
            assert not torch.equal(frozen(name, parameter), parameter)
        else:
            assert frozen(name, parameter) is parameter


def test_a_plain_model_is_left_as_it_is(trained) -> None:
    run = trained(dtype="float32")
    assert build_dequantizer(load_model(run.config.model, run.hardware), "none") is use_stored_weight


def test_into_the_original_base_is_refused_and_says_what_instead(quantised, merged) -> None:
    with pytest.raises(GateError, match="reloaded_logit_error") as caught:
        merged(quantised, into="original")
    assert "--into dequantized" in str(caught.value.help)
    certificate = read_json(quantised.run.certificate)
    assert (certificate["into"], certificate["passed"]) == ("original", False)


def test_the_merge_is_certified_and_loads_as_an_ordinary_model(quantised, merged) -> None:
    certificate = merged(quantised)
    assert certificate["passed"]
    assert "quantization_config" not in read_json(quantised.run.merged / "config.json")
    found = load_saved(quantised.config.model, quantised.run.merged, quantised.hardware)
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert {type(module) for module in found.modules() if isinstance(module, torch.nn.Linear)} == {torch.nn.Linear}
