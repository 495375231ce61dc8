"""deploy/: Prometheus takes it, its alerts fire when they should, and the dashboard asks for what is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefit.core.rundir import RunDir

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = re.compile(r"\bsurefit_[a-z_]+")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here (Debian: prometheus)"
)


def promtool(*arguments: object) -> str:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every name that the sink can show, GPUs included."""
    pytest.importorskip("prometheus_client")
    from surefit.telemetry.prometheus import NvmlCollector, Prometheus

    sink = Prometheus(0, "127.0.0.1", RunDir(tmp_path))
    found = {f"surefit_gpu_{name}" for name, _, _ in NvmlCollector("x")._quantities()}
    for family in sink.registry.collect():
        found.add(f"{family.name}_total" if family.type == "counter" else family.name)
    return found


def test_the_dashboard_asks_for_metrics_that_exist(names: set[str]) -> None:
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    asked = {name for panel in board["panels"] for target in panel["targets"] for name in NAME.findall(target["expr"])}
    assert asked == names
    assert NAME.findall(board["templating"]["list"][1]["query"]["query"]) == ["surefit_step"]


def test_its_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_alerts_ask_for_metrics_that_exist(names: set[str]) -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    asked = {name for rule in rules for name in NAME.findall(rule["expr"])}
    assert asked
    assert asked <= names


@needs_promtool
def test_prometheus_takes_both_files() -> None:
    assert "6 rules found" in promtool("check", "rules", DEPLOY / "alerts.yml")
    assert "valid prometheus config" in promtool("check", "config", DEPLOY / "prometheus.yml")


def fires(alert: str, at: str, **series: str) -> dict[str, Any]:
    """A case of `promtool test rules`: these series, and one of this alert at that time; with `nothing_` none."""
    quiet = alert.startswith("nothing_")
    inputs = [
        {"series": f'surefit_{name}{{run="r"}}' if name != "up" else 'up{job="surefit"}', "values": values}
        for name, values in series.items()
    ]
    return {
        "name": alert,
        "interval": "1m",
        "input_series": inputs,
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert.removeprefix("nothing_")}",alertstate="firing"}})',
                "eval_time": at,
                "exp_samples": [] if quiet else [{"labels": "{}", "value": 1}],
            }
        ],
    }


@needs_promtool
@pytest.mark.parametrize(
    "case",
    [
        fires("SureFitStalled", "30m", last_step_timestamp_seconds="0x40"),
        fires("nothing_SureFitStalled", "30m", last_step_timestamp_seconds="0+60x40"),
        fires("SureFitGone", "10m", up="1 1 1 0x20"),
        fires("nothing_SureFitGone", "10m", up="1x20"),
        fires("SureFitLossNotFinite", "5m", loss="2 2 2 NaN NaN NaN"),
        fires("nothing_SureFitLossNotFinite", "5m", loss="2 2 2 1 1 1"),
        fires("SureFitStepsRejected", "10m", rejected_steps_total="0 0 0 0 0 1x20"),
        fires("nothing_SureFitStepsRejected", "10m", rejected_steps_total="4x20"),
        fires("SureFitDiskFull", "10m", disk_free_bytes="20e9 20e9 9e9x20"),
        fires("SureFitDiskFillsUp", "90m", disk_free_bytes="100e9-500e6x90"),
        fires("nothing_SureFitDiskFillsUp", "90m", disk_free_bytes="100e9-1e6x90"),
    ],
    ids=lambda case: case["name"],
)
def test_alerts_fire_when_they_should(tmp_path: Path, case: dict[str, Any]) -> None:
    file = tmp_path / "cases.yml"
    cases = {
        "rule_files": [str(DEPLOY / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [{key: value for key, value in case.items() if key != "name"}],
    }
    file.write_text(yaml.safe_dump(cases))
    promtool("test", "rules", file)
