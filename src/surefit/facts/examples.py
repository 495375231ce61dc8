"""Facts about a sample of the conversations that the recipe makes of the rows."""

from __future__ import annotations

from dataclasses import dataclass

ENOUGH = 20
"""Examples with one prompt, from which on a rule reports that all the others may have the same prompt (DAT010)."""


@dataclass(frozen=True)
class ExampleFacts:
    """Counts and lengths of a sample of examples.

    Attributes:
        examples: number of examples in the sample.
        prompts: different prompts among them; of plain text, different texts.
        conversations: examples that are messages; the others are plain text.
        with_tools: examples that pass tools to the chat template.
        measured: examples whose length was compared with `max_length`; 0 where the tokenizer is not on this machine.
        max_length: the limit, in tokens.
        too_long: measured examples that exceed the limit by their own text, not by the chat template's.
        first_too_long: place of the first of them.
        longest: lower bound of the tokens of the longest of them.
        in_fields: examples in which an answer has reasoning in a field of its own (`facts.thinking.FIELDS`).
        in_tags: examples in which an answer has it in its content, before `</think>`.
        other_tags: other tags in which answers have it.
        most_bytes: largest number of bytes of text in an example; a token covers at least one. 0 where it is not known.
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
