"""The verb `predict`: answer new rows, or one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefit.cli.exits import verb
from surefit.cli.options import EachGpu, Overrides, Target, repeat_option
from surefit.cli.render import Output

if TYPE_CHECKING:
    from surefit.parallel.process_group import World
    from surefit.stages.run_context import CheckedRun


@verb
def predict(
    out: Output,
    target: Target,
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="Rows to answer, laid out as trained.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this one user message instead.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSONL here; if killed, run it again to go on.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="base, adapter, merged, model or served; default: the best.")
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="The same as --variant base.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="The same as --variant adapter.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="The same as --variant merged.")] = False,
    constrained: Annotated[bool, typer.Option("--constrained", help="Answer under the recipe's grammar.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in --output.")] = False,
    gpus: EachGpu = None,
    overrides: Overrides = None,
) -> int:
    """Answer new rows, or one prompt, with a trained model."""
    from surefit.cli.processes import distribute_rows

    models = [name for name, is_set in (("base", base), ("adapter", adapter), ("merged", merged)) if is_set]
    models += [variant] if variant else []
    if len(models) > 1:
        raise typer.BadParameter(f"one model answers, not {' and '.join(models)}")
    changes = [*(overrides or ()), *(["evaluate.constrained=only"] if constrained else [])]
    model = models[0] if models else None

    def work(run: CheckedRun, world: World | None) -> int:
        from surefit.cli.answer_rows import PredictOptions, predict_rows  # imports torch

        return predict_rows(out, run, PredictOptions(data, prompt, output, model, overwrite), world)

    options = {"--variant": model, "--output": output, "--prompt": prompt}
    command = ["predict", str(target), *([data] if data is not None else [])]
    command += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    command += [*["--overwrite"] * overwrite, *repeat_option("--set", changes)]
    return distribute_rows(out, target, changes, gpus, command, work)
