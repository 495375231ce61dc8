"""Which node of one graph is which node of another, so that most triples agree: the search inside Smatch, exactly.

It is a quadratic assignment problem: pairing i with j is worth what the two nodes share (concept, attributes), pairing
i with j *and* k with l is worth the edges that then coincide. Smatch climbs from a few starting points and reports a
lower bound. Here the worth of each pair of pairs is divided between its two members; then the best pairing is an
ordinary assignment, and its value an upper bound for every division (Gilmore 1962, Lawler 1963). The division is
improved by subgradient steps (as in Lagrangean decomposition; Swoboda et al. 2017), every assignment met on the way is
a pairing whose true worth counts as a lower bound, and pairs that could not beat it by a whole triple are struck out.
All values are whole numbers, so the search ends as soon as the bounds are less than one apart, for sentences nearly
always without branching. What is left is divided into cases, up to a budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefit.metrics.assignment import Assignment, Floats, best_assignment

Pair = tuple[int, int]
Indices = NDArray[np.intp]

BUDGET = 200_000
"""Steps before the search gives up proving: some four seconds. A pair of sentences takes a thousandth of that."""
_PATIENCE = 12
_TINY = 1e-6


@dataclass(frozen=True)
class Alignment:
    """A pairing of nodes.

    Attributes:
        pairs: node of the first graph → node of the second.
        worth: the triples that agree.
        bound: no pairing is worth more than this.
    """

    pairs: dict[int, int]
    worth: int
    bound: int

    @property
    def proven(self) -> bool:
        """Whether no other pairing is worth more."""
        return self.worth == self.bound


def best_alignment(
    single: Mapping[Pair, int], double: Mapping[tuple[Pair, Pair], int], budget: int = BUDGET
) -> Alignment:
    """The pairing worth most, or the best found when the budget is spent.

    Args:
        single: (i, j) → worth of pairing i with j, > 0.
        double: ((i, j), (k, l)) → what pairing both is worth beside that, > 0, each two once, i ≠ k and j ≠ l.
        budget: steps; with 0 the first bound and the best pairing on the way are taken.

    >>> best_alignment({(0, 0): 1, (0, 1): 1, (1, 0): 1}, {((0, 1), (1, 0)): 2}).pairs
    {0: 1, 1: 0}
    """
    pairs = sorted({*single, *(pair for both in double for pair in both)})
    if not pairs:
        return Alignment({}, 0, 0)
    rows, columns = sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})
    search = _Search(len(rows), len(columns), budget)
    problem = _problem(pairs, single, double, rows, columns)
    search.solve(problem)
    found = {rows[int(problem.row[p])]: columns[int(problem.column[p])] for p in np.flatnonzero(search.best)}
    return Alignment(found, search.worth, search.worth if search.finished else search.bound)


@dataclass
class _Problem:
    """The pairs that may still be chosen. Every two pairs with a common worth are two halves, one seen from each pair.

    Attributes:
        row, column, worth: (pairs,)
        name: (pairs,) the pair's number in the whole problem.
        owner, partner: (halves,) the pair that gets this half, and the other one; sorted by owner and partner's row.
        full: (halves,) the worth of both together.
        share: (halves,) what of it the owner is credited with; with its twin's it adds up to `full`.
        twin: (halves,) the other half.
    """

    row: Indices
    column: Indices
    worth: Floats
    name: Indices
    owner: Indices
    partner: Indices
    full: Floats
    share: Floats
    twin: Indices

    def __post_init__(self) -> None:
        """Halves of one owner whose partners are in one row form a group: only one of them can come true."""
        key = self.owner * (int(self.row.max(initial=0)) + 1) + self.row[self.partner]
        self.starts = np.flatnonzero(np.diff(key, prepend=-1))
        self.group = np.cumsum(np.diff(key, prepend=-1) != 0) - 1
        self.group_owner = self.owner[self.starts]

    def kept(self, keep: NDArray[np.bool_]) -> _Problem:
        """Only these pairs, with what is between them."""
        halves = keep[self.owner] & keep[self.partner]
        pair_number, half_number = np.cumsum(keep) - 1, np.cumsum(halves) - 1
        return _Problem(
            self.row[keep],
            self.column[keep],
            self.worth[keep],
            self.name[keep],
            pair_number[self.owner[halves]],
            pair_number[self.partner[halves]],
            self.full[halves],
            self.share[halves],
            half_number[self.twin[halves]],
        )

    def credited(self) -> tuple[Floats, Floats]:
        """What each pair can be worth at most under the present division, and each group of halves."""
        if not len(self.owner):
            return self.worth, np.zeros(0)
        best = np.maximum(np.maximum.reduceat(self.share, self.starts), 0.0)
        return self.worth + np.bincount(self.group_owner, best, len(self.worth)), best


def _problem(
    pairs: list[Pair],
    single: Mapping[Pair, int],
    double: Mapping[tuple[Pair, Pair], int],
    rows: list[int],
    columns: list[int],
) -> _Problem:
    number = {pair: n for n, pair in enumerate(pairs)}
    row_number = {row: n for n, row in enumerate(rows)}
    column_number = {column: n for n, column in enumerate(columns)}
    row = np.array([row_number[i] for i, _ in pairs])
    first = np.array([number[a] for a, _ in double], dtype=np.intp)
    second = np.array([number[b] for _, b in double], dtype=np.intp)
    full = np.array(list(double.values()), dtype=np.float64)
    count = len(full)
    owner, partner = np.concatenate([first, second]), np.concatenate([second, first])
    order = np.lexsort((partner, row[partner], owner))
    place = np.empty(2 * count, dtype=np.intp)
    place[order] = np.arange(2 * count)
    twin = np.concatenate([np.arange(count) + count, np.arange(count)])
    doubled = np.concatenate([full, full])[order]
    return _Problem(
        row,
        np.array([column_number[j] for _, j in pairs]),
        np.array([single.get(pair, 0) for pair in pairs], dtype=np.float64),
        np.arange(len(pairs)),
        owner[order],
        partner[order],
        doubled,
        doubled / 2,
        place[twin[order]],
    )


class _Search:
    """Branch and bound: the best pairing so far, and what it may still cost to look for a better one."""

    def __init__(self, rows: int, columns: int, budget: int) -> None:
        self.shape, self.budget = (rows, columns), budget
        self.worth, self.bound, self.finished = -1, 0, True
        self.best: NDArray[np.bool_] = np.zeros(0, dtype=bool)

    def solve(self, problem: _Problem) -> None:
        """Look at the whole problem, then at the cases that are left, the more promising case of two first."""
        self.best = np.zeros(len(problem.row), dtype=bool)
        stack = [problem]
        while stack:
            cases = self._narrow(stack.pop(), first=self.worth < 0)
            stack.extend(reversed(cases))
            if stack and self.budget <= 0:
                self.finished = False
                return

    def _narrow(self, problem: _Problem, first: bool) -> list[_Problem]:
        """Lower the bound of a case until nothing is left to gain in it, or return the two cases it divides into."""
        lowest, waited, pace = np.inf, 0, 1.0
        while len(problem.row):
            credited, groups = problem.credited()
            found = self._assign(problem, credited)
            chosen = found.columns[problem.row] == problem.column
            self._offer(problem, chosen, climb=first or waited == 0)
            if first:
                self.bound = int(min(found.value, lowest) + _TINY)
            if found.value + _TINY < self.worth + 1:
                return []
            loss = found.rows_dual[problem.row] + found.columns_dual[problem.column] - credited
            keep = found.value - loss + _TINY >= self.worth + 1
            disagreeing = _disagreement(problem, chosen, groups)
            waited = 0 if found.value < lowest - 0.01 else waited + 1
            lowest = min(lowest, found.value)
            if waited > _PATIENCE or self.budget <= 0:
                return _cases(problem, chosen, disagreeing)
            if waited and waited % 4 == 0:
                pace /= 2
            step = pace * (found.value - self.worth) / max(1, len(disagreeing))
            problem.share[disagreeing] -= step
            problem.share[problem.twin[disagreeing]] += step
            if not keep.all():
                problem = problem.kept(keep)
        return []

    def _assign(self, problem: _Problem, gains: Floats) -> Assignment:
        matrix = np.full(self.shape, -np.inf)
        matrix[problem.row, problem.column] = gains
        found = best_assignment(matrix)
        self.budget -= found.steps
        return found

    def _offer(self, problem: _Problem, chosen: NDArray[np.bool_], climb: bool) -> None:
        """Remember a pairing if it is the best; `climb` improves it first, as far as assignments lead."""
        worth = _worth(problem, chosen)
        while climb:
            beside = np.bincount(problem.owner, problem.full * chosen[problem.partner], len(problem.worth))
            other = self._assign(problem, problem.worth + beside).columns[problem.row] == problem.column
            if _worth(problem, other) <= worth:
                break
            chosen, worth = other, _worth(problem, other)
        if worth > self.worth:
            self.worth = worth
            self.best[:] = False
            self.best[problem.name[chosen]] = True


def _worth(problem: _Problem, chosen: NDArray[np.bool_]) -> int:
    both = chosen[problem.owner] & chosen[problem.partner]
    return round(float(problem.worth[chosen].sum() + problem.full[both].sum() / 2))


def _disagreement(problem: _Problem, chosen: NDArray[np.bool_], groups: Floats) -> Indices:
    """Of the halves that the bound counts on, those whose twin it does not count on."""
    counted = np.flatnonzero(chosen[problem.owner] & (problem.share > _TINY))
    counted = counted[problem.share[counted] >= groups[problem.group[counted]]]
    counted = counted[np.unique(problem.group[counted], return_index=True)[1]]
    mask = np.zeros(len(problem.owner), dtype=bool)
    mask[counted] = True
    alone: Indices = counted[~mask[problem.twin[counted]]]
    return alone


def _cases(problem: _Problem, chosen: NDArray[np.bool_], disagreeing: Indices) -> list[_Problem]:
    """With the pair that is most in doubt, and without it."""
    doubt = np.bincount(problem.owner[disagreeing], minlength=len(problem.row)) + np.bincount(
        problem.partner[disagreeing], minlength=len(problem.row)
    )
    rivals = np.bincount(problem.row)[problem.row]
    pair = int(np.argmax(np.where(chosen, doubt * 100 + rivals, -1)))
    beside = (problem.row == problem.row[pair]) | (problem.column == problem.column[pair])
    beside[pair] = False
    without = np.ones(len(problem.row), dtype=bool)
    without[pair] = False
    return [problem.kept(~beside), problem.kept(without)]
