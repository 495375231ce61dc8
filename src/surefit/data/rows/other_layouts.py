"""Layouts of other tools, recognized by their columns: how to name the columns so that SureFit reads them."""

from __future__ import annotations

from collections.abc import Sequence

PREFERENCES = (
    ("chosen", "rejected"), ("preferred_output", "non_preferred_output"), ("chosen_response", "rejected_response")
)  # fmt: skip
"""Columns of pairs of a better and a worse answer."""
QUESTIONS = ("instruction", "prompt", "query", "question", "problem", "input", "user", "human")
ANSWERS = ("output", "completion", "response", "answer", "answers", "target", "reply", "assistant", "solution", "gpt")
WRAPPERS = ("data", "train", "rows", "examples", "test", "validation")
"""Key names under which a single wrapping object holds the rows."""


def suggest_layout(columns: Sequence[str]) -> str | None:
    """Return advice for rows with these columns, which fit no layout; None where no known layout is near.

    >>> suggest_layout(["query", "response"])
    'set data.columns: {prompt: query, completion: response}'
    """
    lower = {name.lower(): name for name in columns}
    for better, worse in PREFERENCES:
        if better in lower and worse in lower:
            return _preference_advice(lower, lower[better])
    if "contents" in lower:
        return (
            "these are rows of Vertex AI: write contents as messages, with the role assistant for model and the joined "
            "text of parts as content"
        )
    if "conversation" in lower:
        return (
            "set data.columns: {messages: conversation} (turns of role and content) or {conversations: conversation} "
            "(from and value)"
        )
    if len(columns) <= 3 and all(name.lower() in WRAPPERS for name in columns):
        return f"the file is one object around the rows: write the list under {columns[0]!r} alone"
    names = propose_columns(columns)
    return (
        f"set data.columns: {{{', '.join(f'{name}: {column}' for name, column in names.items())}}}" if names else None
    )


def propose_columns(columns: Sequence[str]) -> dict[str, str]:
    """Return `data.columns` for rows of a question and an answer under other names; empty where there is no such pair.

    >>> propose_columns(["id", "Frage", "query", "response"])
    {'prompt': 'query', 'completion': 'response'}
    """
    lower = {name.lower(): name for name in columns}
    question = next((lower[name] for name in QUESTIONS if name in lower), None)
    answer = next((lower[name] for name in ANSWERS if name in lower and lower[name] != question), None)
    if question is not None and question.lower() == "problem":  # the solution ends with the answer
        answer = lower.get("solution", answer)
    if question is None or answer is None or any(better in lower and worse in lower for better, worse in PREFERENCES):
        return {}
    alpaca = question.lower() == "instruction" or any(name in lower for name in ("history", "context"))
    targets = ("instruction", "output") if alpaca else ("prompt", "completion")
    names = {name: column for column, name in zip((question, answer), targets, strict=True) if column != name}
    others = {"input": lower.get("input") or lower.get("context"), "history": lower.get("history")} if alpaca else {}
    others["system"] = lower.get("system")
    read = {"input", "context", "history", "system", question, answer}
    return names | {name: column for name, column in others.items() if column is not None and column not in read}


def _preference_advice(lower: dict[str, str], better: str) -> str:
    """Return advice for pairs of answers: they are not trained on; the better ones can be."""
    prompt = next((lower[name] for name in QUESTIONS if name in lower), None)
    prompt = f" and {prompt} to prompt" if prompt not in (None, "prompt") else ""
    target = f"completion{prompt}" if any(name in lower for name in QUESTIONS) else "messages"
    return (
        "these are preference pairs, and SureFit does not train on pairs: to train on the preferred answers, "
        f"rename {better} to {target}"
    )
