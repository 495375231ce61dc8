"""TRK: experiment trackers."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.schema import SureFitConfig
from surefit.config.trackers import TRACKERS
from surefit.core.packaging import install_extra
from surefit.facts.environment import EnvironmentFacts
from surefit.facts.setup import Setup
from surefit.facts.stack import StackFacts
from surefit.lint.rule import Finding, LintContext, rule


@rule("TRK001", "tracker-would-prompt", severity="warning")
def tracker_would_prompt(context: LintContext, setup: Setup, environment: EnvironmentFacts) -> Iterator[Finding]:
    """The run uses a tracker that needs a login, but there is no login.

    ## What it does
    If a config names such a tracker (wandb), looks for a key or a mode (`WANDB_API_KEY`, `WANDB_MODE`, a login in
    `~/.netrc`) on this machine and in the batch script. Another tool's config is checked only if that tool is
    installed: otherwise the run is for another machine.

    ## Why it is bad
    At a terminal the run waits at a prompt until somebody answers; in a batch job it stops with "api_key not configured
    (no-tty)" after the model was loaded. SureFit never prompts: it stops before the model is loaded.

    ## Example
    `report_to: wandb` on a machine where `wandb login` was never run.

    ## Fix
    Run `wandb login`, or set `WANDB_MODE=offline` or `report_to: none`; in SureFit's config, `telemetry.wandb:
    offline`.

    ## Evidence
    A published report on LLM ranking had runs blocked by the prompt. McGill-NLP/llm2vec#99, hiyouga/LlamaFactory#3530.
    """
    ready = (*environment.trackers, *(setup.quiet_trackers or ()))
    job_variables = set(context.job.variables) if context.job else set()
    names = [name for name in setup.trackers or () if name in TRACKERS and name not in ready]
    for name in names if trains_here(context, setup) else ():
        tracker = TRACKERS[name]
        if tracker.login and not job_variables & set(tracker.variables):
            yield Finding(
                field="trackers",
                message=f"{setup.name('trackers')} names {name}, but this machine has no login or mode for it",
                help=f"run `{tracker.login}`, or write {tracker.key}: offline"
                if setup.tool == "surefit"
                else f"run `{tracker.login}`, set {tracker.offline}, or remove {name}",
            )


def trains_here(context: LintContext, setup: Setup) -> bool:
    """Return whether the run could train on this machine: with SureFit, in a batch job, or with an installed tool."""
    if setup.tool in ("surefit", "slurm"):
        return True
    return context.stack is None or setup.package in context.stack.versions


@rule("TRK002", "every-tracker", severity="warning")
def every_tracker(setup: Setup) -> Iterator[Finding]:
    """The run reports to every installed tracker.

    ## What it does
    Looks for `report_to: all`.

    ## Why it is bad
    Installing a package then changes where the run reports, and whether it waits for a login. Each tracker also sends
    the config and the losses to its own server.

    ## Example
    `report_to: all` in an environment with wandb, mlflow and comet.

    ## Fix
    Name the trackers, or write `report_to: none`.

    ## Evidence
    It was the default of transformers 4; version 5 changed it to none. McGill-NLP/llm2vec#99: a run that prompts for a
    W&B account because the package is installed.
    """
    if "all" in (setup.trackers or ()):
        yield Finding(
            field="trackers",
            message=f"{setup.name('trackers')} is all: the run reports to every installed tracker",
            help="name the trackers that you want, or write none",
        )


@rule("TRK003", "tracker-not-installed", severity="warning")
def tracker_not_installed(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """The run reports to a tracker whose package is not installed.

    ## What it does
    Compares the trackers in the config with the installed packages, if the run would use this environment.

    ## Why it is bad
    transformers' Trainer stops with a RuntimeError when it is created, after the model was loaded. SureFit stops before
    that.

    ## Example
    `telemetry.tensorboard: true` without the package tensorboard.

    ## Fix
    Run the pip command that the finding names, or remove the tracker.

    ## Evidence
    transformers: "WandbCallback requires wandb to be installed. Run `pip install wandb`."
    """
    on_this_machine = context.hardware is None or context.hardware.source == "detected"
    if not on_this_machine or (setup.tool != "surefit" and setup.package not in stack.versions):
        return
    for name in setup.trackers or ():
        packages = TRACKERS[name].packages if name in TRACKERS else ()
        if packages and not set(packages) & stack.versions.keys():
            yield Finding(
                field="trackers",
                message=f"{setup.name('trackers')} names {name}, but {packages[0]} is not installed",
                help=install_extra(name) if setup.tool == "surefit" else f"pip install {packages[0]}",
            )


@rule("TRK007", "address-variable-missing", severity="warning")
def address_variable_missing(config: SureFitConfig, environment: EnvironmentFacts) -> Iterator[Finding]:
    """A tracker's address comes from an environment variable that is not set.

    ## What it does
    If `telemetry.mlflow_uri` is `env`, looks for `MLFLOW_TRACKING_URI` in the environment and in `.env`.

    ## Why it is bad
    Training stops before its first step, a batch job only after waiting in the queue.

    ## Example
    `telemetry: {mlflow_uri: env}` in a shell without `MLFLOW_TRACKING_URI`.

    ## Fix
    Set the variable on the machine that runs the job, or write the address into the config. Ignore the finding if the
    variable is set on the node only.

    ## Evidence
    A team's batch script exported it in one shell, and submitted the job from another.
    """
    if config.telemetry.mlflow_uri == "env" and "mlflow" not in environment.trackers:
        yield Finding(
            field="telemetry.mlflow_uri",
            message="telemetry.mlflow_uri is env, but MLFLOW_TRACKING_URI is not set here: the run stops at the start "
            "unless it is set there",
            help="export MLFLOW_TRACKING_URI, put it into .env, or write the address instead of env",
        )
