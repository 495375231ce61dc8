"""The verb `serve-check`: how to serve a model, and whether a server answers as the run did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, ConfigError
from surefit.core.sampling import evenly_spaced
from surefit.core.units import plural, truncate_text

if TYPE_CHECKING:
    from surefit.merge.serving import ServingCommands

ASKED = 3
"""Number of prompts of the run that a server is asked."""


@verb
def serve_check(
    out: Output,
    target: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run, an export, or a model's directory.")],
    url: Annotated[
        str | None, typer.Option(help="Address of a running server: ask it a few prompts of the run.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Its name there, where it has several.")] = None,
) -> int:
    """Print the commands that serve a model with vLLM, SGLang or Ollama; with --url, see that a server answers as the
    run did."""
    from surefit.merge.serving import build_serving_commands

    serving = build_serving_commands(target)
    for name, value in serving.facts.items():
        out.say(f"{name}: {value}")
    for name, commands in serving.commands.items():
        out.say(f"\n{name}", "bold")
        for line in commands:
            out.say(line)
    for line in serving.notes:
        out.note(line)
    result = {"facts": serving.facts, "commands": serving.commands, "notes": serving.notes, "answers": None}
    if url is None:
        out.result(result)
        return EXIT_OK
    answers = _smoke_test(out, serving, url, model)
    matches = sum(answer["same"] for answer in answers)
    all_nonempty = all(answer["text"].strip() for answer in answers)
    ok = all_nonempty and matches > 0
    out.say(f"{matches} of {plural(len(answers), 'answer')} as the run has them", "green" if ok else "red")
    if not ok:
        out.say("Not one is: see that the server has this model, its chat template and its stop tokens", "red")
    out.result(result | {"answers": answers, "same": matches})
    return EXIT_OK if ok else EXIT_FINDINGS


def _smoke_test(out: Output, found: ServingCommands, url: str, model: str | None) -> list[dict[str, Any]]:
    """Send a few rows of the run to the server with greedy decoding, and compare the answers with the run's."""
    from surefit.data.rows.layouts import read_splits
    from surefit.evaluate.answers import read_run
    from surefit.evaluate.generation_settings import GenerationSettings
    from surefit.evaluate.inference import ServerModel
    from surefit.evaluate.rows import select_eval_rows
    from surefit.generate.engine import DecodingConfig
    from surefit.generate.server import ServedModel
    from surefit.stages.evaluating import require_held_out
    from surefit.stages.run_context import load_checked_run

    if found.run is None:
        raise ConfigError(
            "an export has no prompts of its own", code="E1017", field="--url", help="name the run that it was made of"
        )
    run = load_checked_run(found.run.path)
    config = run.resolved.config
    require_held_out(config, "--url")
    answers_of_run = {line["where"]: line for line in read_run(str(found.run.path), "eval").lines}
    _, held_out = read_splits(config.data, run.recipe, config.train.seed, run.rows, run.mixed)
    rows = select_eval_rows("eval", held_out, None)
    candidates = [
        place
        for place, where in enumerate(rows.where)
        if where in answers_of_run and not answers_of_run[where]["truncated"]
    ]
    sampled_rows = rows.subset(evenly_spaced(candidates, ASKED))
    respondent = ServerModel(
        ServedModel(url, model, field="--url", switches=config.evaluate.chat_template_kwargs), run.recipe
    )
    settings = GenerationSettings(DecodingConfig(config.evaluate.max_new_tokens, ASKED, stop=tuple(run.recipe.stop)))
    with out.progress("asking") as on_progress:
        answers = respondent.answer(sampled_rows, respondent.prompts(sampled_rows), settings, on_progress)
    lines = []
    for where, answer in zip(sampled_rows.where, answers, strict=True):
        text, expected = answer.generations[0].text, str(answers_of_run[where]["text"])
        is_same = text.strip() == expected.strip()
        lines.append({"where": where, "same": is_same, "text": text, "expected": expected})
        out.say(f"{where}: {'same' if is_same else 'DIFFERENT'}", None if is_same else "yellow")
        if not is_same:
            out.say(f"  the run: {truncate_text(expected, 200)}\n  served:  {truncate_text(text, 200)}")
    return lines
