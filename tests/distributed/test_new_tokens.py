"""Rows of new tokens in two real processes under DDP, against one."""

import pytest
from engine_steps import HELPERS, assert_the_same_steps, start

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found():
    return start(HELPERS / "new_tokens_run.py")


@pytest.mark.parametrize(
    "scenario", ["tied", "untied", "packed", "recomputed", "fused", "seen by one process", "full logits"]
)
def test_twenty_steps_are_those_of_one_process(found, scenario):
    assert_the_same_steps(found[scenario])
