"""Rows that are already token ids: `input_ids`, with `labels` or a mask if not all of them are supervised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefit.core.errors import DataError
from surefit.data.rows.messages import parse_json_list
from surefit.metrics.strict_json import json_kind
from surefit.task import Example, Row

MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""Columns of 0 and 1 with which other tools mark supervised tokens: TRL's two, and the usual name."""
_IGNORED = -100


def example_from_tokens(row: Row) -> Example:
    """Return a row of token ids as an example, with the ids as its text: rows of the same ids are the same row.

    The loss falls where `labels` and all masks in the row agree on it, as in TRL. Positions that `attention_mask` marks
    as padding are left out.

    Raises:
        DataError: a column is malformed, or of another length than `input_ids`.
    """
    ids = _numbers(row["input_ids"], "input_ids")
    if not ids:
        raise DataError("no tokens", code="E4029", field="input_ids")
    if (negative := next((n for n, token in enumerate(ids) if token < 0), None)) is not None:
        raise DataError(f"token ids start at 0, got {ids[negative]}", code="E4030", field=f"input_ids[{negative}]")
    learnt = _supervised_mask(row, ids)
    if row.get("attention_mask") is not None:
        attended = _mask(row["attention_mask"], "attention_mask", ids)
        if not any(attended):
            raise DataError("no tokens: all of them are padding", code="E4031", field="attention_mask")
        ids = [token for token, keep in zip(ids, attended, strict=True) if keep]
        learnt = [token for token, keep in zip(learnt, attended, strict=True) if keep]
    return Example(text=" ".join(map(str, ids)), tokens=(tuple(ids), tuple(learnt)))


def require_known_tokens(ids: Sequence[int], known: int) -> None:
    """Raise if a row has token ids outside the tokenizer's vocabulary.

    Raises:
        DataError: a row's tokens are not all among the `known` ones of the tokenizer."""
    if max(ids, default=0) >= known:
        raise DataError(
            f"token id {max(ids):,} is outside the tokenizer's vocabulary of {known:,}: these rows were made "
            "with another tokenizer",
            code="E4032",
            field="input_ids",
            help="tokenize them with this model's tokenizer, or train on their text",
        )


def _supervised_mask(row: Row, ids: list[int]) -> list[bool]:
    masks = [_mask(row[name], name, ids) for name in MASKS if row.get(name) is not None]
    if row.get("labels") is not None:
        masks.append(_mask_from_labels(row["labels"], ids))
    return [all(flags) for flags in zip(*masks, strict=True)] if masks else [True] * len(ids)


def _mask_from_labels(value: Any, ids: list[int]) -> list[bool]:
    labels = _numbers(value, "labels")
    _require_length(labels, ids, "labels")
    for n, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (token, _IGNORED):
            raise DataError(
                f"a label must be the token itself or {_IGNORED}, not {label} where input_ids has {token}",
                code="E4033",
                field=f"labels[{n}]",
                help="labels are not shifted: the model does that",
            )
    return [label != _IGNORED for label in labels]


def _mask(value: Any, field: str, ids: list[int]) -> list[bool]:
    mask = [int(flag) if isinstance(flag, bool) else flag for flag in parse_json_list(value, field)]
    _require_length(mask, ids, field)
    if (wrong := next((n for n, flag in enumerate(mask) if flag not in (0, 1)), None)) is not None:
        raise DataError(f"expected 0 or 1, not {mask[wrong]!r}", code="E4034", field=f"{field}[{wrong}]")
    return [flag == 1 for flag in mask]


def _numbers(value: Any, field: str) -> list[int]:
    numbers = list(parse_json_list(value, field))
    wrong = next(
        (n for n, number in enumerate(numbers) if not isinstance(number, int) or isinstance(number, bool)), None
    )
    if wrong is not None:
        raise DataError(
            f"expected an integer, not {json_kind(numbers[wrong])}", code="E4035", field=f"{field}[{wrong}]"
        )
    return numbers


def _require_length(found: list[Any], ids: list[int], field: str) -> None:
    if len(found) != len(ids):
        raise DataError(f"{len(found):,} values for {len(ids):,} input_ids", code="E4036", field=field)
