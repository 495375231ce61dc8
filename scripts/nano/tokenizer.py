"""The byte-level BPE tokenizer of `surefit/nano`, and its chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 1536
PAD, END = "<|pad|>", "<|end|>"
SPECIAL = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")
CONTEXT = 2048
PIECES = r"[A-Za-z]+|[0-9]{1,2}|[^A-Za-z0-9]+"
"""Words without the space before them, so that a word is the same tokens in a sentence and in JSON and can be copied;
numbers two digits at a time; runs of punctuation, so that `": {"` costs one token."""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learns the vocabulary from `texts` and wraps it for transformers, with distinct pad and end-of-turn tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    wrapped.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text().rstrip("\n")
    return wrapped
