"""Messages that name something of use: what they propose is there, and following them helps."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from surefit.cli import exits
from surefit.cli.app import app
from surefit.config.load import load_config
from surefit.core.errors import ConfigError, DataError
from surefit.data.read.load import load_rows
from surefit.facts.hardware import hardware_facts

RUN = "model: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl, eval: 0.3}\noutput_dir: run\n"


def surefit(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def _config() -> None:
    rows = [{"prompt": f"Say {n}.", "completion": f"It is {n}."} for n in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.yaml").write_text(RUN)


def test_a_config_is_no_file_of_rows() -> None:
    """N12 e"""
    Path("missing.yaml").write_text(RUN)
    with pytest.raises(DataError) as error:
        load_rows("missing.jsonl")
    assert "missing.yaml" not in error.value.message
    Path("mising.jsonl").write_text("{}\n")
    with pytest.raises(DataError) as error:
        load_rows("missing.jsonl")
    assert "'mising.jsonl'" in error.value.message


@pytest.mark.parametrize("key", ["output_dir", "model", "data"], ids=lambda key: f"N12-f-{key}")
def test_what_is_missing_can_be_added_as_it_is_said(key: str) -> None:
    tree: dict[str, Any] = yaml.safe_load(RUN)
    del tree[key]
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as error:
        load_config(Path("run.yaml"))
    assert (error.value.code, error.value.field) == ("E2018", key)
    assert error.value.help is not None
    line = error.value.help.removeprefix("add ")
    assert list(yaml.safe_load(line)) == [key]
    Path("run.yaml").write_text(yaml.safe_dump(tree) + line + "\n")
    load_config(Path("run.yaml"))


def test_a_key_of_a_section_is_shown_too() -> None:
    """N12 f"""
    Path("run.yaml").write_text(RUN.replace("train: rows.jsonl, ", ""))
    with pytest.raises(ConfigError) as error:
        load_config(Path("run.yaml"))
    assert error.value.help == "add train: train.jsonl"


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, 3), (errno.EROFS, 3), (errno.ENAMETOOLONG, 2), (errno.EACCES, 3)]
)
def test_what_to_do_after_a_failed_system_call(number: int, code: int) -> None:
    """N12 g"""
    said: list[Any] = []
    out: Any = type("Out", (), {"error": staticmethod(said.append)})
    assert exits._failed_system_call(out, OSError(number, os.strerror(number), "x")) == code
    assert said[0].code == "E1201"
    assert said[0].help.split()[0] in ("free", "name", "shorten", "check", "choose")


def test_one_step_is_one_step() -> None:
    """N12 h"""
    code, text = surefit("plan", "run.yaml", "--quick")
    assert code == 0
    assert "1 step of" in " ".join(text.split())


@pytest.mark.parametrize("what", ["run.yaml", "rows.jsonl"], ids=lambda name: f"N12-i-{name}")
def test_a_link_that_leads_to_itself(what: str) -> None:
    Path(what).unlink()
    os.symlink(what, what)
    code, text = surefit("check", "run.yaml")
    assert code in (1, 2)
    assert "permissions" not in text
    assert "link" in text


@pytest.mark.parametrize("verb", ["check", "plan", "train", "evaluate", "run"], ids=lambda verb: f"N12-j-{verb}")
@pytest.mark.parametrize("named", ["", "  "], ids=["empty", "spaces"])
def test_an_empty_name_is_not_this_directory(verb: str, named: str) -> None:
    code, text = surefit(verb, named)
    assert code == 2
    assert "empty" in text
    assert "no run is here" not in text


def test_an_empty_gpu_is_not_this_machine() -> None:
    """N12 j"""
    code, text = surefit("plan", "run.yaml", "--quick", "--gpu", "", "--json")
    error = json.loads(text.strip().splitlines()[-1])
    assert (code, error["code"], error["field"]) == (2, "E2068", "hardware.gpu")
    assert surefit("plan", "run.yaml", "--quick", "--gpu", "4090", "--json")[0] == 0


@pytest.mark.parametrize(
    ("written", "meant"), [("4O90", "4090"), ("h10O", "h100"), ("rtx409", "rtx4090"), ("a100-8O", "a100-80")]
)
def test_a_misspelt_gpu(written: str, meant: str) -> None:
    """N12 j"""
    with pytest.raises(ConfigError) as error:
        hardware_facts(written)
    assert error.value.code == "E2068"
    assert f"'{meant}'" in error.value.message
