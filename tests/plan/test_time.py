"""The time of a step: counts against arithmetic by hand and PyTorch's own counter, rates, runs, a real CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.config.load import LoadedConfig
from surefit.config.resolve import resolve_config
from surefit.config.schema import LoraSection, SureFitConfig
from surefit.core.errors import ConfigError, MachineError
from surefit.data.tokens.collate import build_loss_targets
from surefit.facts.gpus import GPUS
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.facts.sdpa import share_of_products
from surefit.plan import calibrate as calibrating
from surefit.plan import profile as profiles
from surefit.plan.operations import Operation, Operations, OperatorCounter, extrapolate_operations, operator_cost
from surefit.plan.planner import ExampleLengths, Planner
from surefit.plan.profile import (
    LAUNCH_SECONDS,
    MOVEMENT,
    PRODUCTS,
    DeviceProfile,
    DeviceRates,
    find_device_speed,
    interpolate_speed,
    load_profile,
    load_stored_profile,
    to_device_rates,
)
from surefit.plan.simulate import record_training
from surefit.plan.step_config import StepConfig
from surefit.plan.time import OperatorTime, StepTime, count_step_operations, roofline, run_time
from surefit.train.optim import MasterAdamW
from surefit.train.step import train_step

ROOT = Path(__file__).parents[2]
HIDDEN, INNER, HEADS, KEYS, VOCABULARY = 64, 160, 4, 2, 256
FLAT = DeviceRates(
    {"float32": [(1, 1e10)], "bfloat16": [(1, 1e11)]}, [(1, 1e9)], 1e-5, {"float32": 1e10}, 0.1, "a test"
)


def config(layers: int = 2) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KEYS, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip


def setting(kind: str = "lora", layers: int = 2, **changes: Any) -> StepConfig:
    base = StepConfig(config(layers), "bfloat16", LoraSection(r=4) if kind == "lora" else None, rows=2, length=48)
    return replace(base, **changes)


def flops(counted: Operations, attention: bool | None = None) -> int:
    """Of all operators, of attention, or of all but attention."""
    return sum(
        times * operation.flops
        for operation, times in counted.items()
        if attention is None or ("attention" in operation.name) == attention
    )


def linear_flops(counted: Operations) -> int:
    """Of the linear layers alone: transformers 5.17 multiplies positions and frequencies as a batch of matrices (bmm),
    5.23 number by number."""
    return sum(times * each.flops for each, times in counted.items() if each.name in ("mm", "addmm"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))


def linear_parameters(layers: int) -> tuple[int, int]:
    """(of one layer's seven linear maps, of those that read the layer's input)."""
    keys = HIDDEN // HEADS * KEYS
    reading = HIDDEN * HIDDEN + 2 * HIDDEN * keys
    return reading + HIDDEN * HIDDEN + 3 * HIDDEN * INNER, reading


def test_full_training_multiplies_every_weight_three_times() -> None:
    step, _ = count_step_operations(setting("full"))
    tokens, targets, (layer, _) = 2 * 48, 2 * 47, linear_parameters(2)
    # One hidden state goes through the head to show what it is made of.
    assert linear_flops(step) == 6 * tokens * 2 * layer + (6 * targets + 2) * HIDDEN * VOCABULARY
    scores = 2 * HEADS * 48 * 48 * (HIDDEN // HEADS)
    assert flops(step, attention=True) == 2 * 2 * (2 + 5) * scores // 2


def test_lora_skips_the_weight_gradients_of_the_base_model() -> None:
    """And the first layer's input gradient, which nobody needs, of base and adapter."""
    step, _ = count_step_operations(setting("lora"))
    tokens, targets, (layer, reading), r = 2 * 48, 2 * 47, linear_parameters(2), 4
    keys = HIDDEN // HEADS * KEYS
    shapes = [(HIDDEN, HIDDEN), (HIDDEN, keys), (HIDDEN, keys), (HIDDEN, HIDDEN)]
    shapes += [(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]
    factors = r * sum(inputs + outputs for inputs, outputs in shapes)
    base = 4 * (tokens * 2 * layer + targets * HIDDEN * VOCABULARY) - 2 * tokens * reading
    adapter = 6 * tokens * 2 * factors - 2 * tokens * 3 * r * HIDDEN
    assert linear_flops(step) == base + adapter


@pytest.mark.parametrize(("experts", "dtype"), [(False, "bfloat16"), (True, "bfloat16"), (True, "float32")])
def test_of_the_experts_those_that_are_chosen_are_counted(experts: bool, dtype: str) -> None:
    """Forward and the inputs' gradient; with factors beside them that of the whole stacks, and these made of both."""
    many, chosen, inner, r = 8, 2, 32, 4
    shape = {"num_experts": many, "num_experts_per_tok": chosen, "moe_intermediate_size": inner, "head_dim": 16}
    model = Qwen3MoeConfig(**{**config().to_diff_dict(), **shape, "model_type": "qwen3_moe"})
    adapter = LoraSection(r=r, target_modules=["q_proj"], experts=experts)
    step, _ = count_step_operations(setting(config=model, adapter=adapter, dtype=dtype))
    found = sum(times * each.flops for each, times in step.items() if each.name == "_grouped_mm")
    rows, layers, each = 2 * 48 * chosen, 2, 3 * HIDDEN * inner
    # Nobody needs the gradient of what the first layer's experts read: but its attention does, which has factors.
    assert found == (6 if experts else 4) * rows * layers * each
    batched = sum(times * each.flops for each, times in step.items() if each.name in ("bmm", "baddbmm"))
    added = 2 * r * layers * many * each  # B A, and the gradients of B and A
    assert batched >= 3 * added if experts else batched < added


def test_checkpointing_runs_the_layers_forward_twice() -> None:
    plain, again = (count_step_operations(setting("full", checkpointing=each))[0] for each in (False, True))
    layer, _ = linear_parameters(2)
    extra = flops(again, attention=False) - flops(plain, attention=False)
    # PyTorch stops recomputing at the last tensor it needs, which is before the last product of the layer.
    assert extra == 2 * 2 * 48 * 2 * (layer - HIDDEN * INNER)


def test_a_real_step_has_the_flops_that_pytorch_counts() -> None:
    """torch.utils.flop_counter knows no attention of a CPU, so without it."""
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
    ids = torch.randint(0, VOCABULARY, (2, 48))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} | build_loss_targets(ids)
    with FlopCounterMode(display=False) as counter:
        train_step(model, [batch], MasterAdamW(model), 1.0)
    step, _ = count_step_operations(setting("full", dtype="float32", cuda=False))
    assert flops(step, attention=False) == counter.get_total_flops()


@pytest.mark.parametrize(("kind", "layers", "micro_batches"), [("lora", 9, 1), ("full", 2, 4)])
def test_layers_and_micro_batches_are_extrapolated_exactly(kind: str, layers: int, micro_batches: int) -> None:
    deep = setting(kind, layers, micro_batches=micro_batches)
    tally = OperatorCounter({"step"})
    record_training(deep, tally.note)
    counted, _ = count_step_operations(deep)
    for what in ("flops", "bytes"):
        total, direct = (sum(n * getattr(o, what) for o, n in each.items()) for each in (counted, tally.operations))
        assert total == direct
    seconds, directly = roofline(counted, FLAT)[0], roofline(tally.operations, FLAT)[0]
    assert seconds == pytest.approx(directly, rel=1e-3)  # launches of an operator on lists come in whole numbers


def test_extended_continues_the_line() -> None:
    same, small, large = (Operation(name, "float32", 0, size, 1) for name, size in (("a", 1), ("b", 20), ("b", 30)))
    line = extrapolate_operations(Counter({same: 2, small: 1}), Counter({same: 3, large: 1}), 2)
    assert sum(times * operation.bytes for operation, times in line.items()) == 5 * 1 + 50
    assert line[same] == 5


def test_the_roofline_by_hand() -> None:
    product = Operation("mm", "bfloat16", 10**9, 10**6, 1)  # 10 ms of arithmetic, 1 ms of memory
    thin = Operation("mm", "float32", 10**6, 10**7, 1)  # 0.1 ms of arithmetic, 10 ms of memory
    many = Operation("_fused_adamw_", "float32", 0, 2 * 10**6, 5)  # 2 ms of memory
    counted = Counter({product: 3, thin: 1, many: 1})
    seconds, limit = roofline(counted, FLAT)
    assert seconds == pytest.approx(0.030 + 0.010 + 0.002)
    assert limit == "arithmetic"
    assert roofline(Counter({thin: 1}), FLAT)[1] == "memory bandwidth"
    one_after_the_other, _ = roofline(counted, replace(FLAT, overlaps=False))
    assert one_after_the_other == pytest.approx(seconds + 9e-5)


def test_a_gpu_works_while_kernels_are_launched() -> None:
    """1,000 kernels of 10 µs to launch: 10 ms, hidden by 12 ms of work and not by 4."""
    for work, on_gpu, on_cpu in ((4e-3, 10e-3, 14e-3), (12e-3, 12e-3, 22e-3)):
        counted = Counter({Operation("add", "bfloat16", 0, round(work * 1e6), 1): 1000})
        gpu, cpu = (roofline(counted, replace(FLAT, overlaps=each)) for each in (True, False))
        assert (gpu[0], cpu[0]) == (pytest.approx(on_gpu), pytest.approx(on_cpu))
        assert gpu[1] == ("kernel launches" if on_gpu > work else "memory bandwidth")


def test_a_step_waits_for_launches_as_a_whole() -> None:
    """Two parts of 3 + 1 ms of work and 1 + 3 ms of launches: the second's are made while the first still works."""
    first, second = OperatorTime(arithmetic=3e-3, launches=1e-3), OperatorTime(movement=1e-3, launches=3e-3)
    assert first.seconds == second.seconds == 3e-3
    assert first.plus(second).seconds == pytest.approx(4e-3)
    assert first.plus(second, 2).seconds == pytest.approx(7e-3)
    assert first.plus(second, -5) == OperatorTime(arithmetic=3e-3), "less than nothing of neither"


def test_attention_has_a_rate_of_its_own() -> None:
    """An H200: products at 0.70 × 989 TFLOP/s = 692; flash 0.45 of that forward, and backward with heads of 64
    0.45 × 0.8 × 0.75 = 0.27 of it. That is 32 % of the data sheet forward; its authors give 35 % on Hopper."""
    rates, flops = to_device_rates(GPUS["h200"]), 10**13
    product = 989e12 * PRODUCTS
    for attention, share in (("flash forward 128", 0.45), ("flash backward 64", 0.27), ("efficient forward 128", 0.35)):
        call = Operation("any", "bfloat16", flops, 1, 1, attention)
        assert roofline(Counter({call: 1}), rates)[0] == pytest.approx(flops / (share * product))
    plain = roofline(Counter({Operation("mm", "bfloat16", flops, 1, 1): 1}), rates)[0]
    assert plain == pytest.approx(flops / product)
    assert share_of_products("flash", (8, 0)) == 0.7


def test_a_data_sheet_is_not_reached() -> None:
    """10^12 bytes at 0.82 of 4.8 TB/s, and 1,000 kernels of nothing."""
    rates = to_device_rates(GPUS["h200"])
    assert roofline(Counter({Operation("add", "bfloat16", 0, 10**12, 1): 1}), rates)[0] == pytest.approx(
        1e12 / (MOVEMENT * 4.8e12)
    )
    assert roofline(Counter({Operation("add", "bfloat16", 0, 1, 1): 1000}), rates)[0] == 1000 * LAUNCH_SECONDS


def test_measured_attention_is_preferred_with_the_nearest_heads() -> None:
    curves = {
        "flash backward 64 bfloat16": [(1e9, 1e14), (1e11, 2e14)],
        "flash backward 128 bfloat16": [(1e9, 1e14), (1e11, 3e14)],
    }
    rates = to_device_rates(profile("NVIDIA H100 80GB HBM3", attention=curves))
    for width, speed in ((64, 2e14), (80, 2e14), (128, 3e14), (256, 3e14)):
        assert rates.attention_speed("flash", True, width, "bfloat16", 1e12) == speed
    # Not measured: a share of the fastest product.
    assert rates.attention_speed("flash", False, 128, "bfloat16", 1e12) == pytest.approx(0.45 * 3e14)
    on_cpu = to_device_rates(profile("a processor", kind="cpu"))
    assert not on_cpu.overlaps
    assert on_cpu.attention_speed("cpu", False, 64, "float32", 1e12) == 4e12


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if (found := operator_cost(func, args, kwargs or {}, out)) is not None:
            self.operations.append(found)
        return out


LOGITS = torch.zeros(410, 1000)
ROW, TARGET = torch.arange(410), torch.zeros(410, dtype=torch.long)
TOUCHED = {
    # A number of each row: read and written, and two indices of 8 bytes for it.
    "index": (lambda: LOGITS[ROW, TARGET], 410 * (4 + 4 + 16)),
    "index_put_": (lambda: LOGITS.index_put_((ROW, TARGET), torch.ones(410)), 410 * (4 + 4 + 16)),
    "gather": (lambda: LOGITS.gather(1, TARGET[:, None]), 410 * (4 + 4 + 8)),
    "scatter_": (lambda: LOGITS.scatter_(1, TARGET[:, None], 2.0), 410 * (4 + 8)),
    # Added up: what is there is read as well.
    "scatter_add_": (lambda: LOGITS.scatter_add_(1, TARGET[:, None], torch.ones(410, 1)), 410 * (3 * 4 + 8)),
    "index_add_": (lambda: LOGITS.index_add_(0, ROW[:5], torch.ones(5, 1000)), 5 * (3 * 4000 + 8)),
    # A copy of the whole, and the numbers.
    "scatter": (lambda: LOGITS.scatter(1, TARGET[:, None], 2.0), 2 * 1_640_000 + 410 * (4 + 8)),
    # Whole rows.
    "embedding": (lambda: torch.nn.functional.embedding(ROW[:7], LOGITS), 7 * (2 * 4000 + 8)),
    "index_put_ of rows": (lambda: LOGITS.index_put_((ROW[:7],), torch.zeros(1000)), 7 * (4000 + 8) + 4000),
    # What is only overwritten is not read, what is changed is; a shape is not read.
    "zero_": (lambda: LOGITS.zero_(), 1_640_000),
    "mul_": (lambda: LOGITS.mul_(2), 2 * 1_640_000),
    "copy_": (lambda: LOGITS.copy_(torch.ones(1)), 1_640_000 + 4),
    "zeros_like": (lambda: torch.zeros_like(LOGITS), 1_640_000),
}  # fmt: skip


@pytest.mark.parametrize("name", TOUCHED)
def test_bytes_are_those_that_are_touched(name: str) -> None:
    call, expected = TOUCHED[name]
    with Counted() as counted:
        call()
    found = [each.bytes for each in counted.operations if each.name == name.split()[0]]
    assert found == [expected]


def test_the_optimizer_writes_all_but_the_gradients() -> None:
    weight = torch.nn.Parameter(torch.zeros(1000))
    weight.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    with Counted() as counted:
        optimizer.step()
    (update,) = (each for each in counted.operations if each.name == "_fused_adamw_")
    assert update.bytes == 7 * 4000 + 4, "gradient, weight and two moments read, three of them written; and the step"


def step_on(gpu: str, lengths: ExampleLengths | None = None, **sections: Any) -> StepTime:
    """Of the built-in model in padded micro batches of 4 × 512 tokens."""
    tree = {
        "model": {"name_or_path": "surefit/nano", "dtype": "bfloat16"},
        "data": {"train": "unused", "max_length": 512, "packing": False},
        "train": {"global_batch_size": 8, "per_device_train_batch_size": 4, "gradient_checkpointing": False},
        "output_dir": "unused",
    }
    tree |= {name: tree.get(name, {}) | section for name, section in sections.items()}
    hardware, model = hardware_facts(gpu), model_facts("surefit/nano")
    made = resolve_config(
        LoadedConfig(SureFitConfig.model_validate(tree), Path("run.yaml"), {}, frozenset()), model, hardware, 100
    )
    step = Planner(model, lengths or ExampleLengths()).step(made, hardware)
    assert step is not None
    return step


@pytest.mark.parametrize(("micro", "passes"), [(4, 1), (1, 2)])
def test_packed_ranks_wait_for_their_own_launches(micro: int, passes: int) -> None:
    """64 examples of 100 tokens over 8 ranks: 8 for each, in a row of 2,048 tokens or in two of 512."""
    lengths, data = ExampleLengths(500, 100, "made"), {"packing": True}
    train = {"global_batch_size": 64, "per_device_train_batch_size": micro}
    shared = {"hardware": {"count": 8}, "parallel": {"mode": "ddp"}}
    eight = step_on("h100", lengths, data=data, train=train, **shared)
    alone = step_on("h100", lengths, data=data, train={"global_batch_size": 8})
    assert eight.limit == alone.limit == "kernel launches"
    assert eight.seconds == pytest.approx(passes * alone.seconds, rel=0.02)


def test_a_step_on_gpus_of_the_catalogue() -> None:
    small_slow, small_fast = (step_on(name) for name in ("a10", "h100"))
    assert small_slow.seconds == small_fast.seconds, "both wait for launches"
    assert small_slow.limit == small_fast.limit == "kernel launches"
    batch = {"global_batch_size": 512, "per_device_train_batch_size": 512}
    slow, fast = (step_on(name, train=batch) for name in ("a10", "h100"))
    assert slow.seconds > 1.5 * fast.seconds
    assert (slow.flops, slow.bytes, slow.kernels) == (fast.flops, fast.bytes, fast.kernels)
    for each in (slow, fast):
        assert each.low < each.seconds < each.high
        assert each.tokens_per_second == pytest.approx(512 * 512 / each.seconds)
        assert each.evaluation_tokens_per_second > each.tokens_per_second
        assert 0 < each.mfu < 1
        assert each.source.startswith("data sheet")


def test_mfu_does_not_count_recomputation() -> None:
    plain, again = (step_on("h100", train={"gradient_checkpointing": each}) for each in (False, True))
    assert again.flops > plain.flops
    assert again.mfu * again.seconds == pytest.approx(plain.mfu * plain.seconds)


def test_a_card_whose_speed_is_not_known_is_named() -> None:
    with pytest.raises(MachineError, match="MI250") as caught:
        to_device_rates(replace(GPUS["mi250"], bandwidth=None))
    assert "surefit calibrate" in str(caught.value.help)


def test_measurements_between_checkpoints_take_time() -> None:
    """20 steps with a checkpoint every 10: 2 measurements; every 3 as well: 3, 6, 9, 10, 12, 15, 18 and 20 are 8."""
    step = StepTime(0.5, 0.45, 0.55, 10**9, 10**9, 100, 0.4, 200.0, 400.0, "arithmetic", "a test")
    hardware, model, parts = hardware_facts("a10"), model_facts("surefit/nano"), []
    for every in (None, 3):
        tree = {
            "model": {"name_or_path": "surefit/nano"}, "data": {"train": "unused", "eval": 0.1}, "output_dir": "unused",
            "train": {"max_steps": 20, "num_train_epochs": 100, "eval_steps": every}, "checkpoint": {"save_steps": 10},
        }  # fmt: skip
        made = resolve_config(
            LoadedConfig(SureFitConfig.model_validate(tree), Path("run.yaml"), {}, frozenset()), model, hardware, 100
        )
        run = Planner(model).run(made, step, 100)
        assert run is not None
        parts.append(run.parts)
    assert parts[0]["evaluations"] > 0
    assert parts[1]["evaluations"] == pytest.approx(parts[0]["evaluations"] * 8 / 2)
    assert parts[1]["saves"] == parts[0]["saves"]


def test_a_run_adds_up_and_costs() -> None:
    step = StepTime(0.5, 0.45, 0.55, 10**9, 10**9, 100, 0.4, 200.0, 400.0, "arithmetic", "a test")
    run = run_time(
        step, 100, tokens_per_step=96, weight_bytes=10**9, evaluations=4, evaluation_tokens=1000, saves=2,
        save_bytes=10**8, disk=1e8, loading=1e6,
    )  # fmt: skip
    assert run.parts["steps"] == pytest.approx(100 * step.seconds)
    assert run.parts["loading"] == pytest.approx(0.0096)
    assert run.parts["saves"] == pytest.approx(2.0)
    assert run.parts["start"] == pytest.approx(25.0)
    assert run.seconds == pytest.approx(sum(run.parts.values()))
    certain = run.seconds - run.parts["steps"] - run.parts["evaluations"]
    assert run.low - certain == pytest.approx(0.9 * (run.seconds - certain))
    expected, low, high = run.cost(2.5, devices=2)
    assert expected == pytest.approx(run.seconds / 3600 * 5)
    assert low < expected < high
    assert run.limit == step.limit
    assert run_time(step, 100, tokens_per_step=96, loading=10).limit == "data loading"
    with pytest.raises(ConfigError, match="price of -1"):
        run.cost(-1)


def profile(device: str, **changes: Any) -> DeviceProfile:
    products = {"float32": [(1e6, 1e12), (1e9, 4e12)], "bfloat16": [(1e6, 2e12), (1e9, 3e14)]}
    base = DeviceProfile(
        device, "cuda", None, "2.13.0+cu130", "580.65.06", products, [(1e6, 1e11), (1e9, 1e12)], 5e-6,
        85 * 10**9, 5 * 10**8, 10**7, 60.0,
    )  # fmt: skip
    return replace(base, **changes)


def test_what_was_measured_is_preferred_to_the_data_sheet(tmp_path: Path) -> None:
    before = step_on("h100")
    measured = profile("NVIDIA H100 80GB HBM3")
    measured.save(measured.stored_at)
    profile("NVIDIA L4").save(profile("NVIDIA L4").stored_at)
    after = step_on("h100")
    assert load_stored_profile(GPUS["h100"]) == measured
    assert load_stored_profile(GPUS["a100-80"]) is None
    assert find_device_speed(hardware_facts("h100", tmp_path)) == measured
    assert find_device_speed(hardware_facts("a100-80", tmp_path)) == GPUS["a100-80"]
    assert find_device_speed(hardware_facts("cpu", tmp_path)) is None
    assert after.seconds != before.seconds
    assert "driver 580.65.06" in after.source
    assert after.mfu * after.seconds == pytest.approx(before.mfu * before.seconds), "of the data sheet's peak in both"


def test_between_sizes_the_speed_is_on_a_line_of_logarithms() -> None:
    curve = [(1e6, 1e10), (1e8, 1e12)]
    assert interpolate_speed(curve, 1e3) == 1e10
    assert interpolate_speed(curve, 1e7) == pytest.approx(1e11)
    assert interpolate_speed(curve, 1e12) == 1e12


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"device": "x", "matmul": {}, "copy": []}'])
def test_a_damaged_profile_is_named(content: str) -> None:
    path = profiles.profile_folder() / "x.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ConfigError, match="not a device profile") as caught:
        find_device_speed(hardware_facts("h100"))
    assert caught.value.path == str(path)


def test_calibrate_measures_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "WIDTHS", {"cpu": (64, 128), "cuda": (128, 256)})
    monkeypatch.setattr(calibrating, "MEASURE_SECONDS", 0.02)
    file = tmp_path / "mine.json"
    done = CliRunner().invoke(app, ["calibrate", "--json", "--output", str(file)])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout.splitlines()[-1])
    measured = load_profile(file)
    assert load_profile(Path(answer["stored_at"])) == measured
    assert measured.torch == torch.__version__
    assert all(speed > 1e6 for curve in measured.matmul.values() for _, speed in curve)
    assert 1e-7 < measured.launch < 1
    assert measured.attention
    assert all(1e6 < speed < 1e15 for curve in measured.attention.values() for _, speed in curve)
    if not torch.cuda.is_available():
        names = (f"cpu {way} {width} {dtype}" for way in ("forward", "backward") for width in (64, 128)
                 for dtype in ("float32", "bfloat16"))  # fmt: skip
        assert set(measured.attention) == set(names)
        assert measured.kind == "cpu"
        assert load_stored_profile() == measured == find_device_speed(hardware_facts("cpu", tmp_path))


def test_calibrate_wants_a_file(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["calibrate", "--json", "--output", str(tmp_path)])
    assert done.exit_code == 2
    assert "E1603" in done.output


@pytest.mark.slow
def test_a_step_of_the_built_in_model_takes_about_what_this_cpu_is_measured_for() -> None:
    """Shared cores vary: only the order of magnitude is asked for."""
    import surefit.nano

    shape = AutoConfig.from_pretrained(Path(surefit.nano.__file__).parent)
    measured = calibrating.calibrate_device(measure_seconds=0.05)
    planned = StepConfig(shape, "float32", None, rows=4, length=128, cuda=False)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    ids = torch.randint(0, shape.vocab_size, (4, 128))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} | build_loss_targets(ids)
    optimizer, taken = MasterAdamW(model), []
    for _ in range(4):
        start = time.perf_counter()
        train_step(model, [batch], optimizer, 1.0)
        taken.append(time.perf_counter() - start)
    predicted, _ = roofline(count_step_operations(planned)[0], to_device_rates(measured))
    assert 0.1 < predicted / min(taken) < 10


@pytest.mark.slow
def test_published_runs_are_predicted_from_each_other() -> None:
    data = ROOT.parent / "shared" / "data" / "planner" / "peft_metamathqa_l40s.jsonl"
    if not data.exists():
        pytest.skip("the published measurements are not beside this repository")
    names = "lora--llama-3.2-3B-rank64,ia3--llama-3.2-3B-default,ln_tuning,miss--llama-3.2-3B-mini,tokens50,glora,full,"
    names += "mica"
    command = [sys.executable, str(ROOT / "benchmarks" / "time_published.py"), "--data", str(data), "--only", names]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["rows"], summary["with_steps"]) == (8, 4)
    assert summary["mean_error"] < 0.08
    assert summary["worst_error"] < 0.15
    assert summary["left_out_worst_error"] < 0.25
    assert summary["whole_mean_error"] < 0.07
    assert summary["whole_worst_error"] < 0.12
