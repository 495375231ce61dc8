"""How a script loads its model, which parts it trains, and which weights it merges the adapter into."""

from __future__ import annotations

import ast
from typing import Any

from surefit.importers.hf import STORAGE
from surefit.importers.python_calls import (
    ANY_ARGUMENTS,
    ANY_TRAINER,
    ARGUMENTS,
    FAST,
    NAMED,
    OTHER_STAGES,
    OTHER_TRAINERS,
    TRAINERS,
    ModelOrigins,
    ScriptCall,
    find_model_loads,
    read_call,
)
from surefit.importers.python_script import ScriptNotes
from surefit.importers.python_source import Scope, ScriptSource

MERGES = ("merge_and_unload", "merge_adapter")
TYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
LOADED_IN = ("float32", "float16", "bfloat16")


def read_models(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall]) -> None:
    """Note the trained model, its quantization, and a merge."""
    models = ModelOrigins(source, calls)
    stage = next((call for call in calls if call.kind in (*OTHER_STAGES, *OTHER_TRAINERS)), None)
    if stage is not None:
        notes.say("preferences", True, stage.kind, stage.line)
    trained_load = _find_trained_load(calls, models)
    loads = find_model_loads(calls)
    main = trained_load or (loads[0] if len(loads) == 1 else None)
    named_trainer = _find_named_trainer(calls)
    if named_trainer is not None:
        notes.say("base_model", named_trainer.known["model"], "model", named_trainer.lines["model"])
    elif main is not None:
        _read_load(notes, source, main, trains=_trains(source, calls))
        _read_scaling(notes, main, calls)
    _read_adapter(notes, source, calls, named_trainer or trained_load)
    _read_merge(notes, source, models)


def _find_trained_load(calls: list[ScriptCall], models: ModelOrigins) -> ScriptCall | None:
    """Return the load whose model all trainers of the script train, if there is exactly one."""
    trainers = [call for call in calls if call.kind in TRAINERS and "model" in call.given]
    loads = {models.single(*call.given["model"], call.line) for call in trainers}
    return loads.pop() if len(loads) == 1 else None


def _find_named_trainer(calls: list[ScriptCall]) -> ScriptCall | None:
    """Return the trainer that loads its model by name, unless another trainer trains a different model."""
    trainers = [call for call in calls if call.kind in ANY_TRAINER]
    names = {call.known.get("model") if call.kind in NAMED else None for call in trainers}
    name = names.pop() if len(names) == 1 else None
    return trainers[0] if isinstance(name, str) and name else None


def _trains(source: ScriptSource, calls: list[ScriptCall]) -> bool:
    """Return whether the script trains: one that only generates may place weights anywhere."""
    if any(call.kind in (*ANY_ARGUMENTS, *ANY_TRAINER) for call in calls):
        return True
    return any(
        isinstance(node.func, ast.Attribute) and node.func.attr == "backward" for node, _ in source.each(ast.Call)
    )


def _read_load(notes: ScriptNotes, source: ScriptSource, call: ScriptCall, trains: bool) -> None:
    for argument in ("pretrained_model_name_or_path", "model_name"):
        name = call.known.get(argument)
        if isinstance(name, str) and name:
            notes.say("base_model", name, argument if argument == "model_name" else call.kind, call.lines[argument])
    _say(notes, call, "revision", "base_revision", str)
    _say(notes, call, "attn_implementation", "attention", str)
    for argument in ("torch_dtype", "dtype"):
        dtype = call.known.get(argument)
        if TYPES.get(str(dtype), dtype) in LOADED_IN:
            notes.say("weights_dtype", TYPES.get(str(dtype), dtype), argument, call.lines[argument])
    if trains:
        _read_placement(notes, call)
    quantization = _quantization(source, call)
    if quantization:
        for attribute, (value, name, line) in quantization.items():
            notes.say(attribute, value, name, line)


def _say(notes: ScriptNotes, call: ScriptCall, argument: str, attribute: str, kind: type) -> None:
    value = call.known.get(argument)
    if isinstance(value, kind) and value:
        notes.say(attribute, value, argument, call.lines[argument])


def _read_placement(notes: ScriptNotes, call: ScriptCall) -> None:
    """Note where a device map, or max_memory, places the weights."""
    places, memory = call.known.get("device_map"), call.known.get("max_memory")
    if isinstance(places, str) and places:
        notes.say("device_map", places, "device_map", call.lines["device_map"])
        if isinstance(memory, dict) and memory.get("cpu") not in (None, 0, "0", "0GB", "0GiB"):
            notes.say("cpu_offload", True, "max_memory", call.lines["max_memory"])
    elif isinstance(places, dict):
        devices = {str(place) for place in places.values()}
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            notes.say("device_map", "custom", "device_map", call.lines["device_map"])
            notes.say("cpu_offload", True, "device_map", call.lines["device_map"])


FoundSettings = dict[str, tuple[Any, str, int]]
"""Attribute → (value, its name in the script, line)."""


def _quantization(source: ScriptSource, call: ScriptCall) -> FoundSettings | None:
    """Return how a load quantizes the model; empty if it does not, None if that is unknown."""
    name = call.model_name
    if isinstance(name, str) and name.lower().endswith("-bnb-4bit"):
        argument = "model_name" if "model_name" in call.known else call.kind
        return {"quantization": ("nf4", argument, call.line)}
    if "quantization_config" in call.given:
        return _read_bnb_config(source, *call.given["quantization_config"])
    is_unsloth = call.kind.startswith(FAST)
    for argument, kind in (("load_in_4bit", "nf4" if is_unsloth else "fp4"), ("load_in_8bit", "int8")):
        if call.known.get(argument) is True:
            return {"quantization": (kind, argument, call.lines[argument])}
    # Unsloth loads in 4 bits by default.
    unknown = (
        call.open
        or call.computed & {"load_in_4bit", "load_in_8bit"}
        or (is_unsloth and "load_in_4bit" not in call.known)
    )
    return None if unknown else {}


def _read_bnb_config(source: ScriptSource, node: ast.expr, scope: Scope) -> FoundSettings | None:
    """Return the settings of a BitsAndBytesConfig; None if they are unknown."""
    if source.value(node, scope) is None:
        return {}
    call, call_scope = source.expression(node, scope)
    origin = source.origin(call.func, call_scope) if isinstance(call, ast.Call) else None
    if not isinstance(call, ast.Call) or not (origin or "").endswith(".BitsAndBytesConfig"):
        return None
    config = read_call(source, "BitsAndBytesConfig", call, call_scope)
    if config.known.get("load_in_8bit") is True:
        return {"quantization": ("int8", "load_in_8bit", config.lines["load_in_8bit"])}
    if config.known.get("load_in_4bit") is not True:
        return None
    kind = "fp4" if config.silent("bnb_4bit_quant_type") else config.known.get("bnb_4bit_quant_type")
    if kind not in ("nf4", "fp4"):
        return None
    settings: FoundSettings = {"quantization": (kind, "load_in_4bit", config.lines["load_in_4bit"])}
    compute, storage = config.known.get("bnb_4bit_compute_dtype"), config.known.get("bnb_4bit_quant_storage")
    if compute in LOADED_IN:
        settings["quant_compute_dtype"] = (compute, "bnb_4bit_compute_dtype", config.lines["bnb_4bit_compute_dtype"])
    elif config.silent("bnb_4bit_compute_dtype"):
        settings["quant_compute_dtype"] = ("float32", "bnb_4bit_compute_dtype (by default)", config.line)
    if storage in STORAGE:
        settings["quant_storage"] = (storage, "bnb_4bit_quant_storage", config.lines["bnb_4bit_quant_storage"])
    return settings


def _read_scaling(notes: ScriptNotes, load: ScriptCall, calls: list[ScriptCall]) -> None:
    """Note float16 weights in a run without loss scaling."""
    arguments = [call for call in calls if call.kind in ARGUMENTS]
    plain_arguments = len(arguments) == 1 and arguments[0].kind != "SFTConfig"  # SFTConfig turns bf16 on by default
    if not plain_arguments or notes.setup.get("weights_dtype") != "float16" or notes.setup.get("quantization"):
        return
    unscaled = all(arguments[0].silent(name) or arguments[0].known.get(name) is False for name in ("fp16", "bf16"))
    if unscaled and not arguments[0].open and "deepspeed" not in arguments[0].given:
        place = notes.places["weights_dtype"]
        notes.say("dtype", "float16", place.name, place.line or load.line)


def _read_adapter(
    notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall], trained: ScriptCall | None
) -> None:
    """Note whether an adapter is trained, and the dtype in which PEFT stores it."""
    wrappers = [call for call in calls if call.kind == "get_peft_model"]
    four_bit = notes.setup.get("quantization") in ("nf4", "fp4")
    cast = any(node.name == "LoraLayer" for node, _ in source.each(ast.alias))
    if wrappers and four_bit and not cast and wrappers[0].silent("autocast_adapter_dtype"):
        notes.say("adapter_dtype", "float32", "get_peft_model", wrappers[0].line)
    text = source.text
    without_adapter = not any(word in text for word in ("peft", "lora", "Lora", "add_adapter", "unsloth"))
    if trained is not None and without_adapter:
        trainer = next(call for call in calls if call.kind in ANY_TRAINER)
        notes.say("adapter", "full", trainer.kind, trainer.line)


def _read_merge(notes: ScriptNotes, source: ScriptSource, models: ModelOrigins) -> None:
    """Note into which load of the base model an adapter is merged."""
    for node, scope in source.each(ast.Call):
        if not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in MERGES:
            base = models.single(node.func.value, scope, node.lineno)
            settings = _quantization(source, base) if base is not None else None
            if settings:
                notes.say("merge_into", "quantized", f"{node.func.attr}()", node.lineno)
                notes.setup.setdefault("quantization", settings["quantization"][0])
                return
            if settings is not None:
                notes.say("merge_into", "original", f"{node.func.attr}()", node.lineno)
        elif node.func.attr == "save_pretrained_merged":
            call = read_call(source, node.func.attr, node, scope)
            if str(call.known.get("save_method", "")).startswith("merged_4bit"):
                notes.say("merge_into", "quantized", "save_method", call.lines["save_method"])
                return
