"""Plan against actual: what plan.json forecast beside what the run's logs and files say, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefit.config.load import load_config
from surefit.config.resolve import ResolvedConfig
from surefit.core.errors import SureFitError
from surefit.core.rundir import RunDir
from surefit.plan.verify import PlannedVersusActual, measure_plan_deviations
from surefit.report.artefacts import Artefacts
from surefit.report.curves import TrainingCurves
from surefit.report.shapes import PlannedMemory
from surefit.report.text import MINUS, NBSP, drop_surrogates, shorten_text
from surefit.report.timeline import Attempt

MAX_PHASES = 20
STEPS = "seconds in all steps"
FOLDERS = ("checkpoints", "adapter", "model", "merged", "eval", "rejected")


@dataclass(frozen=True)
class MemoryPhase:
    """The memory of one part of training, in bytes; None where it was not planned, or not measured.

    Attributes:
        planned, planned_reserved: of tensors, and with what the allocator keeps.
        measured, measured_reserved: the same, on CUDA.
        resident: the RAM of the process.
    """

    name: str
    planned: float | None = None
    planned_reserved: float | None = None
    measured: float | None = None
    measured_reserved: float | None = None
    resident: float | None = None


@dataclass(frozen=True)
class PlanComparison:
    """What the page shows of the plan beside the run: quantities, memory by phase, folders, remarks."""

    rows: list[PlannedVersusActual]
    phases: list[MemoryPhase]
    folders: list[tuple[str, int]]
    notes: list[str]

    @property
    def on_gpu(self) -> bool:
        """Whether the memory of tensors was measured; else only that of the whole process."""
        return any(phase.measured is not None for phase in self.phases)

    @property
    def resident(self) -> float | None:
        """The RAM of the process at most."""
        return max((phase.resident for phase in self.phases if phase.resident is not None), default=None)


def compare_plan_with_run(found: Artefacts, trained: TrainingCurves | None, tries: Sequence[Attempt]) -> PlanComparison:
    """Everything that can be compared; a damaged file takes away its own part only."""
    rows, notes = _verified(found)
    phases = _phases(found.plan.estimate if found.plan else None, found)
    return PlanComparison([*_whole_run(found, trained, tries, phases), *rows], phases, _folders(found.run), notes)


def _verified(found: Artefacts) -> tuple[list[PlannedVersusActual], list[str]]:
    """What `surefit plan --against` says of time and disk."""
    if found.plan is None or not found.metrics:
        return [], []
    try:
        resolved = ResolvedConfig(load_config(found.run.resolved).config, {}, 1, found.plan.steps.total_steps)
        compared = measure_plan_deviations(found.documents[found.run.plan], resolved, found.run)
    except (SureFitError, LookupError, TypeError, ValueError, AttributeError, AssertionError, OSError):
        return [], []  # some file is not as it was written; those that are damaged are named in the verdict
    rows = [row for row in compared.rows if ":" not in row.what and row.what not in ("optimizer steps", STEPS)]
    return rows, [
        shorten_text(drop_surrogates(note), 400) for note in compared.notes if not note.startswith("memory by phase:")
    ]


def _whole_run(
    found: Artefacts, trained: TrainingCurves | None, tries: Sequence[Attempt], phases: Sequence[MemoryPhase]
) -> list[PlannedVersusActual]:
    plan = found.plan
    estimate, time = (plan.estimate, plan.time) if plan else (None, None)
    peak = estimate.peak_bytes if estimate else plan.memory_total_bytes if plan else None
    parts = (time.parts or {}) if time else {}
    spent = [attempt.seconds for attempt in tries if attempt.stage == "train" and attempt.seconds is not None]
    return [
        PlannedVersusActual("Peak memory", peak, _peak(trained, phases), "bytes"),
        PlannedVersusActual(
            "Optimizer steps", plan.steps.total_steps if plan else None, trained.last_step if trained else None, "steps"
        ),
        PlannedVersusActual(
            "Time in training steps", parts.get("steps"), trained.seconds if trained else None, "seconds"
        ),
        PlannedVersusActual("Time of all of training", time.seconds if time else None, sum(spent) or None, "seconds"),
    ]


def _peak(trained: TrainingCurves | None, phases: Sequence[MemoryPhase]) -> float | None:
    """What a GPU's tensors took at most; on a CPU there is only the whole process, which is another quantity."""
    if trained and trained.peak_memory is not None:
        return trained.peak_memory
    return max((phase.measured for phase in phases if phase.measured is not None), default=None)


def _phases(estimate: PlannedMemory | None, found: Artefacts) -> list[MemoryPhase]:
    """Planned phases in their order, then those that were only measured."""
    planned = {phase.name: phase for phase in estimate.phases} if estimate else {}
    measured = _most([found.dry_pass.phases] if found.dry_pass else [])
    measured |= _most(event.phases for event in found.events if event.event == "memory")
    names = dict.fromkeys([*planned, *measured])
    phases = []
    for name in list(names)[:MAX_PHASES]:
        figures, forecast = measured.get(name, {}), planned.get(name)
        phases.append(
            MemoryPhase(
                name,
                forecast.allocated_bytes if forecast else None,
                forecast.reserved_bytes if forecast else None,
                figures.get("allocated"),
                figures.get("reserved"),
                figures.get("resident"),
            )
        )
    return phases


def _most(attempts: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """phase → the most that any attempt at the training measured."""
    found: dict[str, dict[str, float]] = {}
    for phases in attempts:
        for name, figures in phases.items():
            before = found.setdefault(name, {})
            before.update({key: max(value, before.get(key, 0.0)) for key, value in figures.items()})
    return found


def _folders(run: RunDir) -> list[tuple[str, int]]:
    """What the run's folders take on the disk now, in bytes, and all other files of the run together."""
    sizes = [(name, _size(run.path / name)) for name in FOLDERS if (run.path / name).is_dir()]
    others = sum(_bytes(path) for path in run.path.glob("*") if path.is_file() and path != run.report)
    return [*sizes, ("logs and records", others)] if sizes or others else []


def _size(directory: Path) -> int:
    return sum(_bytes(path) for path in directory.rglob("*") if path.is_file())


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it is being replaced at this moment
        return 0


def percent_off(row: PlannedVersusActual) -> str:
    """How far the plan is off, in per cent of what was measured; empty where that cannot be said.

    >>> [percent_off(PlannedVersusActual("x", planned, 100.0, "bytes")) for planned in (110.0, 99.9)]
    ['+10\xa0%', '0\xa0%']
    """
    if row.error is None:
        return ""
    text = f"{100 * row.error:+.0f}".replace("-", MINUS)
    return f"{'0' if text[1:] == '0' else text}{NBSP}%"
