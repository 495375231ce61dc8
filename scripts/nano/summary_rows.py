"""The sample sets of `long_summarization`: small bills in the public-domain style of statutes, and what each does.

A bill has one to three provisions among sentences that matter to nobody; its summary has a line for each provision, in
order. Two of the seven kinds of provision are new to `surefit/nano`, and so is a summary of several lines. One bill in
twelve goes on for long after its last provision: for `data.too_long`. Evaluation bills are held out by the hash of each
line of their summary, so no line of it is in the training set.
"""

from __future__ import annotations

from random import Random

from corpus import ACTS, FILLERS, is_held_out
from words import GOODS, NOUNS, city, person

TRAIN, EVAL = 1200, 120
INSTRUCTION = "Summarise the text, one line for each thing it does."
NEW_ACTS = (
    (
        "The Commissioner shall open the {noun} of {place} to the public within {sum} days.",
        "Opens the {noun} of {place} to the public within {sum} days.",
    ),
    (
        "Section {sum} of the {name} Act, which concerns {good}, is repealed.",
        "Repeals section {sum} of the {name} Act on {good}.",
    ),
)
MORE_FILLERS = (
    "The clerk shall send a copy of this Act to the mayor of {place}.",
    "Sums that are not spent by the end of the year are returned.",
    "The term officer includes {name} and any person who acts for {name}.",
)


def _filled(rng: Random, *patterns: str) -> list[str]:
    values = {
        "sum": rng.randint(2, 90),
        "place": city(rng),
        "good": rng.choice(GOODS),
        "noun": rng.choice(NOUNS),
        "name": person(rng),
    }
    return [pattern.format(**values) for pattern in patterns]


def _provision(rng: Random, held_out: bool) -> list[str]:
    while True:
        provision, gist = _filled(rng, *rng.choice(ACTS + NEW_ACTS))
        if is_held_out(gist) == held_out:
            return [provision, gist]


def _fillers(rng: Random, count: int) -> list[str]:
    return [_filled(rng, rng.choice(FILLERS + MORE_FILLERS))[0] for _ in range(count)]


def _bill(rng: Random, held_out: bool) -> dict[str, str]:
    provisions = [_provision(rng, held_out) for _ in range(rng.choice((1, 2, 2, 3)))]
    body = _fillers(rng, rng.randint(2, 5))
    places = sorted(rng.sample(range(len(body) + len(provisions)), len(provisions)))
    for place, (provision, _) in zip(places, provisions, strict=True):
        body.insert(place, provision)
    if rng.random() < 1 / 12:
        body += _fillers(rng, rng.randint(20, 30))
    return {"instruction": INSTRUCTION, "document": " ".join(body), "summary": "\n".join(g for _, g in provisions)}


def sample_sets() -> dict[str, list[dict[str, str]]]:
    """Both sets by name."""
    sizes = {"summaries-train": (TRAIN, 51, False), "summaries-eval": (EVAL, 52, True)}
    sets = {}
    for name, (count, seed, held_out) in sizes.items():
        rng = Random(seed)
        sets[name] = [{"id": f"{name}-{i}", **_bill(rng, held_out)} for i in range(count)]
    return sets
