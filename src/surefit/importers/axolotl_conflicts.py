"""Values that Axolotl rejects in combination: the checks of 0.19.0's utils/schemas/, each tested with its own
validator."""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import Any

from surefit.importers.config_mapping import ConfigDraft
from surefit.importers.conflicts import (
    Ignored,
    Rule,
    is_switched_off,
    is_whole_number,
    mark_ignored_keys,
    mutually_exclusive,
    refuse_conflicts,
    requires_any_of,
)


def _steps(strategy: str, steps: str) -> Rule:
    return (
        lambda flat: (
            not is_switched_off(flat.get(strategy))
            and flat[strategy] != "steps"
            and not is_switched_off(flat.get(steps))
        ),
        f"{strategy} {steps}",
        f"{strategy}: steps with {steps}, or {steps} left out",
    )


def _quantised_full(flat: dict[str, Any]) -> bool:
    return is_switched_off(flat.get("adapter")) and not all(
        is_switched_off(flat.get(f"load_in_{bits}bit")) for bits in (4, 8)
    )


def _is_version_2(flat: dict[str, Any]) -> bool:
    return (
        str(flat.get("fsdp_version") or flat.get("fsdp_config.fsdp_version") or flat.get("fsdp_config.version")) == "2"
    )


def _fsdp(flat: dict[str, Any], name: str) -> Any:
    return flat.get(f"fsdp_config.{name}", flat.get(f"fsdp_config.fsdp_{name}"))


def _evaluates_nothing(flat: dict[str, Any]) -> bool:
    """Return whether no rows are held out; val_set_size defaults to 0."""
    return is_switched_off(flat.get("val_set_size")) and is_switched_off(flat.get("test_datasets"))


def _no_adapter(kind: str, plugins: bool) -> bool:
    """Return whether Axolotl has no such adapter; with plugins, only whether it is a misspelled name of its own."""
    adapters = ("lora", "qlora", "llama-adapter")
    return kind not in adapters and (not plugins or bool(get_close_matches(kind, adapters, cutoff=0.8)))


def _loss_types(flat: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of DPO losses and of their weights; 0 if they are not set."""
    counts = [
        len(value) if isinstance(value, list) else int(value is not None)
        for value in (flat.get("dpo_loss_type"), flat.get("dpo_loss_weights"))
    ]
    return counts[0], counts[1]


def _generations(flat: dict[str, Any]) -> int | None:
    """Return the number of completions per prompt under GRPO, if the file sets it."""
    section = flat.get("trl")
    number = section.get("num_generations") if isinstance(section, dict) else flat.get("trl.num_generations")
    return number if flat.get("rl") == "grpo" and is_whole_number(number, 0) else None


def _splits_group(flat: dict[str, Any]) -> bool:
    """Return whether the completions of a step do not make up whole groups (check_grpo_batch_size_divisibility)."""
    section, number = flat.get("trl"), _generations(flat)
    batch = section.get("generation_batch_size") if isinstance(section, dict) else flat.get("trl.generation_batch_size")
    factors = [batch] if batch is not None else [flat.get("micro_batch_size"), flat.get("gradient_accumulation_steps")]
    sizes = [1 if factor is None else factor for factor in factors]
    return bool(number) and all(map(is_whole_number, sizes)) and math.prod(sizes) % (number or 1) != 0


def _shards(flat: dict[str, Any]) -> bool:
    return not is_switched_off(flat.get("fsdp")) or any(key.startswith("fsdp_config") for key in flat)


CROSS_ENTROPIES = "cut_cross_entropy chunked_cross_entropy liger_cross_entropy liger_fused_linear_cross_entropy"
KERNELS = "lora_mlp_kernel lora_qkv_kernel lora_o_kernel"
AXOLOTL: tuple[Rule, ...] = (
    mutually_exclusive("warmup_steps", "warmup_ratio"),
    (
        lambda flat: any(_loss_types(flat)) and flat.get("rl") != "dpo",
        "dpo_loss_type dpo_loss_weights",
        "rl: dpo with it",
    ),
    (
        lambda flat: flat.get("rl") == "dpo" and _loss_types(flat)[1] not in (0, _loss_types(flat)[0]),
        "dpo_loss_weights",
        "a weight for each entry of dpo_loss_type",
    ),
    (
        lambda flat: (_generations(flat) or 2) < 2,
        "trl trl.num_generations",
        "num_generations of 2 or more: in a group of one, no completion is better than the others",
    ),
    (
        _splits_group,
        "! trl trl.num_generations",
        "num_generations that divides the completions of a step (micro_batch_size × gradient_accumulation_steps)",
    ),
    (
        lambda flat: flat.get("rl") == "simpo" and not is_switched_off(flat.get("warmup_ratio")),
        "warmup_ratio",
        "warmup_steps with rl: simpo",
    ),
    (
        lambda flat: flat.get("rl") == "kto" and not is_switched_off(flat.get("sample_packing")),
        "sample_packing",
        "no sample_packing with rl: kto",
    ),
    (
        lambda flat: (
            flat.get("rl") in ("dpo", "kto", "orpo", "ipo")
            and str(flat.get("fsdp_version")) == "2"
            and any(not is_switched_off(flat.get(f"load_in_{bits}bit")) for bits in (4, 8))
        ),
        "! load_in_4bit load_in_8bit",
        "weights that are not quantized with rl and fsdp_version: 2",
    ),
    (
        lambda flat: flat.get("optimizer") == "muon" and not is_switched_off(flat.get("deepspeed")),
        "optimizer deepspeed",
        "another optimizer with DeepSpeed",
    ),
    (
        lambda flat: flat.get("optimizer") == "muon" and _shards(flat) and not _is_version_2(flat),
        "optimizer",
        "fsdp_version: 2 with muon",
    ),
    (
        lambda flat: (
            not is_switched_off(flat.get("relora")) and (not is_switched_off(flat.get("deepspeed")) or _shards(flat))
        ),
        "relora",
        "neither DeepSpeed nor FSDP with it",
    ),
    (
        lambda flat: not is_switched_off(flat.get("relora")) and flat.get("lr_scheduler") == "one_cycle",
        "lr_scheduler",
        "another schedule than one_cycle with relora",
    ),
    (
        lambda flat: sum(not is_switched_off(flat.get(key)) for key in CROSS_ENTROPIES.split()) > 1,
        CROSS_ENTROPIES,
        "one of the cross entropies",
    ),
    (
        lambda flat: (
            not is_switched_off(flat.get("batch_size"))
            and is_switched_off(flat.get("micro_batch_size"))
            and is_switched_off(flat.get("gradient_accumulation_steps"))
        ),
        "batch_size",
        "micro_batch_size or gradient_accumulation_steps with it",
    ),
    mutually_exclusive("do_causal_lm_eval", "eval_sample_packing"),
    mutually_exclusive("unfrozen_parameters", "peft_layers_to_transform"),
    mutually_exclusive("pretraining_dataset", "include_tokens_per_second"),
    mutually_exclusive("saves_per_epoch", "save_steps"),
    mutually_exclusive("evals_per_epoch", "eval_steps"),
    mutually_exclusive("test_datasets", "val_set_size"),
    mutually_exclusive("gradient_accumulation_steps", "batch_size"),
    mutually_exclusive("max_memory", "gpu_memory_limit"),
    mutually_exclusive("deepspeed", "fsdp"),
    mutually_exclusive("lr_groups", "loraplus_lr_ratio"),
    mutually_exclusive("sample_packing", "rl"),
    mutually_exclusive("batch_flattening", "sample_packing"),
    mutually_exclusive("streaming", "val_set_size"),
    mutually_exclusive("pretraining_dataset", "val_set_size"),
    mutually_exclusive("gptq", "revision_of_model"),
    mutually_exclusive("model_quantization_config", "load_in_4bit"),
    mutually_exclusive("model_quantization_config", "load_in_8bit"),
    mutually_exclusive("noisy_embedding_alpha", "neftune_noise_alpha"),
    _steps("save_strategy", "save_steps"),
    _steps("eval_strategy", "eval_steps"),
    _steps("eval_strategy", "evals_per_epoch"),
    requires_any_of("activation_offloading", "gradient_checkpointing"),
    requires_any_of("selective_checkpointing", "gradient_checkpointing"),
    requires_any_of("pretraining_dataset", "max_steps"),
    requires_any_of("streaming", "max_steps"),
    requires_any_of("peft_layers_pattern", "peft_layers_to_transform"),
    requires_any_of("fp8_config", "fp8"),
    requires_any_of("deepcompile", "deepspeed"),
    requires_any_of("push_dataset_to_hub", "hf_use_auth_token"),
    requires_any_of("do_bench_eval", "evals_per_epoch", "eval_steps"),
    requires_any_of("relora", "jagged_restart_steps"),
    (
        lambda flat: not is_switched_off(flat.get("early_stopping_patience")) and _evaluates_nothing(flat),
        "early_stopping_patience",
        "rows to evaluate on: val_set_size above 0 or test_datasets, with eval_steps and save_steps",
    ),
    requires_any_of("early_stopping_patience", "save_steps"),
    requires_any_of("early_stopping_patience", "eval_steps"),
    (
        lambda flat: (
            not is_switched_off(flat.get("early_stopping_patience"))
            and is_whole_number(flat.get("save_steps"))
            and is_whole_number(flat.get("eval_steps"))
            and flat["save_steps"] % flat["eval_steps"]
        ),
        "early_stopping_patience save_steps eval_steps",
        "save_steps that eval_steps divides, for early_stopping_patience",
    ),
    (_quantised_full, "! adapter load_in_4bit load_in_8bit", "an adapter with it: quantized weights are not trained"),
    (
        lambda flat: (
            flat.get("adapter") == "qlora"
            and is_switched_off(flat.get("load_in_4bit"))
            and is_switched_off(flat.get("merge_lora"))
        ),
        "! load_in_4bit adapter",
        "load_in_4bit: true for adapter: qlora",
    ),
    (
        lambda flat: flat.get("adapter") == "qlora" and not is_switched_off(flat.get("load_in_8bit")),
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
        "chat_template_jinja with chat_template: jinja",
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
        lambda flat: "learning_rate" not in flat and "datasets" in flat and "num_epochs" in flat,
        "base_model",
        "learning_rate, which has no default",
    ),
    (
        lambda flat: flat.get("rl") == "kto" and flat.get("remove_unused_columns") is not False,
        "rl",
        "remove_unused_columns: false with rl: kto",
    ),
    (
        lambda flat: (
            any(not is_switched_off(flat.get(key)) for key in KERNELS.split())
            and (flat.get("trust_remote_code") is True or (flat.get("adapter") == "lora" and flat.get("load_in_8bit")))
        ),
        KERNELS,
        "no LoRA kernels with trust_remote_code or 8-bit weights",
    ),
    (
        lambda flat: flat.get("lora_target_parameters") and flat.get("lora_dropout"),
        "lora_dropout",
        "lora_dropout: 0 with lora_target_parameters",
    ),
    (
        lambda flat: (
            _is_version_2(flat)
            and _fsdp(flat, "cpu_ram_efficient_loading") is True
            and flat.get("load_in_4bit") is True
        ),
        "load_in_4bit fsdp_config.cpu_ram_efficient_loading fsdp_config.fsdp_cpu_ram_efficient_loading",
        "cpu_ram_efficient_loading: false with load_in_4bit under FSDP2",
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
        "an optimizer that is not 8-bit with FSDP's offload_params",
    ),
    (
        lambda flat: _fsdp(flat, "auto_wrap_policy") == "SIZE_BASED_WRAP" and _fsdp(flat, "min_num_params") is None,
        "fsdp_config.auto_wrap_policy fsdp_config.fsdp_auto_wrap_policy",
        "min_num_params with SIZE_BASED_WRAP",
    ),
    (
        lambda flat: not is_switched_off(flat.get("flash_attn_fuse_mlp")) and flat.get("adapter") in ("lora", "qlora"),
        "flash_attn_fuse_mlp",
        "no fused modules with LoRA",
    ),
    (
        lambda flat: (
            flat.get("tokenizer_use_mistral_common") is True
            and any(flat.get(key) for key in ("special_tokens", "tokens", "chat_template", "added_tokens_overrides"))
        ),
        "special_tokens tokens chat_template added_tokens_overrides",
        "it left out with tokenizer_use_mistral_common",
    ),
)


EVALUATIONS = "eval_strategy evals_per_epoch eval_steps load_best_model_at_end eval_sample_packing do_causal_lm_eval"
IGNORED: tuple[Ignored, ...] = (
    (_evaluates_nothing, EVALUATIONS, "no rows are held out (val_set_size is 0, and there are no test_datasets)"),
    (
        lambda flat: flat.get("adapter") == "lora" and flat.get("load_in_4bit") is True,
        "load_in_4bit",
        "adapter is lora, which loads the weights as they are: write adapter: qlora",
    ),
    (
        lambda flat: "special_tokens.eot_tokens" in flat,
        "special_tokens.eot_tokens",
        "eot_tokens is a separate key, next to special_tokens",
    ),
)
"""Axolotl 0.19.0: core/builders/base.py, _configure_save_and_eval_strategy; loaders/model.py; schemas/model.py."""


def check_axolotl_conflicts(draft: ConfigDraft) -> None:
    """Check combinations of values by Axolotl's own validators, and record keys that it does not use."""
    refuse_conflicts(draft, AXOLOTL)
    mark_ignored_keys(draft, IGNORED)
