"""What a sample of the rows becomes once the recipe has made conversations of it."""

from __future__ import annotations

from dataclasses import dataclass

ENOUGH = 20
"""Examples of one prompt, of which a rule says that all the others may have the same (DAT010)."""


@dataclass(frozen=True)
class ExampleFacts:
    """A sample of examples in numbers.

    Attributes:
        examples: in the sample.
        prompts: different prompts among them; of plain text, different texts.
        conversations: those of them that are messages; the others are plain text.
        with_tools: those that hand tools to the chat template.
        measured: those whose length was compared with `max_length`; 0 where the tokenizer is not on this machine.
        max_length: the limit, in tokens.
        too_long: of those measured, the ones that are longer by what the example itself says,
            not what the chat template adds.
        first_too_long: where the first of them is.
        longest: tokens that the longest of them has at least.
        in_fields: those in which an answer has reasoning in a field of its own (`facts.thinking.FIELDS`).
        in_tags: those in which an answer has it in its content, before `</think>`.
        other_tags: of those in which an answer has it in another tag, that tag.
        most_bytes: of text in one of them; a token covers at least one. 0 where it is not known.
    """

    examples: int
    conversations: int
    with_tools: int
    measured: int = 0
    max_length: int | None = None
    too_long: int = 0
    first_too_long: str | None = None
    longest: int = 0
    most_bytes: int = 0
    in_fields: int = 0
    in_tags: int = 0
    other_tags: tuple[str, ...] = ()
    prompts: int = 0
