"""Who took what, when: events become the histories of the published protocol.

LlamaRec's protocol (arXiv:2311.02089): every rating counts as an interaction; users and items with fewer than five are
dropped until none is left; a history is sorted by time, and within one time by the item's number; the last item of a
history is the test, the one before it the validation, the rest is trained on. Ties in time are common (91 of the 610
users of ml-latest-small have their last two events in one second), so the numbering of the items decides who is asked
for what.
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
"""A user or an item as its data set calls it: MovieLens has numbers, Amazon has texts."""
Numbering = Literal["sorted", "published"]
"""How items are numbered: in the order of their keys, or as LlamaRec's code does, in the order in which CPython's set
of the keys happens to give them."""


@dataclass(frozen=True)
class Events:
    """What the files of a data set say, as they say it.

    Attributes:
        name: of the data set, for messages.
        users, items, times: one entry per event.
        titles: item → title; empty where the data set comes without.
        files: what was read.
        notes: what is odd about the data set, for a person.
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
        users: of history n, the user.
        items: of item number n, at place n - 1, the item.
        histories: item numbers (from 1) in the order of time; at least three each.
        titles: of item number n, at place n; place 0 is empty.
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
        """What is learnt from: each history without its last two."""
        return [history[:-2] for history in self.histories]

    def questions(self, split: Literal["valid", "test"]) -> tuple[list[tuple[int, ...]], list[int]]:
        """(what is known, what comes next) of every user. The test's known part holds the validation's answer."""
        end = -2 if split == "valid" else -1
        return [history[:end] for history in self.histories], [history[end] for history in self.histories]

    def counts(self) -> dict[str, float]:
        """The numbers by which a data set is recognised."""
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
    """Events → histories, after the protocol above. Where there are titles, items without one are dropped first.

    Raises:
        DataError: fewer than three events per user are asked for, or nothing is left.
    """
    if core < 3:
        raise DataError(
            f"a history needs three events (to learn, to select, to test), and {core} are asked for",
            code="E7143",
            field="core",
            help="use 3 or more",
        )
    user_keys, users = _numbered(events.users)
    item_keys, items = _numbered(events.items)
    times = np.asarray(events.times, dtype=np.int64)
    titled = np.array([not events.titles or key in events.titles for key in item_keys], dtype=bool)
    keep = titled[items] if len(items) else np.zeros(0, dtype=bool)
    dropped = int((~keep).sum())
    keep = _core(users, items, keep, core)
    if not keep.any():
        raise DataError(
            f"no user and no item of {events.name} has {core} events: {len(users):,} were read",
            code="E7144",
            help="was only a part of the data set given? a lower --core keeps more",
        )
    users, items, times = users[keep], items[keep], times[keep]
    kept_items = _order([item_keys[n] for n in _distinct(items)], numbering)
    number = np.zeros(len(item_keys), dtype=np.int64)
    place = {key: n for n, key in enumerate(item_keys)}
    number[[place[key] for key in kept_items]] = np.arange(1, len(kept_items) + 1)
    histories, tied = _histories(users, number[items], times)
    return Interactions(
        users=tuple(user_keys[n] for n in np.unique(users)),
        items=tuple(kept_items),
        histories=histories,
        titles=("", *(events.titles.get(key, str(key)) for key in kept_items)),
        tied=tied,
        without_title=dropped,
    )


def _numbered(keys: Sequence[Key]) -> tuple[list[Key], NDArray[np.int64]]:
    """The distinct keys in their order, and the place of every key among them."""
    distinct: list[Key] = sorted(set(keys))
    place = {key: n for n, key in enumerate(distinct)}
    return distinct, np.fromiter((place[key] for key in keys), dtype=np.int64, count=len(keys))


def _core(users: NDArray[np.int64], items: NDArray[np.int64], keep: NDArray[np.bool_], core: int) -> NDArray[np.bool_]:
    """Drop rare users and items until no one is rare: the order in which that is done does not matter."""
    while True:
        per_user = np.bincount(users[keep], minlength=users.max(initial=-1) + 1)
        per_item = np.bincount(items[keep], minlength=items.max(initial=-1) + 1)
        fewer = keep & (per_user[users] >= core) & (per_item[items] >= core)
        if fewer.sum() == keep.sum():
            return fewer
        keep = fewer


def _distinct(items: NDArray[np.int64]) -> list[int]:
    """In the order of their first appearance."""
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
