"""The parallel modes, a row each, read wherever it matters which one a run has.

What a mode cannot be combined with is in `config/capabilities.py`; what a process then needs, sends and runs is
arithmetic and code of its own: `facts/memory_per_rank.py`, `plan/communication.py`, `parallel/engine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ModeName = Literal["single", "ddp", "fsdp", "zero2", "zero3", "tp", "pp", "cp"]
"""Values of `parallel.mode` once it is decided."""


@dataclass(frozen=True)
class ParallelMode:
    """A way in which processes share a run.

    Attributes:
        holds: what each process has, in words.
        divided: what each process has a part of: the optimizer's state with its float32 masters and gradients, or that
            and the weights.
        grouped: as many processes as the setting of `parallel` with the mode's name says read the same examples.
        zero_stage: of ZeRO, which DeepSpeed runs: it reads the values of tensors, and is of use to one process too. 0
            where it does not.
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
        """Each process has a part of every tensor that is divided. What is not with it can be in the host's memory."""
        return self.divided != "nothing" and not self.grouped

    @property
    def overlaps(self) -> bool:
        """It exchanges while it computes: only what takes longer than the arithmetic is waited for."""
        return not self.grouped

    @property
    def loads_on_host(self) -> bool:
        """Weights are read into the host's memory, and what a process holds of them is moved to its device."""
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
