"""Gates and intervals that know how little they know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scored_run import scored_run
from typer.testing import CliRunner

from surefit import recipes
from surefit.cli import evaluate as shown
from surefit.cli.app import app
from surefit.cli.render import Output
from surefit.cli.runs.summary import summarize_run as state_of
from surefit.config.schema import GateSection
from surefit.core.rundir import append_jsonl, read_jsonl
from surefit.evaluate import stats
from surefit.evaluate.gate import evaluate_gate
from surefit.evaluate.paired import paired_differences
from surefit.evaluate.stats import aggregate_intervals, paired_aggregates
from surefit.evaluate.summary import summarize_evaluation

Rows = list[dict[str, float]]


def call(*command: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, [*map(str, command), "--json"])
    return result.exit_code, json.loads(result.stdout.strip().splitlines()[-1])


def scored(*right: int) -> Rows:
    return [{"exact_match": float(value)} for value in right]


def verdict(base: Rows, tuned: Rows, **gate: Any) -> dict[str, Any]:
    section = GateSection(**({"not_worse_than": "base"} | gate))
    return evaluate_gate(section, recipes.get_recipe("chat"), {"base": base, "merged": tuned}, None)


@pytest.mark.parametrize(
    ("base", "tuned", "gate", "outcome"),
    [
        pytest.param([0] * 4, [0] * 4, {}, "cannot tell", id="TA5-four rows, both at zero"),
        pytest.param([1] * 5 + [0] * 5, [1] + [0] * 9, {}, "cannot tell", id="TA5-40 points lost on ten rows"),
        pytest.param([1] * 4, [1] * 4, {}, "cannot tell", id="TA5-four rows, both at one"),
        pytest.param([0] * 52, [0] * 52, {}, "cannot tell", id="TA5-52 ties"),
        pytest.param([0] * 54, [0] * 54, {}, "passed", id="TA5-54 ties rule out 5 points"),
        pytest.param([0] * 54, [0] * 54, {"margin": 0.02}, "cannot tell", id="TA5-but not 2"),
        pytest.param([0] * 10, [1] * 10, {}, "passed", id="TA5-ten rows are enough for ten points won"),
        pytest.param([1] * 50 + [0] * 50, [0] * 100, {}, "failed", id="TA5-surely worse"),
        pytest.param([1] * 50 + [0] * 50, [0] * 100, {"margin": 1}, "passed", id="TA5-a margin of 100 points"),
        pytest.param(
            [1] * 500 + [0] * 4500, [1] * 460 + [0] * 4540, {}, "passed", id="TA5-worse by less than the margin"
        ),
        pytest.param([1] * 500 + [0] * 4500, [1] * 460 + [0] * 4540, {"margin": 0.0}, "failed", id="TA5-no margin"),
        pytest.param([0] * 4, [1] * 4, {"not_worse_than": None, "min": 0.8}, "cannot tell", id="TA5-min on four rows"),
        pytest.param([0] * 90, [1] * 90, {"not_worse_than": None, "min": 0.8}, "passed", id="TA5-min on ninety"),
        pytest.param([0] * 4, [0] * 4, {"not_worse_than": None, "min": 0.8}, "failed", id="TA5-below min"),
        pytest.param([0] * 60, [1] * 60, {"min": 0.999, "margin": 0.01}, "cannot tell", id="TA5-min decides, too"),
    ],
)  # fmt: skip
def test_the_outcome(base: list[int], tuned: list[int], gate: dict[str, Any], outcome: str) -> None:
    found = verdict(scored(*base), scored(*tuned), **gate)
    assert (found["outcome"], found["passed"]) == (outcome, outcome == "passed")


def test_a_gate_that_cannot_tell_says_what_it_does_not_rule_out() -> None:
    reason = verdict(scored(*[1] * 5, *[0] * 5), scored(1, *[0] * 9))["reason"]
    assert " 5 points" in reason
    assert "about" not in reason, "more rows that differ as these do show a loss"


@pytest.mark.parametrize("both", [0.0, 1.0], ids=["TA5-tasks at zero", "TA5-tasks at one"])
def test_each_task_of_a_run_of_several_has_to_be_told(both: float) -> None:
    recipe = recipes.get_recipe("math_reasoning+code_generation")
    names = {part.name: part.primary_metric for part in recipe.parts.values()}
    rows = [{f"{name}.{metric}": both} for name, metric in names.items() for _ in range(4 if "code" in name else 1)]
    found = evaluate_gate(GateSection(not_worse_than="base"), recipe, {"base": rows, "merged": rows}, None)
    assert found["outcome"] == "cannot tell"


@pytest.mark.parametrize(
    ("right", "code"), [([0] * 4, 5), ([1] * 60, 0), ([0] * 60, 1)], ids=["TA5-exit 5", "TA5-exit 0", "TA5-exit 1"]
)
def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: list[int], code: int) -> None:
    base = [1] * 60 if code == 1 else [0] * len(right)
    run = scored_run(tmp_path / "run")
    sets = {"eval": {"base": scored(*base), "merged": scored(*right)}}
    summary = summarize_evaluation(recipes.get_recipe("chat"), GateSection(not_worse_than="base"), sets, [])
    monkeypatch.setattr("surefit.stages.evaluating.evaluate_run", lambda *given: summary)
    prepared: Any = type("Run", (), {"run": run})
    assert shown.evaluate_and_show(Output(as_json=True), prepared, None) == code


@pytest.mark.slow
def test_a_run_whose_gate_cannot_tell_still_has_its_page(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} and {n}?", "completion": f"It is {2 * n}."} for n in range(24)]
    for name, part in (("rows", rows[:20]), ("held", rows[20:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (tmp_path / "run.yaml").write_text(
        "recipe: chat\nmodel: {name_or_path: surefit/nano}\n"
        "data: {train: rows.jsonl, eval: held.jsonl, max_length: 64}\n"
        "train: {max_steps: 2, global_batch_size: 4, per_device_train_batch_size: 2}\nhardware: {gpu: cpu}\n"
        "evaluate: {max_new_tokens: 4, gate: {not_worse_than: base}}\noutput_dir: runs/a\n"
    )
    code, said = call("run", "run.yaml")
    assert (code, said["scores"]["gate"]["outcome"]) == (5, "cannot tell")
    assert (tmp_path / "runs/a/report.html").is_file()


@pytest.mark.parametrize(
    "mistyped",
    [
        ["--set", "recipe=math_reasoning"], ["--set", "data.eval=other.jsonl"], ["--variant", "step-99"],
        ["--set", "evaluate.gate={not_worse_than: bse}"],
    ],
    ids=["TA11-recipe", "TA11-columns", "TA11-variant", "TA11-gate"],
)  # fmt: skip
def test_a_mistyped_evaluation_leaves_the_state_of_a_run(tmp_path: Path, mistyped: list[str]) -> None:
    rows = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other.jsonl").write_text('{"column": 1}\n')
    run = scored_run(tmp_path / "run")
    run.resolved.write_text(run.resolved.read_text().replace("function_calling", "chat"))
    for stage in ("train", "evaluate"):
        for event in ("started", "finished"):
            append_jsonl(run.events, {"time": 1.0, "stage": stage, "event": event})
    before = state_of(run)["state_text"]
    code, _ = call("evaluate", run.path, *mistyped)
    assert (code, state_of(run)["state_text"]) == (2, before) == (2, "evaluate finished")
    assert not [event for event in read_jsonl(run.events) if event["event"] == "failed"]


GRAPH = "# ::id {id}\n# ::snt Row {id}.\n(w / want-01 :ARG0 (b / boy) :ARG1 (g / go-02))\n\n"


@pytest.mark.parametrize(
    ("answer", "mean"),
    [
        ("no graph", 0.0), ("(z / zebra :quant 7 :mod (y / yak))", 0.182),
        ("(w / want-01 :ARG0 (b / boy) :ARG1 (g / go-02))", 1.0),
    ],
    ids=["TA12-all wrong", "TA12-all equally near", "TA12-all right"],
)  # fmt: skip
def test_four_graphs_do_not_give_an_interval_of_no_width(tmp_path: Path, answer: str, mean: float) -> None:
    (tmp_path / "gold.txt").write_text("".join(GRAPH.format(id=n) for n in range(4)))
    (tmp_path / "pred.jsonl").write_text("".join(json.dumps({"text": answer}) + "\n" for _ in range(4)))
    command = ["score", "--recipe", "amr_parsing", "--predictions", "pred.jsonl", "--references", "gold.txt"]
    code, said = call(*command)
    found = said["metrics"]["smatch"]
    unseen = 3.8415 / (4 + 3.8415)  # Wilson's upper limit for a value that 4 rows do not show
    assert (code, found["mean"]) == (0, pytest.approx(mean, abs=0.001))
    assert found["ci95"] == pytest.approx([mean * (1 - unseen), mean + (1 - mean) * unseen], abs=0.001)


def test_equal_scores_of_two_models_are_not_surely_equal() -> None:
    found = paired_differences("a", "b", scored(1, 1, 1, 1), scored(1, 1, 1, 1), recipes.get_recipe("chat"))[
        "exact_match"
    ]
    assert (found.low, found.high) == pytest.approx((-0.462, 0.462), abs=0.001)


def micro(rows: Any) -> dict[str, float]:
    return {"f": sum(row["m"] for row in rows) / sum(row["s"] for row in rows)}


def graphs(rng: np.random.Generator, n: int, right: float) -> Rows:
    """Graphs of 4 to 12 triples: whole with probability `right`, else up to four fifths of each."""
    sizes = rng.integers(4, 13, n).astype(float)
    matched = np.where(rng.random(n) < right, sizes, sizes * rng.random(n) * 0.8)
    return [{"m": m, "s": s} for m, s in zip(matched, sizes, strict=True)]


@pytest.mark.parametrize(("n", "right"), [(3, 0.9), (4, 0.97), (8, 0.9), (20, 0.97), (8, 0.5)])
def test_intervals_of_few_corpus_scores_hold_the_truth(monkeypatch: pytest.MonkeyPatch, n: int, right: float) -> None:
    """Plain resampling holds it in 8 % (4 rows, 97 %: 15 %) to 56 % of such tests, and in 92 % of the last."""
    monkeypatch.setattr(stats, "AGGREGATE_RESAMPLES", 200)
    rng, truth = np.random.default_rng(5), right + (1 - right) * 0.4
    found = [aggregate_intervals(graphs(rng, n, right), micro)["f"] for _ in range(200)]
    assert sum(low <= truth <= high for low, high in found) / 200 >= 0.935
    if n == 20:
        assert np.mean([high - low for low, high in found]) < 0.2


@pytest.mark.parametrize("shape", ["corpus", "mean"])
def test_intervals_of_differences_of_few_rows_hold_the_truth(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Rows that nearly all tie: 3 % lose everything. Plain resampling sees no difference in most tests."""
    monkeypatch.setattr(stats, "RESAMPLES", 500)
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        before, lost = graphs(rng, 12, 0.5), rng.random(12) < 0.03
        after = [{"m": row["m"] * (not gone), "s": row["s"]} for row, gone in zip(before, lost, strict=True)]
        if shape == "corpus":
            _, low, high = paired_aggregates(before, after, micro)["f"]
        else:
            values = [[row["m"] / row["s"] for row in rows] for rows in (before, after)]
            pair = stats.paired_bootstrap(*values)
            low, high = pair.low, pair.high
        held += low <= -0.03 * 0.7 <= high
    assert held / 200 >= 0.935
