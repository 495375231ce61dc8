"""DeepSpeed's JSON config; "auto", which the Trainer fills in, counts as unset."""

from __future__ import annotations

from typing import Any

from surefit.importers import convert as c
from surefit.importers.config_mapping import ConfigDraft, KeyMapping, ToolSchema
from surefit.importers.conflicts import check_conflicts
from surefit.importers.known import DEEPSPEED, ZERO, key_replacements


def _stage(value: Any) -> str:
    stage = c.to_int(value)
    if not 0 <= stage <= 3:
        raise c.InvalidValue("a whole number from 0 to 3")
    return f"zero{stage}" if stage else "ddp"


_whole, _number, _switch = c.unless_auto(c.to_int), c.unless_auto(c.to_float), c.unless_auto(c.to_bool)
KEYS: dict[str, KeyMapping] = {
    "train_batch_size": KeyMapping(_whole, None, "global_batch"),
    "train_micro_batch_size_per_gpu": KeyMapping(_whole, None, "micro_batch"),
    "gradient_accumulation_steps": KeyMapping(_whole, None, "accumulation"),
    "bf16.enabled": KeyMapping(_switch, None, "bf16"),
    "bfloat16.enabled": KeyMapping(_switch, None, "bf16"),
    "fp16.enabled": KeyMapping(_switch, None, "fp16"),
    "zero_optimization.stage": KeyMapping(_stage, None, "parallel"),
    "zero_optimization.offload_optimizer.device": KeyMapping(c.true_if_offloaded, None, "cpu_offload"),
    "zero_optimization.offload_param.device": KeyMapping(c.true_if_offloaded, None, "cpu_offload"),
    "optimizer.params.lr": KeyMapping(_number, None, "learning_rate"),
    "scheduler.params.warmup_num_steps": KeyMapping(_whole, None, "warmup_steps"),
    "scheduler.params.total_num_steps": KeyMapping(_whole, None, "total_steps"),
}
DEPRECATED = key_replacements("deepspeed deprecated")
"""DeepSpeed 0.19 still reads the ZeRO keys under their new names (runtime/zero/config.py, json_schema_extra)."""
OPEN = frozenset({"bf16", "bfloat16", "fp16", "optimizer", "scheduler"})


def _finish(draft: ConfigDraft) -> None:
    draft.whole_run = False
    batch, micro, accumulation = (draft.setup.get(name) for name in ("global_batch", "micro_batch", "accumulation"))
    if batch and micro and accumulation and batch % (micro * accumulation) == 0:
        draft.say("world_size", batch // (micro * accumulation), "train_batch_size")


TOOL = ToolSchema(
    name="deepspeed",
    keys=KEYS,
    known=DEEPSPEED
    | {f"zero_optimization.{name}" for name in ZERO}
    | {
        f"zero_optimization.offload_{target}.{name}"
        for target in ("param", "optimizer")
        for name in (
            "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline_read", "pipeline_write",
            "pipeline", "fast_init", "ratio",
        )
    },
    gone={},
    finish=_finish,
    open_sections=OPEN,
    deprecated=DEPRECATED,
    passes_over=lambda key: not key.startswith("zero_optimization."),
    conflicts=check_conflicts,
)  # fmt: skip
