"""Counts what makes the code easy or hard to read: size, length of functions, files that an addition touches, dead and
double names, untyped results, docstrings and words that break the rules.

python scripts/house.py [--json] [--source DIR]    (DIR: another src/surefit; tests/arch/test_house.py has the limits)
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import re
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "surefit"
EXEMPLARS = {
    "a parallel mode": r"\bzero3\b",
    "an optimizer": r"paged_adamw_32bit\b",
    "a telemetry sink": r"[Tt]ensor[Bb]oard",
    "a recipe": r"amr_parsing\b",
    "a rule": r"PAR013",
}
"""Kind of addition → what every file that knows one of that kind mentions; the plainest one, without peculiarities."""
VOCABULARY = {"config/renamed.py", "importers/known.py", "importers/requirements.py", "lint/rules/requirements.py"}
"""Keys and packages of other tools: one may be called as something of ours is, and stays as it is."""
PATCHED = {"model/compat.py", "plan/loading.py", "plan/ranks.py", "plan/simulate.py"}
"""Where names of other packages may be replaced: while training, while libraries are imported, and on fake tensors."""
SETTERS = ("setattr", "mock.patch.object", "patch.object")
Function = ast.FunctionDef | ast.AsyncFunctionDef
BEGINNINGS = re.compile(r"(Of|Those|That|What it|Whoever|Nobody)\b")
"""What no docstring begins with: its subject would be the reader's guess."""
VERBLESS = re.compile(
    r"(The|An?|What|Whether|One|Every|How|Where|All|As|Each|Why|Which|Its|With|In|On|From|For|Some|Several|Only)\b"
)
"""What a function's docstring begins with that does not say first what the function does."""
BANNED = re.compile(r"\b(without a word|has room|whoever|so many|those of|asks? for|told|nobody)\b", re.IGNORECASE)
"""Words of riddles, in messages and docstrings."""
PRONOUNS = re.compile(r"own|one|each|mine|found|said|told|given|asked|here|there|taken|held|made|seen|wanted")
"""Names of variables that do not say what they hold."""


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path

    @property
    def file(self) -> str:
        return self.path.relative_to(SOURCE).as_posix()

    @property
    def name(self) -> str:
        return ".".join(["surefit", *self.path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def knowledge(self) -> str:
        """The text without the pages of rules: what they quote as an example is not what an addition has to change."""
        pages = {
            line
            for node in self.functions
            if any(ast.unparse(decorator).startswith("rule(") for decorator in node.decorator_list)
            for line in _docstring_lines(node)
        }
        return "\n".join(line for at, line in enumerate(self.text.splitlines(), 1) if at not in pages)

    @property
    def definitions(self) -> Iterator[Function | ast.ClassDef]:
        """At the top of the file."""
        yield from (node for node in self.tree.body if isinstance(node, Function | ast.ClassDef))

    @property
    def functions(self) -> Iterator[Function]:
        yield from (node for node in ast.walk(self.tree) if isinstance(node, Function))


def modules() -> list[Module]:
    return [Module(path) for path in sorted(SOURCE.rglob("*.py"))]


def source_lines(module: Module) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstring_lines(module.tree)))


def _docstring_lines(tree: ast.AST) -> Iterator[int]:
    """Those of every string that stands alone as a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def function_lengths(found: Iterable[Module]) -> list[int]:
    """Lines of each function, its docstring left out."""
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1 - len(set(_docstring_lines(node)))
        for module in found
        for node in module.functions
    ]


def touched(found: Iterable[Module], pattern: str) -> list[str]:
    """Files that mention what an addition of this kind is called."""
    return [module.file for module in found if module.file not in VOCABULARY and re.search(pattern, module.knowledge)]


def defined_twice(found: Iterable[Module]) -> dict[str, list[str]]:
    """Public names at the top of more than one file; rules and commands have theirs from a table."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in found:
        for node in module.definitions:
            if not node.name.startswith("_"):
                places[node.name].append(module.file)
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def without_caller(found: Iterable[Module]) -> list[str]:
    """Functions and classes that nothing in the package mentions; decorated ones are called by what decorates them."""
    found = list(found)
    mentioned: dict[str, int] = defaultdict(int)
    for module in found:
        for name in _mentions(module.tree):
            mentioned[name] += 1
    return [
        f"{module.file}:{node.lineno} {node.name}"
        for module in found
        for node in module.definitions
        if not mentioned[node.name] and not node.decorator_list and node.name not in ("main", "__getattr__")
    ]


def _mentions(tree: ast.AST) -> Iterator[str]:
    """Every name that is read, imported from another file's text, or written in a string that a loader takes apart."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
            yield from re.findall(r"\w+", node.value)


def untyped_results(found: Iterable[Module]) -> list[str]:
    """Functions that return `dict[str, Any]`: neither a reader nor a type checker knows what is in it."""
    return [
        f"{module.file}:{node.lineno} {node.name}"
        for module in found
        for node in module.functions
        if node.returns is not None and ast.unparse(node.returns) == "dict[str, Any]"
    ]


def docstrings(module: Module) -> Iterator[tuple[ast.AST, int, str]]:
    """What each docstring documents, its line, and its text; strings under attributes are docstrings, too."""
    for node in ast.walk(module.tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            yield node, getattr(node, "lineno", 1), text
        body = getattr(node, "body", None)
        for first, second in itertools.pairwise(body if isinstance(body, list) else []):
            if isinstance(first, ast.Assign | ast.AnnAssign) and (text := _stated(second)):
                yield first, second.lineno, text


def _stated(node: ast.stmt) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def unclear_docstrings(found: Iterable[Module]) -> list[str]:
    """Docstrings with a beginning that no docstring may have."""
    return [
        f"{module.file}:{line} {text[:60]!r}"
        for module in found
        for _, line, text in docstrings(module)
        if BEGINNINGS.match(text)
    ]


def verbless_docstrings(found: Iterable[Module]) -> list[str]:
    """Docstrings of functions, but for rules (they are pages), that do not begin with a verb."""
    return [
        f"{module.file}:{line} {text[:60]!r}"
        for module in found
        for node, line, text in docstrings(module)
        if isinstance(node, Function) and not node.decorator_list and VERBLESS.match(text)
    ]


def banned_words(found: Iterable[Module]) -> list[str]:
    """Words of riddles in any text of the source: docstrings and messages."""
    return [
        f"{module.file}:{node.lineno} {match[0]}"
        for module in found
        if module.file not in VOCABULARY
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for match in BANNED.finditer(node.value)
    ]


def pronoun_variables(found: Iterable[Module]) -> list[str]:
    """Places where a variable gets a value whose name is a pronoun or a participle."""
    return [
        f"{module.file}:{node.lineno} {node.id}"
        for module in found
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and PRONOUNS.fullmatch(node.id)
    ]


def rooms(found: Iterable[Module]) -> dict[str, tuple[int, int]]:
    """Files and lines of code of each room."""
    sizes: dict[str, tuple[int, int]] = {}
    for module in found:
        room = module.file.partition("/")[0].removesuffix(".py")
        files, lines = sizes.get(room, (0, 0))
        sizes[room] = files + 1, lines + source_lines(module)
    return dict(sorted(sizes.items(), key=lambda entry: -entry[1][1]))


def circles(found: Iterable[Module], types: bool = False) -> list[list[str]]:
    """Files that import one another, directly or around; imports for types alone count where `types` says so."""
    found = list(found)
    names = {module.name: module.file for module in found}
    graph = {
        module.file: {names[name] for name in _imports(module, names, types) if name != module.name} for module in found
    }
    return sorted(group for group in _strong(graph) if len(group) > 1)


def _imports(module: Module, names: dict[str, str], types: bool) -> Iterator[str]:
    skipped = {
        id(inner)
        for node in ast.walk(module.tree)
        if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(module.tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in names:
                    yield inner
                elif node.module in names:
                    yield node.module


def _strong(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Strongly connected components (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            place = stack.index(node)
            groups.append(sorted(stack[place:]))
            del stack[place:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return iter(groups)


def patches(found: Iterable[Module]) -> list[str]:
    """Attributes of other packages' modules and classes that are replaced, outside the places for it."""
    return [
        f"{module.file}:{line} {what}"
        for module in found
        if module.file not in PATCHED
        for line, what in _replaced(module.tree)
    ]


def _replaced(tree: ast.Module) -> Iterator[tuple[int, str]]:
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names} - {"sys"}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("surefit"):
            foreign |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                text = ast.unparse(target)
                if isinstance(target, ast.Attribute) and _root(target) in foreign and ".config." not in text:
                    yield node.lineno, text
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in SETTERS and _root(node.args[0]) in foreign:
            yield node.lineno, ast.unparse(node)[:80]


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def report() -> dict[str, Any]:
    found = modules()
    lengths = sorted(function_lengths(found))
    return {
        "files": len(found),
        "source_lines": sum(map(source_lines, found)),
        "rooms": rooms(found),
        "functions": len(lengths),
        "function_lines": {
            "p50": round(statistics.median(lengths)),
            "p90": lengths[int(0.9 * len(lengths))],
            "max": lengths[-1],
        },
        "files_to_touch": {kind: touched(found, pattern) for kind, pattern in EXEMPLARS.items()},
        "defined_twice": defined_twice(found),
        "without_caller": without_caller(found),
        "circles": circles(found),
        "circles_with_types": circles(found, types=True),
        "untyped_results": untyped_results(found),
        "unclear_docstrings": unclear_docstrings(found),
        "verbless_docstrings": verbless_docstrings(found),
        "banned_words": banned_words(found),
        "pronoun_variables": pronoun_variables(found),
        "fmt_skip": sum(module.text.count("# fmt: skip") for module in found),
        "patches_outside_their_place": patches(found),
    }


LISTED = ("defined_twice", "without_caller", "circles", "circles_with_types", "patches_outside_their_place")
COUNTED = ("untyped_results", "unclear_docstrings", "verbless_docstrings", "banned_words", "pronoun_variables")


def main() -> None:
    global SOURCE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--source", type=Path, default=SOURCE)
    options = parser.parse_args()
    SOURCE = options.source.resolve()
    found = report()
    if options.json:
        print(json.dumps(found, indent=1))
        return
    lines = found["function_lines"]
    print(f"{found['source_lines']:,} lines of code in {found['files']} files")
    print(", ".join(f"{room} {lines:,} ({files})" for room, (files, lines) in found["rooms"].items()))
    print(f"{found['functions']:,} functions: p50 {lines['p50']}, p90 {lines['p90']}, max {lines['max']} lines")
    for title in COUNTED:
        print(f"{title.replace('_', ' ')}: {len(found[title])}")
    print(f"fmt: skip: {found['fmt_skip']}")
    for kind, files in found["files_to_touch"].items():
        print(f"{kind}: {len(files)} files: {', '.join(files)}")
    for title in LISTED:
        print(f"\n{title.replace('_', ' ')}: {len(found[title])}")
        entries = found[title].items() if isinstance(found[title], dict) else found[title]
        for entry in entries:
            print(f"  {entry}")


if __name__ == "__main__":
    main()
