"""Rows that a chat template cannot render, and texts of a row that are missing from its rendering.

Every text of a conversation (turns, thoughts, calls, tools) is searched for in the rendered text; the text of a
supervised turn only in the part that the model has to write there. A short text may be there by chance, so a second
conversation of the same shape, each text replaced by a unique word, is rendered too; once for each shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surefit.data.rows.messages import is_trained_on
from surefit.data.tokens.turns import Segment
from surefit.facts.thinking import FIELDS, OPENING
from surefit.task import Example, Message

Sight = tuple[str, str]
"""(name of an observation, what was seen)."""
Segments = list[list[Segment]]
"""The token examples of a conversation, each cut into context and supervised segments."""
TWICE = "written_twice"
LOST = ("turn_left_out", "part_left_out", "tools_left_out", "reasoning_left_out", "indentation_lost", TWICE)
"""Observations of `TemplateLossFinder`."""
UNCLOSED = "unclosed_thought"
BEFORE = "what comes before the thought"
SHAPES = 256
"""Shapes of conversations whose second rendering is kept."""
_TAG = re.compile(r"</?(?:think|thinking|thought|reasoning|seed:think|mm:think)>|\[/?THINK\]")
_OPENED = re.compile(r"(?:\A|\n|>)[^\S\n]*(<(?:think|thinking|thought|reasoning|seed:think|mm:think)>|\[THINK\])")
_BEGINS = re.compile(r"<[^<>/\s][^<>\s]*>|\[[A-Z_]+\]")
_IDS = re.compile(r'"(?:id|tool_call_id)": "[^"]*"|\d+')
"""The parts that differ between conversations of one shape."""
_SWITCH = re.compile(r"(?<!\S)/(?:no_?)?think(?!\S)")
"""Words that switch reasoning on and off in Qwen 3's and SmolLM3's messages; some templates remove them."""
RUN_WORDS = 3
"""Words that are searched for at a time: fewer are often there by chance."""
MOST_WORDS = 200
"""Words of a text that are searched for one after the other, where it is not there as a whole."""
_QUOTES = (('"', "'"), ("&#34;", "&#39;"), ("&quot;", "&#x27;"), ("&quot;", "&apos;"))
"""A double and a single quote as XML writes them: unchanged, by Jinja's filter, by Python, by the standard."""
_ROLES = {"system": "the system message", "user": "what the user says", "tool": "the tool's result"}


@dataclass(frozen=True)
class _Text:
    """A text of a conversation.

    Attributes:
        turn: the number of its message; -1 for a tool's.
        name: the observation that is made where it is not rendered.
        what: description.
        text: the text itself.
    """

    turn: int
    name: str
    what: str
    text: str


Write = Callable[[int, str, str, str], str]
"""(turn, observation, words, text) → the text in the copy."""


@dataclass
class TemplateLossFinder:
    """Finds the texts that a chat template leaves out of conversations.

    Attributes:
        render: a conversation → its segments; raises where the template cannot render it.
        shapes: shape of a conversation → numbers of the texts that the template leaves out.
    """

    render: Callable[[Example], Segments]
    shapes: dict[str, frozenset[int]] = field(default_factory=dict)

    def losses(self, example: Example, segments: Segments) -> list[Sight]:
        """Return the first text of each kind that is missing from the rendering of a conversation."""
        texts = _texts_of(example)
        stacks = _haystacks(example, texts, segments)
        missing = [_missing(text.text, stack) for text, stack in zip(texts, stacks, strict=True)]
        by_shape = self._lost_by_shape(example)
        prompt_texts = [text for segment_list in segments for text, is_learnt in segment_list if not is_learnt]
        opened = any(text.rstrip().endswith(OPENING) for text in prompt_texts)
        lost_texts: dict[str, str] = {}
        for number, (text, stack) in enumerate(zip(texts, stacks, strict=True)):
            loss = missing[number]
            if number in by_shape and (loss or _is_ambiguous(text.text, number, texts)):
                loss = "whole"
            if opened and text.what.startswith(BEFORE):  # the prompt opens a thought, so this becomes a part of it
                loss = "whole"
            name, description = text.name, text.what
            if loss == "part" and name == "turn_left_out":
                name, description = "part_left_out", f"a part of {description}"
            if text.turn < 0 and name == "part_left_out" and "tools_left_out" in lost_texts:
                continue
            if loss:
                lost_texts.setdefault(name, f"{description}: {text.text.strip()!r}")
            elif text.turn >= 0 and is_trained_on(example.messages[text.turn]) and _loses_indentation(text, stack):
                lost_texts.setdefault("indentation_lost", f"{text.what}: {text.text[:60]!r}")
        if twice := _written_twice(example, segments, "tools_left_out" not in lost_texts):
            lost_texts[TWICE] = twice
        return list(lost_texts.items())

    def _lost_by_shape(self, example: Example) -> frozenset[int]:
        probe = _with_words(example)
        shape = _IDS.sub("0", json.dumps([probe.messages, probe.tools], default=str))
        if shape not in self.shapes:
            if len(self.shapes) >= SHAPES:
                self.shapes.clear()
            self.shapes[shape] = self._lost(probe)
        return self.shapes[shape]

    def _lost(self, probe: Example) -> frozenset[int]:
        try:
            segments = self.render(probe)
        except Exception:  # whether the template renders a row is decided by the row itself
            return frozenset()
        texts = _texts_of(probe)
        stacks = _haystacks(probe, texts, segments)
        return frozenset(n for n, text in enumerate(texts) if _missing(text.text, stacks[n]))


def _written_twice(example: Example, segments: Segments, tools_written: bool) -> str | None:
    """Return a tool's result that contains the template's own text around it, or tools in the system message that the
    template also writes.
    """
    rendered = "\n".join("".join(text for text, _ in segment_list) for segment_list in segments)
    for turn, message in enumerate(example.messages):
        content = message.get("content")
        text = content.strip() if isinstance(content, str) else ""
        if message["role"] == "tool" and (opening := _BEGINS.match(text)):
            before = rendered.partition(text)[0] if text in rendered else ""
            if before.rstrip().endswith(opening[0]):
                return (
                    f"messages[{turn}] begins with {opening[0]}, which the chat template writes before a tool's result"
                )
        if message["role"] == "system" and example.tools and tools_written and '"parameters"' in text:
            names = [str(_function(tool).get("name")) for tool in example.tools]
            if all(f'"{name}"' in text for name in names):
                return f"messages[{turn}] has the tool {names[0]!r}, which the chat template writes from tools"
    return None


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def unclosed_thoughts(example: Example) -> Iterator[Sight]:
    """Yield the first supervised answer whose reasoning begins and never ends."""
    for turn, message in enumerate(example.messages):
        content = message.get("content")
        if is_trained_on(message) and isinstance(content, str) and (tag := _never_closed(content)):
            yield UNCLOSED, f"messages[{turn}] opens {tag} and does not close it: {content.strip()[:60]!r}"
            return


def _never_closed(content: str) -> str | None:
    *_, last_match = (None, *_OPENED.finditer(content))
    if last_match is None:
        return None
    opening = last_match[1]
    closing = opening.replace("<", "</", 1).replace("[", "[/", 1)
    return None if closing in content[last_match.end() :] else opening


def _haystacks(example: Example, texts: Sequence[_Text], segments: Segments) -> list[str]:
    """Return the text to search for each text: the supervised text of its turn, or the whole rendering for other
    texts."""
    full_text = "\n".join("".join(text for text, _ in segment_list) for segment_list in segments)
    learnt = [text for segment_list in segments for text, is_learnt in segment_list if is_learnt]
    turns = [n for n, message in enumerate(example.messages) if is_trained_on(message)]
    learnt_by_turn = dict(zip(turns, learnt, strict=True)) if len(turns) == len(learnt) else {}
    return [learnt_by_turn.get(text.turn, full_text) for text in texts]


def _missing(text: str, rendered: str) -> str:
    """Return "whole" or "part" where a text, or some of its lines or words, are missing from the rendered text, and ""
    where nothing is. White space at the ends of lines does not count, and neither do words that switch reasoning on or
    off: a template may remove them after reading them."""
    if _is_in(text, rendered):
        return ""
    lines = [piece for line in text.splitlines() for piece in _SWITCH.split(line) if piece.strip()]
    lost = [line for line in lines if not _is_in(line, rendered)]
    if not lost:
        return ""
    return "part" if len(lost) < len(lines) or _words_are_in(lost, rendered) else "whole"


def _words_are_in(lines: Sequence[str], rendered: str) -> bool:
    """Return whether most words of these lines are in the rendered text, `RUN_WORDS` at a time."""
    words = [word for line in lines for word in line.split()][:MOST_WORDS]
    matched: set[int] = set()
    for start in range(len(words)):
        end = start + RUN_WORDS
        if end <= len(words) and " ".join(words[start:end]) in rendered:
            matched |= {*range(start, end)}
    return 2 * len(matched) >= max(1, len(words))


def _is_in(text: str, rendered: str) -> bool:
    """Return whether a text is there, as it is or as JSON, JSON within JSON, Python or XML would quote it."""
    text = text.strip()
    if text in rendered:
        return True
    quoted = {json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)}
    quoted |= {json.dumps(form, ensure_ascii=ascii_only)[1:-1] for form in quoted for ascii_only in (False, True)}
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    quoted |= {repr(text)[1:-1], *(escaped.replace('"', double).replace("'", single) for double, single in _QUOTES)}
    return any(form in rendered for form in quoted)


def _is_ambiguous(text: str, number: int, texts: Sequence[_Text]) -> bool:
    """Return whether a match of a text may belong to another: it is short, or another text contains it too."""
    text = text.strip()
    return len(text) < 16 or any(text in other.text for n, other in enumerate(texts) if n != number)


def _loses_indentation(one: _Text, rendered: str) -> bool:
    """Return whether the first line of an answer loses the spaces before it: code does not run without them."""
    if one.name != "turn_left_out":
        return False
    line = next((line for line in one.text.splitlines() if line.strip()), "")
    spaces = line[: len(line) - len(line.lstrip())]
    return len(spaces.expandtabs()) > 1 and line.rstrip() not in rendered


def _texts_of(example: Example) -> list[_Text]:
    texts: list[_Text] = []

    def keep(turn: int, name: str, what: str, text: str) -> str:
        texts.append(_Text(turn, name, what, text))
        return text

    _copy(example, keep)
    return texts


def _with_words(example: Example) -> Example:
    """Return the conversation with a unique word in place of each text; the white space around a text stays."""
    count = 0

    def word(turn: int, name: str, what: str, text: str) -> str:
        nonlocal count
        count += 1
        stripped = text.strip()
        start = text.find(stripped)
        return f"{text[:start]}Zq{count:03d}x{text[start + len(stripped) :]}"

    return _copy(example, word)


def _copy(example: Example, write: Write) -> Example:
    """Return the conversation, each of its texts written by `write`, always in the same order."""
    messages = tuple(_message(turn, message, write) for turn, message in enumerate(example.messages))
    tools = tuple(_tool(tool, write) for tool in example.tools) if example.tools else example.tools
    return replace(example, messages=messages, tools=tools)


def _message(turn: int, message: Message, write: Write) -> Message:
    copy = dict(message)
    is_assistant, where = message["role"] == "assistant", f"messages[{turn}]"
    if is_assistant and is_trained_on(message):
        name = next((name for name in FIELDS if isinstance(text := message.get(name), str) and text.strip()), None)
        if name:
            copy[name] = write(turn, "reasoning_left_out", f"{where}.{name}", message[name])
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        if is_assistant and _TAG.search(content):
            copy["content"] = _thinking(turn, content, write, is_trained_on(message))
        else:
            description = _ROLES.get(message["role"], "the answer")
            copy["content"] = write(turn, "turn_left_out", f"{description} ({where})", content)
    if message.get("tool_calls"):
        copy["tool_calls"] = [_call(turn, call, write) for call in message["tool_calls"]]
    return copy


def _thinking(turn: int, content: str, write: Write, learnt: bool) -> str:
    """Write an answer with reasoning in its content: the text before, in, between and behind the thoughts.

    An answer that is only context may lose its reasoning, as templates leave it out of earlier turns.
    """
    where = f"messages[{turn}]"
    tags = [*_TAG.finditer(content)]
    pieces = []
    end, inside = 0, "/" in tags[0][0]
    for number, tag in enumerate([*tags, None]):
        text = content[end : tag.start()] if tag else content[end:]
        if text.strip() and (learnt or tag is None):
            name, description = "part_left_out", "what comes between two thoughts"
            if tag is None:
                name, description = "turn_left_out", "the answer after the thought"
            elif inside and number <= 1:
                name, description = "reasoning_left_out", "the thought"
            elif inside:
                description = "a second thought"
            elif number == 0:
                description = BEFORE
            text = write(turn, name, f"{description} ({where})", text)
        pieces += [text, tag[0] if tag else ""]
        if tag:
            end, inside = tag.end(), "/" not in tag[0]
    return "".join(pieces)


def _call(turn: int, call: Mapping[str, Any], write: Write) -> dict[str, Any]:
    function = call["function"]
    place = f"messages[{turn}].tool_calls"
    name = write(turn, "turn_left_out", f"the call ({place})", function["name"])
    arguments = _argument(turn, f"an argument of the call ({place})", function["arguments"], write)
    return {**call, "function": {**function, "name": name, "arguments": arguments}}


def _argument(turn: int, what: str, value: Any, write: Write) -> Any:
    if isinstance(value, Mapping):
        return {
            write(turn, "turn_left_out", what, key) if key.strip() else key: _argument(turn, what, inner, write)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_argument(turn, what, inner, write) for inner in value]
    return write(turn, "turn_left_out", what, value) if isinstance(value, str) and value.strip() else value


def _tool(tool: Mapping[str, Any], write: Write) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    name = function.get("name", "")
    copy = {**function, "name": write(-1, "tools_left_out", "the tool", name)}
    description = f"of the tool {name!r}"
    if isinstance(text := function.get("description"), str) and text.strip():
        copy["description"] = write(-1, "part_left_out", f"the description {description}", text)
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if isinstance(parameters, Mapping) and isinstance(properties, Mapping):
        copy["parameters"] = {**parameters, "properties": dict(_properties(properties, description, write))}
    return {**tool, "function": copy}


def _properties(properties: Mapping[str, Any], what: str, write: Write) -> Iterator[tuple[str, Any]]:
    for name, schema in properties.items():
        # The list of required parameters names them too, so the name stays unchanged.
        if isinstance(schema, Mapping) and isinstance(text := schema.get("description"), str) and text.strip():
            words = f"the description of the parameter {name!r} {what}"
            schema = {**schema, "description": write(-1, "part_left_out", words, text)}
        yield name, schema
