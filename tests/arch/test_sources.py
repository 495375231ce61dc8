"""The house's habits that no linter holds: sizes, one door to the environment and to the screen, nothing evaluated."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/surefit").rglob("*.py"))
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def where(file: Path, node: ast.AST | None = None) -> str:
    place = str(file.relative_to(ROOT))
    return f"{place}:{node.lineno}" if node is not None and hasattr(node, "lineno") else place


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """What is looked at here, of every file of src: read once for all tests."""
    kinds = (*FUNCTION, ast.Import, ast.ImportFrom, ast.Attribute, ast.Call)
    trees = ((file, ast.parse(file.read_text(encoding="utf-8"))) for file in SOURCES)
    return [(file, node) for file, tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    yield
    nodes.cache_clear()


def uses(wrong: Callable[[ast.AST], bool], allowed: str | None = None) -> list[str]:
    """Where a kind of node stands in src, but for the one file that may have it."""
    return [where(file, node) for file, node in nodes() if wrong(node) and where(file) != allowed]


def lengths() -> dict[str, int]:
    """Lines of every function, its docstring not counted."""
    found = {}
    for file, node in nodes():
        if isinstance(node, FUNCTION):
            first = node.body[0]
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            docstring = (first.end_lineno or 0) - first.lineno + 1 if is_text and ast.get_docstring(node) else 0
            found[f"{where(file, node)} {node.name}"] = (node.end_lineno or 0) - node.lineno + 1 - docstring
    return found


def test_functions_are_short() -> None:
    sizes = lengths()
    ordered = sorted(sizes.values())
    assert {name: size for name, size in sizes.items() if size > 80} == {}
    assert statistics.median(ordered) <= 15
    assert ordered[len(ordered) * 9 // 10] <= 40


def is_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    )


def test_the_environment_is_read_in_one_file() -> None:
    assert uses(is_environment, allowed="src/surefit/core/env.py") == []


def imports(package: str) -> Callable[[ast.AST], bool]:
    def wrong(node: ast.AST) -> bool:
        if isinstance(node, ast.Import):
            return any(alias.name.partition(".")[0] == package for alias in node.names)
        return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package

    return wrong


def test_rich_is_used_in_one_file() -> None:
    assert uses(imports("rich"), allowed="src/surefit/cli/render.py") == []


@pytest.mark.parametrize("package", ["pickle", "cPickle", "dill", "marshal", "shelve"])
def test_nothing_is_unpickled(package: str) -> None:
    assert uses(imports(package)) == []


def calls(*names: str) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def test_no_text_is_run_as_code_but_inside_the_sandbox() -> None:
    wrong = uses(calls("eval", "exec", "compile"))
    assert [place for place in wrong if place.partition(":")[0] != "src/surefit/core/jail_inside.py"] == []


def test_the_library_does_not_print() -> None:
    assert uses(calls("print"), allowed="src/surefit/cli/render.py") == []


def is_unsafe_torch_load(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"):
        return False
    safe = [word for word in node.keywords if word.arg == "weights_only" and ast.unparse(word.value) == "True"]
    return not safe


def test_torch_load_reads_tensors_only() -> None:
    assert uses(is_unsafe_torch_load) == []


@pytest.mark.parametrize(
    ("wrong", "source"),
    [
        (is_environment, "os.environ['A']"),
        (is_environment, "from os import getenv"),
        (imports("rich"), "import rich.table"),
        (imports("rich"), "from rich.table import Table"),
        (calls("eval", "exec", "compile"), "eval('1')"),
        (is_unsafe_torch_load, "torch.load(path)"),
        (is_unsafe_torch_load, "torch.load(path, weights_only=False)"),
    ],
)
def test_what_is_wrong_is_seen(wrong: Callable[[ast.AST], bool], source: str) -> None:
    assert any(wrong(node) for node in ast.walk(ast.parse(source)))


STARTS_PYTHON = {
    "core/processes.py": "our own processes: -P, and the package by its file",
    "core/jail.py": "the sandbox: -I, which is more",
    "doctor/devices.py": "the self-test: -P",
    "doctor/probes.py": "names it",
    "doctor/script.py": "names it",
    "core/limited.py": "tries a function: -I, which is more",
    "facts/validate_model_files.py": "tries an expression: -I, which is more",
    "launch/slurm.py": "names its environment",
    "merge/quantised.py": "llama.cpp's converter, in the checkout that the user named",
}


def test_whoever_starts_a_python_process_leaves_out_the_working_directory() -> None:
    found = {
        str(file.relative_to(ROOT / "src/surefit"))
        for file, node in nodes()
        if isinstance(node, ast.Attribute) and node.attr == "executable" and ast.unparse(node) == "sys.executable"
    }
    assert found <= set(STARTS_PYTHON), "own_command of core/processes.py does it"
    pools = uses(lambda node: isinstance(node, ast.Call) and "ProcessPoolExecutor" in ast.unparse(node.func))
    assert [place.partition(":")[0] for place in pools] == ["src/surefit/core/processes.py"]
