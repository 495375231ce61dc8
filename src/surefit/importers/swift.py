"""ms-swift: the YAML or JSON of `swift sft`, `swift pt` and `swift rlhf`."""

from __future__ import annotations

import math
import os.path
import re
from typing import Any

from surefit.config.schema import STACKED, LoraSection
from surefit.importers import convert as c
from surefit.importers import hf
from surefit.importers.config_mapping import ConfigDraft, KeyMapping, ToolSchema
from surefit.importers.conflicts import check_conflicts
from surefit.importers.known import SWIFT, TRAINING_ARGUMENTS, TRAINING_ARGUMENTS_4, key_replacements
from surefit.importers.preferences import (
    OTHERWISE,
    OWN_REFERENCE,
    ToolNumber,
    ToolObjective,
    map_objective,
    note_reference,
    split_losses,
)  # fmt: skip

LORA_KEYS = ("lora_rank", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
ATTENTION = {
    "flash_attn": "flash_attention_2", "flash_attention_2": "flash_attention_2", "sdpa": "sdpa", "eager": "eager",
    "flash_attention_3": "flash_attention_3",
}  # fmt: skip
LOSS_SCALES = {"default": "assistant", "last_round": "completion", "all": "all"}
"""Values of loss_scale → the tokens that are trained on (4.6, arguments/base_args/template_args.py)."""
PRESET = re.compile(r"zero([0-3])(_offload)?")
"""A DeepSpeed config that comes with ms-swift."""
DATASET = re.compile(r"(?P<source>[^#]+?)(?::(?P<subset>[\w/.-]+))?(?:#(?P<count>\d+))?")
"""`id_or_path:subset#count`."""
OTHER_HUB = "without use_hf: true an id of ModelScope: SureFit reads Hugging Face's hub"
BATCH = 16
"""Rows of an optimizer step over all processes where gradient_accumulation_steps is not set."""


def _attention(value: Any) -> Any:
    return c.choice_of(ATTENTION, "SureFit's speed.attention does not support {value}")(value)


def _targets(value: Any) -> tuple[str, ...]:
    return hf.to_setup_target_modules(value)


def _side(value: Any) -> Any:
    return value if value in ("left", "right") else c.UNSET


def _loss_on(value: Any) -> Any:
    return LOSS_SCALES.get(str(value), c.UNSET)


KEYS = hf.KEYS | {
    "model": KeyMapping(c.to_text, "model.name_or_path", "base_model"),
    "torch_dtype": KeyMapping(hf.to_dtype, "model.dtype", "weights_dtype"),
    "attn_impl": KeyMapping(_attention, "speed.attention", "attention"),
    "template": KeyMapping(c.to_text, None, "chat_template"),
    "enable_thinking": KeyMapping(lambda value: {"enable_thinking": c.to_bool(value)}, "model.chat_template_kwargs"),
    "max_length": KeyMapping(c.to_int, "data.max_length", "max_length"),
    "truncation_strategy": KeyMapping(_side, None, "truncation_side"),
    "packing": KeyMapping(c.to_bool, "data.packing", "packing"),
    "split_dataset_ratio": KeyMapping(c.to_eval_fraction, "data.eval"),
    "loss_scale": KeyMapping(_loss_on, None, "loss_on"),
    "lora_rank": KeyMapping(c.to_int, "lora.r", "lora_r"),
    "lora_alpha": KeyMapping(c.to_float, "lora.lora_alpha", "lora_alpha"),
    "lora_dropout": KeyMapping(c.to_float, "lora.lora_dropout", "lora_dropout"),
    "target_modules": KeyMapping(_targets, "lora.target_modules", "target_modules", hf.to_config_target_modules),
    "target_parameters": KeyMapping(hf.to_expert_targets, "lora.experts"),
    "modules_to_save": KeyMapping(c.to_texts, None, "modules_to_save"),
    "use_rslora": KeyMapping(c.to_bool, "lora.use_rslora", "rslora"),
    "use_dora": KeyMapping(c.to_bool, "lora.use_dora"),
    "warmup_ratio": KeyMapping(c.to_fraction, "train.warmup_steps", "warmup_share"),
    "max_epochs": KeyMapping(c.to_float, "train.num_train_epochs", "epochs"),
    "early_stop_interval": KeyMapping(c.to_limit, "train.early_stopping_patience"),
}
GONE = key_replacements("swift gone")
"""Keys of ms-swift 2 and 3 → what to write in ms-swift 4."""
DEFAULTS = {
    "train.method": ("tuner_type", "lora"),
    "data.eval": ("split_dataset_ratio", 0.0),
    "train.num_train_epochs": ("num_train_epochs", 3.0),
    "train.lr_scheduler_type": ("lr_scheduler_type", "cosine"),
    "train.weight_decay": ("weight_decay", 0.1),
    "train.warmup_steps": ("warmup_ratio", 0.0),
    "train.gradient_checkpointing": ("gradient_checkpointing", True),
    "train.seed": ("seed", 42),
    "output_dir": ("output_dir", "output"),
}
"""ms-swift 4.6's defaults that differ from SureFit's."""


def _finish(draft: ConfigDraft) -> None:
    _batch(draft)
    _evaluation(draft)
    _sharding(draft)
    hf.map_training_arguments(draft)
    _adapter(draft)
    _quantization(draft)
    _data(draft)
    _objective(draft)
    hf.map_eval_rows(draft, "split_dataset_ratio", "val_dataset")


def _batch(draft: ConfigDraft) -> None:
    """Note the defaults of the batch: one row per process, and 16 in a step (trainers/arguments.py)."""
    if "micro_batch" not in draft.setup:
        draft.say("micro_batch", 1, "per_device_train_batch_size")
    if "accumulation" not in draft.setup and "gradient_accumulation_steps" not in draft.refused:
        draft.say("accumulation", math.ceil(BATCH / max(1, draft.setup["micro_batch"])), "gradient_accumulation_steps")


def _evaluation(draft: ConfigDraft) -> None:
    """Note the default of eval_strategy: save_strategy, where rows are held out (arguments/sft_args.py)."""
    if "eval_strategy" not in draft.setup and (draft.flat.get("val_dataset") or draft.flat.get("split_dataset_ratio")):
        draft.say("eval_strategy", draft.setup.get("save_strategy", "steps"), "eval_strategy")


def _sharding(draft: ConfigDraft) -> None:
    """Map the names of the DeepSpeed and FSDP configs that come with ms-swift."""
    preset = PRESET.fullmatch(str(draft.flat.get("deepspeed")))
    if preset:
        stage = int(preset[1])
        draft.say("parallel", f"zero{stage}" if stage else "ddp", "deepspeed")
        if preset[2]:
            draft.say("cpu_offload", True, "deepspeed")
        draft.judge("deepspeed")


def _adapter(draft: ConfigDraft) -> None:
    """Map tuner_type, which train_type was before ms-swift 4, and the settings that depend on it."""
    key = next((key for key in ("tuner_type", "train_type", "sft_type") if draft.says(key)), "tuner_type")
    kind = draft.flat.get(key) or "lora"
    if kind not in ("lora", "full"):
        draft.whole_run = False
        draft.lose(key, "SureFit trains LoRA adapters or all weights")
        return
    dora = kind == "lora" and draft.flat.get("use_dora") is True
    draft.say("adapter", "dora" if dora else kind, key)
    draft.carry("train.method", kind, key)
    draft.reach(key)
    rates = {"lora": 1e-4, "full": 1e-5}
    defaults: dict[str, tuple[str, Any]] = {"train.learning_rate": ("learning_rate", rates[kind])}
    if kind == "full":
        draft.without_effect(LORA_KEYS, f"{key} is full")
        for dotted in LoraSection.model_fields:
            draft.config.pop(f"lora.{dotted}", None)
    else:
        defaults |= {
            "lora.r": ("lora_rank", 8),
            "lora.lora_alpha": ("lora_alpha", 32.0),
            "lora.lora_dropout": ("lora_dropout", 0.05),
        }
        _start(draft)
    for dotted, (name, value) in defaults.items():
        if dotted not in draft.config and not draft.says(name):
            draft.config[dotted] = value
            draft.names[dotted] = name


def _start(draft: ConfigDraft) -> None:
    """Map an adapter that is trained further."""
    adapter = single(draft.flat.get("adapters"))
    if adapter is not None:
        draft.say("starts_from", adapter, "adapters")
        draft.carry("lora.start_from", adapter, "adapters")
        draft.reach("adapters")
    elif draft.flat.get("adapters"):
        draft.lose("adapters", STACKED)


def single(value: Any) -> str | None:
    """Return a text, or the only item of a list of one; None for anything else."""
    items = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return items[0] if len(items) == 1 and isinstance(items[0], str) and items[0].strip() else None


def _quantization(draft: ConfigDraft) -> None:
    bits, method = draft.flat.get("quant_bits"), draft.flat.get("quant_method")
    kind = {4: str(draft.flat.get("bnb_4bit_quant_type") or "nf4"), 8: "int8"}.get(bits if type(bits) is int else 0)
    if method == "bnb" and kind is not None:
        draft.say("quantization", kind, "quant_bits")
        draft.judge("quant_bits")
        draft.judge("quant_method")
        if kind == "nf4":
            draft.carry("model.quantization", "nf4", "quant_bits")
            draft.reach("quant_bits")
            draft.reach("quant_method")


def _data(draft: ConfigDraft) -> None:
    """Map `dataset`: paths and ids, each with a subset and a number of rows."""
    value = draft.flat.get("dataset")
    names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    parts = [match for name in names if (match := DATASET.fullmatch(str(name).strip()))]
    if not parts or len(parts) < len(names):
        draft.whole_run = False
        if names:
            draft.refuse("dataset", "paths or ids of data sets, such as rows.jsonl or owner/name#500")
        return
    draft.carry("data.train", parts[0]["source"], "dataset")
    draft.reach("dataset")
    draft.rows_known = False
    is_local = [os.path.exists(path) for part in parts for path in (part["source"], draft.path.parent / part["source"])]
    if not any(is_local) and draft.flat.get("use_hf") is not True:
        draft.lose_part("dataset", "", value, OTHER_HUB)
    for i, part in enumerate(parts):
        if part["subset"]:
            draft.lose_part("dataset", f"[{i}]", names[i], "SureFit reads a set's default configuration")
    if len(parts) == 1 and parts[0]["count"]:
        draft.carry("data.limit", int(parts[0]["count"]), "dataset")
    elif len(parts) > 1:
        counted = any(part["count"] for part in parts)
        if counted or not hf.map_data_mix(draft, [part["source"] for part in parts[1:]], "dataset"):
            draft.lose("dataset", "data.mix sets how often each data set is repeated: write the number of passes")
    held_out = single(draft.flat.get("val_dataset"))
    match = DATASET.fullmatch(held_out) if held_out is not None else None
    if match and not match["count"]:
        draft.carry("data.eval", match["source"], "val_dataset")
        draft.reach("val_dataset")


def _objective(draft: ConfigDraft) -> None:
    """Map rlhf_type; a file without it is one of `swift sft` or `swift pt`."""
    kind = draft.flat.get("rlhf_type")
    if kind is None:
        return
    if "rlhf_type" in draft.refused:
        draft.whole_run = False
        return
    kind = str(kind)
    names = {"dpo": "dpo", "orpo": "orpo", "simpo": "simpo", "kto": "kto", "rm": "reward", "cpo": "cpo"}
    if kind not in names:
        draft.whole_run = False
        draft.say("preferences", True, "rlhf_type")
        draft.lose("rlhf_type", OTHERWISE)
        return
    losses = draft.flat.get("loss_type")
    loss, likelihood = split_losses(losses if kind == "dpo" else None, draft.flat.get("loss_weights"))
    loss = str(losses or "kto") if kind == "kto" else loss
    weights = {"dpo": ToolNumber(("rpo_alpha",), likelihood), "simpo": ToolNumber(("cpo_alpha",), 1.0)}
    map_objective(
        draft,
        ToolObjective(
            names[kind], "rlhf_type", loss, "loss_type" if kind in ("dpo", "kto") and losses else None,
            beta=ToolNumber(("beta",), 2.0 if kind == "simpo" else 0.1), margin=ToolNumber(("simpo_gamma",), 1.0),
            sft_weight=weights.get(kind, ToolNumber((), 0.0)), desirable=ToolNumber(("desirable_weight",), 1.0),
            undesirable=ToolNumber(("undesirable_weight",), 1.0),
        ),
    )  # fmt: skip
    _reference(draft)


def _reference(draft: ConfigDraft) -> None:
    """Note the reference: without `ref_adapters`, LoRA's is the model with its adapters off."""
    adapter, reference = single(draft.flat.get("adapters")), draft.flat.get("ref_adapters")
    if draft.says("ref_model"):
        draft.lose("ref_model", OWN_REFERENCE)
        note_reference(draft, str(draft.flat["ref_model"]), adapter is None, "ref_model")
    elif adapter is None or single(reference) == adapter or draft.setup.get("adapter") == "full":
        draft.reach("ref_adapters")
        note_reference(draft, "the model as training begins", True, "rlhf_type")
    else:
        text = f"the base model with {single(reference)}" if reference else "the base model without it"
        note_reference(draft, text, False, "adapters")


TOOL = ToolSchema(
    name="swift",
    keys=KEYS,
    known=TRAINING_ARGUMENTS | TRAINING_ARGUMENTS_4 | SWIFT,
    gone=GONE,
    once={
        "model_id_or_path": KEYS["model"],
        "lora_dropout_p": KEYS["lora_dropout"],
        "lora_target_modules": KEYS["target_modules"],
        "batch_size": KEYS["per_device_train_batch_size"],
    },
    defaults=DEFAULTS,
    finish=_finish,
    open_sections=hf.OPEN_SECTIONS | {"ENV"},
    conflicts=check_conflicts,
)
