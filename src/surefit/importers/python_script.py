"""A Python training script: the arguments of transformers, TRL and PEFT that are written out in it, as one `Setup`.

What is computed is not known, and what needs it is not judged.
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
from surefit.importers.config_mapping import ConfigDraft, ToolSchema
from surefit.importers.known import SFT_CONFIG, TRAINING_ARGUMENTS
from surefit.importers.paths import find_missing_files
from surefit.importers.python_calls import (
    ARGUMENTS,
    FAST,
    LORA,
    NAMED,
    OTHER_STAGES,
    OTHER_TRAINERS,
    PRETRAINED,
    TRAINERS,
    UNSLOTH_LORA,
    ScriptCall,
)
from surefit.importers.releases import NAMES, TargetReleases, Verdict, release_table
from surefit.importers.result import UnmappedKey

OPEN = ""
"""Stands for the value of an argument that is not known, where only its name is judged."""
TOGETHER = frozenset({
    "eval_strategy", "evaluation_strategy", "save_strategy", "eval_steps", "save_steps", "load_best_model_at_end",
    "fsdp", "deepspeed", "max_length", "max_seq_length", "packing",
})  # fmt: skip
"""Arguments that a check of several looks at: none is made where one of them is computed."""
IN_SFT_CONFIG = (
    "chars_per_token", "dataset_batch_size", "dataset_kwargs", "dataset_num_proc", "dataset_text_field", "eval_packing",
    "max_seq_length", "model_init_kwargs", "neftune_noise_alpha", "num_of_sequences", "packing",
)  # fmt: skip
INSTEAD = hf.GONE_BEFORE_5 | hf.GONE_IN_5 | trl.GONE | {
    "max_prompt_length": "take it out: leave rows whose prompt is too long out of the data set",
    "max_completion_length": "write max_length",
    "max_target_length": "write max_length",
    "generate_during_eval": "take it out: a TrainerCallback can generate",
    "rpo_alpha": 'write loss_type=["sigmoid", "sft"] with loss_weights',
    "reference_free": "take it out: CPOTrainer is without a reference",
    "ref_model_init_kwargs": "load the reference model, and pass it as ref_model",
    "use_liger_loss": "write use_liger_kernel",
    "wandb_log_unique_prompts": "write log_unique_prompts",
    "vllm_guided_decoding_regex": "write vllm_structured_outputs_regex",
    "dispatch_batches": "write accelerator_config",
    "split_batches": "write accelerator_config",
}  # fmt: skip
"""Argument that is gone → what to write instead."""
GONE_FROM_LOADS = {
    "load_in_4bit": "write quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    "load_in_8bit": "write quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
    "use_flash_attention_2": 'write attn_implementation="flash_attention_2"',
    "use_auth_token": "write token",
    "resume_download": "take it out: downloads are always resumed",
}  # fmt: skip
"""Arguments of a model's `from_pretrained` in transformers 4 that 5.0.0 and 5.23.0 no longer take out before they
build the model. Code of the model's own (trust_remote_code) may still take them."""
UNSLOTHS = frozenset({"max_seq_length"})
"""What Unsloth's own configs take beside TRL's."""
RENAMED_BY_UNSLOTH = frozenset({
    "use_liger_loss", "vllm_guided_decoding_regex", "wandb_log_unique_prompts", "warmup_ratio", "push_to_hub_token",
    "per_gpu_train_batch_size", "per_gpu_eval_batch_size",
})  # fmt: skip
"""What they hand on under the new name (unsloth 2026.10, models/rl_config_compat.py); other old names are left out."""
ONCE = hf.ONCE_BEFORE_5 | hf.ONCE_IN_5
SFT_KEYS = {key: to for key, to in trl.KEYS.items() if key.partition(".")[0] in TRAINING_ARGUMENTS | SFT_CONFIG}
KEYS = {key: to for key, to in hf.KEYS.items() if key.partition(".")[0] in TRAINING_ARGUMENTS}
LORA_KEYS = {key: to for key, to in peft_adapter.KEYS.items() if key not in ("peft_type", "base_model_name_or_path")}
MERGED = ("gone", "ignored", "deprecated", "meant")
BEST_FIRST: tuple[Verdict, ...] = ("taken", "deprecated", "gone", "not yet", "unknown")


@dataclass
class ScriptNotes:
    """What has been read of a script so far; what several calls say of the same thing is not known."""

    path: Path
    setup: dict[str, Any] = field(default_factory=dict)
    places: dict[str, SettingLocation] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    deprecated: dict[str, str] = field(default_factory=dict)
    out_of_range: dict[str, str] = field(default_factory=dict)
    meant: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    gone_imports: dict[str, str] = field(default_factory=dict)
    lost: list[UnmappedKey] = field(default_factory=list)
    problems: list[SureFitError] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    columns: dict[str, tuple[str, str]] = field(default_factory=dict)
    judges: bool = False

    def say(self, attribute: str, value: Any, name: str, line: int) -> None:
        """The script says this about the run."""
        self.setup[attribute] = value
        self.places[attribute] = SettingLocation(name, str(self.path), line)

    def place(self, key: str, name: str, line: int | None) -> None:
        """Where something stands that a finding will be about."""
        self.places[key] = SettingLocation(name, str(self.path), line)

    def take(self, call: ScriptCall, draft: ConfigDraft, whole: bool, again: bool) -> None:
        """What the arguments of one call say, or only what is wrong with them."""
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
        judged = call.kind not in (*TRAINERS, *OTHER_TRAINERS)
        unread = sorted(call.computed & draft.tool.known) if judged else ()
        computed = [UnmappedKey(key, call.lines[key], None, "it is computed while the script runs") for key in unread]
        self.lost += [*draft.lost.values(), *computed]
        if whole:
            self.setup.update(draft.setup)
            self.places.update({name: draft.places[name] for name in draft.setup})

    def finished(self) -> Setup:
        """All of it."""
        return Setup(
            tool="python", places=self.places, gone=self.gone, unknown=tuple(self.unknown), meant=self.meant,
            ignored=self.ignored, deprecated=self.deprecated, missing=self.missing, gone_imports=self.gone_imports,
            passed_over=tuple(self.passed_over), out_of_range=self.out_of_range, **self.setup,
        )  # fmt: skip


def read_arguments(notes: ScriptNotes, calls: Iterable[ScriptCall], judge: TargetReleases) -> None:
    """TrainingArguments, LoraConfig and the trainers: every argument that is written out.

    Args:
        judge: the releases that count.
    """
    calls = list(calls)
    for kinds in ((*ARGUMENTS, *OTHER_STAGES), LORA, (*TRAINERS, *OTHER_TRAINERS)):
        found = [call for call in calls if call.kind in kinds]
        for call in found:
            draft = _draft(call, notes.path, judge)
            notes.judges |= bool(_classes(call.kind))
            again = sum(other.kind == call.kind for other in found) > 1
            notes.take(call, draft, whole=len(found) == 1, again=again)


def read_loads(notes: ScriptNotes, calls: Iterable[ScriptCall], judge: TargetReleases) -> None:
    """Arguments of `from_pretrained` that transformers 5 hands on to the model, which stops at them."""
    release = judge.release("transformers")
    if release is None or judge.is_open("transformers") or judge.unsloth or int(release.partition(".")[0]) < 5:
        return
    for call in calls:
        own = call.kind.startswith((*FAST, "PeftModel", "AutoPeftModel")) or "trust_remote_code" in call.given
        for name in GONE_FROM_LOADS if call.kind.endswith(PRETRAINED) and not own else ():
            if name in call.given:
                key = f"{call.kind}.{call.line}.{name}"
                notes.gone[key] = f"{GONE_FROM_LOADS[name]} (transformers 5.0 no longer takes it)"
                notes.place(key, name, call.lines[name])
                notes.judges = True


def _draft(call: ScriptCall, path: Path, judge: TargetReleases) -> ConfigDraft:
    verdicts = _verdicts(call, judge) if _is_there(call, judge) else {}
    tool = _schema_for_releases(_tool(call), call, verdicts, judge)
    known = {key: _to_plain_value(value) for key, value in call.known.items() if value is not None or tool.knows(key)}
    if call.kind in NAMED and isinstance(known.get("model"), str):
        known.pop("model")  # read with the models
    judged = {key: OPEN for key in call.given if key not in known and not tool.knows(key)}
    if call.kind == UNSLOTH_LORA:
        # It takes more than LoraConfig does, and any other name.
        known, judged = {key: value for key, value in known.items() if key in LORA_KEYS}, {}
    early = {key for key in call.given if verdicts.get(key) == "not yet"}
    draft = ConfigDraft(
        tool, path, {key: value for key, value in (known | judged).items() if key not in early}, call.lines
    )
    draft.read_all()
    for key in tool.deprecated.keys() & call.given.keys() - known.keys():  # whatever its value is
        draft.deprecated[key] = tool.deprecated[key]
    draft.problems += [_too_early(call, key, path, judge) for key in sorted(early)]
    if not _is_there(call, judge):
        package = release_table()["classes"][call.kind]["package"]
        draft.unknown.clear()
        draft.problems.append(ConfigError(
            f"{NAMES[package]} {judge.release(package)} has no {call.kind}: it came with {judge.came_with(call.kind)}",
            code="E3505", path=path, line=call.line, field=call.kind,
            help=f"ask for the later release in {judge.source.get(package, 'the requirements')}",
        ))  # fmt: skip
    if _is_unsloths(call, judge):
        _accept_unsloth_names(draft)
    return draft


def _is_there(call: ScriptCall, judge: TargetReleases) -> bool:
    """Whether the release that counts has the class at all."""
    return call.kind not in release_table()["classes"] or judge.has(call.kind) != "not yet"


def _classes(kind: str) -> tuple[str, ...]:
    """The classes in the table of releases whose arguments a call may have."""
    entry = release_table()["classes"].get(kind)
    if entry is None:
        return ()
    more = entry["training_arguments"] or kind == "Seq2SeqTrainingArguments"
    return (kind, "TrainingArguments") if more else (kind, "Trainer") if kind == "Seq2SeqTrainer" else (kind,)


def _verdicts(call: ScriptCall, judge: TargetReleases) -> dict[str, Verdict]:
    """Argument → what becomes of it, in the release that counts; of several classes the kindest."""
    names = _classes(call.kind)
    if _is_unsloths(call, judge) and call.kind.endswith("Trainer"):
        config = f"{call.kind.removesuffix('Trainer')}Config"
        names = (*names, *_classes(config))
    keys = {*call.given, *(key for name in names for key in judge.keys(name, "taken", "deprecated"))}
    found = {key: min((judge.takes(name, key) for name in names), key=BEST_FIRST.index) for key in keys if names}
    return found


def _is_unsloths(call: ScriptCall, judge: TargetReleases) -> bool:
    """Whether Unsloth has put a class of its own in the place of TRL's."""
    return judge.unsloth and release_table()["classes"].get(call.kind, {}).get("package") == "trl"


def _too_early(call: ScriptCall, key: str, path: Path, judge: TargetReleases) -> SureFitError:
    """An argument of a later release than the one that is asked for."""
    name = next(each for each in _classes(call.kind) if judge.takes(each, key) == "not yet")
    package = release_table()["classes"][name]["package"]
    older = {"eval_strategy": "evaluation_strategy", "processing_class": "tokenizer", "max_length": "max_seq_length"}
    help_text = f"write {older[key]}" if key in older else "take it out"
    return ConfigError(
        f"{NAMES[package]} {judge.release(package)} has no {key} in {call.kind}: it came with {judge.since(name, key)}",
        code="E3500", path=path, line=call.lines.get(key, call.line), field=key,
        help=f"{help_text}, or ask for the later release in {judge.source.get(package, 'the requirements')}",
    )  # fmt: skip


def _accept_unsloth_names(draft: ConfigDraft) -> None:
    """Unsloth's classes take old names, hand some on under the new ones, and leave the others out with a line of
    their own; so they do with names that nobody knows, where it is a config."""
    is_config = not draft.tool.name.endswith("trainer")
    for key in [key for key in draft.gone if not is_config or key in RENAMED_BY_UNSLOTH]:
        draft.deprecated[key] = draft.gone.pop(key)
    for key in list(draft.gone):
        draft.gone.pop(key)
        draft.ignored[key] = "Unsloth leaves it out, for this release of TRL has no such argument"
    if is_config:
        draft.passed_over += draft.unknown
        draft.unknown.clear()


def _to_plain_value(value: Any) -> Any:
    """Several numbers are a list to the tools; one, with a comma behind it, is a mistake."""
    return list(value) if isinstance(value, tuple) and len(value) != 1 else value


def _tool(call: ScriptCall) -> ToolSchema:
    """The table that reads a call, apart from which arguments there are."""
    if call.kind in LORA:
        return replace(peft_adapter.TOOL, keys=LORA_KEYS, finish=partial(_finish_lora, call), passes_over=_never)
    if call.kind in (*TRAINERS, *OTHER_TRAINERS):
        keys = {key: SFT_KEYS[key] for key in ("packing",)} | {"max_seq_length": SFT_KEYS["max_length"]}
        return ToolSchema("trainer", keys if call.kind == "SFTTrainer" else {}, frozenset(), {}, conflicts=_nothing)
    table = replace(trl.TOOL, finish=partial(_finish, call), passes_over=_never, extensions=frozenset())
    table = replace(table, conflicts=_nothing if call.open or call.computed & TOGETHER else table.conflicts)
    once = ONCE | {"max_seq_length": SFT_KEYS["max_length"], "use_liger": SFT_KEYS["use_liger_kernel"]}
    return replace(table, keys=SFT_KEYS if call.kind == "SFTConfig" else KEYS, once=once)


def _schema_for_releases(
    tool: ToolSchema, call: ScriptCall, verdicts: dict[str, Verdict], judge: TargetReleases
) -> ToolSchema:
    """The table for the releases that count."""
    if not verdicts:
        return tool
    names = _classes(call.kind)
    own = UNSLOTHS if _is_unsloths(call, judge) else frozenset()
    if own and call.kind.endswith("Trainer"):
        own |= {"tokenizer"}
    taken = frozenset(key for key, verdict in verdicts.items() if verdict in ("taken", "deprecated")) | own
    old: dict[str, dict[str, str]] = {"gone": {}, "deprecated": {}}
    for key, verdict in verdicts.items():
        if verdict in old and key not in own and any(judge.takes(name, key) == verdict for name in names):
            old[verdict][key] = _replacement_text(call, key, judge)
    keys = {key: to for key, to in tool.keys.items() if key.partition(".")[0] in taken and key not in old["deprecated"]}
    keys |= {key: to for key, to in tool.once.items() if key in taken and key not in {**keys, **old["deprecated"]}}
    if "max_seq_length" in taken and "max_seq_length" not in old["deprecated"]:
        keys["max_seq_length"] = SFT_KEYS["max_length"]
    kept = frozenset() if tool.name != "peft" else tool.known
    never = {key: text for key, text in tool.gone.items() if verdicts.get(key, "unknown") == "unknown"}
    never.pop("torch_dtype", None)  # in a script it belongs to the model
    return replace(tool, keys=keys, known=taken | kept, gone=never | old["gone"], deprecated=old["deprecated"])


def _replacement_text(call: ScriptCall, key: str, judge: TargetReleases) -> str:
    """What to write for an argument that is gone, or will be, and since which release."""
    name = next(each for each in _classes(call.kind) if judge.takes(each, key) in ("gone", "deprecated"))
    instead = INSTEAD.get(key, "take it out")
    if call.kind == "SFTTrainer" and key in IN_SFT_CONFIG:
        instead = f"write {'max_length' if key == 'max_seq_length' else key} in SFTConfig"
    elif key == "tokenizer":
        instead = "write processing_class"
    return f"{instead} ({judge.since(name, key)} no longer takes it)"


def _never(key: str) -> bool:
    return False


def _nothing(draft: ConfigDraft) -> None:
    return None


def _finish(call: ScriptCall, draft: ConfigDraft) -> None:
    """What several of the Trainer's arguments say together, as far as none of them is computed."""
    draft.whole_run = False
    hf.map_warmup(draft, "warmup_steps")
    hf.map_sharding(draft, None if call.open else call.computed)
    for steps, strategy, default in (("eval_steps", "eval_strategy", "no"), ("save_steps", "save_strategy", "steps")):
        old = "evaluation_strategy" if strategy == "eval_strategy" else strategy
        if call.open or call.computed & {strategy, old}:
            draft.setup.pop(steps, None)
        elif draft.setup.get(strategy, default) != "steps" and strategy not in draft.refused:
            draft.without_effect([steps], f"{strategy} is {draft.setup.get(strategy, default)}, not steps")
    if call.open or "save_total_limit" in call.computed:
        # A limit that is not known may be there.
        draft.setup.pop("save_steps", None)
        draft.setup.pop("save_strategy", None)
    eval_key = "evaluation_strategy" if "evaluation_strategy" in call.given else "eval_strategy"
    silent = not call.open and not call.computed & {"eval_strategy", "evaluation_strategy", "save_strategy"}
    if silent and {draft.setup.get("eval_strategy", "no"), draft.setup.get("save_strategy", "steps")} == {"no"}:
        why = f"no checkpoint is saved and none is measured: save_strategy is no, and {eval_key} too"
        draft.without_effect([key for key in ("load_best_model_at_end",) if draft.flat.get(key) is True], why)
    if call.open or call.computed & {"max_steps", "num_train_epochs"}:
        draft.setup.pop("epochs", None)
    elif draft.setup.get("max_steps"):
        draft.without_effect(["num_train_epochs"], "max_steps takes its place")
    if call.kind == "SFTConfig":
        _finish_sft(draft)
    generates = call.kind.startswith("Seq2Seq") and call.known.get("predict_with_generate") is True
    if generates and draft.setup.get("eval_strategy") in ("steps", "epoch"):
        draft.say("generates_in_loop", True, "predict_with_generate")


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
    """The file is a script, and none that trains."""
    return ConfigError(
        "not a file of a tool that SureFit knows: a Python script without a call that trains, loads or merges a model, "
        "or prepares a data set",
        code="E3019",
        path=path,
        help="checked are scripts that call transformers, TRL, PEFT or Unsloth; its calls may stand in another file",
    )
