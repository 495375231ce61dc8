"""Activation checkpointing in three ways: recompute everything, all but attention, or with its inputs on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from surefit.model.compat import checkpoint_activations, wrap_checkpoints

CheckpointingKind = Literal[True, "selective", "offload"]


def enable_checkpointing(model: torch.nn.Module, kind: bool | Literal["selective", "offload"]) -> None:
    """Make the decoder layers of a transformers model, with or without LoRA factors, recompute in the backward pass.

    Args:
        kind: False changes nothing. True keeps only the input of each layer. "selective" keeps the output of attention
            as well, 2 × heads × head width + 4 × heads bytes per token and layer in 16 bits, and recomputes the rest.
            "offload" is True with each layer's input in the host's memory: on a GPU in pinned memory, copied beside the
            computation; on a CPU, where it is already, nothing is copied.

    Loss and gradients stay the same.
    """
    if kind is False:
        return
    subject: Any = model
    if kind == "selective":
        checkpoint_activations(subject, context_fn=partial(create_selective_checkpoint_contexts, _keep_attention))
        return
    checkpoint_activations(subject)
    if kind == "offload":
        wrap_checkpoints(model, _offloading)


def _keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the output of attention, unless it drew random numbers: skipped in the recomputation, it would draw none,
    and every dropout after it would drop other values than in the forward pass."""
    position = _attention_operators().get(op)
    if position is None:
        return CheckpointPolicy.PREFER_RECOMPUTE
    dropout = kwargs.get("dropout_p", args[position] if position < len(args) else 0.0)
    return CheckpointPolicy.PREFER_RECOMPUTE if dropout else CheckpointPolicy.MUST_SAVE


NO_DROPOUT = 1_000
"""Position of the argument `dropout_p` for an operator without it."""


@cache
def _attention_operators() -> dict[Any, int]:
    """Return the operators that compute attention as a whole → the position of their argument `dropout_p`.

    The textbook formula, which sdpa falls back to, is not an operator of its own: there nothing is kept.
    """
    import torch.nn.attention.varlen  # registers torch_attn::_varlen_attn

    aten = torch.ops.aten
    packets = (
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_fused_attention_overrideable,
        torch.ops.torch_attn._varlen_attn,
    )
    positions = {}
    for packet in packets:
        names = [argument.name for argument in packet.default._schema.arguments]
        positions[packet.default] = names.index("dropout_p") if "dropout_p" in names else NO_DROPOUT
    return positions


def _offloading(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `checkpoint` to keep its inputs on the host until the backward pass.

    Non-reentrant checkpointing handles everything saved inside the call itself, so these hooks see only the tensors
    that it saves for the call: the layer's arguments. Only the first, the hidden states, differs from layer to layer; a
    mask, say, is the same tensor in every layer.
    """

    def offloaded(function: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden_id = id(hidden)  # a hook with a reference to the tensor itself would keep it on the device
        with saved_tensors_hooks(lambda tensor: to_host(tensor) if id(tensor) == hidden_id else tensor, _unpack):
            return checkpoint(function, hidden, *args, **kwargs)

    return offloaded


def _unpack(kept: Any) -> torch.Tensor:
    return kept if isinstance(kept, torch.Tensor) else to_device(kept)


def to_host(tensor: torch.Tensor) -> Any:
    """Release a tensor's memory on its device; return an object that `to_device` turns back into the tensor.

    The plan replaces these two functions by its own, since its device is not real.
    """
    return OffloadedTensor(tensor) if tensor.is_cuda else HostTensor(tensor)


def to_device(kept: Any) -> torch.Tensor:
    """Return the tensor that `to_host` moved, with the same bits."""
    tensor: torch.Tensor = kept.tensor()
    return tensor


class HostTensor:
    """Holder of a tensor that is on the host already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def tensor(self) -> torch.Tensor:
        return self._tensor


class OffloadedTensor:
    """Copy of a CUDA tensor in pinned memory. Both copies run on a separate stream, beside the computation.

    The backward pass reads the layers from last to first. So reading one begins to fetch the one that was offloaded
    just before it, which is there by the time the layer between them has been recomputed: at most two are on the device
    at once.
    """

    _newest: weakref.ref[OffloadedTensor] | None = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self._before, OffloadedTensor._newest = OffloadedTensor._newest, weakref.ref(self)
        self._device = tensor.device
        self._fetched: torch.Tensor | None = None
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self._beside():
            self._host.copy_(tensor, non_blocking=True)
        # Keeps the allocator from reusing its memory before the copy is done.
        tensor.record_stream(_stream(self._device))

    def tensor(self) -> torch.Tensor:
        """Return the tensor on its device, ready for the current stream; it is the caller's, and a second call copies
        again."""
        self.fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        torch.cuda.current_stream(self._device).wait_stream(_stream(self._device))
        previous = self._before() if self._before is not None else None
        if previous is not None:
            previous.fetch()
        return fetched

    def fetch(self) -> None:
        """Begin to copy the tensor back, if that has not begun."""
        if self._fetched is None:
            # Made on the current stream, where it is used and freed; the copy waits for earlier uses of the memory.
            self._fetched = torch.empty_like(self._host, device=self._device)
            with self._beside():
                self._fetched.copy_(self._host, non_blocking=True)
            self._fetched.record_stream(_stream(self._device))

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run the block on the copying stream, after all work submitted to the current one so far."""
        stream = _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that copies to and from a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
