"""One way of writing in all the sources of a run: of `data.train`, `data.mix` and the sets that are scored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app

CASES = Path(__file__).parents[3] / "shared/cases/teams/t3/dir"
CONFIG = """recipe: {recipe}
model: {{name_or_path: surefit/nano, dtype: float32}}
data: {{train: {train}, eval: {held_out}, mix: {mix}, max_length: 256}}
evaluate: {{extra_sets: {also}}}
hardware: {{gpu: cpu}}
output_dir: run
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def findings(
    verb: str, train: str, held_out: Any = 0.3, mix: Any = "{}", also: Any = "{}", recipe: str = "chat"
) -> list:
    text = CONFIG.format(train=train, held_out=held_out, mix=mix, also=also, recipe=recipe)
    Path("run.yaml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, [verb, "run.yaml", "--json"])
    document = json.loads(result.stdout.strip().splitlines()[-1])
    return [found["field"] for found in document["findings"] if found["code"] == "AUD033"]


def graph(n: int, joined: str) -> dict[str, Any]:
    text = f"(w / want :agent (c / little{joined}boy) :theme (g / go :mod (n / number{n})))"
    return {"prompt": f"Parse sentence {n}.", "completion": text}


def final(n: int, way: str) -> dict[str, Any]:
    return {"prompt": f"What is {n} + 1?", "completion": f"We add one to {n}.\n" + way.format(n + 1)}


def spaced_json(n: int, colon: str) -> dict[str, Any]:
    return {"prompt": f"Give number {n}.", "completion": f'{{"number"{colon}{n}}}'}


def write(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


KINDS: list[tuple[Callable[[int, str], dict[str, Any]], str, str]] = [
    (graph, "_", " "), (final, "#### {}", "\\boxed{{{}}}"), (spaced_json, ": ", ":")
]  # fmt: skip


@pytest.mark.parametrize("verb", ["check", "audit"])
@pytest.mark.parametrize(("row", "one", "other"), KINDS, ids=["TA4-graphs", "TA4-final-answers", "TA4-json"])
def test_sources_in_two_ways(place: Path, verb: str, row: Callable[..., dict[str, Any]], one: str, other: str) -> None:
    train = write("train.jsonl", [row(n, one) for n in range(60)])
    second = write("second.jsonl", [row(n, other) for n in range(100, 140)])
    same = write("same.jsonl", [row(n, one) for n in range(200, 240)])
    assert findings(verb, train, mix=f"{{{second}: 1}}") == ["data.train"]
    assert findings(verb, train, held_out=second) == ["data.eval"]
    assert findings(verb, train, held_out=same, also=f"{{old: {second}}}") == ["evaluate.extra_sets.old"]
    assert findings(verb, train, held_out=same, mix=f"{{{same}: 1}}" if verb == "check" else "{}") == []


def test_rows_of_several_tasks_have_ways_of_their_own(place: Path) -> None:
    from surefit import samples

    names = [name for name in samples.list_samples() if "math" in name or "function-calling" in name]
    math = next(name for name in names if "math" in name and "train" in name)
    tools = next(name for name in names if "function-calling-train" in name)
    assert findings("check", math, mix=f"{{{tools}: 1}}", recipe="math_reasoning + function_calling") == []


@pytest.mark.parametrize("way", ["data.mix", "data.eval"], ids=["TA4-mix", "TA4-eval"])
def test_a_team_s_files(place: Path, way: str) -> None:
    if not CASES.is_dir():
        pytest.skip("the cases are not on this machine")
    first, second = (str(path) for path in sorted(CASES.glob("*.txt"))[:2])
    found = (
        findings("check", first, mix=f"{{{second}: 1}}", recipe="amr_parsing")
        if way == "data.mix"
        else findings("check", first, held_out=second, recipe="amr_parsing")
    )
    assert found == ["data.train" if way == "data.mix" else "data.eval"]
