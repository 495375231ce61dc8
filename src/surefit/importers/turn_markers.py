"""Texts that begin an answer in the chat templates that Unsloth names, and in the templates of well-known models."""

from __future__ import annotations

import re

LLAMA_3, CHATML, GEMMA = "<|start_header_id|>assistant", "<|im_start|>assistant", "<start_of_turn>model"
PHI, MISTRAL, HARMONY = "<|assistant|>", "[/INST]", "<|start|>assistant"
ALPACA, VICUNA, UNSLOTH, STARLING = "### Response:", "ASSISTANT:", ">>> Assistant:", "GPT4 Correct Assistant:"
MARKERS = (LLAMA_3, CHATML, GEMMA, PHI, MISTRAL, HARMONY, ALPACA, VICUNA, UNSLOTH, STARLING)
UNSLOTH_TEMPLATES = {
    "unsloth": UNSLOTH, "zephyr": PHI, "chatml": CHATML, "mistral": MISTRAL, "llama": MISTRAL, "vicuna": VICUNA,
    "vicuna_old": None, "vicuna old": None, "alpaca": ALPACA, "gemma": GEMMA, "gemma_chatml": CHATML, "gemma2": GEMMA,
    "gemma2_chatml": CHATML, "gemma-3": GEMMA, "gemma3": GEMMA, "gemma-3n": GEMMA, "gemma3n": GEMMA, "gemma-4": None,
    "gemma4": None, "gemma-4-thinking": None, "gemma4-thinking": None, "llama-3": LLAMA_3, "llama3": LLAMA_3,
    "llama-3.1": LLAMA_3, "llama-31": LLAMA_3, "llama-3.2": LLAMA_3, "llama-3.3": LLAMA_3, "llama-32": LLAMA_3,
    "llama-33": LLAMA_3, "phi-3": PHI, "phi-35": PHI, "phi-3.5": PHI, "phi-4": CHATML, "qwen-2.5": CHATML,
    "qwen-25": CHATML, "qwen25": CHATML, "qwen2.5": CHATML, "qwen-2.5-coder": CHATML, "qwen-25-coder": CHATML,
    "qwen25-coder": CHATML, "qwen2.5-coder": CHATML, "qwen-3": CHATML, "qwen3": CHATML, "qwen3-instruct": CHATML,
    "qwen3-thinking": CHATML, "gpt-oss": HARMONY, "gptoss": HARMONY, "lfm-2": CHATML, "lfm-2.5": CHATML,
    "starling": STARLING, "yi-chat": CHATML,
}  # fmt: skip
"""Name of an Unsloth chat template (2026.10.9) → the text that begins an answer; None if it is not always the same."""
MODELS: tuple[tuple[str, str], ...] = (
    (r"llama-?3(\.[123])?-.*instruct", LLAMA_3), (r"qwen-?(1\.5|2(\.5)?|3)-", CHATML),
    (r"gemma-?[23]?-.*\bit\b", GEMMA),
    (r"phi-3(\.5)?-(mini|medium).*instruct", PHI), (r"mistral-7b-instruct", MISTRAL), (r"llama-?2-.*chat", MISTRAL),
)  # fmt: skip
"""(pattern of the names of chat models, the text that begins an answer in their chat template)."""


def marker_of(text: str) -> str | None:
    """Return the first of `MARKERS` that a text contains.

    >>> marker_of("<|im_start|>assistant\\n"), marker_of("Answer:")
    ('<|im_start|>assistant', None)
    """
    return next((marker for marker in MARKERS if marker in text), None)


def marker_of_template(name: str) -> str | None:
    """Return the text that begins an answer in one of Unsloth's templates."""
    return UNSLOTH_TEMPLATES.get(name)


def marker_of_model(name: str) -> str | None:
    """Return the text that begins an answer in a model's chat template, by the model's name.

    >>> marker_of_model("unsloth/Llama-3.2-3B-Instruct-bnb-4bit"), marker_of_model("meta-llama/Llama-3.1-8B")
    ('<|start_header_id|>assistant', None)
    """
    leaf = name.rpartition("/")[2].lower()
    markers = {marker for pattern, marker in MODELS if re.search(pattern, leaf)}
    return markers.pop() if len(markers) == 1 else None
