"""Weights & Biases: files below the run directory that `wandb sync` uploads, or its server directly. It never
prompts."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from surefit.core.rundir import RunDir, read_jsonl
from surefit.telemetry.ids import read_tracker_run_id, save_tracker_run_id
from surefit.telemetry.numbers import numbers_of

PATIENCE = 8.0
"""Maximum seconds for the remaining upload at the end: less than the fan-out waits for all sinks."""


class WeightsAndBiases:
    """A sink for Weights & Biases.

    Args:
        mode: offline needs no login and no network.
        project: created if it does not exist.
        run: the run directory.
    """

    def __init__(self, mode: Literal["offline", "online"], project: str, run: RunDir) -> None:
        self.mode, self.project, self.run = mode, project, run
        self._run: Any = None

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Begin a run, or continue the one that the run directory records."""
        self._run = self._opened(params)
        # By SureFit's step: a resumed run repeats steps, and W&B's own step only grows.
        self._run.define_metric("*", step_metric="step")

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Hand the numbers to W&B's process, which writes or uploads them."""
        for record in records:
            self._run.log({"step": record["step"], **numbers_of(record)})

    def finish(self, status: str) -> None:
        """Close the run; one that did not finish is marked as crashed."""
        self._run.finish(exit_code=0 if status == "finished" else 1)

    def conclude(
        self, numbers: Mapping[str, float], files: Sequence[Path], examples: Sequence[Mapping[str, str]]
    ) -> None:
        """Put numbers and table into the run's summary, and copies of the files beside it."""
        import wandb

        run = self._opened({})
        try:
            # Offline, W&B's process does not read earlier files, and their summaries replace each other.
            run.summary.update({**(self._newest() if self.mode == "offline" else {}), **numbers})
            if examples:
                rows = [list(row.values()) for row in examples]
                run.summary.update({"examples": wandb.Table(columns=list(examples[0]), data=rows)})
            for path in files:
                copy = Path(run.dir) / path.relative_to(self.run.path)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
                run.save(str(copy), base_path=run.dir, policy="now")
        finally:
            run.finish(exit_code=0)

    def _newest(self) -> dict[str, float]:
        """Return the last number of every name that training has logged."""
        return {key: value for line in read_jsonl(self.run.metrics) for key, value in numbers_of(line).items()}

    def _opened(self, params: Mapping[str, Any]) -> Any:
        import wandb

        name = read_tracker_run_id(self.run, "wandb") or uuid.uuid4().hex[:8]
        save_tracker_run_id(self.run, "wandb", name)
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, disable_job_creation=True,
            finish_timeout=PATIENCE, finish_timeout_raises=True, init_timeout=PATIENCE, login_timeout=PATIENCE,
        )  # fmt: skip
        return wandb.init(
            project=self.project, id=name, resume="allow" if self.mode == "online" else None, mode=self.mode,
            name=self.run.path.resolve().name, dir=str(self.run.path.resolve()), config=dict(params), settings=settings,
        )  # fmt: skip
