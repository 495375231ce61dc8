"""Which pairing of the rows of a matrix with its columns is worth most: the assignment problem, exactly."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Assignment(NamedTuple):
    """The best pairing.

    Attributes:
        columns: of each row its column, or -1 where the row stays alone.
        value: the sum of the gains.
        rows_dual, columns_dual: prices ≥ the gains: `rows_dual[i] + columns_dual[j] - gains[i, j]` is what the sum
            loses at least if i is paired with j.
        steps: how long it took; one step is one pass over a row.
    """

    columns: NDArray[np.intp]
    value: float
    rows_dual: Floats
    columns_dual: Floats
    steps: int


def best_assignment(gains: Floats) -> Assignment:
    """The pairing with the greatest sum of gains, in which rows may stay alone at no gain.

    The Hungarian method with shortest augmenting paths (Jonker & Volgenant 1987), started from the pairs that are best
    for their row and in nobody's way.

    Args:
        gains: (rows, columns); -inf forbids a pair.

    >>> best_assignment(np.array([[3.0, 2.0], [3.0, -np.inf]])).columns.tolist()
    [1, 0]
    >>> best_assignment(np.array([[3.0, 2.0], [1.5, 0.0]])).value
    3.5
    """
    rows, real = gains.shape
    own = np.full((rows, rows), np.inf)  # a column of its own for each row to stay alone in
    np.fill_diagonal(own, 0.0)
    costs = np.hstack([-gains, own])
    row_price, column_price = costs.min(axis=1), np.zeros(real + rows)
    owner = np.full(real + rows, -1)
    late = []
    for row, column in enumerate(costs.argmin(axis=1).tolist()):
        if owner[column] < 0:
            owner[column] = row
        else:
            late.append(row)
    steps = rows + sum(_augment(row, costs, owner, row_price, column_price) for row in late)
    columns = np.full(rows, -1)
    taken = np.flatnonzero(owner >= 0)
    columns[owner[taken]] = np.where(taken < real, taken, -1)
    value = -float(row_price.sum() + column_price.sum())
    return Assignment(columns, value, -row_price, -column_price[:real], steps)


def _augment(row: int, costs: Floats, owner: NDArray[np.intp], row_price: Floats, column_price: Floats) -> int:
    """Give `row` a column, moving others along the cheapest path; the prices stay feasible."""
    width = costs.shape[1]
    distance, before = np.full(width, np.inf), np.full(width, -1)
    open_columns = np.ones(width, dtype=bool)
    visited: list[int] = []
    current, reached, steps = row, 0.0, 0
    while True:
        steps += 1
        through = reached + costs[current] - row_price[current] - column_price
        better = open_columns & (through < distance)
        distance[better] = through[better]
        before[better] = visited[-1] if visited else -1
        column = int(np.where(open_columns, distance, np.inf).argmin())
        reached = float(distance[column])
        if owner[column] < 0:
            break
        open_columns[column] = False
        visited.append(column)
        current = int(owner[column])
    row_price[row] += reached
    if visited:
        spare = reached - distance[visited]
        row_price[owner[visited]] += spare
        column_price[visited] -= spare
    while before[column] >= 0:
        owner[column] = owner[before[column]]
        column = int(before[column])
    owner[column] = row
    return steps
