"""Secrets never show, errors say where and what to do, quantities read the same everywhere."""

from __future__ import annotations

import doctest
import io
import logging
import os
import re
from pathlib import Path

import pytest

from surefit.core import dotenv_file, env, errors, sampling, units
from surefit.core.dotenv_file import parse_dotenv
from surefit.core.errors import ConfigError


@pytest.mark.parametrize("module", [units, errors, sampling, dotenv_file])
def test_worked_numbers_in_docstrings(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_dotenv_fills_what_the_environment_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "from-the-environment")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / ".env").write_text("HF_TOKEN=from-the-file\nWANDB_API_KEY='abc def'\n")
    assert env.load_dotenv(tmp_path) == env.Dotenv(tmp_path / ".env", ("WANDB_API_KEY",))
    assert env.hub_token() == "from-the-environment"
    assert os.environ["WANDB_API_KEY"] == "abc def"
    monkeypatch.delenv("WANDB_API_KEY")
    assert env.load_dotenv(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("A=1\nB = 2 \nexport C=3\n", {"A": "1", "B": "2", "C": "3"}),
        ("# a comment\n\nA=1 # and another\nB=a#b\nC= # none\nD=#d\n", {"A": "1", "B": "a#b", "C": "", "D": "#d"}),
        ("A='it is\\n #1' # x\nB='a\\'b'\n", {"A": "it is\\n #1", "B": "a'b"}),
        ('A="a\\tb\\n\\"c\\""\nB="${HOME}/x"\n', {"A": 'a\tb\n"c"', "B": "${HOME}/x"}),
        ("A='one\ntwo'\nB=3", {"A": "one\ntwo", "B": "3"}),
        ("A=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
        ("A\nB=\n'C d'=4\n", {"A": None, "B": "", "C d": "4"}),
        ('A=\'open\nB=2\n=3\nC="x" y\nD=4\nA=5\n', {"B": "2", "D": "4", "A": "5"}),
        ("A=1\nA=2\n", {"A": "2"}),
        ("", {}),
        (" \n\t\n", {}),
    ],
)
def test_the_text_of_a_dotenv(text: str, values: dict[str, str | None]) -> None:
    assert parse_dotenv(text) == values
    dotenv = pytest.importorskip("dotenv", reason="python-dotenv is not installed: nothing to compare with")
    lines = io.StringIO(text.replace("\r\n", "\n"))
    assert dict(dotenv.dotenv_values(stream=lines, interpolate=False)) == values


def test_a_dotenv_sets_the_documented_names_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that one works in may be somebody else's: it decides neither what runs nor where tokens are sent."""
    for name in (*env.DOTENV, "PYTHONPATH", "HF_ENDPOINT", "LLAMA_CPP", "WANDB_BASE_URL", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / ".env").write_text(
        "PYTHONPATH=.\nHF_ENDPOINT=https://x.example\nLLAMA_CPP=.\nWANDB_BASE_URL=x\nLD_PRELOAD=./x.so\n"
        "HF_HOME=${HOME}/models\nMLFLOW_TRACKING_URI=http://x/${WANDB_API_KEY}\nHF_TOKEN=\n"
    )
    os.environ["WANDB_API_KEY"] = "from-the-environment"
    found = env.load_dotenv(tmp_path)
    assert found is not None
    assert found.accepted == ("HF_HOME", "MLFLOW_TRACKING_URI")
    assert found.left == ("PYTHONPATH", "HF_ENDPOINT", "LLAMA_CPP", "WANDB_BASE_URL", "LD_PRELOAD")
    assert env.hub_home() == Path.home() / "models"
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://x/${WANDB_API_KEY}", "no secret is filled into an address"
    assert not {"PYTHONPATH", "HF_ENDPOINT", "LLAMA_CPP"} & set(os.environ)


def test_a_dotenvs_address_is_not_asked_with_the_environments_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"MLFLOW_TRACKING_TOKEN": "mine", "HOME": str(tmp_path)})
    (tmp_path / ".env").write_text("MLFLOW_TRACKING_URI=http://somewhere.example\n")
    assert env.load_dotenv(tmp_path) == env.Dotenv(tmp_path / ".env", (), ("MLFLOW_TRACKING_URI",))


def test_the_documented_names_are_those_that_a_dotenv_may_set() -> None:
    root = Path(__file__).parents[3]
    example = set(re.findall(r"^# ([A-Z_]+)=", (root / ".env.example").read_text(), re.MULTILINE))
    assert example <= set(env.DOTENV)
    assert set(env.DOTENV) <= set(re.findall(r"[A-Z_]{4,}", (root / "docs/install.md").read_text()))


@pytest.mark.parametrize("content", [b"A=" + b"x" * 70_000, b"HF_TOKEN='a\0b'\n"])
def test_a_dotenv_has_a_bound(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".env").write_bytes(content)
    with pytest.raises(ConfigError, match=r"\.env: "):
        env.load_dotenv(tmp_path)


def test_a_dotenv_that_is_not_text_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"HF_TOKEN=\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"\.env: cannot be read: not UTF-8"):
        env.load_dotenv(tmp_path)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [(None, None), ("", []), ("-1", []), ("0", [0]), ("2, 0", [2, 0]), ("1,x,0", [1]), ("GPU-8a56", None)],
)
def test_visible_gpus_as_cuda_reads_them(
    text: str | None, numbers: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert env.visible_gpus() == numbers


def test_the_first_line_of_anothers_error_holds_no_secret() -> None:
    made_up = "hf_" + "a1B2" * 6
    assert env.first_line(ValueError(f"401 for {made_up}\nand more")) == "401 for ***"
    assert env.first_line(ValueError()) == "ValueError"


def test_token_file_of_the_hub_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert env.hub_token() is None
    (tmp_path / "token").write_text("stored-token\n")
    assert env.hub_token() == "stored-token"


@pytest.mark.parametrize("first", ["", "hf_of-the-first-name"])
def test_the_libraries_send_the_token_whichever_name_it_has(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers loads models with what huggingface_hub finds by itself."""
    from huggingface_hub import get_token

    for name in env.HUB_TOKENS:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", first)
    monkeypatch.setenv("HUGGINGFACE_HUB_TOKEN", "hf_of-the-last-name")
    env.quiet_libraries()
    assert get_token() == env.hub_token() == (first or "hf_of-the-last-name")
    for name in env.HUB_TOKENS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".env").write_text("HUGGINGFACE_HUB_TOKEN=hf_of-the-file\n")
    env.load_dotenv(tmp_path)
    assert get_token() == "hf_of-the-file"


def test_redact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct horse battery")
    made_up = "hf_" + "a1B2" * 6
    text = env.redact(f"login {made_up} with correct horse battery at host")
    assert text == "login *** with *** at host"
    assert env.redact("half_life and task-oriented stay") == "half_life and task-oriented stay"


def test_error_text_and_json() -> None:
    second = ConfigError("two", field="b")
    error = ConfigError("one", help="do this", path="run.yaml", line=3, field="a.b", also=[second])
    assert str(error) == "run.yaml:3: a.b: one\n  help: do this\nb: two"
    as_json = error.as_dict()
    assert (as_json["line"], as_json["exit_code"], len(as_json["also"])) == (3, 2, 1)  # type: ignore[arg-type]


def test_a_field_is_named_where_an_error_names_none() -> None:
    rows = [errors.DataError("empty", field="text"), errors.DataError("no prompt")]
    error = errors.DataError("2 rows cannot be used", also=rows)
    error.about("data.eval")
    assert [one.field for one in (error, *error.also)] == ["data.eval", "text", "data.eval"]


def test_of_the_libraries_only_what_users_can_do_nothing_about_is_kept_from_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.quiet_libraries()
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    monkeypatch.setattr(logger, "disabled", False)  # MLflow's migrations disable every logger that is there
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please …", "No module")
    logger.warning("something else")
    logger.error("worse")
    assert [record.message for record in caplog.records] == ["something else", "worse"]


def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    env.sleep_at_barriers()
    assert os.environ == {"OMP_WAIT_POLICY": "passive"}
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "active"})
    env.sleep_at_barriers()
    assert os.environ == {"OMP_WAIT_POLICY": "active"}


@pytest.mark.parametrize(("text", "threads"), [("3", 3), ("4,2", 4), ("", None), ("0", None), ("many", None)])
def test_threads_that_are_asked_for(monkeypatch: pytest.MonkeyPatch, text: str, threads: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert env.threads_asked() == threads
