"""Every switch of the config at once, and an adapter that goes on from another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from peft import get_peft_model_state_dict

from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError, GateError
from surefit.data.tokens.collate import collate, collate_packed
from surefit.model.adapter import add_adapter, load_initial_adapter
from surefit.model.load import load_model
from surefit.model.prepare import prepare_for_training, reads_padding, unwrap_base_model
from surefit.train.loss import loss_sum


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    return tiny_run.training(tiny_run.config(base, out, max_steps=3)).fit().output


def changed(settings: SureFitConfig, **changes: Any) -> SureFitConfig:
    tree = settings.model_dump()
    for dotted, value in changes.items():
        section, key = dotted.split("__")
        tree[section][key] = value
    return SureFitConfig.model_validate(tree)


def prepared(settings: SureFitConfig) -> tuple[Any, list[str]]:
    return prepare_for_training(load_model(settings.model, tiny_run.CPU), settings, tiny_run.CPU)


def gradients(settings: SureFitConfig) -> tuple[float, dict[str, torch.Tensor]]:
    model, _ = prepared(settings)
    model.train()
    items = tiny_run.rows(4)
    batch = collate_packed(items) if settings.data.packing else collate(items, 0)
    loss = loss_sum(model, batch, chunked=settings.speed.chunked_loss)
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_all_switches_together_change_neither_loss_nor_gradients(base: Path, tmp_path: Path) -> None:
    plain = changed(tiny_run.config(base, tmp_path), lora__lora_dropout=0.0, speed__chunked_loss=False)
    everything = changed(
        plain,
        data__packing=True,
        speed__attention="torch_varlen",
        speed__fused_lora=True,
        speed__tiled_mlp=True,
        speed__chunked_loss=True,
        train__gradient_checkpointing="selective",
    )
    (loss, expected), (other_loss, found) = gradients(plain), gradients(everything)
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_what_a_user_may_want_to_know(base: Path, tmp_path: Path) -> None:
    _, notes = prepared(tiny_run.config(base, tmp_path, packing=True))
    assert [note for note in notes if note.startswith("packed, attention torch_varlen: one document at a time")]
    assert prepared(tiny_run.config(base, tmp_path))[1] == []


def test_noise_is_added_in_training_alone(base: Path, tmp_path: Path) -> None:
    settings = changed(tiny_run.config(base, tmp_path), train__neftune_noise_alpha=5.0, lora__lora_dropout=0.0)
    model, _ = prepared(settings)
    ids = torch.arange(1, 9)[None]
    quiet, again = (model.eval()(input_ids=ids).logits for _ in range(2))
    assert torch.equal(quiet, again)
    assert not torch.allclose(model.train()(input_ids=ids).logits, quiet)


def test_a_packed_model_reads_padding_where_it_must(base: Path, tmp_path: Path) -> None:
    model, _ = prepared(tiny_run.config(base, tmp_path, packing=True))
    model.eval()
    padded, mask = torch.tensor([[0, 0, 5, 6]]), torch.tensor([[0, 0, 1, 1]])
    with torch.no_grad():
        alone = model(input_ids=padded[:, 2:]).logits
        with reads_padding(model):
            assert unwrap_base_model(model).config._attn_implementation == "sdpa"
            found = model(input_ids=padded, attention_mask=mask, position_ids=torch.tensor([[0, 0, 0, 1]])).logits
    torch.testing.assert_close(found[:, 2:], alone)
    assert unwrap_base_model(model).config._attn_implementation == "torch_varlen"


def test_an_adapter_goes_on_from_another(base: Path, tmp_path: Path, trained: Path) -> None:
    settings = changed(tiny_run.config(base, tmp_path), lora__start_from=str(trained))
    model, notes = prepared(settings)
    first = tiny_run.training(tiny_run.config(base, tmp_path / "again", max_steps=3))
    first.fit()
    expected = get_peft_model_state_dict(first.model)
    found = get_peft_model_state_dict(model)
    assert notes == []
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert all(p.requires_grad for name, p in model.named_parameters() if ".lora_" in name)


def adapter_like(trained: Path, directory: Path, **changes: Any) -> Path:
    """A copy of a trained adapter with other settings."""
    directory.mkdir()
    for file in trained.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 8}, r"the adapter has lora\.r 8, but the config has 4"),
        ({"lora_alpha": 8}, r"the adapter has lora\.lora_alpha 8, but the config has 32"),
        ({"use_rslora": True}, "the adapter has use_rslora true, but the config has false"),
        ({"use_dora": True}, "the adapter has use_dora true, but the config has false"),
        ({"bias": "all"}, "the adapter has bias, which SureFit does not train"),
    ],
    ids=["rank", "scale", "stabilised", "kind", "variant"],
)
def test_an_adapter_that_does_not_fit(
    base: Path, tmp_path: Path, trained: Path, changes: dict[str, Any], words: str
) -> None:
    settings = tiny_run.config(base, tmp_path)
    model = add_adapter(load_model(settings.model, tiny_run.CPU), settings.adapter)
    with pytest.raises(ConfigError, match=words):
        load_initial_adapter(model, adapter_like(trained, tmp_path / "other", **changes), settings.model)


def test_an_adapter_of_other_layers(base: Path, tmp_path: Path, trained: Path) -> None:
    settings = changed(tiny_run.config(base, tmp_path), lora__target_modules=["q_proj"])
    model = add_adapter(load_model(settings.model, tiny_run.CPU), settings.adapter)
    with pytest.raises(ConfigError, match=r"differ in 12 layers, model\.layers\.0\.mlp\.down_proj among them"):
        load_initial_adapter(model, trained, settings.model)


def test_an_adapter_of_another_base(tmp_path: Path, trained: Path) -> None:
    other = tiny_run.save_base(tmp_path / "other", seed=1)
    settings = tiny_run.config(other, tmp_path)
    model = add_adapter(load_model(settings.model, tiny_run.CPU), settings.adapter)
    with pytest.raises(ConfigError, match=r"it was trained on .*base, whose files differ from .*other"):
        load_initial_adapter(model, trained, settings.model)


def test_an_adapter_that_says_nothing_of_its_base(base: Path, tmp_path: Path, trained: Path) -> None:
    anonymous = adapter_like(trained, tmp_path / "other")
    (anonymous / "surefit.json").unlink()
    settings = tiny_run.config(base, tmp_path)
    model = add_adapter(load_model(settings.model, tiny_run.CPU), settings.adapter)
    (note,) = load_initial_adapter(model, anonymous, settings.model)
    assert "does not record its base model" in note


@pytest.mark.parametrize("damage", ["missing", "no weights", "cut short"])
def test_a_damaged_adapter(base: Path, tmp_path: Path, trained: Path, damage: str) -> None:
    directory = tmp_path / "other"
    if damage != "missing":
        weights = adapter_like(trained, directory) / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100]) if damage == "cut short" else weights.unlink()
    settings = tiny_run.config(base, tmp_path)
    model = add_adapter(load_model(settings.model, tiny_run.CPU), settings.adapter)
    with pytest.raises((ConfigError, GateError)) as caught:
        load_initial_adapter(model, directory, settings.model)
    assert caught.value.field == "lora.start_from"
