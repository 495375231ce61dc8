"""The verb `init`: a starter config of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK
from surefit.core.output import output_file
from surefit.core.rundir import write_atomic
from surefit.core.units import shell_quote


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
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
) -> int:
    """Write a config: for your own rows with --data, or a commented starter of a recipe."""
    from surefit import recipes
    from surefit.config.starter import starter_config

    if data is not None:
        return _write_for_rows(out, data, model, gpu, recipe, output)
    if list_recipes or recipe is None:
        purposes = {name: recipes.describe_recipe(name) for name in recipes.list_recipes()}
        out.table("Recipes", ["name", "for"], [[name, text] for name, text in purposes.items()])
        out.next_step(["init", recipes.GENERAL, "--output", "run.yaml"])
        out.result({"recipes": list(purposes), "purposes": purposes})
        return EXIT_OK
    text = starter_config(recipes.get_recipe(recipe).name)
    print_or_write_config(out, text, output)
    out.result({"recipe": recipe, "path": str(output) if output else None, "config": text})
    return EXIT_OK


def _write_for_rows(
    out: Output, data: str, model: str | None, gpu: str, recipe: str | None, output: Path | None
) -> int:
    """Write a short config for somebody's rows, and say what was seen."""
    from surefit.config.inputs import row_files
    from surefit.stages.starting import build_starting_config, next_command

    draft = build_starting_config(data, model, gpu, recipe)
    path = output or Path(Path(draft.values["output_dir"]).name + ".yaml")
    write_atomic(output_file(path, row_files("the rows", data)), draft.text)
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
