"""Ranking for recommendation: from a user's history and twenty candidates to an order of the candidates.

The prompt is LlamaRec's (arXiv:2311.02089). The model generates nothing: one forward pass gives the probabilities of
the candidates' letters as its answer, which order them (`choices`).
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Any

from surefit.core.errors import DataError, did_you_mean
from surefit.core.units import plural, truncate_text
from surefit.metrics.ranking import ranking_scores
from surefit.task import Example, Message, Prediction, Row, Scores, TaskRecipe

_INSTRUCTION = (
    "Given user history in chronological order, recommend an item from the candidate pool with its index letter."
)
_COLUMNS_HELP = (
    "a row has the columns history and candidates (lists of titles) and answer (the right candidate's letter); "
    "`surefit retrieve` writes such rows. A row for prediction only has no column answer"
)
_LETTERS = re.compile(r"\(?[A-Z]\)?(?:\s*[\s,>;]\s*\(?[A-Z]\)?)*")
_MOST = len(string.ascii_uppercase)
_METRICS = tuple(ranking_scores(None))


@dataclass(frozen=True)
class GoldRanking:
    """Gold answer of a row.

    Attributes:
        letters: the candidates' letters, in the retriever's order.
        answer: letter of the relevant item, or None where it is not a candidate or not known.
        rank: the relevant item's rank in the retriever's ranking of all items, where it is known and not a candidate.
    """

    letters: str
    answer: str | None
    rank: int | None = None


def to_example(row: Row) -> Example:
    """Convert a row of `surefit retrieve` to user (history and candidates), assistant (the letter).

    Args:
        row: `history` and `candidates` (lists of titles), `answer` (a letter). Where the relevant item is not a
            candidate, `answer` is "" and `rank` (int) is its rank in the retriever's ranking: such a row is scored, and
            not trained on. Without the column `answer` it can only be predicted.

    Raises:
        DataError: a column is missing or malformed; `field` names it.
    """
    history, candidates = _titles("history", row), _titles("candidates", row)
    if not 2 <= len(candidates) <= _MOST:
        problem = f"{plural(len(candidates), 'candidate')}; there must be 2 to {_MOST}, one per letter"
        raise DataError(problem, code="E7125", field="candidates", help=_COLUMNS_HELP)
    letters = string.ascii_uppercase[: len(candidates)]
    history_text = " \n ".join(f"({number}) {title}" for number, title in enumerate(history, start=1))
    candidate_text = " \n ".join(f"({letter}) {title}" for letter, title in zip(letters, candidates, strict=True))
    prompt: Message = {
        "role": "user",
        "content": f"{_INSTRUCTION}\n\nUser history: {history_text}; \n Candidate pool: {candidate_text}",
    }
    if "answer" not in row:
        return Example(messages=(prompt,), reference=GoldRanking(letters, None))
    gold = _gold(row, letters)
    if gold.answer is None:
        return Example(messages=(prompt,), reference=gold)
    return Example((prompt, {"role": "assistant", "content": gold.answer}), completion=gold.answer, reference=gold)


def to_gold(row: Row) -> Example:
    """Convert a row to its gold answer; only the number of candidates matters (20 if the column is missing)."""
    candidates = row.get("candidates")
    count = len(candidates) if isinstance(candidates, list) else 20
    if not 2 <= count <= _MOST:
        problem = f"{plural(count, 'candidate')}; there must be 2 to {_MOST}"
        raise DataError(problem, code="E7126", field="candidates", help=_COLUMNS_HELP)
    return Example(reference=_gold(row, string.ascii_uppercase[:count]))


def _titles(column: str, row: Row) -> list[str]:
    value = row.get(column)
    if value is None:
        state = "null" if column in row else f"missing; the row has {', '.join(map(repr, row)) or 'nothing'}"
        raise DataError(
            f"{column} is {state}{did_you_mean(column, row)}", code="E7127", field=column, help=_COLUMNS_HELP
        )
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{column} is {truncate_text(repr(value))}, not a list of titles",
            code="E7128",
            field=column,
            help=_COLUMNS_HELP,
        )
    for position, title in enumerate(value):
        if not isinstance(title, str) or not title.strip():
            problem = f"a title is {truncate_text(repr(title))}, not a string"
            raise DataError(problem, code="E7129", field=f"{column}[{position}]", help=_COLUMNS_HELP)
    return value


def _gold(row: Row, letters: str) -> GoldRanking:
    answer, rank = row.get("answer"), row.get("rank")
    if not isinstance(answer, str) or (answer and answer not in list(letters)):
        value = "null" if answer is None else truncate_text(repr(answer))
        raise DataError(
            f"answer is {value}, not a letter from A to {letters[-1]}", code="E7130", field="answer", help=_COLUMNS_HELP
        )
    if answer:
        return GoldRanking(letters, answer)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank <= len(letters):
        value = "null or missing" if rank is None else truncate_text(repr(rank))
        raise DataError(
            f"the right item is not among the candidates (answer is ''), but rank is {value}",
            code="E7131",
            field="rank",
            help=f"rank is its place in the retriever's ranking of all items: {len(letters) + 1} or more",
        )
    return GoldRanking(letters, None, rank)


def parse(text: str) -> dict[str, float] | None:
    """Parse letters in an order, best first, into {letter: higher is better}; None for any other text.

    >>> parse("C"), parse("(B) > A"), parse("Toy Story"), parse("A, B, A")
    ({'C': 0.0}, {'B': 0.0, 'A': -1.0}, None, None)
    """
    letters = re.findall(r"[A-Z]", text)
    if len(set(letters)) < len(letters) or not _LETTERS.fullmatch(text.strip()):
        return None
    return {letter: float(-rank) for rank, letter in enumerate(letters)}


def score(example: Example, prediction: Prediction) -> Scores:
    """Return Recall, MRR and NDCG at 1, 5, 10 and 20: for every user, and as valid/… for users whom a ranker can help.

    A user whose relevant item is not a candidate keeps the retriever's scores, whatever the answer. Letters that an
    answer omits, or that are not the row's, rank after all others: if the relevant one is among them, it is not found.
    """
    gold = example.reference
    if not isinstance(gold, GoldRanking) or (gold.answer is None and gold.rank is None):
        raise DataError("the row has no answer to score against", code="E7132", field="answer", help=_COLUMNS_HELP)
    if gold.answer is None:
        return ranking_scores(gold.rank)
    scores = ranking_scores(_rank(gold, prediction.parsed))
    return scores | {f"valid/{name}": value for name, value in scores.items()}


def _rank(gold: GoldRanking, parsed: Any) -> int | None:
    if not isinstance(parsed, dict) or gold.answer not in parsed:
        return None
    # Ties keep the retriever's order.
    order = sorted((letter for letter in gold.letters if letter in parsed), key=lambda letter: -parsed[letter])
    return 1 + order.index(str(gold.answer))


def _as_retrieved(example: Example) -> Prediction:
    letters = example.reference.letters
    return Prediction(letters[0], parsed={letter: -float(rank) for rank, letter in enumerate(letters)})


def _choices(example: Example) -> tuple[str, ...]:
    gold = example.reference
    # A row without the relevant item gets the retriever's scores whatever the model answers: there is nothing to
    # choose.
    return tuple(gold.letters if gold.rank is None else gold.letters[0])


RECIPE = TaskRecipe(
    name="rec_ranking",
    purpose="Ranks what somebody may want next, from what they chose before.",
    version=2,
    citation=(
        "prompt and protocol: LlamaRec, arXiv:2311.02089, Yueeeeeeee/LlamaRec commit "
        "48b288b23197b57d564955753c69ac2baa4c1dad; MovieLens: Harper and Konstan 2015, doi:10.1145/2827872"
    ),
    columns=("history", "candidates"),
    to_example=to_example,
    parse=parse,
    score=score,
    primary_metric="ndcg@10",
    metrics=(*_METRICS, *(f"valid/{name}" for name in _METRICS)),
    choices=_choices,
    baselines={"retriever": _as_retrieved},
    to_gold=to_gold,
)
