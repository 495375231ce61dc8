"""The options shared by several verbs, as typer reads them from the signatures in `app.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def _path_or_none(text: str) -> Path:
    """Return the path. Raise for an empty text, as of an unset shell variable: it would mean the current directory."""
    if not text.strip():
        raise typer.BadParameter("empty: name a file or a directory")
    return Path(text)


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A config file (YAML).", parser=_path_or_none)]
Target = Annotated[
    Path, typer.Argument(metavar="TARGET", help="A config file, or a run directory.", parser=_path_or_none)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value, e.g. train.num_train_epochs=2."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line of stdout.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in output_dir from where it stopped.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the run that is already in output_dir first.")]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="So many GPUs; with hardware.gpu: cpu, processes.")]
Adapt = Annotated[
    bool, typer.Option("--adapt", help="Out of memory: go on with settings that need less and learn the same.")
]
Into = Annotated[
    Literal["auto", "original", "dequantized"],
    typer.Option(help="Of a base that was quantised: its weights as trained beside, or as before. auto: as trained."),
]
EachGpu = Annotated[int | None, typer.Option("--gpus", min=1, help="Share the rows between so many, a model on each.")]
AllCheckpoints = Annotated[
    bool, typer.Option("--all-checkpoints", help="Score each checkpoint instead, also while training runs.")
]
Base = Annotated[str | None, typer.Option(metavar="MODEL", help="An adapter's base; default: what PEFT noted.")]
TrainedOn = Annotated[
    Literal["none", "nf4", "fp8"], typer.Option(help="How an adapter's base was quantised while it was trained.")
]
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help="Compare on these prompts, one per line.")]
Gpu = Annotated[str | None, typer.Option("--gpu", help="Plan for this GPU (e.g. h100), or for cpu.")]
