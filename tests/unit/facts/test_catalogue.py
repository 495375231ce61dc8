"""scripts/catalogue.py: entries of the catalogue from config.json files, and what it refuses."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from surefit.facts import model
from surefit.facts.model import CATALOGUE, catalogue, model_facts

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "scripts/catalogue.py"))
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0", "_name_or_path": "/home/somebody/secret",
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty catalogue that the facts read."""
    monkeypatch.setattr(model, "CATALOGUE", tmp_path / "catalogue")
    catalogue.cache_clear()
    (tmp_path / "catalogue").mkdir()
    yield tmp_path / "catalogue"
    catalogue.cache_clear()


def config_in(directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    return directory / "config.json"


def run(place: Path, *arguments: str) -> int:
    code: int = SCRIPT["main"](list(arguments), place)
    catalogue.cache_clear()
    return code


def test_a_config_becomes_an_entry_that_a_name_is_planned_from(place: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(place, f"org/tiny={config_in(tmp_path / 'a')}") == 0
    text = (place / "org--tiny.json").read_text()
    assert "secret" not in text
    assert "4.40.0" not in text
    assert '+    "hidden_size": 64,' in capsys.readouterr().out
    facts = model_facts("org/tiny")
    assert (facts.source, facts.dtype, facts.gated, facts.has_chat_template) == ("catalogue", "bfloat16", None, None)
    assert facts.weight_bytes == 2 * facts.parameters == 2 * facts.expected_parameters  # type: ignore[operator]


def test_an_update_shows_what_changed_and_keeps_what_no_file_says(place: Path, tmp_path: Path, capsys: Any) -> None:
    path = config_in(tmp_path / "a")
    run(place, f"org/tiny={path}")
    entry = json.loads((place / "org--tiny.json").read_text()) | {"gated": True}
    (place / "org--tiny.json").write_text(json.dumps(entry))
    config_in(tmp_path / "a", hidden_size=96)
    capsys.readouterr()
    assert run(place, "--dry-run", f"org/tiny={path.parent}") == 0
    assert model_facts("org/tiny").hidden_size == 64
    assert run(place, f"org/tiny={path.parent}") == 0
    assert (model_facts("org/tiny").hidden_size, model_facts("org/tiny").gated) == (96, True)
    capsys.readouterr()
    run(place, f"org/tiny={path.parent}")
    assert capsys.readouterr().out == f"org/tiny={path.parent}: as it was\n"


def test_a_download_brings_its_name_its_template_and_the_size_of_its_weights(place: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--org--new/snapshots/c0ffee"
    config_in(snapshot, architectures=["NewForCausalLM"], model_type="new")
    (snapshot / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    save_file({"a.weight": torch.zeros(10, 10)}, snapshot / "model.safetensors")
    assert run(place, str(snapshot)) == 0
    facts = model_facts("org/new")
    assert (facts.has_chat_template, facts.weight_bytes, facts.parameters) == (True, 400, None)
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 7000}, "weight_map": {}})
    )
    assert run(place, str(snapshot)) == 0
    assert model_facts("org/new").weight_bytes == 7000


def test_a_nested_part_loses_what_is_somebodys_too(place: Path, tmp_path: Path) -> None:
    path = config_in(tmp_path / "a")
    inner = {"_name_or_path": "/home/somebody/model", "torch_dtype": "bfloat16", "hidden_size": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_config": inner}))
    (path.parent / "model.safetensors.index.json").write_text('{"metadata": null, "weight_map": {}}')
    assert run(place, f"org/nested={path.parent}") == 0
    kept = json.loads((place / "org--nested.json").read_text())["config"]["vision_config"]
    assert kept == {"hidden_size": 64, "dtype": "bfloat16"}


def test_weights_that_are_no_match_are_said(place: Path, tmp_path: Path, capsys: Any) -> None:
    path = config_in(tmp_path / "a")
    save_file({"a.weight": torch.zeros(10, 10)}, tmp_path / "a/model.safetensors")
    assert run(place, f"org/tiny={path.parent}") == 0
    assert "org/tiny: 400 bytes of weights, and config.json amounts to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "argument", "words"),
    [
        ("{", "org/a={}", "not valid JSON"),
        ("[]", "org/a={}", "not a JSON object"),
        ('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}', "org/a={}", "hidden_size"),
        (json.dumps(LLAMA), "{}", "the model's hub id is missing"),
        (json.dumps(LLAMA), "a b={}", "the model's hub id is missing"),
        (json.dumps(LLAMA), "org/a={}x", "no such file or directory"),
        (json.dumps(LLAMA | {"architectures": []}), "org/a={}", "names no architecture"),
        (json.dumps(LLAMA | {"hidden_size": "64"}), "org/a={}", "hidden_size"),
    ],
)
def test_what_cannot_be_read_is_refused_and_the_others_go_on(
    place: Path, tmp_path: Path, capsys: Any, text: str, argument: str, words: str
) -> None:
    path = tmp_path / "bad/config.json"
    path.parent.mkdir()
    path.write_text(text)
    assert run(place, argument.format(path), f"org/good={config_in(tmp_path / 'good')}") == 1
    assert words in capsys.readouterr().err
    assert [file.name for file in place.iterdir()] == ["org--good.json"]


def test_what_is_shipped_is_what_the_script_writes() -> None:
    for file in CATALOGUE.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        assert text.rstrip("\n") + "\n" == SCRIPT["as_text"](json.loads(text)), file.name
        assert not set(json.loads(text)["config"]) & set(SCRIPT["LEFT_OUT"]), file.name
