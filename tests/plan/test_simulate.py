"""The phases of a run, their terms, deep models from shallow ones, and numbers that no run can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from surefit.config.schema import LoraSection
from surefit.core.errors import ConfigError, ModelError
from surefit.core.units import MIB
from surefit.facts.model import model_facts
from surefit.plan.extrapolate_layers import SHALLOW, extrapolate_trace, layer_of
from surefit.plan.simulate import SimulatedMemory, record_training, simulate_memory
from surefit.plan.step_config import StepConfig, build_step_config
from surefit.plan.trace import Recorder, Trace

LORA, FULL = LoraSection(r=8, target_modules=["q_proj"]), None


def _config(**changes: Any) -> LlamaConfig:
    shape = {
        "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    return LlamaConfig(**shape | changes)


@pytest.fixture(scope="module")
def memory() -> SimulatedMemory:
    return simulate_memory(StepConfig(_config(), "bfloat16", LORA, rows=2, length=128))


def test_the_phases_of_a_run(memory: SimulatedMemory) -> None:
    phases = {phase.name: phase for phase in memory.phases}
    assert list(phases) == ["load", "first step", "step", "save", "eval", "merge"]
    assert all(phase.reserved >= phase.allocated for phase in memory.phases)
    assert phases["load"].allocated < phases["save"].allocated < phases["step"].allocated
    assert memory.reserved == max(phase.reserved for phase in memory.phases)
    assert memory.fragmentation == memory.reserved - memory.allocated >= 0


def test_a_checkpoint_takes_nothing_and_the_optimizer_stays(memory: SimulatedMemory) -> None:
    """A checkpoint copies to the host what is held anyway: weights, factors, masters and moments, and workspaces."""
    save = next(phase for phase in memory.phases if phase.name == "save")
    kept = sum(memory.terms[name] for name in ("weights", "adapter", "optimizer", "workspace"))
    assert save.allocated == pytest.approx(kept, rel=1e-3)


def test_the_terms_add_up_to_the_fullest_moment_of_a_step(memory: SimulatedMemory) -> None:
    step = max(phase.allocated for phase in memory.phases if "step" in phase.name)
    assert sum(memory.terms.values()) == step
    assert {"weights", "adapter", "optimizer", "activations", "loss", "workspace", "batch"} <= memory.terms.keys()
    weights = 2 * (2 * 2048 * 256 + 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 2 * 256) + 256)
    assert memory.terms["weights"] == pytest.approx(weights, rel=2e-3)
    factors = 2 * 8 * (256 + 256)
    assert memory.terms["adapter"] == pytest.approx(2 * factors, rel=1e-2)
    assert memory.terms["optimizer"] == pytest.approx((4 + 8) * factors, rel=5e-2)
    assert memory.terms["workspace"] == 2 * (2 * 4096 * 1024 + 8 * 16 * 1024)
    assert memory.peak.module.endswith("lm_head")


def test_what_the_update_makes_is_temporary() -> None:
    """All weights in bfloat16 and next to no tokens: the fullest moment is the float32 copies of all gradients."""
    found = simulate_memory(StepConfig(_config(), "bfloat16", FULL, rows=1, length=8))
    assert found.terms["temporaries"] == pytest.approx(2 * found.terms["gradients"], rel=0.05)
    assert found.terms["gradients"] == pytest.approx(found.terms["weights"], rel=0.01)
    assert found.terms["optimizer"] == pytest.approx(6 * found.terms["weights"], rel=0.05)


def test_a_gpu_of_this_generation_has_larger_workspaces() -> None:
    setting = StepConfig(_config(num_hidden_layers=1), "bfloat16", LORA, 1, 16)
    assert simulate_memory(replace(setting, capability=(9, 0))).terms["workspace"] == 64 * MIB
    assert "workspace" not in simulate_memory(replace(setting, cuda=False)).terms


def _events(trace: Trace) -> list[tuple[int, str]]:
    found = []
    for event in trace.events:
        allocation = trace.allocations[abs(event) - 1]
        found.append((allocation.bytes if event > 0 else -allocation.bytes, allocation.module))
    return found


@pytest.mark.parametrize(("adapter", "checkpointing"), [(LORA, False), (LORA, True), (FULL, True)], ids=str)
def test_a_deep_model_s_trace_is_that_of_a_shallow_one_with_more_layers(
    adapter: LoraSection, checkpointing: bool
) -> None:
    """Equal event by event: sizes, order, and the layer that each belongs to. So reserved memory is equal as well."""
    shallow = StepConfig(_config(num_hidden_layers=SHALLOW), "bfloat16", adapter, 2, 40, True, 1, checkpointing)
    deep = extrapolate_trace(record_training(shallow), 6)
    assert deep is not None
    whole = record_training(replace(shallow, config=_config(num_hidden_layers=6)))
    assert _events(deep) == _events(whole)
    assert (deep.phases, deep.tags) == (whole.phases, whole.tags)


def test_layers_that_are_not_alike_are_not_repeated() -> None:
    trace = record_training(StepConfig(_config(num_hidden_layers=SHALLOW), "bfloat16", LORA, 1, 16))
    at = next(i for i, a in enumerate(trace.allocations) if a.phase == "step" and layer_of(a.module) == 2)
    trace.allocations[at] = replace(trace.allocations[at], bytes=trace.allocations[at].bytes + 512)
    assert extrapolate_trace(trace, 9) is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": 0}, ConfigError, "0 rows in a micro batch"),
        ({"length": 0}, ConfigError, "0 tokens in a row"),
        ({"micro_batches": 0}, ConfigError, "0 micro batches"),
        (
            {"adapter": LoraSection(r=257)},
            ConfigError,
            "rank 257 has more parameters than the layers, which are 256 wide",
        ),
        ({"config": _config(num_hidden_layers=0)}, ModelError, "0 layers"),
    ],
    ids=str,
)
def test_impossible_numbers_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        simulate_memory(replace(StepConfig(_config(), "bfloat16", LORA, 1, 16), **change))


def test_a_setting_says_what_the_config_says(place: Callable[..., Any]) -> None:
    where, facts = place(
        "train.per_device_train_batch_size=2", "train.gradient_checkpointing=true", "lora.r=4", gpu="h100"
    )
    setting = build_step_config(where.resolved, facts, where.hardware)
    assert (setting.rows, setting.micro_batches, setting.length, setting.packed) == (2, 4, 512, True)
    assert (setting.dtype, setting.checkpointing, setting.cuda, setting.capability) == ("bfloat16", True, True, (9, 0))
    assert (setting.adapter.r, setting.layers) == (4, facts.num_layers)
    assert build_step_config(where.resolved, facts, where.hardware, length=9999).length == 512
    short = build_step_config(where.resolved, facts, where.hardware, length=100, supervised=0.5)
    assert (short.rows, short.length, short.micro_batches) == (8, 100, 1), "8 of 100 tokens fit into a row of 1,024"
    assert short.targets == 396
    padded, _ = place("data.packing=false", "train.per_device_train_batch_size=2")
    plain = build_step_config(padded.resolved, facts, padded.hardware, length=100)
    assert (plain.rows, plain.length, plain.micro_batches, plain.padded) == (2, 100, 4, True)


def test_a_model_that_cannot_be_simulated_is_named(place: Callable[..., Any]) -> None:
    where, facts = place()
    for changed, message in (
        (replace(facts, custom_code=True), "its own Python code"),
        (replace(facts, quantization="gptq"), "quantized"),
    ):
        with pytest.raises(ModelError, match=message):
            build_step_config(where.resolved, changed, where.hardware)


def test_the_built_in_model_is_read_from_its_folder(place: Callable[..., Any]) -> None:
    where, facts = place("lora.target_modules=[q_proj]", model="surefit/nano", gpu="cpu")
    found = simulate_memory(build_step_config(where.resolved, facts, where.hardware, length=32))
    assert found.terms["weights"] == pytest.approx(2 * (model_facts("surefit/nano").parameters or 0), rel=0.02)
    assert (found.context, "workspace" in found.terms) == (0, False)


def test_a_repeated_part_leaves_the_trace_that_running_it_leaves() -> None:
    def traced(repeat: bool) -> Trace:
        recorder = Recorder(matmuls=frozenset({"mm"}), workspace=1024)
        weights = {name: torch.ones(64, 64) for name in ("layers.0.up", "layers.1.up", "layers.2.up", "layers.3.up")}
        with recorder:
            recorder.start("merge")
            for name, weight in weights.items():
                with recorder.inside(name):
                    recorder.tag([weight], "weights")
                work = partial(lambda weight: (weight @ weight).abs().sum(), weight)
                recorder.repeating("up", name, work) if repeat else work()
        return recorder.trace

    assert traced(repeat=True) == traced(repeat=False)


SETTING = StepConfig(_config(), "bfloat16", LORA, rows=2, length=64)


def workspaces(trace: Trace) -> list[str]:
    """The phases in which cuBLAS's workspaces are opened."""
    return [trace.allocations[number - 1].phase for number, tag in trace.tags.items() if tag == "workspace"]


def test_the_workspace_is_opened_where_a_run_opens_it() -> None:
    """Packed, the proof that documents do not read each other multiplies before the first step does; a shard's model
    is proven on the host."""
    packed = replace(SETTING, packed=True, capability=(9, 0))
    assert workspaces(record_training(packed)) == ["load", "first step"]
    assert workspaces(record_training(replace(packed, packed=False))) == ["first step", "first step"]
    assert workspaces(record_training(replace(packed, cuda=False))) == []
    loads = [simulate_memory(each, merge=False).phases[0] for each in (packed, replace(packed, packed=False))]
    assert loads[0].allocated - loads[1].allocated >= 32 * MIB


def test_the_proof_of_packing_leaves_the_model_as_it_was() -> None:
    """What is allocated after loading is the same, but for the workspace, which is there already."""
    packed = replace(SETTING, packed=True, capability=(9, 0))
    trace = record_training(packed)
    sizes = {
        phase: [each.bytes for each in trace.allocations if each.phase == phase and each.bytes != 32 * MIB]
        for phase, _ in trace.phases
    }
    assert sizes["step"]
    live = [number for number in trace.live_at(dict(trace.phases)["first step"]) if number not in trace.tags]
    assert not live, "nothing of the proof is left"


def test_four_bit_weights_are_quantised_on_the_gpu_one_after_the_other() -> None:
    """In the order of their names, from 16 bits that are gone before the next are read: that of 256 × 512 numbers is
    262,144 bytes, and beside it twice the scales of every 64 numbers, 8,192 bytes each."""
    pytest.importorskip("bitsandbytes")
    trace = record_training(replace(SETTING, quantization="nf4", dtype="bfloat16"))
    load = dict(trace.phases)
    events = trace.events[load["load"] : load["first step"]]
    whole = [
        n for n in events if n > 0 and (a := trace.allocations[n - 1]).dtype == "bfloat16" and a.shape == (512, 256)
    ]
    names = [trace.allocations[number - 1].module.removeprefix("base_model.model.") for number in whole]
    assert names == [f"model.layers.{layer}.mlp.{which}_proj" for layer in (0, 1) for which in ("gate", "up")]
    for number, following in pairwise(whole):
        at = events.index(number)
        assert trace.allocations[number - 1].bytes == 262_144
        assert -number in events[at : events.index(following)]
        scales = [n for n in events[at : events.index(-number)] if n > 0 and trace.allocations[n - 1].shape == (2048,)]
        assert [trace.allocations[n - 1].bytes for n in scales if trace.allocations[n - 1].dtype == "float32"] == [
            8192,
            8192,
        ]
    on_cpu = record_training(replace(SETTING, quantization="nf4", dtype="bfloat16", cuda=False))
    assert not any(each.shape == (512, 256) for each in on_cpu.allocations if each.phase == "load")
