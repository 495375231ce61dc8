"""Ranking of a row's labels by the model's probabilities instead of a generated text.

Every prompt is read once. Labels of one token, letters say, need nothing more; for longer ones the prompt's cache is
repeated and only the labels' own tokens are read.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefit.core.errors import DataError, ModelError
from surefit.core.progress import OnProgress, ignore_progress
from surefit.generate.engine import generation_mode, left_padded, memory_errors, padding_id, stop_token_ids

_END = -1
"""The answer's end, appended to a label's tokens where labels begin alike; the last column of `_log_softmax`."""
_TAIL = 4
"""Last tokens of the prompt used to see how a label is tokenized behind it."""

LabelTokens = tuple[int, ...]
"""A label's tokens."""


def rank_labels(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    labels: Sequence[Sequence[str]],
    batch_size: int,
    on_progress: OnProgress = ignore_progress,
) -> list[dict[str, float]]:
    """Return the log-probability of every label as the answer to its prompt, among the row's labels alone.

    A label's probability is the product of its tokens' (tokenized as behind this prompt, like in a training row); if
    one label's tokens begin with another's ("1" and "10"), times the probability of the answer ending there, for all
    labels of the row.

    Args:
        model: a causal language model, including a PEFT model; left unchanged.
        prompts: token ids, chat template applied.
        labels: the labels of each prompt, with the spaces of their text: " A" is not "A".
        batch_size: prompts, or labels of several tokens, that are read at once; the result does not depend on it.
        on_progress: called before the first batch and after each one.

    Returns:
        Per prompt, in their order: label → natural logarithm of its probability, the most probable first, labels of
        equal probability in the given order. The probabilities sum to 1; a row with one label is not read.

    Raises:
        DataError: a row without a prompt or labels, an empty or duplicate label, or more tokens than the model's
            context.
        MachineError: the batch does not fit in memory.
        ModelError: the model's logits are NaN, or it has no token that ends an answer and labels begin alike.
    """
    assert len(prompts) == len(labels), (len(prompts), len(labels))
    started = time.perf_counter()
    on_progress(0, len(prompts), "")
    ranked: dict[int, dict[str, float]] = {}
    with generation_mode(model), torch.no_grad():
        ranker = _Ranker(model, tokenizer)
        paths = [
            ranker.paths(n, prompt, row_labels)
            for n, (prompt, row_labels) in enumerate(zip(prompts, labels, strict=True))
        ]
        ranked |= {n: dict.fromkeys(row_paths, 0.0) for n, row_paths in enumerate(paths) if len(row_paths) == 1}
        order = sorted(set(range(len(prompts))) - ranked.keys(), key=lambda n: -len(prompts[n]))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            with memory_errors(len(batch), len(prompts[batch[0]])):
                scores = ranker.rank([prompts[n] for n in batch], [paths[n] for n in batch], batch_size)
            ranked.update(zip(batch, scores, strict=True))
            on_progress(len(ranked), len(prompts), f"{len(ranked) / (time.perf_counter() - started):,.1f} prompts/s")
    return [ranked[n] for n in range(len(prompts))]


class _Ranker:
    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model: Any = model
        self.tokenizer = tokenizer
        self.stop_ids = stop_token_ids(model, tokenizer)
        self.pad_id = padding_id(model, tokenizer)
        self.context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        inner: Any = getattr(model, "get_base_model", lambda: model)()
        self.known = inspect.signature(inner.forward).parameters
        self.written: dict[tuple[LabelTokens, str], LabelTokens] = {}

    def paths(self, number: int, prompt: Sequence[int], labels: Sequence[str]) -> dict[str, LabelTokens]:
        """Return label → tokens for a row, with `_END` where it is needed."""
        _refuse_unusable(number, prompt, labels)
        paths = {label: self._tokens(tuple(prompt[-_TAIL:]), label) for label in labels}
        if len(set(paths.values())) < len(paths):
            raise DataError(
                f"two labels of row {number} have the same tokens for this model",
                code="E7070",
                help="rename one of them",
            )
        if any(_begins(other, path) for path in paths.values() for other in paths.values() if other is not path):
            if not self.stop_ids:
                raise ModelError(
                    f"one label of row {number} begins another, and the model has no token that ends an answer",
                    code="E7071",
                    help="set eos_token in its tokenizer_config.json, or use labels none of which begins another",
                )
            paths = {label: (*path, _END) for label, path in paths.items()}
        longest = len(prompt) + max(map(len, paths.values())) - 1
        if self.context is not None and longest > self.context:
            raise DataError(
                f"row {number} has {longest:,} tokens with its longest label; the model's context is {self.context:,}",
                code="E7072",
                help="shorten the prompt",
            )
        return paths

    def _tokens(self, tail: LabelTokens, label: str) -> LabelTokens:
        """Return a label's tokens behind the prompt. SentencePiece tokenizers put a space before a text that stands
        alone, so the label is also tokenized together with the prompt's end, whose tokens are then removed, as in
        `data.tokens.tokenize`."""
        if (tail, label) not in self.written:
            before = str(self.tokenizer.decode(list(tail), clean_up_tokenization_spaces=False))
            alone, start, joined = self.tokenizer([label, before, before + label], add_special_tokens=False).input_ids
            label_tokens = joined[len(start) :] if joined[: len(start)] == start else alone
            self.written[tail, label] = tuple(label_tokens or alone)
        return self.written[tail, label]

    def rank(
        self, prompts: Sequence[Sequence[int]], paths: Sequence[Mapping[str, LabelTokens]], batch_size: int
    ) -> list[dict[str, float]]:
        """Rank the labels of one batch."""
        ids, mask = (part.to(self.model.device) for part in left_padded(prompts, self.pad_id))
        sequences = _sequences(paths)
        logits, cache = self._forward(ids, mask, mask.cumsum(1) - 1, None, use_cache=bool(sequences), keep=1)
        steps = _Steps(paths, self.stop_ids)
        steps.read(logits[:, -1], [(row, ()) for row in range(len(prompts))])
        for start in range(0, len(sequences), batch_size):
            self._read_behind(sequences[start : start + batch_size], mask, cache, steps)
        return [
            _normalize_scores({label: steps.total(row, path) for label, path in row_paths.items()})
            for row, row_paths in enumerate(paths)
        ]

    def _read_behind(
        self, sequences: Sequence[tuple[int, LabelTokens]], mask: torch.Tensor, cache: Any, found: _Steps
    ) -> None:
        """Read label tokens behind their prompts' cache, one row per sequence, and record the next tokens'
        probabilities.
        """
        width = max(len(path) for _, path in sequences)
        ids = torch.tensor([[*path, *[self.pad_id] * (width - len(path))] for _, path in sequences], device=mask.device)
        rows = torch.tensor([row for row, _ in sequences], device=mask.device)
        repeated = copy.deepcopy(cache)
        repeated.reorder_cache(rows)
        positions = mask[rows].sum(1, keepdim=True) + torch.arange(width, device=mask.device)
        logits, _ = self._forward(
            ids, torch.cat([mask[rows], torch.ones_like(ids)], dim=1), positions, repeated, True, None
        )
        for place in range(width):  # one at a time: (rows, vocabulary) in float32 is enough memory
            reached = [n for n, (_, path) in enumerate(sequences) if len(path) > place]
            prefixes = [(sequences[n][0], sequences[n][1][: place + 1]) for n in reached]
            found.read(logits[reached, place], prefixes)

    def _forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        use_cache: bool,
        keep: int | None,
    ) -> tuple[torch.Tensor, Any]:
        options: dict[str, Any] = {"position_ids": positions.clamp(min=0), "past_key_values": cache}
        if keep is not None:
            options["logits_to_keep"] = keep
        options = {name: value for name, value in options.items() if name in self.known}
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=use_cache, **options)
        return output.logits, getattr(output, "past_key_values", None)


class _Steps:
    """Log-probabilities of single tokens behind a row's prompt and the beginnings of its labels."""

    def __init__(self, paths: Sequence[Mapping[str, LabelTokens]], stop_ids: list[int]) -> None:
        self.stop_ids = stop_ids
        self.found: dict[tuple[int, LabelTokens], float] = {}
        self.next: dict[tuple[int, LabelTokens], set[int]] = {}
        for row, row_paths in enumerate(paths):
            for path in row_paths.values():
                for place, token in enumerate(path):
                    self.next.setdefault((row, path[:place]), set()).add(token)

    def read(self, logits: torch.Tensor, prefixes: Sequence[tuple[int, LabelTokens]]) -> None:
        """Record the log-probabilities that the labels need from `logits`, (prefixes, vocabulary)."""
        logs = _log_softmax(logits, self.stop_ids)
        needed = [(n, row, prefix, t) for n, (row, prefix) in enumerate(prefixes) for t in self.next[row, prefix]]
        values = logs[[n for n, *_ in needed], [token for *_, token in needed]].tolist()
        for (_, row, prefix, token), value in zip(needed, values, strict=True):
            self.found[row, (*prefix, token)] = value

    def total(self, row: int, path: LabelTokens) -> float:
        """Return the log-probability of a whole label."""
        return math.fsum(self.found[row, path[: n + 1]] for n in range(len(path)))


def _log_softmax(logits: torch.Tensor, stop_ids: list[int]) -> torch.Tensor:
    """Return the log-softmax in float32, with an extra last column for "any token that ends the answer"."""
    logs = torch.log_softmax(logits.float(), dim=-1)
    if torch.isnan(logs).any():
        raise ModelError(
            "the model's logits are NaN",
            code="E7073",
            help="its weights are damaged or its dtype overflows: try model.dtype float32, else train again",
        )
    return torch.cat([logs, torch.logsumexp(logs[:, stop_ids], dim=-1, keepdim=True)], dim=-1) if stop_ids else logs


def _sequences(paths: Sequence[Mapping[str, LabelTokens]]) -> list[tuple[int, LabelTokens]]:
    """Return the token sequences to read behind each row's prompt: the labels without their last token, except
    sequences that others begin with. Similar lengths stand together."""
    sequences = []
    for row, row_paths in enumerate(paths):
        inner = sorted({path[:-1] for path in row_paths.values() if len(path) > 1})
        # In sorted order, paths that begin with a path come directly behind it.
        covered = {path for path, after in pairwise(inner) if _begins(after, path)}
        sequences += [(row, path) for path in inner if path not in covered]
    return sorted(sequences, key=lambda pair: -len(pair[1]))


def _begins(path: LabelTokens, start: LabelTokens) -> bool:
    return path[: len(start)] == start


def _normalize_scores(scores: Mapping[str, float]) -> dict[str, float]:
    top = max(scores.values())
    total = top + math.log(math.fsum(math.exp(score - top) for score in scores.values()))
    return {label: score - total for label, score in sorted(scores.items(), key=lambda pair: -pair[1])}


def _refuse_unusable(number: int, prompt: Sequence[int], labels: Sequence[str]) -> None:
    if not prompt:
        raise DataError(f"prompt {number} has no tokens", code="E7074", help="remove the row, or give it a prompt")
    if not labels or not all(labels):
        raise DataError(
            f"row {number} has {'an empty label' if labels else 'no labels'}", code="E7075", help="name its choices"
        )
    duplicate = next((label for label in labels if list(labels).count(label) > 1), None)
    if duplicate is not None:
        raise DataError(
            f"the label {duplicate!r} of row {number} occurs twice", code="E7076", help="name each choice once"
        )
