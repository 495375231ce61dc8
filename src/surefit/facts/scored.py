"""What a model is asked when a run is scored: how many prompts, and how long they are. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScoredSet:
    """The rows of one set, from a sample of them.

    Attributes:
        name: "eval", or as `evaluate.also` has it.
        prompts: rows that are scored, at most `evaluate.max_examples`; None where they are not counted yet.
        longest: tokens of the longest prompt in the sample; where no tokenizer was asked, its bytes, which are at least
            as many. None where no row was looked at.
        mean: tokens of a prompt, and answer: of a right answer; where no tokenizer was asked, a quarter of the bytes.
            None where no row was looked at, and answer also where no row has one.
    """

    name: str
    prompts: int | None
    longest: int | None = None
    mean: float | None = None
    answer: float | None = None


@dataclass(frozen=True)
class ScoredFacts:
    """All sets that are scored, the held-out rows first.

    Attributes:
        ranked: the recipe ranks labels, and no answer is written.
    """

    sets: tuple[ScoredSet, ...]
    ranked: bool = False

    @property
    def held_out(self) -> ScoredSet:
        """The set that is scored while training, too."""
        return self.sets[0] if self.sets else ScoredSet("eval", None)

    def longest(self, unknown: int) -> int:
        """Tokens of the longest prompt of any set; of one that nobody looked at, `unknown`.

        >>> ScoredFacts((ScoredSet("eval", 9, 40), ScoredSet("old", None))).longest(2048)
        2048
        """
        return max((unknown if each.longest is None else each.longest for each in self.sets), default=unknown)
