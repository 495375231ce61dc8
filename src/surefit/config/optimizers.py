"""Table of the optimizers, read wherever the code depends on a run's optimizer.

Conflicts of an optimizer with other settings are in `config/capabilities.py`; `train/optim.py` constructs it.
DeepSpeed's engine (`parallel/zero.py`) reads AdamW's state by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BitsAndBytesName = Literal["adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"]
"""Optimizers of bitsandbytes."""
OtherName = BitsAndBytesName
"""All optimizers but torch's AdamW, the only one whose state DeepSpeed shards."""
OptimizerName = Literal["adamw_torch", OtherName]
"""Values of `train.optim`."""


@dataclass(frozen=True)
class OptimizerSpec:
    """State that an optimizer keeps per trained parameter.

    Attributes:
        aliases: names of the same optimizer in other tools.
        state: names, as in a checkpoint, of the state tensors of each trained parameter; float32, and of its shape.
        eight_bit: whether the state has 8 bits, for the tensors that bitsandbytes quantizes.
        paged: whether the state is in memory that the driver may move to the host.
    """

    aliases: tuple[str, ...] = ()
    state: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    eight_bit: bool = False
    paged: bool = False


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw_torch": OptimizerSpec(("adamw", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")),
    "adamw_8bit": OptimizerSpec(("adamw_bnb_8bit",), eight_bit=True),
    "paged_adamw_32bit": OptimizerSpec(("paged_adamw",), paged=True),
    "paged_adamw_8bit": OptimizerSpec(eight_bit=True, paged=True),
}
