"""The tokenizer in a GGUF file, rebuilt without transformers, so that `surefit check` can count tokens too.

The file gives the split of a text before merging only as a name (`tokenizer.ggml.pre`); the meaning of the names is in
llama.cpp's src/llama-vocab.cpp. transformers (5.17 to 5.23) knows some of them, splits by GPT-2's rule for others, and
adds GPT-2's <|endoftext|> to a vocabulary that has none (docs/adr/0014-gguf-files-read-by-both.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from surefit.core.errors import ModelError
from surefit.facts.gguf import CONTROL, USER_DEFINED, GgufHeader

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class Split:
    """Rules of splitting a text before merging.

    Attributes:
        expression: regular expression of the pieces; GPT-2's own where it is None.
        digits: every digit is a piece of its own.
        composed: characters are composed first (Unicode NFC).
        whole: a piece that is in the vocabulary is not merged from its parts.
        starts: a BOS token is added to a text, unless the file sets otherwise.
    """

    expression: str | None = None
    digits: bool = False
    composed: bool = False
    whole: bool = False
    starts: bool = False


SPLITS = {
    "smollm": Split(digits=True),
    "gpt-2": Split(),
    "llama-bpe": Split(_LLAMA3, whole=True, starts=True),
    "qwen2": Split(_QWEN2, composed=True),
}
"""Value of `tokenizer.ggml.pre` → its split."""


def build_tokenizer(header: GgufHeader) -> Tokenizer:
    """Return the tokenizer of a file that `gguf_model.config_of` accepts.

    Raises:
        ModelError: its vocabulary or its merge rules do not fit together.
    """
    split = SPLITS[header.metadata["tokenizer.ggml.pre"]]
    merges = [tuple(rule.split(" ")) for rule in header.metadata.get("tokenizer.ggml.merges") or ()]
    vocabulary = {token: number for number, token in enumerate(header.tokens)}
    try:
        tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=split.whole))
        if split.composed:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _cut(split)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = _around(header, split)
        kinds = header.metadata.get("tokenizer.ggml.token_type") or ()
        token_kinds = list(zip(header.tokens, kinds, strict=False))
        control_tokens = [
            AddedToken(token, normalized=False, special=True) for token, kind in token_kinds if kind == CONTROL
        ]
        tokenizer.add_special_tokens(control_tokens)
        tokenizer.add_tokens(
            [AddedToken(token, normalized=False) for token, kind in token_kinds if kind == USER_DEFINED]
        )
        size = tokenizer.get_vocab_size()
    except Exception as error:  # the library raises nothing narrower
        raise _unfit(header, str(error)) from error
    if size != len(header.tokens):
        raise _unfit(header, f"{size:,} of {len(header.tokens):,} tokens remain")
    return tokenizer


def _unfit(header: GgufHeader, why: str) -> ModelError:
    return ModelError(
        f"its vocabulary and its merge rules do not fit together: {' '.join(why.split())[:200]}",
        code="E2066",
        path=header.path,
        help="download the file again, or use the model's folder with config.json and *.safetensors",
    )


def _cut(split: Split) -> pre_tokenizers.PreTokenizer:
    parts: list[pre_tokenizers.PreTokenizer] = []
    if split.digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    if split.expression:
        parts.append(pre_tokenizers.Split(Regex(split.expression), behavior="isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.expression is None))
    return pre_tokenizers.Sequence(parts)


def _around(header: GgufHeader, split: Split) -> processors.PostProcessor:
    """Return the post-processor that adds tokens before and after a text."""
    added = {
        "bos": header.metadata.get("tokenizer.ggml.add_bos_token", split.starts),
        "eos": header.metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {role: header.token_id(role) for role in added if added[role]}
    special = [(header.tokens[number], number) for number in ids.values() if number is not None]
    before, after = (
        [header.tokens[number]] if (number := ids.get(role)) is not None else [] for role in ("bos", "eos")
    )
    return processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, "$B"], special_tokens=special
    )
