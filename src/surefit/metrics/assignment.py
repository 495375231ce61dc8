"""The assignment problem, solved exactly: the pairing of a matrix's rows and columns with the largest sum."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Assignment(NamedTuple):
    """The optimal pairing.

    Attributes:
        columns: column of each row, or -1 if the row is unpaired.
        value: the sum of the gains.
        rows_dual, columns_dual: dual prices ≥ the gains: `rows_dual[i] + columns_dual[j] - gains[i, j]` is the least
            loss of the sum if i is paired with j.
        steps: number of passes over a row.
    """

    columns: NDArray[np.intp]
    value: float
    rows_dual: Floats
    columns_dual: Floats
    steps: int


def best_assignment(gains: Floats) -> Assignment:
    """Return the pairing with the largest sum of gains, in which rows may stay unpaired at no gain.

    The Hungarian method with shortest augmenting paths (Jonker & Volgenant 1987), started from each row's best column
    where no earlier row has it.

    Args:
        gains: (rows, columns); -inf forbids a pair.

    >>> best_assignment(np.array([[3.0, 2.0], [3.0, -np.inf]])).columns.tolist()
    [1, 0]
    >>> best_assignment(np.array([[3.0, 2.0], [1.5, 0.0]])).value
    3.5
    """
    rows, real = gains.shape
    unpaired = np.full((rows, rows), np.inf)  # one extra column per row, which leaves the row unpaired
    np.fill_diagonal(unpaired, 0.0)
    costs = np.hstack([-gains, unpaired])
    row_price, column_price = costs.min(axis=1), np.zeros(real + rows)
    owner = np.full(real + rows, -1)
    unassigned = []
    for row, column in enumerate(costs.argmin(axis=1).tolist()):
        if owner[column] < 0:
            owner[column] = row
        else:
            unassigned.append(row)
    steps = rows + sum(_augment(row, costs, owner, row_price, column_price) for row in unassigned)
    columns = np.full(rows, -1)
    assigned = np.flatnonzero(owner >= 0)
    columns[owner[assigned]] = np.where(assigned < real, assigned, -1)
    value = -float(row_price.sum() + column_price.sum())
    return Assignment(columns, value, -row_price, -column_price[:real], steps)


def _augment(row: int, costs: Floats, owner: NDArray[np.intp], row_price: Floats, column_price: Floats) -> int:
    """Assign a column to `row`, moving other rows along the cheapest path; the prices stay feasible."""
    width = costs.shape[1]
    distance, previous = np.full(width, np.inf), np.full(width, -1)
    open_columns = np.ones(width, dtype=bool)
    visited: list[int] = []
    current, path_cost, steps = row, 0.0, 0
    while True:
        steps += 1
        path_length = path_cost + costs[current] - row_price[current] - column_price
        shorter = open_columns & (path_length < distance)
        distance[shorter] = path_length[shorter]
        previous[shorter] = visited[-1] if visited else -1
        column = int(np.where(open_columns, distance, np.inf).argmin())
        path_cost = float(distance[column])
        if owner[column] < 0:
            break
        open_columns[column] = False
        visited.append(column)
        current = int(owner[column])
    row_price[row] += path_cost
    if visited:
        slack = path_cost - distance[visited]
        row_price[owner[visited]] += slack
        column_price[visited] -= slack
    while previous[column] >= 0:
        owner[column] = owner[previous[column]]
        column = int(previous[column])
    owner[column] = row
    return steps
