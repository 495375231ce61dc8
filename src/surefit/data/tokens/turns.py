"""Conversion of a conversation to training texts: cut where the model has to write, and restarted where its template
rewrites earlier turns.

The model's prompt for turn i is the rendering of the turns before it with a generation prompt; the text that it has to
write is what the rendering of i + 1 turns adds. Most templates only append, and then one text holds every turn. Others
drop the reasoning of earlier turns, or move the system message, once another turn follows (Qwen3, gpt-oss, Mistral
Nemo): no single text has every turn after its own prompt, so a new text begins where the old one is no longer part of
the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from surefit.core.errors import DataError
from surefit.data.rows.messages import is_trained_on
from surefit.facts.thinking import CLOSING, OPENING, reasoning_of_message, split_think_tags
from surefit.facts.turn_end import turn_end_text
from surefit.task import Example, Message

Segment = tuple[str, bool]
"""A text, and whether the model has to write it."""
Rendering = tuple[int, bool]
"""(number of first turns, whether a generation prompt stands behind them)."""
_THOUGHT = re.compile(
    r"(?P<opened><think>|<\|channel>thought|<\|START_THINKING\|>)\s*+"
    r"(?P<closed></think>|<channel\|>|<\|END_THINKING\|>)?\s*+\Z"
)
"""A thought at the end of a prompt, as Qwen's and DeepSeek's, Google's and Cohere's templates write it."""


def build_template_refusal(reason: object) -> DataError:
    """Return the error about a conversation that the chat template cannot render, with the template's own reason."""
    return DataError(
        f"the model's chat template does not accept this conversation: {' '.join(str(reason).split())}",
        code="E4136",
        field="messages",
        help="change the order or the roles of the messages to what the template accepts",
    )


def plan_renderings(example: Example) -> list[Rendering]:
    """Return the renderings needed to cut a conversation: (turns, generation prompt behind them), the whole first."""
    messages = example.messages
    renderings = [(len(messages), messages[-1]["role"] != "assistant")]
    for i, message in enumerate(messages):
        if is_trained_on(message):
            renderings += [(i, True), (i + 1, False)]
    return list(dict.fromkeys(renderings))


def count_rendered_turns(example: Example) -> int:
    """Return the turns rendered to cut a conversation, each counted every time; 1 if there is no conversation.

    >>> count_rendered_turns(Example(({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"})))
    3
    """
    return sum(count for count, _ in plan_renderings(example)) if example.messages else 1


def truncate_conversation(example: Example, limit: int) -> Example:
    """Return a conversation up to the last answer for which at most `limit` turns are rendered, or up to its first
    answer; an example that is no conversation, or needs no more, is unchanged."""
    if count_rendered_turns(example) <= limit:
        return example
    rendered, kept_turns = 0, 0
    for i, message in enumerate(example.messages):
        if not is_trained_on(message):
            continue
        rendered += 2 * i + 1
        if kept_turns and rendered > limit:
            break
        kept_turns = i + 1
    return replace(example, messages=example.messages[:kept_turns]) if kept_turns else example


def answers_of(example: Example) -> tuple[Example, Example]:
    """Return a pair as two conversations, with the chosen and with the rejected answer: of each only the last turn is
    supervised, because the turns before it are the same in both.

    Raises:
        DataError: the rejected conversation has another prompt, or one of both does not end with an answer.
    """
    chosen, rejected = example.messages, example.rejected or ()
    if chosen[:-1] != rejected[:-1] or any(
        not turns or turns[-1]["role"] != "assistant" for turns in (chosen, rejected)
    ):
        raise DataError(
            "the chosen and the rejected conversation differ before their last turn, or do not end with an answer",
            code="E4841",
            field="rejected",
            help="a pair is two answers of the assistant to the same turns",
        )
    prompt = tuple(turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in chosen[:-1])
    return Example((*prompt, chosen[-1]), example.tools), Example((*prompt, rejected[-1]), example.tools)


def split_segments(
    example: Example, rendered: Mapping[Rendering, str], ends: Mapping[str, str] | None = None
) -> list[list[Segment]]:
    """Return the training texts, each in alternating segments: context, and the parts that the model has to write.

    Args:
        example: a conversation. If it does not end with an answer, the last text ends with the generation prompt.
        rendered: its `plan_renderings`, in their order.
        ends: for a template that writes no end of a turn, the text that begins the next one (facts/turn_end.py).

    Raises:
        DataError: the text with an answer does not start with its generation prompt, so the answer's place is unknown.
    """
    whole = next(iter(rendered.values()))
    asks = example.messages[-1]["role"] != "assistant"
    texts: list[list[Segment]] = []
    prefix = ""
    for i, message in enumerate(example.messages):
        if not is_trained_on(message):
            continue
        prompt, with_answer = rendered[i, True], rendered[i + 1, False]
        answer = _answer(example.messages[i - 1], message, prompt, with_answer)
        if answer is None:
            if asks:  # an earlier turn of a prompt, which is only shown
                continue
            raise _not_answering(i, message, prompt, with_answer)
        answer += turn_end_text(message, ends or {})
        if not texts or not prompt.startswith(prefix):
            texts.append([])
            prefix = ""
        texts[-1] += [(prompt[len(prefix) :], False), (answer, True)]
        prefix = prompt + answer
    if texts and whole.startswith(prefix):
        texts[-1].append((whole[len(prefix) :], False))
    elif asks or not texts:
        texts.append([(whole, False)])
    return [[(text, learnt) for text, learnt in segments if text] for segments in texts]


def _answer(given: Message, message: Message, prompt: str, upto: str) -> str | None:
    """Return the text that the model has to write behind the prompt; None if the two renderings do not show it.

    If the text with the answer does not start with the prompt, the answer is the text after the last turn and the end
    of the prompt: some templates write earlier turns in another way as soon as there is an answer (Mistral Nemo's
    system message), and some end the prompt with a thought that they leave out before the answer. A closed one (Gemma
    4) is context. An open one (DeepSeek-R1, QwQ) is completed: with the row's own thought and the closing tag.
    """
    if upto.startswith(prompt):
        return upto[len(prompt) :]
    thought = _THOUGHT.search(prompt)
    written = _text_after(
        prompt[: thought.start()] if thought else prompt, upto, str(given.get("content") or "").strip()
    )
    if written is None or thought is None:
        return written
    reasoning = reasoning_of_message(message).strip("\n")
    if thought["closed"]:
        # Command R7B's template writes the next prompt behind every answer, even without add_generation_prompt.
        unclear = (reasoning and reasoning in written) or written.endswith(thought[0])
        return None if unclear else written.removeprefix(CLOSING)
    if not reasoning or thought["opened"] != OPENING:
        return None
    answer = split_think_tags(written)[1] if CLOSING in written else written
    closing = f"\n{CLOSING}\n\n" if thought[0].endswith("\n") else CLOSING
    return reasoning + closing + answer.lstrip("\n")


def _text_after(start: str, text: str, given: str) -> str | None:
    """Return the text after `start`; or, if it starts otherwise, the text after the last turn's content and the rest of
    `start`."""
    if text.startswith(start):
        return text[len(start) :]
    _, turn, end = start.rpartition(given) if given else ("", "", "")
    _, separator, after = text.rpartition(turn + end) if turn and end else ("", "", "")
    return after if separator else None


def _not_answering(turn: int, message: Message, prompt: str, upto: str) -> DataError:
    common = next(
        (i for i, (a, b) in enumerate(zip(prompt, upto, strict=False)) if a != b), min(len(prompt), len(upto))
    )
    thought = _THOUGHT.search(prompt)
    if reasoning_of_message(message):
        help_text = "set data.thinking: drop, or turn reasoning on with model.chat_template_kwargs"
    elif thought and not thought["closed"]:
        help_text = (
            "this template's prompt begins a reasoning block: add reasoning to the rows (reasoning_content), or turn "
            "it off with the template's switch (model.chat_template_kwargs)"
        )
    else:
        help_text = 'set "weight": 0 on this turn, or choose a chat template whose answers follow its generation prompt'
    return DataError(
        f"the chat template's generation prompt for turn {turn} (assistant) ends with {prompt[common:][-40:]!r}, but "
        "it writes the answer without that text: training on this turn would teach text that no answer needs",
        code="E4139",
        field=f"messages[{turn}]",
        help=help_text,
    )
