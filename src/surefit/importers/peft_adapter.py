"""PEFT: the adapter_config.json beside an adapter's weights."""

from __future__ import annotations

from typing import Any

from surefit.facts.validate_model_files import wrong_patterns
from surefit.importers import conflicts, hf
from surefit.importers import convert as c
from surefit.importers.config_mapping import Draft, To, Tool
from surefit.importers.known import LORA_CONFIG


def _targets(value: Any) -> Any:
    return ("custom",) if isinstance(value, dict) else hf.linear_or_pattern(value)


def one_name(draft: Draft, key: str, value: Any) -> None:
    """A plain name that is given as a text: PEFT matches it with the whole names of modules, as it does patterns."""
    if isinstance(value, str) and value.isidentifier():
        draft.say("target_pattern", value, key)


KEYS: dict[str, To] = {
    "peft_type": To(c.word, None, "adapter"),
    "base_model_name_or_path": To(c.text, None, "base_model"),
    "revision": To(c.text, None, "base_revision"),
    "r": To(c.whole, None, "lora_r"),
    "lora_alpha": To(c.number, None, "lora_alpha"),
    "lora_dropout": To(c.number, None, "lora_dropout"),
    "target_modules": To(_targets, None, "target_modules"),
    "target_parameters": To(hf.experts),
    "modules_to_save": To(c.texts, None, "modules_to_save"),
    "trainable_token_indices": To(c.if_any, None, "trainable_tokens"),
    "use_rslora": To(c.switch, None, "rslora"),
}
GONE = {"enable_lora": "target_modules", "merge_weights": "nothing: merging is a method of the model"}


def _finish(draft: Draft) -> None:
    draft.whole_run = False
    for key, problem, help_text in wrong_patterns(draft.tree):
        draft.refuse_with(key, problem, help_text)
    if draft.flat.get("use_dora") is True:
        draft.say("adapter", "dora", "use_dora")
        draft.judge("use_dora")
    if str(draft.flat.get("peft_type")).upper() != "LORA":
        # Every kind of adapter has keys of its own: only LoRA's are written down here.
        for key in (*draft.unknown, *draft.passed_over):
            draft.places.pop(key, None)
            if key not in draft.refused:
                draft.lose(key, "only LoRA adapters are looked into")
        draft.unknown.clear()
        draft.passed_over.clear()


TOOL = Tool(
    name="peft",
    keys=KEYS,
    known=LORA_CONFIG,
    gone=GONE,
    finish=_finish,
    passes_over=lambda key: True,
    conflicts=conflicts.peft,
)
