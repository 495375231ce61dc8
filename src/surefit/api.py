"""SureFit from Python: the stages of a run as functions with typed results. `import surefit` gives these names.

A function returns the fields that the command of the same name prints with `--json`, all of them in `document`; where
the command has an exit code, the function raises an exception or has a property. Heavy libraries are imported only when
they are needed.

Stable within a minor version: the names in `__all__`, their parameters, and the attributes of their results. The fields
of `document` may become more. Everything else in the package may change with any release.
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
from surefit.core.packaging import require_extra
from surefit.core.progress import progress_listener
from surefit.core.rundir import write_atomic
from surefit.results import Certificate, CheckReport, Comparison, FindingResult, Plan, Scores, TrainingResult
from surefit.stages.progress_listener import LineListener, ProgressListener
from surefit.stages.run_context import CheckedRun, find_config_file, load_checked_run, load_run_context

if TYPE_CHECKING:
    from surefit.config.schema import SureFitConfig as Settings
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
# As the command line does: libraries read these settings when they are imported, and any function here may be the first
# to import them.
env.quiet_libraries()
env.sleep_at_barriers()
PYTHON = Path("python")
"""Path that messages show for a config that is in no file."""


@dataclass(frozen=True)
class Config:
    """A valid config, from a file or a dict.

    Attributes:
        loaded: the settings, and where each came from (file, `--set`, default).
    """

    loaded: LoadedConfig

    @classmethod
    def load(cls, path: str | Path, changes: Mapping[str, Any] | None = None) -> Config:
        """Load a config from a YAML file, or from the resolved config of a run directory.

        Args:
            changes: dotted key → value, as in `--set`.

        Raises:
            ConfigError: with file, line and field, for every problem.
        """
        # The recorded output_dir of a run directory that was moved is wrong: use the path where it is now.
        moved_output = {"output_dir": str(path)} if Path(path).is_dir() else {}
        return cls(load_config(find_config_file(Path(path)), _overrides(moved_output | dict(changes or {}))))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Config:
        """Make a config from nested mappings, laid out as the YAML file.

        Where the file has the path of a data set (`data.train`, `data.eval`, `evaluate.extra_sets`), the value may be
        the rows: a list of dicts, a pandas DataFrame, a `datasets.Dataset`. They are written once into SureFit's cache,
        named by their hash, so that the run can be repeated and resumed without this program.
        """
        text = yaml.safe_dump(_to_yaml_value(values), sort_keys=False, allow_unicode=True)
        return cls(load_text(text, PYTHON, _overrides(changes)))

    def changed(self, changes: Mapping[str, Any]) -> Config:
        """Return a copy of the config with other values, by dotted key."""
        return Config.from_dict(self.settings.model_dump(mode="json", exclude_unset=True), changes)

    @property
    def settings(self) -> Settings:
        """Sections of the config, each with its fields: `config.settings.train.learning_rate`."""
        return self.loaded.config

    def __str__(self) -> str:
        """Return the config as YAML, without the default values."""
        values = self.settings.model_dump(mode="json", exclude_unset=True)
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


Target = Config | str | Path
"""A config, or the path of a config file or of a run directory."""


def check(target: Target) -> CheckReport:
    """Report what will break: config, model and data. Torch is not imported.

    Raises:
        ConfigError: the config is not valid.
    """
    from surefit.facts.hub import PATIENCE_S
    from surefit.stages.checking import run_check

    document = run_check(load_run_context(_target(target), patience=PATIENCE_S, look=True))
    redacted = json.loads(env.redact(json.dumps(document["findings"])))
    findings = tuple(
        FindingResult(**{field.name: finding[field.name] for field in fields(FindingResult)}) for finding in redacted
    )
    return CheckReport(findings, document["rules"], document)


def plan(target: Target, gpu: str | None = None, *, quick: bool = False) -> Plan:
    """Predict what the run needs, and whether it fits, in a separate CPU process that does not inherit this process's
    RAM.

    Args:
        gpu: GPU to plan for instead of the one in this machine, e.g. "h100"; `hardware.gpu`.
        quick: estimate by arithmetic alone; otherwise the run is simulated, which imports torch.
    """
    from surefit.plan.process import planning_for_new_process
    from surefit.stages.planning import build_run_plan

    config = target if gpu is None else _config(target).changed({"hardware.gpu": gpu})
    with planning_for_new_process():
        document = build_run_plan(load_checked_run(_target(config)), quick=quick, needs_rows=True, advise=True)
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
        callbacks: called after every step with its state (step, loss, tokens per second, ETA, …), which is read-only; a
            callback that returns True ends the run, with the weights so far as its result.
        resume: continue from the newest checkpoint, if there is one.
        overwrite: delete an existing run.
        dry_run: prepare everything, run no step, write nothing.
        adapt: when memory runs out, continue with a configuration that needs less and learns the same.
        quiet: print nothing; otherwise progress lines go to stderr.

    Raises:
        CheckFailed: the check has findings of severity error.
        MachineError: torch or another package of the extra `train` is not installed.
        Interrupted: by Ctrl-C, with the work saved; `resume=True` continues.
        ConfigError: the config needs several devices, which `surefit train --gpus N` starts.
    """
    from surefit.config.world import count_processes

    require_extra("train")
    from surefit.stages.training import train_run as train_run

    run = load_checked_run(_target(target), resume=resume)
    if (count := count_processes(run.resolved.config)) > 1:
        raise ConfigError(
            f"{count} processes, and this is one",
            code="E1001",
            field="hardware.count",
            help="`surefit train CONFIG --gpus N` starts them",
        )
    with _progress_lines(quiet, callbacks) as watcher:
        doc = train_run(run, watcher, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt)
    return TrainingResult(
        run.run.path, Path(doc["output"]) if "output" in doc else None, doc.get("steps", 0), doc["total_steps"],
        doc.get("loss"), doc.get("eval_loss"), doc.get("stopped_early", False), doc,
    )  # fmt: skip


def merge(target: Target | TrainingResult, into: str = "auto", *, quiet: bool = False) -> Certificate:
    """Merge a run's adapter into its base model and certify that the result computes the same.

    Args:
        into: data type of the merged weights; the base model's by default.

    Raises:
        GateError: it does not; the merged model is deleted.
    """
    require_extra("train")
    from surefit.stages.merging import merge_run

    run = _run(target)
    with _progress_lines(quiet) as watcher:
        document = merge_run(run, watcher, into)
    merged = run.run.merged if run.resolved.config.train.method == "lora" else run.run.model
    return Certificate(merged, document["passed"], document)


def evaluate(target: Target | TrainingResult, variants: Sequence[str] | None = None, *, quiet: bool = False) -> Scores:
    """Score the base, adapter and merged models on the held-out rows, with confidence intervals.

    Args:
        variants: score only these: base, adapter, merged, model, served, or step-N.
    """
    require_extra("train")
    from surefit.stages.evaluating import evaluate_run as evaluate_run

    with _progress_lines(quiet) as watcher:
        document = evaluate_run(_run(target), watcher, variants)
    assert document is not None, "one process is the first"
    gate = document["gate"]
    has_outcome = gate is not None and gate["outcome"] != "cannot tell"
    return Scores(document["primary_metric"], gate["passed"] if has_outcome else None, document)


def compare(
    a: str | Path | TrainingResult, b: str | Path | TrainingResult, *, set_name: str = "eval", metric: str | None = None
) -> Comparison:
    """Test whether B is better than A: two scored runs, RUN:VARIANT, or files of scored predictions.

    Args:
        metric: the metric that decides; the recipe's primary metric by default.
    """
    from surefit.stages.comparing import compare_answer_sets

    compared = compare_answer_sets(_side(a), _side(b), set_name, metric=metric)
    diff = compared.main.difference
    return Comparison(compared.metric, compared.verdict, diff.difference, (diff.low, diff.high), compared.document())


def report(target: Target | TrainingResult, *others: Target | TrainingResult) -> Path:
    """Write the report page of one run, or one page that compares several, and return its path."""
    from surefit.stages.reporting import write_comparison_report
    from surefit.stages.reporting import write_run_report as report_run
    from surefit.stages.run_context import find_run_directory

    runs = [find_run_directory(_path(run)) for run in (target, *others)]
    with _progress_lines(quiet=False) as watcher:
        return write_comparison_report(runs, watcher) if others else report_run(runs[0], watcher)


def _config(target: Target) -> Config:
    return target if isinstance(target, Config) else Config.load(target)


def _target(target: Target) -> Path | LoadedConfig:
    return target.loaded if isinstance(target, Config) else Path(target)


def _run(target: Target | TrainingResult) -> CheckedRun:
    return load_checked_run(target.run if isinstance(target, TrainingResult) else _target(target))


def _path(target: Target | TrainingResult) -> Path:
    """Return a run directory, or the path of the config file that names it.

    Raises:
        ConfigError: the config's run has not begun.
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
    """Yield a listener that prints a stage's progress to stderr and calls the callbacks."""
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
    """Convert a value to what YAML can hold: numpy scalars and paths to plain values, rows to the path of a file.

    Raises:
        ConfigError: a config cannot hold a value of this type.
        DataError: rows that cannot be written as JSON.
    """
    if isinstance(value, Mapping):
        return {key: _to_yaml_value(item, f"{dotted}.{key}".lstrip(".")) for key, item in value.items()}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()  # a numpy scalar; some of them are Python floats, too
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Path):
        return str(value)
    if dotted in ("data.train", "data.eval") or dotted.startswith("evaluate.extra_sets."):
        return str(_rows_file(value, dotted))
    if isinstance(value, list | tuple | set):
        return [_to_yaml_value(item, dotted) for item in value]
    raise ConfigError(
        f"a config cannot hold {type(value).__name__}",
        code="E1003",
        field=dotted,
        help="texts, numbers, lists and mappings; rows in data.train, data.eval and evaluate.extra_sets",
    )


def _rows_file(value: Any, dotted: str) -> Path:
    """Return the JSONL file in the cache that holds these rows; write it if it does not exist."""
    try:
        if hasattr(value, "columns") and hasattr(value, "to_dict"):  # a DataFrame: missing values are NaN
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
