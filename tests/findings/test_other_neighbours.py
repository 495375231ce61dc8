"""Neighbours of findings about splits, adapters and samples, as an independent test tried them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import call as surefit
from tests.findings.conftest import write_rows

from surefit.core.errors import DataError
from surefit.data.sources import files_of, resolve_source

ROW: dict[str, object] = {"prompt": "a", "completion": "b"}


def write_all(names: tuple[str, ...]) -> None:
    for name in names:
        path = Path("rows", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, [ROW])


@pytest.mark.parametrize(
    "names",
    [
        ("rows.jsonl", "test.jsonl"),
        ("data.jsonl", "eval.jsonl"),
        ("rows.jsonl", "valid.jsonl"),
        ("rows.jsonl", "dev.jsonl"),
        ("gsm8k.jsonl", "gsm8k_test_1k.jsonl"),
        ("train.jsonl", "validate.jsonl"),
        ("alpaca_cleaned.jsonl", "alpaca_holdout.jsonl"),
        ("alpaca_cleaned.jsonl", "alpaca_held_out.jsonl"),
        ("dolly.jsonl", "alpaca.jsonl", "hold-out.jsonl"),
        ("rows-00000-of-00001.jsonl", "TEST-00000-of-00001.jsonl"),
        ("math.jsonl", "squadTest.jsonl"),
        ("math.jsonl", "testset_v2.jsonl"),
        ("math.jsonl", "test_gsm8k.jsonl"),
        ("math.jsonl", "squad_validation_en.jsonl"),
    ],
    ids=lambda names: f"N1-9-{names[-1]}",
)
def test_a_file_named_for_a_split_beside_others_is_not_read(names: tuple[str, ...]) -> None:
    write_all(names)
    for source in ("rows", "rows/*.jsonl"):
        with pytest.raises(DataError) as raised:
            files_of(resolve_source(source))
        assert raised.value.code == "E4125"
        assert names[-1] in raised.value.message


@pytest.mark.parametrize(
    "names",
    [
        ("contest.jsonl", "rows.jsonl"),
        ("latest.jsonl", "rows.jsonl"),
        ("devices.jsonl", "rows.jsonl"),
        ("unit_test_generation.jsonl", "rows.jsonl"),
        ("unit_tests.jsonl", "unit_test.jsonl", "rows.jsonl"),
        ("test_cases_a.jsonl", "test_cases_b.jsonl", "rows.jsonl"),
        ("test_generation.jsonl", "rows.jsonl"),
        ("valid_sql.jsonl", "rows.jsonl"),
        ("game_dev.jsonl", "web-development.jsonl", "cooking.jsonl"),
        ("lm_eval_harness.jsonl", "rows.jsonl"),
        ("test-1.jsonl", "test-2.jsonl"),
        ("alpaca_test.jsonl", "dolly_test.jsonl"),
        ("eval.jsonl", "validation-extra.jsonl"),
        ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"),
        ("train_a.jsonl", "extra.jsonl"),
        ("test.jsonl",),
    ],
    ids=lambda names: f"N1-9-not-{names[0]}",
)
def test_subjects_and_whole_splits_are_read(names: tuple[str, ...]) -> None:
    write_all(names)
    assert [Path(file).name for file in files_of(resolve_source("rows"))] == sorted(names)


def test_a_directory_named_for_a_split_beside_others() -> None:
    """N1-9 for a pattern that enters directories."""
    write_all(("a.jsonl", "test/b.jsonl"))
    with pytest.raises(DataError) as raised:
        files_of(resolve_source("rows/**/*.jsonl"))
    assert raised.value.code == "E4125"
    assert len(files_of(resolve_source("rows/test"))) == 1
