"""The operator in which compiled layers run LoRA's products: against the formula, and as torch wants its operators."""

from typing import Any

import pytest
import torch

from surefit.model.lora_products import lora_linear_products

SCALINGS = [0.5, 2.0]


def arguments(dropout: bool, bias: bool) -> tuple[Any, ...]:
    """x, what dropout made of it, W, b, A, B, s of two projections whose widths and ranks differ."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, trained: bool = True) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(trained)

    weights = [normal(8, 16, trained=False), normal(6, 16, trained=False)]
    biases = [normal(8, trained=False), normal(6, trained=False)] if bias else [None, None]
    dropped = normal(5, 16) if dropout else None
    return (
        normal(5, 16),
        dropped,
        weights,
        biases,
        [normal(3, 16), normal(4, 16)],
        [normal(8, 3), normal(6, 4)],
        SCALINGS,
    )


def by_formula(x: Any, dropped: Any, weights: Any, biases: Any, a: Any, b: Any, scalings: Any) -> list[torch.Tensor]:
    read = x if dropped is None else dropped
    bases = [x @ weight.T + (0 if bias is None else bias) for weight, bias in zip(weights, biases, strict=True)]
    return [base + s * read @ low.T @ up.T for base, low, up, s in zip(bases, a, b, scalings, strict=True)]


@pytest.mark.parametrize("through", [True, False])
@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_formula(dropout: bool, bias: bool, through: bool) -> None:
    x, dropped, weights, biases, a, b, scalings = arguments(dropout, bias)
    x.requires_grad_(through)
    leaves = [tensor for tensor in (x, dropped, *a, *b) if tensor is not None and tensor.requires_grad]
    found = lora_linear_products(x, dropped, weights, biases, a, b, scalings)[:-1]
    expected = by_formula(x, dropped, weights, biases, a, b, scalings)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    for outputs in (found, expected):
        sum(output.sin().sum() for output in outputs).backward()  # type: ignore[union-attr]
        outputs[:] = [leaf.grad for leaf in leaves]  # type: ignore[misc]
        for leaf in leaves:
            leaf.grad = None
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_may_trace_it(dropout: bool, bias: bool) -> None:
    """Its schema, its shapes without data, and its gradients when they are traced, also with symbolic sizes."""
    assert set(torch.library.opcheck(lora_linear_products, arguments(dropout, bias)).values()) == {"SUCCESS"}
