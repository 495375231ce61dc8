"""Which engine a mode becomes."""

import pytest

from surefit.config.schema import ParallelSection
from surefit.parallel.engine import build_engine
from surefit.parallel.process_group import World


@pytest.mark.parametrize("mode", ["single", "ddp", "fsdp"])
def test_one_process_has_nobody_to_share_with(mode: str) -> None:
    assert build_engine(ParallelSection(mode=mode), World()).name == "single"


def test_zero_is_an_engine_of_one_process_too() -> None:
    """It can keep optimizer state in the host's memory, so it must not quietly become something else."""
    pytest.importorskip("deepspeed")
    assert build_engine(ParallelSection(mode="zero2", offload=True), World()).name == "zero2"
