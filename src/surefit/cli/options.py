"""The options shared by several verbs, as typer reads them from the verbs' signatures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer


def _path_or_none(text: str) -> Path:
    """Return the path. Raise for an empty text, as of an unset shell variable: it would mean the current directory."""
    if not text.strip():
        raise typer.BadParameter("empty: name a file or a directory")
    return Path(text)


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A config file (YAML).", parser=_path_or_none)]
AnyConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="A config of SureFit or another tool, a training script (.py), requirements, a job script.",
        parser=_path_or_none,
    ),
]
Target = Annotated[
    Path, typer.Argument(metavar="TARGET", help="A config file, or a run directory.", parser=_path_or_none)
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value, e.g. train.num_train_epochs=2."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line of stdout.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in output_dir from where it stopped.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the run that is already in output_dir first.")]
Gpus = Annotated[
    int | None, typer.Option("--gpus", min=1, help="Number of GPUs; with hardware.gpu: cpu, of processes.")
]
Adapt = Annotated[
    bool, typer.Option("--adapt", help="Out of memory: go on with settings that need less and learn the same.")
]
Into = Annotated[
    Literal["auto", "original", "dequantized"],
    typer.Option(
        help="Weights of a quantized base to merge into: dequantized (as in training; auto), or the original ones."
    ),
]
EachGpu = Annotated[
    int | None, typer.Option("--gpus", min=1, help="Number of GPUs that share the rows, each with its own model.")
]
Base = Annotated[
    str | None, typer.Option(metavar="MODEL", help="An adapter's base; default: the one in its adapter_config.json.")
]
TrainedOn = Annotated[
    Literal["none", "nf4", "fp8"], typer.Option(help="How an adapter's base was quantized in training.")
]
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help="Compare on these prompts, one per line.")]


def repeat_option(option: str, values: Sequence[str]) -> list[str]:
    """Return the words of a command line that give an option each of the values."""
    return [word for value in values for word in (option, value)]
