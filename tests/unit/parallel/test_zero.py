"""What ZeRO refuses before it starts, and what DeepSpeed is told; for the steps see tests/distributed/test_zero.py."""

import importlib
import importlib.util
import json

import pytest
import tiny_run
import torch

from surefit.config.schema import ParallelSection
from surefit.core.errors import MachineError
from surefit.parallel import zero
from surefit.parallel.engine import build_engine
from surefit.parallel.process_group import World
from surefit.train.loss import chunked_loss_obstacle
from surefit.train.optim import MasterAdamW

INSTALLED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not INSTALLED, reason="needs DeepSpeed: the extra deepspeed")


def test_without_deepspeed_the_error_says_what_to_install(monkeypatch) -> None:
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(zero.importlib, "import_module", missing)
    with pytest.raises(MachineError, match="No module named 'deepspeed'") as caught:
        zero.Zero(World(), ParallelSection(mode="zero2"))
    assert ".[deepspeed]" in (caught.value.help or "")


@needs_deepspeed
def test_the_engine_is_found_by_its_mode() -> None:
    engine = build_engine(ParallelSection(mode="zero3"), World())
    assert isinstance(engine, zero.Zero)
    assert (engine.name, engine.stage, engine.data_size) == ("zero3", 3, 1)


def test_without_masters_the_parameters_themselves_are_in_the_groups() -> None:
    model = tiny_run.llama().bfloat16()
    optimizer = MasterAdamW(model, 0.1, masters=False)
    (inner,) = optimizer.inner
    held = {id(p) for group in inner.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert [group["weight_decay"] for group in inner.param_groups] == [0.1, 0.0]


def test_what_deepspeed_is_told(tmp_path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": "auto"}})
    )
    section = ParallelSection(mode="zero3", offload=True, deepspeed_config=str(tmp_path / "ds.json"))
    told = zero.build_deepspeed_config(section, torch.bfloat16)
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    assert told["zero_optimization"] == {
        "stage": 3, "overlap_comm": False, "offload_optimizer": host, "offload_param": host,
    }  # fmt: skip
    assert told["bf16"] == {"enabled": True}
    assert told["gradient_clipping"] == 0.0
    plain = zero.build_deepspeed_config(ParallelSection(mode="zero2"), torch.float32)
    assert plain["zero_optimization"] == {"stage": 2}
    assert "bf16" not in plain


def test_weights_in_shares_are_a_reason_not_to_chunk_the_loss() -> None:
    model = tiny_run.llama()
    assert chunked_loss_obstacle(model) is None
    model.lm_head.weight.ds_id = 0
    assert "ZeRO-3" in (chunked_loss_obstacle(model) or "")


@needs_deepspeed
def test_deepspeed_has_what_zero_takes_of_it() -> None:
    """Names that no public interface promises; a newer DeepSpeed without them must fail here, not in a run."""
    zero.import_deepspeed(World())
    fragments = importlib.import_module("deepspeed.utils")
    for name in (
        "safe_get_full_fp32_param", "safe_get_full_optimizer_state", "safe_set_full_fp32_param",
        "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_optimizer_state",
    ):  # fmt: skip
        assert hasattr(fragments, name)
    second = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer
    assert hasattr(second, "_lazy_init_hp_params_optimizer_state")
