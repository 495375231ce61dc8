"""The command line: registers the verbs, each of which has a file of its own.

A verb's file imports nothing heavy at its top: `surefit --help` must answer at once, `surefit check` without torch.
"""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

from surefit import __version__
from surefit.cli.audit import audit
from surefit.cli.calibrate import calibrate
from surefit.cli.certify import certify
from surefit.cli.chat import chat
from surefit.cli.chat_worker import chat_worker
from surefit.cli.check import check
from surefit.cli.command_line import Verb, Verbs
from surefit.cli.compare import compare
from surefit.cli.demo import demo
from surefit.cli.doctor import doctor
from surefit.cli.evaluate import evaluate
from surefit.cli.exits import exit_now, open_closed_streams
from surefit.cli.explain import explain
from surefit.cli.export import export
from surefit.cli.import_ import import_
from surefit.cli.init import init
from surefit.cli.merge import merge
from surefit.cli.plan import plan
from surefit.cli.predict import predict
from surefit.cli.prepare import prepare
from surefit.cli.push import push
from surefit.cli.report import report
from surefit.cli.retrieve import retrieve
from surefit.cli.run import run
from surefit.cli.runs import runs
from surefit.cli.score import score
from surefit.cli.serve_check import serve_check
from surefit.cli.slurm import slurm
from surefit.cli.train import train
from surefit.cli.ui import ui
from surefit.core import env

EPILOG = (
    "Exit codes: 0 fine · 1 findings, or a gate not passed · 2 usage, config or data · 3 environment · "
    "4 a bug in SureFit · 5 a score gate that cannot tell · "
    "75 interrupted with the work saved (continue with --resume) · 130 interrupted"
)

app = typer.Typer(
    name="surefit",
    cls=Verbs,
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


VERBS = (
    init, check, audit, import_, plan, train, prepare, slurm, merge, certify, evaluate, predict, chat, score, compare,
    retrieve, report, run, demo, doctor, calibrate, explain, export, push, serve_check, ui,
)  # fmt: skip
"""In the order of `surefit --help`."""
for command in VERBS:
    app.command(command.__name__.strip("_").replace("_", "-"), cls=Verb)(command)
app.add_typer(runs, name="runs")
app.command("chat-worker", hidden=True)(chat_worker)  # surefit ui starts it


def main() -> None:
    """Run the console script."""
    open_closed_streams()
    env.start_children_safely()
    try:
        app(prog_name="surefit")
    except SystemExit as ended:
        if sys.argv[1:2] == ["plan"]:
            exit_now(ended)
        raise
    finally:
        gc.disable()  # the process ends anyway: with torch loaded, a last garbage collection takes half a second


if __name__ == "__main__":
    main()
