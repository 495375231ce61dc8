"""Pairs of a chosen and a rejected answer to one prompt, from the layouts in which data sets of preferences come.

A pair becomes two conversations with the same turns before the last one, which is the answer. Everything here raises
`DataError` with the field that is wrong; the caller adds the file and line.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefit.core.errors import DataError
from surefit.core.units import truncate_text
from surefit.data.rows.messages import (
    is_trained_on,
    parse_json_list,
    parse_json_value,
    parse_messages,
    parse_tools,
    sharegpt_turns,
    system_turn,
    tools_from_row,
)
from surefit.data.rows.prompts import alpaca_prompt, contents_turns, listed, turns_of
from surefit.metrics.strict_json import json_kind, strict_json
from surefit.task import Example, Message, Row

PAIR_PROMPTS = ("prompt", "messages", "conversations", "contents", "question", "instruction")
"""Columns that hold the prompt of a pair, in the order in which they are tried."""
SCORE_COLUMNS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
"""Columns with a judge's score of each answer: UltraFeedback-binarized's, and those of Argilla's data sets."""
SCORES = ("overall_score", "score", "rating")
"""Keys of a judge's score in an answer of `completions`."""
ANSWERS = ("response", "text", "content", "completion", "answer")
"""Keys of the text in an answer of `completions`."""
TURNS = "turns are {'role', 'content'} or {'from', 'value'}"
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):[ \t]?")
"""Speakers in the text of Anthropic's HH-RLHF."""
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Side:
    """One side of a pair: what its column holds.

    Attributes:
        turns: the turns, checked.
        whole: whether they are the whole conversation; otherwise only the answer.
        tools: tools that stand beside the turns in the column.
    """

    turns: list[Message]
    whole: bool
    tools: list[dict[str, Any]] | None = None


def pair_row(row: Row) -> dict[str, Any]:
    """Return the two conversations of a row with `chosen` and `rejected`: answers to a prompt in another column, or
    whole conversations that differ in the last turn only.
    """
    chosen, rejected = _side(row["chosen"], "chosen"), _side(row["rejected"], "rejected")
    if chosen.whole != rejected.whole:
        one, other = ("chosen", "rejected") if chosen.whole else ("rejected", "chosen")
        raise DataError(
            f"{one} is a whole conversation, and {other} only an answer",
            code="E4823",
            field=one,
            help="write both the same way: two answers and a column prompt, or two whole conversations",
        )
    if chosen.tools != rejected.tools:
        raise DataError(
            "chosen and rejected have different tools: the model would see another prompt for each answer",
            code="E4824",
            field="rejected.tools" if chosen.tools else "chosen.tools",
            help="write the tools once, in a column tools",
        )
    tools = chosen.tools or tools_from_row(row)
    if chosen.whole:
        system = system_turn(row, chosen.turns)
        pair = two_conversations([*system, *chosen.turns], [*system, *rejected.turns], "chosen", "rejected")
        _require_same_prompt(row, pair["messages"][:-1])
        return pair | {"tools": tools}
    prompt = _prompt_of(row, chosen.turns[-1])
    return two_conversations([*prompt, *chosen.turns], [*prompt, *rejected.turns], "chosen", "rejected") | {
        "tools": tools
    }


def openai_pair_row(row: Row) -> dict[str, Any]:
    """Return the two conversations of a row of OpenAI's preference tuning: input.messages, and one answer each in
    `preferred_output` and `non_preferred_output`.
    """
    prompt = parse_json_value(row["input"], "input")
    if not isinstance(prompt, Mapping) or prompt.get("messages") is None:
        raise DataError(
            f"expected an object with messages, got {json_kind(prompt)}"
            if not isinstance(prompt, Mapping)
            else "missing",
            code="E4825",
            field="input" if not isinstance(prompt, Mapping) else "input.messages",
            help='a row is {"input": {"messages": […]}, "preferred_output": […], "non_preferred_output": […]}',
        )
    turns = parse_messages(prompt["messages"], "input.messages")
    fields = ("preferred_output", "non_preferred_output")
    better, worse = (_side(row[field], field) for field in fields)
    return two_conversations([*turns, *better.turns], [*turns, *worse.turns], *fields) | {
        "tools": parse_tools(prompt.get("tools"), "input.tools")
    }


def swift_pair_row(row: Row) -> dict[str, Any]:
    """Return the two conversations of a row of ms-swift's: `messages` ends with the chosen answer, and
    `rejected_response` is the other one.
    """
    conversation = _turns(parse_json_list(row["messages"], "messages"), "messages")
    rejected = _side(row["rejected_response"], "rejected_response")
    system = system_turn(row, conversation)
    chosen = [*system, *conversation]
    return two_conversations(chosen, [*chosen[:-1], *rejected.turns], "messages", "rejected_response") | {
        "tools": tools_from_row(row)
    }


def scored_answers_row(row: Row) -> dict[str, Any]:
    """Return the pair of a row with several scored answers, as in UltraFeedback: the answer with the highest score
    against the one with the lowest; of equal scores the first answer counts.
    """
    answers = [
        _scored(item, f"completions[{n}]") for n, item in enumerate(parse_json_list(row["completions"], "completions"))
    ]
    if len(answers) < 2:
        raise DataError(f"{len(answers)} answers: a pair needs two", code="E4826", field="completions")
    best, worst = max(answers, key=lambda answer: answer[0]), min(answers, key=lambda answer: answer[0])
    if best[0] == worst[0]:
        raise DataError(
            f"all {len(answers)} answers have the score {best[0]:g}, so that none is better",
            code="E4827",
            field="completions",
            help="remove the row: a pair needs a better and a worse answer",
        )
    answer = {"role": "assistant", "content": best[1]}
    prompt = _prompt_of(row, answer)
    other = {"role": "assistant", "content": worst[1]}
    return two_conversations([*prompt, answer], [*prompt, other], "completions", "completions") | {
        "tools": tools_from_row(row)
    }


def _scored(item: Any, field: str) -> tuple[float, str]:
    """Return the score and the text of one of several answers."""
    if not isinstance(item, Mapping):
        raise DataError(f"an answer must be an object, not {json_kind(item)}", code="E4828", field=field)
    text = next((item[name] for name in ANSWERS if item.get(name) is not None), None)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"the answer has no text ({', '.join(ANSWERS)})", code="E4829", field=field)
    score = next((item[name] for name in SCORES if item.get(name) is not None), None)
    number = as_number(score)
    if number is None:
        problem = "the answer has no score" if score is None else f"the score is {score!r:.40}, not a number"
        raise DataError(f"{problem} ({', '.join(SCORES)})", code="E4830", field=field)
    return number, text


def as_number(value: Any) -> float | None:
    """Return a finite number, also where it is written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def scores_of(row: Mapping[str, Any]) -> tuple[str, float, str, float] | None:
    """Return (column, score of the chosen answer, column, score of the rejected one), or None without two scores."""
    for better, worse in SCORE_COLUMNS:
        chosen, rejected = as_number(row.get(better)), as_number(row.get(worse))
        if chosen is not None and rejected is not None:
            return better, chosen, worse, rejected
    return None


def two_conversations(chosen: list[Message], rejected: list[Message], field: str, other: str) -> dict[str, Any]:
    """Return `{"messages", "rejected"}`: both conversations, of which only the last turn is trained on.

    Args:
        chosen: the conversation that ends with the preferred answer.
        rejected: the other one.
        field: column of the preferred answer.
        other: column of the other answer.

    Raises:
        DataError: a side does not end with an answer, there is no prompt, or they differ before the last turn.
    """
    for turns, name in ((chosen, field), (rejected, other)):
        if not turns or turns[-1]["role"] != "assistant":
            role = f"the last turn is the {turns[-1]['role']}'s" if turns else "it has no turns"
            raise DataError(f"{name} has no answer: {role}", code="E4831", field=name, help=TURNS)
        if not is_trained_on(turns[-1]):
            raise DataError(
                "the answer has weight 0: there is nothing to compare", code="E4832", field=name, help="remove the mark"
            )
    prompt = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in chosen[:-1]]
    others = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in rejected[:-1]]
    if prompt != others:
        n = next((n for n, (a, b) in enumerate(zip(prompt, others, strict=False)) if a != b), None)
        problem = f"{len(prompt)} turns before the answer of {field}, {len(others)} before that of {other}"
        if n is not None:
            problem = f"turn {n + 1} is {_short(prompt[n])} in one and {_short(others[n])} in the other"
        raise DataError(
            f"the two conversations differ before the answer: {problem}",
            code="E4833",
            field=other,
            help="both answers of a pair follow the same turns: only the last turn may differ",
        )
    if not any(turn["role"] != "system" for turn in prompt):
        raise DataError("there is no prompt before the answer", code="E4834", field=field, help=_prompt_help())
    if next(turn for turn in prompt if turn["role"] != "system")["role"] == "assistant":
        raise DataError(
            "the conversation starts with the assistant, so there is no prompt to answer", code="E4835", field=field
        )
    return {"messages": [*prompt, chosen[-1]], "rejected": [*prompt, rejected[-1]]}


def _short(turn: Message) -> str:
    return f"{turn['role']} {truncate_text(str(turn['content'] or turn.get('tool_calls')), 60)!r}"


def _prompt_help() -> str:
    return (
        f"the prompt stands in one of the columns {', '.join(PAIR_PROMPTS)}, or chosen and rejected are whole "
        "conversations; for another name set data.columns: {prompt: NAME}"
    )


def _side(value: Any, field: str) -> Side:
    """Return the turns of one side: a text, a turn, a list of turns, or an object with messages and tools."""
    tools = None
    if isinstance(value, Mapping) and "messages" in value:
        tools, value = parse_tools(value.get("tools"), f"{field}.tools"), value["messages"]
    elif isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, str | list | tuple):
        raise DataError(
            "missing" if value is None else f"expected an answer as text or as turns, got {json_kind(value)}",
            code="E4660",
            field=field,
            help="write the answer as text, or as a list of turns; remove the row if it has no such answer",
        )
    value = _parsed_list(value)
    if isinstance(value, str):
        if not value.strip():
            raise DataError("empty", code="E4836", field=field)
        turns = hh_turns(value)
        return Side(turns, True) if turns else Side([{"role": "assistant", "content": value}], False)
    if isinstance(value, list) and not value:
        raise DataError("empty", code="E4837", field=field)
    turns = _turns(value, field)
    first = next((turn["role"] for turn in turns), "")
    return Side(turns, first != "assistant", tools)


def _turns(value: Any, field: str) -> list[Message]:
    """Return turns of role and content, or of from and value, checked."""
    if isinstance(value, Sequence) and value and all(isinstance(t, Mapping) and "from" in t for t in value):
        value = sharegpt_turns(value, field)
    return parse_messages(value, field)


def _parsed_list(value: Any) -> Any:
    """Return a list of turns that is JSON text, as in a CSV cell; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return value
    with contextlib.suppress(ValueError):
        parsed = strict_json(value)
        if isinstance(parsed, list) and all(isinstance(t, Mapping) and ("role" in t or "from" in t) for t in parsed):
            return parsed
    return value


def hh_turns(text: str) -> list[Message]:
    r"""Return the turns of a dialogue written like Anthropic's HH-RLHF; empty for any other text.

    >>> hh_turns("\n\nHuman: Hi\n\nAssistant: Hello")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    parts = _SPEAKER.split(text)
    if len(parts) < 5 or parts[0].strip() or parts[1] != "Human":
        return []
    speakers = zip(parts[1::2], parts[2::2], strict=True)
    turns = [{"role": _HH_ROLES[speaker], "content": content.strip()} for speaker, content in speakers]
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def _prompt_of(row: Row, answer: Message) -> list[Message]:
    """Return the turns before the answers, with the system message of a column of its own."""
    name = next((name for name in PAIR_PROMPTS if row.get(name) not in (None, "", [])), None)
    if name is None:
        raise DataError(
            f"no prompt among the columns {listed([*dict(row)])}", code="E4838", field="prompt", help=_prompt_help()
        )
    if name == "instruction":
        return alpaca_prompt(row)
    if name == "contents":
        turns = contents_turns(row)
    else:
        value = _parsed_list(row[name])
        turns = (hh_turns(value) if isinstance(value, str) else _turns(value, name)) or turns_of(value, name, "user")
    if turns[-1]["role"] == "assistant":  # the conversation with the chosen answer, which `chosen` repeats
        if (turns[-1]["content"], turns[-1].get("tool_calls")) != (answer["content"], answer.get("tool_calls")):
            raise DataError(
                "the prompt ends with an answer that is not the chosen one",
                code="E4839",
                field=name,
                help="the prompt ends with the user's turn, or the tool's",
            )
        turns = turns[:-1]
    return [*system_turn(row, turns), *turns]


def _require_same_prompt(row: Row, prompt: Sequence[Message]) -> None:
    """Raise if the column `prompt` says something else than the conversations, which hold their prompt themselves."""
    value = _parsed_list(row.get("prompt"))
    if value in (None, "", []):
        return
    if isinstance(value, str):
        wanted = {" ".join(turn["content"].split()) for turn in hh_turns(value) or [{"content": value}]}
    else:
        wanted = {" ".join(turn["content"].split()) for turn in _turns(value, "prompt")}
    unknown = wanted - {" ".join(turn["content"].split()) for turn in prompt}
    if unknown:
        raise DataError(
            f"the prompt {truncate_text(min(unknown), 60)!r} is not in the conversations of chosen and rejected",
            code="E4840",
            field="prompt",
            help="chosen and rejected hold their prompt themselves: remove the column prompt, or mend it",
        )


def pair_sides(example: Example) -> tuple[Example, Example]:
    """Return a pair as two examples of one answer each: the chosen one, then the rejected one."""
    assert example.rejected is not None
    answer = example.rejected[-1].get("content") or None
    return (
        replace(example, rejected=None),
        replace(example, messages=example.rejected, rejected=None, completion=answer, reference=answer),
    )


def answer_sides(example: Example) -> tuple[Example, ...]:
    """Return the conversations that an example is: two for a pair, otherwise itself."""
    return (example,) if example.rejected is None else pair_sides(example)
