"""The sinks that a config asks for. Their packages are extras: where one is missing, nothing costly is started."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from surefit.config.schema import TelemetrySection
from surefit.core import env
from surefit.core.errors import MachineError
from surefit.core.rundir import RunDir
from surefit.telemetry.sink import Sink


def make_sinks(config: TelemetrySection, run: RunDir) -> list[Sink]:
    """The sinks of one run; to be called by the main process alone. Nothing is written and nobody is asked yet.

    Raises:
        MachineError: naming every package that is missing or broken; W&B is to be online and nobody is logged in.
    """
    if problems := list(_problems(config)):
        first, *rest = problems
        raise MachineError(first.message, field=first.field, help=first.help, also=rest)
    sinks: list[Sink] = []
    if config.mlflow_uri is not None:
        from surefit.telemetry.mlflow import MLflow

        sinks.append(MLflow(config.mlflow_uri, config.mlflow_experiment, run))
    if config.wandb != "off":
        from surefit.telemetry.wandb import WeightsAndBiases

        sinks.append(WeightsAndBiases(config.wandb, config.wandb_project, run))
    if config.tensorboard:
        from surefit.telemetry.tensorboard import TensorBoard

        sinks.append(TensorBoard(run))
    if config.prometheus_port is not None:
        from surefit.telemetry.prometheus import Prometheus

        sinks.append(Prometheus(config.prometheus_port, config.prometheus_host, run))
    return sinks


def _problems(config: TelemetrySection) -> Iterator[MachineError]:
    env.quiet_trackers()
    wanted = (
        (config.mlflow_uri is not None, "telemetry.mlflow_uri", "mlflow", "mlflow"),
        (config.wandb != "off", "telemetry.wandb", "wandb", "wandb"),
        (config.tensorboard, "telemetry.tensorboard", "torch.utils.tensorboard", "tensorboard"),
        (config.prometheus_port is not None, "telemetry.prometheus_port", "prometheus_client", "prometheus"),
    )
    for _, field, module, extra in (entry for entry in wanted if entry[0]):
        # Here and not in the sinks' threads: a package that cannot be imported is said before the model is loaded.
        try:
            importlib.import_module(module)
        except ImportError as error:
            yield MachineError(
                f"needs a package that is not installed or does not fit: {env.first_line(error)}",
                field=field,
                help=f"pip install 'surefit[{extra}]', or take {field} out",
            )
        except Exception as error:  # protobuf and its like fail in ways of their own
            yield MachineError(
                f"{module} cannot be imported: {type(error).__name__}: {env.first_line(error)}",
                field=field,
                help=f"pip install --upgrade 'surefit[{extra}]', or take {field} out",
            )
    if config.wandb == "online" and not env.trackers_configured()["wandb"]:
        yield MachineError(
            "online, and nobody is logged in to W&B on this machine: it would ask",
            field="telemetry.wandb",
            help="run `wandb login`, set WANDB_API_KEY, or write telemetry.wandb: offline",
        )
