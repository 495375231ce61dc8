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
    recipe: Annotated[str | None, typer.Argument(help="The task, e.g. function_calling.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of to stdout.")] = None,
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
) -> int:
    """Write a commented starter config."""
    from surefit import recipes
    from surefit.config.starter import starter_config

    if list_recipes or recipe is None:
        citations = {name: recipes.get_recipe(name).citation for name in recipes.list_recipes()}
        out.table("Recipes", ["name", "what and where from"], [[name, text] for name, text in citations.items()])
        out.result({"recipes": list(citations)})
        return EXIT_OK
    text = starter_config(recipes.get_recipe(recipe).name)
    print_or_write_config(out, text, output)
    out.result({"recipe": recipe, "path": str(output) if output else None, "config": text})
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
