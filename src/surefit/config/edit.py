"""Edit values in a config file's text without changing another character.

Only a value's own characters are replaced, and only a key's own line is removed: comments, order, quotes, spacing and
line ends stay. (YAML libraries write the whole file anew: ruamel.yaml, for one, indents it its own way and loses the
comment behind a key that is removed.) Every change is verified by parsing the result: it must hold the old values with
that one changed. A value that cannot be changed alone, for example one that an anchor shares with another key, is not
changed.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from surefit.config.load import compose_yaml, parse_yaml
from surefit.config.renamed import renamed_keys
from surefit.config.resolve import one_line_yaml
from surefit.core.errors import ConfigError, MachineError
from surefit.core.rundir import write_atomic

SHARED = "the change would reach other values too: an anchor (&, *) shares them; change it by hand"


@dataclass
class EditResult:
    """A config's text after the changes that could be made.

    Attributes:
        text: the new text.
        done: the dotted keys that were changed.
        refused: dotted key → why it was not changed.
    """

    text: str
    done: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


class _Step(NamedTuple):
    """A key on the path to the one that is changed: its mapping, its index in the mapping, and its nodes."""

    mapping: yaml.MappingNode
    number: int
    key: yaml.Node
    value: yaml.Node

    @classmethod
    def of(cls, mapping: yaml.MappingNode, number: int) -> _Step:
        key, value = mapping.value[number]
        return cls(mapping, number, key, value)


def edit_text(text: str, changes: Mapping[str, Any], path: Path) -> EditResult:
    """Set dotted keys to values; None removes a key, and its section if that is empty then.

    Args:
        text: the text of a config that `load_config` accepts.
        changes: dotted key → value.
        path: the file, for messages.
    """
    edited = EditResult(text)
    for dotted, value in changes.items():
        try:
            edited.text = _edit(edited.text, dotted.split("."), value, path)
            edited.done.append(dotted)
        except ConfigError as error:
            edited.refused[dotted] = error.message
    return edited


def rename_text(text: str, path: Path) -> EditResult:
    """Rename every key with an old name (config/renamed.py), in place where it stays in its section.

    Args:
        text: the text of a config.
        path: the file, for messages.
    """
    edited = EditResult(text)
    tree, _ = parse_yaml(text, path)
    for old, new, value, both in renamed_keys(tree if isinstance(tree, dict) else {}):
        if both:
            edited.refused[old] = f"{new} is also set: remove one of the two"
            continue
        try:
            edited.text = _rename(edited.text, old.split("."), new.split("."), value, path)
            edited.done.append(old)
        except ConfigError as error:
            edited.refused[old] = error.message
    return edited


def _rename(text: str, old: list[str], new: list[str], value: Any, path: Path) -> str:
    if old == new:
        return _edit(text, new, value, path)
    if old[0] != new[0]:
        if (old[0], new[0]) != ("adapter", "lora") or len(_find(_root(text), [new[0], old[1]])) == 1:
            return _edit(_edit(text, new, value, path), old, None, path)
        if section := _find(_root(text), old[:1]):
            text = _with_key(text, section[-1], new[0])
        old = [new[0], old[1]]
    return _edit(_with_key(text, _find(_root(text), old)[-1], new[-1]), new, value, path)


def _root(text: str) -> yaml.MappingNode:
    root = compose_yaml(text)
    assert isinstance(root, yaml.MappingNode)
    return root


def _with_key(text: str, step: _Step, name: str) -> str:
    return text[: step.key.start_mark.index] + name + text[step.key.end_mark.index :]


def write_edited(path: Path, text: str) -> None:
    """Replace a config file's text atomically, keeping its byte-order mark and mode; a symbolic link stays one.

    Raises:
        MachineError: the file cannot be written.
    """
    path = path.resolve()
    mark = codecs.BOM_UTF8 if path.read_bytes().startswith(codecs.BOM_UTF8) else b""
    mode = path.stat().st_mode
    try:
        write_atomic(path, mark + text.encode())
    except MachineError as error:
        error.help = "make the file and its directory writable; nothing was changed"
        raise
    with contextlib.suppress(OSError):  # some file systems have no modes
        os.chmod(path, mode)


def _edit(text: str, keys: list[str], value: Any, path: Path) -> str:
    tree, _ = parse_yaml(text, path)
    root = compose_yaml(text)
    if root is None:  # the text has only comments
        first, *inner = keys
        gap = "\n" if text and not text.endswith("\n") else ""
        return text if value is None else f"{text}{gap}{first}: {one_line_yaml(_nested(inner, value))}\n"
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("the file has no keys: correct it by hand first", code="E2200")
    steps = _find(root, keys)
    if value is None and len(steps) < len(keys):
        return text
    if value is not None and steps and len(steps) < len(keys) and not _may_hold_keys(steps[-1].value):
        section = ".".join(keys[: len(steps)])
        raise ConfigError(f"{section} is a value, not a section with keys: correct it by hand first", code="E2201")
    if value is None:
        while len(steps) > 1 and len(steps[-1].mapping.value) == 1:
            steps, keys = steps[:-1], keys[:-1]
        new = _without(text, steps[-1])
    elif len(steps) == len(keys):
        new = _replaced(text, steps[-1].value, value)
    else:
        new = _added(text, steps[-1].value if steps else root, keys[len(steps) :], value)
    try:
        reread, _ = parse_yaml(new, path)
    except ConfigError:
        raise ConfigError("SureFit cannot edit this notation; change it by hand", code="E2001") from None
    if reread != _expected(tree, keys, value):
        raise ConfigError(SHARED, code="E2002")
    return new


def _may_hold_keys(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode) or node.tag == "tag:yaml.org,2002:null"


def _find(root: yaml.MappingNode, keys: list[str]) -> list[_Step]:
    """Return the steps of the keys that exist, from the outermost."""
    steps: list[_Step] = []
    node: yaml.Node = root
    for key in keys:
        if not isinstance(node, yaml.MappingNode):
            break
        index = next((i for i, (child, _) in enumerate(node.value) if child.value == key), None)
        if index is None:
            break
        steps.append(_Step.of(node, index))
        node = steps[-1].value
    return steps


def _expected(tree: Any, keys: list[str], value: Any) -> Any:
    """Return the values that the new text must hold."""
    tree = copy.deepcopy(tree)
    section = tree
    for key in keys[:-1]:
        section[key] = section.get(key) or {}
        section = section[key]
    if value is None:
        section.pop(keys[-1], None)
    else:
        section[keys[-1]] = value
    return tree


def _replaced(text: str, node: yaml.Node, value: Any) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    gap = " " if text[start - 1 : start] == ":" else ""  # a key without a value
    return text[:start] + gap + one_line_yaml(value) + text[end:]


def _without(text: str, step: _Step) -> str:
    entries = step.mapping.value
    if step.mapping.flow_style:
        if step.number + 1 < len(entries):
            start, end = step.key.start_mark.index, entries[step.number + 1][0].start_mark.index
        else:
            previous_mark = entries[step.number - 1][1].end_mark if step.number else step.mapping.start_mark
            start, end = previous_mark.index + (step.number == 0), step.value.end_mark.index
        return text[:start] + text[end:]
    start = text.rfind("\n", 0, step.key.start_mark.index) + 1
    return text[:start] + text[_line_end(text, step) :]


def _added(text: str, node: yaml.Node, keys: list[str], value: Any) -> str:
    """Return the text with a new key, as the last of its mapping."""
    if not isinstance(node, yaml.MappingNode):
        return _replaced(text, node, _nested(keys, value))
    first, *inner = keys
    value_text = one_line_yaml(_nested(inner, value) if inner else value)
    if node.flow_style:
        position = node.value[-1][1].end_mark.index if node.value else node.start_mark.index + 1
        return f"{text[:position]}{', ' if node.value else ''}{first}: {value_text}{text[position:]}"
    last = _Step.of(node, len(node.value) - 1)
    indent = " " * last.key.start_mark.column
    position = _line_end(text, last)
    end = "\r\n" if "\r\n" in text else "\n"
    gap = "" if text[:position].endswith("\n") else end
    return f"{text[:position]}{gap}{indent}{first}: {value_text}{end}{text[position:]}"


def _nested(keys: list[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def _line_end(text: str, step: _Step) -> int:
    """Return the index behind the line break that ends an entry of a block mapping."""
    node = step.value
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        # A block collection "ends" where the next token starts, behind comments that belong to other keys.
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    end = max(node.end_mark.index, step.key.end_mark.index)
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        return end
    return text.find("\n", end) + 1 or len(text)
