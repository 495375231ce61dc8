"""What a model is asked when a run is scored: how many prompts, and how long they are. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvalPromptSet:
    """The rows of one set, from a sample of them.

    Attributes:
        name: "eval", or as `evaluate.extra_sets` has it.
        prompts: rows that are scored, at most `evaluate.max_examples`; None where they are not counted yet.
        longest: tokens of the longest prompt in the sample; where no tokenizer was asked, its bytes, which are at least
            as many. None where no row was looked at.
        mean: tokens of a prompt, and answer: of a right answer; where no tokenizer was asked, a quarter of the bytes.
            None where no row was looked at, and answer also where no row has one.
        looked_at: rows of the sample, and unanswered: those of them without a gold answer, such as plain text.
    """

    name: str
    prompts: int | None
    longest: int | None = None
    mean: float | None = None
    answer: float | None = None
    looked_at: int = 0
    unanswered: int = 0

    @property
    def has_no_answer(self) -> bool:
        """Whether no row that was looked at has one."""
        return 0 < self.looked_at == self.unanswered


@dataclass(frozen=True)
class EvalPromptFacts:
    """All sets that are scored, the held-out rows first, where there are any.

    Attributes:
        ranked: the recipe ranks labels, and no answer is written.
    """

    sets: tuple[EvalPromptSet, ...]
    ranked: bool = False

    @property
    def held_out(self) -> EvalPromptSet:
        """The set that is scored while training, too."""
        return next((each for each in self.sets if each.name == "eval"), EvalPromptSet("eval", None))

    @property
    def nothing_to_score(self) -> bool:
        """Whether no row that was looked at has an answer to compare with, in any set, or there is no set.

        >>> unanswered = EvalPromptSet("eval", 9, looked_at=9, unanswered=9)
        >>> EvalPromptFacts((unanswered, EvalPromptSet("old", None))).nothing_to_score
        False
        """
        return all(each.has_no_answer for each in self.sets)

    def longest(self, unknown: int) -> int:
        """Tokens of the longest prompt of any set; of one that nobody looked at, `unknown`.

        >>> EvalPromptFacts((EvalPromptSet("eval", 9, 40), EvalPromptSet("old", None))).longest(2048)
        2048
        """
        return max((unknown if each.longest is None else each.longest for each in self.sets), default=unknown)
