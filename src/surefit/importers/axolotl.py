"""Axolotl's YAML config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefit.config.schema import LoraSection
from surefit.config.trackers import TRACKERS, Tracker
from surefit.importers import convert as c
from surefit.importers import hf
from surefit.importers.axolotl_data import read_datasets
from surefit.importers.config_mapping import ConfigDraft, KeyMapping, ToolSchema
from surefit.importers.conflicts import check_conflicts
from surefit.importers.known import AXOLOTL, AXOLOTL_PLUGINS, key_replacements, tool_defaults
from surefit.importers.paths import count_rows
from surefit.importers.preferences import (
    OTHERWISE,
    ToolNumber,
    ToolObjective,
    map_objective,
    note_reference,
    split_losses,
)

LORA_KEYS = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear",
    "lora_target_parameters", "lora_modules_to_save", "peft_use_dora", "peft_use_rslora",
)  # fmt: skip
ASKED = {key: name for name, tracker in TRACKERS.items() for key in tracker.axolotl} | {
    "use_comet": "comet_ml", "use_trackio": "trackio",
}  # fmt: skip
"""Axolotl's keys that switch a tracker on → the tracker."""


def _bf16(value: Any) -> Any:
    """Return whether bf16 is on; the value is true, false, auto or full."""
    return c.UNSET if value == "auto" else value == "full" or c.to_bool(value)


def _recompute(value: Any) -> bool:
    return value == "offload" or value == "offload_disk" or c.to_bool(value)


def _device_map(value: Any) -> Any:
    """Return the name of a device map, or "custom" for a mapping of the model's parts."""
    return "custom" if isinstance(value, dict) and value else c.to_text(value)


def _template(value: Any) -> Any:
    # tokenizer_default_fallback_chatml means chatml if the tokenizer has no template.
    return c.UNSET if value == "tokenizer_default" else c.to_text(value)


KEYS: dict[str, KeyMapping] = {
    "base_model": KeyMapping(c.to_text, "model.name_or_path", "base_model"),
    "revision_of_model": KeyMapping(c.to_text, "model.revision", "base_revision"),
    "model_revision": KeyMapping(c.to_text, "model.revision", "base_revision"),
    "adapter": KeyMapping(c.to_lowercase, None, "adapter"),
    "load_in_4bit": KeyMapping(c.value_when_true("nf4"), "model.quantization", "quantization"),
    "load_in_8bit": KeyMapping(
        c.value_when_true("int8"), "model.quantization", "quantization", hf.to_config_quantization
    ),
    "gptq": KeyMapping(c.value_when_true("gptq"), "model.quantization", "quantization", hf.to_config_quantization),
    "lora_model_dir": KeyMapping(c.to_text, "lora.start_from"),
    "lora_r": KeyMapping(c.to_int, "lora.r", "lora_r"),
    "lora_alpha": KeyMapping(c.to_float, "lora.lora_alpha", "lora_alpha"),
    "lora_dropout": KeyMapping(c.to_float, "lora.lora_dropout", "lora_dropout"),
    "lora_target_modules": KeyMapping(
        hf.to_target_modules_or_pattern, "lora.target_modules", "target_modules", hf.to_config_target_modules
    ),
    "lora_target_linear": KeyMapping(
        c.value_when_true(("all-linear",)), "lora.target_modules", "target_modules", hf.to_config_target_modules
    ),
    "lora_target_parameters": KeyMapping(hf.to_expert_targets, "lora.experts"),
    "lora_modules_to_save": KeyMapping(c.to_texts, None, "modules_to_save"),
    "peft_use_rslora": KeyMapping(c.to_bool, "lora.use_rslora", "rslora"),
    "peft_use_dora": KeyMapping(c.to_bool, "lora.use_dora"),
    "peft_trainable_token_indices": KeyMapping(c.true_if_nonempty, None, "trainable_tokens"),
    "special_tokens.eos_token": KeyMapping(c.to_text, None, "eos_token"),
    "chat_template": KeyMapping(_template, None, "chat_template"),
    "chat_template_jinja": KeyMapping(c.to_text, None, "chat_template"),
    "bnb_config_kwargs.bnb_4bit_compute_dtype": KeyMapping(hf.to_dtype, None, "quant_compute_dtype"),
    "bnb_config_kwargs.bnb_4bit_quant_storage": KeyMapping(hf.to_storage_dtype, None, "quant_storage"),
    "tokens": KeyMapping(c.to_texts, "model.add_tokens", "new_tokens", list),
    "sequence_len": KeyMapping(c.to_int, "data.max_length", "max_length"),
    "sample_packing": KeyMapping(c.to_bool, "data.packing", "packing"),
    "val_set_size": KeyMapping(c.to_eval_fraction, "data.eval"),
    "train_on_inputs": KeyMapping(c.value_when_true("all"), None, "loss_on"),
    "micro_batch_size": KeyMapping(c.to_int, "train.per_device_train_batch_size", "micro_batch"),
    "gradient_accumulation_steps": KeyMapping(c.to_int, None, "accumulation"),
    "batch_size": KeyMapping(c.to_int, "train.global_batch_size", "global_batch"),
    "eval_batch_size": KeyMapping(c.to_int, None, "eval_micro_batch"),
    "num_epochs": KeyMapping(c.to_float, "train.num_train_epochs", "epochs"),
    "lr_scheduler": KeyMapping(hf.to_scheduler_type, "train.lr_scheduler_type"),
    "optimizer": KeyMapping(hf.to_optim, "train.optim", "optimizer"),
    "early_stopping_patience": KeyMapping(c.to_limit, "train.early_stopping_patience"),
    "tiled_mlp": KeyMapping(c.to_bool, "speed.tiled_mlp"),
    "warmup_ratio": KeyMapping(c.to_fraction, "train.warmup_steps", "warmup_share"),
    "bf16": KeyMapping(_bf16, None, "bf16"),
    "bfloat16": KeyMapping(c.value_when_true("bfloat16"), "model.dtype", "dtype"),
    "float16": KeyMapping(c.value_when_true("float16"), "model.dtype", "dtype"),
    "gradient_checkpointing": KeyMapping(_recompute, "train.gradient_checkpointing", "gradient_checkpointing"),
    "flash_attention": KeyMapping(c.value_when_true("flash_attention_2"), "speed.attention", "attention"),
    "sdp_attention": KeyMapping(c.value_when_true("sdpa"), "speed.attention", "attention"),
    "eager_attention": KeyMapping(c.value_when_true("eager"), "speed.attention", "attention"),
    "flex_attention": KeyMapping(
        c.value_when_true("flex_attention"), "speed.attention", "attention", hf.to_config_attention
    ),
    "xformers_attention": KeyMapping(
        c.value_when_true("xformers"), "speed.attention", "attention", hf.to_config_attention
    ),
    "attn_implementation": KeyMapping(c.to_text, "speed.attention", "attention", hf.to_config_attention),
    "device_map": KeyMapping(_device_map, None, "device_map"),
    "world_size": KeyMapping(c.to_int, None, "world_size"),
    "auto_resume_from_checkpoints": KeyMapping(c.value_when_true(True), None, "resume"),
    "generate_samples": KeyMapping(c.to_bool, None, "generates_in_loop"),
    "do_causal_lm_eval": KeyMapping(c.to_bool, None, "generates_in_loop"),
    "fsdp_config.fsdp_version": KeyMapping(c.to_int, None, "fsdp_version"),
    "fsdp_config.fsdp_state_dict_type": KeyMapping(c.to_text, None, "fsdp_state_dict"),
    "fsdp_config.fsdp_offload_params": KeyMapping(c.to_bool, None, "fsdp_offload"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": KeyMapping(c.to_bool, None, "fsdp_efficient_loading"),
    "fsdp_config.fsdp_sync_module_states": KeyMapping(c.to_bool, None, "fsdp_sync_states"),
    "fsdp_version": KeyMapping(c.to_int, None, "fsdp_version"),
    "fsdp_config.transformer_layer_cls_to_wrap": KeyMapping(c.to_texts, None, "fsdp_layers"),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": KeyMapping(c.to_texts, None, "fsdp_layers"),
    "tokenizer_config": KeyMapping(c.to_text, None, "tokenizer_name"),
} | {
    key: to
    for key, to in hf.KEYS.items()
    if key in AXOLOTL or key.startswith(("fsdp_config.", "gradient_checkpointing_kwargs.", "lr_scheduler_kwargs."))
    if key not in ("gradient_checkpointing", "bf16", "gradient_accumulation_steps")
}
GONE = key_replacements("axolotl gone")
"""Removed keys: Axolotl 0.19.0 raises if they are set (schemas/deprecated.py, schemas/validation.py)."""
DEPRECATED = key_replacements("axolotl deprecated")
"""Keys that Axolotl 0.19.0 accepts with a warning → what to write instead."""
ALIASES = key_replacements("axolotl aliases")
"""Keys of LLaMA-Factory and TRL → Axolotl's name for them; Axolotl silently ignores these keys."""
ONCE = {"evaluation_strategy": hf.KEYS["eval_strategy"], "noisy_embedding_alpha": hf.KEYS["neftune_noise_alpha"]}
DEFAULTS = tool_defaults("axolotl")
"""Axolotl 0.19.0's defaults that differ from SureFit's, and those that every SureFit config must set."""


def _finish(draft: ConfigDraft) -> None:
    for key in ("warmup_steps", "warmup_ratio"):
        hf.map_warmup(draft, key)
    _world(draft)
    hf.map_global_batch(draft, "micro_batch_size", 1, "gradient_accumulation_steps")
    _adapter(draft)
    _precision(draft)
    _recomputation(draft)
    hf.map_best_model(draft)
    hf.default_to_padding(draft, "sample_packing")
    _placement(draft)
    hf.map_sharding(draft)
    read_datasets(draft)
    hf.map_eval_rows(draft, "val_set_size", "test_datasets")
    _tokens(draft)
    _frequency(draft)
    _kernels_and_trackers(draft)
    _objective(draft)


OBJECTIVES = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
"""Values of `rl` → the objective."""


def _objective(draft: ConfigDraft) -> None:
    """Map `rl` and its numbers, which have the defaults of TRL's configs (Axolotl 0.19.0, core/builders/rl.py)."""
    kind, losses = str(draft.flat.get("rl") or ""), draft.flat.get("dpo_loss_type")
    if kind in OBJECTIVES:
        loss, likelihood = split_losses(losses, draft.flat.get("dpo_loss_weights"))
        loss = {"ipo": "ipo", "kto": "kto"}.get(kind, loss)
        sft = ToolNumber(("cpo_alpha",), 1.0) if kind == "simpo" else ToolNumber((), likelihood)
        betas = ("rl_beta", "dpo_beta") if kind != "orpo" else ("rl_beta", "orpo_alpha")
        map_objective(
            draft,
            ToolObjective(
                OBJECTIVES[kind], "rl", loss, "dpo_loss_type" if losses and kind == "dpo" else None,
                beta=ToolNumber(betas, 0.1), margin=ToolNumber(("simpo_gamma",)),
                sft_weight=sft, likelihood_on="all", desirable=ToolNumber(("kto_desirable_weight",), 1.0),
                undesirable=ToolNumber(("kto_undesirable_weight",), 1.0),
            ),
        )  # fmt: skip
        start = draft.flat.get("lora_model_dir")
        if isinstance(start, str):
            draft.say("starts_from", start, "lora_model_dir")
        note_reference(draft, "the model as training begins", True, "rl")
        return
    for key in ("rl", "process_reward_model"):
        if draft.flat.get(key):
            draft.whole_run = False
            draft.say("preferences", True, key)
            draft.lose(key, OTHERWISE)
    if draft.flat.get("reward_model"):
        map_objective(draft, ToolObjective("reward", "reward_model"))


def _tokens(draft: ConfigDraft) -> None:
    """Map `tokens`: strings appended to the vocabulary, like `model.add_tokens`."""
    if "new_tokens" in draft.setup:
        draft.setup["new_tokens"] = bool(draft.setup["new_tokens"])


def _frequency(draft: ConfigDraft) -> None:
    """Map evaluations and checkpoints per epoch to steps, which SureFit counts and which depend on the rows."""
    for key, dotted in (("evals_per_epoch", "train.eval_steps"), ("saves_per_epoch", "checkpoint.save_steps")):
        times, steps = draft.flat.get(key), _steps_per_epoch(draft)
        if not times or isinstance(times, bool) or not isinstance(times, int) or key in draft.ignored:
            continue
        if steps:
            draft.carry(dotted, max(1, steps // times), key)
            draft.reach(key)
        else:
            draft.lose(key, f"{dotted} counts steps: write the steps of an epoch divided by {times}")
    if draft.says("early_stopping_patience") and "train.eval_steps" not in draft.config:
        draft.lose_part(
            "early_stopping_patience",
            "",
            draft.flat["early_stopping_patience"],
            "train.eval_steps sets how often SureFit evaluates; without it, at every checkpoint",
        )


def _steps_per_epoch(draft: ConfigDraft) -> int | None:
    """Return the optimizer steps of an epoch, if all rows are in a local file and packing is off."""
    source, batch = draft.config.get("data.train"), draft.config.get("train.global_batch_size", 0)
    if not draft.rows_known or draft.setup.get("packing") or not batch:
        return None
    rows = count_rows(Path(str(source)))
    if rows is None:
        return None
    share = draft.config.get("data.eval")
    return max(1, round(rows * (1 - share) if isinstance(share, float) else rows) // int(batch))


def _world(draft: ConfigDraft) -> None:
    """Map `batch_size`, the batch of all processes together."""
    if "global_batch" in draft.setup:
        draft.config.setdefault("train.per_device_train_batch_size", 1)
        draft.names.setdefault("train.per_device_train_batch_size", "micro_batch_size")


def _adapter(draft: ConfigDraft) -> None:
    kind = draft.setup.get("adapter")
    if kind is None and not draft.says("adapter"):
        # Axolotl trains all weights if `adapter` is not set.
        draft.say("adapter", "full", "adapter")
        draft.without_effect(LORA_KEYS, "adapter is not set: every weight is trained")
        for dotted in LoraSection.model_fields:
            draft.config.pop(f"lora.{dotted}", None)
    elif kind in ("lora", "qlora"):
        dora = draft.flat.get("peft_use_dora") is True
        draft.say("adapter", "dora" if dora else "lora", "adapter")
        draft.carry("train.method", "lora", "adapter")
        draft.judged.pop("adapter", None)
        if kind == "qlora" and draft.config.get("model.quantization") != "nf4":
            draft.lose("adapter", "without load_in_4bit: true the weights are not quantized")
    else:
        draft.whole_run = False
        draft.lose("adapter", "SureFit trains LoRA adapters or all weights")
    if draft.says("load_in_4bit") and draft.flat["load_in_4bit"] is False and "quantization" not in draft.setup:
        draft.say("quantization", "none", "load_in_4bit")


def _precision(draft: ConfigDraft) -> None:
    if draft.flat.get("bf16") == "full":
        draft.say("dtype", "bfloat16", "bf16")
    if draft.setup.get("bf16"):
        # Axolotl also loads the weights in the dtype it computes in (cfg.torch_dtype).
        draft.say("weights_dtype", "bfloat16", "bf16")
    hf.map_mixed_precision(draft)


def _recomputation(draft: ConfigDraft) -> None:
    """Map where activation checkpoints are kept: `activation_offloading` moves them, formerly "offload"."""
    kind, offloading = draft.flat.get("gradient_checkpointing"), draft.flat.get("activation_offloading")
    if "train.gradient_checkpointing" not in draft.config:
        return
    if kind == "offload_disk" or offloading == "disk":
        del draft.config["train.gradient_checkpointing"]
        draft.lose("gradient_checkpointing", "SureFit offloads to host memory only")
    elif kind == "offload" or (kind is True and offloading in (True, "legacy")):
        draft.carry("train.gradient_checkpointing", "offload", "gradient_checkpointing")
        if offloading is not None:
            draft.reach("activation_offloading")


def _placement(draft: ConfigDraft) -> None:
    """Record weights that the device map, or max_memory, places in RAM or on disk."""
    memory, device_map = draft.flat.get("max_memory"), draft.flat.get("device_map")
    if isinstance(memory, dict) and memory.get("cpu"):
        if "device_map" not in draft.setup:
            draft.say("device_map", "auto", "max_memory")  # Axolotl creates one (infer_auto_device_map)
        draft.say("cpu_offload", True, "max_memory")
        draft.judge("max_memory")
    places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
    if "disk" in places or ("cpu" in places and len(places) > 1):
        draft.say("cpu_offload", True, "device_map")


def _kernels_and_trackers(draft: ConfigDraft) -> None:
    for key, value in draft.flat.items():
        if key.startswith("liger_") and value is True:
            draft.say("liger", True, key)
            draft.judge(key)
    trackers = dict.fromkeys(name for key, name in ASKED.items() if draft.flat.get(key))
    if draft.flat.get("wandb_mode") == "disabled" or draft.flat.get("use_wandb") is False:
        trackers.pop("wandb", None)
    for key, name in ASKED.items():
        if name in trackers and draft.flat.get(key):
            draft.say("trackers", tuple(trackers), key)
            draft.judge(key)
    if "wandb" in trackers:
        draft.reach("wandb_mode")
        if draft.flat.get("wandb_mode") == "offline":
            draft.say("quiet_trackers", ("wandb",), "wandb_mode")
    for name in sorted(trackers.keys() & TRACKERS.keys()):
        _telemetry(draft, name, TRACKERS[name])


def _telemetry(draft: ConfigDraft, name: str, tracker: Tracker) -> None:
    """Map the settings of a tracker that SureFit has, too."""
    key = next(key for key in tracker.axolotl if draft.flat.get(key))
    for axolotl_key, setting in tracker.axolotl_values.items():
        if isinstance(draft.flat.get(axolotl_key), str):
            draft.carry(f"telemetry.{setting}", draft.flat[axolotl_key], axolotl_key)
            draft.reach(axolotl_key)
    if tracker.on is not None:
        draft.carry(tracker.key, "offline" if name in draft.setup.get("quiet_trackers", ()) else tracker.on, key)
    elif tracker.key not in draft.config:
        draft.lose(key, tracker.without_address)
        return
    for tracker_key in tracker.axolotl:
        draft.reach(tracker_key)


TOOL = ToolSchema(
    name="axolotl",
    keys=KEYS,
    known=AXOLOTL | AXOLOTL_PLUGINS,
    gone=GONE,
    once=ONCE,
    defaults=DEFAULTS,
    finish=_finish,
    open_sections=frozenset({"special_tokens", "bnb_config_kwargs"}) | hf.OPEN_SECTIONS,
    deprecated=DEPRECATED,
    passes_over=lambda key: True,
    off_is_unset=True,
    conflicts=check_conflicts,
    aliases=ALIASES,
)
