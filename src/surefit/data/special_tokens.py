"""Texts that hold the tokenizer's own special tokens, or were rendered before they became rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from surefit.data.messages import trained_on
from surefit.facts.thinking import FIELDS
from surefit.task import Example, Message

Sight = tuple[str, str]
"""The name of an observation, and what was seen."""
SPECIAL, RENDERED, RENDERED_TEXT, NO_BEGIN = "special_tokens", "rendered_already", "rendered_text", "no_begin"
"""Observations: a text holds a special token; a turn was rendered before; so was a plain text; a plain text begins
without the token for it, which the tokenizer does not add."""
MOST_UNLIKE = 100
"""Tokens that are looked for one by one, at most."""
_LIKE_TOKENS = re.compile(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,40}\]")
_WRITTEN_BY_HAND = re.compile(
    r"[<\[]/?(?:\w+:)?(?:think|tool_calls?|tool_response|tools?|answer|reasoning|TOOL_CALLS|THINK)[>\]]"
)
"""What rows hold on purpose, although some tokenizers call it special: tags of reasoning and of calls."""
_TURN = re.compile(
    r"<\|im_start\|>\w+\n|<\|start_header_id\|>\w+<\|end_header_id\|>|<start_of_turn>(?:user|model)\n|<\|turn>\w+\n"
    r"|\[INST\].*?\[/INST\]|<<SYS>>|<\uff5c(?:User|Assistant)\uff5c>|<\|START_OF_TURN_TOKEN\|>|<\|start_of_role\|>\w+<"
    r"|<\|start\|>(?:user|assistant|system|developer)<|(?:^|\n)<\|(?:user|assistant|system|observation)\|>\s*\n"
    r"|<\|(?:user|assistant|system)\|>[^<]*<\|end\|>",
    re.DOTALL,
)
"""How chat templates begin a turn: ChatML's, Llama 3's, Gemma's, Mistral's and Llama 2's, DeepSeek's, Cohere's,
Granite's, gpt-oss's, Zephyr's and Phi's."""
_PROMPT_IN_TEXT = re.compile(r"(?:^|\n)### ?(?:Response|Assistant|Answer):|(?:^|\n)(?:Assistant|ASSISTANT|Bot):")
"""How prompts of base models ask for an answer: Alpaca's, Vicuna's."""
_IN_ONE_LINE = re.compile(r"(?<=[\s>])ASSISTANT:(?=\s)")
"""Vicuna's, whose turns follow each other in one line, behind `USER: `."""


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer, as far as texts can hold them.

    Attributes:
        all: every one that no text is meant to hold.
        unlike: those of them that are not written in brackets, and have to be looked for one by one.
        begin: what the tokenizer or the template writes before everything (BOS); None where it writes nothing.
        ends: those that end an answer or a text.
        asks: what the chat template writes to ask for an answer; empty where it has none.
        lacking: `begin` where the model expects it and a plain text gets it from nobody.
    """

    all: frozenset[str]
    unlike: tuple[str, ...] = ()
    begin: str | None = None
    ends: frozenset[str] = frozenset()
    asks: str = ""
    lacking: str | None = None

    def sights(self, example: Example) -> Iterator[Sight]:
        """The first text of each kind in an example: one that was rendered before, one with a special token."""
        if example.tokens is not None:
            return
        found: dict[str, str] = {}
        if example.text is not None:
            text = example.text
            if self.lacking and not text.startswith(self.lacking):
                found[NO_BEGIN] = f"begins with {text[:60]!r}"
            text = text.removeprefix(self.lacking or "")
            if why := self._rendered(text, True) or self._asks_in(text):
                found[RENDERED_TEXT] = f"{why}: {text.strip()[:60]!r}"
            elif token := self._held(text):
                found[SPECIAL] = f"{token!r} in {_around(text, token)!r}"
        for turn, message in enumerate(example.messages):
            for text in _texts(message):
                if token := self._held(text):
                    found.setdefault(SPECIAL, f"messages[{turn}] has {token!r} in {_around(text, token)!r}")
                if why := self._rendered(text, trained_on(message)):
                    found.setdefault(RENDERED, f"messages[{turn}] {why}: {text.strip()[:60]!r}")
        yield from found.items()

    def _held(self, text: str) -> str | None:
        """The first special token in a text."""
        found = (match[0] for match in _LIKE_TOKENS.finditer(text))
        token = next((one for one in found if one in self.all), None)
        return token or next((one for one in self.unlike if one in text), None)

    def _rendered(self, text: str, learnt: bool) -> str | None:
        """How a text shows that it was rendered before."""
        if self.begin and text.lstrip().startswith(self.begin):
            return f"begins with {self.begin}, which is written before every conversation"
        bare = text.rstrip()
        end = next((end for end in self.ends if bare.endswith(end)), None)
        if learnt and end:
            return f"ends with {end}, which is written behind every answer"
        for turn in _TURN.finditer(text):
            if self._is_turn(turn, text, learnt):
                return f"holds a turn that is rendered already ({turn[0].strip()[:40]!r})"
        return None

    def _is_turn(self, turn: re.Match[str], text: str, learnt: bool) -> bool:
        """Whether a turn's head is this tokenizer's or template's, or begins a prompt; a quoted one of another model is
        text as any other."""
        own = any(token in self.all for token in _LIKE_TOKENS.findall(turn[0])) or bool(self._asks_in(text))
        return own or (not learnt and not _LIKE_TOKENS.sub("", text[: turn.start()]).strip())

    def _asks_in(self, text: str) -> str | None:
        """The chat template's own mark before an answer, or Alpaca's, in a text."""
        if self.asks and self.asks in text:
            return f"holds {self.asks!r}, with which the chat template asks for an answer"
        found = _PROMPT_IN_TEXT.search(text) or (_IN_ONE_LINE.search(text) if "USER: " in text else None)
        return f"holds {found[0].strip()!r}" if found else None


def special_tokens(
    tokens: Iterable[str],
    begin: str | None,
    ends: Iterable[str | None],
    asks: str | None,
    lacking: str | None = None,
) -> SpecialTokens:
    """What to look for in texts.

    Args:
        tokens: all special tokens of the tokenizer.
        begin: BOS, where it is written.
        ends: tokens that end answers and texts.
        asks: the generation prompt of the chat template.
        lacking: as `lacking_begin` has it.
    """
    named = frozenset(token for token in tokens if token.strip() and not _WRITTEN_BY_HAND.fullmatch(token))
    unlike = tuple(token for token in named if not _LIKE_TOKENS.fullmatch(token))[:MOST_UNLIKE]
    asks = (asks or "").strip()
    asks = asks if len(asks) > 2 and not asks.isalpha() else ""
    return SpecialTokens(named, unlike, begin, frozenset(end for end in ends if end), asks, lacking)


def lacking_begin(begin: str | None, others: Iterable[str | None], question: str | None) -> str | None:
    """Return the token for the beginning of a text (BOS), where a tokenizer that does not add it should: it is none of
    its other tokens, and the chat template begins a conversation with it.

    Args:
        others: tokens that end texts and turns, and padding.
        question: a question as the template renders it; None where there is no template, which says nothing.
    """
    if begin is None or begin in others:
        return None
    written = question is None or (question.startswith(begin) and question.count(begin) == 1)
    return begin if written else None


def _texts(message: Message) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    yield from (text for name in FIELDS if isinstance(text := message.get(name), str))
    for call in message.get("tool_calls") or ():
        yield json.dumps(call["function"]["arguments"], ensure_ascii=False)


def _around(text: str, token: str) -> str:
    at = text.find(token)
    return " ".join(text[max(0, at - 20) : at + len(token) + 20].split())
