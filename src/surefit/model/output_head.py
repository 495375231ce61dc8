"""The output head of a causal language model run apart from its decoder: hidden states first, logits when needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel

from surefit.model.compat import stub_forward


@dataclass(frozen=True)
class OutputHead:
    """Everything that a causal language model computes after its decoder: projection, scale, softcap, LoRA on the head.

    Attributes:
        output: type of the decoder's output.
    """

    causal_lm: Any
    decoder: torch.nn.Module
    output: type[Any]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits (n, vocabulary) of hidden states (n, hidden size)."""
        # The decoder is stubbed to return the given states, so that the model's own forward does the rest: transformers
        # has no function for it, and a copy of the head's arithmetic would have to be maintained for every family.
        routed = getattr(self.causal_lm.config.get_text_config(), "output_router_logits", False)
        with stub_forward(self.decoder, self.output(last_hidden_state=hidden[None])):
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            options = {"output_router_logits": False} if routed else {}
            logits: torch.Tensor = self.causal_lm(input_ids=ids, use_cache=False, **options).logits
        return logits.squeeze(0)


def separate_decoder(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the decoder of a causal language model, with or without an adapter; None if it has no output head outside
    of the decoder."""
    causal_lm: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return None
    decoder: torch.nn.Module | None = causal_lm.get_decoder() if hasattr(causal_lm, "get_decoder") else None
    head = causal_lm.get_output_embeddings()
    if decoder is None or decoder is causal_lm or head is None or any(module is head for module in decoder.modules()):
        return None
    return decoder


@contextmanager
def keep_hidden_states(decoder: torch.nn.Module) -> Iterator[list[Any]]:
    """Keep the decoder's output while a model runs, which computes the logits of a single position.

    Yields:
        One item per forward pass: the decoder's output, hidden states (rows, length, size).
    """
    kept: list[Any] = []

    def keep(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        states = output.last_hidden_state
        kept.append(type(output)(last_hidden_state=states))
        routers = {"router_logits": output.router_logits} if getattr(output, "router_logits", None) else {}
        return type(output)(last_hidden_state=states[:1, -1:], **routers)

    hook = decoder.register_forward_hook(keep)
    try:
        yield kept
    finally:
        hook.remove()
