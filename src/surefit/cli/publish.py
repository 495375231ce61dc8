"""The verbs for a finished run, as typer reads them: export, push, serve-check and runs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from surefit.cli.exits import run_verb
from surefit.cli.options import Json, Target

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


def export(
    target: Target,
    format: Annotated[
        Literal["hub", "adapter", "nf4", "int8", "fp8", "gguf"],
        typer.Option("--format", help="hub: the merged weights as they are; adapter: without the base."),
    ] = "hub",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: export/FORMAT in the run.")] = None,
    outtype: Annotated[Literal["f16", "bf16", "q8_0", "q4_k_m"], typer.Option(help="Of a GGUF file.")] = "q8_0",
    llama_cpp: Annotated[
        Path | None, typer.Option("--llama-cpp", metavar="DIR", help="A checkout of llama.cpp; default: LLAMA_CPP.")
    ] = None,
    score: Annotated[bool, typer.Option("--score", help="Measure the task's metrics of a conversion too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be made; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Write the certified model for others: model card, certificate, and the weights as they are or in fewer bits."""

    def verb(out: Any) -> int:
        options = _cli("exporting").ExportOptions(format, output, outtype, llama_cpp, score, dry_run)
        code: int = _cli("exporting").export_command(out, target, options)
        return code

    run_verb(as_json, verb)


def push(
    target: Annotated[Path, typer.Argument(metavar="RUN|EXPORT", help="An export; of a run, its export/hub.")],
    repo_id: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository on the hub.")],
    public: Annotated[bool, typer.Option("--public/--private", help="For all to see; where it is made now.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files and sizes; send nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Upload an export to the hub: private by default, and nothing but what the export lists."""
    run_verb(as_json, lambda out: _cli("exporting").push_command(out, target, repo_id, public, dry_run))


def serve_check(
    target: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run, an export, or a model's directory.")],
    url: Annotated[str | None, typer.Option(help="Of a running server: ask it a few prompts of the run.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Its name there, where it has several.")] = None,
    as_json: Json = False,
) -> None:
    """Print the commands that serve a model with vLLM, SGLang or Ollama; with --url, see that a server answers as the
    run did."""
    run_verb(as_json, lambda out: _cli("exporting").serve_check_command(out, target, url, model))


class _ListsByDefault(TyperGroup):
    """Command group in which `surefit runs DIR` means `surefit runs list DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


runs = typer.Typer(cls=_ListsByDefault, help="List, look into, compare, prune and reproduce runs.")


@runs.command("list")
def list_(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to look for run directories.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs below a directory: state, steps, scores, size. `surefit runs DIR` does the same."""
    run_verb(as_json, lambda out: _cli("info").list_runs_command(out, directory))


@runs.command()
def show(run: Run, as_json: Json = False) -> None:
    """Show one run: settings, stages, scores, disk use, and the stages that can be continued."""
    run_verb(as_json, lambda out: _cli("run_index").show_run_command(out, run))


@runs.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: Json = False,
) -> None:
    """Show the differences of two runs: settings, data, environment, scores."""
    run_verb(as_json, lambda out: _cli("run_index").diff_runs_command(out, a, b))


@runs.command()
def prune(
    target: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run, or where to look for runs.")] = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only say what could be deleted.")] = False,
    as_json: Json = False,
) -> None:
    """Free disk space: checkpoints that are neither the newest nor the best, leftovers, W&B's copies."""
    run_verb(as_json, lambda out: _cli("run_index").prune_runs_command(out, target, yes))


@runs.command()
def reproduce(
    run: Run,
    steps: Annotated[int, typer.Option(min=1, help="So many optimizer steps.")] = 20,
    as_json: Json = False,
) -> None:
    """Train the first steps again, elsewhere, and compare the loss curve; exit code 1 if it differs."""
    run_verb(as_json, lambda out: _cli("reproducing").reproduce_command(out, run, steps))


def _cli(module: str) -> Any:
    """Import a module of surefit.cli when a verb needs it."""
    return import_module(f"surefit.cli.{module}")
