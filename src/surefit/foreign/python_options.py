"""The options of a script: what its argparse or HfArgumentParser has, with their defaults, and classes of constants."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from surefit.foreign.python_source import COMPUTED, Binding, Imported, Scope, Source

DATACLASS_PARSERS = ("HfArgumentParser", "TrlParser")
OWN_SETUP = ("__init__", "__post_init__", "__new__", "__getattr__", "__getattribute__", "__setattr__")
"""Methods that may give attributes other values than the class has."""


@dataclass
class Options:
    """What one parser takes.

    Attributes:
        defaults: option → its default, or COMPUTED where that is not written out.
        switches: those without a value.
        whole: every option is written out, and an unknown one stops the script.
    """

    defaults: dict[str, Any] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    whole: bool = True


def option(source: Source, node: ast.expr, scope: Scope, name: str) -> Any:
    """The value of `args.name`: COMPUTED where it is not certain, None where `args` comes from no parser.

    A default of None is COMPUTED too: some other part of the script decides.
    """
    call, element, home, at = _parsed(source, node, scope)
    if call is None or not isinstance(call.func, ast.Attribute):
        return None
    if call.func.attr == "parse_args_into_dataclasses":
        inside = _dataclass(home, call.func.value, at, element)
        return None if inside is None else _passed(home, name, _field(home, inside, name), switch=False)
    options = options_of(home, call.func.value, at)
    if options is None or name not in options.defaults:
        return COMPUTED
    return _passed(home, name, options.defaults[name], name in options.switches)


def _passed(source: Source, name: str, default: Any, switch: bool) -> Any:
    """The default, or what the launch lines beside the script pass in its place."""
    given = source.passed.get(name)
    if not given:
        return COMPUTED if default is None else default
    if len(given) > 1 or None in given:
        return COMPUTED
    written = next(iter(given)) or ""
    if switch or (written == "" and isinstance(default, bool)):
        return True
    if isinstance(default, bool) or written in ("True", "False", "true", "false"):
        return written.lower() in ("true", "1", "yes")
    for kind in (int, float):
        try:
            return kind(written)
        except ValueError:
            continue
    return written


def _parsed(source: Source, node: ast.expr, scope: Scope) -> tuple[ast.Call | None, int, Source, Scope]:
    """The call of a parser that an expression stands for, and which of its results it is."""
    found, element = source.expression(node, scope), 0
    inside: ast.expr = found[0]
    at = found[1]
    if isinstance(inside, ast.Name):
        binding = _single(at, inside.id)
        if binding is not None and isinstance(binding.value, ast.expr) and binding.element is not None:
            inside, element = binding.value, binding.element
    if isinstance(inside, ast.Subscript) and isinstance(inside.slice, ast.Constant) and type(inside.slice.value) is int:
        element = inside.slice.value
        inside = inside.value
    names = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")
    parses = isinstance(inside, ast.Call) and isinstance(inside.func, ast.Attribute) and inside.func.attr in names
    return (inside if parses and isinstance(inside, ast.Call) else None), element, at.home or source, at


def _single(scope: Scope, name: str) -> Binding | None:
    found = scope.find(name)
    return found[1][0] if found and len(found[1]) == 1 else None


def options_of(source: Source, parser: ast.expr, scope: Scope) -> Options | None:
    """The options that are added to a parser, where it is argparse's."""
    inside, _ = source.expression(parser, scope)
    origin = source.origin(inside.func, scope) if isinstance(inside, ast.Call) else None
    if origin not in ("argparse.ArgumentParser", "ArgumentParser") or not isinstance(parser, ast.Name):
        return None
    options = Options(whole=not any(keyword.arg == "parents" for keyword in getattr(inside, "keywords", ())))
    groups = {parser.id, *_groups(source, parser.id)}
    for node, at in source.each(ast.Call):
        if not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "add_subparsers" or any(isinstance(x, ast.Name) and x.id in groups for x in node.args):
            options.whole = False  # something else may add to it
        owner = node.func.value
        chained = isinstance(owner, ast.Call) and "add_argument_group" in ast.dump(owner.func)
        if node.func.attr == "add_argument" and ((isinstance(owner, ast.Name) and owner.id in groups) or chained):
            _add(source, node, at, options)
        elif node.func.attr == "set_defaults":
            options.defaults.update(dict.fromkeys((k.arg for k in node.keywords if k.arg), COMPUTED))
    return options


def _groups(source: Source, parser: str) -> Iterator[str]:
    """The names of argument groups of a parser."""
    for node, _ in source.each(ast.Assign):
        made = node.value
        if isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr.endswith("_group"):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _add(source: Source, node: ast.Call, scope: Scope, options: Options) -> None:
    flags = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if not flags or len(flags) != len(node.args) or None in given:
        options.whole = False
        return
    long = [flag for flag in flags if flag.startswith("--")]
    name = (long or flags)[0].lstrip("-").replace("-", "_")
    if "dest" in given:
        dest = source.value(given["dest"], scope)
        name = dest if isinstance(dest, str) else name
    action = source.value(given["action"], scope) if "action" in given else "store"
    default: Any = source.value(given["default"], scope) if "default" in given else None
    if action in ("store_true", "store_false"):
        options.switches.add(name)
        default = action == "store_false" if default is None else default
    required = "required" in given and source.value(given["required"], scope) is not False
    options.defaults[name] = COMPUTED if required or not flags[0].startswith("-") else default
    # argparse takes each of its spellings.
    options.defaults.update({flag.lstrip("-").replace("-", "_"): options.defaults[name] for flag in long})


def script_options(source: Source) -> Options | None:
    """The options of the one parser of a script, where it stops at others; None where that is not certain."""
    calls = [(node, scope) for node, scope in source.each(ast.Call) if isinstance(node.func, ast.Attribute)]
    parses = [(node, scope) for node, scope in calls if node.func.attr in ("parse_args", "parse_known_args")]
    made = [node for node, scope in source.each(ast.Call) if (source.origin(node.func, scope) or "").endswith("Parser")]
    if len(parses) != 1 or parses[0][0].func.attr != "parse_args" or parses[0][0].args or len(made) != 1:
        return None
    found = options_of(source, parses[0][0].func.value, parses[0][1])
    return found if found is not None and found.whole else None


def takes_training_arguments(source: Source) -> bool:
    """Whether the script's command line is made of transformers' or TRL's arguments."""
    for node, scope in source.each(ast.Call):
        if (source.origin(node.func, scope) or "").rpartition(".")[2] in DATACLASS_PARSERS and node.args:
            classes = node.args[0].elts if isinstance(node.args[0], ast.Tuple | ast.List) else [node.args[0]]
            origins = [source.origin(each, scope) or "" for each in classes]
            if any(origin.endswith(("TrainingArguments", "SFTConfig")) for origin in origins):
                return True
    return False


def _dataclass(source: Source, parser: ast.expr, scope: Scope, element: int) -> ast.ClassDef | None:
    """The class of one of the results of an HfArgumentParser."""
    inside, at = source.expression(parser, scope)
    if not isinstance(inside, ast.Call) or not inside.args:
        return None
    if (source.origin(inside.func, at) or "").rpartition(".")[2] not in DATACLASS_PARSERS:
        return None
    given, at = source.expression(inside.args[0], at)
    classes = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
    chosen = classes[element] if 0 <= element < len(classes) else None
    return _class(source, chosen.id) if isinstance(chosen, ast.Name) else None


def _class(source: Source, name: str) -> ast.ClassDef | None:
    found = [each for each, _ in source.each(ast.ClassDef) if each.name == name]
    return found[0] if len(found) == 1 else None


def attribute(source: Source, node: ast.Attribute, scope: Scope, depth: int) -> Any:
    """The attribute of a class of constants, or of an instance that is made of it."""
    inside, at = source.expression(node.value, scope)
    home = at.home or source
    given: dict[str | None, ast.expr] = {}
    if isinstance(inside, ast.Call) and not inside.args:
        given = {keyword.arg: keyword.value for keyword in inside.keywords}
        inside = inside.func
    if not isinstance(inside, ast.Name) or None in given:
        return COMPUTED
    owner = _class(home, inside.id)
    found = at.find(inside.id)
    imported = found[1][0].value if found and len(found[1]) == 1 else None
    if owner is None and isinstance(imported, Imported):
        module, _, name = imported.dotted.rpartition(".")
        other = home.beside(module) if module else None
        home, owner = (other, _class(other, name)) if other else (home, None)
    if owner is None or not _is_plain(owner, bool(given)):
        return COMPUTED
    if node.attr in given:
        return source.value(given[node.attr], at, depth)
    value = _field(home, owner, node.attr)
    return COMPUTED if value is None and not _sets(home, owner, node.attr) else value


def _is_plain(owner: ast.ClassDef, called: bool) -> bool:
    """Whether a class's attributes are what it writes: no bases, and no method that sets them."""
    own = [each.name for each in owner.body if isinstance(each, ast.FunctionDef)]
    dataclassed = any("dataclass" in ast.dump(each) for each in owner.decorator_list)
    return not owner.bases and not set(own) & set(OWN_SETUP) and (dataclassed or not called)


def _sets(source: Source, owner: ast.ClassDef, name: str) -> bool:
    return len(source.inside[owner].names.get(name, [])) == 1


def _field(source: Source, owner: ast.ClassDef, name: str) -> Any:
    """The default of a field; COMPUTED where it is not written out."""
    scope = source.inside[owner]
    bindings = scope.names.get(name, [])
    value = bindings[0].value if len(bindings) == 1 else None
    if not isinstance(value, ast.expr):
        return COMPUTED
    if isinstance(value, ast.Call) and getattr(value.func, "id", getattr(value.func, "attr", "")) in ("field", "Field"):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        factory = given.get("default_factory")
        inner = given.get("default") or (factory.body if isinstance(factory, ast.Lambda) else None)
        return source.value(inner, scope) if inner is not None else COMPUTED
    return source.value(value, scope)
