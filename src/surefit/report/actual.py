"""Plan against actual: the forecasts of plan.json beside the values in the run's logs and files, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose

from surefit.config.load import load_config
from surefit.config.resolve import ResolvedConfig
from surefit.core.errors import SureFitError
from surefit.core.rundir import RunDir, disk_size
from surefit.plan.verify import PlannedVersusActual, measure_plan_deviations
from surefit.report.artefacts import Artefacts
from surefit.report.curves import TrainingCurves
from surefit.report.shapes import PlannedMemory, PlanRecord, TermRecord
from surefit.report.text import MINUS, NBSP, drop_surrogates, shorten_text
from surefit.report.timeline import Attempt

MAX_PHASES = 20
STEPS = "seconds in all steps"
MEMORY_COLUMNS = (
    ("In tensors, planned", "planned"),
    ("Measured", "measured"),
    ("Held by the allocator, planned", "planned_reserved"),
    ("Measured", "measured_reserved"),
    ("Process, measured", "resident"),
)
"""Title and `MemoryPhase` field of each column of the memory by phase."""
FOLDERS = ("checkpoints", "adapter", "model", "merged", "eval", "rejected")


@dataclass(frozen=True)
class MemoryPhase:
    """Memory of one phase of training, in bytes; None if it was not planned, or not measured.

    Attributes:
        planned, planned_reserved: bytes in tensors, and bytes that the allocator reserves.
        measured, measured_reserved: the same, measured on CUDA.
        resident: RAM of the process.
    """

    name: str
    planned: float | None = None
    planned_reserved: float | None = None
    measured: float | None = None
    measured_reserved: float | None = None
    resident: float | None = None


@dataclass(frozen=True)
class PlanComparison:
    """The plan beside the run, as the page shows it: quantities, memory by phase, directories, notes.

    Attributes:
        memory_columns: title and `MemoryPhase` field of the columns that have something to show.
        fullest: the simulated fullest moment of a step, by component; empty if nothing was simulated.
        planned_peak: bytes in tensors at that moment, or by the formula.
        resident: peak RAM of the process, in bytes.
        same_resident: whether that was the RAM of every phase.
    """

    rows: list[PlannedVersusActual]
    phases: list[MemoryPhase]
    memory_columns: list[tuple[str, str]]
    fullest: list[TermRecord]
    planned_peak: float | None
    resident: float | None
    same_resident: bool
    folders: list[tuple[str, int]]
    notes: list[str]

    @property
    def on_gpu(self) -> bool:
        """Return whether the memory of tensors was measured, and not only the RAM of the process."""
        return any(phase.measured is not None for phase in self.phases)


def compare_plan_with_run(found: Artefacts, trained: TrainingCurves | None, tries: Sequence[Attempt]) -> PlanComparison:
    """Compare everything that both have; a damaged file only removes its own part."""
    rows, notes = _verified(found)
    plan = found.plan
    phases = _phases(plan.estimate if plan else None, found)
    fullest = _fullest(plan) if plan else []
    peak = (sum(term.bytes for term in fullest) or plan.memory_total_bytes) if plan else None
    residents = [phase.resident for phase in phases if phase.resident is not None]
    same_resident = len(residents) > 1 and len(set(residents)) == 1
    columns = [
        (title, field)
        for title, field in MEMORY_COLUMNS
        if any(getattr(phase, field) is not None for phase in phases) and not (field == "resident" and same_resident)
    ]
    return PlanComparison(
        rows=[*_whole_run(found, trained, tries, peak, phases), *rows],
        phases=[phase for phase in phases if any(getattr(phase, field) is not None for _, field in columns)],
        memory_columns=columns,
        fullest=fullest,
        planned_peak=peak,
        resident=max(residents, default=None),
        same_resident=same_resident,
        folders=_folders(found.run),
        notes=notes,
    )


def _fullest(plan: PlanRecord) -> list[TermRecord]:
    """Return the simulated fullest moment of a step by component, with the formula's explanation where both agree."""
    if plan.estimate is None or plan.estimate.peak is None:
        return []
    by_formula = {term.term: term for term in plan.memory}
    return [
        term.model_copy(update={"why": same.why})
        if (same := by_formula.get(term.term)) and isclose(same.bytes, term.bytes, rel_tol=0.02)
        else term
        for term in plan.estimate.peak.terms
    ]


def _verified(found: Artefacts) -> tuple[list[PlannedVersusActual], list[str]]:
    """Return the rows and notes of `surefit plan --against` about time and disk."""
    if found.plan is None or not found.metrics:
        return [], []
    try:
        resolved = ResolvedConfig(load_config(found.run.resolved).config, {}, 1, found.plan.steps.total_steps)
        deviations = measure_plan_deviations(found.documents[found.run.plan], resolved, found.run)
    except (SureFitError, LookupError, TypeError, ValueError, AttributeError, AssertionError, OSError):
        return [], []  # some file is not as it was written; the verdict lists the damaged ones
    rows = [row for row in deviations.rows if ":" not in row.what and row.what not in ("optimizer steps", STEPS)]
    return rows, [
        shorten_text(drop_surrogates(note), 400) for note in deviations.notes if not note.startswith("memory by phase:")
    ]


def _whole_run(
    found: Artefacts,
    trained: TrainingCurves | None,
    tries: Sequence[Attempt],
    peak: float | None,
    phases: Sequence[MemoryPhase],
) -> list[PlannedVersusActual]:
    plan = found.plan
    time = plan.time if plan else None
    parts = (time.parts or {}) if time else {}
    attempt_seconds = [attempt.seconds for attempt in tries if attempt.stage == "train" and attempt.seconds is not None]
    return [
        PlannedVersusActual("Peak memory, in tensors", peak, _peak(trained, phases), "bytes"),
        PlannedVersusActual(
            "Optimizer steps", plan.steps.total_steps if plan else None, trained.last_step if trained else None, "steps"
        ),
        PlannedVersusActual(
            "Time in training steps", parts.get("steps"), trained.seconds if trained else None, "seconds"
        ),
        PlannedVersusActual(
            "Total training time", time.seconds if time else None, sum(attempt_seconds) or None, "seconds"
        ),
    ]


def _peak(trained: TrainingCurves | None, phases: Sequence[MemoryPhase]) -> float | None:
    """Return the peak memory of a GPU's tensors; None on a CPU, where only the process's RAM is known, a different
    quantity."""
    if trained and trained.peak_memory is not None:
        return trained.peak_memory
    return max((phase.measured for phase in phases if phase.measured is not None), default=None)


def _phases(estimate: PlannedMemory | None, found: Artefacts) -> list[MemoryPhase]:
    """Return the planned phases in their order, then those that were only measured."""
    planned_phases = {phase.name: phase for phase in estimate.phases} if estimate else {}
    measured_phases = _most([found.dry_pass.phases] if found.dry_pass else [])
    measured_phases |= _most(event.phases for event in found.events if event.event == "memory")
    names = dict.fromkeys([*planned_phases, *measured_phases])
    phases = []
    for name in list(names)[:MAX_PHASES]:
        figures, forecast = measured_phases.get(name, {}), planned_phases.get(name)
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
    """Return phase → the largest values that any attempt at the training measured."""
    maxima: dict[str, dict[str, float]] = {}
    for phases in attempts:
        for name, figures in phases.items():
            previous = maxima.setdefault(name, {})
            previous.update({key: max(value, previous.get(key, 0.0)) for key, value in figures.items()})
    return maxima


def _folders(run: RunDir) -> list[tuple[str, int]]:
    """Return the sizes on disk of the run's directories, in bytes, and of all other files of the run together."""
    sizes = [(name, disk_size(run.path / name)) for name in FOLDERS if (run.path / name).is_dir()]
    other_files = sum(disk_size(path) for path in run.path.glob("*") if path.is_file() and path != run.report)
    return [*sizes, ("logs and records", other_files)] if sizes or other_files else []


def percent_off(row: PlannedVersusActual) -> str:
    """Return the plan's error in percent of the measured value; empty if unknown.

    >>> [percent_off(PlannedVersusActual("x", planned, 100.0, "bytes")) for planned in (110.0, 99.9)]
    ['+10\xa0%', '0\xa0%']
    """
    if row.error is None:
        return ""
    text = f"{100 * row.error:+.0f}".replace("-", MINUS)
    return f"{'0' if text[1:] == '0' else text}{NBSP}%"
