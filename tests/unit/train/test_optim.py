"""AdamW with float32 masters, what weight decay leaves alone, and the learning rate's worked numbers."""

import tiny_run
import torch

from surefit.train.optim import MasterAdamW, is_decayed, learning_rate


def fill_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_float32_equals_torch_adamw_bit_for_bit() -> None:
    ours, theirs = tiny_run.llama(), tiny_run.llama()
    optimizer = MasterAdamW(ours)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    optimizer.learning_rate = 1e-3
    for seed in range(3):
        fill_gradients(ours, seed)
        fill_gradients(theirs, seed)
        optimizer.step()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_weight_decay_spares_norms_and_biases() -> None:
    model = tiny_run.llama(attention_bias=True)
    optimizer = MasterAdamW(model, weight_decay=0.1)
    optimizer.learning_rate = 0.5
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # the update is then the decay alone
    optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 0.95 if is_decayed(name, parameter) else 1.0
        torch.testing.assert_close(parameter, before[name] * kept)
        assert is_decayed(name, parameter) == ("norm" not in name and "bias" not in name)


def test_updates_too_small_for_bfloat16_add_up() -> None:
    plain, ours = (torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16) for _ in range(2))
    for layer in (plain, ours):
        torch.nn.init.constant_(layer.weight, 1.0)
    reference, optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0), MasterAdamW(ours)
    optimizer.learning_rate = 1e-3
    for _ in range(20):
        plain.weight.grad, ours.weight.grad = (torch.ones_like(layer.weight) for layer in (plain, ours))
        reference.step()
        optimizer.step()
    assert torch.equal(plain.weight, torch.ones_like(plain.weight))  # what we avoid: 1 - 0.001 rounds to 1
    torch.testing.assert_close(ours.weight.float(), torch.full((4, 4), 0.98), atol=2e-3, rtol=0)
    assert ours.weight.grad is not None
    optimizer.zero_grad()
    assert ours.weight.grad is None


def test_state_goes_around_through_tensors() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        first, second = tiny_run.llama().to(dtype), tiny_run.llama().to(dtype)
        one, two = MasterAdamW(first, 0.01), MasterAdamW(second, 0.01)
        one.learning_rate = two.learning_rate = 1e-2
        fill_gradients(first, 0)
        one.step()
        two.load_tensors(one.tensors())
        with torch.no_grad():
            for source, target in zip(first.parameters(), second.parameters(), strict=True):
                target.copy_(source)
        for model, optimizer in ((first, one), (second, two)):
            fill_gradients(model, 1)
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
        assert one.tensors().keys() == two.tensors().keys()
        assert any(name.startswith("master.") for name in one.tensors()) == (dtype == torch.bfloat16)


def test_a_fresh_optimizer_has_no_moments_to_save() -> None:
    assert MasterAdamW(tiny_run.llama()).tensors() == {}


def test_the_rate_never_is_zero_and_peaks_once() -> None:
    for schedule in ("cosine", "linear"):
        rates = [learning_rate(step, 50, 2e-4, schedule, 0.1) for step in range(50)]
        assert min(rates) > 0
        assert rates.index(max(rates)) == 5
        assert max(rates) == 2e-4
        assert rates.count(2e-4) == 1
        assert rates[:6] == sorted(rates[:6])
        assert rates[5:] == sorted(rates[5:], reverse=True)


def test_warmup_longer_than_the_run_and_a_constant_rate() -> None:
    assert [learning_rate(step, 3, 1.0, "cosine", 9) for step in range(3)] == [0.1, 0.2, 0.3]
    assert [learning_rate(step, 4, 1.0, "constant", 1) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert learning_rate(0, 1, 1.0, "cosine", 0.0) == 1.0
