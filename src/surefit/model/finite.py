"""Weights and logits that are not finite: reported as such, before another cause is reported for their effects."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from surefit.core.errors import ModelError
from surefit.core.units import plural

FIELD, DTYPE = "model.name_or_path", "model.dtype"


def explain_non_finite(model: torch.nn.Module, dtype: str) -> ModelError:
    """Return the reason why a model computes NaN or infinity: values of its weights, or overflow in the computation.

    Args:
        model: loaded; every weight is read once.
        dtype: dtype of the computation, such as "float16".
    """
    faults = list(_not_finite(model))
    if not faults:
        return ModelError(
            f"the logits are not finite, though all weights are: values overflow {dtype}",
            code="E5352",
            field=DTYPE,
            help="set model.dtype: bfloat16, or float32 where the device cannot compute in it"
            if dtype == "float16"
            else "compare config.json with the original: it may not belong to these weights",
        )
    name, nan, infinite, total = faults[0]
    more = f"; {plural(len(faults) - 1, 'more tensor')} likewise" if len(faults) > 1 else ""
    problem = f"{nan + infinite:,} of {total:,} values of {name} are not finite ({nan:,} NaN, {infinite:,} infinite)"
    overflows = dtype == "float16" and not any(fault[1] for fault in faults)
    return ModelError(
        problem + more,
        code="E5353",
        field=DTYPE if overflows else FIELD,
        help="the weights are too large for float16: set model.dtype: bfloat16 or float32"
        if overflows
        else "the weights are damaged: download or convert the model again",
    )


def _not_finite(model: torch.nn.Module) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, NaN values, infinite values, values) of each weight, or scale of quantized weights, that has any."""
    for name, tensor in _weights_and_scales(model):
        # For a tensor sharded between processes, the local shard.
        values = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not values.is_floating_point():
            continue
        values = values.float() if values.itemsize == 1 else values  # isfinite does not support float8
        if bool(torch.isfinite(values).all()):
            continue
        nan, infinite = (int(count) for count in (torch.isnan(values).sum(), torch.isinf(values).sum()))
        yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), nan, infinite, values.numel()


def _weights_and_scales(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter, and the scales of those that are quantized."""
    for name, parameter in model.named_parameters():
        yield name, parameter
        state = getattr(parameter, "quant_state", None)  # bitsandbytes'; its scales are quantized in turn
        if state is not None:
            nested = [state.state2.absmax, state.offset] if state.nested else []
            yield from ((f"{name} (scale)", scale) for scale in (state.absmax, *nested))
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".scale") or name == "scale")
