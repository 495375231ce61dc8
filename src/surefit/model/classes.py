"""The class of transformers that a base model is loaded with."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of the language model alone, where transformers has one (Llama 4, Qwen3.5); else of the whole
    model that also accepts images (Mistral 3, Qwen3-VL), which gets none here. Its names are those in its own
    checkpoints."""
    kind = config.model_type
    text_only = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForCausalLM if text_only else AutoModelForImageTextToText
