"""Contradictions between a script's calls, and values that make a library raise."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from surefit.core.errors import ConfigError, did_you_mean
from surefit.importers import trl
from surefit.importers.python_calls import ANY_ARGUMENTS, ANY_TRAINER, ScriptCall
from surefit.importers.python_script import ScriptNotes
from surefit.importers.python_source import Scope, ScriptSource, argument_of
from surefit.importers.releases import NEWEST

FOUR_BIT_TYPES = ("fp4", "nf4")
EVALUATES = ("steps", "epoch")


def read_conflicts(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall]) -> None:
    """Note evaluation without rows, and quantization settings that are not valid."""
    notes.problems += _without_rows(notes, source, calls)
    for call in calls:
        if call.kind == "BitsAndBytesConfig":
            notes.problems += _quantization(notes, call)
            _read_unused(notes, call)


def find_trainer_arguments(source: ScriptSource, trainer: ScriptCall, calls: list[ScriptCall]) -> ScriptCall | None:
    """Return the call that creates a trainer's `args`, if it can be determined."""
    if "args" not in trainer.given:
        return None
    target, _, _ = source.before(*trainer.given["args"], trainer.line)
    return next((call for call in calls if call.node is target and call.kind in ANY_ARGUMENTS), None)


def _without_rows(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall]) -> Iterator[ConfigError]:
    """Yield an error for each trainer that evaluates during training without an eval_dataset."""
    for trainer in calls:
        if trainer.kind not in ANY_TRAINER or trainer.open or "eval_dataset" in source.set_attributes:
            continue
        eval_dataset = trainer.given.get("eval_dataset")
        if eval_dataset is not None and source.value(*eval_dataset) is not None:
            continue
        arguments = find_trainer_arguments(source, trainer, calls)
        values = arguments.known if arguments else {}
        key = next((name for name in ("eval_strategy", "evaluation_strategy") if name in values), None)
        if key and arguments and str(values[key]) in EVALUATES:
            yield ConfigError(
                f"{key} is {values[key]}, but {trainer.kind} has no eval_dataset", code="E3501", path=notes.path,
                line=arguments.lines[key], field=key,
                help=f"pass eval_dataset to {trainer.kind} (line {trainer.line}), or remove {key}",
            )  # fmt: skip


def _quantization(notes: ScriptNotes, call: ScriptCall) -> Iterator[ConfigError]:
    """Yield errors for a BitsAndBytesConfig that transformers or bitsandbytes rejects."""
    if call.known.get("load_in_4bit") is True and call.known.get("load_in_8bit") is True:
        yield ConfigError(
            "load_in_4bit and load_in_8bit are both true, but a model is loaded in one of them", code="E3502",
            path=notes.path, line=call.lines["load_in_8bit"], field="load_in_8bit", help="remove one of them",
        )  # fmt: skip
    kind = call.known.get("bnb_4bit_quant_type", "nf4")
    if isinstance(kind, str) and kind not in FOUR_BIT_TYPES:
        yield ConfigError(
            f"bitsandbytes has no 4-bit type {kind!r}{did_you_mean(kind, FOUR_BIT_TYPES)}", code="E3503",
            path=notes.path, line=call.lines["bnb_4bit_quant_type"], field="bnb_4bit_quant_type",
            help="write nf4 or fp4",
        )  # fmt: skip
    for name in ("load_in_4bit", "load_in_8bit"):
        value = call.known.get(name, False)
        if not isinstance(value, bool):
            yield ConfigError(
                f"{name} must be True or False, got {value!r}", code="E3504", path=notes.path, line=call.lines[name],
                field=name, help="write True or False",
            )  # fmt: skip


def read_generation_groups(notes: ScriptNotes, calls: list[ScriptCall]) -> None:
    """Note an error if a generation batch of GRPO or RLOO does not consist of whole groups."""
    argument_names = {"num_generations", *trl.BATCH_OF_GENERATIONS}
    for call in calls:
        if call.kind not in trl.GENERATIONS or call.open or call.computed & argument_names:
            continue
        generations = call.known.get("num_generations", trl.GENERATIONS[call.kind])
        processes = notes.setup.get("processes")
        size = trl.incomplete_group_size(call.known, generations, processes)
        if size is None:
            continue
        key = next((name for name in ("num_generations", *trl.BATCH_OF_GENERATIONS) if name in call.given), None)
        line = call.lines[key] if key else call.line
        has_batch_size = call.known.get("generation_batch_size") is not None
        problem, help_text = trl.describe_incomplete_group(size, generations, processes, has_batch_size)
        if help_text:
            notes.problems.append(ConfigError(
                problem, code="E3900", path=notes.path, line=line, field="num_generations", help=help_text
            ))  # fmt: skip
        else:
            notes.out_of_range[f"{call.kind}.{call.line}.num_generations"] = problem
            notes.place(f"{call.kind}.{call.line}.num_generations", "num_generations", line)


def _read_unused(notes: ScriptNotes, call: ScriptCall) -> None:
    """Note arguments that BitsAndBytesConfig accepts and never uses."""
    used = set(NEWEST.keys("BitsAndBytesConfig", "taken"))
    for name in sorted(set(call.given) - used - {"quant_method"}):
        key = f"BitsAndBytesConfig.{name}"
        notes.passed_over.append(key)
        notes.place(key, name, call.lines[name])


END_TOKENS = {
    "</s>": r"llama-?2|mistral|vicuna|tinyllama", "<|endoftext|>": r"gpt2|pythia|gpt-neo|falcon|phi-2|phi-1",
    "<|end_of_text|>": r"llama-?3(\.\d)?-\d+b(?!-instruct)", "<|eot_id|>": r"llama-?3(\.\d)?-\d+b-instruct",
    "<|im_end|>": r"qwen[\d.]+-[\d.]+b-instruct",
}  # fmt: skip
"""Token → names of the models that use it as the end-of-sequence token."""


def find_eos_padding(source: ScriptSource) -> int | None:
    """Return the line at which the tokenizer's padding token is set to its end-of-sequence token, if nothing else sets
    it."""
    lines = []
    for node, scope in source.each(ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and target.attr in ("pad_token", "pad_token_id"):
                is_eos = _is_end(source, node.value, scope, target.attr.replace("pad", "eos"))
                on_config = isinstance(target.value, ast.Attribute) and target.value.attr in (
                    "config",
                    "generation_config",
                )
                lines += [] if on_config else [node.lineno if is_eos else None]
    for node, scope in source.each(ast.Call):
        padding = _padding_given(source, node, scope)
        if padding is not None:
            lines.append(padding.lineno if _is_end(source, padding, scope, "eos_token") else None)
    return lines[0] if lines and None not in lines else None


def _is_end(source: ScriptSource, node: ast.expr, scope: Scope, attribute: str) -> bool:
    """Return whether a value is the tokenizer's end-of-sequence token: its attribute, or the token itself."""
    is_attribute = isinstance(node, ast.Attribute) and node.attr == attribute
    value = None if isinstance(node, ast.Attribute) else source.value(node, scope)
    models = END_TOKENS.get(value) if isinstance(value, str) else None
    return is_attribute or (models is not None and re.search(models, source.text.lower()) is not None)


def _padding_given(source: ScriptSource, node: ast.Call, scope: Scope) -> ast.expr | None:
    """Return the padding token passed when a tokenizer is loaded, or among added special tokens."""
    name = getattr(node.func, "attr", "")
    if name == "from_pretrained" and "Tokenizer" in (source.origin(node.func, scope) or ""):
        return argument_of(node, "pad_token")
    if name == "add_special_tokens" and node.args:
        tokens, _ = source.expression(node.args[0], scope)
        pairs = zip(tokens.keys, tokens.values, strict=True) if isinstance(tokens, ast.Dict) else ()
        return next((value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "pad_token"), None)
    return None
