"""Each sink by itself, with what it writes read back by the tracker's own means; and what a config asks for."""

from __future__ import annotations

import json
import math
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from surefit.config.trackers import TelemetrySection
from surefit.core.errors import MachineError
from surefit.core.rundir import RunDir, append_jsonl, read_json
from surefit.telemetry.ids import read_tracker_run_id, save_tracker_run_id
from surefit.telemetry.sink import FanOut
from surefit.telemetry.sinks import make_sinks

BLOCK, FULL, LAST = 32_768, 1, 4
"""LevelDB's log format: the size of a block, and the kinds of chunks that end a record."""
PARAMS = {"train.learning_rate": 0.01, "total_steps": 40, "data.train: content": "ab" * 32, "data.mix": {"x/y.z": 1.0}}


def step(number: int, **changes: Any) -> dict[str, Any]:
    line = {
        "step": number, "epoch": number / 10, "loss": 2.0 / number, "grad_norm": 1.5, "learning_rate": 0.01,
        "tokens": 100, "supervised_tokens": 60, "tokens_per_second": 50.0, "flops": None, "mfu": None, "seconds": 2.0,
        "memory_bytes": None, "rejected": False, "time": 1000.0 + 2 * number,
    }  # fmt: skip
    return line | changes


def held_out(number: int) -> dict[str, Any]:
    return {"step": number, "eval_loss": 1.25, "eval_tokens": 9, "eval_perplexity": 3.49, "exact_match": 0.5,
            "time": 1000.0 + 2 * number}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "my-run")
    found.create()
    return found


def test_nothing_asked_nothing_made(run: RunDir) -> None:
    before = set(sys.modules)
    assert make_sinks(TelemetrySection(), run) == []
    assert not {"mlflow", "wandb", "prometheus_client"} & (set(sys.modules) - before)


def test_missing_packages_are_named_together_with_their_commands(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mlflow", "wandb", "prometheus_client", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    section = TelemetrySection(mlflow_uri="http://127.0.0.1:1", wandb="offline", tensorboard=True, prometheus_port=0)
    with pytest.raises(MachineError) as caught:
        make_sinks(section, run)
    problems = [caught.value, *caught.value.also]
    assert [problem.field for problem in problems] == [
        "telemetry.mlflow_uri", "telemetry.wandb", "telemetry.tensorboard", "telemetry.prometheus_port",
    ]  # fmt: skip
    for problem, extra in zip(problems, ("mlflow", "wandb", "tensorboard", "prometheus"), strict=True):
        assert f"'.[{extra}]'" in str(problem.help)


def test_wandb_online_without_a_login_is_refused_and_asks_nobody(run: RunDir) -> None:
    pytest.importorskip("wandb")
    with pytest.raises(MachineError, match="is not logged in"):
        make_sinks(TelemetrySection(wandb="online"), run)


def test_mlflow_is_asked_where_its_own_variable_says(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    section = TelemetrySection(mlflow_uri="env")
    with pytest.raises(MachineError, match="MLFLOW_TRACKING_URI is not set") as caught:
        make_sinks(section, run)
    assert caught.value.field == "telemetry.mlflow_uri"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{run.path}/from-env.db")
    (sink,) = make_sinks(section, run)
    assert sink.uri == f"sqlite:///{run.path}/from-env.db"
    (sink,) = make_sinks(TelemetrySection(mlflow_uri="sqlite:///named.db"), run)
    assert sink.uri == "sqlite:///named.db"


def test_ids_are_kept_side_by_side(run: RunDir) -> None:
    assert read_tracker_run_id(run, "mlflow") is None
    save_tracker_run_id(run, "mlflow", "one")
    save_tracker_run_id(run, "wandb", "two")
    assert (read_tracker_run_id(run, "mlflow"), read_tracker_run_id(run, "wandb")) == ("one", "two")
    assert read_json(run.telemetry) == {"mlflow": "one", "wandb": "two"}


# --- TensorBoard ---


def scalars(run: RunDir) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_and_a_resumed_run_takes_steps_back(run: RunDir) -> None:
    pytest.importorskip("tensorboard")
    for first, last in ((1, 6), (4, 8)):
        (sink,) = make_sinks(TelemetrySection(tensorboard=True), run)
        sink.start("x", PARAMS)
        sink.log([step(number, loss=first + number / 10) for number in range(first, last)])
        sink.log([held_out(last - 1)])
        sink.finish("finished")
    found = scalars(run)
    expected = {1: 1.1, 2: 1.2, 3: 1.3, 4: 4.4, 5: 4.5, 6: 4.6, 7: 4.7}
    assert found["loss"] == pytest.approx(expected)
    assert found["exact_match"] == {7: 0.5}
    assert "mfu" not in found


# --- Weights & Biases ---


def wandb_records(run: RunDir) -> list[Any]:
    """Every record of the run's files, once W&B's own process has written the last one, which may be after `finish`."""
    end = time.monotonic() + 30
    while not (records := _written(run)) or not records[-1].HasField("exit"):
        assert time.monotonic() < end, "the file has no end"
        time.sleep(0.05)
    return records


def _written(run: RunDir) -> list[Any]:
    """LevelDB's log format behind a header of 7 bytes, protocol buffers in it."""
    from wandb.proto import wandb_internal_pb2

    records = []
    for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if BLOCK - at % BLOCK < 7:
                at += BLOCK - at % BLOCK
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            if at + 7 + length > len(data):
                break  # it is being written
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (FULL, LAST):
                records.append(wandb_internal_pb2.Record.FromString(whole))
                whole = b""
    return records


def test_wandb_offline_needs_nobody_and_goes_on_under_one_id(run: RunDir) -> None:
    pytest.importorskip("wandb")
    for number in (1, 2):
        (sink,) = make_sinks(TelemetrySection(wandb="offline", wandb_project="mine"), run)
        sink.start("x", PARAMS)
        sink.log([step(number)])
        sink.finish("finished")
    records = wandb_records(run)
    runs = [record.run for record in records if record.HasField("run")]
    assert {found.run_id for found in runs} == {read_json(run.telemetry)["wandb"]}
    assert {found.project for found in runs} == {"mine"}
    names = {item.key or ".".join(item.nested_key) for record in records for item in record.history.item}
    assert {"step", "loss", "grad_norm"} <= names
    assert "mfu" not in names


# --- Prometheus ---


@pytest.fixture
def prometheus(run: RunDir) -> Iterator[Any]:
    pytest.importorskip("prometheus_client")
    (sink,) = make_sinks(TelemetrySection(prometheus_port=0), run)
    yield sink
    sink.finish("finished")


def samples(run: RunDir) -> dict[str, float]:
    """name{labels} → value, scraped from the address in the target file."""
    from prometheus_client.parser import text_string_to_metric_families

    (target,) = json.loads((run.path / "prometheus-target.json").read_text())
    with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = {}
    for family in families:
        for sample in family.samples:
            assert sample.labels.pop("run") == "my-run"
            found[sample.name + "".join(f"[{value}]" for value in sample.labels.values())] = sample.value
    return found


def test_prometheus_shows_the_newest_step(run: RunDir, prometheus: Any) -> None:
    for number in range(1, 4):
        append_jsonl(run.metrics, step(number, rejected=number == 2))
    append_jsonl(run.events, {"stage": "train", "event": "resumed"})
    prometheus.start("x", PARAMS)
    assert "surefit_loss" not in samples(run)
    prometheus.log([step(4), step(5, rejected=True), held_out(5), step(6)])
    found = samples(run)
    assert found["surefit_loss"] == pytest.approx(2 / 6)
    assert found["surefit_step"] == 6
    assert found["surefit_planned_steps"] == 40
    assert found["surefit_eval_loss"] == 1.25
    assert found["surefit_score[exact_match]"] == 0.5
    assert found["surefit_restarts"] == 1
    assert found["surefit_rejected_steps_total"] == 2
    assert found["surefit_eta_seconds"] == pytest.approx(2.0 * 34)
    assert found["surefit_last_step_timestamp_seconds"] == 1012.0
    assert found["surefit_disk_free_bytes"] > 0
    assert not {"surefit_mfu_ratio", "surefit_memory_peak_bytes", "surefit_score[eval_tokens]"} & found.keys()


def test_a_loss_that_is_not_finite_is_nan(run: RunDir, prometheus: Any) -> None:
    prometheus.start("x", PARAMS)
    prometheus.log([step(1), step(2, loss=None, grad_norm=None, rejected=True)])
    assert math.isnan(samples(run)["surefit_loss"])


def test_the_target_file_goes_with_the_run(run: RunDir, prometheus: Any) -> None:
    prometheus.start("x", PARAMS)
    assert (run.path / "prometheus-target.json").exists()
    prometheus.finish("failed")
    assert not (run.path / "prometheus-target.json").exists()


def test_a_port_in_use_is_said_and_taken_when_it_is_free(run: RunDir) -> None:
    pytest.importorskip("prometheus_client")
    notes: list[str] = []
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        fan_out = FanOut(make_sinks(TelemetrySection(prometheus_port=port), run), notes.append, every=0.05)
        fan_out.start("x", PARAMS)
        while not notes:
            fan_out.log(step(1))
    while not (run.path / "prometheus-target.json").exists():
        pass
    assert len(notes) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in notes[0]
    assert samples(run)["surefit_planned_steps"] == 40
    fan_out.finish("finished")


class Nvml:
    """pynvml with two GPUs, of which the second cannot say what it draws."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        self.asked.append(name)
        return name

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return type("Memory", (), {"used": 3e9, "total": 24e9})

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return type("Rates", (), {"gpu": 87})

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if handle == "GPU-b":
            raise self.NVMLError("not supported")
        return 250_500


def test_gpus_are_found_by_uuid_and_what_they_cannot_say_is_absent(
    run: RunDir, prometheus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: type("P", (), {"uuid": "ab"[i]}))
    prometheus.start("x", PARAMS)
    found = samples(run)
    assert nvml.asked == ["GPU-a", "GPU-b"]
    assert found["surefit_gpu_memory_used_bytes[0]"] == 3e9
    assert found["surefit_gpu_utilisation_ratio[1]"] == 0.87
    assert found["surefit_gpu_power_watts[0]"] == 250.5
    assert "surefit_gpu_power_watts[1]" not in found


@pytest.mark.gpu
def test_a_real_gpu_says_all_four(run: RunDir, prometheus: Any) -> None:
    pytest.importorskip("pynvml")
    prometheus.start("x", PARAMS)
    found = samples(run)
    assert 0 < found["surefit_gpu_memory_used_bytes[0]"] < found["surefit_gpu_memory_total_bytes[0]"]
    assert 0 <= found["surefit_gpu_utilisation_ratio[0]"] <= 1
    assert found["surefit_gpu_power_watts[0]"] > 0


# --- MLflow, without a server: its client is replaced ---


class Client:
    """What MLflow's client is asked, with a run that already has a setting."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self.known, self.batches, self.made = known, [], 0
        self.terminated: list[str] = []

    def get_run(self, name: str) -> Any:
        data = type("Data", (), {"params": dict(self.known)})
        return type("Run", (), {"data": data, "info": type("Info", (), {"lifecycle_stage": "active"})})

    def update_run(self, name: str, status: str) -> None:
        pass

    def log_batch(self, name: str, metrics: Sequence[Any] = (), params: Sequence[Any] = (), tags: Any = ()) -> None:
        self.batches.append((list(metrics), list(params), list(tags)))

    def set_terminated(self, name: str, status: str) -> None:
        self.terminated.append(status)


@pytest.fixture
def mlflow(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = pytest.importorskip("mlflow")
    save_tracker_run_id(run, "mlflow", "known")
    client = Client({"train.learning_rate": "0.02"})
    monkeypatch.setattr(package, "MlflowClient", lambda tracking_uri: client)
    (sink,) = make_sinks(TelemetrySection(mlflow_uri="http://127.0.0.1:1"), run)
    monkeypatch.setattr(sink, "_watch_the_machine", lambda: None)
    sink.start("x", PARAMS)
    return sink


def test_mlflow_writes_each_setting_once_and_a_changed_one_as_a_tag(mlflow: Any) -> None:
    params = {param.key: param.value for _, params, _ in mlflow._client.batches for param in params}
    tags = {tag.key: tag.value for _, _, tags in mlflow._client.batches for tag in tags}
    assert params == {"total_steps": "40", "data.train_ content": "ab" * 32, "data.mix": "{'x/y.z': 1.0}"}
    assert tags["resumed.train.learning_rate"] == "0.01"
    assert tags["dataset.sha256"] == "ab" * 32


def test_mlflow_gets_numbers_only_in_parts_it_can_take(mlflow: Any) -> None:
    mlflow._client.batches.clear()
    mlflow.log([step(number) for number in range(1, 300)] + [held_out(299) | {"f1@5": 0.5}])
    metrics = [metric for metrics, _, _ in mlflow._client.batches for metric in metrics]
    assert max(len(metrics) for metrics, _, _ in mlflow._client.batches) == 1000
    assert {metric.key for metric in metrics} >= {"loss", "rejected", "eval_loss", "f1_5"}
    assert "mfu" not in {metric.key for metric in metrics}
    assert metrics[0].timestamp == 1_002_000
    assert {metric.step for metric in metrics if metric.key == "loss"} == set(range(1, 300))


def test_mlflow_says_how_a_run_ended_even_where_artefacts_do_not_arrive(mlflow: Any, run: RunDir) -> None:
    run.plan.write_text("{}")  # this client has no log_artifact
    with pytest.raises(AttributeError):
        mlflow.finish("interrupted")
    assert mlflow._client.terminated == ["KILLED"]


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        TelemetrySection(mlflow_uri="https://me:hunter2@host/")
    assert "hunter2" not in str(caught.value.errors()[0]["msg"])
