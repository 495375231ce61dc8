"""Files to read, and tokenizers small enough to check by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from surefit.data.rows.layouts import Examples
from surefit.task import Example

SPECIAL = ["<|pad|>", "<|text_end|>", "<|begin|>", "<|end|>", "<|tools|>", *(f"<|{r}|>" for r in ("system", "user"))]
SPECIAL += ["<|assistant|>", "<|tool|>"]
CORPUS = [
    "what is the weather in Oslo on Monday",
    '{"name": "add", "arguments": {"a": 1}}',
    "\n\n\nx" * 30 + "grüße 你好",
]

MARKED_TEMPLATE = (
    "{% if tools %}{{ '<|tools|>' + (tools | tojson) + '<|end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | map(attribute='function') | list | tojson }}{% endif %}"
    "{{ '<|end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Like that of surefit/nano: the template itself marks what the model has to write."""

SHARED = Path(__file__).parents[3] / "../shared/data"


@pytest.fixture
def shared() -> Callable[[str], Path]:
    """shared("function_calling/…") → a real data file, where this checkout has them beside it."""

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"{name} is not beside this checkout")
        return path

    return find


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """make_tokenizer(template=MARKED_TEMPLATE, backend=None) → a tokenizer of its own."""

    def make(template: str | None = MARKED_TEMPLATE, backend: Tokenizer | None = None) -> PreTrainedTokenizerFast:
        fast = PreTrainedTokenizerFast(
            tokenizer_object=backend or byte_level(),
            pad_token="<|pad|>",
            eos_token="<|text_end|>",
            bos_token="<|begin|>",
        )
        fast.chat_template = template
        return fast

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def write(tmp_path) -> Callable[..., Path]:
    """write("a.jsonl", content) → the file; content is text, bytes, or a list of rows as JSON Lines."""

    def make(name: str, content: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def chat(*turns: str, **more: Any) -> Example:
    """user, assistant, user, … as an example."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(turns))
    return Example(messages, **more)


def as_examples(*examples: Example) -> Examples:
    return Examples(list(examples), [f"rows.jsonl:{i}" for i in range(1, len(examples) + 1)], [])
