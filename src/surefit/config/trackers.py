"""The trackers that a run can report to: their settings, and a row each with all that the rest asks about them.

To add one: its settings and its row here, its sink in telemetry/; `core/env.py` where a key of its is a secret.
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
    """Where else the numbers of a run go; metrics.jsonl always has them all."""

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
        """What `mlflow_uri` stands for; None where nothing is named."""
        return env.tracking_uri() if self.mlflow_uri == "env" else self.mlflow_uri

    @field_validator("mlflow_uri")
    @classmethod
    def _is_an_address_without_a_password(cls, value: str | None) -> str | None:
        if value is not None and re.match(r"[\w.-]+:\d+(/|$)", value):
            raise ValueError(f"a server's address begins with http:// or https://: http://{value}")
        if value is not None and "@" in urlsplit(value).netloc:
            raise ValueError(
                "a user or a password is in the address, and the config is written into the run directory: put them "
                "into MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, in the environment or in .env"
            )
        return value


@dataclass(frozen=True)
class Tracker:
    """One of them. What it has no use for is left out.

    Attributes:
        title: its name in a sentence.
        setting: what switches it on, in `TelemetrySection`.
        packages: of which one has to be installed; the last is the one that has the code. Empty: Python has it.
        module: what is imported to see whether it works.
        sink: module and class in telemetry/, imported when it is used.
        arguments: what the sink takes before the run directory.
        leaves: the file or folder that it writes in the run directory.
        on: the value of `setting` where another tool's config does no more than name the tracker; None: it has to say
            an address as well.
        axolotl: the keys with which Axolotl asks for it.
        axolotl_values: those of its keys whose value is one of our settings → that setting.
        quiet: variables, and the values with which it neither talks nor reports on its users, and gives up in seconds:
            whoever calls it tries again.
        variables: with any of which it knows where to log, and who does.
        host: of which a login in ~/.netrc does as well.
        unknown: what it does where neither is there.
        login: the command after which it asks nothing, if it asks who logs; its `setting` then has the value offline.
        offline: the variable that keeps it from asking, as it is set.
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
        """The dotted key of what switches it on."""
        return f"telemetry.{self.setting}"

    @property
    def without_address(self) -> str:
        """Why the name alone is not enough."""
        return f"{self.title}'s address is not in the file: give it as {self.key}"

    @property
    def is_set_up(self) -> bool:
        """Whether this machine says where it logs and who does."""
        return env.any_set(self.variables) or (self.host != "" and env.logged_in(self.host))

    def asks(self, section: TelemetrySection) -> bool:
        """Whether it would ask who logs, where nobody is logged in."""
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
        unknown="would ask for a key when a run starts", login="wandb login", offline="WANDB_MODE=offline",
    ),
    "tensorboard": Tracker(
        "TensorBoard", "tensorboard", ("tensorboard",), "torch.utils.tensorboard", "tensorboard:TensorBoard",
        leaves="tensorboard", on=True, axolotl=("use_tensorboard",),
        quiet={"TF_CPP_MIN_LOG_LEVEL": "2"},  # it imports TensorFlow where that is installed
    ),
    "prometheus": Tracker(
        "Prometheus", "prometheus_port", ("prometheus-client",), "prometheus_client", "prometheus:Prometheus",
        lambda section: (section.prometheus_port, section.prometheus_host), leaves="prometheus-target.json",
    ),
}  # fmt: skip
"""By name: as other tools' report_to has it, and as the extra that installs it is called."""


def enabled_trackers(section: TelemetrySection) -> dict[str, Tracker]:
    """Those that a config asks for."""
    return {
        name: tracker
        for name, tracker in TRACKERS.items()
        if getattr(section, tracker.setting) != TelemetrySection.model_fields[tracker.setting].default
    }
