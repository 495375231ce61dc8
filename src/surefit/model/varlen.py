"""`torch_varlen`: attention over documents concatenated in a row, with torch alone.

Registered with transformers under that name, together with its mask function (an attention without one would have its
padding dropped, silently). A document's tokens attend to that document alone:

- where the GPU has it, in one kernel over the whole row, `torch.nn.attention.varlen`, with no mask at all; sinks are
  added to its result;
- everywhere else exactly, one document at a time: `scaled_dot_product_attention`, or the textbook formula where a model
  has sinks, or a softcap, which none of torch's kernels supports.

Two answers behind one prompt (data/tokens/shared_prompts.py) are two documents that read some of the same tokens.

Where several processes share the tokens of a row, `share_keys_across_processes` gives the part of this one
(parallel/context_parallel.py).
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from surefit.core.errors import ModelError
from surefit.facts.attention import KERNEL_CAPABILITY, KERNEL_DTYPES, KERNEL_WIDTH
from surefit.model.sdpa import capability_of, must_repeat_kv_heads

NAME = "torch_varlen"
"""Name of this attention in transformers. It must not contain "flash", for which transformers requires a package."""
UNPACKED = "set data.packing: false, and speed.attention: sdpa"
_DTYPES = tuple(getattr(torch, name) for name in KERNEL_DTYPES)
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Keyword for grouped-query attention; torch 2.11's kernel supports fewer key heads than query heads without it."""
CachedT = TypeVar("CachedT")
Masks = dict[tuple[int, int, int | None], torch.Tensor]
"""(queries, keys, window) → what is added to the logits: 0, or -inf."""


class Formula(NamedTuple):
    """Parameters of the attention softmax(softcap · tanh(q kᵀ · scale / softcap)) v.

    Attributes:
        scale: factor of the logits; None is 1 / √width.
        window: number of tokens back that a token attends to, itself included; None: all of its document.
        softcap: cap of the logits; None: they are as they are.
        sinks: (heads,) a logit in addition to the keys', without a value.
        dropout: the share of the attention weights that is dropped.
    """

    scale: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    dropout: float


class PackedDocuments(NamedTuple):
    """Positions of the documents in a packed row.

    Attributes:
        starts: (documents + 1,) int32 on the tensors' device: the first token of each, and the end of the last.
        lengths: tokens of each, where they are known without reading from the device.
        longest: tokens of the longest.
    """

    starts: torch.Tensor
    lengths: tuple[int, ...] | None
    longest: int


@dataclass
class AttentionCallCounts:
    """Counts of `counting_attention`.

    Attributes:
        kernel, exact: number of layers that used the kernel, and attention one document at a time.
        windows: the sliding windows of the layers.
        masks: the sliding windows of the model's own masks.
    """

    kernel: int = 0
    exact: int = 0
    windows: set[int] = field(default_factory=set)
    masks: set[int] = field(default_factory=set)

    @property
    def total(self) -> int:
        return self.kernel + self.exact

    def note(self, kernel: bool, window: int | None) -> None:
        self.kernel, self.exact = self.kernel + kernel, self.exact + (not kernel)
        if window is not None:
            self.windows.add(window)


@dataclass(frozen=True)
class ContextShard:
    """The part of a packed row in this process, where several share the row.

    Attributes:
        queries: this process's pieces of documents, one after the other.
        keys: the keys of each piece: its document, from the first token to the piece's last.
        order: int64 on the tensors' device: position of each token of `keys` in the result of `gather`.
        gather: keys or values (length, heads, width) of this process → of all, one process after the other.
    """

    queries: PackedDocuments
    keys: PackedDocuments
    order: torch.Tensor
    gather: Callable[[torch.Tensor], torch.Tensor]

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather keys or values (1, heads, length, width) of this process's tokens, in the order and the
        layout of `keys`."""
        return self.gather(tensor[0].transpose(0, 1)).index_select(0, self.order).transpose(0, 1)[None]


_calls: AttentionCallCounts | None = None
_share: ContextShard | None = None


@contextmanager
def counting_attention() -> Iterator[AttentionCallCounts]:
    """Count the calls of `torch_varlen` inside; a recomputed layer (gradient checkpointing) counts again."""
    global _calls
    outer, _calls = _calls, AttentionCallCounts()
    try:
        yield _calls
    finally:
        _calls = outer


@contextmanager
def share_keys_across_processes(share: ContextShard) -> Iterator[None]:
    """Let every layer in this block read the keys of all processes; around the backward pass too, which may recompute
    layers.

    Not a context variable: on a GPU, layers are recomputed in one of autograd's threads.
    """
    global _share
    outer, _share = _share, share
    try:
        yield
    finally:
        _share = outer


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    document_lengths: tuple[int, ...] | None = None,
    key_order: torch.Tensor | None = None,
    key_lengths: tuple[int, ...] | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each document; transformers' attention interface.

    Args:
        query: (batch, heads, length, width); key and value may have fewer heads.
        attention_mask: must be None, the result of `varlen_mask`.
        sliding_window: number of tokens back that a token attends to, itself included.
        s_aux: (heads,) attention sinks: a logit in addition to the keys', without a value.
        position_ids: without `cu_seq_lens_q` in the batch, a document starts where these do not increase by one.
            Without either, each row is a document.
        cu_seq_lens_q, max_length_q: transformers' names for the boundaries of packed documents.
        document_lengths: the same on the host: without it, attention one document at a time reads from the device, once
            per batch.
        key_order: the row's tokens in the order in which its documents read them as keys, where several documents read
            the same prompt (data/tokens/shared_prompts.py); key_lengths, cu_seq_lens_k, max_length_k: how many of them
            each document reads. Its last query is at the last of them.

    Returns:
        (batch, length, heads, width of the values), and no weights.

    Raises:
        ModelError: attention that is not supported: with a mask, not causal, with a bias.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is not None or not causal or others.get("position_bias") is not None:
        feature = "its own mask" if attention_mask is not None else "a bias" if causal else "both directions"
        raise ModelError(
            f"{type(module).__name__} uses {feature}, which {NAME} does not support", code="E5073", help=UNPACKED
        )
    formula = Formula(scaling, sliding_window or None, softcap or None, s_aux, dropout)
    kernel = _kernel_takes(query, key, value, formula)
    if _calls is not None:
        _calls.note(kernel, formula.window)
    if query.shape[2] != key.shape[2]:  # a token is generated: each row continues after the keys in its cache
        return _exact(query, key, value, formula).transpose(1, 2), None
    if _share is not None:
        return _context_parallel_attention(query, key, value, formula, kernel), None
    documents = _documents(query, position_ids, cu_seq_lens_q, max_length_q, document_lengths)
    if key_order is not None:
        assert documents is not None
        assert cu_seq_lens_k is not None
        assert max_length_k is not None
        read = PackedDocuments(cu_seq_lens_k, key_lengths, max_length_k)
        key, value = key.index_select(2, key_order), value.index_select(2, key_order)
        if kernel:
            return _varlen(query, key, value, documents, read, formula), None
        # Every layer keeps its masks for the backward pass: one for all of them.
        masks: Masks = _remember(cu_seq_lens_k, dict)
        return _exact_per_document(query, key, value, documents, read, formula, masks), None
    if kernel:
        spans = documents or _rows(query)
        return _varlen(query, key, value, spans, spans, formula), None
    if documents is None:
        return _exact(query, key, value, formula).transpose(1, 2), None
    return _exact_per_document(query, key, value, documents, documents, formula), None


def varlen_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **others: Any,
) -> None:
    """Return None, the mask of `torch_varlen`; transformers' mask interface.

    Raises:
        ModelError: the batch is padded, or the model modifies its mask.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ModelError(
            f"{NAME} received a padded batch, but does not support padding",
            code="E5074",
            field="data.packing",
            help="pass packed batches, or use sdpa for padded ones; if SureFit made the batch, please report it",
        )
    if use_vmap or q_offset + q_length != kv_offset + kv_length:
        raise ModelError(f"the model needs its own mask, which {NAME} does not support", code="E5075", help=UNPACKED)
    if _calls is not None and local_size:
        _calls.masks.add(local_size)


AttentionInterface.register(NAME, varlen_attention)
AttentionMaskInterface.register(NAME, varlen_mask)


# -- the documents' positions -----------------------------------------------------------------------------------------


def _documents(
    query: torch.Tensor,
    positions: torch.Tensor | None,
    starts: torch.Tensor | None,
    longest: int | None,
    lengths: tuple[int, ...] | None,
) -> PackedDocuments | None:
    """Return the documents of the flattened batch; None where each row is one."""
    if starts is None:
        if positions is None:
            return None
        starts = _remember(positions, lambda: _starts(positions, query))
        if starts is None:
            return None
        lengths, longest = None, None
    if longest is None:
        lengths = lengths or _lengths(starts)
        longest = max(lengths)
    return PackedDocuments(starts, lengths, longest)


def _rows(query: torch.Tensor) -> PackedDocuments:
    batch, _, length, _ = query.shape
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    return PackedDocuments(starts, (length,) * batch, length)


def _starts(positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor | None:
    """Return the starts of documents, where positions do not increase by one: transformers' own rule. None: only at
    every row's start."""
    batch, _, length, _ = query.shape
    rows = (positions[0] if positions.dim() == 3 else positions).expand(batch, length)
    first = torch.ones_like(rows, dtype=torch.bool)
    first[:, 1:] = rows.diff() != 1
    starts = first.flatten().nonzero().flatten()
    if starts.numel() == batch:
        return None
    return torch.cat([starts, starts.new_tensor([batch * length])]).to(torch.int32)


def _lengths(starts: torch.Tensor) -> tuple[int, ...]:
    return _remember(starts, lambda: tuple(b - a for a, b in pairwise(starts.tolist())))  # type: ignore[no-any-return]


_memory: dict[int, tuple[Any, int, Any]] = {}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _remember(tensor: torch.Tensor, find: Callable[[], CachedT]) -> CachedT:
    """Return the cached result of `find` for this tensor: computed once per batch and not once per layer, because it
    waits for the GPU."""
    version = 0 if tensor.is_inference() else tensor._version
    entry = _memory.get(id(tensor))
    if entry is not None and entry[0]() is tensor and entry[1] == version:
        return entry[2]  # type: ignore[no-any-return]
    result = find()
    for number in [number for number, (reference, _, _) in _memory.items() if reference() is None]:
        del _memory[number]
    _memory[id(tensor)] = (weakref.ref(tensor), version, result)
    return result


# -- the arithmetic ---------------------------------------------------------------------------------------------------


def _kernel_takes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    formula: Formula,
) -> bool:
    """Return whether the kernel supports these tensors: `facts.attention.kernel_obstacle` for the tensors
    themselves."""
    width = query.shape[-1]
    if formula.dropout or formula.softcap or query.shape[2] != key.shape[2]:
        return False
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        return False
    if width % 8 or max(width, value.shape[-1]) > KERNEL_WIDTH or value.shape[-1] > width:
        return False
    capability = capability_of(query)
    return capability is not None and capability >= KERNEL_CAPABILITY


@torch.compiler.disable  # type: ignore[untyped-decorator] # it communicates with other processes
def _context_parallel_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, formula: Formula, kernel: bool
) -> torch.Tensor:
    """Compute attention of this process's queries to the keys of all: (1, length, heads, width)."""
    assert _share is not None
    key, value = _share.read(key), _share.read(value)
    attend = _varlen if kernel else _exact_per_document
    return attend(query, key, value, _share.queries, _share.keys, formula)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: PackedDocuments,
    read: PackedDocuments,
    formula: Formula,
) -> torch.Tensor:
    """Run one kernel over all documents: (batch, length, heads, width).

    Args:
        documents: positions of their queries; read: positions of their keys, the last query at the last key.
    """
    batch, heads, length, width = query.shape
    value_width = value.shape[-1]
    if value_width < width:  # multi-head latent attention: the kernel needs values as wide as keys
        value = F.pad(value, (0, width - value_width))
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    window = (-1, 0) if formula.window is None else (formula.window - 1, 0)
    boundaries = (documents.starts, read.starts, documents.longest, read.longest)
    if formula.sinks is None:
        gqa = _GQA if key.shape[1] != heads else {}
        result = varlen_attn(q, k, v, *boundaries, scale=formula.scale, window_size=window, **gqa)
    else:
        result = _WithSinks.apply(q, k, v, formula.sinks, *boundaries, formula.scale, window)  # type: ignore[no-untyped-call]
    assert isinstance(result, torch.Tensor)
    return result.view(batch, length, heads, width)[..., :value_width]


class _WithSinks(torch.autograd.Function):
    """`varlen_attn` with a logit in addition to the keys': (q, k, v, sinks, boundaries …) → (tokens, heads, width).

    FlashAttention 2 does not support sinks (github.com/Dao-AILab/flash-attention/issues/1797), but returns l, the
    logarithm of the sum of each row's exponentials. With a sink s it is l' = log(exp l + exp s), and the result is
    multiplied by exp(l - l'). The backward pass recomputes the weights as exp(logit - l), and subtracts the product of
    the result and its gradient from their gradients: given l' and the result with the sink, it computes the gradients
    with the sink.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor,
        starts: torch.Tensor,
        starts_read: torch.Tensor,
        longest: int,
        longest_read: int,
        scale: float | None,
        back: tuple[int, int],
    ) -> torch.Tensor:
        gqa = _GQA if k.shape[1] != q.shape[1] else {}
        boundaries = (starts, starts_read, longest, longest_read)
        plain, sums = varlen_attn(
            q, k, v, *boundaries, return_aux=AuxRequest(lse=True), scale=scale, window_size=back, **gqa
        )
        assert sums.shape == (q.shape[1], len(q)), "a row per head, though the docstring has it the other way round"
        sums_with_sink = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
        result = torch.empty_like(plain)
        torch.mul(plain, (sums - sums_with_sink).exp_().t()[..., None], out=result)
        ctx.save_for_backward(q, k, v, sinks, starts, starts_read, result, sums_with_sink)
        ctx.places = longest, longest_read, back == (-1, 0)
        ctx.formula = {"scale": scale, "window_size": list(back)}
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, starts, starts_read, result, sums_with_sink = ctx.saved_tensors
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state, unused without dropout
        gradients = torch.ops.torch_attn._varlen_attn_backward(
            gradient.contiguous(),
            q,
            k,
            v,
            result,
            sums_with_sink,
            starts,
            starts_read,
            *ctx.places,
            random_state,
            **ctx.formula,
        )
        sinks_gradient = None
        if ctx.needs_input_grad[3]:
            share = (sinks.to(sums_with_sink.dtype)[:, None] - sums_with_sink).exp_()
            products = (gradient * result).sum(-1, dtype=sums_with_sink.dtype)
            sinks_gradient = -(share * products.t()).sum(1).to(sinks.dtype)
        return *gradients, sinks_gradient, *6 * (None,)


@torch.compiler.disable  # type: ignore[untyped-decorator] # it would be compiled again for every batch's lengths
def _exact_per_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: PackedDocuments,
    read: PackedDocuments,
    formula: Formula,
    masks: Masks | None = None,
) -> torch.Tensor:
    """Compute `_exact`, one document of the flattened batch at a time; arguments and result as in `_varlen`."""
    batch, heads, length, _ = query.shape
    lengths, lengths_read = (list(spans.lengths or _lengths(spans.starts)) for spans in (documents, read))
    if sum(lengths) != batch * length:
        raise ModelError(
            f"the documents of a batch have {sum(lengths)} tokens, but the batch has {batch * length}", code="E5076"
        )
    flat = [tensor.transpose(0, 1).flatten(1, 2)[None] if batch > 1 else tensor for tensor in (query, key, value)]
    sizes = (lengths, lengths_read, lengths_read)
    parts = zip(*(torch.split(tensor, size, dim=2) for tensor, size in zip(flat, sizes, strict=True)), strict=True)
    results = [_exact(q, k, v, formula, masks).transpose(1, 2) for q, k, v in parts]
    return torch.cat(results, dim=1).view(batch, length, heads, -1)


def _exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, formula: Formula, masks: Masks | None = None
) -> torch.Tensor:
    """Compute causal attention of whole rows, the last query at the last key: (batch, heads, queries, width).

    Args:
        masks: where masks are taken from, and put.
    """
    queries, keys, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    textbook = formula.softcap is not None or formula.sinks is not None
    plain = not textbook and queries == keys and (formula.window is None or formula.window >= keys)
    shared = groups > 1 and plain and query.dtype in _DTYPES and not must_repeat_kv_heads(key, value)
    if groups > 1 and not shared:  # for these, sdpa would choose its slowest code, which holds all the logits
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if textbook:
        return _textbook(query, key, value, _visible(queries, keys, formula.window, query.device), formula)
    visible = None if plain else (masks or {}).get((queries, keys, formula.window))
    if visible is None and not plain:
        visible = _visible(queries, keys, formula.window, query.device)
        if masks is not None:  # in the form that torch would make of it in every call
            visible = query.new_zeros(queries, keys).masked_fill_(~visible, -math.inf)
            masks[queries, keys, formula.window] = visible
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        dropout_p=formula.dropout,
        is_causal=plain,
        scale=formula.scale,
        enable_gqa=shared,
    )


def _textbook(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, formula: Formula
) -> torch.Tensor:
    """Compute the formula as it is written; a sink's share of the softmax has no value."""
    scale = formula.scale if formula.scale is not None else 1 / math.sqrt(query.shape[-1])
    logits = (query @ key.transpose(2, 3) * scale).float()
    if formula.softcap is not None:
        logits = torch.tanh(logits / formula.softcap) * formula.softcap
    logits = logits.masked_fill(~seen, float("-inf"))
    if formula.sinks is not None:
        sink_logits = formula.sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink_logits], dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, formula.dropout) @ value


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a (queries, keys) bool mask of the keys that each query attends to, the last query at the last key."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return visible if window is None else visible.triu_(keys - queries - window + 1)
