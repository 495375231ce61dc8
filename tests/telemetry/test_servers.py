"""Training beside a real MLflow server and a real Prometheus: what arrives there, and what happens when they die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from servers import MLflowServer, PrometheusServer, until

from surefit.core.errors import Interrupted
from surefit.core.rundir import RunDir, read_json, read_jsonl, write_json
from surefit.telemetry.sinks import make_sinks
from surefit.train.progress import TrainingProgress

if reason := MLflowServer.missing() or PrometheusServer.missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.slow
STEPS = 24
KILLED_AT = 14
INTERRUPTED_AT = 8


class Scene:
    """One run: interrupted, resumed, its servers killed while it goes on, MLflow started again after its end."""

    def __init__(self, directory: Path) -> None:
        self.run = RunDir(directory / "run")
        self.run.create()
        self.base = tiny_run.save_base(directory / "base")
        self.mlflow = MLflowServer(directory / "mlflow")
        self.prometheus = PrometheusServer(directory / "prometheus", (self.run.path / "prometheus-target.json"))
        self.notes: list[str] = []
        self.seen: dict[str, Any] = {}

    def train(self, resume: bool, on_progress: Any, epochs: float = 8.0) -> Any:
        settings = tiny_run.config(self.base, self.run.path, num_train_epochs=epochs)
        telemetry = settings.telemetry.model_copy(update={"mlflow_uri": self.mlflow.url, "prometheus_port": 0})
        settings = settings.model_copy(update={"telemetry": telemetry})
        sinks = make_sinks(telemetry, self.run)
        job = tiny_run.training(settings, sinks=sinks, on_progress=on_progress, on_note=self.notes.append)
        return job.fit(resume)

    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.mlflow.url)

    def logged(self, step: int) -> bool:
        """Whether MLflow has this step, under the id that the run directory remembers."""
        found = self.client().get_run(read_json(self.run.telemetry)["mlflow"])
        return bool(found.data.metrics.get("loss")) and self.last_step() >= step

    def last_step(self) -> int:
        history = self.client().get_metric_history(read_json(self.run.telemetry)["mlflow"], "loss")
        return max((metric.step for metric in history), default=0)

    def scraped(self, name: str) -> float | None:
        samples = self.prometheus.query(f'surefit_{name}{{run="run"}}')
        return float(samples[0]["value"][1]) if samples else None


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("telemetry"))
    scene.mlflow.start()
    scene.prometheus.start()
    try:
        with pytest.raises(Interrupted):
            scene.train(False, first_part(scene))
        scene.seen["after the interruption"] = scene.client().get_run(read_json(scene.run.telemetry)["mlflow"])
        scene.seen["target after"] = (scene.run.path / "prometheus-target.json").exists()
        scene.seen["result"] = scene.train(True, second_part(scene))
        yield scene
    finally:
        scene.mlflow.kill()
        scene.prometheus.kill()


def first_part(scene: Scene) -> Any:
    def on_progress(progress: TrainingProgress) -> None:
        if progress.step == INTERRUPTED_AT:
            until(lambda: scene.logged(INTERRUPTED_AT), "the step in MLflow")
            until(lambda: scene.scraped("step") == INTERRUPTED_AT, "the step in Prometheus")
            scene.seen["target"] = read_json(scene.run.path / "prometheus-target.json")
            names = ("loss", "learning_rate", "tokens_per_second", "planned_steps", "disk_free_bytes", "restarts")
            scene.seen["scraped"] = {name: scene.scraped(name) for name in names}
            scene.seen["absent"] = [scene.scraped(name) for name in ("gpu_power_watts", "mfu_ratio")]
            raise Interrupted("stopped by the test")

    return on_progress


def second_part(scene: Scene) -> Any:
    def on_progress(progress: TrainingProgress) -> None:
        if progress.step == KILLED_AT:
            until(lambda: scene.logged(KILLED_AT), "the step in MLflow")
            until(lambda: scene.scraped("step") == KILLED_AT, "the step in Prometheus")
            scene.seen["restarts"] = scene.scraped("restarts")
            scene.mlflow.kill()
            scene.prometheus.kill()

    return on_progress


def test_training_outlives_its_servers_and_loses_nothing(scene: Scene) -> None:
    lines = [line for line in read_jsonl(scene.run.metrics) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert scene.seen["result"].counters.step == STEPS
    assert scene.run.adapter.exists()


def test_the_loss_of_a_server_is_said_once(scene: Scene) -> None:
    failed = [note for note in scene.notes if "failed, and training goes on" in note]
    assert len(failed) == 1
    assert failed[0].startswith("MLflow failed")
    (lost,) = [note for note in scene.notes if "did not get" in note]
    # The steps after the kill, and the held-out lines among them.
    assert lost.startswith("MLflow did not get 1")
    assert "metrics.jsonl has them all" in lost


def test_prometheus_saw_the_run(scene: Scene) -> None:
    lines = [line for line in read_jsonl(scene.run.metrics) if "loss" in line]
    at = lines[INTERRUPTED_AT - 1]
    seen = scene.seen["scraped"]
    assert seen["loss"] == pytest.approx(at["loss"])
    assert seen["learning_rate"] == pytest.approx(at["learning_rate"])
    assert seen["planned_steps"] == STEPS
    assert seen["disk_free_bytes"] > 0
    assert seen["restarts"] == 0
    assert scene.seen["restarts"] == 1
    assert scene.seen["absent"] == [None, None]


def test_the_target_file_is_there_while_it_trains(scene: Scene) -> None:
    (target,) = scene.seen["target"]
    assert target["targets"][0].startswith("127.0.0.1:")
    assert scene.seen["target after"] is False
    assert not (scene.run.path / "prometheus-target.json").exists()


def test_mlflow_knows_how_the_first_part_ended(scene: Scene) -> None:
    found = scene.seen["after the interruption"]
    assert found.info.status == "KILLED"
    assert found.info.run_name == "run"
    assert found.data.params["train.learning_rate"] == "0.01"
    assert found.data.params["total_steps"] == str(STEPS)
    assert len(found.data.tags["dataset.sha256"]) == 64
    assert found.data.metrics["tokens_per_second"] > 0


def test_one_mlflow_run_across_resumes_and_a_server_that_comes_back(scene: Scene) -> None:
    scene.mlflow.start()
    write_json(scene.run.plan, {"made": "up"})
    before = scene.last_step()
    assert KILLED_AT <= before < STEPS
    result = scene.train(True, lambda progress: None)
    assert result.resumed_from == STEPS
    client = scene.client()
    (experiment,) = [found for found in client.search_experiments() if found.name == "surefit"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == read_json(scene.run.telemetry)["mlflow"]
    assert found.info.status == "FINISHED"
    assert "plan.json" in [file.path for file in client.list_artifacts(found.info.run_id)]
    losses = {metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, "loss")}
    lines = {line["step"]: line["loss"] for line in read_jsonl(scene.run.metrics) if "loss" in line}
    assert losses == pytest.approx({step: lines[step] for step in losses})
