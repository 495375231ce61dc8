"""TRL: the YAML or JSON that its command line reads (SFTConfig, ModelConfig, ScriptArguments), or part of it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from surefit.facts.setup import Setup
from surefit.importers import convert as c
from surefit.importers import hf, peft_adapter
from surefit.importers.axolotl_data import is_plain_split
from surefit.importers.config_mapping import ConfigDraft, KeyMapping, ToolSchema
from surefit.importers.conflicts import check_conflicts
from surefit.importers.known import (
    OPEN_R1,
    TRAINING_ARGUMENTS,
    TRL,
    TRL_LAUNCHER,
    TRL_STAGES,
    key_replacements,
    tool_defaults,
)
from surefit.importers.preferences import (
    OTHERWISE,
    ToolNumber,
    ToolObjective,
    map_objective,
    note_reference,
    split_losses,
)  # fmt: skip
from surefit.importers.releases import NAMES, TargetReleases, release_table
from surefit.importers.requirements import read_project_requirements
from surefit.importers.values import trl_commands

LORA_KEYS = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save",
    "use_rslora", "use_dora",
)  # fmt: skip
SEVERAL = 3
"""The number of keys unknown to TRL from which on the file is taken to belong to a custom script: then none is a
typo."""
SFT_LOSSES = ("nll", "dft", "chunked_nll")
PAIRS = re.compile(r"binarized|prefer|dpo|kto|reward|feedback|\bhh-rlhf|unpaired|tldr", re.IGNORECASE)
"""Parts of names of datasets that contain pairs, rewards or prompts only."""
QUANT_KEYS = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")


def _truncation(value: Any) -> str:
    sides = {"keep_start": "right", "keep_end": "left"}
    if not isinstance(value, str) or value not in sides:
        raise c.InvalidValue("keep_start or keep_end")
    return sides[value]


def _whole_split(value: str) -> str:
    if not is_plain_split(value):
        raise c.Unmappable("a part of a split: SureFit would use all its rows")
    return value


def _targets(value: Any) -> Any:
    """Return the target modules; ModelConfig passes a list of one to PEFT as a string."""
    return hf.to_target_modules_or_pattern(value[0] if isinstance(value, list) and len(value) == 1 else value)


KEYS = hf.KEYS | {
    "dtype": KeyMapping(hf.to_dtype, "model.dtype", "weights_dtype"),
    "attn_implementation": KeyMapping(c.to_text, "speed.attention", "attention", hf.to_config_attention),
    "lora_r": KeyMapping(c.to_int, "lora.r", "lora_r"),
    "lora_alpha": KeyMapping(c.to_float, "lora.lora_alpha", "lora_alpha"),
    "lora_dropout": KeyMapping(c.to_float, "lora.lora_dropout", "lora_dropout"),
    "lora_target_modules": KeyMapping(_targets, "lora.target_modules", "target_modules", hf.to_config_target_modules),
    "lora_target_parameters": KeyMapping(hf.to_expert_targets, "lora.experts"),
    "lora_modules_to_save": KeyMapping(c.to_texts, None, "modules_to_save"),
    "use_rslora": KeyMapping(c.to_bool, "lora.use_rslora", "rslora"),
    "use_dora": KeyMapping(c.to_bool, "lora.use_dora"),
    "bnb_4bit_quant_storage": KeyMapping(hf.to_storage_dtype, None, "quant_storage"),
    "dataset_name": KeyMapping(c.to_text, "data.train"),
    "dataset_train_split": KeyMapping(c.to_text, "data.split", None, _whole_split),
    "test_split_size": KeyMapping(c.to_float, "data.eval"),
    "max_length": KeyMapping(c.to_int, "data.max_length", "max_length"),
    "truncation_mode": KeyMapping(_truncation, None, "truncation_side"),
    "packing": KeyMapping(c.to_bool, "data.packing", "packing"),
    "packing_strategy": KeyMapping(c.to_lowercase, None, "packing_strategy"),
    "eos_token": KeyMapping(c.to_text, None, "eos_token"),
    "chat_template_path": KeyMapping(c.to_text, None, "chat_template"),
}
GONE = hf.GONE_BEFORE_5 | hf.GONE_IN_5 | key_replacements("trl gone")
ONCE = hf.ONCE_BEFORE_5 | hf.ONCE_IN_5 | {
    "max_seq_length": KEYS["max_length"],
    "torch_dtype": KEYS["dtype"],
    "use_liger": KEYS["use_liger_kernel"],
}  # fmt: skip
ONCE_IN_STAGES = key_replacements("trl gone from its stages")
"""Keys that configs of TRL's other trainers accepted before 1.0 → what to write instead."""
DEFAULTS = tool_defaults("trl")
"""TRL 1.16.0's defaults that differ from SureFit's."""


def _finish(draft: ConfigDraft) -> None:
    hf.map_training_arguments(draft)
    _data(draft)
    _adapter(draft)
    _check_releases(draft)
    _stage(draft)
    _loss(draft)
    hf.map_eval_rows(draft, "test_split_size")
    _held_out(draft)
    if not draft.setup.get("packing"):
        draft.without_effect(["packing_strategy"], "packing is not true")


def _stage(draft: ConfigDraft) -> None:
    """Map keys of other trainers than SFTTrainer, and keys that TRL passes to `accelerate launch`."""
    stages = [key for key in draft.flat if key in TRL_STAGES and draft.says(key)]
    _generations(draft)
    preference_key = next(iter(stages), None) or _preferences(draft)
    objective = find_objective(draft.flat, (draft.path.name, *map(str, map(draft.flat.get, NAMED_BY))))
    if objective is not None:
        map_objective(draft, objective)
        note_reference(draft, "the model as training begins", True, objective.key)
    elif preference_key:
        draft.say("preferences", True, preference_key)
    if stages and objective is None:
        draft.whole_run = False
        for key in stages:
            draft.lose(key, OTHERWISE)
    if TargetReleases(*read_project_requirements(draft.path)).reaches("trl", DPO_WITHOUT):
        mark_unread_by_dpo(draft)
    _dropout(draft)
    _command(draft)
    for key in filter(draft.says, sorted(TRL_LAUNCHER)):
        draft.lose(key, "TRL passes it to `accelerate launch`; in SureFit see the sections hardware and parallel")
    if len(draft.unknown) + len(draft.passed_over) >= SEVERAL:
        draft.passed_over += draft.unknown
        draft.unknown.clear()
        draft.meant.clear()
    if draft.passed_over:
        # A script with its own arguments may use another release of TRL.
        for key, instead in draft.gone.items():
            draft.deprecated[key] = instead
            draft.mapped.add(key)
        draft.gone.clear()


def _dropout(draft: ConfigDraft) -> None:
    """Note the dropout that stays on where `disable_dropout` is false."""
    rate = draft.setup.get("lora_dropout", 0.05 if draft.flat.get("use_peft") is True else None)
    if draft.flat.get("disable_dropout") is False and rate:
        draft.say("active_dropout", rate, "disable_dropout")


DPO_WITHOUT = ">=0.29"
"""The releases whose DPOTrainer accepts padding_free and label_smoothing, and mostly uses neither."""
SMOOTHED = ("robust", "exo_pair", "aot")
"""Parts of the names of the losses that read label_smoothing (TRL 0.29 to 1.16, trainer/dpo_trainer.py)."""


def mark_unread_by_dpo(draft: ConfigDraft) -> None:
    """Note the arguments of DPOConfig that DPOTrainer does not use."""
    if draft.setup.get("objective") != "dpo":
        return
    if draft.flat.get("padding_free") is True:
        draft.without_effect(["padding_free"], "DPOTrainer pads all the same (huggingface/trl#7014)")
    loss = draft.setup["objective_loss"]
    if draft.flat.get("label_smoothing") and not any(name in loss for name in SMOOTHED):
        reason = f"the loss {loss} does not read it; write loss_type: robust for pairs that may be swapped"
        draft.without_effect(["label_smoothing"], reason)


NAMED_BY = ("output_dir", "hub_model_id", "run_name")
"""Keys whose values often name the objective."""
_WORDS = re.compile(r"(?<![a-z])(dpo|ipo|orpo|simpo|kto)(?![a-z])", re.IGNORECASE)
OTHER_KEYS = frozenset({
    "reward_funcs", "reward_weights", "num_generations", "teacher_model_name_or_path", "lmbda", "temperature", "delta",
    "max_new_tokens", "reward_model_path", "reward_model_name_or_path", "epsilon", "num_iterations", "use_vllm",
    "generation_batch_size", "steps_per_generation", "kl_coef", "scale_rewards", "max_completion_length",
})  # fmt: skip
"""Keys of trainers that generate text."""
ONLY_KTO = frozenset({"desirable_weight", "undesirable_weight"})
ONLY_CPO = frozenset({"simpo_gamma", "cpo_alpha"})
DPO_KEYS = frozenset({
    "beta", "label_smoothing", "loss_weights", "precompute_ref_log_probs", "precompute_ref_batch_size", "ld_alpha",
    "f_divergence_type", "use_weighting", "rpo_alpha", "discopop_tau", "reference_free",
})  # fmt: skip
KTO_LOSSES = ("kto", "apo_zero_unpaired")


def find_objective(flat: Mapping[str, Any], names: Collection[str], kind: str | None = None) -> ToolObjective | None:
    """Return what a file for TRL optimizes, by the keys that only one of its trainers has; None where no key says.

    Args:
        flat: the file's keys, or the arguments of a call.
        names: the file's name, and values in it that may name the objective: ORPO's keys are DPO's.
        kind: the config's class in a script, such as DPOConfig.
    """
    keys = {key for key, value in flat.items() if value is not None}
    losses = flat.get("loss_type")
    key = next((name for name in flat if name in keys & (DPO_KEYS | ONLY_KTO | ONLY_CPO)), "loss_type")
    beta = ToolNumber(("beta",), 0.1)
    rate = {"train.learning_rate": ("learning_rate", 1e-6)}
    if kind is None and keys & OTHER_KEYS and not keys & (ONLY_KTO | ONLY_CPO):
        return None
    if kind == "KTOConfig" or (kind is None and (keys & ONLY_KTO or losses in KTO_LOSSES)):
        loss_key = "loss_type" if "loss_type" in keys else None
        return ToolObjective(
            "kto", key, str(losses or "kto"), loss_key, beta, desirable=ToolNumber(("desirable_weight",), 1.0),
            undesirable=ToolNumber(("undesirable_weight",), 1.0), defaults=rate,
        )  # fmt: skip
    if kind == "RewardConfig" or (kind is None and "center_rewards_coefficient" in keys):
        return ToolObjective("reward", key if kind else "center_rewards_coefficient")
    if kind == "CPOConfig" or (kind is None and (keys & ONLY_CPO or losses == "simpo")):
        return _cpo(flat, key, beta, rate)
    if not keys & DPO_KEYS and losses in (None, *SFT_LOSSES) and kind is None:
        return None
    word = next((match[1].lower() for name in names if (match := _WORDS.search(name))), "dpo")
    if kind == "ORPOConfig" or (kind is None and word == "orpo"):
        return ToolObjective("orpo", key, beta=beta, likelihood_on="all", defaults=rate)
    if kind is None and word not in ("dpo", "ipo"):
        return None
    loss, likelihood = split_losses(losses, flat.get("loss_weights"))
    loss_key = "loss_type" if "loss_type" in keys else None
    return ToolObjective("dpo", key, loss, loss_key, beta, sft_weight=ToolNumber((), likelihood), defaults=rate)


def _cpo(flat: Mapping[str, Any], key: str, beta: ToolNumber, rate: Mapping[str, tuple[str, Any]]) -> ToolObjective:
    """Return SimPO, or CPO, which SureFit does not train; CPOConfig adds a likelihood term with weight 1."""
    name = "simpo" if flat.get("loss_type") == "simpo" else "cpo"
    loss_key = "loss_type" if flat.get("loss_type") is not None else None
    return ToolObjective(
        name, key, "simpo", loss_key, beta, ToolNumber(("simpo_gamma",), 0.5),
        sft_weight=ToolNumber(("cpo_alpha",), 1.0), defaults=rate,
    )  # fmt: skip


PINNED = ("TrainingArguments", "ModelConfig", "SFTConfig")
"""The classes with the arguments of a file for `trl sft`."""


def _check_releases(draft: ConfigDraft) -> None:
    """Check the keys against the releases that the requirements beside the file pin, if any."""
    versions, files = read_project_requirements(draft.path)
    judge = TargetReleases(versions, files)
    if not {"trl", "transformers"} & judge.bounds.keys():
        return
    stages = _preferences(draft) or any(key in TRL_STAGES for key in draft.flat)
    classes = [name for name in release_table()["classes"] if name.endswith("Config")] if stages else []
    for key in filter(draft.says, list(draft.flat)):
        verdicts = {judge.takes(name, key): name for name in (*classes, *PINNED)}
        if {"taken", "deprecated"} & verdicts.keys():
            if key in draft.gone:
                del draft.gone[key]
                draft.mapped.add(key)
        elif "not yet" in verdicts and key not in draft.refused:
            name = verdicts["not yet"]
            package = release_table()["classes"][name]["package"]
            draft.refuse_with(
                key,
                f"{NAMES[package]} {judge.release(package)} does not have it: it came with {judge.since(name, key)}",
                f"remove it, or use the later release in {files.get(package, 'the requirements')}",
            )


GENERATIONS = {"GRPOConfig": 8, "RLOOConfig": 2}
"""TRL's configs whose generation batch consists of groups → the default of num_generations (TRL 1.16)."""
BATCH_OF_GENERATIONS = (
    "generation_batch_size", "steps_per_generation", "per_device_train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip


def incomplete_group_size(values: Mapping[str, Any], generations: Any, processes: int | None) -> int | None:
    """Return the number of completions in a generation batch if they do not make up whole groups; that of one process
    if the number of processes is not known."""
    size, steps = values.get("generation_batch_size"), values.get("steps_per_generation")
    if size is None:
        steps = steps if steps is not None else values.get("gradient_accumulation_steps", 1)
        factors = (values.get("per_device_train_batch_size", 8), steps, processes or 1)
        if not all(type(factor) is int and factor > 0 for factor in factors):
            return None
        size = math.prod(factors)
    numbers = type(size) is int and type(generations) is int and size > 0 and generations > 0
    return size if numbers and size % generations else None


def describe_incomplete_group(size: int, generations: int, processes: int | None, given: bool) -> tuple[str, str]:
    """Return (what is wrong, what to write) for such a batch; `given`: whether its size is written out."""
    if given or processes:
        return (
            f"a generation batch of {size} is not divisible by num_generations, {generations}",
            f"write a num_generations that divides {size}, or a batch that {generations} divides",
        )
    multiple = generations // math.gcd(size, generations)
    return f"a divisor of {size}, the generation batch of one process, or a multiple of {multiple} processes", ""


def _generations(draft: ConfigDraft) -> None:
    """Record an error if the generation batch does not consist of whole groups: TRL raises."""
    generations, count = draft.flat.get("num_generations"), draft.flat.get("num_processes")
    processes = count if type(count) is int and count > 0 else None
    size = incomplete_group_size(draft.flat, generations, processes)
    if (
        size is None
        or not isinstance(generations, int)
        or any(key.startswith(("teacher_", "distillation_")) for key in draft.flat)
    ):
        return
    problem, help_text = describe_incomplete_group(size, generations, processes, "generation_batch_size" in draft.flat)
    if help_text:
        draft.refuse_with("num_generations", problem, help_text)
    else:
        draft.out_of_range["num_generations"] = problem
        draft.places["num_generations"] = draft.place("num_generations")


def _preferences(draft: ConfigDraft) -> str | None:
    """Return the key that indicates another trainer than SFTTrainer although none of that trainer's own keys is set."""
    losses = draft.flat.get("loss_type")
    if isinstance(losses, list) or (isinstance(losses, str) and losses not in SFT_LOSSES):
        return "loss_type"
    return "dataset_name" if PAIRS.search(str(draft.flat.get("dataset_name", ""))) else None


def _command(draft: ConfigDraft) -> None:
    """Record keys that no TRL command accepts, or that no single command accepts together.

    A file with arguments of a custom script may belong to any trainer and any release: it is not checked.
    """
    commands = trl_commands()
    trl_keys = [key for key in draft.flat if draft.says(key) and key in TRL | TRL_STAGES | TRAINING_ARGUMENTS]
    if draft.passed_over or draft.unknown or OPEN_R1 & draft.flat.keys():
        return
    unaccepted = [
        key
        for key in trl_keys
        if key in TRL_STAGES - draft.refused and not any(key in accepted for accepted in commands.values())
    ]
    for key in unaccepted:
        draft.mapped.discard(key)
        draft.lost.pop(key, None)
        draft.judged.pop(key, None)
        draft.gone[key] = ONCE_IN_STAGES.get(key, "remove it: no command of TRL 1.16 has it")
        draft.places[key] = draft.place(key)
    remaining = [key for key in trl_keys if key not in unaccepted and key not in TRL_LAUNCHER]
    missing = {
        name: [key for key in remaining if key not in accepted and key != "env"] for name, accepted in commands.items()
    }
    name, unsupported = min(missing.items(), key=lambda item: len(item[1]))
    if unsupported and len(unsupported) < len([key for key in remaining if key in TRL_STAGES]) + 1:
        for key in unsupported:
            supporting = ", ".join(command for command, accepted in commands.items() if key in accepted)
            draft.refuse_with(
                key,
                f"no command accepts this with the other keys: `trl {name}` does not",
                f"it belongs to trl {supporting}",
            )


def _adapter(draft: ConfigDraft) -> None:
    """Map use_peft and the keys that need it."""
    lora = draft.flat.get("use_peft") is True
    if draft.says("use_peft"):
        kind = "dora" if lora and draft.flat.get("use_dora") is True else "lora" if lora else "full"
        draft.say("adapter", kind, "use_peft")
        draft.carry("train.method", "lora" if lora else "full", "use_peft")
        draft.reach("use_peft")
    elif draft.says("dataset_name") or draft.whole_run:
        draft.say("adapter", "full", "use_peft")
        draft.config["train.method"] = "full"
        draft.names["train.method"] = "use_peft"
    if not lora and draft.setup.get("adapter") == "full":
        draft.without_effect(LORA_KEYS, "use_peft is not true")
    if draft.config.get("train.method") == "full":
        for dotted in [dotted for dotted in draft.config if dotted.startswith("lora.")]:
            del draft.config[dotted]
    if lora:
        targets = draft.flat.get("lora_target_modules")
        target = targets[0] if isinstance(targets, list) and len(targets) == 1 else targets
        peft_adapter.check_single_name(draft, "lora_target_modules", target)
    _quantization(draft)


def _quantization(draft: ConfigDraft) -> None:
    four, eight = (draft.flat.get(f"load_in_{bits}bit") is True for bits in (4, 8))
    for key in ("load_in_4bit", "load_in_8bit"):
        if draft.says(key):
            draft.judge(key)
    if four:
        kind = str(draft.flat.get("bnb_4bit_quant_type") or "nf4")
        draft.say("quantization", kind, "load_in_4bit")
        if draft.says("bnb_4bit_quant_type"):
            draft.judge("bnb_4bit_quant_type")
        if kind == "nf4":
            draft.carry("model.quantization", "nf4", "load_in_4bit")
            draft.reach("load_in_4bit")
            draft.reach("bnb_4bit_quant_type")
        if "weights_dtype" in draft.setup:
            # TRL's get_quantization_config passes `dtype` on as bnb_4bit_compute_dtype.
            draft.say("quant_compute_dtype", draft.setup["weights_dtype"], draft.places["weights_dtype"].name)
    elif eight:
        draft.say("quantization", "int8", "load_in_8bit")
    elif draft.says("load_in_4bit"):
        draft.say("quantization", "none", "load_in_4bit")
    if not four:
        draft.without_effect(QUANT_KEYS, "load_in_4bit is not true")


def _data(draft: ConfigDraft) -> None:
    """Map the rows: `dataset_name`, or a mixture under `datasets`."""
    mixture = draft.flat.get("datasets")
    if not draft.says("dataset_name") and isinstance(mixture, list) and mixture and isinstance(mixture[0], dict):
        _mixture(draft, mixture)
    draft.whole_run = "data.train" in draft.config and "model.name_or_path" in draft.config
    row_keys = ("dataset_config", "dataset_streaming", "streaming", "dataset_kwargs")
    if any(draft.says(key) for key in row_keys) or draft.flat.get("dataset_text_field", "text") != "text":
        draft.rows_known = False


def _held_out(draft: ConfigDraft) -> None:
    """Map the held-out split: TRL evaluates `dataset_test_split` if `eval_strategy` is set, and nothing otherwise."""
    if "data.eval" in draft.config or "test_split_size" in draft.refused:
        return
    if draft.setup.get("eval_strategy", "no") == "no":
        draft.config["data.eval"] = 0.0
        draft.names["data.eval"] = "eval_strategy"
        return
    source, split = draft.flat.get("dataset_name"), draft.flat.get("dataset_test_split") or "test"
    on_hub = isinstance(source, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and not os.path.exists(source)
    if on_hub and is_plain_split(split):
        draft.carry("data.eval", f"{source}@{split}", "dataset_test_split")
        draft.reach("dataset_test_split")
    else:
        reason = "data.eval needs a file, or a split of a hub data set; it stays SureFit's default"
        draft.lose_part("dataset_test_split", "", split, reason)


def _mixture(draft: ConfigDraft, mixture: list[Any]) -> None:
    source = mixture[0].get("path")
    if isinstance(source, str):
        draft.carry("data.train", source, "datasets[0].path")
        draft.reach("datasets")
        if is_plain_split(mixture[0].get("split")):
            draft.carry("data.split", mixture[0]["split"], "datasets[0].split")
    path_and_split = all(isinstance(entry, dict) and set(entry) <= {"path", "split"} for entry in mixture)
    whole_splits = path_and_split and all(is_plain_split(entry.get("split", "train")) for entry in mixture)
    sources = [_to_mix_source(entry) for entry in mixture[1:]] if whole_splits else []
    draft.rows_known = len(mixture) == 1 and whole_splits
    is_mixed = (
        whole_splits and None not in sources and hf.map_data_mix(draft, [name for name in sources if name], "datasets")
    )
    for i, entry in enumerate(mixture):
        for key, value in entry.items() if isinstance(entry, dict) else ():
            is_mapped = (
                (key == "path" or is_plain_split(value)) if key in ("path", "split") and (i == 0 or is_mixed) else False
            )
            if not is_mapped and value is not None:
                draft.lose_part("datasets", f"[{i}].{key}", value, "data.mix needs whole splits, by path or id")


def _to_mix_source(entry: dict[str, Any]) -> str | None:
    """Return a further dataset as an entry of `data.mix`, or None."""
    path, split = entry.get("path"), entry.get("split", "train")
    return None if not isinstance(path, str) else path if split == "train" else f"{path}@{split}"


def _loss(draft: ConfigDraft) -> None:
    """Record which tokens the loss is computed on."""
    words = {("assistant_only_loss", True): "assistant", ("completion_only_loss", True): "completion"}
    words[("completion_only_loss", False)] = "all"
    for (key, value), loss_on in words.items():
        if draft.flat.get(key) is value and "loss_on" not in draft.setup:
            draft.say("loss_on", loss_on, key)
    for key in ("assistant_only_loss", "completion_only_loss"):
        draft.judge(key)
    rows_key = "dataset_name" if draft.says("dataset_name") else "datasets"
    draft.places.setdefault("conversations", draft.place(rows_key))
    draft.places.setdefault(
        "loss_on", draft.place("assistant_only_loss" if draft.says("assistant_only_loss") else rows_key)
    )


def apply_row_columns(setup: Setup, columns: Collection[str]) -> Setup:
    """Return the setup completed by the rows' columns: TRL trains on whole conversations unless `assistant_only_loss`
    is true.

    The columns decide: https://huggingface.co/docs/trl/dataset_formats. The loss of rows with prompt and completion is
    computed on the completion, whether these are strings or messages.
    """
    if "messages" not in columns or {"prompt", "completion"} & set(columns):
        return setup
    return replace(setup, conversations=True, loss_on=setup.loss_on or "all")


TOOL = ToolSchema(
    name="trl",
    keys=KEYS,
    known=TRAINING_ARGUMENTS | TRL | TRL_STAGES | TRL_LAUNCHER,
    gone=GONE,
    once=ONCE,
    defaults=DEFAULTS,
    finish=_finish,
    open_sections=hf.OPEN_SECTIONS,
    passes_over=lambda key: True,
    extensions=OPEN_R1,
    conflicts=check_conflicts,
)
