"""Plan against actual: the predictions for a run beside the measurements in its run directory. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from surefit.config.resolve import ResolvedConfig
from surefit.core.errors import ConfigError
from surefit.core.rundir import RunDir, read_json, read_jsonl
from surefit.facts.disk import TOKENIZER_FILES, copies_at_once
from surefit.facts.named_templates import TEMPLATE_DIR

Unit = Literal["bytes", "seconds", "steps"]
KEPT_TERMS = ("weights", "adapter", "optimizer")
"""Memory terms that are held between two steps."""


@dataclass(frozen=True)
class PlannedVersusActual:
    """One quantity, planned and measured: None where it was not planned, or not measured."""

    what: str
    planned: float | None
    actual: float | None
    unit: Unit

    @property
    def error(self) -> float | None:
        """Relative error of the plan, as a share of the measurement; positive where the plan was too high."""
        if self.planned is None or not self.actual:
            return None
        return self.planned / self.actual - 1

    def as_dict(self) -> dict[str, Any]:
        """Return the quantity as a dict for JSON."""
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class PlanDeviations:
    """A plan compared with a run.

    Attributes:
        rows: memory by phase, steps, time, disk.
        notes: quantities that could not be compared, with the reason, and differences between the two.
    """

    rows: tuple[PlannedVersusActual, ...]
    notes: tuple[str, ...]

    @property
    def widest(self) -> PlannedVersusActual | None:
        """Row with the largest relative error."""
        comparable = [row for row in self.rows if row.error is not None]
        return max(comparable, key=lambda row: abs(row.error or 0.0), default=None)


def measure_plan_deviations(planned: dict[str, Any], resolved: ResolvedConfig, run: RunDir) -> PlanDeviations:
    """Compare a plan with a run.

    Args:
        planned: the content of plan.json, as built now.
        resolved: the config it was made for.
        run: the run directory.

    Raises:
        ConfigError: nothing was trained there.
        DataError: a log of the run is damaged.
    """
    steps = [line for line in read_jsonl(run.metrics) if "loss" in line]
    if not steps:
        raise ConfigError(
            "this run has no training steps", code="E8019", path=run.path, help="name a run directory after training"
        )
    phases = _measured_phases(run)
    rows = [*_memory(planned, phases), *_time(planned, steps), *_disk(planned, resolved, run)]
    return PlanDeviations(tuple(rows), tuple(_notes(planned, run, phases)))


def _measured_phases(run: RunDir) -> dict[str, dict[str, int]]:
    """Return phase → measurements, the maximum over all attempts at the training."""
    phases: dict[str, dict[str, int]] = {}
    for event in read_jsonl(run.events):
        for name, figures in event.get("phases", {}).items() if event["event"] == "memory" else ():
            before = phases.get(name, {})
            phases[name] = {key: max(value, before.get(key, 0)) for key, value in figures.items()}
    return phases


def _memory(planned: dict[str, Any], phases: dict[str, dict[str, int]]) -> Iterator[PlannedVersusActual]:
    estimate = planned.get("estimate") or {}
    for phase in estimate.get("phases", []):
        actual = phases.get(phase["name"], {})
        for key in ("allocated", "reserved"):
            if key in actual:
                yield PlannedVersusActual(f"{phase['name']}: {key}", phase[f"{key}_bytes"], actual[key], "bytes")
    resident = max((figures.get("resident", 0) for figures in phases.values()), default=0)
    if resident and "training" in estimate:
        yield PlannedVersusActual("the process's RAM", estimate["training"]["likely_bytes"], resident, "bytes")
    between_steps = next(
        (phases[name]["held"] for name in ("step", "first step") if "held" in phases.get(name, {})), None
    )
    if between_steps is not None and estimate.get("peak"):
        terms = {term["term"]: term["bytes"] for term in estimate["peak"]["terms"]}
        expected = sum(terms.get(name, 0) for name in KEPT_TERMS)
        yield PlannedVersusActual("between steps: weights, adapter, optimizer", expected, between_steps, "bytes")


def _time(planned: dict[str, Any], steps: list[dict[str, Any]]) -> Iterator[PlannedVersusActual]:
    time = planned.get("time") or {}
    # The first step of a process also warms up kernels and allocator; a median leaves it out.
    seconds = [line["seconds"] for line in steps]
    yield PlannedVersusActual("optimizer steps", planned["steps"]["total_steps"], steps[-1]["step"], "steps")
    yield PlannedVersusActual(
        "seconds per step (median)", time.get("seconds_per_step"), statistics.median(seconds), "seconds"
    )
    parts = time.get("parts") or {}
    yield PlannedVersusActual("seconds in all steps", parts.get("steps"), sum(seconds), "seconds")


def _disk(planned: dict[str, Any], resolved: ResolvedConfig, run: RunDir) -> Iterator[PlannedVersusActual]:
    terms = {term["term"]: term["bytes"] for term in planned["disk"]}
    saved = sorted(run.checkpoints.glob("step-*"), key=lambda path: path.stat().st_mtime)
    if "checkpoints" in terms and saved:
        yield PlannedVersusActual(
            "one checkpoint", terms["checkpoints"] // copies_at_once(resolved), _size(saved[-1]), "bytes"
        )
    for term, directory in (("adapter", run.adapter), ("model", run.model), ("merged", run.merged)):
        if term in terms and directory.is_dir():
            yield PlannedVersusActual(f"{term} on disk", terms[term], _size(directory), "bytes")


def _size(directory: Path) -> int:
    """Return the bytes of a directory's files without the tokenizer's, which are a separate term."""
    files = (path for path in directory.rglob("*") if path.is_file() and not _of_tokenizer(path))
    return sum(path.stat().st_size for path in files)


def _of_tokenizer(path: Path) -> bool:
    return path.name in TOKENIZER_FILES or path.parent.name == TEMPLATE_DIR


def _notes(planned: dict[str, Any], run: RunDir, phases: dict[str, dict[str, int]]) -> Iterator[str]:
    estimate = planned.get("estimate") or {}
    if run.plan.is_file():
        device = read_json(run.plan).get("device", {}).get("name")
        if device not in (None, planned["device"]["name"]):
            yield f"the run was planned for {device}, but this plan is for {planned['device']['name']}"
    if not phases:
        yield "memory: the run did not record it"
    elif not any("allocated" in figures for figures in phases.values()):
        peak_resident = max(figures.get("resident", 0) for figures in phases.values())
        training = estimate.get("training", estimate)
        yield (
            f"memory by phase: measured on CUDA only; the process peaked at {peak_resident:,} bytes of RAM, planned "
            f"{training.get('low_bytes', 0):,} to {training.get('high_bytes', 0):,}"
        )
    if not estimate.get("phases"):
        yield f"memory by phase: the plan was not simulated: {estimate.get('not_simulated', 'no reason is recorded')}"
    if planned.get("time") is None:
        yield "time: not planned, because the speed of this device is unknown; `surefit calibrate` measures it"
