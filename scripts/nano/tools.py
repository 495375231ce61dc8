"""Two sets of tools that share no tool name, no argument name and no phrasing.

The base model is trained on `OLD_TOOLS` and never sees `NEW_TOOLS`; the sample set for fine-tuning teaches those.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from words import Draw, city, good, one_of, person, phrase, whole, whole_list, word_from


@dataclass(frozen=True)
class Param:
    """One argument of a tool. An optional one is used only by a query that mentions it, with the words in `mention`."""

    name: str
    description: str
    type: str
    draw: Draw
    mention: str = ""

    def schema(self) -> dict[str, Any]:
        """As xLAM writes it: `{"description": …, "type": …}`, with `, optional` in the type and a default."""
        if not self.mention:
            return {"description": self.description, "type": self.type}
        default: Any = "" if self.type == "str" else 0
        return {"description": self.description, "type": f"{self.type}, optional", "default": default}


@dataclass(frozen=True)
class Tool:
    """A function a model may call, and the sentences with which people ask for it."""

    name: str
    description: str
    params: tuple[Param, ...]
    phrasings: tuple[str, ...]

    def schema(self) -> dict[str, Any]:
        """As xLAM writes it: name, description, parameters by name."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": {param.name: param.schema() for param in self.params},
        }

    def ask(self, rng: Random) -> tuple[str, dict[str, Any]]:
        """A query and the call that answers it."""
        chosen = [param for param in self.params if not param.mention or rng.random() < 0.5]
        arguments = {param.name: param.draw(rng) for param in chosen}
        while len({str(value) for value in arguments.values()}) < len(arguments):
            arguments = {param.name: param.draw(rng) for param in chosen}
        shown = {name: spoken(value) for name, value in arguments.items()}
        query = rng.choice(self.phrasings).format(**shown)
        mentions = [param.mention.format(**shown) for param in chosen if param.mention]
        return " ".join([query, *mentions]), {"name": self.name, "arguments": arguments}


def spoken(value: Any) -> str:
    """A value as it stands in a sentence: a list without its brackets."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Dutch", "Polish", "Greek", "Latin")
_MONEY = ("euros", "dollars", "pounds", "yen", "francs", "rupees", "pesos")

OLD_TOOLS = (
    Tool(
        "get_weather",
        "Weather forecast",
        (Param("city", "City name", "str", city), Param("days", "Days ahead", "int", whole(1, 60))),
        (
            "What is the weather in {city} for {days} days?",
            "Forecast for {city} over the next {days} days",
            "Will it rain in {city} in the next {days} days?",
            "Show {days} days of weather for {city}",
            "How warm will {city} be in the coming {days} days?",
        ),
    ),
    Tool(
        "send_message",
        "Send a text message",
        (
            Param("to", "Receiver", "str", person),
            Param(
                "text",
                "Message",
                "str",
                phrase(
                    "the {good} are here",
                    "{person} is late",
                    "we need {good}",
                    "I met {person}",
                    "the {noun} is closed",
                ),
            ),
        ),
        (
            "Tell {to} that {text}",
            "Send a message to {to}: {text}",
            "Text {to} and say {text}",
            "Let {to} know that {text}",
            "Write to {to}: {text}",
        ),
    ),
    Tool(
        "set_timer",
        "Start a timer",
        (
            Param("minutes", "Minutes", "int", whole(1, 180)),
            Param(
                "label",
                "Timer name",
                "str",
                word_from(("tea", "rice", "pizza", "nap", "bath", "soup", "eggs")),
                "called {label}",
            ),
        ),
        (
            "Set a timer for {minutes} minutes",
            "Wake me in {minutes} minutes",
            "Start a {minutes} minute timer",
            "Count down {minutes} minutes",
            "Beep after {minutes} minutes",
        ),
    ),
    Tool(
        "add_item",
        "Add to the shopping list",
        (Param("item", "What to buy", "str", good), Param("count", "How many", "int", whole(1, 99))),
        (
            "Put {count} {item} on my list",
            "Add {count} {item} to the shopping list",
            "I need to buy {count} {item}",
            "Shopping list: {item}, {count} of them",
            "Remember to get {count} {item}",
        ),
    ),
    Tool(
        "book_table",
        "Reserve a restaurant table",
        (
            Param("restaurant", "Restaurant name", "str", phrase("{adjective} {noun}", "{person}")),
            Param("people", "Guests", "int", whole(1, 30)),
            Param("hour", "Hour of day", "int", whole(10, 23), "at {hour} o'clock"),
        ),
        (
            "Book a table at {restaurant} for {people} people",
            "Dinner for {people} at {restaurant}",
            "Reserve {restaurant} for a party of {people}",
            "We are {people} and want to eat at {restaurant}",
            "A table for {people} at {restaurant} please",
        ),
    ),
    Tool(
        "find_hotel",
        "Search for hotels",
        (
            Param("place", "Where", "str", city),
            Param("nights", "Number of nights", "int", whole(1, 40)),
            Param("stars", "Minimum stars", "int", whole(1, 5), "with {stars} stars"),
        ),
        (
            "Find a hotel in {place} for {nights} nights",
            "I will sleep {nights} nights in {place}, where?",
            "Search hotels in {place}, {nights} nights",
            "A room in {place} for {nights} nights",
            "Where can I stay in {place} for {nights} nights?",
        ),
    ),
    Tool(
        "convert_money",
        "Convert currencies",
        (
            Param("amount", "Sum of money", "int", whole(1, 999)),
            Param("from", "Currency now", "str", one_of(*_MONEY)),
            Param("into", "Currency wanted", "str", one_of(*_MONEY)),
        ),
        (
            "Convert {amount} {from} to {into}",
            "How many {into} are {amount} {from}?",
            "What are {amount} {from} worth in {into}?",
            "Exchange {amount} {from} for {into}",
            "Change {amount} {from} into {into}",
        ),
    ),
    Tool(
        "play_song",
        "Play music",
        (
            Param("title", "Song title", "str", phrase("{adjective} {noun}", "the {adjective} {noun}", "{person}")),
            Param("artist", "Singer", "str", person, "by {artist}"),
        ),
        (
            "Play {title}",
            "I want to hear {title}",
            "Put on the song {title}",
            "Start the music with {title}",
            "Can you play {title}",
        ),
    ),
    Tool(
        "call_contact",
        "Phone someone",
        (Param("contact", "Whom to call", "str", person),),
        (
            "Call {contact}",
            "Phone {contact} please",
            "Can you ring {contact}?",
            "Dial {contact}",
            "Get {contact} on the line",
        ),
    ),
    Tool(
        "add_numbers",
        "Sum of a list",
        (Param("numbers", "Numbers to add", "List[int]", whole_list(2, 5, 99)),),
        (
            "Add up {numbers}",
            "What is the sum of {numbers}?",
            "Total of {numbers}",
            "Sum these: {numbers}",
            "How much is {numbers} together?",
        ),
    ),
    Tool(
        "translate",
        "Translate a sentence",
        (
            Param(
                "sentence",
                "Source sentence",
                "str",
                phrase("where is the {noun}", "I like {good}", "{person} has {good}"),
            ),
            Param("language", "Target language", "str", one_of(*_LANGUAGES)),
        ),
        (
            "Translate to {language}: {sentence}",
            "How do you say {sentence} in {language}?",
            "{sentence} in {language} please",
            "Say in {language}: {sentence}",
            "I need the {language} for {sentence}",
        ),
    ),
    Tool(
        "create_event",
        "Add to the calendar",
        (
            Param("event", "Event name", "str", phrase("meeting with {person}", "{noun} tour", "lunch with {person}")),
            Param("day", "Day of week", "str", one_of(*_DAYS)),
        ),
        (
            "Plan {event} on {day}",
            "Put {event} in my calendar for {day}",
            "New event on {day}: {event}",
            "Schedule {event} for {day}",
            "On {day} I have {event}",
        ),
    ),
)

NEW_TOOLS = (
    Tool(
        "rent_vehicle",
        "Hire a car",
        (
            Param("pickup_town", "Pick up location", "str", city),
            Param("duration_h", "Rental hours", "int", whole(2, 96)),
        ),
        (
            "I want to drive around {pickup_town} for {duration_h} hours",
            "Get me a car near {pickup_town}, {duration_h} hours",
            "We need wheels: {pickup_town}, {duration_h} hours",
            "{duration_h} hours with a rental car from {pickup_town}",
        ),
    ),
    Tool(
        "transfer_funds",
        "Pay a person",
        (Param("payee", "Who is paid", "str", person), Param("cents", "Sum in cents", "int", whole(5, 99))),
        (
            "{payee} should receive {cents} cents from me",
            "Pay {cents} cents to {payee}",
            "I owe {payee} {cents} cents, settle it",
            "Move {cents} cents over to {payee}",
        ),
    ),
    Tool(
        "check_stock",
        "Warehouse stock level",
        (Param("product", "Product", "str", good),),
        (
            "Do we still have {product}?",
            "How much of {product} is left?",
            "Are we running out of {product}?",
            "Inventory of {product}",
        ),
    ),
    Tool(
        "restock_shelf",
        "Order boxes for a shelf",
        (Param("article", "Article", "str", good), Param("boxes", "Boxes", "int", whole(1, 80))),
        (
            "Order {boxes} boxes of {article}",
            "The shelf wants {boxes} more boxes of {article}",
            "Refill {article} with {boxes} boxes",
            "{article} is low, have {boxes} boxes delivered",
        ),
    ),
    Tool(
        "seat_guest",
        "Assign a seat",
        (Param("guest", "Visitor", "str", person), Param("seat_no", "Seat", "int", whole(1, 99))),
        (
            "Seat {seat_no} belongs to {guest}",
            "Invite {guest} and give them seat {seat_no}",
            "{guest} sits on {seat_no}",
            "Assign {guest} to seat {seat_no}",
        ),
    ),
    Tool(
        "buy_train_ticket",
        "Rail ticket",
        (
            Param("destination", "Arrival station", "str", city),
            Param("carriage", "Coach", "int", whole(1, 24)),
        ),
        (
            "A train to {destination}, carriage {carriage}",
            "I go by rail to {destination} in carriage {carriage}",
            "One ticket to {destination}, carriage {carriage}",
            "Carriage {carriage} of the train to {destination}",
        ),
    ),
)
