"""What the first batches that reach the loss look like, in numbers that rules can judge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchFacts:
    """What the first batches that reach the loss look like, in numbers that rules can judge."""
