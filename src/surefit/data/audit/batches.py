"""The audit of the batches: the tensors that reach the loss, compared with the examples that went into them.

It is independent of the collator. It looks for each example's ids in the tensors, and from there on uses only what lies
at that place: the labels, the attention mask, the positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from surefit.data.tokens.cache import MASKED
from surefit.facts.audit import Observation
from surefit.facts.batch import BatchFacts
from surefit.facts.named_templates import to_template_dict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""(input ids, labels) of one example, as the data set returns them."""
MARK = "surefit"
CALL_ID = "surefit01"
"""Nine letters and digits: some templates accept no other id of a tool call."""
EXAMPLES = 3
SHOWN_TOKENS = 40
SLACK = 8
"""Tokens decoded before the expected end of a prompt: a token boundary may cut a character."""
ALWAYS = ("dead", "overwritten", "supervised_padding", "attention", "positions", "run_together")


@dataclass(frozen=True)
class BatchExample:
    """An example and its place in a batch.

    Attributes:
        name: name for messages.
        start: its first column in `row`.
        packed: another example lies in the same row.
    """

    item: Item
    name: str
    row: int
    start: int
    packed: bool = False

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + len(self.item[0]))


@dataclass
class BatchCheckCounts:
    """Counts of the faults in the batches."""

    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ALWAYS, 0))
    of: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ALWAYS, 0))
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, wrong: bool, what: str, number: int = 1) -> None:
        self.of[name] = self.of.get(name, 0) + number
        self.rows[name] = self.rows.get(name, 0) + number * wrong
        if wrong and len(self.examples.setdefault(name, [])) < EXAMPLES:
            self.examples[name].append(what)

    def observations(self) -> dict[str, Observation]:
        return {n: Observation(self.rows[n], self.of[n], tuple(self.examples.get(n, ()))) for n in self.rows}


def audit_batches(
    batches: Sequence[tuple[Mapping[str, Any], Sequence[Item]]],
    tokenizer: PreTrainedTokenizerBase,
    conversations: bool = False,
) -> BatchFacts:
    """Check micro batches as they reach the loss.

    Args:
        batches: for each batch its tensors (`input_ids` and `labels`, and if there are any `attention_mask`,
            `position_ids`, `cu_seq_lens_q`), and the examples that went into it, in their order.
        tokenizer: decodes them; its template tells what stands before an answer.
        conversations: the examples are conversations. In plain text everything but the first token is supervised, so
            there is no prompt that the loss could wrongly include.
    """
    count = BatchCheckCounts()
    ends = prompt_ends(tokenizer) if conversations else []
    check_starts = partial(_check_answer_starts, count, tokenizer, [(text, _ids(tokenizer, text)) for text in ends])
    examples, tokens, supervised = 0, 0, 0
    shown: list[dict[str, Any]] = []
    for number, (tensors, items) in enumerate(batches, start=1):
        arrays = _as_read({name: np.atleast_2d(np.asarray(tensor)) for name, tensor in tensors.items()})
        located = list(_locate_examples(arrays["input_ids"], items, number, count))
        for example in located:
            ids, labels = example.item[0], arrays["labels"][example.row, example.columns]
            examples, tokens = examples + 1, tokens + len(ids)
            supervised += int(np.count_nonzero(labels[1:] != MASKED))
            _check_labels(count, example, labels)
            _check_attention_and_positions(count, example, arrays)
            if ends:
                check_starts(example, ids, labels)
        if len(located) == len(items):  # otherwise apparent padding may be an example that was not found
            _check_padding(count, arrays, located, number)
        if number in (1, len(batches)):
            shown += [_describe_example(tokenizer, example, arrays["labels"]) for example in located[:1]]
    longest = max((len(ids) for _, items in batches for ids, _ in items), default=0)
    return BatchFacts(len(batches), examples, tokens, supervised, longest, count.observations(), tuple(shown))


def _as_read(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a batch as attention reads them: a prompt that two answers share, before each of them."""
    if "key_order" not in arrays:
        return arrays
    order = arrays["key_order"][0]
    return arrays | {name: arrays[name][:, order] for name in ("input_ids", "labels", "position_ids")}


def _locate_examples(
    input_ids: npt.NDArray[Any], items: Sequence[Item], number: int, count: BatchCheckCounts
) -> Iterator[BatchExample]:
    """Yield every example with its place: at the left, after the previous one, or at the right end of a row."""
    located: list[BatchExample] = []
    width = input_ids.shape[1]
    row, column = 0, 0
    for index, item in enumerate(items, start=1):
        name = f"micro batch {number}, example {index}"
        places = [(row, column)] if 0 < column < width else []
        places += [(r, start) for r in range(row + bool(column), len(input_ids)) for start in (0, width - len(item[0]))]
        place = next((p for p in places if _lies_at(input_ids, item[0], *p)), None)
        if place is None:
            count.add("overwritten", True, f"{name}: its {len(item[0])} tokens are not in the batch")
            continue
        row, column = place[0], place[1] + len(item[0])
        located.append(BatchExample(item, name, row, column - len(item[0])))
    rows = [example.row for example in located]
    yield from (BatchExample(e.item, e.name, e.row, e.start, rows.count(e.row) > 1) for e in located)


def _lies_at(input_ids: npt.NDArray[Any], ids: npt.NDArray[Any], row: int, start: int) -> bool:
    return start >= 0 and np.array_equal(input_ids[row, start : start + len(ids)], ids)


def _check_labels(count: BatchCheckCounts, each: BatchExample, labels: npt.NDArray[Any]) -> None:
    ids, expected = each.item
    dead = not np.any(labels[1:] != MASKED)
    count.add("dead", dead, f"{each.name}: all {len(ids)} labels are {MASKED}")
    wrong = np.flatnonzero((labels != expected) | ((labels != MASKED) & (labels != ids)))
    learnt = int(np.count_nonzero(expected != MASKED)), int(np.count_nonzero(labels != MASKED))
    description = f"{each.name}: {learnt[1]} labels instead of {learnt[0]}, of {len(ids)} tokens; the first at token "
    count.add("overwritten", not dead and wrong.size > 0, description + str(wrong[0] if wrong.size else 0))


def _check_attention_and_positions(
    count: BatchCheckCounts, each: BatchExample, arrays: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Check attention and positions at the example's place."""
    mask, positions = arrays.get("attention_mask"), arrays.get("position_ids")
    flat = mask if mask is not None and mask.ndim == 2 else None
    hidden = flat is not None and not flat[each.row, each.columns].all()
    count.add("attention", hidden, f"{each.name}: attention does not see all of its {len(each.item[0])} tokens")
    restarts = positions is not None and np.array_equal(positions[each.row, each.columns], np.arange(len(each.item[0])))
    if positions is not None:
        first = int(positions[each.row, each.start])
        count.add("positions", not restarts, f"{each.name}: its positions start at {first} and do not count up from 0")
    if each.packed:
        # transformers separates the examples of a row by positions only where there is no 2-D attention mask.
        apart = "cu_seq_lens_q" in arrays or (restarts and flat is None) or (mask is not None and mask.ndim == 4)
        count.add("run_together", not apart, f"{each.name}: attention sees the examples before it in its row")


def _check_padding(
    count: BatchCheckCounts, arrays: Mapping[str, npt.NDArray[Any]], placed: Sequence[BatchExample], number: int
) -> None:
    padding = np.ones(arrays["input_ids"].shape, dtype=bool)
    for example in placed:
        padding[example.row, example.columns] = False
    learnt = int(np.count_nonzero(arrays["labels"][padding] != MASKED))
    description = f"micro batch {number}: {learnt} of {int(padding.sum())} padding tokens have a label"
    count.add("supervised_padding", False, description, int(padding.sum()) - learnt)
    if learnt:
        count.add("supervised_padding", True, description, learnt)
    mask = arrays.get("attention_mask")
    if mask is None or mask.ndim == 2:
        for example in placed:
            before = slice(0, example.start)
            attended = padding[example.row, before] & (True if mask is None else mask[example.row, before] != 0)
            if attended.any():
                description = f"{example.name}: attention sees the {int(attended.sum())} padding tokens before it"
                count.add("attention", True, description)


def _check_answer_starts(
    count: BatchCheckCounts,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[tuple[str, list[int]]],
    each: BatchExample,
    ids: npt.NDArray[Any],
    labels: npt.NDArray[Any],
) -> None:
    """Check that every answer begins where a prompt ends."""
    learnt = np.concatenate([[False], labels != MASKED])
    window = max(len(end) for _, end in ends) + SLACK
    for start in np.flatnonzero(learnt[1:] & ~learnt[:-1]).tolist():
        before = ids[max(0, start - window) : start].tolist()
        fits = any(end and before[-len(end) :] == end for _, end in ends)
        fits = fits or _ends_with_one(_decoded(tokenizer, before), [text for text, _ in ends])
        place = "at its first token" if start == 0 else f"after {_decoded(tokenizer, before[-SLACK:])!r}"
        count.add("misplaced_mask", not fits, f"{each.name}: the loss starts {place}")


def _ends_with_one(text: str, ends: Sequence[str]) -> bool:
    """Return whether the text ends with one of `ends`, ignoring spaces: SentencePiece may drop some in decoding."""
    return any("".join(text.split()).endswith("".join(end.split())) for end in ends)


def prompt_ends(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts that may precede an answer: the template's generation prompts after a user's and a tool's turn.

    Empty where the template does not write a plain conversation, or none with a tool although it mentions tools: then
    the place where a mask has to begin is unknown.
    """
    all_ends: list[str] = []
    for template in to_template_dict(tokenizer.chat_template).values():
        ends = _prompt_ends(tokenizer, template)
        if not ends:
            return []
        all_ends += ends
    return list(dict.fromkeys(all_ends))


def _prompt_ends(tokenizer: PreTrainedTokenizerBase, template: str) -> list[str]:
    question: list[dict[str, Any]] = [{"role": "user", "content": MARK}]
    calls = [{"id": CALL_ID, "type": "function", "function": {"name": "look", "arguments": {}}}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "name": "look", "tool_call_id": CALL_ID, "content": MARK}
    after_user, after_tool = (
        _prompt_end(tokenizer, turns, template) for turns in (question, [*question, call, result])
    )
    if not after_user or (not after_tool and "tool" in template):
        return []
    return [end for end in dict.fromkeys((after_user, after_tool)) if end]


def _prompt_end(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]], template: str) -> str | None:
    """Return the generation prompt; if the template adds none, the text that it writes after the last turn's text."""
    try:
        plain, prompted = (
            str(
                tokenizer.apply_chat_template(
                    turns, chat_template=template, tokenize=False, add_generation_prompt=add_prompt
                )
            )
            for add_prompt in (False, True)
        )
    except (TemplateError, TypeError, ValueError, KeyError):
        return None
    if prompted != plain and prompted.startswith(plain):
        return prompted[len(plain) :]
    return prompted.rpartition(MARK)[2] if MARK in prompted else None


def _describe_example(
    tokenizer: PreTrainedTokenizerBase, each: BatchExample, labels: npt.NDArray[Any]
) -> dict[str, Any]:
    ids, example_labels = each.item[0], labels[each.row, each.columns]
    learnt = np.flatnonzero(example_labels != MASKED)
    first, last = (int(learnt[0]), int(learnt[-1]) + 1) if learnt.size else (len(ids), len(ids))
    return {
        "example": each.name,
        "tokens": len(ids),
        "supervised_tokens": int(learnt.size),
        "before": _decoded(tokenizer, ids[max(0, first - SHOWN_TOKENS) : first]),
        "begins": _decoded(tokenizer, ids[first : min(last, first + SHOWN_TOKENS)]),
        "ends": _decoded(tokenizer, ids[max(first, last - SHOWN_TOKENS) : last]),
    }


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)
