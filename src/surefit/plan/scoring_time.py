"""The time of scoring: the model's real forward passes, on tensors without data, timed as training's step is.

A batch of answers reads its prompts at once, and then writes a token of each answer in every forward pass, until the
last of them ends. Such a pass reads all weights and the whole KV cache whatever the batch is, so that memory bandwidth
or, in a small model, the kernel launches decide its time. Where reading a batch takes R and a pass W seconds, n batches
take n × (R + W × t), with t tokens in the longest answer: at least the mean length of a right answer, and at most
`evaluate.max_new_tokens`.

Worked example, Llama-3.1-8B in bfloat16 on an H100, 16 prompts of 2,048 tokens with answers of up to 256: a pass reads
14.96 GiB of weights and, when half of an answer is written, 16 × 2,176 × 128 KiB = 4.25 GiB of cache: 19.2 GiB, which
a bandwidth of 3.35 TB/s, of which training reaches 0.82 (`plan/profile.py`), moves in 7.5 ms; 256 passes take 1.9 s a
batch. With more than 357 kernels of 21 µs to launch, a pass waits for them instead. A cache that transformers makes
itself (sliding windows, state spaces) is copied to grow, which is counted.

Source: Pope et al. 2022, Efficiently Scaling Transformer Inference (arXiv 2211.05102), section 2: decoding is bound by
memory. The operations of a pass are not taken from there but counted, operator by operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig
from surefit.evaluate.variants import VARIANTS
from surefit.facts.eval_prompts import EvalPromptFacts, EvalPromptSet
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import ModelFacts
from surefit.generate.cache import preallocated_cache
from surefit.plan.building import build_model
from surefit.plan.operations import Operations, OperatorCounter, extrapolate_operations
from surefit.plan.profile import DeviceRates
from surefit.plan.simulate import DEEP, record_run
from surefit.plan.step_config import StepConfig, build_step_config
from surefit.plan.time import DISK_BYTES_PER_SECOND, SHALLOW, START_SECONDS, roofline
from surefit.plan.trace import Recorder

READ, WRITE = "reading the prompts", "generating a token"
LIKELIHOOD_PASSES = 2
"""Forward passes over prompt and answer in which `evaluate.likelihood` reads a row's own answer."""
ROUNDING = 16
"""Tokens to which lengths are rounded up, so that sets of about the same length are simulated once."""


@dataclass(frozen=True)
class ValueRange:
    """Seconds if every answer has the length of a right one, and if every answer has the maximum length."""

    low: float
    high: float

    def __add__(self, other: ValueRange) -> ValueRange:
        return ValueRange(self.low + other.low, self.high + other.high)

    def __mul__(self, times: float) -> ValueRange:
        return ValueRange(self.low * times, self.high * times)


@dataclass(frozen=True)
class ScoringTime:
    """Time of scoring the models one after the other, in one process.

    Attributes:
        variants: the models that are scored; ways: number of decodings: free, with a grammar, or both.
        answers: number of answers that are written, or of prompts with ranked labels.
        tokens: least and most tokens per answer.
        loading: seconds of starting, and of reading each model's files.
        answering: seconds of all answers.
        in_training: seconds of one checkpoint's answers; None where checkpoints are not scored.
        source: the origin of the device's rates.
    """

    variants: tuple[str, ...]
    ways: int
    answers: int
    tokens: ValueRange
    loading: float
    answering: ValueRange
    in_training: ValueRange | None
    source: str


def estimate_scoring_time(
    resolved: ResolvedConfig,
    model: ModelFacts,
    hardware: HardwareFacts,
    scored: EvalPromptFacts,
    usual: int,
    rates: DeviceRates,
) -> ScoringTime | None:
    """Return the time of `surefit evaluate`; None where not all prompts are counted, and where a server answers.

    Each end of a range is moved outwards by the error margin of the rates. Grammars, judging and programs that are run
    in the sandbox are not counted.

    Args:
        resolved: the config without "auto".
        usual: tokens of a prompt where they are not known.
    """
    config = resolved.config
    if config.evaluate.server is not None or any(prompts.prompts is None for prompts in scored.sets):
        return None
    variants = VARIANTS[config.train.method]
    ways = 2 if config.evaluate.constrained == "both" else 1
    samples = config.evaluate.samples
    base = replace(
        build_step_config(resolved, model, hardware, length=usual), sharing=None, packed=False, attention=None
    )

    def answers(each: EvalPromptSet, variant: str) -> ValueRange:
        adapted = variant == "adapter"
        return _seconds_of_set(config, model, base, each, scored, usual, rates, adapted=adapted)

    total = (
        sum((answers(prompt_set, variant) for prompt_set in scored.sets for variant in variants), ValueRange(0, 0))
        * ways
    )
    checkpoint = answers(scored.held_out, "adapter" if "adapter" in variants else "model")
    loads = 2  # the base, which answers with the adapter too; and the merged or fully trained model
    prompt_count = sum(prompt_set.prompts or 0 for prompt_set in scored.sets)
    answer_lengths = [_tokens(config, model, prompt_set, scored.ranked, usual) for prompt_set in scored.sets]
    return ScoringTime(
        variants,
        ways,
        prompt_count * samples * len(variants) * ways,
        ValueRange(
            min(answer_length.low for answer_length in answer_lengths),
            max(answer_length.high for answer_length in answer_lengths),
        ),
        START_SECONDS + loads * (model.weight_bytes or 0) / DISK_BYTES_PER_SECOND,
        total,
        checkpoint if config.evaluate.in_training else None,
        rates.source,
    )


def _seconds_of_set(
    config: SureFitConfig,
    model: ModelFacts,
    base: StepConfig,
    each: EvalPromptSet,
    scored: EvalPromptFacts,
    usual: int,
    rates: DeviceRates,
    *,
    adapted: bool,
) -> ValueRange:
    """Return the seconds of a set's answers by one model in one way of decoding; with the passes that read each row's
    own answer behind its prompt, and behind another one, where likelihoods are measured."""
    ranked = scored.ranked
    section = config.evaluate
    assert isinstance(section.batch_size, int)
    prompt, tokens = _prompt(model, each, usual), _tokens(config, model, each, ranked, usual)
    answers = (each.prompts or 0) * section.samples
    if not answers:
        return ValueRange(0, 0)
    # The real number of batches, all taken to be of one size: the last is smaller, and time is linear in the rows.
    batches = -(-answers // section.batch_size)
    rows = -(-answers // batches) * section.num_beams
    # Reading the prompt gives the first token. A pass is timed when half of the longest answer is written.
    low, high = (0.0, 0.0) if ranked else (max(0.0, tokens.low - 1), tokens.high - 1)
    reading, writing = _passes(base, rows, prompt, prompt + math.ceil(high / 2), adapted)
    read, write = roofline(reading, rates)[0], roofline(writing, rates)[0]
    # The answers are read with the prompts, which takes as much longer as there are more tokens.
    share = (1 + (each.answer or 1) / prompt) / (section.num_beams * section.samples)
    likelihoods = LIKELIHOOD_PASSES * read * share if scored.likelihood else 0.0
    low_seconds, high_seconds = (read + likelihoods + passes * write for passes in (low, high))
    return ValueRange(low_seconds * (1 - rates.margin), high_seconds * (1 + rates.margin)) * batches


def _prompt(model: ModelFacts, each: EvalPromptSet, usual: int) -> int:
    """Return the mean tokens of a prompt, rounded up."""
    tokens = math.ceil(each.mean if each.mean is not None else min(usual, each.longest or usual))
    rounded = -(-max(1, tokens) // ROUNDING) * ROUNDING
    return min(rounded, model.max_position_embeddings or rounded)


def _tokens(config: SureFitConfig, model: ModelFacts, each: EvalPromptSet, ranked: bool, usual: int) -> ValueRange:
    """Return the least and most tokens of an answer: a right one's length, and the maximum; a ranked label is one
    token."""
    if ranked:
        return ValueRange(1, 1)
    max_tokens = config.evaluate.max_new_tokens
    if model.max_position_embeddings:
        max_tokens = max(1, min(max_tokens, model.max_position_embeddings - _prompt(model, each, usual)))
    return ValueRange(min(max_tokens, each.answer or 1), max_tokens)


def _passes(base: StepConfig, rows: int, prompt: int, middle: int, adapted: bool) -> tuple[Operations, Operations]:
    """Return the operators of reading prompts of `prompt` tokens, and of writing a token after `middle` others."""
    adapter = base.adapter if adapted else None
    setting = replace(base, adapter=adapter, rows=rows, length=prompt, padded=rows > 1)
    text = f"{setting.config.to_json_string()} {replace(setting, config=None)!r} {middle}"  # type: ignore[arg-type]
    return _count_operations_cached(_CacheKey(text, setting, middle))


class _CacheKey:
    """A setting identified by its text: a PretrainedConfig has no hash."""

    def __init__(self, text: str, setting: StepConfig, middle: int) -> None:
        self.text, self.setting, self.middle = text, setting, middle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CacheKey) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@lru_cache(maxsize=64)
def _count_operations_cached(known: _CacheKey) -> tuple[Operations, Operations]:
    setting, middle = known.setting, known.middle
    layers = setting.layers
    if layers <= DEEP or not setting.uniform:
        return _count_operations(setting, middle)
    few, more = (_count_operations(setting.with_layers(depth), middle) for depth in SHALLOW)
    return tuple(extrapolate_operations(a, b, layers - SHALLOW[1]) for a, b in zip(few, more, strict=True))  # type: ignore[return-value]


def _count_operations(setting: StepConfig, middle: int) -> tuple[Operations, Operations]:
    """Return the operators of a model that is run whole."""
    reading, writing = OperatorCounter({READ}), OperatorCounter({WRITE})

    def watch(phase: str, *call: Any) -> Any:
        return (writing if phase == WRITE else reading).note(phase, *call)

    def run(model: torch.nn.Module, recorder: Recorder) -> None:
        recorder.watch = watch
        model.eval()
        with torch.no_grad():
            recorder.start(READ)
            _forward(model, setting.rows, setting.length, setting.length)
            recorder.start("the answer so far")
            room = preallocated_cache(model, middle + 1)
            cache = _forward(model, setting.rows, middle, middle, room)
            recorder.start(WRITE)
            _forward(model, setting.rows, 1, middle + 1, cache)

    record_run(
        build_model(setting, "meta"), run, padded=setting.padded, cuda=setting.cuda, capability=setting.capability
    )
    return reading.operations, writing.operations


def _forward(model: Any, rows: int, tokens: int, seen: int, cache: Any = None) -> Any:
    """Run a pass over `tokens` tokens of each row, as `generate` does, with the choice of the next one, and return the
    cache."""
    ids = torch.ones((rows, tokens), dtype=torch.long)
    mask = torch.ones((rows, seen), dtype=torch.long)
    position_ids = torch.arange(seen - tokens, seen)[None].expand(rows, -1)
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position_ids,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    torch.cat([ids, out.logits[:, -1].float().argmax(-1, keepdim=True)], dim=-1)
    return out.past_key_values
