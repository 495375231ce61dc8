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


@pytest.mark.parametrize(("what", "code"), [("no-such.log", "E"), ("XYZ999", "E2100")])
def test_what_is_not_there_is_an_error(what: str, code: str) -> None:
    exit_code, answer = _explain(what)
    assert exit_code == EXIT_USAGE
    assert answer["code"].startswith(code)


def test_a_rule_is_still_found_by_its_code_in_any_case() -> None:
    code, answer = _explain("sch001")
    assert code == EXIT_OK
    assert answer["rules"][0]["code"] == "SCH001"
