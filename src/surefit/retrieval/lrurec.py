"""LRURec: linear recurrent units over the items of a history (Yue et al. 2023, arXiv:2310.02367).

The recurrence is the linear recurrent unit of Orvieto et al. 2023 (arXiv:2303.06349): a complex diagonal state h_t = λ
∘ h_{t-1} + g ∘ (B x_t + b) with |λ| < 1, learned as λ = exp(-exp(n) + i exp(θ)). Because it is linear in h, all steps
of a sequence are computed in log₂(length) rounds instead of one after the other.

Complex numbers are pairs of real tensors: on a CPU their products are several times faster that way, and every dtype
works.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

PAD = 0
"""The item number of padding; before the first item of a history it means "nothing yet"."""


@dataclass(frozen=True)
class LRURecSize:
    """The size of the model.

    Attributes:
        items: number of items, numbered from 1.
        width: width of an item's vector; the state of a recurrence is twice as wide, the inner layer four times.
        blocks: number of blocks, each a recurrence and a position-wise network.
        dropout: dropout everywhere except inside the recurrence.
        ring: the smallest and the largest magnitude that λ is drawn with; the phase is drawn from the whole circle.
    """

    items: int
    width: int = 64
    blocks: int = 2
    dropout: float = 0.3
    ring: tuple[float, float] = (0.8, 0.99)


def scan(real: Tensor, imaginary: Tensor, decay_real: Tensor, decay_imaginary: Tensor) -> tuple[Tensor, Tensor]:
    """Compute h_t = λ ∘ h_{t-1} + u_t for every t, in log₂(length) rounds.

    In each round pairs of neighboring stretches become one: the second half of a pair of length 2n lacks the final
    state of the first half, times λ, λ², … λⁿ.

    Args:
        real, imaginary: u, shape (batch, length, state).
        decay_real, decay_imaginary: λ, shape (state,).

    Returns:
        h, in the form of u.
    """
    length = real.shape[1]
    padding = 2 ** math.ceil(math.log2(length)) - length
    h_real, h_imaginary = (functional.pad(part, (0, 0, 0, padding)) for part in (real, imaginary))
    powers_real, powers_imaginary = decay_real[None], decay_imaginary[None]
    while (half := len(powers_real)) < length + padding:
        shape = (len(real), -1, 2, half, real.shape[2])
        (first_real, second_real), (first_imaginary, second_imaginary) = (
            part.reshape(shape).unbind(2) for part in (h_real, h_imaginary)
        )
        end_real, end_imaginary = first_real[:, :, -1:], first_imaginary[:, :, -1:]
        second_real = second_real + powers_real * end_real - powers_imaginary * end_imaginary
        second_imaginary = second_imaginary + powers_real * end_imaginary + powers_imaginary * end_real
        h_real = torch.stack((first_real, second_real), 2)
        h_imaginary = torch.stack((first_imaginary, second_imaginary), 2)
        last_real, last_imaginary = powers_real[-1], powers_imaginary[-1]
        powers_real, powers_imaginary = (
            torch.cat((powers_real, powers_real * last_real - powers_imaginary * last_imaginary)),
            torch.cat((powers_imaginary, powers_real * last_imaginary + powers_imaginary * last_real)),
        )
    shape_out = (len(real), -1, real.shape[2])
    return h_real.reshape(shape_out)[:, :length], h_imaginary.reshape(shape_out)[:, :length]


class LinearRecurrentUnit(nn.Module):
    """The recurrence, dropout, the residual connection, layer norm."""

    def __init__(self, shape: LRURecSize) -> None:
        super().__init__()
        state = 2 * shape.width
        low, high = shape.ring
        radius = torch.rand(state) * (high**2 - low**2) + low**2
        nu_log = torch.log(-0.5 * torch.log(radius))
        theta_log = torch.log(torch.rand(state) * 2 * math.pi)
        # The factor keeps the state's variance equal to its input's.
        gamma_log = torch.log(torch.sqrt(1 - torch.exp(-2 * torch.exp(nu_log))))
        self.ring_log = nn.Parameter(torch.stack((nu_log, theta_log, gamma_log)))
        self.into = nn.Linear(shape.width, 2 * state)
        self.out = nn.Linear(2 * state, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor, places: Tensor, nothing_yet: Tensor) -> Tensor:
        """Apply the unit to the tokens of a batch.

        Args:
            x: (tokens, width), the histories of a batch one after the other.
            places: (batch, length), where in the batch the tokens are.
            nothing_yet: (tokens, 1), 1 for a token that sees itself and leaves nothing behind.
        """
        nu, theta, gamma = torch.exp(self.ring_log)
        magnitude = torch.exp(-nu)
        inputs = self.into(x) * gamma.repeat(2)
        alone = inputs * nothing_yet
        rows = inputs.new_zeros((*places.shape, inputs.shape[-1]))
        rows[places] = inputs - alone
        real, imaginary = rows.chunk(2, dim=-1)
        states = scan(real, imaginary, magnitude * torch.cos(theta), magnitude * torch.sin(theta))
        state = torch.cat(states, dim=-1)[places]
        normed: Tensor = self.norm(self.dropout(self.out(state + alone)) + x)
        return normed


class PositionWise(nn.Module):
    """Two layers for each token alone, the residual connection, layer norm."""

    def __init__(self, shape: LRURecSize) -> None:
        super().__init__()
        self.wide = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.dropout(functional.gelu(self.wide(x)))
        normed: Tensor = self.norm(self.dropout(self.narrow(inner)) + x)
        return normed


class LRURec(nn.Module):
    """Item numbers → for every position, a vector whose product with an item's vector scores it as the next item.

    Histories are padded on the right. A history begins with `PAD` while the model is trained, so that its first item is
    predicted too, from nothing; the recurrence carries nothing over from there.
    """

    def __init__(self, shape: LRURecSize) -> None:
        super().__init__()
        self.shape = shape
        self.item = nn.Embedding(shape.items + 1, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.norm = nn.LayerNorm(shape.width)
        self.recurrent = nn.ModuleList(LinearRecurrentUnit(shape) for _ in range(shape.blocks))
        self.position_wise = nn.ModuleList(PositionWise(shape) for _ in range(shape.blocks))
        self.bias = nn.Parameter(torch.zeros(shape.items + 1))
        for name, parameter in self.named_parameters():
            if "norm" not in name and "ring_log" not in name:
                nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)

    def forward(self, items: Tensor) -> Tensor:
        """Encode (batch, length) item numbers → (batch, length, width); zeros at padding."""
        places = items != PAD
        places[:, 0] = True
        tokens = items[places]
        nothing_yet = (tokens == PAD).unsqueeze(-1)
        x = self.norm(self.dropout(self.item(tokens)))
        for recurrent, position_wise in zip(self.recurrent, self.position_wise, strict=True):
            x = position_wise(recurrent(x, places, nothing_yet))
        vectors: Tensor = x.new_zeros((*items.shape, x.shape[-1]))
        vectors[places] = x
        return vectors

    def logits(self, vectors: Tensor) -> Tensor:
        """Return the logits, (…, width) → (…, items + 1): item 0 is the padding's and never an answer."""
        return functional.linear(vectors, self.item.weight, self.bias)


class _FullSoftmax(torch.autograd.Function):
    """The mean of -log softmax(logits)[target] over all items, with its gradients computed in the forward pass.

    The logits of a few hundred places are in the cache at a time; a whole batch's would be written to memory and read
    back some ten times.
    """

    PLACES = 256

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        count, loss = len(targets), vectors.new_zeros(())
        gradients = torch.empty_like(vectors), torch.zeros_like(weight), torch.zeros_like(bias)
        for start in range(0, count, _FullSoftmax.PLACES):
            part = slice(start, start + _FullSoftmax.PLACES)
            logits = torch.addmm(bias, vectors[part], weight.T)
            largest = logits.amax(1, keepdim=True)
            at_target = logits.gather(1, targets[part, None])
            share = logits.sub_(largest).exp_()
            total = share.sum(1, keepdim=True)
            loss += (total.log() + largest - at_target).sum()
            share.div_(total * count)
            share.scatter_add_(1, targets[part, None], torch.full_like(total, -1 / count))
            gradients[0][part] = share @ weight
            gradients[1].addmm_(share.T, vectors[part])
            gradients[2].add_(share.sum(0))
        ctx.save_for_backward(*gradients)
        return loss / count

    @staticmethod
    def backward(ctx: Any, *of_loss: Tensor) -> tuple[Tensor | None, ...]:
        return *(gradient * of_loss[0] for gradient in ctx.saved_tensors), None


def next_item_loss(model: LRURec, items: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all items of the places that have a target; `PAD` is none.

    Args:
        items, targets: item numbers, both of shape (batch, length).
    """
    has_target = targets != PAD
    loss: Tensor = _FullSoftmax.apply(  # type: ignore[no-untyped-call]
        model(items)[has_target], model.item.weight, model.bias, targets[has_target]
    )
    return loss
