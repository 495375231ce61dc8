"""Rows shared between processes: every row once, parts put together again, answers of all processes kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefit.evaluate.answer_cache import AnswerCache
from surefit.evaluate.distributed import local_row_indices, merge_results
from surefit.evaluate.record import VariantResult
from surefit.evaluate.rows import EvalRows, GeneratedAnswer
from surefit.generate.engine import Generation
from surefit.parallel.process_group import World
from surefit.task import Example


def rows_of(lengths: list[int]) -> EvalRows:
    examples = [Example(({"role": "user", "content": "x" * length},)) for length in lengths]
    return EvalRows(list(range(len(lengths))), examples, [f"eval:{n}" for n in range(len(lengths))])


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_row_is_answered_by_one_process_and_all_have_about_as_much_to_read(size: int) -> None:
    lengths = [(37 * n) % 101 * 10 for n in range(61)]
    rows = rows_of(lengths)
    parts = [local_row_indices(rows, World(rank, size)) for rank in range(size)]
    assert sorted(place for part in parts for place in part) == list(range(61))
    assert all(part == sorted(part) for part in parts), "in the order of the set"
    sums = [sum(lengths[place] for place in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths)


def test_more_processes_than_rows() -> None:
    parts = [local_row_indices(rows_of([5, 9]), World(rank, 4)) for rank in range(4)]
    assert parts == [[1], [0], [], []]


def scored(indices: list[int], seconds: float) -> VariantResult:
    lines = [{"index": index} for index in indices]
    return VariantResult("base", lines, {"strategy": "greedy"}, {}, 1, 2, seconds, 10 * len(indices))


def test_the_parts_put_together() -> None:
    found = merge_results([scored([0, 3], 2.0), scored([1, 2, 4], 3.0), scored([], 0.0)])
    assert [line["index"] for line in found.lines] == [0, 1, 2, 3, 4]
    assert (found.truncated, found.unparsed, found.seconds, found.tokens) == (3, 6, 3.0, 50)


def answer(text: str) -> GeneratedAnswer:
    return GeneratedAnswer((Generation(text, False, 1),))


def test_each_process_has_a_file_and_reads_those_of_all(tmp_path: Path) -> None:
    path = tmp_path / "base.partial.jsonl"
    for rank, key in enumerate(("a", "b", "c")):
        AnswerCache(path, {"model": "m"}, rank).add([(key, answer(key))], 1.0)
    AnswerCache(tmp_path / "base.partial.jsonl", {"model": "other"}, 3).add([("d", answer("d"))], 1.0)
    AnswerCache(tmp_path / "base2.partial.jsonl", {"model": "m"}).add([("e", answer("e"))], 1.0)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "base.partial.1.jsonl", "base.partial.2.jsonl", "base.partial.3.jsonl", "base.partial.jsonl",
        "base2.partial.jsonl",
    ]  # fmt: skip
    other = tmp_path / "base.partial.2.jsonl"
    other.write_bytes(other.read_bytes() + b'{"key": "f", "seco')
    before = other.read_bytes()
    found = AnswerCache(path, {"model": "m"}, 1).read()
    assert {key: value[0].generations[0].text for key, value in found.items()} == {"a": "a", "b": "b", "c": "c"}
    assert other.read_bytes() == before, "another process may be writing to it"
    AnswerCache(path, {"model": "m"}).forget()
    assert [file.name for file in tmp_path.iterdir()] == ["base2.partial.jsonl"]


def test_tools_count_too() -> None:
    plain = Example(({"role": "user", "content": "long" * 20},))
    with_tools = Example((), ({"name": "x" * 500},), text="t")
    assert local_row_indices(EvalRows([0, 1], [plain, with_tools], ["a", "b"]), World(0, 2)) == [1]
