"""Parts of tensors as ranges of their numbers, flattened: how processes say which part of a checkpoint each has.

A shard of rows, as FSDP makes them, is such a range; so is any cut of a flat buffer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import torch


class FlatRange(NamedTuple):
    """A part of a tensor.

    Attributes:
        values: 1-d.
        offset: of the first of them in the whole, flattened.
        shape: of the whole.
    """

    values: torch.Tensor
    offset: int
    shape: tuple[int, ...]


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each made when it is asked for, and kept by nobody here."""

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
    """Whole tensors by name, put together from parts when they are asked for; a range of one can be had alone."""

    @abstractmethod
    def shape(self, name: str) -> torch.Size:
        """Of the whole tensor."""

    @abstractmethod
    def part(self, name: str, offset: int, count: int) -> torch.Tensor:
        """`count` numbers of the flattened tensor, 1-d; not to be written to."""


def read_shape(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    """Of one of them, without reading it."""
    return tensors.shape(name) if isinstance(tensors, ShardedTensors) else tensors[name].shape


def read_flat_range(tensors: Mapping[str, torch.Tensor], name: str, offset: int, count: int) -> torch.Tensor:
    """`count` numbers of one of them, flattened, and no more of it than that is read where it can be helped."""
    if isinstance(tensors, ShardedTensors):
        return tensors.part(name, offset, count)
    return tensors[name].reshape(-1)[offset : offset + count]
