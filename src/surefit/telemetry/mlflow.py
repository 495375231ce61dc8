"""MLflow: one run of its own per run directory, across resumes, with settings, numbers and what explains them.

A server that is away costs nothing: the fan-out offers the same lines again, and MLflow takes a number only once, by
its step and time. https://mlflow.org/docs/latest/rest-api.html has the limits that the lines are cut to.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surefit import __version__
from surefit.core.rundir import RunDir
from surefit.telemetry.ids import remember, remembered
from surefit.telemetry.numbers import numbers_of

METRICS_AT_ONCE, PARAMS_AT_ONCE, TAGS_AT_ONCE = 1_000, 100, 100
LONGEST_PARAM, LONGEST_TAG = 6_000, 5_000
SYSTEM_EVERY = 10.0
"""Seconds between two samples of the machine."""
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
DATASET = "data.train: content"
"""The setting that is the SHA-256 of the training rows (train/identity.py)."""


class MLflow:
    """A sink for an MLflow tracking server.

    Args:
        uri: of the server, or of a database.
        experiment: made where it is not there.
        run: the run directory.
    """

    def __init__(self, uri: str, experiment: str, run: RunDir) -> None:
        logging.getLogger("mlflow").setLevel(logging.ERROR)  # it would say at every try that a server is down
        self.uri, self.experiment, self.run = uri, experiment, run
        self.id: str | None = None
        self._client: Any = None
        self._system: Any = None
        self._was_away = False

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Make a run, or go on with the one that the run directory remembers."""
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self.uri)
        self.id = self.id or self._known() or self._made()
        remember(self.run, "mlflow", self.id)
        self._client.update_run(self.id, status="RUNNING")
        self._describe({_plain(key): str(value)[:LONGEST_PARAM] for key, value in params.items()}, params)
        self._watch_the_machine()

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Send the numbers, all at once."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_plain(key), value, int(record["time"] * 1000), record["step"])
            for record in records
            for key, value in numbers_of(record).items()
        ]
        try:
            for part in _parts(metrics, METRICS_AT_ONCE):
                self._client.log_batch(self.id, metrics=part)
        except Exception:
            self._was_away = True
            raise
        if self._was_away:
            self._was_away = False
            self._watch_the_machine()

    def finish(self, status: str) -> None:
        """Send what explains the run (no weights), and say how it ended."""
        try:
            if self._system is not None:
                self._system.finish()
            for path in _artefacts(self.run):
                self._client.log_artifact(self.id, str(path))
        finally:
            self._client.set_terminated(self.id, STATUS[status])

    def _known(self) -> str | None:
        """The remembered run, unless this server does not have it, or somebody deleted it there."""
        from mlflow.exceptions import MlflowException

        name = remembered(self.run, "mlflow")
        if name is None:
            return None
        try:
            found = self._client.get_run(name)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return name if found.info.lifecycle_stage == "active" else None

    def _made(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self.experiment)
        run = self._client.create_run(experiment, run_name=self.run.path.resolve().name)
        return str(run.info.run_id)

    def _describe(self, texts: Mapping[str, str], params: Mapping[str, Any]) -> None:
        """Settings are written once in MLflow: what a resumed run changes becomes a tag."""
        from mlflow.entities import Param, RunTag

        before = self._client.get_run(self.id).data.params
        new = [Param(key, text) for key, text in texts.items() if key not in before]
        for part in _parts(new, PARAMS_AT_ONCE):
            self._client.log_batch(self.id, params=part)
        tags = {f"resumed.{key}": text for key, text in texts.items() if before.get(key, text) != text}
        tags |= {"surefit.version": __version__, "dataset.sha256": str(params.get(DATASET, ""))}
        listed = [RunTag(key, text[:LONGEST_TAG]) for key, text in tags.items() if text]
        for part in _parts(listed, TAGS_AT_ONCE):
            self._client.log_batch(self.id, tags=part)

    def _watch_the_machine(self) -> None:
        """MLflow's own system metrics, where psutil is there; their thread gives up when the server is away."""
        if importlib.util.find_spec("psutil") is None:
            return
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        if self._system is not None:
            self._system.finish()
        self._system = SystemMetricsMonitor(
            self.id, sampling_interval=SYSTEM_EVERY, resume_logging=True, tracking_uri=self.uri
        )
        self._system.start()


def _artefacts(run: RunDir) -> Iterator[Any]:
    for path in (run.resolved, run.plan, run.check, run.environment, run.batch_audit, run.dry_pass, run.report):
        if path.exists():
            yield path


def _plain(key: str) -> str:
    """A name as every MLflow server takes it."""
    return re.sub(r"[^\w\-. /]", "_", key)


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))
