"""`data.thinking`: the part of the rows' reasoning that is trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from surefit.data.rows.messages import is_trained_on
from surefit.data.rows.pairs import pair_sides
from surefit.facts.thinking import remove_reasoning, split_think_tags
from surefit.task import Example

if TYPE_CHECKING:
    from surefit.data.rows.layouts import Examples


def apply_reasoning_mode(examples: Examples, mode: str) -> Examples:
    """Return the examples changed as `data.thinking` demands; the same ones for "keep".

    Args:
        mode: "drop" removes the reasoning from every assistant turn, "only_last" trains on the last assistant turn
            alone.
    """
    return (
        examples
        if mode == "keep"
        else replace(examples, examples=[convert_reasoning(example, mode) for example in examples])
    )


def convert_reasoning(example: Example, mode: str) -> Example:
    """Convert one example, like `apply_reasoning_mode`."""
    if mode == "keep":
        return example
    if example.rejected is not None:
        chosen, rejected = (convert_reasoning(side, mode) for side in pair_sides(example))
        return replace(chosen, rejected=rejected.messages)
    return _dropped(example) if mode == "drop" else _only_last(example)


def _dropped(example: Example) -> Example:
    turns = [remove_reasoning(turn) if turn["role"] == "assistant" else turn for turn in example.messages]
    completion = example.completion
    if completion is None:
        return replace(example, messages=tuple(turns))
    answer = split_think_tags(completion)[1]
    reference = answer if example.reference == completion else example.reference
    return replace(example, messages=tuple(turns), completion=answer, reference=reference)


def _only_last(example: Example) -> Example:
    learnt = [place for place, turn in enumerate(example.messages) if is_trained_on(turn)]
    earlier = set(learnt[:-1])
    turns = [{**turn, "weight": 0} if place in earlier else turn for place, turn in enumerate(example.messages)]
    return replace(example, messages=tuple(turns))
