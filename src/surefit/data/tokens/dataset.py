"""All examples of a run as token rows, in the cache: tokenized, with long examples cut or left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surefit.core.errors import DataError
from surefit.core.progress import OnProgress, ignore_progress
from surefit.data.rows.layouts import SKIP_ROWS_HELP, Examples, bad_rows_error, refusal_reasons, with_place
from surefit.data.rows.shorten import shorten_document
from surefit.data.tokens.cache import Encoded, TokenDataset, TokenizationStats, cache_key, open_cached, store_dataset
from surefit.data.tokens.tokenize import BATCH, encode_labelled, encode_pairs, encode_turns, require_encodable
from surefit.facts.chat_template import TEMPLATE_DATE
from surefit.task import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefit.config.schema import DataSection


Encode = Callable[["PreTrainedTokenizerBase", Sequence[Example]], list[list[Encoded]]]
"""`encode_turns`, `encode_pairs` or `encode_labelled`."""


def build_dataset(
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    too_long: str = "drop",
    bad_rows: str = "error",
    source: str = "data.train",
    cache: Path | None = None,
    on_progress: OnProgress = ignore_progress,
    paired: bool = False,
    labelled: bool = False,
) -> TokenDataset:
    """Tokenize the examples once: the result is stored in SureFit's cache under the hash of all that it depends on.

    A pair becomes two consecutive token examples, chosen and rejected; both are kept, or both are left out. A labelled
    answer is one with its label (`TokenDataset.desirable`); of an objective on labelled answers a pair is two of them.

    Args:
        examples: the result of `read_splits`.
        tokenizer: the model's.
        max_length: tokens per example. A longer one is never cut at its end: that would remove the answer.
        too_long: "drop" leaves longer examples out and counts them, "error" raises; "truncate" and "truncate_middle"
            cut their documents (`data.rows.shorten`).
        bad_rows: "skip" leaves out examples for which the chat template raises an error, and counts them
            (`TokenDataset.refused`).
        source: the rows' config key.
        cache: the directory of the cache; `core.env.cache_dir()` if None.
        on_progress: called after every batch with the examples done.
        paired: the examples are pairs; then the counts of `TokenizationStats` are of pairs, and its tokens of both
            answers.
        labelled: the examples are labelled answers, or pairs that make two of them.

    Raises:
        DataError: no example is left, one is too long and must not be or cannot be cut, or the template does not fit
            one.
        MachineError: the cache cannot be written.
    """
    skips = bad_rows == "skip"
    settings = {"max_length": max_length, "too_long": too_long, "date": TEMPLATE_DATE} | (
        {"skips": True} if skips else {}
    )
    settings |= {"paired": True} if paired else {"labelled": True} if labelled else {}
    key = cache_key(examples, tokenizer, settings)
    dataset = open_cached(key, cache)
    if dataset is None:
        cut: list[int] = []
        refused: dict[int, DataError] = {}
        encode = encode_pairs if paired else encode_labelled if labelled else encode_turns
        encoded = encode_all(
            examples, tokenizer, max_length, too_long, cut, refused if skips else None, source, on_progress, encode
        )
        kept_labels: list[bool] | None = [] if labelled else None
        arrays, stats = _select(encoded, examples, max_length, too_long, refused, source, paired, kept_labels)
        stats, reasons = replace(stats, cut=len(cut)), refusal_reasons(refused)
        dataset = store_dataset(key, cache, arrays, stats, reasons, kept_labels)
    else:
        on_progress(len(examples), len(examples), "from the cache")
    return dataset.counting_skipped(len(examples.skipped) + len(dataset.refused))


def require_both_labels(rows: TokenDataset, source: str) -> None:
    """Raise if all labelled answers have one label.

    Raises:
        DataError: as said.
    """
    desirable = rows.desirable
    if desirable is None or 0 < desirable.sum() < len(desirable):
        return
    kind, other = ("true", "bad") if desirable.all() else ("false", "good")
    raise DataError(
        f"all of {len(desirable):,} labelled answers have the label {kind}: kto learns from the difference to {other} "
        "ones",
        code="E4506",
        path=source,
        field="label",
        help=f"add {other} answers"
        + ("; to learn from good answers alone, write objective: sft" if desirable.all() else ", or swap the labels"),
    )


def build_empty_dataset(cache: Path | None = None) -> TokenDataset:
    """Return the data set without examples: the held-out rows if nothing is held out.

    Raises:
        MachineError: the cache cannot be written.
    """
    return store_dataset("none", cache, [], TokenizationStats(0, 0, 0, 0, 0, 0, 0))


def encode_all(
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    too_long: str,
    cut: list[int],
    refused: dict[int, DataError] | None = None,
    source: str = "data.train",
    on_progress: OnProgress = ignore_progress,
    encode: Encode = encode_turns,
) -> Iterator[list[Encoded]]:
    """Yield the token examples of every example, documents cut if `too_long` says so; other long ones are included.

    Args:
        cut: receives the numbers of the examples that were cut.
        refused: receives the examples for which the chat template raises an error, which make no token example; None
            raises at them.
        source: the rows' config key.
        encode: tokenizes some examples.

    Raises:
        DataError: the template does not fit an example, or its document cannot be cut enough.
    """
    encoded = _encode_whole(examples, tokenizer, refused, source, on_progress, encode)
    if too_long.startswith("truncate"):
        return _shorten_documents(encoded, examples, tokenizer, max_length, too_long, cut)
    return encoded


def _encode_whole(
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    refused: dict[int, DataError] | None,
    source: str,
    on_progress: OnProgress,
    encode: Encode,
) -> Iterator[list[Encoded]]:
    total, tokens = len(examples), 0
    on_progress(0, total, "")
    for start in range(0, total, BATCH):
        batch = examples[start : start + BATCH]
        try:
            encoded = encode(tokenizer, batch)
        except DataError:
            if refused is None:
                problems = [*find_untokenizable(tokenizer, examples).values()]
                raise bad_rows_error(problems, total, source, SKIP_ROWS_HELP) from None
            errors = find_untokenizable(tokenizer, examples.subset(range(start, start + len(batch))))
            good = iter(encode(tokenizer, [example for n, example in enumerate(batch) if n not in errors]))
            encoded = [[] if n in errors else next(good) for n in range(len(batch))]
            refused.update({start + n: error for n, error in errors.items()})
        tokens += sum(len(ids) for token_examples in encoded for ids, _ in token_examples)
        yield from encoded
        on_progress(start + len(batch), total, f"{tokens:,} tokens")


def drop_untokenizable(
    examples: Examples, tokenizer: PreTrainedTokenizerBase, bad_rows: str, source: str = "data.eval"
) -> Examples:
    """Return the examples, for `data.bad_rows: skip` without the ones for which the chat template raises an error,
    which are listed as skipped. For rows that are not tokenized whole; `build_dataset` leaves them out itself.

    Raises:
        DataError: the template raises for all of them.
    """
    if bad_rows != "skip" or not examples:
        return examples
    refused = find_untokenizable(tokenizer, examples)
    if len(refused) == len(examples):
        raise bad_rows_error([*refused.values()], len(examples), source, "")
    return examples.without(refusal_reasons(refused))


def eval_key(section: DataSection) -> str:
    """Return the config key of the held-out rows: `data.train` if `data.eval` is a share."""
    return "data.eval" if isinstance(section.eval, str) or section.tokenized is not None else "data.train"


def find_untokenizable(tokenizer: PreTrainedTokenizerBase, examples: Examples) -> dict[int, DataError]:
    """Return the numbers of the examples that cannot be tokenized, each with the reason and the place of its row."""
    errors = {}
    for start in range(0, len(examples), BATCH):
        batch = examples[start : start + BATCH]
        try:
            require_encodable(tokenizer, batch)
            continue
        except DataError:
            pass
        for index, example in enumerate(batch, start=start):
            try:
                require_encodable(tokenizer, [example])
            except DataError as error:
                errors[index] = with_place(error, examples.where[index])
    return errors


def _shorten_documents(
    encoded: Iterator[list[Encoded]],
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    too_long: str,
    cut: list[int],
) -> Iterator[list[Encoded]]:
    """Yield the token examples with documents that fit; `cut` receives the numbers of the examples that were cut."""
    for index, token_examples in enumerate(encoded):
        if any(len(ids) > max_length for ids, _ in token_examples):
            try:
                token_examples = encode_turns(
                    tokenizer, [shorten_document(examples[index], tokenizer, max_length, too_long)]
                )[0]
            except DataError as error:
                where = examples.where[index]
                raise DataError(
                    error.message, code=error.code, path=where, field=error.field, help=error.help
                ) from error
            cut.append(index)
        yield token_examples


def _select(
    encoded: Iterator[list[Encoded]],
    examples: Examples,
    max_length: int,
    too_long: str,
    refused: Mapping[int, DataError],
    source: str,
    paired: bool = False,
    kept_labels: list[bool] | None = None,
) -> tuple[list[tuple[Any, Any]], TokenizationStats]:
    """Return the examples to train on as arrays (int32 ids, uint8 mask), and the stats with the counts of the
    others: of token examples, or of pairs of them, of which both are kept or none.

    Args:
        kept_labels: receives the label of each example; of a pair's two answers the first is the desirable one. None
            for examples without labels.
    """
    kept: list[list[tuple[Any, Any]]] = []
    overlong, unsupervised, longest = [], 0, 0
    for index, number, group in (
        (index, number, group)
        for index, token_examples in enumerate(encoded)
        for number, group in enumerate(
            [token_examples] if paired and token_examples else [[each] for each in token_examples]
        )
    ):
        most = max(len(ids) for ids, _ in group)
        longest = max(longest, most)
        if most > max_length:
            overlong.append(
                DataError(f"{most:,} tokens, over max_length {max_length:,}", code="E4007", path=examples.where[index])
            )
        elif not all(any(supervised) for _, supervised in group):
            unsupervised += 1
        else:
            kept.append([(np.array(ids, np.int32), np.array(supervised, np.uint8)) for ids, supervised in group])
            if kept_labels is not None:
                desirable = examples[index].desirable
                kept_labels.append(number == 0 if desirable is None else desirable)
    way_out = f"set data.max_length to {longest} or more, or data.too_long to drop"
    if overlong and too_long == "error":
        raise bad_rows_error(overlong, len(overlong) + len(kept) + unsupervised, source, way_out)
    if refused and len(refused) == len(examples):
        raise bad_rows_error([*refused.values()], len(examples), source, "")
    if not kept:
        raise DataError(
            f"no example is left: of {len(overlong) + unsupervised:,}, {len(overlong):,} are longer than max_length "
            f"{max_length:,} tokens (the longest has {longest:,}) and {unsupervised:,} have no token to train on",
            code="E4008",
            field="data.max_length",
            help=f"set data.max_length to {longest} or more, as far as the model's context allows",
        )
    arrays = [array for group in kept for array in group]
    return arrays, TokenizationStats(
        rows=len(examples) - len(refused),
        kept=len(kept),
        dropped_too_long=len(overlong),
        dropped_unsupervised=unsupervised,
        tokens=sum(len(ids) for ids, _ in arrays),
        supervised_tokens=sum(int(mask.sum()) for _, mask in arrays),
        longest=max(len(ids) for ids, _ in arrays),
        split=len(kept) + len(overlong) + unsupervised - (len(examples) - len(refused)),
    )
