"""One place draws: JSON alone on stdout for scripts, lines without a terminal, secrets nowhere."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from surefit.cli.render import Output
from surefit.core.errors import ConfigError
from surefit.stages import progress_listener

FINDING = {
    "code": "SCH001",
    "severity": "error",
    "path": "run.yaml",
    "line": 3,
    "field": "train.warmup_steps",
    "message": "the warmup takes 100 steps of 3",
    "help": "lower it",
}


def test_json_mode_prints_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(as_json=True)
    out.say("for people")
    out.table("t", ["a"], [["1"]])
    out.findings([FINDING])
    out.without_result().result({"inner": 1})
    out.result({"outer": 1, "text": "é"})
    assert json.loads(capsys.readouterr().out) == {"outer": 1, "text": "é"}


def test_a_title_is_not_folded_to_the_width_of_a_narrow_table(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table("math_reasoning (scorer version 1), 95 % intervals", ["metric"], [["loss"]])
    assert capsys.readouterr().out.splitlines()[0] == "math_reasoning (scorer version 1), 95 % intervals"


def test_findings_read_like_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    Output().findings([FINDING])
    assert capsys.readouterr().out == (
        "run.yaml:3: error[SCH001] train.warmup_steps: the warmup takes 100 steps of 3\n  help: lower it\n"
    )


def test_errors_show_every_problem_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    Output().error(ConfigError("one", help="do", path="a.yaml", line=2, also=[ConfigError("two", field="x.y")]))
    assert capsys.readouterr().err == "error a.yaml:2: one\n  help: do\nerror x.y: two\n"


def test_markup_in_a_users_text_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output()
    out.say("[bold]not markup[/bold]")
    out.table("", ["name"], [["[red]x[/red]"]])
    shown = capsys.readouterr().out
    assert "[bold]not markup[/bold]" in shown
    assert "[red]x[/red]" in shown


def test_secrets_are_taken_out_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hf_" + "Zz9" * 8
    out = Output()
    out.say(secret)
    out.note(secret)
    out.table("", ["a"], [[secret]])
    out.error(ConfigError(f"token {secret}"))
    Output(as_json=True).result({"token": secret})
    shown = capsys.readouterr()
    assert secret not in shown.out + shown.err


def test_trained_text_is_marked_without_colours_too(capsys: pytest.CaptureFixture[str]) -> None:
    Output().segments([("ask ", False), ("answer", True)])
    assert capsys.readouterr().out == "ask ⟦answer⟧\n"


def test_plain_progress_speaks_only_on_long_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 1.0, 12.0, 13.0, 30.0])
    monkeypatch.setattr(progress_listener.time, "monotonic", lambda: next(clock))
    with Output().progress("training") as on_progress:
        for done in (0, 1, 2, 3, 4):  # the first call says what was done before
            on_progress(done, 4, f"step {done}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["training 2/4 ETA 12.0 s step 2", "training 4/4 ETA 0.0 s step 4"]


def test_a_terminal_gets_a_bar_with_eta() -> None:
    out = Output()
    screen = io.StringIO()
    out.err = Console(file=screen, force_terminal=True, width=100)
    with out.progress("training") as on_progress:
        on_progress(1, 2, "loss 0.5")
        on_progress(2, 2, "loss 0.4")
    drawn = screen.getvalue()
    assert "training" in drawn
    assert "ETA" in drawn


ESCAPES = "runs/\x1b[2J\x1b]0;owned\x07one\u202egpj\udcff"


def test_no_name_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """File names and rows are other people's: what a terminal would obey is written out, whoever says it."""
    out = Output()
    out.say(ESCAPES)
    out.note(ESCAPES)
    out.heading(ESCAPES)
    out.table(ESCAPES, ["a"], [[ESCAPES]])
    out.findings([FINDING | dict.fromkeys(("path", "field", "message", "help"), ESCAPES)])
    out.error(ConfigError(ESCAPES, path=ESCAPES, help=ESCAPES))
    out.segments([(ESCAPES, True)])
    said = "".join(capsys.readouterr())
    assert said.count(r"\x1b[2J") == 13
    assert not {"\x1b", "\x07", "\u202e", "\udcff"} & set(said)


def test_json_and_documents_can_always_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).result({"path": ESCAPES})
    said = capsys.readouterr().out
    said.encode()
    assert json.loads(said)["path"] == ESCAPES
    Output().document("file: \udcff")
    capsys.readouterr().out.encode()


def test_an_address_of_our_own_keeps_its_token_and_no_other_does(capsys: pytest.CaptureFixture[str]) -> None:
    Output().own_address("served at", "http://127.0.0.1:1/?token=abcdef")
    Output().say("asked http://host/v1?api_key=abcdef&model=x, with WANDB_API_KEY=0123456789abcdef")
    said = capsys.readouterr().out
    assert "?token=abcdef" in said
    assert "?api_key=***&model=x, with WANDB_API_KEY=***" in said
