"""Facts about one run directory, for the verbs of `runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefit.cli.runs.summary import read_or_default
from surefit.core.errors import ConfigError
from surefit.core.rundir import RunDir, read_json


def require_run(path: Path) -> RunDir:
    """Return the run directory at `path`.

    Raises:
        ConfigError: no run is there.
    """
    run = RunDir(path)
    if not run.resolved.exists():
        raise ConfigError(
            "no run is here: there is no resolved.yaml", code="E1040", path=path, help="`surefit runs` lists the runs"
        )
    return run


def read_primary_scores(run: RunDir) -> list[dict[str, Any]]:
    """Return the primary metric of every variant on every set; empty if the scores are missing or damaged."""

    def read() -> list[dict[str, Any]]:
        summary = read_json(run.eval_summary)
        return [
            {"set": name, "variant": variant, "metric": metric, **metrics[metric]}
            for name, scored in summary["sets"].items()
            for metric in (scored.get("primary_metric", summary["primary_metric"]),)
            for variant, metrics in scored["variants"].items()
            if metric in metrics
        ]

    scores: list[dict[str, Any]] = read_or_default(read, []) if run.eval_summary.exists() else []
    return scores


def newest_checkpoint(run: RunDir) -> Path | None:
    """Return the newest checkpoint whose files are complete, judged by their sizes."""
    from surefit.checkpoint.files import find_checkpoint_damage, list_steps

    return next(
        (
            path
            for _, path in reversed(list_steps(run.checkpoints))
            if find_checkpoint_damage(path, hashes=False) is None
        ),
        None,
    )


def training_data_facts(run: RunDir) -> dict[str, Any]:
    """Return the recorded facts about the training rows: from a checkpoint, else from the audit."""
    newest = newest_checkpoint(run)
    identity = read_or_default(lambda: read_json(newest / "trainer.json")["identity"], {}) if newest else {}
    facts = {name: identity[f"data.train: {name}"] for name in ("rows", "content") if f"data.train: {name}" in identity}
    if not facts and run.passport.exists():
        passport = read_or_default(lambda: read_json(run.passport), {})
        facts = {name: passport[name] for name in ("rows", "sha256") if name in passport}
    return facts
