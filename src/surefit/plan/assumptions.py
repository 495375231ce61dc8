"""Assumptions of a plan about a machine that cannot be inspected: one with a GPU that is not here. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from surefit.config.modes import MODES
from surefit.config.optimizers import OPTIMIZERS
from surefit.config.resolve import KERNEL_PACKAGES, ResolvedConfig, kernels_obstacle
from surefit.facts.hardware import HardwareFacts


@dataclass(frozen=True)
class Assumption:
    """An assumption about a package on the other machine.

    Attributes:
        package: its name for pip.
        installed: the assumption. False is the case that needs more memory and time.
        why: the effect, and how to plan the other case.
    """

    package: str
    installed: bool
    why: str


def list_assumptions(resolved: ResolvedConfig, hardware: HardwareFacts) -> Iterator[Assumption]:
    """Yield the assumptions about the machine with the GPU; none where it is this one."""
    if not hardware.is_another_machine:
        return
    config = resolved.config
    decided = resolved.provenance.get("speed.kernels")
    if decided is not None and decided.kind == "auto" and not kernels_obstacle(config, hardware):
        yield Assumption(
            "liger-kernel",
            False,
            "fused kernels, which need less memory and time, are not planned: set speed.kernels: true to include them",
        )
    elif config.speed.kernels is True:
        yield from (Assumption(package, True, "speed.kernels: true") for package in KERNEL_PACKAGES)
    optimizer = OPTIMIZERS[config.train.optim]
    if config.model.quantization == "nf4":
        yield Assumption("bitsandbytes", True, "model.quantization: nf4")
    elif optimizer.eight_bit or optimizer.paged:
        yield Assumption("bitsandbytes", True, f"train.optim: {config.train.optim}")
    mode = config.parallel.mode
    if mode != "auto" and MODES[mode].zero_stage:
        yield Assumption("deepspeed", True, f"parallel.mode: {mode}")
    if config.speed.attention in ("flash_attention_2", "flash_attention_3"):
        yield Assumption("flash-attn", True, f"speed.attention: {config.speed.attention}")


def assumption_text(assumed: Mapping[str, Any]) -> str:
    """Return an entry of plan.json's `assumptions` in words."""
    state = "installed" if assumed["installed"] else "not installed"
    return f"{assumed['package']} is {state} on that machine ({assumed['why']})"
