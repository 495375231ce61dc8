"""Parts of tensors as ranges of their flattened elements: the format of a process's part of a checkpoint.

A shard of rows, as FSDP makes them, is such a range; so is any slice of a flat buffer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import torch


class FlatRange(NamedTuple):
    """A range of a flattened tensor.

    Attributes:
        values: the elements, 1-d.
        offset: index of the first element in the flattened whole.
        shape: shape of the whole.
    """

    values: torch.Tensor
    offset: int
    shape: tuple[int, ...]


class LazyTensors(Mapping[str, torch.Tensor]):
    """Mapping from names to tensors, each made at access, and not cached."""

    def __init__(self, names: Collection[str], make: Callable[[str], torch.Tensor]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class ShardedTensors(Mapping[str, torch.Tensor]):
    """Mapping from names to whole tensors, put together from parts at access; ranges can be read separately."""

    @abstractmethod
    def shape(self, name: str) -> torch.Size:
        """Return the shape of the whole tensor."""

    @abstractmethod
    def part(self, name: str, offset: int, count: int) -> torch.Tensor:
        """Return `count` elements of the flattened tensor, 1-d, read-only."""


def read_shape(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    """Return the shape of a tensor, without reading it."""
    return tensors.shape(name) if isinstance(tensors, ShardedTensors) else tensors[name].shape


def read_flat_range(tensors: Mapping[str, torch.Tensor], name: str, offset: int, count: int) -> torch.Tensor:
    """Return `count` elements of a flattened tensor, without reading the rest if possible."""
    if isinstance(tensors, ShardedTensors):
        return tensors.part(name, offset, count)
    return tensors[name].reshape(-1)[offset : offset + count]
