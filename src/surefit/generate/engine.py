"""Generation of answers: batched decoding in which every row gets the same answer as alone.

By default greedy decoding and nothing else: no temperature, no repetition penalty and no other processor that the
model's own `generation_config.json` may set, because a score must not depend on them.
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
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from surefit.core.errors import ConfigError, DataError, MachineError
from surefit.core.progress import OnProgress, ignore_progress
from surefit.data.tokens.tokenize import find_turn_ends
from surefit.facts.named_templates import TOOL_USE, to_template_dict
from surefit.facts.thinking import message_as_template_reads, probe_template_reasoning
from surefit.generate.cache import preallocated_cache
from surefit.generate.constrained import GrammarCompiler, GrammarLogitsProcessor
from surefit.generate.processors import RefuseNaN, SamplingProcessor, StopTextCriteria, decode_answer
from surefit.generate.streaming import OnText, TextStream
from surefit.model.memory_errors import is_out_of_memory
from surefit.task import Grammar


@dataclass(frozen=True)
class DecodingConfig:
    """Decoding settings.

    Attributes:
        max_new_tokens: tokens per answer.
        batch_size: prompts per batch.
        num_beams: number of beams in beam search; 1 decodes greedily.
        temperature: sampling temperature; 0 does not sample.
        seed: seed of the sampling.
        stop: texts that end an answer; they and the text after them are cut off.
        prefill_chunk: tokens of the prompt that are read at a time; needs less memory for very long prompts.

    Raises:
        ConfigError: beams and a temperature at once, or an empty stop string.
    """

    max_new_tokens: int
    batch_size: int
    num_beams: int = 1
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.num_beams > 1 and self.temperature > 0:
            raise ConfigError(
                f"{self.num_beams} beams cannot be combined with a temperature of {self.temperature:g}",
                code="E7055",
                field="evaluate.num_beams",
                help="beam search finds the most probable answer, a temperature samples one: remove one of the two",
            )
        if not all(self.stop):
            raise ConfigError(
                "a stop string is empty, which would end every answer at once", code="E7056", help="remove it"
            )


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
        text: decoded, special tokens removed; a thought that they enclose stands in `<think>…</think>`.
        truncated: the token limit, or the end of the model's context, came before the model ended its answer.
        tokens: generated tokens, including the one that ends the answer.
    """

    text: str
    truncated: bool
    tokens: int


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    decoding: DecodingConfig,
    on_progress: OnProgress = ignore_progress,
    grammars: Sequence[Grammar | None] | None = None,
    numbers: Sequence[int] | None = None,
    on_text: OnText | None = None,
) -> list[Generation]:
    """Answer every prompt.

    Batches hold prompts of similar length, the longest first, so that a batch size which does not fit in memory fails
    at once and not after an hour. The model, with its training mode and its generation config, and the tokenizer are
    left unchanged.

    Args:
        model: a causal language model, including a PEFT model.
        prompts: token ids, chat template applied. For several samples repeat a prompt: each gets its own number.
        decoding: the decoding settings.
        on_progress: called before the first batch and after each one.
        grammars: grammar of each prompt's answer, None for any answer; see `generate.constrained`.
        numbers: number of each prompt for sampling; its position by default. A caller that generates in portions passes
            numbers over all of them.
        on_text: receives the answer to a single prompt part by part, while it is generated.

    Returns:
        One `Generation` per prompt, in the order of `prompts`. A grammar does not make an answer end: an answer that
        the token limit cuts is truncated, and is then only the beginning of an allowed answer.

    Raises:
        ConfigError: a grammar that cannot be compiled.
        DataError: a prompt without tokens.
        MachineError: the batch does not fit in memory, or grammars without the package for them.
        ModelError: the model's logits are NaN.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise DataError(f"prompt {number} has no tokens", code="E7057", help="remove the row, or give it a prompt")
    assert grammars is None or len(grammars) == len(prompts)
    assert on_text is None or len(prompts) == decoding.num_beams == 1
    answers: dict[int, Generation] = {}
    started, tokens = time.perf_counter(), 0
    on_progress(0, len(prompts), "")
    with generation_mode(model):
        decoder = _Decoder(model, tokenizer, decoding, grammars, numbers, on_text)
        for batch in _batches([len(prompt) for prompt in prompts], decoding, decoder.context):
            answers.update(zip(batch, decoder.answer(batch, [prompts[i] for i in batch]), strict=True))
            tokens += sum(answers[i].tokens for i in batch)
            speed = tokens / (time.perf_counter() - started)
            on_progress(len(answers), len(prompts), f"{speed:,.0f} tokens/s")
    return [answers[i] for i in range(len(prompts))]


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that end an answer: the generation config's, the tokenizer's end of sequence, and
    the token that the chat template writes after an assistant's turn, or begins the next one with (GLM).

    The last is missing from the generation config of base models that are fine-tuned with a chat template (Qwen2.5 ends
    turns with `<|im_end|>`, its base model only knows `<|endoftext|>`); without it a perfect answer never ends.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured])
    ids |= {tokenizer.eos_token_id}
    for name, template in to_template_dict(tokenizer.chat_template).items():
        ids.add(_end_of_turn_id(tokenizer, template))
        ids |= {_first_added(tokenizer, end) for end in find_turn_ends(tokenizer, name == TOOL_USE).values()}
    return sorted(i for i in ids if i is not None)


def _end_of_turn_id(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    answer = "surefit"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    visible_turns = [message_as_template_reads(turn, probe_template_reasoning(template)) for turn in turns]
    try:
        text = str(tokenizer.apply_chat_template(visible_turns, chat_template=template, tokenize=False))
    except (TemplateError, TypeError, ValueError):  # some templates raise without a system turn
        return None
    if answer not in text:
        return None
    return _first_added(tokenizer, text.rpartition(answer)[2])


def _first_added(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return next((i for i in ids if i in tokenizer.added_tokens_decoder), None)


def padding_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of a padding token; any token works, because it is masked."""
    pad = tokenizer.pad_token_id
    return pad if isinstance(pad, int) else next(iter(stop_token_ids(model, tokenizer)), 0)


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, both (rows, longest prompt), the prompts at the right."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _batches(lengths: Sequence[int], decoding: DecodingConfig, context: int | None) -> Iterator[list[int]]:
    """Yield batches of row numbers, longest prompts first. A row that reaches the end of the context has a smaller
    token limit than the others, so it is answered alone."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    alone = [i for i in order if context is not None and lengths[i] + decoding.max_new_tokens > context]
    yield from ([i] for i in alone)
    batched = order[len(alone) :]
    yield from (batched[start : start + decoding.batch_size] for start in range(0, len(batched), decoding.batch_size))


class _Decoder:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        decoding: DecodingConfig,
        grammars: Sequence[Grammar | None] | None = None,
        numbers: Sequence[int] | None = None,
        on_text: OnText | None = None,
    ) -> None:
        self.model: Any = model
        self.on_text = on_text
        self.tokenizer, self.decoding, self.grammars, self.numbers = tokenizer, decoding, grammars, numbers
        self.stop_ids = stop_token_ids(model, tokenizer)
        self.pad_id = padding_id(model, tokenizer)
        self.context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        constrained = grammars is not None and any(grammar is not None for grammar in grammars)
        self.compiler = GrammarCompiler(model, tokenizer, self.stop_ids) if constrained else None

    def answer(self, numbers: list[int], prompts: list[Sequence[int]]) -> list[Generation]:
        """Answer one batch; `numbers` are the prompts' positions among all prompts."""
        ids, mask = left_padded(prompts, self.pad_id)
        width = ids.shape[1]
        limit = self.decoding.max_new_tokens
        limit = limit if self.context is None else min(limit, self.context - width)
        if limit < 1:
            return [Generation("", truncated=True, tokens=0) for _ in prompts]
        stop = StopTextCriteria(self.tokenizer, self.decoding.stop, width) if self.decoding.stop else None
        stream = self._stream(width)
        with memory_errors(len(prompts), width + limit):
            output = self.model.generate(
                input_ids=ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                generation_config=self._settings(width, limit),
                logits_processor=self._processors(numbers, width),
                stopping_criteria=StoppingCriteriaList([criteria for criteria in (stop, stream) if criteria]),
                **self._cache(width + limit),
            )
        answers = [self._finish(new, stop) for new in output[:, width:].tolist()]
        if stream is not None:
            stream.finish(answers[0].text)
        return answers

    def _stream(self, width: int) -> TextStream | None:
        if self.on_text is None:
            return None
        return TextStream(self.tokenizer, self.on_text, width, self.stop_ids, self.decoding.stop)

    def _cache(self, tokens: int) -> dict[str, DynamicCache]:
        """Return the cache of a batch, as an argument of `generate`; beam search reorders its rows, so it keeps
        transformers' own."""
        cache = preallocated_cache(self.model, tokens) if self.decoding.num_beams == 1 else None
        return {} if cache is None else {"past_key_values": cache}

    def _settings(self, width: int, limit: int) -> GenerationConfig:
        chunk = self.decoding.prefill_chunk
        return GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,  # `SamplingProcessor` samples
            num_beams=self.decoding.num_beams,
            max_new_tokens=limit,
            use_cache=True,  # training may have switched it off in the model's config
            eos_token_id=self.stop_ids or None,
            pad_token_id=self.pad_id,
            prefill_chunk_size=chunk if chunk is not None and chunk < width else None,
        )

    def _processors(self, numbers: Sequence[int], width: int) -> LogitsProcessorList:
        processors: list[Any] = [RefuseNaN()]
        if self.compiler and self.grammars:
            batch_grammars = [self.grammars[number] for number in numbers]
            processors.append(GrammarLogitsProcessor(self.compiler, batch_grammars, width, self.decoding.num_beams))
        if self.decoding.temperature > 0:
            draws = numbers if self.numbers is None else [self.numbers[number] for number in numbers]
            processors.append(SamplingProcessor(self.decoding.temperature, self.decoding.seed, draws))
        return LogitsProcessorList(processors)

    def _finish(self, new: list[int], stop: StopTextCriteria | None = None) -> Generation:
        end = next((place for place, token in enumerate(new) if token in self.stop_ids), None)
        cut = stop.cut(new[:end]) if stop else None
        if cut:
            return Generation(cut[0], truncated=False, tokens=cut[1])
        text = decode_answer(self.tokenizer, new[:end])
        return Generation(text, truncated=end is None, tokens=len(new) if end is None else end + 1)


@contextlib.contextmanager
def generation_mode(model: Any) -> Iterator[None]:
    """Set evaluation mode and a neutral generation config: `generate` fills settings missing in a call from the model's
    own config (a repetition penalty, for example), whatever config the call passes."""
    modes = [(module, module.training) for module in model.modules()]
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    original = inner.generation_config
    neutral = GenerationConfig(eos_token_id=getattr(original, "eos_token_id", None))  # type: ignore[no-untyped-call]
    try:
        model.eval()
        inner.generation_config = neutral
        yield
    finally:
        inner.generation_config = original
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def memory_errors(rows: int, tokens: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MachineError(
            f"out of memory while generating answers to {rows} prompts of up to {tokens:,} tokens at once",
            code="E7058",
            field="evaluate.batch_size",
            help=f"set evaluate.batch_size to {max(1, rows // 2)}"
            if rows > 1
            else "lower evaluate.max_new_tokens, or use a GPU with more memory",
        ) from error
