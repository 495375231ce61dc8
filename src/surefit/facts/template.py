"""The chat template, rendered as transformers renders it, without importing it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NoReturn

from surefit.core.limited import SECONDS, ExceedsLimit, TrialNotRun, run_limited

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

# The tag is transformers' own. `if true` replaces it in place, so that its whitespace dashes keep their meaning.
_OPENING = re.compile(r"(\{%-?\s*)generation(\s*-?%\})")
_CLOSING = re.compile(r"(\{%-?\s*)endgeneration(\s*-?%\})")


MAX_LOOPS = 500_000
"""Iterations of all loops in one rendering. A conversation of a thousand messages needs a few thousand."""
MAX_TEXT = 64 * 2**20
"""Characters of a text that a template builds on its way, and of what it returns."""
MAX_WIDTH = 100_000
"""The largest number that a template may pass to a function or a filter, for widths and counts."""
MAX_PATTERN = 200
"""Characters of a date pattern (strftime)."""
PLAIN_FILTERS = frozenset((
    "capitalize", "count", "counted", "default", "d", "dictsort", "e", "escape", "first", "float", "int", "items",
    "join", "last", "length", "list", "lower", "map", "reject", "rejectattr", "replace", "reverse", "round", "safe",
    "select", "selectattr", "sized", "sort", "string", "title", "tojson", "trim", "unique", "upper",
))  # fmt: skip
PLAIN_METHODS = frozenset((
    "append", "capitalize", "count", "endswith", "find", "get", "items", "join", "keys", "lower", "lstrip", "pop",
    "removeprefix", "removesuffix", "replace", "rstrip", "split", "splitlines", "startswith", "strip", "title",
    "update", "upper", "values",
))  # fmt: skip
"""Filters and methods that are as fast as a copy of their text. A template with others is tried in a subprocess."""
PLAIN_NUMBER = 10_000
_left = ContextVar("turns of loops that are left", default=MAX_LOOPS)
_until = ContextVar("processor time at which the rendering ends", default=float("inf"))
_trusted = ContextVar("templates are rendered without a trial", default=False)
_too_slow: dict[str, str] = {}
"""Template → the limit that it exceeded on a short conversation: it is not rendered again."""
SHORT = 4
"""Messages of a short conversation."""
_WIDE = re.compile(r"\d{6,}")


class TemplateRefused(Exception):
    """The template raised on these messages, or is no valid template."""


class TemplateExceeds(TemplateRefused):
    """The template needs more loops or longer texts than any conversation needs: it may never end."""


class TemplateTooSlow(TemplateExceeds):
    """The template used more processor time than the limit."""


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    special: Mapping[str, str] | None = None,
    switches: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation with a chat template.

    Args:
        template: the template's text.
        messages: the conversation, as for `apply_chat_template`.
        tools: JSON-schema functions.
        add_generation_prompt: end with the prompt for an answer.
        special: `bos_token` and the other special tokens, by name.
        switches: other variables that it reads, such as `enable_thinking`.

    Raises:
        TemplateRefused: with the template's own reason.
        TemplateExceeds: it exceeded the limits above.
    """
    if template in _too_slow:
        raise TemplateExceeds(_too_slow[template])
    variables = {
        "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt,
        **(special or {}), **(switches or {}),
    }  # fmt: skip
    try:
        _require_tried(template)
        try:
            return _rendered(template, variables)
        except TemplateTooSlow:  # a machine that pauses for a moment is not the template's fault
            return _rendered(template, variables)
    except TemplateExceeds as error:
        if len(messages) <= SHORT:
            _too_slow[template] = str(error)
        raise
    except TemplateRefused:
        raise
    except Exception as error:  # a template is foreign code: it can fail in any way
        raise TemplateRefused(str(error)) from error


def _rendered(template: str, given: dict[str, Any]) -> str:
    _left.set(MAX_LOOPS)
    _until.set(time.thread_time() + SECONDS)
    return "".join(_within_bounds(_compiled(template).generate(given)))


def variables_of(template: str) -> frozenset[str]:
    """Return the variables that the template reads and does not set itself: messages, tools, and its switches.

    Raises:
        TemplateRefused: it is no valid template.
    """
    from jinja2 import TemplateError, meta

    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(_readable(template))))
    except TemplateError as error:
        raise TemplateRefused(str(error)) from error


def _within_bounds(parts: Iterator[str]) -> Iterator[str]:
    length = 0
    for part in parts:
        length += len(part)
        if length > MAX_TEXT:
            raise TemplateExceeds(f"it writes more than {MAX_TEXT:,} characters")
        yield part


def _require_tried(template: str) -> None:
    """Try a template that is not plain in a process of its own, once.

    Raises:
        TemplateExceeds: it needed too much time there, or too much memory.
    """
    if not _trusted.get() and (reason := _tried(template)) is not None:
        raise TemplateExceeds(reason)


@lru_cache(maxsize=16)
def _tried(template: str) -> str | None:
    """Return the limit that a template exceeds in a process of its own; None where it is plain or ended in time."""
    if _is_plain(_environment().parse(_readable(template))):
        return None
    try:
        refused: str | None = run_limited(f"{__name__}:try_template", template)
    except ExceedsLimit as error:
        return f"it {error}" if str(error).startswith("takes") else str(error)
    except TrialNotRun:  # its time is also counted while it is rendered
        return None
    return refused


def try_template(template: str) -> str | None:
    """Render a few conversations; return the limit that the template exceeds, if any."""
    _trusted.set(True)
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    question, system = {"role": "user", "content": "Some words, 12.\n" * 20}, {"role": "system", "content": "Be kind."}
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    for turns in ([question], [question, answer], [system, question, answer, question], [question, answer] * 20):
        for offered in (None, tools):
            try:
                render_chat_template(
                    template,
                    turns,
                    tools=offered,
                    add_generation_prompt=turns[-1] is question,
                    special={"bos_token": "<s>", "eos_token": "</s>"},
                )
            except TemplateExceeds as error:
                return str(error)
            except TemplateRefused:
                continue
    return None


def _is_plain(tree: nodes.Template) -> bool:
    """Return whether a template has no single call that could run long; repeated calls are counted anyway."""
    from jinja2 import nodes

    for node in tree.find_all((nodes.Filter, nodes.Call, nodes.Mul, nodes.Pow, nodes.Const)):
        if isinstance(node, (nodes.Mul, nodes.Pow)):
            return False
        if isinstance(node, nodes.Const):
            if isinstance(node.value, (int, float)) and abs(node.value) > PLAIN_NUMBER:
                return False
        elif isinstance(node, nodes.Filter):
            if node.name not in PLAIN_FILTERS:
                return False
        elif isinstance(node, nodes.Call):
            function = node.node
            if isinstance(function, nodes.Getattr) and function.attr in PLAIN_METHODS:
                continue
            if not isinstance(function, nodes.Name) or function.name == "lipsum":
                return False
    return True


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    return _environment().from_string(_readable(template))


def _readable(template: str) -> str:
    return _CLOSING.sub(r"\1endif\2", _OPENING.sub(r"\1if true\2", template))


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import nodes
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        """Sandboxed environment that counts loop iterations, and checks texts' sizes before they are built."""

        intercepted_binops = frozenset(("*", "**", "+", "%"))

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            for loop in list(tree.find_all(nodes.For)):
                loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
            for holder in [tree, *tree.find_all(nodes.Node)]:
                _wrap_texts(holder, nodes.Concat, nodes.Filter)
            return tree

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _require_time()
            _require_small(operator, left, right)
            return _sized(super().call_binop(context, operator, left, right))

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            _require_time()
            text = getattr(__obj, "__self__", None)
            _require_narrow(*args, *kwargs.values(), text)
            if isinstance(text, str):
                _require_no_growth(__obj.__name__, text, args)
            return _sized(super().call(__context, __obj, *args, **kwargs))

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    for filter_name, function in list(environment.filters.items()):
        environment.filters[filter_name] = _narrow(function)
    environment.filters |= {"counted": _Counted, "sized": _sized}
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _wrap_texts(holder: Any, concat: Any, filtered: Any) -> None:
    """Wrap concatenations `a ~ b`, which call no function of the environment, so that their size is checked."""
    for name, value in list(holder.iter_fields()):
        if isinstance(value, concat):
            setattr(holder, name, filtered(value, "sized", [], [], None, None, lineno=value.lineno))
        elif isinstance(value, list):
            setattr(holder, name, [
                filtered(item, "sized", [], [], None, None, lineno=item.lineno) if isinstance(item, concat) else item
                for item in value
            ])  # fmt: skip


class _Counted:
    """Items of a loop; every iteration of every loop is counted."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            remaining = _left.get() - 1
            if remaining < 0:
                raise TemplateExceeds(f"its loops run more than {MAX_LOOPS:,} turns")
            _left.set(remaining)
            if not remaining % 64:
                _require_time()
            yield item


def _require_time() -> None:
    if time.thread_time() > _until.get():
        raise TemplateTooSlow(f"it needs more than {SECONDS} s")


def _require_no_growth(method: str, text: str, args: tuple[Any, ...]) -> None:
    """Check the size of a string method's result before the method builds it."""
    if method == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        _sized_in_advance(len(text) + text.count(args[0]) * len(args[1]))
    elif method == "format":
        _sized_in_advance(text.count("{") * sum(len(value) for value in args if isinstance(value, str)))
    elif method == "join" and args and isinstance(args[0], (list, tuple)):
        _sized_in_advance(len(text) * len(args[0]))


def _now(pattern: str) -> str:
    if len(pattern) > MAX_PATTERN:
        raise TemplateExceeds(f"it formats a date with a pattern of {len(pattern):,} characters")
    return datetime.now().strftime(pattern)


def _sized(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_TEXT:
        raise TemplateExceeds(f"it writes a string of {len(value):,} characters")
    return value


def _require_small(operator: str, left: Any, right: Any) -> None:
    """Check the size of a product, a power or a padded number before it is computed."""
    for text, count in ((left, right), (right, left)):
        if operator == "*" and isinstance(text, (str, list, tuple)) and isinstance(count, int):
            _sized_in_advance(len(text) * count)
    if operator == "**" and isinstance(left, (int, float)) and isinstance(right, (int, float)) and abs(right) > 64:
        raise TemplateExceeds(f"it raises a number to the power of {right}")
    if operator == "%" and isinstance(left, str):
        _require_narrow(left, right)


def _sized_in_advance(length: int) -> None:
    if length > MAX_TEXT:
        raise TemplateExceeds(f"it writes a string of {length:,} characters")


def _require_narrow(*values: Any) -> None:
    """Check numbers, and format strings with numbers in them, that are widths or counts."""
    for value in values:
        too_wide = isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_WIDTH
        if too_wide or (isinstance(value, str) and len(value) < 1_000 and "{:" in value and _WIDE.search(value)):
            raise TemplateExceeds(f"it requests {str(value)[:40]} characters or items")
        if isinstance(value, str) and len(value) < 1_000 and "%" in value and _WIDE.search(value):
            raise TemplateExceeds(f"it requests {value[:40]} characters")


def _narrow(function: Any) -> Any:
    """Wrap a filter so that its own arguments are checked; the environment that Jinja passes before them is not."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _require_time()
        _require_narrow(*args[1:], *kwargs.values())
        if function.__name__ == "do_replace" and len(args) > 3:
            _require_no_growth("replace", str(args[1]), args[2:])
        return _sized(function(*args, **kwargs))

    return checked


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefused(message)
