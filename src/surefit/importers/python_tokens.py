"""Checks of a script's tokenizer against its model: the tokenizer's name, added tokens, and the number of label
classes."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from surefit.core.errors import ConfigError
from surefit.facts.module_names import type_in_name
from surefit.importers.known import read_schema
from surefit.importers.python_calls import ANY_TRAINER, PRETRAINED, ScriptCall, find_model_loads, read_call
from surefit.importers.python_rows import find_local_file
from surefit.importers.python_script import ScriptNotes
from surefit.importers.python_source import COMPUTED, ScriptSource, argument_of

SPARE = {"qwen2": 271, "qwen3": 267, "gpt_neox": 27, "phi": 905, "phi3": 0, "llama": 0, "mistral": 0, "gpt2": 0}
SPARE |= {"falcon": 0, "bloom": 200, "opt": 7, "gemma": 0, "gemma2": 0, "gpt_bigcode": 0, "mixtral": 0}
"""`model_type` → rows of the embedding without a token, in the smallest model of this type."""
PADDING = ("[PAD]", "<pad>", "<PAD>", "[pad]", "<|pad|>")
"""Padding tokens that scripts invent."""
HAVE_PADDING = ("gemma", "gemma2", "gemma3_text", "opt", "t5", "bert", "roberta", "distilbert", "deberta-v2", "bloom")
RESIZES = ("resize_token_embeddings", "setup_chat_format", "clone_chat_template", "add_new_tokens", "smart_tokenizer")
_TABLE = read_schema("label_classes.json")
CLASSES: dict[str, int] = _TABLE["classes"]
"""Dataset, with its configuration → number of label classes, by its dataset card on the Hub."""
OWNERS: list[str] = _TABLE["owners"]
"""Accounts on the Hub that these datasets have moved to."""
LABELED = ("ForSequenceClassification", "ForTokenClassification")
MOST_ROWS = 20_000


def read_tokens(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall]) -> None:
    """Add the findings about the tokenizer and the labels to the notes."""
    loads = find_model_loads(calls)
    names = {name for call in loads if isinstance(name := call.model_name, str)}
    trains = any(call.kind in ANY_TRAINER for call in calls)
    resizes = any(word in source.text for word in RESIZES)
    if trains and len(names) == 1 and not resizes:
        _read_tokenizer(notes, source)
        _read_added(notes, source, type_in_name(next(iter(names))))
    for load in loads:
        notes.problems += _classes(notes, source, load, calls)


def _read_tokenizer(notes: ScriptNotes, source: ScriptSource) -> None:
    """Note the tokenizer that the script loads, if it is the only one and named separately from the model."""
    tokenizers = []
    for node, scope in source.each(ast.Call):
        origin = source.origin(node.func, scope) or ""
        if origin.startswith("transformers.") and origin.endswith(
            ("Tokenizer.from_pretrained", "Fast.from_pretrained")
        ):
            call = read_call(source, f"AutoTokenizer.{PRETRAINED}", node, scope)
            tokenizers.append((call.known.get("pretrained_model_name_or_path"), call.line))
    if len(tokenizers) == 1 and isinstance(tokenizers[0][0], str):
        notes.say("tokenizer_name", tokenizers[0][0], f"AutoTokenizer.{PRETRAINED}", tokenizers[0][1])


def _read_added(notes: ScriptNotes, source: ScriptSource, model_type: str | None) -> None:
    """Note tokens that the tokenizer gets beyond the rows of the embedding."""
    for node, scope in source.each(ast.Call):
        name = getattr(node.func, "attr", "")
        if name not in ("add_tokens", "add_special_tokens") or not node.args:
            continue
        expression, _ = source.expression(node.args[0], scope)
        value = source.value(node.args[0], scope)
        added = _count(expression, value) if name == "add_tokens" else _special(value, model_type)
        if added is not None and (added[0] is None or added[0] > SPARE.get(model_type or "", 0)):
            notes.say("tokens_past_embedding", added[1], name, node.lineno)
            return


def _count(written: ast.expr, value: Any) -> tuple[int | None, str] | None:
    """Return (number of tokens, its text in a message) of `add_tokens`, or None."""
    if isinstance(value, str | list | tuple):
        count = 1 if isinstance(value, str) else len(value)
        return (count, str(count)) if count else None
    if isinstance(written, ast.ListComp) and len(written.generators) == 1:
        iterable = written.generators[0].iter
        stop = (
            iterable.args[0]
            if isinstance(iterable, ast.Call) and getattr(iterable.func, "id", "") == "range" and iterable.args
            else None
        )
        number = stop.value if isinstance(stop, ast.Constant) and len(getattr(iterable, "args", ())) == 1 else None
        return (number, str(number)) if type(number) is int else (None, "of a list")
    return None


def _special(value: Any, model_type: str | None) -> tuple[int | None, str] | None:
    """Return the same for `add_special_tokens`: additional tokens, and a padding token that models of this type
    lack."""
    if not isinstance(value, dict):
        return None
    tokens = value.get("additional_special_tokens")
    if isinstance(tokens, list | tuple) and tokens:
        return len(tokens), str(len(tokens))
    pad = value.get("pad_token")
    lacks_padding = model_type is not None and model_type not in HAVE_PADDING
    return (1, str(pad)) if lacks_padding and pad in PADDING else None


def _classes(
    notes: ScriptNotes, source: ScriptSource, load: ScriptCall, calls: list[ScriptCall]
) -> Iterator[ConfigError]:
    """Yield an error if the model has fewer outputs than the dataset's labels have classes."""
    if not load.kind.removesuffix(f".{PRETRAINED}").endswith(LABELED) or load.open:
        return
    if (
        load.computed & {"num_labels", "id2label", "label2id", "config"}
        or {"config", "problem_type"} & load.given.keys()
    ):
        return
    mapping = load.known.get("id2label")
    outputs = len(mapping) if isinstance(mapping, dict) else load.known.get("num_labels", 2)
    labels = _labels_of(source, calls)
    fine_tuned = "/" in str(load.model_name) and load.silent("num_labels")  # its config may have more outputs
    if labels and type(outputs) is int and 1 < outputs < labels[1] and not fine_tuned:
        line = load.lines.get("num_labels", load.line)
        yield ConfigError(
            f"the model has {outputs} outputs, but the labels of {labels[0]} have {labels[1]} classes", code="E3966",
            path=notes.path, line=line, field="num_labels", help=f"write num_labels={labels[1]}",
        )  # fmt: skip


def _labels_of(source: ScriptSource, calls: list[ScriptCall]) -> tuple[str, int] | None:
    """Return (dataset, number of its label classes) if the script loads one dataset and does not create the labels
    anew."""
    loads = [
        (node, scope)
        for node, scope in source.each(ast.Call)
        if (source.origin(node.func, scope) or "").endswith("datasets.load_dataset") and node.args
    ]
    renames = any(word in source.text for word in ('["label"] =', '"label":', "'label':", '"labels":', "[label]"))
    if len(loads) != 1 or renames:
        return None
    node, scope = loads[0]
    name = source.value(node.args[0], scope)
    config_node = argument_of(node, "name", 1)
    config = source.value(config_node, scope) if config_node is not None else None
    if not isinstance(name, str) or config is COMPUTED:
        return None
    owner, _, leaf = name.rpartition("/")
    known_name = leaf if owner in OWNERS else name
    classes = CLASSES.get(f"{known_name}/{config}" if config else known_name)
    if classes:
        return f"{name} ({config})" if config else name, classes
    file = find_local_file(source, node, scope, node.lineno + 1)
    return (file, count) if file and (count := _count_labels(Path(file))) else None


def _count_labels(path: Path) -> int | None:
    """Return the number of classes of the integers under `label` in a JSON Lines file; None if it has none."""
    labels: set[int] = set()
    try:
        with path.open(encoding="utf-8") as rows:
            for line in islice(rows, MOST_ROWS):
                row = json.loads(line) if line.strip() else {}
                label = row.get("label", row.get("labels")) if isinstance(row, dict) else None
                if label is not None and (type(label) is not int or label < 0):
                    return None
                labels |= {label} if label is not None else set()
    except (OSError, ValueError):
        return None
    return max(labels) + 1 if labels else None
