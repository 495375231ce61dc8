"""Which rows share a micro batch, padded and packed, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch

from surefit.config.schema import SureFitConfig
from surefit.train.batches import MicroBatcher
from surefit.train.step import train_step

ROWS = tiny_run.rows(32, seed=5)
LENGTHS = np.array([len(ids) for ids, _ in ROWS])


def config(packing: bool, size: int = 2, batch: int = 12) -> SureFitConfig:
    made = tiny_run.config(
        Path("x"), Path("y"), packing=packing, global_batch_size=batch, per_device_train_batch_size=size
    )
    return made.model_copy(update={"data": made.data.model_copy(update={"max_length": 24})})


def batches(packing: bool, ranks: int = 1, **settings: int) -> MicroBatcher:
    return MicroBatcher(ROWS, LENGTHS, config(packing, **settings), 0, ranks)


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_has_the_same_rows_however_they_are_cut(packing: bool) -> None:
    made = batches(packing)
    padded = batches(False)
    for step in range(4):
        rows = sorted(row for micro in made.of_step(step) for row in micro)
        assert len(rows) == 12
        assert rows == sorted(row for micro in padded.of_step(step) for row in micro)


def test_a_packed_micro_batch_keeps_to_its_tokens() -> None:
    made = batches(True)
    micros = made.of_step(0)
    tokens = [int(LENGTHS[micro].sum()) for micro in micros]
    assert max(tokens) <= 2 * 24
    assert len(micros) < len(batches(False).of_step(0))
    assert tokens[0] == max(tokens), "the peak comes first"
    for micro in micros:
        batch = made.make(micro)
        assert "attention_mask" not in batch
        assert batch["input_ids"].shape == (1, int(LENGTHS[micro].sum()))
        assert batch["document_lengths"] == tuple(LENGTHS[micro])


@pytest.mark.parametrize("packing", [False, True])
def test_no_step_has_a_fuller_micro_batch_than_the_fullest(packing: bool) -> None:
    made = batches(packing)
    fullest = int(LENGTHS[made.fullest()].sum())
    assert all(LENGTHS[micro].sum() <= fullest for step in range(8) for micro in made.of_step(step))


def test_the_fullest_of_few_rows_is_as_full_as_a_step_that_repeats_them() -> None:
    """Eight rows, four times, twelve to a step: three steps, which see some rows twice."""
    few = ROWS[:8]
    lengths = LENGTHS[:8]
    made = MicroBatcher(few, lengths, config(True, size=6), 0)
    fullest = int(lengths[made.fullest()].sum())
    assert all(lengths[micro].sum() <= fullest for step in range(3) for micro in made.of_step(step))


def test_every_cut_gives_the_same_update() -> None:
    """1 × 12, 12 × 1 and packed bins: the gradient norm and the loss of uneven rows agree to 1e-6."""
    seen = []
    for packing, size in ((False, 12), (False, 1), (True, 2), (True, 1)):
        model = tiny_run.llama().train()
        if packing:
            from surefit.model.attention import use_varlen

            use_varlen(model)
        made = batches(packing, size=size)

        class Keep:
            gradients: dict[str, torch.Tensor]

            def step(self, factor: float = 1.0, model: torch.nn.Module = model) -> None:
                self.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

            def zero_grad(self, model: torch.nn.Module = model) -> None:
                model.zero_grad()

        keep = Keep()
        result = train_step(model, [made.make(micro) for micro in made.of_step(3)], keep, 1e9)
        seen.append((result, keep.gradients))
    (first, gradients), *others = seen
    for result, theirs in others:
        assert result.loss == pytest.approx(first.loss, abs=1e-6)
        assert result.supervised_tokens == first.supervised_tokens
        assert result.tokens == first.tokens
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_a_step_in_equally_many_micro_batches(packing: bool, size: int) -> None:
    made = batches(packing, size)
    micros = made.of_step(0)
    shares = [made.share(micros, rank) for rank in range(size)]
    assert {len(share) for share in shares} == {-(-len(micros) // size)}
    assert sorted(row for share in shares for micro in share for row in micro) == sorted(
        row for micro in micros for row in micro
    )
    assert batches(packing).share(micros, 0) == micros


def test_no_process_waits_where_one_row_of_tokens_would_hold_the_whole_step() -> None:
    made = batches(True, 3, size=4)
    micros = made.of_step(0)
    assert len(batches(True, size=12).of_step(0)) == 1
    tokens = [sum(int(LENGTHS[micro].sum()) for micro in made.share(micros, rank)) for rank in range(3)]
    assert max(tokens) < 1.1 * min(tokens)
    rows = sorted(row for micro in micros for row in micro)
    assert rows == sorted(row for micro in batches(True).of_step(0) for row in micro)
    fullest = int(LENGTHS[made.fullest()].sum())
    assert fullest <= 4 * LENGTHS.max(), "a third of twelve rows"
    assert all(LENGTHS[micro].sum() <= fullest for step in range(8) for micro in made.of_step(step))


@pytest.mark.parametrize("packing", [False, True])
def test_an_empty_micro_batch_has_one_token_and_nothing_to_learn(packing: bool) -> None:
    batch = batches(packing).make([])
    assert batch["input_ids"].shape == (1, 1)
    assert len(batch["targets"]) == 0
