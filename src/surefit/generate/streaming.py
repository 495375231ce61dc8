"""Text of an answer while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from surefit.generate.processors import decode_answer

OnText = Callable[[str], None]
"""Receives the next part of an answer."""


class TextStream(StoppingCriteria):
    """Passes the text of one answer on, token by token; it never stops the generation.

    Text that may still change is held back: half a character of several bytes, and a beginning of a stop text. The
    caller passes the finished answer to `finish`, which passes on the rest.

    Args:
        width: where the answer begins in `input_ids`.
        stop_ids: tokens that end the answer.
        stop: texts that end the answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_text: OnText,
        width: int,
        stop_ids: Collection[int],
        stop: Sequence[str] = (),
    ) -> None:
        self.tokenizer, self.on_text, self.width = tokenizer, on_text, width
        self.stop_ids, self.stop = frozenset(stop_ids), tuple(stop)
        self.sent = ""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.BoolTensor:
        tokens = input_ids[0, self.width :].tolist()
        if tokens and tokens[-1] not in self.stop_ids:
            self._send(self._stable(decode_answer(self.tokenizer, tokens)))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]

    def finish(self, text: str) -> None:
        """Pass on what the finished answer has beyond the text so far."""
        if text.startswith(self.sent):
            self._send(text)
        else:  # a thought that was recognized late
            self.on_text(f"\n{text}")

    def _stable(self, text: str) -> str:
        """Return the text without an end that the next tokens may change or a stop text may cut."""
        for stop in self.stop:
            text = text.partition(stop)[0]
        held = max((n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        return text[: len(text) - held].rstrip("\N{REPLACEMENT CHARACTER}")

    def _send(self, text: str) -> None:
        if text.startswith(self.sent) and len(text) > len(self.sent):
            self.on_text(text[len(self.sent) :])
            self.sent = text
