"""Retrieved candidates as rows for a language model to rank: `recipe: rec_ranking` reads them.

As in LlamaRec (arXiv:2311.02089) a row has the last titles of a history and twenty candidates. In training rows, the
candidates are the next item and random items that the user never took; in evaluation rows, the retriever's first twenty
in its order. Users whose right item is not among these stay in the files: the ranker cannot help them, and every mean
is over all users.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from surefit.core.units import truncate_text
from surefit.retrieval.interactions import Interactions
from surefit.retrieval.ranking import Ranking

TITLE = 96
"""Maximum characters of a title. LlamaRec cuts at 32 tokens; no tokenizer is known here, and titles have about three
characters per token."""


@dataclass(frozen=True)
class RankerRows:
    """Settings of the rows.

    Attributes:
        interactions: the histories.
        candidates: titles to choose from: 2 to 26, one for each letter.
        history: the most titles of a history in a row, the last ones.
        seed: seed of the choice of places in the histories, and of the wrong candidates.
    """

    interactions: Interactions
    candidates: int = 20
    history: int = 20
    seed: int = 0

    def train(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield up to `count` rows, drawn evenly from the places of the training histories that have an item before
        them.
        """
        places = [
            (user, place) for user, history in enumerate(self.interactions.trained) for place in range(1, len(history))
        ]
        rng = Random(self.seed)
        for n in sorted(rng.sample(range(len(places)), min(count, len(places)))):
            yield self._train_row(*places[n], rng)

    def _train_row(self, user: int, at: int, draw: Random) -> dict[str, Any]:
        history = self.interactions.trained[user]
        items = [history[at], *self._never_taken(set(history), self.candidates - 1, draw)]
        draw.shuffle(items)
        answer = string.ascii_uppercase[items.index(history[at])]
        return {**self._row(user, history[:at], items), "answer": answer}

    def _never_taken(self, taken: set[int], count: int, draw: Random) -> list[int]:
        untaken = [item for item in range(1, len(self.interactions.items) + 1) if item not in taken]
        return draw.sample(untaken, min(count, len(untaken)))

    def scored(self, split: Literal["valid", "test"], ranking: Ranking) -> Iterator[dict[str, Any]]:
        """Yield a row for every user: the candidates in the retriever's order, the right item's `rank` among all items,
        and as `answer` its letter; an empty text if it is not among the candidates."""
        histories, targets = self.interactions.questions(split)
        for user, (history, target, rank) in enumerate(zip(histories, targets, ranking.ranks.tolist(), strict=True)):
            items = ranking.top[user, : self.candidates].tolist()
            answer = string.ascii_uppercase[items.index(target)] if target in items else ""
            yield {**self._row(user, history, items), "answer": answer, "rank": rank}

    def _row(self, user: int, history: Sequence[int], items: Sequence[int]) -> dict[str, Any]:
        return {
            "user": str(self.interactions.users[user]),
            "history": [self._title(item) for item in history[-self.history :]],
            "candidates": [self._title(item) for item in items],
        }

    def _title(self, item: int) -> str:
        return cut_title(self.interactions.titles[item])


def cut_title(title: str, limit: int = TITLE) -> str:
    """Return a title of at most `limit` characters, cut between words where that leaves most of it.

    >>> cut_title("Alien (1979)"), cut_title("one two three", 9)
    ('Alien (1979)', 'one two…')
    """
    if len(title) <= limit:
        return title
    words = truncate_text(title, limit)[:-1].rpartition(" ")[0]
    return f"{words}…" if len(words) > limit // 2 else truncate_text(title, limit)


def candidate_lines(
    interactions: Interactions, split: Literal["valid", "test"], ranking: Ranking
) -> Iterator[dict[str, Any]]:
    """Yield the retrieved items with the data set's own keys: for rankers other than SureFit's."""
    _, targets = interactions.questions(split)
    for user, target in enumerate(targets):
        yield {
            "split": split,
            "user": interactions.users[user],
            "target": interactions.items[target - 1],
            "rank": int(ranking.ranks[user]),
            "items": [interactions.items[item - 1] for item in ranking.top[user].tolist()],
            "scores": [round(float(score), 5) for score in ranking.scores[user]],
        }
