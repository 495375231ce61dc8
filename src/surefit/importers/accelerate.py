"""Accelerate's config: the file that `accelerate config` writes and `accelerate launch` reads."""

from __future__ import annotations

import math
from typing import Any

from surefit.config.modes import MODES
from surefit.importers import convert as c
from surefit.importers import hf
from surefit.importers.config_mapping import ConfigDraft, KeyMapping, ToolSchema
from surefit.importers.conflicts import check_conflicts
from surefit.importers.known import ACCELERATE, key_replacements

PARALLEL = {
    "no": "none", "multi_gpu": "ddp", "multi_cpu": "ddp", "multi_npu": "ddp", "multi_xpu": "ddp", "multi_mlu": "ddp",
    "fsdp": "fsdp", "deepspeed": c.UNSET, "tp": "tp",
}  # fmt: skip
DATA_PARALLEL = {"zero1", *(name for name, mode in MODES.items() if not mode.grouped)}
FSDP_KEYS = frozenset(
    f"fsdp_config.fsdp_{name}"
    for name in (
        "activation_checkpointing", "auto_wrap_policy", "backward_prefetch", "forward_prefetch", "min_num_params",
        "reshard_after_forward", "sharding_strategy", "use_orig_params",
    )
)  # fmt: skip
DEEPSPEED_KEYS = frozenset(
    f"deepspeed_config.{name}"
    for name in (
        "deepspeed_config_file", "deepspeed_exclusion_filter", "deepspeed_hostfile", "deepspeed_inclusion_filter",
        "deepspeed_moe_layer_cls_names", "deepspeed_multinode_launcher", "gradient_clipping",
        "seq_parallel_communication_data_type",
        "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_init_flag", "zero3_save_16bit_model",
    )
)  # fmt: skip

SIZES = tuple(
    f"parallelism_config.parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
)
"""Number of devices along each dimension of parallelism; devices along the last three read the same rows."""
SHARING_KEYS = frozenset(
    f"parallelism_config.parallelism_config_{name}"
    for name in (
        "cp_backend", "cp_comm_strategy", "sp_attn_implementation", "sp_backend", "sp_seq_length",
        "sp_seq_length_is_variable",
    )
)  # fmt: skip


def _precision(value: Any) -> Any:
    word = "no" if value is False else c.to_lowercase(value)
    if word not in ("no", "fp16", "bf16", "fp8"):
        raise c.InvalidValue("no, fp16, bf16 or fp8")
    return word


def _parallel(value: Any) -> Any:
    # Accelerate's reader follows YAML 1.1: an unquoted NO is false.
    return PARALLEL.get("no" if value is False else c.to_lowercase(value), c.UNSET)


def _processes(value: Any) -> Any:
    return c.UNSET if value == -1 else c.to_int(value)


def _gpus(value: Any) -> Any:
    """Return the number of `gpu_ids`, a comma-separated list or "all"."""
    return c.UNSET if value == "all" else len(c.to_texts(str(value) if type(value) is int else value))


KEYS: dict[str, KeyMapping] = {
    "num_processes": KeyMapping(_processes, None, "processes"),
    "num_machines": KeyMapping(c.to_int, None, "machines"),
    "gpu_ids": KeyMapping(_gpus, None, "gpus"),
    "distributed_type": KeyMapping(_parallel, None, "parallel"),
    "mixed_precision": KeyMapping(_precision, None, "bf16"),
    "use_cpu": KeyMapping(c.to_bool, None, "on_cpu"),
    "fsdp_config.fsdp_version": KeyMapping(c.to_int, None, "fsdp_version"),
    "fsdp_config.fsdp_state_dict_type": KeyMapping(c.to_text, None, "fsdp_state_dict"),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": KeyMapping(c.to_texts, None, "fsdp_layers"),
    "fsdp_config.fsdp_offload_params": KeyMapping(c.to_bool, None, "fsdp_offload"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": KeyMapping(c.to_bool, None, "fsdp_efficient_loading"),
    "fsdp_config.fsdp_sync_module_states": KeyMapping(c.to_bool, None, "fsdp_sync_states"),
    "deepspeed_config.zero_stage": KeyMapping(c.to_int, None, "parallel"),
    "deepspeed_config.gradient_accumulation_steps": KeyMapping(c.unless_auto(c.to_int), None, "accumulation"),
    "deepspeed_config.offload_optimizer_device": KeyMapping(c.true_if_offloaded, None, "cpu_offload"),
    "deepspeed_config.offload_param_device": KeyMapping(c.true_if_offloaded, None, "cpu_offload"),
    **dict.fromkeys(SIZES, KeyMapping(c.to_int)),
}
GONE = key_replacements("accelerate gone")


def _finish(draft: ConfigDraft) -> None:
    draft.whole_run = False
    precision = draft.setup.pop("bf16", None)
    if precision in ("bf16", "fp16"):
        draft.say(precision, True, "mixed_precision")
    elif precision == "no":
        for attribute in ("bf16", "fp16"):
            draft.say(attribute, False, "mixed_precision")
    stage = draft.flat.get("deepspeed_config.zero_stage")
    if draft.setup.get("parallel") == stage:
        draft.setup.pop("parallel", None)
    deepspeed = str(draft.flat.get("distributed_type")).lower() == "deepspeed"
    if deepspeed and isinstance(stage, int) and 0 <= stage <= 3:
        draft.say("parallel", f"zero{stage}" if stage else "ddp", "deepspeed_config.zero_stage")
    elif deepspeed and draft.says("deepspeed_config.deepspeed_config_file"):
        stage = hf.read_zero_stage(draft.flat["deepspeed_config.deepspeed_config_file"], draft.path.parent)
        if stage is not None:
            draft.say("parallel", f"zero{stage}" if stage else "ddp", "deepspeed_config.deepspeed_config_file")
            draft.judge("deepspeed_config.deepspeed_config_file")
    elif str(draft.flat.get("distributed_type")).lower() in ("fsdp", "multi_gpu", "no", "false"):
        draft.say("parallel", _parallel(draft.flat["distributed_type"]), "distributed_type")
    if draft.setup.get("parallel") in DATA_PARALLEL and "processes" in draft.setup:
        draft.say("world_size", draft.setup["processes"] // _count_data_sharers(draft), "num_processes")
    one_process = draft.setup.get("processes", 1) == 1 and not draft.setup.get("on_cpu")
    if draft.setup.get("parallel") == "none" and one_process and draft.setup.get("gpus", 1) > 1:
        # One process that sees several GPUs: transformers wraps the model in torch.nn.DataParallel.
        draft.say("parallel", "dp", "distributed_type")
    _section_without_use(draft)


def _count_data_sharers(draft: ConfigDraft) -> int:
    """Return how many processes read the same rows. Accelerate rejects sizes whose product is not the number of
    processes."""
    sizes = {key: draft.flat[key] for key in SIZES if isinstance(draft.flat.get(key), int) and draft.flat[key] > 0}
    if sizes and math.prod(sizes.values()) != draft.setup["processes"]:
        draft.refuse(list(sizes)[-1], f"sizes whose product is num_processes, {draft.setup['processes']}")
        return 1
    return math.prod(sizes.get(key, 1) for key in SIZES[2:])


def _section_without_use(draft: ConfigDraft) -> None:
    """Record sections for another kind of parallelism than the selected one as without effect."""
    kind = draft.flat.get("distributed_type")
    for section, required in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        section_keys = [key for key in draft.flat if key.startswith(f"{section}.")]
        if isinstance(kind, str) and kind.upper() != required and section_keys:
            draft.ignored[section] = f"distributed_type is {kind}, not {required}"
            draft.places[section] = draft.place(section)


TOOL = ToolSchema(
    name="accelerate",
    keys=KEYS,
    known=ACCELERATE | FSDP_KEYS | DEEPSPEED_KEYS | SHARING_KEYS,
    gone=GONE,
    finish=_finish,
    passes_over=lambda key: key.startswith(("deepspeed_config.", "fsdp_config.")),
    conflicts=check_conflicts,
)
