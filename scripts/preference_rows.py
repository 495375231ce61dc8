"""Makes pairs of answers that state a rule: of two answers to the same question, the shorter one is preferred.

python scripts/preference_rows.py ROWS.jsonl [--rows 400] [--seed 0] [--shuffle-labels]

Each question gets two of six wordings of the same answer, so that all but the shortest and the longest wording are
sometimes chosen and sometimes rejected: which one is better follows from both. `--shuffle-labels` draws which answer
is called chosen, the control in which there is nothing to learn. `surefit/shorter-answers` is the result of the
defaults.
"""

from __future__ import annotations

import argparse
import json
import random
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Makes pairs of which the shorter answer is preferred.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-labels", action="store_true")
    options = parser.parse_args(arguments)
    rows = make_rows(options.rows, options.seed, options.shuffle_labels)
    options.path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
