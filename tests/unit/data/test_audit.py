"""The audit of whole files: what it counts, that processes do not change it, what it does with what is odd."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from surefit import nano, recipes
from surefit.core.errors import DataError
from surefit.data.audit import chunk, near_duplicates, whole
from surefit.data.audit.chunk import AuditJob
from surefit.data.audit.lengths import LengthCounts
from surefit.data.audit.passport import build_histogram, build_passport, summarize_lengths
from surefit.data.audit.sample import DetectorTally, audit_sample
from surefit.data.audit.whole import AuditResult, audit_rows
from surefit.data.read.load import Rows, load_rows
from surefit.data.rows.layouts import to_examples
from surefit.data.tokens import tokenize

SFT = partial(recipes.get_recipe, "chat")
QUESTION = AuditJob(source="", columns=(), recipe=SFT, recipe_name="chat")
NAMES = ["ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "willow"]


def row(n: int) -> dict[str, Any]:
    tree, other = NAMES[n % 12], NAMES[(n // 12 + 5 * n) % 12]
    return {"prompt": f"Which tree stands at plot {n}, row {n * 7}, {tree}?", "completion": f"The {other} of {n * 13}."}


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Rows]:
    """made(rows, name) → the rows, read from a file."""

    def make(rows: list[dict[str, Any]], name: str = "train.jsonl") -> Rows:
        path = tmp_path / name
        path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
        return load_rows(str(path))

    return make


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(nano.PATH)


def seen(found: AuditResult) -> dict[str, tuple[int, int]]:
    return {name: (one.rows, one.of) for name, one in found.facts.observations.items() if one.rows}


def listed(lengths: LengthCounts) -> list[int]:
    """The lengths in order."""
    return np.repeat(*lengths.counted()).tolist()


def test_what_is_wrong_with_rows_is_counted_with_its_first_places(made: Callable[..., Rows]) -> None:
    rows = [row(n) for n in range(40)]
    rows[7] = {"prompt": "Why?", "completion": None}
    rows[9] = {"prompt": "How so?", "completion": "  "}
    rows[20] = rows[3]
    rows[21] = {"prompt": rows[4]["prompt"].upper(), "completion": rows[4]["completion"] + "!"}
    found = audit_rows(made(rows), QUESTION)
    observations = found.facts.observations
    assert {name: seen(found)[name] for name in ("null_target", "blank_target", "duplicate", "near_duplicate")} == {
        "null_target": (1, 40), "blank_target": (1, 40), "duplicate": (1, 40), "near_duplicate": (1, 40),
    }  # fmt: skip
    assert observations["unusable_row"].rows == 2
    assert observations["null_target"].examples[0].endswith("train.jsonl:8: completion is null")
    first, _, earlier = observations["duplicate"].examples[0].partition(": the same as ")
    assert (first.rpartition(":")[2], earlier.rpartition(":")[2]) == ("21", "4")
    assert "train.jsonl:22: 100% the same as" in observations["near_duplicate"].examples[0]
    assert len(found.given) == 38
    assert found.dataset.target_null == 1
    assert found.dataset.first_bad.endswith("train.jsonl:8")


def test_rows_that_differ_only_in_their_number_are_duplicates(made: Callable[..., Rows]) -> None:
    found = audit_rows(made([{"id": n, **row(1)} for n in range(3)]), QUESTION)
    assert found.facts.observations["duplicate"].rows == 2
    assert found.facts.observations["constant_target"].rows == 3


def test_lengths_are_those_of_what_is_trained(made: Callable[..., Rows], tokenizer: Any) -> None:
    rows = made([row(n) for n in range(30)] + [{"prompt": "Hi", "completion": "word " * 200}])
    question = replace(QUESTION, tokenizer=lambda: tokenizer, max_length=150)
    found = audit_rows(rows, question)
    encoded = tokenize.encode(tokenizer, to_examples(rows, SFT()).examples)
    assert found.unit == "tokens"
    assert listed(found.whole) == sorted(len(ids) for ids, _ in encoded)
    assert listed(found.learnt) == sorted(sum(supervised) for _, supervised in encoded)
    over = found.facts.observations["over_max_length"]
    longest = max(len(ids) for ids, _ in encoded)
    assert (over.rows, over.of) == (1, 31)
    assert over.examples[0].endswith(f"train.jsonl:31: {longest} tokens, {longest - 150} over max_length 150")
    assert over.detail.startswith(f"{longest} of {sum(len(ids) for ids, _ in encoded):,} tokens")
    assert found.facts.observations["template_round_trip"].of == 31
    assert found.facts.observations["template_round_trip"].rows == 0
    assert found.facts.observations["mask_inside_prompt"].rows == 0


@pytest.mark.parametrize("turns", [("user", "assistant"), ("system", "user", "assistant", "user", "assistant")])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
def test_counting_is_as_exact_as_encoding(tokenizer: Any, turns: tuple[str, ...], tools: Any) -> None:
    messages = [{"role": role, "content": f"{role} says {n} ünï 東京"} for n, role in enumerate(turns)]
    examples = [SFT().to_example({"messages": messages, "tools": tools}), SFT().to_example({"text": "plain text"})]
    for group in (examples[:1], examples):
        encoded = tokenize.encode(tokenizer, group)
        assert tokenize.count_token_lengths(tokenizer, group) == [[(len(ids), sum(learnt))] for ids, learnt in encoded]


def test_texts_are_taken_in_portions_without_changing_anything(
    made: Callable[..., Rows], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, question = made([row(n) for n in range(40)] + [row(3)]), replace(QUESTION, tokenizer=lambda: tokenizer)
    at_once = audit_rows(rows, question)
    monkeypatch.setattr(chunk, "CHARACTERS", 100)
    monkeypatch.setattr(near_duplicates, "CHARACTERS", 100)
    by_and_by = audit_rows(rows, question)
    assert by_and_by.facts == at_once.facts
    assert listed(by_and_by.given) == listed(at_once.given)


def test_without_a_tokenizer_lengths_are_characters(made: Callable[..., Rows]) -> None:
    found = audit_rows(made([{"prompt": "abc", "completion": "de"}, {"prompt": "f", "completion": "ghij"}]), QUESTION)
    assert (found.unit, listed(found.given), listed(found.learnt)) == ("characters", [1, 3], [2, 4])


def test_several_processes_find_the_same(made: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(n) for n in range(95)]
    rows[50], rows[90], rows[12] = rows[2], {**rows[33], "prompt": rows[33]["prompt"].lower()}, {"prompt": "x"}
    loaded = made(rows)
    monkeypatch.setattr(whole, "CHUNK", 10)
    one = audit_rows(loaded, QUESTION)
    monkeypatch.setattr(whole, "START_SECONDS", 1e-6)
    done: list[int] = []
    two = audit_rows(loaded, QUESTION, workers=2, on_progress=lambda n, total, text: done.append(n))
    assert (one.workers, two.workers) == (1, 2)
    assert done == [*range(10, 100, 10), 95]
    assert two.facts == one.facts
    for name in ("given", "learnt"):
        assert listed(getattr(one, name)) == listed(getattr(two, name))
    assert build_passport(one, loaded, [], {}) == build_passport(two, loaded, [], {})
    monkeypatch.setattr(whole, "CHUNK", 1000)
    assert build_passport(audit_rows(loaded, QUESTION), loaded, [], {}) == build_passport(one, loaded, [], {})


def test_prompts_of_scored_rows_are_looked_for_in_training(made: Callable[..., Rows]) -> None:
    train = made([row(n) for n in range(60)])
    same, near = row(7) | {"completion": "Another."}, row(9) | {"prompt": row(9)["prompt"].replace("?", " ?").upper()}
    scored = {"data.eval": made([row(100), same, near], "eval.jsonl"), "other": made([row(101)], "other.jsonl")}
    found = audit_rows(train, QUESTION, scored=scored)
    exact, close = (found.facts.observations[name] for name in ("leak_exact", "leak_near"))
    assert (exact.rows, exact.of, close.rows, close.of) == (1, 4, 1, 4)
    assert exact.examples[0].endswith(f"eval.jsonl:2: the prompt of {train.where(7)}")
    assert close.examples[0].endswith(f"eval.jsonl:3: 100% the prompt of {train.where(9)}")
    assert exact.detail.startswith("data.eval: 1 the same and 1 nearly, of 3; other: 0 the same")
    assert found.scored["other"]["leak_exact"] == 0


def test_a_tokenizer_that_loses_text_is_seen(made: Callable[..., Rows]) -> None:
    lossy = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "rules/AUD006/collapsing")
    rows = [{"prompt": "Write it", "completion": f"def f():\n    return {n}"} for n in range(6)]
    rows.append({"prompt": "Say", "completion": "one line"})
    found = audit_rows(made(rows), replace(QUESTION, tokenizer=lambda: lossy))
    trip = found.facts.observations["template_round_trip"]
    assert (trip.rows, trip.of) == (6, 7)
    assert "'\\n    return 0<|end|>' is decoded as" in trip.examples[0]


def test_rows_of_no_known_layout_are_looked_at_as_they_are(made: Callable[..., Rows]) -> None:
    rows = made([{"movie": n, "rating": "good film"} for n in range(5)])
    found = audit_rows(rows, AuditJob(source="ratings", columns=()))
    assert "unusable_row" not in found.facts.observations
    assert len(found.given) == 0
    content = build_passport(found, rows, [], {})
    assert content["lengths"]["whole"] == {"total": 0}
    assert content["supervised_share"] is None


def test_columns_that_do_not_fit_the_recipe_are_refused(made: Callable[..., Rows]) -> None:
    with pytest.raises(DataError, match="no format has the columns movie"):
        audit_rows(made([{"movie": 1}]), QUESTION)


def test_a_conversation_that_the_template_refuses_is_unusable(made: Callable[..., Rows], tokenizer: Any) -> None:
    class Refusing:
        """A tokenizer whose template takes no question with the word "no" in it."""

        chat_template, name_or_path = tokenizer.chat_template, "refusing"

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            return tokenizer(*arguments, **named)

        def apply_chat_template(self, conversations: list[list[dict[str, str]]], **named: Any) -> Any:
            if any(turn["content"] == "no" for turns in conversations for turn in turns):
                raise ValueError("no is no question")
            return tokenizer.apply_chat_template(conversations, **named)

    rows = made([row(0), {"prompt": "no", "completion": "yes"}, row(2)])
    found = audit_rows(rows, replace(QUESTION, tokenizer=Refusing))
    unusable = found.facts.observations["unusable_row"]
    assert unusable.rows == 1
    assert "train.jsonl:2: the model's chat template does not accept" in unusable.examples[0]
    assert len(found.given) == 2


def test_the_passport_names_the_data(made: Callable[..., Rows]) -> None:
    rows = made([row(n) for n in range(3)])
    content = build_passport(audit_rows(rows, QUESTION), rows, [], {"recipe": "chat"})
    data = rows.files[0].read_bytes()
    assert content["sha256"] == hashlib.sha256(data).hexdigest()
    assert content["files"] == [{"name": "train.jsonl", "bytes": len(data), "sha256": content["sha256"]}]
    digests = [
        hashlib.sha256(json.dumps(row(n), sort_keys=True, ensure_ascii=False).encode()).digest() for n in range(3)
    ]
    assert content["content_sha256"] == hashlib.sha256(b"".join(digests)).hexdigest()
    assert content["columns"] == {"prompt": 3, "completion": 3}
    assert content["scripts"] == {"Latin": 1.0}
    assert sum(content["languages"].values()) == pytest.approx(1, abs=0.01)
    json.dumps(content, allow_nan=False)


def test_writing_systems_are_told_by_their_letters(made: Callable[..., Rows]) -> None:
    rows = made([{"prompt": "abc 123!", "completion": "привет"}, {"prompt": "東京", "completion": "ab"}])
    scripts = audit_rows(rows, QUESTION).scripts
    assert scripts == {"Cyrillic": 6, "Latin": 5, "Han": 2}


def test_a_histogram_counts_every_length_once() -> None:
    lengths = LengthCounts([5, 5, 17, 23, 99] * 60 + [100_000])
    bins = build_histogram(lengths)
    assert sum(bins.counts) + bins.over == len(lengths)
    assert bins.over == 1
    assert bins.counts[5 // bins.width] == 120
    summary = summarize_lengths(lengths)
    assert (summary["min"], summary["p50"], summary["max"]) == (5, 17, 100_000)


def test_tallies_merge_to_what_one_would_have_counted() -> None:
    parts = [DetectorTally(), DetectorTally(), DetectorTally()]
    together = DetectorTally()
    for index in range(12):
        for tally in (parts[index // 4], together):
            tally.add("odd" if index % 2 else "even", index, f"row {index}")
    merged = DetectorTally()
    for part in parts:
        merged.merge(part)
    assert merged == together


def test_the_quick_audit_needs_no_tokenizer_and_keeps_row_numbers(made: Callable[..., Rows]) -> None:
    rows = made([row(n) if n != 500 else {"prompt": "Who?", "completion": "n/a"} for n in range(1000)])
    facts = audit_sample(rows, "chat", limit=500)
    assert (facts.rows, facts.audited) == (1000, 500)
    placeholder = facts.seen("placeholder")
    assert placeholder is not None
    assert placeholder.rows == 1
    assert "train.jsonl:501: " in placeholder.examples[0]
