"""Tokenization of examples to token ids and their label mask: which tokens are supervised. Built only here.

A conversation is rendered by the model's own chat template and cut into segments: the context and the parts that the
model has to write. Each segment is tokenized separately, so the tokens before an answer are exactly the prompt tokens
in evaluation, even if the tokenizer would merge them with the answer's first letters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from surefit.core.errors import DataError, ModelError
from surefit.core.gc_pause import pause_gc
from surefit.data.rows.special_tokens import SpecialTokens, build_special_tokens
from surefit.data.tokens.cache import Encoded
from surefit.data.tokens.pretokenized import require_known_tokens
from surefit.data.tokens.turns import Segment, answers_of, build_template_refusal, plan_renderings, split_segments
from surefit.facts.chat_template import TEMPLATE_DATE
from surefit.facts.named_templates import template_for
from surefit.facts.thinking import TemplateReasoning, message_as_template_reads, probe_template_reasoning
from surefit.facts.tokenizer import catch_tokenizer_panics
from surefit.facts.turn_end import ends_of_turn, first_in
from surefit.task import Example, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 256
"""Examples that are passed to the tokenizer at once: it works on them in parallel."""


def tokenize_prompt(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of `example.prompt` for generation: the beginning of the example as it is trained on.

    Raises:
        DataError: as `conversation_segments`; and where the example is plain text, which has no prompt.
    """
    if not example.prompt:
        raise DataError(
            "plain text has no prompt to answer", code="E4134", help="score with rows that have a prompt and an answer"
        )
    prompt = Example(example.prompt, example.tools)
    return encode_turns(tokenizer, [prompt])[0][-1][0]


def tokenize_beginning(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of plain text, or a row's own tokens, for the model to continue: as they are trained on, without
    the end-of-text token.

    Raises:
        DataError: the row contains tokens that the tokenizer does not have.
    """
    if example.tokens:
        return _encode_pretokenized(example.tokens, len(tokenizer))[0]
    ids = _ids(tokenizer, [example.text or ""], add_special_tokens=True)[0]
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids


def tokenize_label_prompt(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of `tokenize_prompt`, extended to the place of a label in a training answer: behind the empty
    thought, or the channel, that the chat template has the model write first.

    Raises:
        DataError: as `tokenize_prompt`; and where no answer without reasoning follows the generation prompt.
    """
    label = "surefit"
    example_with_answer = Example((*example.prompt, {"role": "assistant", "content": label}), example.tools)
    segments = conversation_segments(example_with_answer, tokenizer)[-1] if example.prompt else []
    place = max((n for n, (_, learnt) in enumerate(segments) if learnt), default=0)
    head = segments[place][0].partition(label)[0] if segments else ""
    if not head.strip():
        return tokenize_prompt(example, tokenizer)
    segments = [*segments[:place], (head, True)]
    return _joined(segments, _piecewise(tokenizer, [segments]))[0]


def conversation_segments(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[list[Segment]]:
    """Render the conversation and cut it before and after each turn that the model has to write (`data.tokens.turns`).

    A turn starts where the generation prompt before it ends, and ends with the template's end-of-turn mark.

    Returns:
        One list of segments for each token example: one, except where the template rewrites earlier turns.

    Raises:
        DataError: the text with an answer does not start with its generation prompt.
        ModelError: the tokenizer has no chat template.
    """
    return _all_segments([example], tokenizer)[0]


def _all_segments(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> list[list[list[Segment]]]:
    """Return the segments of every example; all are rendered in batched template calls, which is twice as fast."""
    renderings = [plan_renderings(example) for example in examples]
    texts = iter(
        _render(
            [(e, *rendering) for e, plan in zip(examples, renderings, strict=True) for rendering in plan], tokenizer
        )
    )
    ends = [find_turn_ends(tokenizer, with_tools) for with_tools in (False, True)]
    pairs = zip(examples, renderings, strict=True)
    return [split_segments(e, {rendering: next(texts) for rendering in plan}, ends[bool(e.tools)]) for e, plan in pairs]


def find_turn_ends(tokenizer: PreTrainedTokenizerBase, tools: Any = None) -> dict[str, str]:
    """Return `facts.turn_end.ends_of_turn` of the template that renders a conversation with these tools."""
    template = template_for(tokenizer.chat_template, tools)
    if not template:
        return {}
    return ends_of_turn(template, tokenizer.special_tokens_map, tokenizer.get_added_vocab)


def special_tokens_from_tokenizer(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return the special tokens of a tokenizer that texts are searched for."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    question, end = None, None
    with suppress(DataError, ModelError):
        example = Example(({"role": "user", "content": "?"}, {"role": "assistant", "content": "surefit"}))
        before, after, answered = _render([(example, 1, False), (example, 1, True), (example, 2, False)], tokenizer)
        question = before, after
        end = first_in(answered.rpartition("surefit")[2], special)
    return build_special_tokens(
        special,
        bos=tokenizer.bos_token,
        eos=tokenizer.eos_token,
        end_of_turn=end,
        padding=tokenizer.pad_token,
        asked=question,
        templated=bool(tokenizer.chat_template),
        adds=_ids(tokenizer, ["x"], add_special_tokens=True)[0][:1] == [tokenizer.bos_token_id],
    )


def _render(wanted: Sequence[tuple[Example, int, bool]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Render the first turns of each example with the chat template, in the order of `wanted`."""
    if not wanted:  # plain text and tokens need no template
        return []
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template, so conversations cannot be rendered for this model",
            code="E4135",
            path=tokenizer.name_or_path or None,
            help="choose the instruct version of the model, set model.chat_template: plain, or train on plain text "
            "(data.format: text)",
        )
    reads = [_reads(tokenizer, with_tools) for with_tools in (False, True)]
    visible_turns = {
        id(example): _visible(example.messages, reads[bool(example.tools)])
        for example in {id(e): e for e, _, _ in wanted}.values()
    }
    texts = [""] * len(wanted)
    groups: dict[tuple[int, bool], list[int]] = {}
    for number, (example, _, generation_prompt) in enumerate(wanted):
        # A call accepts one list of tools for all its conversations.
        groups.setdefault((id(example.tools) if example.tools else 0, generation_prompt), []).append(number)
    for (_, generation_prompt), numbers in groups.items():
        tools = wanted[numbers[0]][0].tools
        conversations = [visible_turns[id(wanted[n][0])][: wanted[n][1]] for n in numbers]
        try:
            rendered = tokenizer.apply_chat_template(
                conversations,
                tools=list(tools) if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                date_string=TEMPLATE_DATE,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise build_template_refusal(error) from error
        for number, text in zip(numbers, rendered, strict=True):
            assert isinstance(text, str)
            texts[number] = text
    return texts


def _reads(tokenizer: PreTrainedTokenizerBase, tools: Any) -> TemplateReasoning:
    template = template_for(tokenizer.chat_template, tools)
    return probe_template_reasoning(template) if template else TemplateReasoning()


def _visible(messages: Sequence[Message], reads: TemplateReasoning) -> list[Message]:
    unweighted = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    return [message_as_template_reads(message, reads) for message in unweighted]


def encode(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[Encoded]:
    """Return (ids, whether the loss falls on each) of examples that make one token example each.

    Raises:
        DataError: as `encode_turns`; and where a chat template rewrites earlier turns.
        ModelError: as `encode_turns`.
    """
    encoded = encode_turns(tokenizer, examples)
    if any(len(token_examples) != 1 for token_examples in encoded):
        raise DataError(
            "the chat template rewrites earlier turns of a conversation, which then needs several token examples",
            code="E4137",
            field="messages",
            help="call encode_turns, which returns all of them, or set data.thinking: only_last",
        )
    return [token_examples[0] for token_examples in encoded]


@pause_gc()
def encode_turns(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[list[Encoded]]:
    """Return the token examples of each example: one, except where the chat template rewrites earlier turns.

    Raises:
        DataError: the chat template raises for a conversation or does not fit it (see `conversation_segments`), or a
            row contains tokens that the tokenizer does not have.
        ModelError: the tokenizer has no chat template, or for plain text no end-of-text token.
    """
    rendered = iter(_all_segments([e for e in examples if e.text is None], tokenizer))
    conversations = [next(rendered) if e.text is None else [] for e in examples]
    pieces = _piecewise(tokenizer, [segments for conversation in conversations for segments in conversation])
    texts = iter(_texts(tokenizer, [e.text for e in examples if e.text is not None and e.tokens is None]))
    vocabulary = len(tokenizer) if any(e.tokens for e in examples) else 0
    return [
        [_encode_pretokenized(example.tokens, vocabulary)]
        if example.tokens
        else [next(texts)]
        if example.text is not None
        else [_joined(segments, pieces) for segments in conversation]
        for example, conversation in zip(examples, conversations, strict=True)
    ]


def encode_pairs(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[list[Encoded]]:
    """Return two token examples of each pair, chosen and rejected, each tokenized as any conversation.

    Raises:
        DataError: as `encode_turns` and `answers_of`; and where the chat template writes the prompt before the two
            answers differently.
    """
    encoded = iter(encode(tokenizer, [answer for example in examples for answer in answers_of(example)]))
    pairs = [[next(encoded), next(encoded)] for _ in examples]
    for pair in pairs:
        starts = [supervised.index(True) if any(supervised) else len(ids) for ids, supervised in pair]
        prompts = [ids[:start] for (ids, _), start in zip(pair, starts, strict=True)]
        if prompts[0] != prompts[1]:
            raise DataError(
                f"the chat template writes another prompt before the chosen answer ({starts[0]} tokens) than before "
                f"the rejected one ({starts[1]} tokens)",
                code="E4860",
                field="rejected",
                help="give both answers the same form, with reasoning or without (data.thinking: drop)",
            )
    return pairs


def encode_labelled(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[list[Encoded]]:
    """Return the token examples of labelled answers: one of each, or two of a pair, chosen and rejected.

    Raises:
        DataError: as `encode_turns` and `encode_pairs`.
    """
    single = iter(encode(tokenizer, [example for example in examples if example.rejected is None]))
    paired = iter(encode_pairs(tokenizer, [example for example in examples if example.rejected is not None]))
    return [[next(single)] if example.rejected is None else next(paired) for example in examples]


def require_encodable(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> None:
    """Raise if conversations or token ids cannot be encoded; nothing is tokenized.

    Raises:
        DataError, ModelError: as `encode_turns` for conversations and for token ids.
    """
    whole = [e for e in examples if e.text is None and e.rejected is None]
    _all_segments(whole, tokenizer)
    if pairs := [e for e in examples if e.rejected is not None]:
        encode_pairs(tokenizer, pairs)
    for example in examples:
        if example.tokens:
            _encode_pretokenized(example.tokens, len(tokenizer))


def _encode_pretokenized(tokens: tuple[tuple[int, ...], tuple[bool, ...]], known: int) -> Encoded:
    """Return a row's own tokens as a token example; raises if the tokenizer does not have them."""
    ids, learnt = tokens
    require_known_tokens(ids, known)
    return list(ids), [False, *learnt[1:]]


def _joined(segments: Sequence[Segment], pieces: Iterator[list[int]]) -> Encoded:
    ids: list[int] = []
    supervised: list[bool] = []
    for _, learnt in segments:
        piece = next(pieces)
        ids += piece
        supervised += [learnt] * len(piece)
    supervised[:1] = [False] * len(ids[:1])
    return ids, supervised


def count_token_lengths(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[list[tuple[int, int]]]:
    """Return (ids, supervised ids) of each token example of each example: the lengths of the result of `encode_turns`.

    Raises:
        DataError, ModelError: as `encode_turns`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or any(example.text is not None for example in examples) or not _starts_freely(tokenizer):
        encoded = encode_turns(tokenizer, examples)
        return [[(len(ids), sum(supervised)) for ids, supervised in token_examples] for token_examples in encoded]
    conversations = _all_segments(examples, tokenizer)
    pieces = [text for token_examples in conversations for segments in token_examples for text, _ in segments]
    counts = iter(map(len, _encodings(tokenizer, pieces)))
    return [[_counted(segments, counts) for segments in token_examples] for token_examples in conversations]


def _counted(segments: Sequence[Segment], counts: Iterator[int]) -> tuple[int, int]:
    lengths = [(next(counts), learnt) for _, learnt in segments]
    # As in `_joined`, the first id of all is never supervised.
    return sum(n for n, _ in lengths), sum(n for n, learnt in lengths if learnt) - lengths[0][1]


def _texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[Encoded]:
    """Yield plain texts with the tokenizer's begin token, each ended by the end-of-text token."""
    if not texts:
        return
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ModelError(
            "the tokenizer has no end-of-text token, so a model trained on plain text would never stop",
            code="E4138",
            path=tokenizer.name_or_path or None,
            help="set eos_token in its tokenizer_config.json",
        )
    for ids in _ids(tokenizer, texts, add_special_tokens=True):
        ids = ids if ids[-1:] == [end] else [*ids, end]
        yield ids, [False] + [True] * (len(ids) - 1)


def _piecewise(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Segment]]) -> Iterator[list[int]]:
    """Yield the ids of every segment of every conversation.

    A SentencePiece-like tokenizer puts a space before every text. Only the first segment should get it, so the others
    are tokenized together with the previous segment, whose ids are then removed.
    """
    texts = [[text for text, _ in segments] for segments in conversations]
    alone = iter(_ids(tokenizer, [text for group in texts for text in group]))
    if _starts_freely(tokenizer):
        yield from alone
        return
    joined = iter(_ids(tokenizer, [a + b for group in texts for a, b in pairwise(group)]))
    for group in texts:
        before: list[int] | None = None
        for piece in (next(alone) for _ in group):
            joined_ids = next(joined) if before is not None else piece
            start = len(before or ())
            yield joined_ids[start:] if joined_ids[:start] == (before or []) else piece
            before = piece


def _starts_freely(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a text's tokens do not depend on being the first: true for byte-level tokenizers."""
    newline, letter, both = _ids(tokenizer, ["\n", "x", "\nx"])
    return newline + letter == both


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
    if not texts:
        return []
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        return [encoding.ids for encoding in _encodings(tokenizer, texts, add_special_tokens)]
    with catch_tokenizer_panics(tokenizer.name_or_path):
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return ids


def _encodings(tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool = False) -> list[Any]:
    """Encode texts with the tokenizer's backend, without the offsets, which are a quarter of its work."""
    # A call without options resets padding and truncation that an earlier call may have left in the backend.
    tokenizer("", add_special_tokens=False)
    encodings: list[Any] = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    return encodings
