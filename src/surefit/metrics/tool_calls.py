"""Tool calls as a JSON array, `[{"name": "f", "arguments": {"x": 1}}]`: strict parsing and metrics.

A call is a dict with exactly the keys `name` (str) and `arguments` (object). The metrics, with an example of each and
the leaderboard's oddities: docs/recipes/function-calling.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefit.metrics.bfcl_checker import check_calls
from surefit.metrics.strict_json import strict_json
from surefit.metrics.tool_schema import acceptable_answer

ToolCall = dict[str, Any]
"""`{"name": str, "arguments": dict}`."""


def parse_calls(text: str) -> list[ToolCall] | None:
    """Parse an answer that is a JSON array of calls and nothing else; return None for any other text.

    White space around the array is the only freedom: a code fence, a sentence before it, a single object, another key
    (`parameters`, `id`), arguments inside a string, and everything that `strict_json` rejects are all None.

    >>> parse_calls('[{"name": "f", "arguments": {"x": 1}}]')
    [{'name': 'f', 'arguments': {'x': 1}}]
    >>> parse_calls('Sure: [{"name": "f", "arguments": {}}]') is None
    True
    """
    try:
        value = strict_json(text)
    except ValueError:
        return None
    return value if isinstance(value, list) and all(is_call(item) for item in value) else None


def is_call(value: Any) -> bool:
    """Return whether a JSON value has the shape of a call."""
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "arguments"}
        and isinstance(value["name"], str)
        and isinstance(value["arguments"], dict)
    )


@dataclass(frozen=True)
class GoldCalls:
    """Gold answer to one question.

    Attributes:
        calls: the gold calls; empty where no tool fits.
        functions: the documents of the available tools (`tool_schema.function_document`), including the tools of
            `calls`.
    """

    calls: Sequence[ToolCall]
    functions: Sequence[Mapping[str, Any]]

    def answers(self) -> list[dict[str, dict[str, list[Any]]]]:
        """Return `calls` in the format of the leaderboard's checker; of two tools with one name it uses the first."""
        by_name = {function["name"]: function for function in reversed(self.functions)}
        return [acceptable_answer(call, by_name[call["name"]]) for call in self.calls]


def score_calls(gold: GoldCalls, calls: Sequence[ToolCall] | None) -> dict[str, float]:
    """Return every metric that applies to this question; which ones do depends on `gold` alone, never on the answer.

    Args:
        gold: the gold answer.
        calls: the model's answer from `parse_calls`; None where it does not parse, which scores zero everywhere but in
            `irrelevance`.

    Returns:
        json_valid: the answer parses.
        name_accuracy: the share of called names in common, as multisets, relative to the longer list.
        argument_accuracy: the share of equal arguments among calls of the same name, relative to the longer list of
            arguments; left out where gold has no argument.
        exact_match: the same calls in any order (`same_calls`).
        ast: the leaderboard's verdict; left out where gold is empty.
        irrelevance: no call is made; only where gold is empty. As on the leaderboard, an answer that does not parse
            makes no call.
    """
    valid, predicted = calls is not None, calls or []
    scores = {
        "json_valid": float(valid),
        "name_accuracy": _name_accuracy(gold.calls, predicted) if valid else 0.0,
        "exact_match": float(valid and same_calls(gold.calls, predicted)),
    }
    if any(call["arguments"] for call in gold.calls):
        scores["argument_accuracy"] = _argument_accuracy(gold.calls, predicted)
    if gold.calls:
        category = "parallel" if len(gold.calls) > 1 else "multiple"
        scores["ast"] = float(check_calls(gold.functions, predicted, gold.answers(), category) is None)
    else:
        scores["irrelevance"] = float(not predicted)
    return scores


def same_calls(left: Sequence[ToolCall], right: Sequence[ToolCall]) -> bool:
    """Return whether two lists contain the same calls, in any order.

    Arguments are equal as JSON Schema defines it: 1 equals 1.0, true does not equal 1, strings match exactly, arrays in
    order, objects in any order.

    >>> same_calls([{"name": "f", "arguments": {"x": 1}}], [{"name": "f", "arguments": {"x": 1.0}}])
    True
    >>> same_calls([{"name": "f", "arguments": {"x": 1}}], [{"name": "f", "arguments": {"x": True}}])
    False
    """
    return Counter(map(_identity, left)) == Counter(map(_identity, right))


def _identity(value: Any) -> Hashable:
    """Return a hashable key: two JSON values are equal exactly when their keys are."""
    if isinstance(value, dict):
        return "object", frozenset((key, _identity(inner)) for key, inner in value.items())
    if isinstance(value, list):
        return "array", tuple(_identity(item) for item in value)
    if isinstance(value, bool):
        return "boolean", value
    return "plain", value


def _name_accuracy(gold: Sequence[ToolCall], given: Sequence[ToolCall]) -> float:
    longer = max(len(gold), len(given))
    common = Counter(call["name"] for call in gold) & Counter(call["name"] for call in given)
    return common.total() / longer if longer else 1.0


def _argument_accuracy(gold: Sequence[ToolCall], given: Sequence[ToolCall]) -> float:
    """Return the share of equal arguments, pairing calls of one name so that the most arguments in common come
    first.
    """
    pairs = [
        (_equal_arguments(gold_call, call), i, j)
        for i, gold_call in enumerate(gold)
        for j, call in enumerate(given)
        if gold_call["name"] == call["name"]
    ]
    paired_gold, paired_given, equal = set(), set(), 0
    for common, i, j in sorted(pairs, key=lambda pair: -pair[0]):
        if i not in paired_gold and j not in paired_given:
            paired_gold.add(i)
            paired_given.add(j)
            equal += common
    longer = max(sum(len(call["arguments"]) for call in calls) for calls in (gold, given))
    return equal / longer


def _equal_arguments(left: ToolCall, right: ToolCall) -> int:
    left_arguments, right_arguments = left["arguments"], right["arguments"]
    return sum(
        name in right_arguments and _identity(value) == _identity(right_arguments[name])
        for name, value in left_arguments.items()
    )
