"""What the operators of a training step cost whatever device runs them: arithmetic, bytes moved, kernels launched.

Counted on the operators that autograd really calls, so the weight gradients that LoRA does not need are not in it, and
with gradient checkpointing the second forward pass is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from surefit.facts.flops import seen_pairs

NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_local_scalar_dense",
    "lift_fresh", "is_same_size", "sym_size", "sym_stride", "sym_numel",
}  # fmt: skip
"""Operators besides views that launch nothing."""
CHUNK = 65_536
BLOCKS = 320
TENSORS = (110, 64, 48, 36, 30)
"""How PyTorch cuts an operator on lists of tensors into launches: elements per block, blocks per launch, tensors per
launch by the number of lists (aten/native/cuda/MultiTensorApply.cuh)."""
NAMESPACES = {"aten", "torch_attn", "bitsandbytes"}
"""Whose operators launch kernels: PyTorch's, those of its attention for packed examples, and bitsandbytes'."""
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Matrix products of attention; the backward pass computes the scores once more."""


class Operation(NamedTuple):
    """One operator call.

    Attributes:
        name: of the operator.
        dtype: its first tensor's, without "torch.".
        flops: floating-point operations of matrix products; 0 for all other operators.
        bytes: read and written, each argument once.
        kernels: launches.
    """

    name: str
    dtype: str
    flops: int
    bytes: int
    kernels: int


Operations = Counter[Operation]
"""How often each call occurs; negative where depths were extrapolated: the sum is what counts."""


class Tally:
    """Counts the operators of some phases of a simulated run; give `note` to a Recorder as its `watch`."""

    def __init__(self, phases: Iterable[str]) -> None:
        self.phases = frozenset(phases)
        self.operations: Operations = Counter()

    def note(self, phase: str, func: Any, args: Any, kwargs: Any, out: Any) -> Callable[[], None] | None:
        """Count one call, if it is of these phases and launches anything; what comes back counts it once more."""
        if phase not in self.phases or (operation := operation_of(func, args, kwargs, out)) is None:
            return None
        self._count(operation)
        return partial(self._count, operation)

    def _count(self, operation: Operation) -> None:
        self.operations[operation] += 1


def operation_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Operation | None:
    """The cost of one call of an aten operator; None for views and what else launches nothing."""
    packet = func._overloadpacket
    name = packet.__name__
    if func.namespace not in NAMESPACES or name in NO_KERNEL or func.is_view:
        return None
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    if not read and not written:
        return None
    first = (read or written)[0]
    moved = sum(map(stored_bytes, read)) + sum(map(stored_bytes, written))
    if name.startswith("optimizer_update"):  # in place: all but the gradient is written as well
        moved += sum(map(stored_bytes, read[1:]))
    if name == "gemm_4bit":  # the weights in 16 bits, written and read
        moved += 2 * math.prod(args[2]) * first.element_size()
    dtype = str(first.dtype).removeprefix("torch.")
    return Operation(name, dtype, _flops(func, args, kwargs, out), moved, _launches(args))


def extended(few: Operations, more: Operations, steps: int) -> Operations:
    """The line through the operators of two depths, continued by `steps` layers.

    A call that occurs in every layer gains its count; one whose size grows with the depth (the optimizer's) appears as
    the larger one counted up and the smaller counted down, which sums to the same line.
    """
    result: Operations = Counter(more)
    for operation in few.keys() | more.keys():
        result[operation] += steps * (more[operation] - few[operation])
    return result


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor in memory; what `expand` repeats lies there once."""
    held = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return math.prod(held) * tensor.element_size()


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    name = func._overloadpacket.__name__
    if "attention" in name:
        return _attention_flops(func, args, kwargs)
    if name.startswith("_varlen_attn"):
        return _packed_attention_flops(func, args, kwargs)
    if name == "gemm_4bit":
        return 2 * int(args[0].numel()) * int(args[2][0])
    if name == "addmm_":
        return 2 * int(args[1].numel()) * int(args[2].shape[-1])
    count = flop_registry.get(func._overloadpacket)
    return int(count(*args, **kwargs, out_val=out)) if count else 0


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The kernels compute only the lower triangle of a causal score matrix; a mask does not spare them anything."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    query, key = given["query"], given["key"]
    batch, heads, queries, width = query.shape
    products = BACKWARD_PRODUCTS if "grad_out" in given or "grad_out_" in given else FORWARD_PRODUCTS
    full = 2 * products * batch * heads * queries * key.shape[-2] * width
    return int(full // 2 if given.get("is_causal") else full)


def _packed_attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """As many pairs of positions as documents of even length have, none longer than the longest."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    tokens, heads, width = given["query"].shape
    documents = given["cu_seq_q"].numel() - 1
    window = given.get("window_size") or [-1, 0]
    length = tokens // documents
    pairs = documents * seen_pairs(length, window[0] + 1 if window[0] >= 0 else None)
    products = BACKWARD_PRODUCTS if "grad_out" in given else FORWARD_PRODUCTS
    return int(2 * products * pairs * heads * width)


def _launches(args: tuple[Any, ...]) -> int:
    """One, or for an operator on lists as many as PyTorch cuts them into."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor)]
    if not lists:
        return 1
    chunks: int = sum(-(-tensor.numel() // CHUNK) for tensor in lists[0])
    per_launch = TENSORS[min(len(lists), len(TENSORS)) - 1]
    return max(-(-chunks // BLOCKS), -(-len(lists[0]) // per_launch))
