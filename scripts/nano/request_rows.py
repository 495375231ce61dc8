"""Requests written by hand, from requests.txt to rows: real wording, tools of daily life, whole groups held out."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

SOURCE = Path(__file__).with_name("requests.txt")
HELD_OUT = "held out: "
FEW, ALL = (0, 1, 2), (9,)
"""Numbers of tools of its group that a row offers beside those it needs: rows to train on are kept short."""


@dataclass
class Group:
    """Tools that are offered together, and requests to them."""

    name: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)


def sample_sets() -> dict[str, list[dict[str, str]]]:
    """Return the rows by set: the scored requests that a tool fits, and those that none fits, are apart."""
    groups = read(SOURCE.read_text(encoding="utf-8"))
    train = [group for group in groups if not group.name.startswith(HELD_OUT)]
    held = list(_rows([group for group in groups if group.name.startswith(HELD_OUT)], "requests-eval", ALL))
    return {
        "requests-train": list(_rows(train, "requests-train", FEW)),
        "requests-eval": [row for row in held if row["answers"] != "[]"],
        "requests-no-tool": [row for row in held if row["answers"] == "[]"],
    }


def read(text: str) -> list[Group]:
    """The groups of a file in the layout that requests.txt describes."""
    groups: list[Group] = []
    for line in text.splitlines():
        if line.startswith("["):
            groups.append(Group(line.strip("[]")))
        elif line.startswith("tool "):
            _, name, description = line.split(" ", 2)
            groups[-1].tools.append({"name": name, "description": description, "parameters": {}})
        elif line.startswith("  "):
            name, kind, description = line.strip().split(" ", 2)
            kind = f"{kind[:-1]}, optional" if kind.endswith("?") else kind
            groups[-1].tools[-1]["parameters"][name] = {"description": description, "type": kind}
        elif " => " in line and not line.startswith("#"):
            query, _, calls = line.rpartition(" => ")
            groups[-1].requests.append((query, [] if calls == "none" else [_call(part) for part in calls.split("; ")]))
    return groups


def _call(text: str) -> dict[str, Any]:
    call = ast.parse(re.sub(r"=(true|false)\b", lambda found: f"={found[1].title()}", text), mode="eval").body
    assert isinstance(call, ast.Call), text
    assert isinstance(call.func, ast.Name), text
    return {"name": call.func.id, "arguments": {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}}


def _rows(groups: list[Group], name: str, spare: Sequence[int]) -> Iterator[dict[str, str]]:
    """Yield a row per request: the called tools, some that are not, and in every second one a tool of another group.

    Args:
        groups: of one part, training or scoring.
        name: of the set, for the rows' ids.
        spare: how many tools of the group are offered that are not called, each as likely; a request that no tool fits
            is offered one more.
    """
    number = 0
    for place, group in enumerate(groups):
        for query, calls in group.requests:
            rng = Random(f"{name}-{number}")
            called = {call["name"] for call in calls}
            others = [tool for tool in group.tools if tool["name"] not in called]
            count = rng.choice(spare) + (not calls)
            tools = [tool for tool in group.tools if tool["name"] in called] + rng.sample(
                others, min(count, len(others))
            )
            # Not beside a request that no tool of its group fits: another group's might.
            if calls and number % 2:
                other = groups[(place + 1 + rng.randrange(len(groups) - 1)) % len(groups)]
                tools.append(rng.choice(other.tools))
            rng.shuffle(tools)
            yield {
                "id": f"{name}-{number}",
                "query": query,
                "tools": json.dumps(tools, ensure_ascii=False),
                "answers": json.dumps(calls, ensure_ascii=False),
            }
            number += 1
