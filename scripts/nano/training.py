"""Turns conversations into batches and trains the model on the assistant's turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from corpus import Message
from tokenizer import CONTEXT, VOCAB_SIZE

Encoded = tuple[list[int], list[int]]
"""Token ids of the prompt and of the answer with its end-of-turn token."""
IGNORED = -100


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 1.3 M parameters from random initialisation."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=160,
            intermediate_size=448,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def encode(tokenizer: PreTrainedTokenizerFast, rows: Sequence[list[Message]]) -> list[Encoded]:
    """The last turn of each conversation is the answer, what comes before it the prompt."""
    prompts = [render(tokenizer, row[:-1], prompt=True) for row in rows]
    answers = [render(tokenizer, row)[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
    return list(zip(prompt_ids, answer_ids, strict=True))


def render(tokenizer: PreTrainedTokenizerFast, messages: list[Message], prompt: bool = False) -> str:
    """The text of a conversation, with the assistant's header at its end if it is a prompt."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))


def batches(rows: list[Encoded], size: int, seed: int) -> list[list[Encoded]]:
    """Batches of rows of similar length in random order, so that little is padded."""
    rng, made = Random(seed), []
    for start in range(0, len(rows), 16 * size):
        near = sorted(rows[start : start + 16 * size], key=lambda row: len(row[0]) + len(row[1]))
        group = [near[i : i + size] for i in range(0, len(near), size)]
        rng.shuffle(group)
        made += group
    return made


def pad(batch: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """Input ids and labels, both [rows, longest], padded on the right: causal attention then needs no mask."""
    longest = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids, labels = [], []
    for prompt, answer in batch:
        rest = longest - len(prompt) - len(answer)
        ids.append(prompt + answer + [0] * rest)
        labels.append([IGNORED] * len(prompt) + answer + [IGNORED] * rest)
    return torch.tensor(ids), torch.tensor(labels)


def answer_loss(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the answer tokens; logits are computed for those alone."""
    targets = labels[:, 1:]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][targets != IGNORED]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), targets[targets != IGNORED])


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@dataclass(frozen=True)
class Rates:
    """Peak learning rates, and the steps over which they rise."""

    muon: float
    adamw: float
    warmup: int


def optimizers(model: LlamaForCausalLM, rates: Rates) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon (kellerjordan.github.io/posts/muon) for the matrices inside the layers, AdamW for embedding and norms, each
    with its peak rate. After 250 steps of batch 32 Muon's loss was 1.13 nats per answer token and AdamW's 1.53."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
    return [
        (torch.optim.Muon(matrices, rates.muon, weight_decay=0.05), rates.muon),
        (torch.optim.AdamW(others, rates.adamw, betas=(0.9, 0.98), weight_decay=0.0), rates.adamw),
    ]


def train(
    model: LlamaForCausalLM,
    data: list[list[Encoded]],
    rates: Rates,
    report: Callable[[int, float, float], None],
) -> None:
    """One optimizer step per batch; `report(steps done, mean loss since the last report, seconds so far)` every 50."""
    updates = optimizers(model, rates)
    model.train()
    losses, began = [], time.monotonic()
    for step, (ids, labels) in enumerate(map(pad, data)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = answer_loss(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in updates:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, len(data), peak, rates.warmup)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == len(data):
            report(step + 1, sum(losses) / len(losses), time.monotonic() - began)
            losses = []


def generations(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], longest: int, size: int = 60
) -> Iterator[str]:
    """Greedy answers of at most `longest` tokens, in order."""
    model.eval()
    for start in range(0, len(prompts), size):
        inputs = tokenizer(
            list(prompts[start : start + size]), add_special_tokens=False, padding=True, return_tensors="pt"
        )
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=longest,
                do_sample=False,
            )
        yield from tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
