"""A model split by layers over GPUs that are not here: the map alone, on meta. On GPUs: not yet measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from surefit.config.schema import ModelSection
from surefit.core.errors import MachineError
from surefit.model import layers
from surefit.model.layers import FOR_WEIGHTS, build_meta_model, load_for_generation, split_by_layers


def llama(count: int = 12, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=2_000, hidden_size=64, intermediate_size=256, num_hidden_layers=count, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def device_of(name: str, placed: dict[str, int]) -> int:
    (found,) = {device for module, device in placed.items() if name == module or name.startswith(f"{module}.")}
    return found


@pytest.mark.parametrize("cards", [2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_has_one_place_layers_stay_whole_and_no_card_is_too_full(cards: int, tied: bool) -> None:
    model = llama(tied=tied)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    free = [int(1.5 * whole / cards / FOR_WEIGHTS)] * cards
    placed = split_by_layers(model, free)
    assert placed is not None
    held = [0] * cards
    for name, parameter in model.named_parameters():
        held[device_of(name, placed)] += parameter.nbytes
    assert all(0 < bytes_ <= FOR_WEIGHTS * most for bytes_, most in zip(held, free, strict=True))
    order = [
        {device_of(name, placed) for name, _ in model.named_parameters() if f"layers.{n}." in name} for n in range(12)
    ]
    assert all(len(devices) == 1 for devices in order)
    found = [device for devices in order for device in devices]
    assert found == sorted(found), "what follows lies on the same card or a later one"


def test_what_one_card_holds_is_not_split() -> None:
    model = llama()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert split_by_layers(model, [int(whole / FOR_WEIGHTS) + 1, 10**12]) is None


def test_cards_of_different_room() -> None:
    model = llama()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    placed = split_by_layers(model, [int(0.3 * whole / FOR_WEIGHTS), int(1.2 * whole / FOR_WEIGHTS)])
    assert placed is not None
    assert set(placed.values()) == {0, 1}


def test_more_than_all_of_them_hold() -> None:
    model = llama()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(MachineError, match="2 GPUs have"):
        split_by_layers(model, [whole // 4, whole // 4])


@pytest.mark.parametrize(("cards", "quantization", "split"), [(2, "none", True), (1, "none", False), (2, "nf4", False)])
def test_when_it_is_split(monkeypatch: pytest.MonkeyPatch, cards: int, quantization: str, split: bool) -> None:
    asked = {}
    monkeypatch.setattr(layers, "load_model", lambda section, hardware, **more: asked.update(more))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    section = ModelSection(name_or_path="surefit/nano", dtype="float32", quantization=quantization)  # type: ignore[arg-type]
    size = sum(parameter.nbytes for parameter in build_meta_model(section).parameters())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (size, 10**9))
    load_for_generation(section, SimpleNamespace(kind="cuda"))  # type: ignore[arg-type]
    assert ("placed" in asked and asked["placed"] is not None) == split
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    asked.clear()
    load_for_generation(section, SimpleNamespace(kind="cuda"))  # type: ignore[arg-type]
    assert asked == {}, "each of several processes has a GPU of its own"
