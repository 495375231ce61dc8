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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import torch

from surefit.core.malloc import trim_heap
from surefit.model.output_head import OutputHead, keep_hidden_states, separate_decoder

Value = float | int | str
SAFETY = 4.0
LOGITS_HELD = 2**27
"""Number of logits compared per model: 512 MiB in float32."""
LOGITS_COMPUTED_AT_ONCE = 2**24
"""Number of logits that the head of each model computes at once: 64 MiB in float32. At fewer positions, reading the
head's weights would take longer than multiplying them."""
COMPARED_AT_ONCE = 2**18
"""Number of logits compared at once: 2 MiB in float64, so that the copies stay in the processor's cache."""
TOKENS_READ = 2**13
"""Number of tokens that a model reads in all: 32 rows of 256 tokens."""
TOKENS_PER_GROUP = 128
"""A group of rows of its own must save this many tokens of padding. Reading all weights of a 135M model in float32 once
more takes as long as computing with them for some 50 tokens; nudging them, 110."""
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


class LogitSource(Protocol):
    """A model's logits at the compared positions of all prompts, read a few positions at a time."""

    @property
    def positions(self) -> int:
        """Number of positions."""

    @property
    def vocabulary(self) -> int:
        """Number of logits per position."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the logits (positions, vocabulary), on the CPU, in the model's output dtype."""


@dataclass(frozen=True)
class HeldLogits:
    """Logits in memory."""

    logits: Logits

    @property
    def positions(self) -> int:
        return sum(map(len, self.logits))

    @property
    def vocabulary(self) -> int:
        return self.logits[0].shape[-1]

    def read(self, start: int, stop: int) -> torch.Tensor:
        return _rows_between(self.logits, start, stop)


@dataclass(frozen=True)
class HeadLogits:
    """Logits that the output head computes when they are read: the hidden states before it are far smaller.

    Attributes:
        states: one tensor (positions, hidden size) per prompt, on the CPU.
        running: gives the model its weights while the head runs.
    """

    states: list[torch.Tensor]
    head: OutputHead
    vocabulary: int
    device: str | torch.device
    running: Callable[[], AbstractContextManager[None]]

    @property
    def positions(self) -> int:
        return sum(map(len, self.states))

    @torch.no_grad()
    def read(self, start: int, stop: int) -> torch.Tensor:
        with self.running():
            return self.head(_rows_between(self.states, start, stop).to(self.device)).cpu()


def _rows_between(tensors: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Return rows `start` to `stop` of the tensors one behind the other."""
    parts, offset = [], 0
    for tensor in tensors:
        parts.append(tensor[max(0, start - offset) : max(0, stop - offset)])
        offset += len(tensor)
    parts = [part for part in parts if len(part)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def read_logits(model: Any, sequences: Sequence[Sequence[int]], device: str | torch.device | None = None) -> Logits:
    """Compute the logits at the last positions of every sequence, where its answer is.

    The sequences share `TOKENS_READ` and `LOGITS_HELD` equally; a sequence that exceeds its share is truncated at its
    beginning.

    Args:
        device: device that the model runs on, if its parameters do not tell.
    """
    return _read_rows(model, sequences, device, lambda arguments: model(**arguments).logits)


def read_states(
    model: Any,
    sequences: Sequence[Sequence[int]],
    device: str | torch.device,
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> LogitSource:
    """Run a model up to its output head, and return the logits of `read_logits`, which the head computes when they are
    read; where the head is a part of the decoder, they are computed now.

    Args:
        device: device that the model runs on.
        running: gives the model its weights while it runs, as `LayerwiseModel.running` does.
    """
    decoder = separate_decoder(model)
    with running():
        if decoder is None:
            return HeldLogits(read_logits(model, sequences, device))
        kinds: list[type[Any]] = []

        def forward(arguments: dict[str, Any]) -> torch.Tensor:
            with keep_hidden_states(decoder) as kept:
                model(**arguments)
            (output,) = kept
            kinds[:] = [type(output)]
            states: torch.Tensor = output.last_hidden_state
            return states

        states = [rows.clone() for rows in _read_rows(model, sequences, device, forward)]
    causal_lm = _causal_lm(model)
    head = OutputHead(causal_lm, decoder, kinds[0])
    return HeadLogits(states, head, causal_lm.config.get_text_config().vocab_size, device, running)


def _causal_lm(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@torch.no_grad()
def _read_rows(
    model: Any,
    sequences: Sequence[Sequence[int]],
    device: str | torch.device | None,
    forward: Callable[[dict[str, Any]], torch.Tensor],
) -> list[torch.Tensor]:
    """Return what `forward` computes, (rows, length, size), at the compared positions: a tensor (positions, size) per
    sequence, on the CPU.

    On a CPU, rows of about the same length form a batch; elsewhere, where copying the weights takes longer than the
    arithmetic, all of them. Each batch is padded on the left.
    """
    trim_heap()  # each reading fragments the heap by some hundred MiB, where the next one's tensors do not fit
    device = torch.device(device or model.device)
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or TOKENS_READ
    share = max(1, min(context, TOKENS_READ // max(1, len(sequences))))
    rows = [list(sequence)[-share:] for sequence in sequences]
    kept_positions = min(max(map(len, rows)), max(1, LOGITS_HELD // (config.vocab_size * len(rows))))
    accepted = inspect.signature(_causal_lm(model).forward).parameters
    compared: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    for group in group_by_length(list(map(len, rows))) if device.type == "cpu" else [list(range(len(rows)))]:
        inputs = _padded([rows[index] for index in group])
        arguments: dict[str, Any] = {name: tensor.to(device) for name, tensor in inputs.items() if name in accepted}
        if "logits_to_keep" in accepted:
            arguments["logits_to_keep"] = kept_positions
        output = forward(arguments | {"use_cache": False})[:, -kept_positions:]
        for index, row_output in zip(group, output, strict=True):
            compared[index] = row_output[-len(rows[index]) :].cpu()
    return compared


def _padded(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs = {
        "input_ids": torch.tensor([[0] * (width - len(row)) + list(row) for row in rows]),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_(min=0),
    }
    if bool(mask.all()):
        del inputs["attention_mask"]
    return inputs


def group_by_length(lengths: Sequence[int], per_group: int = TOKENS_PER_GROUP) -> list[list[int]]:
    """Divide rows into groups so that all padded tokens, and `per_group` for each group, are as few as can be.

    >>> group_by_length([100, 900, 110, 880])
    [[0, 2], [3, 1]]
    >>> group_by_length([100, 101, 110])
    [[0, 1, 2]]
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best: list[tuple[int, list[list[int]]]] = [(0, [])]
    for stop in range(1, len(order) + 1):
        longest = lengths[order[stop - 1]]
        costs = [best[start][0] + (stop - start) * longest + per_group for start in range(stop)]
        start = costs.index(min(costs))
        best.append((costs[start], [*best[start][1], order[start:stop]]))
    return best[-1][1]


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
        base_squares: sum of the squared differences from the base's logits, if they are compared.
        errors: the largest error of each position; `gaps`: the reference's best logit less its second best; `moves`:
            the largest movement in the nudged model, if it is compared.
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
    base_squares: float = 0.0
    errors: list[torch.Tensor] = field(default_factory=list)
    gaps: list[torch.Tensor] = field(default_factory=list)
    moves: list[torch.Tensor] = field(default_factory=list)

    def add(
        self,
        reference: torch.Tensor,
        other: torch.Tensor,
        nudged: torch.Tensor | None = None,
        base: torch.Tensor | None = None,
    ) -> None:
        """Add some positions: logits (positions, vocabulary) of each model."""
        reference, other = reference.double(), other.double()
        error = other - reference
        absolute = float(torch.linalg.vector_norm(error, 1))
        if not math.isfinite(absolute):  # the sum of errors is finite only if every logit is
            self.infinite += int((~torch.isfinite(reference)).sum() + (~torch.isfinite(other)).sum())
        self.entries += error.numel()
        self.positions += len(error)
        self.absolute += absolute
        self.squares += _sum_of_squares(error)
        self.errors.append(torch.linalg.vector_norm(error, math.inf, dim=-1))
        self.largest = max(self.largest, float(self.errors[-1].max()))
        self.spread += _sum_of_squares(reference - reference.mean(-1, keepdim=True))
        if nudged is not None:
            self.moves.append(torch.linalg.vector_norm(nudged.double() - other, math.inf, dim=-1))
        if base is not None:
            self.base_squares += _sum_of_squares(other - base.double())
        best, best_other = reference.argmax(-1, keepdim=True), other.argmax(-1, keepdim=True)
        self.agreeing += int((best == best_other).sum())
        highest, highest_other = reference.gather(-1, best), other.gather(-1, best_other)
        # Σ p (log p - log q), with p the exponentials divided by their sum: the mean of the errors under p, and the
        # logarithms of both sums.
        weights, weights_other = (reference - highest).exp_(), other.sub_(highest_other).exp_()
        total, total_other = weights.sum(-1), weights_other.sum(-1)
        means = weights.mul_(error).sum(-1) / total
        logs = (highest_other - highest)[:, 0] + total_other.log() - total.log()
        self.divergence += float((logs - means).sum())
        second = reference.scatter_(-1, best, -math.inf).amax(-1)
        self.gaps.append(highest[:, 0] - second)

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.entries)

    @property
    def deviation(self) -> float:
        return math.sqrt(self.spread / self.entries)


def _sum_of_squares(tensor: torch.Tensor) -> float:
    flat = tensor.flatten()
    return float(torch.dot(flat, flat))


def compare_logits(
    reference: LogitSource | Logits,
    other: LogitSource | Logits,
    nudged: LogitSource | Logits | None = None,
    base: LogitSource | Logits | None = None,
) -> LogitDifference:
    """Compare models' logits at the same positions, each computed once.

    Args:
        nudged: the logits of `other` with every weight nudged, for `check_agreement`.
        base: the logits of the model without the adapter, for `check_effect`.
    """
    sources = [
        None if logits is None else HeldLogits(logits) if isinstance(logits, list) else logits
        for logits in (reference, other, nudged, base)
    ]
    compared = [source for source in sources if source is not None]
    (positions,) = {source.positions for source in compared}
    vocabulary = max(source.vocabulary for source in compared)
    total = LogitDifference()
    for rows in _slices(positions, max(1, LOGITS_COMPUTED_AT_ONCE // vocabulary)):
        blocks = [None if source is None else source.read(rows.start, rows.stop) for source in sources]
        for some in _slices(rows.stop - rows.start, max(1, COMPARED_AT_ONCE // vocabulary)):
            total.add(*(None if block is None else block[some] for block in blocks))  # type: ignore[arg-type]
    return total


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def check_agreement(
    label: str, diff: LogitDifference, dtype: torch.dtype, size: RoundingDimensions
) -> list[MergeCheck]:
    """Return the four logit checks of a comparison with the adapter's and the nudged logits; if a logit is not finite,
    only the check that says so."""
    if diff.infinite:
        return [MergeCheck(f"{label}_logits_not_finite", diff.infinite, 0, "==", "every logit must be a finite number")]
    noise = logit_noise(dtype, size) * diff.deviation
    vocabulary = diff.entries // diff.positions
    worst = _worst_position(torch.cat(diff.errors), torch.cat(diff.moves))
    flips = _expected_flips(torch.cat(diff.gaps), noise)
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


def _worst_position(errors: torch.Tensor, moves: torch.Tensor) -> float:
    """Return the largest ratio of the positions' errors to the movements that nudging all weights causes, both sorted
    by size.

    They are compared by rank and not position by position: where attention is about equally strong to two tokens, the
    least rounding decides, and at other positions in the nudged model. The number of such positions is random, too: the
    k-th largest error is compared with the movement of rank k - 3√k, three standard errors before it. The first eleven
    ranks have no counterpart, and are covered by the mean, the divergence and the next tokens.
    """
    error, move = (values.sort(descending=True).values for values in (errors, moves))
    rank = torch.arange(1, len(error) + 1)
    compared_rank = (rank - 3 * rank.sqrt()).floor().long()
    has_counterpart = compared_rank >= 1
    has_counterpart[-1] = True  # with fewer than twelve positions: the smallest error against the largest movement
    ratios = error[has_counterpart] / move[compared_rank[has_counterpart].clamp(min=1) - 1].clamp(
        min=torch.finfo(torch.float32).tiny
    )
    return float(ratios.max())


def _expected_flips(gaps: torch.Tensor, noise: float) -> float:
    """Return the expected number of changed answers: a gap g between the two best logits closes with probability Φ(-g /
    (√2 · noise))."""
    return float(torch.erfc(gaps / (2 * noise)).sum()) / 2


def check_effect(diff: LogitDifference) -> MergeCheck:
    """Check that the adapter's effect survived, in a comparison with the adapter's and the base's logits: an update
    smaller than the format's rounding step disappears in a merge, and the logit checks, which allow for rounding, would
    not notice.

    With rounding noise n in each of the three models and an effect of size E the share is
    √(E² + 2n²) / (√(E² + 2n²) + √2 n): ½ where there is no effect, ⅔ where it is 2.4 times the noise.
    """
    adapter_distance, base_distance = diff.rms, math.sqrt(diff.base_squares / diff.entries)
    share = base_distance / (base_distance + adapter_distance) if base_distance + adapter_distance > 0 else 0.0
    return MergeCheck(
        "effect_kept", share, 2 / 3, ">=",
        "the merged model must be twice as far from the base as from the adapter; ½ is an effect lost in rounding "
        "noise: train longer, or use a finer model.dtype",
    )  # fmt: skip
