"""What `surefit evaluate` says: free and constrained side by side, gains in words, rows that were won and lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.cli.checkpoint_scores import say_checkpoints
from surefit.cli.evaluate import _say_rows, say_scores
from surefit.cli.render import Output
from surefit.core.rundir import RunDir, write_json
from surefit.evaluate.summary import summarize_evaluation
from surefit.recipes.function_calling import RECIPE

RIGHT = {
    "baseline:nothing": [0, 0, 0, 0],
    "base": [0, 1, 0, 0],
    "base+grammar": [0, 1, 0, 1],
    "merged": [1, 0, 1, 1],
    "merged+grammar": [1, 1, 1, 1],
}


@pytest.fixture
def scored(tmp_path: Path) -> tuple[RunDir, dict[str, Any]]:
    run = RunDir(tmp_path)
    rows = {v: [{"exact_match": float(x), "_count": 3.0, "ast": float(x)} for x in xs] for v, xs in RIGHT.items()}
    for variant, scores in rows.items():
        about = {"truncated": 1, "unparsed": 2, "tokens_per_second": None if "baseline" in variant else 81.4}
        write_json(run.eval / "eval" / f"{variant}.json", about)
        lines = [
            {"index": i, "where": f"eval.jsonl:{i + 1}", "prompt": f"ask {i}", "gold": "[]", "text": f"say {variant}",
             "truncated": False, "parsed": [], "scores": one}
            for i, one in enumerate(scores)
        ]  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.eval / "eval" / f"{variant}.predictions.jsonl").write_text(text)
    return run, summarize_evaluation(RECIPE, None, {"eval": rows}, [])


def test_the_table_puts_the_grammar_beside(scored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, summary = scored
    say_scores(Output(), summary, run)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "eval: 4 rows, exact_match with 95 % intervals"
    assert lines[1] == "model exact_match with grammar cut off unparsed tokens/s"
    assert lines[2].startswith("baseline:nothing 0.000 [")
    assert lines[2].endswith("] - 1 2 -")
    assert lines[3].startswith("base 0.250 [")
    assert "0.500 [" in lines[3]
    assert lines[3].endswith("1 | 1 2 | 2 81 | 81")
    assert [line.split()[0] for line in lines[2:5]] == ["baseline:nothing", "base", "merged"]
    assert not any("_count" in line for line in lines)


def test_gains_are_said_in_words(scored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, summary = scored
    say_scores(Output(), summary, run)
    said = [line for line in capsys.readouterr().out.splitlines() if "; rows: " in line]
    assert sorted(" ".join(line.split(":")[0].split()) for line in said) == [
        "base+grammar does not differ significantly from base",
        "merged does not differ significantly from base",
        "merged does not differ significantly from baseline",
        "merged+grammar does not differ significantly from base+grammar",
        "merged+grammar does not differ significantly from merged",
    ]
    assert any(line.endswith("rows: 3 won, 1 lost, 0 tied") for line in said), said


def test_what_the_loss_shows_beside_a_metric_that_does_not_move(
    scored: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run, summary = scored
    other = {"a": "base", "outcome": "better", "headline": "", "loss_text": ""}
    effects = [
        other | {"b": "merged", "metric_text": "No clear change", "sentence": "No clear change; merged fits"},
    ]
    fit = {"decides": False, "reason": "", "losses": {"base": 2.0, "merged": 1.0}, "effects": effects}
    summary["sets"]["eval"]["fit"] = fit | {"show_more": ["more steps (why)", "more rows to score (how many)"]}
    say_scores(Output(), summary, run)
    said = capsys.readouterr()
    assert "No clear change; merged fits" in said.out
    assert "merged does not differ significantly from base:" not in said.out
    assert "merged+grammar does not differ significantly from base+grammar" in " ".join(said.out.split())
    told = " ".join((said.out + said.err).split())
    assert "what would show more: more steps (why); more rows to score (how many)" in told


def test_rows_won_and_lost(scored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, summary = scored
    _say_rows(Output(), run, "eval", summary, 2)
    said = capsys.readouterr().out
    assert "eval: 3 rows won by merged against base" in said
    assert "eval: 1 row lost by merged against base" in said
    assert [line for line in said.splitlines() if line.startswith("eval.jsonl")] == [
        "eval.jsonl:1", "eval.jsonl:3", "eval.jsonl:2",
    ]  # fmt: skip
    assert "  merged, 1: say merged" in said


def test_the_checkpoints_as_a_table_and_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [
        {"variant": f"step-{n}", "mean": n / 100, "ci95": [0.0, 0.5], "truncated": 1_200, "unparsed": n,
         "there": n > 10}
        for n in (10, 20)
    ]  # fmt: skip
    lead = {"variant": "step-10", "difference": 0.1, "interval": [0.02, 0.18], "more_than_chance": True}
    best = {"variant": "step-20", "confidence": 0.95, "over": [lead]}
    found = {"set": "eval", "n": 40, "metric": "exact_match", "checkpoints": points, "base": None, "best": best}
    say_checkpoints(Output(), found | {"left_out": [], "passed_over": ["step-5: gone"]}, RunDir(tmp_path))
    said = capsys.readouterr()
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert lines[0] == "eval: 40 rows, exact_match with 95 % intervals"
    assert lines[2] == "step-10 (deleted) 0.100 [0.000, 0.500] 1,200 10 +10.0 [+2.0, +18.0]"
    assert lines[3] == "step-20 0.200 [0.000, 0.500] 1,200 20 best"
    assert lines[4] == "step-20 is the best of 2, by a significant margin (1 comparison, intervals of 95 %)"
    assert "passed over: step-5: gone" in said.err


@pytest.mark.slow
def test_the_base_alone_is_scored_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        "recipe: function_calling\nmodel: {name_or_path: surefit/nano}\noutput_dir: runs/r\n"
        "data: {train: surefit/function-calling-train, eval: surefit/function-calling-eval}\n"
        "evaluate: {max_examples: 4, max_new_tokens: 8, gate: {not_worse_than: base}}\n"
    )
    found = CliRunner().invoke(app, ["evaluate", "run.yaml", "--variant", "base", "--json"])
    assert found.exit_code == 0, found.output
    scored = json.loads(found.stdout.splitlines()[-1])
    assert list(scored["sets"]["eval"]["variants"]) == ["base"]
    assert scored["gate"] is None
    refused = CliRunner().invoke(app, ["evaluate", "run.yaml"])
    assert refused.exit_code == 2
    assert CliRunner().invoke(app, ["train", "run.yaml", "--dry-run", "--set", "train.max_steps=1"]).exit_code == 0
