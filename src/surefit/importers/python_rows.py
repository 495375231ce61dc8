"""What a script does with its rows: the tokens in the loss, truncation, the columns it reads, and the number of
rows."""

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
from surefit.importers.python_source import Scope, ScriptSource, argument_of, last_name
from surefit.importers.releases import TargetReleases

IGNORED = -100
TEXTS = key_set("""
    text prompt completion document doc content body article input output instruction response question answer summary
    source target query context
""")
"""Columns that hold text, so `len` counts characters."""
LENGTHS = frozenset({"max_length", "max_seq_length", "model_max_length", "max_new_tokens", "max_position_embeddings"})
TURNS = (
    ("<|im_start|>user", "<|im_start|>assistant"), ("<|start_header_id|>user", "<|start_header_id|>assistant"),
    ("<start_of_turn>user", "<start_of_turn>model"), ("[INST]", "[/INST]"), ("### Instruction", "### Response"),
    ("<|user|>", "<|assistant|>"), ("<|User|>", "<|Assistant|>"), ("<|start|>user", "<|start|>assistant"),
)  # fmt: skip
"""How a user turn and an assistant turn begin."""
OWN_COLLATOR = "<0.16"
"""TRL releases whose SFTTrainer creates transformers' DataCollatorForLanguageModeling by default."""
OWN_MASKS = ("train_on_responses_only", "CompletionOnly", "assistant_masks", "assistant_only_loss", "return_assistant")
KEPT_ROWS = ("map", "shuffle", "remove_columns", "rename_column", "rename_columns", "select_columns", "with_format")
"""Dataset methods that keep the number of rows."""
FEWER_ROWS = ("filter", "select", "train_test_split", "take", "shard")
"""Dataset methods that keep some of the rows, each at most once."""


@dataclass(frozen=True)
class MappedFunction:
    """A function called with each row of `over`: its node, its scope and the name of its row parameter."""

    node: ast.FunctionDef | ast.Lambda
    scope: Scope
    row: str
    over: ast.expr
    at: Scope
    line: int


def read_rows(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall], judge: TargetReleases) -> None:
    """Note the labels, truncation, filters, columns and length of the run."""
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
    """Yield the functions passed to `.map` and `.filter`."""
    for node, scope in source.each(ast.Call):
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in ("map", "filter") or not node.args:
            continue
        argument = node.args[0]
        function: Any = argument if isinstance(argument, ast.Lambda) else _find_function(source, argument, scope)
        if function is not None and function.args.args:
            row = function.args.args[0].arg
            yield MappedFunction(function, source.inside[function], row, node.func.value, scope, node.lineno)


def _find_function(source: ScriptSource, node: ast.expr, scope: Scope) -> ast.FunctionDef | None:
    """Return the function with this name if the script defines exactly one."""
    definitions = [
        definition
        for definition, _ in source.each(ast.FunctionDef)
        if isinstance(node, ast.Name) and definition.name == node.id
    ]
    return definitions[0] if len(definitions) == 1 else None


def _read_collator(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall], judge: TargetReleases) -> None:
    """Note the data collator that the script's trainer is given or creates itself."""
    trainers = [call for call in calls if call.kind in TRAINERS]
    if len(trainers) != 1 or trainers[0].open:
        return
    if "data_collator" not in trainers[0].given:
        if trainers[0].kind == "SFTTrainer" and judge.reaches("trl", OWN_COLLATOR):
            notes.say("collator", "transformers.DataCollatorForLanguageModeling", "SFTTrainer", trainers[0].line)
        return
    creator, creator_scope = source.expression(*trainers[0].given["data_collator"])
    origin = source.origin(creator.func, creator_scope) if isinstance(creator, ast.Call) else None
    if origin and origin.startswith("transformers."):
        notes.say("collator", origin, "data_collator", trainers[0].lines["data_collator"])


def _is_ignored(node: ast.AST) -> bool:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return bool(value == -IGNORED)
    return False


def _masks(node: ast.AST) -> int | None:
    """Return the line at which the prompt's labels become -100 (`labels[:n] = …` or `[-100] * n + answer`), or None.

    Masks of the padding alone (`labels[labels == pad] = -100`, `ids + [-100] * n`) do not count.
    """
    for child in ast.walk(node):
        if isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Subscript):
            index = child.targets[0].slice
            begins = isinstance(index, ast.Slice) and index.lower is None and index.upper is not None
            if begins and any(map(_is_ignored, ast.walk(child.value))):
                return child.lineno
        elif isinstance(child, ast.BinOp) and isinstance(child.op, ast.Add) and isinstance(child.left, ast.BinOp):
            prefix = child.left
            if isinstance(prefix.left, ast.List) and any(map(_is_ignored, prefix.left.elts)):
                return prefix.lineno
    return None


def _find_label_copy(node: ast.AST) -> int | None:
    """Return the line at which the labels become a copy of the input ids, or None."""
    for child in ast.walk(node):
        if isinstance(child, ast.Assign) and len(child.targets) == 1 and isinstance(child.targets[0], ast.Subscript):
            pairs = [(child.targets[0].slice, child.value)]
        elif isinstance(child, ast.Dict):
            pairs = [(key, value) for key, value in zip(child.keys, child.values, strict=True) if key is not None]
        else:
            continue
        for key, value in pairs:
            if isinstance(key, ast.Constant) and key.value == "labels" and _is_ids(value):
                return value.lineno
    return None


def _copied_expression(node: ast.ListComp) -> ast.expr:
    """Return the expression that a comprehension copies row by row (`[ids[:] for ids in x]`), or else the
    comprehension."""
    if len(node.generators) != 1 or node.generators[0].ifs:
        return node
    element, target = node.elt, node.generators[0].target
    if isinstance(element, ast.Subscript) and isinstance(element.slice, ast.Slice):
        element = element.value
    elif isinstance(element, ast.Call):
        element = element.func.value if isinstance(element.func, ast.Attribute) else next(iter(element.args), element)
    copies_target = isinstance(element, ast.Name) and isinstance(target, ast.Name) and element.id == target.id
    return node.generators[0].iter if copies_target else node


def _is_ids(node: ast.expr) -> bool:
    """Return whether an expression is `x["input_ids"]` or a copy of it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("copy", "clone"):
        node = node.func.value
    elif isinstance(node, ast.Call) and last_name(node.func) in ("list", "deepcopy") and node.args:
        node = node.args[0]
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        node = node.value
    elif isinstance(node, ast.ListComp):
        node = _copied_expression(node)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "input_ids"
    return last_name(node) == "input_ids"


def _read_labels(notes: ScriptNotes, source: ScriptSource, functions: list[MappedFunction]) -> None:
    """Note which tokens the loss is computed on, if the script creates the labels itself."""
    masks_anywhere = any(_is_ignored(node) for node, _ in source.nodes) or any(
        word in source.text for word in OWN_MASKS
    )
    for function in functions:
        words = {node.value for node in ast.walk(function.node) if isinstance(node, ast.Constant)}
        mask_line = _masks(function.node) if "labels" in words else None
        if mask_line:
            notes.say("loss_on", "completion", "labels", mask_line)
            _read_truncation(notes, source, function)
            return
        copy_line = _find_label_copy(function.node)
        if copy_line and not masks_anywhere and (_templates(function.node) or _writes_turns(function.node)):
            _note_unmasked_loss(notes, "labels", copy_line)
            _read_truncation(notes, source, function)
            return
    copies = str(notes.setup.get("collator")).endswith("DataCollatorForLanguageModeling")
    renders = any(_templates(function.node) or _writes_turns(function.node) for function in functions)
    if copies and not masks_anywhere and renders:
        _note_unmasked_loss(notes, "data_collator", notes.places["collator"].line)


KEEPS_LABELS = ("default_data_collator", "DefaultDataCollator", "DataCollatorWithPadding", "")
"""transformers' collators that leave labels unchanged; the empty name stands for the Trainer's default."""


def _read_padding(
    notes: ScriptNotes, source: ScriptSource, functions: list[MappedFunction], trainers: list[ScriptCall]
) -> None:
    """Note labels that are a copy of padded ids, if nothing masks the padding afterwards."""
    masks_padding = (
        any(_is_ignored(node) for node, _ in source.nodes) or "IGNORE" in source.text or "ignore_index" in source.text
    )
    if masks_padding or len(trainers) != 1 or trainers[0].kind not in ("Trainer", "Seq2SeqTrainer") or trainers[0].open:
        return
    argument = trainers[0].given.get("data_collator")
    collator = source.before(*argument, trainers[0].line) if argument else None
    callee = collator[0].func if collator and isinstance(collator[0], ast.Call) else collator[0] if collator else None
    origin = (source.origin(callee, collator[1]) or "?") if callee is not None and collator else ""
    if origin and not (origin.startswith("transformers.") and origin.rpartition(".")[2] in KEEPS_LABELS):
        return
    for mapped in functions:
        copy_line = _find_label_copy(mapped.node)
        if copy_line and any(_pads(source, node, mapped.scope) for node in ast.walk(mapped.node)):
            notes.say("padding_learnt", True, "labels", copy_line)
            return


def _pads(source: ScriptSource, node: ast.AST, scope: Scope) -> bool:
    """Return whether a call pads what it tokenizes."""
    if not isinstance(node, ast.Call):
        return False
    padding = argument_of(node, "padding")
    return padding is not None and source.value(padding, scope) in (True, "max_length", "longest")


def _note_unmasked_loss(notes: ScriptNotes, name: str, line: int | None) -> None:
    """Note that the loss is computed on whole conversations."""
    for attribute, value in (("conversations", True), ("loss_on", "all")):
        notes.say(attribute, value, name, line or 1)


def _templates(node: ast.AST) -> list[ast.Call]:
    """Return the calls that render a conversation with its answer."""
    calls = [child for child in ast.walk(node) if isinstance(child, ast.Call)]
    return [call for call in calls if getattr(call.func, "attr", "") == "apply_chat_template" and not _asks(call)]


def _writes_turns(node: ast.AST) -> bool:
    """Return whether a string in the code contains turn markers of both sides of a conversation."""
    texts = [
        child.value for child in ast.walk(node) if isinstance(child, ast.Constant) and isinstance(child.value, str)
    ]
    text = "\n".join(texts)
    return any(user in text and answer in text for user, answer in TURNS)


def _asks(node: ast.Call) -> bool:
    """Return whether a call ends, or may end, its text with the generation prompt."""
    values = [keyword.value for keyword in node.keywords if keyword.arg in (None, "add_generation_prompt")]
    return any(not (isinstance(value, ast.Constant) and value.value is False) for value in values)


def _read_truncation(notes: ScriptNotes, source: ScriptSource, function: MappedFunction) -> None:
    """Note that the tokenizer truncates a text with its answer on the right."""
    if "truncation_side" in source.set_attributes or "truncation_side" in source.text:
        return
    for node in ast.walk(function.node):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        call = read_call(source, "tokenizer", node, function.scope)
        cuts = last_name(node.func).endswith("tokenizer") and call.known.get("truncation") is True
        if cuts and _has_answer(source, node.args[0], function.scope):
            notes.say("truncation_side", "right", "truncation", call.lines["truncation"])
            limit = call.known.get("max_length")
            if type(limit) is int and "max_length" not in notes.setup:
                notes.say("max_length", limit, "max_length", call.lines["max_length"])
            return


def _has_answer(source: ScriptSource, node: ast.expr, scope: Scope) -> bool:
    """Return whether a text is a prompt followed by something else."""
    node, _ = source.expression(node, scope)
    if isinstance(node, ast.Call):
        return node in _templates(node)
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and not isinstance(node.left, ast.Constant)


def _read_filters(notes: ScriptNotes, source: ScriptSource, functions: list[MappedFunction]) -> None:
    """Note filters that compare a number of characters with a limit in tokens."""
    values = [keyword.value for keyword, _ in source.each(ast.keyword) if keyword.arg in LENGTHS]
    limits = {node.id for node in values if isinstance(node, ast.Name)}
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
    """Return whether an expression is `len(row["text"])`."""
    match node:
        case ast.Call(
            func=ast.Name(id="len"),
            args=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=column)), *_],
        ):
            return name == row and column in TEXTS
    return False


def _read_lengths(notes: ScriptNotes, source: ScriptSource) -> None:
    """Note the length at which the script's tokenizer truncates, if there is only one."""
    limits: dict[int, int] = {}
    for node, scope in source.each(ast.Call):
        if last_name(node.func).endswith(("tokenizer", "apply_chat_template")):
            call = read_call(source, "tokenizer", node, scope)
            limit = call.known.get("max_length")
            if type(limit) is int and call.known.get("truncation") in (True, "longest_first", "only_first"):
                limits.setdefault(limit, call.lines["max_length"])
    if len(limits) == 1 and "max_length" not in notes.setup:
        ((limit, line),) = limits.items()
        notes.say("max_length", limit, "max_length", line)


def _read_columns(notes: ScriptNotes, source: ScriptSource, function: MappedFunction) -> None:
    """Note the columns that a function reads from rows that come directly from a local file."""
    file = find_local_file(source, function.over, function.at, function.line)
    if file is None:
        return
    tested_columns = {_tested_column(child) for child in ast.walk(function.node)}
    tried_nodes = {
        descendant
        for child in ast.walk(function.node)
        if isinstance(child, ast.Try)
        for statement in child.body
        for descendant in ast.walk(statement)
    }
    assigned_columns = {_assigned_column(child) for child in ast.walk(function.node)}
    for node in ast.walk(function.node):
        column = _column(node, function.row)
        if (
            isinstance(node, ast.expr)
            and node not in tried_nodes
            and column is not None
            and column not in tested_columns | assigned_columns
        ):
            key = f"{function.row}[{column!r}]"
            notes.columns[key] = (file, column)
            notes.lines[key] = node.lineno


def _tested_column(node: ast.AST) -> Any:
    """Return the column in `"x" in row`, or None."""
    match node:
        case ast.Compare(left=ast.Constant(value=name), ops=[ast.In() | ast.NotIn(), *_]):
            return name
    return None


def _assigned_column(node: ast.AST) -> Any:
    """Return the column in `row["x"] = …`, or None."""
    match node:
        case ast.Subscript(ctx=ast.Store(), slice=ast.Constant(value=name)):
            return name
    return None


def _column(node: ast.AST, row: str) -> str | None:
    """Return the column in `row["x"]` or `row.get("x")`, or None."""
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
        key = node.slice if node.value.id == row else None
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        reads_row = isinstance(node.func.value, ast.Name) and node.func.value.id == row and len(node.args) == 1
        key = node.args[0] if reads_row else None
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def find_local_file(source: ScriptSource, node: ast.expr, scope: Scope, line: int) -> str | None:
    """Return the file that `load_dataset("json", data_files=…)` reads, if an expression is its train split."""
    call_node, call_scope, line = source.before(node, scope, line)
    split = None
    if isinstance(call_node, ast.Subscript) and isinstance(call_node.slice, ast.Constant):
        split = call_node.slice.value
        call_node, call_scope, line = source.before(call_node.value, call_scope, line)
    if not isinstance(call_node, ast.Call) or not (source.origin(call_node.func, call_scope) or "").endswith(
        "datasets.load_dataset"
    ):
        return None
    call = read_call(source, "load_dataset", call_node, call_scope)
    loader = source.value(call_node.args[0], call_scope) if call_node.args else None
    file, is_train = call.known.get("data_files"), (split or call.known.get("split")) == "train"
    if loader != "json" or not isinstance(file, str) or not is_train or "://" in file:
        return None
    beside = source.path.parent / file
    return str(beside) if not Path(file).is_file() and beside.is_file() else file


def _read_steps(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall]) -> None:
    """Note the number of optimizer steps on one process, if rows, batch size and epochs are all written out."""
    arguments = [call for call in calls if call.kind in ARGUMENTS]
    trainers = [call for call in calls if call.kind in TRAINERS and "train_dataset" in call.given]
    if len(arguments) != 1 or len(trainers) != 1 or notes.setup.get("max_steps") or notes.setup.get("packing"):
        return
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3}
    call = arguments[0]
    if call.open or call.computed & {*sizes, "max_steps", "packing"}:
        return
    file, all_rows = _file_of_rows(source, *trainers[0].given["train_dataset"], trainers[0].line)
    micro, accumulation, epochs = (call.known.get(name, default) for name, default in sizes.items())
    valid = all(type(value) is int and value > 0 for value in (micro, accumulation))
    rows = count_rows(Path(file)) if file and valid and isinstance(epochs, int | float) else None
    if rows:
        steps = math.ceil(math.ceil(math.ceil(rows / micro) / accumulation) * epochs)
        notes.say("total_steps", steps, "num_train_epochs", call.lines.get("num_train_epochs", call.line))
        if not all_rows:
            notes.setup["steps_at_most"] = True


def _file_of_rows(
    source: ScriptSource, node: ast.expr, scope: Scope, line: int, depth: int = 0
) -> tuple[str | None, bool]:
    """Return the file that a dataset's rows come from, each at most once, and whether the dataset has all its rows."""
    call, call_scope, line = source.before(node, scope, line)
    split = call.value if isinstance(call, ast.Subscript) else None
    split_call, split_scope, split_line = (
        source.before(split, call_scope, line) if split is not None else (call, call_scope, line)
    )
    if (
        split is not None
        and isinstance(split_call, ast.Call)
        and getattr(split_call.func, "attr", "") == "train_test_split"
    ):
        call, call_scope, line = split_call, split_scope, split_line
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or depth > 9:
        return find_local_file(source, node, scope, line + 1), True
    batch_keywords = [keyword for keyword in call.keywords if keyword.arg in ("batched", None)]
    repeats = call.func.attr == "select" and not (call.args and _is_range(call.args[0]))
    keeps_rows = call.func.attr in (*KEPT_ROWS, *FEWER_ROWS) and not repeats
    if not keeps_rows:
        return find_local_file(source, node, scope, line + 1), True
    if call.func.attr != "filter" and any(
        source.value(keyword.value, call_scope) is not False for keyword in batch_keywords
    ):
        return None, True  # a batch may become more rows
    file, all_rows = _file_of_rows(source, call.func.value, call_scope, line, depth + 1)
    return file, all_rows and call.func.attr in KEPT_ROWS


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
