"""Observations of the first batches that reach the loss, in numbers that rules can judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surefit.facts.audit import Observation


@dataclass(frozen=True)
class BatchFacts:
    """The micro batches before the first step, and the one with the longest examples, as the loss receives them.

    Attributes:
        micro_batches: number of micro batches examined.
        examples: number of examples in them.
        tokens: tokens of these examples.
        supervised_tokens: tokens with a label, which the loss counts.
        longest: tokens of the longest example.
        observations: name → its frequency; a name that is missing could not be checked:
            dead: examples without any supervised token;
            overwritten: examples whose labels differ from what tokenization set;
            misplaced_mask: answers whose labels do not begin right after the generation prompt;
            supervised_padding: padding tokens with a label;
            attention: examples with tokens that attention does not see, or with padding before them that it does see;
            positions: examples whose positions do not count up from 0;
            run_together: examples that share a row with others and are not kept apart from them.
        shown: the first examples and the longest, decoded around the beginning and the end of their supervised tokens.
    """

    micro_batches: int
    examples: int
    tokens: int
    supervised_tokens: int
    longest: int
    observations: Mapping[str, Observation] = field(default_factory=dict)
    shown: tuple[Mapping[str, Any], ...] = ()

    def seen(self, name: str) -> Observation | None:
        """Return an observation that at least one example shows, or None."""
        observation = self.observations.get(name)
        return observation if observation and observation.rows else None
