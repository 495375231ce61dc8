"""The process environment for rules: whether a token is set, never its value."""

from __future__ import annotations

from dataclasses import dataclass

from surefit.config.trackers import TRACKERS
from surefit.core import env


@dataclass(frozen=True)
class EnvironmentFacts:
    """Settings of the environment as plain values, so that a rule's test needs no environment.

    Attributes:
        hub_token: a Hugging Face token is set or was saved by a login.
        offline: the user set Hugging Face's libraries not to use the network.
        trackers: names of trackers that have a key, or a mode set in which they need none.
    """

    hub_token: bool = False
    offline: bool = False
    trackers: tuple[str, ...] = ()


def environment_facts() -> EnvironmentFacts:
    """Return the environment facts of this process."""
    set_up = tuple(name for name, tracker in TRACKERS.items() if tracker.is_set_up)
    return EnvironmentFacts(env.hub_token() is not None, env.offline(), set_up)
