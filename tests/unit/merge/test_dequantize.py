"""An adapter beside a quantised base is merged into the weights that base computes with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from surefit.core.rundir import read_json
from surefit.merge.dequantize import dequantize
from surefit.model.load import load_model
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


def test_a_dequantised_model_answers_as_the_quantised_one(quantised) -> None:
    section, ids = quantised.config.model, torch.tensor([[5, 6, 7, 8, 9, 10]])
    model = load_model(section, quantised.hardware)
    names = dequantize(model)
    assert len(names) == 14, "seven linear layers in each of two"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        difference = model(ids).logits - load_model(section, quantised.hardware)(ids).logits
        lost = model(ids).logits - load_model(
            section.model_copy(update={"quantization": "none"}), quantised.hardware
        )(ids).logits  # fmt: skip
    assert difference.abs().max() < 1e-4
    assert lost.abs().max() > 1e-2, "these are not the original weights"


def test_a_plain_model_is_left_as_it_is(trained) -> None:
    run = trained(dtype="float32")
    model = load_model(run.config.model, run.hardware)
    before = {name: id(module) for name, module in model.named_modules()}
    assert dequantize(model) == []
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_the_merge_is_certified_and_loads_as_an_ordinary_model(quantised, merged) -> None:
    certificate = merged(quantised)
    assert certificate["passed"]
    assert "quantization_config" not in read_json(quantised.run.merged / "config.json")
    found = load_saved(quantised.config.model, quantised.run.merged, quantised.hardware)
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert {type(module) for module in found.modules() if isinstance(module, torch.nn.Linear)} == {torch.nn.Linear}
