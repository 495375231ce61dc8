"""Checks of a script's calls against each other: models, adapters, collators, callbacks, columns and turn markers.

Each finding is an error that a library of the script raises, by its source. Values that cannot be resolved are not
checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefit.core.errors import ConfigError, did_you_mean
from surefit.importers.known import key_set
from surefit.importers.python_calls import (
    ANY_TRAINER,
    FAST,
    PRETRAINED,
    UNSLOTH_LORA,
    ModelOrigins,
    ScriptCall,
    find_model_loads,
    read_call,
)
from surefit.importers.python_conflicts import EVALUATES, find_trainer_arguments
from surefit.importers.python_script import ScriptNotes
from surefit.importers.python_source import Scope, ScriptSource, argument_of, last_name
from surefit.importers.releases import TargetReleases
from surefit.importers.turn_markers import UNSLOTH_TEMPLATES, marker_of, marker_of_model

ADAPTED = ("get_peft_model", UNSLOTH_LORA, "PeftModel.from_pretrained")
"""Calls that return a model with an adapter."""
PREPARES = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
WITH_REFERENCE = ("DPOTrainer", "KTOTrainer", "BCOTrainer", "OnlineDPOTrainer")
MASKED = "DataCollatorForLanguageModeling"
PADS_ONLY = ("DataCollatorWithPadding", "DefaultDataCollator", "default_data_collator")
"""transformers' collators that create no labels."""
NO_FOLDERS = key_set("True true False false yes no None none auto latest last")
"""Texts meant as a switch that the Trainer reads as a folder's name."""
PAIRS = dict.fromkeys(("DPOTrainer", "ORPOTrainer", "CPOTrainer", "RewardTrainer"), ("chosen", "rejected"))
NEEDED = PAIRS | dict.fromkeys(("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer"), ("prompt",))
"""Trainer → the columns that it reads from every row (TRL, docs/source/dataset_formats.md)."""
OWN_COLLATOR_UNPACKED = ">=0.19"
"""TRL releases whose SFTTrainer accepts no custom collator together with padding-free packing."""


def read_faults(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall], judge: TargetReleases) -> None:
    """Add the findings about conflicting calls to the notes."""
    trainers = [call for call in calls if call.kind in ANY_TRAINER]
    models = ModelOrigins(source, calls)
    for trainer in trainers:
        arguments = find_trainer_arguments(source, trainer, calls)
        notes.problems += _references(notes, source, trainer)
        notes.problems += _columns(notes, source, trainer)
        notes.problems += _collators(notes, source, trainer, arguments, models, judge)
        notes.problems += _callbacks(notes, source, trainer, arguments)
        notes.problems += _metrics(notes, source, trainer, arguments)
        notes.problems += _adapted_twice(notes, source, trainer, calls, judge)
    notes.problems += _prepared_late(notes, source, calls)
    notes.problems += _two_widths(notes, calls)
    notes.problems += _resumes(notes, source)
    notes.problems += _templates(notes, source)
    notes.problems += _markers(notes, source, calls)


def resolve_callee(source: ScriptSource, given: tuple[ast.expr, Scope], line: int) -> tuple[str, ast.expr, Scope]:
    """Return the dotted name of an argument or of the function that creates it, with its expression and scope."""
    target, target_scope, _ = source.before(*given, line)
    function = target.func if isinstance(target, ast.Call) else target
    return source.origin(function, target_scope) or "", target, target_scope


def _made_by(
    source: ScriptSource, node: ast.expr, scope: Scope, line: int, calls: list[ScriptCall]
) -> ScriptCall | None:
    """Return the call that an expression stands for at a line, or None."""
    target, _, _ = source.before(node, scope, line)
    return next((call for call in calls if call.node is target), None)


def _references(notes: ScriptNotes, source: ScriptSource, trainer: ScriptCall) -> Iterator[ConfigError]:
    """Yield an error if the trained model is also passed as the reference model."""
    if trainer.kind not in WITH_REFERENCE or not {"model", "ref_model"} <= trainer.given.keys():
        return
    model, reference = (source.before(*trainer.given[name], trainer.line)[0] for name in ("model", "ref_model"))
    same_name = isinstance(model, ast.Name) and isinstance(reference, ast.Name) and model.id == reference.id
    if same_name or (model is reference and isinstance(model, ast.Call)):
        yield ConfigError(
            f"ref_model is the trained model itself: {trainer.kind} stops", code="E3953", path=notes.path,
            line=trainer.lines["ref_model"], field="ref_model",
            help="remove ref_model: the trainer makes a copy, or disables the adapter",
        )  # fmt: skip


def _prepared_late(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall]) -> Iterator[ConfigError]:
    """Yield an error for a model prepared for k-bit training after its adapter was added: that freezes the adapter
    too."""
    adds = [
        (node.func.value.id, node.lineno)
        for node, _ in source.each(ast.Call)
        if isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_adapter"
        and isinstance(node.func.value, ast.Name)
    ]
    for call in calls:
        if call.kind not in PREPARES or "model" not in call.given:
            continue
        node, scope = call.given["model"]
        creator = _made_by(source, node, scope, call.line, calls)
        has_adapter = isinstance(node, ast.Name) and any(name == node.id and line < call.line for name, line in adds)
        if has_adapter or (
            creator is not None and creator.kind in ADAPTED and creator.known.get("is_trainable") is not True
        ):
            yield ConfigError(
                f"{call.kind} freezes every weight, the adapter's too: nothing is left to train",
                code="E3954", path=notes.path, line=call.line, field=call.kind,
                help="call it on the base model, before the adapter is added",
            )  # fmt: skip


def _adapted_twice(
    notes: ScriptNotes, source: ScriptSource, trainer: ScriptCall, calls: list[ScriptCall], judge: TargetReleases
) -> Iterator[ConfigError]:
    """Yield an error for a model with an adapter passed to a trainer that adds another."""
    adds_adapter = {"model", "peft_config"} <= trainer.given.keys() and trainer.kind in ("SFTTrainer", "DPOTrainer")
    if not adds_adapter or source.value(*trainer.given["peft_config"]) is None or not judge.reaches("trl", ">=1.16"):
        return
    call = _made_by(source, *trainer.given["model"], trainer.line, calls)
    if call is not None and call.kind in ADAPTED:
        yield ConfigError(
            f"the model has an adapter by {call.kind} (line {call.line}), but {trainer.kind} also has peft_config",
            code="E3955", path=notes.path, line=trainer.lines["peft_config"], field="peft_config",
            help="remove peft_config, or the call that adds the adapter",
        )  # fmt: skip


def _two_widths(notes: ScriptNotes, calls: list[ScriptCall]) -> Iterator[ConfigError]:
    """Yield an error for a call of an Unsloth loader with several bit widths at once."""
    for call in calls:
        if call.kind.removesuffix(f".{PRETRAINED}") not in FAST:
            continue
        widths = [name for name in ("load_in_4bit", "load_in_8bit", "load_in_16bit") if call.known.get(name) is True]
        if len(widths) > 1:
            yield ConfigError(
                f"{' and '.join(widths)} are both true, but Unsloth loads in one of them", code="E3956",
                path=notes.path, line=call.lines[widths[1]], field=widths[1], help="remove one of them",
            )  # fmt: skip


def _collators(
    notes: ScriptNotes,
    source: ScriptSource,
    trainer: ScriptCall,
    arguments: ScriptCall | None,
    models: ModelOrigins,
    judge: TargetReleases,
) -> Iterator[ConfigError]:
    """Yield errors for a collator that creates no labels, masks tokens for a decoder, or does not work with packing."""
    argument = trainer.given.get("data_collator")
    origin, creator, creator_scope = resolve_callee(source, argument, trainer.line) if argument else ("", None, None)
    name = origin.rpartition(".")[2]
    line = trainer.lines.get("data_collator", trainer.line)
    decodes = _decodes(trainer, models)
    if (
        origin.startswith("transformers.")
        and name == MASKED
        and isinstance(creator, ast.Call)
        and creator_scope is not None
    ):
        collator = read_call(source, MASKED, creator, creator_scope)
        if decodes and not collator.open and (collator.silent("mlm") or collator.known.get("mlm") is True):
            yield ConfigError(
                f"{MASKED} masks tokens unless mlm is False, but a decoder's tokenizer has no mask token",
                code="E3957", path=notes.path, line=collator.lines.get("mlm", collator.line), field="mlm",
                help="write mlm=False",
            )  # fmt: skip
    no_collator = not argument and not trainer.open and "data_collator" not in source.set_attributes
    padding = origin.startswith("transformers.") and name in PADS_ONLY
    base_trainer = trainer.kind in ("Trainer", "Seq2SeqTrainer") and "compute_loss_func" not in trainer.given
    if base_trainer and decodes and (no_collator or padding) and _makes_no_labels(source):
        reason = f"{name} adds none" if padding else "the Trainer's default collator adds none"
        yield ConfigError(
            f"no labels reach the model: the rows are tokenized without them, and {reason}", code="E3958",
            path=notes.path, line=line, field="data_collator",
            help=f"write data_collator={MASKED}(tokenizer, mlm=False)",
        )  # fmt: skip
    yield from _packed_collator(notes, source, trainer, arguments, name, judge)


def _decodes(trainer: ScriptCall, models: ModelOrigins) -> bool:
    """Return whether the trainer's model is a decoder loaded with a language modeling head."""
    if "model" not in trainer.given:
        return False
    load = models.single(*trainer.given["model"], trainer.line)
    return load is not None and (load.kind.startswith(FAST) or load.kind.endswith(f"ForCausalLM.{PRETRAINED}"))


def _makes_no_labels(source: ScriptSource) -> bool:
    """Return whether the script tokenizes its rows itself and never mentions labels."""
    if re.search(r"label|load_from_disk|compute_loss|get_dataset|prepare_dataset", source.text):
        return False
    mapped = [node for node, _ in source.each(ast.Call) if getattr(node.func, "attr", "") == "map" and node.args]
    names = {node.args[0].id for node in mapped if isinstance(node.args[0], ast.Name)}
    bodies = [node for node, _ in source.each(ast.FunctionDef) if node.name in names]
    bodies += [node.args[0] for node in mapped if isinstance(node.args[0], ast.Lambda)]
    return bool(bodies) and any(
        isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id.endswith("tokenizer")
        for body in bodies
        for child in ast.walk(body)
    )


def _packed_collator(
    notes: ScriptNotes,
    source: ScriptSource,
    trainer: ScriptCall,
    arguments: ScriptCall | None,
    name: str,
    judge: TargetReleases,
) -> Iterator[ConfigError]:
    """Yield an error for a custom collator together with packing."""
    values = (arguments.known if arguments else {}) | trainer.known
    if trainer.kind != "SFTTrainer" or values.get("packing") is not True or "data_collator" not in trainer.given:
        return
    if source.value(*trainer.given["data_collator"]) is None:
        return
    strategy = values.get("packing_strategy", "bfd")
    unpadded = judge.reaches("trl", OWN_COLLATOR_UNPACKED) and strategy in ("bfd", "bfd_split", "ffd")
    if name == "DataCollatorForCompletionOnlyLM" or (unpadded and not (arguments and arguments.open)):
        yield ConfigError(
            f"{name or 'a data collator'} cannot be combined with packing: SFTTrainer stops", code="E3959",
            path=notes.path, line=trainer.lines["data_collator"], field="packing",
            help="write packing=False, or remove data_collator",
        )  # fmt: skip


def _callbacks(
    notes: ScriptNotes, source: ScriptSource, trainer: ScriptCall, arguments: ScriptCall | None
) -> Iterator[ConfigError]:
    """Yield an error for early stopping without evaluation or without a metric to monitor."""
    stops = [
        node
        for node, scope in source.each(ast.Call)
        if (source.origin(node.func, scope) or "").endswith("transformers.EarlyStoppingCallback")
    ]
    if (
        not stops
        or arguments is None
        or arguments.open
        or arguments.computed & {"eval_strategy", "evaluation_strategy"}
    ):
        return
    strategy = arguments.known.get("eval_strategy", arguments.known.get("evaluation_strategy", "no"))
    best = arguments.known.get("load_best_model_at_end", "load_best_model_at_end" in arguments.given)
    if strategy not in EVALUATES:
        problem, field = "EarlyStoppingCallback needs evaluations, but eval_strategy is no", "eval_strategy"
        help_text = 'write eval_strategy="steps" or "epoch", with an eval_dataset'
    elif not best and arguments.silent("metric_for_best_model"):
        problem = "EarlyStoppingCallback needs metric_for_best_model, which only load_best_model_at_end sets by itself"
        field, help_text = "metric_for_best_model", 'write load_best_model_at_end=True, or metric_for_best_model="loss"'
    else:
        return
    line = arguments.lines.get(field, stops[0].lineno)
    yield ConfigError(problem, code="E3960", path=notes.path, line=line, field=field, help=help_text)


def _metrics(
    notes: ScriptNotes, source: ScriptSource, trainer: ScriptCall, arguments: ScriptCall | None
) -> Iterator[ConfigError]:
    """Yield an error if the best checkpoint is chosen by a metric that no function computes."""
    base_trainer = trainer.kind in ("Trainer", "Seq2SeqTrainer") and trainer.silent("compute_metrics")
    if not base_trainer or arguments is None or "compute_metrics" in source.set_attributes:
        return
    metric = arguments.known.get("metric_for_best_model")
    used = arguments.known.get("load_best_model_at_end") is True or arguments.known.get("save_strategy") == "best"
    computed = isinstance(metric, str) and not re.search(r"loss|runtime|per_second|epoch", metric)
    if used and computed:
        yield ConfigError(
            f"metric_for_best_model is {metric}, but the Trainer has no compute_metrics",
            code="E3961", path=notes.path, line=arguments.lines["metric_for_best_model"], field="metric_for_best_model",
            help='pass compute_metrics, or write metric_for_best_model="loss"',
        )  # fmt: skip


def _resumes(notes: ScriptNotes, source: ScriptSource) -> Iterator[ConfigError]:
    """Yield an error for `trainer.train(resume_from_checkpoint="True")`: a string is read as a folder."""
    for node, scope in source.each(ast.Call):
        if getattr(node.func, "attr", "") != "train":
            continue
        argument = next((keyword for keyword in node.keywords if keyword.arg == "resume_from_checkpoint"), None)
        value = source.value(argument.value, scope) if argument else None
        if argument and isinstance(value, str) and value in NO_FOLDERS and not Path(value).is_dir():
            yield ConfigError(
                f"resume_from_checkpoint is the string {value!r}, which the Trainer reads as a folder", code="E3962",
                path=notes.path, line=argument.lineno, field="resume_from_checkpoint",
                help="write True without quotes for the last checkpoint, or the checkpoint's folder",
            )  # fmt: skip


def _columns(notes: ScriptNotes, source: ScriptSource, trainer: ScriptCall) -> Iterator[ConfigError]:
    """Yield an error for each column that the trainer reads and the script renames or removes."""
    if "train_dataset" not in trainer.given:
        return
    for column in NEEDED.get(trainer.kind, ()):
        step = _loses(source, *trainer.given["train_dataset"], trainer.line, column)
        if step is not None:
            yield ConfigError(
                f"{trainer.kind} reads the column {column!r}, but {step[0]} removes it", code="E3963",
                path=notes.path, line=step[1], field=column,
                help=f"leave {column} as it is, or name the new column {column}",
            )  # fmt: skip


def _loses(source: ScriptSource, node: ast.expr, scope: Scope, line: int, column: str) -> tuple[str, int] | None:
    """Return the method that removes a column from a dataset, and its line, unless a later step creates the column
    again."""
    removal: tuple[str, int] | None = None
    for call, call_scope in reversed(list(_chain(source, node, scope, line))):
        name = getattr(call.func, "attr", "")
        values = [
            source.value(argument, call_scope)
            for argument in (*call.args, *(keyword.value for keyword in call.keywords))
        ]
        texts = [x for value in values for x in (value if isinstance(value, list | tuple | dict) else [value])]
        created_columns = [x for value in values for x in (value.values() if isinstance(value, dict) else [])]
        created_columns += values[1:2] if name == "rename_column" else []
        if column in created_columns or (name in ("map", "add_column") and _mentions(source, call, column)):
            removal = None
        elif _takes_away(source, call, call_scope, texts, column):
            removal = (name, call.lineno)
    return removal


def _takes_away(source: ScriptSource, call: ast.Call, at: Scope, named: list[Any], column: str) -> bool:
    """Return whether a method of a dataset drops a column; `named`: all texts among its arguments."""
    name = getattr(call.func, "attr", "")
    if name in ("rename_columns", "rename_column", "remove_columns"):
        return column in named
    if name == "select_columns":
        return bool(named) and all(isinstance(text, str) for text in named) and column not in named
    removed_columns = [source.value(keyword.value, at) for keyword in call.keywords if keyword.arg == "remove_columns"]
    return name == "map" and any(
        column in value if isinstance(value, list | tuple) else column == value for value in removed_columns
    )


def _mentions(source: ScriptSource, call: ast.Call, column: str) -> bool:
    """Return whether the function passed to a call may create a column: it mentions it, or is not in this file."""
    function: ast.AST | None = call.args[0] if call.args else None
    if isinstance(function, ast.Name):
        name = function.id
        function = next((node for node, _ in source.each(ast.FunctionDef) if node.name == name), None)
    if function is None:
        return True
    return any(
        (isinstance(child, ast.Constant) and child.value == column)
        or (isinstance(child, ast.keyword) and child.arg == column)
        for child in ast.walk(function)
    )


def _chain(source: ScriptSource, node: ast.expr, scope: Scope, line: int) -> Iterator[tuple[ast.Call, Scope]]:
    """Yield the method calls that created a dataset, the last one first."""
    for _ in range(20):
        node, scope, line = source.before(node, scope, line)
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node, scope
            node = node.func.value
        else:
            return


def _templates(notes: ScriptNotes, source: ScriptSource) -> Iterator[ConfigError]:
    """Yield an error for each chat template name that Unsloth does not have."""
    for node, scope in source.each(ast.Call):
        is_unsloths = (source.origin(node.func, scope) or "").startswith("unsloth")
        if not is_unsloths or last_name(node.func) != "get_chat_template":
            continue
        expression = argument_of(node, "chat_template", 1)
        value = source.value(expression, scope) if expression is not None else None
        if isinstance(value, str) and expression is not None and value not in UNSLOTH_TEMPLATES:
            yield ConfigError(
                f"Unsloth has no chat template {value!r}{did_you_mean(value, sorted(UNSLOTH_TEMPLATES))}", code="E3964",
                path=notes.path, line=expression.lineno, field="chat_template",
                help=f"write one of {', '.join(sorted(UNSLOTH_TEMPLATES))}",
            )  # fmt: skip


RESPONSE_MARKERS = {"train_on_responses_only": "response_part", "DataCollatorForCompletionOnlyLM": "response_template"}
"""Callable → its argument with the text that begins an answer; the collator's first one."""


def _markers(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall]) -> Iterator[ConfigError]:
    """Yield an error for a response marker that differs from how the chat template begins an answer."""
    template = _template_of_script(source, calls)
    if template is None or "apply_chat_template" not in source.text:
        return
    for node, scope in source.each(ast.Call):
        name = last_name(node.func)
        key = RESPONSE_MARKERS.get(name)
        if key is None:
            continue
        expression = argument_of(node, key, 0 if name.startswith("Data") else None)
        value = source.value(expression, scope) if expression is not None else None
        marker = marker_of(value) if isinstance(value, str) else None
        if (
            isinstance(value, str)
            and marker
            and expression is not None
            and marker != template
            and source.text.count(marker) <= value.count(marker)
        ):
            yield ConfigError(
                f"{key} is {value!r}, but the chat template begins an answer with {template!r}: no label remains",
                code="E3965", path=notes.path, line=expression.lineno, field=key, help=f"write a {key} with {template}",
            )  # fmt: skip


def _template_of_script(source: ScriptSource, calls: list[ScriptCall]) -> str | None:
    """Return how the script's answers begin: by the chat template it passes to Unsloth, or by its only model's name."""
    if "chat_template" in source.set_attributes or "setup_chat_format" in source.text:
        return None
    templates = []
    for node, scope in source.each(ast.Call):
        if last_name(node.func) == "get_chat_template":
            expression = argument_of(node, "chat_template", 1)
            templates.append(source.value(expression, scope) if expression is not None else None)
    if templates:
        return UNSLOTH_TEMPLATES.get(templates[0]) if len(templates) == 1 and isinstance(templates[0], str) else None
    names = {call.model_name for call in find_model_loads(calls)}
    name = names.pop() if len(names) == 1 else None
    return marker_of_model(name) if isinstance(name, str) else None
