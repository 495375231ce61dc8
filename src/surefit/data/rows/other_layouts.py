"""Layouts of other tools, recognized by their columns: how to name the columns so that SureFit reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from surefit.core.errors import DataError
from surefit.core.sampling import evenly_spaced_indices
from surefit.data.rows.messages import ROLES, SHAREGPT_ROLES
from surefit.data.rows.pairs import PAIR_PROMPTS

if TYPE_CHECKING:
    from surefit.data.read.load import Rows

PREFERENCES = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("chosen_response", "rejected_response"),
    ("response_chosen", "response_rejected"),
    ("chosen_answer", "rejected_answer"),
    ("answer_chosen", "answer_rejected"),
    ("chosen_output", "rejected_output"),
    ("accepted", "rejected"),
    ("preferred", "dispreferred"),
    ("preferred", "rejected"),
    ("better", "worse"),
    ("winner", "loser"),
)
"""Columns of pairs of a better and a worse answer. Not `positive` and `negative`: those are passages of retrieval."""
QUESTIONS = ("instruction", "prompt", "query", "question", "problem", "input", "user", "human", "input_text")
ANSWERS = (
    "output",
    "completion",
    "response",
    "answer",
    "answers",
    "target",
    "reply",
    "assistant",
    "solution",
    "gpt",
    "output_text",
)
QUESTION_WORDS = ("ticket", "request", "message", "email")
"""What a customer writes; only in names of which another column is the answer."""
TRIED_ROWS = 64
"""Rows whose speakers are read."""
ROLE_KEYS = ("role", "from", "speaker", "author", "sender", "who")
ASSISTANTS = ("assistant", "agent", "ai", "bot", "chatbot", "gpt", "model", "support", "operator", "advisor")
USERS = ("user", "customer", "client", "human", "visitor", "caller", "patient", "student", "guest")
"""Names of speakers in other people's rows."""
CONTENT_KEYS = ("content", "value", "text", "message", "body", "says")
"""Names of a message's keys in other layouts."""
WRAPPERS = ("data", "train", "rows", "examples", "test", "validation")
"""Key names under which a single wrapping object holds the rows."""


def suggest_layout(columns: Sequence[str]) -> str | None:
    """Return advice for rows with these columns, which fit no layout; None where no known layout is near.

    >>> suggest_layout(["query", "response"])
    'set data.columns: {prompt: query, completion: response}'
    """
    lower = {name.lower(): name for name in columns}
    if advice := _preference_advice(lower):
        return advice
    if "conversation" in lower:
        return (
            "set data.columns: {messages: conversation} (turns of role and content) or {conversations: conversation} "
            "(from and value)"
        )
    if len(columns) <= 3 and all(name.lower() in WRAPPERS for name in columns):
        return f"the file is one object around the rows: jq -c '.{columns[0]}[]' FILE > rows.jsonl, and name rows.jsonl"
    names = propose_columns(columns)
    return names_text({"columns": names}) if names else None


def names_text(names: Mapping[str, Mapping[str, str]]) -> str:
    """Return the settings to paste for the names of columns and roles.

    >>> names_text({"columns": {"messages": "log"}, "roles": {"user": "customer", "assistant": "agent"}})
    'set data.columns: {messages: log} and data.roles: {user: customer, assistant: agent}'
    """
    settings = [
        f"data.{key}: {{{', '.join(f'{name}: {theirs}' for name, theirs in names[key].items())}}}"
        for key in ("columns", "roles")
        if names.get(key)
    ]
    return f"set {' and '.join(settings)}"


def propose_names(rows: Rows) -> dict[str, dict[str, str]]:
    """Return `data.columns` and `data.roles` for columns that fit no layout; empty where they remain unknown.

    Raises:
        DataError: a column has a conversation, and the names of its speakers do not tell which is the assistant.
    """
    if columns := propose_columns(rows.columns):
        return {"columns": columns}
    row = rows.row(0)
    for column, value in row.items():
        turns = [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list) else []
        keys = [key for key, text in turns[0].items() if isinstance(text, str)] if turns else []
        role = next((key for key in keys if key.lower() in ROLE_KEYS), None)
        content = next((key for key in keys if key.lower() in CONTENT_KEYS), None)
        if role is None or content is None:
            continue
        names = {"messages": column, "role": role, "content": content}
        sample = (rows.row(n).get(column) or [] for n in evenly_spaced_indices(len(rows), TRIED_ROWS))
        speakers = list(dict.fromkeys(str(t.get(role)) for part in sample for t in part if isinstance(t, Mapping)))
        if (role, content) == ("from", "value") and set(speakers) <= set(SHAREGPT_ROLES):
            return {"columns": {"conversations": column}}
        roles = {} if set(speakers) <= set(ROLES) else _propose_roles(speakers)
        if not roles and not set(speakers) <= set(ROLES):
            raise DataError(
                f"the speakers are {', '.join(speakers[:8])}, and it is not known which of them is the assistant",
                code="E8048",
                path=rows.source,
                field="data.roles",
                help="rename the assistant's turns to assistant and the others to user, or write a config with "
                f"data.columns: {{messages: {column}, role: {role}, content: {content}}} and data.roles: "
                "{user: NAME, assistant: NAME}",
            )
        return {"columns": _renamed(names)} | ({"roles": roles} if roles else {})
    return {}


def _renamed(names: Mapping[str, str]) -> dict[str, str]:
    return {name: theirs for name, theirs in names.items() if name != theirs}


def _propose_roles(speakers: Sequence[str]) -> dict[str, str]:
    """Return `data.roles` for two speakers, by their names; empty where the names do not tell who answers.

    >>> _propose_roles(["system", "agent", "customer"]), _propose_roles(["Ann", "Bo"])
    ({'user': 'customer', 'assistant': 'agent'}, {})
    """
    others = [speaker for speaker in speakers if speaker not in ("system", "tool")]
    if len(others) != 2:
        return {}
    for assistant, user in (others, others[::-1]):
        answers, asks = assistant.lower() in ASSISTANTS, user.lower() in USERS
        if (answers or asks) and assistant.lower() not in USERS and user.lower() not in ASSISTANTS:
            return {"user": user, "assistant": assistant}
    return {}


def propose_columns(columns: Sequence[str]) -> dict[str, str]:
    """Return `data.columns` for rows of a question and an answer under other names; empty where there is no such pair.

    >>> propose_columns(["id", "Frage", "query", "response"])
    {'prompt': 'query', 'completion': 'response'}
    >>> propose_columns(["Ticket text", "Our reply", "Agent"])
    {'prompt': 'Ticket text', 'completion': 'Our reply'}
    >>> propose_columns(["input", "output", "context"]), propose_columns(["question", "Our reply"])
    ({'instruction': 'input', 'input': 'context'}, {'prompt': 'question', 'completion': 'Our reply'})
    """
    lower = {name.lower(): name for name in columns}
    question = next((lower[name] for name in QUESTIONS if name in lower), None)
    answer = next((lower[name] for name in ANSWERS if name in lower and lower[name] != question), None)
    if question is None or answer is None:
        question, answer = _by_words(columns, question, answer)
    if question is not None and question.lower() == "problem":  # the solution ends with the answer
        answer = lower.get("solution", answer)
    if question is None or answer is None or any(better in lower and worse in lower for better, worse in PREFERENCES):
        return {}
    alpaca = question.lower() == "instruction" or any(name in lower for name in ("history", "context"))
    targets = ("instruction", "output") if alpaca else ("prompt", "completion")
    names = {name: column for column, name in zip((question, answer), targets, strict=True) if column != name}
    inputs = (lower[name] for name in ("input", "context") if name in lower and lower[name] != question)
    others = {"input": next(inputs, None), "history": lower.get("history")} if alpaca else {}
    others["system"] = lower.get("system")
    return names | {name: column for name, column in others.items() if column not in (None, name, question, answer)}


def _by_words(columns: Sequence[str], question: str | None, answer: str | None) -> tuple[str | None, str | None]:
    """Return the columns of question and answer, the unknown ones by the words in their names, where one column alone
    has such a word: names of several words say less, so a second candidate leaves it unknown."""
    words = {name: set(re.findall("[a-z]+", name.lower())) for name in columns if name not in (question, answer)}
    asked, answered = (
        [name for name in words if words[name] & set(known)] for known in ((*QUESTIONS, *QUESTION_WORDS), ANSWERS)
    )
    question = question or (asked[0] if len(asked) == 1 and asked[0] not in answered else None)
    answer = answer or (answered[0] if len(answered) == 1 and answered[0] not in asked else None)
    return question, answer


def pair_columns(columns: Sequence[str]) -> dict[str, str]:
    """Return `data.columns` for pairs of answers; empty where there is no better and worse answer among the columns.

    >>> pair_columns(["query", "response_chosen", "response_rejected"])
    {'chosen': 'response_chosen', 'rejected': 'response_rejected', 'prompt': 'query'}
    >>> pair_columns(["query", "positive", "negative"]), pair_columns(["prompt", "win", "lose"])
    ({}, {})
    """
    lower = {name.lower(): name for name in columns}
    answers = next(((lower[a], lower[b]) for a, b in PREFERENCES if a in lower and b in lower), None)
    if answers is None or "preferred_output" in lower:
        return {}
    names = dict(zip(("chosen", "rejected"), answers, strict=True))
    if not any(name in columns for name in PAIR_PROMPTS):
        question = next((lower[name] for name in QUESTIONS if name in lower), None)
        names |= {"prompt": question} if question is not None else {}
    return _renamed(names)


def suggest_pairs(columns: Sequence[str]) -> str | None:
    """Return how to name the columns of pairs that have other names; None where they look like no pairs."""
    names = pair_columns(columns)
    return names_text({"columns": names}) if names else None


def _preference_advice(lower: Mapping[str, str]) -> str | None:
    """Return advice for rows of pairs, which no format of single answers reads; None for other rows."""
    columns = list(lower.values())
    answers = next(((lower[a], lower[b]) for a, b in PREFERENCES if a in lower and b in lower), None)
    if answers is None and "completions" in lower and any(name in lower for name in PAIR_PROMPTS):
        return "these are rows with several scored answers: to compare the best with the worst, write objective: dpo"
    if answers is None:
        return None
    if answers[0].lower() == "preferred_output":
        return (
            "these are pairs as OpenAI's preference tuning takes them: write objective: dpo; to train on the preferred "
            "answers alone, write input.messages followed by preferred_output as messages"
        )
    names = pair_columns(columns)
    settings = f" and data.columns: {{{', '.join(f'{name}: {theirs}' for name, theirs in names.items())}}}"
    prompt = next((lower[name] for name in QUESTIONS if name in lower), None)
    alone = f"completion: {answers[0]}" if prompt else f"messages: {answers[0]}"
    alone = f"prompt: {prompt}, {alone}" if prompt not in (None, "prompt") else alone
    return (
        f"these are pairs of a better and a worse answer: write objective: dpo{settings if names else ''}; to train on "
        f"the better answers alone, set data.columns: {{{alone}}}"
    )
