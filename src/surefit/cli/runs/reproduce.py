"""The verb `runs reproduce`: test whether the same config, data and seed still give the same loss curve.

The first steps are trained again in a temporary directory, with the run's own length (the learning rate depends on it),
and compared with metrics.jsonl. Nothing is written into the run.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.options import RunPath
from surefit.cli.render import Output
from surefit.cli.runs.run_facts import newest_checkpoint, require_run, training_data_facts
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, DataError
from surefit.core.rundir import RunDir, read_json, read_jsonl
from surefit.core.units import plural

if TYPE_CHECKING:
    from surefit.stages.run_context import CheckedRun

COMPARED = ("loss", "grad_norm", "learning_rate", "tokens", "supervised_tokens")
"""Keys of every step's line; the first two are measured, the others must be the same on every machine."""
MEASURED = ("loss", "grad_norm")
TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 2e-2}
"""The relative difference that another software stack may cause, by the model's dtype (docs/runs.md)."""


class _StepLimitReached(Exception):
    """The requested number of steps is done."""


@dataclass(frozen=True)
class LossCurveComparison:
    """Comparison of two loss curves, step by step.

    Attributes:
        steps: number of steps compared.
        identical: whether they are equal bit for bit.
        largest: largest relative difference of a loss or gradient norm.
        first: the first difference, in words.
    """

    steps: int
    identical: bool
    largest: float
    first: str | None


@verb
def reproduce(
    out: Output,
    run: RunPath,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps.")] = 20,
) -> int:
    """Train the first steps again, elsewhere, and compare the loss curve; exit code 1 if it differs."""
    from surefit.stages.run_context import load_checked_run

    directory = require_run(run)
    original_lines = _lines(directory, steps)
    with tempfile.TemporaryDirectory(prefix="surefit-reproduce-") as folder:
        config = Path(folder) / "resolved.yaml"
        shutil.copy2(directory.resolved, config)
        overrides = [f"output_dir={folder}/run", "evaluate.in_training=false", "checkpoint.metric_for_best_model=null"]
        new_run = load_checked_run(config, overrides)
        data = _train_again(out, new_run, len(original_lines))
        stack = find_stack_changes(directory, new_run)  # after loading the model, which sets the number of threads
        new_lines = read_jsonl(new_run.run.metrics)
    changed = _data_changed(directory, data)
    curve = compare_curves(original_lines, [line for line in new_lines if "loss" in line])
    return _say(out, directory, new_run.resolved.config.model.dtype, curve, stack, changed)


def _lines(run: RunDir, steps: int) -> list[dict[str, Any]]:
    lines = [line for line in read_jsonl(run.metrics) if "loss" in line][:steps]
    if not lines:
        raise DataError(
            "no step is on record", code="E1039", path=run.metrics, help="train first: there is nothing to compare with"
        )
    return lines


def find_stack_changes(run: RunDir, again: CheckedRun) -> list[str]:
    """Return the differences of software, threads, device and parallelism from the run's, in words."""
    from surefit.checkpoint.manager import changed_versions
    from surefit.facts.record import environment_record
    from surefit.train.identity import changed_settings

    newest = newest_checkpoint(run)
    if newest is not None:
        trainer = read_json(newest / "trainer.json")
        return changed_versions(newest) + changed_settings(trainer, again.resolved.config)
    if not run.environment.exists():
        return ["the environment of the run is not on record"]
    recorded, current = read_json(run.environment), environment_record(again.hardware)
    return [f"{key}: {recorded.get(key)}, now {current.get(key)}" for key in ("python", "packages", "cpu_count", "gpus")
            if recorded.get(key) != current.get(key)]  # fmt: skip


def _train_again(out: Output, again: CheckedRun, steps: int) -> dict[str, Any]:
    """Train the given number of steps; return the facts that identify the rows."""
    from surefit.model.load import load_model
    from surefit.model.prepare import prepare_for_training
    from surefit.stages.training import tokenize_dataset
    from surefit.train.inputs import Callbacks, TrainingEnvironment
    from surefit.train.loop import Trainer

    config = again.resolved.config
    again.run.create()
    data = tokenize_dataset(out, again, None)
    model, _ = prepare_for_training(load_model(config.model, again.hardware), config, again.hardware)
    with out.training_progress() as on_step:

        def watch(state: Any) -> None:
            on_step(state)
            if state.step >= steps:
                raise _StepLimitReached

        environment = TrainingEnvironment(model=again.model, hardware=again.hardware)
        training = Trainer(model, data, config, again.run, environment, Callbacks(watch))
        with contextlib.suppress(_StepLimitReached):
            training.fit()
    return {"rows": len(training.survey.lengths), "content": training.survey.sha256}


def _data_changed(run: RunDir, data: Mapping[str, Any]) -> str | None:
    recorded = training_data_facts(run)
    if "content" in recorded and recorded["content"] != data["content"]:
        return f"{recorded['rows']:,} rows with the hash {recorded['content'][:12]} then, {data['rows']:,} with " \
               f"{data['content'][:12]} now"  # fmt: skip
    return None


def compare_curves(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> LossCurveComparison:
    """Compare the lines of two metrics.jsonl, step by step."""
    largest, first = 0.0, None
    for old_line, new_line in zip(before, after, strict=False):
        for key in COMPARED:
            if old_line.get(key) == new_line.get(key):
                continue
            distance = _relative_difference(old_line.get(key), new_line.get(key)) if key in MEASURED else math.inf
            largest = max(largest, distance)
            first = first or f"step {old_line['step']}: {key} {old_line.get(key)} then, {new_line.get(key)} now"
    if len(after) < len(before):
        largest, first = math.inf, first or f"it ended after {plural(len(after), 'step')}"
    return LossCurveComparison(min(len(before), len(after)), first is None, largest, first)


def _relative_difference(old: float | None, new: float | None) -> float:
    """Return the relative difference; infinite if a number is missing, as for a rejected step."""
    return math.inf if old is None or new is None else abs(new - old) / max(abs(old), 1e-12)


def _say(
    out: Output, run: RunDir, dtype: str, curve: LossCurveComparison, stack: Sequence[str], changed: str | None
) -> int:
    tolerance = TOLERANCES.get(dtype, TOLERANCES["float32"]) if stack else 0.0
    passed = changed is None and curve.largest <= tolerance
    for line in stack:
        out.note(f"another stack: {line}")
    if changed:
        out.say(f"The training data are not what they were: {changed}", "red")
    count = plural(curve.steps, "step")
    if curve.identical:
        out.say(f"{count} again: the same loss and gradient norm, bit for bit", "green" if passed else None)
    else:
        bound = f"{tolerance:g} is allowed on another stack" if stack else "the stack is the same: none is allowed"
        size = f"largest relative difference {curve.largest:.2g}; {bound}"
        out.say(f"{count} again: {size}. First: {curve.first}", "green" if passed else "red")
    out.say("Reproduced" if passed else "NOT reproduced", "green" if passed else "red")
    out.result(
        {
            "run": str(run.path), "reproduced": passed, "steps": curve.steps, "identical": curve.identical,
            "largest_relative_difference": curve.largest if math.isfinite(curve.largest) else None,
            "tolerance": tolerance, "first_difference": curve.first, "stack": list(stack), "data_changed": changed,
        }
    )  # fmt: skip
    return EXIT_OK if passed else EXIT_FINDINGS
