"""`surefit demo`: the whole pipeline on the built-in model, offline, with the figures that matter on one screen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit import samples
from surefit.cli import stages
from surefit.cli.prepare import prepare
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK
from surefit.core.rundir import RunDir, read_json, read_jsonl
from surefit.core.units import duration_text

if TYPE_CHECKING:
    from surefit.cli.render import Output

CONFIG = Path(samples.__file__).parent / "demo.yaml"
OLD = "old_tools"


def demo(out: Output, output_dir: str) -> int:
    """Run every stage of the packaged config and say what came of it."""
    start = time.monotonic()
    out.note(f"config: {CONFIG}")
    run = prepare(CONFIG, [f"output_dir={output_dir}"])
    code = stages.run(out.without_result(), run, resume=False, overwrite=True)
    result = summary(run.run, time.monotonic() - start)
    new, old = result["sets"]["eval"], result["sets"][OLD]
    rows = [
        ["new tools: exact match", *_shares(new), f"{100 * new['gain']:+.1f} points"],
        ["old tools: exact match", *_shares(old), f"{100 * old['gain']:+.1f} points"],
    ]
    out.table("What the built-in model learned", ["", "base", "fine-tuned", "difference"], rows)
    low, high = result["ci95"]
    out.say(
        f"gain on the new tools: {100 * low:+.1f} to {100 * high:+.1f} points (95 % interval, {result['n']} prompts)"
    )
    out.say(f"certificate: {'passed' if result['certificate'] else 'FAILED'} · {result['steps']} optimizer steps · "
            f"{duration_text(result['seconds'])}")  # fmt: skip
    out.say(f"the page that explains it: {run.run.report}", "bold")
    out.result(result)
    return EXIT_OK if code == EXIT_OK and result["certificate"] else EXIT_FINDINGS


def summary(run: RunDir, seconds: float) -> dict[str, Any]:
    """The object that `surefit demo --json` ends with; shares are in [0, 1]."""
    scored = read_json(run.eval_summary)
    metric = scored["primary_metric"]
    sets = {}
    for name, found in scored["sets"].items():
        pair = next(p for p in found["comparisons"] if (p["a"], p["b"], p["metric"]) == ("base", "merged", metric))
        sets[name] = {
            "base": found["variants"]["base"][metric]["mean"],
            "tuned": found["variants"]["merged"][metric]["mean"],
            "gain": pair["difference"],
            "ci95": pair["ci95"],
            "n": found["n"],
        }
    steps = [line["step"] for line in read_jsonl(run.metrics) if "loss" in line]
    return {
        **sets["eval"],
        "metric": metric,
        "steps": max(steps),
        "seconds": round(seconds, 1),
        "certificate": read_json(run.certificate)["passed"],
        "report": str(run.report),
        "sets": sets,
    }


def _shares(scored: dict[str, Any]) -> list[str]:
    return [f"{100 * scored[name]:.1f} %" for name in ("base", "tuned")]
