"""The verbs of `surefit`, their options and the exit codes. What a verb does is in the other files.

Nothing heavy is imported here: `surefit --help` must answer at once, `surefit check` without torch.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from surefit import __version__
from surefit.core import env
from surefit.core.errors import EXIT_BUG, Interrupted, LostProcess, SureFitError

EPILOG = (
    "Exit codes: 0 fine · 1 findings, or a gate not passed · 2 usage, config or data · 3 environment · "
    "4 a bug in SureFit · 75 interrupted with the work saved (continue with --resume) · 130 interrupted"
)

app = typer.Typer(
    name="surefit",
    help="Fine-tune language models and get it right the first time: check → plan → train → merge → evaluate → report.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A config file (YAML).")]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="A config file, or a run directory.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value, e.g. train.epochs=2.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line of stdout.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in output_dir from where it stopped.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the run that is already in output_dir first.")]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="So many GPUs; with hardware.gpu: cpu, processes.")]
Gpu = Annotated[str | None, typer.Option("--gpu", help="Plan for this GPU (e.g. h100), or for cpu.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"surefit {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    env.quiet_libraries()


@app.command()
def init(
    recipe: Annotated[str | None, typer.Argument(help="The task, e.g. function_calling.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of to stdout.")] = None,
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    as_json: Json = False,
) -> None:
    """Write a commented starter config."""
    _finish(as_json, lambda out: _cli("about").init(out, recipe, output, list_recipes))


@app.command()
def check(
    config: ConfigFile,
    overrides: Overrides = None,
    select: Annotated[str | None, typer.Option(metavar="CODES", help="Only these rules, e.g. MEM,SCH001.")] = None,
    ignore: Annotated[str | None, typer.Option(metavar="CODES", help="All rules but these.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Write the changes that have one right answer.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --fix: show the changes, write nothing.")] = False,
    show: Annotated[int, typer.Option(min=0, help="Show this many examples, with what is trained marked.")] = 0,
    style: Annotated[Literal["text", "json", "sarif", "github"], typer.Option("--format", help="For CI.")] = "text",
    as_json: Json = False,
) -> None:
    """Say what will break: config, model and data, in two seconds and without loading anything heavy."""
    if dry_run and not fix:
        raise typer.BadParameter("--dry-run goes with --fix")
    if as_json and style not in ("text", "json"):
        raise typer.BadParameter(f"--json is not --format {style}")
    shown = "json" if as_json else style
    _finish(
        shown != "text",
        lambda out: _cli("checking").check_file(
            out, config, overrides, show=show, select=select, ignore=ignore, fix=fix, dry_run=dry_run, style=shown
        ),
        with_result=shown == "json",
    )


@app.command()
def audit(
    target: Annotated[str, typer.Argument(metavar="CONFIG|DATA", help="A config or run directory, or bare data.")],
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the passport here.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Look at this many rows, spread evenly.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes at most; default: one per core.")] = None,
    as_json: Json = False,
) -> None:
    """Look at every row: lengths, duplicates, leaks, damage; write the data set's passport."""
    _finish(
        as_json,
        lambda out: _cli("auditing").audit(out, target, overrides, output=output, max_rows=max_rows, workers=workers),
    )


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="Another tool's config: axolotl, LLaMA-Factory, TRL.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of to stdout.")] = None,
    as_json: Json = False,
) -> None:
    """Make a SureFit config of another tool's, with a comment for every key that has no place in it."""
    _finish(as_json, lambda out: _cli("foreign").import_config(out, source, output))


@app.command()
def plan(
    config: Target,
    overrides: Overrides = None,
    gpu: Gpu = None,
    quick: Annotated[bool, typer.Option("--quick", help="Arithmetic only: nothing is simulated.")] = False,
    optimize: Annotated[bool, typer.Option("--optimize", help="Look for the fastest way that fits.")] = False,
    compare: Annotated[str | None, typer.Option(metavar="GPUS", help="On each of these, e.g. t4,l4,h200.")] = None,
    price: Annotated[str | None, typer.Option(metavar="GPU=PRICE,…", help="What an hour costs you.")] = None,
    solve: Annotated[str | None, typer.Option(metavar="FIELD", help="max_length, batch, rank or model.")] = None,
    against: Annotated[Path | None, typer.Option(metavar="RUN", help="Beside what this run really took.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the memory as SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Say what the run needs, and whether it fits: memory by phase, time, disk, with what is not counted."""
    changes = [*(overrides or ()), *([f"hardware.gpu={gpu}"] if gpu else [])]
    _finish(
        as_json,
        lambda out: _cli("planning").plan(
            out, config, changes, quick=quick, optimize=optimize, compare=compare, price=price, solve=solve,
            against=against, plot=plot,
        ),
    )  # fmt: skip


@app.command()
def train(
    config: Target, overrides: Overrides = None, resume: Resume = False, overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Prepare everything, run no step, write nothing.")] = False,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Out of memory: go on with settings that need less and learn the same.")
    ] = False,
    gpus: Gpus = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Train the adapter (or the model), with checkpoints that survive a crash."""
    _finish(
        as_json,
        lambda out: _cli("launching").train(
            out, config, overrides, gpus, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt
        ),
    )


@app.command()
def slurm(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines; default: hardware.nodes.")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, help="GPUs on each; default: hardware.count.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it to sbatch.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the script here.")] = None,
    interface: Annotated[str | None, typer.Option(help="The network interface to talk over, e.g. ib0.")] = None,
    as_json: Json = False,
) -> None:
    """Check the run and print the batch script of a job that saves, requeues itself and resumes until it is done."""
    if submit and output:
        raise typer.BadParameter("--submit writes job.sbatch into the run directory; --output is without it")
    _finish(
        as_json,
        lambda out: _cli("slurm").slurm(
            out, config, overrides or (), nodes=nodes, per_node=gpus, submit=submit, output=output, interface=interface
        ),
    )


@app.command()
def merge(target: Target, overrides: Overrides = None, as_json: Json = False) -> None:
    """Merge the adapter into a freshly loaded base model, with a certificate that the result is the same model."""
    _finish(as_json, lambda out: _cli("stages").merge(out, _cli("prepare").prepare(target, overrides)))


@app.command()
def evaluate(
    target: Target, overrides: Overrides = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Score only this one: base, adapter, merged or model (repeatable).")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Score base, adapter and merged model on the held-out rows, with confidence intervals."""
    _finish(as_json, lambda out: _cli("stages").evaluate(out, _cli("prepare").prepare(target, overrides), variant))


@app.command()
def predict(
    target: Target,
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="Rows to answer, laid out as trained.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this one user message instead.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSONL here, not to stdout.")] = None,
    variant: Annotated[str | None, typer.Option(help="base, adapter, merged or model; default: the best.")] = None,
    overrides: Overrides = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Answer new rows, or one prompt, with a trained model."""
    _finish(
        as_json,
        lambda out: _cli("stages").predict(
            out, _cli("prepare").prepare(target, overrides), data, prompt, output, variant
        ),
    )


@app.command()
def report(target: Target, as_json: Json = False) -> None:
    """Write the page that explains the run: one file, readable offline."""
    _finish(as_json, lambda out: _cli("stages").report(out, _cli("prepare").run_directory(target)))


@app.command()
def run(
    config: Target, overrides: Overrides = None, resume: Resume = False, overwrite: Overwrite = False,
    gpus: Gpus = None, as_json: Json = False,
) -> None:  # fmt: skip
    """All stages in order: check, plan, train, merge, evaluate, report; stops at the first that fails."""
    _finish(
        as_json,
        lambda out: _cli("launching").run(out, config, overrides, gpus, resume=resume, overwrite=overwrite),
    )


@app.command()
def demo(
    output_dir: Annotated[str, typer.Option(help="The run directory; an earlier demo is replaced.")] = "runs/demo",
    as_json: Json = False,
) -> None:
    """Teach the built-in model six new tools: the whole pipeline, offline, in a few minutes on a CPU."""
    _finish(as_json, lambda out: _cli("demo").demo(out, output_dir))


@app.command()
def doctor(
    file: Annotated[Path | None, typer.Argument(help="With --fix-script: write it here, not to stdout.")] = None,
    fix_script: Annotated[bool, typer.Option("--fix-script", help="Write the commands that mend it.")] = False,
    as_json: Json = False,
) -> None:
    """Look at this machine: what is there, what is wrong, how to mend it."""
    _finish(as_json, lambda out: _cli("about").doctor(out, fix_script, file))


@app.command()
def calibrate(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the profile here as well.")] = None,
    as_json: Json = False,
) -> None:
    """Measure how fast this machine's GPU (or CPU) is, so that `plan` need not believe the data sheet."""
    _finish(as_json, lambda out: _cli("calibrating").calibrate(out, output))


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(help="A rule's code, e.g. SCH001.")] = None,
    every: Annotated[bool, typer.Option("--all", help="List every rule.")] = False,
    as_json: Json = False,
) -> None:
    """Explain a rule: what it looks for, why that is bad, how to fix it, where it was seen."""
    _finish(as_json, lambda out: _cli("about").explain(out, code, every))


@app.command()
def runs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to look for run directories.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs below a directory: state, steps, scores."""
    _finish(as_json, lambda out: _cli("about").runs(out, directory))


def _cli(module: str) -> Any:
    """A module of this folder, imported when a verb needs it."""
    return import_module(f"surefit.cli.{module}")


def _finish(as_json: bool, verb: Callable[[Any], int], with_result: bool = True) -> None:
    """Run a verb; every way it can end becomes a message and an exit code."""
    from surefit.cli.render import Output

    out = Output(as_json, with_result, rank=env.process_place()[0])
    try:
        env.load_dotenv()
        code = verb(out)
    except (Interrupted, LostProcess) as error:
        # Of several processes the first speaks for all that were asked to stop, the launcher of those that are lost.
        if not (out.rank if isinstance(error, Interrupted) else env.launched_here()):
            out.error(error)
        code = error.exit_code
    except SureFitError as error:
        out.error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        out.note("interrupted")
        code = 130
    except BrokenPipeError:
        # The reader went away (`| head`): not our error, and there is no one left to tell.
        sys.stderr.close()
        code = 0
    except MemoryError:
        out.error(
            SureFitError("out of memory (RAM)", help="lower train.per_device_train_batch_size or data.max_length")
        )
        code = 3
    except Exception:
        code = _report_bug(out)
    raise typer.Exit(code)


def _report_bug(out: Any) -> int:
    with tempfile.NamedTemporaryFile("w", prefix="surefit-bug-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(env.redact(traceback.format_exc()))
    problem = traceback.format_exc(limit=0).strip().splitlines()[-1]
    error = SureFitError(
        f"SureFit did not expect this: {problem}",
        help=f"this is a bug in SureFit, please report it with {file.name}; what was saved before is still good",
    )
    error.exit_code = EXIT_BUG
    out.error(error)
    return EXIT_BUG


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
