"""The verbs of `surefit` and their options. The other files of this folder implement them; `exits.py` ends them.

Nothing heavy is imported here: `surefit --help` must answer at once, `surefit check` without torch.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from surefit import __version__
from surefit.cli import data, preparing, publish
from surefit.cli.exits import exit_now, open_closed_streams, run_verb
from surefit.cli.options import (
    Adapt,
    AllCheckpoints,
    Base,
    ConfigFile,
    EachGpu,
    Gpu,
    Gpus,
    Into,
    Json,
    Overrides,
    Overwrite,
    Prompts,
    Resume,
    Target,
    TrainedOn,
)
from surefit.core import env

EPILOG = (
    "Exit codes: 0 fine · 1 findings, or a gate not passed · 2 usage, config or data · 3 environment · "
    "4 a bug in SureFit · 5 a score gate that cannot tell · "
    "75 interrupted with the work saved (continue with --resume) · 130 interrupted"
)

app = typer.Typer(
    name="surefit",
    help="Fine-tune language models and get it right the first time: check → plan → train → merge → evaluate → report.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    env.sleep_at_barriers()


@app.command()
def init(
    recipe: Annotated[str | None, typer.Argument(help="The task, e.g. function_calling.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of to stdout.")] = None,
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    as_json: Json = False,
) -> None:
    """Write a commented starter config."""
    run_verb(as_json, lambda out: _cli("info").init_command(out, recipe, output, list_recipes))


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
        raise typer.BadParameter("--dry-run needs --fix")
    if as_json and style not in ("text", "json"):
        raise typer.BadParameter(f"--json is not --format {style}")
    output_format = "json" if as_json else style
    run_verb(
        output_format != "text",
        lambda out: _cli("checking").check_file(
            out,
            config,
            overrides,
            show=show,
            select=select,
            ignore=ignore,
            fix=fix,
            dry_run=dry_run,
            style=output_format,
        ),
        with_result=output_format == "json",
    )


app.command()(data.audit)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="Another tool's config: axolotl, LLaMA-Factory, TRL.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead of to stdout.")] = None,
    as_json: Json = False,
) -> None:
    """Make a SureFit config of another tool's, with a comment for every key that has no place in it."""
    run_verb(as_json, lambda out: _cli("checking_foreign").import_config(out, source, output))


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
    gpus: Gpus = None,
    as_json: Json = False,
) -> None:
    """Say what the run needs, and whether it fits: memory by phase, time, disk, with what is not counted."""
    changes = [*(overrides or ()), *([] if gpu is None else [f"hardware.gpu={gpu!r}"])]
    changes += [f"hardware.count={gpus}"] if gpus else []
    run_verb(
        as_json,
        lambda out: _cli("planning").plan_command(
            out, config, changes, _cli("planning").PlanOptions(quick, optimize, compare, price, solve, against, plot)
        ),
    )


@app.command()
def train(
    config: Target, overrides: Overrides = None, resume: Resume = False, overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Prepare everything, run no step, write nothing.")] = False,
    adapt: Adapt = False, gpus: Gpus = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Train the adapter (or the model), with checkpoints that survive a crash."""
    run_verb(
        as_json,
        lambda out: _cli("launching").train_command(
            out, config, overrides, gpus, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt
        ),
    )


app.command()(preparing.prepare)


@app.command()
def slurm(
    config: ConfigFile, overrides: Overrides = None,
    stage: Annotated[
        Literal["train", "merge", "evaluate", "run"],
        typer.Option(help="What the job does; run is a job for each of them, one after the other."),
    ] = "train",
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines; default: hardware.nodes, or 1.")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus-per-node", min=0, help="GPUs on each; default: hardware.count, or 1.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it to sbatch.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it here; of a run, a folder.")] = None,
    interface: Annotated[str | None, typer.Option(help="The network interface to talk over, e.g. ib0.")] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Instead an array job that scores checkpoints.")] = False,
    prepare: Annotated[bool, typer.Option("--prepare", help="Instead an array job that makes data.tokenized.")] = False,
    array: Annotated[str | None, typer.Option(metavar="TASKS[%AT_ONCE]", help="Of an array job: so many.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Check the run and print the batch script of a job that saves, requeues itself and resumes until it is done."""
    if array and not (evaluate or prepare):
        raise typer.BadParameter("--array needs --evaluate or --prepare")
    if evaluate + prepare + (stage != "train") > 1:
        raise typer.BadParameter("--stage, --evaluate and --prepare cannot be combined: give one of them")
    if gpus == 0 and (evaluate or stage != "merge"):
        raise typer.BadParameter("--gpus-per-node 0 is for --stage merge; elsewhere set hardware.gpu: cpu")
    if stage == "merge" and ((nodes or 1) > 1 or (gpus or 1) > 1):
        raise typer.BadParameter("a merge is one process: --stage merge takes one node, and one GPU or none")
    if submit and output:
        raise typer.BadParameter("--submit writes job.sbatch into the run directory; --output is without it")

    def work(out: Any) -> int:
        verbs, changes = _cli("slurm"), overrides or ()
        options = verbs.SlurmOptions(nodes, gpus, submit, output, interface, array)
        if evaluate or prepare:
            return int(
                (verbs.submit_evaluation_array if evaluate else verbs.submit_prepare_array)(
                    out, config, changes, options
                )
            )
        return int(verbs.slurm_command(out, config, changes, stage, options))

    run_verb(as_json, work)


@app.command()
def merge(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A config, a run, or any tool's adapter directory.")],
    overrides: Overrides = None,
    into: Into = "auto",
    base: Base = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="For an adapter: where merged/ goes.")] = None,
    others: Annotated[
        list[str] | None, typer.Option("--with", metavar="ADAPTER[:WEIGHT]", help="Combine it with this one first.")
    ] = None,
    combine: Annotated[str, typer.Option(metavar="WAY", help="cat (sum), ties, dare_ties, …: PEFT's ways.")] = "cat",
    trained_on: TrainedOn = "none",
    prompts: Prompts = None,
    as_json: Json = False,
) -> None:
    """Merge the adapter into its base, file by file, with a certificate that the result is the same model."""
    run_verb(as_json, lambda out: _cli("merging").merge_command(
        out, target, overrides, into, _cli("merging").AdapterOptions(
            base, output, trained_on, prompts, others or (), combine
        ),
    ))  # fmt: skip


@app.command()
def certify(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="The adapter's directory.")],
    merged: Annotated[Path, typer.Argument(metavar="MERGED", help="The merged model's, whoever merged it.")],
    base: Base = None,
    into: Into = "auto",
    trained_on: TrainedOn = "none",
    prompts: Prompts = None,
    as_json: Json = False,
) -> None:
    """Say whether a merged model is base + adapter: weight by weight, and by what it answers."""
    run_verb(as_json, lambda out: _cli("merging").certify_command(
        out, adapter, merged, into, _cli("merging").AdapterOptions(base, None, trained_on, prompts)
    ))  # fmt: skip


@app.command()
def evaluate(
    target: Target, overrides: Overrides = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Score only this one: base, adapter, merged, model, served, or step-N (repeatable)."),
    ] = None,
    constrained: Annotated[
        bool, typer.Option("--constrained", help="Answer under the recipe's grammar too, side by side.")
    ] = False,
    max_examples: Annotated[
        int | None, typer.Option(min=1, help="Only so many rows of each set, taken evenly from all.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Print so many rows that were won, and as many lost.")] = 0,
    all_checkpoints: AllCheckpoints = False, gpus: EachGpu = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be asked; load no model.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Score base, adapter and merged model on the held-out rows, with confidence intervals."""
    changes = [
        *(overrides or ()),
        *(["evaluate.constrained=both"] if constrained else []),
        *([f"evaluate.max_examples={max_examples}"] if max_examples else []),
    ]
    if all_checkpoints and (variant or show):
        raise typer.BadParameter("--all-checkpoints cannot be combined with --variant or --show")
    run_verb(
        as_json,
        lambda out: _cli("answering").evaluate_command(
            out, target, changes, variant, show=show, every=all_checkpoints, gpus=gpus, dry_run=dry_run
        ),
    )


@app.command()
def predict(
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
    constrained: Annotated[
        bool, typer.Option("--constrained", help="Answer under the recipe's grammar.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in --output.")] = False,
    gpus: EachGpu = None, overrides: Overrides = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Answer new rows, or one prompt, with a trained model."""
    chosen = [name for name, is_set in (("base", base), ("adapter", adapter), ("merged", merged)) if is_set]
    chosen += [variant] if variant else []
    if len(chosen) > 1:
        raise typer.BadParameter(f"one model answers, not {' and '.join(chosen)}")
    changes = [*(overrides or ()), *(["evaluate.constrained=only"] if constrained else [])]
    model = chosen[0] if chosen else None
    run_verb(
        as_json,
        lambda out: _cli("answering").predict_command(
            out, target, changes, _cli("answering").PredictOptions(data, prompt, output, model, overwrite), gpus
        ),
    )


@app.command()
def score(
    predictions: Annotated[str, typer.Option(metavar="FILE", help="Answers: JSONL, JSON, CSV, Parquet or text lines.")],
    references: Annotated[str, typer.Option(metavar="FILE", help="Gold rows, laid out as the recipe's data.")],
    recipe: Annotated[str, typer.Option(metavar="NAME", help="Whose scorer, e.g. function_calling.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the scores of every row here.")] = None,
    as_json: Json = False,
) -> None:
    """Score any predictions with a recipe's scorer: no model, no run."""
    run_verb(as_json, lambda out: _cli("scoring").score_command(out, recipe, predictions, references, output))


@app.command("compare")
def compare_(
    a: Annotated[str, typer.Argument(metavar="A", help="RUN, RUN:VARIANT, scored predictions, or a baseline of B.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same: what is asked is whether B is better.")],
    set_name: Annotated[str, typer.Option("--set", metavar="NAME", help="The set that both answered.")] = "eval",
    variant: Annotated[str | None, typer.Option(help="Of runs without one; default: the tuned model.")] = None,
    metric: Annotated[str | None, typer.Option(help="That decides; default: the recipe's primary metric.")] = None,
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="For files that do not name theirs.")] = None,
    judge: Annotated[str | None, typer.Option(metavar="URL", help="Ask a model on this server (OpenAI's API).")] = None,
    judge_model: Annotated[str | None, typer.Option(metavar="NAME", help="Its name; without URL a local one.")] = None,
    judge_rows: Annotated[int | None, typer.Option(min=1, help="Ask about so many rows, taken evenly.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how many calls the judge would take.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the differences as SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Say whether B's answers are better than A's, on the same rows, and how sure that is."""
    run_verb(
        as_json,
        lambda out: _cli("comparing").compare_command(
            out, a, b, set_name=set_name, variant=variant, metric=metric, recipe_name=recipe, plot=plot,
            judge=_cli("comparing").JudgeOptions(judge, judge_model, judge_rows, dry_run),
        ),
    )  # fmt: skip


@app.command()
def retrieve(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="MovieLens or reviews: the file, or its directory.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory for rows, candidates and manifest.")],
    retriever: Annotated[str, typer.Option(help="blend, lrurec, popularity, markov or window5.")] = "blend",
    seed: Annotated[int, typer.Option(min=0, help="Of the training, and of the wrong candidates.")] = 0,
    train_rows: Annotated[int, typer.Option(min=1, help="Rows for the ranker to learn from, at most.")] = 10_000,
    candidates: Annotated[int, typer.Option(min=2, max=26, help="Titles to choose from in each row.")] = 20,
    history: Annotated[int, typer.Option(min=1, max=500, help="Titles of a user's history in each row.")] = 20,
    core: Annotated[int, typer.Option(min=3, help="Events that each user and each item must have.")] = 5,
    as_json: Json = False,
) -> None:
    """Make rows for recipe rec_ranking: find candidates for every user, with a retriever that is trained here."""
    run_verb(
        as_json,
        lambda out: _cli("retrieving").retrieve_command(
            out,
            data,
            output,
            retriever=retriever,
            seed=seed,
            train_rows=train_rows,
            candidates=candidates,
            history=history,
            core=core,
        ),
    )


@app.command()
def report(
    targets: Annotated[list[Path], typer.Argument(metavar="TARGET...", help="Config files, or run directories.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Of several runs: the page that compares them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the page that explains the run, or one that compares several: one file, readable offline."""
    run_verb(as_json, lambda out: _cli("reporting").report_command(out, targets, output))


@app.command()
def run(
    config: Target, overrides: Overrides = None, resume: Resume = False, overwrite: Overwrite = False,
    adapt: Adapt = False, gpus: Gpus = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Run all stages in order: check, plan, train, merge, evaluate, report; stop at the first that fails."""
    run_verb(
        as_json,
        lambda out: _cli("launching").run_command(
            out, config, overrides, gpus, resume=resume, overwrite=overwrite, adapt=adapt
        ),
    )


@app.command()
def demo(
    output_dir: Annotated[
        str | None, typer.Option(help="The run directory; an earlier demo is replaced. runs/demo, or runs/demo-real.")
    ] = None,
    real: Annotated[bool, typer.Option("--real", help="Teach SmolLM2-135M-Instruct, a pretrained model.")] = False,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --real: score the leaderboard's requests in DIR, too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Teach a model new tools: the whole pipeline, offline, in minutes on a CPU."""
    if data is not None and not real:
        raise typer.BadParameter("--data needs --real")
    run_verb(as_json, lambda out: _cli("demo").demo_command(out, output_dir, real=real, data=data))


@app.command()
def doctor(
    file: Annotated[Path | None, typer.Argument(help="With --fix-script: write it here, not to stdout.")] = None,
    fix_script: Annotated[bool, typer.Option("--fix-script", help="Write the commands that fix it.")] = False,
    as_json: Json = False,
) -> None:
    """Look at this machine: what is there, what is wrong, how to fix it."""
    run_verb(as_json, lambda out: _cli("info").doctor_command(out, fix_script, file))


@app.command()
def calibrate(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the profile here as well.")] = None,
    as_json: Json = False,
) -> None:
    """Measure how fast this machine's GPU (or CPU) is, so that `plan` need not believe the data sheet."""
    run_verb(as_json, lambda out: _cli("calibrating").calibrate_command(out, output))


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(help="A rule's code, e.g. SCH001.")] = None,
    every: Annotated[bool, typer.Option("--all", help="List every rule.")] = False,
    as_json: Json = False,
) -> None:
    """Explain a rule: what it looks for, why that is bad, how to fix it, where it was seen."""
    run_verb(as_json, lambda out: _cli("info").explain_command(out, code, every))


app.command()(publish.export)
app.command()(publish.push)
app.command("serve-check")(publish.serve_check)
app.add_typer(publish.runs, name="runs")


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8365,
    host: Annotated[str, typer.Option(help="Where to listen; beyond this machine a token is asked for.")] = "127.0.0.1",
    workspace: Annotated[Path, typer.Option(metavar="DIR", help="All that the pages read and write.")] = Path("."),
    token: Annotated[bool, typer.Option("--token", help="Ask for a token on this machine too.")] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Serve a local page: write configs, plan by sliders, watch and compare runs, read what they answered."""
    run_verb(False, lambda out: _cli("serving").serve(out, host, port, workspace, token, not no_open))


def _cli(module: str) -> Any:
    """Import a module of surefit.cli when a verb needs it."""
    return import_module(f"surefit.cli.{module}")


def main() -> None:
    """Run the console script."""
    open_closed_streams()
    env.start_children_safely()
    try:
        app()
    except SystemExit as ended:
        if sys.argv[1:2] == ["plan"]:
            exit_now(ended)
        raise
    finally:
        gc.disable()  # the process ends anyway: with torch loaded, a last garbage collection takes half a second


if __name__ == "__main__":
    main()
