"""What to do next, as commands: first what the run still lacks, then what its scores suggest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from surefit.core.units import shell_quote
from surefit.report.artefacts import Artefacts
from surefit.report.reproduce import run_path
from surefit.report.scores import HELD_OUT
from surefit.report.ship import ShipDecision
from surefit.report.timeline import Attempt, last_attempt
from surefit.report.verdict import Effect, has_no_held_out, has_trained_model


def list_next_steps(
    found: Artefacts, ship: ShipDecision, changes: Sequence[Effect], tries: Sequence[Attempt]
) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs; none without a resolved.yaml, since the commands read it."""
    if found.settings is None:
        return []
    run = run_path(found)
    if not has_trained_model(found, tries):
        if last_attempt(tries, "train") is None:
            return [("Run all stages:", f"surefit run {shell_quote(run)}")]
        return [
            (
                "Continue where the training stopped, and run the other stages:",
                f"surefit run {shell_quote(run)} --resume",
            )
        ]
    return [*_missing(found, run), *_suggested(found, run, changes), *_use(found, run, ship)]


def _missing(found: Artefacts, run: str) -> Iterator[tuple[str, str]]:
    if found.certificate is None:
        yield "Merge, with a certificate that the merged model is the trained one:", f"surefit merge {shell_quote(run)}"
    elif not found.certificate.passed:
        yield "See which checks failed under Certificate, then merge again:", f"surefit merge {shell_quote(run)}"
    if found.summary is None and not has_no_held_out(found):
        yield "Score the base and the tuned model on the held-out rows:", f"surefit evaluate {shell_quote(run)}"


def _suggested(found: Artefacts, run: str, changes: Sequence[Effect]) -> Iterator[tuple[str, str]]:
    main = next((change for change in changes if change.set == HELD_OUT), None)
    worse = [change.set for change in changes if change.set != HELD_OUT and change.fell]
    if worse:
        yield (
            f"Forget less: train again with other rows of the kind of {', '.join(worse)} mixed in, not those that are "
            "scored (OTHER.jsonl, a quarter of its rows):",
            f"surefit run {shell_quote(f'{run}/resolved.yaml')} --set output_dir={shell_quote(f'{run}-mixed')} "
            """--set 'data.mix={"OTHER.jsonl": 0.25}'""",
        )
    if main is not None and main.tone == "bad" and found.checkpoints is None:
        yield (
            "See whether an earlier checkpoint is better than the last:",
            f"surefit evaluate {shell_quote(run)} --all-checkpoints",
        )
    if main is not None and main.tone != "good" and found.passport is None:
        yield (
            "Look for damage, duplicates and contradictions in the training rows:",
            f"surefit audit {shell_quote(run)}",
        )
    if main is not None and len(changes) == 1:
        yield (
            "Find out what it forgot: score rows of another task, too (OTHER.jsonl):",
            f"""surefit evaluate {shell_quote(run)} --set 'evaluate.extra_sets={{"other": "OTHER.jsonl"}}'""",
        )


def _use(found: Artefacts, run: str, ship: ShipDecision) -> Iterator[tuple[str, str]]:
    yield "Talk to the model, with the base beside it:", f"surefit chat {shell_quote(run)} --compare"
    if found.certificate and found.certificate.passed and ship.tone in ("good", "warning"):
        yield (
            "Write the folder to publish, and print the commands that serve the model:",
            f"surefit export {shell_quote(run)}\nsurefit serve-check {shell_quote(run)}",
        )


def list_comparison_steps(runs: Sequence[Artefacts], better: Sequence[Artefacts]) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs for compared runs; `better` are those that beat the first."""
    first, *others = (run_path(run) for run in runs)
    comparisons = "\n".join(f"surefit compare {shell_quote(first)} {shell_quote(other)}" for other in others)
    steps = [("Compare the answers on every set, and read the rows that differ:", comparisons)]
    if better:
        best = run_path(better[0])
        steps += [("Talk to the better model, with its base beside it:", f"surefit chat {shell_quote(best)} --compare")]
        steps += [("Write the folder to publish:", f"surefit export {shell_quote(best)}")]
    else:
        again = f"{first}-seed-1"
        steps.append(
            (
                "See how much chance alone changes: train the first again with another seed:",
                f"surefit run {shell_quote(f'{first}/resolved.yaml')} --set train.seed=1 "
                f"--set output_dir={shell_quote(again)}\nsurefit report {shell_quote(first)} {shell_quote(again)}",
            )
        )
    return steps
