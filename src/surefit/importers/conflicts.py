"""Values that a tool rejects in combination, by its own checks, and values that it accepts and ignores.

They are facts about the releases that the files in schemas/ name. Each was tested with the tool's own parser: a
combination that it rejects is an error at the key to change; a value that it ignores or replaces is a key without
effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surefit.config.modes import MODES
from surefit.importers.config_mapping import ConfigDraft
from surefit.importers.known import key_set as key_names

Rule = tuple[Callable[[dict[str, Any]], Any], str, str]
"""(condition for the error, the keys of which the last in the file is reported, what the tool expects)."""
Ignored = tuple[Callable[[dict[str, Any]], Any], str, str]
"""(condition for keys without effect, those keys, why)."""
FIRST = "! "
"""Prefix of keys of which the first in the written order is reported."""


def is_switched_off(value: Any) -> bool:
    """Return whether a value switches its key off."""
    return value is None or value is False or value in (0, "", [], {}, "none", "no")


def refuse_conflicts(draft: ConfigDraft, rules: tuple[Rule, ...]) -> None:
    """Record an error for each combination of values that the tool rejects."""
    flat = {key: value for key, value in draft.flat.items() if key not in draft.refused}
    for wrong, keys, expected in rules:
        by_order = keys.startswith(FIRST)
        set_keys = [key for key in keys.lstrip(FIRST).split() if key in flat and (by_order or flat[key] is not None)]
        if set_keys and wrong(flat):
            key = set_keys[0] if by_order else max(set_keys, key=lambda key: draft.line(key) or 0)
            draft.refuse_with(key, f"expected {expected}", "change this key, or the one that it conflicts with")


def mark_ignored_keys(draft: ConfigDraft, rules: tuple[Ignored, ...]) -> None:
    """Record the keys that the tool accepts and does not use, except those switched off."""
    for holds, keys, reason in rules:
        if holds(draft.flat):
            active_keys = [
                key for key in keys.split() if key not in draft.refused and not is_switched_off(draft.flat.get(key))
            ]
            draft.without_effect(active_keys, reason)


def both_set(first: str, second: str) -> Callable[[dict[str, Any]], bool]:
    """Return a condition: both keys are on."""
    return lambda flat: not is_switched_off(flat.get(first)) and not is_switched_off(flat.get(second))


def set_without(key: str, *needed: str) -> Callable[[dict[str, Any]], bool]:
    """Return a condition: a key is on, and none of the keys that it needs is."""
    return lambda flat: not is_switched_off(flat.get(key)) and all(is_switched_off(flat.get(name)) for name in needed)


def mutually_exclusive(first: str, second: str) -> Rule:
    """Return the rule for two keys of which only one may be on."""
    return both_set(first, second), f"{first} {second}", f"only one of {first} and {second}"


def requires_any_of(key: str, *needed: str) -> Rule:
    """Return the rule for a key that needs one of several others."""
    return set_without(key, *needed), key, f"{' or '.join(needed)} with {key}"


TRAINER: tuple[Rule, ...] = (
    (
        lambda flat: (
            flat.get("load_best_model_at_end") is True
            and flat.get("save_strategy") != "best"
            and str(flat.get("eval_strategy", flat.get("evaluation_strategy", "no")))
            != str(flat.get("save_strategy", "steps"))
        ),
        "load_best_model_at_end",
        "the same eval_strategy and save_strategy with load_best_model_at_end",
    ),
    (
        lambda flat: (
            flat.get("load_best_model_at_end") is True
            and flat.get("save_strategy", "steps") == "steps" == flat.get("eval_strategy")
            and is_whole_number(flat.get("save_steps"))
            and is_whole_number(flat.get("eval_steps"))
            and flat["save_steps"] % flat["eval_steps"]
        ),
        "save_steps eval_steps",
        "save_steps that eval_steps divides, for load_best_model_at_end",
    ),
    (
        lambda flat: not is_switched_off(flat.get("fsdp")) and not is_switched_off(flat.get("deepspeed")),
        "fsdp deepspeed",
        "only one of them",
    ),
)


def _losses(flat: dict[str, Any]) -> list[Any]:
    losses = flat.get("loss_type", "sigmoid")
    return losses if isinstance(losses, list) else [losses]


TRL: tuple[Rule, ...] = (
    *TRAINER,
    (
        lambda flat: isinstance(flat.get("loss_weights"), list) and len(flat["loss_weights"]) != len(_losses(flat)),
        "loss_weights",
        "a weight for each entry of loss_type",
    ),
    (
        lambda flat: "exo_pair" in _losses(flat) and flat.get("label_smoothing") == 0,
        "label_smoothing",
        "a number above 0 with loss_type: exo_pair",
    ),
    mutually_exclusive("sync_ref_model", "precompute_ref_log_probs"),
    mutually_exclusive("generation_batch_size", "steps_per_generation"),
    mutually_exclusive("load_in_8bit", "load_in_4bit"),
    (
        lambda flat: flat.get("max_length", ...) is None and flat.get("packing") is True,
        "packing",
        "a max_length with packing",
    ),
)


TRL_IGNORED: tuple[Ignored, ...] = (
    (both_set("dataset_name", "datasets"), "dataset_name", "the rows named under datasets are trained on"),
)


def _is_kind(flat: dict[str, Any], *kinds: str) -> bool:
    return (flat.get("finetuning_type") or "lora") in kinds


def _trains(flat: dict[str, Any]) -> bool:
    return flat.get("do_train") is True


def _is_stage(flat: dict[str, Any], *stages: str) -> bool:
    return (flat.get("stage") or "sft") in stages


def _entries(value: Any) -> int:
    """Return the number of entries of a list or a comma-separated text."""
    return len(value) if isinstance(value, list) else str(value).count(",") + 1


def _evaluates_nothing(flat: dict[str, Any]) -> bool:
    """Return whether evaluation is on without rows for it: `do_eval` is on if `eval_strategy` is."""
    evaluates = any(not is_switched_off(flat.get(key)) for key in ASK_FOR_ROWS.split())
    return (
        evaluates
        and _trains(flat)
        and is_switched_off(flat.get("eval_dataset"))
        and _numeric(flat.get("val_size")) < LEAST_SHARE
    )


ASK_FOR_ROWS = "eval_strategy evaluation_strategy do_eval do_predict predict_with_generate"
LEAST_SHARE = 1e-6
"""LLaMA-Factory treats a smaller val_size as 0."""


LLAMAFACTORY: tuple[Rule, ...] = (
    *TRAINER,
    (
        _evaluates_nothing,
        f"! {ASK_FOR_ROWS}",
        "rows to evaluate on: val_size above 0, or eval_dataset",
    ),
    (
        lambda flat: (
            flat.get("do_predict") is True
            and _is_stage(flat, "sft")
            and is_switched_off(flat.get("predict_with_generate"))
        ),
        "do_predict",
        "predict_with_generate: true with do_predict",
    ),
    *(
        (
            lambda flat, key=key: not is_switched_off(flat.get(key)) and not _is_stage(flat, "sft"),
            key,
            f"stage: sft with {key}",
        )
        for key in ("neat_packing", "train_on_prompt", "mask_history")
    ),
    (
        lambda flat: flat.get("load_best_model_at_end") is True and _is_stage(flat, "rm", "ppo"),
        "load_best_model_at_end",
        "it left out: the stages rm and ppo do not support it",
    ),
    (
        lambda flat: _trains(flat) and flat.get("infer_backend") not in (None, "huggingface"),
        "infer_backend",
        "huggingface in training: the other backends only generate",
    ),
    (
        lambda flat: (
            flat.get("pissa_init") is True
            and (
                _is_stage(flat, "ppo", "kto")
                or (_is_stage(flat, "dpo") and flat.get("pref_loss") not in ("orpo", "simpo"))
            )
        ),
        "pissa_init stage",
        "no pissa_init with stage: ppo, kto or dpo",
    ),
    (
        lambda flat: flat.get("pissa_init") is True and flat.get("quantization_bit"),
        "pissa_init quantization_bit",
        "no pissa_init with quantization_bit: scripts/pissa_init.py writes such a model first",
    ),
    (
        lambda flat: flat.get("use_llama_pro") is True and _is_kind(flat, "full"),
        "use_llama_pro finetuning_type",
        "finetuning_type: freeze or lora with use_llama_pro",
    ),
    (
        lambda flat: flat.get("quantization_bit") and flat.get("create_new_adapter") is True,
        "create_new_adapter quantization_bit",
        "no create_new_adapter with quantization_bit",
    ),
    (
        lambda flat: flat.get("quantization_bit") and "," in str(flat.get("adapter_name_or_path") or ""),
        "adapter_name_or_path quantization_bit",
        "one adapter with quantization_bit: merge them first",
    ),
    mutually_exclusive("fp8", "quantization_bit"),
    (
        lambda flat: not is_switched_off(flat.get("val_size")) and not is_switched_off(flat.get("eval_dataset")),
        "val_size eval_dataset",
        "only one of val_size and eval_dataset",
    ),
    (
        lambda flat: flat.get("quantization_bit") and not _is_kind(flat, "lora", "oft"),
        "quantization_bit finetuning_type",
        "finetuning_type lora or oft with quantization_bit",
    ),
    (
        lambda flat: not is_switched_off(flat.get("adapter_name_or_path")) and not _is_kind(flat, "lora"),
        "adapter_name_or_path finetuning_type",
        "finetuning_type: lora with adapter_name_or_path",
    ),
    *(
        (
            lambda flat, key=key: not is_switched_off(flat.get(key)) and not _is_kind(flat, "lora"),
            key,
            f"finetuning_type: lora with {key}",
        )
        for key in ("loraplus_lr_ratio", "use_rslora", "use_dora", "pissa_init")
    ),
    *(
        (
            lambda flat, key=key: not is_switched_off(flat.get(key)) and _is_kind(flat, "lora"),
            f"{key} finetuning_type",
            f"finetuning_type: full or freeze with {key}",
        )
        for key in ("use_galore", "use_apollo", "use_badam")
    ),
    (
        lambda flat: (
            flat.get("stage") == "ppo" and flat.get("reward_model_type") == "lora" and not _is_kind(flat, "lora")
        ),
        "reward_model_type finetuning_type",
        "finetuning_type: lora with reward_model_type: lora",
    ),
    *(
        (
            lambda flat, kind=kind: (
                not is_switched_off(flat.get(f"{kind}_layerwise")) and flat.get("gradient_accumulation_steps", 1) != 1
            ),
            f"{kind}_layerwise gradient_accumulation_steps",
            f"gradient_accumulation_steps: 1 with {kind}_layerwise",
        )
        for kind in ("galore", "apollo")
    ),
    (
        lambda flat: flat.get("stage") == "ppo" and not is_switched_off(flat.get("shift_attn")),
        "shift_attn",
        "no shift_attn with stage: ppo",
    ),
    (
        lambda flat: flat.get("stage") == "ppo" and not is_switched_off(flat.get("resume_from_checkpoint")),
        "resume_from_checkpoint",
        "it left out: the stage ppo starts again",
    ),
    (
        lambda flat: (
            not is_switched_off(flat.get("interleave_probs"))
            and not is_switched_off(flat.get("dataset"))
            and _entries(flat["interleave_probs"]) != _entries(flat["dataset"])
        ),
        "interleave_probs",
        "a share for each data set",
    ),
    (
        lambda flat: is_switched_off(flat.get("dataset")) and _numeric(flat.get("val_size")) > LEAST_SHARE,
        "val_size",
        "a dataset with val_size",
    ),
    mutually_exclusive("use_galore", "use_apollo"),
    mutually_exclusive("use_galore", "use_badam"),
    mutually_exclusive("use_apollo", "use_badam"),
    mutually_exclusive("mask_history", "train_on_prompt"),
    mutually_exclusive("streaming", "max_samples"),
    (
        lambda flat: flat.get("streaming") is True and 0 < _numeric(flat.get("val_size")) < 1,
        "val_size",
        "a number of rows with streaming",
    ),
    (
        lambda flat: (
            flat.get("streaming") is True
            and not is_switched_off(flat.get("do_train"))
            and is_switched_off(flat.get("max_steps"))
        ),
        "streaming",
        "max_steps with streaming",
    ),
    (
        lambda flat: flat.get("stage") == "ppo" and is_switched_off(flat.get("reward_model")),
        "stage",
        "reward_model for stage: ppo",
    ),
    (
        lambda flat: (
            flat.get("stage") == "dpo"
            and flat.get("pref_loss", "sigmoid") != "sigmoid"
            and _numeric(flat.get("dpo_label_smoothing")) > 0
        ),
        "dpo_label_smoothing",
        "pref_loss: sigmoid with dpo_label_smoothing",
    ),
    (
        lambda flat: flat.get("predict_with_generate") is True and flat.get("stage", "sft") != "sft",
        "predict_with_generate",
        "stage: sft with predict_with_generate",
    ),
    (
        lambda flat: both_set("predict_with_generate", "compute_accuracy")(flat),
        "compute_accuracy predict_with_generate",
        "only one",
    ),
    (
        lambda flat: flat.get("interleave_probs") is not None and flat.get("mix_strategy", "concat") == "concat",
        "interleave_probs",
        "an interleaving mix_strategy with interleave_probs",
    ),
    (
        lambda flat: flat.get("do_train") is True and flat.get("quantization_device_map") == "auto",
        "quantization_device_map",
        "it left out in training",
    ),
    (
        lambda flat: (
            not is_switched_off(flat.get("deepspeed"))
            and (flat.get("use_galore") is True or flat.get("use_apollo") is True)
        ),
        "deepspeed use_galore use_apollo",
        "no DeepSpeed with GaLore or APOLLO",
    ),
    (
        lambda flat: flat.get("export_quantization_bit") and not flat.get("export_quantization_dataset"),
        "export_quantization_bit",
        "export_quantization_dataset with it",
    ),
    (
        lambda flat: flat.get("quantization_bit") and flat.get("resize_vocab") is True,
        "resize_vocab quantization_bit",
        "no resize_vocab with quantization_bit",
    ),
    (
        lambda flat: flat.get("export_dir") and flat.get("quantization_bit"),
        "quantization_bit export_dir",
        "no quantization_bit in an export: an adapter is not merged into quantized weights",
    ),
)
GENERATION_KEYS = (
    "max_new_tokens max_length top_p top_k num_beams repetition_penalty length_penalty do_sample temperature"
)
LLAMAFACTORY_IGNORED: tuple[Ignored, ...] = (
    (
        lambda flat: (
            _trains(flat)
            and is_switched_off(flat.get("predict_with_generate"))
            and is_switched_off(flat.get("do_predict"))
            and flat.get("stage") != "ppo"
        ),
        GENERATION_KEYS,
        "it is an argument of generation, and nothing is generated; rows are truncated at cutoff_len",
    ),
    (
        lambda flat: _trains(flat) and not _is_stage(flat, "dpo", "kto"),
        "pref_beta pref_loss pref_ftx dpo_label_smoothing simpo_gamma",
        "it belongs to the stages dpo and kto",
    ),
)
"""LLaMA-Factory 0.9.5: hparams/generating_args.py, hparams/finetuning_args.py."""
ZERO3: tuple[Rule, ...] = (
    (
        lambda flat: flat.get("quantization_bit") == 8,
        "quantization_bit",
        "4 under ZeRO-3 or FSDP: LLaMA-Factory shards no 8-bit weights",
    ),
    *(
        (lambda flat, key=key: flat.get(key) is True, key, f"no {key} under DeepSpeed's ZeRO-3")
        for key in ("predict_with_generate", "pissa_init", "pure_bf16", "use_unsloth", "use_kt")
    ),
)
"""Options that LLaMA-Factory does not support with sharded weights; the first is not supported with FSDP either."""
BELOW_3 = (0, 1, 2)
DEEPSPEED_IGNORED: tuple[Ignored, ...] = (
    (
        lambda flat: (
            flat.get("zero_optimization.offload_param.device") in ("cpu", "nvme")
            and flat.get("zero_optimization.stage", 0) in BELOW_3
        ),
        "zero_optimization.offload_param.device",
        "parameters are offloaded in stage 3 only",
    ),
)
DEEPSPEED: tuple[Rule, ...] = (
    *(
        (
            lambda flat, what=what: (
                flat.get(f"zero_optimization.offload_{what}.device") == "nvme"
                and not flat.get(f"zero_optimization.offload_{what}.nvme_path")
            ),
            f"zero_optimization.offload_{what}.device",
            "nvme_path with device: nvme",
        )
        for what in ("param", "optimizer")
    ),
    (
        lambda flat: flat.get("gradient_allreduce_op") == "sum" and flat.get("zero_optimization.stage") == 3,
        "gradient_allreduce_op",
        "mean under ZeRO-3",
    ),
    (
        lambda flat: (
            flat.get("zero_optimization.stage") == 3 and flat.get("zero_optimization.elastic_checkpoint") is True
        ),
        "zero_optimization.elastic_checkpoint",
        "false under ZeRO-3",
    ),
    (
        lambda flat: (
            all(is_whole_number(flat.get(key)) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
            and flat["train_batch_size"]
            % (flat["train_micro_batch_size_per_gpu"] * (_numeric(flat.get("gradient_accumulation_steps")) or 1))
        ),
        "train_batch_size",
        "a multiple of train_micro_batch_size_per_gpu × gradient_accumulation_steps",
    ),
)
ACCELERATE: tuple[Rule, ...] = (
    (
        lambda flat: "distributed_type" not in flat and flat.get("compute_environment") != "AMAZON_SAGEMAKER",
        "! num_processes num_machines mixed_precision compute_environment",
        "distributed_type in the file: NO, MULTI_GPU, FSDP or DEEPSPEED",
    ),
    (
        lambda flat: (
            is_whole_number(flat.get("machine_rank"), 0)
            and is_whole_number(flat.get("num_machines"), 2)
            and flat["machine_rank"] >= flat["num_machines"]
        ),
        "machine_rank",
        "a machine_rank below num_machines",
    ),
    (
        lambda flat: (
            _upper(flat, "distributed_type") == "FSDP"
            and str(flat.get("fsdp_config.fsdp_version")) == "2"
            and _upper(flat, "fsdp_config.fsdp_state_dict_type") == "LOCAL_STATE_DICT"
        ),
        "fsdp_config.fsdp_state_dict_type",
        "SHARDED_STATE_DICT or FULL_STATE_DICT under FSDP2",
    ),
    (
        lambda flat: (
            flat.get("fsdp_config.fsdp_cpu_ram_efficient_loading") is True
            and flat.get("fsdp_config.fsdp_sync_module_states") is False
        ),
        "fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_cpu_ram_efficient_loading",
        "fsdp_sync_module_states: true with fsdp_cpu_ram_efficient_loading",
    ),
)
NOT_BESIDE_FILE = key_names("""
    gradient_accumulation_steps gradient_clipping zero_stage offload_optimizer_device offload_param_device
    offload_param_nvme_path offload_optimizer_nvme_path zero3_save_16bit_model
""")
"""Keys that Accelerate 1.15 does not accept beside a DeepSpeed file (utils/dataclasses.py,
_deepspeed_config_checks)."""


def _beside_deepspeed_file(key: str) -> Rule:
    """Return the rule for a key that Accelerate does not accept beside a DeepSpeed file."""

    def wrong(flat: dict[str, Any]) -> bool:
        has_file = not is_switched_off(flat.get("deepspeed_config.deepspeed_config_file"))
        return _upper(flat, "distributed_type") == "DEEPSPEED" and has_file and flat.get(key) is not None

    leaf = key.rpartition(".")[2]
    return wrong, key, f"{leaf} in the DeepSpeed file: not allowed with deepspeed_config_file"


ACCELERATE += tuple(
    map(_beside_deepspeed_file, ("mixed_precision", *sorted(f"deepspeed_config.{name}" for name in NOT_BESIDE_FILE)))
)
ACCELERATE_IGNORED: tuple[Ignored, ...] = (
    (
        lambda flat: is_whole_number(flat.get("machine_rank")) and flat.get("num_machines") == 1,
        "machine_rank",
        "num_machines is 1",
    ),
    (
        lambda flat: (
            _upper(flat, "distributed_type") == "NO"
            and is_whole_number(flat.get("num_processes"), 2)
            and flat.get("use_cpu") is not True
        ),
        "num_processes",
        "distributed_type is NO, and one process is started",
    ),
    (
        lambda flat: (
            _upper(flat, "fsdp_config.fsdp_auto_wrap_policy") == "SIZE_BASED_WRAP"
            and is_switched_off(flat.get("fsdp_config.fsdp_min_num_params"))
        ),
        "fsdp_config.fsdp_auto_wrap_policy",
        "SIZE_BASED_WRAP wraps nothing without fsdp_min_num_params",
    ),
    (
        lambda flat: (
            flat.get("deepspeed_config.offload_param_device") in ("cpu", "nvme")
            and flat.get("deepspeed_config.zero_stage") in BELOW_3
        ),
        "deepspeed_config.offload_param_device",
        "parameters are offloaded in stage 3 only",
    ),
    (
        lambda flat: (
            flat.get("deepspeed_config.zero3_init_flag") is True and flat.get("deepspeed_config.zero_stage") in BELOW_3
        ),
        "deepspeed_config.zero3_init_flag",
        "weights are sharded as they are made in stage 3 only",
    ),
)
PEFT: tuple[Rule, ...] = (
    (
        lambda flat: isinstance(flat.get("target_modules"), str) and flat.get("layers_to_transform") is not None,
        "layers_to_transform",
        "a list as target_modules with layers_to_transform",
    ),
    (
        lambda flat: isinstance(flat.get("target_modules"), str) and flat.get("layers_pattern") is not None,
        "layers_pattern",
        "a list as target_modules with layers_pattern",
    ),
    (
        lambda flat: flat.get("layers_pattern") and flat.get("layers_to_transform") is None,
        "layers_pattern",
        "layers_to_transform with layers_pattern",
    ),
    (
        lambda flat: flat.get("use_dora") is True and flat.get("megatron_config"),
        "use_dora",
        "no megatron_config with use_dora",
    ),
    (
        lambda flat: flat.get("lora_bias") is True and flat.get("use_dora") is True,
        "lora_bias",
        "lora_bias: false with use_dora",
    ),
    (
        lambda flat: flat.get("init_lora_weights") == "loftq" and not flat.get("loftq_config"),
        "init_lora_weights",
        "loftq_config with init_lora_weights: loftq",
    ),
)


def is_whole_number(value: Any, least: int = 1) -> bool:
    """Return whether a value is an integer of at least `least`."""
    return type(value) is int and value >= least


def _numeric(value: Any) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _upper(flat: dict[str, Any], key: str) -> str:
    value = flat.get(key)
    # Accelerate's reader follows YAML 1.1: an unquoted NO is false.
    return "NO" if value is False else str(value).upper()


def check_trl_conflicts(draft: ConfigDraft) -> None:
    """Check combinations of values in TrainingArguments and TRL's command line."""
    refuse_conflicts(draft, TRL)
    mark_ignored_keys(draft, TRL_IGNORED)


def check_llamafactory_conflicts(draft: ConfigDraft) -> None:
    """Check combinations of values and unused keys in LLaMA-Factory's arguments."""
    refuse_conflicts(draft, LLAMAFACTORY)
    mark_ignored_keys(draft, LLAMAFACTORY_IGNORED)
    mode = MODES.get(draft.setup.get("parallel") or "single")
    if mode is not None and mode.zero_stage == 3:
        refuse_conflicts(draft, ZERO3)
    elif draft.setup.get("parallel") == "fsdp":
        refuse_conflicts(draft, ZERO3[:1])


def check_deepspeed_conflicts(draft: ConfigDraft) -> None:
    """Check combinations of values in DeepSpeed's config."""
    refuse_conflicts(draft, DEEPSPEED)
    mark_ignored_keys(draft, DEEPSPEED_IGNORED)


def check_accelerate_conflicts(draft: ConfigDraft) -> None:
    """Check combinations of values in the config of `accelerate launch`."""
    refuse_conflicts(draft, ACCELERATE)
    mark_ignored_keys(draft, ACCELERATE_IGNORED)


def check_peft_conflicts(draft: ConfigDraft) -> None:
    """Check combinations of values in LoraConfig."""
    if str(draft.flat.get("peft_type")).upper() == "LORA":
        refuse_conflicts(draft, PEFT)
