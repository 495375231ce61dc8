"""The trackers that a run can report to, a row each.

To add one: its settings in `TelemetrySection` (config/schema.py), a row here, its sink in telemetry/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surefit.config.schema import TelemetrySection


@dataclass(frozen=True)
class Tracker:
    """One of them.

    Attributes:
        name: as other tools' report_to has it; also the extra that installs it.
        field: the setting that switches it on.
        is_on: whether it is.
        packages: of which one has to be installed; the last is the one that has the code.
        module: what is imported to see whether it works.
        sink: module and class in telemetry/, imported when it is used.
        arguments: what the sink takes before the run directory.
    """

    name: str
    field: str
    is_on: Callable[[TelemetrySection], bool]
    packages: tuple[str, ...]
    module: str
    sink: str
    arguments: Callable[[TelemetrySection], tuple[Any, ...]]


TRACKERS = (
    Tracker(
        "mlflow", "telemetry.mlflow_uri", lambda section: section.mlflow_uri is not None, ("mlflow", "mlflow-skinny"),
        "mlflow", "mlflow:MLflow", lambda section: (section.mlflow_uri, section.mlflow_experiment),
    ),
    Tracker(
        "wandb", "telemetry.wandb", lambda section: section.wandb != "off", ("wandb",),
        "wandb", "wandb:WeightsAndBiases", lambda section: (section.wandb, section.wandb_project),
    ),
    Tracker(
        "tensorboard", "telemetry.tensorboard", lambda section: section.tensorboard, ("tensorboard",),
        "torch.utils.tensorboard", "tensorboard:TensorBoard", lambda section: (),
    ),
    Tracker(
        "prometheus", "telemetry.prometheus_port", lambda section: section.prometheus_port is not None,
        ("prometheus-client",), "prometheus_client", "prometheus:Prometheus",
        lambda section: (section.prometheus_port, section.prometheus_host),
    ),
)  # fmt: skip


def switched_on(section: TelemetrySection) -> list[Tracker]:
    """Those that a config asks for."""
    return [tracker for tracker in TRACKERS if tracker.is_on(section)]
