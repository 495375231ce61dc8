"""Which stage of a pipeline gets which layers."""

import random
from itertools import combinations, pairwise

import pytest

from surefit.core.errors import ConfigError
from surefit.parallel.pipeline_parallel import split_layers


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_has_a_cheaper_worst_stage(seed):
    draw = random.Random(seed)
    costs = [draw.randint(1, 9) for _ in range(draw.randint(3, 8))]
    stages = draw.randint(1, 3)
    found = split_layers(costs, stages)
    assert [index for stage in found for index in stage] == list(range(len(costs)))
    assert all(found), "no stage is empty"
    cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1)]
    best = min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts)
    assert max(sum(costs[index] for index in stage) for stage in found) == best


def test_a_large_head_takes_layers_off_the_last_stage():
    assert [len(stage) for stage in split_layers([1] * 7 + [4], 2)] == [5, 3]


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ConfigError, match="4 layers"):
        split_layers([1] * 4, 5)
