"""Activation checkpointing, three ways: recompute everything, all but attention, or with its inputs on the host."""

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
        kind: False changes nothing. True keeps only the input of each layer. "selective" keeps what attention gave as
            well, 2 × heads × head width + 4 × heads bytes per token and layer in 16 bits, and recomputes the rest.
            "offload" is True with each layer's input in the host's memory: on a GPU in pinned memory, copied beside
            the computation; on a CPU, where it is already, nothing is copied.

    Loss and gradients stay what they are without it.
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
    """Keep what attention gave, unless it drew random numbers: left out of the recomputation, it would draw none, and
    every dropout after it would drop others than in the forward pass."""
    position = _attention_operators().get(op)
    if position is None:
        return CheckpointPolicy.PREFER_RECOMPUTE
    dropout = kwargs.get("dropout_p", args[position] if position < len(args) else 0.0)
    return CheckpointPolicy.PREFER_RECOMPUTE if dropout else CheckpointPolicy.MUST_SAVE


NO_DROPOUT = 1_000
"""The position of the argument `dropout_p` of an operator that has none."""


@cache
def _attention_operators() -> dict[Any, int]:
    """The operators that compute attention as a whole → the position of their argument `dropout_p`.

    The textbook formula, which sdpa falls back to, is no operator of its own: there nothing is kept.
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
    found = {}
    for packet in packets:
        names = [argument.name for argument in packet.default._schema.arguments]
        found[packet.default] = names.index("dropout_p") if "dropout_p" in names else NO_DROPOUT
    return found


def _offloading(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """`checkpoint`, with its inputs on the host until the backward pass asks for them.

    Non-reentrant checkpointing takes care of everything saved inside the call itself, so these hooks see what it saves
    for the call: the layer's arguments. Of those only the first, the hidden states, is its own; a mask, say, is the
    same tensor in every layer.
    """

    def offloaded(function: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen = id(hidden)  # a hook that held the tensor itself would keep it on the device
        with saved_tensors_hooks(lambda tensor: to_host(tensor) if id(tensor) == chosen else tensor, _unpack):
            return checkpoint(function, hidden, *args, **kwargs)

    return offloaded


def _unpack(kept: Any) -> torch.Tensor:
    return kept if isinstance(kept, torch.Tensor) else to_device(kept)


def to_host(tensor: torch.Tensor) -> Any:
    """Let go of a tensor's memory on its device: what comes back is not a tensor, and `to_device` takes it.

    The plan puts functions of its own in the place of these two, since its device is not real.
    """
    return OffloadedTensor(tensor) if tensor.is_cuda else HostTensor(tensor)


def to_device(kept: Any) -> torch.Tensor:
    """The tensor that `to_host` was given, with the same bits."""
    tensor: torch.Tensor = kept.tensor()
    return tensor


class HostTensor:
    """A tensor that is on the host anyway."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def tensor(self) -> torch.Tensor:
        return self._tensor


class OffloadedTensor:
    """The copy of a CUDA tensor in pinned memory. Both copies run on a stream of their own, beside the computation.

    The backward pass asks for the layers from last to first. So whoever is asked for begins to fetch the one that was
    offloaded just before it, which is there by the time the layer between them has been recomputed: at most two are on
    the device at once.
    """

    _newest: weakref.ref[OffloadedTensor] | None = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self._before, OffloadedTensor._newest = OffloadedTensor._newest, weakref.ref(self)
        self._device = tensor.device
        self._fetched: torch.Tensor | None = None
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self._beside():
            self._host.copy_(tensor, non_blocking=True)
        # Its memory is given to nobody before the copy is done.
        tensor.record_stream(_stream(self._device))

    def tensor(self) -> torch.Tensor:
        """On its device again, ready for the current stream; it is the caller's, and a second call copies again."""
        self.fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        torch.cuda.current_stream(self._device).wait_stream(_stream(self._device))
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        return fetched

    def fetch(self) -> None:
        """Begin to copy it back, if nobody has."""
        if self._fetched is None:
            # Made on the current stream, where it is used and freed; the copy waits for who had the memory before.
            self._fetched = torch.empty_like(self._host, device=self._device)
            with self._beside():
                self._fetched.copy_(self._host, non_blocking=True)
            self._fetched.record_stream(_stream(self._device))

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the copying stream, once the current one has done what it was asked for so far."""
        stream = _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that copies to and from a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
