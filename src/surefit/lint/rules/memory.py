"""MEM: what arithmetic alone shows not to fit. What might not fit is the plan's business, not a finding."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.resolve import Resolved
from surefit.core.units import bytes_text
from surefit.facts.budget import Term, at_least, memory_terms
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import ModelFacts
from surefit.lint.rule import Finding, LintContext, rule


@rule("MEM001", "does-not-fit", severity="error", needs=(Resolved, ModelFacts, HardwareFacts))
def does_not_fit(
    context: LintContext, resolved: Resolved, model: ModelFacts, hardware: HardwareFacts
) -> Iterator[Finding]:
    """Weights, gradients and optimizer alone are larger than the memory.

    ## What it does
    Adds up what every optimizer step holds whatever the data is: the weights, the LoRA factors, the gradients, AdamW's
    two float32 moments and its float32 masters. Activations are not counted, so staying below proves nothing.

    ## Why it is bad
    The run cannot start, and after minutes of downloading and loading it says so.

    ## Example
    Full training of Llama-3.1-8B in bfloat16 takes 8.03e9 × (2 + 2 + 8 + 4 + 4) bytes = 149.6 GiB, on a GPU with 79.

    ## Fix
    Train with LoRA, take a smaller model, or a larger GPU.

    ## Evidence
    All of five published reports on fine-tuning ran out of memory without having expected it.
    """
    full = resolved.config.adapter.kind == "full"
    yield from _too_large(
        [term for term in memory_terms(resolved, model) if term.moment != "loss"],
        hardware,
        "adapter.kind" if full else "model.name_or_path",
        "train with adapter.kind: lora" if full else "take a smaller model or a larger GPU",
    )


@rule("MEM002", "logits-do-not-fit", severity="warning", needs=(Resolved, ModelFacts, HardwareFacts))
def logits_do_not_fit(
    context: LintContext, resolved: Resolved, model: ModelFacts, hardware: HardwareFacts
) -> Iterator[Finding]:
    """With the logits of full-length rows, the memory does not suffice.

    ## What it does
    Adds to MEM001's terms what the loss holds for one micro batch of `max_length` tokens: 12 bytes per token and
    vocabulary entry.

    ## Why it is bad
    The run starts, and dies at the first batch with a long enough row, which may come after hours.

    ## Example
    One row of 262,144 tokens and a vocabulary of 151,936: 445 GiB for the loss alone.

    ## Fix
    Lower `max_length` to what the rows need, or `per_device_train_batch_size`.

    ## Evidence
    A published plan for training Qwen3-4B on 262,144 tokens counted 59 GB per GPU and left the logits out, which are
    80 GB in bfloat16.
    """
    terms = memory_terms(resolved, model)
    without = [term for term in terms if term.moment != "loss"]
    if hardware.memory_bytes is not None and at_least(without) <= hardware.memory_bytes:
        micro = resolved.config.train.per_device_train_batch_size
        yield from _too_large(
            terms,
            hardware,
            "data.max_length",
            f"lower data.max_length from {resolved.config.data.max_length:,} to what the rows need"
            + (f", or per_device_train_batch_size from {micro}" if micro != 1 else ""),
        )


def _too_large(terms: list[Term], hardware: HardwareFacts, field: str, help_text: str) -> Iterator[Finding]:
    needed = at_least(terms)
    if hardware.memory_bytes is not None and needed > hardware.memory_bytes:
        largest = max(terms, key=lambda term: term.bytes)
        yield Finding(
            field=field,
            message=f"at least {bytes_text(needed)} are needed, and {hardware.name} has "
            f"{bytes_text(hardware.memory_bytes)}; the largest part is the {largest.term}, "
            f"{bytes_text(largest.bytes)} ({largest.why})",
            help=help_text,
            evidence="; ".join(f"{term.term} {bytes_text(term.bytes)}" for term in terms),
        )
