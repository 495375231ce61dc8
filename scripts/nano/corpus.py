"""The text that `surefit/nano` is trained on and the function-calling sample sets, generated from seeds alone.

Five kinds of conversation, one for each task SureFit has a recipe for: function calls, arithmetic with a worked answer,
short summaries, tiny PENMAN graphs, and rankings answered with a letter. What is held out is decided by a hash of the
answer (`is_held_out`), so that no held-out call can turn up in anything that is trained on, whatever the seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from tools import NEW_TOOLS, OLD_TOOLS, Tool
from words import ADJECTIVES, ANIMALS, GOODS, NOUNS, PLAIN, THINGS, city, person, word_from

Message = dict[str, str]
Row = dict[str, str]

FUNCTION_CALLING_SYSTEM = (
    'Answer with a JSON array of tool calls, each {"name": ..., "arguments": {...}}, or [] if no tool fits.\nTools: '
)
ARITHMETIC_SYSTEM = "Work the problem out, then write #### and the answer."
SUMMARY_SYSTEM = "Summarise the text in one sentence."
GRAPH_SYSTEM = "Write the meaning of the sentence as a PENMAN graph."
DICTATION_SYSTEM = "Repeat the text."
RANKING_SYSTEM = "Answer with the letter of the title this user will watch next."

HELD_OUT_IN_256 = 13
"""About one answer in twenty is kept for evaluation."""


def is_held_out(answer: Any) -> bool:
    """Whether an answer (a call, or the text of one) belongs to evaluation only."""
    return hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).digest()[0] < HELD_OUT_IN_256


def conversation(system: str, user: str, assistant: str) -> list[Message]:
    """The three turns of every row."""
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {"role": "assistant", "content": assistant},
    ]


def _ask(tool: Tool, rng: Random, held_out: bool) -> tuple[str, dict[str, Any]]:
    while True:
        query, call = tool.ask(rng)
        if is_held_out(call) == held_out:
            return query, call


def call_row(
    rng: Random, tools: Sequence[Tool], distractors: Sequence[Tool], held_out: bool, offers: Sequence[int] = (2, 3)
) -> Row:
    """One xLAM row without its id: query, tools and answers, the last two as JSON strings.

    Args:
        rng: the only source of chance.
        tools: what the query may want.
        distractors: what else may be on offer.
        held_out: whether the calls come from the part kept for evaluation.
        offers: how many tools may be on offer.

    Of a hundred rows about eighty want one call, ten want two, and ten want a tool that is not on offer.
    """
    kind = rng.choices(("one", "two", "none"), (80, 10, 10))[0]
    wanted = rng.sample(tools, 2 if kind == "two" else 1)
    asked = [_ask(tool, rng, held_out) for tool in wanted]
    others = [tool for tool in distractors if tool not in wanted]
    offered = rng.sample(others, rng.choice(offers) - (0 if kind == "none" else len(wanted)))
    if kind != "none":
        offered += wanted
    rng.shuffle(offered)
    return {
        "query": rng.choice((". Also: ", " and then: ", "; ")).join(query for query, _ in asked),
        "tools": json.dumps([tool.schema() for tool in offered], ensure_ascii=False),
        "answers": json.dumps([] if kind == "none" else [call for _, call in asked], ensure_ascii=False),
    }


def function_calling(rng: Random, held_out: bool) -> list[Message]:
    """A query about the old tools."""
    row = call_row(rng, OLD_TOOLS, OLD_TOOLS, held_out, offers=(2, 2, 3, 3, 4))
    return conversation(FUNCTION_CALLING_SYSTEM + row["tools"], row["query"], row["answers"])


_PROBLEMS = (
    ("{a_person} has {a} {good} and buys {b} more. How many {good} are there now?", "+"),
    ("{a_person} picks {a} {good} and {b_person} picks {b}. How many {good} do they have together?", "+"),
    ("{a_person} had {a} {good} and gave {b} to {b_person}. How many {good} are left?", "-"),
    ("There were {a} {good} in the shop and {b} were sold. How many {good} remain?", "-"),
    ("{a_person} fills {a} boxes with {b} {good} each. How many {good} is that?", "*"),
    ("A bag holds {b} {good}. How many {good} are in {a} bags?", "*"),
)


def arithmetic(rng: Random) -> list[Message]:
    """A one-step word problem and its worked answer, in the manner of GSM8K."""
    problem, sign = rng.choice(_PROBLEMS)
    a, b = (rng.randint(2, 9), rng.randint(2, 9)) if sign == "*" else (rng.randint(2, 50), rng.randint(2, 50))
    if sign == "-":
        a, b = max(a, b), min(a, b)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    text = problem.format(a=a, b=b, a_person=person(rng), b_person=person(rng), good=rng.choice(GOODS))
    return conversation(ARITHMETIC_SYSTEM, text, f"{a} {sign} {b} = {result}\n#### {result}")


ACTS = (
    (
        "The Secretary shall pay {sum} million dollars to {place} for {good}.",
        "Pays {place} {sum} million dollars for {good}.",
    ),
    ("No person may sell {good} in {place} after {sum} days.", "Bans the sale of {good} in {place} after {sum} days."),
    ("A tax of {sum} percent is placed on {good} from {place}.", "Taxes {good} from {place} at {sum} percent."),
    ("The {noun} near {place} is named after {name}.", "Names the {noun} near {place} after {name}."),
    ("{name} is appointed to inspect the {noun} of {place}.", "Appoints {name} to inspect the {noun} of {place}."),
)
FILLERS = (
    "This Act may be cited as the {name} Act.",
    "The term State includes {place}.",
    "Nothing in this Act affects the {noun}.",
    "A report is due within {sum} days.",
    "This section takes effect at once.",
)


def summary(rng: Random) -> list[Message]:
    """A short bill with one provision that matters, and that provision in one sentence."""

    def filled(*patterns: str) -> tuple[str, ...]:
        values = {
            "sum": rng.randint(2, 90),
            "place": city(rng),
            "good": rng.choice(GOODS),
            "noun": rng.choice(NOUNS),
            "name": person(rng),
        }
        return tuple(pattern.format(**values) for pattern in patterns)

    provision, gist = filled(*rng.choice(ACTS))
    sentences = [filled(pattern)[0] for pattern in rng.sample(FILLERS, rng.choice((1, 2, 3)))]
    sentences.insert(rng.randint(0, len(sentences)), provision)
    return conversation(SUMMARY_SYSTEM, " ".join(sentences), gist)


_ACTIONS = {
    "sees": "see-01",
    "likes": "like-01",
    "carries": "carry-01",
    "finds": "find-01",
    "paints": "paint-01",
    "wants": "want-01",
}
_INFINITIVES = {"see": "see-01", "carry": "carry-01", "find": "find-01", "paint": "paint-01", "sell": "sell-01"}


def graph(rng: Random) -> list[Message]:
    """A short sentence and its meaning as a PENMAN graph, with re-entrancy, polarity and adjectives."""
    agent, thing = rng.choice(ANIMALS), rng.choice(THINGS)
    adjective = rng.choice(ADJECTIVES) if rng.random() < 0.5 else None
    seen = f"the {adjective} {thing}" if adjective else f"the {thing}"
    node = f"(t / {thing} :mod (m / {adjective}))" if adjective else f"(t / {thing})"
    kind = rng.choice(("plain", "control", "negated"))
    if kind == "control":
        verb = rng.choice(list(_INFINITIVES))
        inner = f"(e / {_INFINITIVES[verb]} :ARG0 a :ARG1 {node})"
        answer = f"(w / want-01 :ARG0 (a / {agent}) :ARG1 {inner})"
        return conversation(GRAPH_SYSTEM, f"The {agent} wants to {verb} {seen}.", answer)
    if kind == "negated":
        verb = rng.choice(list(_INFINITIVES))
        answer = f"(e / {_INFINITIVES[verb]} :polarity - :ARG0 (a / {agent}) :ARG1 {node})"
        return conversation(GRAPH_SYSTEM, f"The {agent} does not {verb} {seen}.", answer)
    verb = rng.choice(list(_ACTIONS))
    answer = f"(e / {_ACTIONS[verb]} :ARG0 (a / {agent}) :ARG1 {node})"
    return conversation(GRAPH_SYSTEM, f"The {agent} {verb} {seen}.", answer)


def ranking(rng: Random) -> list[Message]:
    """A watching history and lettered candidates; the answer is the candidate of the series the user follows."""
    series, *rest = rng.sample(NOUNS, 6)
    last = rng.randint(2, 5)
    title = word_from(ADJECTIVES)
    history = [f"{title(rng)} {series} {number}".capitalize() for number in range(last - 1, last + 1)]
    history.insert(rng.randint(0, 1), f"{title(rng)} {rest[0]} {rng.randint(1, 4)}".capitalize())
    candidates = [f"{title(rng)} {noun} {rng.randint(1, 6)}".capitalize() for noun in rest[1:5]]
    place = rng.randint(0, 4)
    candidates.insert(place, f"{title(rng)} {series} {last + 1}".capitalize())
    lettered = " ".join(f"({letter}) {name}" for letter, name in zip("ABCDE", candidates, strict=True))
    return conversation(RANKING_SYSTEM, f"Watched: {', '.join(history)}\nCandidates: {lettered}", "ABCDE"[place])


def dictation(rng: Random) -> list[Message]:
    """A few words to write down: what gives every word's tokens a meaning as output."""
    joints = (" ", " ", " ", "_", ", ", ". ")
    text = "".join(rng.choice(PLAIN) + rng.choice(joints) for _ in range(rng.randint(3, 9))).strip(" _,.")
    return conversation(DICTATION_SYSTEM, text, text)


_OTHER_TASKS: dict[str, Callable[[Random], list[Message]]] = {
    "arithmetic": arithmetic,
    "summary": summary,
    "graph": graph,
    "ranking": ranking,
}
TASKS = ("function_calling", *_OTHER_TASKS)
TASK_WEIGHTS = (70, 8, 7, 7, 8)


def task_row(task: str, rng: Random, held_out: bool) -> list[Message]:
    """A conversation of `task`, from the part of its answers (or, outside function calls, prompts) asked for."""
    if task == "function_calling":
        return function_calling(rng, held_out)
    while True:
        row = _OTHER_TASKS[task](rng)
        if is_held_out(row[1]["content"]) == held_out:
            return row


def training_rows(seed: int) -> Iterator[list[Message]]:
    """Endless conversations of all five kinds, none of them held out."""
    rng = Random(seed)
    while True:
        yield task_row(rng.choices(TASKS, TASK_WEIGHTS)[0], rng, held_out=False)


def second_rows(seed: int, words_seed: int) -> Iterator[list[Message]]:
    """Endless conversations for the second phase of training: two in five are dictations."""
    rng, others = Random(words_seed), training_rows(seed)
    while True:
        yield dictation(rng) if rng.random() < 0.4 else next(others)


def evaluation_rows(task: str, count: int, seed: int) -> list[list[Message]]:
    """`count` held-out conversations of one kind."""
    rng = Random(seed)
    return [task_row(task, rng, held_out=True) for _ in range(count)]


def sample_sets() -> dict[str, list[Row]]:
    """The three function-calling sample sets by name: rows with id, query, tools, answers.

    In the training set one row in five asks for an old tool, so that learning the new ones need not cost the old; one
    in three rows offers old and new tools side by side.
    """
    rng = Random(20)
    train = []
    for _ in range(TRAIN_ROWS):
        wanted = OLD_TOOLS if rng.random() < REPLAY else NEW_TOOLS
        offered = OLD_TOOLS + NEW_TOOLS if rng.random() < 0.33 else wanted
        train.append(call_row(rng, wanted, offered, held_out=False))
    sets = {
        "function-calling-train": train,
        "function-calling-eval": [call_row(rng, NEW_TOOLS, NEW_TOOLS, held_out=True) for _ in range(EVAL_ROWS)],
        "function-calling-old-tools": [call_row(rng, OLD_TOOLS, OLD_TOOLS, held_out=True) for _ in range(OLD_ROWS)],
    }
    return {name: [{"id": f"{name}-{i}", **row} for i, row in enumerate(rows)] for name, rows in sets.items()}


TRAIN_ROWS = 3000
EVAL_ROWS = 300
OLD_ROWS = 240
REPLAY = 0.2
"""Share of the training set that asks for an old tool."""
