"""A shuffle without a table: the position of each of n rows is computed, so that 10^12 rows need no more memory than
ten.

A Feistel network over b = ⌈log2 n⌉ bits: the number is split into two halves, and in each round one half is XORed with
a hash of the other half and of the round's key. A round is its own inverse, so the network is a bijection whatever the
hash is (Luby and Rackoff 1988, doi:10.1137/0217022). Values outside [0, n) go through it again until they are inside
("cycle walking": Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9): at most two passes on average, since 2^b < 2n.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 8
"""Number of rounds. Luby and Rackoff need four with a perfect hash; here half of a small number is only a few bits."""
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def permute_positions(positions: npt.NDArray[np.int64], n: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the elements at these positions of the key's shuffle of 0 … n-1.

    Args:
        positions: in [0, n); any shape.
        n: at most 2^62.
        key: non-negative numbers; every key gives another shuffle.
    """
    if n <= 1:
        return np.zeros_like(positions)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    bits = max(2, (n - 1).bit_length())
    permuted = _network(positions.astype(np.uint64), bits, keys)
    while (outside := permuted >= n).any():
        permuted[outside] = _network(permuted[outside], bits, keys)
    return permuted.astype(np.int64)


def _network(values: npt.NDArray[np.uint64], bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply a permutation of all numbers of `bits` bits."""
    low = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    left, right = values >> low, values & low_mask
    for round_number, key in enumerate(keys):
        if round_number % 2:
            right = right ^ (_hash(left, key) & low_mask)
        else:
            left = left ^ (_hash(right, key) & high_mask)
    return (left << low) | right


def _hash(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's finalizer (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195) of the sum with a key."""
    mixed = values + key  # wraps around
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    return mixed ^ (mixed >> np.uint64(31))
