"""Every number of the config, at the edge of what a number can be: a value that is taken can be worked with."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.cli.conftest import call

from surefit.config.load import load_config
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError

ODD = (
    ".nan", ".inf", "-.inf", "1e308", "-1e308", "1e35", str(10**35), "5e-324", "-0.0", "0", "-1", str(2**63),
    str(2**31), "1e9", "1000000", "1e-9",
)  # fmt: skip


def numeric(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys that take a number."""
    for name, entry in section.model_fields.items():
        for option in typing.get_args(entry.annotation) or (entry.annotation,):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from numeric(option, f"{prefix}{name}.")
        text = str(entry.annotation)
        if not text.startswith("<class 'surefit") and ("int" in text or "float" in text) and "Section" not in text:
            yield f"{prefix}{name}"


FIELDS = sorted(set(numeric(SureFitConfig)))


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {name_or_path: surefit/nano}\ndata: {train: surefit/function-calling-eval}\n"
        "recipe: function_calling\noutput_dir: run\n"
    )
    return path


def taken(path: Path, field: str, value: str) -> Any:
    """The config with it, or None where it is refused in words."""
    key = value if field != "data.mix" else f"{{surefit/function-calling-train: {value}}}"
    try:
        return load_config(path, [f"{field}={key}"])
    except ConfigError as error:
        return None if str(error.field).startswith(field) else pytest.fail(f"{field}={value}: {error}")


def test_there_are_many_and_none_takes_what_is_no_number(written: Path) -> None:
    assert len(FIELDS) >= 40
    for field in FIELDS:
        for value in (".nan", ".inf", "-.inf", "1e308", "-1e308", "1e35", str(10**35)):
            assert taken(written, field, value) is None, (field, value)


@pytest.mark.parametrize(
    "field", ["train.num_train_epochs", "data.mix", "train.warmup_steps", "lora.lora_alpha", "data.max_length"]
)
@pytest.mark.parametrize("value", ["5e-324", "1000000"])
def test_what_is_taken_is_checked_without_a_fault_of_ours(written: Path, field: str, value: str) -> None:
    """A few; all of them in the slow suite."""
    checked(written, field, value)


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
def test_every_number_that_is_taken_can_be_checked_and_planned(written: Path, field: str) -> None:
    for value in ODD:
        checked(written, field, value, plan=True)


def checked(path: Path, field: str, value: str, plan: bool = False) -> None:
    if taken(path, field, value) is None:
        return
    key = value if field != "data.mix" else f"{{surefit/function-calling-train: {value}}}"
    for verb in (["check"], ["plan", "--quick"])[: 1 + plan]:
        answer = call(verb[0], path, *verb[1:], "--set", f"{field}={key}", "--json")
        assert answer.code in (0, 1, 2, 3), (field, value, answer.text[-600:])
        assert "INT001" not in answer.stdout, (field, value)
