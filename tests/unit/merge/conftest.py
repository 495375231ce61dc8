"""Trained runs, one per kind and dtype, copied for each test; and the merge of one."""

from __future__ import annotations

import pytest
import torch

from surefit.merge.merge import merge_and_certify


def sequences_of(count, length, seed):
    """Each token follows from the one before it, so that there is something to learn."""
    starts = torch.randint(5, 290, (count,), generator=torch.Generator().manual_seed(seed))
    return ((starts[:, None] + 7 * torch.arange(length)) % 285 + 5).tolist()


@pytest.fixture(scope="session")
def trained_once(train_tiny):
    made = {}

    def get(kind, dtype):
        if (kind, dtype) not in made:
            made[kind, dtype] = train_tiny(sequences_of(16, 24, seed=1), kind, dtype)
        return made[kind, dtype]

    return get


@pytest.fixture
def trained(trained_once, copy_of):
    """trained(kind, dtype) → a run to merge."""
    return lambda kind="lora", dtype="float32": copy_of(trained_once(kind, dtype))


@pytest.fixture
def held_out():
    return sequences_of(6, 40, seed=9)


@pytest.fixture
def merged(held_out):
    """merged(trained_run, …) → the certificate of its merge."""
    return lambda trained, **options: merge_and_certify(
        trained.config, trained.hardware, trained.run, held_out, **options
    )
