"""Prompts in, answers out: batched greedy decoding that gives every row what it would get alone.

Greedy means the most probable token at each step and nothing else: no temperature, no repetition penalty and no other
processor that the model's own `generation_config.json` may ask for, because a score must not depend on them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from surefit.core.errors import DataError, MachineError, ModelError
from surefit.core.progress import OnProgress, silent


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
        text: decoded, special tokens removed.
        truncated: the token limit, or the end of the model's context, came before the model ended its answer.
        tokens: generated tokens, the one that ends the answer included.
    """

    text: str
    truncated: bool
    tokens: int


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    on_progress: OnProgress = silent,
) -> list[Generation]:
    """Answer every prompt greedily.

    Batches hold prompts of similar length, the longest first, so that a batch size which does not fit in memory fails
    at once and not after an hour. The model, with its training mode and its generation config, and the tokenizer are
    left as they were.

    Args:
        model: a causal language model, a PEFT model included.
        prompts: token ids, chat template applied.
        max_new_tokens: tokens per answer.
        batch_size: prompts per batch.
        on_progress: called before the first batch and after each one.

    Returns:
        One `Generation` per prompt, in the order of `prompts`.

    Raises:
        DataError: a prompt without tokens.
        MachineError: the batch does not fit in memory.
        ModelError: the model's logits are NaN.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise DataError(f"prompt {number} has no tokens", help="remove the row, or give it a prompt")
    answers: dict[int, Generation] = {}
    started, tokens = time.perf_counter(), 0
    on_progress(0, len(prompts), "")
    with _ready(model):
        decoder = _Decoder(model, tokenizer)
        for batch in _batches([len(prompt) for prompt in prompts], batch_size, decoder.context, max_new_tokens):
            answers.update(zip(batch, decoder.answer([prompts[i] for i in batch], max_new_tokens), strict=True))
            tokens += sum(answers[i].tokens for i in batch)
            speed = tokens / (time.perf_counter() - started)
            on_progress(len(answers), len(prompts), f"{speed:,.0f} tokens/s")
    return [answers[i] for i in range(len(prompts))]


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer: those of the model's generation config, the tokenizer's end of sequence, and the
    token that the chat template writes after an assistant's turn.

    The last is missing from the generation config of base models that are fine-tuned with a chat template (Qwen2.5
    ends turns with `<|im_end|>`, its base model only knows `<|endoftext|>`); without it a perfect answer never ends.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured])
    ids |= {tokenizer.eos_token_id, _end_of_turn_id(tokenizer)}
    return sorted(i for i in ids if i is not None)


def _end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    if not tokenizer.chat_template:
        return None
    answer = "surefit"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, TypeError, ValueError):  # some refuse a conversation without a system turn
        return None
    tail = tokenizer(str(text).rpartition(answer)[2], add_special_tokens=False).input_ids
    return next((i for i in tail if i in tokenizer.added_tokens_decoder), None)


def _batches(lengths: Sequence[int], batch_size: int, context: int | None, max_new_tokens: int) -> Iterator[list[int]]:
    """Row numbers, longest prompts first. A row that reaches the end of the context has a smaller token limit than the
    others, so it is answered alone."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    alone = [i for i in order if context is not None and lengths[i] + max_new_tokens > context]
    yield from ([i] for i in alone)
    rest = order[len(alone) :]
    yield from (rest[start : start + batch_size] for start in range(0, len(rest), batch_size))


class _Decoder:
    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model: Any = model
        self.tokenizer = tokenizer
        self.stop_ids = stop_token_ids(model, tokenizer)
        pad = tokenizer.pad_token_id
        self.pad_id = pad if pad is not None else next(iter(self.stop_ids), 0)
        self.context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def answer(self, prompts: list[Sequence[int]], max_new_tokens: int) -> list[Generation]:
        width = max(len(prompt) for prompt in prompts)
        limit = max_new_tokens if self.context is None else min(max_new_tokens, self.context - width)
        if limit < 1:
            return [Generation("", truncated=True, tokens=0) for _ in prompts]
        ids = torch.full((len(prompts), width), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with _memory_errors(len(prompts), width + limit):
            output = self.model.generate(
                input_ids=ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                generation_config=self._greedy(limit),
                logits_processor=LogitsProcessorList([_RefuseNaN()]),
            )
        return [self._finish(new) for new in output[:, width:].tolist()]

    def _greedy(self, limit: int) -> GenerationConfig:
        return GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            num_beams=1,
            max_new_tokens=limit,
            use_cache=True,  # training may have switched it off in the model's config
            eos_token_id=self.stop_ids or None,
            pad_token_id=self.pad_id,
        )

    def _finish(self, new: list[int]) -> Generation:
        end = next((place for place, token in enumerate(new) if token in self.stop_ids), None)
        # Llama 3's tokenizer config asks for "clean up", which would remove spaces that the model wrote.
        text = self.tokenizer.decode(new[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Generation(str(text), truncated=end is None, tokens=len(new) if end is None else end + 1)


class _RefuseNaN(LogitsProcessor):
    """The most probable of NaNs is a token like any other: without this a broken model answers nonsense silently."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if torch.isnan(scores).any():
            raise ModelError(
                "the model's logits are NaN",
                help="its weights are damaged or its dtype overflows: try model.dtype float32, else train again",
            )
        return scores


@contextlib.contextmanager
def _ready(model: Any) -> Iterator[None]:
    """Evaluation mode, and a neutral generation config: `generate` fills what a call leaves open from the model's own
    (a repetition penalty, for example), whatever config the call passes."""
    modes = [(module, module.training) for module in model.modules()]
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = inner.generation_config
    neutral = GenerationConfig(eos_token_id=getattr(own, "eos_token_id", None))  # type: ignore[no-untyped-call]
    try:
        model.eval()
        inner.generation_config = neutral
        yield
    finally:
        inner.generation_config = own
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def _memory_errors(rows: int, tokens: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MachineError(
            f"out of GPU memory while answering {rows} prompts of up to {tokens:,} tokens at once",
            field="evaluate.batch_size",
            help=f"set evaluate.batch_size to {max(1, rows // 2)}"
            if rows > 1
            else "lower evaluate.max_new_tokens, or use a GPU with more memory",
        ) from error
