"""TRK: experiment trackers."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.facts.environment import EnvironmentFacts
from surefit.facts.setup import Setup
from surefit.lint.rule import Finding, LintContext, rule

ANSWERS = {"WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED"}
"""Variables with which W&B asks no question."""


@rule("TRK001", "tracker-would-prompt", severity="warning", needs=(Setup, EnvironmentFacts))
def tracker_would_prompt(context: LintContext, setup: Setup, environment: EnvironmentFacts) -> Iterator[Finding]:
    """Weights & Biases is to be used, and nobody is logged in.

    ## What it does
    Where a config names wandb: looks for a key or a mode (`WANDB_API_KEY`, `WANDB_MODE`, a login in `~/.netrc`) on this
    machine and in the batch script.

    ## Why it is bad
    At a terminal the run waits at a question until somebody answers; in a batch job it stops with "api_key not
    configured (no-tty)" after the model was loaded.

    ## Example
    `report_to: wandb` on a machine where `wandb login` was never run.

    ## Fix
    `wandb login`, or `WANDB_MODE=offline`, or `report_to: none`.

    ## Evidence
    A published report on LLM ranking had runs blocked by the question. McGill-NLP/llm2vec#99,
    hiyouga/LlamaFactory#3530.
    """
    in_job = bool(context.job and ANSWERS & set(context.job.variables))
    if "wandb" in (setup.trackers or ()) and not environment.wandb and not in_job:
        yield Finding(
            field="trackers",
            message=f"{setup.name('trackers')} names wandb, and there is no key and no mode for it on this machine",
            help="run `wandb login`, set WANDB_MODE=offline, or take wandb out",
        )


@rule("TRK002", "every-tracker", severity="warning", needs=(Setup,))
def every_tracker(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The run reports to every tracker that happens to be installed.

    ## What it does
    Looks for `report_to: all`.

    ## Why it is bad
    Installing a package changes where a run reports, and whether it waits for a login. Each tracker also sends the
    config and the losses to its own server.

    ## Example
    `report_to: all` in an environment with wandb, mlflow and comet.

    ## Fix
    Name the trackers, or write `report_to: none`.

    ## Evidence
    It was the default of transformers 4; version 5 changed it to none. McGill-NLP/llm2vec#99: a run that asks for a W&B
    account because the package was there.
    """
    if "all" in (setup.trackers or ()):
        yield Finding(
            field="trackers",
            message=f"{setup.name('trackers')} is all: every tracker that is installed is used",
            help="name the trackers that are meant, or write none",
        )
