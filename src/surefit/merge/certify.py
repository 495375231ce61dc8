"""Checks that the saved model is the trained model, with thresholds derived from the number format.

A merged model may differ from base + adapter by rounding only. The size of the rounding error:

1. A number rounded to a format with unit roundoff u (float32 2⁻²⁴, float16 2⁻¹¹, bfloat16 2⁻⁸) is off by at most a
   share u of itself; a sum of n products accumulated in float32 adds about √n · 2⁻²⁴ (Higham, Accuracy and Stability of
   Numerical Algorithms, 2nd ed., §2.2 and §3.1; √n rather than n because rounding errors have no preferred sign,
   Higham & Mary 2019). Together e = √(u² + n · 2⁻⁴⁸) per rounding, n the widest layer.
2. The residual stream is rounded twice per layer. Values inside a layer are rounded more often, but have less weight
   the more layers there are: 8 more roundings account for them, the final norm and the head. Both models round
   independently, so a relative error of e · √(2 (2 · layers + 8)) of the logits' standard deviation is expected.
3. Layers may amplify: a safety factor of 4. Random Llamas of 2 to 24 layers, in all three formats, measured between
   0.01 and 0.25 of the resulting limit (docs/merge.md).

The other limits follow from this one on the root mean square of the logit error: the mean error is never above it; the
largest of N normally distributed errors is below √(2 ln N) times it; the Kullback-Leibler divergence of two softmaxes
with logits that differ by at most d is at most d²/2 (Hoeffding's lemma), with d the largest error over the vocabulary;
and an answer may change where the two best tokens are about as close as the error.

No formula limits the error of single positions, because the least rounding decides at a position where attention is
about equally strong to two tokens. It is measured: with every weight of the merged model nudged by about as much as
rounding changes it, the errors of the positions may be four times the errors of the nudged model.

These limits are wide for a coarse format, so three checks do not depend on them: every merged weight is the rounding of
its exact value, every weight on disk is bit for bit the computed one, and the merged model is closer to the adapter
than to the base.
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
"""Number of logits kept per model: 512 MiB in float32."""
COMPARED_AT_ONCE = 2**20
"""Number of logits compared at once: 8 MiB in float64, of which about eight copies are in memory."""
TOKENS_READ = 2**13
"""Number of tokens that a model reads in all: 32 rows of 256 tokens."""
Logits = list[torch.Tensor]
"""One (positions, vocabulary) tensor per prompt, on the CPU, in the model's output dtype."""


@dataclass(frozen=True)
class MergeCheck:
    """One line of the certificate: a value, its threshold, and the reason for that threshold."""

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
        """Return the check as certificate.json stores it; JSON has no NaN and no infinity, so they become text."""
        finite = not isinstance(self.value, float) or math.isfinite(self.value)
        return {**asdict(self), "value": self.value if finite else str(self.value), "passed": self.passed}

    def __str__(self) -> str:
        value = f"{self.value:.4g}" if isinstance(self.value, float) else self.value
        threshold = f"{self.threshold:.4g}" if isinstance(self.threshold, float) else self.threshold
        return f"{self.name} is {value}, required {self.comparison} {threshold} ({self.why})"


@dataclass(frozen=True)
class RoundingDimensions:
    """Model sizes that the rounding error depends on, beside the dtype."""

    layers: int
    width: int


def rounding_dimensions(model: Any) -> RoundingDimensions:
    """Return the number of layers and the width of the widest layer of a transformers model."""
    config = model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 0
    widest = max(inner) if isinstance(inner, (list, tuple)) else inner  # one width per layer (Gemma 3n)
    return RoundingDimensions(config.num_hidden_layers, max(config.hidden_size, widest))


@torch.no_grad()
def read_logits(model: Any, sequences: Sequence[Sequence[int]], device: str | torch.device | None = None) -> Logits:
    """Compute the logits at the last positions of every sequence, where its answer is.

    All sequences form one batch, padded on the left: a model that reads its weights from its files reads them once.
    They share `TOKENS_READ` and `LOGITS_HELD` equally; a sequence that exceeds its share is truncated at its beginning.

    Args:
        device: device that the model runs on, if its parameters do not tell.
    """
    trim_heap()  # each reading fragments the heap by some hundred MiB, where the next one's tensors do not fit
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or TOKENS_READ
    share = max(1, min(context, TOKENS_READ // max(1, len(sequences))))
    rows = [list(sequence)[-share:] for sequence in sequences]
    width = max(len(row) for row in rows)
    kept_positions = min(width, max(1, LOGITS_HELD // (config.vocab_size * len(rows))))
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs = {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_(min=0),
    }
    if bool(mask.all()):
        del inputs["attention_mask"]
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    accepted = inspect.signature(inner.forward).parameters
    arguments: dict[str, Any] = {
        name: tensor.to(device or model.device) for name, tensor in inputs.items() if name in accepted
    }
    if "logits_to_keep" in accepted:
        arguments["logits_to_keep"] = kept_positions
    logits = model(**arguments, use_cache=False).logits[:, -kept_positions:]
    return [
        sequence_logits[max(0, kept_positions - len(row)) :].cpu()
        for sequence_logits, row in zip(logits, rows, strict=True)
    ]


def logit_noise(dtype: torch.dtype, size: RoundingDimensions) -> float:
    """Return the largest root-mean-square logit error that rounding explains, as a share of the logits' standard
    deviation.

    >>> size = RoundingDimensions(28, 8192)
    >>> f"{logit_noise(torch.float32, size):.1e}", f"{logit_noise(torch.bfloat16, size):.2f}"
    ('2.4e-04', '0.18')
    """
    return SAFETY * _rounding(dtype, size) * math.sqrt(2 * (2 * size.layers + 8))


def nudge(dtype: torch.dtype, size: RoundingDimensions) -> float:
    """Return the relative change of each weight with which the effect of rounding at a position is measured."""
    return 2 * _rounding(dtype, size)


def _rounding(dtype: torch.dtype, size: RoundingDimensions) -> float:
    """Return the relative error of one rounding: e in the module's docstring."""
    unit, unit32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    return math.sqrt(unit**2 + size.width * unit32**2)


@dataclass
class LogitDifference:
    """Difference of one model's logits from a reference's: sums over positions and vocabulary.

    Attributes:
        entries: positions times vocabulary.
        absolute: sum of the errors' absolute values; `squares`: of their squares; `largest`: their maximum.
        spread: sum of squared deviations of the reference's logits from their mean over the vocabulary.
        divergence: sum over the positions of the Kullback-Leibler divergence from the reference, in nats.
        agreeing: positions where both models have the same best token.
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
        log_p, log_q = reference.log_softmax(-1), other.log_softmax(-1)
        self.divergence += float((log_p.exp() * (log_p - log_q)).sum())
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
    for reference_logits, other_logits in zip(reference, other, strict=True):
        for rows in _slices(reference_logits):
            total.add(reference_logits[rows], other_logits[rows])
    return total


def _slices(logits: torch.Tensor) -> Iterator[slice]:
    """Return slices of a few positions each: float64 over a large vocabulary is large."""
    step = max(1, COMPARED_AT_ONCE // logits.shape[-1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def check_agreement(
    label: str, reference: Logits, other: Logits, nudged: Logits, dtype: torch.dtype, size: RoundingDimensions
) -> list[MergeCheck]:
    """Return the four logit checks of `other` against the adapter's logits; if a logit is not finite, only the check
    that says so."""
    trim_heap()
    diff = compare_logits(reference, other)
    if diff.infinite:
        return [MergeCheck(f"{label}_logits_not_finite", diff.infinite, 0, "==", "every logit must be a finite number")]
    noise = logit_noise(dtype, size) * diff.deviation
    vocabulary = reference[0].shape[-1]
    worst = _worst_position(reference, other, nudged)
    flips = _expected_flips(reference, noise)
    name = str(dtype).removeprefix("torch.")
    return [
        MergeCheck(
            f"{label}_logit_error_mean", diff.absolute / diff.entries, noise, "<=",
            f"rounding to {name} in {size.layers} layers explains {noise / diff.deviation:.2g} of the logits' "
            f"standard deviation {diff.deviation:.3g}",
        ),
        MergeCheck(
            f"{label}_logit_error_worst", worst, SAFETY, "<=",
            f"the errors of the positions, of which the largest is {diff.largest:.3g}, divided by rounding's: "
            f"how far logits move when each weight moves by {_rounding(dtype, size):.1g} of itself",
        ),
        MergeCheck(
            f"{label}_kl_mean", diff.divergence / diff.positions, noise**2 * math.log(vocabulary), "<=",
            f"in nats; Hoeffding's lemma with the largest error over {vocabulary:,} tokens",
        ),
        MergeCheck(
            f"{label}_top1_agreement", diff.agreeing / diff.positions,
            1 - (flips + 3 * math.sqrt(flips)) / diff.positions, ">=",
            f"the two best tokens are so close that such errors change {flips:.3g} of {diff.positions:,} answers; "
            "three more standard errors are allowed",
        ),
    ]  # fmt: skip


def _worst_position(reference: Logits, other: Logits, nudged: Logits) -> float:
    """Return the largest ratio of the positions' errors to the movements that nudging all weights causes, both sorted
    by size.

    They are compared by rank and not position by position: where attention is about equally strong to two tokens, the
    least rounding decides, and at other positions in the nudged model. The number of such positions is random, too: the
    k-th largest error is compared with the movement of rank k - 3√k, three standard errors before it. The first eleven
    ranks have no counterpart, and are covered by the mean, the divergence and the next tokens.
    """
    errors, moves = [], []
    for reference_logits, other_logits, nudged_logits in zip(reference, other, nudged, strict=True):
        for rows in _slices(reference_logits):
            errors.append((other_logits[rows].double() - reference_logits[rows].double()).abs().amax(-1))
            moves.append((nudged_logits[rows].double() - other_logits[rows].double()).abs().amax(-1))
    error, move = (torch.cat(values).sort(descending=True).values for values in (errors, moves))
    rank = torch.arange(1, len(error) + 1)
    compared_rank = (rank - 3 * rank.sqrt()).floor().long()
    has_counterpart = compared_rank >= 1
    has_counterpart[-1] = True  # with fewer than twelve positions: the smallest error against the largest movement
    ratios = error[has_counterpart] / move[compared_rank[has_counterpart].clamp(min=1) - 1].clamp(
        min=torch.finfo(torch.float32).tiny
    )
    return float(ratios.max())


def _expected_flips(reference: Logits, noise: float) -> float:
    """Return the expected number of changed answers: a gap g between the two best logits closes with probability Φ(-g /
    (√2 · noise))."""
    flips = 0.0
    for logits in reference:
        best = logits.double().topk(2, dim=-1).values
        flips += float(torch.erfc((best[:, 0] - best[:, 1]) / (2 * noise)).sum()) / 2
    return flips


def check_effect(base: Logits, adapter: Logits, merged: Logits) -> MergeCheck:
    """Check that the adapter's effect survived: an update smaller than the format's rounding step disappears in a
    merge, and the logit checks, which allow for rounding, would not notice.

    With rounding noise n in each of the three models and an effect of size E the share is
    √(E² + 2n²) / (√(E² + 2n²) + √2 n): ½ where there is no effect, ⅔ where it is 2.4 times the noise.
    """
    adapter_distance, base_distance = compare_logits(adapter, merged).rms, compare_logits(base, merged).rms
    share = base_distance / (base_distance + adapter_distance) if base_distance + adapter_distance > 0 else 0.0
    return MergeCheck(
        "effect_kept", share, 2 / 3, ">=",
        "the merged model must be twice as far from the base as from the adapter; ½ is an effect lost in rounding "
        "noise: train longer, or use a finer model.dtype",
    )  # fmt: skip
