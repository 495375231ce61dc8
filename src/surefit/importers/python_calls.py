"""The calls of a training script that determine how it trains: their arguments, and the models passed to them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from surefit.importers.python_source import COMPUTED, Binding, Scope, ScriptSource, argument_of, reaching_bindings

LIBRARIES = ("transformers", "trl", "peft", "unsloth")
ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")
TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer")
OTHER_STAGES = (
    "BCOConfig", "CPOConfig", "DPOConfig", "GKDConfig", "GRPOConfig", "KTOConfig", "OnlineDPOConfig", "ORPOConfig",
    "PPOConfig", "PRMConfig", "RewardConfig", "RLOOConfig", "XPOConfig", "NashMDConfig", "IterativeSFTConfig",
)  # fmt: skip
"""Configs of TRL's other trainers, which add keys of their own to TrainingArguments."""
OTHER_TRAINERS = tuple(f"{name.removesuffix('Config')}Trainer" for name in OTHER_STAGES)
ANY_ARGUMENTS, ANY_TRAINER = (*ARGUMENTS, *OTHER_STAGES), (*TRAINERS, *OTHER_TRAINERS)
UNSLOTH_LORA = "FastLanguageModel.get_peft_model"
LORA = ("LoraConfig", UNSLOTH_LORA)
CONFIGS = ("LoraConfig", "BitsAndBytesConfig")
_TRAINER = ("model", "args", "data_collator", "train_dataset", "eval_dataset")
FAST = ("FastLanguageModel", "FastModel", "FastVisionModel")
"""Unsloth's loaders."""
_FAST_FIRST = ("model_name", "max_seq_length", "dtype", "load_in_4bit")
FIRST = dict.fromkeys(ANY_ARGUMENTS, ("output_dir",)) | dict.fromkeys(TRAINERS, _TRAINER) | {
    "BitsAndBytesConfig": ("load_in_8bit", "load_in_4bit"),
    **{f"{name}.from_pretrained": _FAST_FIRST for name in FAST},
    **{name: ("model",) for name in OTHER_TRAINERS if name != "PPOTrainer"}, UNSLOTH_LORA: ("model",),
    "PeftModel.from_pretrained": ("model", "model_id"), "get_peft_model": ("model", "peft_config"),
    "DataCollatorForLanguageModeling": ("tokenizer", "mlm", "mlm_probability"),
    "prepare_model_for_kbit_training": ("model",), "prepare_model_for_int8_training": ("model",),
}  # fmt: skip
"""Callable → names of its first parameters."""
WRAPPERS = ("get_peft_model", "prepare_model_for_kbit_training", "prepare_model_for_int8_training")
"""Functions that return the model passed as their first argument."""
METHODS = ("to", "cuda", "eval", "train", "half", "float", "bfloat16", "requires_grad_", "merge_and_unload")
"""Methods of a model that return the model."""
PRETRAINED = "from_pretrained"
NAMED = ("SFTTrainer", *(name for name in OTHER_TRAINERS if name != "PPOTrainer"))
"""Trainers that load a model by name; the model is their first parameter."""


@dataclass(frozen=True, eq=False)
class ScriptCall:
    """One call in a script.

    Attributes:
        kind: name of the callee in its library; AutoModelForCausalLM.from_pretrained in full.
        node, scope: the call's node and its scope.
        known: argument → its value, for arguments that are written out.
        lines: argument → its line.
        given: argument → its expression and the scope of that expression.
        open: whether further arguments may come from elsewhere (`**kwargs`).
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
        """First line of the call."""
        return self.node.lineno

    @property
    def computed(self) -> frozenset[str]:
        """Arguments with unknown values."""
        return frozenset(self.given) - frozenset(self.known)

    @property
    def model_name(self) -> Any:
        """The model that the call names; None where it names none, or the name is not written out."""
        return self.known.get("pretrained_model_name_or_path", self.known.get("model_name"))

    def silent(self, *names: str) -> bool:
        """Return whether the call leaves these arguments at their defaults."""
        return not self.open and not set(names) & set(self.given)


def read_call(source: ScriptSource, kind: str, node: ast.Call, scope: Scope) -> ScriptCall:
    """Return a call with its arguments."""
    call = ScriptCall(kind, node, scope)
    unpacked = False
    parameters = FIRST.get(kind, ("pretrained_model_name_or_path",) if kind.endswith(PRETRAINED) else ())
    for name, value in zip(parameters, node.args, strict=False):
        unpacked |= isinstance(value, ast.Starred)
        _take(call, source, name, value, value.lineno, scope)
    unpacked |= len(node.args) > len(parameters) or any(isinstance(argument, ast.Starred) for argument in node.args)
    for keyword in node.keywords:
        if keyword.arg is not None:
            _take(call, source, keyword.arg, keyword.value, keyword.lineno, scope)
        else:
            unpacked |= not _unpack(call, source, keyword.value, scope)
    return ScriptCall(kind, node, scope, call.known, call.lines, call.given, unpacked)


def _unpack(call: ScriptCall, source: ScriptSource, node: ast.expr, scope: Scope) -> bool:
    """Add the entries of `**settings` to a call; return False if they are not all written out."""
    name = node.id if isinstance(node, ast.Name) else None
    settings, settings_scope = source.expression(node, scope)
    if not isinstance(settings, ast.Dict) or name in source.changed:
        return False
    complete = True
    for key, value in zip(settings.keys, settings.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            _take(call, source, key.value, value, key.lineno, settings_scope)
        else:
            complete = False
    return complete


def _take(call: ScriptCall, source: ScriptSource, name: str, node: ast.expr, line: int, scope: Scope) -> None:
    call.given[name] = (node, scope)
    call.lines[name] = line
    value = source.value(node, scope)
    if value is not COMPUTED:
        call.known[name] = value


def find_calls(source: ScriptSource) -> Iterator[ScriptCall]:
    """Yield every call that loads, adapts or trains a model."""
    for node, scope in source.each(ast.Call):
        kind = _kind(source.origin(node.func, scope))
        if kind:
            yield read_call(source, kind, node, scope)


def find_model_loads(calls: Iterable[ScriptCall]) -> list[ScriptCall]:
    """Return the calls that load a model; one that adds a saved adapter to it does not count."""
    return [call for call in calls if call.kind.endswith(PRETRAINED) and not call.kind.startswith("PeftModel")]


def _kind(origin: str | None) -> str | None:
    root, _, path = (origin or "").partition(".")
    if root not in LIBRARIES or not path:
        return None
    *_, owner, leaf = ("", *path.split("."))
    if leaf == PRETRAINED:
        return f"{owner}.{leaf}" if _is_model(owner) else None
    if root == "unsloth" and leaf == "get_peft_model" and owner.startswith("Fast"):
        return UNSLOTH_LORA
    is_relevant = leaf in (*ANY_ARGUMENTS, *ANY_TRAINER, *CONFIGS, *WRAPPERS)
    return leaf if is_relevant else None


def _is_model(name: str) -> bool:
    model = name.startswith(("AutoModelFor", "AutoPeftModelFor", "PeftModel")) or name in (
        "AutoModel",
        *FAST,
    )
    return model or name.endswith(("ForCausalLM", "ForConditionalGeneration"))


class ModelOrigins:
    """Finds the `from_pretrained` call that a model in an expression comes from."""

    def __init__(self, source: ScriptSource, calls: list[ScriptCall]) -> None:
        self.source = source
        self.calls = {call.node: call for call in calls}

    def of(self, node: ast.expr | None, scope: Scope, line: int, depth: int = 0) -> frozenset[ScriptCall | None]:
        """Return the loads that a model may come from; None in the set stands for an unknown one."""
        if node is None or depth > 20:
            return frozenset({None})
        if isinstance(node, ast.IfExp):
            return self.of(node.body, scope, line, depth + 1) | self.of(node.orelse, scope, line, depth + 1)
        if isinstance(node, ast.Call):
            return self._of_call(node, scope, line, depth + 1)
        if isinstance(node, ast.Attribute) and node.attr == "model":
            return self._of_trainer(node.value, scope, line, depth + 1)
        match = scope.find(node.id) if isinstance(node, ast.Name) else None
        if match is None:
            return frozenset({None})
        binding_scope, bindings = match
        reaching = reaching_bindings(bindings, line) if binding_scope is scope else bindings
        origins = [self._of_binding(binding, binding_scope, depth + 1) for binding in reaching]
        return frozenset().union(*origins) if origins else frozenset({None})

    def single(self, node: ast.expr | None, scope: Scope, line: int) -> ScriptCall | None:
        """Return the load that a model comes from, if there is exactly one."""
        loads = self.of(node, scope, line)
        return next(iter(loads)) if len(loads) == 1 else None

    def _of_binding(self, binding: Binding, scope: Scope, depth: int) -> frozenset[ScriptCall | None]:
        if not isinstance(binding.value, ast.expr) or binding.element not in (None, 0):
            return frozenset({None})
        return self.of(binding.value, scope, binding.line, depth)

    def _of_call(self, node: ast.Call, scope: Scope, line: int, depth: int) -> frozenset[ScriptCall | None]:
        call = self.calls.get(node)
        model = argument_of(node, "model", 0) or argument_of(node, "base_model")
        if call is not None and call.kind.endswith(PRETRAINED):
            return self.of(model, scope, line, depth) if call.kind.startswith("PeftModel") else frozenset({call})
        if call is not None and call.kind in WRAPPERS:
            return self.of(model, scope, line, depth)
        if isinstance(node.func, ast.Attribute):
            origin = self.source.origin(node.func, scope) or ""
            if origin.startswith("unsloth.Fast") and origin.endswith(".get_peft_model"):
                return self.of(model, scope, line, depth)
            if node.func.attr in METHODS:
                return self.of(node.func.value, scope, line, depth)
        return frozenset({None})

    def _of_trainer(self, node: ast.expr, scope: Scope, line: int, depth: int) -> frozenset[ScriptCall | None]:
        target, _, _ = self.source.before(node, scope, line)
        call = self.calls.get(target) if isinstance(target, ast.Call) else None
        if call is None or call.kind not in TRAINERS or "model" not in call.given:
            return frozenset({None})
        return self.of(*call.given["model"], call.line, depth)
