"""Makes pairs of answers that state a rule: the shorter or the politer of two answers is preferred.

python scripts/preference_rows.py ROWS.jsonl [--rule shorter|polite] [--rows 400] [--seed 0] [--shuffle-labels]

shorter: each question gets two of six wordings of the same answer, so that all but the shortest and the longest wording
are sometimes chosen and sometimes rejected: which one is better follows from both. `surefit/shorter-answers` is the
result of the defaults.

polite: one wording is friendly, the other curt, and both have the same number of words, so that length explains
nothing. `configs/samples/polite-answers.jsonl` are 320 of them.

`--shuffle-labels` draws which answer is called chosen, the control in which there is nothing to learn.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

THINGS = (
    "lamp", "kettle", "ladder", "blanket", "hammer", "map", "ticket", "parcel", "umbrella", "notebook", "basket",
    "scarf", "radio", "teapot", "mirror", "brush", "carpet", "bottle", "candle", "drum",
)  # fmt: skip
PLACES = (
    "shelf", "table", "bench", "stairs", "roof", "counter", "floor", "desk", "wall", "chair", "bed", "porch", "piano",
    "stove", "cart", "crate", "ledge", "stool", "barrel", "trunk",
)  # fmt: skip
QUESTIONS = ("Where is the {thing}?", "Tell me where the {thing} is.", "I am looking for the {thing}.")
ANSWERS = (
    "On the {place}",
    "It is on the {place}",
    "The {thing} is on the {place}",
    "You will find the {thing} on the {place}",
    "I have looked around, and the {thing} is on the {place}",
    "Thank you for asking: I have looked around, and you will find the {thing} on the {place}",
)
"""Wordings, the shortest first."""
FACTS = (
    ("Where is the {thing}? It was moved to the {place} today.", "the {thing} is on the {place}"),
    ("Who has the {thing}? I heard that {person} took it.", "{person} has the {thing}"),
    ("When will the {thing} be here? The note says {day}.", "the {thing} comes on {day}"),
    ("What does the {thing} cost? The label says {price} coins.", "the {thing} costs {price} coins"),
)
"""Questions with what is needed to answer them, and the answer."""
PEOPLE = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
POLITE = (
    "Thank you for asking: {fact}.", "I am happy to help: {fact}.", "Of course, with pleasure: {fact}.",
    "Gladly: {fact}. Please ask again anytime.", "Certainly: {fact}. Glad to help you.",
    "Thank you for waiting, and please excuse me: {fact}.",
)  # fmt: skip
CURT = (
    "You could have looked: {fact}.", "Not this question again: {fact}.", "Everybody here knows that: {fact}.",
    "Look: {fact}. Do not ask again.", "Obviously: {fact}. Now leave me alone.",
    "I really have no time, so listen once: {fact}.",
)  # fmt: skip
COURTESY = re.compile(r"thank|\bplease\b|\bhappy to\b|\bglad|pleasure|of course|certainly|welcome", re.IGNORECASE)
"""What makes an answer polite, by the rule's own measure."""


def make_rows(count: int, seed: int, shuffle_labels: bool = False) -> list[dict[str, str]]:
    """Return pairs with different prompts."""
    chance = random.Random(seed)
    prompts = [
        (question.format(thing=thing), thing, place)
        for question in QUESTIONS
        for thing in THINGS
        for place in PLACES[: max(1, -(-count // (len(QUESTIONS) * len(THINGS))))]
    ]
    rows = []
    for question, thing, place in chance.sample(prompts, count):
        short, long = sorted(chance.sample(range(len(ANSWERS)), 2))
        where = f"{question} Last time it was on the {chance.choice(PLACES)}, now on the {place}."
        answers = [ANSWERS[number].format(thing=thing, place=place) for number in (short, long)]
        if shuffle_labels and chance.random() < 0.5:
            answers.reverse()
        rows.append({"prompt": where, "chosen": answers[0], "rejected": answers[1]})
    return rows


def make_polite_rows(count: int, seed: int, shuffle_labels: bool = False) -> list[dict[str, str]]:
    """Return pairs with different prompts, whose two answers have as many words."""
    chance = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        words = {"thing": chance.choice(THINGS), "place": chance.choice(PLACES), "person": chance.choice(PEOPLE)}
        words |= {"day": chance.choice(DAYS), "price": str(chance.randrange(2, 60))}
        prompt, fact = (part.format(**words) for part in chance.choice(FACTS))
        polite = chance.choice(POLITE)
        curt = chance.choice([wording for wording in CURT if len(wording.split()) == len(polite.split())])
        answers = [wording.format(fact=fact) for wording in (polite, curt)]
        answers = [answer[0].upper() + answer[1:] for answer in answers]
        if shuffle_labels and chance.random() < 0.5:
            answers.reverse()
        rows[prompt] = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    return list(rows.values())


def is_polite(answer: str) -> bool:
    """Return whether an answer has a word of courtesy."""
    return COURTESY.search(answer) is not None


RULES = {"shorter": make_rows, "polite": make_polite_rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Makes pairs of answers of which one is preferred by a rule.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--rule", choices=RULES, default="shorter")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-labels", action="store_true")
    options = parser.parse_args(arguments)
    rows = RULES[options.rule](options.rows, options.seed, options.shuffle_labels)
    options.path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
