"""The calls of a training script that say how it trains: their arguments, and what they were handed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from surefit.importers.python_source import COMPUTED, Binding, Scope, ScriptSource, reaching_bindings

LIBRARIES = ("transformers", "trl", "peft", "unsloth")
ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")
TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer")
OTHER_STAGES = (
    "BCOConfig", "CPOConfig", "DPOConfig", "GKDConfig", "GRPOConfig", "KTOConfig", "OnlineDPOConfig", "ORPOConfig",
    "PPOConfig", "PRMConfig", "RewardConfig", "RLOOConfig", "XPOConfig", "NashMDConfig", "IterativeSFTConfig",
)  # fmt: skip
"""TRL's other trainers: TrainingArguments, and keys of their own."""
OTHER_TRAINERS = tuple(f"{name.removesuffix('Config')}Trainer" for name in OTHER_STAGES)
UNSLOTH_LORA = "FastLanguageModel.get_peft_model"
LORA = ("LoraConfig", UNSLOTH_LORA)
CONFIGS = ("LoraConfig", "BitsAndBytesConfig")
_TRAINER = ("model", "args", "data_collator", "train_dataset", "eval_dataset")
FAST = ("FastLanguageModel", "FastModel", "FastVisionModel")
"""Unsloth's loaders."""
_FAST_FIRST = ("model_name", "max_seq_length", "dtype", "load_in_4bit")
FIRST = dict.fromkeys((*ARGUMENTS, *OTHER_STAGES), ("output_dir",)) | dict.fromkeys(TRAINERS, _TRAINER) | {
    "BitsAndBytesConfig": ("load_in_8bit", "load_in_4bit"),
    **{f"{name}.from_pretrained": _FAST_FIRST for name in FAST},
    **{name: ("model",) for name in OTHER_TRAINERS if name != "PPOTrainer"}, UNSLOTH_LORA: ("model",),
    "PeftModel.from_pretrained": ("model", "model_id"), "get_peft_model": ("model", "peft_config"),
    "DataCollatorForLanguageModeling": ("tokenizer", "mlm", "mlm_probability"),
    "prepare_model_for_kbit_training": ("model",), "prepare_model_for_int8_training": ("model",),
}  # fmt: skip
"""Callable → the names of its first parameters."""
WRAPPERS = ("get_peft_model", "prepare_model_for_kbit_training", "prepare_model_for_int8_training")
"""Functions that return the model they are handed first."""
METHODS = ("to", "cuda", "eval", "train", "half", "float", "bfloat16", "requires_grad_", "merge_and_unload")
"""Methods of a model that return it."""
PRETRAINED = "from_pretrained"
NAMED = ("SFTTrainer", *(name for name in OTHER_TRAINERS if name != "PPOTrainer"))
"""Trainers that load a model themselves where they are given its name; it is their first parameter."""


@dataclass(frozen=True, eq=False)
class ScriptCall:
    """One call.

    Attributes:
        kind: the name of what is called, as its library has it; AutoModelForCausalLM.from_pretrained in full.
        node, scope: the call itself.
        known: argument → its value, where that is written out.
        lines: argument → its line.
        given: argument → its expression, with its scope.
        open: further arguments come from somewhere else (`**kwargs`).
    """

    kind: str
    node: ast.Call
    scope: Scope
    known: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    given: dict[str, tuple[ast.expr, Scope]] = field(default_factory=dict)
    open: bool = False

    @property
    def line(self) -> int:
        """Where it begins."""
        return self.node.lineno

    @property
    def computed(self) -> frozenset[str]:
        """The arguments whose values are not known."""
        return frozenset(self.given) - frozenset(self.known)

    def silent(self, *names: str) -> bool:
        """Whether it leaves these at their defaults."""
        return not self.open and not set(names) & set(self.given)


def read_call(source: ScriptSource, kind: str, node: ast.Call, scope: Scope) -> ScriptCall:
    """A call with its arguments."""
    call = ScriptCall(kind, node, scope)
    unpacked = False
    first = FIRST.get(kind, ("pretrained_model_name_or_path",) if kind.endswith(PRETRAINED) else ())
    for name, value in zip(first, node.args, strict=False):
        unpacked |= isinstance(value, ast.Starred)
        _take(call, source, name, value, value.lineno, scope)
    unpacked |= len(node.args) > len(first) or any(isinstance(each, ast.Starred) for each in node.args)
    for keyword in node.keywords:
        if keyword.arg is not None:
            _take(call, source, keyword.arg, keyword.value, keyword.lineno, scope)
        else:
            unpacked |= not _unpack(call, source, keyword.value, scope)
    return ScriptCall(kind, node, scope, call.known, call.lines, call.given, unpacked)


def _unpack(call: ScriptCall, source: ScriptSource, node: ast.expr, scope: Scope) -> bool:
    """The entries of `**settings`; False where they are not all written out."""
    name = node.id if isinstance(node, ast.Name) else None
    inside, at = source.expression(node, scope)
    if not isinstance(inside, ast.Dict) or name in source.changed:
        return False
    whole = True
    for key, value in zip(inside.keys, inside.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            _take(call, source, key.value, value, key.lineno, at)
        else:
            whole = False
    return whole


def _take(call: ScriptCall, source: ScriptSource, name: str, node: ast.expr, line: int, scope: Scope) -> None:
    call.given[name] = (node, scope)
    call.lines[name] = line
    value = source.value(node, scope)
    if value is not COMPUTED:
        call.known[name] = value


def find_calls(source: ScriptSource) -> Iterator[ScriptCall]:
    """Every call that says how a model is loaded, adapted or trained."""
    for node, scope in source.each(ast.Call):
        kind = _kind(source.origin(node.func, scope))
        if kind:
            yield read_call(source, kind, node, scope)


def _kind(origin: str | None) -> str | None:
    root, _, rest = (origin or "").partition(".")
    if root not in LIBRARIES or not rest:
        return None
    *_, owner, leaf = ("", *rest.split("."))
    if leaf == PRETRAINED:
        return f"{owner}.{leaf}" if _is_model(owner) else None
    if root == "unsloth" and leaf == "get_peft_model" and owner.startswith("Fast"):
        return UNSLOTH_LORA
    wanted = leaf in (*ARGUMENTS, *OTHER_STAGES, *TRAINERS, *OTHER_TRAINERS, *CONFIGS, *WRAPPERS)
    return leaf if wanted else None


def _is_model(name: str) -> bool:
    model = name.startswith(("AutoModelFor", "AutoPeftModelFor", "PeftModel")) or name in (
        "AutoModel",
        *FAST,
    )
    return model or name.endswith(("ForCausalLM", "ForConditionalGeneration"))


class ModelOrigins:
    """Which `from_pretrained` the model in an expression comes from."""

    def __init__(self, source: ScriptSource, calls: list[ScriptCall]) -> None:
        self.source = source
        self.calls = {call.node: call for call in calls}

    def of(self, node: ast.expr | None, scope: Scope, line: int, depth: int = 0) -> frozenset[ScriptCall | None]:
        """The loads that it may come from; None among them stands for one that is not found."""
        if node is None or depth > 20:
            return frozenset({None})
        if isinstance(node, ast.IfExp):
            return self.of(node.body, scope, line, depth + 1) | self.of(node.orelse, scope, line, depth + 1)
        if isinstance(node, ast.Call):
            return self._of_call(node, scope, line, depth + 1)
        if isinstance(node, ast.Attribute) and node.attr == "model":
            return self._of_trainer(node.value, scope, line, depth + 1)
        found = scope.find(node.id) if isinstance(node, ast.Name) else None
        if found is None:
            return frozenset({None})
        at, bindings = found
        here = reaching_bindings(bindings, line) if at is scope else bindings
        each = [self._of_binding(binding, at, depth + 1) for binding in here]
        return frozenset().union(*each) if each else frozenset({None})

    def single(self, node: ast.expr | None, scope: Scope, line: int) -> ScriptCall | None:
        """The one load that it comes from, if it can be told."""
        found = self.of(node, scope, line)
        return next(iter(found)) if len(found) == 1 else None

    def _of_binding(self, binding: Binding, scope: Scope, depth: int) -> frozenset[ScriptCall | None]:
        if not isinstance(binding.value, ast.expr) or binding.element not in (None, 0):
            return frozenset({None})
        return self.of(binding.value, scope, binding.line, depth)

    def _of_call(self, node: ast.Call, scope: Scope, line: int, depth: int) -> frozenset[ScriptCall | None]:
        call = self.calls.get(node)
        first = (
            node.args[0]
            if node.args
            else next((k.value for k in node.keywords if k.arg in ("model", "base_model")), None)
        )
        if call is not None and call.kind.endswith(PRETRAINED):
            return self.of(first, scope, line, depth) if call.kind.startswith("PeftModel") else frozenset({call})
        if call is not None and call.kind in WRAPPERS:
            return self.of(first, scope, line, depth)
        if isinstance(node.func, ast.Attribute):
            origin = self.source.origin(node.func, scope) or ""
            if origin.startswith("unsloth.Fast") and origin.endswith(".get_peft_model"):
                return self.of(first, scope, line, depth)
            if node.func.attr in METHODS:
                return self.of(node.func.value, scope, line, depth)
        return frozenset({None})

    def _of_trainer(self, node: ast.expr, scope: Scope, line: int, depth: int) -> frozenset[ScriptCall | None]:
        inside, _, _ = self.source.before(node, scope, line)
        call = self.calls.get(inside) if isinstance(inside, ast.Call) else None
        if call is None or call.kind not in TRAINERS or "model" not in call.given:
            return frozenset({None})
        return self.of(*call.given["model"], call.line, depth)
