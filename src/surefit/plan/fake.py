"""A faster mode for tensors without data.

`FakeTensorMode` caches the result of every operator, and spends more than half of an operator's time on building the
cache key from its arguments. Here the key is shorter, and distinguishes as much among the plain tensors of a training
step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _DispatchCacheKey

_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)  # fmt: skip

# Its logger prints the traceback of an operator that fails, which the plan reports in one line.
logging.getLogger(fake_tensor.__name__).disabled = True
_aten = torch.ops.aten


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A `FakeTensorMode` with a shorter key for its cache, with two operators cached that it leaves out, and with
    grouped matrix products in every dtype; the other results are the same."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as `trace.Recorder` does: nothing is compiled meanwhile."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.split_with_sizes.default and not kwargs:
            return self._split(types, *args)
        if func is _aten.nonzero.default:
            return self._nonzero(types, args[0])
        if func is _aten._unsafe_view.default:
            func = _aten.view.default
        if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return self._grouped(types, *args[:3])
        return self.dispatch(func, types, args, kwargs or {})

    def _split(self, types: Any, tensor: Any, sizes: list[int], dim: int = 0) -> list[Any]:
        """Split a tensor by slices, which are cached, unlike a list. Sizes that do not add up were read out of a tensor
        without data (tokens of each expert): the parts are then as even as they can be."""
        length = tensor.shape[dim]
        if sum(sizes) != length:
            sizes = [(n + 1) * length // len(sizes) - n * length // len(sizes) for n in range(len(sizes))]
        ends = list(accumulate(sizes))
        return [
            self.dispatch(_aten.slice.Tensor, types, (tensor, dim, end - size, end), {})
            for size, end in zip(sizes, ends, strict=True)
        ]

    def _nonzero(self, types: Any, mask: Any) -> Any:
        """Return fake indices of a mask, since the tokens of an expert are data: a mask that is one of many in its
        storage marks its even share; one with its own storage, everything."""
        stored = mask.untyped_storage().nbytes() // mask.element_size()
        rows = -(-(mask.numel() ** 2) // stored) if stored else 0
        return self.dispatch(_aten.new_empty.default, types, (mask, [rows, mask.dim()]), {"dtype": torch.int64})

    def _grouped(self, types: Any, a: Any, b: Any, ends: Any) -> Any:
        """Return a fake grouped matrix product: without data torch (2.11 to 2.13) supports only bfloat16; its kernels
        compute in float32 and float16 too.

        Groups of rows by a matrix each, (rows, k) and (groups, k, n), give (rows, n); two matrices, split along their
        common dimension, (groups, m, n).
        """
        shape = [a.shape[0], b.shape[-1]] if b.dim() == 3 else [ends.shape[0], a.shape[0], b.shape[1]]
        return self.dispatch(_aten.new_empty.default, types, (a, shape), {})

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> _DispatchCacheKey:
        parts = ["surefit", func, torch.get_default_dtype(), torch._C._get_default_device()]
        parts.append(torch.is_inference_mode_enabled())
        if self._write(parts, args) and self._write(parts, kwargs) and self._write(parts, kwargs.values()):
            return _DispatchCacheKey(tuple(parts))
        return super()._cache_key(state, func, args, kwargs)

    def _write(self, parts: list[Any], values: Iterable[Any]) -> bool:
        """Append all values that a result depends on; return False where there may be others."""
        parts.append("(")
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None:
                    return False
                # The dispatch keys encode the device, and that the tensor is neither sparse, quantized nor conjugated.
                parts += (
                    value.dtype, value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes(),
                    value.requires_grad, value.fake_device, torch._C._dispatch_keys(value).raw_repr(),
                )  # fmt: skip
            elif kind in _PLAIN:  # 1 and 1.0 are equal, and give results of different dtypes
                parts += (kind, value)
            elif kind is list or kind is tuple:
                if not self._write(parts, value):
                    return False
            else:
                return False
        parts.append(")")
        return True
