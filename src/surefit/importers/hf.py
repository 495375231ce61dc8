"""Arguments of transformers' Trainer, which TRL and LLaMA-Factory share."""

from __future__ import annotations

import os.path
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args

from surefit.config.optimizers import OPTIMIZERS
from surefit.config.schema import SchedulerName
from surefit.config.trackers import TRACKERS
from surefit.importers import convert as c
from surefit.importers.config_mapping import ConfigDraft, KeyMapping
from surefit.importers.known import key_replacements

AUTO = "auto"
SCHEDULES = {name: name for name in get_args(SchedulerName)}
OPTIMIZER_NAMES = {alias: name for name, row in OPTIMIZERS.items() for alias in (name, *row.aliases)}
ATTENTION = {
    name: name for name in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "xformers")
}
OWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
_ROUTER = re.compile(r"(?:[a-z_]+\.)?(?:gate|router)\.weight")
_STACK = re.compile(r"(?:[a-z_]+\.)?experts\.(\w+)")
EVERY_STACK = ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"})
"""The parameters of a layer's experts, with and without a gate."""
to_scheduler_type = c.choice_of(SCHEDULES, f"SureFit's schedules are {', '.join(SCHEDULES)}, not {{value}}")
to_optim = c.choice_of(OPTIMIZER_NAMES, f"SureFit's optimizers are {', '.join(OPTIMIZERS)}, not {{value}}")
to_dtype = c.choice_of(
    {name: name for name in ("float32", "bfloat16", "float16")} | {AUTO: c.UNSET, "fp32": "float32", "fp16": "float16"}
    | {"bf16": "bfloat16"},
    "SureFit computes in float32, bfloat16 or float16, not {value}",
)  # fmt: skip


STORAGE = ("bfloat16", "float16", "float32", "float64", "int8", "uint8")


def to_storage_dtype(value: Any) -> str:
    """Return `bnb_4bit_quant_storage`, by the names that transformers accepts."""
    if c.to_lowercase(value) not in STORAGE:
        raise c.InvalidValue(f"one of {', '.join(STORAGE)}")
    return c.to_lowercase(value)


def to_nonnegative(value: Any) -> float:
    """Return a number of at least 0."""
    number = c.to_float(value)
    if number < 0:
        raise c.InvalidValue("a number (at least 0)")
    return number


def to_positive(value: Any) -> Any:
    """Return a number above 0, or `UNSET` for 0."""
    return to_nonnegative(value) or c.UNSET


def to_trackers(value: Any) -> tuple[str, ...]:
    """Return the trackers in `report_to`: names, "all" or "none"."""
    return tuple(name for name in c.to_texts(value) if name.lower() != "none")


def to_resume_flag(value: Any) -> bool:
    """Return whether `resume_from_checkpoint`, a path or a bool, is set."""
    return value if isinstance(value, bool) else bool(c.to_text(value))


def to_max_grad_norm(value: Any) -> Any:
    """Return `max_grad_norm`; raises for 0, which turns clipping off."""
    if to_nonnegative(value) == 0:
        raise c.Unmappable("SureFit always scales gradients down to train.max_grad_norm")
    return c.to_float(value)


def to_config_attention(value: str) -> str:
    """Return `Setup.attention` as SureFit's config has it."""
    if value not in OWN_ATTENTION:
        raise c.Unmappable(f"SureFit's speed.attention does not support {value}")
    return value


def to_config_quantization(value: str) -> str:
    """Return `Setup.quantization` as SureFit's config has it."""
    if value not in ("none", "nf4"):
        raise c.Unmappable(f"SureFit quantizes a frozen base to nf4 or fp8, not to {value}")
    return value


def to_setup_target_modules(value: Any) -> tuple[str, ...]:
    """Return names of linear layers, as PEFT accepts them, for `Setup.target_modules`."""
    names = c.to_texts(value)
    return ("all-linear",) if names in (("all-linear",), ("all",)) else names


def to_target_modules_or_pattern(value: Any) -> Any:
    """Return the same, but raise for a string that PEFT reads as a regular expression matched against full names."""
    if isinstance(value, str) and value not in ("all-linear", "all_linear"):
        raise c.Unmappable(
            f"PEFT reads the string {value!r} as a regular expression; SureFit needs names or all-linear"
        )
    return ("all-linear",) if isinstance(value, str) else to_setup_target_modules(value)


def to_config_target_modules(value: tuple[str, ...]) -> Any:
    """Return `Setup.target_modules` as SureFit's config has it."""
    return "all-linear" if value == ("all-linear",) else list(value)


def to_expert_targets(value: Any) -> Any:
    """Return True if PEFT's `target_parameters`, suffixes of parameter names, are the experts of every layer, and
    "with_router" if they include the routers; `UNSET` if empty. Any other parameters raise `Unmappable`."""
    names = c.to_texts(value)
    if not names:
        return c.UNSET
    routed = [name for name in names if _ROUTER.fullmatch(name)]
    matches = [_STACK.fullmatch(name) for name in names if name not in routed]
    if not all(matches) or {match[1] for match in matches if match} not in EVERY_STACK:
        raise c.Unmappable("SureFit adds factors to all experts of every layer, or to none")
    return "with_router" if routed else True


KEYS: dict[str, KeyMapping] = {
    "output_dir": KeyMapping(c.to_text, "output_dir"),
    "model_name_or_path": KeyMapping(c.to_text, "model.name_or_path", "base_model"),
    "model_revision": KeyMapping(c.to_text, "model.revision", "base_revision"),
    "trust_remote_code": KeyMapping(c.to_bool, "model.trust_remote_code"),
    "per_device_train_batch_size": KeyMapping(c.to_int, "train.per_device_train_batch_size", "micro_batch"),
    "gradient_accumulation_steps": KeyMapping(c.to_int, None, "accumulation"),
    "num_train_epochs": KeyMapping(c.to_float, "train.num_train_epochs", "epochs"),
    "max_steps": KeyMapping(c.to_limit, "train.max_steps", "max_steps"),
    "learning_rate": KeyMapping(c.to_float, "train.learning_rate", "learning_rate"),
    "lr_scheduler_type": KeyMapping(to_scheduler_type, "train.lr_scheduler_type"),
    "lr_scheduler_kwargs.num_decay_steps": KeyMapping(c.to_int, "train.decay_steps"),
    "optim": KeyMapping(to_optim, "train.optim", "optimizer"),
    "neftune_noise_alpha": KeyMapping(to_positive, "train.neftune_noise_alpha"),
    "torch_compile": KeyMapping(c.unless_auto(c.to_bool), "speed.compile"),
    "weight_decay": KeyMapping(c.to_float, "train.weight_decay"),
    "adam_beta1": KeyMapping(c.unsupported_setting(0.9, "AdamW's betas")),
    "adam_beta2": KeyMapping(c.unsupported_setting(0.999, "AdamW's betas")),
    "adam_epsilon": KeyMapping(c.unsupported_setting(1e-8, "AdamW's epsilon")),
    "max_grad_norm": KeyMapping(to_max_grad_norm, "train.max_grad_norm"),
    "warmup_steps": KeyMapping(to_nonnegative, "train.warmup_steps"),
    "seed": KeyMapping(c.to_int, "train.seed"),
    "bf16": KeyMapping(c.to_bool, None, "bf16"),
    "fp16": KeyMapping(c.to_bool, None, "fp16"),
    "gradient_checkpointing": KeyMapping(c.to_bool, "train.gradient_checkpointing", "gradient_checkpointing"),
    "gradient_checkpointing_kwargs.use_reentrant": KeyMapping(c.to_bool, None, "reentrant"),
    "use_liger_kernel": KeyMapping(c.to_bool, None, "liger"),
    "use_cache": KeyMapping(c.to_bool, None, "use_cache"),
    "per_device_eval_batch_size": KeyMapping(c.to_int, None, "eval_micro_batch"),
    "eval_strategy": KeyMapping(c.to_lowercase, None, "eval_strategy"),
    "eval_steps": KeyMapping(c.to_step_count, "train.eval_steps", "eval_steps"),
    "save_strategy": KeyMapping(c.to_lowercase, None, "save_strategy"),
    "save_steps": KeyMapping(c.to_step_count, "checkpoint.save_steps", "save_steps"),
    "save_total_limit": KeyMapping(c.to_limit, "checkpoint.save_total_limit", "save_total_limit"),
    "save_only_model": KeyMapping(c.to_bool, None, "save_only_model"),
    "load_best_model_at_end": KeyMapping(c.to_bool, None, "best_model"),
    "metric_for_best_model": KeyMapping(c.to_text, None, "best_metric"),
    "dataloader_num_workers": KeyMapping(c.to_int, None, "dataloader_workers"),
    "ddp_find_unused_parameters": KeyMapping(c.to_bool, None, "find_unused_parameters"),
    "use_cpu": KeyMapping(c.to_bool, None, "on_cpu"),
    "report_to": KeyMapping(to_trackers, None, "trackers"),
    "resume_from_checkpoint": KeyMapping(to_resume_flag, None, "resume"),
    "fsdp_config.version": KeyMapping(c.to_int, None, "fsdp_version"),
    "fsdp_config.fsdp_version": KeyMapping(c.to_int, None, "fsdp_version"),
    "fsdp_config.state_dict_type": KeyMapping(c.to_text, None, "fsdp_state_dict"),
    "fsdp_config.cpu_offload": KeyMapping(c.to_bool, None, "fsdp_offload"),
    "fsdp_config.offload_params": KeyMapping(c.to_bool, None, "fsdp_offload"),
    "fsdp_config.cpu_ram_efficient_loading": KeyMapping(c.to_bool, None, "fsdp_efficient_loading"),
    "fsdp_config.sync_module_states": KeyMapping(c.to_bool, None, "fsdp_sync_states"),
    "fsdp_config.transformer_layer_cls_to_wrap": KeyMapping(c.to_texts, None, "fsdp_layers"),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": KeyMapping(c.to_texts, None, "fsdp_layers"),
}
KEYS |= {
    key.replace("gradient_", "activation_"): to for key, to in KEYS.items() if key.startswith("gradient_checkpointing")
}
OPEN_SECTIONS = frozenset(
    {"fsdp_config", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "lr_scheduler_kwargs"}
)

GONE_BEFORE_5 = key_replacements("transformers gone before 5")
"""Removed in transformers 4.46 or earlier → what to write instead."""
ONCE_BEFORE_5: dict[str, KeyMapping] = {
    "evaluation_strategy": KEYS["eval_strategy"],
    "per_gpu_train_batch_size": KEYS["per_device_train_batch_size"],
    "per_gpu_eval_batch_size": KEYS["per_device_eval_batch_size"],
}
"""Keys of `GONE_BEFORE_5` with the meaning of a newer key."""
GONE_IN_5 = key_replacements("transformers gone in 5")
"""Removed in transformers 5 → what to write instead; checked in 5.23.0's TrainingArguments, which has no such
fields."""

ONCE_IN_5: dict[str, KeyMapping] = {
    "warmup_ratio": KeyMapping(c.to_fraction, "train.warmup_steps", "warmup_share"),
    "no_cuda": KEYS["use_cpu"],
}
"""Keys of `GONE_IN_5` with the meaning of a newer key."""


def map_training_arguments(draft: ConfigDraft) -> None:
    """Map what several of the Trainer's arguments mean together."""
    map_warmup(draft, "warmup_steps")
    map_global_batch(draft, "per_device_train_batch_size", 8, "gradient_accumulation_steps")
    _map_max_steps(draft)
    map_mixed_precision(draft)
    map_best_model(draft)
    default_to_padding(draft, "packing")
    map_sharding(draft)
    map_trackers(draft)
    for steps_key, strategy_key, default in (
        ("eval_steps", "eval_strategy", "no"),
        ("save_steps", "save_strategy", "steps"),
    ):
        strategy = draft.setup.get(strategy_key, default)
        if strategy != "steps" and strategy_key not in draft.refused:
            draft.without_effect([steps_key], f"{strategy_key} is {strategy}, not steps")
    if draft.setup.get("eval_strategy") == "steps" and draft.flat.get("eval_steps") == 0:
        draft.without_effect(["eval_steps"], "it is 0, so logging_steps is used")
    if draft.flat.get("save_strategy") in ("no", "epoch", "best"):
        draft.config.pop("checkpoint.save_steps", None)
    if draft.setup.get("eval_strategy", "no") != "steps":
        draft.config.pop("train.eval_steps", None)


def map_warmup(draft: ConfigDraft, key: str) -> None:
    """Map warmup as a number of steps, or as a share of the run if it is below 1."""
    value = draft.config.get("train.warmup_steps")
    if value is None or draft.names["train.warmup_steps"] != key:
        return
    if 0 < value < 1:
        draft.say("warmup_share", value, key)
    else:
        draft.say("warmup_steps", int(value), key)


def map_global_batch(draft: ConfigDraft, micro_key: str, default: int, accumulation_key: str) -> None:
    """Map the batch of one process to the global batch; the number of processes is in the setup."""
    micro = draft.setup.get("micro_batch", default)
    accumulation = draft.setup.get("accumulation", 1)
    if "train.global_batch_size" in draft.config:
        return
    set_keys = [key for key in (micro_key, accumulation_key) if draft.says(key)]
    draft.carry("train.global_batch_size", micro * accumulation, " × ".join(set_keys) or micro_key)
    draft.config.setdefault("train.per_device_train_batch_size", micro)
    draft.names.setdefault("train.per_device_train_batch_size", micro_key)
    draft.judged.pop(accumulation_key, None)


def _map_max_steps(draft: ConfigDraft) -> None:
    """Map `max_steps` to a number of epochs that suffices for it, even with a single row: the Trainer repeats its rows
    until `max_steps`, whatever its epochs (TrainingArguments: "it will override `num_train_epochs`"), but SureFit's run
    ends at whichever limit is reached first."""
    steps = draft.config.get("train.max_steps")
    if steps is None:
        return
    draft.without_effect(["num_train_epochs"], "max_steps overrides it")
    draft.carry(
        "train.num_train_epochs", float(min(10**6, steps * draft.config["train.global_batch_size"])), "max_steps"
    )


def map_mixed_precision(draft: ConfigDraft) -> None:
    """Map bf16 and fp16 to the dtype that SureFit computes in, with loss scaling for float16."""
    for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if draft.setup.get(key) and "model.dtype" not in draft.config:
            draft.carry("model.dtype", dtype, key)
        if draft.says(key) and key not in draft.refused:
            draft.judged.pop(key, None)


def map_best_model(draft: ConfigDraft) -> None:
    """Map `load_best_model_at_end` if it uses the held-out loss: other metrics have other names in SureFit's
    recipes."""
    metric = draft.setup.get("best_metric", "loss")
    if draft.setup.get("best_model") and metric in ("loss", "eval_loss"):
        draft.carry("checkpoint.metric_for_best_model", "eval_loss", "load_best_model_at_end")
        draft.reach("load_best_model_at_end")
        if "best_metric" in draft.setup:
            draft.reach("metric_for_best_model")


def default_to_padding(draft: ConfigDraft, key: str) -> None:
    """Turn packing off by default with attention that needs a dense mask for packed rows, unless the file sets it."""
    if draft.config.get("speed.attention") in ("sdpa", "eager") and "data.packing" not in draft.config:
        draft.config["data.packing"] = False
        draft.names["data.packing"] = key


def map_data_mix(draft: ConfigDraft, sources: Sequence[str], key: str) -> bool:
    """Map further datasets, each seen once; return False if one is named twice, which `data.mix` cannot express."""
    if len({*sources, draft.config.get("data.train")}) <= len(sources):
        return False
    if sources:
        draft.carry("data.mix", dict.fromkeys(sources, 1.0), key)
    return True


def map_trackers(draft: ConfigDraft) -> None:
    """Map the trackers in `report_to` for which it provides everything that SureFit needs."""
    names = {name.lower() for name in draft.setup.get("trackers", ())}
    trackers = [TRACKERS[name] for name in TRACKERS if name in names]
    for tracker in trackers:
        if tracker.on is None:
            draft.lose("report_to", tracker.without_address)
        else:
            draft.carry(tracker.key, tracker.on, "report_to")
    if len(trackers) == len(names) and all(tracker.on is not None for tracker in trackers):
        draft.reach("report_to")


def map_sharding(draft: ConfigDraft, computed: Collection[str] | None = frozenset()) -> None:
    """Map `fsdp` and `deepspeed`: how the model is sharded over processes.

    Args:
        computed: arguments that are set to unknown values; None: any argument may be.
    """
    if draft.flat.get("fsdp"):
        draft.say("parallel", "fsdp", "fsdp")
        draft.judge("fsdp")
        if "offload" in str(draft.flat["fsdp"]):
            draft.say("fsdp_offload", True, "fsdp")
    if draft.flat.get("deepspeed"):
        _judge_deepspeed(draft, computed)
        stage = read_zero_stage(draft.flat["deepspeed"], draft.path.parent)
        if stage is not None:
            draft.say("parallel", f"zero{stage}" if stage else "ddp", "deepspeed")
            draft.judge("deepspeed")
        else:
            # With any such file, DeepSpeed's bf16 and fp16 optimizers update float32 copies.
            draft.setup["float32_masters"] = True


DEEPSPEED_PAIRS = (
    ("train_micro_batch_size_per_gpu", ("per_device_train_batch_size", "micro_batch_size")),
    ("gradient_accumulation_steps", ("gradient_accumulation_steps",)),
    ("gradient_clipping", ("max_grad_norm",)),
    ("optimizer.params.lr", ("learning_rate",)),
    ("optimizer.params.weight_decay", ("weight_decay",)),
    ("scheduler.params.warmup_max_lr", ("learning_rate",)),
    ("fp16.enabled", ("fp16",)),
    ("bf16.enabled", ("bf16",)),
)
"""(key of a DeepSpeed config, the arguments that must agree with it): transformers 5.23, trainer_config_process."""


def _judge_deepspeed(draft: ConfigDraft, computed: Collection[str] | None) -> None:
    """Record values of the DeepSpeed config that contradict the file: the Trainer raises if they are not "auto".

    An argument that the file does not set has a default, which must agree as well: one micro batch per step, and no
    other dtype than the one that is switched on.
    """
    config = read_deepspeed_config(draft.flat["deepspeed"], draft.path.parent)
    for deepspeed_key, keys in DEEPSPEED_PAIRS:
        value: Any = config
        for name in deepspeed_key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        key = next((key for key in keys if draft.says(key)), None)
        if key is None and computed is not None and not set(keys) & set(computed):
            _judge_default(draft, deepspeed_key, value)
        if key is None or value in (None, "auto") or isinstance(value, str):
            continue
        try:
            argument = c.to_bool(draft.flat[key]) if isinstance(value, bool) else c.to_float(draft.flat[key])
        except c.InvalidValue:
            continue
        if argument != value:
            draft.refuse_with(
                key,
                f"{draft.flat[key]} here, but {deepspeed_key} is {value} in the DeepSpeed config",
                f'write "auto" as {deepspeed_key}, or the same value',
            )


OTHER_TYPE = {"fp16.enabled": "bf16", "bf16.enabled": "fp16"}


def _judge_default(draft: ConfigDraft, theirs: str, value: Any) -> None:
    """Record a value of the DeepSpeed config that contradicts an argument's default."""
    other_dtype = OTHER_TYPE.get(theirs)
    if other_dtype and value is True and draft.flat.get(other_dtype) in (True, "true"):
        draft.refuse_with(
            other_dtype,
            f"it is on here, but the DeepSpeed config turns {theirs} on",
            f'write "auto" as {theirs} and {other_dtype}.enabled',
        )
    elif theirs == "gradient_accumulation_steps" and type(value) is int and value > 1:
        draft.refuse_with(
            "deepspeed",
            f"{theirs} is {value} in the DeepSpeed config, but 1 here, the default",
            f'write "auto" as {theirs} there, or {theirs}: {value} here',
        )


def map_eval_rows(draft: ConfigDraft, *keys: str) -> None:
    """Record whether rows are held out, by any of these keys."""
    for key in keys:
        if draft.flat.get(key):
            draft.say("eval_rows", True, key)


def read_zero_stage(value: Any, folder: Path) -> int | None:
    """Return the ZeRO stage of a DeepSpeed config, a mapping or a file relative to the current directory or
    `folder`."""
    section = read_deepspeed_config(value, folder).get("zero_optimization")
    stage = section.get("stage") if isinstance(section, dict) else None
    return stage if isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3 else None


def read_deepspeed_config(value: Any, folder: Path) -> dict[str, Any]:
    """Return a DeepSpeed config given as a mapping or as a file; empty if it cannot be read on this machine."""
    from surefit.config.load import parse_yaml, read_config_text
    from surefit.core.errors import ConfigError

    if isinstance(value, str):
        path = next((path for path in (Path(value), folder / value) if os.path.isfile(path)), None)
        if path is None:
            return {}
        try:
            value, _ = parse_yaml(read_config_text(path).replace("\t", " "), path, {})
        except ConfigError:
            return {}
    return value if isinstance(value, dict) else {}
