"""Tokens that a config adds to a model's vocabulary: in its tokenizer, in its matrices, and as rows to train.

A new token starts from the tokenization of its text: its rows are the mean of the rows of the tokens that the tokenizer
split the text into (Bevilacqua et al. 2021, SPRING, who add the relations of AMR so). Beside LoRA only these rows of
the vocabulary are trained, as PEFT's `trainable_token_indices`, so that plain PEFT loads the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from surefit.core.errors import ConfigError
from surefit.model.tokenizer import ADDED, NewTokens, Resized


def resize_vocabulary(model: PreTrainedModel, new: NewTokens | Resized) -> None:
    """Extend a model with its weights by the rows of new tokens, in place; a tied head stays tied."""
    weights = [new.into(module.weight.data) for module in vocabulary_modules(model)]
    model.resize_token_embeddings(len(weights[0]), mean_resizing=False)
    for module, weight in zip(vocabulary_modules(model), weights, strict=True):  # the head is a new module now
        module.weight.data.copy_(weight)


def vocabulary_modules(model: PreTrainedModel) -> list[Any]:
    """Return the modules whose weights have a row for each token: the embedding, and the head unless it is the same
    tensor."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [embedding] if head is None or head.weight is embedding.weight else [embedding, head]


def token_rows(model: PreTrainedModel, ids: Sequence[int]) -> dict[str, list[int]]:
    """Return the rows of the vocabulary's matrices that PEFT trains: module → rows; a tied head's are the embedding's.

    Raises:
        ConfigError: the head adds a bias, which PEFT's trained rows leave out.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"the output head of a {model.config.model_type} adds a bias, which PEFT's trainable tokens ignore",
            code="E5077",
            field=ADDED,
            help="set train.method: full, which trains whole matrices, or remove the tokens",
        )
    return {
        name: list(ids)
        for name, module in model.named_modules()
        if any(module is matrix for matrix in vocabulary_modules(model))
    }


def compute_rows_apart(model: torch.nn.Module) -> None:
    """Let the new rows be computed beside the frozen matrices, in place.

    PEFT copies the whole matrix to insert the rows, each time that it is read, and computes the gradient of all of it
    for theirs: for 128,256 tokens of width 4,096 in bfloat16 one GiB each, at every chunk of the loss.
    """
    for layer in model.modules():
        if isinstance(layer, TrainableTokensLayer):
            layer.forward_adapters = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: Any, x: torch.Tensor, active_adapters: Sequence[str], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute `TrainableTokensLayer.forward_adapters` where the rows are consecutive."""
    base = layer.base_layer
    if layer.disable_adapters or not active_adapters:
        return base(x, *args, **kwargs)  # type: ignore[no-any-return]
    (adapter,) = active_adapters
    rows, first = layer.trainable_tokens_delta[adapter], layer.token_indices[adapter][0]
    if not isinstance(base, torch.nn.Embedding):
        return _Head.apply(x, base.weight, rows, first)  # type: ignore[no-any-return, no-untyped-call]
    positions = x - first
    scale = layer._get_embed_scale()  # of Gemma's embeddings
    new = F.embedding(positions.clamp(0, len(rows) - 1), rows)
    new = new if scale is None else new * scale.to(new.dtype)
    return torch.where(((positions >= 0) & (positions < len(rows)))[..., None], new, base(x, *args, **kwargs))


class _Head(torch.autograd.Function):
    """(x, frozen matrix, rows, first) → the logits of the matrix with its rows from `first` on replaced by `rows`.

    autograd itself would copy all logits to remove the new rows' logits from the matrix's share of the gradient; here
    the difference of the rows is added to it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, first: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight, rows)
        ctx.first = first
        logits = F.linear(x, weight)
        logits[..., first : first + len(rows)] = F.linear(x, rows)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rows = ctx.saved_tensors
        replaced = slice(ctx.first, ctx.first + len(rows))
        rows_gradient = gradient[..., replaced]
        d_rows = rows_gradient.flatten(0, -2).T @ x.flatten(0, -2) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, None, d_rows, None
        difference = (rows.float() - weight[replaced].float()).to(rows.dtype)
        return torch.matmul(gradient, weight).add_(rows_gradient @ difference), None, d_rows, None
