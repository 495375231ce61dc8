"""Verdicts of a judge model on two answers, and measures of its reliability.

A judge that sees each row once, with the candidate always first and without the gold answer, mostly shows its bias. So
every pair is judged in both orders and only a verdict that is the same in both counts (Zheng et al. 2023,
arXiv:2306.05685); the prompt contains the gold answer; and the judge itself is measured: how often the two orders
agree, how much it favors the first position or the longer answer, and how often it agrees with the gold answer where
that decides. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surefit.core.progress import OnProgress, ignore_progress, offset_progress
from surefit.core.rundir import append_jsonl, read_jsonl
from surefit.core.sampling import evenly_spaced
from surefit.core.units import plural
from surefit.evaluate.compare import ComparedRow
from surefit.evaluate.stats import bootstrap_mean, paired_bootstrap
from surefit.facts.thinking import strip_reasoning
from surefit.task import Message

Ask = Callable[[Sequence[list[Message]], OnProgress], list[str]]
"""Conversations → answers."""
Vote = Literal["a", "b", "tie"]
MAX_NEW_TOKENS = 1024
PORTION = 64
"""Number of calls that are cached together: the most that an interruption loses."""

_SYSTEM = (
    "You compare two answers to the same task. Judge only which is more correct{by_gold}; length, tone and the order "
    "of the answers do not matter. Think briefly if you must, then end with one line: "
    "VERDICT: A, VERDICT: B or VERDICT: TIE."
)
_BY_GOLD = ", by the reference answer"
_VERDICT = re.compile(r"VERDICT\W*(A|B|TIE)\b", re.IGNORECASE)
_ONLY = re.compile(r"\W*(A|B|TIE)\W*", re.IGNORECASE)


@dataclass(frozen=True)
class AnswerPair:
    """Two answers to a row, and the winner by the gold answer.

    Attributes:
        gold_says: the side that scored more, "tie", or None if the row has no score.
    """

    prompt: str | None
    gold: str | None
    a: str
    b: str
    gold_says: Vote | None

    def messages(self, swapped: bool) -> list[Message]:
        """Return the judge's prompt as messages; swapped, b's answer is shown as "Answer A"."""
        first, second = (self.b, self.a) if swapped else (self.a, self.b)
        parts = [("Task", self.prompt), ("Reference answer", self.gold), ("Answer A", first), ("Answer B", second)]
        text = "\n\n".join(f"[{name}]\n{value}" for name, value in parts if value is not None)
        system = _SYSTEM.format(by_gold=_BY_GOLD if self.gold is not None else "")
        return [{"role": "system", "content": system}, {"role": "user", "content": text}]


@dataclass(frozen=True)
class JudgeCost:
    """Cost of judging: of `rows`, `asked` have two different answers; of the `calls`, `cached` are in the cache."""

    rows: int
    asked: int
    calls: int
    cached: int
    characters: int

    @property
    def text(self) -> str:
        uncached = self.calls - self.cached
        return (
            f"{plural(self.asked, 'row')} of {self.rows:,} with different answers, both orders: "
            f"{plural(self.calls, 'call')}, {self.cached:,} answered before, {uncached:,} to be made "
            f"(about {self.characters / 4:,.0f} prompt tokens)"
        )


class CachedJudge:
    """A judge model with a cache of its answers.

    Args:
        ask: calls the model.
        identity: model and settings; part of the cache key.
        cache: JSON Lines file of earlier answers.
    """

    def __init__(self, ask: Ask, identity: str, cache: Path) -> None:
        self.ask, self.identity, self.cache = ask, identity, cache
        self.known: dict[str, str] = {record["key"]: record["answer"] for record in read_jsonl(cache)}

    def would_call(self, pairs: Sequence[AnswerPair], limit: int | None = None) -> JudgeCost:
        """Return the cost of `judge`, without calling the model."""
        selected = evenly_spaced(pairs, limit)
        differing = [pair for pair in selected if pair.a != pair.b]
        questions = [pair.messages(swapped) for pair in differing for swapped in (False, True)]
        uncached = [question for question in questions if self._key(question) not in self.known]
        characters = sum(len(turn["content"]) for question in uncached for turn in question)
        return JudgeCost(len(selected), len(differing), len(questions), len(questions) - len(uncached), characters)

    def judge(
        self, pairs: Sequence[AnswerPair], limit: int | None = None, on_progress: OnProgress = ignore_progress
    ) -> dict[str, Any]:
        """Judge every pair (or `limit` of them, evenly spaced) in both orders.

        Returns:
            See `summarize_votes`.
        """
        selected = evenly_spaced(pairs, limit)
        differing = [pair for pair in selected if pair.a != pair.b]
        self._learn([pair.messages(swapped) for pair in differing for swapped in (False, True)], on_progress)
        votes = [tuple(self._vote(pair, swapped) for swapped in (False, True)) for pair in differing]
        return summarize_votes(len(selected), differing, votes)

    def _vote(self, pair: AnswerPair, swapped: bool) -> Vote | None:
        vote = parse_verdict(self.known[self._key(pair.messages(swapped))])
        if swapped and vote in ("a", "b"):
            return "b" if vote == "a" else "a"
        return vote

    def _learn(self, questions: Sequence[list[Message]], on_progress: OnProgress) -> None:
        uncached = [question for question in questions if self._key(question) not in self.known]
        for start in range(0, len(uncached), PORTION):
            portion = uncached[start : start + PORTION]
            answers = self.ask(portion, offset_progress(on_progress, start, len(uncached)))
            for question, answer in zip(portion, answers, strict=True):
                key = self._key(question)
                self.known[key] = answer
                append_jsonl(self.cache, {"key": key, "answer": answer})

    def _key(self, messages: Sequence[Message]) -> str:
        return hashlib.sha256(json.dumps([self.identity, MAX_NEW_TOKENS, list(messages)]).encode()).hexdigest()


def cache_file(directory: Path, identity: str) -> Path:
    """Return the path of a judge's cache file."""
    return directory / "judge" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.jsonl"


def build_answer_pairs(rows: Sequence[ComparedRow]) -> list[AnswerPair]:
    """Build the answer pairs of a comparison; of several sampled answers the first is used."""
    return [
        AnswerPair(
            row.after.get("prompt", row.before.get("prompt")),
            row.after.get("gold"),
            _text(row.before),
            _text(row.after),
            _gold_says(row.values),
        )
        for row in rows
    ]


def _text(line: Mapping[str, Any]) -> str:
    text = line["text"]
    return strip_reasoning(str(text[0] if isinstance(text, list) else text))


def _gold_says(pair: tuple[float, float] | None) -> Vote | None:
    if pair is None:
        return None
    return "tie" if pair[0] == pair[1] else "b" if pair[1] > pair[0] else "a"


def parse_verdict(answer: str) -> Vote | None:
    """Return the last verdict in a judge's answer, or the answer itself if it is only a verdict; None if there is none.

    >>> parse_verdict("Both add up, B has no unit.\\nVERDICT: A"), parse_verdict("b."), parse_verdict("Hard to say")
    ('a', 'b', None)
    """
    matches = _VERDICT.findall(answer)
    word = matches[-1] if matches else (_ONLY.fullmatch(answer) or [None, None])[1]
    votes: dict[str, Vote] = {"a": "a", "b": "b", "tie": "tie"}
    return votes[word.lower()] if word else None


def summarize_votes(rows: int, asked: Sequence[AnswerPair], votes: Sequence[tuple[Vote | None, ...]]) -> dict[str, Any]:
    """Summarize the judge's verdicts and its reliability.

    Args:
        rows: number of all rows; rows with two equal answers are ties and were not sent to the judge.
        asked: pairs of the other rows.
        votes: votes for each pair, by side and not by position: (a shown first, b shown first).

    Returns:
        `wins`, `losses`, `ties` of b with the difference and its interval, by verdicts that both orders share;
        `orders_agree`, `first_place` (share of decided verdicts for the answer shown first; 0.5 is fair),
        `agrees_with_gold` and `longer` as {"mean", "ci95", "n"} or None if there is nothing to count; `biased`;
        `unreadable` answers.
    """
    verdicts = [first if first == second and first is not None else "tie" for first, second in votes]
    wins, losses = verdicts.count("b"), verdicts.count("a")
    scores = [{"b": 1.0, "a": -1.0}.get(verdict, 0.0) for verdict in verdicts] + [0.0] * (rows - len(asked))
    diff = paired_bootstrap([0.0] * rows, scores)
    first_place = _share([_first(first, second) for first, second in votes])
    return {
        "rows": rows,
        "asked": len(asked),
        "wins": wins,
        "losses": losses,
        "ties": rows - wins - losses,
        "difference": diff.difference,
        "ci95": [diff.low, diff.high],
        "orders_agree": _share([None if None in pair else float(pair[0] == pair[1]) for pair in votes]),
        "first_place": first_place,
        "biased": first_place is not None and not first_place["ci95"][0] <= 0.5 <= first_place["ci95"][1],
        "agrees_with_gold": _share([_agrees(pair, v) for pair, v in zip(asked, verdicts, strict=True)]),
        "longer": _share([_longer(pair, v) for pair, v in zip(asked, verdicts, strict=True)]),
        "gold_longer": _share([_longer(pair, pair.gold_says) for pair in asked]),
        "gold_tied": _where_gold_ties(asked, verdicts),
        "unreadable": sum(vote is None for pair in votes for vote in pair),
    }


def _first(first: Vote | None, second: Vote | None) -> float | None:
    """Return the share of a row's decided verdicts that chose the answer shown first: a in the first order, b in the
    second."""
    picks = [float(vote == first_side) for vote, first_side in ((first, "a"), (second, "b")) if vote in ("a", "b")]
    return sum(picks) / len(picks) if picks else None


def _agrees(pair: AnswerPair, verdict: Vote) -> float | None:
    """Return 1 if the verdict is the gold answer's, else 0; None if the gold answer does not decide. A tie is no
    agreement."""
    return None if pair.gold_says in (None, "tie") else float(verdict == pair.gold_says)


def _longer(pair: AnswerPair, verdict: Vote | None) -> float | None:
    if verdict not in ("a", "b") or len(pair.a) == len(pair.b):
        return None
    return float((verdict == "b") == (len(pair.b) > len(pair.a)))


def _where_gold_ties(asked: Sequence[AnswerPair], verdicts: Sequence[Vote]) -> dict[str, int]:
    """Count the judge's verdicts on rows where the gold answer does not decide."""
    undecided = [verdict for pair, verdict in zip(asked, verdicts, strict=True) if pair.gold_says in (None, "tie")]
    return {"wins": undecided.count("b"), "losses": undecided.count("a"), "ties": undecided.count("tie")}


def _share(values: Sequence[float | None]) -> dict[str, Any] | None:
    counted = [value for value in values if value is not None]
    if not counted:
        return None
    return bootstrap_mean(counted).document()
