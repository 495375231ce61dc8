"""The tokenizer in a GGUF file, built again: without transformers, so that `surefit check` can count tokens too.

The file says how a text is cut before its pieces are merged only by a name (`tokenizer.ggml.pre`); what the names mean
is in llama.cpp's src/llama-vocab.cpp. transformers (5.17 to 5.23) knows a part of them, cuts by GPT-2's rule where it
does not, and puts GPT-2's <|endoftext|> behind a vocabulary that has none.
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
    """How a text is cut before merging.

    Attributes:
        expression: of the pieces; GPT-2's own where there is none.
        digits: every digit is a piece of its own.
        composed: characters are composed first (Unicode NFC).
        whole: a piece that is in the vocabulary is not merged from its parts.
        starts: a text starts with the token for it, unless the file says otherwise.
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
"""By `tokenizer.ggml.pre`."""


def build_tokenizer(header: GgufHeader) -> Tokenizer:
    """The tokenizer of a file that `gguf_model.config_of` accepts.

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
        named = list(zip(header.tokens, kinds, strict=False))
        whole = [AddedToken(token, normalized=False, special=True) for token, kind in named if kind == CONTROL]
        tokenizer.add_special_tokens(whole)
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in named if kind == USER_DEFINED])
        size = tokenizer.get_vocab_size()
    except Exception as error:  # the library raises nothing narrower
        raise _unfit(header, str(error)) from error
    if size != len(header.tokens):
        raise _unfit(header, f"{size:,} tokens come out of {len(header.tokens):,}")
    return tokenizer


def _unfit(header: GgufHeader, why: str) -> ModelError:
    return ModelError(
        f"its vocabulary and its merge rules do not fit together: {' '.join(why.split())[:200]}", code="E2066",
        path=header.path, help="fetch the file again, or take the model's folder with config.json and *.safetensors",
    )  # fmt: skip


def _cut(split: Split) -> pre_tokenizers.PreTokenizer:
    parts: list[pre_tokenizers.PreTokenizer] = []
    if split.digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    if split.expression:
        parts.append(pre_tokenizers.Split(Regex(split.expression), behavior="isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.expression is None))
    return pre_tokenizers.Sequence(parts)


def _around(header: GgufHeader, split: Split) -> processors.PostProcessor:
    """What the tokenizer puts before and after a text."""
    wanted = {
        "bos": header.metadata.get("tokenizer.ggml.add_bos_token", split.starts),
        "eos": header.metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {role: header.token_id(role) for role in wanted if wanted[role]}
    special = [(header.tokens[number], number) for number in ids.values() if number is not None]
    before, after = (
        [header.tokens[number]] if (number := ids.get(role)) is not None else [] for role in ("bos", "eos")
    )
    return processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, "$B"], special_tokens=special
    )  # fmt: skip
