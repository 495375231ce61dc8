"""DPO by one stack of benchmarks/preference_speed.py, in a process of its own: `preference_stack.py STACK < job.json`.

Prints one line of JSON: the losses, the seconds and processor seconds of the reference and of the timed steps, the
peak of memory, and how SureFit's first batch was checked. Both stacks start from the same LoRA factors, new ones: B is
zero, so that the reference is the base model.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from throughput_stack import CUDA, DEVICE, MASKED, Job, clock, model_in_memory, peak_bytes, synchronised, write_base

BETA, SEED = 0.1, 0


class PairJob(Job):
    """As throughput_stack.py's, with two rows to an example: `batch` and `micro` count pairs.

    Attributes:
        packing: of SureFit; TRL pads.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.packing = job.get("packing", "auto")
        self.total = self.warmup + self.steps
        if not self.in_memory:
            self.base = Path(self.model)

    def order(self) -> list[list[int]]:
        """The pairs of each step, as `surefit train` draws them."""
        from surefit.train.sampler import batch_rows

        return [list(batch_rows(step, SEED, len(self.rows) // 2, self.batch)) for step in range(self.total)]

    def tokens(self) -> list[int]:
        return [sum(len(self.rows[2 * pair + side]) for pair in step for side in (0, 1)) for step in self.order()]


@torch.no_grad()
def set_factors(model: Any) -> None:
    """LoRA's factors, the same in every stack: A drawn by its name, B zero."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.zero_()
        elif "lora_A" in name:
            seed = zlib.crc32(name.replace("_orig_mod.", "").encode())
            drawn = torch.randn(parameter.shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
            parameter.copy_(drawn / parameter.shape[1] ** 0.5)


class Meter:
    """Wall and processor seconds of a block."""

    def __enter__(self) -> Meter:
        self.start = synchronised(), time.process_time()
        return self

    def __exit__(self, *error: Any) -> None:
        self.seconds, self.cpu_seconds = synchronised() - self.start[0], time.process_time() - self.start[1]


# SureFit


def surefit_config(job: PairJob) -> Any:
    """The config that `surefit train` would run, every "auto" decided."""
    import yaml

    from surefit.stages.run_context import load_checked_run

    pairs = [{"prompt": f"{n} 2 3", "chosen": f"4 5 {n}", "rejected": f"6 {n} 7"} for n in range(64)]
    (job.folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = {
        "recipe": "chat", "objective": {"name": "dpo", "beta": BETA},
        "model": {"name_or_path": str(job.base), "dtype": job.dtype, "quantization": job.quantization},
        "lora": {"r": job.r, "lora_alpha": 2 * job.r, "target_modules": "all-linear"},
        "data": {"train": str(job.folder / "pairs.jsonl"), "max_length": job.length, "packing": job.packing},
        "train": {
            "global_batch_size": job.batch, "per_device_train_batch_size": job.micro, "max_grad_norm": 1.0,
            "learning_rate": job.learning_rate, "lr_scheduler_type": job.schedule, "warmup_steps": 0, "seed": SEED,
            "gradient_checkpointing": False, "max_steps": job.total,
        },
        "hardware": {"gpu": "auto" if CUDA else "cpu"}, "output_dir": str(job.folder / "run"),
    }  # fmt: skip
    path = job.folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return load_checked_run(path, job.overrides).resolved.config


def surefit(job: PairJob) -> dict[str, Any]:
    from surefit.facts.hardware import hardware_facts
    from surefit.model.load import load_model
    from surefit.model.prepare import prepare_for_training
    from surefit.parallel.engine import SINGLE
    from surefit.train.batches import MicroBatcher
    from surefit.train.first_batch import check_first_batch
    from surefit.train.objectives.pairs import PairObjective
    from surefit.train.optim import make_optimizer
    from surefit.train.reference import StoredReference, switch_off_dropout
    from surefit.train.schedule import learning_rate
    from surefit.train.step import train_step

    if job.in_memory:
        write_base(job)
    config = surefit_config(job)
    hardware = hardware_facts("auto" if CUDA else "cpu")
    model: Any = model_in_memory(job) if job.in_memory else load_model(config.model, hardware)
    model, _ = prepare_for_training(model, config, hardware)
    set_factors(model)
    switch_off_dropout(model)
    model.train()
    optimizer, objective = make_optimizer(model, config.train), PairObjective(config.objective)
    rows = list(zip(job.rows, job.labels, strict=True))
    batches = MicroBatcher(rows, np.array([len(row) for row in job.rows]), config, 0)
    none = MicroBatcher([], np.zeros(0, np.int64), config, 0)
    stored = StoredReference(job.folder / "reference.safetensors", "", batches, none, job.total, {}, SINGLE)
    with Meter() as reference:
        stored.compute(model, config.speed.chunked_loss, lambda: False)
    stored.hand_out()
    first = check_first_batch(model, [batches.make(m) for m in batches.of_step(0)], objective, config, SINGLE)
    losses, norms, meters = [], [], []
    for step in range(job.total):
        optimizer.learning_rate = learning_rate(step, job.total, job.learning_rate, job.schedule, 0)
        with Meter() as meter:
            micro = [batches.make(each) for each in batches.of_step(step)]
            result = train_step(
                model, micro, optimizer, config.train.max_grad_norm, chunked=config.speed.chunked_loss,
                objective=objective,
            )  # fmt: skip
        losses.append(result.loss)
        norms.append(result.grad_norm)
        meters.append((meter.seconds, meter.cpu_seconds))
    how = f"micro batch {job.micro} pairs, packing {config.data.packing}, reference stored"
    how += f", prompts shared {config.speed.shared_prompts}"
    return {"first_batch": vars(first)} | summary(job, losses, norms, meters, reference, how)


def summary(
    job: PairJob, losses: list[float], norms: list[float], meters: Any, reference: Meter | None, how: str
) -> dict[str, Any]:
    """What both stacks print; the reference's seconds are of all steps' pairs, and 0 where it is part of the step."""
    timed = np.asarray(meters)[-job.steps :]
    return {
        "losses": losses, "grad_norm": norms[0], "seconds": timed[:, 0].tolist(),
        "cpu_seconds": float(timed[:, 1].sum()),
        "tokens": sum(job.tokens()[-job.steps :]), "all_tokens": sum(job.tokens()),
        "reference_seconds": reference.seconds if reference else 0.0,
        "reference_cpu_seconds": reference.cpu_seconds if reference else 0.0, "peak_bytes": peak_bytes(), "how": how,
    }  # fmt: skip


# TRL


def trl(job: PairJob, tuned: bool) -> dict[str, Any]:
    """TRL's DPOTrainer over the same ids: as it comes, or with stored references and without checkpointing."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    if job.in_memory:
        write_base(job)
        model = model_in_memory(job)
    else:
        model = AutoModelForCausalLM.from_pretrained(job.base, dtype=job.torch_dtype, device_map={"": DEVICE})
    settings: dict[str, Any] = {
        "output_dir": str(job.folder / "peer"), "beta": BETA, "max_length": job.length, "max_steps": job.total,
        "per_device_train_batch_size": job.micro, "gradient_accumulation_steps": job.batch // job.micro,
        "learning_rate": job.learning_rate, "lr_scheduler_type": job.schedule, "max_grad_norm": 1.0, "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "train_sampling_strategy": "sequential", "use_cpu": not CUDA,
        "bf16": job.dtype == "bfloat16", "disable_tqdm": True, "dataloader_pin_memory": CUDA,
    }  # fmt: skip
    if tuned:
        settings |= {"gradient_checkpointing": False, "precompute_ref_log_probs": True}
    reference = Meter()
    reference.seconds = reference.cpu_seconds = 0.0

    class Trainer(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *given: Any, **named: Any) -> Any:
            """The rows are tokens already."""
            return dataset

        def _precompute_ref_logps(self, *given: Any, **named: Any) -> Any:
            with reference:
                return super()._precompute_ref_logps(*given, **named)

    times: list[tuple[float, float]] = []
    trainer = Trainer(
        model, args=DPOConfig(**settings), train_dataset=Dataset.from_list(trl_rows(job)),
        processing_class=AutoTokenizer.from_pretrained(job.base), callbacks=[clock(times)],
        peft_config=LoraConfig(r=job.r, lora_alpha=2 * job.r, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    set_factors(trainer.model)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    losses, norms = ([line[key] for line in lines] for key in ("loss", "grad_norm"))
    how = f"micro batch {job.micro} pairs, gradient_checkpointing {not tuned}, "
    how += "reference stored" if tuned else "reference in the step"
    return summary(job, losses, norms, np.diff(np.asarray(times), axis=0), reference, how)


def trl_rows(job: PairJob) -> list[dict[str, Any]]:
    """The pairs in the order of the steps, by TRL's columns."""
    rows = []
    for pair in (pair for step in job.order() for pair in step):
        starts = [int((job.labels[2 * pair + side] == MASKED).sum()) for side in (0, 1)]
        chosen, rejected = (job.rows[2 * pair + side].tolist() for side in (0, 1))
        row = {"prompt_ids": chosen[: starts[0]], "chosen_ids": chosen[starts[0] :]}
        rows.append(row | {"rejected_ids": rejected[starts[1] :]})
    return rows


def surefit_apart(job: PairJob) -> dict[str, Any]:
    """With a pair's prompt twice, as TRL computes it."""
    job.overrides = [*job.overrides, "speed.shared_prompts=false"]
    return surefit(job)


STACKS: dict[str, Callable[[PairJob], dict[str, Any]]] = {
    "surefit": surefit,
    "surefit-apart": surefit_apart,
    "trl-default": lambda job: trl(job, False),
    "trl-tuned": lambda job: trl(job, True),
}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    os.environ["HF_DATASETS_CACHE"] = str(Path(given["folder"]) / "datasets")  # no reference that another run stored
    print(json.dumps(STACKS[sys.argv[1]](PairJob(given))))
