"""Is the saved model the model that was trained? Checks with thresholds that follow from the number format.

A merged model can only differ from base + adapter by rounding. How much that may be:

1. A number rounded to a format with unit roundoff u (float32 2⁻²⁴, float16 2⁻¹¹, bfloat16 2⁻⁸) is off by at most a
   share u of itself; a sum of n products accumulated in float32 adds about √n · 2⁻²⁴ (Higham, Accuracy and Stability of
   Numerical Algorithms, 2nd ed., §2.2 and §3.1; √n rather than n because rounding errors have no preferred sign,
   Higham & Mary 2019). Together e = √(u² + n · 2⁻⁴⁸) per rounding, n the widest layer.
2. The residual stream is rounded twice per layer. What happens inside a layer is rounded more often, but weighs less
   the more layers there are: 8 more roundings stand for all of it, with the final norm and the head. Both models round,
   and independently, so a relative error of e · √(2 (2 · layers + 8)) of the logits' standard deviation is expected.
3. Layers may amplify: a safety factor of 4. Random Llamas of 2 to 24 layers, in all three formats, measured between
   0.01 and 0.25 of the resulting limit (docs/merge.md).

That limit on the root mean square of the logit error gives the others: the mean error is never above it; the largest of
N normally distributed errors is below √(2 ln N) times it; the Kullback-Leibler divergence of two softmaxes whose logits
differ by at most d is at most d²/2 (Hoeffding's lemma), with d the largest error over the vocabulary; and an answer
may change where the two best tokens are about as close as the error.

How much single positions may be off follows from no formula, because a position where attention is about as strong to
two sides is thrown by the least rounding. It is measured: with every weight of the merged model nudged by about as much
as rounding does, the errors of the positions may be four times what the nudged model's are.

These limits are wide for a coarse format, so three checks do not depend on them: every merged weight is the rounding of
its exact value, every weight on disk is bit for bit the one that was meant, and the merged model is closer to the
adapter than to the base.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from surefit.core.malloc import trim_heap

Value = float | int | str
SAFETY = 4.0
LOGITS_HELD = 2**27
"""Logits kept per model: 512 MiB in float32."""
COMPARED_AT_ONCE = 2**20
"""Logits: 8 MiB in float64, of which some eight copies are held."""
TOKENS_READ = 2**13
"""What a model is given to read in all: 32 rows of 256 tokens."""
Logits = list[torch.Tensor]
"""One (positions, vocabulary) tensor per prompt, on the CPU, in the dtype the model answers in."""


@dataclass(frozen=True)
class MergeCheck:
    """One line of the certificate: a value against its threshold, and why that threshold."""

    name: str
    value: Value
    threshold: Value
    comparison: Literal["<=", ">=", "=="]
    why: str

    @property
    def passed(self) -> bool:
        if self.comparison == "==":
            return self.value == self.threshold
        value, threshold = float(self.value), float(self.threshold)
        return value <= threshold if self.comparison == "<=" else value >= threshold

    def as_dict(self) -> dict[str, Any]:
        """As in certificate.json, which knows no NaN and no infinity: they become text."""
        finite = not isinstance(self.value, float) or math.isfinite(self.value)
        return {**asdict(self), "value": self.value if finite else str(self.value), "passed": self.passed}

    def __str__(self) -> str:
        value = f"{self.value:.4g}" if isinstance(self.value, float) else self.value
        threshold = f"{self.threshold:.4g}" if isinstance(self.threshold, float) else self.threshold
        return f"{self.name} is {value}, required {self.comparison} {threshold} ({self.why})"


@dataclass(frozen=True)
class RoundingDimensions:
    """What the rounding errors of a model depend on beside its dtype."""

    layers: int
    width: int


def rounding_dimensions(model: Any) -> RoundingDimensions:
    """Layers and widest layer of a transformers model."""
    config = model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 0
    widest = max(inner) if isinstance(inner, (list, tuple)) else inner  # one for each layer (Gemma 3n)
    return RoundingDimensions(config.num_hidden_layers, max(config.hidden_size, widest))


@torch.no_grad()
def read_logits(model: Any, sequences: Sequence[Sequence[int]], device: str | torch.device | None = None) -> Logits:
    """The logits at the last positions of every sequence, where its answer is.

    All sequences are read at once, padded on the left: a model that reads its weights from its files reads them once.
    They share `TOKENS_READ` and `LOGITS_HELD` among them; each loses its beginning where its share is not enough.

    Args:
        device: where the model runs, if its parameters do not tell.
    """
    trim_heap()  # each reading leaves holes of some hundred MiB, in which the next one's tensors do not fit
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or TOKENS_READ
    share = max(1, min(context, TOKENS_READ // max(1, len(sequences))))
    rows = [list(sequence)[-share:] for sequence in sequences]
    width = max(len(row) for row in rows)
    kept = min(width, max(1, LOGITS_HELD // (config.vocab_size * len(rows))))
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs = {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_(min=0),
    }
    if bool(mask.all()):
        del inputs["attention_mask"]
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = inspect.signature(inner.forward).parameters
    given: dict[str, Any] = {
        name: tensor.to(device or model.device) for name, tensor in inputs.items() if name in known
    }
    if "logits_to_keep" in known:
        given["logits_to_keep"] = kept
    logits = model(**given, use_cache=False).logits[:, -kept:]
    return [each[max(0, kept - len(row)) :].cpu() for each, row in zip(logits, rows, strict=True)]


def logit_noise(dtype: torch.dtype, size: RoundingDimensions) -> float:
    """The largest root-mean-square logit error that rounding explains, as a share of the logits' standard deviation.

    >>> size = RoundingDimensions(28, 8192)
    >>> f"{logit_noise(torch.float32, size):.1e}", f"{logit_noise(torch.bfloat16, size):.2f}"
    ('2.4e-04', '0.18')
    """
    return SAFETY * _rounding(dtype, size) * math.sqrt(2 * (2 * size.layers + 8))


def nudge(dtype: torch.dtype, size: RoundingDimensions) -> float:
    """The share of itself by which each weight is moved to measure what rounding does at a position."""
    return 2 * _rounding(dtype, size)


def _rounding(dtype: torch.dtype, size: RoundingDimensions) -> float:
    """The relative error of one rounding: e in the text above."""
    unit, unit32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    return math.sqrt(unit**2 + size.width * unit32**2)


@dataclass
class LogitDifference:
    """How far the logits of one model are from a reference's: sums over positions and vocabulary.

    Attributes:
        entries: positions times vocabulary.
        absolute: sum of the errors' absolute values; `squares` of their squares; `largest` the largest.
        spread: sum of squared deviations of the reference's logits from their mean over the vocabulary.
        divergence: sum over the positions of the Kullback-Leibler divergence from the reference, in nats.
        agreeing: positions where both find the same token best.
        infinite: logits of either model that are NaN or infinite.
    """

    entries: int = 0
    positions: int = 0
    absolute: float = 0.0
    squares: float = 0.0
    spread: float = 0.0
    largest: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0
    infinite: int = 0

    def add(self, reference: torch.Tensor, other: torch.Tensor) -> None:
        reference, other = reference.double(), other.double()
        self.infinite += int((~torch.isfinite(reference)).sum() + (~torch.isfinite(other)).sum())
        error = other - reference
        self.entries += error.numel()
        self.positions += len(error)
        self.absolute += float(error.abs().sum())
        self.squares += float(error.square().sum())
        self.largest = max(self.largest, float(error.abs().max()))
        self.spread += float((reference - reference.mean(-1, keepdim=True)).square().sum())
        before, after = reference.log_softmax(-1), other.log_softmax(-1)
        self.divergence += float((before.exp() * (before - after)).sum())
        self.agreeing += int((reference.argmax(-1) == other.argmax(-1)).sum())

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.entries)

    @property
    def deviation(self) -> float:
        return math.sqrt(self.spread / self.entries)


def compare_logits(reference: Logits, other: Logits) -> LogitDifference:
    """Compare two models' logits at the same positions."""
    total = LogitDifference()
    for one, two in zip(reference, other, strict=True):
        for rows in _slices(one):
            total.add(one[rows], two[rows])
    return total


def _slices(logits: torch.Tensor) -> Iterator[slice]:
    """A few positions at a time: float64 over a large vocabulary is large."""
    step = max(1, COMPARED_AT_ONCE // logits.shape[-1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def check_agreement(
    label: str, reference: Logits, other: Logits, nudged: Logits, dtype: torch.dtype, size: RoundingDimensions
) -> list[MergeCheck]:
    """The four logit checks of `other` against the adapter's logits, after one that they are numbers at all."""
    trim_heap()
    found = compare_logits(reference, other)
    if found.infinite:
        return [
            MergeCheck(f"{label}_logits_not_finite", found.infinite, 0, "==", "a logit that is no number is no answer")
        ]
    noise = logit_noise(dtype, size) * found.deviation
    vocabulary = reference[0].shape[-1]
    worst = _worst_position(reference, other, nudged)
    flips = _expected_flips(reference, noise)
    name = str(dtype).removeprefix("torch.")
    return [
        MergeCheck(
            f"{label}_logit_error_mean", found.absolute / found.entries, noise, "<=",
            f"rounding to {name} in {size.layers} layers explains {noise / found.deviation:.2g} of the logits' "
            f"standard deviation {found.deviation:.3g}",
        ),
        MergeCheck(
            f"{label}_logit_error_worst", worst, SAFETY, "<=",
            f"the errors of the positions, of which the largest is {found.largest:.3g}, as a multiple of what rounding "
            f"does: how far logits move when each weight does by {_rounding(dtype, size):.1g} of itself",
        ),
        MergeCheck(
            f"{label}_kl_mean", found.divergence / found.positions, noise**2 * math.log(vocabulary), "<=",
            f"in nats; Hoeffding's lemma with the largest error over {vocabulary:,} tokens",
        ),
        MergeCheck(
            f"{label}_top1_agreement", found.agreeing / found.positions,
            1 - (flips + 3 * math.sqrt(flips)) / found.positions, ">=",
            f"the two best tokens are so close that such errors change {flips:.3g} of {found.positions:,} answers; "
            "three standard errors more are allowed",
        ),
    ]  # fmt: skip


def _worst_position(reference: Logits, other: Logits, nudged: Logits) -> float:
    """The errors of the positions over the movements that nudging all weights causes, largest with largest: their
    largest ratio.

    They are compared by rank and not place by place: where attention is about as strong to two sides, the least
    rounding decides, and another one at another place. How many places those are is chance, too: the k-th largest error
    is held against the movement of rank k - 3√k, three standard errors before it. So the first eleven have none, and
    are left to the mean, to the divergence and to the next tokens.
    """
    errors, moves = [], []
    for one, two, moved in zip(reference, other, nudged, strict=True):
        for rows in _slices(one):
            errors.append((two[rows].double() - one[rows].double()).abs().amax(-1))
            moves.append((moved[rows].double() - two[rows].double()).abs().amax(-1))
    error, move = (torch.cat(each).sort(descending=True).values for each in (errors, moves))
    rank = torch.arange(1, len(error) + 1)
    against = (rank - 3 * rank.sqrt()).floor().long()
    known = against >= 1
    known[-1] = True  # of fewer than twelve positions the smallest error, against the largest movement
    ratios = error[known] / move[against[known].clamp(min=1) - 1].clamp(min=torch.finfo(torch.float32).tiny)
    return float(ratios.max())


def _expected_flips(reference: Logits, noise: float) -> float:
    """A gap g between the two best logits closes with probability Φ(-g / (√2 · noise))."""
    flips = 0.0
    for logits in reference:
        best = logits.double().topk(2, dim=-1).values
        flips += float(torch.erfc((best[:, 0] - best[:, 1]) / (2 * noise)).sum()) / 2
    return flips


def check_effect(base: Logits, adapter: Logits, merged: Logits) -> MergeCheck:
    """Whether the adapter's effect survived: an update smaller than the format's rounding step disappears in a merge,
    and the logit checks, which allow for rounding, would not notice.

    With rounding noise n in each of the three models and an effect of size E the share is
    √(E² + 2n²) / (√(E² + 2n²) + √2 n): ½ where there is no effect, ⅔ where it is 2.4 times the noise.
    """
    lost, kept = compare_logits(adapter, merged).rms, compare_logits(base, merged).rms
    share = kept / (kept + lost) if kept + lost > 0 else 0.0
    return MergeCheck(
        "effect_kept", share, 2 / 3, ">=",
        "the merged model must be twice as far from the base as from the adapter; ½ is an effect lost in rounding "
        "noise: train longer, or use a finer model.dtype",
    )  # fmt: skip
