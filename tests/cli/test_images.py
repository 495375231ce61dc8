"""Checkpoints that also take images, trained on text from a config as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.cli.conftest import Surefit
from transformers import AutoModelForImageTextToText
from typed_run import FILE, ROWS, done, save_base, type_run


def base(kind: str, directory: Path) -> dict[str, torch.Tensor]:
    """A random checkpoint with images; its tensors."""
    tensors = save_base(f"{kind}:images", directory, AutoModelForImageTextToText)
    (directory / "preprocessor_config.json").write_text('{"size": 16}')
    return tensors


def typed(folder: Path, adapter: str, row: dict[str, Any] | None = None, **model: Any) -> Path:
    return type_run(folder, rows=[row] * len(ROWS) if row else ROWS, method=adapter, **model)


def vision(name: str) -> bool:
    return any(part in name for part in ("vision", "visual", "multi_modal_projector"))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("llama4", "full"),
        ("gemma3", "full"),
        pytest.param("qwen2_5_vl", "full", marks=SLOW),
        ("qwen2_5_vl", "lora"),
        pytest.param("llama4", "lora", marks=SLOW),
        pytest.param("gemma3", "lora", marks=SLOW),
    ],
)
def test_the_vision_part_is_kept_bit_for_bit(kind: str, adapter: str, surefit: Surefit, tmp_path: Path) -> None:
    before = base(kind, tmp_path / "base")
    config = typed(tmp_path, adapter)
    for verb in ("train", "merge"):
        done(surefit, verb, config)
    result = tmp_path / "out" / ("merged" if adapter == "lora" else "model")
    after = load_file(result / FILE)
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any(map(vision, changed))
    assert any(map(vision, before))
    assert json.loads((tmp_path / "out/certificate.json").read_text())["passed"]
    assert (result / "preprocessor_config.json").is_file()


@pytest.mark.parametrize(("kind", "tokens"), [("qwen3_5", False), pytest.param("llama4", True, marks=SLOW)])
def test_an_exported_adapter_has_the_names_of_the_whole(
    kind: str, tokens: bool, surefit: Surefit, tmp_path: Path
) -> None:
    """vLLM looks them up in the whole model, which it always loads, and passes over a name that it does not find."""
    base(kind, tmp_path / "base")
    config = typed(tmp_path, "lora", add_tokens=["<go>"] if tokens else [])
    for words in (("train",), ("merge",), ("export", "--format", "adapter")):
        done(surefit, words[0], config, *words[1:])
    exported = tmp_path / "out/export/adapter"
    plain: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merged: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "out/merged", dtype=torch.float32).eval()
    plain.resize_token_embeddings(len(merged.get_input_embeddings().weight))
    modules = dict(plain.named_modules())
    names = [name.partition(".lora_")[0] for name in load_file(exported / "adapter_model.safetensors")]
    assert all(name.removeprefix("base_model.model.").removesuffix(".token_adapter.trainable_tokens_delta") in modules
               for name in names)  # fmt: skip
    tuned = PeftModel.from_pretrained(plain, str(exported), autocast_adapter_dtype=False).eval()
    assert not any(vision(name) for name, _ in tuned.named_parameters() if "lora_" in name)
    ids = torch.arange(5, 21)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        torch.testing.assert_close(merged(**given).logits, tuned(**given).logits, rtol=1e-3, atol=1e-4)


def test_a_model_that_could_not_be_saved_whole_is_not_trained(surefit: Surefit, tmp_path: Path) -> None:
    tensors = base("llama4", tmp_path / "base")
    text = {name: tensor for name, tensor in tensors.items() if not vision(name)}
    save_file(text, tmp_path / "base" / FILE, metadata={"format": "pt"})
    answer = surefit("train", typed(tmp_path, "full"))
    assert answer.code != 0
    assert "the untrained part cannot be saved unchanged" in answer.text
    assert not (tmp_path / "out/checkpoints").exists()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
                      {"role": "assistant", "content": "A cat."}]},
        {"prompt": "What is it?", "completion": "A cat.", "images": ["cat.png"]},
    ],
)  # fmt: skip
def test_rows_with_images_are_refused(row: dict[str, Any], surefit: Surefit, tmp_path: Path) -> None:
    base("gemma3", tmp_path / "base")
    answer = surefit("check", typed(tmp_path, "lora", row))
    assert answer.code == 1
    assert "rows.jsonl:1: error[DAT001]" in answer.text
    assert "use rows with text only: SureFit does not train on images, audio or video" in answer.text
