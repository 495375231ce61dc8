"""Facts about a model's tokenizer, from the files in its folder: without transformers, and in a fraction of a
second."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from surefit.core.errors import ModelError
from surefit.core.limited import ExceedsLimit, TrialNotRun, run_limited
from surefit.core.reading import read_bytes, reason_of
from surefit.facts.chat_template import SPECIAL
from surefit.facts.gguf import CONTROL, USER_DEFINED, GgufHeader, read_gguf
from surefit.facts.model import ModelFacts
from surefit.facts.named_templates import DEFAULT, TOOL_USE, template_for, templates_in
from surefit.facts.template import TemplateExceeds, TemplateRefused, render_chat_template
from surefit.facts.thinking import message_as_template_reads, probe_template_reasoning
from surefit.facts.turn_end import ends_of_turn, first_in
from surefit.facts.validate_model_files import read_json_object, require_sound_special, require_sound_steps

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TOOLS = re.compile(r"\btools\b")
_ANSWER = "surefit"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer's files, tokens, ids and chat template.

    Attributes:
        file: its tokenizer.json, or the GGUF file; None where the folder has none, and then no id is known.
        tokens: number of all tokens, the added ones included.
        largest_id: largest id of all tokens.
        largest_plain_id: largest id of the tokens that are not added ones.
        added: added token → id: special tokens, and tokens that a user put behind the vocabulary.
        special: the special ones among them, which no text should contain.
        pad_token, eos_token, bos_token: their texts, None where the tokenizer has none; pad_id, eos_id, bos_id: their
            ids, None also where they are not known.
        stop_ids: ids at which generation stops, by generation_config.json, else by config.json; empty where both have
            none.
        chat_template: its text.
        tool_template: the text of the separate template for conversations with tools, where there is one.
        marks_generation: the template marks with {% generation %} which text the model writes.
        mentions_tools: the template uses the variable `tools`.
        turn_end: the text that the template writes after an assistant's answer; None where it has no template or the
            template raises on a question and an answer.
        ends_with_next: it writes nothing there, but a token at the start of the next turn, which ends an answer.
        end_of_turn: the first added token in `turn_end`, and its id; None where there is none.
    """

    file: Path | None = None
    tokens: int | None = None
    largest_id: int | None = None
    largest_plain_id: int | None = None
    added: Mapping[str, int] = field(default_factory=dict)
    special: frozenset[str] = frozenset()
    pad_token: str | None = None
    pad_id: int | None = None
    eos_token: str | None = None
    eos_id: int | None = None
    bos_token: str | None = None
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = field(default=None, repr=False)
    tool_template: str | None = field(default=None, repr=False)
    marks_generation: bool = False
    mentions_tools: bool = False
    turn_end: str | None = None
    ends_with_next: bool = False
    end_of_turn: str | None = None
    end_of_turn_id: int | None = None

    def template_for(self, tools: Any) -> str | None:
        """Return the template that a conversation with these tools is rendered with."""
        templates = {DEFAULT: self.chat_template, TOOL_USE: self.tool_template}
        return template_for({name: text for name, text in templates.items() if text}, tools)

    def without_template(self) -> TokenizerFacts:
        """Return the facts for a run that does not use the tokenizer's own chat template."""
        return replace(
            self, chat_template=None, tool_template=None, marks_generation=False, mentions_tools=False, turn_end=None,
            ends_with_next=False, end_of_turn=None, end_of_turn_id=None,
        )  # fmt: skip


def facts_of_tokenizer(model: ModelFacts) -> TokenizerFacts | None:
    """Return the facts about a model's tokenizer; None where it is not on this machine.

    Raises:
        ModelError: one of its files is damaged.
    """
    if model.path is not None:
        return tokenizer_facts(model.path, model.chat_template, model.tool_template)
    return gguf_tokenizer_facts(read_gguf(model.gguf), model.chat_template) if model.gguf is not None else None


def tokenizer_facts(path: Path, template: str | None = None, tool_template: str | None = None) -> TokenizerFacts:
    """Return the facts about the tokenizer in a model's folder.

    Args:
        template, tool_template: used in place of its own, the second for conversations with tools.

    Raises:
        ModelError: one of its files is damaged.
    """
    require_sound_tokenizer(path)
    config = _optional(path / "tokenizer_config.json")
    special_tokens = {role: _text(config, path, f"{role}_token") for role in ("pad", "eos", "bos")}
    vocabulary, added, special = _vocabulary(path / "tokenizer.json")
    file = path / "tokenizer.json" if vocabulary else None
    templates = {} if template else templates_in(path)
    template, tool_template = template or templates.get(DEFAULT), tool_template or templates.get(TOOL_USE)
    facts = _facts(path, file, vocabulary, added, special_tokens, _stop_ids(path), template, tool_template)
    return replace(facts, special=frozenset(special))


def gguf_tokenizer_facts(header: GgufHeader, chosen: str | None = None) -> TokenizerFacts:
    """Return the facts about the tokenizer in a GGUF file's header."""
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    added_ids = {number for number, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)} if kinds else set()
    vocabulary = {token: number for number, token in enumerate(header.tokens)}
    ids = {"pad": header.token_id("padding"), "eos": header.token_id("eos"), "bos": header.token_id("bos")}
    special_tokens = {role: None if number is None else header.tokens[number] for role, number in ids.items()}
    added = {header.tokens[number]: number for number in sorted(added_ids) if number < len(header.tokens)}
    template = chosen or header.metadata.get("tokenizer.chat_template")
    stops = () if ids["eos"] is None else (ids["eos"],)
    template = template if isinstance(template, str) else None
    facts = _facts(header.path, header.path, vocabulary, added, special_tokens, stops, template)
    controls = {number for number, kind in enumerate(kinds) if kind == CONTROL} if kinds else set()
    return replace(facts, special=frozenset(token for token, number in added.items() if number in controls))


def begins_texts(facts: TokenizerFacts) -> bool | None:
    """Return whether the tokenizer adds a BOS token before a plain text; None where its file does not determine it."""
    if facts.file is None or facts.file.suffix != ".json":
        return None
    try:
        return _writes_before(_entry(_text_of(facts.file), '"post_processor"'))
    except (ModelError, ValueError, RecursionError):
        return None


def _writes_before(processor: Any) -> bool:
    """Return whether a post-processor of tokenizer.json adds a token before a text."""
    if not isinstance(processor, Mapping):
        return False
    if processor.get("type") == "Sequence":
        return any(map(_writes_before, processor.get("processors") or ()))
    if processor.get("type") == "TemplateProcessing":
        return any("SpecialToken" in piece for piece in (processor.get("single") or ())[:1])
    return processor.get("type") in ("BertProcessing", "RobertaProcessing")


def known_tokens(facts: TokenizerFacts, tokens: Sequence[str]) -> list[str]:
    """Return the tokens that the tokenizer has already, as far as its vocabulary is on this machine."""
    existing = set(facts.added)
    if tokens and facts.file is not None:
        with suppress(ModelError):  # a fault of the file was reported when the facts were gathered
            existing |= set(
                _vocabulary(facts.file)[0] if facts.file.suffix == ".json" else read_gguf(facts.file).tokens
            )
    return [token for token in tokens if token in existing]


def _facts(
    place: Path,
    file: Path | None,
    vocabulary: Mapping[str, int],
    added: Mapping[str, int],
    named: Mapping[str, str | None],
    stops: tuple[int, ...],
    template: str | None,
    tool_template: str | None = None,
) -> TokenizerFacts:
    special = {f"{role}_token": text for role, text in named.items() if text}
    turn_end = _turn_end(place, template, special)
    end_of_turn = first_in(turn_end or "", added)
    shared_tokens = {token for token in added if token in vocabulary}
    largest_plain = _largest(vocabulary, {vocabulary[token] for token in shared_tokens})
    ids = {role: added.get(text, vocabulary.get(text)) for role, text in named.items() if text}
    return TokenizerFacts(
        file=file,
        tokens=len(vocabulary) + len(added) - len(shared_tokens) or None,
        largest_id=max((number for number in (largest_plain, *added.values()) if number is not None), default=None),
        largest_plain_id=largest_plain,
        added=added,
        **{f"{role}_token": text for role, text in named.items()},  # type: ignore[arg-type]
        **{f"{role}_id": number for role, number in ids.items()},  # type: ignore[arg-type]
        stop_ids=stops,
        chat_template=template,
        tool_template=tool_template,
        marks_generation=bool(template and _GENERATION.search(template)),
        mentions_tools=bool(_TOOLS.search(tool_template or template or "")),
        turn_end=turn_end,
        ends_with_next=bool(template and ends_of_turn(template, special, lambda: added)),
        end_of_turn=end_of_turn,
        end_of_turn_id=added.get(end_of_turn) if end_of_turn else None,
    )


def require_sound_tokenizer(path: Path) -> None:
    """Check a tokenizer's files before a library reads them (facts/validate_model_files.py); files may be missing.

    Raises:
        ModelError: a file is damaged, or would need too much time or memory in a library.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        require_sound_special(_optional(path / name), path / name)
    file = path / "tokenizer.json"
    if file.is_file():
        text = _text_of(file)
        require_sound_steps(text, file)
        _require_sound_ids(file, text)
        if _is_unusual(text) and (reason := _tried(file, file.stat().st_mtime_ns)) is not None:
            help_text = "download tokenizer.json again from the model's own repository"
            raise ModelError(f"the tokenizer cannot be used: {reason}", code="E2650", path=file, help=help_text)


_SIMPLE = 4_000
"""Characters of the longest expression that is not tried first; expressions of known models have under 1,000."""
_PATTERN = re.compile(r'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")')
_CLASS = re.compile(r"\\.|\[(?:[^\]\\]|\\.)*\]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_MANY_REPETITIONS = 6
TRIAL = (
    "The quick brown fox, it's 12,345.67 €!\n\n\tdef f(x):\n        return x\r\n",
    "Zażółć gęślą jaźń 你好世界 こんにちは Привет שלום 🎉",
    *("a" * 300 + "!", " " * 300 + "x", "0" * 200 + "." * 200, "ab" * 150 + "\n" * 50, ""),
    " ".join(letter * 40 + "!" for letter in string.ascii_letters + string.digits),
)
"""Texts that a tokenizer is tried on: words of several scripts, and runs that make expressions backtrack."""


def _is_unusual(text: str) -> bool:
    """Return whether a tokenizer.json has expressions that may need exponential time: a repeated group, or many
    repetitions in one alternative, or an expression that is not valid JSON. Published models have none of these."""
    for match in _PATTERN.finditer(text):
        try:
            pattern = _CLASS.sub("c", json.loads(match[1]))
        except ValueError:  # the library's error states the fault
            return True
        if len(pattern) > _SIMPLE or _REPEATED_GROUP.search(pattern):
            return True
        if any(len(re.findall(r"[*+{]", part)) >= _MANY_REPETITIONS for part in pattern.split("|")):
            return True
    return False


@lru_cache(maxsize=4)
def _tried(file: Path, changed: int) -> str | None:
    """Return why a tokenizer cannot be used, tried in a process of its own; None where it works."""
    try:
        reason: str | None = run_limited(f"{__name__}:try_tokenizer", str(file))
    except ExceedsLimit as error:
        return f"a short text {error}" if str(error).startswith("takes") else str(error)
    except TrialNotRun:
        return None
    return reason


def try_tokenizer(file: str) -> str | None:
    """Load a tokenizer.json and tokenize short texts with it; return the error, or None."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(file)
        for text in TRIAL:
            tokenizer.encode(text, add_special_tokens=False)
    except BaseException as error:  # a Rust panic of the library is no Exception
        return reason_of(error)
    return None


@contextmanager
def catch_tokenizer_panics(file: str | Path | None) -> Iterator[None]:
    """Convert a panic of the tokenizers library, which is no Exception, into a ModelError.

    Raises:
        ModelError: with the file and the library's message.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        problem = f"the tokenizer fails on a text: {reason_of(error)}"
        help_text = "download tokenizer.json again from the model's own repository"
        raise ModelError(problem, code="E2651", path=file, help=help_text) from None


def _require_sound_ids(file: Path, text: str) -> None:
    """Check that the vocabulary is not empty and that no token's id is negative.

    Raises:
        ModelError: it is, or one is.
    """
    vocabulary, added, _ = _vocabulary(file)
    help_text = "download tokenizer.json again from the model's own repository"
    if _EMPTY.search(text) and not vocabulary:
        raise ModelError("the vocabulary is empty", code="E2652", path=file, field="model.vocab", help=help_text)
    for key, numbers in (("model.vocab", vocabulary), ("added_tokens", added)):
        if (least := min(numbers.values(), default=0)) < 0:
            token = next(name for name, number in numbers.items() if number == least)
            problem = f"the token {token!r:.60} has the number {least}"
            raise ModelError(problem, code="E2653", path=file, field=key, help=help_text)


_EMPTY = re.compile(r'"vocab"\s*:\s*(?:\{\s*\}|\[\s*\])')


def _text_of(file: Path) -> str:
    try:
        return read_bytes(file).decode("utf-8")
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        problem = "cannot be read: not UTF-8"
    raise ModelError(problem, code="E2096", path=file, help="download the file again") from None


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _text(config: Mapping[str, Any], path: Path, name: str) -> str | None:
    """Return a special token's text; older folders have it in special_tokens_map.json only."""
    entry = config.get(name)
    if entry is None and name not in config:
        entry = _optional(path / "special_tokens_map.json").get(name)
    entry = entry.get("content") if isinstance(entry, Mapping) else entry
    return entry if isinstance(entry, str) else None


def _vocabulary(path: Path) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Return (token → id of the vocabulary, token → id of the added tokens, the special ones); all empty without a
    file."""
    return _parsed(path, path.stat().st_mtime_ns) if path.is_file() else ({}, {}, [])


@lru_cache(maxsize=2)
def _parsed(path: Path, changed: int) -> tuple[dict[str, int], dict[str, int], list[str]]:
    text = _text_of(path)
    try:
        added, vocabulary = _entry(text, '"added_tokens"'), _entry(text, '"vocab"')
    except (ValueError, RecursionError):
        document = read_json_object(path)
        model = document.get("model")
        added, vocabulary = document.get("added_tokens"), model.get("vocab") if isinstance(model, Mapping) else None
    entries = [entry for entry in added if isinstance(entry, Mapping)] if isinstance(added, list) else []
    special = [entry["content"] for entry in entries if entry.get("special") and isinstance(entry.get("content"), str)]
    return _token_ids(vocabulary), _added_ids(added), special


def _entry(text: str, key: str) -> Any:
    """Parse one value of tokenizer.json alone: the merge rules, not needed here, are the larger half of the file.

    Raises:
        ValueError: the key does not exist, or no JSON follows it.
    """
    match = re.compile(rf"{re.escape(key)}\s*:\s*").search(text)
    if match is None:
        raise ValueError(f"no {key}")
    return json.JSONDecoder().raw_decode(text, match.end())[0]


def _token_ids(vocabulary: Any) -> dict[str, int]:
    """Return token → id: a BPE or WordPiece vocabulary is such a map, a Unigram one lists [token, score] in id
    order."""
    if isinstance(vocabulary, list):
        pairs = [(entry[0], number) for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry]
        return {token: number for token, number in pairs if isinstance(token, str)}
    is_valid = isinstance(vocabulary, dict) and set(map(type, vocabulary.values())) == {int}
    return vocabulary if is_valid else {}


def _largest(vocabulary: Mapping[str, int], without: set[int]) -> int | None:
    return max(set(vocabulary.values()) - without if without else vocabulary.values(), default=None)


def _added_ids(added: Any) -> dict[str, int]:
    entries = [entry for entry in added if isinstance(entry, Mapping)] if isinstance(added, list) else []
    pairs = [(entry.get("content"), entry.get("id")) for entry in entries]
    return {token: number for token, number in pairs if isinstance(token, str) and type(number) is int}


def _stop_ids(path: Path) -> tuple[int, ...]:
    for name in (GENERATION_CONFIG, "config.json"):
        stated = _optional(path / name).get("eos_token_id")
        ids = stated if isinstance(stated, list) else [stated]
        if stop_ids := tuple(number for number in ids if isinstance(number, int)):
            return stop_ids
    return ()


def require_quick_template(template: Any, path: str | Path) -> None:
    """Check that a chat template, or each of several by name, renders quickly.

    Raises:
        ModelError: one needs more time or memory than any conversation needs.
    """
    for text in template.values() if isinstance(template, Mapping) else [template]:
        if isinstance(text, str):
            _turn_end(Path(path), text, SPECIAL)


def _turn_end(path: Path, template: str | None, special: Mapping[str, str]) -> str | None:
    if not template:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render_chat_template(
            template,
            [message_as_template_reads(turn, probe_template_reasoning(template)) for turn in turns],
            special=special,
        )
    except TemplateExceeds as error:
        raise ModelError(
            f"the chat template cannot be used: {error}",
            code="E2097",
            path=path,
            help="use the template from the model's own repository",
        ) from None
    except TemplateRefused:
        return None
    return text.rpartition(_ANSWER)[2] if _ANSWER in text else None
