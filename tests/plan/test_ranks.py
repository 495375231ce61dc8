"""The plan of one process of several: by arithmetic, by torch's own engines without data, and beside real processes."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks_run
from engine_steps import HELPERS, start
from transformers import AutoConfig

from surefit.config.load import load_config
from surefit.config.resolve import ResolvedConfig, resolve_config
from surefit.config.schema import SureFitConfig
from surefit.config.world import count_accumulation_steps
from surefit.core.errors import MachineError
from surefit.core.units import GIB
from surefit.facts import memory_formula, memory_per_rank
from surefit.facts.hardware import hardware_facts
from surefit.facts.interconnect import REACHED, link_of
from surefit.facts.model import ModelFacts, build_facts, catalogue, model_facts
from surefit.facts.sharding import ShardingLayout, model_state_bytes, sharing_of
from surefit.lint.rule import LintContext
from surefit.lint.rules.memory import does_not_fit
from surefit.plan.build_plan import build_plan
from surefit.plan.communication import estimate_step_communication
from surefit.plan.memory_interval import build_memory_estimate, closed_form_upper_bound
from surefit.plan.planner import Planner
from surefit.plan.ranks import fake_process_group_engine
from surefit.plan.search import DeviceConfig, enumerate_candidates, shared_variants
from surefit.plan.simulate import record_training
from surefit.plan.step_config import StepConfig

LLAMA_1B, LLAMA_3B, LLAMA_8B = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B"


def run_of(mode: str, processes: int, facts: ModelFacts, **sections: Any) -> ResolvedConfig:
    tree: dict[str, Any] = {
        "model": {"name_or_path": facts.name, "dtype": "bfloat16"},
        "lora": {"r": 16},
        "data": {"train": "rows", "max_length": 2048, "packing": True},
        "train": {"global_batch_size": 16, "per_device_train_batch_size": 1, "gradient_checkpointing": True},
        "speed": {"fused_lora": False, "tiled_mlp": False, "attention": "torch_varlen"},
        "hardware": {"count": processes},
        "parallel": ranks_run.parallel_of(mode, processes),
        "checkpoint": {"save_steps": 10},
        "evaluate": {"batch_size": 16},
        "output_dir": "runs/x",
    }
    for name, values in sections.items():
        tree[name] |= values
    config = SureFitConfig.model_validate(tree)
    return ResolvedConfig(config, {}, count_accumulation_steps(config), 10)


def shallow(name: str, layers: int) -> tuple[Any, ModelFacts]:
    shape = copy.deepcopy(catalogue()[name]["config"]) | {"num_hidden_layers": layers}
    facts = build_facts(name, shape, None, where=name, source="catalogue")
    return AutoConfig.for_model(shape.pop("model_type"), **shape), facts


@pytest.mark.parametrize(
    ("mode", "processes", "kind", "checkpointing", "error"),
    [
        ("ddp", 2, "lora", True, 0.005),
        ("fsdp", 2, "lora", True, 0.01),
        pytest.param("fsdp", 8, "lora", False, 0.005, marks=pytest.mark.slow),
        ("fsdp", 2, "full", True, 0.005),
        pytest.param("tp", 2, "lora", True, 0.005, marks=pytest.mark.slow),
        pytest.param("cp", 2, "lora", True, 0.005, marks=pytest.mark.slow),
        pytest.param("fsdp+cp", 2, "lora", True, 0.01, marks=pytest.mark.slow),
        ("fsdp+cp", 4, "full", True, 0.01),
        ("pp", 2, "lora", True, 0.005),
    ],
)
def test_arithmetic_and_the_engines_without_data_agree(
    mode: str, processes: int, kind: str, checkpointing: bool, error: float
) -> None:
    config, facts = shallow(LLAMA_1B, 3)
    batches = {"global_batch_size": 2 * (1 if mode.endswith(("tp", "cp", "pp")) else processes)}
    train = batches | {"gradient_checkpointing": checkpointing}
    resolved = run_of(mode, processes, facts, train={**train, "method": kind})
    closed = memory_per_rank.peak_bytes(resolved, facts, padded=False)
    sharing = sharing_of(resolved.config)
    assert closed is not None
    assert sharing is not None
    if mode == "pp":
        sharing = replace(sharing, rank=memory_per_rank.fullest_stage(resolved, facts))
    setting = StepConfig(
        config, "bfloat16", resolved.config.adapter, 1, 2048, packed=True, micro_batches=2,
        checkpointing=checkpointing, sharing=sharing,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = record_training(setting)
    phases = dict(trace.phases)
    assert closed.phases["step"] == pytest.approx(trace.peak(phases["first step"], phases["save"])[0], rel=error)


@pytest.fixture(scope="module")
def found() -> Any:
    pytest.importorskip("deepspeed")
    return start(HELPERS / "ranks_run.py")


@pytest.mark.distributed
@pytest.mark.parametrize("case", ranks_run.CASES)
def test_two_real_processes_hold_what_is_planned_to_the_byte(found: Any, case: str) -> None:
    mode, family, kind, dtype = ranks_run.CASES[case]
    shape = ranks_run.shape_of(mode, family) | {"architectures": [ranks_run.KINDS[family][0]], "model_type": family}
    facts = build_facts("tiny", shape, None, where="tiny", source="catalogue")
    resolved = run_of(mode, 2, facts, lora={"r": 3}, train={"method": kind}, model={"dtype": dtype})
    for rank in (0, 1):
        mine = model_state_bytes(resolved, facts, sharing_of(resolved.config), rank)
        assert found[case][rank] == {
            "parameters": mine.parameters, "gradients": mine.gradients, "optimizer": mine.optimizer
        }  # fmt: skip


def test_the_worked_example() -> None:
    facts = model_facts(LLAMA_3B)
    mine = model_state_bytes(run_of("fsdp", 8, facts), facts, ShardingLayout("fsdp", 8, 8))
    assert mine.parameters / GIB == pytest.approx(0.754, abs=0.001)
    one = model_state_bytes(run_of("ddp", 8, facts), facts, ShardingLayout("ddp", 8, 8))
    assert one.parameters / GIB == pytest.approx(6.03, abs=0.01), "weights and factors whole"
    budget_ = memory_per_rank.peak_bytes(run_of("fsdp", 8, facts), facts)
    assert budget_ is not None
    gathered = {term.moment: term.bytes for term in budget_.terms if term.term == "gathered weights"}
    layer = gathered["backward"] - gathered["loss"]
    assert layer == 2 * (gathered["loss"] - 2 * (128_256 * 3_072 + 3_072) * 1)
    assert layer / 2 / GIB == pytest.approx(0.19, abs=0.01)


def test_more_processes_need_less_of_what_they_share() -> None:
    facts = model_facts(LLAMA_8B)
    for mode in ("fsdp", "zero3", "tp", "pp"):
        few, many = (memory_per_rank.peak_bytes(run_of(mode, count, facts), facts) for count in (2, 4))
        one = memory_formula.peak_bytes_on_one(run_of(mode, 2, facts), facts)
        assert few is not None
        assert many is not None
        assert one is not None
        assert many.allocated < few.allocated
        weights = [sum(t.bytes for t in found.terms if t.term == "weights") for found in (many, few, one)]
        assert weights == sorted(weights)
        assert weights[0] < 0.4 * weights[2]


def test_deepspeed_is_calculated_with_its_buckets() -> None:
    facts = model_facts(LLAMA_8B)
    two, offloaded = (
        memory_per_rank.peak_bytes(run_of("zero2", 4, facts, parallel={"offload": offload}), facts)
        for offload in (False, True)
    )
    assert two is not None
    assert offloaded is not None
    terms = {term.term: term.bytes for term in two.terms}
    assert terms["bucket"] == 2 * 5e8
    assert terms["weights"] == 2 * facts.parameters  # type: ignore[operator]
    assert {term.term: term.bytes for term in offloaded.terms}["optimizer"] == 0
    three = memory_per_rank.peak_bytes(run_of("zero3", 4, facts), facts)
    assert three is not None
    logits = next(term.bytes for term in three.terms if term.term == "logits")
    assert logits == 12 * 2047 * facts.vocab_size, "never in chunks"
    with pytest.raises(MachineError, match="DeepSpeed"), fake_process_group_engine(ShardingLayout("zero2", 2, 2)):
        pass


BARE = LintContext(None, Path("run.yaml"))


def test_a_check_judges_one_process_of_several() -> None:
    facts, card = model_facts(LLAMA_8B), hardware_facts("a100-80")
    full = {"train": {"method": "full"}}
    alone = list(does_not_fit.check(BARE, run_of("ddp", 8, facts, **full), facts, card))  # type: ignore[attr-defined]
    shared = list(does_not_fit.check(BARE, run_of("fsdp", 8, facts, **full), facts, card))  # type: ignore[attr-defined]
    assert alone
    assert not shared


def test_nccls_memory_widens_the_interval() -> None:
    one, several = (
        build_memory_estimate(GIB, "cuda", "simulation"),
        build_memory_estimate(GIB, "cuda", "simulation", ShardingLayout("cp", 4, 4)),
    )
    assert several.high - one.high > GIB
    assert several.low > one.low
    assert build_memory_estimate(GIB, "cpu", "simulation", ShardingLayout("ddp", 2, 2)) == build_memory_estimate(
        GIB, "cpu", "simulation"
    )


def auto(tmp_path: Path, gpu: str, model: str, count: int, **values: Any) -> ResolvedConfig:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"data: {{train: some/rows, max_length: {values.pop('max_length', 2048)}}}\nmodel: {{name_or_path: {model}}}\n"
        "train: {max_steps: 10, global_batch_size: 8}\noutput_dir: runs/x\n"
    )
    changes = [f"hardware.gpu={gpu}", f"hardware.count={count}", *(f"{key}={value}" for key, value in values.items())]
    facts, hardware = model_facts(model), hardware_facts(gpu, tmp_path)
    return resolve_config(
        load_config(path, changes), facts, hardware, None, needed=closed_form_upper_bound(facts, hardware)
    )


def test_auto_shares_what_does_not_fit_and_says_why(tmp_path: Path) -> None:
    fits = auto(tmp_path, "a100-80", LLAMA_3B, 4)
    assert fits.config.parallel.mode == "ddp"
    assert "a whole model on each device" in str(fits.provenance["parallel.mode"])
    large = auto(tmp_path, "t4", LLAMA_8B, 8)
    assert large.config.parallel.mode == "fsdp"
    assert "a whole model on each device would need" in str(large.provenance["parallel.mode"])
    long = auto(tmp_path, "l40s", "Qwen/Qwen3-4B", 8, max_length=262_144)
    assert (long.config.parallel.mode, long.config.parallel.cp > 1) == ("cp", True)
    assert "a share of each example's tokens: up to" in str(long.provenance["parallel.mode"])
    whole = auto(tmp_path, "h100", "Qwen/Qwen3-4B", 8, max_length=262_144, **{"train.method": "full"})
    assert (whole.config.parallel.mode, whole.config.parallel.cp) == ("fsdp", 2), "neither fits alone"
    assert "a share of the model and a share of each example's tokens: up to" in str(whole.provenance["parallel.cp"])
    assert auto(tmp_path, "t4", LLAMA_8B, 1).config.parallel.mode == "single"


def test_the_search_keeps_what_is_learnt(tmp_path: Path) -> None:
    resolved = auto(tmp_path, "a100-80", LLAMA_3B, 4)
    facts = model_facts(LLAMA_3B)
    modes = {
        (one.config.parallel.mode, one.config.parallel.cp) for one in shared_variants(resolved, facts, deepspeed=True)
    }
    assert {("ddp", 1), ("fsdp", 1), ("cp", 2), ("cp", 4), ("fsdp", 2), ("fsdp", 4), ("tp", 1)} <= modes
    nf4 = resolved.config.model_copy(update={"model": resolved.config.model.model_copy(update={"quantization": "nf4"})})
    quantized = {
        one.config.parallel.mode for one in shared_variants(replace(resolved, config=nf4), facts, deepspeed=True)
    }
    assert not quantized & {"fsdp", "zero3", "tp"}
    planner = Planner(facts)
    few = replace(
        resolved,
        config=resolved.config.model_copy(
            update={"train": resolved.config.train.model_copy(update={"per_device_train_batch_size": 1})}
        ),
    )
    place = DeviceConfig(replace(hardware_facts("a100-80"), name="unknown"), few)
    for one in enumerate_candidates(planner, [place]):
        assert one.place.resolved.config.train.global_batch_size == 8
        assert one.micro_batch * one.accumulation >= one.place.resolved.config.train.global_batch_size / 4


def test_what_is_exchanged_and_how_long_it_takes() -> None:
    facts, card = model_facts(LLAMA_3B), hardware_facts("a100-80")
    ddp = estimate_step_communication(run_of("ddp", 4, facts), facts, card, 2048)
    fsdp = estimate_step_communication(run_of("fsdp", 4, facts), facts, card, 2048)
    assert ddp is not None
    assert fsdp is not None
    factors = memory_formula.count_trainable_parameters(
        facts, run_of("ddp", 4, facts).config.adapter, "bfloat16"
    ).parameters  # type: ignore[union-attr]
    assert ddp.bytes == round(2 * 3 / 4 * 2 * factors), "a ring moves a sum twice, but for each one's own part"
    assert fsdp.bytes > 100 * ddp.bytes
    link = link_of("a100-80")
    assert link is not None
    assert ddp.seconds == pytest.approx(ddp.bytes / (REACHED * link.bandwidth))
    wide = estimate_step_communication(run_of("fsdp", 4, facts, hardware={"count": 4, "nodes": 2}), facts, card, 2048)
    near = estimate_step_communication(
        run_of("fsdp", 4, facts, hardware={"count": 4, "nodes": 2}, parallel={"dp_replicate": 2}), facts, card, 2048
    )
    assert wide is not None
    assert near is not None
    assert near.seconds < wide.seconds / 5  # type: ignore[operator]
    assert estimate_step_communication(run_of("single", 1, facts), facts, card, 2048) is None


@pytest.mark.parametrize("mode", ["tp", "pp"])
def test_groups_that_share_a_model_also_exchange_gradients(mode: str) -> None:
    """Two groups of two: half of the micro batches of one group, and the gradients that each process holds."""
    facts, card = model_facts(LLAMA_3B), hardware_facts("a100-80")
    one, two = (
        estimate_step_communication(run_of(mode, 2, facts, hardware={"count": count}), facts, card, 2048)
        for count in (2, 4)
    )
    assert one is not None
    assert two is not None
    factors = memory_formula.count_trainable_parameters(
        facts, run_of(mode, 2, facts).config.adapter, "bfloat16"
    ).parameters  # type: ignore[union-attr]
    assert two.bytes == pytest.approx(one.bytes / 2 + 2 * 1 / 2 * 2 * factors / 2, rel=1e-6)
    assert two.what.endswith("between the groups")


def test_shared_tokens_within_shards_exchange_keys_which_are_waited_for() -> None:
    facts, card = model_facts(LLAMA_3B), hardware_facts("a100-80")
    step = {"train": {"global_batch_size": 1}, "data": {"max_length": 65_536}}
    tokens, shards, both = (
        estimate_step_communication(run_of(mode, 4, facts, **step), facts, card, 65_536)
        for mode in ("cp", "fsdp", "fsdp+cp")
    )
    assert tokens is not None
    assert shards is not None
    assert both is not None
    keys = 3 * 28 * 3 / 4 * 2 * 2 * 8 * 128 * 65_536
    assert both.waited == both.bytes - shards.bytes == keys
    factors = memory_formula.count_trainable_parameters(
        facts, run_of("cp", 4, facts).config.adapter, "bfloat16"
    ).parameters  # type: ignore[union-attr]
    assert tokens.bytes == round(keys + 2 * 3 / 4 * 2 * factors)
    # Groups within a machine, shards over two: the keys do not leave it.
    over = {"hardware": {"count": 4, "nodes": 2}, "parallel": {"cp": 4}}
    wide = estimate_step_communication(run_of("fsdp+cp", 8, facts, **step, **over), facts, card, 65_536)
    assert wide is not None
    assert (wide.waited, wide.bytes - wide.across) == (keys, keys)
    assert wide.waited_seconds == both.waited_seconds


def test_plan_json_says_whose_numbers_it_has() -> None:
    facts, card = model_facts(LLAMA_8B), hardware_facts("a100-80")
    found = build_plan(run_of("pp", 4, facts), facts, card, quick=True)["ranks"]
    assert (found["mode"], found["processes"], found["rank"]) == ("pp", 4, 1)
    assert "the stage with most memory" in found["which"]
    assert found["rank"] == 1, "the first stage holds a layer less, for the embeddings"
    assert found["held"]["parameters_bytes"] < 2 * facts.parameters / 3  # type: ignore[operator]
    both = build_plan(run_of("fsdp+cp", 4, facts), facts, card, quick=True)["ranks"]
    assert both["share"].endswith("in shards, and a part of every example's tokens in each")
    assert both["exchanged"].endswith("; keys and values of every layer")
    assert build_plan(run_of("single", 1, facts), facts, card, quick=True)["ranks"] is None
