"""The thresholds: noise passes, damage does not, and each bound is what its derivation says."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from surefit.merge import certify
from surefit.merge.certify import (
    MergeCheck,
    RoundingDimensions,
    check_agreement,
    check_effect,
    compare_logits,
    logit_noise,
    read_logits,
)
from surefit.model.layerwise_forward import perturb_weights

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_adapter(make_tiny, dtype, seed, layers, effect=0.1):
    """A random Llama with a random adapter, and the same merged: in float32, rounded once."""
    base = make_tiny(seed=seed, num_hidden_layers=layers)
    for parameter in base.parameters():
        parameter.data = parameter.data.to(dtype)
    adapter = get_peft_model(
        copy.deepcopy(base), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), autocast_adapter_dtype=False
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter.named_parameters():
        if ".lora_B" in name:
            parameter.data = (effect * 0.15 * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return base, adapter, merged_by_hand(base, adapter)


def merged_by_hand(base, adapter, factor=1.0):
    merged = copy.deepcopy(base)
    for name, layer in adapter.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            weight = merged.get_submodule(name).weight
            update = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
            weight.data = (weight.data.float() + factor * layer.scaling["default"] * update).to(weight.dtype)
    return merged


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, 290, (4, 64), generator=generator).tolist()


def logit_checks(adapter, merged, sequences, dtype):
    size = certify.rounding_dimensions(merged)
    moved = copy.deepcopy(merged)
    for name, parameter in moved.named_parameters():
        perturb_weights(parameter.data, certify.nudge(dtype, size), name)
    logits = [read_logits(model, sequences) for model in (adapter, merged, moved)]
    return check_agreement("m", compare_logits(*logits), dtype, size)


@pytest.mark.parametrize("layers", [2, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_noise_passes_with_room_and_not_too_much_of_it(make_tiny, sequences, dtype, layers):
    ratios = []
    for seed in range(4):
        _, adapter, merged = random_adapter(make_tiny, dtype, seed, layers)
        checks = logit_checks(adapter, merged, sequences, dtype)
        assert all(check.passed for check in checks), [str(check) for check in checks if not check.passed]
        ratios.append([check.value / check.threshold for check in checks[:2]])
    mean, worst = zip(*ratios, strict=True)
    assert 0.003 < min(mean) <= max(mean) < 0.5
    assert 0.01 < min(worst) <= max(worst) < 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.5, 2.0, -1.0])
def test_an_update_of_the_wrong_size_does_not_pass(make_tiny, sequences, dtype, factor):
    base, adapter, _ = random_adapter(make_tiny, dtype, seed=0, layers=2, effect=1.0)
    checks = logit_checks(adapter, merged_by_hand(base, adapter, factor), sequences, dtype)
    assert {check.name for check in checks if not check.passed} >= {
        "m_logit_error_mean",
        "m_logit_error_worst",
        "m_kl_mean",
    }


def test_a_thousandth_too_much_is_found_in_float32(make_tiny, sequences):
    base, adapter, _ = random_adapter(make_tiny, torch.float32, seed=0, layers=2)
    checks = logit_checks(adapter, merged_by_hand(base, adapter, 1.001), sequences, torch.float32)
    assert not checks[0].passed


def test_one_layer_left_out_does_not_pass(make_tiny, sequences):
    base, adapter, merged = random_adapter(make_tiny, torch.bfloat16, seed=1, layers=2, effect=1.0)
    name = "model.layers.1.mlp.down_proj"
    merged.get_submodule(name).weight.data = base.get_submodule(name).weight.data
    checks = logit_checks(adapter, merged, sequences, torch.bfloat16)
    assert not all(check.passed for check in checks)


def test_the_bounds_hold_for_noise_of_the_assumed_size():
    """Normal errors with the permitted root mean square: mean, maximum, divergence and agreement all just pass."""
    generator = torch.Generator().manual_seed(0)
    reference = [torch.randn(200, 500, generator=generator) for _ in range(3)]
    size = RoundingDimensions(2, 64)
    noise = logit_noise(torch.bfloat16, size)
    noisy = [logits + 0.98 * noise * torch.randn(logits.shape, generator=generator) for logits in reference]
    moved = [logits + noise / certify.SAFETY * torch.randn(logits.shape, generator=generator) for logits in noisy]
    mean, worst, divergence, top1 = check_agreement("n", compare_logits(reference, noisy, moved), torch.bfloat16, size)
    assert all(check.passed for check in (mean, divergence, top1))
    assert mean.value / mean.threshold == pytest.approx(0.98 * math.sqrt(2 / math.pi), abs=0.01)
    assert worst.value / worst.threshold == pytest.approx(1.0, abs=0.3), "the worst of 600 positions"
    assert divergence.value == pytest.approx(noise**2 / 2, rel=0.05), "half the variance of the error"
    gaps = torch.cat([logits.double().topk(2).values.diff(dim=-1).neg().flatten() for logits in reference])
    expected = 1 - certify._expected_flips(gaps, noise) / 600
    assert top1.value == pytest.approx(expected, abs=0.05)
    assert top1.value < 1


def worst_position(reference, merged, moved):
    found = compare_logits([reference], [merged], [moved])
    return certify._worst_position(torch.cat(found.errors), torch.cat(found.moves))


def thrown(generator, share, count=600):
    """Logits of many positions, with errors of 0.01, but of 1 at a share of the positions, which chance picks."""
    reference = torch.randn(count, 50, generator=generator)
    sizes = torch.where(torch.rand(count, 1, generator=generator) < share, 1.0, 0.01)
    return reference, reference + sizes * torch.randn(count, 50, generator=generator)


@pytest.mark.parametrize("share", [0.0, 0.002, 0.01, 0.1])
def test_positions_that_the_least_rounding_throws_are_not_held_against_a_merge(share):
    """Which positions it throws is chance: they are others in the nudged model, and one more or less of them."""
    worst = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        reference, merged = thrown(generator, share)
        nudges = thrown(generator, share)
        moved = merged + nudges[1] - nudges[0]
        worst.append(worst_position(reference, merged, moved))
    assert max(worst) < certify.SAFETY
    # Ten times as much at one position in fifteen, which the mean would not show.
    reference, merged = thrown(generator, 0.0)
    nudges = thrown(generator, 0.0)
    damaged = merged.clone()
    damaged[::15] += 9 * (merged - reference)[::15]
    assert worst_position(reference, damaged, damaged + nudges[1] - nudges[0]) > certify.SAFETY


def test_a_few_positions_are_compared_too():
    one = torch.zeros(3, 4)
    assert worst_position(one, one + 1.0, one + 1.5) == 2.0
    assert worst_position(one, one, one) == 0.0


def test_differences_are_those_of_the_definitions():
    one, two = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]), torch.tensor([[0.0, 3.0, 2.0], [3.0, 0.0, 1.0]])
    found = compare_logits([one], [two])
    assert (found.entries, found.positions, found.agreeing, found.infinite) == (6, 2, 1, 0)
    assert (found.absolute, found.largest) == (3.0, 2.0)
    assert found.rms == pytest.approx(math.sqrt(5 / 6))
    assert found.deviation == pytest.approx(math.sqrt((2 + 6) / 6))
    assert torch.cat(found.errors).tolist() == [2.0, 1.0]
    assert torch.cat(found.gaps).tolist() == [1.0, 3.0]
    p, q = one.double().softmax(-1), two.double().softmax(-1)
    assert found.divergence == pytest.approx(float((p * (p / q).log()).sum()))


@pytest.mark.parametrize("broken", ["reference", "other"])
def test_logits_that_are_no_numbers_fail_and_can_be_written(broken):
    good, bad = torch.zeros(2, 3), torch.tensor([[0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0]])
    one, two = ([bad], [good]) if broken == "reference" else ([good], [bad])
    checks = check_agreement("m", compare_logits(one, two, two), torch.float32, RoundingDimensions(1, 8))
    assert [(check.name, check.value, check.passed) for check in checks] == [("m_logits_not_finite", 2, False)]
    written = MergeCheck("x", float("nan"), 1.0, "<=", "why").as_dict()
    assert written["value"] == "nan"
    assert written["passed"] is False
    json.dumps(written, allow_nan=False)


def test_the_limit_grows_with_the_step_of_the_dtype_the_depth_and_the_width():
    size = RoundingDimensions(32, 4096)
    single, half, brain = (logit_noise(dtype, size) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    assert 1e-4 < single < 1e-3
    assert brain / half == pytest.approx(8, rel=1e-3)
    assert logit_noise(torch.float32, RoundingDimensions(32, 16384)) == pytest.approx(2 * single, rel=1e-3)
    assert logit_noise(torch.bfloat16, RoundingDimensions(132, 4096)) / brain == pytest.approx(math.sqrt(272 / 72))


def effect_kept(base, adapter, merged):
    return check_effect(compare_logits(adapter, merged, base=base))


def test_the_effect_kept_is_one_for_the_adapter_and_nothing_for_the_base():
    generator = torch.Generator().manual_seed(0)
    base = [torch.randn(8, 50, generator=generator)]
    adapter = [base[0] + torch.randn(8, 50, generator=generator)]
    assert effect_kept(base, adapter, adapter).value == 1.0
    assert effect_kept(base, adapter, base).value == 0.0
    assert not effect_kept(base, base, base).passed, "an adapter without an effect is not kept"
    halfway = [(base[0] + adapter[0]) / 2]
    assert effect_kept(base, adapter, halfway).value == pytest.approx(0.5)
    noise = lambda: 0.1 * torch.randn(8, 50, generator=generator)  # noqa: E731
    quiet = effect_kept([base[0] + noise()], [base[0] + noise()], [base[0] + noise()])
    assert quiet.value == pytest.approx(0.5, abs=0.05)
    assert not quiet.passed


def test_large_vocabularies_are_read_at_the_last_positions(make_tiny, sequences, monkeypatch):
    model = make_tiny()
    everything = read_logits(model, sequences)
    monkeypatch.setattr(certify, "LOGITS_HELD", 300 * 4 * 5)
    some = read_logits(model, sequences)
    assert [len(logits) for logits in some] == [5] * 4
    torch.testing.assert_close(some[0], everything[0][-5:], rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(certify, "LOGITS_HELD", 1)
    assert [len(logits) for logits in read_logits(model, sequences)] == [1] * 4


def test_rows_of_unequal_length_are_read_as_alone(make_tiny, sequences):
    model = make_tiny()
    rows = [sequences[0], sequences[1][:7], sequences[2][:30]]
    for found, row in zip(read_logits(model, rows), rows, strict=True):
        torch.testing.assert_close(found, read_logits(model, [row])[0], rtol=1e-5, atol=1e-5)
        assert len(found) == len(row)


def test_many_tokens_are_shared_out_and_each_row_keeps_its_end(make_tiny, sequences, monkeypatch):
    model = make_tiny()
    monkeypatch.setattr(certify, "TOKENS_READ", 40)
    found = read_logits(model, sequences)
    assert [len(logits) for logits in found] == [10] * 4
    torch.testing.assert_close(found[2], read_logits(model, [sequences[2][-10:]])[0], rtol=1e-5, atol=1e-5)


def test_sequences_longer_than_the_context_are_cut(make_tiny):
    assert len(read_logits(make_tiny(max_position_embeddings=16), [[5] * 40])[0]) == 16
