"""Factors beside experts in two real processes under DDP, against one."""

import pytest
from engine_steps import HELPERS, assert_the_same_steps, start

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found():
    return start(HELPERS / "experts_run.py")


@pytest.mark.parametrize("scenario", ["padded", "packed", "recomputed", "routers too", "router loss"])
def test_twenty_steps_are_those_of_one_process(found, scenario):
    assert_the_same_steps(found[scenario])
