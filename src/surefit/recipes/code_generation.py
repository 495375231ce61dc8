"""Programming tasks: the answer is Python, which is judged by running tests against it in the sandbox.

Rows as in HumanEval (prompt, entry_point, canonical_solution, test) or as in MBPP (text or prompt, code, test_list,
test_setup_code or test_imports). The answer is a fenced block of Python, or Python alone.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from surefit.core.errors import DataError, did_you_mean
from surefit.core.units import truncate_text
from surefit.evaluate.sandbox import MAX_SOURCE, TIMEOUT_S, Program, SandboxResult, require_sandbox, run_many
from surefit.facts.free_text import LIKELIHOOD
from surefit.metrics.pass_at_k import pass_at_k
from surefit.metrics.strict_json import json_kind
from surefit.task import Example, Message, Prediction, Row, Scores, TaskRecipe

INSTRUCTION = "Write the Python code. Answer with one code block and nothing else."
_COMPLETE = "Complete this function:\n"
_PASSING = "Your code should pass these tests:\n"
_HELP = (
    "a row has task_id and either prompt, entry_point, test and canonical_solution (as HumanEval) or text, test_list "
    "and code (as MBPP); without canonical_solution or code it can be scored but not trained on"
)
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PASS_AT = (1, 5, 10, 100)


@dataclass(frozen=True)
class GoldTests:
    """Tests that judge an answer.

    Attributes:
        tests: source that raises unless the program is correct.
        names: the program's names that the tests use.
        before: source that the tests need and that does not belong to the program.
        prefix: HumanEval's prompt: imports, helpers and the function's signature, which an answer may leave out.
        entry_point: the function whose signature ends the prefix; empty where there is no prefix.
    """

    tests: str
    names: tuple[str, ...]
    before: str = ""
    prefix: str = ""
    entry_point: str = ""

    def program(self, code: str) -> str:
        """Return the whole program: an answer that defines the function is complete, another continues the prompt."""
        if len(code) > MAX_SOURCE:  # the sandbox does not run it, so it is not parsed here
            return code
        dedented = code if _tree(code) else textwrap.dedent(code)  # a block inside a list is indented as a whole
        if not self.prefix:
            return dedented
        if self.entry_point in _defined(dedented):
            return f"{_complete_program(self.prefix)}\n{dedented}"
        return self.prefix + code

    def job(self, code: str) -> Program:
        """Return the job for the sandbox."""
        return Program(self.program(code), self.tests, self.names, self.before)


def to_example(row: Row) -> Example:
    """Convert a row of either format to system (instruction), user (task), assistant (a fenced block).

    Raises:
        DataError: a column is missing or empty, or the tests or the reference are not Python; `field` names it.
    """
    gold, task, solution = _humaneval(row) if "entry_point" in row else _mbpp(row)
    messages: list[Message] = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": task}]
    if solution is None:
        return Example(messages=tuple(messages), reference=gold)
    completion = f"```python\n{solution.strip(chr(10))}\n```"
    messages.append({"role": "assistant", "content": completion})
    return Example(messages=tuple(messages), completion=completion, reference=gold)


def to_gold(row: Row) -> Example:
    """Convert a row to its tests alone."""
    return Example(reference=to_example(row).reference)


def _humaneval(row: Row) -> tuple[GoldTests, str, str | None]:
    prompt, entry, test = (_text(row, column) for column in ("prompt", "entry_point", "test"))
    assert prompt is not None
    assert entry is not None
    assert test is not None
    _parsed(_complete_program(prompt), "prompt")
    _parsed(test, "test")
    gold = GoldTests(f"{test}\ncheck({entry})", (entry,), _complete_program(prompt), prompt, entry)
    body = _text(row, "canonical_solution", needed=False)
    task = f"{_COMPLETE}```python\n{prompt.rstrip()}\n```"
    if body is None:
        return gold, task, None
    _parsed(prompt + body, "canonical_solution")
    return gold, task, prompt + body


def _mbpp(row: Row) -> tuple[GoldTests, str, str | None]:
    task = _text(row, "text" if "text" in row or "prompt" not in row else "prompt")
    code = _text(row, "code", needed=False)
    tests = _lines(row, "test_list")
    setup = _text(row, "test_setup_code", needed=False, empty=True)
    imports = _lines(row, "test_imports", needed=False)
    # The setup may use the program's definitions, so it comes after them: MBPP's own order fails for two of its rows.
    source = _unix("\n".join([setup or "", *tests]))
    tree = _parsed(source, "test_list")
    defined = _imports_of(code, tree) if code is not None else ([], set())
    before = "\n".join([*imports, *defined[0]])
    names = _used_of_program(tree, _parsed(before, "test_imports"), defined[1])
    prompt = f"{task}\n{_PASSING}" + "\n".join(test.strip() for test in tests)
    return GoldTests(source, names, before), prompt, _unix(code) if code is not None else None


def _imports_of(code: str, tests: ast.Module) -> tuple[list[str], set[str]]:
    """Return the reference's imports that the tests use too, and the names that the reference defines."""
    tree = _parsed(_unix(code), "code")
    used_names = _names(tests)
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {_bound(alias) for node in imports for alias in node.names}
    shared = [ast.unparse(node) for node in imports if any(_bound(alias) in used_names for alias in node.names)]
    return shared, _top_level(tree) - imported


def _used_of_program(tests: ast.Module, before: ast.Module, defined: set[str]) -> tuple[str, ...]:
    """Return the names in the tests that only the program can define: the reference's, or otherwise undefined ones."""
    defined_elsewhere = set(dir(builtins)) | _top_level(before) | _top_level(tests) | _local(tests)
    return tuple(sorted(name for name in _names(tests) if name in defined or name not in defined_elsewhere))


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _local(tree: ast.AST) -> set[str]:
    """Return the names bound anywhere inside: loop variables, arguments."""
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return bound | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def _top_level(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {_bound(alias) for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _text(row: Row, column: str, needed: bool = True, empty: bool = False) -> str | None:
    if column not in row and not needed:
        return None
    value = row.get(column)
    if isinstance(value, str) and (value.strip() or empty):
        return value
    if column not in row:
        columns = ", ".join(map(repr, row)) or "none"
        problem = f"the row has no column {column!r}, only {columns}{did_you_mean(column, row)}"
    else:
        problem = f"{column} is {'empty' if isinstance(value, str) else json_kind(value)}"
    raise DataError(problem, code="E7092", field=column, help=_HELP)


def _lines(row: Row, column: str, needed: bool = True) -> list[str]:
    value: Any = row.get(column)
    if value is None and not needed:
        return []
    if column not in row:
        _text(row, column)
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value) or (needed and not value):
        problem = f"{column} is {'empty' if value == [] else json_kind(value)}, not a list of strings"
        raise DataError(problem, code="E7093", field=column, help=_HELP)
    return value


def _unix(source: str) -> str:
    """Convert line ends: MBPP's are CRLF."""
    return source.replace("\r\n", "\n")


def _complete_program(prompt: str) -> str:
    """Return the prompt as a complete program: a signature without a docstring gets a body."""
    return prompt if _tree(prompt) else f"{prompt.rstrip()}\n    pass\n"


def _tree(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # "\d" in a model's answer is not our warning
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _parsed(source: str, column: str) -> ast.Module:
    tree = _tree(source)
    if tree is None:
        raise DataError(
            f"{column} is not Python: {truncate_text(repr(source))}", code="E7094", field=column, help=_HELP
        )
    return tree


def _is_python(program: str) -> bool:
    """Return whether an answer parses; one that is too long to run does not count: Python's parser needs 143 s for an
    f-string of 500,000 characters, in this process and without reacting to Ctrl-C.
    """
    return len(program) <= MAX_SOURCE and _tree(program) is not None


def _defined(code: str) -> set[str]:
    tree = _tree(code)
    return _top_level(tree) if tree else set()


def parse(text: str) -> str | None:
    """Extract the Python from an answer; None where there is none.

    The fenced blocks marked as Python (or, without one, the unmarked blocks) are joined; the last one may be unclosed.
    Without a fence, the whole text.
    """
    blocks = [(language.lower(), code) for language, code in _FENCE.findall(text)]
    for languages in (("python", "py", "python3"), ("",)):
        sources = [code for language, code in blocks if language in languages]
        if sources:
            return _blank_as_none("\n".join(sources))
    return None if blocks else _blank_as_none(text)


def _blank_as_none(code: str) -> str | None:
    return code if code.strip() else None


def _results(gold: GoldTests, programs: Sequence[str | None]) -> Iterable[SandboxResult | None]:
    require_sandbox()
    sandbox_results = iter(run_many([gold.job(code) for code in programs if code is not None], TIMEOUT_S))
    return [None if code is None else next(sandbox_results) for code in programs]


def _gold(example: Example) -> GoldTests:
    if not isinstance(example.reference, GoldTests):
        raise DataError("the row has no tests to score against", code="E7095", field="test_list", help=_HELP)
    return example.reference


def _score(example: Example, prediction: Prediction) -> Scores:
    return _score_samples(example, [prediction])


def _score_samples(example: Example, predictions: Sequence[Prediction]) -> Scores:
    """Return pass@k for every k up to the number of answers; the other metrics are means over the answers."""
    gold = _gold(example)
    programs: list[str | None] = [prediction.parsed for prediction in predictions]
    results = list(_results(gold, programs))
    n, passed = len(results), sum(result is not None and result.status == "passed" for result in results)
    valid = sum(code is not None and _is_python(gold.program(code)) for code in programs)
    timeouts = sum(result is not None and result.status == "timeout" for result in results)
    passes = {f"pass@{k}": pass_at_k(n, passed, k) for k in PASS_AT if k <= n}
    return passes | {"syntax_valid": valid / n, "timeout": timeouts / n}


RECIPE = TaskRecipe(
    name="code_generation",
    purpose="Writes Python for a task in words, and is judged by running tests.",
    version=3,
    citation=(
        "HumanEval and pass@k: arXiv:2107.03374, openai/human-eval commit 6d43fb9; MBPP: arXiv:2108.07732; run by "
        "surefit's own sandbox"
    ),
    columns=("task_id",),
    to_example=to_example,
    parse=parse,
    score=_score,
    primary_metric="pass@1",
    metrics=(*(f"pass@{k}" for k in PASS_AT), "syntax_valid", "timeout", LIKELIHOOD),
    score_samples=_score_samples,
    to_gold=to_gold,
)
