"""What rules may know about the process environment: that a token is there, never what it is."""

from __future__ import annotations

from dataclasses import dataclass

from surefit.config.trackers import TRACKERS
from surefit.core import env


@dataclass(frozen=True)
class EnvironmentFacts:
    """Plain values, so that a rule's test needs no environment.

    Attributes:
        hub_token: a Hugging Face token is set or was saved by a login.
        offline: the user asked Hugging Face's libraries not to use the network.
        trackers: the names of those that have a key, or were told a mode in which they ask for none.
    """

    hub_token: bool = False
    offline: bool = False
    trackers: tuple[str, ...] = ()


def environment_facts() -> EnvironmentFacts:
    """The environment of this process."""
    set_up = tuple(name for name, tracker in TRACKERS.items() if tracker.is_set_up)
    return EnvironmentFacts(env.hub_token() is not None, env.offline(), set_up)
