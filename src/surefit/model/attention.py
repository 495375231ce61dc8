"""The attention implementation of a model, and the check that packed documents do not attend to each other in it.

`varlen` is SureFit's own, `torch_varlen`. `facts.attention` decides, from config.json, which models cannot be packed
and when the kernel runs; `require_packable` checks it on the model itself, before training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.utils import import_utils

from surefit.core.errors import MachineError, ModelError
from surefit.core.reading import reason_of
from surefit.core.units import plural
from surefit.facts.attention import KERNEL_DTYPES, attention_layers, attention_needs, kernel_obstacle, packing_obstacle
from surefit.model.finite import explain_non_finite
from surefit.model.memory_errors import is_out_of_memory
from surefit.model.varlen import NAME, UNPACKED, counting_attention

__all__ = [
    "NAME",
    "Attention",
    "counting_attention",
    "pack_ids",
    "packing_disagreement",
    "require_packable",
    "require_shareable_prompts",
    "resolve_attention",
    "use_varlen",
]

FIELD = "data.packing"


class Attention(NamedTuple):
    """transformers' name of an attention implementation, and why it was chosen."""

    name: str
    reason: str


FLASH = {
    "flash_attention_2": (import_utils.is_flash_attn_2_available, (8, 0)),
    "flash_attention_3": (import_utils.is_flash_attn_3_available, (9, 0)),
}
"""Name → whether its package is installed, and the oldest GPU that supports it."""


def resolve_attention(
    requested: str, *, packed: bool, dtype: str, capability: tuple[int, int] | None, config: Mapping[str, Any]
) -> Attention:
    """Return the attention to load a model with.

    Args:
        requested: `speed.attention`: "auto", "torch_varlen", "sdpa", "eager", "flash_attention_2" or "…_3".
        packed: whether documents share a row.
        dtype: dtype of the computation, such as "bfloat16".
        capability: the GPU's compute capability; None on a CPU.
        config: the model's config.json.

    Raises:
        ModelError: packing is set for a model that cannot be packed, or `torch_varlen` for padded batches.
        MachineError: FlashAttention is set where it is not installed or the GPU is too old. transformers would silently
            download a kernel instead.
    """
    if packed and (obstacle := packing_obstacle(config)):
        raise ModelError(obstacle, code="E5038", field=FIELD, help=UNPACKED)
    needs = attention_needs(config)
    obstacle = kernel_obstacle(needs, dtype=dtype, capability=capability)
    if requested in FLASH:
        _require_flash(requested, dtype, capability)
        if needs.sinks:  # transformers would replace it by a kernel from the hub that supports them
            raise ModelError(
                "the model has attention sinks", code="E5039", field="speed.attention", help="leave it at auto"
            )
        return Attention(requested, "set in the config, and installed")
    if requested == NAME and not packed:
        raise ModelError(
            f"{NAME} supports packed batches only", code="E5040", field="speed.attention", help="leave it at auto"
        )
    if requested not in ("auto", NAME):
        return Attention(requested, "set in the config" + (": a dense mask keeps documents apart" if packed else ""))
    if not packed:
        formula = needs.softcap or needs.sinks
        return Attention("eager", "softcap or sinks") if formula else Attention("sdpa", "torch's own")
    if requested == "auto" and obstacle is None and capability == (9, 0) and FLASH["flash_attention_3"][0]():
        return Attention("flash_attention_3", "installed, and the fastest on Hopper")
    return Attention(NAME, f"one document at a time: {obstacle}" if obstacle else "torch's variable-length kernel")


def _require_flash(name: str, dtype: str, capability: tuple[int, int] | None) -> None:
    installed, oldest = FLASH[name]
    if capability is None or capability < oldest:
        problem = f"{name} needs a GPU of compute capability {oldest[0]}.{oldest[1]}"
    elif dtype not in KERNEL_DTYPES:
        problem = f"{name} computes in {' or '.join(KERNEL_DTYPES)}, not in {dtype}"
    elif not installed():
        problem = f"{name} is not installed"
    else:
        return
    raise MachineError(
        problem, code="E5041", field="speed.attention", help="leave it at auto: packing needs nothing but torch"
    )


def use_varlen(model: PreTrainedModel | PeftModel) -> None:
    """Set `torch_varlen` on a loaded model, in place.

    Raises:
        ModelError: the model, or a part of it, has attention code of its own that no setting changes.
    """
    base = _base(model)
    base.set_attn_implementation(NAME)
    parts = [module for module in base.modules() if isinstance(module, PreTrainedModel)]
    if any(part.config._attn_implementation != NAME for part in parts):
        kind = base.config.model_type
        raise ModelError(
            packing_obstacle(base.config.to_dict())
            or f"{kind} has its own attention code, which does not support document boundaries",
            code="E5042",
            field=FIELD,
            help=UNPACKED,
        )


def require_packable(model: PreTrainedModel | PeftModel) -> None:
    """Check that documents packed into a row are read as if they were alone.

    Two short documents run through the model once packed, with its attention, and once each alone with transformers'
    own plain attention. Where its attention is `torch_varlen`, every layer must have called it, with the window of its
    mask. The logits must agree: the norm of the difference divided by the norm of the logits (their mean over the
    vocabulary subtracted) at most 4 · √layers · ε of the dtype, or 1e-3 if that is more. The error of a document that
    reads another is about 1.

    Args:
        model: loaded, `use_varlen` done. Its mode and attention are left as they are.

    Raises:
        ModelError: the check fails; says where.
    """
    base = _base(model)
    kind = base.config.model_type
    problem = packing_obstacle(base.config.to_dict())
    if problem is None:
        try:
            disagreement = packing_disagreement(model)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            require_computing(model)
            raise ModelError(
                f"{kind} cannot be packed: its code does not accept packed documents ({error})",
                code="E5043",
                field=FIELD,
                help=UNPACKED,
            ) from error
        if disagreement:
            require_computing(model)
        problem = f"{kind} cannot be packed: {disagreement}" if disagreement else None
    if problem:
        raise ModelError(problem, code="E5044", field=FIELD, help=UNPACKED)


def require_computing(model: PreTrainedModel | PeftModel) -> None:
    """Run two short documents alone, with transformers' own plain attention: a failure there is not one of packing.

    Raises:
        ModelError: its forward pass fails, or returns logits that are not finite.
    """
    base = _base(model)
    implementation = base.config._attn_implementation
    base.set_attn_implementation("eager")
    try:
        with torch.no_grad(), _evaluating(model):
            logits = [_logits(model, input_ids=ids[None]) for ids in _documents_for(base, None)]
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"the forward pass of this {base.config.model_type} fails: {reason_of(error)}",
            code="E5351",
            field="model.name_or_path",
            help="compare its config.json with the original",
        ) from error
    finally:
        base.set_attn_implementation(implementation)
    if not all(bool(torch.isfinite(document_logits).all()) for document_logits in logits):
        raise explain_non_finite(model, str(base.dtype).removeprefix("torch."))


def require_shareable_prompts(model: PreTrainedModel | PeftModel) -> None:
    """Check that two answers behind one prompt (`speed.shared_prompts`) are read as if each were alone.

    A short pair runs through the model once with its prompt shared, and each answer alone with transformers' own plain
    attention; the logits must agree as in `require_packable`.

    Args:
        model: loaded, `require_packable` done. Its mode and attention are left as they are.

    Raises:
        ModelError: they do not.
    """
    base = _base(model)
    first, tail = _documents_for(base, attention_needs(base.config.to_dict()).sliding_window)
    prompt = len(first) - 2
    answers = [first, torch.cat([first[:prompt], tail])]
    inputs = share_prompt_ids(answers, prompt)
    with torch.no_grad(), _evaluating(model):
        shared = _logits(model, **inputs)[:, inputs["key_order"]]
        separate = _alone(model, answers)
    if problem := _difference(base, shared, separate, "two answers that share their prompt"):
        raise ModelError(
            f"{base.config.model_type} cannot share prompts: {problem}",
            code="E5620",
            field="speed.shared_prompts",
            help="set speed.shared_prompts: false",
        )


def share_prompt_ids(answers: Sequence[torch.Tensor], prompt: int) -> dict[str, Any]:
    """Return a forward pass's arguments for the 1-d token ids of two answers that begin with the same prompt, which is
    in the row once (as data/tokens/shared_prompts.py makes it of pairs)."""
    first, second = answers
    device, tokens = first.device, len(first) + len(second) - prompt
    order = [torch.arange(len(first)), torch.arange(prompt), torch.arange(len(first), tokens)]
    arguments = pack_ids([first, second[prompt:]])
    arguments["position_ids"][0, len(first) :] += prompt
    return arguments | {
        "cu_seq_lens_k": torch.tensor([0, len(first), len(first) + len(second)], dtype=torch.int32, device=device),
        "max_length_k": max(len(first), len(second)),
        "key_lengths": (len(first), len(second)),
        "key_order": torch.cat(order).to(device),
    }


def pack_ids(documents: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return a forward pass's arguments for 1-d token ids packed into one row."""
    lengths = tuple(len(ids) for ids in documents)
    device = documents[0].device
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)
    return {
        "input_ids": torch.cat(list(documents))[None],
        "position_ids": torch.cat([torch.arange(length, device=device) for length in lengths])[None],
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "document_lengths": lengths,
    }


def packing_disagreement(model: PreTrainedModel | PeftModel) -> str | None:
    """Return the condition of `require_packable` that fails, in words, or None. A plan runs it on tensors without data
    for the memory that it needs, and for the cuBLAS workspace of the first product; its result means nothing there."""
    base = _base(model)
    config = base.config.to_dict()
    implementation, layers = base.config._attn_implementation, attention_layers(config)
    documents = _documents_for(base, attention_needs(config).sliding_window)
    with counting_attention() as calls, torch.no_grad(), _evaluating(model):
        packed = _logits(model, **pack_ids(documents))
        separate = _alone(model, documents)
    if implementation == NAME and calls.total != layers:
        return f"{calls.total} of its {plural(layers, 'attention layer')} receive document boundaries"
    # Some models make masks for windows that none of their layers has.
    windowed = "sliding_attention" in (config.get("layer_types") or ("sliding_attention",))
    if implementation == NAME and calls.windows != (calls.masks if windowed else set()):
        return f"its masks have the windows {sorted(calls.masks)}, its layers use {sorted(calls.windows)}"
    return _difference(base, packed, separate, "two packed documents")


def _alone(model: PreTrainedModel | PeftModel, documents: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the logits of documents, each alone with transformers' own plain attention, one after the other."""
    base = _base(model)
    implementation = base.config._attn_implementation
    base.set_attn_implementation("eager")
    try:
        return torch.cat([_logits(model, input_ids=ids[None]) for ids in documents], dim=1)
    finally:
        base.set_attn_implementation(implementation)


def _difference(base: PreTrainedModel, found: torch.Tensor, expected: torch.Tensor, what: str) -> str | None:
    """Return that logits differ by more than rounding, in words, or None."""
    found, expected = (logits - logits.mean(-1, keepdim=True) for logits in (found, expected))
    error = float((found - expected).norm() / expected.norm())
    allowed = max(1e-3, 4 * math.sqrt(attention_layers(base.config.to_dict())) * torch.finfo(base.dtype).eps)
    if error <= allowed:
        return None
    return f"the logits of {what} are off by {error:.2g} of their size; rounding explains {allowed:.2g}"


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _documents_for(model: PreTrainedModel, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids of two documents, the first longer than a short window."""
    table: Any = model.get_input_embeddings()
    longer = window + 3 if window and window <= 128 else 6
    ids = (7 + 5 * torch.arange(longer + 5, device=table.weight.device)) % len(table.weight)
    return ids[:longer], ids[longer:]


def _logits(model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits.float()


def _base(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    return base
