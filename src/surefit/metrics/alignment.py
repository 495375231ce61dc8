"""Exact alignment of two graphs' nodes that maximizes the matching triples: the search inside Smatch.

It is a quadratic assignment problem: pairing i with j is worth the triples that the two nodes share (concept,
attributes); pairing i with j *and* k with l is worth the edges that then coincide. Smatch climbs from a few starting
points and reports a lower bound. Here the worth of each pair of pairs is divided between its two members; then the best
pairing is an ordinary assignment, and its value an upper bound for every division (Gilmore 1962, Lawler 1963). The
division is improved by subgradient steps (as in Lagrangean decomposition; Swoboda et al. 2017), every assignment on the
way is a pairing whose true worth counts as a lower bound, and pairs that could not beat it by a whole triple are
removed. All values are whole numbers, so the search ends as soon as the bounds are less than one apart, for sentences
nearly always without branching. The remaining pairs are divided into cases, up to a budget.
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
"""Steps before the search stops without a proof: some four seconds. A pair of sentences needs a thousandth of that."""
_PATIENCE = 12
_TINY = 1e-6


@dataclass(frozen=True)
class Alignment:
    """A pairing of nodes.

    Attributes:
        pairs: node of the first graph → node of the second.
        worth: number of triples that agree.
        bound: upper bound on the worth of any pairing.
    """

    pairs: dict[int, int]
    worth: int
    bound: int

    @property
    def proven(self) -> bool:
        """Return whether the pairing is proved optimal."""
        return self.worth == self.bound


def best_alignment(
    single: Mapping[Pair, int], double: Mapping[tuple[Pair, Pair], int], budget: int = BUDGET
) -> Alignment:
    """Find the pairing of largest worth, or the best so far when the budget is spent.

    Args:
        single: (i, j) → worth of pairing i with j, > 0.
        double: ((i, j), (k, l)) → additional worth of pairing both, > 0, each two once, i ≠ k and j ≠ l.
        budget: steps; with 0 only the first bound and the best pairing on the way are computed.

    >>> best_alignment({(0, 0): 1, (0, 1): 1, (1, 0): 1}, {((0, 1), (1, 0)): 2}).pairs
    {0: 1, 1: 0}
    """
    pairs = sorted({*single, *(pair for two_pairs in double for pair in two_pairs)})
    if not pairs:
        return Alignment({}, 0, 0)
    rows, columns = sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})
    search = _Search(len(rows), len(columns), budget)
    problem = _problem(pairs, single, double, rows, columns)
    search.solve(problem)
    alignment = {rows[int(problem.row[p])]: columns[int(problem.column[p])] for p in np.flatnonzero(search.best)}
    return Alignment(alignment, search.worth, search.worth if search.finished else search.bound)


@dataclass
class _Problem:
    """The remaining candidate pairs. Every two pairs with a common worth are two halves, one seen from each pair.

    Attributes:
        row, column, worth: (pairs,) nodes and own worth of each pair.
        name: (pairs,) the pair's number in the whole problem.
        owner, partner: (halves,) the pair that owns this half, and the other pair; sorted by owner and partner's row.
        full: (halves,) the common worth of the two pairs.
        share: (halves,) the part of it credited to the owner; the share and its twin's sum to `full`.
        twin: (halves,) index of the other half.
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
        """Group the halves of one owner whose partners are in one row: only one of them can be realized."""
        key = self.owner * (int(self.row.max(initial=0)) + 1) + self.row[self.partner]
        self.starts = np.flatnonzero(np.diff(key, prepend=-1))
        self.group = np.cumsum(np.diff(key, prepend=-1) != 0) - 1
        self.group_owner = self.owner[self.starts]

    def kept(self, keep: NDArray[np.bool_]) -> _Problem:
        """Return the problem restricted to these pairs and the halves between them."""
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
        """Return the upper bound of each pair's worth under the current division, and the best share of each group of
        halves.
        """
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
    new_position = np.empty(2 * count, dtype=np.intp)
    new_position[order] = np.arange(2 * count)
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
        new_position[twin[order]],
    )


class _Search:
    """Branch and bound: the best pairing so far, and the remaining budget."""

    def __init__(self, rows: int, columns: int, budget: int) -> None:
        self.shape, self.budget = (rows, columns), budget
        self.worth, self.bound, self.finished = -1, 0, True
        self.best: NDArray[np.bool_] = np.zeros(0, dtype=bool)

    def solve(self, problem: _Problem) -> None:
        """Bound the whole problem, then the remaining cases, the more promising of two first."""
        self.best = np.zeros(len(problem.row), dtype=bool)
        stack = [problem]
        while stack:
            cases = self._narrow(stack.pop(), first=self.worth < 0)
            stack.extend(reversed(cases))
            if stack and self.budget <= 0:
                self.finished = False
                return

    def _narrow(self, problem: _Problem, first: bool) -> list[_Problem]:
        """Lower the bound of a case until it cannot improve the best pairing, or return the two cases it is divided
        into.
        """
        lowest_bound, stalled_steps, step_scale = np.inf, 0, 1.0
        while len(problem.row):
            credited, groups = problem.credited()
            assignment = self._assign(problem, credited)
            chosen = assignment.columns[problem.row] == problem.column
            self._offer(problem, chosen, climb=first or stalled_steps == 0)
            if first:
                self.bound = int(min(assignment.value, lowest_bound) + _TINY)
            if assignment.value + _TINY < self.worth + 1:
                return []
            loss = assignment.rows_dual[problem.row] + assignment.columns_dual[problem.column] - credited
            keep = assignment.value - loss + _TINY >= self.worth + 1
            disagreeing = _disagreement(problem, chosen, groups)
            stalled_steps = 0 if assignment.value < lowest_bound - 0.01 else stalled_steps + 1
            lowest_bound = min(lowest_bound, assignment.value)
            if stalled_steps > _PATIENCE or self.budget <= 0:
                return _cases(problem, chosen, disagreeing)
            if stalled_steps and stalled_steps % 4 == 0:
                step_scale /= 2
            step = step_scale * (assignment.value - self.worth) / max(1, len(disagreeing))
            problem.share[disagreeing] -= step
            problem.share[problem.twin[disagreeing]] += step
            if not keep.all():
                problem = problem.kept(keep)
        return []

    def _assign(self, problem: _Problem, gains: Floats) -> Assignment:
        matrix = np.full(self.shape, -np.inf)
        matrix[problem.row, problem.column] = gains
        assignment = best_assignment(matrix)
        self.budget -= assignment.steps
        return assignment

    def _offer(self, problem: _Problem, chosen: NDArray[np.bool_], climb: bool) -> None:
        """Keep a pairing if it is the best so far; `climb` first improves it by repeated assignments."""
        worth = _worth(problem, chosen)
        while climb:
            partner_worth = np.bincount(problem.owner, problem.full * chosen[problem.partner], len(problem.worth))
            improved = self._assign(problem, problem.worth + partner_worth).columns[problem.row] == problem.column
            if _worth(problem, improved) <= worth:
                break
            chosen, worth = improved, _worth(problem, improved)
        if worth > self.worth:
            self.worth = worth
            self.best[:] = False
            self.best[problem.name[chosen]] = True


def _worth(problem: _Problem, chosen: NDArray[np.bool_]) -> int:
    both_chosen = chosen[problem.owner] & chosen[problem.partner]
    return round(float(problem.worth[chosen].sum() + problem.full[both_chosen].sum() / 2))


def _disagreement(problem: _Problem, chosen: NDArray[np.bool_], groups: Floats) -> Indices:
    """Return the halves that the bound counts without counting their twins."""
    counted = np.flatnonzero(chosen[problem.owner] & (problem.share > _TINY))
    counted = counted[problem.share[counted] >= groups[problem.group[counted]]]
    counted = counted[np.unique(problem.group[counted], return_index=True)[1]]
    mask = np.zeros(len(problem.owner), dtype=bool)
    mask[counted] = True
    unmatched: Indices = counted[~mask[problem.twin[counted]]]
    return unmatched


def _cases(problem: _Problem, chosen: NDArray[np.bool_], disagreeing: Indices) -> list[_Problem]:
    """Return two cases: with the most doubtful pair, and without it."""
    doubt = np.bincount(problem.owner[disagreeing], minlength=len(problem.row)) + np.bincount(
        problem.partner[disagreeing], minlength=len(problem.row)
    )
    rivals = np.bincount(problem.row)[problem.row]
    pair = int(np.argmax(np.where(chosen, doubt * 100 + rivals, -1)))
    excluded = (problem.row == problem.row[pair]) | (problem.column == problem.column[pair])
    excluded[pair] = False
    remaining = np.ones(len(problem.row), dtype=bool)
    remaining[pair] = False
    return [problem.kept(~excluded), problem.kept(remaining)]
