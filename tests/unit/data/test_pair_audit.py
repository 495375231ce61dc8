"""What an audit sees in pairs of answers: each number on rows for which it was computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.rows_config import rows_config

from surefit.data.audit.chunk import AuditJob
from surefit.data.audit.pairs import (
    CONTRADICTION,
    IDENTICAL,
    LONGER,
    NEAR,
    SAME_PROMPT,
    SWAPPED,
    TRUNCATED,
    find_swapped_scores,
    length_bias,
    observe_pairs,
    word_similarity,
)
from surefit.data.audit.whole import audit_rows
from surefit.data.read.load import load_rows
from surefit.data.rows.columns import recipe_for
from surefit.data.rows.layouts import to_examples
from surefit.data.rows.unread_fields import UNREAD, find_unread_columns
from surefit.facts.audit import Observation
from surefit.recipes import get_recipe

RECIPE = recipe_for(get_recipe("chat"), rows_config(objective="dpo"))
WORDS = " ".join(f"w{n}" for n in range(39))
ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "chosen": "yes it is", "rejected": "no", "score_chosen": 8, "score_rejected": 3},
    {"prompt": "a", "chosen": "no", "rejected": "yes it is", "score_chosen": 8, "score_rejected": 3},
    {"prompt": "b", "chosen": "same", "rejected": "same "},
    {
        "prompt": "c",
        "chosen": f"{WORDS} end",
        "rejected": f"{WORDS.upper()}, close",
        "score_chosen": 2,
        "score_rejected": 9,
    },
    {"prompt": "a", "chosen": "yes it is", "rejected": "no"},
]


def observed(tmp_path: Path, rows: list[dict[str, Any]]) -> tuple[dict[str, Observation], dict[str, Observation], str]:
    """Return the observations on a check's sample and of the audit of all rows, and the file's name."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    loaded = load_rows(str(path))
    sampled = observe_pairs(to_examples(loaded, RECIPE), loaded, loaded.where, {})
    job = AuditJob(source=str(path), columns=(), recipe=lambda: RECIPE, recipe_name="chat")
    return sampled, dict(audit_rows(loaded, job).facts.observations), str(path)


def test_each_pattern_is_seen_with_its_rows(tmp_path):
    sampled, audited, path = observed(tmp_path, ROWS)
    expected = {
        IDENTICAL: (1, 5, [3]),
        NEAR: (1, 5, [4]),  # 39 of 40 words: 97.5 %
        SWAPPED: (1, 5, [4]),
        CONTRADICTION: (2, 5, [2, 5]),  # row 2 reverses row 1, and row 5 reverses row 2
        SAME_PROMPT: (2, 5, [2, 5]),
        LONGER: (2, 4, [1, 5]),  # rows 3 has equal lengths; in rows 2 and 4 the rejected answer is longer
    }
    for observations in (sampled, audited):
        for name, (rows, of, lines) in expected.items():
            observation = observations[name]
            assert (name, observation.rows, observation.of) == (name, rows, of)
            assert [example.split(": ")[0] for example in observation.examples] == [f"{path}:{line}" for line in lines]
    assert "3 different prompts; the most frequent has 3 pairs" in sampled[SAME_PROMPT].detail
    assert TRUNCATED not in audited  # without a tokenizer


def test_rows_of_one_answer_show_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    rows = load_rows(str(path))
    assert observe_pairs(to_examples(rows, get_recipe("chat")), rows, rows.where, {}) == {}


@pytest.mark.parametrize(
    ("one", "other", "similarity"),
    [
        ("It is 4.", "it is, 4", 1.0),
        (f"{WORDS} end", f"{WORDS} close", 0.975),
        ("one two three four", "one two three five", 0.0),  # 75 %, which is below the limit
        ("", "", 0.0),
    ],
)
def test_the_share_of_words_in_common(one, other, similarity):
    assert word_similarity(one, other) == pytest.approx(similarity)


def test_the_bias_of_length():
    # Chosen 3, 5, 2 against rejected 1, 5, 4: of the nine comparisons 3>1, 5>1, 5>4, 2>1 are won and 5=5 is a tie.
    bias = length_bias([(3, 1), (5, 5), (2, 4)])
    assert (bias.longer, bias.unequal) == (1, 2)
    assert bias.share[0] == 0.5
    assert bias.auc[0] == pytest.approx(4.5 / 9)
    # Wilson's interval of 1 of 2 at 95 %.
    assert bias.share[1:] == pytest.approx((0.0945, 0.9055), abs=1e-4)


def test_length_that_tells_every_answer():
    bias = length_bias([(10 + n, n) for n in range(10)])
    assert bias.share[0] == 1.0
    assert bias.auc == pytest.approx((1.0, 1.0, 1.0))


def test_the_interval_of_the_auc():
    # Two pairs, (2, 1) and (2, 3): each chosen answer is above half of the rejected ones. The first rejected answer is
    # below both chosen ones (1), the second below none (0): the sums are 1/2 + 1 - 1 and 1/2 + 0 - 1, so that the
    # variance is (1/4 + 1/4) / (2 * 1) = 1/4, and the half width 1.96 * 1/2, which is cut at 0 and 1.
    assert length_bias([(2, 1), (2, 3)]).auc == pytest.approx((0.5, 0.0, 1.0))
    # A hundred such pairs: variance (100 * 1/4) / (100 * 99), half width 0.0985.
    assert length_bias([(2, 1), (2, 3)] * 50).auc == pytest.approx((0.5, 0.5 - 0.0985, 0.5 + 0.0985), abs=1e-4)


def test_answers_that_differ_beyond_max_length(tmp_path, tokenizer):
    long = " ".join(["word"] * 200)
    rows = [
        {"prompt": long, "chosen": "yes", "rejected": "no"},
        {"prompt": "short", "chosen": "yes", "rejected": "no"},
        {"prompt": "short", "chosen": f"yes {long}", "rejected": f"no {long}"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job = AuditJob(
        source=str(path),
        columns=(),
        recipe=lambda: RECIPE,
        recipe_name="chat",
        tokenizer=lambda: tokenizer,
        max_length=64,
    )
    audit = audit_rows(load_rows(str(path)), job)
    observation = audit.facts.observations[TRUNCATED]
    assert (observation.rows, observation.of) == (1, 3)
    assert observation.examples[0].startswith(f"{path}:1:")
    assert audit.facts.observations["over_max_length"].rows == 2
    assert len(audit.whole) == 6  # two conversations per pair


def test_scores_are_swapped_with_the_answers():
    """The advice for swapped scores, taken, is enough."""
    row = {"chosen": "a", "rejected": "b", "score_chosen": 2, "score_rejected": 9}
    assert find_swapped_scores(row, {})
    assert not find_swapped_scores(row, {"chosen": "rejected", "rejected": "chosen"})
    assert find_swapped_scores(row | {"score_chosen": 10}, {"chosen": "rejected", "rejected": "chosen"})


def test_score_columns_of_pairs_are_not_named_as_unread(tmp_path):
    path = tmp_path / "rows.jsonl"
    scored = [row | {"score_chosen": 8, "score_rejected": 3, "mood": "glad"} for row in ROWS]
    path.write_text("".join(json.dumps(row) + "\n" for row in scored), encoding="utf-8")
    found = find_unread_columns(load_rows(str(path)), RECIPE, "auto", None)
    assert found[UNREAD].examples == ("mood",)
