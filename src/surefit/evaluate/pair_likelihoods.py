"""Log-probabilities of both answers of held-out pairs, of the same tokens that training compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefit.data.tokens.tokenize import encode_pairs
from surefit.evaluate.likelihood import ReadSequence, read_log_probabilities
from surefit.evaluate.rewards import LOG_PROBS, TOKENS
from surefit.task import Example, Scores


def read_pair_log_probabilities(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    batch_size: int,
    max_length: int | None = None,
) -> list[Scores]:
    """Return the log-probability of each pair's chosen and rejected answer, in nats summed over tokens, and the
    numbers of tokens; nothing for a row that is no pair, or has an answer that training would leave out.

    Args:
        model: a causal language model, including a PEFT model; left unchanged.
        batch_size: answers of the longest pair that are read at once.
        max_length: tokens of a prompt with its answer, at most.
    """
    places = [place for place, example in enumerate(examples) if example.rejected is not None]
    sides: dict[int, list[ReadSequence]] = {}
    for place, pair in zip(places, encode_pairs(tokenizer, [examples[n] for n in places]), strict=True):
        if max_length is None or all(len(ids) <= max_length for ids, _ in pair):
            sides[place] = [_answer(ids, supervised) for ids, supervised in pair]
    sequences = [sequence for pair in sides.values() for sequence in pair]
    longest = max((len(sequence.ids) for sequence in sequences), default=1)
    values = iter(read_log_probabilities(model, tokenizer, sequences, batch_size, longest))
    found: list[Scores] = [{} for _ in examples]
    for place in sides:
        chosen, rejected = next(values), next(values)
        sums = dict(zip(LOG_PROBS, (math.fsum(chosen), math.fsum(rejected)), strict=True))
        found[place] = sums | dict(zip(TOKENS, (len(chosen), len(rejected)), strict=True))
    return found


def _answer(ids: Sequence[int], supervised: Sequence[bool]) -> ReadSequence:
    """Return a conversation up to the last token that is trained on; these tokens stand together at its end."""
    end = max(place + 1 for place, learnt in enumerate(supervised) if learnt)
    return ReadSequence(list(ids[:end]), sum(map(bool, supervised)))
