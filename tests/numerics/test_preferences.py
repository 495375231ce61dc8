"""Objectives of pairs equal the papers' formulas, written here a second time in float64 from all logits.

`benchmarks/preference.py` compares them with TRL as well, where it is installed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from peft import LoraConfig, get_peft_model

from surefit.config.schema import ObjectiveSection
from surefit.data.tokens.collate import collate, collate_packed, describe_pairs
from surefit.model import attention
from surefit.train import loss
from surefit.train.loss import exact_token_losses, token_losses
from surefit.train.objectives.pairs import PairObjective
from surefit.train.optim import MasterAdamW
from surefit.train.step import measure, train_step

pytestmark = pytest.mark.usefixtures("one_thread")
SECTIONS = {
    "sigmoid": {"name": "dpo", "beta": 0.1},
    "smoothed": {"name": "dpo", "beta": 0.3, "label_smoothing": 0.2},
    "rpo": {"name": "dpo", "beta": 0.1, "sft_weight": 0.7},
    "ipo": {"name": "dpo", "loss_type": "ipo", "beta": 0.1},
    "sigmoid_norm": {"name": "dpo", "loss_type": "sigmoid_norm", "beta": 5.0},
    "orpo": {"name": "orpo", "beta": 0.1},
    "simpo": {"name": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.5},
    "simpo+sft": {"name": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.25, "sft_weight": 0.5},
}
PAIRS = 6


def objective(name: str) -> PairObjective:
    return PairObjective(ObjectiveSection.model_validate(SECTIONS[name]))


def reference(pairs: int = PAIRS) -> np.ndarray:
    """As far from the model as training takes it."""
    return np.random.default_rng(5).normal(-25, 6, (pairs, 2)).astype(np.float32)


def batch_of(rows: list[Any], values: np.ndarray, packed: bool = False) -> dict[str, Any]:
    return (collate_packed(rows) if packed else collate(rows, 0)) | describe_pairs(rows, values)


def model_of(kind: str, packed: bool = False, **changes: Any) -> torch.nn.Module:
    model = tiny_run.llama(**changes, **({"attn_implementation": attention.NAME} if packed else {}))
    if kind == "lora":
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return model.train()


def by_the_papers(name: str, rows: list[Any], values: np.ndarray, model: torch.nn.Module) -> torch.Tensor:
    """The mean loss over all pairs in float64, an answer at a time, from all of its logits."""
    section = SECTIONS[name]
    beta, terms, nll, tokens = section["beta"], [], 0.0, 0
    for number in range(len(rows) // 2):
        sums, lengths = [], []
        for ids, labels in rows[2 * number : 2 * number + 2]:
            log_probs = torch.log_softmax(model(torch.as_tensor(ids)[None]).logits[0].double(), -1)
            places = [place for place in range(1, len(ids)) if labels[place] != -100]
            sums.append(sum(log_probs[place - 1, ids[place]] for place in places))
            lengths.append(len(places))
        (c, r), (nc, nr) = sums, lengths
        rc, rr = (float(value) for value in values[number])
        nll, tokens = nll - c, tokens + nc
        if section["name"] == "orpo":
            pc, pr = torch.exp(c / nc), torch.exp(r / nr)
            terms.append(-beta * torch.log(torch.sigmoid(torch.log((pc / (1 - pc)) / (pr / (1 - pr))))))
        elif section["name"] == "simpo":
            gamma = beta * section["gamma_beta_ratio"]
            terms.append(-torch.log(torch.sigmoid(beta / nc * c - beta / nr * r - gamma)))
        elif section.get("loss_type") == "ipo":
            terms.append(((c - rc) / nc - (r - rr) / nr - 1 / (2 * beta)) ** 2)
        else:
            norm = section.get("loss_type") == "sigmoid_norm"
            margin = beta * ((c - rc) / (nc if norm else 1) - (r - rr) / (nr if norm else 1))
            e = section.get("label_smoothing", 0.0)
            terms.append(-(1 - e) * torch.log(torch.sigmoid(margin)) - e * torch.log(torch.sigmoid(-margin)))
    weight = 1.0 if section["name"] == "orpo" else section.get("sft_weight", 0.0)
    return sum(terms) / len(terms) + weight * nll / tokens


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone().double() for name, p in model.named_parameters() if p.grad is not None}


def of_step(name: str, model: torch.nn.Module, batches: list[Any], chunked: bool = True) -> tuple[Any, Any]:
    """Loss and gradients as the step gives them to the optimizer."""
    optimizer = MasterAdamW(model)
    kept: dict[str, torch.Tensor] = {}
    optimizer.step = lambda factor=1.0: kept.update(gradients(model))  # type: ignore[method-assign]
    result = train_step(model, batches, optimizer, 1e9, chunked=chunked, objective=objective(name))
    assert result.applied
    return result, kept


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(float(tensor.abs().max()) for tensor in theirs.values())
    for key, tensor in theirs.items():
        assert float((ours[key] - tensor).abs().max()) <= tolerance * max(1.0, scale), key


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_loss_and_gradients_are_the_papers(name: str, packed: bool, kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("surefit.train.loss.chunk_rows", lambda *sizes: 7)  # several chunks
    rows, values = tiny_run.pairs(PAIRS), reference()
    model = model_of(kind, packed)
    result, ours = of_step(name, model, [batch_of(rows, values, packed)])
    exact = model_of(kind).double()
    exact.load_state_dict(model.state_dict())
    loss = by_the_papers(name, rows, values, exact)
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert_close(ours, gradients(exact), 2e-6)
    assert any("lm_head" in key or "embed" in key for key in ours) == (kind == "full")


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_chunks_change_nothing(kind: str) -> None:
    rows, values = tiny_run.pairs(PAIRS), reference()
    model = model_of(kind, tie_word_embeddings=False)
    (one, ours), (two, theirs) = (of_step("rpo", model, [batch_of(rows, values)], chunked) for chunked in (True, False))
    assert one.loss == pytest.approx(two.loss, rel=1e-6)
    assert one.metrics == pytest.approx(two.metrics, rel=1e-5, abs=1e-5)
    assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["rpo", "orpo", "ipo"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_global_batch_decides_and_not_the_micro_batches(name: str, packed: bool) -> None:
    """1 × 6 = 6 × 1, though the answers of the pairs differ in length: the SFT term is a mean over tokens."""
    rows, values = tiny_run.pairs(PAIRS), reference()
    model = model_of("lora", packed)
    whole, ours = of_step(name, model, [batch_of(rows, values, packed)])
    each = [batch_of(rows[2 * n : 2 * n + 2], values[n : n + 1], packed) for n in range(PAIRS)]
    parts, theirs = of_step(name, model, each)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-5)
    assert_close(ours, theirs)
    measured = measure(model, each, objective=objective(name))
    assert measured is not None
    assert measured.loss == pytest.approx(whole.loss, rel=1e-6)
    assert measured.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-5)


def test_the_sft_term_does_not_overwrite_the_rewards() -> None:
    """TRL #5079: the rewards of a run with an SFT term were another's."""
    rows, values = tiny_run.pairs(PAIRS), reference()
    model = model_of("lora")
    plain, _ = of_step("sigmoid", model, [batch_of(rows, values)])
    added, _ = of_step("rpo", model, [batch_of(rows, values)])
    assert {name: value for name, value in added.metrics.items() if name != "nll"} == plain.metrics
    assert added.loss == pytest.approx(plain.loss + 0.7 * added.metrics["nll"], rel=1e-6)
    chosen = sum(values[:, 0].astype(float)) / PAIRS
    assert plain.metrics["rewards/chosen"] == pytest.approx(0.1 * (plain.metrics["logps/chosen"] - chosen), rel=1e-5)
    assert plain.metrics["rewards/margins"] == pytest.approx(
        plain.metrics["rewards/chosen"] - plain.metrics["rewards/rejected"], rel=1e-5
    )


def test_padding_with_the_end_token_hides_no_supervised_end() -> None:
    """TRL #6357: where pad = eos, a mask made of the padding token drops the end of every answer."""
    ids = np.array([5, 6, 7, 0])  # 0 ends the answer and pads
    labels = np.array([-100, -100, 7, 0])
    batch = batch_of([(ids, labels), (np.array([5, 6, 9]), np.array([-100, -100, 9]))], reference(1))
    assert batch["answer_targets"] == (2, 1)
    assert batch["targets"].tolist() == [7, 0, 9]


def test_a_step_far_from_the_reference_stays_finite() -> None:
    rows = tiny_run.pairs(PAIRS)
    model = model_of("lora")
    for far in (-1e4, 1e4):
        values = reference() + np.array([far, -far], np.float32)
        result, ours = of_step("sigmoid", model, [batch_of(rows, values)])
        assert math.isfinite(result.loss)
        assert all(bool(tensor.isfinite().all()) for tensor in ours.values())


def test_orpo_is_finite_where_an_answer_is_certain() -> None:
    """LLaMA-Factory's log1p(−exp(x)) is −inf at x → 0."""
    terms, _ = objective("orpo").terms(answers := _certain())
    terms.sum().backward()
    assert bool(terms.isfinite().all())
    assert bool(answers.log_probs.grad.isfinite().all())


def _certain() -> Any:
    from surefit.train.objectives.pairs import AnswerSums

    log_probs = torch.tensor([[0.0, -1e-9], [-50.0, 0.0], [-1e-30, -80.0]], requires_grad=True)
    return AnswerSums(log_probs, torch.full((3, 2), 2.0))


def test_exact_losses_are_the_losses() -> None:
    rows = tiny_run.pairs(PAIRS)
    model, batch = model_of("lora"), batch_of(rows, reference())
    losses, router = token_losses(model, batch, True)
    assert router is None
    assert losses.dtype == torch.float32
    for chunked in (True, False):
        exact = exact_token_losses(model, batch, chunked)
        assert exact.dtype == torch.float64
        assert torch.allclose(losses.double(), exact, atol=1e-5)


def test_exact_losses_take_few_rows_of_float64_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_of("lora"), batch_of(tiny_run.pairs(PAIRS), reference())
    whole, sizes = exact_token_losses(model, batch, False), []
    inner = loss.F.cross_entropy
    monkeypatch.setattr(loss, "LOSS_TILE", 3)
    monkeypatch.setattr(loss.F, "cross_entropy", lambda a, *b, **c: (sizes.append(len(a)), inner(a, *b, **c))[1])
    assert torch.equal(exact_token_losses(model, batch, False), whole)
    assert max(sizes) == 3
    assert sum(sizes) == len(whole)


def test_bfloat16_log_probabilities_are_summed_in_float32() -> None:
    rows = tiny_run.pairs(PAIRS)
    model = model_of("full").bfloat16()
    batch = batch_of(rows, reference())
    losses, _ = token_losses(model, batch, True)
    assert losses.dtype == torch.float32
    assert torch.allclose(losses.double(), exact_token_losses(model, batch, True), atol=1e-5)
