"""The gradient is that of the mean over all supervised tokens, however the global batch is cut."""

import pytest
import tiny_run
import torch

from surefit.data.tokens.collate import collate
from surefit.train.optim import MasterAdamW
from surefit.train.step import train_step

ROWS = tiny_run.rows(8, seed=3)


class Keep:
    """An optimizer that only looks: the gradients before they are cleared."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, factor: float = 1.0) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def zero_grad(self) -> None:
        self.model.zero_grad()


def gradients(cut: list[list[int]]) -> tuple[dict[str, torch.Tensor], float]:
    model = tiny_run.llama().train()
    keep = Keep(model)
    result = train_step(model, [collate([ROWS[row] for row in micro], 0) for micro in cut], keep, 1e9)
    return keep.gradients, result.loss


@pytest.mark.parametrize(
    "cut",
    [[[row] for row in range(8)], [[0, 1, 2, 3], [4, 5, 6, 7]], [[7], [0, 1, 2], [6, 3, 5, 4]]],
    ids=["1x8", "4x2", "uneven"],
)
def test_any_cut_gives_the_gradient_of_the_whole_batch(cut: list[list[int]]) -> None:
    assert len({len(ids) for ids, _ in ROWS}) > 4, "the lengths must be uneven for this to mean something"
    whole, whole_loss = gradients([list(range(8))])
    parts, loss = gradients(cut)
    assert loss == pytest.approx(whole_loss, abs=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-5, atol=1e-6)


def test_it_is_the_gradient_of_transformers_own_mean_loss() -> None:
    ours, loss = gradients([[row] for row in range(8)])
    model = tiny_run.llama().train()
    batch = collate(ROWS, 0)
    theirs = model(**batch, use_cache=False).loss
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), abs=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_averaging_the_means_of_micro_batches_would_be_wrong() -> None:
    """The fault that counting tokens avoids; if this passes no more, the test above has lost its teeth."""
    _, loss = gradients([[row] for row in range(8)])
    means = [gradients([[row]])[1] for row in range(8)]
    assert abs(sum(means) / 8 - loss) > 1e-4


def test_whole_runs_agree() -> None:
    losses = []
    for size in (8, 1):
        model = tiny_run.llama().train()
        optimizer = MasterAdamW(model)
        optimizer.learning_rate = 1e-3
        cut = [ROWS[start : start + size] for start in range(0, 8, size)]
        losses.append([train_step(model, [collate(m, 0) for m in cut], optimizer, 1.0).loss for _ in range(20)])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0, atol=1e-5)
