"""rsLoRA and DoRA train what PEFT and torch's AdamW train; resumed it is the same, merged it is proved."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from surefit.config.schema import ModelSection
from surefit.core.errors import ConfigError, Interrupted
from surefit.core.rundir import read_json, read_jsonl
from surefit.merge.merge import MergeJob, merge_adapter_job
from surefit.train.identity import require_same
from surefit.train.sampler import batch_rows

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora and rslora": {"use_dora": True, "use_rslora": True},
}
STEPS = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base")


def settings(base: Path, out: Path, kind: str, dropout: float = 0.0, **changes: Any) -> Any:
    adapter = KINDS[kind] | {"lora_dropout": dropout, "lora_alpha": 8.0}
    # One micro batch, so that the plain loop below is one.
    return tiny_run.config(base, out, adapter=adapter, per_device_train_batch_size=8, **changes)


def plain_losses(base: Path, kind: str, seed: int, peak: float) -> list[float]:
    """The losses of a loop that has nothing of SureFit's but the order of the rows."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **KINDS[kind])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=peak, weight_decay=0.0)
    rows, losses = tiny_run.rows(), []
    for step in range(STEPS):
        chosen = [rows[index] for index in batch_rows(step, seed, len(rows), 8)]
        width = max(len(ids) for ids, _ in chosen)
        ids, labels = (
            torch.tensor([[*part, *[empty] * (width - len(part))] for part in column])
            for column, empty in zip(zip(*chosen, strict=True), (0, -100), strict=True)
        )
        mask = torch.tensor([[1] * len(part) + [0] * (width - len(part)) for part, _ in chosen])
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_a_plain_loop(base: Path, tmp_path: Path, kind: str) -> None:
    made = settings(base, tmp_path / "run", kind, lr_scheduler_type="constant")
    tiny_run.training(made).fit()
    losses = [line["loss"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(losses) == STEPS
    assert losses == pytest.approx(plain_losses(base, kind, made.train.seed, made.train.learning_rate), abs=1e-6)
    assert losses[-1] < losses[0] - 0.1


def test_the_kinds_learn_differently(base: Path, tmp_path: Path) -> None:
    """Else the test above would compare PEFT's plain LoRA with itself."""
    ends = {round(plain_losses(base, kind, 0, 1e-2)[-1], 4) for kind in KINDS}
    assert len(ends) == len(KINDS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_equals_uninterrupted_bit_for_bit(base: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    def made(out: str) -> Any:
        return settings(base, tmp_path / out, kind, dropout=0.1, dtype=dtype)

    def stop(progress: Any) -> None:
        if progress.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    tiny_run.training(made("straight")).fit()
    with pytest.raises(Interrupted):
        tiny_run.training(made("stopped"), on_progress=stop).fit()
    tiny_run.training(made("stopped")).fit(resume=True)
    for name in ("weights", "optimizer"):
        one, two = (
            load_file(tmp_path / out / "checkpoints" / "step-12" / f"{name}.safetensors")
            for out in ("straight", "stopped")
        )
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
        assert any("lora_magnitude_vector" in key for key in one) == ("dora" in kind)


def test_over_four_bit_weights_the_merge_is_certified_too(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    made = settings(base, tmp_path / "run", "dora")
    made = made.model_copy(update={"model": made.model.model_copy(update={"quantization": "nf4"})})
    tiny_run.training(made).fit()
    job = MergeJob(
        made.model, tmp_path / "run" / "adapter", tmp_path / "merged", tmp_path / "certificate.json", made.adapter
    )
    assert merge_adapter_job(job, tiny_run.CPU, [row.tolist() for row, _ in tiny_run.rows(4)])["passed"] is True


def test_a_checkpoint_from_before_these_settings_is_resumed(tmp_path: Path) -> None:
    now = {"lora.r": 4, "lora.use_rslora": False, "lora.use_dora": False}
    require_same({"lora.r": 4}, now, tmp_path)
    with pytest.raises(ConfigError, match="use_dora was False when the checkpoint was written and is True now"):
        require_same({"lora.r": 4}, now | {"lora.use_dora": True}, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_the_adapter_and_the_merge_is_certified(base: Path, tmp_path: Path, kind: str) -> None:
    made = settings(base, tmp_path / "run", kind)
    job = tiny_run.training(made)
    job.fit()
    adapter = tmp_path / "run" / "adapter"
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
    trained, loaded = (
        {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
        for model in (job.model, plain)
    )
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(parameter, loaded[name]) for name, parameter in trained.items())
    ids = torch.arange(1, 17).reshape(2, 8)
    with torch.no_grad():
        ours, theirs = job.model.eval()(input_ids=ids).logits, plain(input_ids=ids).logits
    assert torch.equal(ours, theirs)
    merged = tmp_path / "merged"
    merge_adapter_job(
        MergeJob(
            ModelSection(name_or_path=str(base), dtype="float32"), adapter, merged, tmp_path / "certificate.json",
            expected=made.adapter,
        ),
        tiny_run.CPU, [row.tolist() for row, _ in tiny_run.rows(4)],
    )  # fmt: skip
    certificate = read_json(tmp_path / "certificate.json")
    assert certificate["passed"] is True
    with torch.no_grad():
        answered = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()(input_ids=ids).logits
    assert torch.allclose(answered, theirs, atol=1e-5)
