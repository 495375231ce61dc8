"""The verb `compare`: two sets of answers to the same rows. Imports torch only if a local model is the judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.intervals import interval_text, points_text
from surefit.cli.render import Output
from surefit.core import env
from surefit.core.errors import EXIT_OK, ConfigError
from surefit.core.progress import OnProgress
from surefit.core.rundir import write_atomic
from surefit.core.units import truncate_text
from surefit.facts.free_text import LIKELIHOOD_BESIDE_ANSWER, is_likelihood

if TYPE_CHECKING:
    from surefit.evaluate.compare import AnswerComparison, ComparedRow, MetricComparison
    from surefit.evaluate.judge import Ask
    from surefit.task import Message

JUDGE_BATCH = 8
"""Number of questions to a judge per batch."""
CONTEXT = 70
"""Number of characters of a text that an example shows."""


@dataclass(frozen=True)
class JudgeOptions:
    """Options of the LLM judge.

    Attributes:
        url: of an OpenAI-compatible server; None for a local model.
        model: its name on the server, or a local model's name or path.
        rows: maximum number of rows to judge, evenly spaced.
        dry_run: only report the number of calls that it would take.
    """

    url: str | None = None
    model: str | None = None
    rows: int | None = None
    dry_run: bool = False


@verb
def compare(
    out: Output,
    a: Annotated[str, typer.Argument(metavar="A", help="RUN, RUN:VARIANT, scored predictions, or a baseline of B.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What is compared with A, named likewise: is B better?")],
    set_name: Annotated[str, typer.Option("--set", metavar="NAME", help="The set that both answered.")] = "eval",
    variant: Annotated[
        str | None, typer.Option(help="Variant to compare when A or B names only a run; default: tuned.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Metric that decides; default: the recipe's primary one.")] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="Recipe of prediction files that do not name one.")
    ] = None,
    judge: Annotated[str | None, typer.Option(metavar="URL", help="Ask a model on this server (OpenAI's API).")] = None,
    judge_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the judge on the server, or of a local model.")
    ] = None,
    judge_rows: Annotated[int | None, typer.Option(min=1, help="Ask about this many rows, taken evenly.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how many calls the judge would take.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the differences as SVG.")] = None,
) -> int:
    """Say whether B's answers are better than A's, on the same rows, and how sure that is."""
    from surefit.config.inputs import row_files
    from surefit.core.svg import picture_file
    from surefit.evaluate.judge import build_answer_pairs
    from surefit.evaluate.plot import draw_forest_plot
    from surefit.stages.comparing import compare_answer_sets

    options = JudgeOptions(judge, judge_model, judge_rows, dry_run)
    is_judged = bool(judge or judge_model)
    if dry_run and not is_judged:
        raise ConfigError("which judge?", code="E1011", help="--dry-run needs --judge URL, --judge-model NAME or both")
    if plot is not None:
        picture_file(plot, row_files("A", a) | row_files("B", b))
    compared = compare_answer_sets(a, b, set_name, variant, metric, recipe)
    verdicts = _judge_pairs(out, options, build_answer_pairs(compared.rows)) if is_judged else None
    _say(out, compared)
    if verdicts and not dry_run:
        _say_judge(out, verdicts)
    document = compared.document(verdicts)
    if plot is not None:
        write_atomic(plot, draw_forest_plot(document))
        out.say(f"Wrote {plot}")
    out.result(document)
    return EXIT_OK


def _judge_pairs(out: Output, options: JudgeOptions, pairs: Sequence[Any]) -> dict[str, Any]:
    from surefit.evaluate.judge import CachedJudge, cache_file

    identity = f"{options.url or 'local'} {options.model or ''}"
    judge = CachedJudge(_lazily(options), identity, cache_file(env.cache_dir(), identity))
    calls = judge.would_call(pairs, options.rows)
    out.note(f"the judge: {calls.text}")
    if options.dry_run:
        return {"dry_run": True, "calls": calls.calls, "cached": calls.cached, "asked": calls.asked}
    with out.progress("judging") as on_progress:
        return {**judge.judge(pairs, options.rows, on_progress), "model": options.model, "calls": calls.calls,
                "cached": calls.cached}  # fmt: skip


def _lazily(options: JudgeOptions) -> Ask:
    """Return a judge that loads its model at the first question: a comparison with cached verdicts needs none."""
    judges: list[Ask] = []

    def ask(questions: Sequence[list[Message]], on_progress: OnProgress) -> list[str]:
        if not judges:
            judges.append(_served(options.url, options.model) if options.url else _local(str(options.model)))
        return judges[0](questions, on_progress)

    return ask


def _served(url: str, model: str | None) -> Ask:
    from surefit.evaluate.judge import MAX_NEW_TOKENS
    from surefit.generate.engine import DecodingConfig
    from surefit.generate.server import ServedModel

    server = ServedModel(url, model, field="--judge")
    decoding = DecodingConfig(MAX_NEW_TOKENS, JUDGE_BATCH)

    def ask(questions: Sequence[list[Message]], on_progress: OnProgress) -> list[str]:
        return [answer.text for answer in server.answer(questions, decoding, on_progress=on_progress)]

    return ask


def _local(name: str) -> Ask:
    from surefit.config.resolve import decide_dtype
    from surefit.config.schema import ModelSection
    from surefit.data.tokens.tokenize import tokenize_prompt
    from surefit.evaluate.judge import MAX_NEW_TOKENS
    from surefit.facts.hardware import hardware_facts
    from surefit.generate.engine import DecodingConfig, generate
    from surefit.model.load import load_model
    from surefit.model.tokenizer import load_tokenizer
    from surefit.task import Example

    hardware = hardware_facts()
    section = ModelSection.model_validate({"name_or_path": name, "dtype": decide_dtype(hardware)[0]})
    tokenizer, model = load_tokenizer(section), load_model(section, hardware)
    decoding = DecodingConfig(MAX_NEW_TOKENS, JUDGE_BATCH)

    def ask(questions: Sequence[list[Message]], on_progress: OnProgress) -> list[str]:
        prompts = [tokenize_prompt(Example(messages=tuple(question)), tokenizer) for question in questions]
        return [answer.text for answer in generate(model, tokenizer, prompts, decoding, on_progress)]

    return ask


def _say(out: Output, compared: AnswerComparison) -> None:
    out.say(f"A  {compared.a}")
    out.say(f"B  {compared.b}")
    rows = [_row(name, metric) for name, metric in compared.metrics.items()]
    columns = ["metric", "A", "B", "B - A, points", "won", "lost", "tied", "McNemar p", "could see"]
    out.table(f"{len(compared.rows):,} rows, 95 % intervals", columns, rows)
    if is_likelihood(compared.metric):
        out.note(LIKELIHOOD_BESIDE_ANSWER)
    for title, examples in (("won by B", compared.won()), ("lost by B", compared.lost())):
        _say_examples(out, title, examples)
    if compared.reason:
        out.paragraph(f"{compared.reason[:1].upper()}{compared.reason[1:]}.")
    out.paragraph(_verdict(compared), {"better": "green", "worse": "red"}.get(compared.verdict))


def _row(name: str, metric: MetricComparison) -> list[str]:
    diff, p = metric.difference, metric.mcnemar_p
    return [
        name,
        interval_text(metric.a.document()),
        interval_text(metric.b.document()),
        points_text(diff.difference, (diff.low, diff.high)),
        *map(str, (diff.wins, diff.losses, diff.ties)),
        "-" if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001",
        # A difference of shares is at most 100 points: if the detectable one is larger, these rows can show none.
        "none" if p is not None and metric.detectable > 1 else f"{100 * metric.detectable:.1f}",
    ]


def _verdict(compared: AnswerComparison) -> str:
    if compared.fit is not None and (is_likelihood(compared.metric) or compared.fit.metric_text):
        return f"{replace(compared.fit, a='A', b='B').sentence}."
    main = compared.main
    rows = main.difference.wins + main.difference.losses + main.difference.ties
    text = {
        "better": "B is better than A by more than chance",
        "worse": "B is worse than A by more than chance",
        "undecided": "No difference is shown: the interval holds zero",
    }[compared.verdict]
    if main.mcnemar_p is not None and main.detectable > 1:
        return f"{text} ({compared.metric}). {rows:,} rows are too few to find any difference four times in five."
    return (
        f"{text} ({compared.metric}). With these {rows:,} rows a true difference of "
        f"{100 * main.detectable:.1f} points would be found four times in five."
    )


def _say_examples(out: Output, title: str, rows: Sequence[ComparedRow]) -> None:
    for example in (row.document() for row in rows[:2]):
        out.say(f"{title}: {example['where']}  (A {example['score_a']:.2f}, B {example['score_b']:.2f})")
        texts = {key: " ".join(str(example[key]).split()) for key in ("gold", "a", "b") if example[key] is not None}
        for key, text in zip(texts, cut_around_difference(list(texts.values())), strict=True):
            out.say(f"    {key if key == 'gold' else key.upper():4}  {text}")


def cut_around_difference(texts: Sequence[str], limit: int = CONTEXT) -> list[str]:
    """Cut texts to the length of one line: from their beginning, or from shortly before the place where they first
    differ.

    >>> cut_around_difference(["one two three four five", "one two three 4 five"], 14)
    ['…three four f…', '…three 4 five']
    """
    columns = enumerate(zip(*texts, strict=False))
    shared = next((place for place, letters in columns if len(set(letters)) > 1), min(map(len, texts)))
    start = max(0, shared - limit // 2) if shared > limit // 2 and max(map(len, texts)) > limit else 0
    return [truncate_text(f"…{text[start + 1 :]}" if start else text, limit) for text in texts]


def _say_judge(out: Output, judged: dict[str, Any]) -> None:
    rows = [
        ["rows for B / for A / tied", f"{judged['wins']} / {judged['losses']} / {judged['ties']}"],
        ["B - A, points", points_text(judged["difference"], judged["ci95"])],
        ["both orders agree", _percent(judged["orders_agree"])],
        ["picks the first place (fair: 50 %)", _percent(judged["first_place"])],
        ["picks the longer answer", _percent(judged["longer"])],
        ["the gold answer picks the longer", _percent(judged["gold_longer"])],
        ["agrees with the gold answer where it decides", _percent(judged["agrees_with_gold"])],
        ["answers without a verdict", f"{judged['unreadable']} of {2 * judged['asked']}"],
    ]
    out.table("The judge, beside the gold answers", ["", "rows and shares, 95 % intervals"], rows)
    if judged["biased"]:
        out.paragraph("The judge favours a place: only verdicts that both orders share were counted.", "yellow")


def _percent(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    low, high = found["ci95"]
    return f"{100 * found['mean']:.0f} % [{100 * low:.0f}, {100 * high:.0f}] of {found['n']}"
