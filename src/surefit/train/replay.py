"""Writes the batch that stopped a run, so that anyone can look at it or run it again.

`rejected/step-N.safetensors` holds every tensor of micro batch i of optimizer step N as `i.NAME` (input_ids, labels,
and attention_mask, or position_ids and cu_seq_lens_q where examples were packed), int64 or int32, as the model got
them. Its metadata are strings: `format` (surefit-rejected-1), `step` (1 for the first), `micro_batches`, `seed` (of the
run), `dropout_seed` (for `torch.manual_seed` before the step), `loss` and `grad_norm`, as they were. safetensors is
enough to read it. To reproduce the step with the same weights, resume the run: it comes to this step again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from surefit.core.errors import MachineError
from surefit.core.rundir import RunDir, is_full, write_atomic

FORMAT = "surefit-rejected-1"


def write_rejected(run: RunDir, batches: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Path | None:
    """Write the micro batches of a rejected step, and return the file's path.

    Args:
        run: the run directory.
        batches: micro batches as the step got them.
        facts: `step`, and the other metadata.

    Returns:
        The file; None if the disk is full, so that this does not hide the error that follows.
    """
    tensors = {
        f"{number}.{name}": value.contiguous().clone()
        for number, batch in enumerate(batches)
        for name, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    metadata = {"format": FORMAT, "micro_batches": len(batches)} | dict(facts)
    path = run.rejected / f"step-{facts['step']}.safetensors"
    try:
        write_atomic(path, save(tensors, {key: str(value) for key, value in metadata.items()}))
    except MachineError as error:
        if not is_full(error):
            raise
        return None
    return path
