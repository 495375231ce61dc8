"""kto: the loss equals the paper's in float64, whatever the micro batches and the order of rows; runs start at the
closed form, resume bit for bit, and stop at a reference that is not theirs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors

from surefit.config.schema import ObjectiveSection
from surefit.core.errors import ConfigError, DataError, GateError
from surefit.core.rundir import read_jsonl
from surefit.data.tokens.collate import collate, collate_packed, count_targets, describe_labelled
from surefit.model import attention
from surefit.train import reference
from surefit.train.mismatched import choose_partners, mismatch
from surefit.train.objectives.build import build_objective
from surefit.train.optim import MasterAdamW
from surefit.train.step import measure, train_step

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 8
KTO = {"name": "kto", "beta": 0.1}
WEIGHTED = KTO | {"beta": 0.05, "desirable_weight": 1.5, "undesirable_weight": 0.5}
TIMES = ("seconds", "tokens_per_second", "mfu", "disk_free_bytes")


def model_of(kind: str, packed: bool = False) -> torch.nn.Module:
    model = tiny_run.llama(**({"attn_implementation": attention.NAME} if packed else {}))
    if kind == "lora":
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return model.train()


def reference_values() -> np.ndarray:
    """As far from the model as training takes it, and below it on the mismatched rows, so that the baseline counts."""
    return np.random.default_rng(5).normal((-25, -30), 4, (ROWS, 2)).astype(np.float32)


def batch_of(rows: tiny_run.Labelled, numbers: list[int], packed: bool = False) -> dict[str, Any]:
    """A micro batch of some of the rows, each with its partner among all of them."""
    partners, values = choose_partners(rows, 0), reference_values()
    put: Any = collate_packed if packed else lambda items: collate(items, 0)
    items, others = [rows[n] for n in numbers], [mismatch(rows[n], rows[partners[n]], 64) for n in numbers]
    counts = {"answer_targets": count_targets(others), "reference_log_probs": torch.as_tensor(values[numbers, 1])}
    labels = rows.desirable[numbers].tolist()
    return put(items) | describe_labelled(items, labels, values[numbers], [put(others) | counts])


def summed_log_prob(model: torch.nn.Module, row: tiny_run.Row) -> torch.Tensor:
    ids, labels = row
    log_probs = torch.log_softmax(model(torch.as_tensor(ids)[None]).logits[0].double(), -1)
    return sum(log_probs[place - 1, ids[place]] for place in range(1, len(ids)) if labels[place] != -100)


def by_the_paper(
    section: dict[str, Any], rows: tiny_run.Labelled, model: torch.nn.Module
) -> tuple[torch.Tensor, float]:
    """Equation 7 of the paper in float64, an answer at a time; also the baseline."""
    partners, values, losses = choose_partners(rows, 0), reference_values().astype(np.float64), []
    with torch.no_grad():
        mismatched = [summed_log_prob(model, mismatch(row, rows[p], 64)) for row, p in zip(rows, partners, strict=True)]
    baseline = max(0.0, float(np.mean([float(m) for m in mismatched] - values[:, 1])))
    for row, value, desirable in zip(rows, values, rows.desirable, strict=True):
        r = summed_log_prob(model, row) - value[0]
        if desirable:
            losses.append(section.get("desirable_weight", 1) * (1 - torch.sigmoid(section["beta"] * (r - baseline))))
        else:
            losses.append(section.get("undesirable_weight", 1) * (1 - torch.sigmoid(section["beta"] * (baseline - r))))
    return sum(losses) / len(losses), baseline


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone().double() for name, p in model.named_parameters() if p.grad is not None}


def of_step(section: dict[str, Any], model: torch.nn.Module, batches: list[Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Result, and the gradients as the step gives them to the optimizer."""
    optimizer, kept = MasterAdamW(model), dict[str, torch.Tensor]()
    optimizer.step = lambda factor=1.0: kept.update(gradients(model))  # type: ignore[method-assign]
    result = train_step(model, batches, optimizer, 1e9, objective=build_objective(ObjectiveSection(**section)))
    assert result.applied
    return result, kept


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(float(tensor.abs().max()) for tensor in theirs.values())
    assert scale > 1e-4
    for key, tensor in theirs.items():
        assert float((ours[key] - tensor).abs().max()) <= 5e-6 * scale, key


@pytest.mark.parametrize("section", [KTO, WEIGHTED], ids=["plain", "weighted"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_loss_and_gradients_are_the_papers(section: dict[str, Any], packed: bool, kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("surefit.train.loss.chunk_rows", lambda *sizes: 7)  # several chunks
    rows, model = tiny_run.labelled(ROWS), model_of(kind, packed)
    result, ours = of_step(section, model, [batch_of(rows, [*range(ROWS)], packed)])
    exact = model_of(kind).double()
    exact.load_state_dict(model.state_dict())
    loss, baseline = by_the_paper(section, rows, exact)
    loss.backward()
    assert baseline > 1
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.metrics["kl"] == pytest.approx(baseline, rel=1e-6)
    assert_close(ours, gradients(exact))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "micros", [[[n] for n in range(ROWS)], [[7, 2], [0, 5, 1], [6], [4, 3]], [[*reversed(range(ROWS))]]], ids=str
)
def test_micro_batches_and_their_order_change_nothing(micros: list[list[int]], packed: bool) -> None:
    """TRL's baseline is a micro batch's, and its mismatched answers are those of its neighbours."""
    rows, model = tiny_run.labelled(ROWS), model_of("lora", packed)
    one, whole = of_step(WEIGHTED, model, [batch_of(rows, [*range(ROWS)], packed)])
    many, parts = of_step(WEIGHTED, model, [batch_of(rows, micro, packed) for micro in micros])
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.metrics == pytest.approx(one.metrics, rel=1e-5)
    assert_close(parts, whole)


def test_a_step_has_the_metrics_of_each_kind_separately() -> None:
    rows, model = tiny_run.labelled(ROWS), model_of("full")
    result, _ = of_step(WEIGHTED, model, [batch_of(rows, [*range(ROWS)])])
    with torch.no_grad():
        log_probs = np.array([float(summed_log_prob(model, row)) for row in rows])
    rewards, desirable = 0.05 * (log_probs - reference_values()[:, 0]), rows.desirable
    assert 0 < desirable.sum() < ROWS
    for kind, chosen in (("chosen", desirable), ("rejected", ~desirable)):
        assert result.metrics[f"rewards/{kind}"] == pytest.approx(rewards[chosen].mean(), rel=1e-4)
        assert result.metrics[f"logps/{kind}"] == pytest.approx(log_probs[chosen].mean(), rel=1e-4)
    one_kind = [n for n in range(ROWS) if desirable[n]]
    result, _ = of_step(WEIGHTED, model, [batch_of(rows, one_kind)])
    assert result.metrics.keys() == {"rewards/chosen", "logps/chosen", "kl"}


@pytest.mark.parametrize("size", [1, 3, ROWS])
def test_held_out_rows_are_measured_as_one_batch(size: int) -> None:
    rows, model = tiny_run.labelled(ROWS), model_of("lora")
    batches = [batch_of(rows, [*range(ROWS)][start : start + size]) for start in range(0, ROWS, size)]
    measured = measure(model, batches, objective=build_objective(ObjectiveSection(**WEIGHTED)))
    with torch.no_grad():
        loss, baseline = by_the_paper(WEIGHTED, rows, model)
        rewards = [
            float(summed_log_prob(model, row)) - value
            for row, value in zip(rows, reference_values()[:, 0], strict=True)
        ]
    assert measured is not None
    assert measured.loss == pytest.approx(float(loss), rel=1e-5)
    assert measured.metrics["kl"] == pytest.approx(baseline, rel=1e-5)
    kinds = [[r for r, label in zip(rewards, rows.desirable, strict=True) if label == kind] for kind in (True, False)]
    wins = sum((a > b) + (a == b) / 2 for a in kinds[0] for b in kinds[1])
    assert measured.metrics["rewards/auc"] == pytest.approx(wins / (len(kinds[0]) * len(kinds[1])))
    assert (measured.metrics["desirable"], measured.metrics["undesirable"]) == (len(kinds[0]), len(kinds[1]))


def prompts_of(rows: Any) -> list[bytes]:
    return [ids[labels == -100].tobytes() for ids, labels in rows]


def test_partners_are_a_permutation_between_different_prompts() -> None:
    rows = tiny_run.Labelled(tiny_run.pairs(20))  # two answers to each prompt
    partners, prompts = choose_partners(rows, 0), prompts_of(rows)
    assert sorted(partners) == list(range(40))
    assert all(prompts[row] != prompts[partner] for row, partner in enumerate(partners))
    assert np.array_equal(partners, choose_partners(rows, 0))
    assert not np.array_equal(partners, choose_partners(rows, 1))


@pytest.mark.parametrize(("same", "others"), [(7, 3), (4, 0)])
def test_partners_where_most_rows_have_one_prompt(same: int, others: int) -> None:
    """No partner is the row itself, and no more rows than must have one of their own prompt."""
    prompt = np.array([9, 8, 7])
    rows = [(np.concatenate([prompt, [n]]), np.array([-100] * 3 + [n])) for n in range(same)]
    rows += [(np.array([n, 1]), np.array([-100, 1])) for n in range(others)]
    partners, prompts = choose_partners(rows, 0), prompts_of(rows)
    assert sorted(partners) == list(range(len(rows)))
    assert all(row != partner for row, partner in enumerate(partners))
    assert sum(prompts[row] == prompts[partner] for row, partner in enumerate(partners)) <= same - others + 1


def test_one_row_has_no_partner() -> None:
    with pytest.raises(DataError):
        choose_partners(tiny_run.labelled(1), 0)
    assert len(choose_partners([], 0)) == 0


def test_a_mismatched_row_keeps_its_prompt_and_is_cut_at_its_end() -> None:
    row = (np.array([1, 2, 3, 4]), np.array([-100, -100, 3, 4]))
    partner = (np.array([5, 6, 7, 8]), np.array([-100, 6, 7, -100]))
    ids, labels = mismatch(row, partner, 64)
    assert (ids.tolist(), labels.tolist()) == ([1, 2, 6, 7, 8], [-100, -100, 6, 7, -100])
    assert mismatch(row, partner, 3)[0].tolist() == [1, 2, 6]


# Runs


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base", attention_dropout=0.1)


def settings(base: Path, out: Path, objective: dict[str, Any] = KTO, **changes: Any) -> Any:
    return tiny_run.config(base, out, objective=objective, **({"max_steps": 8} | changes))


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_jsonl(out / "metrics.jsonl")]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_run_learns_the_labels_and_starts_at_half_the_mean_weight(base: Path, tmp_path: Path, packing: bool) -> None:
    changes = {"packing": packing, "max_steps": 40, "num_train_epochs": 14.0}
    job = tiny_run.training(settings(base, tmp_path, WEIGHTED, **changes), eval_rows=tiny_run.labelled(16, seed=1))
    result = job.fit()
    first = json.loads((tmp_path / "first_batch.json").read_text())
    labels = job.batches.desirable[[row for micro in job.batches.of_step(0) for row in micro]]
    assert first["passed"]
    assert first["expected"] == pytest.approx((1.5 * labels.sum() + 0.5 * (~labels).sum()) / (2 * len(labels)))
    assert first["loss"] == pytest.approx(first["expected"], abs=1e-6)
    assert (first["offset"], first["baseline"]) == (0.0, 0.0)
    assert any("half the mean weight" in note for note in result.notes)
    lines = [line for line in lines_of(tmp_path) if "loss" in line]
    assert (lines[0]["rewards/chosen"], lines[0]["kl"]) == (0.0, 0.0)
    assert any(line["kl"] > 0 for line in lines)
    held_out = [line for line in lines_of(tmp_path) if "eval_loss" in line][-1]
    assert held_out["eval_rewards/auc"] > 0.8
    assert held_out["eval_desirable"] + held_out["eval_undesirable"] == 16
    assert not {"eval_perplexity", "eval_pairs"} & held_out.keys()


@pytest.mark.parametrize("when", ["in the pass", "in the steps"])
def test_killed_and_resumed_equals_uninterrupted(base: Path, tmp_path: Path, when: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(reference, "SAVED_EVERY", 4)
    tiny_run.training(settings(base, tmp_path / "straight")).fit()

    class Killed(BaseException):
        pass

    calls, inner = 0, reference.StoredReference._measure

    def killed_in_the_pass(self: Any, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Killed
        return inner(self, *given)

    def killed_in_step_6(progress: Any) -> None:
        if when == "in the steps" and progress.step == 6:
            raise Killed

    with monkeypatch.context() as patched:
        if when == "in the pass":
            patched.setattr(reference.StoredReference, "_measure", killed_in_the_pass)
        job = tiny_run.training(settings(base, tmp_path / "killed"), on_progress=killed_in_step_6)
        with pytest.raises(Killed):
            job.fit()
    torch.manual_seed(9)
    tiny_run.training(settings(base, tmp_path / "killed")).fit(resume=True)
    one, two = tmp_path / "straight", tmp_path / "killed"
    assert lines_of(one) == lines_of(two)
    ours, theirs = (load_tensors(out / "adapter" / "adapter_model.safetensors") for out in (one, two))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() | theirs.keys())


@pytest.mark.parametrize("column", [0, 1], ids=["answers", "mismatched"])
def test_a_reference_that_is_not_the_models_stops_the_run(base: Path, tmp_path: Path, column: int) -> None:
    """Also where only the mismatched answers' numbers are off, which the rewards at the start do not show."""
    tiny_run.training(settings(base, tmp_path / "good", max_steps=2)).fit()
    with safe_open(tmp_path / "good" / "reference.safetensors", framework="numpy") as opened:
        metadata = opened.metadata()
    numbers = load_file(tmp_path / "good" / "reference.safetensors")
    numbers["train"][:, column] += np.float32(0.01)
    out = tmp_path / "bad"
    out.mkdir()
    save_file(numbers, out / "reference.safetensors", metadata | {"sha256": reference._sha256(numbers)})
    with pytest.raises(GateError) as error:
        tiny_run.training(settings(base, out, max_steps=2)).fit()
    assert error.value.field == "objective"
    assert not (out / "checkpoints").exists()


def test_other_partners_need_another_reference(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    tiny_run.training(settings(base, out, max_steps=2)).fit()
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / "reference.safetensors").write_bytes((out / "reference.safetensors").read_bytes())
    result = tiny_run.training(settings(base, tmp_path / "seed", max_steps=2, seed=1)).fit()
    assert any("of another run" in note for note in result.notes)


def test_other_labels_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    class Swapped(tiny_run.Labelled):
        @property
        def desirable(self) -> np.ndarray:
            return ~super().desirable

    tiny_run.training(settings(base, tmp_path, max_steps=4, every=2)).fit()
    with pytest.raises(ConfigError) as error:
        tiny_run.training(settings(base, tmp_path, max_steps=4, every=2), Swapped(tiny_run.labelled())).fit(resume=True)
    assert error.value.field == "data.train"


def test_dropout_that_comes_back_stops_the_run(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("surefit.train.loop.switch_off_dropout", lambda model: 0)
    with pytest.raises(GateError) as error:
        tiny_run.training(settings(base, tmp_path)).fit()
    assert error.value.field == "objective"


@pytest.mark.parametrize("setting", ["dropout", "truncated", "prepared", "mode", "batch"])
def test_what_cannot_be_combined_is_refused(base: Path, tmp_path: Path, setting: str) -> None:
    changed = settings(base, tmp_path)
    section, update, field = {
        "dropout": ("lora", {"lora_dropout": 0.05}, "lora.lora_dropout"),
        "truncated": ("data", {"too_long": "truncate"}, "data.too_long"),
        "prepared": ("data", {"tokenized": "shards"}, "data.tokenized"),
        "mode": ("parallel", {"mode": "fsdp"}, "objective.name"),
        "batch": ("train", {"global_batch_size": 1, "per_device_train_batch_size": 1}, "train.global_batch_size"),
    }[setting]
    changed = changed.model_copy(update={section: getattr(changed, section).model_copy(update=update)})
    with pytest.raises(ConfigError) as error:
        tiny_run.training(changed)
    assert error.value.field == field


def test_a_baseline_that_is_no_number_rejects_the_step() -> None:
    rows, model = tiny_run.labelled(ROWS), model_of("lora")
    batch = batch_of(rows, [*range(ROWS)])
    batch["mismatched"][0]["reference_log_probs"][0] = math.nan
    objective = build_objective(ObjectiveSection(**KTO))
    assert not train_step(model, [batch], MasterAdamW(model), 1.0, objective=objective).applied
