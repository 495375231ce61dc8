"""Constrained decoding: before each token, every token with which the grammar cannot continue is masked.

xgrammar does the matching. The grammar is guaranteed for an answer that ends; an answer cut by the token limit is only
the beginning of an allowed answer. The recipe's own parser reads the text like any other answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from surefit.core.errors import ConfigError, MachineError, ModelError
from surefit.core.packaging import install_extra
from surefit.metrics.ebnf import literal
from surefit.task import Grammar

CACHE_BYTES = 2 * 1024**3
"""Maximum bytes of cached grammars: each needs megabytes for a large vocabulary, and every row may have its own."""


@cache
def _xgrammar() -> ModuleType:
    try:
        import xgrammar
    except ImportError:
        raise MachineError(
            "constrained decoding needs the package xgrammar",
            code="E7050",
            field="evaluate.constrained",
            help=f"{install_extra('constrained')}; or set evaluate.constrained to none",
        ) from None
    module: ModuleType = xgrammar
    return module


class GrammarCompiler:
    """Grammars compiled for one model's vocabulary; each distinct grammar is compiled once.

    Args:
        stop_ids: the tokens that end an answer: allowed only where the grammar is complete.

    Raises:
        MachineError: xgrammar is not installed.
        ModelError: no token ends answers, or xgrammar does not know this kind of tokenizer.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        self.xgrammar = _xgrammar()
        self.vocabulary: int = model.config.get_text_config().vocab_size  # including the padding that logits have
        self.stop_ids = [i for i in stop_ids if i < self.vocabulary]
        if not self.stop_ids:
            raise ModelError(
                "the model has no token that ends an answer, which constrained decoding needs",
                code="E7051",
                help="set eos_token in its tokenizer_config.json",
            )
        try:
            info = self.xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=self.vocabulary, stop_token_ids=self.stop_ids
            )
        except (ValueError, RuntimeError) as error:
            raise ModelError(
                f"constrained decoding does not support this tokenizer: {error}",
                code="E7052",
                help="decode without grammars",
            ) from error
        self._compiler = self.xgrammar.GrammarCompiler(
            info, max_threads=torch.get_num_threads(), cache_limit_bytes=CACHE_BYTES
        )
        self.never = self._bits(_unwritten(tokenizer) - set(self.stop_ids))
        self.stops = self._bits(set(self.stop_ids))

    def _bits(self, ids: set[int]) -> torch.Tensor:
        """Return a bitmask row, int32, with these tokens' bits set."""
        flags = torch.zeros(self.xgrammar.get_bitmask_shape(1, self.vocabulary)[1] * 32, dtype=torch.int64)
        flags[[i for i in ids if i < self.vocabulary]] = 1
        words = (flags.view(-1, 32) << torch.arange(32)).sum(1)
        return words.to(torch.int32)  # wraps around: the highest bit is the sign

    def compile(self, grammar: Grammar) -> Any:
        """Compile a grammar with xgrammar.

        Raises:
            ConfigError: it is not a valid grammar.
        """
        compile_: dict[str, Callable[[str], Any]] = {
            # The spacing of `json.dumps`, which recipes write: with any whitespace allowed a model may write spaces
            # forever.
            "json_schema": lambda text: self._compiler.compile_json_schema(text, any_whitespace=False),
            "regex": self._compiler.compile_regex,
            "ebnf": self._compiler.compile_grammar,
            "choices": self._compiler.compile_grammar,
        }
        source = grammar.source if isinstance(grammar.source, str) else choices_ebnf(grammar.source)
        try:
            return compile_[grammar.kind](source)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the {grammar.kind} grammar cannot be compiled: {str(error).strip().splitlines()[-1]}",
                code="E7053",
                help=f"fix it in the recipe; it begins {source[:80]!r}",
            ) from error


def choices_ebnf(choices: Sequence[str]) -> str:
    """Return a grammar of exactly these answers.

    >>> choices_ebnf(["yes", "no"])
    'root ::= "yes" | "no"'
    """
    if not choices or not all(choices):
        raise ConfigError("a grammar of choices has no choices, or an empty one", code="E7054", help="name the answers")
    return "root ::= " + " | ".join(map(literal, choices))


def _unwritten(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special tokens: they have a text for xgrammar, but none in the decoded answer."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


class GrammarLogitsProcessor(LogitsProcessor):
    """Masks the tokens that the rows' grammars forbid. A row's matcher follows the row's tokens, also backwards,
    because beams replace one another.

    Args:
        grammars: one per prompt of the batch, None where anything is allowed.
        width: where answers begin in `input_ids`.
        beams: rows per prompt.
    """

    def __init__(
        self, compiler: GrammarCompiler, grammars: Sequence[Grammar | None], width: int, beams: int = 1
    ) -> None:
        self.compiler, self.width = compiler, width
        compiled = [None if grammar is None else compiler.compile(grammar) for grammar in grammars]
        matcher = compiler.xgrammar.GrammarMatcher
        rows = [grammar for grammar in compiled for _ in range(beams)]
        self.rows = {n: _Row(matcher(grammar)) for n, grammar in enumerate(rows) if grammar is not None}
        self.batch = compiler.xgrammar.BatchGrammarMatcher(max_threads=torch.get_num_threads())
        self.mask: torch.Tensor = compiler.xgrammar.allocate_token_bitmask(len(rows), compiler.vocabulary)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        written = input_ids[:, self.width :].tolist()
        active = [n for n, row in self.rows.items() if row.follow(written[n])]
        self.mask.fill_(-1)
        if active:
            self.batch.batch_fill_next_token_bitmask([self.rows[n].matcher for n in active], self.mask, active)
            allowed = self.mask[active] & ~self.compiler.never
            # If the vocabulary cannot spell the continuation, end here and leave the judgment to the parser.
            allowed[~allowed.any(dim=1)] = self.compiler.stops
            self.mask[active] = allowed
        self.compiler.xgrammar.apply_token_bitmask_inplace(scores, self.mask.to(scores.device, non_blocking=True))
        return scores


class _Row:
    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.accepted: list[int] = []

    def follow(self, tokens: Sequence[int]) -> bool:
        """Advance the matcher to `tokens`; return False if they have ended, or left the grammar: the tokens after an
        end are padding, and a beam without an allowed token is one that the search has dropped."""
        common = len(self.accepted)
        if list(tokens[:common]) != self.accepted:
            common = next(n for n, (a, b) in enumerate(zip(self.accepted, tokens, strict=False)) if a != b)
            self.matcher.rollback(len(self.accepted) - common)
            del self.accepted[common:]
        for token in tokens[common:]:
            if self.matcher.is_terminated() or not self.matcher.accept_token(token):
                return False
            self.accepted.append(token)
        return not self.matcher.is_terminated()
