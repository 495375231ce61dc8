"""Write src/surefit/config/tool_keys.json: how each key of transformers, TRL, Axolotl and LLaMA-Factory is written in
SureFit's config, by the importers' tables; config loading reads it where a config has an unknown key.

python scripts/keys_here.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefit.importers.config_mapping import KeyMapping
from surefit.importers.configs import load_tool_schema
from surefit.importers.convert import UNSET, InvalidValue, Unmappable
from surefit.importers.known import TRAINING_ARGUMENTS, TRAINING_ARGUMENTS_4
from surefit.importers.reasons import unmapped_reason
from surefit.importers.recognize import FLAT
from surefit.importers.values import value_kind

OUTPUT = Path(__file__).parents[1] / "src/surefit/config/tool_keys.json"
TOOLS = {"trl": "TRL", "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory"}
STEPS = "which counts optimizer steps"
TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "accelerate_config": ("parallel.accelerate_config", {}),
    "adapter": ("train.method", {"qlora": "lora, with model.quantization: nf4"}),
    "adapter_name_or_path": ("lora.start_from", {}),
    "beta": ("objective.beta", {}),
    "bf16": ("model.dtype", {"true": "bfloat16", "auto": "auto", "full": "bfloat16"}),
    "chat_template": ("model.chat_template", {}),
    "chat_template_jinja": ("model.chat_template", {}),
    "chat_template_path": ("model.chat_template", {}),
    "context_parallel_size": ("parallel.cp", {}),
    "dataset": ("data.train", {}),
    "dataset_train_split": ("data.split", {}),
    "datasets": ("data.train", {}),
    "deepspeed": ("parallel.deepspeed_config", {}),
    "dp_replicate_size": ("parallel.dp_replicate", {}),
    "eval_dataset": ("data.eval", {}),
    "eval_strategy": (f"train.eval_steps, {STEPS}", {}),
    "evals_per_epoch": (f"train.eval_steps, {STEPS}", {}),
    "evaluation_strategy": (f"train.eval_steps, {STEPS}", {}),
    "finetuning_type": ("train.method", {"lora": "lora", "full": "full"}),
    "fp16": ("model.dtype", {"true": "float16"}),
    "fsdp": ("parallel.mode", {}),
    "fsdp_config": ("parallel.mode", {}),
    "generation_max_new_tokens": ("evaluate.max_new_tokens", {}),
    "gradient_accumulation_steps": ("train.global_batch_size, the rows of a step over all processes", {}),
    "load_best_model_at_end": ("checkpoint.metric_for_best_model", {}),
    "load_in_4bit": ("model.quantization", {"true": "nf4", "false": "none"}),
    "max_samples": ("data.limit", {}),
    "orpo_alpha": ("objective.beta, with objective.name: orpo", {}),
    "pref_beta": ("objective.beta", {}),
    "pref_ftx": ("objective.sft_weight", {}),
    "pref_loss": ("objective.name, or objective.loss_type", {"sigmoid": "dpo", "orpo": "orpo", "simpo": "simpo"}),
    "quantization_bit": ("model.quantization", {"4": "nf4"}),
    "rl": ("objective.name", {"ipo": "dpo, with objective.loss_type: ipo"}),
    "rl_beta": ("objective.beta", {}),
    "save_strategy": (f"checkpoint.save_steps, {STEPS}", {}),
    "saves_per_epoch": (f"checkpoint.save_steps, {STEPS}", {}),
    "simpo_gamma": ("objective.gamma_beta_ratio, gamma divided by beta", {}),
    "tensor_parallel_size": ("parallel.tp", {}),
    "test_datasets": ("data.eval", {}),
    "use_peft": ("train.method", {"true": "lora", "false": "full"}),
    "use_tensorboard": ("telemetry.tensorboard", {}),
    "use_wandb": ("telemetry.wandb", {}),
    "warmup_ratio": ("train.warmup_steps, a share of the run if it is below 1", {}),
}
"""Key → SureFit's, and values that change, where the importers' code maps the key with others or part of it."""


def translations(tool: str, key: str, mapping: KeyMapping) -> dict[str, str]:
    """Return the words that a key accepts and that SureFit writes differently → SureFit's.

    Raises:
        Unmappable: the key is a switch that SureFit cannot express.
    """
    words = [part[1:] for part in (value_kind(tool, key) or "").split("|") if part.startswith("=") and "*" not in part]
    found: dict[str, str] = {}
    for value in (True, False, *words):
        try:
            plain = mapping.read(value)
            here = plain if plain is UNSET else mapping.carry(plain)
        except InvalidValue:
            continue
        except Unmappable:
            if value is True:
                raise
            continue
        if here is not UNSET and here != value:
            found[str(value).lower()] = here if isinstance(here, str) else json.dumps(here)
    return found


def keys_of(tool: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield each top-level key of a tool with [SureFit's key, its translated values], or [the reason why it has
    none]."""
    schema = load_tool_schema(tool)
    mappings = dict(schema.once) | dict(schema.keys)
    for key in sorted({*mappings, *schema.known, *schema.gone, *schema.deprecated}):
        mapping = mappings.get(key)
        if "." in key:
            continue
        if key in TOGETHER:
            yield key, [*TOGETHER[key]]
        elif mapping is not None and mapping.config:
            try:
                yield key, [mapping.config, translations(tool, key, mapping)]
            except Unmappable as reason:
                yield key, [str(reason)]
        else:
            yield key, [unmapped_reason(key)]


def table() -> dict[str, Any]:
    """Return key → [the tools that have it, SureFit's key, values] or [the tools, the number of a reason]."""
    found: dict[str, list[Any]] = {}
    reasons: list[str] = []
    for tool, name in TOOLS.items():
        for key, entry in keys_of(tool):
            is_shared = key in TRAINING_ARGUMENTS | TRAINING_ARGUMENTS_4
            names, *known = found.setdefault(key, [["transformers"] if is_shared else []])
            if name not in names and not is_shared:
                names.append(name)
            if len(known) < len(entry):  # a tool that maps the key counts before one that does not
                found[key] = [names, *entry]
    for entry in found.values():
        if len(entry) == 2:
            reasons += [entry[1]] if entry[1] not in reasons else []
            entry[1] = reasons.index(entry[1])
        elif not entry[2]:
            del entry[2]
        *others, last = entry[0]
        entry[0] = f"{', '.join(others)} and {last}" if others else last
    for key, written in FLAT.items():
        target, _, value = written.partition(": ")
        found.setdefault(key, ["", target, {"true": value}] if value else ["", target])
    return {"reasons": reasons, "keys": dict(sorted(found.items()))}


def text() -> str:
    """Return the file's text, one key per line."""
    whole = table()
    keys = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in whole["keys"].items())
    return f'{{\n "reasons": {json.dumps(whole["reasons"], indent=2)},\n "keys": {{\n{keys}\n }}\n}}\n'


if __name__ == "__main__":
    OUTPUT.write_text(text(), encoding="utf-8")
