"""Somebody's films and ten to choose from, for the recommendation sample sets: generated from a seed alone.

Made-up people have a favourite kind of film, and made-up films have their kind in the title. The candidates are those
of the popularity retriever, which does not know about kinds: there is something for a ranker to add.
"""

from __future__ import annotations

from random import Random

from corpus import Row
from surefit.retrieval.candidates import RankerRows
from surefit.retrieval.interactions import Events, Interactions, build_interactions
from surefit.retrieval.markov import Popularity
from surefit.retrieval.ranking import rank_items

TRAIN_ROWS = 1500
_KINDS = ("Western", "Comedy", "Space", "Crime")
_FIRST = ("Red", "Cold", "Last", "Blue", "Old", "Dark", "Long", "Lost")
_SECOND = ("Lake", "Road", "House", "Moon", "Train", "Garden", "Winter", "Bridge")


def _watched(people: int = 260) -> Interactions:
    """Six to nine films of each, four of five of the favourite kind; films of one kind are not equally popular."""
    rng = Random(7)
    films = [(kind, place) for kind in _KINDS for place in range(len(_FIRST))]
    titles: dict[int | str, str] = {
        n: f"{kind}: {_FIRST[place]} {rng.choice(_SECOND)}" for n, (kind, place) in enumerate(films)
    }
    users, items, times = [], [], []
    for user in range(people):
        favourite = rng.choice(_KINDS)
        weights = [(8.0 if kind == favourite else 0.7) / (place + 3) for kind, place in films]
        for time in range(rng.randint(6, 9)):
            film = rng.choices(range(len(films)), weights)[0]
            weights[film] = 0.0
            users.append(user)
            items.append(film)
            times.append(time)
    return build_interactions(Events("made up", users, items, times, titles))


def sample_sets() -> dict[str, list[Row]]:
    """Rows to train on, and one for each person to be scored on."""
    interactions = _watched()
    retriever = Popularity(interactions.trained, len(interactions.items))
    rows = RankerRows(interactions, candidates=10)
    ranking = rank_items(retriever, *interactions.questions("test"), k=10)
    return {"rec-tiny-train": list(rows.train(TRAIN_ROWS)), "rec-tiny-eval": list(rows.scored("test", ranking))}
