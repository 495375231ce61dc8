"""Differences between the supported versions of other libraries, each with the condition under which it can go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from peft import PeftModel
from transformers import PreTrainedModel, masking_utils


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


@contextmanager
def reads_masks_of_fake_tensors() -> Iterator[None]:
    """Let transformers look at the values of a padding mask of fake tensors, as it does at a real one's.

    It takes fake tensors for tracing and then builds a full attention mask for every batch, padded or not
    (`masking_utils.is_tracing`, in 5.17 and 5.23 alike); the plan answers what such a read would give. Can go when
    transformers has a public way to say so.
    """
    with patch.object(masking_utils, "is_tracing", lambda tensor=None: False):
        yield
