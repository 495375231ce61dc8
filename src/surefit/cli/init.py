"""The verb `init`: a config for somebody's rows, by options or by four questions, or a recipe's starter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK, ConfigError, SureFitError
from surefit.core.output import output_file
from surefit.core.rundir import write_atomic
from surefit.core.units import shell_quote

if TYPE_CHECKING:
    pass


@verb
def init(
    out: Output,
    recipe: Annotated[str | None, typer.Argument(help="The task, e.g. function_calling; default: by the rows.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Your rows: a file, a directory or a hub data set. The config is made for them.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A hub id, a directory or a GGUF file; default: one that fits the GPU.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="The GPU to train on, such as 4090; default: this machine's.")] = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here; default: DATA.yaml, or stdout.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="With a recipe: every setting, with its default and what it is.")
    ] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
) -> int:
    """Write a config: for your own rows with --data, or a starter of a recipe. Without arguments, ask."""
    from surefit import recipes
    from surefit.config.starter import short_starter, starter_config

    if list_recipes:
        return _list_recipes(out)
    if data is None and recipe is None:
        if out.as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigError(
                "nothing says what to write a config for",
                code="E1080",
                help="surefit init --data ROWS [--model MODEL] [--gpu GPU]; or surefit init RECIPE, of those that "
                "`surefit init --list` names",
            )
        data, model, gpu, output = _ask(out, model, gpu, output)
    if data is not None:
        return _write_for_rows(out, data, model, gpu, recipe, output)
    assert recipe is not None
    name = recipes.get_recipe(recipe).name
    text = starter_config(name) if full else short_starter(name)
    print_or_write_config(out, text, output)
    out.result({"recipe": recipe, "path": str(output) if output else None, "config": text})
    return EXIT_OK


def _list_recipes(out: Output) -> int:
    """Print what each recipe is for, and the rows that it reads."""
    from surefit import recipes
    from surefit.data.rows.layouts import LAYOUTS

    general = ", ".join(" + ".join(layout.columns) for layout in LAYOUTS.values())
    tasks = [recipes.get_recipe(name) for name in recipes.list_recipes()]
    rows = {task.name: ", ".join(task.columns) or general for task in tasks}
    out.table("Recipes", ["name", "what it is for", "columns of the rows"],
              [[task.name, task.purpose, rows[task.name]] for task in tasks])  # fmt: skip
    out.next_step(["init", recipes.GENERAL, "--output", "run.yaml"])
    out.result({"recipes": {task.name: task.purpose for task in tasks}})
    return EXIT_OK


def _ask(out: Output, model: str | None, gpu: str, output: Path | None) -> tuple[str, str | None, str, Path]:
    """Return the rows, card, model and name of the config that the user answers with. Nothing is written."""
    from surefit.facts.hardware import hardware_facts
    from surefit.facts.model import model_facts
    from surefit.stages.starting import choose_run_name, describe_rows

    files = sorted(path.name for ending in ("jsonl", "json", "csv", "parquet") for path in Path().glob(f"*.{ending}"))
    out.paragraph("Rows to train on: a file (JSONL, JSON, CSV, Parquet), a directory, or a data set's id on the hub.")
    data = _answer(out, "rows", files[0] if len(files) == 1 else None, describe_rows)
    if gpu == "auto":
        out.paragraph("GPU to train on, such as 4090 or h100; cpu for none. Enter takes this machine's.")
        device = hardware_facts("auto")
        default_gpu = device.name if device.kind == "cuda" else "cpu"
        answer = _answer(
            out, "GPU", default_gpu, lambda name: name if name == default_gpu else hardware_facts(name).name
        )
        gpu = "auto" if answer == default_gpu else answer
    if model is None:
        out.paragraph("Base model: a hub id, a directory or a GGUF file. Enter takes one that fits the GPU.")
        fitting = "one that fits"
        answer = _answer(out, "model", fitting, lambda name: name if name == fitting else model_facts(name).name)
        model = None if answer == fitting else answer
    if output is None:
        out.paragraph("Name of the config, a new file.")
        default = f"{choose_run_name(Path(), data, for_config=True)}.yaml"
        output = Path(_answer(out, "config", default, lambda name: str(output_file(Path(name)))))
    return data, model, gpu, output


def _answer(out: Output, question: str, default: str | None, describe: Callable[[str], str]) -> str:
    """Return an answer that `describe` accepts, asking again after each that it does not; Enter takes the default."""
    while True:
        out.write(f"{question}{f' [{default}]' if default else ''}: ")
        line = sys.stdin.readline()
        if not line:  # Ctrl-D
            raise KeyboardInterrupt
        if not (answer := line.strip() or default or ""):
            continue
        try:
            if (described := describe(answer)) != answer:
                out.say(f"  {described}")
            return answer
        except SureFitError as error:
            out.error(error)


def _write_for_rows(
    out: Output, data: str, model: str | None, gpu: str, recipe: str | None, output: Path | None
) -> int:
    """Write a short config for somebody's rows, and say what was seen."""
    from surefit.config.inputs import row_files
    from surefit.stages.starting import build_starting_config, choose_run_name, name_after_rows, next_command

    path = output_file(output or Path(f"{name_after_rows(data)}.yaml"), row_files("the rows", data))
    name = choose_run_name(Path(), data, for_config=False)
    draft = build_starting_config(data, model, gpu, recipe, name=name)
    write_atomic(path, draft.text)
    for line in draft.seen:
        out.paragraph(line, indent=2)
    if draft.proposals:
        names = ", ".join(f"{name} ({size}, {license})" for name, size, license in draft.proposals)
        out.paragraph(f"Models that fit: {names}. The first is written; --model chooses another", indent=2)
    out.say(f"Wrote {path}. Next: {next_command(path)}")
    out.result({"path": str(path), "config": draft.text, "seen": list(draft.seen), "verdict": draft.verdict,
                "models": [name for name, _, _ in draft.proposals]})  # fmt: skip
    return EXIT_OK


def print_or_write_config(
    out: Output, config: str, output: Path | None, inputs: Mapping[str, Path] | None = None
) -> None:
    """Print a config, or write it to a new file.

    Args:
        inputs: the files it was made from, by name.
    """
    from surefit.config.starter import OWN_ROWS

    if output is None:
        out.say(config.rstrip("\n"))
    else:
        write_atomic(output_file(output, inputs), config)
        first = f"name your rows in data.train, now {OWN_ROWS}; then " if f"train: {OWN_ROWS}\n" in config else ""
        out.say(f"Wrote {output}. Next: {first}surefit check {shell_quote(output)}")
