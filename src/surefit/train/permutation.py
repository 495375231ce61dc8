"""A shuffle without a table: where each of n rows stands is computed, so that 10^12 rows need no more memory than ten.

A Feistel network over b = ⌈log2 n⌉ bits: the number is cut into two halves, and in each round one half is changed by a
hash of the other and of the round's key. A round undoes itself, so the whole is one to one whatever the hash is (Luby
and Rackoff 1988, doi:10.1137/0217022). What falls outside [0, n) is put through again until it is inside ("cycle
walking": Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9): twice on average at most, because 2^b < 2n.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 8
"""Luby and Rackoff need four with a perfect hash; the half of a small number is a few bits."""
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def permute_positions(positions: npt.NDArray[np.int64], n: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """What stands at these positions of the shuffle of 0 … n-1 that belongs to a key.

    Args:
        positions: each in [0, n); any shape.
        n: at most 2^62.
        key: non-negative numbers; every key has a shuffle of its own.
    """
    if n <= 1:
        return np.zeros_like(positions)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    bits = max(2, (n - 1).bit_length())
    found = _network(positions.astype(np.uint64), bits, keys)
    while (outside := found >= n).any():
        found[outside] = _network(found[outside], bits, keys)
    return found.astype(np.int64)


def _network(values: npt.NDArray[np.uint64], bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A permutation of all numbers of so many bits."""
    low = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    left, right = values >> low, values & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            right = right ^ (_hash(left, key) & low_mask)
        else:
            left = left ^ (_hash(right, key) & high_mask)
    return (left << low) | right


def _hash(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195) of the sum with a key."""
    mixed = values + key  # wraps round
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    return mixed ^ (mixed >> np.uint64(31))
