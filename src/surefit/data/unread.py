"""Columns of rows, and keys of their turns and calls, that nothing reads."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any

from surefit.core.errors import SureFitError
from surefit.core.sampling import evenly
from surefit.data.formats import row_converter
from surefit.data.messages import ARGUMENTS, CALL_KEYS, MARKS, PARTIAL_MARKS
from surefit.facts.audit import Observation
from surefit.facts.thinking import FIELDS
from surefit.facts.tokenizer import TokenizerFacts
from surefit.task import TaskRecipe

if TYPE_CHECKING:
    from surefit.data.load import Rows

UNREAD, UNREAD_PROMPTS = "unread_columns", "unread_prompts"
"""Observations: columns or keys that nothing reads; those that belong to what the model is asked, or to how it is
trained."""
LOOKED_AT = 100
"""Rows that are converted to see what is read."""
IDENTIFIERS = frozenset({"id", "idx", "index", "uuid", "row_id", "__index_level_0__", "prompt_id", "conversation_id"})
_TURN_KEYS = frozenset(
    ("role", "content", "tool_calls", "function_call", "name", "tool_call_id", "id", "from", "value", "type")
).union(MARKS, PARTIAL_MARKS, FIELDS)
_OF_PROMPTS = re.compile(
    r"system|context|history|instruct|prompt|question|query|document|passage|input|persona|developer"
    r"|reason|think|thought|cot|rationale|chosen|rejected|label|weight|loss|mask|train|chat_template|tool|function"
    r"|image|audio|video",
    re.IGNORECASE,
)
"""Names of what belongs to the prompt or the answer, or says how a row is trained on."""


class _Recorded(Mapping[str, Any]):
    """A row that notes which of its columns are read; going through all of them is no reading."""

    def __init__(self, row: Mapping[str, Any], read: set[str]) -> None:
        self._row, self._read = row, read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._row[name]

    def __contains__(self, name: object) -> bool:
        return name in self._row

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    def items(self) -> ItemsView[str, Any]:
        return self._row.items()

    def values(self) -> ValuesView[Any]:
        return self._row.values()


def unread_columns(
    rows: Rows, recipe: TaskRecipe, fmt: str, tokenizer: TokenizerFacts | None
) -> dict[str, Observation]:
    """What a sample of the rows has that neither the recipe nor the chat template reads."""
    sample = [rows[number] for number in evenly(len(rows), LOOKED_AT)]
    read: set[str] = set()
    with contextlib.suppress(SureFitError):
        convert = row_converter(rows.columns, rows.source, recipe, fmt)
        for row in sample:
            with contextlib.suppress(SureFitError):  # reported where rows are converted
                convert(_Recorded(row, read))
    if not read:
        return {}
    written = f"{tokenizer.chat_template} {tokenizer.tool_template}" if tokenizer else ""
    known = frozenset(re.findall(r"\w+", written))
    counts: Counter[str] = Counter()
    for row in sample:
        unread = {name for name, value in row.items() if name not in read and _says_something(value)}
        counts.update(name for name in unread if name.lower() not in IDENTIFIERS)
        counts.update(set(_unread_keys(row, read, known)))
    names = sorted(counts)
    of_prompts = [name for name in names if _OF_PROMPTS.search(name)]
    others = [name for name in names if name not in of_prompts]
    return {
        key: Observation(max((counts[name] for name in own), default=0), len(sample), tuple(own))
        for key, own in ((UNREAD, others), (UNREAD_PROMPTS, of_prompts))
    }


def _says_something(value: Any) -> bool:
    return value not in (None, "", [], {})


def _unread_keys(row: Mapping[str, Any], read: set[str], known: frozenset[str]) -> Iterator[str]:
    """Keys of turns and of calls that are passed over, as `column[].key`."""
    for column in ("messages", "conversations", "prompt", "completion"):
        turns = row.get(column)
        if column not in read or not isinstance(turns, list):
            continue
        for turn in turns:
            if not isinstance(turn, Mapping):
                continue
            yield from (
                f"{column}[].{key}"
                for key, value in turn.items()
                if key not in _TURN_KEYS and key not in known and _says_something(value)
            )
            yield from _call_keys(turn.get("tool_calls"), f"{column}[].tool_calls[]")


def _call_keys(calls: Any, place: str) -> Iterator[str]:
    for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
        if isinstance(call, Mapping):
            function = call["function"] if isinstance(call.get("function"), Mapping) else call
            known = (*ARGUMENTS, *CALL_KEYS, "function")
            yield from (f"{place}.{key}" for key, value in function.items() if key not in known and value is not None)
