"""Rows that are tokens already: `input_ids`, with `labels` or a mask where not all of them are learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefit.core.errors import DataError
from surefit.data.rows.messages import parse_json_list
from surefit.metrics.strict_json import json_kind
from surefit.task import Example, Row

MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""Columns of 0 and 1 with which other tools say what is learnt: TRL's two, and the usual name."""
_IGNORED = -100


def example_from_tokens(row: Row) -> Example:
    """A row of tokens as an example, whose text are its ids: rows of the same ids are the same row.

    The loss falls where `labels` and all masks that are there agree on it, as in TRL. Positions that `attention_mask`
    calls padding are left out.

    Raises:
        DataError: a column is malformed, or of another length than `input_ids`.
    """
    ids = _numbers(row["input_ids"], "input_ids")
    if not ids:
        raise DataError("no tokens", code="E4029", field="input_ids")
    if (negative := next((n for n, one in enumerate(ids) if one < 0), None)) is not None:
        raise DataError(f"token ids start at 0, got {ids[negative]}", code="E4030", field=f"input_ids[{negative}]")
    learnt = _supervised_mask(row, ids)
    if row.get("attention_mask") is not None:
        kept = _mask(row["attention_mask"], "attention_mask", ids)
        if not any(kept):
            raise DataError("no tokens: all of them are padding", code="E4031", field="attention_mask")
        ids = [one for one, keep in zip(ids, kept, strict=True) if keep]
        learnt = [one for one, keep in zip(learnt, kept, strict=True) if keep]
    return Example(text=" ".join(map(str, ids)), tokens=(tuple(ids), tuple(learnt)))


def require_known_tokens(ids: Sequence[int], known: int) -> None:
    """Raises:
    DataError: a row's tokens are not all among the `known` ones of the tokenizer."""
    if max(ids, default=0) >= known:
        raise DataError(
            f"token id {max(ids):,} is outside the tokenizer's vocabulary of {known:,}: these rows were made "
            "with another tokenizer",
            code="E4032",
            field="input_ids",
            help="tokenise them with this model's tokenizer, or train on their text",
        )


def _supervised_mask(row: Row, ids: list[int]) -> list[bool]:
    said = [_mask(row[name], name, ids) for name in MASKS if row.get(name) is not None]
    if row.get("labels") is not None:
        said.append(_mask_from_labels(row["labels"], ids))
    return [all(one) for one in zip(*said, strict=True)] if said else [True] * len(ids)


def _mask_from_labels(value: Any, ids: list[int]) -> list[bool]:
    labels = _numbers(value, "labels")
    _require_length(labels, ids, "labels")
    for n, (label, own) in enumerate(zip(labels, ids, strict=True)):
        if label not in (own, _IGNORED):
            raise DataError(
                f"a label is the token itself or {_IGNORED}, not {label} where input_ids has {own}",
                code="E4033",
                field=f"labels[{n}]",
                help="labels are not shifted: the model does that",
            )
    return [label != _IGNORED for label in labels]


def _mask(value: Any, field: str, ids: list[int]) -> list[bool]:
    mask = [int(one) if isinstance(one, bool) else one for one in parse_json_list(value, field)]
    _require_length(mask, ids, field)
    if (wrong := next((n for n, one in enumerate(mask) if one not in (0, 1)), None)) is not None:
        raise DataError(f"expected 0 or 1, not {mask[wrong]!r}", code="E4034", field=f"{field}[{wrong}]")
    return [one == 1 for one in mask]


def _numbers(value: Any, field: str) -> list[int]:
    found = list(parse_json_list(value, field))
    wrong = next((n for n, one in enumerate(found) if not isinstance(one, int) or isinstance(one, bool)), None)
    if wrong is not None:
        raise DataError(f"expected an integer, not {json_kind(found[wrong])}", code="E4035", field=f"{field}[{wrong}]")
    return found


def _require_length(found: list[Any], ids: list[int], field: str) -> None:
    if len(found) != len(ids):
        raise DataError(f"{len(found):,} values for {len(ids):,} input_ids", code="E4036", field=field)
