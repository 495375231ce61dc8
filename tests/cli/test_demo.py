"""The demo is the shipped config on a stricter held-out set, and its summary says what the run's files say."""

from __future__ import annotations

from pathlib import Path

from surefit.cli.demo import CONFIG, summary
from surefit.config.load import load_config
from surefit.config.resolve import leaves
from surefit.core.rundir import RunDir, append_jsonl, write_json

SHIPPED = Path(__file__).parents[2] / "configs/function-calling-nano.yaml"


def test_the_demo_differs_from_the_shipped_config_in_nothing_else() -> None:
    demo, shipped = dict(leaves(load_config(CONFIG).config)), dict(leaves(load_config(SHIPPED).config))
    assert {key for key in demo | shipped if demo.get(key) != shipped.get(key)} == {"data.eval", "output_dir"}
    assert demo["train.max_steps"] <= 500


def test_summary(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    pair = {"a": "base", "b": "merged", "metric": "exact_match", "difference": 0.8, "ci95": [0.75, 0.85]}
    scored = {
        "n": 300,
        "variants": {"base": {"exact_match": {"mean": 0.1}}, "merged": {"exact_match": {"mean": 0.9}}},
        "comparisons": [{**pair, "metric": "ast", "difference": 0.1}, pair],
    }
    write_json(run.eval_summary, {"primary_metric": "exact_match", "sets": {"eval": scored, "old_tools": scored}})
    write_json(run.certificate, {"passed": True})
    for step in (1, 2, 3):
        append_jsonl(run.metrics, {"step": step, "loss": 1.0})
    append_jsonl(run.metrics, {"step": 3, "eval_loss": 1.0})
    result = summary(run, 12.34)
    expected = {"base": 0.1, "tuned": 0.9, "gain": 0.8, "ci95": [0.75, 0.85], "n": 300, "steps": 3, "seconds": 12.3}
    assert {key: result[key] for key in expected} == expected
    assert result["certificate"] is True
