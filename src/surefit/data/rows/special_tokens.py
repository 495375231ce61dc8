"""Detection of texts that contain the tokenizer's own special tokens, or were already rendered by a template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from surefit.data.rows.messages import is_trained_on
from surefit.facts.thinking import FIELDS
from surefit.task import Example, Message

Sight = tuple[str, str]
"""(name of an observation, what was seen)."""
SPECIAL, RENDERED, RENDERED_TEXT = "special_tokens", "rendered_already", "rendered_text"
NO_BEGIN, BEGUN_TWICE = "no_begin", "begun_twice"
"""Observations: a text contains a special token; a turn was already rendered; a plain text was already rendered; a
plain text begins without the bos token, and the tokenizer does not add it; it begins with the bos token, and the
tokenizer adds it too."""
MOST_TURNS = 20
"""The most turn headers in a text that are checked."""
MOST_UNLIKE = 100
"""The most tokens that are searched for one by one."""
_LIKE_TOKENS = re.compile(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,40}\]")
_WRITTEN_BY_HAND = re.compile(
    r"[<\[]/?(?:\w+:)?(?:think|tool_calls?|tool_response|tools?|answer|reasoning|TOOL_CALLS|THINK)[>\]]"
)
"""Tags of reasoning and of calls: rows contain them on purpose, although some tokenizers call them special."""
_TURN = re.compile(
    r"<\|im_start\|>\w+\n|<\|start_header_id\|>\w+<\|end_header_id\|>|<start_of_turn>(?:user|model)\n|<\|turn>\w+\n"
    r"|\[INST\]|<<SYS>>|<\uff5c(?:User|Assistant)\uff5c>|<\|START_OF_TURN_TOKEN\|>|<\|start_of_role\|>\w+<"
    r"|<\|start\|>(?:user|assistant|system|developer)<|(?:^|\n)<\|(?:user|assistant|system|observation)\|>\s*\n"
    r"|<\|(?:user|assistant|system)\|>[^<]*<\|end\|>",
)
"""Headers of turns in chat templates: ChatML's, Llama 3's, Gemma's, Mistral's and Llama 2's, DeepSeek's, Cohere's,
Granite's, gpt-oss's, Zephyr's and Phi's."""
_PROMPT_IN_TEXT = re.compile(r"(?:^|\n)### ?(?:Response|Assistant|Answer):|(?:^|\n)(?:Assistant|ASSISTANT|Bot):")
"""Texts before the answer in prompts of base models: Alpaca's, Vicuna's."""
_IN_ONE_LINE = re.compile(r"(?<=[\s>])ASSISTANT:(?=\s)")
"""Vicuna's, where turns follow each other in one line, behind `USER: `."""


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer, as far as texts can hold them.

    Attributes:
        all: every token that no text is meant to hold.
        unlike: tokens of `all` that are not written in brackets, and have to be searched for one by one.
        bos, eos: the tokens for the beginning and the end of a text.
        begins: the chat template begins every conversation with `bos`.
        adds: the tokenizer begins every plain text with `bos`; None where that is not known.
        ends: tokens that end an answer or a text.
        asks: the chat template's generation prompt; empty where it has none.
        lacks: a plain text should begin with `bos`, and nothing adds it.
    """

    all: frozenset[str]
    unlike: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None
    begins: bool = False
    adds: bool | None = None
    ends: frozenset[str] = frozenset()
    asks: str = ""
    lacks: bool = False

    def sights(self, example: Example) -> Iterator[Sight]:
        """Yield the first text of each kind in an example: one that was already rendered, one with a special token."""
        if example.tokens is not None:
            return
        first_sights: dict[str, str] = {}
        if example.text is not None:
            first_sights.update(self._of_plain_text(example.text))
        for turn, message in enumerate(example.messages):
            for text in _texts(message):
                if token := self._held(text):
                    first_sights.setdefault(SPECIAL, f"messages[{turn}] has {token!r} in {_around(text, token)!r}")
                if why := self._rendered(text, is_trained_on(message)):
                    first_sights.setdefault(RENDERED, f"messages[{turn}] {why}: {text.strip()[:60]!r}")
        yield from first_sights.items()

    def _of_plain_text(self, text: str) -> Iterator[Sight]:
        """Yield what is seen in a plain text. Its own end token is fine: training adds none to a text that has it."""
        has_bos = self.bos is not None and text.startswith(self.bos)
        if self.lacks and not has_bos:
            yield NO_BEGIN, f"begins with {text[:60]!r}"
        if has_bos and self.adds:
            yield BEGUN_TWICE, f"begins with {text[:60]!r}"
        inner = text.removeprefix(self.bos or "").removesuffix(self.eos or "")
        asks = self._asks_in(inner)
        if why := self._turn_in(inner, True, asks) or asks:
            yield RENDERED_TEXT, f"{why}: {text.strip()[:60]!r}"
        elif token := self._held(inner):
            yield SPECIAL, f"{token!r} in {_around(inner, token)!r}"

    def _held(self, text: str) -> str | None:
        """Return the first special token in a text."""
        candidates = (match[0] for match in _LIKE_TOKENS.finditer(text))
        token = next((token for token in candidates if token in self.all), None)
        return token or next((token for token in self.unlike if token in text), None)

    def _rendered(self, text: str, learnt: bool) -> str | None:
        """Return how the text of a turn shows that it was already rendered; None if it does not."""
        if self.bos and self.begins and text.lstrip().startswith(self.bos):
            return f"begins with {self.bos}, which the chat template writes before every conversation"
        stripped = text.rstrip()
        end = next((end for end in self.ends if stripped.endswith(end)), None)
        if learnt and end:
            return f"ends with {end}, which the chat template writes after every answer"
        return self._turn_in(text, learnt, self._asks_in(text))

    def _turn_in(self, text: str, learnt: bool, asks: str | None) -> str | None:
        """Return a description of the turn header in a text, if it belongs to this tokenizer or template, or begins a
        prompt; a quoted header of another model is ordinary text.

        Args:
            asks: result of `_asks_in` on the text.
        """
        for number, turn in enumerate(islice(_TURN.finditer(text), MOST_TURNS)):
            is_own = asks is not None or any(token in self.all for token in _LIKE_TOKENS.findall(turn[0]))
            begins_prompt = number == 0 and not learnt and not _LIKE_TOKENS.sub("", text[: turn.start()]).strip()
            if is_own or begins_prompt:
                return f"contains a turn that is already rendered ({turn[0].strip()[:40]!r})"
        return None

    def _asks_in(self, text: str) -> str | None:
        """Return a description of the chat template's own generation prompt, or Alpaca's, in a text."""
        if self.asks and self.asks in text:
            return f"contains {self.asks!r}, the chat template's generation prompt"
        match = _PROMPT_IN_TEXT.search(text) or (_IN_ONE_LINE.search(text) if "USER: " in text else None)
        return f"holds {match[0].strip()!r}" if match else None


def build_special_tokens(
    tokens: Iterable[str],
    *,
    bos: str | None,
    eos: str | None,
    end_of_turn: str | None,
    padding: str | None,
    asked: tuple[str, str] | None,
    templated: bool,
    adds: bool | None,
) -> SpecialTokens:
    """Build the set of tokens that texts are searched for.

    Args:
        tokens: all special tokens of the tokenizer.
        bos, eos, end_of_turn, padding: the tokens for the beginning and the end of a text, the end of a turn, and
            padding.
        asked: a question as the chat template writes it, without and with the generation prompt; None where it cannot
            render one.
        templated: there is a chat template.
        adds: the tokenizer begins plain texts with `bos`; None where that is not known.
    """
    special = frozenset(token for token in tokens if token.strip() and not _WRITTEN_BY_HAND.fullmatch(token))
    unlike = tuple(token for token in special if not _LIKE_TOKENS.fullmatch(token))[:MOST_UNLIKE]
    before, after = asked or ("", "")
    asks = after[len(before) :].strip() if after.startswith(before) else ""
    asks = asks if len(asks) > 2 and not asks.isalpha() else ""
    begins = bos is not None and after.startswith(bos)
    distinct_bos = bos is not None and bos not in (eos, end_of_turn, padding)
    return SpecialTokens(
        all=special,
        unlike=unlike,
        bos=bos,
        eos=eos,
        begins=begins,
        adds=adds,
        ends=frozenset(end for end in (eos, end_of_turn) if end),
        asks=asks,
        # A bos that the template writes once, at the beginning, is no turn token. Without a template this is unknown.
        lacks=adds is False and distinct_bos and (not templated or (begins and after.count(bos or "") == 1)),
    )


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
