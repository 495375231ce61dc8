"""A Python training script: the arguments of transformers, TRL and PEFT that are written out in it, as one `Setup`.

A computed value is unknown, and checks that need it are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from surefit.core.errors import ConfigError, SureFitError
from surefit.facts.setup import SettingLocation, Setup
from surefit.importers import hf, peft_adapter, trl
from surefit.importers.config_mapping import ConfigDraft, SetupNotes, ToolSchema
from surefit.importers.known import SFT_CONFIG, TRAINING_ARGUMENTS, key_replacements
from surefit.importers.paths import find_missing_files
from surefit.importers.preferences import map_objective
from surefit.importers.python_calls import (
    ANY_ARGUMENTS,
    ANY_TRAINER,
    FAST,
    LORA,
    NAMED,
    PRETRAINED,
    UNSLOTH_LORA,
    ScriptCall,
)
from surefit.importers.releases import NAMES, TargetReleases, Verdict, release_table
from surefit.importers.result import UnmappedKey

OPEN = ""
"""The value of an argument whose value is unknown and whose name alone is checked."""
TOGETHER = frozenset({
    "eval_strategy", "evaluation_strategy", "save_strategy", "eval_steps", "save_steps", "load_best_model_at_end",
    "fsdp", "deepspeed", "max_length", "max_seq_length", "packing",
})  # fmt: skip
"""Arguments of checks that combine several: such a check is skipped if one of them is computed."""
IN_SFT_CONFIG = (
    "chars_per_token", "dataset_batch_size", "dataset_kwargs", "dataset_num_proc", "dataset_text_field", "eval_packing",
    "max_seq_length", "model_init_kwargs", "neftune_noise_alpha", "num_of_sequences", "packing",
)  # fmt: skip
INSTEAD = hf.GONE_BEFORE_5 | hf.GONE_IN_5 | trl.GONE | key_replacements("arguments gone")
"""Removed argument → what to write instead."""
GONE_FROM_LOADS = key_replacements("from_pretrained gone")
"""Arguments of a model's `from_pretrained` in transformers 4 that 5.0.0 and 5.23.0 no longer consume before they build
the model. A model's own code (trust_remote_code) may still accept them."""
UNSLOTHS = frozenset({"max_seq_length"})
"""Arguments that Unsloth's configs accept in addition to TRL's."""
RENAMED_BY_UNSLOTH = frozenset({
    "use_liger_loss", "vllm_guided_decoding_regex", "wandb_log_unique_prompts", "warmup_ratio", "push_to_hub_token",
    "per_gpu_train_batch_size", "per_gpu_eval_batch_size",
})  # fmt: skip
"""Arguments that Unsloth passes on under the new name (unsloth 2026.10, models/rl_config_compat.py); it drops other old
names."""
ONCE = hf.ONCE_BEFORE_5 | hf.ONCE_IN_5
SFT_KEYS = {key: to for key, to in trl.KEYS.items() if key.partition(".")[0] in TRAINING_ARGUMENTS | SFT_CONFIG}
KEYS = {key: to for key, to in hf.KEYS.items() if key.partition(".")[0] in TRAINING_ARGUMENTS}
LORA_KEYS = {key: to for key, to in peft_adapter.KEYS.items() if key not in ("peft_type", "base_model_name_or_path")}
MERGED = ("gone", "ignored", "deprecated", "meant")
BEST_FIRST: tuple[Verdict, ...] = ("taken", "deprecated", "gone", "not yet", "unknown")


@dataclass
class ScriptNotes(SetupNotes):
    """The facts read from a script so far; what several calls set differently is unknown."""

    path: Path
    gone_imports: dict[str, str] = field(default_factory=dict)
    lost: list[UnmappedKey] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    columns: dict[str, tuple[str, str]] = field(default_factory=dict)
    judges: bool = False

    def say(self, attribute: str, value: Any, name: str, line: int) -> None:
        """Record what the script sets for an attribute of the run, and where."""
        self.setup[attribute] = value
        self.places[attribute] = SettingLocation(name, str(self.path), line)

    def place(self, key: str, name: str, line: int | None) -> None:
        """Record the location of something that a finding will be about."""
        self.places[key] = SettingLocation(name, str(self.path), line)

    def take(self, call: ScriptCall, draft: ConfigDraft, whole: bool, again: bool) -> None:
        """Add what the arguments of one call set, or, unless `whole`, only the problems with them."""
        prefix = f"{call.kind}.{f'{call.line}.' if again else ''}"
        for name in MERGED:
            entries = {f"{prefix}{key}": value for key, value in getattr(draft, name).items()}
            getattr(self, name).update(entries)
        self.unknown += [f"{prefix}{key}" for key in draft.unknown]
        self.passed_over += [f"{prefix}{key}" for key in draft.passed_over]
        for key in (*draft.gone, *draft.ignored, *draft.deprecated, *draft.unknown, *draft.passed_over):
            self.place(f"{prefix}{key}", key, call.lines.get(key, call.line))
        self.problems += draft.problems
        for key, file in find_missing_files(call.known, self.path):
            self.missing[f"{prefix}{key}"] = file
            self.place(f"{prefix}{key}", key, call.lines.get(key))
        checked = call.kind not in ANY_TRAINER
        unread = sorted(call.computed & draft.tool.known) if checked else ()
        computed_keys = [
            UnmappedKey(key, call.lines[key], None, "it is computed when the script runs") for key in unread
        ]
        self.lost += [*draft.lost.values(), *computed_keys]
        if whole:
            self.setup.update(draft.setup)
            self.places.update({name: draft.places[name] for name in draft.setup})

    def finished(self) -> Setup:
        """Return everything recorded so far as a `Setup`."""
        return self.to_setup("python", gone_imports=self.gone_imports)


def read_arguments(notes: ScriptNotes, calls: Iterable[ScriptCall], judge: TargetReleases) -> None:
    """Note every argument of TrainingArguments, LoraConfig and the trainers that is written out.

    Args:
        judge: the library releases that the script is checked against.
    """
    calls = list(calls)
    for kinds in (ANY_ARGUMENTS, LORA, ANY_TRAINER):
        matches = [call for call in calls if call.kind in kinds]
        for call in matches:
            draft = _draft(call, notes.path, judge)
            notes.judges |= bool(_classes(call.kind))
            repeated = sum(match.kind == call.kind for match in matches) > 1
            notes.take(call, draft, whole=len(matches) == 1, again=repeated)


def read_loads(notes: ScriptNotes, calls: Iterable[ScriptCall], judge: TargetReleases) -> None:
    """Note arguments of `from_pretrained` that transformers 5 passes on to the model, which raises at them."""
    release = judge.release("transformers")
    if release is None or judge.is_open("transformers") or judge.unsloth or int(release.partition(".")[0]) < 5:
        return
    for call in calls:
        accepts_any = call.kind.startswith((*FAST, "PeftModel", "AutoPeftModel")) or "trust_remote_code" in call.given
        for name in GONE_FROM_LOADS if call.kind.endswith(PRETRAINED) and not accepts_any else ():
            if name in call.given:
                key = f"{call.kind}.{call.line}.{name}"
                notes.gone[key] = f"{GONE_FROM_LOADS[name]} (transformers 5.0 removed it)"
                notes.place(key, name, call.lines[name])
                notes.judges = True


def _draft(call: ScriptCall, path: Path, judge: TargetReleases) -> ConfigDraft:
    verdicts = _verdicts(call, judge) if _is_there(call, judge) else {}
    tool = _schema_for_releases(_tool(call), call, verdicts, judge)
    values = {key: _to_plain_value(value) for key, value in call.known.items() if value is not None or tool.knows(key)}
    if call.kind in NAMED and isinstance(values.get("model"), str):
        values.pop("model")  # read with the models
    names_only = {key: OPEN for key in call.given if key not in values and not tool.knows(key)}
    if call.kind == UNSLOTH_LORA:
        # It accepts more arguments than LoraConfig, and any other name.
        values, names_only = {key: value for key, value in values.items() if key in LORA_KEYS}, {}
    early_keys = {key for key in call.given if verdicts.get(key) == "not yet"}
    draft = ConfigDraft(
        tool, path, {key: value for key, value in (values | names_only).items() if key not in early_keys}, call.lines
    )
    draft.read_all()
    if call.kind == "DPOConfig" and judge.reaches("trl", trl.DPO_WITHOUT):
        trl.mark_unread_by_dpo(draft)
    for key in tool.deprecated.keys() & call.given.keys() - values.keys():  # whatever its value is
        draft.deprecated[key] = tool.deprecated[key]
    draft.problems += [_too_early(call, key, path, judge) for key in sorted(early_keys)]
    if not _is_there(call, judge):
        package = release_table()["classes"][call.kind]["package"]
        draft.unknown.clear()
        draft.problems.append(ConfigError(
            f"{NAMES[package]} {judge.release(package)} has no {call.kind}: it came with {judge.came_with(call.kind)}",
            code="E3505", path=path, line=call.line, field=call.kind,
            help=f"use the later release in {judge.source.get(package, 'the requirements')}",
        ))  # fmt: skip
    if _is_unsloths(call, judge):
        _accept_unsloth_names(draft)
    return draft


def _is_there(call: ScriptCall, judge: TargetReleases) -> bool:
    """Return whether the checked release has the class at all."""
    return call.kind not in release_table()["classes"] or judge.has(call.kind) != "not yet"


def _classes(kind: str) -> tuple[str, ...]:
    """Return the classes in the table of releases whose arguments a call may have."""
    entry = release_table()["classes"].get(kind)
    if entry is None:
        return ()
    extends = entry["training_arguments"] or kind == "Seq2SeqTrainingArguments"
    return (kind, "TrainingArguments") if extends else (kind, "Trainer") if kind == "Seq2SeqTrainer" else (kind,)


def _verdicts(call: ScriptCall, judge: TargetReleases) -> dict[str, Verdict]:
    """Return argument → its status in the checked release; if several classes have it, the most permissive status."""
    names = _classes(call.kind)
    if _is_unsloths(call, judge) and call.kind.endswith("Trainer"):
        config = f"{call.kind.removesuffix('Trainer')}Config"
        names = (*names, *_classes(config))
    keys = {*call.given, *(key for name in names for key in judge.keys(name, "taken", "deprecated"))}
    verdicts = {key: min((judge.takes(name, key) for name in names), key=BEST_FIRST.index) for key in keys if names}
    return verdicts


def _is_unsloths(call: ScriptCall, judge: TargetReleases) -> bool:
    """Return whether Unsloth replaces TRL's class with its own."""
    return judge.unsloth and release_table()["classes"].get(call.kind, {}).get("package") == "trl"


def _too_early(call: ScriptCall, key: str, path: Path, judge: TargetReleases) -> SureFitError:
    """Return the error for an argument that only a later release has."""
    name = next(class_name for class_name in _classes(call.kind) if judge.takes(class_name, key) == "not yet")
    package = release_table()["classes"][name]["package"]
    older = {"eval_strategy": "evaluation_strategy", "processing_class": "tokenizer", "max_length": "max_seq_length"}
    help_text = f"write {older[key]}" if key in older else "remove it"
    return ConfigError(
        f"{NAMES[package]} {judge.release(package)} has no {key} in {call.kind}: it came with {judge.since(name, key)}",
        code="E3500", path=path, line=call.lines.get(key, call.line), field=key,
        help=f"{help_text}, or use the later release in {judge.source.get(package, 'the requirements')}",
    )  # fmt: skip


def _accept_unsloth_names(draft: ConfigDraft) -> None:
    """Accept the argument names that Unsloth's classes accept: they pass some old names on under the new ones and drop
    the others with a warning of their own; a config does so with unknown names too."""
    is_config = not draft.tool.name.endswith("trainer")
    for key in [key for key in draft.gone if not is_config or key in RENAMED_BY_UNSLOTH]:
        draft.deprecated[key] = draft.gone.pop(key)
    for key in list(draft.gone):
        draft.gone.pop(key)
        draft.ignored[key] = "Unsloth ignores it: this release of TRL has no such argument"
    if is_config:
        draft.passed_over += draft.unknown
        draft.unknown.clear()


def _to_plain_value(value: Any) -> Any:
    """Return several numbers as a list, as the tools read them; a tuple of one comes from a stray comma and stays."""
    return list(value) if isinstance(value, tuple) and len(value) != 1 else value


def _tool(call: ScriptCall) -> ToolSchema:
    """Return the table that reads a call's arguments, before the releases decide which of them exist."""
    if call.kind in LORA:
        return replace(peft_adapter.TOOL, keys=LORA_KEYS, finish=partial(_finish_lora, call), passes_over=_never)
    if call.kind in ANY_TRAINER:
        keys = {key: SFT_KEYS[key] for key in ("packing",)} | {"max_seq_length": SFT_KEYS["max_length"]}
        return ToolSchema("trainer", keys if call.kind == "SFTTrainer" else {}, frozenset(), {}, conflicts=_nothing)
    table = replace(trl.TOOL, finish=partial(_finish, call), passes_over=_never, extensions=frozenset())
    table = replace(table, conflicts=_nothing if call.open or call.computed & TOGETHER else table.conflicts)
    renamed = ONCE | {"max_seq_length": SFT_KEYS["max_length"], "use_liger": SFT_KEYS["use_liger_kernel"]}
    return replace(table, keys=SFT_KEYS if call.kind == "SFTConfig" else KEYS, once=renamed)


def _schema_for_releases(
    tool: ToolSchema, call: ScriptCall, verdicts: dict[str, Verdict], judge: TargetReleases
) -> ToolSchema:
    """Return the table of the arguments that the checked releases accept."""
    if not verdicts:
        return tool
    names = _classes(call.kind)
    unsloth_keys = UNSLOTHS if _is_unsloths(call, judge) else frozenset()
    if unsloth_keys and call.kind.endswith("Trainer"):
        unsloth_keys |= {"tokenizer"}
    accepted = frozenset(key for key, verdict in verdicts.items() if verdict in ("taken", "deprecated")) | unsloth_keys
    replaced: dict[str, dict[str, str]] = {"gone": {}, "deprecated": {}}
    for key, verdict in verdicts.items():
        if verdict in replaced and key not in unsloth_keys and any(judge.takes(name, key) == verdict for name in names):
            replaced[verdict][key] = _replacement_text(call, key, judge)
    keys = {
        key: mapping
        for key, mapping in tool.keys.items()
        if key.partition(".")[0] in accepted and key not in replaced["deprecated"]
    }
    keys |= {
        key: mapping
        for key, mapping in tool.once.items()
        if key in accepted and key not in {**keys, **replaced["deprecated"]}
    }
    if "max_seq_length" in accepted and "max_seq_length" not in replaced["deprecated"]:
        keys["max_seq_length"] = SFT_KEYS["max_length"]
    more_keys = frozenset() if tool.name != "peft" else tool.known
    always_gone = {key: text for key, text in tool.gone.items() if verdicts.get(key, "unknown") == "unknown"}
    always_gone.pop("torch_dtype", None)  # in a script it belongs to the model
    return replace(
        tool,
        keys=keys,
        known=accepted | more_keys,
        gone=always_gone | replaced["gone"],
        deprecated=replaced["deprecated"],
    )


def _replacement_text(call: ScriptCall, key: str, judge: TargetReleases) -> str:
    """Return what to write for an argument that is removed or deprecated, and since which release."""
    name = next(
        class_name for class_name in _classes(call.kind) if judge.takes(class_name, key) in ("gone", "deprecated")
    )
    instead = INSTEAD.get(key, "remove it")
    if call.kind == "SFTTrainer" and key in IN_SFT_CONFIG:
        instead = f"write {'max_length' if key == 'max_seq_length' else key} in SFTConfig"
    elif key == "tokenizer":
        instead = "write processing_class"
    return f"{instead} ({judge.since(name, key)} removed it)"


def _never(key: str) -> bool:
    return False


def _nothing(draft: ConfigDraft) -> None:
    return None


def _finish(call: ScriptCall, draft: ConfigDraft) -> None:
    """Add what several of the Trainer's arguments mean together, if none of them is computed."""
    draft.whole_run = False
    hf.map_warmup(draft, "warmup_steps")
    hf.map_sharding(draft, None if call.open else call.computed)
    for steps, strategy, default in (("eval_steps", "eval_strategy", "no"), ("save_steps", "save_strategy", "steps")):
        old_name = "evaluation_strategy" if strategy == "eval_strategy" else strategy
        if call.open or call.computed & {strategy, old_name}:
            draft.setup.pop(steps, None)
        elif draft.setup.get(strategy, default) != "steps" and strategy not in draft.refused:
            draft.without_effect([steps], f"{strategy} is {draft.setup.get(strategy, default)}, not steps")
    if call.open or "save_total_limit" in call.computed:
        # An unknown limit may be set.
        draft.setup.pop("save_steps", None)
        draft.setup.pop("save_strategy", None)
    eval_key = "evaluation_strategy" if "evaluation_strategy" in call.given else "eval_strategy"
    all_known = not call.open and not call.computed & {"eval_strategy", "evaluation_strategy", "save_strategy"}
    if all_known and {draft.setup.get("eval_strategy", "no"), draft.setup.get("save_strategy", "steps")} == {"no"}:
        reason = f"no checkpoint is saved or evaluated: save_strategy and {eval_key} are no"
        draft.without_effect([key for key in ("load_best_model_at_end",) if draft.flat.get(key) is True], reason)
    if call.open or call.computed & {"max_steps", "num_train_epochs"}:
        draft.setup.pop("epochs", None)
    elif draft.setup.get("max_steps"):
        draft.without_effect(["num_train_epochs"], "max_steps overrides it")
    if call.kind == "SFTConfig":
        _finish_sft(draft)
    elif not call.open:
        _finish_preferences(call, draft)
    generates = call.kind.startswith("Seq2Seq") and call.known.get("predict_with_generate") is True
    if generates and draft.setup.get("eval_strategy") in ("steps", "epoch"):
        draft.say("generates_in_loop", True, "predict_with_generate")


def _finish_preferences(call: ScriptCall, draft: ConfigDraft) -> None:
    """Note the objective of a config of TRL's preference trainers; a value that is computed is unknown."""
    objective = trl.find_objective(call.known, (), call.kind) if call.kind in PREFERENCES else None
    if objective is None or "loss_type" in call.computed:
        return
    unknown = {"beta": "beta", "target_margin": "simpo_gamma", "label_smoothing": "label_smoothing"}
    map_objective(draft, replace(objective, key=call.kind))
    for attribute, argument in unknown.items():
        if argument in call.computed:
            draft.setup.pop(attribute, None)


PREFERENCES = ("DPOConfig", "CPOConfig", "ORPOConfig", "KTOConfig", "RewardConfig")


def _finish_sft(draft: ConfigDraft) -> None:
    words = {("assistant_only_loss", True): "assistant", ("completion_only_loss", True): "completion"}
    for (key, value), loss_on in words.items():
        if draft.flat.get(key) is value:
            draft.say("loss_on", loss_on, key)


def _finish_lora(call: ScriptCall, draft: ConfigDraft) -> None:
    if not call.open and not call.computed & {"use_dora"}:
        draft.setup["adapter"] = "dora" if draft.flat.get("use_dora") is True else "lora"
        draft.places["adapter"] = SettingLocation(call.kind.rpartition(".")[2], str(draft.path), call.line)
    if call.kind != UNSLOTH_LORA:
        peft_adapter.check_single_name(draft, "target_modules", draft.flat.get("target_modules"))


def not_a_training_script(path: Path) -> ConfigError:
    """Return the error for a script that does not train."""
    return ConfigError(
        "not a file of a tool that SureFit knows: a Python script without a call that trains, loads or merges a model, "
        "or prepares a data set",
        code="E3019",
        path=path,
        help="SureFit checks scripts that call transformers, TRL, PEFT or Unsloth; the calls may be in another file",
    )
