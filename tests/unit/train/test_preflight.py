"""Before the first step: sound batches pass and are written down, any other stops the run with nothing trained."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from transformers import AutoTokenizer

from surefit import nano
from surefit.core.errors import GateError
from surefit.core.rundir import RunDir, read_json
from surefit.data.audit.batches import Item
from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.collate import collate
from surefit.data.tokens.tokenize import encode
from surefit.task import Example
from surefit.train import batches
from surefit.train.preflight import require_sound_batches


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(nano.PATH)


@pytest.fixture(scope="module")
def rows(tokenizer: Any) -> list[Item]:
    """64 conversations as surefit/nano sees them."""
    turns = [("user", f"what is {n} + {n}?" + " please" * (n % 7)) for n in range(64)]
    examples = [
        Example(({"role": role, "content": text}, {"role": "assistant", "content": f"it is {2 * n}"}))
        for n, (role, text) in enumerate(turns)
    ]
    return [(np.array(ids), np.where(learnt, ids, MASKED)) for ids, learnt in encode(tokenizer, examples)]


def copied_labels(items: Any, pad_id: int) -> dict[str, torch.Tensor]:
    """As transformers' DataCollatorForLanguageModeling: the labels are the ids, masked where they equal the padding."""
    batch = collate(items, pad_id)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["input_ids"] == pad_id, MASKED)}


def learnt_padding(items: Any, pad_id: int) -> dict[str, torch.Tensor]:
    batch = collate(items, pad_id)
    return batch | {"labels": batch["labels"].masked_fill(batch["attention_mask"] == 0, pad_id)}


def dead_labels(items: Any, pad_id: int) -> dict[str, torch.Tensor]:
    batch = collate(items, pad_id)
    return batch | {"labels": torch.full_like(batch["labels"], MASKED)}


def test_a_sound_run_writes_what_was_seen(base: Path, tmp_path: Path) -> None:
    tiny_run.training(tiny_run.config(base, tmp_path)).fit()
    written = read_json(RunDir(tmp_path).batch_audit)
    assert written["findings"] == []
    assert written["rules"] >= 6
    assert written["micro_batches"] == 3, "both micro batches of the first step, and the longest rows"
    assert written["longest"] == max(len(ids) for ids, _ in tiny_run.rows())
    assert all(seen["rows"] == 0 for seen in written["observations"].values())
    assert RunDir(tmp_path).batch_audit in RunDir(tmp_path).artefacts()


@pytest.mark.parametrize(
    ("broken", "code"), [(copied_labels, "LAB007"), (learnt_padding, "LAB009"), (dead_labels, "LAB006")]
)
def test_a_broken_collator_stops_the_run_before_any_step(
    broken: Any, code: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "collate", broken)
    training = tiny_run.training(tiny_run.config(base, tmp_path))
    before = {name: weight.clone() for name, weight in training.model.state_dict().items()}
    with pytest.raises(GateError, match=code) as caught:
        training.fit()
    assert caught.value.exit_code == 1
    assert "no step was taken" in caught.value.help
    assert training.counters.step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in training.model.state_dict().items())
    assert not (tmp_path / "checkpoints").exists()
    assert {finding["code"] for finding in read_json(RunDir(tmp_path).batch_audit)["findings"]} == {code}


def test_a_dry_run_writes_nothing(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = tiny_run.training(tiny_run.config(base, tmp_path / "run"))
    training.audit(write=False)
    monkeypatch.setattr(batches, "collate", copied_labels)
    with pytest.raises(GateError):
        training.audit(write=False)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_masks_wrongly_stops_the_run(rows: list[Item], tokenizer: Any, tmp_path: Path) -> None:
    config = tiny_run.config(tmp_path, tmp_path)
    early = [(ids, np.where(np.roll(labels, -1) != MASKED, ids, labels)) for ids, labels in rows[:8]]
    require_sound_batches([(collate(rows[:8], 0), rows[:8])], tokenizer, True, config, None)
    with pytest.raises(GateError, match="LAB008: 8 of 8 answers") as caught:
        require_sound_batches([(collate(early, 0), early)], tokenizer, True, config, RunDir(tmp_path))
    assert caught.value.also == ()
    assert json.loads((tmp_path / "batch_audit.json").read_text())["observations"]["misplaced_mask"]["rows"] == 8


def test_every_error_is_reported_at_once(rows: list[Item], tokenizer: Any, tmp_path: Path) -> None:
    batch = learnt_padding(rows[:8], 0)
    batch["labels"][0] = MASKED
    with pytest.raises(GateError, match="LAB006") as caught:
        require_sound_batches([(batch, rows[:8])], tokenizer, True, tiny_run.config(tmp_path, tmp_path), None)
    assert [str(other.message)[:6] for other in caught.value.also] == ["LAB009"]


def test_it_costs_less_than_fifty_milliseconds(rows: list[Item], tokenizer: Any, tmp_path: Path) -> None:
    """On five micro batches of 16 conversations of surefit/nano, in CPU time."""
    config = tiny_run.config(tmp_path, tmp_path)
    made = [(collate(rows[n : n + 16], 0), rows[n : n + 16]) for n in (0, 16, 32, 48, 0)]
    times = []
    for _ in range(4):
        start = time.process_time()
        require_sound_batches(made, tokenizer, True, config, None)
        times.append(time.process_time() - start)
    assert min(times) < 0.05
