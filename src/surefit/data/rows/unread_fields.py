"""Detection of columns of rows, and keys of their turns and calls, that neither recipe nor template reads."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from surefit.core.errors import SureFitError
from surefit.core.sampling import evenly_spaced_indices
from surefit.data.rows.labelled import PREFERENCE_COLUMNS, preference_from_label
from surefit.data.rows.layouts import row_conversion
from surefit.data.rows.messages import ARGUMENTS, CALL_KEYS, MARKS, PARTIAL_MARKS, SHAREGPT_ROLES
from surefit.data.rows.pairs import SCORE_COLUMNS
from surefit.facts.audit import Observation
from surefit.facts.chat_template import SPECIAL
from surefit.facts.template import TemplateRefused, render_chat_template
from surefit.facts.thinking import FIELDS
from surefit.facts.tokenizer import TokenizerFacts
from surefit.task import Example, TaskRecipe

if TYPE_CHECKING:
    from surefit.data.read.load import Rows

UNREAD, UNREAD_PROMPTS, UNREAD_MARKS = "unread_columns", "unread_prompts", "unread_marks"
"""Observations: columns or keys that nothing reads; those with text that belongs to the prompt or the answer; those
that mark which turns or rows are trained on."""
RARE = 0.05
"""The largest share of the rows with a column whose text may be missing from the turns."""
LOOKED_AT = 100
"""Rows that are converted to see which columns are read."""
IDENTIFIERS = frozenset(
    {"id", "idx", "index", "uuid", "row_id", "__index_level_0__", "prompt_id", "conversation_id"}
    | {"schemaversion", "parallel_tool_calls"}  # Bedrock's and OpenAI's: nothing that a model could learn
)
_TURN_KEYS = frozenset(
    ("role", "content", "parts", "tool_calls", "function_call", "name", "tool_call_id", "id", "from", "value", "type")
).union(MARKS, PARTIAL_MARKS, FIELDS)
_ALONE = re.compile(
    r"system|contexts?|history|instructions?|prompts?|questions?|query|documents?|passages?|inputs?|persona|developer"
    r"|reason(?:ing)?|think(?:ing)?|thoughts?|cot|rationales?|rejected"
)
"""Names of columns of the prompt or the answer, whose text counts however short it is."""
_OF_PROMPTS = re.compile(rf"{_ALONE.pattern}|chosen|tools?|functions?|images?|audio|video")
"""Words in names of prompt and answer columns."""
_ABOUT = re.compile(
    r"types?|ids?|sources?|length|len|count|tokens|categor(?:y|ies)|language|lang|model|name|configs?|format|hash|index"
    r"|scores?|domain|date|time|url|title|topic|level|quality|difficulty"
)
"""Last words of names that describe a part of a row: `question_type`, `prompt_source`."""
CONVERSATION_COLUMNS = ("messages", "conversations", "contents", "prompt", "completion")
_SPEAKER = "[].name"
"""End of the key with which a turn names its speaker."""
_SWITCHES = ("chat_template", "chat_template_kwargs")
_MARK = re.compile(
    rf"{'|'.join((*MARKS, *PARTIAL_MARKS))}|mask(?:ed)?|(?:loss|train|labels)_mask|train_on(?:_turn)?|compute_loss"
    r"|learn(?:ed)?|(?:loss_)?weights|sample_weight|loss_scale"
    r"|is_(?:good|bad|correct|wrong|preferred|chosen|accepted)|accepted|approved|liked"
)
"""Names that mark the turns or rows that are trained on, or whose answers are good ones."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_UNSPACED = re.compile(r"[^\W\d_a-zA-Z]{6,}")
"""Letters of scripts that are written without spaces."""


def find_unread_columns(
    rows: Rows, recipe: TaskRecipe, fmt: str, tokenizer: TokenizerFacts | None
) -> dict[str, Observation]:
    """Return observations on the parts of a sample of the rows that neither the recipe nor the chat template reads."""
    sample, examples, read_columns = _converted(rows, recipe, fmt)
    if not read_columns:
        return {}
    if not recipe.columns and not recipe.parts:  # every layout reads them, but only uses values that judge the answer
        values = {name: [row[name] for row in sample if row.get(name) is not None] for name in PREFERENCE_COLUMNS}
        read_columns -= {
            name
            for name in PREFERENCE_COLUMNS
            if any(preference_from_label(name, value) is None for value in values[name])
        }
    if recipe.pairs:  # AUD086 compares them with the order of the answers
        read_columns |= {name for both in SCORE_COLUMNS if set(both) <= set(rows.columns) for name in both}
    template_text = f"{tokenizer.chat_template} {tokenizer.tool_template}" if tokenizer else ""
    template_words = frozenset(re.findall(r"\w+", template_text))
    counts: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    speakers: set[str] = set()
    for row, example in zip(sample, examples, strict=True):
        unread = {
            name: value for name, value in row.items() if name not in read_columns and name.lower() not in IDENTIFIERS
        }
        unread_values = [
            *unread.items(),
            *_unread_keys(row, read_columns, template_words),
            *_unread_names(row, read_columns, tokenizer),
        ]
        unread_values = [(name, value) for name, value in unread_values if _says_something(value)]
        counts.update({name for name, _ in unread_values})
        text = _spaced(
            _texts(row[name] for name in read_columns if name in row)
            if example is None
            else _iterate_visible_texts(example)
        )
        missing.update({name for name, value in unread_values if _belongs(name, value, text)})
        speakers.update(str(value) for name, value in unread_values if name.endswith(_SPEAKER))
    if len(speakers) < 2:  # always the same speaker: nothing that the model could tell apart
        missing = Counter({name: count for name, count in missing.items() if not name.endswith(_SPEAKER)})
    marks = [name for name in sorted(missing) if _MARK.fullmatch(_key(name))]
    of_prompts = [name for name in sorted(missing) if name not in marks and missing[name] > RARE * counts[name]]
    other_names = [name for name in sorted(counts) if name not in (*of_prompts, *marks)]
    return {
        key: Observation(max((counts[name] for name in names), default=0), len(sample), tuple(names))
        for key, names in ((UNREAD, other_names), (UNREAD_PROMPTS, of_prompts), (UNREAD_MARKS, marks))
    }


def find_read_columns(rows: Rows, recipe: TaskRecipe, fmt: str) -> set[str]:
    """Return the columns that converting a sample of the rows reads; empty where no row can be converted."""
    return _converted(rows, recipe, fmt)[2]


def _converted(rows: Rows, recipe: TaskRecipe, fmt: str) -> tuple[list[dict[str, Any]], list[Example | None], set[str]]:
    """Return a sample of the rows, the example that each becomes, and the columns that are read for it."""
    numbers = evenly_spaced_indices(len(rows), LOOKED_AT)
    sample = [rows[number] for number in numbers]
    read_columns: set[str] = set()
    examples: list[Example | None] = [None] * len(sample)
    with contextlib.suppress(SureFitError):
        conversion = row_conversion(rows, recipe, fmt)
        for index, number in enumerate(numbers):
            with contextlib.suppress(SureFitError):  # reported where rows are converted
                converted = conversion.converted(rows.at(number))
                read_columns |= converted.columns_read
                examples[index] = converted.result if isinstance(converted.result, Example) else None
    return sample, examples, read_columns


def _key(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _belongs(name: str, value: Any, text: str) -> bool:
    """Return whether a column or key has content for the model to see or learn that the row's turns do not have."""
    key = _key(name)
    if name.endswith(_SPEAKER):
        return _missing(str(value), text)
    if _MARK.fullmatch(key):  # a mark that says "learn this" changes nothing
        return key in ("mask", "masked") or value not in (True, "true", "True")
    if key in _SWITCHES:
        return True
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2].replace("CoT", "COT"))]
    if not words or _ABOUT.fullmatch(words[-1]) or not any(map(_OF_PROMPTS.fullmatch, words)):
        return False
    short = len(words) == 1 and _ALONE.fullmatch(words[0])
    return any(_missing(part, text) for part in _texts([value]) if short or _is_prose(part))


def _missing(part: str, text: str) -> bool:
    lines = [" ".join(line.split()) for line in part.splitlines() if line.strip()]
    return " ".join(lines) not in text and any(line not in text for line in lines)


def _is_prose(text: str) -> bool:
    """Return whether a text is more than a tag, a number, an identifier or a path."""
    words = [word for word in text.split() if sum(map(str.isalpha, word)) > 1]
    return len(words) > 1 or _UNSPACED.search(text) is not None


def _texts(values: Iterable[Any]) -> Iterator[str]:
    """Yield every text in lists and objects, except the names of speakers."""
    for value in values:
        if isinstance(value, str):
            if value.strip():
                yield value
        elif isinstance(value, Mapping):
            yield from _texts(inner for key, inner in value.items() if key not in ("role", "from", "type"))
        elif isinstance(value, Sequence):
            yield from _texts(value)


def _iterate_visible_texts(example: Example) -> Iterator[str]:
    turns = [{key: value for key, value in turn.items() if key != "name"} for turn in example.messages]
    yield from _texts([example.text, turns, example.tools])


def _spaced(texts: Iterable[str]) -> str:
    return " ".join(" ".join(texts).split())


def _says_something(value: Any) -> bool:
    return value not in (None, "", [], {})


def _unread_keys(row: Mapping[str, Any], read: set[str], known: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield keys of turns and of calls that are ignored, as `column[].key`, with their values."""
    for column in CONVERSATION_COLUMNS:
        turns = row.get(column)
        if column not in read or not isinstance(turns, list):
            continue
        for turn in turns:
            if not isinstance(turn, Mapping):
                continue
            yield from (
                (f"{column}[].{key}", value)
                for key, value in turn.items()
                if key not in _TURN_KEYS and key not in known
            )
            yield from _call_keys(turn.get("tool_calls"), f"{column}[].tool_calls[]")


def _unread_names(
    row: Mapping[str, Any], read: set[str], tokenizer: TokenizerFacts | None
) -> Iterator[tuple[str, Any]]:
    """Yield the speakers' names, as `column[].name`, where the template does not write them; tools' names are
    optional."""
    for column in CONVERSATION_COLUMNS:
        turns = row.get(column)
        for turn in turns if column in read and isinstance(turns, list) else ():
            if not isinstance(turn, Mapping) or not isinstance(turn.get("name"), str):
                continue
            role = SHAREGPT_ROLES.get(str(turn.get("role", turn.get("from"))))
            if role in ("user", "assistant") and not _writes_name(tokenizer.chat_template if tokenizer else None, role):
                yield f"{column}{_SPEAKER}", turn["name"]


@lru_cache(maxsize=8)
def _writes_name(template: str | None, role: str) -> bool:
    """Return whether a chat template writes the speaker's name in this role; True if there is no template."""
    if template is None:
        return True
    turns = [
        {"role": speaker_role, "content": "?"} | ({"name": "Zqname"} if speaker_role == role else {})
        for speaker_role in ("user", "assistant")
    ]
    try:
        return "Zqname" in render_chat_template(template, turns, special=SPECIAL)
    except TemplateRefused:
        return True


def _call_keys(calls: Any, place: str) -> Iterator[tuple[str, Any]]:
    for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
        if isinstance(call, Mapping):
            function = call.get("function")
            entries = [*function.items(), *call.items()] if isinstance(function, Mapping) else call.items()
            known_keys = (*ARGUMENTS, *CALL_KEYS, "function")
            yield from ((f"{place}.{key}", value) for key, value in entries if key not in known_keys)
