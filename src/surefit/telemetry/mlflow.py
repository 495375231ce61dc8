"""MLflow: one MLflow run per run directory, across resumes, with settings, numbers and the artefacts that explain them.

A server that is down costs nothing: the fan-out offers the same lines again, and MLflow stores a number only once, by
its step and time. https://mlflow.org/docs/latest/rest-api.html has the limits that the lines are cut to.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefit import __version__
from surefit.core.rundir import RunDir
from surefit.telemetry.ids import read_tracker_run_id, save_tracker_run_id
from surefit.telemetry.numbers import FINAL_STEP, numbers_of

METRICS_AT_ONCE, PARAMS_AT_ONCE, TAGS_AT_ONCE = 1_000, 100, 100
LONGEST_PARAM, LONGEST_TAG = 6_000, 5_000
SYSTEM_EVERY = 10.0
"""Seconds between two samples of the system metrics."""
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
EXAMPLES, TABLES = "examples.json", "mlflow.loggedArtifacts"
"""The table of examples, and the tag by which MLflow's UI finds its tables."""
DATASET = "data.train: content"
"""The setting that is the SHA-256 of the training rows (train/identity.py)."""


class MLflow:
    """A sink for an MLflow tracking server.

    Args:
        uri: of the server, or of a database.
        experiment: created if it does not exist.
        run: the run directory.
    """

    def __init__(self, uri: str, experiment: str, run: RunDir) -> None:
        logging.getLogger("mlflow").setLevel(logging.ERROR)  # it would log at every attempt that a server is down
        self.uri, self.experiment, self.run = uri, experiment, run
        self.id: str | None = None
        self._client: Any = None
        self._system: Any = None
        self._was_away = False

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Create a run, or continue the one that the run directory records."""
        self._connect()
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
        """Upload the artefacts that explain the run (no weights), and set its final status."""
        try:
            if self._system is not None:
                self._system.finish()
            for path in _artefacts(self.run):
                self._client.log_artifact(self.id, str(path))
        finally:
            self._client.set_terminated(self.id, STATUS[status])

    def conclude(
        self, numbers: Mapping[str, float], files: Sequence[Path], examples: Sequence[Mapping[str, str]]
    ) -> None:
        """Send the new numbers, and replace the files and the table.

        If training has not logged here, also upload the artefacts that explain the run.
        """
        created = self._connect()
        try:
            run_data = self._client.get_run(self.id).data
            self._send_final({_plain(key): value for key, value in numbers.items()}, run_data.metrics)
            for path in (*files, *(_artefacts(self.run) if created else ())):
                folder = path.relative_to(self.run.path).parent.as_posix()
                self._client.log_artifact(self.id, str(path), None if folder == "." else folder)
            if examples:
                self._send_table(examples, run_data.tags.get(TABLES))
        finally:
            if created:
                self._client.set_terminated(self.id, STATUS["finished"])

    def _send_final(self, numbers: Mapping[str, float], before: Mapping[str, float]) -> None:
        """Send the numbers that MLflow does not have yet: others would be a second point at the same step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        new_metrics = [
            Metric(key, value, now, FINAL_STEP) for key, value in numbers.items() if before.get(key) != value
        ]
        for part in _parts(new_metrics, METRICS_AT_ONCE):
            self._client.log_batch(self.id, metrics=part)

    def _send_table(self, rows: Sequence[Mapping[str, str]], tag: str | None) -> None:
        """Write the table as `mlflow.log_table` does, which would append to existing rows, and needs pandas."""
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._client.log_text(self.id, json.dumps(table), EXAMPLES)
        entry, tables = {"path": EXAMPLES, "type": "table"}, json.loads(tag or "[]")
        if entry not in tables:
            self._client.set_tag(self.id, TABLES, json.dumps([*tables, entry]))

    def _connect(self) -> bool:
        """Continue the run that the run directory records, or create one; return whether it was created."""
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self.uri)
        existing = self.id or self._known()
        self.id = existing or self._made()
        save_tracker_run_id(self.run, "mlflow", self.id)
        return existing is None

    def _known(self) -> str | None:
        """Return the recorded run's id, or None if this server does not have it, or it was deleted there."""
        from mlflow.exceptions import MlflowException

        name = read_tracker_run_id(self.run, "mlflow")
        if name is None:
            return None
        try:
            run = self._client.get_run(name)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return name if run.info.lifecycle_stage == "active" else None

    def _made(self) -> str:
        existing = self._client.get_experiment_by_name(self.experiment)
        experiment = existing.experiment_id if existing else self._client.create_experiment(self.experiment)
        run = self._client.create_run(experiment, run_name=self.run.path.resolve().name)
        return str(run.info.run_id)

    def _describe(self, texts: Mapping[str, str], params: Mapping[str, Any]) -> None:
        """Log the settings. MLflow stores a setting once: a value that a resumed run changes becomes a tag."""
        from mlflow.entities import Param, RunTag

        existing = self._client.get_run(self.id).data.params
        new_params = [Param(key, text) for key, text in texts.items() if key not in existing]
        for part in _parts(new_params, PARAMS_AT_ONCE):
            self._client.log_batch(self.id, params=part)
        tags = {f"resumed.{key}": text for key, text in texts.items() if existing.get(key, text) != text}
        tags |= {"surefit.version": __version__, "dataset.sha256": str(params.get(DATASET, ""))}
        run_tags = [RunTag(key, text[:LONGEST_TAG]) for key, text in tags.items() if text]
        for part in _parts(run_tags, TAGS_AT_ONCE):
            self._client.log_batch(self.id, tags=part)

    def _watch_the_machine(self) -> None:
        """Start MLflow's own system metrics if psutil is installed; their thread stops when the server is down."""
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
    """Return a name that every MLflow server accepts."""
    return re.sub(r"[^\w\-. /]", "_", key)


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
