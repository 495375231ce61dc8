"""Mapping of a tool's config keys to an `ImportedConfig`: a table maps each key, code adds what depends on two."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from surefit.config.load import LoadedConfig, expected_text
from surefit.config.schema import SureFitConfig
from surefit.core.env import redact
from surefit.core.errors import ConfigError, SureFitError
from surefit.core.units import truncate_text
from surefit.facts.setup import SettingLocation, Setup
from surefit.importers.convert import UNSET, Convert, InvalidValue, Unmappable
from surefit.importers.paths import find_missing_files
from surefit.importers.reasons import unmapped_reason
from surefit.importers.result import ImportedConfig, UnmappedKey
from surefit.importers.values import expected_value, is_placeholder, value_kind

COMMENT = ("_", "//", "#")
"""Prefixes of keys that the tool reads as comments."""
SLIP = 0.87
"""The least similarity of a misspelled key to the real one: adam_eps and adam_epsilon (0.8) are two different keys."""
SLIPS = 2
"""The largest difference in length of a misspelled key: hub_model_revision is not model_revision."""


@dataclass(frozen=True)
class KeyMapping:
    """Where a key of a tool's config is mapped to.

    Attributes:
        read: the key's value → a plain value.
        config: the dotted key of SureFit's config, or None.
        setup: the attribute of `Setup`, or None.
        carry: the plain value → the value in SureFit's config, if they differ.
    """

    read: Convert
    config: str | None = None
    setup: str | None = None
    carry: Convert = lambda value: value


@dataclass(frozen=True)
class ToolSchema:
    """The keys that a tool's config may have, and how they are read.

    Attributes:
        name: the tool's name, as in `Setup.tool`.
        keys: key → its mapping; nested keys with dots.
        known: further keys that the tool knows.
        gone: keys that earlier releases knew → what to write instead.
        once: removed or deprecated keys whose meaning has not changed, only the name: they are read under their old
            meaning.
        defaults: dotted SureFit key → (the tool's key, its default value in the tool).
        finish: adds what depends on several keys.
        open_sections: mappings with keys that are not all known; a key not in `keys` is lost, not unknown.
        deprecated: keys that the tool still accepts with a warning → what to write instead.
        passes_over: whether the tool silently ignores this unknown key.
        extensions: keys of programs built on the tool, which are not misspellings of its keys.
        off_is_unset: whether a removed key with the value false or 0 means nothing.
        conflicts: adds the errors of values that are wrong together.
        aliases: keys of other tools → this tool's name for them.
        takes_repeated: whether the last value of a key that is set twice counts; otherwise the tool raises.
    """

    name: str
    keys: Mapping[str, KeyMapping]
    known: frozenset[str]
    gone: Mapping[str, str]
    once: Mapping[str, KeyMapping] = field(default_factory=dict)
    defaults: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    finish: Callable[[ConfigDraft], None] = lambda draft: None
    open_sections: frozenset[str] = frozenset()
    deprecated: Mapping[str, str] = field(default_factory=dict)
    passes_over: Callable[[str], bool] = lambda key: False
    extensions: frozenset[str] = frozenset()
    off_is_unset: bool = False
    conflicts: Callable[[ConfigDraft], None] = lambda draft: None
    aliases: Mapping[str, str] = field(default_factory=dict)
    takes_repeated: bool = True

    def knows(self, key: str) -> bool:
        """Return whether the tool accepts this key."""
        return key in self.keys or key in self.known

    def nearest(self, key: str) -> str | None:
        """Return the known key that a misspelled one probably stands for, or None."""
        parent, dot, leaf = key.rpartition(".")
        names = {name.removeprefix(parent + dot) for name in (*self.keys, *self.known) if name.startswith(parent + dot)}
        close = difflib.get_close_matches(leaf, names, n=1, cutoff=0.75)
        return f"{parent}{dot}{close[0]}" if close else None

    def misspelt(self, key: str) -> str | None:
        """Return the known key that a key equals except for a typo, a missing end (gradient_acumulation for
        gradient_accumulation_steps) or a missing prefix (dropout for lora_dropout), or None."""
        parent, dot, leaf = key.rpartition(".")
        names = {name.removeprefix(parent + dot) for name in (*self.keys, *self.known) if name.startswith(parent + dot)}
        similar = [name for name in names if abs(len(name) - len(leaf)) <= SLIPS]
        containing = [name for name in names if leaf in name.split("_")]
        parts = leaf.count("_") + 1
        heads = {"_".join(name.split("_")[:parts]): name for name in names} if parts > 1 else {}
        heads = {} if leaf in heads else heads  # a key of its own: chat_template beside chat_template_path
        close = (
            difflib.get_close_matches(leaf, similar, n=1, cutoff=SLIP)
            or [heads[start] for start in difflib.get_close_matches(leaf, heads, n=1, cutoff=SLIP)]
            or (containing if len(containing) == 1 else [])
        )
        return f"{parent}{dot}{close[0]}" if close else None

    def is_section(self, key: str) -> bool:
        """Return whether the keys inside this key are read one by one."""
        prefix = f"{key}."
        return any(name.startswith(prefix) for name in (*self.keys, *self.known))


@dataclass(kw_only=True)
class SetupNotes:
    """What a file says about a run, and what is wrong with its keys, on the way to a `Setup`."""

    setup: dict[str, Any] = field(default_factory=dict)
    places: dict[str, SettingLocation] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    deprecated: dict[str, str] = field(default_factory=dict)
    out_of_range: dict[str, str] = field(default_factory=dict)
    meant: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    problems: list[SureFitError] = field(default_factory=list)

    def to_setup(self, tool: str, **more: Any) -> Setup:
        """Return everything recorded so far, and `more` attributes, as a `Setup`."""
        return Setup(
            tool=tool, places=self.places, gone=self.gone, ignored=self.ignored, deprecated=self.deprecated,
            out_of_range=self.out_of_range, meant=self.meant, unknown=tuple(self.unknown),
            passed_over=tuple(self.passed_over), missing=self.missing, **more, **self.setup,
        )  # fmt: skip


@dataclass
class ConfigDraft(SetupNotes):
    """The state of a config file while its keys are read."""

    tool: ToolSchema
    path: Path
    tree: dict[str, Any]
    lines: Mapping[str, int]
    repeated: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    flat: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    parts: list[UnmappedKey] = field(default_factory=list)
    mapped: set[str] = field(default_factory=set)
    judged: dict[str, UnmappedKey] = field(default_factory=dict)
    lost: dict[str, UnmappedKey] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    whole_run: bool = True
    rows_known: bool = True

    def line(self, key: str) -> int | None:
        """Return the line of a key, or of its nearest parent with a line."""
        while key and key not in self.lines:
            key = re.sub(r"(\.[^.\[]*|\[\d+\]|^[^.\[]*)$", "", key)
        return self.lines.get(key)

    def place(self, key: str) -> SettingLocation:
        """Return the location of a key."""
        return SettingLocation(key, str(self.path), self.line(key))

    def says(self, key: str) -> bool:
        """Return whether the file sets this key."""
        return self.flat.get(key) is not None

    def say(self, attribute: str, value: Any, key: str) -> None:
        """Record the value that a key sets for an attribute of `Setup`."""
        if value is not UNSET:
            self.setup[attribute] = value
            self.places[attribute] = self.place(key)
        self.places.setdefault(attribute, self.place(key))

    def carry(self, dotted: str, value: Any, key: str) -> None:
        """Record the value that a key sets in SureFit's config; `finished` drops values that the config's schema
        rejects."""
        if value is not UNSET:
            self.config[dotted] = value
            self.names[dotted] = key
        self.names.setdefault(dotted, key)

    def lose(self, key: str, why: str) -> None:
        """Record a key that SureFit's config cannot express; a rule that reads the key still checks it."""
        if self._is_open(key):
            target = self.judged if key in self.mapped else self.lost
            target[key] = UnmappedKey(key, self.line(key), hide_secret(key, self.flat[key]), why)

    def lose_part(self, key: str, part: str, value: Any, why: str) -> None:
        """Record a part of a key's value that SureFit's config cannot express, whether or not the key itself is
        mapped."""
        self.parts.append(UnmappedKey(f"{key}{part}", self.line(f"{key}{part}"), hide_secret(part, value), why))

    def reach(self, key: str) -> None:
        """Record that a key that the table lost is mapped after all."""
        self.judge(key)
        self.judged.pop(key, None)

    def judge(self, key: str) -> None:
        """Record that the rules check a key that the table lost."""
        if self._is_open(key):
            self.mapped.add(key)
            if key in self.lost:
                self.judged[key] = self.lost.pop(key)

    def _is_open(self, key: str) -> bool:
        """Return whether the file has the key and it is neither removed nor invalid."""
        return key in self.flat and key not in self.refused and key not in self.gone

    def refuse_part(self, key: str, part: str, value: Any, expected: str) -> None:
        """Record an error for a part of a key's value that the tool cannot use."""
        name = f"{key}{part}"
        self.problems.append(
            ConfigError(
                f"expected {expected}, got {quote_value(value)}",
                code="E3016",
                path=self.path,
                line=self.line(name),
                field=name,
                help=_value_help(value, expected),
            )
        )

    def without_effect(self, keys: Iterable[str], why: str) -> None:
        """Record which of these keys, if set, have no effect, and why."""
        for key in filter(self.says, keys):
            self.ignored[key] = why
            self.places[key] = self.place(key)

    def refuse(self, key: str, expected: str) -> None:
        """Record an error for a value that the tool cannot use, once per key."""
        value = self.flat.get(key)
        self.refuse_with(key, f"expected {expected}, got {quote_value(value)}", _value_help(value, expected))

    def refuse_with(self, key: str, message: str, help_text: str) -> None:
        """Record an error with this message for a value that the tool cannot use, once per key."""
        if key in self.refused:
            return
        self.refused.add(key)
        self.mapped.discard(key)
        self.lost.pop(key, None)
        self.judged.pop(key, None)
        self.problems.append(
            ConfigError(message, code="E3017", path=self.path, line=self.line(key), field=key, help=help_text)
        )

    def read_all(self) -> None:
        """Read every key and sort it by what becomes of it."""
        self.flat = dict(_flatten(self.tree, self.tool))
        for key, value in self.flat.items():
            if value is None:
                self.mapped.add(key)
            elif key in self.tool.gone and key not in self.tool.keys:
                self._read_gone(key, value)
            elif key in self.tool.deprecated and key not in self.tool.keys:
                self._read_deprecated(key)
            elif not self.tool.knows(key) and key.partition(".")[0] not in self.tool.open_sections:
                self._read_unknown(key)
            elif not self._misfits(key, value):
                if key in self.tool.keys:
                    self.read_key(key, self.tool.keys[key])
                else:
                    self.lose(key, unmapped_reason(key))
        for key in filter(self.tool.once.__contains__, self.gone):
            self.read_old_key(key, self.tool.once[key])
        self.tool.finish(self)
        self.tool.conflicts(self)

    def _read_gone(self, key: str, value: Any) -> None:
        if self.tool.off_is_unset and not value:
            self.mapped.add(key)
            return
        self.gone[key] = self.tool.gone[key]
        self.places[key] = self.place(key)

    def _read_deprecated(self, key: str) -> None:
        self.deprecated[key] = self.tool.deprecated[key]
        self.places[key] = self.place(key)
        if key in self.tool.once:
            self.read_key(key, self.tool.once[key])
        else:
            self.lose(key, self.tool.deprecated[key])

    def _read_unknown(self, key: str) -> None:
        if key.rpartition(".")[2].startswith(COMMENT):
            self.lose(key, "a comment")
            return
        self.places[key] = self.place(key)
        intended = None if key in self.tool.extensions else self.tool.aliases.get(key) or self.tool.misspelt(key)
        if intended is None and self.tool.passes_over(key):
            self.passed_over.append(key)
            self.lose(key, f"{self.tool.name} does not have this key")
            return
        self.unknown.append(key)
        if nearest := intended or self.tool.nearest(key):
            self.meant[key] = nearest

    def _misfits(self, key: str, value: Any) -> bool:
        """Return whether the tool's schema does not allow this value, and record it; a placeholder is recorded as
        lost."""
        kind = value_kind(self.tool.name, key)
        expected_kind = kind and expected_value(key, kind, value)
        if not expected_kind or kind is None:
            return False
        if is_placeholder(value, kind):
            self.lose(key, "a placeholder, filled in by another program")
        else:
            self.refuse(key, expected_kind)
        return True

    def read_key(self, key: str, to: KeyMapping) -> None:
        """Read a key that the table has."""
        try:
            value = to.read(self.flat[key])
        except InvalidValue as misfit:
            self.refuse(key, str(misfit))
            return
        except Unmappable as reason:
            self.lose(key, f"{reason}; {to.config} stays SureFit's default" if to.config else str(reason))
            return
        self.mapped.add(key)
        if to.setup:
            self.say(to.setup, value, key)
        if to.config is None:
            self.lose(key, unmapped_reason(key))
            return
        try:
            self.carry(to.config, value if value is UNSET else to.carry(value), key)
        except Unmappable as reason:
            if not to.setup:
                self.mapped.discard(key)
            self.lose(key, f"{reason}; {to.config} stays SureFit's default")

    def read_old_key(self, key: str, to: KeyMapping) -> None:
        """Read a key under its removed name by its old meaning, unless the new name is set too."""
        if to.setup in self.setup or to.config in self.config or not self.says(key):
            return
        with contextlib.suppress(InvalidValue, Unmappable):
            value = to.read(self.flat[key])
            if to.setup:
                self.say(to.setup, value, key)
            if to.config:
                self.carry(to.config, value if value is UNSET else to.carry(value), key)

    def finished(self) -> ImportedConfig:
        """Read all keys and return the result."""
        self.read_all()
        loaded = self._loaded() if self.whole_run else None
        self._read_repeated()
        self.missing = {key: file for key, file in find_missing_files(self.flat, self.path) if key not in self.refused}
        self.places |= {key: self.place(key) for key in self.missing}
        return ImportedConfig(
            tool=self.tool.name,
            path=self.path,
            setup=self.to_setup(self.tool.name, repeated=self.repeated),
            loaded=loaded,
            names=self.names,
            lost=tuple(self.lost.values()),
            job=None,
            problems=tuple(self.problems),
            mapped=frozenset(self.mapped),
            judged=tuple(self.judged.values()),
            rows_known=self.rows_known,
            values=self.flat,
            parts=tuple(self.parts),
            lines=self.lines,
        )

    def _read_repeated(self) -> None:
        """Record the keys that are set more than once: the last value counts, unless the tool raises at them."""
        for key, (first, last) in self.repeated.items():
            self.places[key] = SettingLocation(key, str(self.path), last)
            if not self.tool.takes_repeated:
                self.refuse_with(key, f"set twice, on lines {first} and {last}", "remove one of them")
        if not self.tool.takes_repeated:
            self.repeated = {}

    def _loaded(self) -> LoadedConfig | None:
        """Return SureFit's config without the values that it rejects; None if its model or data are missing."""
        for dotted, (key, value) in self.tool.defaults.items():
            # A key set in the file that SureFit cannot express does not get the tool's default.
            if dotted not in self.config and not (self.says(key) and key in {*self.lost, *self.judged, *self.refused}):
                self.config[dotted] = value
                self.names[dotted] = key
        while True:
            try:
                config = SureFitConfig.model_validate(to_nested(self.config))
            except ValidationError as error:
                invalid = {_dotted(item["loc"]) for item in error.errors()} & set(self.config)
                if not invalid:
                    return None
                for dotted in invalid:
                    self._refused_by_schema(dotted)
                continue
            keys = {dotted: self.names[dotted] for dotted in self.config}
            lines = {
                dotted: self.line(key.partition(" ")[0])
                for dotted, key in keys.items()
                if top_level_key(key) in self.flat
            }
            return LoadedConfig(
                config, self.path, {dotted: line for dotted, line in lines.items() if line}, frozenset()
            )

    def _refused_by_schema(self, dotted: str) -> None:
        """Move a value that the tool accepts and SureFit's schema rejects to the lost keys; the file itself is
        right."""
        del self.config[dotted]
        key = top_level_key(self.names.pop(dotted))
        if key in self.flat:
            if key not in {place.name for place in self.places.values()}:
                self.mapped.discard(key)
            self.lose(key, f"SureFit expects {expected_text(dotted)}")
            if type(self.flat[key]) in (int, float) and key not in self.refused:
                self.out_of_range[key] = expected_text(dotted)
                self.places[key] = self.place(key)


def _flatten(tree: Mapping[str, Any], tool: ToolSchema, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaf keys with dots and their values; a mapping is a leaf unless the tool's table has keys inside
    it."""
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and tool.is_section(key):
            leaves += _flatten(value, tool, f"{key}.")
        else:
            leaves.append((key, value))
    return leaves


def top_level_key(name: str) -> str:
    """Return the file's top-level key in the name of a value's origin.

    >>> top_level_key("micro_batch_size × gradient_accumulation_steps"), top_level_key("datasets[0].path")
    ('micro_batch_size', 'datasets')
    """
    return re.split(r"[ \[]", name, maxsplit=1)[0]


def to_nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as a nested dict.

    >>> to_nested({"train.num_train_epochs": 2, "output_dir": "runs"})
    {'train': {'num_train_epochs': 2}, 'output_dir': 'runs'}
    """
    tree: dict[str, Any] = {}
    for dotted, value in flat.items():
        *parents, leaf = dotted.split(".")
        parent = tree
        for name in parents:
            parent = parent.setdefault(name, {})
        parent[leaf] = value
    return tree


def _dotted(loc: tuple[int | str, ...]) -> str:
    """Return the config key of a pydantic location, without the names of union branches: keys are at most two names
    deep."""
    names = [str(part) for part in loc[:2]]
    return names[0] if names[0] in ("recipe", "output_dir") else ".".join(names)


def quote_value(value: Any) -> str:
    """Return a value as error messages quote it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return truncate_text(f"the string {value!r}" if isinstance(value, str) else repr(value))


def hide_secret(key: str, value: Any) -> Any:
    """Return the value of a key, or a placeholder if the key may hold a secret."""
    special = re.search(r"(pad|eos|bos|unk|sep|cls|mask|image|audio|video|eot|end|start)_token$", key)
    if not special and re.search(r"token$|api_key|secret|password|credential", key):
        return "(not shown)"
    return redact(value) if isinstance(value, str) else value


def _value_help(value: Any, expected: str) -> str:
    if isinstance(value, tuple):
        return "remove the comma after the number: it makes a tuple"
    if isinstance(value, list) and len(value) == 1 and "list" not in expected:
        return f"write {value[0]!r} without the brackets"
    if isinstance(value, str) and value.rstrip().endswith(","):
        return "remove the comma at the end: it makes the number a string, and in Python a tuple"
    if isinstance(value, str) and "number" in expected:
        return "write the number without quotes, commas or units"
    return f"write {expected}"
