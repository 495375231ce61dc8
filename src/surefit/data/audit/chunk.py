"""The result of a worker on a run of rows: counts, lengths and hashes, small enough to be sent back and merged."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from surefit.core.errors import DataError, RecipeError
from surefit.core.sampling import split_by_total_size
from surefit.data.audit.labelled import LabelFacts, label_facts
from surefit.data.audit.languages import count_languages
from surefit.data.audit.near_duplicates import Hashes, text_keys
from surefit.data.audit.pairs import TRUNCATED, PairFacts, find_alike_answers, find_swapped_scores, pair_facts
from surefit.data.audit.sample import DetectorTally, run_detectors, select_detectors
from surefit.data.rows.layouts import row_converter
from surefit.data.rows.messages import is_trained_on
from surefit.data.rows.other_templates import find_foreign_templates
from surefit.data.rows.pairs import answer_sides, pair_sides
from surefit.data.rows.reasoning import convert_reasoning
from surefit.data.rows.rendered_turns import Segments, TemplateLossFinder, unclosed_thoughts
from surefit.data.rows.template_checks import first_of_each
from surefit.data.tokens import tokenize
from surefit.data.tokens.show import decode_segments
from surefit.facts.dataset import is_blank, is_null, target_value
from surefit.task import Example, TaskRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IDENTIFIERS = frozenset({"id", "idx", "index", "uuid", "row_id", "__index_level_0__"})
"""Columns that identify rows and have no content."""
DIGEST = "S16"
CHARACTERS = 1_000_000
"""Characters that are tokenized at a time: a token needs about a hundred bytes on the way."""
SCRIPTS = {
    "Latin": (0x41, 0x24F), "Greek": (0x370, 0x3FF), "Cyrillic": (0x400, 0x52F), "Hebrew": (0x590, 0x5FF),
    "Arabic": (0x600, 0x77F), "Devanagari": (0x900, 0x97F), "Bengali": (0x980, 0x9FF), "Thai": (0xE00, 0xE7F),
    "Latin (Vietnamese and others)": (0x1E00, 0x1EFF), "Japanese kana": (0x3040, 0x30FF), "Han": (0x3400, 0x9FFF),
    "Hangul": (0xAC00, 0xD7AF),
}  # fmt: skip
"""Writing systems by their Unicode blocks: first and last character."""


@dataclass(frozen=True)
class AuditJob:
    """The task of an audit; it can be sent to another process.

    Attributes:
        source: the data set's name.
        columns: every column of the data set.
        target: the column that holds the answers, where one is known to.
        recipe: makes the task; None where none fits, and then only the raw rows are audited.
        recipe_name: its name.
        fmt: `data.format`.
        tokenizer: makes the model's tokenizer; None counts characters instead of tokens.
        max_length: maximum length of an example, in tokens.
        every: the template's round trip is tried on every this many rows.
        prompts: whether prompts will be compared with the prompts of other sets.
        thinking: `data.thinking`.
    """

    source: str
    columns: tuple[str, ...]
    target: str | None = None
    recipe: Callable[[], TaskRecipe] | None = None
    recipe_name: str | None = None
    fmt: str = "auto"
    tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None
    max_length: int | None = None
    every: int = 1
    prompts: bool = False
    thinking: str = "keep"


@dataclass
class ChunkStats:
    """The stats of a run of rows; arrays have an entry for each row, in order, except `given` and `learnt`.

    Attributes:
        tally: the observations that are counts.
        rows: SHA-256 of each row's canonical JSON, one after the other.
        contents: hash of each row without its identifier.
        targets: hash of each answer; empty where no column holds them.
        longest: tokens (or characters) of each row's longest token example; -1 for a row without one.
        given: tokens (or characters) of each token example without a label; a row makes one token example, except where
            the chat template rewrites earlier turns.
        learnt: tokens (or characters) of each token example that the loss falls on.
        keys: bands of the texts of users and assistant.
        prompts: hash of each prompt; zeros for a row that is no example.
        prompt_keys: bands of the users' texts.
        scripts: writing system → characters.
        languages: language → rows.
        tried: rows whose round trip was tried.
        texts: texts of users and assistant.
        asked: texts of the users; empty where prompts are not compared.
        empty: whether a row has no text, or no answer.
        pairs: number of the row and facts of each pair of answers.
        labels: number of the row and facts of each labelled answer.
    """

    tally: DetectorTally
    rows: bytes
    contents: npt.NDArray[np.bytes_]
    targets: Hashes
    longest: npt.NDArray[np.int32]
    given: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.int32]
    keys: Hashes
    prompts: npt.NDArray[np.bytes_]
    prompt_keys: Hashes
    scripts: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    tried: int = 0
    texts: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    empty: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    pairs: list[tuple[int, PairFacts]] = field(default_factory=list)
    labels: list[tuple[int, LabelFacts]] = field(default_factory=list)


def build_converter(question: AuditJob) -> Callable[[Mapping[str, Any]], Example] | None:
    """Return the function row → example, or None without a recipe.

    Raises:
        DataError: the columns do not fit it.
    """
    if question.recipe is None:
        return None
    convert = row_converter(question.columns, question.source, question.recipe(), question.fmt)
    return lambda row: convert_reasoning(convert(row), question.thinking)


class ChunkAuditor:
    """A job with the tokenizer, converter and detectors that it needs, made once in each process."""

    def __init__(self, question: AuditJob) -> None:
        self.question = question
        self.convert = build_converter(question)
        self.tokenizer = question.tokenizer() if question.tokenizer else None
        self.detectors = select_detectors(question.columns, question.recipe_name)
        self.comparison = self.tokens = None
        if self.tokenizer is not None:
            self.comparison = TemplateLossFinder(self._segments)
            self.tokens = tokenize.special_tokens_from_tokenizer(self.tokenizer)

    def look(self, first: int, rows: Sequence[Mapping[str, Any]]) -> ChunkStats:
        """Audit the rows `first`, `first` + 1, … of the data set."""
        tally = run_detectors(self.detectors, enumerate(rows, start=first))
        empty = np.zeros(len(rows), np.bool_)
        examples = self._examples(first, rows, tally, empty)
        longest, lengths = self._lengths(first, examples, tally)
        self._rendered(first, examples, tally)
        texts = (
            [text_from_roles(e, BOTH) if e else "" for e in examples]
            if self.convert
            else [row_text(row) for row in rows]
        )
        prompts = [text_from_roles(e, USER) if e else "" for e in examples] if self.question.prompts else []
        if self.convert is None:
            empty |= [not text.strip() for text in texts]
        digests, contents = _digests(rows)
        return ChunkStats(
            tally=tally,
            rows=digests,
            contents=contents,
            targets=self._targets(first, rows, tally, empty),
            longest=longest,
            given=np.array([total - supervised for total, supervised in lengths], np.int32),
            learnt=np.array([supervised for _, supervised in lengths], np.int32),
            keys=text_keys(texts),
            prompts=np.array([prompt_digest(e) for e in examples] if prompts else [], DIGEST),
            prompt_keys=text_keys(prompts),
            scripts=_scripts(texts),
            languages=count_languages(texts),
            tried=self._round_trips(first, examples, tally),
            texts=texts,
            asked=prompts,
            empty=empty,
            pairs=self._pairs(first, rows, examples, tally),
            labels=[
                (index, facts)
                for index, example in enumerate(examples, start=first)
                if example is not None
                for facts in label_facts(example)
            ],
        )

    def _pairs(
        self, first: int, rows: Sequence[Mapping[str, Any]], examples: Sequence[Example | None], tally: DetectorTally
    ) -> list[tuple[int, PairFacts]]:
        """Return the facts of the pairs among the examples, and record what is seen in each pair by itself."""
        pairs: list[tuple[int, PairFacts]] = []
        names = self.question.recipe().column_names if self.question.recipe else {}
        for index, (row, example) in enumerate(zip(rows, examples, strict=True), start=first):
            if example is None or example.rejected is None:
                continue
            pairs.append((index, pair_facts(example)))
            matches = [*find_alike_answers(example), *find_swapped_scores(row, names), *self._truncated(example)]
            for name, description in matches:
                tally.add(name, index, description)
        return pairs

    def _truncated(self, example: Example) -> list[tuple[str, str]]:
        """Return whether the two conversations of a pair are the same up to `max_length`, and both go on after it."""
        limit = self.question.max_length
        if limit is None or self.tokenizer is None:
            return []
        chosen, rejected = (tokenize.encode_turns(self.tokenizer, [side])[0][-1][0] for side in pair_sides(example))
        if min(len(chosen), len(rejected)) <= limit or chosen == rejected or chosen[:limit] != rejected[:limit]:
            return []
        place = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), limit)
        return [(TRUNCATED, f"the answers differ from token {place + 1:,} on, max_length is {limit:,}")]

    def _segments(self, example: Example) -> Segments:
        assert self.tokenizer is not None
        return tokenize.conversation_segments(example, self.tokenizer)

    def _rendered(self, first: int, examples: Sequence[Example | None], tally: DetectorTally) -> None:
        """Record what the chat template drops from each row, and texts that were already rendered."""
        if self.comparison is None or self.tokens is None:
            return
        for index, example in enumerate(examples, start=first):
            if example is None:
                continue
            matches: list[tuple[str, str]] = []
            for side in answer_sides(example):
                seen = [*self.tokens.sights(side), *unclosed_thoughts(side)]
                seen += find_foreign_templates(side, self.tokens.all)
                if side.text is None and self.tokenizer and self.tokenizer.chat_template:
                    seen += self.comparison.losses(side, self._segments(side))
                matches += first_of_each(seen, matches)
            for name, description in matches:
                tally.add(name, index, description)

    def _examples(
        self, first: int, rows: Sequence[Mapping[str, Any]], tally: DetectorTally, empty: npt.NDArray[np.bool_]
    ) -> list[Example | None]:
        """Return the rows as training would use them; None for a row that it could not use."""
        examples: list[Example | None] = []
        for index, row in enumerate(rows, start=first):
            example = None
            if self.convert is not None:
                try:
                    example = self.convert(row)
                except (DataError, RecipeError) as error:
                    empty[index - first] = error.message in ("empty", "missing")
                    tally.add(
                        "unusable_row", index, f"{error.field}: {error.message}" if error.field else error.message
                    )
            examples.append(example)
        return examples

    def _lengths(
        self, first: int, examples: list[Example | None], tally: DetectorTally
    ) -> tuple[npt.NDArray[np.int32], list[tuple[int, int]]]:
        """Return `ChunkStats.longest`, and (all, supervised) of each token example; removes a row for which the
        template raises an error from `examples`."""
        longest, all_lengths = np.full(len(examples), -1, np.int32), list[tuple[int, int]]()
        sides = [(number, side) for number, example in enumerate(examples) if example for side in answer_sides(example)]
        numbers, conversations = [number for number, _ in sides], [side for _, side in sides]
        counted = zip(numbers, self._counted(first, numbers, conversations, tally), strict=True)
        for number, group in groupby(counted, key=lambda entry: entry[0]):
            by_side = [lengths for _, lengths in group]
            lengths = [length for side_lengths in by_side for length in side_lengths]
            if not all(by_side):
                examples[number] = None
                continue
            all_lengths += lengths
            longest[number] = max(total for total, _ in lengths)
            self._judge_length(first + number, lengths, tally)
        return longest, all_lengths

    def _judge_length(self, index: int, lengths: Sequence[tuple[int, int]], tally: DetectorTally) -> None:
        limit = self.question.max_length
        total = max(total for total, _ in lengths)
        learnt = sum(learnt for _, learnt in lengths)
        if limit is not None and total > limit:
            tally.add("over_max_length", index, f"{total:,} tokens, {total - limit:,} over max_length {limit:,}")
        if self.tokenizer is not None and learnt == 0:
            tally.add("no_supervised_token", index, f"none of {total:,} tokens are trained on")
        elif self.tokenizer is not None and learnt == 1:
            tally.add("few_supervised_tokens", index, f"1 of {total:,} tokens is trained on")

    def _counted(
        self, first: int, usable: list[int], usable_examples: list[Example], tally: DetectorTally
    ) -> list[list[tuple[int, int]]]:
        """Return (all, supervised) lengths of the token examples of each conversation; none where the template raises.

        Args:
            usable: number of each conversation's row; a pair has two.
        """
        sizes = [_characters(example) for example in usable_examples]
        if self.tokenizer is None:
            return [[size] for size in sizes]
        counted: list[list[tuple[int, int]]] = []
        for portion in split_by_total_size((total for total, _ in sizes), CHARACTERS):
            try:
                counted += tokenize.count_token_lengths(self.tokenizer, usable_examples[portion])
            except DataError:
                placed = zip(usable[portion], usable_examples[portion], strict=True)
                counted += [self._counted_alone(first + number, example, tally) for number, example in placed]
        return counted

    def _counted_alone(self, index: int, example: Example, tally: DetectorTally) -> list[tuple[int, int]]:
        assert self.tokenizer is not None
        try:
            return tokenize.count_token_lengths(self.tokenizer, [example])[0]
        except DataError as error:
            tally.add("unusable_row", index, error.message)
            return []

    def _targets(
        self, first: int, rows: Sequence[Mapping[str, Any]], tally: DetectorTally, empty: npt.NDArray[np.bool_]
    ) -> Hashes:
        name = self.question.target
        if name is None:
            return np.zeros(0, np.uint64)
        hashes = []
        for index, row in enumerate(rows, start=first):
            answer = target_value(row, name)
            empty[index - first] |= is_null(answer) or is_blank(answer)
            if is_null(answer):
                tally.add("null_target", index, f"{name} is null")
            elif is_blank(answer):
                tally.add("blank_target", index, f"{name} is empty")
            content = answer if isinstance(answer, str) else _canonical(answer)
            hashes.append(hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=8).digest())
        return np.frombuffer(b"".join(hashes), np.uint64)

    def _round_trips(self, first: int, examples: Sequence[Example | None], tally: DetectorTally) -> int:
        """Compare some of the examples with the text decoded from their tokens, and return how many."""
        if self.tokenizer is None:
            return 0
        chosen = [
            (index, example)
            for index, example in enumerate(examples, start=first)
            if example is not None and example.text is None and index % self.question.every == 0
        ]
        for index, example in chosen:
            _round_trip(index, example, self.tokenizer, tally)
        return len(chosen)


def _round_trip(index: int, example: Example, tokenizer: PreTrainedTokenizerBase, tally: DetectorTally) -> None:
    """Compare the rendered text with the decoded tokens, and the positions where the loss starts."""
    segments = zip(tokenize.conversation_segments(example, tokenizer), decode_segments(example, tokenizer), strict=True)
    for rendered, decoded in segments:
        rendered_text, decoded_text = "".join(text for text, _ in rendered), "".join(text for text, _ in decoded)
        if rendered_text.lstrip() != decoded_text.lstrip():
            characters = enumerate(zip(rendered_text, decoded_text, strict=False))
            place = next((n for n, (a, b) in characters if a != b), min(len(rendered_text), len(decoded_text)))
            tally.add(
                "template_round_trip",
                index,
                f"{rendered_text[place : place + 24]!r} is decoded as {decoded_text[place : place + 24]!r}",
            )
            return
        if (decoded_start := _learnt_from(decoded)) < (rendered_start := _learnt_from(rendered)) - (
            len(rendered_text) - len(decoded_text)
        ):
            tally.add(
                "mask_inside_prompt",
                index,
                f"the loss starts {rendered_start - decoded_start} characters before the answer",
            )
            return


def _learnt_from(segments: Sequence[tuple[str, bool]]) -> int:
    """Return the number of characters before the first supervised one."""
    before = 0
    for text, learnt in segments:
        if learnt:
            break
        before += len(text)
    return before


BOTH, USER = ("user", "assistant"), ("user",)


def text_from_roles(example: Example, roles: tuple[str, ...]) -> str:
    """Return the text of these roles. The system message and the tools are left out: different rows share them."""
    if example.text is not None:
        return example.text
    messages = example.messages
    if example.rejected is not None and "assistant" in roles:
        messages = (*messages, example.rejected[-1])
    return "\n".join(_turn_text(message) for message in messages if message["role"] in roles)


def _turn_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    calls = message.get("tool_calls")
    return f"{content}\n{_canonical(calls)}" if calls else str(content)


def prompt_digest(example: Example | None) -> bytes:
    """Return the hash of the whole model input; empty for no example."""
    if example is None:
        return b""
    prompt: list[Any] = [example.text] if example.text is not None else [example.prompt, example.tools]
    return _digest(_canonical(prompt))


def _characters(example: Example) -> tuple[int, int]:
    if example.text is not None:
        return len(example.text), len(example.text)
    lengths = [(len(_turn_text(message)), is_trained_on(message)) for message in example.messages]
    return sum(n for n, _ in lengths), sum(n for n, learnt in lengths if learnt)


def row_text(row: Mapping[str, Any]) -> str:
    """Return all the text in a row without a known layout, except its identifier."""
    return "\n".join(value if isinstance(value, str) else _canonical(value) for _, value in _content(row))


def _content(row: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in row.items() if name.lower() not in IDENTIFIERS]


def _digests(rows: Sequence[Mapping[str, Any]]) -> tuple[bytes, npt.NDArray[np.bytes_]]:
    """Return (SHA-256 of each canonical row, hash of each row without its identifiers)."""
    row_digests, contents = [], []
    for row in rows:
        row_digests.append(hashlib.sha256(_canonical(row).encode("utf-8", "replace")).digest())
        content = _content(row)
        contents.append(_digest(_canonical(dict(content))) if len(content) < len(row) else row_digests[-1][:16])
    return b"".join(row_digests), np.array(contents, DIGEST)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()


def _scripts(texts: Sequence[str]) -> Counter[str]:
    """Count letters by writing system."""
    plain = "".join(text for text in texts if text.isascii()).encode("ascii")
    foreign = "".join(text for text in texts if not text.isascii()).encode("utf-32-le", "replace")
    small = np.frombuffer(plain, np.uint8) | np.uint8(32)
    counts = Counter(Latin=int(((small >= 97) & (small <= 122)).sum()))
    codes = np.frombuffer(foreign, np.uint32)
    codes = codes[(codes >= 128) | (((codes | 32) >= 97) & ((codes | 32) <= 122))]
    for name, (low, high) in SCRIPTS.items() if len(codes) else ():
        counts[name] += int(((codes >= low) & (codes <= high)).sum())
    return +counts
