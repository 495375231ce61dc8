"""`surefit merge` and `surefit certify`, for a run or for another tool's adapter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, ConfigError
from surefit.core.rundir import RunDir
from surefit.core.units import plural
from surefit.facts.lora_settings import adapters_below, describe_nested_adapters
from surefit.stages import merging
from surefit.stages.merging import AdapterOptions, is_adapter_directory
from surefit.stages.run_context import CheckedRun, load_checked_run

if TYPE_CHECKING:
    from surefit.cli.render import Output


def merge_command(out: Output, target: Path, overrides: list[str] | None, into: str, options: AdapterOptions) -> int:
    """Merge a run's adapter, or another tool's."""
    if is_adapter_directory(target):
        certificate = merging.merge_external_adapter(target, out, into, options)
        return _say(out, certificate, RunDir(options.output or target).merged)
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
    return merge_run_and_show(out, load_checked_run(target, overrides), into)


def merge_run_and_show(out: Output, run: CheckedRun, into: str = "auto") -> int:
    """Merge a run's adapter, or all its weights, and print the certificate."""
    certificate = merging.merge_run(run, out, into)
    return _say(out, certificate, run.run.merged if run.resolved.config.train.method == "lora" else run.run.model)


def certify_command(out: Output, target: Path, merged: Path, into: str, options: AdapterOptions) -> int:
    """Certify an existing merged model; return the exit code, which shows whether it passed."""
    certificate = merging.certify_merge(target, merged, out, into, options)
    if not certificate["passed"]:
        out.say(f"Not certified: {certificate['reason']}", "red")
        out.result(certificate)
        return EXIT_FINDINGS
    return _say(out, certificate, merged)


def _say(out: Output, certificate: dict[str, Any], path: Path) -> int:
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
    out.say(f"Certificate passed, {plural(len(certificate['checks']), 'check')} → {path}", "green")
    out.result(certificate)
    return EXIT_OK
