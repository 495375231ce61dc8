"""Differences between the supported versions of other libraries, each with the condition under which it can go."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import other as accelerate_other
from peft import PeftModel
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, masking_utils, modeling_gguf_pytorch_utils, modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.integrations import sdpa_attention

_USE_GQA = sdpa_attention.use_gqa_in_sdpa


def checkpoint_activations(model: PreTrainedModel | PeftModel, **options: Any) -> None:
    """Recompute activations in the backward pass instead of keeping them, with torch's non-reentrant checkpointing.

    Args:
        options: more keyword arguments of `torch.utils.checkpoint.checkpoint`.

    transformers 5.23 has the method under a new name and warns about the old one, the only one in 5.17. Keep only the
    first branch once the lower bound has it.
    """
    subject: Any = model
    options = {"use_reentrant": False} | options
    if hasattr(subject, "activation_checkpointing_enable"):
        subject.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        subject.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # It also requires the gradient of the embeddings' output, which only reentrant checkpointing needs: with LoRA that
    # tensor and its gradient, each as large as a layer's input, would be wasted.
    subject.disable_input_require_grads()


@contextmanager
def without_deepspeed() -> Iterator[None]:
    """Keep `save_pretrained` in this block from importing DeepSpeed.

    It checks with accelerate whether the model is wrapped by DeepSpeed, and that imports it wherever it is installed
    (1.15, utils/other.py): 60 to 190 MiB and seconds. DeepSpeed cannot have wrapped a model if it is not imported. Can
    go when accelerate checks that itself.
    """
    with patch.object(accelerate_other, "is_deepspeed_available", lambda: "deepspeed" in sys.modules):
        yield


def wrap_checkpoints(model: torch.nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap every call of `torch.utils.checkpoint.checkpoint`; `checkpoint_activations` comes first.

    transformers keeps the function that its layers call in an attribute of each layer, in 5.17 and 5.23 alike. Can go
    when its switch accepts a custom function, or when its `offload` copies beside the computation.
    """
    for module in model.modules():
        if (function := getattr(module, "_gradient_checkpointing_func", None)) is not None:
            module._gradient_checkpointing_func = wrap(function)  # type: ignore[assignment]


@contextmanager
def stub_forward(module: torch.nn.Module, answer: Any) -> Iterator[None]:
    """Let a module return `answer` from every call instead of computing.

    transformers has no way to run a causal language model from its decoder's output on (5.17 and 5.23; `logits_to_keep`
    selects positions, which are the same in every row). Can go when it has one.
    """
    with patch.object(module, "forward", lambda *args, **kwargs: answer):
        yield


def wrap_forward(module: torch.nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the forward pass of this one module; its name and weights stay as they are.

    `torch.nn.Module` has hooks before and after a forward pass but none around it (2.11 to 2.13).
    """
    module.forward = wrap(module.forward)


@contextmanager
def reads_masks_of_fake_tensors() -> Iterator[None]:
    """Let transformers read the values of a padding mask of fake tensors, as it reads a real one's.

    It treats fake tensors as tracing and then builds a full attention mask for every batch, padded or not
    (`masking_utils.is_tracing`, in 5.17 and 5.23 alike); the plan supplies the value of such a read. Can go when
    transformers has a public switch for it.
    """
    with patch.object(masking_utils, "is_tracing", lambda tensor=None: False):
        yield


@contextmanager
def avoid_mask_syncs(batch: Mapping[str, Any]) -> Iterator[None]:
    """Give transformers, while a model runs on a micro batch, the values that it would otherwise read from the device.

    For each kind of mask that a model makes (one, or two where some layers have a window) it reads whether the rows are
    padded, up to twice, or whether positions start again (`masking_utils`, in 5.17 and 5.23 alike); the processor waits
    each time for all that was launched. Can go when it accepts the values as arguments.

    Args:
        batch: from data/tokens/collate.py. Where it lacks `padded` and `document_lengths`, and for tensors of another
            shape than its rows, transformers reads from the device as usual.
    """
    shape, padded, lengths = batch["input_ids"].shape, batch.get("padded"), batch.get("document_lengths")
    ignored, packed = masking_utils._ignore_causal_mask_sdpa, masking_utils.find_packed_sequence_indices

    def ignore(mask: torch.Tensor | None, *places: Any, **others: Any) -> bool:
        if mask is None or padded is None or mask.shape != shape:
            return ignored(mask, *places, **others)
        return not padded and ignored(None, *places, **others)

    def find(positions: torch.Tensor) -> torch.Tensor | None:
        if lengths is None or positions.shape != shape:
            return packed(positions)
        if len(lengths) == 1:
            return None
        with patch.object(masking_utils, "is_tracing", lambda tensor=None: True):  # then it reads no values
            return packed(positions)

    with ExitStack() as stack:
        stack.enter_context(patch.object(masking_utils, "_ignore_causal_mask_sdpa", ignore))
        stack.enter_context(patch.object(masking_utils, "find_packed_sequence_indices", find))
        yield


def repeat_heads_where(repeats: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    """Let transformers' sdpa attention repeat keys and values, instead of `enable_gqa`, where `repeats` returns True.

    It checks whether there is a mask, and 5.23 the head dimension, but neither the GPU nor the dtype: torch may then
    have no kernel left but the one that holds all logits (github.com/huggingface/transformers/issues/48633).

    Args:
        repeats: called with keys and values (batch, heads, length, width), except where there is a mask, with which
            transformers repeats anyway. 5.17 has no values at that point, so the keys are passed twice.

    Can go once the lower bound checks both, or torch's efficient kernel supports grouped heads in the oldest torch
    (2.14 does).
    """

    def use_gqa(attention_mask: torch.Tensor | None, key: torch.Tensor, *value: torch.Tensor) -> bool:
        return _USE_GQA(attention_mask, key, *value) and not repeats(key, *(value or (key,)))

    sdpa_attention.use_gqa_in_sdpa = use_gqa  # type: ignore[assignment] # 5.17 calls it with one argument less


@contextmanager
def without_allocator_warmup() -> Iterator[None]:
    """Let `from_pretrained` with a `device_map` allocate GPU memory as it needs it.

    transformers first makes and frees one tensor as large as the whole model (`caching_allocator_warmup`, in 5.23), so
    that the allocator has one segment for it. The weights in 16 bits that are quantized one after the other then split
    that segment; the gaps between the quantized ones stay reserved, and where the model just fits the GPU, one more
    weight in 16 bits does not. Can go when transformers has a switch for it.
    """
    with patch.object(modeling_utils, "caching_allocator_warmup", lambda *args, **kwargs: None):
        yield


def keep_four_bit_layout(model: torch.nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights on a CPU with AVX512-BF16.

    There `Linear4bit.forward` in evaluation mode repacks the weights for its own product, in place, and any later
    reader (`dequantize_4bit`, a merge, `.to`) treats the packed bytes as the unpacked ones
    (github.com/bitsandbytes-foundation/bitsandbytes/issues/2078, open; seen in 0.50.2). Can go when a bitsandbytes that
    undoes the packing everywhere is the lower bound.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def ddp_buffer_kwargs() -> dict[str, Any]:
    """Return the keyword argument of DistributedDataParallel that stops it from sending the buffers before every
    forward pass.

    torch 2.13 has it under a new name and warns about the old one, the only one in 2.11. Keep only the first branch
    once the lower bound has it.
    """
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        return {"forward_sync_buffers": False}
    return {"broadcast_buffers": False}


def renamed_in_files(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Return parameter → its name in the files, for tensors that transformers renames without changing them while it
    loads.

    The table that it uses has no public reader (5.17 to 5.23). Can go when it has one.
    """
    table = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in table if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in table if isinstance(conversion, WeightConverter)]
    parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    names = {}
    for name in sorted(stored):
        parameter, changed_by = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if changed_by is None and parameter in parameters:
            names[parameter] = name
    return names


def stacked_from_files(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, list[list[str]]]:
    """Return stack of experts → its tensors in the files: for each expert the tensors stacked below each other in it.

    Of the ways in which transformers builds one tensor from several while it loads, only this one is supported here.
    Its table has no public reader (5.17 to 5.23). Can go when it has one.
    """
    table = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in table if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in table if isinstance(conversion, WeightConverter)]
    stacking = {
        pattern: (conversion, position)
        for conversion in converters
        if [type(step) for step in conversion.operations] in ([MergeModulelist], [MergeModulelist, Concatenate])
        if [getattr(step, "dim", None) for step in conversion.operations] == [0, 1][: len(conversion.operations)]
        for position, pattern in enumerate(conversion.source_patterns)
    }
    parameters: dict[str, Any] = dict(model.named_parameters())
    stacks: dict[str, dict[tuple[int, int], str]] = {}
    for name in stored:
        parameter, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        number = re.search(r"\bexperts\.(\d+)\.", name)
        if pattern in stacking and number and parameter in parameters:
            stacks.setdefault(parameter, {})[int(number[1]), stacking[pattern][1]] = name
    return {
        parameter: [
            [name for (expert, _), name in sorted(parts.items()) if expert == number_of_expert]
            for number_of_expert in range(parameters[parameter].shape[0])
        ]
        for parameter, parts in stacks.items()
    }


@contextmanager
def watched_gguf_tensors(on_tensor: Callable[[int], None]) -> Iterator[None]:
    """Call `on_tensor` for each tensor that transformers dequantizes from a GGUF file, instead of its own progress bar.

    It has no option for either (5.17 to 5.23). Can go when it has a callback. An architecture of its new reader does
    not come through here, and is then not reported.
    """

    def watched(tensors: Any, **options: Any) -> Iterator[Any]:
        for number, tensor in enumerate(tensors):
            on_tensor(number)
            yield tensor

    with patch.object(modeling_gguf_pytorch_utils, "tqdm", watched):
        yield
