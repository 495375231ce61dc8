"""The page that compares runs: what differs, paired scores, refusals."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.core.errors import ConfigError
from surefit.core.rundir import RunDir, write_json
from surefit.report.comparison import build_comparison, comparison_page
from surefit.task import mean_scores

MAKE = runpy.run_path(str(Path(__file__).with_name("make_run.py")))


def recipe_of(name: str) -> Any:
    return SimpleNamespace(name=name, primary_metric="ast_accuracy", aggregate=mean_scores, parts={}, free_text=False)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    made: RunDir = MAKE["write_run"](tmp_path_factory.mktemp("runs") / "one", steps=20)
    return made


@pytest.fixture
def second(first: RunDir, tmp_path: Path) -> RunDir:
    """The same run with another rank, where the tuned model lost 30 of the rows it had right."""
    run = RunDir(Path(shutil.copytree(first.path, tmp_path / "two")))
    run.resolved.write_text(run.resolved.read_text().replace("  r: 16 ", "  r: 4 "))
    path = run.eval / "eval" / "merged.predictions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    right = [line for line in lines if line["scores"]["ast_accuracy"] == 1.0]
    for line in right[:30]:
        line["scores"]["ast_accuracy"] = 0.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_it_says_what_differs_and_how_sure_it_is(first: RunDir, second: RunDir, tmp_path: Path) -> None:
    page = comparison_page([first, second], tmp_path, recipe_of)
    assert page.differences == [("lora.r", ["16", "4"])]
    assert page.same == 38
    eval_rows = next(found for found in page.paired if found.set == "eval")
    name, difference, _, wins, losses, ties = eval_rows.metrics[0]
    assert (name, difference, wins, losses, ties) == ("ast accuracy", "\N{MINUS SIGN}15.0\xa0points", 0, 30, 170)
    assert eval_rows.tone == "bad"
    assert page.headline == "one is the best of these runs"
    assert [chart.name for chart in page.charts] == [
        "loss", "held_out", "learning_rate", "grad_norm", "tokens_per_second", "memory",
    ]  # fmt: skip
    assert [curve.label for curve in page.charts[0].curves] == ["one", "two"]
    assert len({curve.colour for curve in page.charts[0].curves}) == 2


def test_examples_and_commands_follow_the_comparison(first: RunDir, second: RunDir, tmp_path: Path) -> None:
    page = comparison_page([first, second], tmp_path, recipe_of)
    assert [example.kind for _, example in page.samples] == ["lost"] * 4 + ["wrong"]
    assert (page.samples[0][0].base, page.samples[0][0].tuned) == ("one", "two")
    where = "runs/function-calling-nano"
    assert [command for _, command in page.next_steps] == [
        f"surefit compare {where} {where}",
        f"surefit run {where}/resolved.yaml --set train.seed=1 --set output_dir={where}-seed-1\n"
        f"surefit report {where} {where}-seed-1",
    ]
    better = comparison_page([second, first], tmp_path, recipe_of)
    assert [example.kind for _, example in better.samples] == ["wrong", "wrong", "won", "won", "won"]
    assert [command for _, command in better.next_steps][1:] == [
        f"surefit chat {where} --compare",
        f"surefit export {where}",
    ]


def test_the_difference_is_stated_once_before_anything_is_unfolded(
    first: RunDir, second: RunDir, tmp_path: Path
) -> None:
    html = build_comparison([first, second], tmp_path / "compare.html", recipe_of).read_text().replace("\xa0", " ")
    opening, folded = html.split('class="fold"', 1)
    assert opening.count("15.0 points") == 1
    assert folded.count("15.0 points") > 1
    for section in ("differences", "runs", "scores"):
        assert f'<section aria-labelledby="{section}" class="fold">\n<details>' in html
    assert "Free on the disk, GiB: " in html  # a sentence in the place of a chart that would show nothing


def test_the_other_order_names_the_better_run(first: RunDir, second: RunDir, tmp_path: Path) -> None:
    page = comparison_page([second, first], tmp_path, recipe_of)
    assert (page.tone, page.headline) == ("good", "one is better than two")


def test_other_rows_are_not_compared_and_said_why(first: RunDir, second: RunDir, tmp_path: Path) -> None:
    path = second.eval / "eval" / "merged.predictions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:150]))
    page = comparison_page([first, second], tmp_path, recipe_of)
    assert page.headline == "The scores of these runs cannot be compared"
    assert "they answered different rows" in page.sentences[0]


def test_another_judge_is_not_compared(first: RunDir, second: RunDir, tmp_path: Path) -> None:
    for path in (second.eval / "eval").glob("*.json"):
        write_json(path, json.loads(path.read_text()) | {"recipe_version": 2})
    page = comparison_page([first, second], tmp_path, recipe_of)
    assert "function_calling version 1 and by function_calling version 2" in page.sentences[0]


def test_a_setting_an_older_version_did_not_have_is_no_difference(
    first: RunDir, second: RunDir, tmp_path: Path
) -> None:
    second.resolved.write_text(second.resolved.read_text() + "new: 1  # default\nchosen: 2  # --set\n")
    keys = [key for key, _ in comparison_page([first, second], tmp_path, recipe_of).differences]
    assert keys == ["lora.r", "chosen"]


def test_runs_of_one_name_are_told_apart(first: RunDir, tmp_path: Path) -> None:
    twin = RunDir(Path(shutil.copytree(first.path, tmp_path / "other" / "one")))
    names = [run.name for run in comparison_page([first, twin], tmp_path, recipe_of).runs]
    assert names == [f"{first.path.parent.name}/one", "other/one"]


def test_the_page_is_one_file_that_loads_nothing(first: RunDir, second: RunDir, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    write_json(second.certificate, {"passed": True, "reason": hostile})
    second.resolved.write_text(second.resolved.read_text() + f"extra: '{hostile}'  # --set\n")
    html = build_comparison([first, second], tmp_path / "compare.html", recipe_of).read_text()
    assert hostile not in html
    assert "&lt;img src=x" in html
    assert "default-src &#39;none&#39;" in html
    assert len(html) < 400_000


def test_an_empty_run_beside_a_full_one(first: RunDir, tmp_path: Path) -> None:
    empty = RunDir(tmp_path / "empty")
    empty.create()
    page = comparison_page([first, empty], tmp_path, recipe_of)
    assert page.paired == []
    assert build_comparison([first, empty], tmp_path / "c.html", recipe_of).exists()


def test_too_few_too_many_and_twice_the_same_are_refused(first: RunDir, tmp_path: Path) -> None:
    others = [RunDir(tmp_path / str(number)) for number in range(9)]
    for runs, message in (([first], "1 runs"), (others, "9 runs"), ([first, first], "with itself")):
        with pytest.raises(ConfigError, match=message):
            build_comparison(runs, tmp_path / "c.html", recipe_of)


def test_output_is_for_several_runs(first: RunDir, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(first.path), "-o", str(tmp_path / "x.html")])
    assert (result.exit_code, "E1038" in result.stderr) == (2, True)
