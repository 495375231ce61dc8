"""Summarization of documents, short or of hundreds of thousands of tokens.

The metrics are ROUGE as the standard package computes it. They measure how many words and passages a summary shares
with the reference, not whether it is true; so extractiveness and length are reported beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import islice
from typing import Any

from surefit.core.errors import DataError, did_you_mean
from surefit.core.units import truncate_text
from surefit.facts.thinking import split_think_tags
from surefit.metrics.extractiveness import coverage_and_density, novelty
from surefit.metrics.many import map_in_processes
from surefit.metrics.rouge import KINDS, Rouge, estimate_rouge_seconds, rouge
from surefit.metrics.words import split_sentences, split_words
from surefit.task import Example, Message, Prediction, Row, Scores, TaskRecipe

INSTRUCTION = "Summarise the text."
_DOCUMENT = ("text", "original_text", "judgement", "article", "report", "origin_prompt")
_SUMMARY = ("reference_summary", "gold", "highlights")
_HAS_INSTRUCTION = "origin_prompt"
"""Column whose text begins with the instruction."""
_OTHER_LETTERS = 0.02
"""Share of a reference's letters outside a–z above which ROUGE with letters is reported too."""
_GRAMS = {"novel_unigrams": 1, "novel_bigrams": 2, "novel_trigrams": 3}
_COLUMNS_HELP = (
    f"a row has the columns document (or {', '.join(_DOCUMENT)}) and summary (or {', '.join(_SUMMARY)}), and may have "
    "instruction and language; a row for prediction only has no summary column"
)


@dataclass(frozen=True)
class GoldSummary:
    """Reference of a summary.

    Attributes:
        summary: the reference summary, without reasoning before it.
        document: the whole document; None where the row does not have it.
        letters: whether ROUGE with all letters is reported too.
    """

    summary: str
    document: str | None
    letters: bool


def to_example(row: Row) -> Example:
    """Convert a row to system (instruction), user (document), assistant (summary).

    Args:
        row: `document` and `summary` under one of their names; `instruction` in place of the default one; `language`,
            where every value but "en" means that letters outside a–z matter (detected from the summary's letters if it
            is missing).

    Raises:
        DataError: a column is missing, null, empty or no text.
    """
    column = _column("document", row)
    document = _text(row, column)
    messages: list[Message] = [{"role": "user", "content": document}]
    if column != _HAS_INSTRUCTION:
        messages.insert(0, {"role": "system", "content": _instruction(row)})
    if not _has_summary(row):
        _refuse_misspelt_summary(row)
        return Example(messages=tuple(messages), document=document)
    completion = _text(row, _column("summary", row))
    messages.append({"role": "assistant", "content": completion})
    return Example(tuple(messages), completion=completion, reference=_gold(row, document), document=document)


def to_gold(row: Row) -> Example:
    """Convert a row with a summary and optionally a document, which some metrics compare with."""
    column = _column("document", row)
    return Example(reference=_gold(row, _text(row, column) if column in row else None))


def _gold(row: Row, document: str | None) -> GoldSummary:
    summary_text = _text(row, _column("summary", row))
    summary = split_think_tags(summary_text)[1] or summary_text
    return GoldSummary(summary, document, _letters_matter(row, summary))


def _column(name: str, row: Row) -> str:
    """Return the name under which the row has a column, or its first name if the row has none of them."""
    return RECIPE.columns_in(list(row))[RECIPE.columns.index(name)]


def _has_summary(row: Row) -> bool:
    return _column("summary", row) in row


def _text(row: Row, column: str) -> str:
    if column not in row:
        problem = f"the row has no column {column!r}, only {', '.join(map(repr, row)) or 'none'}"
        raise DataError(problem + did_you_mean(column, row), code="E7109", field=column, help=_COLUMNS_HELP)
    value = row[column]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        problem = f"{column} is {'null' if value is None else truncate_text(repr(value))}, not a string"
        raise DataError(problem, code="E7110", field=column, help=_COLUMNS_HELP)
    if not value.strip():
        raise DataError(f"{column} is empty", code="E7111", field=column, help="fill it in, or drop the row")
    return value.strip()


def _instruction(row: Row) -> str:
    return INSTRUCTION if row.get("instruction") is None else _text(row, "instruction")


def _letters_matter(row: Row, summary: str) -> bool:
    language = row.get("language")
    if isinstance(language, str) and language:
        return language.lower().partition("-")[0] != "en"
    letters = [character for character in summary if character.isalpha()]
    return sum(not character.isascii() for character in letters) > _OTHER_LETTERS * len(letters)


def _refuse_misspelt_summary(row: Row) -> None:
    candidates = get_close_matches("summary", list(row), n=1, cutoff=0.8)
    if candidates:
        raise DataError(
            f"the row has a column {candidates[0]!r} but no column 'summary'",
            code="E7112",
            field="summary",
            help=f"rename {candidates[0]!r} to 'summary'; a row for prediction only has neither",
        )


def parse(text: str) -> str | None:
    """Return the summary; None where it is empty."""
    return text.strip() or None


@dataclass(frozen=True)
class _ScoringJob:
    """One answer to score, with everything that another process needs for it."""

    gold: GoldSummary
    text: str
    letters: bool

    @property
    def seconds(self) -> float:
        """Return the estimated scoring time."""
        document = 1e-6 * len(self.gold.document or "")
        return document + (3 if self.letters else 2) * estimate_rouge_seconds(self.gold.summary, self.text)


def score(example: Example, prediction: Prediction, always_letters: bool = False) -> Scores:
    """Return ROUGE, length and extractiveness. A truncated summary is scored as it is."""
    return _score_job(_asked(example, prediction, always_letters))


def score_many(rows: Sequence[tuple[Example, Prediction]], always_letters: bool = False) -> list[Scores]:
    """Score many rows, in several processes if that is worth it."""
    jobs = [_asked(*row, always_letters) for row in rows]
    return map_in_processes(_score_job, jobs, sum(job.seconds for job in jobs))


def _asked(example: Example, prediction: Prediction, always_letters: bool) -> _ScoringJob:
    gold = _reference(example)
    return _ScoringJob(gold, prediction.text, always_letters or gold.letters)


def _score_job(asked: _ScoringJob) -> Scores:
    gold, text = asked.gold, asked.text
    plain = rouge(gold.summary, text, "plain")
    scores = _shown(rouge(gold.summary, text)) | {f"{kind}_plain": plain[kind].f for kind in KINDS}
    if asked.letters:
        letters = rouge(gold.summary, text, "letters")
        scores |= {f"{kind}_letters": letters[kind].f for kind in KINDS}
    return scores | _form(gold, split_words(text))


def _reference(example: Example) -> GoldSummary:
    if not isinstance(example.reference, GoldSummary):
        raise DataError("the row has no summary to score against", code="E7113", field="summary", help=_COLUMNS_HELP)
    return example.reference


def _shown(found: Mapping[str, Rouge]) -> Scores:
    scores = {kind: found[kind].f for kind in KINDS}
    for kind in KINDS:
        scores |= {f"{kind}_precision": found[kind].precision, f"{kind}_recall": found[kind].recall}
    return scores


def _form(gold: GoldSummary, said: Sequence[str]) -> Scores:
    scores = {"length_ratio": len(said) / max(1, len(split_words(gold.summary)))}
    if gold.document is None:
        return scores
    document = split_words(gold.document)
    coverage, density = coverage_and_density(document, said)
    grams = {name: novelty(document, said, n) for name, n in _GRAMS.items()}
    return {**scores, **grams, "coverage": coverage, "density": density}


def _leading(pieces: Iterable[str], separator: str) -> Prediction:
    text = separator.join(pieces)
    return Prediction(text, parsed=parse(text))


def _document(example: Example) -> str:
    if example.document is None:
        raise DataError("the row has no document", code="E7114", field="document", help=_COLUMNS_HELP)
    return example.document


def lead_sentences(count: int, example: Example) -> Prediction:
    """Return the document's first sentences, one per line."""
    return _leading(split_sentences(_document(example))[:count], "\n")


def lead_words(count: int, example: Example) -> Prediction:
    """Return the document's first words with their original spacing and line breaks."""
    document = _document(example)
    ends = [word.end() for word in islice(re.finditer(r"\S+", document), count)]
    return _leading([document[: ends[-1]]] if ends else [], "")


def lead_oracle(example: Example) -> Prediction:
    """Return the document's first words, with the reference's word count: information that no model gets."""
    return lead_words(len(_reference(example).summary.split()), example)


BASELINES: dict[str, Any] = {
    "lead-1": lambda example: lead_sentences(1, example),
    "lead-3": lambda example: lead_sentences(3, example),
    "lead-100-words": lambda example: lead_words(100, example),
    "oracle-lead": lead_oracle,
}

METRICS = (
    *(kind + form for form in ("", "_precision", "_recall", "_plain", "_letters") for kind in KINDS),
    *("length_ratio", *_GRAMS, "coverage", "density"),
)

RECIPE = TaskRecipe(
    name="long_summarization",
    purpose="Summarizes long English documents.",
    version=2,
    citation=(
        "ROUGE: Lin 2004, as rouge-score 0.1.2 computes it (google-research/rouge); coverage and density: Grusky, "
        "Naaman & Artzi 2018, arXiv:1804.11283; new n-grams: See, Liu & Manning 2017, arXiv:1704.04368"
    ),
    columns=("document", "summary"),
    to_example=to_example,
    parse=parse,
    score=score,
    primary_metric="rougeLsum",
    metrics=METRICS,
    baselines=BASELINES,
    to_gold=to_gold,
    aliases={"document": _DOCUMENT, "summary": _SUMMARY},
    score_many=score_many,
)

LETTERS = replace(
    RECIPE,
    name="long_summarization_letters",
    purpose="Summarizes long documents in a language with other letters than a to z.",
    score=partial(score, always_letters=True),
    primary_metric="rougeLsum_letters",
    score_many=partial(score_many, always_letters=True),
)
"""For languages with letters outside a–z: the same rows and metrics, with ROUGE over all letters as the primary one."""
