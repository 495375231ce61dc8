"""SureFit from Python: the stages of a run as functions with typed results. `import surefit` gives these names.

What a function returns has the fields that the command of the same name prints with `--json`, all of them in
`document`; what would be an exit code is an exception, or a property. Nothing heavy is imported before it is needed.

Stable, within a minor version: the names in `__all__`, their parameters, and the attributes of what they return. What
`document` holds may gain fields. Everything else in the package may change with any release.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from surefit.config.load import LoadedConfig, load_config, load_text
from surefit.core import env
from surefit.core.errors import ConfigError, DataError
from surefit.core.progress import progress_listener
from surefit.core.rundir import write_atomic
from surefit.results import Certificate, CheckReport, Comparison, FindingResult, Plan, Scores, TrainingResult
from surefit.stages.progress_listener import LineListener, ProgressListener
from surefit.stages.run_context import CheckedRun, find_config_file, load_checked_run, load_run_context

if TYPE_CHECKING:
    from surefit.config.schema import Config as Settings
    from surefit.train.progress import TrainingProgress

__all__ = [
    "Certificate",
    "CheckReport",
    "Comparison",
    "Config",
    "FindingResult",
    "Plan",
    "Scores",
    "TrainingResult",
    "check",
    "compare",
    "evaluate",
    "merge",
    "plan",
    "report",
    "train",
]
# As the command line does: libraries read it when they are imported, and any of these functions may import them first.
env.quiet_libraries()
env.sleep_at_barriers()
PYTHON = Path("python")
"""What messages call a config that is in no file."""


@dataclass(frozen=True)
class Config:
    """A valid config, of a file or of a dict.

    Attributes:
        loaded: the settings, and where each came from.
    """

    loaded: LoadedConfig

    @classmethod
    def load(cls, path: str | Path, changes: Mapping[str, Any] | None = None) -> Config:
        """Read a YAML file, or the resolved config of a run directory.

        Args:
            changes: dotted key → value, as `--set` takes them.

        Raises:
            ConfigError: with file, line and field, for every problem found.
        """
        # A run that was moved is where it is now.
        here = {"output_dir": str(path)} if Path(path).is_dir() else {}
        return cls(load_config(find_config_file(Path(path)), _overrides(here | dict(changes or {}))))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Config:
        """A config from nested mappings, laid out as the YAML file.

        Where the file would name data (`data.train`, `data.eval`, `evaluate.extra_sets`), rows may stand themselves: a
        list of dicts, a pandas DataFrame, a `datasets.Dataset`. They are written once into SureFit's cache, by their
        hash, so that the run can be repeated and resumed without this program.
        """
        text = yaml.safe_dump(_to_yaml_value(values), sort_keys=False, allow_unicode=True)
        return cls(load_text(text, PYTHON, _overrides(changes)))

    def changed(self, changes: Mapping[str, Any]) -> Config:
        """The same with other values, by dotted key."""
        return Config.from_dict(self.settings.model_dump(mode="json", exclude_unset=True), changes)

    @property
    def settings(self) -> Settings:
        """The sections, each with its fields: `config.settings.train.learning_rate`."""
        return self.loaded.config

    def __str__(self) -> str:
        """As YAML, what is default left out."""
        values = self.settings.model_dump(mode="json", exclude_unset=True)
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


Target = Config | str | Path
"""A config; or the path of a config file or of a run directory."""


def check(target: Target) -> CheckReport:
    """Say what will break: config, model and data. Torch is not imported.

    Raises:
        ConfigError: the config itself is not usable.
    """
    from surefit.facts.hub import PATIENCE_S
    from surefit.stages.checking import run_check

    document = run_check(load_run_context(_target(target), patience=PATIENCE_S, look=True))
    shown = json.loads(env.redact(json.dumps(document["findings"])))
    findings = tuple(
        FindingResult(**{each.name: found[each.name] for each in fields(FindingResult)}) for found in shown
    )
    return CheckReport(findings, document["rules"], document)


def plan(target: Target, gpu: str | None = None, *, quick: bool = False) -> Plan:
    """Say what the run needs, and whether it fits: in a process of its own, on a CPU without what this one has in RAM.

    Args:
        gpu: instead of the one that is here, e.g. "h100"; `hardware.gpu`.
        quick: by arithmetic alone; otherwise the run is simulated, which imports torch.
    """
    from surefit.plan.process import planning_for_new_process
    from surefit.stages.planning import build_run_plan

    config = target if gpu is None else _config(target).changed({"hardware.gpu": gpu})
    with planning_for_new_process():
        document = build_run_plan(load_checked_run(_target(config)), quick=quick, needs_rows=True)
    estimate, time = document["estimate"] or {}, document["time"] or {}
    return Plan(
        estimate.get("verdict"), estimate.get("low_bytes"), estimate.get("high_bytes"), time.get("total_seconds"),
        document["disk_total_bytes"], tuple(document["does_not_fit"]), document,
    )  # fmt: skip


def train(
    target: Target,
    callbacks: Sequence[Callable[[TrainingProgress], bool | None]] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    adapt: bool = False,
    quiet: bool = False,
) -> TrainingResult:
    """Check, then train in this process.

    Args:
        callbacks: called after every step with its state (step, loss, tokens per second, ETA, …), which they cannot
            change; one that returns True ends the run there, with what was learnt so far as its result.
        resume: go on after the newest checkpoint, if there is one.
        overwrite: delete a run that is there already.
        dry_run: prepare everything, run no step, write nothing.
        adapt: where memory runs out, go on with a configuration that needs less and learns the same.
        quiet: say nothing; otherwise lines go to stderr.

    Raises:
        Refused: the check has findings of severity error.
        Interrupted: by Ctrl-C, with the work saved; `resume=True` goes on.
        ConfigError: the config asks for several devices, which `surefit train --gpus N` starts.
    """
    from surefit.config.world import count_processes
    from surefit.stages.training import train_run as train_run

    run = load_checked_run(_target(target))
    if (count := count_processes(run.resolved.config)) > 1:
        raise ConfigError(
            f"{count} processes, and this is one",
            code="E1001",
            field="hardware.count",
            help="`surefit train CONFIG --gpus N` starts them",
        )
    with _progress_lines(quiet, callbacks) as watcher:
        done = train_run(run, watcher, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt)
    return TrainingResult(
        run.run.path, Path(done["output"]) if "output" in done else None, done.get("steps", 0), done["total_steps"],
        done.get("loss"), done.get("eval_loss"), done.get("stopped_early", False), done,
    )  # fmt: skip


def merge(target: Target | TrainingResult, into: str = "auto", *, quiet: bool = False) -> Certificate:
    """Merge a run's adapter into its base, with a certificate that the result is the same model.

    Args:
        into: the type of the merged weights; the base's by default.

    Raises:
        GateError: it is not, and what was made is deleted.
    """
    from surefit.stages.merging import merge_run

    run = _run(target)
    with _progress_lines(quiet) as watcher:
        document = merge_run(run, watcher, into)
    merged = run.run.merged if run.resolved.config.train.method == "lora" else run.run.model
    return Certificate(merged, document["passed"], document)


def evaluate(target: Target | TrainingResult, variants: Sequence[str] | None = None, *, quiet: bool = False) -> Scores:
    """Score base, adapter and merged model on the held-out rows, with confidence intervals.

    Args:
        variants: only these: base, adapter, merged, model, served, or step-N.
    """
    from surefit.stages.evaluating import evaluate_run as evaluate_run

    with _progress_lines(quiet) as watcher:
        document = evaluate_run(_run(target), watcher, variants)
    assert document is not None, "one process is the first"
    gate = document["gate"]
    decided = gate is not None and gate["outcome"] != "cannot tell"
    return Scores(document["primary_metric"], gate["passed"] if decided else None, document)


def compare(
    a: str | Path | TrainingResult, b: str | Path | TrainingResult, *, set_name: str = "eval", metric: str | None = None
) -> Comparison:
    """Say whether B is better than A: two runs that were scored, RUN:VARIANT, or files of scored predictions.

    Args:
        metric: that decides; the recipe's primary metric by default.
    """
    from surefit.stages.comparing import compare_answer_sets

    document = compare_answer_sets(_side(a), _side(b), set_name, metric=metric)
    del document["matched"]
    document["judge"] = None
    metric, found = document["metric"], document["metrics"][document["metric"]]
    return Comparison(metric, document["verdict"], found["difference"], tuple(found["ci95"]), document)


def report(target: Target | TrainingResult, *others: Target | TrainingResult) -> Path:
    """Write the page of a run, or one that compares several; its path."""
    from surefit.stages.reporting import write_comparison_report
    from surefit.stages.reporting import write_run_report as report_run
    from surefit.stages.run_context import find_run_directory

    runs = [find_run_directory(_path(each)) for each in (target, *others)]
    with _progress_lines(quiet=False) as watcher:
        return write_comparison_report(runs, watcher) if others else report_run(runs[0], watcher)


def _config(target: Target) -> Config:
    return target if isinstance(target, Config) else Config.load(target)


def _target(target: Target) -> Path | LoadedConfig:
    return target.loaded if isinstance(target, Config) else Path(target)


def _run(target: Target | TrainingResult) -> CheckedRun:
    return load_checked_run(target.run if isinstance(target, TrainingResult) else _target(target))


def _path(target: Target | TrainingResult) -> Path:
    """A run directory, or the config file that names it.

    Raises:
        ConfigError: a config whose run has not begun.
    """
    if isinstance(target, TrainingResult):
        return target.run
    if not isinstance(target, Config):
        return Path(target)
    directory = Path(target.settings.output_dir)
    if not directory.is_dir():
        raise ConfigError("no run is here", code="E1002", path=directory, help="`surefit.train` comes first")
    return directory


def _side(target: str | Path | TrainingResult) -> str:
    return str(target.run if isinstance(target, TrainingResult) else target)


@contextmanager
def _progress_lines(
    quiet: bool, callbacks: Sequence[Callable[[TrainingProgress], bool | None]] = ()
) -> Iterator[ProgressListener]:
    """Someone who hears how far a stage is."""
    lines = LineListener((lambda text: None) if quiet else _to_stderr, tuple(callbacks))
    with progress_listener(lines.note):
        yield lines


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"{env.redact(text)}\n")
    sys.stderr.flush()


def _overrides(changes: Mapping[str, Any] | None) -> list[str]:
    return [
        f"{key}={json.dumps(_to_yaml_value(value, key), ensure_ascii=False, allow_nan=False)}"
        for key, value in (changes or {}).items()
    ]


def _to_yaml_value(value: Any, dotted: str = "") -> Any:
    """A value as YAML has it: numpy's numbers and paths as plain ones, and files in place of rows.

    Raises:
        ConfigError: nothing that a config can hold.
        DataError: rows that cannot be written as JSON.
    """
    if isinstance(value, Mapping):
        return {key: _to_yaml_value(each, f"{dotted}.{key}".lstrip(".")) for key, each in value.items()}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()  # numpy's, some of which are Python's floats, too
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Path):
        return str(value)
    if dotted in ("data.train", "data.eval") or dotted.startswith("evaluate.extra_sets."):
        return str(_rows_file(value, dotted))
    if isinstance(value, list | tuple | set):
        return [_to_yaml_value(each, dotted) for each in value]
    raise ConfigError(
        f"a config cannot hold {type(value).__name__}",
        code="E1003",
        field=dotted,
        help="texts, numbers, lists and mappings; rows in data.train, data.eval and evaluate.extra_sets",
    )


def _rows_file(value: Any, dotted: str) -> Path:
    """The file that holds these rows, made if need be."""
    try:
        if hasattr(value, "columns") and hasattr(value, "to_dict"):  # a DataFrame, whose gaps are NaN
            value = value.astype(object).where(value.notna(), None).to_dict("records")
        text = "".join(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n" for row in value)
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"these rows cannot be written as JSON: {error}",
            code="E1004",
            field=dotted,
            help="give a list of dicts of texts, numbers and lists, a pandas DataFrame or a datasets.Dataset",
        ) from None
    path = env.cache_dir() / "rows" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    return path
