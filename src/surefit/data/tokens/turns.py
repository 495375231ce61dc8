"""A conversation becomes texts to train on: cut where the model has to write, and anew where its template rewrites.

The model is asked for turn i with the rendering of the turns before it and a generation prompt; what it has to write is
what the rendering of i + 1 turns adds. Most templates go on from what they have written, and then one text holds every
turn. Others drop the reasoning of earlier turns, or move the system message, once another turn follows (Qwen3, gpt-oss,
Mistral Nemo): no single text has every turn as it was asked for, so a new one begins where the old one is no longer
what is shown.
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
"""The first so many turns, and whether a generation prompt stands behind them."""
_THOUGHT = re.compile(
    r"(?P<opened><think>|<\|channel>thought|<\|START_THINKING\|>)\s*+"
    r"(?P<closed></think>|<channel\|>|<\|END_THINKING\|>)?\s*+\Z"
)
"""A thought at the end of a prompt, as Qwen's and DeepSeek's, Google's and Cohere's templates write it."""


def build_template_refusal(reason: object) -> DataError:
    """The error about a conversation that the chat template does not take, with the template's own reason."""
    return DataError(
        f"the model's chat template refuses this conversation: {' '.join(str(reason).split())}",
        code="E4136",
        field="messages",
        help="change the order or the roles of the messages to what the template accepts",
    )


def plan_renderings(example: Example) -> list[Rendering]:
    """What has to be rendered to cut a conversation: (turns, with a generation prompt behind them), the whole first."""
    messages = example.messages
    needed = [(len(messages), messages[-1]["role"] != "assistant")]
    for i, message in enumerate(messages):
        if is_trained_on(message):
            needed += [(i, True), (i + 1, False)]
    return list(dict.fromkeys(needed))


def count_rendered_turns(example: Example) -> int:
    """Turns that are rendered to cut a conversation, each counted every time; 1 for what is no conversation.

    >>> count_rendered_turns(Example(({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"})))
    3
    """
    return sum(count for count, _ in plan_renderings(example)) if example.messages else 1


def truncate_conversation(example: Example, limit: int) -> Example:
    """Return a conversation up to the last answer for which at most `limit` turns are rendered, or up to its first
    answer; an example that is no conversation, or takes no more, as it is."""
    if count_rendered_turns(example) <= limit:
        return example
    taken, shown = 0, 0
    for i, message in enumerate(example.messages):
        if not is_trained_on(message):
            continue
        taken += 2 * i + 1
        if shown and taken > limit:
            break
        shown = i + 1
    return replace(example, messages=example.messages[:shown]) if shown else example


def split_segments(
    example: Example, rendered: Mapping[Rendering, str], ends: Mapping[str, str] | None = None
) -> list[list[Segment]]:
    """The texts to train on, each in segments: what the model is given and what it has to write, in turns.

    Args:
        example: a conversation. Where it does not end with an answer, the last text ends with what asks for one.
        rendered: its `plan_renderings`, in their order.
        ends: of a template that writes no end of a turn, what begins the next one (facts/turn_end.py).

    Raises:
        DataError: the text with an answer does not start with what asks for it, so nothing says what is to be written.
    """
    whole = next(iter(rendered.values()))
    asks = example.messages[-1]["role"] != "assistant"
    texts: list[list[Segment]] = []
    done = ""
    for i, message in enumerate(example.messages):
        if not is_trained_on(message):
            continue
        prompt, upto = rendered[i, True], rendered[i + 1, False]
        answer = _answer(example.messages[i - 1], message, prompt, upto)
        if answer is None:
            if asks:  # an earlier turn of a prompt, which is only shown
                continue
            raise _not_answering(i, message, prompt, upto)
        answer += turn_end_text(message, ends or {})
        if not texts or not prompt.startswith(done):
            texts.append([])
            done = ""
        texts[-1] += [(prompt[len(done) :], False), (answer, True)]
        done = prompt + answer
    if texts and whole.startswith(done):
        texts[-1].append((whole[len(done) :], False))
    elif asks or not texts:
        texts.append([(whole, False)])
    return [[(text, learnt) for text, learnt in segments if text] for segments in texts]


def _answer(given: Message, message: Message, prompt: str, upto: str) -> str | None:
    """What the model has to write behind the prompt; None where the two renderings do not say.

    Where the text with the answer does not start with the prompt, the answer is what follows the last turn and the end
    of the prompt: some templates write earlier turns in another way as soon as there is an answer (Mistral Nemo's
    system message), and some end the prompt with a thought that they leave out of what they write. A closed one
    (Gemma 4) is given, not learnt. An open one (DeepSeek-R1, QwQ) is completed: with the row's own thought and what
    closes it.
    """
    if upto.startswith(prompt):
        return upto[len(prompt) :]
    thought = _THOUGHT.search(prompt)
    rest = _text_after(prompt[: thought.start()] if thought else prompt, upto, str(given.get("content") or "").strip())
    if rest is None or thought is None:
        return rest
    own = reasoning_of_message(message).strip("\n")
    if thought["closed"]:
        # Command R7B's template writes the next prompt behind every answer, asked to or not.
        unclear = (own and own in rest) or rest.endswith(thought[0])
        return None if unclear else rest.removeprefix(CLOSING)
    if not own or thought["opened"] != OPENING:
        return None
    answer = split_think_tags(rest)[1] if CLOSING in rest else rest
    closing = f"\n{CLOSING}\n\n" if thought[0].endswith("\n") else CLOSING
    return own + closing + answer.lstrip("\n")


def _text_after(start: str, text: str, given: str) -> str | None:
    """What the text has behind `start`; or, where it starts otherwise, behind the last turn's content and what `start`
    has after that."""
    if text.startswith(start):
        return text[len(start) :]
    _, turn, end = start.rpartition(given) if given else ("", "", "")
    _, found, rest = text.rpartition(turn + end) if turn and end else ("", "", "")
    return rest if found else None


def _not_answering(turn: int, message: Message, prompt: str, upto: str) -> DataError:
    agreed = next(
        (i for i, (a, b) in enumerate(zip(prompt, upto, strict=False)) if a != b), min(len(prompt), len(upto))
    )
    thought = _THOUGHT.search(prompt)
    if reasoning_of_message(message):
        help_text = "set data.thinking: drop, or the switch with which the template asks for reasoning"
    elif thought and not thought["closed"]:
        help_text = (
            "this template asks for reasoning: add some to the rows (reasoning_content), or set the switch with which "
            "it asks for none (model.chat_template_kwargs)"
        )
    else:
        help_text = 'set "weight": 0 on this turn, or choose a chat template whose answers follow its generation prompt'
    return DataError(
        f"the model's chat template asks for the answer of turn {turn} (assistant) with {prompt[agreed:][-40:]!r}, but "
        "writes the answer without it; training on this turn would teach text that the model never has to write",
        code="E4139",
        field=f"messages[{turn}]",
        help=help_text,
    )
