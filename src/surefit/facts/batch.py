"""What the first batches that reach the loss look like, in numbers that rules can judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surefit.facts.audit import Observation


@dataclass(frozen=True)
class BatchFacts:
    """The micro batches before the first step, and the one with the longest examples, as the loss sees them.

    Attributes:
        micro_batches: that were looked at.
        examples: in them.
        tokens: of these examples.
        supervised_tokens: those of them on which the loss falls.
        longest: tokens of the longest.
        observations: name → what was seen; a name that is missing could not be looked for:
            dead: examples without any token on which the loss falls;
            overwritten: examples whose labels are not those that tokenising gave them;
            misplaced_mask: answers that do not begin right after what asks for them;
            supervised_padding: padding tokens on which the loss falls;
            attention: examples with tokens that attention does not see, or with padding before them that it does see;
            positions: examples whose positions do not count up from 0;
            run_together: examples that share a row with others and are not kept apart from them.
        shown: the first examples and the longest, decoded around the beginning and the end of what is learnt.
    """

    micro_batches: int
    examples: int
    tokens: int
    supervised_tokens: int
    longest: int
    observations: Mapping[str, Observation] = field(default_factory=dict)
    shown: tuple[Mapping[str, Any], ...] = ()

    def seen(self, name: str) -> Observation | None:
        """An observation that at least one example shows, or None."""
        found = self.observations.get(name)
        return found if found and found.rows else None
