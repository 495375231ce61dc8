"""Loading of the config file: YAML parsed with line numbers, overrides applied, every problem reported at once.

YAML is parsed by its 1.2 core rules, because the 1.1 rules of most Python loaders surprise: there `2e-4` is a string
and `no` is false. Anchors are allowed within a bound, tags and duplicate keys are not.
"""

from __future__ import annotations

import contextlib
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from surefit.config.by_objective import find_unread_keys
from surefit.config.renamed import renamed_keys, with_new_names
from surefit.config.schema import STACKED, SureFitConfig
from surefit.config.tool_keys import describe_tool_key
from surefit.core.errors import SET_OPTION, ConfigError, did_you_mean, os_help
from surefit.core.units import KIB, shell_quote, truncate_text

MAX_BYTES = 256 * KIB
MAX_VALUES = 5_000
"""Bound on a file's values after anchors are expanded, against files that expand without end."""
MAX_DEPTH = 50
OVERRIDE = SET_OPTION
_CORE = "tag:yaml.org,2002:"
_TAGS = ("null", "bool", "int", "float", "str", "map", "seq")
_NOUN = {"int": "a whole number", "float": "a number", "bool": "true or false"}


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config and where its values came from.

    Attributes:
        config: the config; it may still hold "auto".
        path: the file it was read from.
        lines: dotted key → 1-based line, for the keys in the file.
        overridden: the dotted keys set on the command line.
        adopted: dotted key → its position in another tool's file that the config names (importers/adopt.py).
        recorded: dotted key → the reason of a value that the run decided at its start, where it is resumed.
    """

    config: SureFitConfig
    path: Path
    lines: dict[str, int]
    overridden: frozenset[str]
    adopted: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, str] = field(default_factory=dict)


class _Loader(yaml.SafeLoader):
    """A composer whose plain scalars follow the YAML 1.2 core schema, and that stops at texts too large for a config.

    It is pure Python: 60,000 values would need more than a second.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.nodes = self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        self.depth += 1
        if self.nodes > MAX_VALUES:
            raise ConfigError(
                f"more than {MAX_VALUES:,} keys and values: not a config file", code="E2003", line=self.line + 1
            )
        if self.depth > MAX_DEPTH:
            raise ConfigError("nested too deeply to be a config", code="E2004", line=self.line + 1)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_CORE + _tag, re.compile(f"^(?:{_pattern})$"), _first)

PLAIN_PATTERNS: dict[str, list[tuple[str, re.Pattern[str]]]] = _Loader.yaml_implicit_resolvers
"""First letter → (tag, pattern) of plain text that is parsed as something else than a string."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, override and validate a config file.

    Args:
        path: the YAML file.
        overrides: `a.b=value` texts; the value is read as YAML.

    Raises:
        ConfigError: with file, line and field, for every problem.
    """
    return load_text(read_config_text(path), path, overrides)


def load_text(text: str, path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Override and validate a config given as YAML text; messages show `path`, which need not exist."""
    tree, lines = parse_yaml(text, path)
    if not isinstance(tree, dict):
        problem = "is empty" if tree is None else f"is {_shape(tree)}, not a mapping of sections"
        raise ConfigError(
            f"the config {problem}", code="E2005", path=path, help="`surefit init --data ROWS` writes one for your rows"
        )
    tree = dict(tree)
    overridden = {_override(tree, text) for text in overrides}
    problems = list(_old_names(tree, path, lines, overridden))
    config = None
    try:
        config = SureFitConfig.model_validate(with_new_names(tree) if problems else tree)
    except ValidationError as error:
        problems += _list_known_keys_once(
            [_problem(item, path, lines, overridden, text) for item in _merge_unions(error)]
        )
    else:
        problems += _unread_by_objective(config, path, lines, overridden)
    if problems or config is None:
        first, *others = problems
        raise ConfigError(
            first.message,
            code=first.code,
            help=first.help,
            path=first.path,
            line=first.line,
            field=first.field,
            also=others,
        )
    return LoadedConfig(config, path, lines, frozenset(overridden))


def _old_names(
    tree: Mapping[str, Any], path: Path, lines: dict[str, int], overridden: set[str]
) -> Iterator[ConfigError]:
    for old, new, value, both in renamed_keys(tree):
        section, _, key = old.partition(".")
        old_value = tree[section][key] if key else tree[section]
        changes = [f"this key is now called {new}"] if new != old else []
        changes += [f"{old_value!r} is now called {value!r}"] if old_value != value else []
        changes += ["that one is also set"] if both else []
        message = ", and ".join(changes)
        if is_overridden(old, overridden):
            yield ConfigError(message, code="E2102", path=OVERRIDE, field=old, help=f"write {OVERRIDE} {new}={value}")
        else:
            way_out = "remove one of the two" if both else "write the new name, or let `surefit check --fix` write it"
            yield ConfigError(message, code="E2103", path=path, line=lines.get(old), field=old, help=way_out)


def _unread_by_objective(
    config: SureFitConfig, path: Path, lines: dict[str, int], overridden: set[str]
) -> Iterator[ConfigError]:
    for key, problem, help_text in find_unread_keys(config.objective):
        if is_overridden(key, overridden):
            yield ConfigError(problem, code="E2840", path=OVERRIDE, field=key, help=help_text)
        elif key in lines:
            yield ConfigError(problem, code="E2841", path=path, line=lines[key], field=key, help=help_text)


def read_config_text(path: Path) -> str:
    """Read a small UTF-8 file's text, with or without a byte-order mark."""
    require_config_name(path)
    if path.is_dir():
        raise ConfigError(
            "this is a directory, not a config file", code="E2006", path=path, help="name the YAML file in it"
        )
    if path.is_fifo() and not str(path).startswith(("/dev/", "/proc/")):  # but allow a shell's `<(command)`
        raise ConfigError("not a regular file", code="E2007", path=path, help="name the YAML file")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _no_such_config(path) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", code="E2009", path=path, help=os_help(error)) from None
    if len(data) > MAX_BYTES:
        problem = f"larger than {MAX_BYTES // KIB} KiB: not a config file"
        raise ConfigError(
            problem, code="E2010", path=path, help="name the YAML file; data files are named inside it, as data.train"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError("not UTF-8 text", code="E2011", path=path, line=line, help="save the file as UTF-8") from None


ROW_FILES = re.compile(r"\.(jsonl|csv|tsv|parquet|arrow|penman)(\.gz|\.zst)?", re.IGNORECASE)
TEXT_FILES = {".md": "a text", ".rst": "a text", ".ipynb": "a notebook", ".html": "a page", ".pdf": "a document",
              ".safetensors": "a file of weights", ".gguf": "a model", ".bin": "a binary file",
              ".pt": "a file of weights"}  # fmt: skip
"""Ending → what such a file is: never a config."""


def require_config_name(path: Path) -> None:
    """Raise if a file's ending says that it is no config but rows, a model or a text.

    Raises:
        ConfigError: with the commands that such a file is for.
    """
    if ROW_FILES.fullmatch("".join(path.suffixes[-2:])) or ROW_FILES.fullmatch(path.suffix):
        raise ConfigError(
            "this is a file of rows, not a config",
            code="E2700",
            path=path,
            help=f"`surefit audit {shell_quote(path)}` looks at the rows; "
            f"`surefit init --data {shell_quote(path)}` writes a config for them",
        )
    if kind := TEXT_FILES.get(path.suffix.lower()):
        raise ConfigError(
            f"this is {kind}, not a config",
            code="E2701",
            path=path,
            help="name a YAML file: `surefit init --data ROWS` writes one for your rows",
        )


def _no_such_config(path: Path) -> ConfigError:
    """Return the error for a config that does not exist; the name may be meant as a run's or a model's."""
    init = "`surefit init --data ROWS` writes a config for your rows"
    if path.suffix.lower() in (".yaml", ".yml", ".json", ".py"):
        siblings = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        return ConfigError(
            f"no such file{did_you_mean(str(path), siblings)}",
            code="E2008",
            path=path,
            help=f"{init}; `surefit runs` lists your runs",
        )
    if path.parent.is_dir():
        siblings = [str(p) for p in path.parent.glob("*")]
    else:  # the directory may be misspelled: run/first for runs/first
        folder = path.parent.parent
        siblings = [str(p / path.name) for p in folder.glob("*/") if (p / path.name).exists()]
    hint = did_you_mean(str(path), siblings)
    help_text = f"{init}; `surefit runs` lists your runs"
    if (
        not hint
        and not path.parent.is_dir()
        and re.fullmatch(r"[\w.-]+/[\w.-]+", str(path))
        and not str(path).startswith(("runs/", "./"))
    ):
        help_text = f"a model of the hub is named in a config: surefit init --data ROWS --model {shell_quote(path)}"
    return ConfigError(
        f"there is no config file or run directory of this name{hint}",
        code="E2702",
        path=path,
        help=help_text,
    )


def parse_yaml(text: str, path: Path, repeated: dict[str, tuple[int, int]] | None = None) -> tuple[Any, dict[str, int]]:
    """Parse YAML text into (plain Python values, dotted key → line).

    Args:
        repeated: filled with dotted key → the lines of its last two occurrences, for every key that is set more than
            once; the last counts, as in most YAML readers. Without this argument such a key is an error.
    """
    try:
        node = compose_yaml(text)
        lines: dict[str, int] = {}
        return (None if node is None else _Builder(path, lines, repeated).build(node, "")), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise ConfigError(
            f"not valid YAML: {_yaml_problem(error)}", code="E2012", path=path, line=line, help=_yaml_help(text, line)
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}".replace("\n", " "), code="E2013", path=path) from None
    except ConfigError as error:
        error.path = str(path)
        raise
    except RecursionError:  # an anchor that contains itself
        raise ConfigError("nested too deeply to be a config", code="E2014", path=path) from None


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    """Return what the parser did not understand; in braces or brackets, with the line on which they begin."""
    context, mark = error.context, error.context_mark
    if mark is not None and context in ("while parsing a flow mapping", "while parsing a flow sequence"):
        opening = "{" if "mapping" in context else "["
        context = f"after the {opening} of line {mark.line + 1}"
    return " ".join(str(part) for part in (error.problem, context) if part)


def compose_yaml(text: str) -> yaml.Node | None:
    """Return the nodes of a YAML text, with their positions; `parse_yaml` raises readable errors for the same text."""
    node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return node


NO_VARIABLES = (
    "a config's ${…} is not replaced: write the path itself, or on the command line --set data.train=$DIR/rows.jsonl"
)


def _yaml_help(text: str, line: int | None) -> str:
    rows = text.splitlines()
    if line and any("${" in row for row in rows[max(0, line - 2) : line]):
        return NO_VARIABLES
    if line and any("\t" in row for row in rows[max(0, line - 2) : line]):
        return "indent with spaces: YAML does not allow tabs"
    return "check indentation, quotes and brackets at and above this line"


class _Builder:
    """Converter of YAML nodes to plain values that records the line of every key."""

    def __init__(self, path: Path, lines: dict[str, int], repeated: dict[str, tuple[int, int]] | None = None) -> None:
        self.path = path
        self.lines = lines
        self.repeated = repeated
        self.count = 0

    def build(self, node: yaml.Node, dotted: str) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise self._error(node, dotted, f"more than {MAX_VALUES:,} values once its anchors are expanded")
        if node.tag.removeprefix(_CORE) not in _TAGS:
            raise self._error(node, dotted, f"the YAML tag {node.tag!r} is not allowed")
        if isinstance(node, yaml.MappingNode):
            return dict(self._items(node, dotted))
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, f"{dotted}[{i}]") for i, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, dotted)

    def _items(self, node: yaml.MappingNode, dotted: str) -> Iterator[tuple[str, Any]]:
        seen_keys: set[str] = set()
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, dotted, "a key must be plain text")
            key = key_node.value
            name = f"{dotted}.{key}" if dotted else key
            if key in seen_keys:
                if self.repeated is None:
                    raise self._error(key_node, name, f"set twice; the first time on line {self.lines[name]}")
                self._forget(name, key_node.start_mark.line + 1)
            seen_keys.add(key)
            self.lines[name] = key_node.start_mark.line + 1
            if "[" in name:
                # A list's key is located at the first entry that has it.
                self.lines.setdefault(re.sub(r"\[\d+\]", "", name), self.lines[name])
            yield key, self.build(value_node, name)

    def _forget(self, name: str, line: int) -> None:
        """Forget the earlier value of a key that is set again on this line."""
        assert self.repeated is not None
        self.repeated[name] = (self.lines[name], line)
        for nested_key in [key for key in self.lines if key.startswith((f"{name}.", f"{name}["))]:
            del self.lines[nested_key]

    def _scalar(self, node: yaml.ScalarNode, dotted: str) -> Any:
        kind, text = node.tag.removeprefix(_CORE), node.value
        if kind in ("str", "null"):
            return text if kind == "str" else None
        if kind == "bool" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if len(text) <= 40:
            # An explicit tag (`!!int x`) can mark a text that is no number.
            with contextlib.suppress(ValueError):
                if kind == "int":
                    return int(text, 0 if text[:2] in ("0x", "0o") else 10)
                if kind == "float":
                    return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))
        raise self._error(node, dotted, f"not usable as {_NOUN[kind]}: {_shape(text)}")

    def _error(self, node: yaml.Node, dotted: str, message: str) -> ConfigError:
        return ConfigError(message, code="E2015", path=self.path, line=node.start_mark.line + 1, field=dotted or None)


def _override(tree: dict[str, Any], text: str) -> str:
    """Apply one `a.b=value` to the tree and return the dotted key."""
    dotted, equals, value = text.partition("=")
    dotted = dotted.strip()
    if not equals or not dotted:
        raise ConfigError(
            f"{OVERRIDE} {text}: expected KEY=VALUE",
            code="E2016",
            help=f"for example {OVERRIDE} train.num_train_epochs=2",
        )
    *parents, leaf = dotted.split(".")
    parsed, _ = parse_yaml(value, Path(OVERRIDE))
    mapping = tree
    for name in parents:
        child = mapping.get(name)
        # Copied, not changed in place: an anchor may share this mapping with another key.
        short = {"name": child} if name == "objective" and isinstance(child, str) else {}
        mapping[name] = dict(child) if isinstance(child, dict) else short
        mapping = mapping[name]
    mapping[leaf] = parsed
    return dotted


def is_overridden(dotted: str, overridden: Iterable[str]) -> bool:
    """Return whether a key, or a section that contains it, was set on the command line.

    >>> is_overridden("train.num_train_epochs", ["train"]), is_overridden("train", ["train.num_train_epochs"])
    (True, False)
    """
    return any(dotted == key or dotted.startswith(f"{key}.") for key in overridden)


def _merge_unions(error: ValidationError) -> list[dict[str, Any]]:
    """Return one error per key: pydantic reports every branch of a union separately. An error of our own validators is
    preferred, because the value had the type of that branch.
    """
    merged: dict[str, dict[str, Any]] = {}
    for item in error.errors(include_url=False):
        dotted = ".".join(_key_path(item["loc"]))
        if dotted not in merged or item["type"] == "value_error":
            merged[dotted] = {"dotted": dotted, **item}
    return list(merged.values())


def _key_path(loc: tuple[int | str, ...]) -> list[str]:
    """Return the config keys in a pydantic location, without list positions and the names of union branches."""
    keys: list[str] = []
    annotation: Any = SureFitConfig
    for part in loc:
        section = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
        if section is None:
            if annotation is dict and isinstance(part, str):
                keys.append(part)
            break
        keys.append(str(part))
        field = section.model_fields.get(str(part))
        annotation = _container(field.annotation) if field else None
    return keys


def _container(annotation: Any) -> Any:
    """Return the section class or `dict` that an annotation allows, or None."""
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
        if typing.get_origin(option) is dict:
            return dict
    return None


def _options(annotation: Any) -> list[Any]:
    """Return the branches of a union, flattened."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [leaf for part in typing.get_args(annotation) for leaf in _options(part)]
    return [annotation]


def _problem(item: dict[str, Any], path: Path, lines: dict[str, int], overridden: set[str], text: str) -> ConfigError:
    """Convert a pydantic error to a ConfigError in the user's terms."""
    dotted: str = item["dotted"]
    line = text.splitlines()[lines[dotted] - 1] if dotted in lines else "{"  # --set's mappings are in braces
    message, help_text = _explain(item, "{" in line)
    if item["type"] == "missing" and dotted == "output_dir":
        name = re.sub(r"[^\w.-]", "-", path.stem)
        help_text = f"add output_dir: runs/{name}"
    nearest = dotted
    while nearest and nearest not in lines:
        nearest = nearest.rpartition(".")[0]
    if is_overridden(dotted, overridden) or any(key.startswith(f"{dotted}.") for key in overridden):
        if item["type"] == "extra_forbidden" and help_text is None and (section := find_section(dotted)):
            value = item["input"] if isinstance(item["input"], str) else json.dumps(item["input"])
            help_text = f"write {OVERRIDE} {shell_quote(f'{section}.{dotted}={value}')}"
        return ConfigError(message, code="E2017", path=OVERRIDE, field=dotted, help=help_text)
    return ConfigError(message, code="E2018", path=path, line=lines.get(nearest), field=dotted, help=help_text)


def _explain(item: dict[str, Any], in_braces: bool) -> tuple[str, str | None]:
    """Return the message and the help for a pydantic error.

    Args:
        in_braces: whether the key stands in { } on its line.
    """
    dotted, value = item["dotted"], item["input"]
    section, _, name = dotted.rpartition(".")
    if item["type"] == "extra_forbidden":
        section_class = _section_at(section)
        known_keys = list(section_class.model_fields) if section_class else []
        if value is None and not section_class:
            return "unknown key", None
        hint = _hint(name, value, known_keys)
        if value is None and not hint and in_braces and name.isidentifier() and section:
            return (
                "unknown key",
                f"a comma inside {{ }} begins a new key: write a list in brackets, such as [x, {name}]",
            )
        return f"unknown key{hint}", None if hint else f"{KNOWN_KEYS}{', '.join(known_keys)}"
    expected = expected_text(dotted)
    if item["type"] == "missing":
        return "missing", f"add {name}: {EXAMPLES.get(dotted, expected)}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"]), None
    if dotted == "lora.start_from" and isinstance(value, list) and len(value) > 1:
        return f"expected one adapter, got {len(value)}", STACKED
    if expected == "text" and type(value) in (int, float):
        return f"expected a string, got {_shape(value)}", f'write it in quotes: {name}: "{value}"'
    if expected.startswith("a mapping") and isinstance(value, str | list):
        first = value[0] if isinstance(value, list) and value else value
        placeholder = "why" if dotted == "lint.ignore" else "…"
        return f"expected {expected}, got {_shape(value)}", f'write {name}: {{{first or "NAME"}: "{placeholder}"}}'
    return f"expected {expected}, got {_shape(value)}", _value_help(dotted, value, expected)


def _list_known_keys_once(problems: Iterable[ConfigError]) -> list[ConfigError]:
    """Return the problems, with a section's list of known keys only at the first of its unknown keys."""
    listed: set[str] = set()
    problems = list(problems)
    for problem in problems:
        if problem.help is not None and problem.help.startswith(KNOWN_KEYS):
            if problem.help in listed:
                problem.help = None
            else:
                listed.add(problem.help)
    return problems


KNOWN_KEYS = "known here: "
EXAMPLES = {
    "model": "{name_or_path: Qwen/Qwen2.5-0.5B-Instruct}",
    "model.name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "data": "{train: train.jsonl}",
    "data.train": "train.jsonl",
}
"""Example values of required keys."""


def _hint(name: str, value: Any, known_keys: list[str]) -> str:
    """Say how an unknown key is written: another tool's key, a key of another section, or a misspelled one."""
    target, sentence = describe_tool_key(name, value)
    translated = f"; {sentence}" if sentence else ""
    if target.rpartition(".")[2] not in ("", name):
        return translated
    return _elsewhere(name) or translated or did_you_mean(name, known_keys)


def find_section(name: str) -> str | None:
    """Return the section of the config that has a key of this name.

    >>> find_section("learning_rate"), find_section("gnome")
    ('train', None)
    """
    for section, entry in SureFitConfig.model_fields.items():
        inner = _container(entry.annotation)
        if inner not in (None, dict) and name in inner.model_fields:
            return section
    return None


def is_key(dotted: str) -> bool:
    """Return whether the config has this key.

    >>> is_key("train.learning_rate"), is_key("output_dir"), is_key("learning_rate")
    (True, True, False)
    """
    section = _section_at(dotted.rpartition(".")[0])
    return section is not None and dotted.rpartition(".")[2] in section.model_fields


def _elsewhere(name: str) -> str:
    """Name the section to which a misplaced key belongs."""
    section = find_section(name)
    return f"; it belongs under '{section}'" if section else ""


def _section_at(dotted: str) -> type[BaseModel] | None:
    annotation: Any = SureFitConfig
    for part in filter(None, dotted.split(".")):
        field = annotation.model_fields.get(part) if annotation not in (None, dict) else None
        annotation = _container(field.annotation) if field else None
    return annotation if annotation is not dict else None


def expected_text(dotted: str) -> str:
    """Describe the values that a key accepts.

    >>> expected_text("train.per_device_train_batch_size")
    "'auto' or a whole number (at least 1, at most 1,048,576)"
    """
    section = _section_at(dotted.rpartition(".")[0])
    field = section.model_fields.get(dotted.rpartition(".")[2]) if section else None
    if field is None:
        return "text"
    return " or ".join(dict.fromkeys(_type_text(option, field.metadata) for option in _options(field.annotation)))


def _type_text(option: Any, metadata: list[Any]) -> str:
    if typing.get_origin(option) is typing.Annotated:
        inner, *extra = typing.get_args(option)
        return _type_text(inner, [m for e in extra for m in getattr(e, "metadata", [e])])
    if typing.get_origin(option) is typing.Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(option))
    if isinstance(option, type) and issubclass(option, BaseModel):
        return f"a section with {', '.join(option.model_fields)}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    origin, inner = typing.get_origin(option) or option, typing.get_args(option)
    if origin is dict:
        values = " or ".join(dict.fromkeys(_type_text(item_option, []) for item_option in _options(inner[1])))
        return f"a mapping of names to {values}" if len(inner) == 2 else "a mapping"
    if origin is list:
        item_text = _type_text(inner[0], []) if inner else "text"
        return "a list of strings" if item_text == "text" else f"a list, each {item_text}"
    name = names.get(origin, "text")
    bounds = _bounds_text(metadata) if origin in (int, float) else ""
    return f"{name} ({bounds})" if bounds else name


def _bounds_text(metadata: list[Any]) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [(word, _plain(getattr(m, key))) for m in metadata for key, word in words.items() if hasattr(m, key)]
    return ", ".join(f"{word} {bound}" for word, bound in bounds)


def _plain(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) and abs(bound) < 1e15 else f"{bound:g}"


def _shape(value: Any) -> str:
    """Return a value as the user wrote it, shortened."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = truncate_text(f"the string {value!r}" if isinstance(value, str) else repr(value))
    if isinstance(value, list):
        return f"a list: {text}"
    return f"a mapping: {text}" if isinstance(value, dict) else text


def _default_number(dotted: str) -> str | None:
    """Return the default of a key that is a number, as one writes it; None for other keys.

    >>> _default_number("train.num_train_epochs"), _default_number("train.learning_rate"), _default_number("recipe")
    ('1', '0.0002', None)
    """
    section = _section_at(dotted.rpartition(".")[0])
    field = section.model_fields.get(dotted.rpartition(".")[2]) if section else None
    default = field.default if field else None
    if isinstance(default, bool) or not isinstance(default, int | float):
        return None
    return f"{default:g}"


def _value_help(dotted: str, value: Any, expected: str) -> str | None:
    if dotted == "data.eval" and isinstance(value, int | float):
        return "write a share of the rows, such as 0.1, or the name of a file of rows to score on"
    if dotted == "data.train" and isinstance(value, list) and len(value) > 1:
        more = ", ".join(f"{json.dumps(str(name))}: 1" for name in value[1:])
        return (
            f"name one here and the others, with their passes per epoch, in mix: {{{more}}}; or a pattern: data/*.jsonl"
        )
    if dotted == "model.quantization":
        return "nf4 stores the frozen weights in 4 bits (QLoRA), fp8 in 8"
    if isinstance(value, str) and re.search(r"\$\{?\w", value):
        return NO_VARIABLES
    if isinstance(value, list) and len(value) == 1:
        return f"write {value[0]!r} without the brackets"
    if isinstance(value, str) and value.endswith(","):
        return "remove the comma at the end: it turns the number into a string"
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9][0-9_,]*(\.[0-9]+)?", value):
        return "write the number without quotes, commas or underscores"
    if isinstance(value, str) and re.match(r"(?:'auto' or )?a (whole )?number", expected):
        number = _default_number(dotted)
        kind = "a whole number" if "whole" in expected else "a number"
        return f"write {kind}" + (f", such as {number}" if number is not None else "")
    return None
