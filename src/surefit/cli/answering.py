"""`evaluate` and `predict` in one process or in several that share the rows. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli.launching import share_rows
from surefit.stages.prepare import Prepared, prepare

if TYPE_CHECKING:
    from surefit.cli.render import Output
    from surefit.parallel.mesh import World


def evaluate(
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
    """Score the run's variants, or every one of its checkpoints."""

    def work(run: Prepared, world: World | None) -> int:
        if every:
            code: int = _module("all_checkpoints").score_all(out, run, dry_run=dry_run, world=world)
        else:
            code = _module("evaluating").evaluate(out, run, variants, show=show, dry_run=dry_run, world=world)
        return code

    if dry_run:
        return work(prepare(target, overrides), None)
    again = ["evaluate", str(target), *_each("--set", overrides), *_each("--variant", variants or ())]
    again += ["--all-checkpoints"] * every + ["--show", str(show)] * bool(show)
    return share_rows(out, target, overrides, gpus, again, work)


def predict(
    out: Output,
    target: Path,
    overrides: Sequence[str],
    data: str | None,
    prompt: str | None,
    output: Path | None,
    variant: str | None,
    *,
    overwrite: bool,
    gpus: int | None,
) -> int:
    """Answer new rows, or one prompt."""

    def work(run: Prepared, world: World | None) -> int:
        code: int = _module("predict").predict(
            out, run, data, prompt, output, variant, overwrite=overwrite, world=world
        )
        return code

    again = ["predict", str(target), *([data] if data is not None else []), *_each("--set", overrides)]
    again += _each("--variant", [variant] if variant else ()) + _each("--output", [str(output)] if output else ())
    again += _each("--prompt", [prompt] if prompt is not None else ()) + ["--overwrite"] * overwrite
    return share_rows(out, target, overrides, gpus, again, work)


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (flag, value)]


def _module(name: str) -> Any:
    """Imported where it is used: it needs torch."""
    return import_module(f"surefit.cli.{name}")
