"""`evaluate` and `predict` in one process, or in several that share the rows. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli.launching import distribute_rows
from surefit.stages.run_context import CheckedRun, load_checked_run

if TYPE_CHECKING:
    from surefit.cli.render import Output
    from surefit.parallel.process_group import World


def evaluate_command(
    out: Output,
    target: Path,
    overrides: Sequence[str],
    variants: Sequence[str] | None,
    *,
    show: int,
    every: bool,
    gpus: int | None,
    dry_run: bool,
) -> int:
    """Score the run's variants, or, with `every`, all of its checkpoints."""

    def work(run: CheckedRun, world: World | None) -> int:
        if every:
            code: int = _module("all_checkpoints").score_all_checkpoints(out, run, dry_run=dry_run, world=world)
        else:
            code = _module("evaluating").evaluate_and_show(out, run, variants, show=show, dry_run=dry_run, world=world)
        return code

    if dry_run:
        return work(load_checked_run(target, overrides), None)
    arguments = ["evaluate", str(target), *_each("--set", overrides), *_each("--variant", variants or ())]
    arguments += ["--all-checkpoints"] * every + ["--show", str(show)] * bool(show)
    return distribute_rows(out, target, overrides, gpus, arguments, work)


@dataclass(frozen=True)
class PredictOptions:
    """Options of `predict`: the rows to answer, and the destination.

    Attributes:
        data: rows laid out like the training rows; alternatively `prompt`, one user message.
        output: JSONL file; None prints the answers.
        variant: the model that answers; None: the best available.
        overwrite: replace the contents of `output`.
    """

    data: str | None = None
    prompt: str | None = None
    output: Path | None = None
    variant: str | None = None
    overwrite: bool = False

    def again(self) -> list[str]:
        """Return the options as command-line arguments."""
        options = {"--variant": self.variant, "--output": self.output, "--prompt": self.prompt}
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return [*([self.data] if self.data is not None else []), *words, *["--overwrite"] * self.overwrite]


def predict_command(
    out: Output, target: Path, overrides: Sequence[str], asked: PredictOptions, gpus: int | None
) -> int:
    """Answer new rows or one prompt."""

    def work(run: CheckedRun, world: World | None) -> int:
        code: int = _module("predict").predict_rows(out, run, asked, world)
        return code

    arguments = ["predict", str(target), *asked.again(), *_each("--set", overrides)]
    return distribute_rows(out, target, overrides, gpus, arguments, work)


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (flag, value)]


def _module(name: str) -> Any:
    """Import a module of surefit.cli on first use: it needs torch."""
    return import_module(f"surefit.cli.{name}")
