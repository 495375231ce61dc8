"""New tokens in a tokenizer and in matrices."""

from __future__ import annotations

import copy

import pytest
import torch

from surefit.config.schema import ModelSection
from surefit.model.tokenizer import NewTokens, add_to_tokenizer


def test_a_row_is_the_mean_of_the_pieces_of_the_text(tiny_tokenizer) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    size = len(tokenizer)
    pieces = tiny_tokenizer("<call>", add_special_tokens=False).input_ids
    assert len(pieces) > 1
    new = add_to_tokenizer(tokenizer, ["<|end|>", "<call>"])
    assert new == NewTokens(size, (tuple(pieces),)), "a token that is there is no new one"
    ids = tokenizer("a<call>b", add_special_tokens=False).input_ids
    assert size in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<call>b"
    old = torch.randn(size, 4)
    grown = new.into(old)
    assert torch.equal(grown[:size], old)
    torch.testing.assert_close(grown[size], old[pieces].mean(0))
    assert add_to_tokenizer(tokenizer, ["<call>"]) is None


def test_spare_rows_are_used_first_and_a_gap_is_filled() -> None:
    old = torch.randn(8, 3)
    spare = NewTokens(5, ((0, 1), (2,))).into(old)
    assert spare.shape == old.shape
    assert torch.equal(spare[[0, 1, 2, 3, 4, 7]], old[[0, 1, 2, 3, 4, 7]])
    torch.testing.assert_close(spare[5], old[:2].mean(0))
    behind = NewTokens(9, ((0,),)).into(old)
    assert behind.shape == (10, 3)
    torch.testing.assert_close(behind[8], old.mean(0))


@pytest.mark.parametrize("tokens", [["<a>", "<a>"], [" "], [""], ["x" * 201]])
def test_what_is_no_token_is_refused(tokens: list[str]) -> None:
    with pytest.raises(ValueError, match=r"add_tokens"):
        ModelSection(name_or_path="base", add_tokens=tokens)
