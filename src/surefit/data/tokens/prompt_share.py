"""Which prompts two answers share: those that are a large enough part of their pair."""

LEAST_SHARE = 0.1
"""Share of a pair's tokens that a prompt has to save. Measured on a CPU (docs/adr/0018): at a tenth a step is about a
tenth faster; the keys that are laid out again cost a few percent of it."""


def worth_sharing(prompt: int, tokens: int) -> int:
    """Return the tokens of a prompt that are left out of a row: all of them, or none where that is not worth it.

    Args:
        prompt: tokens of the prompt.
        tokens: tokens of both answers, each with the prompt.

    >>> worth_sharing(64, 228), worth_sharing(10, 228)
    (64, 0)
    """
    return prompt if prompt >= LEAST_SHARE * tokens else 0
