"""What the calls of a script do not fit together in: models, adapters, collators, callbacks, columns and markers.

Each is what a library of the script stops at, by its own source. What cannot be followed to its end is not judged.
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
    FAST,
    OTHER_TRAINERS,
    PRETRAINED,
    TRAINERS,
    UNSLOTH_LORA,
    ModelOrigins,
    ScriptCall,
    read_call,
)
from surefit.importers.python_conflicts import EVALUATES, find_trainer_arguments
from surefit.importers.python_script import ScriptNotes
from surefit.importers.python_source import Scope, ScriptSource
from surefit.importers.releases import TargetReleases
from surefit.importers.turn_markers import UNSLOTH_TEMPLATES, marker_of, marker_of_model, marker_of_template

ADAPTED = ("get_peft_model", UNSLOTH_LORA, "PeftModel.from_pretrained")
"""Calls whose result is a model with an adapter."""
PREPARES = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
WITH_REFERENCE = ("DPOTrainer", "KTOTrainer", "BCOTrainer", "OnlineDPOTrainer")
MASKED = "DataCollatorForLanguageModeling"
PADS_ONLY = ("DataCollatorWithPadding", "DefaultDataCollator", "default_data_collator")
"""transformers' collators that make no labels."""
NO_FOLDERS = key_set("True true False false yes no None none auto latest last")
"""Texts that are meant as a switch, and that the Trainer takes for a folder."""
PAIRS = dict.fromkeys(("DPOTrainer", "ORPOTrainer", "CPOTrainer", "RewardTrainer"), ("chosen", "rejected"))
NEEDED = PAIRS | dict.fromkeys(("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer"), ("prompt",))
"""Trainer → the columns that it reads of every row (TRL, docs/source/dataset_formats.md)."""
OWN_COLLATOR_UNPACKED = ">=0.19"
"""The releases of TRL whose SFTTrainer takes no collator beside packing without padding."""


def read_faults(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall], judge: TargetReleases) -> None:
    """Add what is found to the notes."""
    trainers = [call for call in calls if call.kind in (*TRAINERS, *OTHER_TRAINERS)]
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
    """The dotted name of what an argument is, or is made by; with its expression."""
    inside, at, _ = source.before(*given, line)
    function = inside.func if isinstance(inside, ast.Call) else inside
    return source.origin(function, at) or "", inside, at


def _made_by(
    source: ScriptSource, node: ast.expr, scope: Scope, line: int, calls: list[ScriptCall]
) -> ScriptCall | None:
    """The call that an expression stands for at a line."""
    inside, _, _ = source.before(node, scope, line)
    return next((call for call in calls if call.node is inside), None)


def _references(notes: ScriptNotes, source: ScriptSource, trainer: ScriptCall) -> Iterator[ConfigError]:
    """The model that is trained, given as the one it is compared with."""
    if trainer.kind not in WITH_REFERENCE or not {"model", "ref_model"} <= trainer.given.keys():
        return
    model, reference = (source.before(*trainer.given[name], trainer.line)[0] for name in ("model", "ref_model"))
    same_name = isinstance(model, ast.Name) and isinstance(reference, ast.Name) and model.id == reference.id
    if same_name or (model is reference and isinstance(model, ast.Call)):
        yield ConfigError(
            f"ref_model is the model that is trained, and {trainer.kind} stops at it", code="E3953", path=notes.path,
            line=trainer.lines["ref_model"], field="ref_model",
            help="leave ref_model out: the trainer makes a copy, or switches the adapter off",
        )  # fmt: skip


def _prepared_late(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall]) -> Iterator[ConfigError]:
    """A model that is prepared for k-bit training once it has its adapter: that freezes the adapter too."""
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
        made = _made_by(source, node, scope, call.line, calls)
        added = isinstance(node, ast.Name) and any(name == node.id and line < call.line for name, line in adds)
        if added or (made is not None and made.kind in ADAPTED and made.known.get("is_trainable") is not True):
            yield ConfigError(
                f"{call.kind} freezes every weight, and the adapter is already there: nothing is left to train",
                code="E3954", path=notes.path, line=call.line, field=call.kind,
                help="call it on the base model, before the adapter is added",
            )  # fmt: skip


def _adapted_twice(
    notes: ScriptNotes, source: ScriptSource, trainer: ScriptCall, calls: list[ScriptCall], judge: TargetReleases
) -> Iterator[ConfigError]:
    """A model with an adapter, handed to a trainer that is to add one."""
    both = {"model", "peft_config"} <= trainer.given.keys() and trainer.kind in ("SFTTrainer", "DPOTrainer")
    if not both or source.value(*trainer.given["peft_config"]) is None or not judge.reaches("trl", ">=1.16"):
        return
    made = _made_by(source, *trainer.given["model"], trainer.line, calls)
    if made is not None and made.kind in ADAPTED:
        yield ConfigError(
            f"the model has an adapter by {made.kind} (line {made.line}), and {trainer.kind} is given peft_config, too",
            code="E3955", path=notes.path, line=trainer.lines["peft_config"], field="peft_config",
            help="take peft_config out, or the call that adds the adapter",
        )  # fmt: skip


def _two_widths(notes: ScriptNotes, calls: list[ScriptCall]) -> Iterator[ConfigError]:
    """Unsloth's loaders, told to load in several widths at once."""
    for call in calls:
        if call.kind.removesuffix(f".{PRETRAINED}") not in FAST:
            continue
        widths = [name for name in ("load_in_4bit", "load_in_8bit", "load_in_16bit") if call.known.get(name) is True]
        if len(widths) > 1:
            yield ConfigError(
                f"{' and '.join(widths)} are true together, and Unsloth loads in one of them", code="E3956",
                path=notes.path, line=call.lines[widths[1]], field=widths[1], help="take one of them out",
            )  # fmt: skip


def _collators(
    notes: ScriptNotes,
    source: ScriptSource,
    trainer: ScriptCall,
    arguments: ScriptCall | None,
    models: ModelOrigins,
    judge: TargetReleases,
) -> Iterator[ConfigError]:
    """A collator that makes no labels, masks what a decoder cannot fill in, or does not go with packing."""
    given = trainer.given.get("data_collator")
    origin, inside, at = resolve_callee(source, given, trainer.line) if given else ("", None, None)
    name = origin.rpartition(".")[2]
    line = trainer.lines.get("data_collator", trainer.line)
    decodes = _decodes(trainer, models)
    if origin.startswith("transformers.") and name == MASKED and isinstance(inside, ast.Call) and at is not None:
        made = read_call(source, MASKED, inside, at)
        if decodes and not made.open and (made.silent("mlm") or made.known.get("mlm") is True):
            yield ConfigError(
                f"{MASKED} masks tokens where mlm is not False, and a decoder's tokenizer has no mask token",
                code="E3957", path=notes.path, line=made.lines.get("mlm", made.line), field="mlm",
                help="write mlm=False",
            )  # fmt: skip
    silent = not given and not trainer.open and "data_collator" not in source.set_attributes
    padding = origin.startswith("transformers.") and name in PADS_ONLY
    plain = trainer.kind in ("Trainer", "Seq2SeqTrainer") and "compute_loss_func" not in trainer.given
    if plain and decodes and (silent or padding) and _makes_no_labels(source):
        what = f"{name} makes none" if padding else "the Trainer's own collator makes none"
        yield ConfigError(
            f"no labels reach the model: the rows are tokenized without them, and {what}", code="E3958",
            path=notes.path, line=line, field="data_collator",
            help=f"write data_collator={MASKED}(tokenizer, mlm=False)",
        )  # fmt: skip
    yield from _packed_collator(notes, source, trainer, arguments, name, judge)


def _decodes(trainer: ScriptCall, models: ModelOrigins) -> bool:
    """Whether the trainer's model is a decoder that was loaded with a head for language modeling."""
    if "model" not in trainer.given:
        return False
    load = models.single(*trainer.given["model"], trainer.line)
    return load is not None and (load.kind.startswith(FAST) or load.kind.endswith(f"ForCausalLM.{PRETRAINED}"))


def _makes_no_labels(source: ScriptSource) -> bool:
    """Whether the script tokenizes its rows itself, and nothing in it speaks of labels."""
    if re.search(r"label|load_from_disk|compute_loss|get_dataset|prepare_dataset", source.text):
        return False
    mapped = [node for node, _ in source.each(ast.Call) if getattr(node.func, "attr", "") == "map" and node.args]
    names = {node.args[0].id for node in mapped if isinstance(node.args[0], ast.Name)}
    bodies = [node for node, _ in source.each(ast.FunctionDef) if node.name in names]
    bodies += [node.args[0] for node in mapped if isinstance(node.args[0], ast.Lambda)]
    return bool(bodies) and any(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id.endswith("tokenizer")
        for body in bodies
        for each in ast.walk(body)
    )


def _packed_collator(
    notes: ScriptNotes,
    source: ScriptSource,
    trainer: ScriptCall,
    arguments: ScriptCall | None,
    name: str,
    judge: TargetReleases,
) -> Iterator[ConfigError]:
    """A collator of one's own beside packing."""
    known = (arguments.known if arguments else {}) | trainer.known
    if trainer.kind != "SFTTrainer" or known.get("packing") is not True or "data_collator" not in trainer.given:
        return
    if source.value(*trainer.given["data_collator"]) is None:
        return
    strategy = known.get("packing_strategy", "bfd")
    unpadded = judge.reaches("trl", OWN_COLLATOR_UNPACKED) and strategy in ("bfd", "bfd_split", "ffd")
    if name == "DataCollatorForCompletionOnlyLM" or (unpadded and not (arguments and arguments.open)):
        yield ConfigError(
            f"{name or 'a data collator'} does not go with packing, and SFTTrainer stops at the two", code="E3959",
            path=notes.path, line=trainer.lines["data_collator"], field="packing",
            help="write packing=False, or leave data_collator out",
        )  # fmt: skip


def _callbacks(
    notes: ScriptNotes, source: ScriptSource, trainer: ScriptCall, arguments: ScriptCall | None
) -> Iterator[ConfigError]:
    """Early stopping in a run that measures nothing, or has nothing to go by."""
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
        problem, field = "EarlyStoppingCallback needs evaluations, and eval_strategy is no", "eval_strategy"
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
    """A metric that chooses the best checkpoint and that nothing computes."""
    plain = trainer.kind in ("Trainer", "Seq2SeqTrainer") and trainer.silent("compute_metrics")
    if not plain or arguments is None or "compute_metrics" in source.set_attributes:
        return
    metric = arguments.known.get("metric_for_best_model")
    used = arguments.known.get("load_best_model_at_end") is True or arguments.known.get("save_strategy") == "best"
    computed = isinstance(metric, str) and not re.search(r"loss|runtime|per_second|epoch", metric)
    if used and computed:
        yield ConfigError(
            f"metric_for_best_model is {metric}, and the Trainer is given no compute_metrics that computes it",
            code="E3961", path=notes.path, line=arguments.lines["metric_for_best_model"], field="metric_for_best_model",
            help='pass compute_metrics, or write metric_for_best_model="loss"',
        )  # fmt: skip


def _resumes(notes: ScriptNotes, source: ScriptSource) -> Iterator[ConfigError]:
    """`trainer.train(resume_from_checkpoint="True")`: a text is a folder."""
    for node, scope in source.each(ast.Call):
        if getattr(node.func, "attr", "") != "train":
            continue
        given = next((each for each in node.keywords if each.arg == "resume_from_checkpoint"), None)
        value = source.value(given.value, scope) if given else None
        if given and isinstance(value, str) and value in NO_FOLDERS and not Path(value).is_dir():
            yield ConfigError(
                f"resume_from_checkpoint is the text {value!r}, which the Trainer takes for a folder", code="E3962",
                path=notes.path, line=given.lineno, field="resume_from_checkpoint",
                help="write True without quotes, which finds the last checkpoint, or the checkpoint's folder",
            )  # fmt: skip


def _columns(notes: ScriptNotes, source: ScriptSource, trainer: ScriptCall) -> Iterator[ConfigError]:
    """Columns that the trainer reads and that the script renames or takes out."""
    if "train_dataset" not in trainer.given:
        return
    for column in NEEDED.get(trainer.kind, ()):
        step = _loses(source, *trainer.given["train_dataset"], trainer.line, column)
        if step is not None:
            yield ConfigError(
                f"{trainer.kind} reads the column {column!r}, and {step[0]} takes it away", code="E3963",
                path=notes.path, line=step[1], field=column,
                help=f"leave {column} as it is, or name the new column {column}",
            )  # fmt: skip


def _loses(source: ScriptSource, node: ast.expr, scope: Scope, line: int, column: str) -> tuple[str, int] | None:
    """The method, and its line, that takes a column out of a data set and after which nothing makes it anew."""
    lost: tuple[str, int] | None = None
    for call, at in reversed(list(_chain(source, node, scope, line))):
        name = getattr(call.func, "attr", "")
        values = [source.value(each, at) for each in (*call.args, *(keyword.value for keyword in call.keywords))]
        named = [x for value in values for x in (value if isinstance(value, list | tuple | dict) else [value])]
        made = [x for value in values for x in (value.values() if isinstance(value, dict) else [])]
        made += values[1:2] if name == "rename_column" else []
        if column in made or (name in ("map", "add_column") and _mentions(source, call, column)):
            lost = None
        elif _takes_away(source, call, at, named, column):
            lost = (name, call.lineno)
    return lost


def _takes_away(source: ScriptSource, call: ast.Call, at: Scope, named: list[Any], column: str) -> bool:
    """Whether a method of a data set leaves a column out; `named`: all texts that it is given."""
    name = getattr(call.func, "attr", "")
    if name in ("rename_columns", "rename_column", "remove_columns"):
        return column in named
    if name == "select_columns":
        return bool(named) and all(isinstance(each, str) for each in named) and column not in named
    removed = [source.value(each.value, at) for each in call.keywords if each.arg == "remove_columns"]
    return name == "map" and any(column in _to_list(value) for value in removed)


def _to_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _mentions(source: ScriptSource, call: ast.Call, column: str) -> bool:
    """Whether the function that a call is given may make a column: it names it, or is not in this file."""
    function: ast.AST | None = call.args[0] if call.args else None
    if isinstance(function, ast.Name):
        name = function.id
        function = next((node for node, _ in source.each(ast.FunctionDef) if node.name == name), None)
    if function is None:
        return True
    return any(
        (isinstance(each, ast.Constant) and each.value == column)
        or (isinstance(each, ast.keyword) and each.arg == column)
        for each in ast.walk(function)
    )


def _chain(source: ScriptSource, node: ast.expr, scope: Scope, line: int) -> Iterator[tuple[ast.Call, Scope]]:
    """The methods that made a data set, the last one first."""
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
    """Names of chat templates that Unsloth does not have."""
    for node, scope in source.each(ast.Call):
        if not (source.origin(node.func, scope) or "").startswith("unsloth") or not _is_call_of(
            node, "get_chat_template"
        ):
            continue
        given = next((each.value for each in node.keywords if each.arg == "chat_template"), None)
        written = given if given is not None else node.args[1] if len(node.args) > 1 else None
        value = source.value(written, scope) if written is not None else None
        if isinstance(value, str) and written is not None and value not in UNSLOTH_TEMPLATES:
            yield ConfigError(
                f"Unsloth has no chat template {value!r}{did_you_mean(value, sorted(UNSLOTH_TEMPLATES))}", code="E3964",
                path=notes.path, line=written.lineno, field="chat_template",
                help=f"write one of {', '.join(sorted(UNSLOTH_TEMPLATES))}",
            )  # fmt: skip


def _is_call_of(node: ast.Call, name: str) -> bool:
    return name in (getattr(node.func, "attr", None), getattr(node.func, "id", None))


def _markers(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall]) -> Iterator[ConfigError]:
    """The text that is to begin an answer, where the chat template that writes the rows begins it otherwise."""
    template = _template_of_script(source, calls)
    if template is None or "apply_chat_template" not in source.text:
        return
    for node, scope in source.each(ast.Call):
        name = next(
            (
                each
                for each in ("train_on_responses_only", "DataCollatorForCompletionOnlyLM")
                if _is_call_of(node, each)
            ),
            None,
        )
        key = {"train_on_responses_only": "response_part", "DataCollatorForCompletionOnlyLM": "response_template"}.get(
            name or ""
        )
        if not name or not key:
            continue
        first = node.args[0] if name.startswith("Data") and node.args else None
        written = next((each.value for each in node.keywords if each.arg == key), first)
        value = source.value(written, scope) if written is not None else None
        marker = marker_of(value) if isinstance(value, str) else None
        if (
            isinstance(value, str)
            and marker
            and written is not None
            and marker != template
            and source.text.count(marker) <= value.count(marker)
        ):
            yield ConfigError(
                f"{key} is {value!r}, and the chat template begins an answer with {template!r}: no label is left",
                code="E3965", path=notes.path, line=written.lineno, field=key, help=f"write a {key} with {template}",
            )  # fmt: skip


def _template_of_script(source: ScriptSource, calls: list[ScriptCall]) -> str | None:
    """How answers begin in what the script writes: by the template it names to Unsloth, or by its one model's name."""
    if "chat_template" in source.set_attributes or "setup_chat_format" in source.text:
        return None
    named = []
    for node, scope in source.each(ast.Call):
        if _is_call_of(node, "get_chat_template"):
            given = next((each.value for each in node.keywords if each.arg == "chat_template"), None)
            written = given if given is not None else node.args[1] if len(node.args) > 1 else None
            named.append(source.value(written, scope) if written is not None else None)
    if named:
        return marker_of_template(named[0]) if len(named) == 1 and isinstance(named[0], str) else None
    names = {
        call.known.get("pretrained_model_name_or_path", call.known.get("model_name"))
        for call in calls
        if call.kind.endswith(PRETRAINED) and not call.kind.startswith("PeftModel")
    }
    name = names.pop() if len(names) == 1 else None
    return marker_of_model(name) if isinstance(name, str) else None
