"""A base model that cannot be used, in a real directory: `check` and `train` say what is wrong and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Surefit

from surefit.nano import PATH as NANO


def without_weights(base: Path) -> None:
    (base / "model.safetensors").unlink()


def of_next_year(base: Path) -> None:
    edit(base / "config.json", model_type="llama9", architectures=["Llama9ForCausalLM"], transformers_version="9.1.0")


def of_no_release(base: Path) -> None:
    edit(base / "config.json", model_type="llama9", transformers_version=version("transformers"))


def larger_vocabulary(base: Path) -> None:
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"surely": 70_000}
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))


def template_that_raises(base: Path) -> None:
    (base / "chat_template.jinja").write_text("{{ raise_exception('no tools in this house') }}")


def template_that_is_none(base: Path) -> None:
    (base / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}")


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (without_weights, ("MOD002", "has a config.json but no weights", "hf download NAME --local-dir")),
        (
            of_next_year,
            (
                "MOD013",
                "does not know the model type 'llama9'",
                "install transformers 9.1.0, which wrote its config.json",
            ),
        ),
        (of_no_release, ("MOD013", "correct model_type in config.json, or install a newer transformers")),
        (larger_vocabulary, ("TPL006", "the plain vocabulary (id 70,000)", "use a reserved token instead")),
        (template_that_raises, ("TPL011", "raises an error for a question and its answer: no tools in this house")),
        (template_that_is_none, ("TPL011", "Unexpected end of template")),
    ],
)
def test_a_base_that_cannot_be_used(
    surefit: Surefit, config: Path, tmp_path: Path, breaks: Callable[[Path], None], said: tuple[str, ...]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(NANO, base)
    breaks(base)
    for verb in ("check", "train"):
        answer = surefit(verb, config, "--set", f"model.name_or_path={base}")
        assert answer.code == 1, answer.text
        text = " ".join(answer.text.split())
        assert all(words in text for words in said), answer.text
        assert "Traceback" not in text
    assert not (tmp_path / "runs/one/adapter").exists()
