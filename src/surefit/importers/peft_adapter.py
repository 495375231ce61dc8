"""PEFT's adapter_config.json, the file beside an adapter's weights."""

from __future__ import annotations

from typing import Any

from surefit.facts.validate_model_files import wrong_patterns
from surefit.importers import convert as c
from surefit.importers import hf
from surefit.importers.config_mapping import ConfigDraft, KeyMapping, ToolSchema
from surefit.importers.conflicts import check_conflicts
from surefit.importers.known import LORA_CONFIG, key_replacements


def _targets(value: Any) -> Any:
    return ("custom",) if isinstance(value, dict) else hf.to_target_modules_or_pattern(value)


def check_single_name(draft: ConfigDraft, key: str, value: Any) -> None:
    """Record a plain module name set as a string: PEFT matches it against full module names, as it does a pattern."""
    if isinstance(value, str) and value.isidentifier():
        draft.say("target_pattern", value, key)


KEYS: dict[str, KeyMapping] = {
    "peft_type": KeyMapping(c.to_lowercase, None, "adapter"),
    "base_model_name_or_path": KeyMapping(c.to_text, None, "base_model"),
    "revision": KeyMapping(c.to_text, None, "base_revision"),
    "r": KeyMapping(c.to_int, None, "lora_r"),
    "lora_alpha": KeyMapping(c.to_float, None, "lora_alpha"),
    "lora_dropout": KeyMapping(c.to_float, None, "lora_dropout"),
    "target_modules": KeyMapping(_targets, None, "target_modules"),
    "target_parameters": KeyMapping(hf.to_expert_targets),
    "modules_to_save": KeyMapping(c.to_texts, None, "modules_to_save"),
    "trainable_token_indices": KeyMapping(c.true_if_nonempty, None, "trainable_tokens"),
    "use_rslora": KeyMapping(c.to_bool, None, "rslora"),
}
GONE = key_replacements("peft gone")


def _finish(draft: ConfigDraft) -> None:
    draft.whole_run = False
    for key, problem, help_text in wrong_patterns(draft.tree):
        draft.refuse_with(key, problem, help_text)
    if draft.flat.get("use_dora") is True:
        draft.say("adapter", "dora", "use_dora")
        draft.judge("use_dora")
    if str(draft.flat.get("peft_type")).upper() != "LORA":
        # Each adapter type has its own keys; only LoRA's are listed here.
        for key in (*draft.unknown, *draft.passed_over):
            draft.places.pop(key, None)
            if key not in draft.refused:
                draft.lose(key, "only LoRA adapters are checked")
        draft.unknown.clear()
        draft.passed_over.clear()


TOOL = ToolSchema(
    name="peft",
    keys=KEYS,
    known=LORA_CONFIG,
    gone=GONE,
    finish=_finish,
    passes_over=lambda key: True,
    conflicts=check_conflicts,
)
