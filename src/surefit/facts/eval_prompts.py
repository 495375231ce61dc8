"""Prompts of an evaluation: how many there are, and how long they are. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvalPromptSet:
    """The prompts of one evaluation set, from a sample of its rows.

    Attributes:
        name: "eval", or its name in `evaluate.extra_sets`.
        prompts: rows that are scored, at most `evaluate.max_examples`; None where they are not counted yet.
        longest: tokens of the longest prompt in the sample; without a tokenizer its bytes, which are an upper bound.
            None where no row was sampled.
        mean: mean tokens of a prompt; answer: mean tokens of a gold answer; without a tokenizer, a quarter of the
            bytes. None where no row was sampled, and answer also where no row has one.
        answer_words: median words of a gold answer; None where no row was sampled or has one.
        looked_at: rows of the sample; unanswered: rows among them without a gold answer, such as plain text.
    """

    name: str
    prompts: int | None
    longest: int | None = None
    mean: float | None = None
    answer: float | None = None
    looked_at: int = 0
    unanswered: int = 0
    answer_words: float | None = None

    @property
    def has_no_answer(self) -> bool:
        """Return whether no sampled row has a gold answer."""
        return 0 < self.looked_at == self.unanswered


@dataclass(frozen=True)
class EvalPromptFacts:
    """All evaluation sets, the held-out rows first, where there are any.

    Attributes:
        ranked: the recipe ranks labels, and no answer is generated.
        likelihood: the likelihood of the rows' own answers is read as well, in two forward passes.
        free_text: it decides where the answers are long.
    """

    sets: tuple[EvalPromptSet, ...]
    ranked: bool = False
    likelihood: bool = False
    free_text: bool = False

    @property
    def held_out(self) -> EvalPromptSet:
        """Evaluation set that is also scored during training."""
        return next((prompt_set for prompt_set in self.sets if prompt_set.name == "eval"), EvalPromptSet("eval", None))

    @property
    def nothing_to_score(self) -> bool:
        """Return whether no sampled row of any set has an answer to compare with, or there is no set.

        >>> unanswered = EvalPromptSet("eval", 9, looked_at=9, unanswered=9)
        >>> EvalPromptFacts((unanswered, EvalPromptSet("old", None))).nothing_to_score
        False
        """
        return all(prompt_set.has_no_answer for prompt_set in self.sets)

    def longest(self, unknown: int) -> int:
        """Return the tokens of the longest prompt of any set; for a set without a sample, `unknown`.

        >>> EvalPromptFacts((EvalPromptSet("eval", 9, 40), EvalPromptSet("old", None))).longest(2048)
        2048
        """
        return max(
            (unknown if prompt_set.longest is None else prompt_set.longest for prompt_set in self.sets), default=unknown
        )
