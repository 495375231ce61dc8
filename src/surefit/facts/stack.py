"""What is installed and how the environment is set: versions and variables, never by importing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StackFacts:
    """What is installed and how the environment is set: versions and variables, never by importing."""
