"""Likelihood of the held-out answers: what a model gives for the row's own answer, read in one forward pass.

Generated answers of more than a few words are never equal to the row's answer, and a small model solves none of its
problems, so exact match cannot show what training did. The log-probability of the row's answer can: it is what training
raises. Only the tokens of the answer count. What the chat template writes around it (role headers, the end of the turn,
the newline behind it) is learned by any training on any rows, as is the thought before an answer, which is given.

The same answer is also read behind another row's prompt. A model that has learned only how answers are written finds it
as likely there; the share of the loss that the row's own prompt removes is what the model knows of the prompt.

In a conversation the last answer is read, behind all turns before it: the answer that is also generated.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from surefit.core.errors import DataError, ModelError
from surefit.core.gc_pause import pause_gc
from surefit.data.tokens.collate import collate
from surefit.data.tokens.tokenize import encode_turns
from surefit.evaluate.answers import CUT, UNREAD
from surefit.evaluate.free_text import LOSS, OTHER_LOSS
from surefit.evaluate.rows import EvalRows
from surefit.facts.free_text import LIKELIHOOD
from surefit.facts.thinking import strip_reasoning
from surefit.generate.engine import generation_mode, memory_errors, padding_id
from surefit.model.output_head import OutputHead, keep_hidden_states, separate_decoder
from surefit.task import Example, Scores

TRIES = 50
"""Rows that are looked at for one with another prompt and another answer."""
FEWEST_LOGITS = 16
"""Positions whose logits exist at a time, at least: 20 MB of a vocabulary of 150,000."""
_INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of a character to


@dataclass(frozen=True)
class AnswerTokens:
    """The token ids that follow a prompt up to the answer's last one, and how many of them come before its first."""

    ids: list[int]
    first: int


def pair_with_other_prompts(rows: EvalRows, seed: int = 0) -> EvalRows:
    """Return the rows with another row's example beside each, whose prompt and answer differ; None where there is none.

    A fixed shuffle decides: a row gets the next one behind it, so that few rows are used twice. With several tasks in
    one run the other row is of the same task.
    """
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    place = {row: position for position, row in enumerate(order)}
    others: list[Example | None] = []
    for row, example in enumerate(rows.examples):
        steps = range(1, min(len(rows), TRIES + 1))
        candidates = (rows.examples[order[(place[row] + step) % len(rows)]] for step in steps)
        others.append(next((other for other in candidates if _differs(example, other)), None))
    return replace(rows, others=tuple(others))


def _differs(example: Example, other: Example) -> bool:
    return example.part == other.part and example.prompt != other.prompt and example.completion != other.completion


def reference_tokens(example: Example, tokenizer: PreTrainedTokenizerBase) -> AnswerTokens | None:
    """Return the tokens of the row's last answer as training has them; None if there is no text in it.

    Args:
        example: a conversation with an answer at its end.

    Raises:
        DataError: the chat template does not write the answer behind its prompt.
    """
    answer = strip_reasoning(example.completion or "").strip()
    if not answer or not example.prompt or example.messages[-1]["role"] != "assistant":
        return None
    last = {key: value for key, value in example.messages[-1].items() if key != "weight"}
    ids, supervised = encode_turns(tokenizer, [replace(example, messages=(*example.prompt, last))])[0][-1]
    end = max((place + 1 for place, learnt in enumerate(supervised) if learnt), default=0)
    start = max((place for place in range(1, end) if not supervised[place - 1]), default=0)
    written = ids[start:end]
    first, behind = _find_answer(written, answer, tokenizer)
    return AnswerTokens(written[:behind], first) if first < behind else None


def _find_answer(ids: Sequence[int], answer: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the range of the tokens that hold a letter of the answer: all that are not special where the tokenizer
    does not give the answer back as it was."""

    special = set(tokenizer.all_special_ids)
    while ids and ids[-1] in special:  # "<|im_end|>" would hold the answer "end"
        ids = ids[:-1]

    def length(count: int) -> int:
        return len(_decode(tokenizer, ids[:count]).rstrip(_INCOMPLETE))

    start = _decode(tokenizer, ids).rfind(answer)
    if start < 0:
        places = [n for n, token in enumerate(ids) if token not in special and _decode(tokenizer, [token]).strip()]
        return (places[0], places[-1] + 1) if places else (0, 0)
    counts = range(len(ids) + 1)
    return bisect_right(counts, start, key=length) - 1, bisect_left(counts, start + len(answer), key=length)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


@dataclass(frozen=True)
class AnswerLikelihoods:
    """The scores of each row (empty where nothing could be read), and what the variant's record says of them.

    Attributes:
        counts: rows of which only a part was read, or nothing.
        read_with: what likelihoods of equal answers depend on besides the model: tokenizer and `max_length`.
    """

    scores: list[Scores]
    counts: dict[str, int]
    read_with: dict[str, Any] = field(default_factory=dict)


def read_answer_likelihoods(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: EvalRows,
    prompts: Sequence[Sequence[int]],
    other_prompts: Sequence[Sequence[int] | None],
    batch_size: int,
    max_length: int | None = None,
) -> AnswerLikelihoods:
    """Return each row's `answer_likelihood` in (0, 1], its loss in nats per token, and its loss behind another prompt.

    Args:
        model: a causal language model, including a PEFT model; left unchanged.
        prompts: token ids of each row's prompt, as they are generated from.
        other_prompts: likewise, of another row; None for a row without one.
        batch_size: rows that are read at once where all are as long as the longest prompt. The result does not depend
            on it.
        max_length: tokens of prompt and answer that are read; the model's context is a limit, too.

    Raises:
        MachineError: a batch does not fit in memory.
        ModelError: the model's logits are NaN.
    """
    limit = min(max_length or 2**62, getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**62)
    answers = [_reference(example, tokenizer) for example in rows.examples]
    sequences: list[ReadSequence] = []
    for row, answer in enumerate(answers):
        for prompt in (prompts[row], other_prompts[row]) if answer is not None else ():
            read = None if prompt is None or answer is None else _sequence(prompt, answer, limit)
            sequences.append(read or ReadSequence([], 0))
    values = iter(read_log_probabilities(model, tokenizer, sequences, batch_size, max(map(len, prompts), default=1)))
    scores: list[Scores] = []
    cut = 0
    for answer in answers:
        own, other = (next(values), next(values)) if answer is not None else ([], [])
        scores.append(_row_scores(own, other))
        cut += answer is not None and 0 < len(own) < len(answer.ids) - answer.first
    return AnswerLikelihoods(scores, {CUT: cut, UNREAD: sum(not row for row in scores)})


@pause_gc()
def _reference(example: Example, tokenizer: PreTrainedTokenizerBase) -> AnswerTokens | None:
    try:
        return reference_tokens(example, tokenizer)
    except DataError:  # training reports such rows; here they are counted
        return None


@dataclass(frozen=True)
class ReadSequence:
    """Token ids to read, the last `targets` of which are the answer's."""

    ids: list[int]
    targets: int


def _sequence(prompt: Sequence[int], answer: AnswerTokens, limit: int) -> ReadSequence | None:
    """Return a prompt with an answer, cut at the limit; None if nothing of the answer is left."""
    ids = [*prompt, *answer.ids][:limit]
    targets = len(ids) - len(prompt) - answer.first
    return ReadSequence(ids, targets) if 0 < targets < len(ids) else None


def _row_scores(own: Sequence[float], other: Sequence[float]) -> Scores:
    if not own:
        return {}
    loss = -math.fsum(own) / len(own)
    scores = {LIKELIHOOD: math.exp(-loss), LOSS: loss}
    if len(other) == len(own):  # else the other prompt is so long that a part of the answer does not fit
        scores[OTHER_LOSS] = -math.fsum(other) / len(other)
    return scores


def read_log_probabilities(
    model: Any, tokenizer: PreTrainedTokenizerBase, sequences: Sequence[ReadSequence], batch_size: int, longest: int
) -> list[list[float]]:
    """Return the log-probability of each target token of each sequence, in nats.

    Batches hold sequences of similar length, the longest first, and at most `batch_size` times `longest` tokens with
    their padding; the logits of `batch_size` positions exist at a time. Generating answers to these prompts needs as
    much, and a KV cache besides, so that the memory planned for it is enough."""
    found: list[list[float]] = [[] for _ in sequences]
    pad = padding_id(model, tokenizer)
    with generation_mode(model), torch.no_grad():
        for batch in _batches([len(sequence.ids) for sequence in sequences], batch_size * longest):
            with memory_errors(len(batch), len(sequences[batch[0]].ids)):
                values = _read_batch(model, [sequences[n] for n in batch], pad, max(batch_size, FEWEST_LOGITS))
            if any(math.isnan(value) for value in values):
                raise ModelError(
                    "the model's logits are NaN",
                    code="E7158",
                    help="its weights are damaged or its dtype overflows: try model.dtype float32, else train again",
                )
            ends = [0]
            for n in batch:
                ends.append(ends[-1] + sequences[n].targets)
            for n, (start, end) in zip(batch, pairwise(ends), strict=True):
                found[n] = values[start:end]
    return found


def _batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield numbers of sequences that are read together; empty sequences are not read."""
    batch: list[int] = []
    for n in sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


def _read_batch(model: Any, sequences: Sequence[ReadSequence], pad_id: int, size: int) -> list[float]:
    """Return the log-probabilities of all targets of a batch, one sequence behind the other; the logits of `size` of
    them exist at a time."""
    labels = [[-100] * (len(s.ids) - s.targets) + s.ids[len(s.ids) - s.targets :] for s in sequences]
    batch = collate([(s.ids, row) for s, row in zip(sequences, labels, strict=True)], pad_id)  # type: ignore[misc]
    device = model.device
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")} | {"use_cache": False}
    decoder = separate_decoder(model)
    if decoder is None:
        # A prompt-learning adapter puts its tokens first, so the positions are counted from the end.
        logits = model(**inputs).logits[:, -batch["input_ids"].shape[1] :].flatten(0, 1)
        rows = batch["loss_rows"].to(logits.device)
        return _gather(logits.index_select(0, rows), batch["targets"])
    with keep_hidden_states(decoder) as kept:
        model(**inputs)
    (output,) = kept
    states = output.last_hidden_state.flatten(0, 1)
    states = states.index_select(0, batch["loss_rows"].to(states.device))
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = OutputHead(causal_lm, decoder, type(output))
    parts = [slice(start, start + size) for start in range(0, len(states), size)]
    return [value for part in parts for value in _gather(head(states[part]), batch["targets"][part])]


def _gather(logits: torch.Tensor, targets: torch.Tensor) -> list[float]:
    logs = torch.log_softmax(logits.float(), dim=-1)
    values: list[float] = logs.gather(1, targets.to(logs.device)[:, None]).squeeze(1).tolist()
    return values
