"""LLaMA-Factory: the YAML or JSON of `llamafactory-cli train`."""

from __future__ import annotations

import os.path
from pathlib import Path
from typing import Any

from surefit.config.load import parse_yaml, read_config_text
from surefit.config.schema import STACKED, LoraSection
from surefit.core.errors import ConfigError, did_you_mean
from surefit.importers import convert as c
from surefit.importers import hf
from surefit.importers.config_mapping import ConfigDraft, KeyMapping, ToolSchema
from surefit.importers.conflicts import check_conflicts
from surefit.importers.known import (
    LLAMAFACTORY,
    TRAINING_ARGUMENTS,
    TRAINING_ARGUMENTS_4,
    key_replacements,
    tool_defaults,
)
from surefit.importers.paths import first_rows
from surefit.importers.preferences import (
    OTHERWISE,
    OWN_REFERENCE,
    ToolNumber,
    ToolObjective,
    map_objective,
    note_reference,
)  # fmt: skip

LORA_KEYS = (
    "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target", "use_rslora", "use_dora",
    "loraplus_lr_ratio",
)  # fmt: skip
ATTENTION = {
    "fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager", "auto": c.UNSET
}  # fmt: skip


PER_ANSWER = (
    "LLaMA-Factory weights the mean loss of each chosen answer, so that a token of a short answer counts more; "
    "objective.sft_weight weights the mean over all tokens of the step"
)


def _attention(value: Any) -> Any:
    return c.choice_of(ATTENTION, "SureFit's speed.attention does not support {value}")(value)


def _to_negated_bool(value: Any) -> bool:
    return not c.to_bool(value)


INFO = "dataset_info.json"
FORMATS = ("alpaca", "sharegpt", "openai")
SOURCES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
ROLES = (
    "prompt", "query", "response", "history", "messages", "system", "tools", "images", "videos", "audios", "chosen",
    "rejected", "kto_tag",
)  # fmt: skip
"""Keys that `columns` of a dataset may have (0.9.5, data/parser.py)."""
TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
"""Defaults of an entry without `tags` or `columns`; an entry that has them gets no defaults (DatasetAttr.join)."""
NAMED = 8
"""The largest number of datasets that a message lists."""
KEYS = hf.KEYS | {
    "warmup_ratio": KeyMapping(c.to_fraction, "train.warmup_steps", "warmup_share"),
    "overwrite_output_dir": KeyMapping(c.to_bool, None, "overwrite"),
    "cutoff_len": KeyMapping(c.to_int, "data.max_length", "max_length"),
    "val_size": KeyMapping(c.to_eval_fraction, "data.eval"),
    "packing": KeyMapping(c.to_bool, "data.packing", "packing"),
    "train_on_prompt": KeyMapping(c.value_when_true("all"), None, "loss_on"),
    "mask_history": KeyMapping(c.value_when_true("completion"), "data.thinking", "loss_on", lambda _: "only_last"),
    "lora_rank": KeyMapping(c.to_int, "lora.r", "lora_r"),
    "lora_alpha": KeyMapping(c.to_float, "lora.lora_alpha", "lora_alpha"),
    "lora_dropout": KeyMapping(c.to_float, "lora.lora_dropout", "lora_dropout"),
    "lora_target": KeyMapping(
        hf.to_setup_target_modules, "lora.target_modules", "target_modules", hf.to_config_target_modules
    ),
    "additional_target": KeyMapping(c.to_texts, None, "modules_to_save"),
    "use_rslora": KeyMapping(c.to_bool, "lora.use_rslora", "rslora"),
    "use_dora": KeyMapping(c.to_bool, "lora.use_dora"),
    "pure_bf16": KeyMapping(c.value_when_true("bfloat16"), "model.dtype", "dtype"),
    "disable_gradient_checkpointing": KeyMapping(
        _to_negated_bool, "train.gradient_checkpointing", "gradient_checkpointing"
    ),
    "use_reentrant_gc": KeyMapping(c.to_bool, None, "reentrant"),
    "flash_attn": KeyMapping(_attention, "speed.attention", "attention"),
    "early_stopping_steps": KeyMapping(c.to_limit, "train.early_stopping_patience"),
    "enable_liger_kernel": KeyMapping(c.to_bool, None, "liger"),
    "use_unsloth": KeyMapping(c.to_bool, None, "unsloth"),
    "resize_vocab": KeyMapping(c.value_when_true(True), None, "new_tokens"),
    "add_tokens": KeyMapping(c.to_texts, "model.add_tokens", "new_tokens", list),
    "predict_with_generate": KeyMapping(c.to_bool, None, "generates_in_loop"),
    "do_sample": KeyMapping(c.to_bool, None, "do_sample"),
    "temperature": KeyMapping(c.to_float, None, "temperature"),
    "template": KeyMapping(c.to_text, None, "chat_template"),
    "enable_thinking": KeyMapping(lambda value: {"enable_thinking": c.to_bool(value)}, "model.chat_template_kwargs"),
}
ALIASES = key_replacements("llamafactory aliases")
"""Keys of Axolotl and TRL → LLaMA-Factory's name for them."""
DEFAULTS = tool_defaults("llamafactory")
"""LLaMA-Factory 0.9.5's defaults that differ from SureFit's."""


def _finish(draft: ConfigDraft) -> None:
    hf.map_training_arguments(draft)
    _adapter(draft)
    _stage(draft)
    _quantization(draft)
    _data(draft)
    hf.map_eval_rows(draft, "val_size", "eval_dataset")
    if draft.says("pure_bf16") and draft.setup.get("dtype"):
        draft.say("weights_dtype", draft.setup["dtype"], "pure_bf16")
    elif draft.flat.get("use_badam") is not True:
        # init_adapter: "Upcasting trainable params to float32", unless pure_bf16 or BAdam; the shards of ZeRO-3 and
        # FSDP are float32 as well.
        draft.say("float32_masters", True, "pure_bf16")
    _tokens(draft)
    _packing(draft)
    _generation(draft)
    _export(draft)


def _tokens(draft: ConfigDraft) -> None:
    """Map `add_tokens` to `model.add_tokens`; `resize_vocab` adds their embedding rows, which SureFit does by
    itself."""
    if "new_tokens" in draft.setup:
        draft.setup["new_tokens"] = bool(draft.setup["new_tokens"])
    if draft.says("resize_vocab") and not draft.says("add_tokens"):
        draft.lose("resize_vocab", "model.add_tokens names the tokens that SureFit appends, with trained rows")
    elif draft.says("additional_target") and draft.says("add_tokens"):
        draft.lose("additional_target", "SureFit trains the rows of model.add_tokens")


def _packing(draft: ConfigDraft) -> None:
    """Map packing: `neat_packing` implies `packing`; without it, packed examples stay whole and attend to each other.

    PackedSupervisedDatasetProcessor: "packed_attention_masks += [1] * len(…)", and only under neat_packing the index of
    the example (0.9.5, data/processor/supervised.py). Pretraining packs by default.
    """
    if draft.flat.get("neat_packing") is True:
        draft.say("packing", True, "neat_packing")
        draft.carry("data.packing", True, "neat_packing")
        draft.reach("neat_packing")
    elif draft.setup.get("packing") and draft.flat.get("stage") != "pt":
        draft.say("packing_strategy", "joined", "packing")
    elif draft.flat.get("stage") == "pt" and not draft.says("packing"):
        draft.say("packing", True, "stage")
        draft.carry("data.packing", True, "stage")


def _generation(draft: ConfigDraft) -> None:
    """Drop generation settings unless `predict_with_generate` is set; a file that only predicts has no training
    loop."""
    predicts = draft.flat.get("do_predict") is True
    if predicts and draft.flat.get("do_train") is not True:
        draft.setup.pop("generates_in_loop", None)
    if not predicts and draft.flat.get("predict_with_generate") is not True:
        for attribute in ("do_sample", "temperature"):
            draft.setup.pop(attribute, None)


def _export(draft: ConfigDraft) -> None:
    """Map `llamafactory-cli export`: the adapter is merged into the base as it is loaded."""
    if draft.says("export_dir") and draft.says("adapter_name_or_path"):
        draft.say("merge_into", "quantized" if "quantization" in draft.setup else "original", "export_dir")
        draft.judge("export_dir")
        draft.judge("adapter_name_or_path")


def _stage(draft: ConfigDraft) -> None:
    stage = draft.flat.get("stage", "sft")
    if stage in ("sft", "pt"):
        draft.reach("stage")
    elif (objective := _objective(draft)) is not None:
        map_objective(draft, objective)
        _reference(draft)
    else:
        draft.say("preferences", True, "stage")
        draft.whole_run = False
        draft.lose("stage", OTHERWISE)
    if stage == "pt":
        draft.say("loss_on", "all", "stage")
        draft.config["data.format"] = "text"
        draft.names["data.format"] = "stage"


def _objective(draft: ConfigDraft) -> ToolObjective | None:
    """Return the objective of the stages dpo (whose loss may be ORPO's or SimPO's), kto and rm; None for ppo."""
    stage, loss = draft.flat.get("stage"), str(draft.flat.get("pref_loss") or "sigmoid")
    if stage == "rm":
        return ToolObjective("reward", "stage")
    if stage not in ("dpo", "kto"):
        return None
    alone = loss in ("orpo", "simpo")
    return ToolObjective(
        name="kto" if stage == "kto" else loss if alone else "dpo",
        key="pref_loss" if alone and stage == "dpo" else "stage",
        loss="kto" if stage == "kto" else loss,
        loss_key="pref_loss" if draft.says("pref_loss") else None,
        beta=ToolNumber(("pref_beta",), 0.1),
        margin=ToolNumber(("simpo_gamma",), 0.5),
        smoothing=ToolNumber(("dpo_label_smoothing",), 0.0),
        sft_weight=ToolNumber(("pref_ftx",), 0.0),
        desirable=ToolNumber(("kto_chosen_weight",), 1.0),
        undesirable=ToolNumber(("kto_rejected_weight",), 1.0),
        sft_weight_why=PER_ANSWER,
    )


def _reference(draft: ConfigDraft) -> None:
    """Note the reference: without `ref_model`, LoRA's is the model with its adapters off (create_ref_model, 0.9.5)."""
    model, adapter = draft.flat.get("ref_model"), draft.flat.get("adapter_name_or_path")
    is_lora = (draft.flat.get("finetuning_type") or "lora") == "lora"
    if isinstance(model, str):
        other = draft.flat.get("ref_model_adapters")
        draft.lose("ref_model", OWN_REFERENCE)
        text = f"{model} with the adapter {other}" if other else model
        note_reference(draft, text, other == adapter or not adapter, "ref_model")
    elif is_lora and isinstance(adapter, str) and draft.flat.get("create_new_adapter") is not True:
        draft.say("starts_from", adapter, "adapter_name_or_path")
        note_reference(draft, "the base model without it", False, "adapter_name_or_path")
    else:
        if isinstance(adapter, str):
            draft.say("starts_from", adapter, "adapter_name_or_path")
        note_reference(draft, "the model as training begins", True, "stage")


def _adapter(draft: ConfigDraft) -> None:
    """Map finetuning_type and the settings that depend on it."""
    kind = draft.flat.get("finetuning_type") or "lora"
    if kind not in ("lora", "full"):
        draft.whole_run = False
        draft.lose("finetuning_type", "SureFit trains LoRA adapters or all weights")
        return
    dora = kind == "lora" and draft.flat.get("use_dora") is True
    draft.say("adapter", "dora" if dora else kind, "finetuning_type")
    draft.carry("train.method", kind, "finetuning_type")
    draft.reach("finetuning_type")
    if kind == "full":
        draft.without_effect(LORA_KEYS, "finetuning_type is full")
        for dotted in LoraSection.model_fields:
            draft.config.pop(f"lora.{dotted}", None)
    else:
        rank = draft.config.setdefault("lora.r", 8)
        draft.names.setdefault("lora.r", "lora_rank")
        draft.config.setdefault("lora.lora_alpha", 2.0 * rank)
        draft.names.setdefault("lora.lora_alpha", "lora_alpha")
        _start(draft)


def _start(draft: ConfigDraft) -> None:
    """Map an adapter that is trained further; several adapters, or one beside `create_new_adapter`, are merged
    first."""
    adapter = draft.flat.get("adapter_name_or_path")
    if adapter is None:
        return
    single = isinstance(adapter, str) and bool(adapter.strip()) and "," not in adapter
    if single and draft.flat.get("create_new_adapter") is not True and not draft.says("export_dir"):
        draft.carry("lora.start_from", adapter, "adapter_name_or_path")
        draft.reach("adapter_name_or_path")
    elif not draft.says("export_dir"):
        draft.lose("adapter_name_or_path", STACKED)


def _quantization(draft: ConfigDraft) -> None:
    bits = draft.flat.get("quantization_bit")
    if bits is None:
        return
    method = draft.flat.get("quantization_method") or "bnb"
    kinds = {4: str(draft.flat.get("quantization_type") or "nf4"), 8: "int8"}
    if not isinstance(bits, int) or isinstance(bits, bool):
        draft.refuse("quantization_bit", "a whole number, 4 or 8")
    elif bits in kinds and method == "bnb":
        draft.say("quantization", kinds[bits], "quantization_bit")
        draft.judge("quantization_bit")
        if kinds[bits] == "nf4":
            draft.carry("model.quantization", "nf4", "quantization_bit")
            draft.reach("quantization_bit")


def _data(draft: ConfigDraft) -> None:
    """Map `dataset`, which names entries of dataset_info.json in `dataset_dir`."""
    draft.rows_known = not any(
        draft.says(key) for key in ("max_samples", "streaming", "tokenized_path", "mix_strategy")
    )
    names = draft.flat.get("dataset")
    if names is None:
        if draft.flat.get("do_train") is True:
            draft.refuse_with("do_train", "there is no dataset to train on", "name one as dataset")
        draft.whole_run = False
        return
    names = parse_dataset_names(names)
    if not names:
        draft.refuse("dataset", "names of data sets, with commas between them")
        draft.whole_run = False
        return
    folder = draft.flat.get("dataset_dir") or "data"
    if isinstance(folder, str):
        folder = resolve_dataset_dir(folder, draft.path)
    info = read_dataset_info(folder) if isinstance(folder, str) else {}
    if info:
        _judge_sets(draft, "dataset", names, folder, info)
        _judge_sets(draft, "eval_dataset", parse_dataset_names(draft.flat.get("eval_dataset") or []), folder, info)
    source, layout = find_dataset_source(names[0], folder, info)
    if info:
        draft.reach("dataset_dir")
    draft.carry("data.train", source, "dataset")
    draft.reach("dataset")
    if layout:
        draft.carry("data.format", layout, "dataset")
    draft.rows_known = draft.rows_known and layout is not None
    for i, name in enumerate(names):
        if not info:
            draft.lose_part("dataset", f"[{i}]", name, f"{folder}/dataset_info.json was not found: name the rows")
        elif find_dataset_source(name, folder, info)[1] is None:
            draft.lose_part(
                "dataset", f"[{i}]", name, "it has its own columns or tags: SureFit reads the layouts of docs/data.md"
            )
    limit = draft.flat.get("max_samples")
    if len(names) == 1 and isinstance(limit, int) and limit > 0:
        draft.carry("data.limit", limit, "max_samples")
        draft.reach("max_samples")
        draft.lose_part("max_samples", "", limit, "data.limit samples all rows evenly, not the first ones")
    if len(names) > 1:
        draft.rows_known = False
        _mix(
            draft,
            [find_dataset_source(name, folder, info) for name in names],
            str(draft.flat.get("mix_strategy") or "concat"),
        )
    held_out = draft.flat.get("eval_dataset")
    if isinstance(held_out, str) and "," not in held_out:
        draft.carry("data.eval", find_dataset_source(held_out, folder, info)[0], "eval_dataset")
        draft.reach("eval_dataset")


def resolve_dataset_dir(folder: str, path: Path) -> str:
    """Return the path of a `dataset_dir`, relative to the current directory, as in LLaMA-Factory, or to the config's
    folder."""
    beside = str(path.parent / folder)
    exists = os.path.isfile(Path(folder) / INFO)
    return beside if not exists and os.path.isfile(Path(beside) / INFO) else folder


def _judge_sets(draft: ConfigDraft, key: str, names: list[str], folder: str, info: dict[str, Any]) -> None:
    """Record datasets that are not in dataset_info.json, and entries that LLaMA-Factory cannot use.

    get_dataset_list (0.9.5, data/parser.py) raises for the former, the converters for the latter.
    """
    for name in names:
        entry = info.get(name)
        if isinstance(entry, dict):
            _find_unnamed_columns(draft, key, name, entry, folder)
        if name not in info:
            suggestion = did_you_mean(name, list(info))
            draft.refuse_with(
                key,
                f"{Path(folder) / INFO} has no data set {name!r}{suggestion}",
                f"add an entry for {name}, or name one of {', '.join(list(info)[:NAMED])}",
            )
        elif not isinstance(entry, dict):
            draft.refuse_with(
                key, f"the entry {name!r} of {Path(folder) / INFO} is not a mapping", "name its file in it"
            )
        elif problem := _wrong_entry(entry, folder) or _wrong_stage(draft, entry) or _wrong_tags(entry, folder):
            draft.refuse_with(key, f"the entry {name!r} of {Path(folder) / INFO}: {problem[0]}", problem[1])


def _wrong_entry(entry: dict[str, Any], folder: str) -> tuple[str, str] | None:
    """Return (what is wrong with an entry of dataset_info.json, what to do) as far as it shows without the rows, or
    None."""
    formatting = entry.get("formatting", "alpaca")
    if formatting not in FORMATS:
        suggestion = did_you_mean(str(formatting), FORMATS)
        return f"formatting is {formatting!r}{suggestion}", f"write one of {', '.join(FORMATS)}"
    if not any(key in entry for key in SOURCES):
        return "it names no rows", "write file_name, or hf_hub_url"
    hubs = any(key in entry for key in SOURCES if key != "file_name")
    file = entry.get("file_name")
    if isinstance(file, str) and not hubs and not os.path.exists(Path(folder) / file):
        return f"there is no file {file}", f"put it into {folder}, or correct file_name"
    columns = entry.get("columns")
    roles = ROLES if isinstance(columns, dict) else ()
    for role in columns if isinstance(columns, dict) else ():
        if role not in roles:
            return f"columns has no {role!r}{did_you_mean(role, roles)}", f"its keys are {', '.join(roles)}"
    return None


RANKED = ("rm", "dpo")
"""Stages that learn from preference pairs."""


def _wrong_stage(draft: ConfigDraft, entry: dict[str, Any]) -> tuple[str, str] | None:
    """Return (what is wrong with an entry for this stage, what to do): `_get_merged_dataset` (0.9.5,
    data/loader.py)."""
    stage, ranking = draft.flat.get("stage") or "sft", entry.get("ranking") is True
    if draft.flat.get("do_train") is not True:
        return None
    columns = entry.get("columns") if isinstance(entry.get("columns"), dict) else {}
    if stage in RANKED and not ranking:
        return f"stage: {stage} needs ranking: true, which the entry does not set", "write ranking: true into it"
    if stage not in RANKED and ranking:
        return f"ranking is true, but stage: {stage} does not use pairs", "name rows with one answer each"
    missing = [name for name in ("chosen", "rejected") if ranking and not (columns or {}).get(name)]
    if missing:
        return f"columns names no {' and no '.join(missing)}", "name the columns of both answers"
    if stage == "kto" and not (columns or {}).get("kto_tag"):
        return "columns names no kto_tag, which stage: kto reads", "name the column that says true or false"
    return None


def _wrong_tags(entry: dict[str, Any], folder: str) -> tuple[str, str] | None:
    """Return (what is wrong with the tags of an entry, what to do), by the first rows of its file."""
    file = entry.get("file_name")
    if entry.get("formatting") not in ("sharegpt", "openai") or not isinstance(file, str):
        return None
    columns = entry.get("columns") if isinstance(entry.get("columns"), dict) else None
    tags = entry.get("tags") if isinstance(entry.get("tags"), dict) else None
    names = TAGS if tags is None else {name: tags.get(name) for name in TAGS}
    column = "conversations" if columns is None else columns.get("messages")
    lists = [row.get(column) for row in first_rows(Path(folder) / file)]
    turns = [turn for turn in lists if isinstance(turn, list) and turn and isinstance(turn[0], dict)]
    if not turns:
        return None
    for tag in ("role_tag", "content_tag"):
        if all(names[tag] not in turn[0] for turn in turns):
            existing = ", ".join(map(str, turns[0][0]))
            return (
                f"{tag} is {names[tag] or 'not given'}, but the turns of {file} have {existing}",
                f"write tags with {tag}",
            )
    first_roles = {
        next((role for message in turn if (role := message.get(names["role_tag"])) != names["system_tag"]), None)
        for turn in turns
    }
    if not first_roles & {names["user_tag"], names["observation_tag"], None}:
        roles = ", ".join(sorted(map(str, first_roles)))
        return (
            f"user_tag is {names['user_tag'] or 'not given'}, but the rows of {file} begin with {roles}",
            "write tags with user_tag and assistant_tag: rows that begin otherwise are skipped",
        )
    return None


def _find_unnamed_columns(draft: ConfigDraft, key: str, name: str, entry: dict[str, Any], folder: str) -> None:
    """Record columns with text that `columns` does not name: `columns` replaces all defaults."""
    columns, file = entry.get("columns"), entry.get("file_name")
    if entry.get("formatting", "alpaca") != "alpaca" or not isinstance(columns, dict) or not isinstance(file, str):
        return
    rows = first_rows(Path(folder) / file)
    for role, column in COLUMNS.items():
        is_used = role in columns or column in columns.values() or (role == "response" and entry.get("ranking"))
        if not is_used and any(isinstance(row.get(column), str) and row[column].strip() for row in rows):
            draft.setup.setdefault("columns_left_out", {})[column] = f"{name}: {role}"
            draft.places["columns_left_out"] = draft.place(key)


def parse_dataset_names(value: Any) -> list[str]:
    """Return the names of datasets, from a list or a comma-separated string; empty for anything else."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    valid = isinstance(names, list) and all(isinstance(name, str) and name for name in names)
    return names if valid and isinstance(names, list) else []


def _mix(draft: ConfigDraft, sources: list[tuple[str, str | None]], strategy: str) -> None:
    """Map several datasets: concatenation is expressed by `data.mix`; the number of rows taken by interleaving is
    not."""
    if any(layout is None for _, layout in sources):
        draft.lose("dataset", "SureFit reads the layouts of docs/data.md only")
    elif strategy != "concat" or not hf.map_data_mix(draft, [source for source, _ in sources[1:]], "dataset"):
        draft.lose("dataset", "data.mix sets how often each data set is repeated: write the number of passes")
    elif len({layout for _, layout in sources}) > 1:
        del draft.config["data.format"]  # auto detects each layout


def read_dataset_info(folder: str) -> dict[str, Any]:
    """Return the dataset_info.json of a folder; empty if there is none."""
    path = Path(folder) / INFO
    try:
        tree, _ = parse_yaml(read_config_text(path).replace("\t", " "), path) if os.path.isfile(path) else ({}, {})
    except ConfigError:
        return {}
    return tree if isinstance(tree, dict) else {}


def find_dataset_source(name: str, folder: Any, info: dict[str, Any]) -> tuple[str, str | None]:
    """Return (source of a dataset's rows, their layout); the layout is None if SureFit cannot read it as it is."""
    entry = info.get(name)
    if not isinstance(entry, dict):
        return name, None
    layout = str(entry.get("formatting") or "alpaca")
    default_layout = not entry.get("columns") and not entry.get("tags") and not entry.get("ranking")
    supported = layout if default_layout and layout in ("alpaca", "sharegpt") else None
    for key in ("hf_hub_url", "file_name"):
        if isinstance(entry.get(key), str):
            return (entry[key] if key == "hf_hub_url" else str(Path(str(folder)) / entry[key])), supported
    return name, None


TOOL = ToolSchema(
    name="llamafactory",
    keys=KEYS,
    known=TRAINING_ARGUMENTS | TRAINING_ARGUMENTS_4 | LLAMAFACTORY,
    gone=hf.GONE_BEFORE_5,
    once=hf.ONCE_BEFORE_5,
    defaults=DEFAULTS,
    finish=_finish,
    open_sections=hf.OPEN_SECTIONS,
    conflicts=check_conflicts,
    aliases=ALIASES,
    takes_repeated=False,  # OmegaConf: "found duplicate key"
)
