"""Prometheus: /metrics of a running training, and a target file with which Prometheus finds it.

An unknown quantity (an MFU without a known peak, a GPU that cannot be queried) is absent, never zero.
"""

from __future__ import annotations

import math
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from surefit.config.trackers import TRACKERS
from surefit.core.rundir import RunDir, read_jsonl, write_json

STEP = {
    "loss": ("loss", "Training loss of the newest step; NaN where it was not finite"),
    "grad_norm": ("gradient_norm", "Norm of the gradient of the newest step, before clipping"),
    "learning_rate": ("learning_rate", "Learning rate of the newest step"),
    "tokens_per_second": ("tokens_per_second", "Tokens of the newest step over its seconds"),
    "mfu": ("mfu_ratio", "Model FLOPs utilization of the newest step"),
    "epoch": ("epoch", "Passes over the training rows"),
    "memory_bytes": ("memory_peak_bytes", "Peak GPU memory allocated to tensors of this process"),
    "step": ("step", "Optimizer steps done"),
    "time": ("last_step_timestamp_seconds", "When the newest step ended; before the first, when training began"),
}
"""Key of a step's line → name and help text of its gauge."""
HELD_OUT = {
    "eval_loss": ("eval_loss", "Held-out loss of the newest measurement"),
    "eval_perplexity": ("eval_perplexity", "Held-out perplexity of the newest measurement"),
}
"""Key of a held-out line → name and help text of its gauge."""
REST = {
    "planned_steps": "Optimizer steps of the whole run",
    "eta_seconds": "Seconds to the end of training, estimated from the steps of this process, pauses included",
    "restarts": "How often the run was resumed",
    "disk_free_bytes": "Free space on the disk of the run directory",
}


class Prometheus:
    """A sink that serves /metrics; every sample has the label `run`, the run directory's name.

    Args:
        port: 0 for any free one.
        host: the address to listen on; 0.0.0.0 and :: let other machines in.
        run: the run directory.
    """

    def __init__(self, port: int, host: str, run: RunDir) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self.port, self.host, self.run = port, host, run
        self.label = run.path.resolve().name
        self._target = run.path / TRACKERS["prometheus"].leaves
        self.registry = CollectorRegistry()
        helps = {**dict(STEP.values()), **dict(HELD_OUT.values()), **REST}
        self._gauges = {name: Gauge(f"surefit_{name}", text, ["run"], registry=self.registry)
                        for name, text in helps.items()}  # fmt: skip
        self._scores = Gauge(
            "surefit_score", "A score of the task, of the newest measurement", ["run", "metric"], registry=self.registry
        )
        rejected = Counter(
            "surefit_rejected_steps", "Steps that changed nothing: loss or gradient not finite", ["run"],
            registry=self.registry,
        )  # fmt: skip
        self._rejected = rejected.labels(self.label)
        self.registry.register(NvmlCollector(self.label))
        self._server: Any = None
        self._first: Mapping[str, Any] | None = None
        self._total: int | None = None

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Start the server, and write the target file."""
        self._total = params.get("total_steps")
        self._gauge("disk_free_bytes").set_function(lambda: _free(self.run))
        self._gauge("last_step_timestamp_seconds").set_to_current_time()
        if self._total is not None:
            self._gauge("planned_steps").set(self._total)
        if self._server is None:
            self._server = self._listening()
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        address = f"[{host}]" if ":" in host else host
        target = {"targets": [f"{address}:{self._server.server_port}"], "labels": {}}
        write_json(self._target, [target])

    def _listening(self) -> Any:
        from prometheus_client import start_http_server

        try:
            return start_http_server(self.port, addr=self.host, registry=self.registry)[0]
        except OSError as error:
            raise OSError(f"cannot listen on {self.host}:{self.port}: {error.strerror}") from None

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Set the gauges to the newest numbers."""
        if self._first is None:
            self._go_on(records[0])
        for record in records:
            if "loss" in record:
                self._step(record)
            else:
                self._held_out(record)

    def finish(self, status: str) -> None:
        """Stop serving, so that no alert waits for steps of a run that has ended."""
        self._target.unlink(missing_ok=True)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _go_on(self, first: Mapping[str, Any]) -> None:
        """Count the restarts and the rejected steps from before this process."""
        self._first = first
        events = read_jsonl(self.run.events)
        self._gauge("restarts").set(sum(event["event"] == "resumed" for event in events))
        earlier_lines = [line for line in read_jsonl(self.run.metrics) if line["step"] < first["step"]]
        self._rejected.inc(sum(bool(line.get("rejected")) for line in earlier_lines))

    def _step(self, record: Mapping[str, Any]) -> None:
        for key, (name, _) in STEP.items():
            if record.get(key) is not None:
                self._gauge(name).set(record[key])
        if record["loss"] is None:
            self._gauge("loss").set(math.nan)
        self._rejected.inc(bool(record.get("rejected")))
        assert self._first is not None
        done_steps = record["step"] - self._first["step"]
        if self._total is not None and done_steps > 0:
            seconds_per_step = (record["time"] - self._first["time"]) / done_steps
            self._gauge("eta_seconds").set(seconds_per_step * (self._total - record["step"]))

    def _held_out(self, record: Mapping[str, Any]) -> None:
        for key, value in record.items():
            if key in HELD_OUT and value is not None:
                self._gauge(HELD_OUT[key][0]).set(value)
            elif key not in (*HELD_OUT, "step", "time", "eval_tokens") and isinstance(value, int | float):
                self._scores.labels(self.label, key).set(value)

    def _gauge(self, name: str) -> Any:
        return self._gauges[name].labels(self.label)


class NvmlCollector:
    """NVML's figures of the GPUs that this process uses, read at each scrape. Empty without NVML."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._nvml: Any = None
        self._handles: dict[str, Any] | None = None

    def collect(self) -> Iterator[Any]:
        """Yield a gauge per quantity, with a sample for each GPU that supports it."""
        from prometheus_client.core import GaugeMetricFamily

        handles = self._handles = self._found() if self._handles is None else self._handles
        for name, text, read in self._quantities() if handles else ():
            family = GaugeMetricFamily(f"surefit_gpu_{name}", text, labels=["run", "gpu"])
            for gpu, handle in handles.items():
                with suppress(self._nvml.NVMLError):
                    family.add_metric([self.label, gpu], read(handle))
            if family.samples:
                yield family

    def _quantities(self) -> Iterator[tuple[str, str, Callable[[Any], float]]]:
        nvml = self._nvml
        yield "memory_used_bytes", "Memory in use, by any process", lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used
        yield "memory_total_bytes", "Memory of the GPU", lambda h: nvml.nvmlDeviceGetMemoryInfo(h).total
        yield (
            "utilisation_ratio", "Share of the time in which a kernel ran",
            lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100,
        )  # fmt: skip
        yield "power_watts", "Power drawn", lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000

    def _found(self) -> dict[str, Any]:
        """Return PyTorch's index of each GPU → NVML's handle, matched by UUID: the two count differently."""
        import torch

        try:
            import pynvml
        except ImportError:
            return {}
        self._nvml, handles = pynvml, {}
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            for number in range(torch.cuda.device_count()):
                name = f"GPU-{torch.cuda.get_device_properties(number).uuid}"
                handles[str(number)] = pynvml.nvmlDeviceGetHandleByUUID(name)
        return handles


def _free(run: RunDir) -> float:
    try:
        return shutil.disk_usage(run.path).free
    except OSError:
        return math.nan
