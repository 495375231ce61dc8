"""A run directory as it is after training, merging and scoring, without a model: what trackers are told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefit.core.rundir import RunDir, append_jsonl, write_json

OUTCOMES = ((0.0, 1.0), (1.0, 0.0), (0.5, 0.5))
"""What base and tuned model score on a row: won, lost, the same."""
PROMPT = "<|im_start|>system\nTools<|im_end|>\n<|im_start|>user\nQuestion {number}<|im_end|>\n<|im_start|>assistant\n"


def scored_run(directory: Path, rows: int = 6, telemetry: str = "{}", **changes: str) -> RunDir:
    """Rows are won, lost and the same in turn.

    Args:
        telemetry: the section, as YAML.
        changes: of every line of the tuned model's answers.
    """
    run = RunDir(directory)
    run.create()
    run.adapter.mkdir()
    run.resolved.write_text(
        "recipe: function_calling\nmodel: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl}\n"
        f"output_dir: {directory}\ntelemetry: {telemetry}\n"
    )
    append_jsonl(run.metrics, {"step": 3, "time": 1000.0, "loss": 0.25})
    write_json(run.certificate, certificate())
    write_json(run.eval_summary, summary())
    for at, variant in enumerate(("base", "merged")):
        write_json(run.eval / "eval" / f"{variant}.json", {"recipe": "function_calling", "recipe_version": 1})
        for number in range(rows):
            line = {
                "index": number, "where": f"rows.jsonl:{number + 1}", "gold": f"gold {number}",
                "prompt": PROMPT.format(number=number), "text": f"{variant} says {number}",
                "scores": {"exact_match": OUTCOMES[number % 3][at]}, "truncated": False,
            }  # fmt: skip
            append_jsonl(run.eval / "eval" / f"{variant}.predictions.jsonl", line | (changes if at else {}))
    return run


def certificate(passed: bool = True) -> dict[str, Any]:
    checks = [
        {"name": "reloaded_kl_max", "value": 2e-6, "threshold": 1e-4, "comparison": "<=", "passed": True},
        {"name": "reloaded_argmax_agreement", "value": 1.0, "threshold": 1.0, "comparison": ">=", "passed": True},
        {"name": "files_sha256", "value": "ab" * 32, "threshold": "ab" * 32, "comparison": "==", "passed": True},
    ]
    return {"passed": passed, "reason": "every check passed", "checks": checks}


def summary() -> dict[str, Any]:
    """Two sets that came out the same."""
    return {"primary_metric": "exact_match", "sets": {"eval": _scored(), "old_tools": _scored()}, "gate": None}


def _scored() -> dict[str, Any]:
    pair = {"a": "base", "b": "merged", "metric": "exact_match", "difference": 0.25, "ci95": [0.125, 0.375]}
    variants = {
        "base": {"exact_match": {"mean": 0.5, "ci95": [0.25, 0.75]}},
        "merged": {"exact_match": {"mean": 0.75, "ci95": [0.5, 1.0]}},
    }
    return {"n": 6, "variants": variants, "comparisons": [pair | {"wins": 2, "losses": 2, "ties": 2}]}
