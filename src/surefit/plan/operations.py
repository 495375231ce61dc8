"""The costs of a training step's operators, on any device: arithmetic, bytes moved, kernels launched.

Counted on the operators that autograd really calls, so the weight gradients that LoRA does not need are left out, and
the second forward pass of gradient checkpointing is included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from surefit.facts.flops import seen_pairs

NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_local_scalar_dense",
    "lift_fresh", "is_same_size", "sym_size", "sym_stride", "sym_numel",
}  # fmt: skip
"""Operators besides views that launch no kernel."""
CHUNK = 65_536
BLOCKS = 320
TENSORS = (110, 64, 48, 36, 30)
"""How PyTorch cuts an operator on lists of tensors into launches: elements per block, blocks per launch, tensors per
launch by the number of lists (aten/native/cuda/MultiTensorApply.cuh)."""
ROWS = {"index": "self", "_unsafe_index": "self", "gather": "self", "index_select": "self", "embedding": "weight"}
"""Operators that read, of this argument, only the numbers that they return."""
PLACES = {
    "index_put", "_index_put_impl", "_unsafe_index_put", "index_copy", "index_add", "scatter", "scatter_add",
    "scatter_reduce",
}  # fmt: skip
"""Operators that change single numbers of `self`; without an underscore at the end of their name, of a copy of it."""
ADDED = {"index_add", "scatter_add", "scatter_reduce"}
"""Operators in `PLACES` that read the numbers they change; `index_put` does if it accumulates."""
UNREAD = {
    "copy_", "fill_", "zero_", "uniform_", "normal_", "_foreach_copy_", "_foreach_zero_",
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_full", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward",
    "nll_loss2d_backward",
}  # fmt: skip
"""Operators that do not read `self`: they overwrite it, use its shape, or read one number of each row."""
GRADIENTS = {"grads", "g"}
"""Arguments that an optimizer's operator declares as changed, and does not change."""
NAMESPACES = {"aten", "torch_attn", "bitsandbytes", "surefit"}
"""Namespaces of the operators that launch kernels: PyTorch's, its attention for packed examples, bitsandbytes', and
ours."""
LAUNCHES = {
    "rms_norm": 1, "rms_norm_backward": 2, "rope": 3, "swiglu": 1, "swiglu_backward": 1, "float8_rows": 1,
    "float8_weights": 1,
}  # fmt: skip
"""Kernel launches of our operators (model/kernel_ops.py, model/float8_ops.py)."""
MORE_PASSES = {"rms_norm_backward": {"x": 1}, "rope": {"q": 2, "k": 2}}
"""Passes over an argument besides reading the arguments and writing the results: Liger fills the gradient of x with
zeros first, and queries and keys are copied before it rotates them in place."""
ATTENTION = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_varlen_attn": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "cpu",
}
"""Forward operator → its attention kernel."""
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Matrix products of attention; the backward pass computes the scores again."""


class Operation(NamedTuple):
    """One operator call.

    Attributes:
        name: the operator's name.
        dtype: dtype of its first tensor, without "torch.".
        flops: floating-point operations of matrix products; 0 for all other operators.
        bytes: bytes read and written, each argument once; of an argument addressed by indices only the numbers touched.
        kernels: number of kernel launches.
        attention: for attention, its kernel, direction and head dimension, such as "flash backward 64".
    """

    name: str
    dtype: str
    flops: int
    bytes: int
    kernels: int
    attention: str = ""


Operations = Counter[Operation]
"""Number of occurrences of each call; negative where depths were extrapolated: only the sum counts."""


class OperatorCounter:
    """Counter of the operators in some phases of a simulated run; give `note` to a Recorder as its `watch`."""

    def __init__(self, phases: Iterable[str]) -> None:
        self.phases = frozenset(phases)
        self.operations: Operations = Counter()

    def note(self, phase: str, func: Any, args: Any, kwargs: Any, out: Any) -> Callable[[], None] | None:
        """Count one call, if it is in these phases and launches a kernel; the returned callback counts it once more."""
        if phase not in self.phases or (operation := operator_cost(func, args, kwargs, out)) is None:
            return None
        self._count(operation)
        return partial(self._count, operation)

    def _count(self, operation: Operation) -> None:
        self.operations[operation] += 1


def operator_cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Operation | None:
    """Return the cost of one call of an aten operator; None for views and others that launch no kernel."""
    packet = func._overloadpacket
    name = packet.__name__
    if func.namespace not in NAMESPACES or name in NO_KERNEL or func.is_view:
        return None
    first = next((leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)), None)
    if first is None:
        return None
    arguments = dict(zip(_arguments(func), args, strict=False)) | kwargs
    dtype = str(first.dtype).removeprefix("torch.")
    flops = _flops(name, func, arguments, args, kwargs, out)
    kernels = LAUNCHES.get(name) or _launches(args)
    return Operation(name, dtype, flops, _bytes_moved(name, func, arguments, out), kernels, _attention(name, arguments))


@cache
def _arguments(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@cache
def _written_arguments(func: Any) -> frozenset[str]:
    """Return the arguments that an operator writes to."""
    written = (
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return frozenset(written) - GRADIENTS


def _bytes_moved(name: str, func: Any, given: dict[str, Any], out: Any) -> int:
    """Return the bytes read and written.

    The log-probabilities of 256 right answers, of 128,256 in float32 each: `gather` reads and writes 256 numbers and
    reads an index of 8 bytes for each, so 256 × (4 + 4 + 8) = 4,096 bytes, and not the 131 MB beside them.
    """
    sizes = {argument: _bytes(value) for argument, value in given.items()}
    changed = _written_arguments(func)
    base_name = name.removesuffix("_")
    if base_name in PLACES:
        touched = _count_indexed_numbers(given) * int(given["self"].element_size())
        passes = 2 if base_name in ADDED or given.get("accumulate") else 1
        copied = 0 if changed else 2 * sizes["self"]
        return sum(sizes.values()) - sizes["self"] + passes * touched + copied
    written = sum(sizes.get(argument, 0) for argument in changed) if changed else _bytes(out)
    unread = "self" if name in UNREAD else ROWS.get(name)
    read = sum(sizes.values()) - (sizes[unread] if unread else 0) - (sizes["out"] if "out" in changed else 0)
    moved = read + written + (written if name in ROWS else 0)
    if name == "gemm_4bit":  # the weights in 16 bits, written and read
        moved += 2 * math.prod(given["shapeB"]) * int(given["A"].element_size())
    return moved + sum(times * sizes[argument] for argument, times in MORE_PASSES.get(name, {}).items())


def _count_indexed_numbers(given: dict[str, Any]) -> int:
    """Return how many numbers of `self` the indices select."""
    target = given["self"]
    if "indices" in given:
        indices = given["indices"]
        shapes = (index.shape for index in indices if index is not None)
        rows: tuple[int, ...] = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        unindexed = [*(index is None for index in indices), *([True] * (target.dim() - len(indices)))]
        return math.prod(rows) * math.prod(
            int(size) for size, is_whole in zip(target.shape, unindexed, strict=True) if is_whole
        )
    if "source" in given:
        return int(given["source"].numel())
    return int(given["index"].numel())


def _bytes(value: Any) -> int:
    """Return the bytes of all tensors in an argument."""
    if isinstance(value, torch.Tensor):
        return stored_bytes(value)
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return 0


def extrapolate_operations(few: Operations, more: Operations, steps: int) -> Operations:
    """Extrapolate the operators of two depths along a line, by `steps` further layers.

    A call that occurs in every layer gains its count; one whose size grows with the depth (the optimizer's) appears as
    the larger one counted up and the smaller counted down, which sums to the same line.
    """
    result: Operations = Counter(more)
    for operation in few.keys() | more.keys():
        result[operation] += steps * (more[operation] - few[operation])
    return result


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in memory; a dimension repeated by `expand` is stored once."""
    stored = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return math.prod(stored) * tensor.element_size()


def _flops(name: str, func: Any, given: dict[str, Any], args: Any, kwargs: Any, out: Any) -> int:
    if name.startswith("_varlen_attn"):
        return _packed_attention_flops(given)
    if "attention" in name:
        return _attention_flops(given)
    if name == "gemm_4bit":
        return 2 * int(args[0].numel()) * int(args[2][0])
    if name == "_grouped_mm":  # rows times the matrix of their expert, or its gradients: each row once
        return 2 * int(args[0].numel()) * int(args[1].shape[-1])
    if name == "addmm_":
        return 2 * int(args[1].numel()) * int(args[2].shape[-1])
    count = flop_registry.get(func._overloadpacket)
    return int(count(*args, **kwargs, out_val=out)) if count else 0


def _attention(name: str, given: dict[str, Any]) -> str:
    kernel = ATTENTION.get(name.removesuffix("_backward"))
    if kernel is None:
        return ""
    direction = "backward" if name.endswith("_backward") else "forward"
    return f"{kernel} {direction} {given['query'].shape[-1]}"


def _attention_flops(given: dict[str, Any]) -> int:
    """Return the FLOP of attention: a causal kernel computes only the lower triangle of the scores; a mask saves
    nothing."""
    query, key = given["query"], given["key"]
    batch, heads, queries, width = query.shape
    products = BACKWARD_PRODUCTS if "grad_out" in given or "grad_out_" in given else FORWARD_PRODUCTS
    full = 2 * products * batch * heads * queries * key.shape[-2] * width
    return int(full // 2 if given.get("is_causal") else full)


def _packed_attention_flops(given: dict[str, Any]) -> int:
    """Return the FLOP of attention over packed documents, assumed to be of even length, within the sliding window."""
    tokens, heads, width = given["query"].shape
    documents = given["cu_seq_q"].numel() - 1
    window = given.get("window_size") or [-1, 0]
    length = tokens // documents
    pairs = documents * seen_pairs(length, window[0] + 1 if window[0] >= 0 else None)
    products = BACKWARD_PRODUCTS if "grad_out" in given else FORWARD_PRODUCTS
    return int(2 * products * pairs * heads * width)


def _launches(args: tuple[Any, ...]) -> int:
    """Return the kernel launches of an operator: 1, or for one on lists the number that PyTorch divides them into."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor)]
    if not lists:
        return 1
    chunks: int = sum(-(-tensor.numel() // CHUNK) for tensor in lists[0])
    per_launch = TENSORS[min(len(lists), len(TENSORS)) - 1]
    return max(-(-chunks // BLOCKS), -(-len(lists[0]) // per_launch))
