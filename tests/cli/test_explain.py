"""`surefit explain` finds rules by their code, and other programs' errors in a text or a log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE

LOG = """step 41 loss 1.2
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB.
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED
"""


def _explain(*arguments: str, stdin: str | None = None) -> tuple[int, dict]:
    result = CliRunner().invoke(app, ["explain", *arguments, "--json"], input=stdin)
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


def test_a_log_and_stdin_name_the_errors_in_their_order(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    for code, answer in (_explain(str(log)), _explain("-", stdin=LOG)):
        assert code == EXIT_OK
        assert [(error["id"], error["line"]) for error in answer["errors"]] == [
            ("cuda-out-of-memory", 2),
            ("child-failed", 3),
        ]


def test_a_text_that_nobody_knows_is_told_so() -> None:
    code, answer = _explain("my flux capacitor is empty")
    assert (code, answer["errors"]) == (EXIT_FINDINGS, [])


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("no-such.log", "E1961"),
        ("logs/no-such", "E1961"),
        ("train.log.gz", "E1961"),
        (".", "E1891"),
        ("", "E1024"),
        ("XYZ999", "E2100"),
    ],
)
def test_what_is_not_there_is_an_error(what: str, code: str) -> None:
    exit_code, answer = _explain(what)
    assert exit_code == EXIT_USAGE
    assert answer["code"].startswith(code)


def test_a_rule_is_still_found_by_its_code_in_any_case() -> None:
    code, answer = _explain("sch001")
    assert code == EXIT_OK
    assert answer["rules"][0]["code"] == "SCH001"


def test_a_message_that_is_longer_than_a_file_name_may_be_is_text() -> None:
    code, answer = _explain("RuntimeError: CUDA out of memory. " + "x" * 300)
    assert code == EXIT_OK
    assert answer["errors"][0]["id"] == "cuda-out-of-memory"


def test_empty_stdin_is_an_error() -> None:
    assert _explain("-", stdin="\n")[0] == EXIT_USAGE


def test_lines_count_from_the_beginning_of_a_log_that_is_read_from_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefit.cli.explain.LOG_BYTES", 150)
    log = tmp_path / "train.log"
    log.write_text("step\n" * 60 + "CUDA out of memory.\n")
    assert _explain(str(log))[1]["errors"][0]["line"] == 61


def test_the_code_of_an_error_message_is_told_from_a_rule() -> None:
    result = CliRunner().invoke(app, ["explain", "E1024"])
    assert result.exit_code == EXIT_OK
    assert "docs/reference/errors.md" in result.stdout
