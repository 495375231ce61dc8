"""A Python file as its syntax tree: the origins of its names, and the values written out in it. The file is never run.

A name stands for a value if its scope assigns it once, to a literal. Any other value is computed, hence unknown.
"""

from __future__ import annotations

import ast
import io
import operator
import sys
import tokenize
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from surefit.core.errors import ConfigError
from surefit.core.units import MIB

MAX_BYTES = 2 * MIB
DEPTH = 40
"""The largest number of names and brackets followed to find one value."""
STEPS = 300_000
"""The largest number of expressions evaluated for one script and the modules beside it: a name that stands for a list
of names is evaluated again at each use, which doubles the work with each such name."""
MOST_MODULES = 20
"""The largest number of modules beside a script that are read."""
LARGEST = 10**30
COMPUTED: Final = object()
"""The value of an expression that is known only at run time."""
MUTATORS = frozenset({"append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"})
DTYPES = frozenset({"float32", "float16", "bfloat16", "float64", "float", "half", "int8", "uint8"})
PLAIN = {"float": "float32", "half": "float16"}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class ImportedName:
    """What an import binds a name to, such as transformers.TrainingArguments, with its line and whether a `try` guards
    it."""

    dotted: str
    line: int
    guarded: bool


@dataclass(frozen=True)
class Binding:
    """A place where a name is bound to a value.

    Attributes:
        value: the expression, an import, or None for anything else (a loop, a parameter, a definition).
        line: 1-based.
        straight: the binding is in no branch and no loop of its scope.
        element: index of the value where several names are unpacked from one expression; None otherwise.
    """

    value: ast.expr | ImportedName | None
    line: int
    straight: bool = True
    element: int | None = None


@dataclass
class Scope:
    """A module, function or class with the names it binds; `home` is the file that contains it."""

    node: ast.AST
    outer: Scope | None = None
    names: dict[str, list[Binding]] = field(default_factory=dict)
    home: ScriptSource | None = None

    def bind(self, name: str, binding: Binding) -> None:
        """Record another binding of a name."""
        self.names.setdefault(name, []).append(binding)

    def find(self, name: str) -> tuple[Scope, list[Binding]] | None:
        """Return the scope that binds a name, by Python's lookup rules, with its bindings; None if no scope does."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names and (scope is self or not isinstance(scope.node, ast.ClassDef)):
                return scope, scope.names[name]
            scope = scope.outer
        return None


@dataclass
class ScriptSource:
    """A parsed Python file.

    Attributes:
        nodes: every node with its scope, in the order of the file.
        changed: names whose value is modified in place somewhere.
        set_attributes: attributes that are assigned to.
        inside: function or class → the scope of its body.
        passed: option of the script's parser → the values that launch scripts beside it pass; None for a value known
            only at run time.
        modules: the parsed files beside the script, by module name; None for a module without such a file.
        evaluated: number of expressions evaluated in all these files, in a list of one element.
    """

    path: Path
    text: str
    module: Scope
    nodes: list[tuple[ast.AST, Scope]] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    set_attributes: set[str] = field(default_factory=set)
    inside: dict[ast.AST, Scope] = field(default_factory=dict)
    passed: dict[str, set[str | None]] = field(default_factory=dict)
    modules: dict[str, ScriptSource | None] = field(default_factory=dict)
    evaluated: list[int] = field(default_factory=lambda: [0])

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text."""
        return self.text.split("\n")

    def text_of(self, node: ast.expr) -> str:
        """Return the source text of an expression, up to the end of its first line."""
        line = self.lines[node.lineno - 1].encode() if node.lineno <= len(self.lines) else b""
        end = node.end_col_offset if node.end_lineno == node.lineno else None
        return line[node.col_offset : end].decode(errors="replace")

    def each(self, *kinds: type[ast.AST]) -> Iterator[tuple[Any, Scope]]:
        """Yield the nodes of these types, each with its scope."""
        yield from ((node, scope) for node, scope in self.nodes if isinstance(node, kinds))

    def origin(self, node: ast.AST, scope: Scope) -> str | None:
        """Return the dotted name that a name or attribute was imported as, such as transformers.TrainingArguments, or
        None."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        match = scope.find(node.id) if isinstance(node, ast.Name) else None
        if match is None:
            return None
        origins = {binding.value.dotted if isinstance(binding.value, ImportedName) else None for binding in match[1]}
        origin = origins.pop()
        return None if origins or origin is None else ".".join([origin, *attributes])

    def once(self, name: str, scope: Scope, depth: int = 0) -> tuple[ast.expr, Scope] | None:
        """Return the expression that a name stands for, if it is the only one; modules beside the script are searched
        too."""
        if depth > MOST_MODULES:  # two modules that import the name from each other
            return None
        home = scope.home or self
        match = scope.find(name)
        if match is None:
            stars = [
                binding.value for binding in home.module.names.get("*", ()) if isinstance(binding.value, ImportedName)
            ]
            targets = [self.global_of(f"{star.dotted[:-1]}{name}", depth) for star in stars] if len(stars) == 1 else []
            return targets[0] if targets else None
        if len(match[1]) != 1 or name in home.changed:
            return None
        binding = match[1][0]
        if isinstance(binding.value, ast.expr) and binding.element is None:
            return binding.value, match[0]
        return self.global_of(binding.value.dotted, depth) if isinstance(binding.value, ImportedName) else None

    def global_of(self, dotted: str, depth: int = 0) -> tuple[ast.expr, Scope] | None:
        """Return the expression of a name in a module beside the script, such as "config.LR", or None."""
        module, _, name = dotted.rpartition(".")
        source = self.beside(module) if module and name else None
        return source.once(name, source.module, depth + 1) if source is not None and source is not self else None

    def beside(self, name: str) -> ScriptSource | None:
        """Return the parsed module beside the script or in its parent folder, or None if there is no such file."""
        bare_name = name.lstrip(".")
        if bare_name.partition(".")[0] in sys.stdlib_module_names or len(self.modules) > MOST_MODULES or not bare_name:
            return None
        if name not in self.modules:
            self.modules[name] = None
            file = bare_name.replace(".", "/")
            for path in (folder / f"{file}{end}" for folder in self._folders(name) for end in (".py", "/__init__.py")):
                if path.is_file():
                    with suppress(ConfigError):
                        source = parse_script(path)
                        source.modules, source.passed, source.evaluated = self.modules, self.passed, self.evaluated
                        self.modules[name] = source
                    break
        return self.modules[name]

    def _folders(self, name: str) -> list[Path]:
        folder = self.path.resolve().parent
        dots = len(name) - len(name.lstrip("."))
        return [folder, folder.parent] if dots == 0 else [[folder, *folder.parents][min(dots - 1, 3)]]

    def expression(self, node: ast.expr, scope: Scope) -> tuple[ast.expr, Scope]:
        """Return the expression itself, or the expression that a name stands for, with its scope."""
        for _ in range(DEPTH):
            target = self.once(node.id, scope) if isinstance(node, ast.Name) else None
            if target is None:
                break
            node, scope = target
        return node, scope

    def before(self, node: ast.expr, scope: Scope, line: int) -> tuple[ast.expr, Scope, int]:
        """Return the expression that a name stands for at a line, with its scope and line, if only one binding can
        reach it."""
        for _ in range(DEPTH):
            match = scope.find(node.id) if isinstance(node, ast.Name) else None
            if match is None:
                break
            reaching = reaching_bindings(match[1], line) if match[0] is scope else match[1]
            if len(reaching) != 1 or not isinstance(reaching[0].value, ast.expr) or reaching[0].element is not None:
                break
            node, scope, line = reaching[0].value, match[0], reaching[0].line
        return node, scope, line

    def value(self, node: ast.expr, scope: Scope, depth: int = 0) -> Any:
        """Return the value of an expression, or `COMPUTED`."""
        self.evaluated[0] += 1
        if depth > DEPTH or self.evaluated[0] > STEPS:
            return COMPUTED
        if scope.home is not None and scope.home is not self:
            return scope.home.value(node, scope, depth + 1)
        if isinstance(node, ast.Constant):
            # No setting is that large, and Python does not convert an integer of over 4300 digits to text.
            huge = isinstance(node.value, int) and abs(node.value) > LARGEST
            return node.value if isinstance(node.value, str | int | float | None) and not huge else COMPUTED
        for kind, evaluate in _EVALUATORS.items():
            if isinstance(node, kind):
                return evaluate(self, node, scope, depth + 1)
        return COMPUTED


def last_name(node: ast.AST) -> str:
    """Return a name, or the last part of an attribute; "" for any other expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def argument_of(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return the expression of an argument that is passed by name, or at its position; None without it."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if named is not None or position is None:
        return named
    return call.args[position] if len(call.args) > position else None


def reaching_bindings(bindings: list[Binding], line: int) -> list[Binding]:
    """Return the bindings that may be in effect at a line of their scope: none from before the last unconditional
    one."""
    earlier = [binding for binding in bindings if binding.line < line] or list(bindings)
    last = max((i for i, binding in enumerate(earlier) if binding.straight), default=0)
    return earlier[last:]


def _evaluate_name(source: ScriptSource, node: ast.Name, scope: Scope, depth: int) -> Any:
    target = source.once(node.id, scope)
    return COMPUTED if target is None or find_accidental_tuple(source, target[0]) else source.value(*target, depth)


def _evaluate_unary(source: ScriptSource, node: ast.UnaryOp, scope: Scope, depth: int) -> Any:
    value = source.value(node.operand, scope, depth)
    if isinstance(value, int | float) and isinstance(node.op, ast.USub | ast.UAdd):
        return -value if isinstance(node.op, ast.USub) else value
    return not value if isinstance(value, bool) and isinstance(node.op, ast.Not) else COMPUTED


def _evaluate_arithmetic(source: ScriptSource, node: ast.BinOp, scope: Scope, depth: int) -> Any:
    sides = [source.value(side, scope, depth) for side in (node.left, node.right)]
    numbers = all(isinstance(side, int | float) and abs(side) < LARGEST for side in sides)
    if not numbers or type(node.op) not in ARITHMETIC:
        return COMPUTED
    try:
        return ARITHMETIC[type(node.op)](*sides)
    except ArithmeticError:
        return COMPUTED


def _evaluate_sequence(source: ScriptSource, node: ast.List | ast.Tuple, scope: Scope, depth: int) -> Any:
    values = [source.value(item, scope, depth) for item in node.elts]
    if COMPUTED in values:
        return COMPUTED
    return values if isinstance(node, ast.List) or any(isinstance(value, str) for value in values) else tuple(values)


def _evaluate_mapping(source: ScriptSource, node: ast.Dict, scope: Scope, depth: int) -> Any:
    keys = [COMPUTED if key is None else source.value(key, scope, depth) for key in node.keys]
    values = [source.value(value, scope, depth) for value in node.values]
    constant = all(isinstance(key, str | int) for key in keys) and COMPUTED not in values
    return dict(zip(keys, values, strict=True)) if constant else COMPUTED


def _evaluate_subscript(source: ScriptSource, node: ast.Subscript, scope: Scope, depth: int) -> Any:
    mapping, mapping_scope = source.expression(node.value, scope)
    key = source.value(node.slice, scope, depth)
    if not isinstance(mapping, ast.Dict) or key is COMPUTED:
        return COMPUTED
    entries = [
        value
        for name, value in zip(mapping.keys, mapping.values, strict=True)
        if isinstance(name, ast.Constant) and name.value == key
    ]
    return (
        source.value(entries[0], mapping_scope, depth) if len(entries) == 1 and None not in mapping.keys else COMPUTED
    )


def _evaluate_attribute(source: ScriptSource, node: ast.Attribute, scope: Scope, depth: int) -> Any:
    """Return the value of an attribute: a torch dtype by its name, a parser option, or a class constant."""
    origin = source.origin(node, scope)
    if origin and origin.startswith("torch.") and node.attr in DTYPES:
        return PLAIN.get(node.attr, node.attr)
    if any(
        node.attr in module_source.set_attributes
        for module_source in (source, *source.modules.values())
        if module_source is not None
    ):
        return COMPUTED
    module = source.global_of(f"{origin}") if origin else None
    if module is not None:
        return source.value(*module, depth)
    option_value = parser_option_value(source, node.value, scope, node.attr)
    if option_value is not None:
        return option_value if isinstance(option_value, str | int | float | list) or option_value is COMPUTED else None
    return class_attribute_value(source, node, scope, depth)


_EVALUATORS: dict[type[ast.expr], Callable[[ScriptSource, Any, Scope, int], Any]] = {
    ast.Name: _evaluate_name,
    ast.UnaryOp: _evaluate_unary,
    ast.BinOp: _evaluate_arithmetic,
    ast.List: _evaluate_sequence,
    ast.Tuple: _evaluate_sequence,
    ast.Dict: _evaluate_mapping,
    ast.Subscript: _evaluate_subscript,
    ast.Attribute: _evaluate_attribute,
}


def find_accidental_tuple(source: ScriptSource, node: ast.expr) -> str | None:
    """Return the number that a stray comma made a tuple, written `262144,` or `262,144` without brackets, or None."""
    if not isinstance(node, ast.Tuple) or not 1 <= len(node.elts) <= 4 or source.text_of(node).startswith("("):
        return None
    parts = [source.text_of(item) for item in node.elts]
    numbers = [item for item in node.elts if isinstance(item, ast.Constant) and type(item.value) in (int, float)]
    thousands = all(len(part) == 3 and part.isdecimal() for part in parts[1:]) and len(parts[0]) <= 3
    is_number = len(numbers) == len(parts) and (len(parts) == 1 or thousands)
    return "".join(parts) if is_number else None


def parse_script(path: Path) -> ScriptSource:
    """Read and parse a Python file.

    Raises:
        ConfigError: it cannot be read, is too large, or is not text or not Python.
    """
    text = _text(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
        return _build_scopes(path, text, tree)
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        problem = f"not valid Python {version}: {error.msg}"
        raise ConfigError(
            problem, code="E3020", path=path, line=error.lineno, help="correct the line, or the one above it"
        ) from None
    except (RecursionError, MemoryError):
        raise ConfigError("nested too deeply to be a script", code="E3021", path=path) from None
    except ValueError as error:
        raise ConfigError(f"not valid Python: {error}", code="E3022", path=path) from None


def _text(path: Path) -> str:
    if path.is_dir() or (path.is_fifo() and not str(path).startswith(("/dev/", "/proc/"))):
        raise ConfigError("not a regular file", code="E3023", path=path, help="name the script")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", code="E3024", path=path, help="check its path and permissions"
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES // MIB} MiB: not a script", code="E3025", path=path)
    if b"\0" in data:
        line = data[: data.index(b"\0")].count(b"\n") + 1
        raise ConfigError(
            "contains null bytes: not a text file", code="E3026", path=path, line=line, help="save the script as UTF-8"
        )
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"not {error.encoding} text", code="E3027", path=path, line=line, help="save the script as UTF-8"
        ) from None
    except (SyntaxError, LookupError) as error:
        problem = getattr(error, "msg", None) or str(error)
        raise ConfigError(
            f"cannot be decoded: {problem}", code="E3028", path=path, line=1, help="save the script as UTF-8"
        ) from None


def _build_scopes(path: Path, text: str, tree: ast.Module) -> ScriptSource:
    """Build the scopes of a file: every node with its scope, in the order of the file."""
    module = Scope(tree)
    source = ScriptSource(path, text, module)
    module.home = source
    stack: list[tuple[ast.AST, Scope, bool, bool]] = [(tree, module, True, False)]
    while stack:
        node, scope, straight, guarded = stack.pop()
        source.nodes.append((node, scope))
        _bind(source, node, scope, straight, guarded)
        inner = scope
        if isinstance(node, Function | ast.ClassDef):
            inner = source.inside[node] = Scope(node, scope, home=source)
            _parameters(node, inner)
        branches = isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.AsyncFor)
        straight_below = (isinstance(node, Function | ast.ClassDef)) or (straight and not branches)
        guarded_below = guarded or isinstance(node, ast.Try)
        stack += [(child, inner, straight_below, guarded_below) for child in reversed(list(ast.iter_child_nodes(node)))]
    return source


def _parameters(node: Function | ast.ClassDef, scope: Scope) -> None:
    if isinstance(node, ast.ClassDef):
        return
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            scope.bind(argument.arg, Binding(None, argument.lineno))


def _bind(source: ScriptSource, node: ast.AST, scope: Scope, straight: bool, guarded: bool) -> None:
    """Record the names that a node binds and the values that it changes."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets if node.value is not None else ():
            _assign(source, target, node.value, scope, straight)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for name, dotted in _imports(node):
            scope.bind(name, Binding(ImportedName(dotted, node.lineno, guarded), node.lineno, straight))
    elif isinstance(node, ast.Global | ast.Nonlocal):
        source.changed.update(node.names)
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        source.changed.add(node.target.id)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        source.changed.update([node.func.value.id] if isinstance(node.func.value, ast.Name) else [])
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope.bind(node.name, Binding(None, node.lineno, straight))
    elif isinstance(node, ast.NamedExpr):
        scope.bind(node.target.id, Binding(None, node.lineno, False))
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        source.changed.update([node.value.id] if isinstance(node.value, ast.Name) else [])
    elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        source.set_attributes.add(node.attr)
    else:
        _bind_others(node, scope)


def _bind_others(node: ast.AST, scope: Scope) -> None:
    """Record the names bound by loops, comprehensions, `with`, `except` and patterns."""
    targets: list[ast.AST] = []
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [node.optional_vars]
    names = [name_node for target in targets for name_node in ast.walk(target) if isinstance(name_node, ast.Name)]
    for name in names:
        scope.bind(name.id, Binding(None, name.lineno, False))
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        scope.bind(node.name, Binding(None, node.lineno, False))


def _assign(source: ScriptSource, target: ast.expr, value: ast.expr | None, scope: Scope, straight: bool) -> None:
    if isinstance(target, ast.Name):
        scope.bind(target.id, Binding(value, target.lineno, straight))
    elif isinstance(target, ast.Tuple | ast.List):
        parallel = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        for i, item in enumerate(target.elts):
            if isinstance(item, ast.Starred):
                item, value = item.value, None
            if isinstance(item, ast.Name) and parallel and isinstance(value, ast.Tuple | ast.List):
                scope.bind(item.id, Binding(value.elts[i], item.lineno, straight))
            elif isinstance(item, ast.Name):
                scope.bind(item.id, Binding(value, item.lineno, straight, element=i))


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield (bound name, what it stands for) for an import; the target of a relative import begins with its dots."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}.{alias.name}"
        elif alias.asname:
            yield alias.asname, alias.name
        else:
            root = alias.name.partition(".")[0]
            yield root, root


# ---------------------------------------------------------------- parser options, and classes of constants

DATACLASS_PARSERS = ("HfArgumentParser", "TrlParser")
OWN_SETUP = ("__init__", "__post_init__", "__new__", "__getattr__", "__getattribute__", "__setattr__")
"""Methods that may set attributes to other values than the class body does."""


@dataclass
class ParserOptions:
    """The options of one command-line parser.

    Attributes:
        defaults: option → its default, or COMPUTED if it is not written out.
        switches: the options without a value.
        types: option → its `type` as written: the name of a function, or "" for any other expression.
        whole: whether every option is written out and an unknown one stops the script.
    """

    defaults: dict[str, Any] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    types: dict[str, str] = field(default_factory=dict)
    whole: bool = True


def parser_option_value(source: ScriptSource, node: ast.expr, scope: Scope, name: str) -> Any:
    """Return the value of `args.name`: COMPUTED if it is not certain, None if `args` comes from no parser.

    A default of None is COMPUTED too: another part of the script decides.
    """
    call, element, home, call_scope = _find_parser_call(source, node, scope)
    if call is None or not isinstance(call.func, ast.Attribute):
        return None
    if call.func.attr == "parse_args_into_dataclasses":
        dataclass_node = _dataclass(home, call.func.value, call_scope, element)
        return None if dataclass_node is None else _passed_value(home, name, _field(home, dataclass_node, name))
    options = find_parser_options(home, call.func.value, call_scope)
    if options is None or name not in options.defaults:
        return COMPUTED
    return _passed_value(home, name, options.defaults[name], name in options.switches, options.types.get(name))


def _passed_value(source: ScriptSource, name: str, default: Any, switch: bool = False, kind: str | None = None) -> Any:
    """Return the value that the launch scripts beside the script pass for an option, or else its default.

    Args:
        kind: the name of argparse's `type`; None if there is none.
    """
    values = source.passed.get(name)
    if not values:
        return COMPUTED if default is None else default
    if len(values) > 1 or None in values:
        return COMPUTED
    text = next(iter(values)) or ""
    if switch or (text == "" and isinstance(default, bool)):
        return True
    if kind is not None:
        return _convert_argument(text, kind)
    if isinstance(default, bool) or text in ("True", "False", "true", "false"):
        return text.lower() in ("true", "1", "yes")
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _convert_argument(written: str, kind: str) -> Any:
    """Return what argparse's `type` converts a text to; COMPUTED for a function defined by the script."""
    if kind in ("int", "float", "str", "bool"):  # bool("False") is True
        try:
            return {"int": int, "float": float, "str": str, "bool": bool}[kind](written)
        except ValueError:
            return COMPUTED
    return written.lower() in ("true", "1", "yes", "y", "on") if "bool" in kind.lower() else COMPUTED


def _find_parser_call(
    source: ScriptSource, node: ast.expr, scope: Scope
) -> tuple[ast.Call | None, int, ScriptSource, Scope]:
    """Return the parser call that an expression stands for, the index of its result, its file and its scope."""
    target, element = source.expression(node, scope), 0
    call, call_scope = target
    if isinstance(call, ast.Name):
        binding = _single(call_scope, call.id)
        if binding is not None and isinstance(binding.value, ast.expr) and binding.element is not None:
            call, element = binding.value, binding.element
    if isinstance(call, ast.Subscript) and isinstance(call.slice, ast.Constant):
        number = call.slice.value
        if type(number) is int:
            call, element = call.value, number
    names = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")
    parses = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names
    return (call if parses and isinstance(call, ast.Call) else None), element, call_scope.home or source, call_scope


def _single(scope: Scope, name: str) -> Binding | None:
    match = scope.find(name)
    return match[1][0] if match and len(match[1]) == 1 else None


def find_parser_options(source: ScriptSource, parser: ast.expr, scope: Scope) -> ParserOptions | None:
    """Return the options added to an argparse parser, or None for any other parser."""
    construction, _ = source.expression(parser, scope)
    origin = source.origin(construction.func, scope) if isinstance(construction, ast.Call) else None
    if origin not in ("argparse.ArgumentParser", "ArgumentParser") or not isinstance(parser, ast.Name):
        return None
    options = ParserOptions(
        whole=not any(keyword.arg == "parents" for keyword in getattr(construction, "keywords", ()))
    )
    groups = {parser.id, *_groups(source, parser.id)}
    for node, call_scope in source.each(ast.Call):
        if not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "add_subparsers" or any(isinstance(x, ast.Name) and x.id in groups for x in node.args):
            options.whole = False  # other code may add options
        owner = node.func.value
        in_group = isinstance(owner, ast.Call) and "add_argument_group" in ast.dump(owner.func)
        if node.func.attr == "add_argument" and ((isinstance(owner, ast.Name) and owner.id in groups) or in_group):
            _add(source, node, call_scope, options)
        elif node.func.attr == "set_defaults":
            options.defaults.update(dict.fromkeys((k.arg for k in node.keywords if k.arg), COMPUTED))
    return options


def _groups(source: ScriptSource, parser: str) -> Iterator[str]:
    """Yield the names of a parser's argument groups."""
    for node, _ in source.each(ast.Assign):
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr.endswith("_group"):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _add(source: ScriptSource, node: ast.Call, scope: Scope, options: ParserOptions) -> None:
    flags = [
        argument.value
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if not flags or len(flags) != len(node.args) or None in keywords:
        options.whole = False
        return
    long_flags = [flag for flag in flags if flag.startswith("--")]
    name = (long_flags or flags)[0].lstrip("-").replace("-", "_")
    if "dest" in keywords:
        dest = source.value(keywords["dest"], scope)
        name = dest if isinstance(dest, str) else name
    action = source.value(keywords["action"], scope) if "action" in keywords else "store"
    default: Any = source.value(keywords["default"], scope) if "default" in keywords else None
    if action in ("store_true", "store_false"):
        options.switches.add(name)
        default = action == "store_false" if default is None else default
    kind = keywords.get("type")
    if kind is not None or "nargs" in keywords:
        options.types[name] = kind.id if isinstance(kind, ast.Name) and "nargs" not in keywords else ""
        if isinstance(default, str) and "nargs" not in keywords:  # argparse converts a default that is a string, too
            default = _convert_argument(default, options.types[name])
    required = "required" in keywords and source.value(keywords["required"], scope) is not False
    options.defaults[name] = COMPUTED if required or not flags[0].startswith("-") else default
    # argparse accepts each spelling of the option.
    options.defaults.update({flag.lstrip("-").replace("-", "_"): options.defaults[name] for flag in long_flags})


def script_options(source: ScriptSource) -> ParserOptions | None:
    """Return the options of a script's only parser if it rejects any others; None if that is not certain."""
    calls = [(node, scope) for node, scope in source.each(ast.Call) if isinstance(node.func, ast.Attribute)]
    parses = [(node, scope) for node, scope in calls if node.func.attr in ("parse_args", "parse_known_args")]
    parsers = [
        node for node, scope in source.each(ast.Call) if (source.origin(node.func, scope) or "").endswith("Parser")
    ]
    if len(parses) != 1 or parses[0][0].func.attr != "parse_args" or parses[0][0].args or len(parsers) != 1:
        return None
    options = find_parser_options(source, parses[0][0].func.value, parses[0][1])
    return options if options is not None and options.whole else None


def takes_training_arguments(source: ScriptSource) -> bool:
    """Return whether the script's command line consists of the arguments of transformers or TRL."""
    for node, scope in source.each(ast.Call):
        if (source.origin(node.func, scope) or "").rpartition(".")[2] in DATACLASS_PARSERS and node.args:
            classes = node.args[0].elts if isinstance(node.args[0], ast.Tuple | ast.List) else [node.args[0]]
            origins = [source.origin(class_, scope) or "" for class_ in classes]
            if any(origin.endswith(("TrainingArguments", "SFTConfig")) for origin in origins):
                return True
    return False


def _dataclass(source: ScriptSource, parser: ast.expr, scope: Scope, element: int) -> ast.ClassDef | None:
    """Return the class of one of the results of an HfArgumentParser, or None."""
    call, call_scope = source.expression(parser, scope)
    if not isinstance(call, ast.Call) or not call.args:
        return None
    if (source.origin(call.func, call_scope) or "").rpartition(".")[2] not in DATACLASS_PARSERS:
        return None
    argument, call_scope = source.expression(call.args[0], call_scope)
    classes = argument.elts if isinstance(argument, ast.Tuple | ast.List) else [argument]
    chosen_class = classes[element] if 0 <= element < len(classes) else None
    return _class(source, chosen_class.id) if isinstance(chosen_class, ast.Name) else None


def _class(source: ScriptSource, name: str) -> ast.ClassDef | None:
    definitions = [definition for definition, _ in source.each(ast.ClassDef) if definition.name == name]
    return definitions[0] if len(definitions) == 1 else None


def class_attribute_value(source: ScriptSource, node: ast.Attribute, scope: Scope, depth: int) -> Any:
    """Return the value of an attribute of a class of constants, or of an instance of it."""
    target, target_scope = source.expression(node.value, scope)
    home = target_scope.home or source
    keywords: dict[str | None, ast.expr] = {}
    if isinstance(target, ast.Call) and not target.args:
        keywords = {keyword.arg: keyword.value for keyword in target.keywords}
        target = target.func
    if not isinstance(target, ast.Name) or None in keywords:
        return COMPUTED
    owner = _class(home, target.id)
    match = target_scope.find(target.id)
    bound = match[1][0].value if owner is None and match and len(match[1]) == 1 else None
    if isinstance(bound, ImportedName):
        module, _, name = bound.dotted.rpartition(".")
        module_source = home.beside(module) if module else None
        home, owner = (module_source, _class(module_source, name)) if module_source else (home, None)
    if owner is None or not _is_plain(owner, bool(keywords)):
        return COMPUTED
    if node.attr in keywords:
        return source.value(keywords[node.attr], target_scope, depth)
    value = _field(home, owner, node.attr)
    return COMPUTED if value is None and not _sets(home, owner, node.attr) else value


def _is_plain(owner: ast.ClassDef, called: bool) -> bool:
    """Return whether a class's attributes are what its body assigns: no bases, and no method that sets them."""
    methods = [method.name for method in owner.body if isinstance(method, ast.FunctionDef)]
    dataclassed = any("dataclass" in ast.dump(decorator) for decorator in owner.decorator_list)
    return not owner.bases and not set(methods) & set(OWN_SETUP) and (dataclassed or not called)


def _sets(source: ScriptSource, owner: ast.ClassDef, name: str) -> bool:
    return len(source.inside[owner].names.get(name, [])) == 1


def _field(source: ScriptSource, owner: ast.ClassDef, name: str) -> Any:
    """Return the default of a class field; COMPUTED if it is not written out."""
    scope = source.inside[owner]
    bindings = scope.names.get(name, [])
    value = bindings[0].value if len(bindings) == 1 else None
    if not isinstance(value, ast.expr):
        return COMPUTED
    if isinstance(value, ast.Call) and last_name(value.func) in ("field", "Field"):
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        factory = keywords.get("default_factory")
        inner = keywords.get("default") or (factory.body if isinstance(factory, ast.Lambda) else None)
        return source.value(inner, scope) if inner is not None else COMPUTED
    return source.value(value, scope)
