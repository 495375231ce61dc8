"""Context parallelism: several processes share the tokens of every example, for contexts too long for a single device.

Each process has two pieces of every document of a micro batch: the document is cut into 2n equal pieces for n
processes, and each gets one from the front and its counterpart from the back. A late token attends to more keys than an
early one; paired in this way, all processes have the same number of tokens and the same work in every document.

Everything in a decoder but attention treats each token separately. In attention the processes gather each other's keys
and values, and each computes its own queries against every earlier key of their documents: exactly what one process
computes. In the backward pass the gradients of keys and values are summed and sent back to their owners.

Here each process has the whole model; parallel/sharded_context.py shards its weights as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from surefit.core.errors import ConfigError, ModelError
from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.collate import collate_packed
from surefit.facts.attention import attention_needs
from surefit.model.attention import NAME, require_packable, use_varlen
from surefit.model.prepare import unwrap_base_model
from surefit.model.varlen import ContextShard, PackedDocuments, share_keys_across_processes
from surefit.parallel.engine import Batch, BatchFunction, Engine, LossFunction
from surefit.parallel.gradients import sum_gradients
from surefit.parallel.process_group import (
    World,
    all_reduce_any,
    communication_device,
    sum_over_processes,
)

FIELD = "parallel.cp"


class SharedTokens(Engine):
    """Mixin for an engine whose processes share the tokens of each micro batch.

    It comes before that engine in a class's bases. Ranks 0 to `size` − 1 are the first group, and so on: a group's
    processes read the same examples, and should be on one machine. The model's attention becomes `torch_varlen`. Padded
    batches are read without their padding.

    Args:
        world: all processes, joined.
        size: number of processes that share a token sequence; divides the number of all processes.
        others: the engine's arguments besides the world.

    Raises:
        ConfigError: `size` does not divide it, or is 1.
    """

    def __init__(self, world: World, size: int, *others: Any) -> None:
        if size < 2 or world.size % size:
            raise ConfigError(
                f"{world.size} processes cannot be divided into groups of {size}",
                code="E5079",
                field=FIELD,
                help="set parallel.cp to the number of processes, or to a divisor of it above 1",
            )
        super().__init__(world, *others)
        groups = init_device_mesh(
            communication_device(world).type, (world.size // size, size), mesh_dim_names=("data", "tokens")
        )
        self.size, self.group, self.data_group = size, groups.get_group("tokens"), groups.get_group("data")
        assert dist.get_world_size(self.group) == size
        self.data_rank, self.rank = divmod(world.rank, size)
        self.data_size = world.size // size

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Set the attention, and verify that sharing changes nothing in this model.

        Raises:
            ModelError: it does: the model has attention of its own, or a state that passes between tokens.
        """
        assert isinstance(model, PreTrainedModel | PeftModel)
        if unwrap_base_model(model).config._attn_implementation != NAME:
            use_varlen(model)
            require_packable(model)
        wrapped = super().wrap(model)
        assert wrapped is model, "sharded in place, if at all"
        self._require_shareable(model)
        assert unwrap_base_model(model).config._attn_implementation == NAME
        return model

    def run(
        self,
        model: torch.nn.Module,
        micro_batches: Sequence[Batch],
        loss_of: LossFunction,
        supervised: int,
        scale: float,
    ) -> torch.Tensor:
        # All ranks that read the same examples have the same seed for this step, but not the same tokens.
        torch.manual_seed(torch.initial_seed() + self.rank)
        parts = []
        for batch in micro_batches:
            shard, context_shard = self._part_of(batch)
            with share_keys_across_processes(context_shard):
                parts.append(super().run(model, [shard], loss_of, supervised, scale))
        return sum(parts[1:], parts[0])

    def evaluate(self, model: torch.nn.Module, batch: Batch, function: BatchFunction, size: int) -> torch.Tensor:
        shard, context_shard = self._part_of(batch)
        with share_keys_across_processes(context_shard):
            values = super().evaluate(model, shard, function, size).double()
        if size:
            dist.all_reduce(values, group=self.group)
        return values

    def _part_of(self, batch: Batch) -> tuple[dict[str, Any], ContextShard]:
        def gather(tensor: torch.Tensor) -> torch.Tensor:
            gathered: torch.Tensor = _Gather.apply(tensor, self.group)  # type: ignore[no-untyped-call]
            return gathered

        def add(sums: torch.Tensor) -> torch.Tensor:
            added: torch.Tensor = _AddUp.apply(sums, self.group)  # type: ignore[no-untyped-call]
            return added

        part, context_shard = shard_micro_batch(batch, self.rank, self.size, gather, communication_device(self.world))
        return part | {"shared_sums": SharedSums(add, self.size)}, context_shard

    @torch.no_grad()
    def _require_shareable(self, model: PreTrainedModel | PeftModel) -> None:
        """Run two short documents whole and shared; the logits must agree to the tolerance of `require_packable`."""
        base = unwrap_base_model(model)
        batch = _two_documents(base, self.size)
        shard, context_shard = self._part_of(batch)
        was_training = model.training
        model.eval()
        try:
            expected = self.loss(model, batch, _centered_logits)
            with share_keys_across_processes(context_shard):
                shared = self.loss(model, shard, _centered_logits)
        finally:
            model.train(was_training)
        rank_indices = torch.cat(
            chunk_token_indices(split_documents_across_ranks(batch["document_lengths"], self.size)[self.rank])
        )
        expected, shared = expected[rank_indices.to(expected.device)], shared[: len(rank_indices)]
        error = float((shared - expected).norm() / expected.norm())
        layers = base.config.get_text_config().num_hidden_layers
        tolerance = max(1e-3, 4 * math.sqrt(layers) * torch.finfo(base.dtype).eps)
        if all_reduce_any(not error <= tolerance, self.world):
            raise ModelError(
                f"{base.config.model_type} cannot be trained with context parallelism: the logits are "
                f"off by {error:.2g} of their size, but rounding explains only {tolerance:.2g}",
                code="E5080",
                field=FIELD,
                help="shard the model instead: parallel.mode fsdp, pp or tp",
            )


class ContextParallel(SharedTokens):
    """Processes with a whole model each, which share the tokens of each micro batch.

    Groups of them may share the examples as well.
    """

    name = "cp"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Prepare the model as `SharedTokens.wrap`, and broadcast the trained weights so that all processes start
        equal.
        """
        model = super().wrap(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    dist.broadcast(parameter, src=0)
        return model

    def run(
        self,
        model: torch.nn.Module,
        micro_batches: Sequence[Batch],
        loss_of: LossFunction,
        supervised: int,
        scale: float,
    ) -> torch.Tensor:
        loss = super().run(model, micro_batches, loss_of, supervised, scale)
        sum_gradients([parameter for parameter in model.parameters() if parameter.requires_grad])
        return loss

    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return sum_over_processes(loss)


def shard_micro_batch(
    batch: Batch, rank: int, size: int, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> tuple[dict[str, Any], ContextShard]:
    """Return one process's shard of a micro batch for its model, and the layout that its attention needs.

    Args:
        batch: packed, or padded on the right, on the CPU.
        rank, size: this process's rank among the processes that share the tokens, and their number.
        gather: as in `ContextShard`.
        device: device of the model.

    Returns:
        input_ids, position_ids (1, n), loss_rows and targets, of this process's pieces. n is the same for all
        processes: one or more filling tokens come last, which no other token attends to. They are at the last position
        of the longest document, so that rotary embeddings that depend on the highest position are the same everywhere.
        Of pairs also what describes them, with `own_targets`: how many of each answer's targets this process has.
    """
    ids, targets, lengths = _without_padding(batch)
    pieces = split_documents_across_ranks(lengths, size)
    rank_indices = [torch.cat([*chunk_token_indices(part), torch.empty(0, dtype=torch.int64)]) for part in pieces]
    count, indices = 1 + max(map(len, rank_indices)), rank_indices[rank]
    filling = count - len(indices)
    gathered_position = torch.empty_like(ids)
    for number, tokens in enumerate(rank_indices):
        gathered_position[tokens] = number * count + torch.arange(len(tokens))
    ends = torch.arange(rank * count + len(indices), (rank + 1) * count)
    key_positions = [gathered_position[piece.document : piece.last] for piece in pieces[rank]]
    positions = torch.cat(
        [torch.arange(piece.first, piece.last) - piece.document for piece in pieces[rank]] or [ends[:0]]
    )
    fill_positions = torch.full((filling,), max(lengths) - 1)
    shard_targets = targets[indices]
    rows = (shard_targets != MASKED).nonzero().flatten()
    part: dict[str, Any] = {
        "input_ids": torch.cat([ids[indices], torch.zeros_like(fill_positions)])[None],
        "position_ids": torch.cat([positions, fill_positions])[None],
        "loss_rows": rows,
        "targets": shard_targets[rows],
    }
    if "answer_targets" in batch:
        part |= {key: batch[key] for key in ("answer_targets", "reference_log_probs") if key in batch}
        part["own_targets"] = _own_targets(pieces[rank], targets, lengths, len(batch["answer_targets"]))
    queries = _documents([*(piece.last - piece.first for piece in pieces[rank]), filling], device)
    keys = _documents([*map(len, key_positions), filling], device)
    return part, ContextShard(queries, keys, torch.cat([*key_positions, ends]).to(device), gather)


def _own_targets(
    pieces: Sequence[DocumentChunk], targets: torch.Tensor, lengths: Sequence[int], answers: int
) -> tuple[int, ...]:
    """Return the number of targets in one process's pieces of each answer, a document of its own; empty for the filling
    token of a micro batch without answers."""
    counts = dict.fromkeys(accumulate(lengths[:-1], initial=0), 0)
    for piece in pieces:
        counts[piece.document] += int((targets[piece.first : piece.last] != MASKED).sum())
    return tuple(counts.values()) if answers else ()


@dataclass(frozen=True)
class SharedSums:
    """How sums over an answer's tokens are completed where several processes share them.

    Attributes:
        add: adds up a tensor over these processes; its gradient is the sum of theirs.
        processes: their number. Each computes the loss of the whole sums, and counts its `processes`-th part.
    """

    add: Callable[[torch.Tensor], torch.Tensor]
    processes: int


class DocumentChunk(NamedTuple):
    """Tokens `first` to `last` − 1 of a row, part of the document that begins at token `document`."""

    document: int
    first: int
    last: int


def split_documents_across_ranks(lengths: Sequence[int], size: int) -> list[list[DocumentChunk]]:
    """Assign the pieces of a row's documents to `size` processes: equal tokens and equal attention work for each.

    Every document is cut into 2 · size pieces, and the i-th is paired with the i-th from the end. Remainders go to the
    processes with the fewest tokens so far.

    >>> [[(p.first, p.last) for p in part] for part in split_documents_across_ranks([8, 4], 2)]
    [[(0, 2), (6, 8), (8, 9), (11, 12)], [(2, 4), (4, 6), (9, 10), (10, 11)]]
    """
    parts: list[list[DocumentChunk]] = [[] for _ in range(size)]
    token_counts = [0] * size
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        cuts = [start + length * i // (2 * size) for i in range(2 * size + 1)]
        pieces = [DocumentChunk(start, first, last) for first, last in pairwise(cuts)]
        pairs = sorted(((pieces[i], pieces[-1 - i]) for i in range(size)), key=_tokens, reverse=True)
        for rank, pair in zip(sorted(range(size), key=token_counts.__getitem__), pairs, strict=True):
            parts[rank] += [piece for piece in pair if piece.first < piece.last]
            token_counts[rank] += _tokens(pair)
    return parts


def chunk_token_indices(pieces: Sequence[DocumentChunk]) -> list[torch.Tensor]:
    """Return the indices of each piece's tokens in the row."""
    return [torch.arange(piece.first, piece.last) for piece in pieces]


# torch 2.13 has these under new names and deprecates the old ones, the only ones in 2.11. Remove with the lower bound.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    """All-gather: (this process's tensor, group) → the group's tensors, joined along the first dimension; the gradient
    is reduce-scattered as a sum.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.shape = group, tensor.shape
        gathered = tensor.new_empty(dist.get_world_size(group) * len(tensor), *tensor.shape[1:])
        _all_gather(gathered, tensor.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        rank_gradient = gradient.new_empty(ctx.shape)
        _reduce_scatter(rank_gradient, gradient.contiguous(), group=ctx.group)
        return rank_gradient, None


class _AddUp(torch.autograd.Function):
    """All-reduce: (tensor, group) → the group's tensors, added up; the gradient is summed likewise."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _without_padding(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return (ids, targets, document lengths) of a micro batch as one packed row, `MASKED` where nothing is
    predicted.
    """
    ids = batch["input_ids"].flatten()
    targets = torch.full_like(ids, MASKED)
    targets[batch["loss_rows"]] = batch["targets"]
    mask = batch.get("attention_mask")
    if mask is None:
        return ids, targets, batch["document_lengths"]
    real_tokens = mask.flatten().bool()
    return ids[real_tokens], targets[real_tokens], tuple(mask.sum(1).tolist())


def _documents(lengths: Sequence[int], device: torch.device) -> PackedDocuments:
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return PackedDocuments(starts, tuple(lengths), max(lengths))


def _tokens(pieces: Sequence[DocumentChunk]) -> int:
    return sum(piece.last - piece.first for piece in pieces)


def _two_documents(model: PreTrainedModel, size: int) -> dict[str, Any]:
    """Return a packed batch: one document longer than a short window, and one that cannot be cut into equal pieces."""
    window = attention_needs(model.config.to_dict()).sliding_window
    longer = window + 3 if window and window <= 128 else 6
    table: Any = model.get_input_embeddings()
    documents = [
        ((7 + 5 * torch.arange(length)) % table.num_embeddings).numpy() for length in (longer + 2 * size, 2 * size + 1)
    ]
    return collate_packed([(document, document) for document in documents])


def _centered_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits (tokens, vocabulary) of one row, minus their mean."""
    device = next(model.parameters()).device
    inputs = {name: batch[name].to(device) for name in ("input_ids", "position_ids")}
    logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    return logits.float() - logits.float().mean(-1, keepdim=True)
