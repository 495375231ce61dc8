"""Differences between the supported versions of other libraries, each with the condition under which it can go."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel


def checkpoint_activations(model: PreTrainedModel | PeftModel) -> None:
    """Recompute activations in the backward pass instead of keeping them, with torch's non-reentrant checkpointing.

    transformers 5.23 has the method under a new name and warns about the old one, which 5.17 has alone. Keep the first
    branch only once the lower bound has it.
    """
    subject: Any = model
    options = {"use_reentrant": False}
    if hasattr(subject, "activation_checkpointing_enable"):
        subject.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        subject.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
