"""A real MLflow server and a real Prometheus on this machine, to be killed and started again at will.

Imported by tests/telemetry and benchmarks/telemetry_cost.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def until(found: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """What `found` returns, once it is true; an exception in it counts as not yet."""
    limit, reason = time.monotonic() + seconds, ""
    while time.monotonic() < limit:
        try:
            if value := found():
                return value
        except Exception as error:
            reason = f": {error}"
        time.sleep(0.1)
    raise TimeoutError(f"{what}: not within {seconds:.0f} s{reason}")


class Server:
    """A process on a port of its own, which keeps it when it is started again."""

    health = "/"
    environment: ClassVar[dict[str, str]] = {}

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self.directory / "output", "ab") as output:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                cwd=self.directory, env={**os.environ, **self.environment},
            )  # fmt: skip
        until(lambda: get(self.url + self.health), type(self).__name__, 120)

    def kill(self) -> None:
        """SIGKILL to the server and its workers, which all are in the session that it leads."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class MLflowServer(Server):
    """Runs in an SQLite file, artefacts in a folder."""

    health = "/health"
    # Its job queue is seven more processes, which a tracking server does not need.
    environment: ClassVar[dict[str, str]] = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}

    @staticmethod
    def missing() -> str | None:
        return None if find_spec("mlflow") and find_spec("sqlalchemy") else "mlflow is not installed: no server to ask"

    def command(self) -> list[str]:
        return [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.directory}/mlflow.db",
            "--artifacts-destination", str(self.directory / "artifacts"),
        ]  # fmt: skip


class PrometheusServer(Server):
    """Scrapes what deploy/prometheus.yml says, but every second, and one run's target file."""

    health = "/-/ready"

    def __init__(self, directory: Path, target: Path) -> None:
        super().__init__(directory)
        self.target = target

    @staticmethod
    def missing() -> str | None:
        return None if shutil.which("prometheus") else "prometheus is not installed (Debian has it)"

    def command(self) -> list[str]:
        settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        settings["global"]["scrape_interval"] = settings["global"]["evaluation_interval"] = "1s"
        settings["rule_files"] = [str(DEPLOY / "alerts.yml")]
        (job,) = settings["scrape_configs"]
        job["file_sd_configs"] = [{"files": [str(self.target)], "refresh_interval": "1s"}]
        (self.directory / "prometheus.yml").write_text(yaml.safe_dump(settings))
        return [
            "prometheus", f"--config.file={self.directory}/prometheus.yml",
            f"--storage.tsdb.path={self.directory}/data", f"--web.listen-address=127.0.0.1:{self.port}",
        ]  # fmt: skip

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression, now."""
        answer = json.loads(get(f"{self.url}/api/v1/query?query={urllib.parse.quote(expression)}"))
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result
