"""Values that a tool refuses together, by its own checks: what each of them says, at the key that has to change.

They are facts of the releases that the files in schemas/ name, written down from the tools' validators.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from surefit.foreign.draft import Draft

Rule = tuple[Callable[[dict[str, Any]], Any], str, str]
"""(what holds where it is wrong, the keys of which the last in the file is named, what the tool expects)."""
FIRST = "! "
"""Before keys of which the first in this order is named."""


def _off(value: Any) -> bool:
    return value is None or value is False or value in (0, "", [], {}, "none", "no")


def _apply(draft: Draft, rules: tuple[Rule, ...]) -> None:
    flat = {key: value for key, value in draft.flat.items() if key not in draft.refused}
    for wrong, keys, expected in rules:
        first = keys.startswith(FIRST)
        named = [key for key in keys.lstrip(FIRST).split() if key in flat and (first or flat[key] is not None)]
        if named and wrong(flat):
            draft.refuse(named[0] if first else max(named, key=lambda key: draft.line(key) or 0), expected)


def both(first: str, second: str) -> Callable[[dict[str, Any]], bool]:
    """Whether two keys are both on."""
    return lambda flat: not _off(flat.get(first)) and not _off(flat.get(second))


def on_without(key: str, *needed: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a key is on and none of those is that it needs."""
    return lambda flat: not _off(flat.get(key)) and all(_off(flat.get(name)) for name in needed)


def _one(first: str, second: str) -> Rule:
    return both(first, second), f"{first} {second}", f"only one of {first} and {second}"


def _needs(key: str, *needed: str) -> Rule:
    return on_without(key, *needed), key, f"{' or '.join(needed)} beside {key}"


def _steps(strategy: str, steps: str) -> Rule:
    return (
        lambda flat: not _off(flat.get(strategy)) and flat[strategy] != "steps" and not _off(flat.get(steps)),
        f"{strategy} {steps}",
        f"{strategy}: steps beside {steps}, or {steps} left out",
    )


def _quantised_full(flat: dict[str, Any]) -> bool:
    return _off(flat.get("adapter")) and not all(_off(flat.get(f"load_in_{bits}bit")) for bits in (4, 8))


def _is_version_2(flat: dict[str, Any]) -> bool:
    return str(flat.get("fsdp_version") or flat.get("fsdp_config.fsdp_version") or flat.get("fsdp_config.version")) == "2"


def _fsdp(flat: dict[str, Any], name: str) -> Any:
    return flat.get(f"fsdp_config.{name}", flat.get(f"fsdp_config.fsdp_{name}"))


def _no_adapter(kind: str, plugins: bool) -> bool:
    """Whether this is no adapter of Axolotl's; with plugins, only where it is one of its own misspelt."""
    known = ("lora", "qlora", "llama-adapter")
    return kind not in known and (not plugins or bool(get_close_matches(kind, known, cutoff=0.8)))


KERNELS = "lora_mlp_kernel lora_qkv_kernel lora_o_kernel"
AXOLOTL: tuple[Rule, ...] = (
    _one("warmup_steps", "warmup_ratio"),
    _one("saves_per_epoch", "save_steps"),
    _one("evals_per_epoch", "eval_steps"),
    _one("test_datasets", "val_set_size"),
    _one("gradient_accumulation_steps", "batch_size"),
    _one("max_memory", "gpu_memory_limit"),
    _one("deepspeed", "fsdp"),
    _one("lr_groups", "loraplus_lr_ratio"),
    _one("load_in_8bit", "load_in_4bit"),
    _one("sample_packing", "rl"),
    _one("batch_flattening", "sample_packing"),
    _one("streaming", "val_set_size"),
    _one("pretraining_dataset", "val_set_size"),
    _one("gptq", "revision_of_model"),
    _one("model_quantization_config", "load_in_4bit"),
    _one("model_quantization_config", "load_in_8bit"),
    _one("noisy_embedding_alpha", "neftune_noise_alpha"),
    _steps("save_strategy", "save_steps"),
    _steps("eval_strategy", "eval_steps"),
    _steps("eval_strategy", "evals_per_epoch"),
    _needs("activation_offloading", "gradient_checkpointing"),
    _needs("selective_checkpointing", "gradient_checkpointing"),
    _needs("pretraining_dataset", "max_steps"),
    _needs("streaming", "max_steps"),
    _needs("peft_layers_pattern", "peft_layers_to_transform"),
    _needs("fp8_config", "fp8"),
    _needs("deepcompile", "deepspeed"),
    _needs("push_dataset_to_hub", "hf_use_auth_token"),
    _needs("do_bench_eval", "evals_per_epoch", "eval_steps"),
    _needs("relora", "jagged_restart_steps"),
    _needs("early_stopping_patience", "save_steps"),
    _needs("early_stopping_patience", "eval_steps"),
    (
        lambda flat: (
            not _off(flat.get("early_stopping_patience"))
            and _whole(flat.get("save_steps"))
            and _whole(flat.get("eval_steps"))
            and flat["save_steps"] % flat["eval_steps"]
        ),
        "early_stopping_patience save_steps eval_steps",
        "save_steps that eval_steps divides, for early_stopping_patience",
    ),
    (_quantised_full, "! adapter load_in_4bit load_in_8bit", "an adapter beside it: quantised weights are not trained"),
    (
        lambda flat: flat.get("adapter") == "qlora" and _off(flat.get("load_in_4bit")) and _off(flat.get("merge_lora")),
        "! load_in_4bit adapter",
        "load_in_4bit: true for adapter: qlora",
    ),
    (
        lambda flat: flat.get("adapter") == "qlora" and not _off(flat.get("load_in_8bit")),
        "load_in_8bit",
        "load_in_8bit: false for adapter: qlora",
    ),
    (
        lambda flat: _no_adapter(str(flat.get("adapter") or "lora"), bool(flat.get("plugins"))),
        "adapter",
        "lora, qlora or llama-adapter, or the plugin that brings it",
    ),
    (
        lambda flat: flat.get("chat_template") == "jinja" and not flat.get("chat_template_jinja"),
        "chat_template",
        "chat_template_jinja beside chat_template: jinja",
    ),
    (
        lambda flat: (
            flat.get("val_set_size") == 0
            and (flat.get("eval_steps") or flat.get("eval_strategy"))
            and not flat.get("test_datasets")
            and flat.get("eval_strategy") != "no"
        ),
        "eval_steps eval_strategy",
        "rows to evaluate on (val_set_size is 0)",
    ),
    (
        lambda flat: flat.get("rl") == "kto" and flat.get("remove_unused_columns") is not False,
        "rl",
        "remove_unused_columns: false beside rl: kto",
    ),
    (
        lambda flat: (
            any(not _off(flat.get(key)) for key in KERNELS.split())
            and (flat.get("trust_remote_code") is True or (flat.get("adapter") == "lora" and flat.get("load_in_8bit")))
        ),
        KERNELS,
        "no LoRA kernels beside trust_remote_code or 8-bit weights",
    ),
    (
        lambda flat: flat.get("lora_target_parameters") and flat.get("lora_dropout"),
        "lora_dropout",
        "lora_dropout: 0 beside lora_target_parameters",
    ),
    (
        lambda flat: (
            _is_version_2(flat) and _fsdp(flat, "cpu_ram_efficient_loading") is True and flat.get("load_in_4bit") is True
        ),
        "load_in_4bit fsdp_config.cpu_ram_efficient_loading fsdp_config.fsdp_cpu_ram_efficient_loading",
        "cpu_ram_efficient_loading: false beside load_in_4bit under FSDP2",
    ),
    (
        lambda flat: (
            _is_version_2(flat)
            and any(key.startswith("fsdp_config.") for key in flat)
            and flat.get("optimizer") in ("adamw_8bit", "adamw_bnb_8bit")
        ),
        "optimizer",
        "another optimizer under FSDP2, such as adamw_torch_8bit",
    ),
    (
        lambda flat: (
            not _is_version_2(flat) and "8bit" in str(flat.get("optimizer")) and _fsdp(flat, "offload_params") is True
        ),
        "optimizer",
        "an optimizer that is not 8-bit beside FSDP's offload_params",
    ),
    (
        lambda flat: _fsdp(flat, "auto_wrap_policy") == "SIZE_BASED_WRAP" and _fsdp(flat, "min_num_params") is None,
        "fsdp_config.auto_wrap_policy fsdp_config.fsdp_auto_wrap_policy",
        "min_num_params beside SIZE_BASED_WRAP",
    ),
    (
        lambda flat: not _off(flat.get("flash_attn_fuse_mlp")) and flat.get("adapter") in ("lora", "qlora"),
        "flash_attn_fuse_mlp",
        "no fused modules beside LoRA",
    ),
    (
        lambda flat: flat.get("bf16") is True and flat.get("fp16") is True,
        "bf16 fp16",
        "only one of bf16 and fp16",
    ),
    (
        lambda flat: (
            flat.get("tokenizer_use_mistral_common") is True
            and any(flat.get(key) for key in ("special_tokens", "tokens", "chat_template", "added_tokens_overrides"))
        ),
        "special_tokens tokens chat_template added_tokens_overrides",
        "it left out beside tokenizer_use_mistral_common",
    ),
)
TRAINER: tuple[Rule, ...] = (
    (lambda flat: flat.get("bf16") is True and flat.get("fp16") is True, "bf16 fp16", "only one of bf16 and fp16"),
    (
        lambda flat: (
            flat.get("load_best_model_at_end") is True
            and flat.get("save_strategy") != "best"
            and str(flat.get("eval_strategy", flat.get("evaluation_strategy", "no"))) != str(flat.get("save_strategy", "steps"))
        ),
        "load_best_model_at_end",
        "the same eval_strategy and save_strategy beside load_best_model_at_end",
    ),
    (
        lambda flat: (
            flat.get("load_best_model_at_end") is True
            and flat.get("save_strategy", "steps") == "steps" == flat.get("eval_strategy")
            and _whole(flat.get("save_steps"))
            and _whole(flat.get("eval_steps"))
            and flat["save_steps"] % flat["eval_steps"]
        ),
        "save_steps eval_steps",
        "save_steps that eval_steps divides, for load_best_model_at_end",
    ),
    (
        lambda flat: flat.get("eval_strategy") == "steps" and flat.get("eval_steps") == 0,
        "eval_steps",
        "eval_steps above 0",
    ),
    (lambda flat: not _off(flat.get("fsdp")) and not _off(flat.get("deepspeed")), "fsdp deepspeed", "only one of them"),
)
TRL: tuple[Rule, ...] = (
    *TRAINER,
    _one("load_in_8bit", "load_in_4bit"),
    _one("dataset_name", "datasets"),
    (
        lambda flat: flat.get("max_length", ...) is None and flat.get("packing") is True,
        "packing",
        "a max_length beside packing",
    ),
)


def _is_kind(flat: dict[str, Any], *kinds: str) -> bool:
    return (flat.get("finetuning_type") or "lora") in kinds


LLAMAFACTORY: tuple[Rule, ...] = (
    *TRAINER,
    (
        lambda flat: not _off(flat.get("val_size")) and not _off(flat.get("eval_dataset")),
        "val_size eval_dataset",
        "only one of val_size and eval_dataset",
    ),
    (
        lambda flat: flat.get("quantization_bit") and not _is_kind(flat, "lora", "oft"),
        "quantization_bit finetuning_type",
        "finetuning_type lora or oft beside quantization_bit",
    ),
    (
        lambda flat: not _off(flat.get("adapter_name_or_path")) and not _is_kind(flat, "lora", "oft"),
        "adapter_name_or_path finetuning_type",
        "finetuning_type: lora beside adapter_name_or_path",
    ),
    *(
        (
            lambda flat, key=key: not _off(flat.get(key)) and not _is_kind(flat, "lora"),
            key,
            f"finetuning_type: lora beside {key}",
        )
        for key in ("loraplus_lr_ratio", "use_rslora", "use_dora", "pissa_init")
    ),
    *(
        (
            lambda flat, key=key: not _off(flat.get(key)) and _is_kind(flat, "lora"),
            f"{key} finetuning_type",
            f"finetuning_type: full or freeze beside {key}",
        )
        for key in ("use_galore", "use_apollo", "use_badam")
    ),
    _one("use_galore", "use_apollo"),
    _one("use_galore", "use_badam"),
    _one("use_apollo", "use_badam"),
    _one("mask_history", "train_on_prompt"),
    _one("streaming", "max_samples"),
    (
        lambda flat: flat.get("streaming") is True and 0 < _numeric(flat.get("val_size")) < 1,
        "val_size",
        "a number of rows beside streaming",
    ),
    (
        lambda flat: flat.get("streaming") is True and not _off(flat.get("do_train")) and _off(flat.get("max_steps")),
        "streaming",
        "max_steps beside streaming",
    ),
    (lambda flat: flat.get("stage") == "ppo" and _off(flat.get("reward_model")), "stage", "reward_model for stage: ppo"),
    (
        lambda flat: flat.get("stage") == "dpo"
        and flat.get("pref_loss", "sigmoid") != "sigmoid"
        and _numeric(flat.get("dpo_label_smoothing")) > 0,
        "dpo_label_smoothing",
        "pref_loss: sigmoid beside dpo_label_smoothing",
    ),
    (
        lambda flat: flat.get("predict_with_generate") is True and flat.get("stage", "sft") != "sft",
        "predict_with_generate",
        "stage: sft beside predict_with_generate",
    ),
    (lambda flat: both("predict_with_generate", "compute_accuracy")(flat), "compute_accuracy predict_with_generate", "only one"),
    (
        lambda flat: flat.get("interleave_probs") is not None and flat.get("mix_strategy", "concat") == "concat",
        "interleave_probs",
        "an interleaving mix_strategy beside interleave_probs",
    ),
    (
        lambda flat: flat.get("do_train") is True and flat.get("quantization_device_map") == "auto",
        "quantization_device_map",
        "it left out in training",
    ),
    (
        lambda flat: not _off(flat.get("deepspeed")) and (flat.get("use_galore") is True or flat.get("use_apollo") is True),
        "deepspeed use_galore use_apollo",
        "no DeepSpeed beside GaLore or APOLLO",
    ),
    (
        lambda flat: flat.get("export_quantization_bit") and not flat.get("export_quantization_dataset"),
        "export_quantization_bit",
        "export_quantization_dataset beside it",
    ),
    (
        lambda flat: flat.get("quantization_bit") and flat.get("resize_vocab") is True,
        "resize_vocab quantization_bit",
        "no resize_vocab beside quantization_bit",
    ),
    (
        lambda flat: flat.get("export_dir") and flat.get("quantization_bit"),
        "quantization_bit export_dir",
        "no quantization_bit in an export: an adapter is not merged into quantised weights",
    ),
)
DEEPSPEED: tuple[Rule, ...] = (
    (
        lambda flat: flat.get("fp16.enabled") is True and True in (flat.get("bf16.enabled"), flat.get("bfloat16.enabled")),
        "fp16.enabled bf16.enabled bfloat16.enabled",
        "only one of bf16 and fp16 enabled",
    ),
    (
        lambda flat: (
            flat.get("zero_optimization.offload_param.device") in ("cpu", "nvme")
            and flat.get("zero_optimization.stage") in (0, 1, 2)
        ),
        "zero_optimization.offload_param.device zero_optimization.stage",
        "stage 3 beside offload_param",
    ),
    *(
        (
            lambda flat, what=what: (
                flat.get(f"zero_optimization.offload_{what}.device") == "nvme"
                and not flat.get(f"zero_optimization.offload_{what}.nvme_path")
            ),
            f"zero_optimization.offload_{what}.device",
            "nvme_path beside device: nvme",
        )
        for what in ("param", "optimizer")
    ),
    (
        lambda flat: flat.get("gradient_allreduce_op") == "sum" and flat.get("zero_optimization.stage") == 3,
        "gradient_allreduce_op",
        "mean under ZeRO-3",
    ),
    (
        lambda flat: flat.get("zero_optimization.stage") == 3 and flat.get("zero_optimization.elastic_checkpoint") is True,
        "zero_optimization.elastic_checkpoint",
        "false under ZeRO-3",
    ),
    (
        lambda flat: all(
            _whole(flat.get(key)) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")
        )
        and flat["train_batch_size"]
        % (flat["train_micro_batch_size_per_gpu"] * (_numeric(flat.get("gradient_accumulation_steps")) or 1)),
        "train_batch_size",
        "a multiple of train_micro_batch_size_per_gpu × gradient_accumulation_steps",
    ),
)
ACCELERATE: tuple[Rule, ...] = (
    (
        lambda flat: _whole(flat.get("machine_rank"), 0) and _whole(flat.get("num_machines")) and flat["machine_rank"] >= flat["num_machines"],
        "machine_rank",
        "a machine_rank below num_machines",
    ),
    (
        lambda flat: _upper(flat, "distributed_type") == "NO" and _whole(flat.get("num_processes")) and flat["num_processes"] > 1,
        "num_processes distributed_type",
        "another distributed_type than NO for several processes",
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
            _upper(flat, "fsdp_config.fsdp_auto_wrap_policy") == "SIZE_BASED_WRAP"
            and _off(flat.get("fsdp_config.fsdp_min_num_params"))
        ),
        "fsdp_config.fsdp_auto_wrap_policy",
        "fsdp_min_num_params beside SIZE_BASED_WRAP",
    ),
    (
        lambda flat: (
            flat.get("fsdp_config.fsdp_cpu_ram_efficient_loading") is True
            and flat.get("fsdp_config.fsdp_sync_module_states") is False
            and str(flat.get("fsdp_config.fsdp_version", "1")) != "2"
        ),
        "fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_cpu_ram_efficient_loading",
        "fsdp_sync_module_states: true beside fsdp_cpu_ram_efficient_loading",
    ),
    (
        lambda flat: (
            flat.get("deepspeed_config.offload_param_device") in ("cpu", "nvme")
            and flat.get("deepspeed_config.zero_stage") in (0, 1, 2)
        ),
        "deepspeed_config.offload_param_device deepspeed_config.zero_stage",
        "zero_stage 3 beside offload_param_device",
    ),
    (
        lambda flat: flat.get("deepspeed_config.zero3_init_flag") is True and flat.get("deepspeed_config.zero_stage") in (0, 1, 2),
        "deepspeed_config.zero3_init_flag deepspeed_config.zero_stage",
        "zero_stage 3 beside zero3_init_flag: true",
    ),
)
PEFT: tuple[Rule, ...] = (
    (
        lambda flat: isinstance(flat.get("target_modules"), str) and flat.get("layers_to_transform") is not None,
        "layers_to_transform",
        "a list as target_modules beside layers_to_transform",
    ),
    (
        lambda flat: isinstance(flat.get("target_modules"), str) and flat.get("layers_pattern") is not None,
        "layers_pattern",
        "a list as target_modules beside layers_pattern",
    ),
    (
        lambda flat: flat.get("layers_pattern") and flat.get("layers_to_transform") is None,
        "layers_pattern",
        "layers_to_transform beside layers_pattern",
    ),
    (
        lambda flat: flat.get("use_dora") is True and flat.get("megatron_config"),
        "use_dora",
        "no megatron_config beside use_dora",
    ),
    (
        lambda flat: flat.get("lora_bias") is True and flat.get("use_dora") is True,
        "lora_bias",
        "lora_bias: false beside use_dora",
    ),
    (
        lambda flat: flat.get("init_lora_weights") == "loftq" and not flat.get("loftq_config"),
        "init_lora_weights",
        "loftq_config beside init_lora_weights: loftq",
    ),
)


def _whole(value: Any, least: int = 1) -> bool:
    return type(value) is int and value >= least


def _numeric(value: Any) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _upper(flat: dict[str, Any], key: str) -> str:
    value = flat.get(key)
    # Unquoted NO is false by the YAML 1.1 rules of Accelerate's reader.
    return "NO" if value is False else str(value).upper()


def axolotl(draft: Draft) -> None:
    """What Axolotl's own validators refuse."""
    _apply(draft, AXOLOTL)


def trl(draft: Draft) -> None:
    """What TrainingArguments and TRL's command line refuse."""
    _apply(draft, TRL)


def llamafactory(draft: Draft) -> None:
    """What LLaMA-Factory's parser refuses."""
    _apply(draft, LLAMAFACTORY)


def deepspeed(draft: Draft) -> None:
    """What DeepSpeed's config refuses."""
    _apply(draft, DEEPSPEED)


def accelerate(draft: Draft) -> None:
    """What `accelerate launch` refuses."""
    _apply(draft, ACCELERATE)


def peft(draft: Draft) -> None:
    """What LoraConfig refuses."""
    if str(draft.flat.get("peft_type")).upper() == "LORA":
        _apply(draft, PEFT)


