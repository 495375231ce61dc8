"""Checks of a sample of examples before any model is loaded: with the light tokenizer, and only where needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.config.schema import DataSection, SureFitConfig
from surefit.core.errors import DataError
from surefit.core.sampling import evenly_spaced
from surefit.data.rows.layouts import Examples, bad_rows_error, prompt_position, split_eval, with_place
from surefit.data.rows.messages import is_trained_on
from surefit.data.rows.pairs import answer_sides
from surefit.data.tokens.light_template import LightTemplate
from surefit.data.tokens.pretokenized import require_known_tokens
from surefit.data.tokens.turns import truncate_conversation
from surefit.facts.examples import ENOUGH, ExampleFacts
from surefit.facts.gguf import read_gguf
from surefit.facts.thinking import has_field, other_tag, reasoning_of_message
from surefit.facts.tokenizer import TokenizerFacts, catch_tokenizer_panics
from surefit.task import Example, Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES_PER_TOKEN = 8
"""Bytes of text per allowed token that are tokenized of an example over the limit: nearly always enough to show it."""
DIVIDED = 40
"""Conversations of several answers that are rendered to see how many token examples each makes."""
DIVIDED_TURNS = 200
"""Rendered turns of each such conversation: twenty messages."""
BUDGET = 1_000_000
"""Bytes of text that are tokenized at most (a third of a second); the examples after that are not measured."""


def example_facts(examples: Examples, tokenizer: TokenizerFacts | None, max_length: int) -> ExampleFacts:
    """Return the facts about a sample of examples.

    A token covers at least a byte, so an example of at most `max_length` bytes of text passes without a tokenizer. For
    longer ones the beginning is tokenized: its tokens are a lower bound of the example's.
    """
    texts = [max((example_text(side, tokenizer) for side in answer_sides(example)), key=len) for example in examples]
    sizes = [len(text.encode()) for text in texts]
    counted = ExampleFacts(
        examples=len(examples),
        prompts=len({prompt_position(example, 0) for example in examples}),
        conversations=sum(example.text is None for example in examples),
        with_tools=sum(bool(example.tools) for example in examples),
        max_length=max_length,
        most_bytes=max(sizes, default=0),
        in_fields=sum(any(has_field(turn) for turn in supervised_turns(example)) for example in examples),
        in_tags=sum(
            any(not has_field(turn) and reasoning_of_message(turn) for turn in supervised_turns(example))
            for example in examples
        ),
        other_tags=tuple(tag for example in examples if (tag := _other_tag_in(example))),
    )
    over_bytes = [n for n, size in enumerate(sizes) if size > max_length]
    if not over_bytes:
        return replace(counted, measured=len(texts))
    if tokenizer is None or tokenizer.file is None:
        return counted
    beginnings = dict(_within_budget(texts, over_bytes, BYTES_PER_TOKEN * max_length))
    lengths = dict(zip(beginnings, _lengths(tokenizer.file, list(beginnings.values())), strict=True))
    too_long = [n for n, length in lengths.items() if length > max_length]
    return replace(
        counted,
        measured=len(texts) - len(over_bytes) + len(lengths),
        too_long=len(too_long),
        first_too_long=examples.where[too_long[0]] if too_long else None,
        longest=max(lengths.values()) if too_long else 0,
    )


def _other_tag_in(example: Example) -> str | None:
    """Return the tag of the first answer that has its reasoning only in a tag other than `<think>`."""
    answers = (turn for turn in supervised_turns(example) if not has_field(turn) and not reasoning_of_message(turn))
    return next((tag for turn in answers if (tag := other_tag(str(turn.get("content") or "")))), None)


def supervised_turns(example: Example) -> list[Message]:
    """Return the turns that the loss falls on."""
    return [turn for turn in example.messages if is_trained_on(turn)]


def mean_token_examples(examples: Sequence[Example], template: LightTemplate) -> float:
    """Return the mean token examples per example: more than 1 where the chat template rewrites earlier turns."""
    multi_answer = [example for example in examples if len(supervised_turns(example)) > 1]
    sampled = evenly_spaced(multi_answer, DIVIDED)
    counts = [_token_examples_of(example, template) for example in sampled]
    return 1 + len(multi_answer) / max(1, len(examples)) * (sum(counts) / max(1, len(counts)) - 1) if counts else 1.0


def _token_examples_of(example: Example, template: LightTemplate) -> float:
    """Return the number of token examples of one conversation; extrapolated from the beginning of a long one."""
    beginning = truncate_conversation(example, DIVIDED_TURNS)
    try:
        added = len(template.segments(beginning)) - 1
    except DataError:  # reported by tokenizing
        return 1
    return 1 + added * (len(supervised_turns(example)) - 1) / max(1, len(supervised_turns(beginning)) - 1)


def _one_prompt(examples: Sequence[Example]) -> bool:
    first = examples[0]
    return all(
        (example.text, example.prompt, example.tools) == (first.text, first.prompt, first.tools) for example in examples
    )


def find_split_problems(config: SureFitConfig, examples: Examples, total: int) -> Iterator[DataError]:
    """Yield an error if the share `data.eval` holds out no row, or all of them: known once all rows are. If `ENOUGH`
    rows have one prompt, a rule reports it instead."""
    share = config.data.share
    complete = len(examples) + len(examples.skipped) == total
    if complete and share and (len(examples) < ENOUGH or not _one_prompt(examples)):
        try:
            split_eval(examples, share, config.train.seed)
        except DataError as error:
            yield error


def find_missing_documents(section: DataSection, examples: Examples) -> Iterator[DataError]:
    """Yield an error if documents are to be cut and the recipe's examples have none."""
    if section.cuts and all(example.document is None for example in examples):
        yield DataError(
            f"{section.too_long} cuts documents, but the recipe does not say which part of a prompt may be cut",
            code="E4107",
            field="data.too_long",
            help="write too_long: drop, or choose a recipe with documents (long_summarization)",
        )


def find_unknown_tokens(
    config: SureFitConfig, key: str, source: str, examples: Examples, tokenizer: TokenizerFacts | None
) -> Iterator[DataError]:
    """Yield an error if rows contain token ids that the tokenizer, as far as it is known, does not have.

    Args:
        key: config key that names the `source` of these examples.
    """
    if tokenizer is None or tokenizer.tokens is None or tokenizer.largest_id is None:
        return
    vocabulary = max(tokenizer.tokens, tokenizer.largest_id + 1) + len(config.model.add_tokens)
    problems = list(_unknown_tokens(examples, vocabulary))
    if problems:
        error = bad_rows_error(problems, len(examples), source, "")
        error.about(key)
        yield error


def find_missing_template(
    key: str, source: str, examples: Examples, tokenizer: TokenizerFacts | None
) -> Iterator[DataError]:
    """Yield an error if rows outside `data.train` (which MOD006 checks) are conversations, and the tokenizer, as far as
    it is known, has no chat template to render them with.

    Args:
        key: config key that names the `source` of these examples.
    """
    if tokenizer is None or tokenizer.chat_template is not None or tokenizer.tool_template is not None:
        return
    count = sum(example.text is None for example in examples)
    if count:
        yield DataError(
            f"{count:,} of {len(examples):,} sampled rows are conversations, and the model has no chat template",
            code="E4352",
            path=source,
            field=key,
            help="set model.chat_template: plain (roles in words), use the instruct variant, or name plain text",
        )


def _unknown_tokens(examples: Examples, known: int) -> Iterator[DataError]:
    for example, where in zip(examples, examples.where, strict=True):
        try:
            require_known_tokens(example.tokens[0] if example.tokens else (), known)
        except DataError as error:
            yield with_place(error, where)


def example_text(example: Example, tokenizer: TokenizerFacts | None) -> str:
    """Return the text that an example has with any template: contents, calls, and the tools where they are written."""
    if example.text is not None:
        return strip_surrogates(example.text)
    parts: list[Any] = [message.get("content") for message in example.messages]
    parts += [message["tool_calls"] for message in example.messages if message.get("tool_calls")]
    if tokenizer and tokenizer.mentions_tools:
        parts += example.tools or ()
    texts = (part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part)
    return strip_surrogates("\n".join(texts))


def strip_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can hold and no tokenizer accepts."""
    return text.encode(errors="replace").decode()


def _within_budget(texts: list[str], chosen: list[int], characters: int) -> Iterator[tuple[int, str]]:
    """Yield some of the chosen examples, spread evenly, each cut to `characters`, until the budget is used up."""
    most = max(1, BUDGET // max(1, min(characters, max(len(texts[n]) for n in chosen))))
    step = max(1, len(chosen) // most)
    for n in chosen[::step][:most]:
        yield n, texts[n][:characters]


def _lengths(file: Path, texts: list[str]) -> list[int]:
    library = load_tokenizer_file(file)
    if library is None:
        return [0] * len(texts)
    with catch_tokenizer_panics(file):
        return [len(encoded.ids) for encoded in library.encode_batch(texts, add_special_tokens=False)]


def load_tokenizer_file(file: Path) -> Tokenizer | None:
    """Load a tokenizer.json or the vocabulary of a GGUF file, ready to encode; None for a damaged file, which the model
    rules report."""
    return _loaded(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _loaded(file: Path, changed: int) -> Tokenizer | None:
    from tokenizers import Tokenizer

    from surefit.facts.gguf_tokenizer import build_tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.suffix == ".json" else build_tokenizer(read_gguf(file))
    except BaseException as error:  # the library raises nothing narrower than Exception, or ends in a panic
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
