"""Words the corpus is made of, and how values are drawn from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Draw = Callable[[Random], Any]

CITIES = (
    "Paris Rome Oslo Lima Cairo Tokyo Delhi Quito Bonn Turin Leeds Porto Sofia Riga Kyiv Seoul Berlin Madrid Lisbon "
    "Vienna Prague Warsaw Athens Dublin Zagreb Tirana Minsk Tallinn Vilnius Bergen Malmo Turku Ghent Bruges Lyon Nice "
    "Nantes Seville Malaga Naples Genoa Bari Graz Linz Basel Geneva Zurich Split Varna Izmir Haifa Tunis Rabat Accra "
    "Lagos Nairobi Harare Lusaka Hanoi Manila Osaka Kyoto Perth Sydney Boston Denver Austin Dallas Havana Bogota"
).split()
PEOPLE = (
    "Anna Bob Carla Dan Eve Frank Gina Hugo Iris Jack Karl Lena Mona Nils Olga Paul Quinn Rosa Sven Tara Ugo Vera Walt "
    "Xenia Yara Zoe Adam Bella Chris Diana Emil Fiona George Helen Ivan Julia Kevin Laura Martin Nora Oscar Petra Ralf "
    "Sarah Tom Ursula Victor Wendy Yusuf Zara Amir Beate Cyril Dora Edgar Flora Glenn Hilda Ines Jonas Kira Leo"
).split()
GOODS = (
    "apples bread cheese dates eggs flour grapes honey jam kiwis limes milk nuts olives pears rice salt tea sugar "
    "butter carrots beans lentils onions peppers plums oats pasta soap candles batteries pencils paper nails screws "
    "paint bricks towels cups plates spoons lamps chairs boots gloves scarves hats tiles ropes bolts"
).split()
ANIMALS = "boy girl dog cat bird horse teacher farmer nurse king child fox wolf driver doctor singer".split()
THINGS = "apple book letter house song bridge river coin garden car cake stone picture door boat".split()
ADJECTIVES = (
    "red blue green silver golden quiet wild lost hidden broken frozen burning distant silent dark bright".split()
)
NOUNS = (
    "river mountain harbor forest tower desert island castle valley meadow storm lake canyon village ocean road".split()
)


def word_from(words: Sequence[str]) -> Draw:
    """Draws one of `words`."""
    return lambda rng: rng.choice(words)


def one_of(*values: str) -> Draw:
    """Draws one of a closed set."""
    return lambda rng: rng.choice(values)


def whole(low: int, high: int) -> Draw:
    """Draws an integer in [low, high]."""
    return lambda rng: rng.randint(low, high)


def whole_list(shortest: int, longest: int, high: int) -> Draw:
    """Draws a list of `shortest` to `longest` integers in [1, high]."""
    return lambda rng: [rng.randint(1, high) for _ in range(rng.randint(shortest, longest))]


def phrase(*patterns: str) -> Draw:
    """Draws a pattern and fills its `{good}`, `{person}`, `{noun}` and `{adjective}`."""
    fill = {
        "good": word_from(GOODS),
        "person": word_from(PEOPLE),
        "noun": word_from(NOUNS),
        "adjective": word_from(ADJECTIVES),
    }

    def draw(rng: Random) -> str:
        return rng.choice(patterns).format(**{name: value(rng) for name, value in fill.items()})

    return draw


city = word_from(CITIES)
person = word_from(PEOPLE)
good = word_from(GOODS)
