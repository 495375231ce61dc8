"""The verb `merge`, for a run or for another tool's adapter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.options import Base, Into, Overrides, Prompts, TrainedOn
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK, ConfigError
from surefit.core.rundir import RunDir
from surefit.core.units import plural

if TYPE_CHECKING:
    from surefit.stages.run_context import CheckedRun


@verb
def merge(
    out: Output,
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
) -> int:
    """Merge the adapter into its base, file by file, with a certificate that the result is the same model."""
    from surefit.facts.lora_settings import adapters_below, describe_nested_adapters
    from surefit.stages.merging import AdapterOptions, is_adapter_directory, merge_external_adapter
    from surefit.stages.run_context import load_checked_run

    options = AdapterOptions(base, output, trained_on, prompts, others or (), combine)
    if is_adapter_directory(target):
        certificate = merge_external_adapter(target, out, into, options)
        return say_certificate(out, certificate, RunDir(output or target).merged)
    if not RunDir(target).resolved.exists() and (below := adapters_below(target)):
        raise ConfigError(
            f"there is no adapter_config.json in it{describe_nested_adapters(below)}",
            code="E1850",
            path=target,
            help=f"PEFT saves an adapter that has a name of its own in a directory of that name: name {below[0]}",
        )
    if options != AdapterOptions():
        raise ConfigError(
            "--base, --output, --with, --trained-on and --prompts are for an adapter's directory",
            code="E1029",
            path=target,
            help="a run knows its base, its prompts and where its merged/ goes",
        )
    run = load_checked_run(target, overrides)
    code = merge_run_and_show(out, run, into)
    out.next_step(["evaluate", run.run.path], ["chat", run.run.path])
    return code


def merge_run_and_show(out: Output, run: CheckedRun, into: str = "auto") -> int:
    """Merge a run's adapter, or all its weights, and print the certificate."""
    from surefit.stages.merging import merge_run

    certificate = merge_run(run, out, into)
    return say_certificate(
        out, certificate, run.run.merged if run.resolved.config.train.method == "lora" else run.run.model
    )


def say_certificate(out: Output, certificate: dict[str, Any], path: Path) -> int:
    """Print what a passed certificate has measured; return the exit code."""
    checks = [
        c for c in certificate["checks"] if c["name"].startswith("reloaded_") and isinstance(c["value"], float | int)
    ]
    rows = [[c["name"], f"{c['value']:.5g}", c["comparison"], f"{c['threshold']:.5g}"] for c in checks]
    if rows:  # with all weights trained there is nothing to fold in
        out.table("The merged model, read from disk, against base + adapter", ["check", "value", "", "bound"], rows)
    if zero := certificate.get("not_trained"):
        layers = f" and {plural(len(zero) - 1, 'more layer')}" if len(zero) > 1 else ""
        out.say(
            f"lora_B of {zero[0]}{layers} is zero: no update was trained there, and the merged weights are the base's"
        )
    checked = plural(len(certificate["checks"]), "check")
    out.say(f"Certificate passed, {checked} (certificate.json has them) → {path}", "green")
    out.result(certificate)
    return EXIT_OK
