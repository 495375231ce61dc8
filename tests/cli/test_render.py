"""One place draws: JSON alone on stdout for scripts, lines without a terminal, secrets nowhere."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from surefit.cli.render import Output, fit_progress_line
from surefit.core.errors import ConfigError
from surefit.stages import progress_listener
from surefit.train.progress import TrainingProgress

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
    assert capsys.readouterr().err == "a.yaml:2: error: one\n  help: do\nerror x.y: two\n"


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
    Output().segments([("ask ", False, False), ("answer", True, False)])
    assert capsys.readouterr().out == "ask ⟦answer⟧\n"


def test_plain_progress_speaks_only_on_long_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Output()  # it notes when it was made
    clock = iter([0.0, 0.0, 1.0, 12.0, 13.0, 30.0])
    monkeypatch.setattr(progress_listener.time, "monotonic", lambda: next(clock))
    with out.progress("training") as on_progress:
        for done in (0, 1, 2, 3, 4):  # the first call says what was done before
            on_progress(done, 4, f"step {done}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["training 2/4 ETA 12.0 s step 2", "training 4/4 ETA 0.0 s step 4"]


def test_a_terminal_gets_a_bar_with_eta() -> None:
    out = Output()
    screen = io.StringIO()
    out.err = Console(file=screen, force_terminal=True, width=100)
    with out.progress("auditing") as on_progress:
        on_progress(1, 2, "rows.jsonl")
        on_progress(2, 2, "more.jsonl")
    drawn = screen.getvalue()
    assert "auditing" in drawn
    assert "ETA 0.0 s" in drawn
    assert "more.jsonl" in drawn


STATE = TrainingProgress(
    60,
    1200,
    0.5,
    1.8906,
    1.51,
    5.71e-3,
    2000.0,
    17.9,
    True,
    0,
    2.1129,
    mfu=0.42,
    memory_bytes=3 * 1024**3,
    eval_step=40,
)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_counter_bar_and_eta_stay_at_any_width(width: int) -> None:
    out, screen = Output(), io.StringIO()
    out.err = Console(file=screen, force_terminal=True, width=width, color_system=None)
    with out.training_progress() as on_step:
        out.training_phase("dry pass", 0, 1200)
        on_step(STATE)
    frames = [line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", screen.getvalue()) if line.strip()]
    assert max(map(len, frames)) <= width
    last = frames[-1].rstrip()
    assert " 60/1200 ETA 17.9 s" in last
    assert last.count("━") >= 6
    shown = {40: [], 80: ["loss 1.8906", "held-out 2.1129 (step 40)"], 200: STATE.text.split(" · ")}[width]
    assert last.split(" · ")[1:] == shown


def test_what_is_at_work_beside_steps_has_its_own_name() -> None:
    out, screen = Output(), io.StringIO()
    out.err = Console(file=screen, force_terminal=True, width=80, color_system=None)
    with out.training_progress():
        out.training_phase("dry pass", 0, 1200)
    assert re.search(r"dry pass ━+ 0/1200 ", screen.getvalue())
    assert not re.search(r"training|\d/1 ", screen.getvalue())
    out.training_phase("too late", 0, 1)  # no display any more
    assert "too late" not in screen.getvalue()


@pytest.mark.parametrize("width", [0, 1, 12, 24, 31])
def test_a_terminal_too_narrow_still_shows_how_far_it_is(width: int) -> None:
    line = fit_progress_line(width, "training", 60, 1200, "ETA 17.9 s", STATE.text)
    assert (line.label, line.text) == ("", " 60/1200 ETA 17.9 s")


def test_a_long_name_is_cut_and_not_left_out() -> None:
    line = fit_progress_line(80, "auditing", 1, 2, "ETA 1.0 s", "データ" * 30)
    assert line.text.endswith("…")
    assert cell_len(line.label + line.text) + line.filled + line.empty <= 80


def test_notes_are_wrapped_between_words_on_a_terminal() -> None:
    out, screen = Output(), io.StringIO()
    out.err = Console(file=screen, force_terminal=True, width=40, color_system=None)
    out.note("dry pass: worst batch 4,096 tokens, 831.0 MiB of RAM (728.6 MiB to 992.7 MiB planned), 1.0 s")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in screen.getvalue().splitlines()]
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines).split()).endswith("831.0 MiB of RAM (728.6 MiB to 992.7 MiB planned), 1.0 s")


def test_the_next_command_is_quoted_and_only_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    Output().next_step(["plan", Path("my run.yaml"), "--set", "a=b c"], ["train", "x.yaml"])
    assert capsys.readouterr().out == "Next: surefit plan 'my run.yaml' --set 'a=b c', or surefit train x.yaml\n"
    Output(as_json=True).next_step(["train", "x.yaml"])
    Output().without_result().next_step(["train", "x.yaml"])
    assert capsys.readouterr().out == ""


def test_only_a_file_is_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    Output().error(ConfigError("no", code="E2017", path="--set", field="train.x"))
    Output().error(ConfigError("no", code="E2018", path="a.yaml", line=3, field="train.x"))
    Output().findings([FINDING | {"path": "--set", "line": None}])
    said = capsys.readouterr()
    assert said.err == "error[E2017] --set train.x: no\na.yaml:3: error[E2018] train.x: no\n"
    assert said.out.startswith("error[SCH001] --set train.warmup_steps: ")


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
    out.segments([(ESCAPES, True, False)])
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
