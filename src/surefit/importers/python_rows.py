"""What a script makes of its rows: which tokens are learnt, what is cut, which columns are read, how many there are."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefit.importers.known import key_set
from surefit.importers.paths import count_rows
from surefit.importers.python_calls import ARGUMENTS, TRAINERS, ScriptCall, read_call
from surefit.importers.python_conflicts import find_eos_padding
from surefit.importers.python_script import ScriptNotes
from surefit.importers.python_source import Scope, ScriptSource
from surefit.importers.releases import TargetReleases

IGNORED = -100
TEXTS = key_set("""
    text prompt completion document doc content body article input output instruction response question answer summary
    source target query context
""")
"""Columns that hold a text: their length is counted in characters."""
LENGTHS = frozenset({"max_length", "max_seq_length", "model_max_length", "max_new_tokens", "max_position_embeddings"})
TURNS = (
    ("<|im_start|>user", "<|im_start|>assistant"), ("<|start_header_id|>user", "<|start_header_id|>assistant"),
    ("<start_of_turn>user", "<start_of_turn>model"), ("[INST]", "[/INST]"), ("### Instruction", "### Response"),
    ("<|user|>", "<|assistant|>"), ("<|User|>", "<|Assistant|>"), ("<|start|>user", "<|start|>assistant"),
)  # fmt: skip
"""How a turn of the user and one of the assistant begin."""
OWN_COLLATOR = "<0.16"
"""The releases of TRL whose SFTTrainer makes transformers' DataCollatorForLanguageModeling where it is given none."""
OWN_MASKS = ("train_on_responses_only", "CompletionOnly", "assistant_masks", "assistant_only_loss", "return_assistant")
KEPT_ROWS = ("map", "shuffle", "remove_columns", "rename_column", "rename_columns", "select_columns", "with_format")
"""Methods of a data set that leave the number of its rows."""
FEWER_ROWS = ("filter", "select", "train_test_split", "take", "shard")
"""Methods that leave some of the rows, each at most once."""


@dataclass(frozen=True)
class MappedFunction:
    """A function that is called with each row of `over`: itself, its scope, and the name of its parameter."""

    node: ast.FunctionDef | ast.Lambda
    scope: Scope
    row: str
    over: ast.expr
    at: Scope
    line: int


def read_rows(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall], judge: TargetReleases) -> None:
    """Labels, truncation, filters, columns and the length of the run."""
    functions = list(_find_mapped_functions(source))
    _read_collator(notes, source, calls, judge)
    line = find_eos_padding(source)
    if line is not None:
        notes.say("pad_is_eos", True, "pad_token", line)
    _read_labels(notes, source, functions)
    _read_padding(notes, source, functions, [call for call in calls if call.kind in TRAINERS])
    _read_filters(notes, source, functions)
    _read_lengths(notes, source)
    for function in functions:
        _read_columns(notes, source, function)
    _read_steps(notes, source, calls)


def _find_mapped_functions(source: ScriptSource) -> Iterator[MappedFunction]:
    """The functions that are given to `.map` and `.filter`."""
    for node, scope in source.each(ast.Call):
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in ("map", "filter") or not node.args:
            continue
        given = node.args[0]
        function: Any = given if isinstance(given, ast.Lambda) else _find_function(source, given, scope)
        if function is not None and function.args.args:
            row = function.args.args[0].arg
            yield MappedFunction(function, source.inside[function], row, node.func.value, scope, node.lineno)


def _find_function(source: ScriptSource, node: ast.expr, scope: Scope) -> ast.FunctionDef | None:
    """The function of this name, where the script has one of it."""
    named = [each for each, _ in source.each(ast.FunctionDef) if isinstance(node, ast.Name) and each.name == node.id]
    return named[0] if len(named) == 1 else None


def _read_collator(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall], judge: TargetReleases) -> None:
    """The data collator that the trainer of the script is given, or makes itself."""
    trainers = [call for call in calls if call.kind in TRAINERS]
    if len(trainers) != 1 or trainers[0].open:
        return
    if "data_collator" not in trainers[0].given:
        if trainers[0].kind == "SFTTrainer" and judge.reaches("trl", OWN_COLLATOR):
            notes.say("collator", "transformers.DataCollatorForLanguageModeling", "SFTTrainer", trainers[0].line)
        return
    inside, at = source.expression(*trainers[0].given["data_collator"])
    origin = source.origin(inside.func, at) if isinstance(inside, ast.Call) else None
    if origin and origin.startswith("transformers."):
        notes.say("collator", origin, "data_collator", trainers[0].lines["data_collator"])


def _is_ignored(node: ast.AST) -> bool:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return bool(value == -IGNORED)
    return False


def _masks(node: ast.AST) -> int | None:
    """The line at which the prompt's labels are made -100: `labels[:n] = …` or `[-100] * n + answer`.

    What is only said of padding (`labels[labels == pad] = -100`, `ids + [-100] * n`) is none.
    """
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Subscript):
            part = each.targets[0].slice
            begins = isinstance(part, ast.Slice) and part.lower is None and part.upper is not None
            if begins and any(map(_is_ignored, ast.walk(each.value))):
                return each.lineno
        elif isinstance(each, ast.BinOp) and isinstance(each.op, ast.Add) and isinstance(each.left, ast.BinOp):
            times = each.left
            if isinstance(times.left, ast.List) and any(map(_is_ignored, times.left.elts)):
                return times.lineno
    return None


def _find_label_copy(node: ast.AST) -> int | None:
    """The line at which the labels are made a copy of the ids."""
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Subscript):
            pairs = [(each.targets[0].slice, each.value)]
        elif isinstance(each, ast.Dict):
            pairs = [(key, value) for key, value in zip(each.keys, each.values, strict=True) if key is not None]
        else:
            continue
        for key, value in pairs:
            if isinstance(key, ast.Constant) and key.value == "labels" and _is_ids(value):
                return value.lineno
    return None


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _copied_expression(node: ast.ListComp) -> ast.expr:
    """What a comprehension copies row by row (`[ids[:] for ids in x]`), or itself where it does something else."""
    if len(node.generators) != 1 or node.generators[0].ifs:
        return node
    each, target = node.elt, node.generators[0].target
    if isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Slice):
        each = each.value
    elif isinstance(each, ast.Call):
        each = each.func.value if isinstance(each.func, ast.Attribute) else next(iter(each.args), each)
    same = isinstance(each, ast.Name) and isinstance(target, ast.Name) and each.id == target.id
    return node.generators[0].iter if same else node


def _is_ids(node: ast.expr) -> bool:
    """`x["input_ids"]`, or a copy of it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("copy", "clone"):
        node = node.func.value
    elif isinstance(node, ast.Call) and _name_of(node.func) in ("list", "deepcopy") and node.args:
        node = node.args[0]
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        node = node.value
    elif isinstance(node, ast.ListComp):
        node = _copied_expression(node)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "input_ids"
    return (isinstance(node, ast.Name) and node.id == "input_ids") or (
        isinstance(node, ast.Attribute) and node.attr == "input_ids"
    )


def _read_labels(notes: ScriptNotes, source: ScriptSource, functions: list[MappedFunction]) -> None:
    """Which tokens are learnt, where the script makes the labels itself."""
    anywhere = any(_is_ignored(node) for node, _ in source.nodes) or any(word in source.text for word in OWN_MASKS)
    for function in functions:
        words = {each.value for each in ast.walk(function.node) if isinstance(each, ast.Constant)}
        masked = _masks(function.node) if "labels" in words else None
        if masked:
            notes.say("loss_on", "completion", "labels", masked)
            _read_truncation(notes, source, function)
            return
        copied = _find_label_copy(function.node)
        if copied and not anywhere and (_templates(function.node) or _writes_turns(function.node)):
            _note_unmasked_loss(notes, "labels", copied)
            _read_truncation(notes, source, function)
            return
    copies = str(notes.setup.get("collator")).endswith("DataCollatorForLanguageModeling")
    written = any(_templates(each.node) or _writes_turns(each.node) for each in functions)
    if copies and not anywhere and written:
        _note_unmasked_loss(notes, "data_collator", notes.places["collator"].line)


KEEPS_LABELS = ("default_data_collator", "DefaultDataCollator", "DataCollatorWithPadding", "")
"""transformers' collators that leave labels as they are; without a name: the Trainer's own."""


def _read_padding(
    notes: ScriptNotes, source: ScriptSource, functions: list[MappedFunction], trainers: list[ScriptCall]
) -> None:
    """Labels that are a copy of padded ids, where nothing masks the padding afterwards."""
    masked = (
        any(_is_ignored(node) for node, _ in source.nodes) or "IGNORE" in source.text or "ignore_index" in source.text
    )
    if masked or len(trainers) != 1 or trainers[0].kind not in ("Trainer", "Seq2SeqTrainer") or trainers[0].open:
        return
    given = trainers[0].given.get("data_collator")
    inside = source.before(*given, trainers[0].line) if given else None
    function = inside[0].func if inside and isinstance(inside[0], ast.Call) else inside[0] if inside else None
    origin = (source.origin(function, inside[1]) or "?") if function is not None and inside else ""
    if origin and not (origin.startswith("transformers.") and origin.rpartition(".")[2] in KEEPS_LABELS):
        return
    for function_ in functions:
        copied = _find_label_copy(function_.node)
        if copied and any(_pads(source, each, function_.scope) for each in ast.walk(function_.node)):
            notes.say("padding_learnt", True, "labels", copied)
            return


def _pads(source: ScriptSource, node: ast.AST, scope: Scope) -> bool:
    """Whether a call pads what it tokenizes."""
    if not isinstance(node, ast.Call):
        return False
    given = next((each.value for each in node.keywords if each.arg == "padding"), None)
    return given is not None and source.value(given, scope) in (True, "max_length", "longest")


def _note_unmasked_loss(notes: ScriptNotes, name: str, line: int | None) -> None:
    """The loss falls on whole conversations."""
    for attribute, value in (("conversations", True), ("loss_on", "all")):
        notes.say(attribute, value, name, line or 1)


def _templates(node: ast.AST) -> list[ast.Call]:
    """Calls that write a conversation with its answer."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [each for each in calls if getattr(each.func, "attr", "") == "apply_chat_template" and not _asks(each)]


def _writes_turns(node: ast.AST) -> bool:
    """Whether a text of both sides of a conversation is written out by hand, with the marks of its turns."""
    texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    text = "\n".join(texts)
    return any(user in text and answer in text for user, answer in TURNS)


def _asks(node: ast.Call) -> bool:
    """Whether it ends where the answer would begin, or may do so."""
    asked = [keyword.value for keyword in node.keywords if keyword.arg in (None, "add_generation_prompt")]
    return any(not (isinstance(value, ast.Constant) and value.value is False) for value in asked)


def _read_truncation(notes: ScriptNotes, source: ScriptSource, function: MappedFunction) -> None:
    """A text with its answer that the tokenizer cuts at the right."""
    if "truncation_side" in source.set_attributes or "truncation_side" in source.text:
        return
    for node in ast.walk(function.node):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        call = read_call(source, "tokenizer", node, function.scope)
        cuts = name.endswith("tokenizer") and call.known.get("truncation") is True
        if cuts and _has_answer(source, node.args[0], function.scope):
            notes.say("truncation_side", "right", "truncation", call.lines["truncation"])
            limit = call.known.get("max_length")
            if type(limit) is int and "max_length" not in notes.setup:
                notes.say("max_length", limit, "max_length", call.lines["max_length"])
            return


def _has_answer(source: ScriptSource, node: ast.expr, scope: Scope) -> bool:
    """Whether a text is a prompt with something behind it."""
    node, _ = source.expression(node, scope)
    if isinstance(node, ast.Call):
        return node in _templates(node)
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and not isinstance(node.left, ast.Constant)


def _read_filters(notes: ScriptNotes, source: ScriptSource, functions: list[MappedFunction]) -> None:
    """Rows that are kept by the number of their characters, against a limit in tokens."""
    named = [each.value for each, _ in source.each(ast.keyword) if each.arg in LENGTHS]
    limits = {node.id for node in named if isinstance(node, ast.Name)}
    for function in functions:
        for node in ast.walk(function.node):
            if not isinstance(node, ast.Compare) or len(node.ops) != 1:
                continue
            left, right = node.left, node.comparators[0]
            if isinstance(node.ops[0], ast.Gt | ast.GtE):
                left, right = right, left
            elif not isinstance(node.ops[0], ast.Lt | ast.LtE):
                continue
            if isinstance(right, ast.Name) and right.id in limits and _counts_text(left, function.row):
                notes.say("length_unit", "characters", right.id, node.lineno)
                limit = source.value(right, function.scope)
                if type(limit) is int:
                    notes.setup.setdefault("max_length", limit)


def _counts_text(node: ast.expr, row: str) -> bool:
    """`len(row["text"])`."""
    match node:
        case ast.Call(
            func=ast.Name(id="len"),
            args=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=column)), *_],
        ):
            return name == row and column in TEXTS
    return False


def _read_lengths(notes: ScriptNotes, source: ScriptSource) -> None:
    """The one limit at which the script's tokenizer cuts."""
    found: dict[int, int] = {}
    for node, scope in source.each(ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name.endswith(("tokenizer", "apply_chat_template")):
            call = read_call(source, "tokenizer", node, scope)
            limit = call.known.get("max_length")
            if type(limit) is int and call.known.get("truncation") in (True, "longest_first", "only_first"):
                found.setdefault(limit, call.lines["max_length"])
    if len(found) == 1 and "max_length" not in notes.setup:
        ((limit, line),) = found.items()
        notes.say("max_length", limit, "max_length", line)


def _read_columns(notes: ScriptNotes, source: ScriptSource, function: MappedFunction) -> None:
    """The columns that a function reads of rows that come straight from a file on this machine."""
    file = find_local_file(source, function.over, function.at, function.line)
    if file is None:
        return
    guarded = {_tested_column(each) for each in ast.walk(function.node)}
    tried = {
        inside
        for each in ast.walk(function.node)
        if isinstance(each, ast.Try)
        for part in each.body
        for inside in ast.walk(part)
    }
    made = {_assigned_column(each) for each in ast.walk(function.node)}
    for node in ast.walk(function.node):
        column = _column(node, function.row)
        if isinstance(node, ast.expr) and node not in tried and column is not None and column not in guarded | made:
            key = f"{function.row}[{column!r}]"
            notes.columns[key] = (file, column)
            notes.lines[key] = node.lineno


def _tested_column(node: ast.AST) -> Any:
    """The column in `"x" in row`."""
    match node:
        case ast.Compare(left=ast.Constant(value=name), ops=[ast.In() | ast.NotIn(), *_]):
            return name
    return None


def _assigned_column(node: ast.AST) -> Any:
    """The column in `row["x"] = …`."""
    match node:
        case ast.Subscript(ctx=ast.Store(), slice=ast.Constant(value=name)):
            return name
    return None


def _column(node: ast.AST, row: str) -> str | None:
    """The column in `row["x"]` and `row.get("x")`."""
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
        key = node.slice if node.value.id == row else None
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        own = isinstance(node.func.value, ast.Name) and node.func.value.id == row and len(node.args) == 1
        key = node.args[0] if own else None
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def find_local_file(source: ScriptSource, node: ast.expr, scope: Scope, line: int) -> str | None:
    """The one file that `load_dataset("json", data_files=…)` reads, where an expression is its only split."""
    inside, at, line = source.before(node, scope, line)
    split = None
    if isinstance(inside, ast.Subscript) and isinstance(inside.slice, ast.Constant):
        split = inside.slice.value
        inside, at, line = source.before(inside.value, at, line)
    if not isinstance(inside, ast.Call) or not (source.origin(inside.func, at) or "").endswith("datasets.load_dataset"):
        return None
    call = read_call(source, "load_dataset", inside, at)
    first = source.value(inside.args[0], at) if inside.args else None
    file, whole = call.known.get("data_files"), (split or call.known.get("split")) == "train"
    if first != "json" or not isinstance(file, str) or not whole or "://" in file:
        return None
    beside = source.path.parent / file
    return str(beside) if not Path(file).is_file() and beside.is_file() else file


def _read_steps(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall]) -> None:
    """The steps of the run on one process, where rows, batch and epochs are all written out."""
    arguments = [call for call in calls if call.kind in ARGUMENTS]
    trainers = [call for call in calls if call.kind in TRAINERS and "train_dataset" in call.given]
    if len(arguments) != 1 or len(trainers) != 1 or notes.setup.get("max_steps") or notes.setup.get("packing"):
        return
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3}
    call = arguments[0]
    if call.open or call.computed & {*sizes, "max_steps", "packing"}:
        return
    file, every = _file_of_rows(source, *trainers[0].given["train_dataset"], trainers[0].line)
    micro, accumulation, epochs = (call.known.get(name, default) for name, default in sizes.items())
    whole = all(type(value) is int and value > 0 for value in (micro, accumulation))
    rows = count_rows(Path(file)) if file and whole and isinstance(epochs, int | float) else None
    if rows:
        steps = math.ceil(math.ceil(math.ceil(rows / micro) / accumulation) * epochs)
        notes.say("total_steps", steps, "num_train_epochs", call.lines.get("num_train_epochs", call.line))
        if not every:
            notes.setup["steps_at_most"] = True


def _file_of_rows(
    source: ScriptSource, node: ast.expr, scope: Scope, line: int, depth: int = 0
) -> tuple[str | None, bool]:
    """The file whose rows a data set has, each at most once; and whether it has all of them."""
    inside, at, line = source.before(node, scope, line)
    split = inside.value if isinstance(inside, ast.Subscript) else None
    parted, there, above = source.before(split, at, line) if split is not None else (inside, at, line)
    if split is not None and isinstance(parted, ast.Call) and getattr(parted.func, "attr", "") == "train_test_split":
        inside, at, line = parted, there, above
    if not isinstance(inside, ast.Call) or not isinstance(inside.func, ast.Attribute) or depth > 9:
        return find_local_file(source, node, scope, line + 1), True
    batched = [keyword for keyword in inside.keywords if keyword.arg in ("batched", None)]
    repeats = inside.func.attr == "select" and not (inside.args and _is_range(inside.args[0]))
    same = inside.func.attr in (*KEPT_ROWS, *FEWER_ROWS) and not repeats
    if not same:
        return find_local_file(source, node, scope, line + 1), True
    if inside.func.attr != "filter" and any(source.value(each.value, at) is not False for each in batched):
        return None, True  # a batch may become more rows
    file, every = _file_of_rows(source, inside.func.value, at, line, depth + 1)
    return file, every and inside.func.attr in KEPT_ROWS


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
