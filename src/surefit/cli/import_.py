"""The verb `import`: a SureFit config of another tool's. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from surefit.cli.exits import verb
from surefit.cli.init import print_or_write_config
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK, ConfigError
from surefit.core.units import plural, shell_quote, truncate_text

if TYPE_CHECKING:
    from surefit.importers import ImportedConfig


@verb
def import_(
    out: Output,
    source: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Another tool's config: Axolotl, LLaMA-Factory, ms-swift, TRL."),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of to stdout.")] = None,
) -> int:
    """Convert an Axolotl, LLaMA-Factory, ms-swift or TRL config to SureFit; unsupported keys become comments."""
    from surefit.cli.other_tools import unmapped_keys_document
    from surefit.importers import read_tool_config
    from surefit.importers.write import to_config_yaml

    imported = read_tool_config(source)
    if imported.loaded is None:
        _raise_no_run(imported)
    text = to_config_yaml(imported)
    print_or_write_config(out, text, output, {"the config to import": source})
    not_carried_over = [*imported.judged, *imported.lost]
    if not_carried_over:
        out.note(f"{plural(len(not_carried_over), 'key')} could not be carried over: the comments say which, and why")
    if output is None:
        out.note(f"Next: surefit import {shell_quote(source)} --output {shell_quote(f'{source.stem}-surefit.yaml')}")
    out.result({**unmapped_keys_document(imported), "path": str(output) if output else None, "config": text})
    return EXIT_OK


def _raise_no_run(found: ImportedConfig) -> NoReturn:
    """Raise with the reasons that the file cannot become a SureFit config."""
    from surefit.importers import TOOL_NAMES
    from surefit.importers.preferences import NOT_YET

    if found.problems:
        first, *more = found.problems
        first.also = tuple(more)
        raise first
    reasons = [
        f"{unmapped.key}: {truncate_text(str(unmapped.value))}: {unmapped.why}"
        for unmapped in (*found.judged, *found.lost)
        if unmapped.key in ("rl", "stage", "rlhf_type", "reward_model") or unmapped.why in NOT_YET.values()
    ]
    raise ConfigError(
        f"this {TOOL_NAMES.get(found.tool, found.tool)} file describes no whole run that SureFit trains"
        + (f" ({'; '.join(reasons)})" if reasons else ""),
        code="E1021",
        path=found.path,
        help="a SureFit config needs a model and rows to train on: `surefit init` writes one to start from, and "
        f"`surefit check {shell_quote(found.path)}` checks this file as it is",
    )
