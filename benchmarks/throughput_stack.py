"""One stack of benchmarks/throughput.py, in a process of its own: `throughput_stack.py STACK < job.json`.

Prints one line of JSON: the loss and gradient norm of the first step, and the seconds and tokens of each timed step.
`reference` writes the model and the LoRA factors that all stacks start from, and computes the first step in float32
with plain transformers and PEFT.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MINI = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
MASKED = -100
LONG = 32_768
"""From so many tokens on the reference reads the loss only: its float32 logits and gradients would not fit."""


class Job:
    """What all stacks share: the workload, the token ids by optimizer step, the folder with the model.

    Attributes:
        rows, labels: of every example, in the order of training; labels are -100 where the loss does not count.
        nudged: move every weight by about as much as rounding does, to see what that does to the losses.
        in_memory: no reference wrote a model; each stack draws the same weights on the device, which takes seconds.
        profile: a file for the table of the operators of one step more; None for no such step.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder, self.overrides = Path(job["folder"]), job["set"]
        for name, value in job["workload"].items():
            setattr(self, name, value)
        ends = np.cumsum(np.load(self.folder / "lengths.npy"))[:-1]
        self.rows, self.labels = (np.split(np.load(self.folder / f"{name}.npy"), ends) for name in ("ids", "labels"))
        self.batches = [self.rows[at : at + self.batch] for at in range(0, len(self.rows), self.batch)]
        self.nudged, self.in_memory = job.get("nudged", False), job.get("in_memory", False)
        self.profile: str | None = job.get("profile")
        self.torch_dtype = getattr(torch, self.dtype)
        self.base, self.adapter = self.folder / "model", self.folder / "adapter"

    model: str
    length: int
    batch: int
    micro: int
    r: int
    dtype: str
    quantization: str
    warmup: int
    steps: int
    learning_rate: float
    schedule: str

    def tokens(self) -> list[int]:
        """Of each timed step."""
        return [sum(map(len, rows)) for rows in self.batches[self.warmup :]]


def synchronised() -> float:
    """Now, with nothing left to do on the device."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes() -> int:
    if CUDA:
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# The reference


def reference(job: Job) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    if Path(job.model).is_dir():
        job.base.unlink(missing_ok=True)
        job.base.symlink_to(Path(job.model).absolute())
        model = AutoModelForCausalLM.from_pretrained(job.base, dtype=job.torch_dtype, device_map={"": DEVICE})
        starting = 1e-4  # next to nothing: `start_from` refuses the zeros that PEFT starts with as an adapter unlearnt
    else:
        model = random_model(job)
        model.save_pretrained(job.base)
        starting = 0.01  # at zero, half of the gradients are
    model = model.float()
    torch.manual_seed(0)
    lora = LoraConfig(r=job.r, lora_alpha=2 * job.r, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, starting)
    model.to(job.torch_dtype).save_pretrained(str(job.adapter))
    model.float()
    loss, norm = first_step(job, model)
    return {"loss": loss, "grad_norm": norm, "flops_per_token": flops_per_token(job, surefit_config(job))}


def random_model(job: Job) -> Any:
    """A model of the catalogue, or the miniature, with random weights, on the device; the folder gets what
    `write_base` writes."""
    from transformers import AutoModelForCausalLM

    config = write_base(job)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=job.torch_dtype)
    draw_weights(model)
    return model


def draw_weights(model: Any) -> None:
    """Matrices normal(0, 0.02), norms one, biases as they are."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02)
            elif not name.endswith("bias"):
                parameter.fill_(1.0)


def write_base(job: Job) -> Any:
    """Write the random model's config beside a tokenizer of 512 words: all that planning reads of a base."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, PreTrainedTokenizerFast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from surefit.facts.model import catalogue

    values = dict(MINI if job.model == "mini" else catalogue()[job.model]["config"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype, config._name_or_path = job.torch_dtype, str(job.base)
    config.save_pretrained(job.base)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(512)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(job.base)
    return config


def model_in_memory(job: Job) -> Any:
    """The random model as `load_model` would give it, 4-bit where the job says so."""
    from surefit.model.sdpa import start_cuda

    if CUDA:
        start_cuda()
    model = random_model(job)
    if job.quantization == "nf4":
        four_bit_layers(model)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model.eval()


def four_bit_layers(model: Any) -> None:
    """Every layer that NF4 quantises, on the GPU."""
    from surefit.model import quantize

    for parent, name, layer in quantize._layers(model):
        setattr(parent, name, _four_bit(layer))
    model.is_loaded_in_4bit = True


def _four_bit(layer: Any) -> Any:
    """As transformers quantises a layer that it loads."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    made = Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=layer.weight.dtype, quant_type="nf4"
    )
    made.weight = Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True)
    made.bias = layer.bias
    return made.to("cuda")


@torch.no_grad()
def seed_factors(model: Any) -> None:
    """The same LoRA factors in every stack, each drawn by its name; none of them zeros."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            seed = zlib.crc32(name.replace("_orig_mod.", "").encode())
            drawn = torch.randn(parameter.shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
            parameter.copy_(0.01 * drawn)


def first_step(job: Job, model: Any) -> tuple[float, float | None]:
    """Loss and gradient norm of the first batch, a row at a time."""
    rows = list(zip(job.batches[0], job.labels, strict=False))
    count = sum(int((labels[1:] != MASKED).sum()) for _, labels in rows)
    if job.length > LONG:
        return sum(summed_loss(model, row, labels) for row, labels in rows) / count, None
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    total = 0.0
    for row, labels in rows:
        ids, targets = (torch.as_tensor(each, device=DEVICE) for each in (row, labels))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float(), targets[1:], reduction="sum") / count
        loss.backward()
        total += float(loss)
    gradients = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
    return total, float(torch.stack([gradient.norm() for gradient in gradients]).norm())


@torch.no_grad()
def summed_loss(model: Any, row: Any, labels: Any) -> float:
    ids, targets = (torch.as_tensor(each, device=DEVICE) for each in (row, labels))
    inner = model.get_base_model()
    hidden = inner.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
    return sum(
        float(torch.nn.functional.cross_entropy(inner.lm_head(part).float(), target, reduction="sum"))
        for part, target in zip(hidden.split(1024), targets[1:].split(1024), strict=True)
    )


def flops_per_token(job: Job, config: Any) -> float:
    from surefit.facts.flops import training_flops
    from surefit.facts.model import model_facts

    work = training_flops(model_facts(str(job.base)), config)
    assert work is not None
    lengths = [len(row) for row in job.rows]
    supervised = sum(int((labels[1:] != MASKED).sum()) for labels in job.labels)
    return work.of(lengths, supervised) / sum(lengths)


# The ceilings


def ceiling(job: Job) -> dict[str, Any]:
    """The fastest large matrix product and copy of this device, now."""
    side = 8192 if CUDA else 1024
    a, b = (torch.randn(side, side, device=DEVICE, dtype=job.torch_dtype) for _ in range(2))
    out = torch.empty_like(a)
    gemm = 2 * side**3 / fastest(lambda: torch.mm(a, b, out=out))
    source = torch.randn((2**30 if CUDA else 2**26) // 4, device=DEVICE)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / fastest(lambda: target.copy_(source))
    return {
        "device": torch.cuda.get_device_name() if CUDA else f"CPU, {torch.get_num_threads()} threads",
        "gemm_flops": gemm, "copy_bytes": copied, "datasheet_flops": datasheet_flops(job),
    }  # fmt: skip


def fastest(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(20):
        start = synchronised()
        run()
        times.append(synchronised() - start)
    return min(times)


def datasheet_flops(job: Job) -> float | None:
    from surefit.facts.flops import peak_flops
    from surefit.facts.hardware import hardware_facts

    return peak_flops(hardware_facts("auto" if CUDA else "cpu"), job.dtype)


# SureFit


def surefit_config(job: Job) -> Any:
    """The config that `surefit train` would run, every "auto" decided."""
    import yaml

    from surefit.stages.run_context import load_checked_run

    settings = {
        "recipe": "chat",
        "model": {"name_or_path": str(job.base), "dtype": job.dtype, "quantization": job.quantization},
        "lora": {"r": job.r, "lora_alpha": 2 * job.r} | ({} if job.in_memory else {"start_from": str(job.adapter)}),
        "data": {"train": str(job.folder / "rows.jsonl"), "max_length": job.length},
        "train": {
            "global_batch_size": job.batch,
            "learning_rate": job.learning_rate,
            "lr_scheduler_type": job.schedule,
            "warmup_steps": 0,
            "max_grad_norm": 1.0,
        },
        "hardware": {"gpu": "auto" if CUDA else "cpu"},
        "output_dir": str(job.folder / "run"),
    }
    (job.folder / "rows.jsonl").write_text('{"text": "1 2 3 4 5 6 7 8"}\n' * 64)
    path = job.folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return load_checked_run(path, job.overrides).resolved.config


def surefit(job: Job) -> dict[str, Any]:
    from surefit.facts.hardware import hardware_facts
    from surefit.model.load import load_model
    from surefit.model.prepare import prepare_for_training
    from surefit.train.batches import MicroBatcher
    from surefit.train.optim import make_optimizer
    from surefit.train.schedule import learning_rate
    from surefit.train.step import train_step

    if job.in_memory:
        write_base(job)
    config = surefit_config(job)
    hardware = hardware_facts("auto" if CUDA else "cpu")
    model: Any = model_in_memory(job) if job.in_memory else load_model(config.model, hardware)
    model, _ = prepare_for_training(model, config, hardware)
    if job.in_memory:
        seed_factors(model)
    model.train()
    nudge(job, model)
    optimizer = make_optimizer(model, config.train)
    rows = [(row, np.concatenate([[MASKED], labels[1:]])) for row, labels in zip(job.rows, job.labels, strict=True)]
    batches = MicroBatcher(rows, np.array([len(row) for row in job.rows]), config, 0)
    results, seconds, worked = [], [], 0.0
    total = job.warmup + job.steps

    def take_step(micro: list[Any]) -> Any:
        return train_step(model, micro, optimizer, config.train.max_grad_norm, chunked=config.speed.chunked_loss)

    for step in range(total):
        optimizer.learning_rate = learning_rate(step, total, job.learning_rate, job.schedule, 0)
        chosen = range(step * job.batch, (step + 1) * job.batch)
        start, began = synchronised(), time.process_time()
        micro = [batches.make(each) for each in batches.cut(chosen)]
        results.append(take_step(micro))
        seconds.append(synchronised() - start)
        worked += (time.process_time() - began) * (step >= job.warmup)
    assert all(result.applied for result in results)
    peak = peak_bytes()
    if job.profile:
        table_of(lambda: take_step(micro), Path(job.profile))
    how = {
        "micro batch": config.train.per_device_train_batch_size, "packing": config.data.packing,
        "gradient_checkpointing": config.train.gradient_checkpointing, **config.speed.model_dump(),
    }  # fmt: skip
    return {
        "loss": results[0].loss, "grad_norm": results[0].grad_norm, "losses": [result.loss for result in results],
        "seconds": seconds[job.warmup :], "tokens": job.tokens(), "cpu_seconds": worked,
        "flops_per_token": flops_per_token(job, config), "peak_bytes": peak,
        "how": ", ".join(f"{k} {v}" for k, v in how.items()),
    }  # fmt: skip


def table_of(step: Callable[[], Any], file: Path) -> None:
    """The 25 operators of a step that take longest, as text."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]
    with profile(activities=activities, acc_events=True) as seen:
        step()
        synchronised()
    order = "self_cuda_time_total" if CUDA else "self_cpu_time_total"
    file.write_text(seen.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70), encoding="utf-8")


def nudge(job: Job, model: Any) -> None:
    """Move every weight, where the job says so, by about as much as rounding does (docs/merge.md)."""
    if not job.nudged:
        return
    from surefit.merge.certify import nudge as share
    from surefit.merge.certify import rounding_dimensions
    from surefit.model.layerwise_forward import perturb_weights

    for name, parameter in model.named_parameters():
        perturb_weights(parameter.data, share(job.torch_dtype, rounding_dimensions(model)), name)


# The peers


def trl(job: Job, tuned: bool) -> dict[str, Any]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if job.in_memory:
        return sft(job, adapted_in_memory(job), tuned)
    options: dict[str, Any] = {"dtype": job.torch_dtype, "device_map": {"": DEVICE}}
    if job.quantization == "nf4":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=job.torch_dtype,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(job.base, **options)
    if job.quantization == "nf4":
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=not tuned)
    model = PeftModel.from_pretrained(model, str(job.adapter), is_trainable=True)
    return sft(job, model, tuned)


def adapted_in_memory(job: Job) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=job.r, lora_alpha=2 * job.r, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model_in_memory(job), lora)
    seed_factors(model)
    return model


def unsloth(job: Job, tuned: bool) -> dict[str, Any]:
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        str(job.adapter), max_seq_length=job.length, dtype=job.torch_dtype, load_in_4bit=job.quantization == "nf4",
        use_gradient_checkpointing=False if tuned else "unsloth",
    )  # fmt: skip
    return sft(job, FastLanguageModel.for_training(model, use_gradient_checkpointing=not tuned), tuned)


def sft(job: Job, model: Any, tuned: bool) -> dict[str, Any]:
    """TRL's SFTTrainer over the same ids: as it comes, or with checkpointing off and Liger's kernels where they are."""
    import importlib.util

    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = [
        {"input_ids": row.tolist(), "labels": labels.tolist()} for row, labels in zip(job.rows, job.labels, strict=True)
    ]
    liger = tuned and CUDA and importlib.util.find_spec("liger_kernel") is not None
    settings: dict[str, Any] = {
        "output_dir": str(job.folder / "peer"), "max_length": job.length, "max_steps": job.warmup + job.steps,
        "per_device_train_batch_size": job.micro, "gradient_accumulation_steps": job.batch // job.micro,
        "learning_rate": job.learning_rate, "lr_scheduler_type": job.schedule, "max_grad_norm": 1.0, "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "train_sampling_strategy": "sequential", "use_cpu": not CUDA,
        "bf16": job.dtype == "bfloat16", "disable_tqdm": True, "dataloader_pin_memory": CUDA,
    }  # fmt: skip
    nudge(job, model)
    if tuned:
        settings |= {"gradient_checkpointing": False, "use_liger_kernel": liger}
    times: list[tuple[float, float]] = []
    trainer = SFTTrainer(
        model, args=SFTConfig(**settings), train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job.base), callbacks=[clock(times)],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(job.folder / "peer"))
    lines = [line for line in trainer.state.log_history if "loss" in line]
    seconds, worked = (np.diff(each)[job.warmup - 1 :] for each in zip(*times, strict=True))
    how = f"micro batch {job.micro}, gradient_checkpointing {not tuned}, liger {liger}"
    return {
        "loss": lines[0]["loss"], "grad_norm": lines[0]["grad_norm"], "losses": [line["loss"] for line in lines],
        "seconds": seconds.tolist(), "cpu_seconds": float(worked.sum()), "tokens": job.tokens(),
        "peak_bytes": peak_bytes(), "how": how,
    }  # fmt: skip


def clock(times: list[tuple[float, float]]) -> Any:
    """Notes when each optimizer step is done, what the trainer does between two included, and the processor's time."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append((synchronised(), time.process_time()))

    return Clock()


STACKS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "reference": reference,
    "ceiling": ceiling,
    "surefit": surefit,
    "trl-default": lambda job: trl(job, False),
    "trl-tuned": lambda job: trl(job, True),
    "unsloth-default": lambda job: unsloth(job, False),
    "unsloth-tuned": lambda job: unsloth(job, True),
}


if __name__ == "__main__":
    print(json.dumps(STACKS[sys.argv[1]](Job(json.load(sys.stdin)))))
