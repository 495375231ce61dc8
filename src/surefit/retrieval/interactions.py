"""Conversion of events to the histories of the published protocol.

LlamaRec's protocol (arXiv:2311.02089): every rating counts as an interaction; users and items with fewer than five are
dropped until none is left; a history is sorted by time, and within one time by the item's number; the last item of a
history is the test, the one before it the validation, all earlier ones are for training. Ties in time are common (91 of
the 610 users of ml-latest-small have their last two events in one second), so the numbering of the items decides which
item is a user's target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from surefit.core.errors import DataError

Key = int | str
"""A user or an item in its data set's notation: MovieLens has numbers, Amazon has texts."""
Numbering = Literal["sorted", "published"]
"""Order of the items' numbers: by key, or as in LlamaRec's code, by the iteration order of CPython's set of the
keys."""


@dataclass(frozen=True)
class Events:
    """The events of a data set's files, unchanged.

    Attributes:
        name: name of the data set, for messages.
        users, items, times: one entry per event.
        titles: item → title; empty if the data set has none.
        files: files that were read.
        notes: what is unusual about the data set, for the user.
    """

    name: str
    users: Sequence[Key]
    items: Sequence[Key]
    times: Sequence[int]
    titles: Mapping[Key, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Interactions:
    """Histories with numbered items.

    Attributes:
        users: user of history n, at place n.
        items: item with number n, at place n - 1.
        histories: item numbers (from 1) in the order of time; at least three each.
        titles: title of item number n, at place n; place 0 is empty.
        tied: users whose last two events have one time.
        without_title: events dropped because their item has none.
    """

    users: tuple[Key, ...]
    items: tuple[Key, ...]
    histories: tuple[tuple[int, ...], ...]
    titles: tuple[str, ...]
    tied: int = 0
    without_title: int = 0

    @property
    def events(self) -> int:
        return sum(map(len, self.histories))

    @property
    def trained(self) -> list[tuple[int, ...]]:
        """Training histories: each history without its last two items."""
        return [history[:-2] for history in self.histories]

    def questions(self, split: Literal["valid", "test"]) -> tuple[list[tuple[int, ...]], list[int]]:
        """Return (history, next item) of every user. The test's history includes the validation's answer."""
        end = -2 if split == "valid" else -1
        return [history[:end] for history in self.histories], [history[end] for history in self.histories]

    def counts(self) -> dict[str, float]:
        """Return the numbers by which a data set is recognized."""
        users, items, events = len(self.users), len(self.items), self.events
        return {
            "users": users,
            "items": items,
            "interactions": events,
            "mean_length": round(events / users, 2),
            "density": round(events / (users * items), 4),
            "users_with_tied_last_two": self.tied,
        }


def build_interactions(events: Events, core: int = 5, numbering: Numbering = "sorted") -> Interactions:
    """Convert events to histories, by the protocol above. If there are titles, items without one are dropped first.

    Raises:
        DataError: `core` is below three, or nothing is left.
    """
    if core < 3:
        raise DataError(
            f"a history needs three events (to train, validate and test), not {core}",
            code="E7143",
            field="core",
            help="use 3 or more",
        )
    user_keys, users = _numbered(events.users)
    item_keys, items = _numbered(events.items)
    times = np.asarray(events.times, dtype=np.int64)
    titled = np.array([not events.titles or key in events.titles for key in item_keys], dtype=bool)
    keep = titled[items] if len(items) else np.zeros(0, dtype=bool)
    untitled = int((~keep).sum())
    keep = _core(users, items, keep, core)
    if not keep.any():
        raise DataError(
            f"no user and no item of {events.name} has {core} events: {len(users):,} were read",
            code="E7144",
            help="give the whole data set, or a lower --core",
        )
    users, items, times = users[keep], items[keep], times[keep]
    kept_items = _order([item_keys[n] for n in _distinct(items)], numbering)
    new_numbers = np.zeros(len(item_keys), dtype=np.int64)
    place = {key: n for n, key in enumerate(item_keys)}
    new_numbers[[place[key] for key in kept_items]] = np.arange(1, len(kept_items) + 1)
    histories, tied = _histories(users, new_numbers[items], times)
    return Interactions(
        users=tuple(user_keys[n] for n in np.unique(users)),
        items=tuple(kept_items),
        histories=histories,
        titles=("", *(events.titles.get(key, str(key)) for key in kept_items)),
        tied=tied,
        without_title=untitled,
    )


def _numbered(keys: Sequence[Key]) -> tuple[list[Key], NDArray[np.int64]]:
    """Return the distinct keys in order, and the place of every key among them."""
    distinct: list[Key] = sorted(set(keys))
    place = {key: n for n, key in enumerate(distinct)}
    return distinct, np.fromiter((place[key] for key in keys), dtype=np.int64, count=len(keys))


def _core(users: NDArray[np.int64], items: NDArray[np.int64], keep: NDArray[np.bool_], core: int) -> NDArray[np.bool_]:
    """Drop rare users and items until none is rare: the result does not depend on the order."""
    while True:
        per_user = np.bincount(users[keep], minlength=users.max(initial=-1) + 1)
        per_item = np.bincount(items[keep], minlength=items.max(initial=-1) + 1)
        next_keep = keep & (per_user[users] >= core) & (per_item[items] >= core)
        if next_keep.sum() == keep.sum():
            return next_keep
        keep = next_keep


def _distinct(items: NDArray[np.int64]) -> list[int]:
    """Return the distinct items in the order of their first appearance."""
    return list(dict.fromkeys(items.tolist()))


def _order(keys: list[Key], numbering: Numbering) -> list[Key]:
    return list(set(keys)) if numbering == "published" else sorted(keys)


def _histories(
    users: NDArray[np.int64], numbers: NDArray[np.int64], times: NDArray[np.int64]
) -> tuple[tuple[tuple[int, ...], ...], int]:
    order = np.lexsort((numbers, times, users))
    starts = np.flatnonzero(np.diff(users[order], prepend=-1))
    parts = np.split(numbers[order], starts[1:])
    ends = np.append(starts[1:], len(order)) - 1
    tied = int((times[order][ends] == times[order][ends - 1]).sum())
    return tuple(tuple(part.tolist()) for part in parts), tied
