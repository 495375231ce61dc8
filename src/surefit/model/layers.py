"""A model too large for one GPU, its layers spread over all GPUs that this process sees: for generation only.

One layer after the other computes, so that one GPU works while the others wait: this is for size, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import PreTrainedModel

from surefit.config.resolve import HardwareLike
from surefit.config.schema import ModelSection
from surefit.core import env
from surefit.core.errors import MachineError
from surefit.core.units import bytes_text
from surefit.facts.generation import FOR_WEIGHTS
from surefit.facts.gguf_source import FIELD
from surefit.model.load import build_meta_model, load_model


def load_for_generation(section: ModelSection, hardware: HardwareLike) -> PreTrainedModel:
    """Load a model with `load_model`, its layers spread over several GPUs where this process is alone, sees several,
    and one does not hold the weights. A quantized model is not spread.

    Raises:
        MachineError: all GPUs together do not hold it; and as `load_model`.
    """
    is_single_process = env.distributed_env()[1] == 1
    if (
        hardware.kind != "cuda"
        or not is_single_process
        or section.quantization != "none"
        or torch.cuda.device_count() < 2
    ):
        return load_model(section, hardware)
    free = [torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())]
    return load_model(section, hardware, placed=split_by_layers(build_meta_model(section), free))


def split_by_layers(model: PreTrainedModel, free: Sequence[int]) -> dict[str, int] | None:
    """Return the GPU of each module, with no decoder layer divided; None where the first holds them all.

    Args:
        model: its weights may be on the meta device.
        free: bytes on each GPU.

    Raises:
        MachineError: all GPUs together do not hold the weights.
    """
    model.tie_weights()
    room = {number: int(FOR_WEIGHTS * most) for number, most in enumerate(free)}
    needed = sum(parameter.nbytes for parameter in model.parameters())
    if needed <= room[0]:
        return None
    layers = sorted(model._no_split_modules or ())
    even = get_balanced_memory(model, max_memory=dict(room), no_split_module_classes=layers)
    for most in (even, room):  # an even split may fail where the GPUs have different free memory
        device_map = infer_auto_device_map(model, max_memory=dict(most), no_split_module_classes=layers)
        if all(isinstance(device, int) for device in device_map.values()):
            return {name: int(device) for name, device in device_map.items()}
    raise MachineError(
        f"the weights take {bytes_text(needed)}, and {len(free)} GPUs have {bytes_text(sum(room.values()))} for them",
        code="E5056",
        field=FIELD,
        help="use more or larger GPUs, or a smaller model",
    )
