"""Examples become token ids and labels; the labels are built here and nowhere else.

A conversation is rendered by the model's own chat template and cut into segments: what the model is given and what it
has to write. Each segment is tokenised on its own, so that the tokens before an answer are exactly those the model is
given when it is evaluated, whatever the answer's first letters would merge with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from surefit.core.errors import DataError, ModelError
from surefit.data.cache import MASKED, Encoded
from surefit.data.messages import trained_on
from surefit.task import Example, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_DATE = "26 Jul 2024"
"""Llama's templates write a date; without this one (their own fallback) it would be today's, and every day's tokens
would differ."""
BATCH = 256
"""Examples that are handed to the tokenizer at once: it works on them in parallel."""

Segment = tuple[str, bool]
"""A text, and whether the model has to write it."""
Rendering = tuple[int, bool]
"""The first so many turns, and whether a generation prompt stands behind them."""


@dataclass(frozen=True)
class Tokenized:
    """One example.

    Attributes:
        input_ids: the whole example.
        labels: the same ids where the loss falls, `MASKED` elsewhere; the loss of label i is that of predicting it from
            the ids before i, so the first label is always masked.
    """

    input_ids: list[int]
    labels: list[int]


def tokenize_example(example: Example, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    """Token ids and labels of one example, at any length.

    Raises:
        DataError: the chat template refuses the conversation or does not fit it (see `conversation_segments`).
        ModelError: the tokenizer has no chat template, or for plain text no end-of-text token.
    """
    ids, supervised = encode(tokenizer, [example])[0]
    return Tokenized(ids, [i if learnt else MASKED for i, learnt in zip(ids, supervised, strict=True)])


def tokenize_prompt(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the model is given when it has to answer `example.prompt`: the start of what it is trained on.

    Raises:
        DataError: as `tokenize_example`; and where the example is plain text, which asks for no answer.
    """
    if not example.prompt:
        raise DataError("plain text has no prompt to answer", help="score with rows that have a prompt and an answer")
    prompt = Example(example.prompt, example.tools)
    return encode(tokenizer, [prompt])[0][0]


def conversation_segments(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[Segment]:
    """The rendered conversation, cut before and after each turn that the model has to write.

    A turn starts where the generation prompt before it ends, and ends with the template's end-of-turn mark. That is
    only well defined for templates whose text grows with each turn; where this one's does not, nothing is guessed.

    Raises:
        DataError: the text up to a turn is not the start of the whole text, or does not start with its own prompt.
        ModelError: the tokenizer has no chat template.
    """
    return _all_segments([example], tokenizer)[0]


def _all_segments(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> list[list[Segment]]:
    """The segments of every example; the template is called for all of them at once, which is twice as fast."""
    needed = [_renderings(example) for example in examples]
    texts = iter(_render([(e, *one) for e, ones in zip(examples, needed, strict=True) for one in ones], tokenizer))
    return [_cut(example, {one: next(texts) for one in ones}) for example, ones in zip(examples, needed, strict=True)]


def _renderings(example: Example) -> list[Rendering]:
    """What has to be rendered to cut a conversation: (turns, with a generation prompt behind them), the whole first."""
    messages = example.messages
    needed = [(len(messages), messages[-1]["role"] != "assistant")]
    for i, message in enumerate(messages):
        if trained_on(message):
            needed += [(i, True), (i + 1, False)]
    return list(dict.fromkeys(needed))


def _cut(example: Example, rendered: Mapping[Rendering, str]) -> list[Segment]:
    whole = next(iter(rendered.values()))
    segments: list[Segment] = []
    done = 0
    for i, message in enumerate(example.messages):
        if not trained_on(message):
            continue
        prompt, upto = rendered[i, True], rendered[i + 1, False]
        if not (done <= len(prompt) and upto.startswith(prompt) and whole.startswith(upto)):
            raise _not_growing(i, prompt, upto, whole)
        segments += [(whole[done : len(prompt)], False), (whole[len(prompt) : len(upto)], True)]
        done = len(upto)
    return [(text, learnt) for text, learnt in [*segments, (whole[done:], False)] if text]


def _render(wanted: Sequence[tuple[Example, int, bool]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The first turns of each example as the chat template writes them, in the order asked for."""
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template, so conversations cannot be written for this model",
            path=tokenizer.name_or_path or None,
            help="choose the instruct version of the model, set model.chat_template: plain, or train on plain text "
            "(data.format: text)",
        )
    texts = [""] * len(wanted)
    together: dict[tuple[int, bool], list[int]] = {}
    for number, (example, _, generation_prompt) in enumerate(wanted):
        # A call takes one list of tools for all its conversations.
        together.setdefault((id(example.tools) if example.tools else 0, generation_prompt), []).append(number)
    for (_, generation_prompt), numbers in together.items():
        tools = wanted[numbers[0]][0].tools
        visible = [_visible(wanted[n][0].messages[: wanted[n][1]]) for n in numbers]
        try:
            rendered = tokenizer.apply_chat_template(
                visible,
                tools=list(tools) if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                date_string=TEMPLATE_DATE,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"the model's chat template refuses this conversation: {error}",
                field="messages",
                help="change the order or the roles of the messages to what the model was made for",
            ) from error
        for number, text in zip(numbers, rendered, strict=True):
            assert isinstance(text, str)
            texts[number] = text
    return texts


def _visible(messages: Sequence[Message]) -> list[Message]:
    return [{key: value for key, value in message.items() if key != "weight"} for message in messages]


def _not_growing(turn: int, prompt: str, upto: str, whole: str) -> DataError:
    before, after = (prompt, upto) if not upto.startswith(prompt) else (upto, whole)
    agreed = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    if after is upto:
        what = f"asks for the answer of turn {turn} (assistant) with {before[agreed:][-40:]!r}, but writes it without"
    else:
        what = f"rewrites turn {turn} (assistant) once more turns follow: {before[agreed:][:40]!r} is gone"
    return DataError(
        f"the model's chat template {what}; training on this turn would teach what the model never has to write",
        field=f"messages[{turn}]",
        help='set "weight": 0 on the assistant turns before the last, or use a chat template that keeps what it has '
        "written",
    )


def encode(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[Encoded]:
    """Ids and, for each, whether the loss falls on it.

    Raises:
        DataError, ModelError: as `tokenize_example`.
    """
    rendered = iter(_all_segments([e for e in examples if e.text is None], tokenizer))
    conversations = [next(rendered) if e.text is None else [] for e in examples]
    pieces = _piecewise(tokenizer, conversations)
    texts = iter(_texts(tokenizer, [e.text for e in examples if e.text is not None]))
    encoded = []
    for example, segments in zip(examples, conversations, strict=True):
        if example.text is not None:
            encoded.append(next(texts))
            continue
        ids: list[int] = []
        supervised: list[bool] = []
        for _, learnt in segments:
            piece = next(pieces)
            ids += piece
            supervised += [learnt] * len(piece)
        supervised[:1] = [False] * len(ids[:1])
        encoded.append((ids, supervised))
    return encoded


def lengths(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[tuple[int, int]]:
    """(ids, those of them that the loss falls on) of each example: the lengths of what `encode` makes.

    Raises:
        DataError, ModelError: as `tokenize_example`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or any(example.text is not None for example in examples) or not _starts_freely(tokenizer):
        return [(len(ids), sum(supervised)) for ids, supervised in encode(tokenizer, examples)]
    conversations = _all_segments(examples, tokenizer)
    pieces = [text for segments in conversations for text, _ in segments]
    # `_starts_freely` has just called the tokenizer without options, so the backend neither pads nor cuts.
    counts = iter(map(len, backend.encode_batch_fast(pieces, add_special_tokens=False)))
    found = []
    for segments in conversations:
        own = [(next(counts), learnt) for _, learnt in segments]
        # As in `encode`, the first id of all is never learnt.
        found.append((sum(n for n, _ in own), sum(n for n, learnt in own if learnt) - own[0][1]))
    return found


def _texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[Encoded]:
    """Plain texts as the tokenizer starts them, each ended by the end-of-text token."""
    if not texts:
        return
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ModelError(
            "the tokenizer has no end-of-text token, so a model trained on plain text would never stop",
            path=tokenizer.name_or_path or None,
            help="set eos_token in its tokenizer_config.json",
        )
    for ids in _ids(tokenizer, texts, add_special_tokens=True):
        ids = ids if ids[-1:] == [end] else [*ids, end]
        yield ids, [False] + [True] * (len(ids) - 1)


def _piecewise(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Segment]]) -> Iterator[list[int]]:
    """The ids of every segment of every conversation.

    A SentencePiece-like tokenizer puts a space before whatever it is given. Only the first segment should get it, so
    the others are tokenised together with the one before, and that one's ids taken off again.
    """
    texts = [[text for text, _ in segments] for segments in conversations]
    alone = iter(_ids(tokenizer, [text for group in texts for text in group]))
    if _starts_freely(tokenizer):
        yield from alone
        return
    joined = iter(_ids(tokenizer, [a + b for group in texts for a, b in pairwise(group)]))
    for group in texts:
        before: list[int] | None = None
        for own in (next(alone) for _ in group):
            both = next(joined) if before is not None else own
            start = len(before or ())
            yield both[start:] if both[:start] == (before or []) else own
            before = own


def _starts_freely(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text's tokens do not depend on being the first: true of byte-level tokenizers."""
    newline, letter, both = _ids(tokenizer, ["\n", "x", "\nx"])
    return newline + letter == both


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
    if not texts:
        return []
    batch = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids: list[list[int]] = batch["input_ids"]
    return ids
