"""What a CPU run holds beside its step: a checkpoint's copy, the files' pages, the process; and whose RAM it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefit.core.units import GIB, MIB
from surefit.plan.build_plan import build_plan
from surefit.plan.cpu import mapped_file_bytes, onednn_scratch_bytes, saves_before_last_step
from surefit.plan.memory_interval import CPU_MARGIN, KEPT_ABOVE, build_memory_estimate, closed_form_estimate
from surefit.plan.planner import memory_per_process
from surefit.plan.process import ASSUMED
from surefit.plan.simulate import simulate_memory
from surefit.plan.step_config import build_step_config

FULL = ("train.method=full", "model.dtype=float32", "train.per_device_train_batch_size=8")
NANO = {"model": "surefit/nano", "gpu": "cpu"}


@pytest.mark.parametrize(
    ("every", "order", "copied"),
    [
        (5, ["load", "first step", "save", "step", "eval"], True),
        (10, ["load", "first step", "step", "save", "eval"], False),
    ],
)
def test_the_copy_of_a_checkpoint_is_beside_the_steps_after_it(
    place, every: int, order: list[str], copied: bool
) -> None:
    where, facts = place(*FULL, f"checkpoint.save_steps={every}", **NANO)
    found = simulate_memory(build_step_config(where.resolved, facts, where.hardware, length=64), merge=False)
    assert [phase.name for phase in found.phases] == order
    # Weights and two moments in float32, as the closed form has them too.
    expected = 12 * (facts.parameters or 0)
    assert found.terms.get("checkpoint's copy", 0) == pytest.approx(expected if copied else 0, rel=0.01)
    phases = {phase.name: phase for phase in found.phases}
    assert (phases["step"].allocated > phases["first step"].allocated + expected) is copied
    assert all(phase.reserved >= phase.allocated for phase in found.phases)
    assert saves_before_last_step(where.resolved) is copied


def test_what_is_freed_goes_back_between_the_phases(place) -> None:
    where, facts = place(*FULL, "data.max_length=512", "checkpoint.save_steps=10", **NANO)
    found = {
        phase.name: phase for phase in simulate_memory(build_step_config(where.resolved, facts, where.hardware)).phases
    }
    assert found["eval"].reserved < found["step"].reserved


def test_the_closed_form_has_it_too(place) -> None:
    often, facts = place(*FULL, "checkpoint.save_steps=5", **NANO)
    once, _ = place(*FULL, "checkpoint.save_steps=10", **NANO)
    sizes = [closed_form_estimate(each.resolved, facts, each.hardware) for each in (often, once)]
    assert sizes[0] is not None
    assert sizes[1] is not None
    assert sizes[0].bytes - sizes[1].bytes == 12 * (facts.parameters or 0)


def test_of_a_quantised_base_the_file_stays_mapped(place) -> None:
    where, facts = place("model.quantization=nf4", "model.dtype=float32", model="meta-llama/Llama-3.2-1B", gpu="cpu")
    stored = replace(facts, dtype="float32")
    # 16 layers × (2 × 2,048² + 2 × 512 × 2,048 + 3 × 8,192 × 2,048) numbers of 4 bytes; head and embeddings are kept.
    assert mapped_file_bytes(where.resolved, stored) == 4 * 16 * (2 * 2048**2 + 2 * 512 * 2048 + 3 * 8192 * 2048)
    assert mapped_file_bytes(where.resolved, replace(facts, dtype="bfloat16")) == 0
    plain, _ = place("model.dtype=float32", model="meta-llama/Llama-3.2-1B", gpu="cpu")
    assert mapped_file_bytes(plain.resolved, stored) == 0


@pytest.mark.slow
def test_products_in_16_bits_take_memory_of_their_own(place) -> None:
    """oneDNN's copy of the widest weights, here the output head's, and its kernels."""
    llama = {"model": "meta-llama/Llama-3.2-1B", "gpu": "cpu"}
    where, facts = place("model.dtype=bfloat16", "data.max_length=512", **llama)
    extra = 128_256 * 2048 * 2 + 64 * MIB
    assert onednn_scratch_bytes(where.resolved, facts) == extra
    setting = build_step_config(where.resolved, facts, where.hardware)
    with_it, without = (simulate_memory(replace(setting, products=size)).reserved for size in (extra, 0))
    assert 0 <= with_it - without - extra < MIB
    plain, _ = place("model.dtype=float32", "data.max_length=512", **llama)
    assert build_step_config(plain.resolved, facts, plain.hardware).products == 0


def test_the_interval_is_the_simulation_and_the_process() -> None:
    needed = build_memory_estimate(4 * GIB, "cpu", "simulation")
    assert needed.likely == 4 * GIB + 620 * MIB
    assert needed.low == round(4 * GIB * (1 - CPU_MARGIN["simulation"])) + ASSUMED[0]
    assert needed.high == round(4 * GIB * (1 + CPU_MARGIN["simulation"])) + ASSUMED[1]
    assert max(needed.high / needed.likely - 1, 1 - needed.low / needed.likely) < 0.10
    measured = build_memory_estimate(4 * GIB, "cpu", "simulation", process=(480 * MIB, 640 * MIB, True))
    assert (needed.low - measured.low, needed.high - measured.high) == (20 * MIB, 100 * MIB)
    kept = build_memory_estimate(GIB, "cpu", "simulation", kept=True)
    assert kept.high == round(GIB * (1 + KEPT_ABOVE)) + ASSUMED[1]


def test_processes_of_one_machine_share_its_ram(place) -> None:
    one, facts = place(*FULL, **NANO, memory=24 * GIB)
    two, _ = place(*FULL, "hardware.count=2", "parallel.mode=ddp", **NANO, memory=24 * GIB)
    assert memory_per_process(one.resolved, one.hardware) == 24 * GIB
    assert memory_per_process(two.resolved, two.hardware) == 12 * GIB
    small = replace(two.hardware, memory_bytes=GIB)
    assert build_plan(two.resolved, facts, small, quick=True)["estimate"]["verdict"] != "fits"


def test_the_plan_tells_training_from_merging(place) -> None:
    where, facts = place(*FULL, **NANO)
    estimate = build_plan(where.resolved, facts, where.hardware)["estimate"]
    alone = estimate["training"]
    assert alone["low_bytes"] < alone["likely_bytes"] < alone["high_bytes"] <= estimate["high_bytes"]
