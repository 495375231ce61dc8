"""Table of the parallel modes, read wherever the code depends on a run's mode.

Conflicts of a mode with other settings are in `config/capabilities.py`; the memory, communication and engine of each
process are in `facts/memory_per_rank.py`, `plan/communication.py`, `parallel/engine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ModeName = Literal["single", "ddp", "fsdp", "zero2", "zero3", "tp", "pp", "cp"]
"""Values of `parallel.mode` after "auto" is resolved."""


@dataclass(frozen=True)
class ParallelMode:
    """One way to distribute a run over processes.

    Attributes:
        holds: what each process holds, in words.
        divided: what is sharded over the processes: the optimizer state with its float32 masters and gradients, or that
            and the weights.
        grouped: whether processes form groups that read the same examples; the field of `parallel` with the mode's name
            is the group size.
        zero_stage: stage of DeepSpeed's ZeRO, or 0 for other modes. ZeRO reads the values of tensors, and is of use
            with one process too.
    """

    holds: str
    divided: Literal["nothing", "optimizer state", "weights"] = "nothing"
    grouped: bool = False
    zero_stage: int = 0

    @property
    def deepspeed(self) -> bool:
        return self.zero_stage > 0

    @property
    def sharded(self) -> bool:
        """Return whether each process holds a part of every sharded tensor. Such a mode can offload it to host
        memory.
        """
        return self.divided != "nothing" and not self.grouped

    @property
    def overlaps(self) -> bool:
        """Return whether communication overlaps computation: only the part that is longer than the arithmetic costs
        time.
        """
        return not self.grouped

    @property
    def loads_on_host(self) -> bool:
        """Return whether weights are loaded into host memory, and each process moves its part to its device."""
        return self.divided == "weights" and not self.deepspeed


MODES: dict[str, ParallelMode] = {
    "single": ParallelMode("everything"),
    "ddp": ParallelMode("a whole model in each"),
    "fsdp": ParallelMode("weights, gradients and optimizer in shards", "weights"),
    "zero2": ParallelMode("gradients and optimizer in shares", "optimizer state", zero_stage=2),
    "zero3": ParallelMode("weights, gradients and optimizer in shares", "weights", zero_stage=3),
    "tp": ParallelMode("a part of every matrix in each", "weights", grouped=True),
    "pp": ParallelMode("some of the layers in each", "weights", grouped=True),
    "cp": ParallelMode("a part of every example's tokens in each", grouped=True),
}
NAMES: tuple[ModeName, ...] = get_args(ModeName)
GROUPED = tuple(name for name in NAMES if MODES[name].grouped)
ZERO = tuple(name for name in NAMES if MODES[name].deepspeed)
WEIGHTS_DIVIDED = tuple(name for name in NAMES if MODES[name].divided == "weights")
