"""The verdict whether a run fits a device: an interval around the estimate, and an answer only outside it. Torch-free.

Worked example, a simulation that reserves 60 GiB on an A100 of 79.25 GiB: 60 × 0.97 + 0.25 = 58.45 GiB at least and
60 × 1.03 + 0.75 = 62.55 GiB at most, so it fits. At 77 GiB the interval is 74.94 to 80.06 GiB: too close to call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from surefit.config.capabilities import require_compatible_settings
from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError, MachineError
from surefit.core.units import MIB, bytes_text
from surefit.facts.hardware import HardwareFacts
from surefit.facts.memory_formula import StepMemory
from surefit.facts.memory_per_rank import peak_bytes
from surefit.facts.model import ModelFacts
from surefit.facts.sharding import ShardingLayout, sharing_of
from surefit.facts.step_shape import micro_batch_shape
from surefit.plan.cpu import cpu_overhead_bytes
from surefit.plan.process import ASSUMED

EstimateMethod = Literal["simulation", "closed form"]
Verdict = Literal["fits", "does not fit", "too close to call", "unknown"]

MARGIN: dict[EstimateMethod, float] = {"simulation": 0.03, "closed form": 0.06}
"""Relative error of an estimate, by method. The closed form may differ from the simulation by another 3 %."""
LONG = 16_384
FRAGMENTATION, ROUGH_FRAGMENTATION, TILED_FRAGMENTATION, KEPT_FRAGMENTATION, FUSED_FRAGMENTATION = (
    0.55,
    0.70,
    0.35,
    0.16,
    0.18,
)
"""Shares that the closed form adds to its upper end, of all memory that is not always held. The first where layers are
recomputed or a micro batch has more than `LONG` tokens: the tensors that a layer keeps are split off the large blocks
that its MLP has just freed, and the next MLP finds no whole one. The second where, beside that, weights are made of
float8 ones or the gradients of all weights are summed over micro batches, the third for long micro batches with MLPs in
tiles, the last two where nothing is recomputed, without fused kernels and with them. The remainders depend on the order
and the sizes, which only a simulation has: up to 53, 65, 32, 15.1 and 17.1 % in benchmarks/plan_closed_form.py's runs
and 93 others (docs/plan-method.md)."""
MIN_FRAGMENTATION = 0.10
"""Smallest fragmentation where layers are recomputed, as a share of the whole estimate: 9 % where nearly all is always
held."""
WHOLE_LOGITS = 0.40
"""Smallest fragmentation with a loss that is not computed in chunks, as a share of the whole estimate: 13 % and 32 % in
two runs of benchmarks/plan_closed_form.py."""
KEPT_ABOVE = 0.30
"""Largest error upwards of the same estimate where malloc keeps freed memory (`core.malloc`): up to 22 % in the
families of benchmarks/plan_real.py, and no simulation of malloc shows it."""
CPU_MARGIN: dict[EstimateMethod, float] = {"simulation": 0.05, "closed form": 0.10}
"""Relative error of an estimate of malloc's memory on a CPU, by method, from `benchmarks/plan_real.py`
(docs/plan-method.md)."""
CONTEXT = (256 * MIB, 768 * MIB)
"""Least and most bytes of the CUDA context and the libraries' kernels on the GPU, beside PyTorch's own memory: about
300 MiB with the lazy loading of CUDA 11.7 and later (github.com/pytorch/pytorch/issues/107667), 200 to over 700 MiB by
GPU (issues/28113)."""
COMMUNICATOR = (256 * MIB, 1126 * MIB)
"""Least and most bytes of NCCL on the GPU for the communicator of all processes, its first connection included: 544 MB
between two and 688 MB among four A100 over NVLink (github.com/NVIDIA/nccl/issues/964), 1.06 GB on eight H100
(issues/1685), less over PCIe, whose channels are fewer (issues/986). Not yet measured here."""
FURTHER_COMMUNICATOR = (0, 688 * MIB)
"""Least and most bytes for each further group that communicates (issues/864: 1.6 GB with one, 6 GB with several):
processes that share layers, or the tokens of an example, beside the group of all."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that the device must have, as an interval.

    Attributes:
        bytes: PyTorch's own memory, as estimated.
        likely, low, high: with everything else on the device: in between, at least and at most.
        how: the method of the estimate.
        margin, above: possible relative error: too high, and too low.
        beside: the other memory on the device, in words.
    """

    bytes: int
    likely: int
    low: int
    high: int
    how: EstimateMethod
    margin: float
    above: float
    beside: str

    @property
    def spread(self) -> str:
        """Method of the estimate and its relative error, in words."""
        if self.above == self.margin:
            return f"{self.how} ± {self.margin:.0%}"
        return f"{self.how} - {self.margin:.0%} + {self.above:.0%} for memory fragmentation"


def build_memory_estimate(
    estimate: int,
    kind: str,
    how: EstimateMethod,
    sharing: ShardingLayout | None = None,
    pieces: float = 0.0,
    *,
    kept: bool = False,
    process: tuple[int, int, str] = (*ASSUMED, "assumed"),
) -> MemoryEstimate:
    """Return the interval around an estimate, on a "cuda" or a "cpu" device; with several processes, of one of them.

    Args:
        estimate: bytes of PyTorch's own memory.
        kind: kind of the device.
        how: the method of the estimate.
        sharing: how several processes share the run.
        pieces: share that fragmentation may add on a GPU beyond the estimate.
        kept: whether, on a CPU, malloc keeps freed memory.
        process: on a CPU the least and most bytes of the process itself, and how they are known.
    """
    cpu = kind == "cpu"
    margin, (least, most) = (CPU_MARGIN[how], process[:2]) if cpu else (MARGIN[how], CONTEXT)
    components = f"the process itself, {process[2]}" if cpu else "the CUDA context"
    if sharing is not None and sharing.processes > 1 and not cpu:
        further = int(sharing.mode in ("cp", "pp") or sharing.tokens > 1)
        least += COMMUNICATOR[0] + further * FURTHER_COMMUNICATOR[0]
        most += COMMUNICATOR[1] + further * FURTHER_COMMUNICATOR[1]
        components += " and NCCL"
    above = max(margin, (KEPT_ABOVE if kept else 0.0) if cpu else pieces)
    low, high = round(estimate * (1 - margin)) + least, round(estimate * (1 + above)) + most
    beside = f"{least // MIB} to {most // MIB} MiB for {components}"
    return MemoryEstimate(estimate, estimate + (least + most) // 2, low, high, how, margin, above, beside)


def closed_form_estimate(
    resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts, length: int | None = None
) -> MemoryEstimate | None:
    """Return the memory by the closed form; None for a model whose activations it does not know.

    Args:
        length: tokens of the longest row; None: `data.max_length`.
    """
    budget = peak_bytes(resolved, model, length, capability=hardware.compute_capability)
    if budget is None:
        return None
    pieces = _fragmentation_share(budget, resolved, micro_batch_shape(resolved, length).tokens)
    beside = cpu_overhead_bytes(resolved, model, budget) if hardware.kind == "cpu" else 0
    return build_memory_estimate(
        budget.allocated + beside, hardware.kind, "closed form", sharing_of(resolved.config), pieces
    )


def _fragmentation_share(budget: StepMemory, resolved: ResolvedConfig, tokens: int) -> float:
    """Return the share that fragmentation may add to a closed form."""
    config = resolved.config
    long = tokens // config.parallel.cp > LONG
    recomputed = config.train.gradient_checkpointing is not False
    summed = config.train.method == "full" and resolved.gradient_accumulation_steps > 1
    if long and config.speed.tiled_mlp is True:
        share = TILED_FRAGMENTATION
    elif summed or (recomputed and config.model.quantization == "fp8"):
        share = ROUGH_FRAGMENTATION
    else:
        share = (
            FRAGMENTATION
            if recomputed or long
            else FUSED_FRAGMENTATION
            if config.speed.kernels is True
            else KEPT_FRAGMENTATION
        )
    always_held = sum(term.bytes for term in budget.terms if term.moment == "always")
    floor = 0.0 if config.speed.chunked_loss else WHOLE_LOGITS
    return max(floor, MIN_FRAGMENTATION if recomputed else 0.0, share * (1 - always_held / budget.allocated))


def judge_fit(needed: MemoryEstimate, capacity: int | None) -> Verdict:
    """Return the verdict: "fits" only where even the upper end fits, "does not fit" only where not even the lower end
    does."""
    if capacity is None:
        return "unknown"
    if needed.high <= capacity:
        return "fits"
    return "does not fit" if needed.low > capacity else "too close to call"


def closed_form_upper_bound(model: ModelFacts, hardware: HardwareFacts) -> Callable[[SureFitConfig, int], int | None]:
    """Return a function (config, micro batches per step) → the upper end of the closed form's interval, or None where
    there is none.

    `config.resolve` uses it to decide what fits.
    """

    def needed(config: SureFitConfig, micro_batches: int) -> int | None:
        estimate = closed_form_estimate(ResolvedConfig(config, {}, micro_batches, None), model, hardware)
        return estimate.high if estimate else None

    return needed


def require_plannable(resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts) -> None:
    """Raise where no plan can be made.

    Raises:
        MachineError: a device without memory.
        ConfigError: settings that cannot be combined; a LoRA rank over the model's hidden size.
    """
    if hardware.memory_bytes is not None and hardware.memory_bytes <= 0:
        raise MachineError(
            f"{hardware.name} has {bytes_text(hardware.memory_bytes)} of memory",
            code="E8017",
            field="hardware.gpu",
            help="name the GPU to plan for, e.g. --gpu h100",
        )
    require_compatible_settings(resolved.config)
    adapter = resolved.config.adapter
    if adapter is not None and adapter.r > model.hidden_size:
        raise ConfigError(
            f"rank {adapter.r:,} exceeds the hidden size of {model.name}, {model.hidden_size:,}",
            code="E8018",
            field="lora.r",
            help="factors wider than the layer save nothing: choose 8 to 256, or train.method: full",
        )
