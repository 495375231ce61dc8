"""Logits processors for generation, and stop criteria beside the stop tokens."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria

from surefit.core.errors import ModelError
from surefit.facts.thinking import CLOSING, OPENING, begins_with_thought, split_reasoning


class RefuseNaN(LogitsProcessor):
    """Raises on NaN logits: greedy decoding would pick a token anyway, and a broken model silently answer nonsense."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if torch.isnan(scores).any():
            raise ModelError(
                "the model's logits are NaN",
                code="E7059",
                help="its weights are damaged or its dtype overflows: try model.dtype float32, else train again",
            )
        return scores


class SamplingProcessor(LogitsProcessor):
    """Samples each row's token at a temperature and masks all others, so that greedy decoding picks it.

    Every prompt has its own random numbers, one per step, and its token is where that number falls among the cumulative
    probabilities. So a sample depends on the seed and the prompt's number, not on the batch or the device.

    Args:
        numbers: the number of each row's prompt.
    """

    def __init__(self, temperature: float, seed: int, numbers: Sequence[int]) -> None:
        self.temperature = temperature
        self.sources = [_source(seed, number) for number in numbers]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # In double precision: the sum of 150,000 rounded probabilities would otherwise bend the rare ones.
        cumulative = torch.softmax(scores.double() / self.temperature, dim=-1).cumsum(dim=-1)
        points = torch.tensor([[source.random()] for source in self.sources], dtype=torch.float64).to(scores.device)
        drawn = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True).clamp_(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)  # type: ignore[return-value]


def _source(seed: int, number: int) -> random.Random:
    """Return a generator with a hashed seed, because generators with neighboring seeds may begin alike."""
    return random.Random(hashlib.sha256(f"{seed}/{number}".encode()).digest())


class StopTextCriteria(StoppingCriteria):
    """Ends a row once its answer contains one of the stop texts, however tokens divide it.

    Args:
        stop: the texts, none of them empty.
        width: where answers begin in `input_ids`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], width: int) -> None:
        self.tokenizer, self.stop, self.width = tokenizer, tuple(stop), width
        # Enough tokens for the longest stop text that the last token can complete: each has at least one of its bytes.
        # Decoders may treat a text's very first tokens differently, hence four more.
        self.tail = max(len(text.encode()) for text in stop) + 4

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.BoolTensor:
        start = max(self.width, input_ids.shape[1] - self.tail)
        ended = [self.find(decode(self.tokenizer, row)) is not None for row in input_ids[:, start:].tolist()]
        return torch.tensor(ended, device=input_ids.device)  # type: ignore[return-value]

    def find(self, text: str) -> int | None:
        """Return where the first stop text begins; None without one."""
        places = [place for place in map(text.find, self.stop) if place >= 0]
        return min(places, default=None)

    def cut(self, tokens: Sequence[int]) -> tuple[str, int] | None:
        """Return the answer before the stop text, and the number of tokens needed to complete the stop text; None
        without a stop text."""
        text = decode(self.tokenizer, tokens)
        place = self.find(text)
        if place is None:
            return None
        needed = bisect_left(
            range(len(tokens)), True, key=lambda n: self.find(decode(self.tokenizer, tokens[:n])) is not None
        )
        return text[:place], needed


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Decode without special tokens, spaces as the model wrote them: Llama 3's tokenizer config sets "clean up", which
    would remove some."""
    return _text(tokenizer, tokens, False)


def decode_answer(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Decode a whole answer like `decode`; a thought that special tokens separate from it stands in `<think>…</think>`.

    Without these tags gpt-oss's channels would read "analysis…assistantfinal…", and Gemma's thought as the answer's
    start.
    """
    text, with_special = decode(tokenizer, tokens), _text(tokenizer, tokens, True)
    marked, plain = split_reasoning(with_special), split_reasoning(text)
    if marked is None:
        return f"{OPENING}{text}" if begins_with_thought(with_special) and not begins_with_thought(text) else text
    if plain and plain[0] == marked[0] and CLOSING in text:
        return text
    start = bisect_left(
        range(len(tokens)), True, key=lambda n: split_reasoning(_text(tokenizer, tokens[:n], True)) is not None
    )
    thought, answer = marked[0], decode(tokenizer, tokens[start:])
    return f"{OPENING}{thought}{CLOSING}{answer}" if thought.strip() else answer


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], special: bool) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False))
