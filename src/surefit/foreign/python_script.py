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
from surefit.facts.setup import Place, Setup
from surefit.foreign import hf, peft_adapter, trl
from surefit.foreign.draft import Draft, Tool
from surefit.foreign.known import SEQ2SEQ, SFT_CONFIG, SFT_TRAINER, TRAINER, TRAINING_ARGUMENTS
from surefit.foreign.paths import missing
from surefit.foreign.python_calls import ARGUMENTS, OTHER_STAGES, TRAINERS, Call
from surefit.foreign.result import Lost

OPEN = ""
"""Stands for the value of an argument that is not known, where only its name is judged."""
TOGETHER = frozenset({
    "eval_strategy", "evaluation_strategy", "save_strategy", "eval_steps", "save_steps", "load_best_model_at_end",
    "fsdp", "deepspeed", "max_length", "max_seq_length", "packing",
})  # fmt: skip
"""Arguments that a check of several looks at: none is made where one of them is computed."""
GONE_FROM_TRAINER = {"tokenizer": "write processing_class"}
IN_SFT_CONFIG = (
    "chars_per_token", "dataset_batch_size", "dataset_kwargs", "dataset_num_proc", "dataset_text_field", "eval_packing",
    "max_seq_length", "model_init_kwargs", "neftune_noise_alpha", "num_of_sequences", "packing",
)  # fmt: skip
GONE_FROM_SFT_TRAINER = GONE_FROM_TRAINER | {
    name: f"write {'max_length' if name == 'max_seq_length' else name} in SFTConfig" for name in IN_SFT_CONFIG
}
SFT_GONE = {key: instead for key, instead in trl.GONE.items() if key != "torch_dtype"}
"""In a script torch_dtype belongs to the model."""
SINCE = {
    **dict.fromkeys(hf.GONE_BEFORE_5, ("transformers", ">=4.46")),
    **dict.fromkeys(hf.GONE_IN_5, ("transformers", ">=5")),
    **dict.fromkeys(IN_SFT_CONFIG, ("trl", ">=0.20")),
    "use_liger": ("trl", ">=0.20"),
}
"""Argument → (package, the versions that no longer take it)."""
ONCE = hf.ONCE_BEFORE_5 | hf.ONCE_IN_5
SFT_KEYS = {key: to for key, to in trl.KEYS.items() if key.partition(".")[0] in TRAINING_ARGUMENTS | SFT_CONFIG}
KEYS = {key: to for key, to in hf.KEYS.items() if key.partition(".")[0] in TRAINING_ARGUMENTS}
MERGED = ("gone", "ignored", "deprecated", "meant")


@dataclass
class Notes:
    """What has been read of a script so far; what several calls say of the same thing is not known."""

    path: Path
    setup: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    deprecated: dict[str, str] = field(default_factory=dict)
    meant: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    gone_imports: dict[str, str] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    problems: list[SureFitError] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    columns: dict[str, tuple[str, str]] = field(default_factory=dict)

    def say(self, attribute: str, value: Any, name: str, line: int) -> None:
        """The script says this about the run."""
        self.setup[attribute] = value
        self.places[attribute] = Place(name, str(self.path), line)

    def place(self, key: str, name: str, line: int | None) -> None:
        """Where something stands that a finding will be about."""
        self.places[key] = Place(name, str(self.path), line)

    def take(self, call: Call, draft: Draft, whole: bool, again: bool) -> None:
        """What the arguments of one call say, or only what is wrong with them."""
        prefix = f"{call.kind}.{f'{call.line}.' if again else ''}"
        for name in MERGED:
            entries = {f"{prefix}{key}": value for key, value in getattr(draft, name).items()}
            getattr(self, name).update(entries)
        self.unknown += [f"{prefix}{key}" for key in draft.unknown]
        for key in (*draft.gone, *draft.ignored, *draft.deprecated, *draft.unknown):
            self.place(f"{prefix}{key}", key, call.lines.get(key, call.line))
        self.problems += draft.problems
        for key, file in missing(call.known, self.path):
            self.missing[f"{prefix}{key}"] = file
            self.place(f"{prefix}{key}", key, call.lines.get(key))
        unread = sorted(call.computed & draft.tool.known) if call.kind not in TRAINERS else ()
        computed = [Lost(key, call.lines[key], None, "it is computed while the script runs") for key in unread]
        self.lost += [*draft.lost.values(), *computed]
        if whole:
            self.setup.update(draft.setup)
            self.places.update({name: draft.places[name] for name in draft.setup})

    def finished(self) -> Setup:
        """All of it."""
        return Setup(
            tool="python", places=self.places, gone=self.gone, unknown=tuple(self.unknown), meant=self.meant,
            ignored=self.ignored, deprecated=self.deprecated, missing=self.missing, gone_imports=self.gone_imports,
            **self.setup,
        )  # fmt: skip


def read_arguments(notes: Notes, calls: Iterable[Call], allows: Any) -> None:
    """TrainingArguments, LoraConfig and the trainers: every argument that is written out.

    Args:
        allows: (package, specifier) → whether the requirements beside the script admit such a version.
    """
    calls = list(calls)
    for kinds in ((*ARGUMENTS, *OTHER_STAGES), ("LoraConfig",), TRAINERS):
        found = [call for call in calls if call.kind in kinds]
        for call in found:
            draft = _draft(call, notes.path, allows)
            again = sum(other.kind == call.kind for other in found) > 1
            notes.take(call, draft, whole=len(found) == 1, again=again)


def _draft(call: Call, path: Path, allows: Any) -> Draft:
    tool = _aged(_tool(call), allows)
    known = {key: _plain(value) for key, value in call.known.items() if value is not None or tool.knows(key)}
    judged = {key: OPEN for key in call.given if key not in known and not tool.knows(key)}
    draft = Draft(tool, path, known | judged, call.lines)
    draft.read_all()
    if call.kind in OTHER_STAGES:
        draft.unknown.clear()
    return draft


def _plain(value: Any) -> Any:
    """Several numbers are a list to the tools; one, with a comma behind it, is a mistake."""
    return list(value) if isinstance(value, tuple) and len(value) != 1 else value


def _tool(call: Call) -> Tool:
    """The table that reads a call."""
    finish = partial(_finish, call)
    if call.kind == "LoraConfig":
        own = partial(_finish_lora, call)
        keys = {key: to for key, to in peft_adapter.KEYS.items() if key not in ("peft_type", "base_model_name_or_path")}
        return replace(peft_adapter.TOOL, keys=keys, finish=own, passes_over=_never)
    if call.kind in TRAINERS:
        sft = call.kind == "SFTTrainer"
        gone = GONE_FROM_SFT_TRAINER if sft else GONE_FROM_TRAINER
        return Tool("trainer", {}, SFT_TRAINER if sft else TRAINER, gone, conflicts=_nothing)
    table = replace(trl.TOOL, finish=finish, passes_over=_never, extensions=frozenset())
    table = replace(table, conflicts=_nothing if call.open or call.computed & TOGETHER else table.conflicts)
    if call.kind == "SFTConfig":
        once = ONCE | {"max_seq_length": SFT_KEYS["max_length"], "use_liger": SFT_KEYS["use_liger_kernel"]}
        return replace(table, keys=SFT_KEYS, known=TRAINING_ARGUMENTS | SFT_CONFIG, gone=SFT_GONE, once=once)
    known = TRAINING_ARGUMENTS | (SEQ2SEQ if call.kind.startswith("Seq2Seq") else frozenset())
    return replace(table, keys=KEYS, known=known, gone=hf.GONE_BEFORE_5 | hf.GONE_IN_5, once=ONCE)


def _aged(tool: Tool, allows: Any) -> Tool:
    """The table for the releases that the requirements ask for: what they still take is not gone."""
    kept = {key for key in tool.gone if key in SINCE and not allows(*SINCE[key])}
    keys = {**tool.keys, **{key: tool.once[key] for key in kept if key in tool.once}}
    gone = {key: instead for key, instead in tool.gone.items() if key not in kept}
    return replace(tool, keys=keys, known=tool.known | kept, gone=gone)


def _never(key: str) -> bool:
    return False


def _nothing(draft: Draft) -> None:
    return None


def _finish(call: Call, draft: Draft) -> None:
    """What several of the Trainer's arguments say together, as far as none of them is computed."""
    draft.whole_run = False
    hf.warmup(draft, "warmup_steps")
    hf.sharding(draft)
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
    if call.open or call.computed & {"max_steps", "num_train_epochs"}:
        draft.setup.pop("epochs", None)
    if call.kind == "SFTConfig":
        _finish_sft(draft)
    generates = call.kind.startswith("Seq2Seq") and call.known.get("predict_with_generate") is True
    if generates and draft.setup.get("eval_strategy") in ("steps", "epoch"):
        draft.say("generates_in_loop", True, "predict_with_generate")


def _finish_sft(draft: Draft) -> None:
    words = {("assistant_only_loss", True): "assistant", ("completion_only_loss", True): "completion"}
    for (key, value), loss_on in words.items():
        if draft.flat.get(key) is value:
            draft.say("loss_on", loss_on, key)


def _finish_lora(call: Call, draft: Draft) -> None:
    if not call.open and not call.computed & {"use_dora"}:
        draft.setup["adapter"] = "dora" if draft.flat.get("use_dora") is True else "lora"
        draft.places["adapter"] = Place("LoraConfig", str(draft.path), call.line)


def unusable(path: Path) -> ConfigError:
    """The file is a script, and none that trains."""
    return ConfigError(
        "not a file of a tool that SureFit knows: a Python script without a call that trains, loads or merges a model",
        code="E3019",
        path=path,
        help="checked are scripts that call transformers, TRL, PEFT or Unsloth; its calls may stand in another file",
    )
