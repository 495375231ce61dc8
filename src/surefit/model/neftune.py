"""NEFTune: noise on the input embeddings while training (Jain et al. 2023, arXiv 2310.05914).

To every number of an embedded document of L tokens and width d, uniform noise from −1 to 1 is added, times `alpha /
√(L·d)`. So the noise of a whole document is a vector of about the same length (`alpha / √3`) whatever its number of
tokens.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Length = int | torch.Tensor


class Neftune:
    """Noise on the output of `model.get_input_embeddings()`, in training mode, until `remove` is called.

    L is counted as in the authors' own code: the tokens of the row's document, padding left out. A packed row holds
    several documents, each with its own L; `position_ids` restart at 0 where one begins. So a document gets the same
    strength of noise padded or packed. (The batch's whole width, which other implementations use as L, would make the
    noise depend on the rest of the batch, and nearly vanish in a packed row.)

    The random numbers come from torch's own generator of the device: a run that seeds it before each step can resume.

    Args:
        model: a transformers model, with or without a PEFT adapter around it.
        alpha: the strength; the paper uses 5 to 15.
    """

    def __init__(self, model: torch.nn.Module, alpha: float) -> None:
        self.alpha = alpha
        self._lengths: Length | None = None
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
        # Every module around the embeddings has a hook: model and caller decide which is called with which arguments.
        surrounding = [
            module for module in model.modules() if module is not embeddings and embeddings in module.modules()
        ]
        self._handles = [module.register_forward_pre_hook(self._look, with_kwargs=True) for module in surrounding]
        self._handles.append(embeddings.register_forward_hook(self._add))

    def remove(self) -> None:
        """Remove the noise from the model."""
        for handle in self._handles:
            handle.remove()

    def _look(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = _named(module.forward, args) | kwargs
        lengths = document_lengths(arguments)
        if lengths is not None:
            self._lengths = lengths

    def _add(self, embeddings: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        lengths, self._lengths = self._lengths, None
        if not embeddings.training:
            return output
        return output + noise(output, output.shape[1] if lengths is None else lengths, self.alpha)


def noise(embedded: torch.Tensor, lengths: Length, alpha: float) -> torch.Tensor:
    """Return uniform noise for (rows, length, width) embeddings, in their dtype.

    Args:
        lengths: tokens of each token's document, broadcastable to (rows, length), or one number for all.
        alpha: see `Neftune`.
    """
    values = torch.empty_like(embedded).uniform_(-1, 1)
    if isinstance(lengths, int):
        return values * (alpha / math.sqrt(lengths * embedded.shape[-1]))
    strength = alpha * (lengths.to(embedded.device) * embedded.shape[-1]).float().rsqrt()
    return values * strength.unsqueeze(-1).to(embedded.dtype)


def document_lengths(given: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tokens of the document of each token, from a model's arguments; None where they lack this.

    >>> document_lengths({"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}).tolist()
    [[3], [1]]
    >>> document_lengths({"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}).tolist()
    [[2, 2, 3, 3, 3]]

    Args:
        given: `attention_mask` (rows, length), 1 or true for tokens, or else `position_ids` (rows, length), 0 at the
            first token of each document.

    Returns:
        int64, (rows, 1) or (rows, length). Computed without reading a value: nothing waits for the device.
    """
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return mask.sum(1, keepdim=True).clamp(min=1)
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return None
    document = (positions == 0).cumsum(1)
    counts = torch.zeros_like(positions[:, :1]).expand(-1, positions.shape[1] + 1).clone()
    return counts.scatter_add_(1, document, torch.ones_like(positions)).gather(1, document)


def _named(forward: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Return positional arguments by their names."""
    return dict(zip(inspect.signature(forward).parameters, args, strict=False)) if args else {}
