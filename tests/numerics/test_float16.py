"""Training in float16 with a scaled loss: as good as float32, and an overflow costs a step and nothing else.

A CPU computes float16 too, with the same range and rounding as the GPUs that need it.
"""

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file

from surefit.core.errors import GateError, Interrupted
from surefit.core.rundir import read_jsonl
from surefit.data.tokens.collate import collate
from surefit.train.loop import MAX_REJECTED_IN_A_ROW, Trainer
from surefit.train.optim import MasterAdamW
from surefit.train.progress import TrainingProgress
from surefit.train.scaling import LossScale
from surefit.train.step import StepResult, train_step

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 60
ROWS = tiny_run.rows(48, seed=5)
CLOCK = ("seconds", "tokens_per_second", "mfu", "disk_free_bytes")


class Run:
    """Steps over `ROWS`, eight at a time, in two micro batches."""

    def __init__(self, dtype: torch.dtype, scaling: LossScale | None) -> None:
        self.model = tiny_run.llama().to(dtype).train()
        self.optimizer, self.scaling, self.done = MasterAdamW(self.model), scaling, 0
        self.optimizer.learning_rate = 5e-3

    def step(self) -> StepResult:
        start = 8 * (self.done % 6)
        rows = ROWS[start : start + 8]
        self.done += 1
        micro = [collate(rows[:4], 0), collate(rows[4:], 0)]
        return train_step(self.model, micro, self.optimizer, 1.0, scaling=self.scaling)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def last_losses(dtype: torch.dtype, scaling: LossScale | None) -> tuple[float, float]:
    """The mean loss and gradient norm of the last of `STEPS` steps; all applied."""
    run = Run(dtype, scaling)
    results = [run.step() for _ in range(STEPS)]
    assert all(result.applied for result in results)
    last = results[-6:]
    return sum(result.loss for result in last) / 6, sum(result.grad_norm for result in last) / 6


def test_float16_learns_what_float32_learns() -> None:
    loss, norm = last_losses(torch.float32, None)
    assert loss < 1.0, "from ln 64 = 4.16: if nothing is learnt, the comparison means nothing"
    half_loss, half_norm = last_losses(torch.float16, LossScale())
    assert half_loss == pytest.approx(loss, rel=0.02)
    assert half_norm == pytest.approx(norm, rel=0.1)


def test_gradients_too_small_for_float16_need_the_scale() -> None:
    """With a scale of 2⁻²⁰ this model's gradients are as small as those of a large one: most of them become zero."""
    exact = Run(torch.float32, None).step().grad_norm
    assert Run(torch.float16, LossScale(2.0**12)).step().grad_norm == pytest.approx(exact, rel=0.01)
    assert Run(torch.float16, LossScale(2.0**-20)).step().grad_norm < 0.9 * exact


def test_an_overflow_leaves_everything_bitwise_alone_and_training_goes_on() -> None:
    run = Run(torch.float16, LossScale())
    assert run.step().applied
    assert run.scaling is not None
    run.scaling.value = 2.0**30
    weights, state = run.weights(), copy.deepcopy(run.optimizer.tensors())
    result = run.step()
    assert (result.applied, result.overflow) == (False, True)
    assert result.loss < 4.5
    assert run.scaling == LossScale(2.0**29)
    assert all(torch.equal(a, b) for a, b in zip(weights, run.weights(), strict=True))
    assert all(torch.equal(value, state[name]) for name, value in run.optimizer.tensors().items())
    assert all(parameter.grad is None for parameter in run.model.parameters())
    results = [run.step() for _ in range(20)]
    assert all(result.applied != result.overflow for result in results)
    assert all(result.applied for result in results[-5:])
    assert run.scaling.value == 2.0 ** (29 - sum(result.overflow for result in results))
    assert results[-1].loss < result.loss


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base", attention_dropout=0.1)


def training(base: Path, out: Path, scale: float, **callbacks: Any) -> Trainer:
    """Twelve steps in float16, saved after every fourth, from a scale that the first ones find too large."""
    run = tiny_run.training(tiny_run.config(base, out, dtype="float16"), **callbacks)
    assert run.scaling is not None
    run.scaling.value = scale
    return run


def steps_of(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock decides; NaN written so that it equals itself."""
    lines = read_jsonl(out / "metrics.jsonl")
    return [{key: repr(value) for key, value in line.items() if key not in CLOCK} for line in lines]


def test_a_resumed_run_has_the_bits_and_the_scale_of_one_that_was_not_stopped(base: Path, tmp_path: Path) -> None:
    whole = training(base, tmp_path / "whole", 2.0**20)
    result = whole.fit()
    assert 0 < result.counters.overflows < 8
    assert result.counters.rejected == 0

    def stop(progress: TrainingProgress) -> None:
        if progress.step in (2, 7):  # among the overflows, and after them
            os.kill(os.getpid(), signal.SIGTERM)

    for scale in (2.0**20, 7.0):  # the second is what the checkpoint must replace
        with pytest.raises(Interrupted):
            training(base, tmp_path / "stopped", scale, on_progress=stop).fit(resume=True)
    last = training(base, tmp_path / "stopped", 7.0)
    assert last.fit(resume=True).resumed_from == 7
    assert last.scaling == whole.scaling
    assert last.counters.overflows == whole.counters.overflows
    assert steps_of(tmp_path / "stopped") == steps_of(tmp_path / "whole")
    one, two = (load_file(tmp_path / out / "adapter" / "adapter_model.safetensors") for out in ("whole", "stopped"))
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_overflows_do_not_stop_a_run_that_ten_faults_would(base: Path, tmp_path: Path) -> None:
    result = tiny_run.training(tiny_run.config(base, tmp_path, dtype="float16", num_train_epochs=12.0))
    assert result.scaling is not None
    result.scaling.value = 2.0**40
    counters = result.fit().counters
    assert counters.overflows > MAX_REJECTED_IN_A_ROW
    assert counters.rejected == 0


def test_a_run_of_overflows_alone_has_learnt_nothing_and_says_so(base: Path, tmp_path: Path) -> None:
    with pytest.raises(GateError, match="all 12 steps"):
        training(base, tmp_path, 2.0**100).fit()
