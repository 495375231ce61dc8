"""The optimizers, a row each, read wherever it matters which one a run has.

What one cannot be combined with is in `config/capabilities.py`; `train/optim.py` makes it. DeepSpeed's engine
(`parallel/zero.py`) asks for AdamW's state by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BitsAndBytesName = Literal["adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"]
"""Those of bitsandbytes."""
OtherName = BitsAndBytesName
"""All but torch's AdamW, the one whose state DeepSpeed shares out."""
OptimizerName = Literal["adamw_torch", OtherName]
"""Values of `train.optim`."""


@dataclass(frozen=True)
class OptimizerSpec:
    """What is kept of the gradients.

    Attributes:
        aliases: what other tools call it besides.
        state: the tensors that it keeps of each trained one, by their names in a checkpoint; float32, and as large.
        eight_bit: they have 8 bits, where bitsandbytes has it so.
        paged: they lie where a driver may move them to the host.
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
