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

PLAIN = [
    *(
        "A Activity Add Are Arrival Article Assign Beep Book Boxes Call Can Change City Coach Convert Count Currency "
        "Day Days Departure Dial Dinner Do Event Exchange File Find Forecast Garden Get Give Guests Hire Hour How I "
        "Inventory Invite Irrigate Leaving Length Let List Mean Message Minimum Minutes Move New Note Number Numbers On "
        "One Order Pay Phone Pick Plan Play Priority Problem Product Put Rail Receiver Refill Remember Rental Report "
        "Reserve Restaurant Say Schedule Search Seat Send Sensor Set Shopping Show Singer Song Source Sprinkle Start "
        "Sum Support Take Target Tell Text The There Timer Today Total Track Training Translate Visitor Wake Warehouse "
        "Water We Weather What Where Who Whom Will Write a about add after ahead amount and are around arriving article "
        "artist at average be bed belongs book boxes buy by calendar call can car carriage cents check city class "
        "coming complaint contact convert count create currencies day days default defect delivered description "
        "destination diary did do down drive dry duration eat effort event fault find for forecast from funds gauge get "
        "give go guest h have hear hotel hotels hour hours in int into irrigation is it item know label language left "
        "level line list litres location log look low many me mean message min minute minutes money more much music my "
        "name near need next nights no now numbers of on open optional origin out over owe paid parameters party payee "
        "people person pickup place plants play please product rail rain readings receive rent rental restaurant "
        "restock ring room running s say seat send sensor sentence session set settle shelf shopping should showed sits "
        "sleep someone song sport stars station stay still stock str sum table text that the them these this ticket "
        "timer title to together town train training transfer translate type up urgency use values vehicle volume want "
        "wanted wants warm was water we weather week wheels where will with workout worth you zone "
    ).split(),
    *GOODS,
    *NOUNS,
    *THINGS,
]
"""Words that the model learns to write down as mere words (see `corpus.dictation`), those of tools it never sees among
them: an output row of the embedding that no answer ever needed is of no use to an adapter, which cannot change it."""


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
