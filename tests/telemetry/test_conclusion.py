"""What the stages after training leave with each tracker, read back by the tracker's own means."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scored_run import scored_run, summary
from servers import MLflowServer
from tests.cli.conftest import call, config, surefit
from tests.telemetry.test_sinks import scalars, wandb_records

from surefit.config.trackers import TelemetrySection
from surefit.core.rundir import RunDir, read_json, write_json
from surefit.stages.concluding import report_stage_to_trackers
from surefit.stages.progress_listener import LineListener
from surefit.telemetry.ids import save_tracker_run_id
from surefit.telemetry.sinks import make_sinks

__all__ = ["config", "surefit"]  # fixtures
COLUMNS = ["question", "expected", "base", "tuned", "outcome"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))
    return scored_run(tmp_path / "my-run")


def end(run: RunDir, section: TelemetrySection) -> list[str]:
    said: list[str] = []
    with report_stage_to_trackers(run, "evaluate", LineListener(said.append), section):
        pass
    return said


def change_the_score(run: RunDir) -> None:
    changed = summary()
    changed["sets"]["eval"]["variants"]["merged"]["exact_match"]["mean"] = 0.875
    write_json(run.eval_summary, changed)


# --- TensorBoard ---


def texts(run: RunDir) -> dict[str, list[str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    found = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    return {tag: [one.tensor_proto.string_val[0].decode() for one in several] for tag, several in found.items()}


def test_tensorboard_has_numbers_and_a_table_beside_the_curves_and_once(run: RunDir) -> None:
    pytest.importorskip("tensorboard")
    section = TelemetrySection(tensorboard=True)
    (sink,) = make_sinks(section, run)
    sink.start("x", {})
    sink.log([{"step": number, "time": 1000.0 + number, "loss": 1 / number} for number in (1, 2, 4)])
    sink.finish("finished")
    assert end(run, section) == []
    change_the_score(run)
    assert end(run, section) == []
    found = scalars(run)
    assert found["loss"] == {1: 1.0, 2: 0.5, 4: 0.25}
    assert found["eval/merged/exact_match"] == {0: 0.875}
    assert found["certificate/passed"] == {0: 1.0}
    assert len(list((run.path / "tensorboard").glob("*.final"))) == 1
    (table,) = texts(run)["examples/text_summary"]
    head, _, first, *_ = table.splitlines()
    assert head == f"| {' | '.join(COLUMNS)} |"
    assert first == "| Question 0 | gold 0 | base says 0 | merged says 0 | won |"


def test_nothing_in_a_text_ends_a_cell_of_the_table(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = scored_run(tmp_path / "run", rows=1, text="a | b\n<tools>")
    assert end(run, TelemetrySection(tensorboard=True)) == []
    assert texts(run)["examples/text_summary"][0].splitlines()[2].endswith("| a &#124; b &lt;tools&gt; | won |")


# --- Weights & Biases ---


def test_wandb_offline_has_a_summary_a_table_and_files_in_the_run_that_training_made(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for module in ("conclusion", "wandb"):  # W&B starts a process of its own, which a busy machine keeps waiting
        monkeypatch.setattr(f"surefit.telemetry.{module}.PATIENCE", 90.0)
    save_tracker_run_id(run, "wandb", "abcd1234")
    run.report.write_text("page")
    assert end(run, TelemetrySection(wandb="offline")) == []
    records = wandb_records(run)
    assert {record.run.run_id for record in records if record.HasField("run")} == {"abcd1234"}
    items = [item for record in records for item in record.summary.update]
    found = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
    assert found["eval/merged/exact_match"] == 0.75
    assert found["loss"] == 0.25
    table = found["examples"]
    assert (table["_type"], table["ncols"], table["nrows"]) == ("table-file", 5, 6)
    (folder,) = run.path.glob("wandb/offline-run-*/files")
    assert json.loads((folder / table["path"]).read_text())["columns"] == COLUMNS
    for name in ("certificate.json", "eval/summary.json", "report.html"):
        assert (folder / name).read_bytes() == (run.path / name).read_bytes()
    saved = {file.path for record in records for file in record.files.files}
    assert {"certificate.json", "eval/summary.json", "report.html"} <= saved


# --- MLflow: a real server ---


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    if reason := MLflowServer.missing():
        pytest.skip(reason)
    found = MLflowServer(tmp_path_factory.mktemp("mlflow"))
    found.start()
    yield found
    found.kill()


class Logged:
    """What the server has of the one run of a directory."""

    def __init__(self, server: MLflowServer, run: RunDir) -> None:
        from mlflow import MlflowClient

        self.url, self.client = server.url, MlflowClient(server.url)
        self.id = read_json(run.telemetry)["mlflow"]
        self.run = self.client.get_run(self.id)

    def points(self, name: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in self.client.get_metric_history(self.id, name)]

    def files(self, folder: str | None = None) -> list[str]:
        return [found.path for found in self.client.list_artifacts(self.id, folder)]

    def table(self) -> Any:
        with pytest.MonkeyPatch.context() as patch:  # it looks for the run on the server that the environment names
            patch.setenv("MLFLOW_TRACKING_URI", self.url)
            return self.client.load_table(self.run.info.experiment_id, "examples.json", [self.id])


@pytest.mark.slow
def test_a_run_is_made_where_training_logged_nowhere_and_sent_again_it_is_the_same(
    run: RunDir, server: MLflowServer
) -> None:
    section = TelemetrySection(mlflow_uri=server.url, mlflow_experiment="later")
    for _ in range(2):
        assert end(run, section) == []
    found = Logged(server, run)
    assert found.run.info.status == "FINISHED"
    assert found.points("eval/merged/exact_match") == [(0, 0.75)]
    assert found.points("certificate/reloaded_kl_max") == [(0, 2e-6)]
    assert list(found.table()[COLUMNS].iloc[0]) == ["Question 0", "gold 0", "base says 0", "merged says 0", "won"]
    assert len(found.table()) == 6
    assert json.loads(found.run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "examples.json", "type": "table"}]
    change_the_score(run)
    assert end(run, section) == []
    again = Logged(server, run)
    assert again.id == found.id
    assert again.run.data.metrics["eval/merged/exact_match"] == 0.875
    assert len(again.client.search_runs([again.run.info.experiment_id])) == 1


@pytest.mark.slow
def test_a_run_of_the_command_line_ends_where_it_was_trained(
    surefit: object, config: Path, server: MLflowServer
) -> None:
    with open(config, "a", encoding="utf-8") as file:
        file.write(f"telemetry: {{mlflow_uri: '{server.url}'}}\n")
    run = RunDir(Path("runs/one"))
    assert call("train", config).code == 0
    trained = Logged(server, run)
    dry = call("evaluate", run.path, "--dry-run", "--variant", "base", "--variant", "adapter")
    assert dry.code == 0, dry.text
    assert "examples.json" not in trained.files()
    for verb in ("merge", "evaluate", "report"):
        answer = call(verb, run.path)
        assert answer.code == 0, answer.text
        assert "could not be sent" not in " ".join(answer.text.split())
    found = Logged(server, run)
    assert found.id == trained.id
    scored = read_json(run.eval_summary)["sets"]["eval"]["variants"]["merged"]["exact_match"]
    assert found.points("eval/merged/exact_match") == [(0, scored["mean"])]
    assert found.points("certificate/passed") == [(0, 1.0)]
    assert max(step for step, _ in found.points("loss")) == 3
    assert {"certificate.json", "report.html", "examples.json"} <= set(found.files())
    assert found.files("eval") == ["eval/summary.json"]
    assert len(found.table()) == 20
    assert found.run.info.status == "FINISHED"


@pytest.mark.slow
def test_a_server_that_dies_leaves_the_exit_code_and_one_line(surefit: object, config: Path, tmp_path: Path) -> None:
    if reason := MLflowServer.missing():
        pytest.skip(reason)
    server = MLflowServer(tmp_path / "server")
    server.start()
    try:
        asked = ("--set", f"telemetry.mlflow_uri={server.url}")
        assert call("train", config, *asked).code == 0
        assert call("merge", "runs/one").code == 0
    finally:
        server.kill()
    answer = call("evaluate", "runs/one")
    assert answer.code == 0, answer.text
    assert " ".join(answer.text.split()).count("could not be sent to MLflow") == 1
    assert "surefit report runs/one" in " ".join(answer.text.split())
    server.start()
    try:
        answer = call("report", "runs/one")
        assert "could not be sent" not in " ".join(answer.text.split())
        assert Logged(server, RunDir(Path("runs/one"))).points("eval/base/exact_match")
    finally:
        server.kill()


def test_a_tracker_that_is_away_is_one_line_with_the_command_that_sends_again(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    run = scored_run(tmp_path / "my run", telemetry="{mlflow_uri: 'http://127.0.0.1:1'}")
    (said,) = end(run, TelemetrySection(mlflow_uri="http://127.0.0.1:1"))
    assert said.startswith("the results could not be sent to MLflow (")
    assert "refused" in said
    assert f"`surefit report '{run.path}'` sends them again" in said
    # resolved.yaml does not know a tracker that was given with --set, and it is all that `report` reads.
    (said,) = end(run, TelemetrySection(mlflow_uri="http://127.0.0.1:2"))
    assert "`surefit evaluate` with the same arguments sends them again" in said


def test_a_server_that_hangs_is_waited_for_only_so_long(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    import socket

    from surefit.telemetry import conclusion

    monkeypatch.setattr(conclusion.send_final_report, "__defaults__", (1.0,))
    with socket.socket() as listening:  # takes connections, and never answers
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        start = time.monotonic()
        said = end(run, TelemetrySection(mlflow_uri=f"http://127.0.0.1:{listening.getsockname()[1]}"))
        assert time.monotonic() - start < 9
    assert len(said) == 1
    assert "MLflow (no answer within 1 s)" in said[0]
