"""A language model loaded alone is saved as the checkpoint with images that it came from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from surefit import nano
from surefit.core.errors import ModelError
from surefit.generate.save import require_savable, save_model
from surefit.model.multimodal_wrapper import MultimodalWrapper, multimodal_config

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import family_shapes

FILE = "model.safetensors"


def saved(kind: str, directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a random checkpoint with images, and a head that predicts further ones, which no class reads."""
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(family_shapes.config(f"{kind}:images"), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tensors = load_file(directory / FILE) | ({"mtp.fc.weight": torch.ones(2, 2)} if kind == "qwen3_5" else {})
    save_file(tensors, directory / FILE, metadata={"format": "pt"})
    (directory / "preprocessor_config.json").write_text('{"size": 16}')
    return tensors


@pytest.mark.parametrize("kind", ["llama4", "qwen3_5"])
def test_the_whole_checkpoint_is_saved(kind: str, tmp_path: Path) -> None:
    base, result = tmp_path / "base", tmp_path / "result"
    before = saved(kind, base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert "vision" not in model.config.to_dict()
    for parameter in model.parameters():
        parameter.data.add_(1)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(model, AutoTokenizer.from_pretrained(nano.PATH), base, result)

    require_savable(model, base)
    after = load_file(result / FILE)
    assert after.keys() == before.keys()
    kept = {
        name for name in before if torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype
    }
    assert kept == {
        name for name in before if not name.startswith(("language_model.", "model.language_model.", "lm_head"))
    }
    assert len(kept) > 20
    config = json.loads((result / "config.json").read_text())
    assert config["architectures"] == json.loads((base / "config.json").read_text())["architectures"]
    assert config["vision_config"] == json.loads((base / "config.json").read_text())["vision_config"]
    assert (result / "preprocessor_config.json").read_text() == '{"size": 16}'
    alone = AutoModelForCausalLM.from_pretrained(result).state_dict()
    assert state.keys() == alone.keys()
    assert all(torch.equal(state[name], alone[name]) for name in state)
    _, found = AutoModelForImageTextToText.from_pretrained(result, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]

    whole = multimodal_config(model.config, base)
    assert whole is not None
    assert MultimodalWrapper(model, whole, base).changed_in(result) == []
    name = next(iter(sorted(kept)))
    save_file(after | {name: after[name] + 1}, result / FILE)
    assert MultimodalWrapper(model, whole, base).changed_in(result) == [name]


def test_a_model_that_is_all_of_its_checkpoint_is_no_part(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(nano.PATH)
    assert multimodal_config(config, nano.PATH) is None
    assert multimodal_config(config, tmp_path) is None


def test_a_checkpoint_without_its_vision_part_is_refused(tmp_path: Path) -> None:
    tensors = saved("llama4", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    rest = {name: tensor for name, tensor in tensors.items() if name.startswith("language_model.")}
    save_file(rest, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="the untrained part cannot be saved unchanged"):
        require_savable(model, tmp_path)


def test_what_is_saved_does_not_claim_to_be_quantised(tmp_path: Path) -> None:
    saved("llama4", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    stored = config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    whole = multimodal_config(model.config, tmp_path)
    assert whole is not None
    assert "quantization_config" not in whole.to_dict()
