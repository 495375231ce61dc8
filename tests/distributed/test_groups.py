"""Four real processes in two groups: each group shares one model, and the groups share the rows of a step."""

import pytest
from engine_steps import HELPERS, assert_the_same_steps, start

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found():
    return start(HELPERS / "groups_run.py", processes=4)


@pytest.mark.parametrize("kind", ["lora", "full tied"])
@pytest.mark.parametrize("mode", ["tp", "pp", "fsdp"])
def test_twenty_steps_are_those_of_one_process(found, mode, kind):
    assert_the_same_steps(found[f"{mode} {kind}"])


def test_as_many_replicas_as_processes_are_the_same_too(found):
    """`dp_replicate` 4 of 4: shards that are whole."""
    assert_the_same_steps(found["fsdp replicas only"])
