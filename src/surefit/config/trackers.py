"""The trackers that a run can report to: their settings, and a table row each with their properties.

To add one: its settings and its row here, its sink in telemetry/; `core/env.py` if one of its variables is a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from surefit.config.section import Section
from surefit.core import env


class TelemetrySection(Section):
    """Further places to log a run's metrics to; metrics.jsonl always has them all."""

    mlflow_uri: str | None = None
    """An MLflow tracking server, such as http://127.0.0.1:5000, or a database, such as sqlite:///mlflow.db; env: the
    one that the variable MLFLOW_TRACKING_URI names."""
    mlflow_experiment: str = "surefit"
    """The experiment that the run is logged under."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: offline writes files that `wandb sync` uploads."""
    wandb_project: str = "surefit"
    """The project that the run is logged under."""
    tensorboard: bool = False
    """Write TensorBoard event files into the run directory."""
    prometheus_port: Annotated[int, Field(ge=0, lt=65536)] | None = None
    """Serve /metrics on this port while training; 0 takes any free one."""
    prometheus_host: str = "127.0.0.1"
    """The address that /metrics listens on; 0.0.0.0 lets a Prometheus on another machine in."""

    @property
    def mlflow_address(self) -> str | None:
        """MLflow's tracking address after `mlflow_uri: env` is replaced; None where none is set."""
        return env.tracking_uri() if self.mlflow_uri == "env" else self.mlflow_uri

    @field_validator("mlflow_uri")
    @classmethod
    def _is_an_address_without_a_password(cls, value: str | None) -> str | None:
        if value is not None and re.match(r"[\w.-]+:\d+(/|$)", value):
            raise ValueError(f"a server's address begins with http:// or https://: http://{value}")
        if value is not None and "@" in urlsplit(value).netloc:
            raise ValueError(
                "the address contains a user name or password, and the run directory keeps the config: put them "
                "into MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, in the environment or in .env"
            )
        return value


@dataclass(frozen=True)
class Tracker:
    """One tracker. Fields that it does not need keep their defaults.

    Attributes:
        title: the tracker's name in a sentence.
        setting: the field of `TelemetrySection` that enables it.
        packages: packages of which one must be installed; the last is the one with the code. Empty: the standard
            library suffices.
        module: module that is imported to test whether it works.
        sink: module and class in telemetry/, imported when it is used.
        arguments: section → arguments of the sink before the run directory.
        leaves: file or folder that it writes in the run directory.
        on: value of `setting` where another tool's config only names the tracker; None where an address is required as
            well.
        axolotl: keys of Axolotl's config that enable it.
        axolotl_values: Axolotl's key → the setting that gets its value.
        quiet: environment variables → values that silence it, switch off usage reports, and make it give up within
            seconds: the caller retries.
        variables: environment variables, any of which tells it the address and the account.
        host: host whose login in ~/.netrc serves as well.
        unknown: its behavior without either.
        login: command after which it does not prompt for an account, if it prompts at all; `setting` can then be
            "offline".
        offline: assignment of the environment variable that keeps it from prompting.
    """

    title: str
    setting: str
    packages: tuple[str, ...]
    module: str
    sink: str
    arguments: Callable[[TelemetrySection], tuple[Any, ...]] = lambda section: ()
    leaves: str = ""
    on: Any = None
    axolotl: tuple[str, ...] = ()
    axolotl_values: Mapping[str, str] = field(default_factory=dict)
    quiet: Mapping[str, str] = field(default_factory=dict)
    variables: tuple[str, ...] = ()
    host: str = ""
    unknown: str = ""
    login: str = ""
    offline: str = ""

    @property
    def key(self) -> str:
        """Dotted key of the setting that enables it."""
        return f"telemetry.{self.setting}"

    @property
    def without_address(self) -> str:
        """Message that the tracker's name alone is not enough."""
        return f"{self.title}'s address is not in the file: give it as {self.key}"

    @property
    def is_set_up(self) -> bool:
        """Return whether this machine has its address or account."""
        return env.any_set(self.variables) or (self.host != "" and env.logged_in(self.host))

    def asks(self, section: TelemetrySection) -> bool:
        """Return whether it would prompt for an account when the user is not logged in."""
        return self.login != "" and getattr(section, self.setting) != "offline"


TRACKERS = {
    "mlflow": Tracker(
        "MLflow", "mlflow_uri", ("mlflow", "mlflow-skinny"), "mlflow", "mlflow:MLflow",
        lambda section: (section.mlflow_address, section.mlflow_experiment),
        axolotl=("use_mlflow", "mlflow_tracking_uri"),
        axolotl_values={"mlflow_tracking_uri": "mlflow_uri", "mlflow_experiment_name": "mlflow_experiment"},
        quiet={"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
               "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"},
        variables=("MLFLOW_TRACKING_URI",), unknown="logs below ./mlruns",
    ),
    "wandb": Tracker(
        "W&B", "wandb", ("wandb",), "wandb", "wandb:WeightsAndBiases",
        lambda section: (section.wandb, section.wandb_project), leaves="wandb", on="online",
        axolotl=("wandb_project", "use_wandb"), axolotl_values={"wandb_project": "wandb_project"},
        quiet={"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"},
        variables=("WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED"), host="api.wandb.ai",
        unknown="would prompt for a key when a run starts", login="wandb login", offline="WANDB_MODE=offline",
    ),
    "tensorboard": Tracker(
        "TensorBoard", "tensorboard", ("tensorboard",), "torch.utils.tensorboard", "tensorboard:TensorBoard",
        leaves="tensorboard", on=True, axolotl=("use_tensorboard",),
        quiet={"TF_CPP_MIN_LOG_LEVEL": "2"},  # it imports TensorFlow if that is installed
    ),
    "prometheus": Tracker(
        "Prometheus", "prometheus_port", ("prometheus-client",), "prometheus_client", "prometheus:Prometheus",
        lambda section: (section.prometheus_port, section.prometheus_host), leaves="prometheus-target.json",
    ),
}  # fmt: skip
"""Name → tracker; the name is the one in other tools' report_to, and of the extra that installs it."""


def enabled_trackers(section: TelemetrySection) -> dict[str, Tracker]:
    """Return the trackers that a config enables."""
    return {
        name: tracker
        for name, tracker in TRACKERS.items()
        if getattr(section, tracker.setting) != TelemetrySection.model_fields[tracker.setting].default
    }
