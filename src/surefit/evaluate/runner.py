"""Every variant of a run answers the same held-out prompts, and every answer counts.

The denominator is the number of rows: an answer that does not parse, or that the token limit cut, is a row with the
recipe's zeros, never one that is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from surefit.config.resolve import HardwareLike
from surefit.config.schema import Config
from surefit.core.progress import OnProgress, silent
from surefit.core.rundir import RunDir, write_json
from surefit.data.formats import Examples
from surefit.evaluate.answers import BASELINE
from surefit.evaluate.asking import LocalModel, Respondent, Server, ask
from surefit.evaluate.gate import require_reference
from surefit.evaluate.kept import Kept
from surefit.evaluate.record import Files, Scored, baseline_settings
from surefit.evaluate.rows import Picked, errors_at, pick, predictions, require_scorable, scored_line
from surefit.evaluate.settings import require_settings
from surefit.evaluate.summary import summarise
from surefit.evaluate.variants import SERVED, choose, open_variants
from surefit.evaluate.ways import Way, ways
from surefit.task import Prediction, TaskRecipe


def evaluate(
    config: Config,
    recipe: TaskRecipe,
    hardware: HardwareLike,
    run: RunDir,
    sets: Mapping[str, Examples],
    variants: Sequence[str] | None = None,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Score variants on sets; write eval/SET/VARIANT.json with its predictions, and eval/summary.json.

    Killed, it goes on where it was when it is called again: answers are kept as they come. The summary also holds what
    earlier calls scored, where it is still comparable: the same model, rows, recipe version and settings. What is not
    is named under "left_out".

    Args:
        config: nothing in it is "auto".
        recipe: judges the answers.
        hardware: where the models are loaded, one at a time; base and adapter are one model.
        sets: name → rows, "eval" (the held-out rows) among them.
        variants: which to score now; all of the run's kind by default.
        on_progress: called with (rows done, rows, what is being scored).

    Returns:
        The summary, as in eval/summary.json. Its "gate" is None, or says whether it passed and why.

    Raises:
        ConfigError: a variant that this run does not have (yet), settings that exclude each other, or a gate on what
            the recipe does not give.
        DataError: a set is empty, or a row cannot be scored.
        GateError: merged/ is not the model that its certificate was given for.
        MachineError: not enough GPU memory, the disk, or the server.
    """
    require_settings(config.evaluate, recipe)
    if config.evaluate.gate:
        require_reference(config.evaluate.gate, recipe)
    chosen = choose(config, run, variants)
    picked = {name: pick(name, examples, config.evaluate.max_examples) for name, examples in sets.items()}
    for rows in picked.values():
        require_scorable(rows, recipe, config.evaluate.samples)
    files = Files(config, recipe, run)
    for name, rows in picked.items():
        for baseline in recipe.baselines:
            if not files.has(name, BASELINE + baseline, rows):
                files.write(name, score_baseline(baseline, recipe, rows, config.evaluate.samples))
    asked = ways(config, recipe)
    total, done = len(chosen) * len(asked) * sum(len(rows) for rows in picked.values()), 0
    for variant, respondent in respondents(config, recipe, hardware, run, chosen):
        for way in asked:
            for name, rows in picked.items():
                label = f"{way.of(variant)} on {name}"
                kept = files.kept(name, variant, way)
                part = _part_of(on_progress, done, total, label)
                files.write(name, score_variant(way.of(variant), respondent, recipe, rows, way, kept, part))
                kept.forget()
                done += len(rows)
        del respondent  # the next variant needs the memory
    scored, about, left_out = files.comparable(picked)
    summary = summarise(recipe, config.evaluate.gate, scored, left_out, run)
    for name, found in about.items():
        summary["sets"][name]["answers"] = found
    write_json(run.eval_summary, summary)
    return summary


def respondents(
    config: Config, recipe: TaskRecipe, hardware: HardwareLike, run: RunDir, chosen: Sequence[str]
) -> Iterator[tuple[str, Respondent]]:
    """(variant, what answers for it), one after the other. Let go of each before asking for the next: it is a model."""
    for name, model, tokenizer in open_variants(config, hardware, run, chosen):
        yield name, LocalModel(model, tokenizer, recipe)
        del model
    if SERVED in chosen:
        from surefit.generate.server import ServedModel

        assert config.evaluate.server is not None  # `choose` has looked
        yield SERVED, Server(ServedModel(config.evaluate.server), recipe)


def _part_of(on_progress: OnProgress, before: int, total: int, label: str) -> OnProgress:
    return lambda done, _, text: on_progress(before + done, total, f"{label} {text}".rstrip())


def score_variant(
    variant: str,
    respondent: Respondent,
    recipe: TaskRecipe,
    rows: Picked,
    way: Way,
    kept: Kept,
    on_progress: OnProgress = silent,
) -> Scored:
    """Ask one variant about these rows in one way, and judge its answers. Nothing is written but what `kept` keeps."""
    asked = ask(respondent, recipe, rows, way, kept, on_progress)
    found = [predictions(recipe, answer) for answer in asked.answers]
    lines = [
        _with_prompt(scored_line(recipe, index, where, example, own, way.samples), respondent.shown(prompt))
        for index, where, example, own, prompt in zip(
            rows.indices, rows.where, rows.examples, found, asked.prompts, strict=True
        )
    ]
    tokens = sum(answer.tokens for answer in asked.answers)
    return Scored(variant, lines, way.settings, way.costs, *_failures(found), asked.seconds, tokens)


def score_baseline(name: str, recipe: TaskRecipe, rows: Picked, samples: int = 1) -> Scored:
    """Judge what one of the recipe's baselines answers to these rows; it answers the same however often it is asked."""
    found, lines = [], []
    for index, where, example in zip(rows.indices, rows.where, rows.examples, strict=True):
        with errors_at(where):
            answer = recipe.baselines[name](example)
        answer = answer if answer.parsed is not None else replace(answer, parsed=recipe.parse(answer.text))
        found.append([answer])
        lines.append(scored_line(recipe, index, where, example, [answer] * samples, samples))
    return Scored(BASELINE + name, lines, baseline_settings(samples), {}, *_failures(found))


def _with_prompt(line: dict[str, Any], prompt: str) -> dict[str, Any]:
    return {"index": line.pop("index"), "where": line.pop("where"), "prompt": prompt, **line}


def _failures(found: Sequence[Sequence[Prediction]]) -> tuple[int, int]:
    """Answers that were cut, and answers that do not parse (the cut ones among them)."""
    every = [one for own in found for one in own]
    return sum(one.truncated for one in every), sum(one.parsed is None for one in every)
