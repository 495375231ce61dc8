"""How a row is divided, and that attention over the parts is attention over the row, on every path it can take."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import varlen_on_cpu  # noqa: F401 (registers the kernel)

from surefit.data.tokens.collate import collate, collate_packed, describe_pairs
from surefit.model import varlen
from surefit.model.sdpa import gpu_assumed
from surefit.model.varlen import counting_attention, share_keys_across_processes, varlen_attention
from surefit.parallel.context_parallel import chunk_token_indices, shard_micro_batch, split_documents_across_ranks

LENGTHS = (23, 1, 40, 2, 7)
HEADS, KEY_HEADS, WIDTH = 4, 2, 16
CPU = torch.device("cpu")


def items(lengths: tuple[int, ...]) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, 64, length) for length in lengths]
    return [(ids, np.where(np.arange(len(ids)) < len(ids) // 3, -100, ids)) for ids in documents]


def work(pieces: list[Any]) -> tuple[int, int]:
    """Tokens, and the keys that they read."""
    tokens = [token - piece.document for piece in pieces for token in range(piece.first, piece.last)]
    return len(tokens), sum(token + 1 for token in tokens)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("lengths", [(1,), (5, 3, 1), LENGTHS, (4_000,), (3_000, 1_001), tuple(range(1, 90))])
def test_every_token_goes_to_one_process_and_all_have_the_same_work(lengths: tuple[int, ...], size: int) -> None:
    parts = split_documents_across_ranks(lengths, size)
    tokens = torch.cat([tokens for part in parts for tokens in chunk_token_indices(part)])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    counts, keys = zip(*map(work, parts), strict=True)
    assert max(counts) - min(counts) <= 2
    # What does not divide is two tokens of each document, which read the whole of it at most.
    assert max(keys) - min(keys) <= 2 * sum(lengths)
    if len(lengths) == 1 and lengths[0] % (2 * size) == 0:
        assert len(set(keys)) == 1


def test_parts_together_teach_what_the_row_teaches_padded_or_packed() -> None:
    for batch in (collate_packed(items(LENGTHS)), collate(items(LENGTHS), 0)):
        parts = [shard_micro_batch(batch, rank, 3, lambda tensor: tensor, CPU)[0] for rank in range(3)]
        shape = {tuple(part[name].shape) for part in parts for name in ("input_ids", "position_ids")}
        assert len(shape) == 1, "the processes exchange tensors of one shape"
        assert sorted(torch.cat([part["targets"] for part in parts])) == sorted(batch["targets"])
        for part in parts:
            assert part["position_ids"][0, -1] == max(LENGTHS) - 1
            # Each target is the token after its row's, in the same document.
            for row, target in zip(part["loss_rows"].tolist(), part["targets"].tolist(), strict=True):
                place = int(part["position_ids"][0, row])
                token = int(part["input_ids"][0, row])
                assert any(
                    len(document) > place + 1 and document[place] == token and document[place + 1] == target
                    for document, _ in items(LENGTHS)
                )


@pytest.mark.parametrize("packed", [True, False])
def test_parts_of_answers_add_up_to_the_answers(packed: bool) -> None:
    """Each process counts its own targets of every answer, in the order of its rows."""
    both = items((11, 4, 7, 3))
    batch = (collate_packed(both) if packed else collate(both, 0)) | describe_pairs(both, np.zeros((2, 2)))
    parts = [shard_micro_batch(batch, rank, 3, lambda tensor: tensor, CPU)[0] for rank in range(3)]
    own = [part["own_targets"] for part in parts]
    assert tuple(map(sum, zip(*own, strict=True))) == batch["answer_targets"]
    assert [sum(counts) for counts in own] == [len(part["targets"]) for part in parts]
    whole = torch.split(batch["targets"], list(batch["answer_targets"]))
    pieces = [torch.split(part["targets"], list(part["own_targets"])) for part in parts]
    for answer, targets in enumerate(whole):
        assert sorted(torch.cat([piece[answer] for piece in pieces])) == sorted(targets)
    empty = collate([(np.array([0]), np.array([-100]))], 0) | describe_pairs([], np.zeros((0, 2)))
    assert shard_micro_batch(empty, 0, 2, lambda tensor: tensor, CPU)[0]["own_targets"] == ()


def test_a_process_without_tokens_has_filling_alone() -> None:
    batch = collate_packed([(np.array([5]), np.array([-100]))])
    parts = [shard_micro_batch(batch, rank, 4, lambda tensor: tensor, CPU)[0] for rank in range(4)]
    assert {part["input_ids"].shape for part in parts} == {(1, 2)}
    assert sum(int((part["input_ids"] == 5).sum()) for part in parts) == 1
    assert all(len(part["targets"]) == 0 for part in parts)


def whole_and_parts(dtype: torch.dtype, device: torch.device, **formula: Any) -> tuple[list[torch.Tensor], ...]:
    """(output, gradients of query, key and value) of the row at once, and of three processes one after the other."""
    torch.manual_seed(0)
    count, module = sum(LENGTHS), torch.nn.Module()
    leaves = [
        torch.randn(1, heads, count, WIDTH, dtype=dtype, device=device).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    weights = torch.randn(1, count, HEADS, WIDTH, dtype=dtype, device=device)
    starts = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=device)
    places: Any = {"cu_seq_lens_q": starts, "max_length_q": max(LENGTHS), "document_lengths": LENGTHS}
    output, _ = varlen_attention(module, *leaves, None, **places, **formula)
    whole = [output, *torch.autograd.grad((output * weights).sum(), leaves)]
    parts = torch.zeros_like(output)
    own = [torch.cat(chunk_token_indices(part)).to(device) for part in split_documents_across_ranks(LENGTHS, 3)]
    size = 1 + max(map(len, own))

    def filled(tensor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor[:, :, tokens], (0, 0, 0, size - len(tokens)), value=100.0)

    for rank in range(3):
        query, *others = (filled(tensor, own[rank]) for tensor in leaves)
        everything = iter([torch.cat([filled(tensor, tokens) for tokens in own], 2)[0] for tensor in leaves[1:]])
        _, share = shard_micro_batch(
            collate_packed(items(LENGTHS)), rank, 3, lambda _, given=everything: next(given).transpose(0, 1), device
        )
        with share_keys_across_processes(share):
            part, _ = varlen_attention(module, query, *others, None, **formula)
        parts = parts.index_copy(1, own[rank], part[:, : len(own[rank])])
    return whole, [parts, *torch.autograd.grad((parts * weights).sum(), leaves)]


@pytest.mark.parametrize("kernel", [False, True], ids=["one at a time", "kernel"])
@pytest.mark.parametrize("window", [None, 1, 4, 64])
def test_attention_over_the_parts_is_attention_over_the_row(
    kernel: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel:
        monkeypatch.setattr(varlen, "_DTYPES", (torch.float32,))
    with gpu_assumed(), counting_attention() as calls:
        whole, parts = whole_and_parts(torch.float32, CPU, sliding_window=window)
    assert (calls.kernel, calls.exact) == ((4, 0) if kernel else (0, 4))
    for expected, found in zip(whole, parts, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_it_holds_for_a_softcap_and_sinks() -> None:
    whole, parts = whole_and_parts(torch.float32, CPU, softcap=2.0, s_aux=torch.randn(HEADS))
    for expected, found in zip(whole, parts, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
def test_the_real_kernel_puts_the_last_query_at_the_last_key(window: int | None) -> None:
    with counting_attention() as calls:
        whole, parts = whole_and_parts(torch.bfloat16, torch.device("cuda"), sliding_window=window)
    assert (calls.kernel, calls.exact) == (4, 0)
    for expected, found in zip(whole, parts, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_sharing_ends_with_its_block() -> None:
    _, share = shard_micro_batch(collate_packed(items((4,))), 0, 2, lambda tensor: tensor, CPU)
    with share_keys_across_processes(share):
        assert varlen._share is share
    assert varlen._share is None
