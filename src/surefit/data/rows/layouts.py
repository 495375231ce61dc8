"""Conversion of rows of any known layout to the recipe's `Example`s, and the split into training and held-out ones.

docs/data.md shows one row of every layout.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from surefit.core.errors import DataError, RecipeError, SureFitError, did_you_mean
from surefit.data.read.load import Rows, load_rows
from surefit.data.rows.cloud_layouts import TEXT_ALONE
from surefit.data.rows.columns import ColumnNames
from surefit.data.rows.conversion import REMEMBERED_ROWS, RowConversion
from surefit.data.rows.labelled import (
    PREFERENCE_COLUMNS,
    label_column,
    labelled_conversation,
    preference_from_label,
    read_label,
)
from surefit.data.rows.messages import (
    messages_from_sharegpt,
    parse_conversation,
    parse_messages,
    require_text,
    system_turn,
    tools_from_row,
    trim_to_last_answer,
)
from surefit.data.rows.other_layouts import suggest_layout, suggest_pairs
from surefit.data.rows.pairs import PAIR_PROMPTS, openai_pair_row, pair_row, scored_answers_row, swift_pair_row
from surefit.data.rows.prompts import alpaca_prompt, contents_turns, listed, prompt_row, text_row, turns_of
from surefit.data.rows.reasoning import apply_reasoning_mode
from surefit.data.tokens.pretokenized import example_from_tokens
from surefit.facts.dataset import enough_share
from surefit.task import Example, Message, Row, TaskRecipe, task_of

if TYPE_CHECKING:
    from surefit.config.schema import DataSection
    from surefit.data.read.readers import RowWithPlace

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
HELD_OUT = "heldout.jsonl"
"""File of the held-out rows of prepared data (data/tokens/shards.py)."""
PROMPT_COLUMNS = ("messages", "conversations", "contents", "prompt", "instruction", "text")
"""Columns that hold the prompt of rows that are only to be answered."""
SKIP_ROWS_HELP = "set data.bad_rows: skip to leave them out (counted)"
SHOWN = 5
"""Problems that one error lists; the others are only counted."""


class LoadRows(Protocol):
    """`load_rows`, or `RunSources.load_rows`, which reads each source once."""

    def __call__(self, source: str, *, split: str = ...) -> Rows: ...


@dataclass(frozen=True)
class Examples(Sequence[Example]):
    """The usable rows of a source.

    Attributes:
        examples: in the order of the rows.
        where: place of each example, `file:line` or `file row N`.
        skipped: place and reason of each row that was left out.
    """

    examples: list[Example]
    where: list[str]
    skipped: list[str]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        return self.examples[index]

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)

    def subset(self, indices: Sequence[int]) -> Examples:
        """Return some of the examples, without the list of skipped rows."""
        return Examples([self.examples[i] for i in indices], [self.where[i] for i in indices], [])

    def without(self, refused: Mapping[int, str]) -> Examples:
        """Return the examples without the numbers in `refused`, which are listed as skipped, each with the reason."""
        if not refused:
            return self
        kept_examples = self.subset([n for n in range(len(self)) if n not in refused])
        return replace(
            kept_examples, skipped=[*self.skipped, *(f"{self.where[n]}: {why}" for n, why in refused.items())]
        )


def _messages_row(row: Row) -> dict[str, Any]:
    return _with_system(row, parse_messages(row["messages"], "messages"), "messages")


def _with_system(row: Row, messages: list[Message], field: str) -> dict[str, Any]:
    """Return a row's conversation, including a system message from a separate column, and its tools."""
    return {
        "messages": trim_to_last_answer([*system_turn(row, messages), *messages], field),
        "tools": tools_from_row(row),
    }


def _prompt_completion_row(row: Row) -> dict[str, Any]:
    prompt = turns_of(row["prompt"], "prompt", "user")
    completion = turns_of(row["completion"], "completion", "assistant")
    if completion[-1]["role"] != "assistant":
        raise DataError("the last message must have the role assistant", code="E4009", field="completion")
    # The loss falls on the completion only: answers in the prompt are context.
    prompt_turns = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in prompt]
    return _with_system(row, prompt_turns + completion, "prompt")


def _alpaca_row(row: Row) -> dict[str, Any]:
    if not require_text(row["output"], "output").strip():
        raise DataError("empty", code="E4012", field="output")
    messages = [*alpaca_prompt(row), {"role": "assistant", "content": row["output"]}]
    return {"messages": parse_conversation(messages, "history"), "tools": tools_from_row(row)}


def _sharegpt_row(row: Row) -> dict[str, Any]:
    value, field = messages_from_sharegpt(row)
    return _with_system(row, parse_messages(value, field), field)


def _gemini_row(row: Row) -> dict[str, Any]:
    return _with_system(row, contents_turns(row), "contents")


@dataclass(frozen=True)
class Layout:
    """A general data format.

    Attributes:
        columns: the columns by which it is recognized.
        normal: row → the input of `to_example` in a recipe without its own columns, whatever the layout: `{"messages":
            list, "tools": list or None}`, checked and ending with an assistant turn, or `{"text": str}`. For rows that
            are already token ids the example itself, which no recipe converts.
    """

    columns: tuple[str, ...]
    normal: Callable[[Row], dict[str, Any] | Example]


LAYOUTS = {
    "messages": Layout(("messages",), _messages_row),
    "sharegpt": Layout(("conversations",), _sharegpt_row),
    "prompt_completion": Layout(("prompt", "completion"), _prompt_completion_row),
    "alpaca": Layout(("instruction", "output"), _alpaca_row),
    "gemini": Layout(("contents",), _gemini_row),
    "text": Layout(("text",), text_row),
    "tokens": Layout(("input_ids",), example_from_tokens),
}
"""The layouts in the order in which `auto` tries them: data sets often carry a rendered `text` column beside the real
ones, and `input_ids` from another model's tokenizer."""
PAIR_LAYOUTS = {
    "pairs": Layout(("chosen", "rejected"), pair_row),
    "openai_pairs": Layout(("input", "preferred_output", "non_preferred_output"), openai_pair_row),
    "swift_pairs": Layout(("messages", "rejected_response"), swift_pair_row),
    "scored_answers": Layout(("completions",), scored_answers_row),
}
"""The layouts of pairs, which a preference objective reads in place of `LAYOUTS`; `normal` gives `rejected` as well."""
LABELLED = ("messages", "sharegpt", "prompt_completion", "alpaca", "gemini")
"""The layouts that kto reads where a row has a label; a pair without one is two labelled answers."""
OPTIONAL = {
    "messages": ("system", "tools", "label"), "sharegpt": ("system", "tools", "label"),
    "gemini": ("system", "tools", "label"), "prompt_completion": ("system", "tools", "label"),
    "alpaca": ("input", "history", "system", "tools", "label"), "text": (), "tokens": ("labels",),
    "pairs": (*PAIR_PROMPTS, "input", "history", "system", "tools"), "openai_pairs": (),
    "swift_pairs": ("system", "tools"),
    "scored_answers": (*PAIR_PROMPTS, "input", "history", "system", "tools"),
}  # fmt: skip
"""Columns that a layout reads where the rows have them."""


def detect_format(columns: Sequence[str], recipe: TaskRecipe) -> str:
    """Return the layout of rows with these columns: "recipe" or a key of `LAYOUTS`.

    Raises:
        DataError: the recipe's columns are not all there, or it has none and no layout fits.
    """
    if recipe.columns:
        _require(columns, recipe.columns_in(columns), f"the recipe {recipe.name}")
        return "recipe"
    layouts = layouts_of(recipe, columns)
    for name, layout in layouts.items():
        if all(column in columns for column in layout.columns):
            return name
    if recipe.pairs:
        raise _no_pairs(columns)
    if recipe.labelled:
        raise _no_labels(columns)
    formats = "; ".join(f"{name}: {', '.join(layout.columns)}" for name, layout in layouts.items())
    advice = suggest_layout(columns)
    raise DataError(
        f"no format has the columns {listed(columns)}",
        code="E4015",
        field="data.format",
        help=f"{advice}; known formats: {formats}" if advice else f"known formats: {formats}",
    )


def layouts_of(recipe: TaskRecipe, columns: Sequence[str]) -> dict[str, Layout]:
    """Return the layouts that a recipe without its own columns reads in rows with these columns: those of pairs for a
    preference objective, and for kto those of single answers as well, where there is a label."""
    if recipe.labelled:
        labelled = {name: LAYOUTS[name] for name in LABELLED} if label_column(columns) else {}
        return labelled | PAIR_LAYOUTS
    return PAIR_LAYOUTS if recipe.pairs else LAYOUTS


def has_pair_columns(columns: Sequence[str]) -> bool:
    """Return whether rows with these columns are pairs of a chosen and a rejected answer, by their names alone."""
    return any(set(layout.columns) <= set(columns) for layout in PAIR_LAYOUTS.values() if len(layout.columns) > 1)


def recipe_of_scored_rows(recipe: TaskRecipe, columns: Sequence[str]) -> TaskRecipe:
    """Return the recipe for rows that are only scored: with a preference objective they may be rows of one answer."""
    theirs = {column: name for name, column in recipe.column_names.items()}
    names = {theirs.get(column, column) for column in columns}
    is_pairs = any(names.issuperset(layout.columns) for layout in PAIR_LAYOUTS.values())
    if is_pairs or (recipe.labelled and label_column([*names])):
        return recipe
    return replace(recipe, pairs=False, labelled=False) if recipe.pairs or recipe.labelled else recipe


def _no_pairs(columns: Sequence[str]) -> DataError:
    """Return the error for rows that are no pairs, where the objective compares two answers."""
    formats = "; ".join(f"{name}: {', '.join(layout.columns)}" for name, layout in PAIR_LAYOUTS.items())
    label = label_column(columns)
    if names := suggest_pairs(columns):
        help_text = f"{names}; layouts of pairs: {formats}"
    elif label is not None:
        help_text = (
            f"rows of one answer with a {label} are labelled answers: write objective: kto; for this objective write "
            "each prompt once, with a good answer as chosen and a bad one as rejected"
        )
    else:
        help_text = f"to train on these rows, write objective: sft; layouts of pairs: {formats}"
    return DataError(
        f"the objective compares a chosen with a rejected answer, but the columns are {listed(columns)}",
        code="E4821",
        field="objective",
        help=help_text,
    )


def _no_labels(columns: Sequence[str]) -> DataError:
    """Return the error for rows that have no label, where the objective is kto, and are no pairs."""
    has_label, names = label_column(columns), suggest_pairs(columns)
    if has_label:
        problem = f"the rows have a {has_label}, but no prompt and answer: the columns are {listed(columns)}"
    else:
        problem = f"objective: kto needs a label for each answer, but the columns are {listed(columns)}"
    return DataError(
        problem,
        code="E4503",
        field="objective",
        help=f"{names}; each pair becomes two labelled answers"
        if names
        else "add a column label, true for a good answer and false for a bad one (for a column with another name: "
        "data.columns: {label: NAME}), beside prompt and completion or messages; to train on all answers as good ones, "
        "write objective: sft",
    )


def _require(columns: Sequence[str], needed: Sequence[str], who: str) -> None:
    missing = [name for name in needed if name not in columns]
    if missing:
        hints = did_you_mean(missing[0], columns)
        raise DataError(
            f"{who} needs the column{'s' * (len(missing) > 1)} {' and '.join(map(repr, missing))}, "
            f"the data has {listed(columns)}{hints}",
            code="E4016",
            field=missing[0],
            help=f"rename the columns to {', '.join(needed)}, or choose another recipe or data.format",
        )


def row_converter(columns: Sequence[str], source: str, recipe: TaskRecipe, fmt: str) -> Callable[[Row], Example]:
    """Return the function row → `Example` for one layout.

    Raises:
        DataError: layout, recipe and columns do not match.
    """
    if recipe.column_names or recipe.role_names:
        names = ColumnNames.of(recipe, columns, source)
        if names is not None and not recipe.columns and not recipe.parts:
            _require_read(names, columns, fmt, source, layouts_of(recipe, names.renamed(columns)))
        plain = replace(recipe, column_names={}, role_names={})
        if names is None:
            return row_converter(columns, source, plain, fmt)
        return names.converter(row_converter(names.renamed(columns), source, plain, fmt))
    if recipe.parts:
        return _mixed_converter(source, recipe, fmt)
    try:
        fmt = detect_format(columns, recipe) if fmt == "auto" else fmt
        if fmt == "recipe" or recipe.columns:
            return _recipe_converter(columns, recipe, fmt)
        layout = _layout_named(fmt, recipe, columns)
        _require(columns, layout.columns, f"the format {fmt}")
    except DataError as error:
        raise DataError(error.message, code=error.code, path=source, field=error.field, help=error.help) from None

    label = label_column(columns) if recipe.labelled and fmt in LABELLED else None

    def convert(row: Row) -> Example:
        _require_values(row, layout.columns)
        _refuse_media(row)
        if not recipe.pairs and not recipe.labelled:
            _refuse_bad_answer(row)
        converted = layout.normal(row)
        if isinstance(converted, Example):
            return converted
        if label is not None:
            desirable = read_label(row, label)
            labelled = labelled_conversation(converted, layout.columns[-1])
            return replace(recipe.to_example(labelled), desirable=desirable)
        rejected = converted.pop("rejected", None)
        example = recipe.to_example(converted)
        return example if rejected is None else replace(example, rejected=tuple(rejected))

    return convert


def _layout_named(fmt: str, recipe: TaskRecipe, columns: Sequence[str]) -> Layout:
    """Return a layout by its name in `data.format`.

    Raises:
        DataError: it is one of pairs and the objective reads none, or the reverse; or the objective is kto, and there
            is no label.
    """
    layouts = layouts_of(recipe, columns)
    if fmt not in layouts and recipe.labelled:
        if fmt in LABELLED:
            raise _no_labels(columns)
        raise DataError(
            f"objective: kto does not read the format {fmt}: an answer needs a prompt before it",
            code="E4504",
            field="data.format",
            help=f"the format is one of {', '.join(layouts)}, or auto",
        )
    if fmt not in layouts:
        problem = (
            f"the objective compares two answers, and rows of the format {fmt} have one"
            if recipe.pairs
            else f"the format {fmt} is one of pairs, and objective: sft trains on one answer"
        )
        raise DataError(
            problem,
            code="E4822",
            field="data.format",
            help=f"for these rows write objective: {'sft' if recipe.pairs else 'dpo'}; with this objective the format "
            f"is one of {', '.join(layouts)}, or auto",
        )
    return layouts[fmt]


def _require_read(
    names: ColumnNames, columns: Sequence[str], fmt: str, source: str, layouts: Mapping[str, Layout]
) -> None:
    """Raise if the rows have another layout than the one to which the named columns belong, and so do not read them."""
    renamed = names.renamed(columns)
    layout = fmt
    if fmt == "auto":
        layout = next((n for n, entry in layouts.items() if set(entry.columns) <= set(renamed)), fmt)
    if layout not in layouts:
        return
    unread = [name for name in names.columns if name not in (*layouts[layout].columns, *OPTIONAL[layout])]
    if unread:
        raise DataError(
            f"the rows are read as {layout} ({', '.join(layouts[layout].columns)}), which has no {unread[0]}",
            code="E4143",
            path=source,
            field=f"data.columns.{unread[0]}",
            help="set data.format to the layout that you mean, or remove the name",
        )


def _mixed_converter(source: str, recipe: TaskRecipe, fmt: str) -> Callable[[Row], Example]:
    """Return a converter that selects the layout by each row's columns: sources of several tasks mix layouts."""
    converters: dict[tuple[str, ...], tuple[str, Callable[[Row], Example]]] = {}

    def convert(row: Row) -> Example:
        columns = tuple(name for name, value in row.items() if value is not None)
        if columns not in converters:
            part = task_of(columns, recipe.parts)
            converters[columns] = part.name, row_converter(columns, source, part, "auto" if part.columns else fmt)
        name, to_example = converters[columns]
        return replace(to_example(row), part=name)

    return convert


def _recipe_converter(columns: Sequence[str], recipe: TaskRecipe, fmt: str) -> Callable[[Row], Example]:
    if not recipe.columns:
        help_text = f"choose one of {', '.join(LAYOUTS)}, or auto"
        raise DataError(
            f"the recipe {recipe.name} does not define columns", code="E4017", field="data.format", help=help_text
        )
    if fmt != "recipe":
        raise DataError(
            f"the recipe {recipe.name} reads its own columns ({', '.join(recipe.columns)}), not the format {fmt}",
            code="E4018",
            field="data.format",
            help="leave data.format at auto, or train with recipe: chat",
        )
    _require(columns, recipe.columns_in(columns), f"the recipe {recipe.name}")
    return recipe.to_example


def _require_values(row: Row, columns: Sequence[str]) -> None:
    for name in columns:
        if row.get(name) is None:
            present = [key for key, value in dict.items(row) if value is not None] if isinstance(row, dict) else []
            other = any(set(layout.columns) <= set(present) for layout in (LAYOUTS | PAIR_LAYOUTS).values())
            help_text = f"the row has {listed(present)}: the rows of a file must have one layout" if other else None
            raise DataError("missing", code="E4019", field=name, help=help_text)


def _refuse_media(row: Row) -> None:
    """Raise if the row has images or other media in separate columns: the text alone would refer to missing media."""
    for name in MEDIA:
        if row.get(name):
            raise DataError(
                f"the row has {name}, but only text is trained on", code="E4020", field=name, help=TEXT_ALONE
            )


def _refuse_bad_answer(row: Row) -> None:
    """Raise if the row marks its answer as a bad one, as KTO's data sets do: it would be trained on as a good one."""
    for name in PREFERENCE_COLUMNS:
        value = row.get(name)
        if preference_from_label(name, value) is False:
            raise DataError(
                f"{name} is {value}, which by KTO's layout (prompt, completion, label: true or false) says that the "
                "answer is a bad one, and objective: sft trains on every answer",
                code="E4326",
                field=name,
                help=f"write objective: kto, which learns from good and bad answers, or remove these rows; if {name} "
                "is a class and says nothing about the answer, rename or delete the column",
            )


def to_examples(rows: Rows, recipe: TaskRecipe, fmt: str = "auto", bad_rows: str = "error") -> Examples:
    """Convert every row to the recipe's `Example`.

    Args:
        rows: the result of `load_rows`.
        recipe: the task.
        fmt: `data.format` of the config.
        bad_rows: "error" converts all rows and then raises for the bad ones, "skip" leaves them out; "refuse" raises
            like "error" where no config could set "skip".

    Raises:
        DataError: with file, line and field; for several bad rows one error with the first ones and their count.
    """
    conversion = row_conversion(rows, recipe, fmt)
    keep = len(rows) <= REMEMBERED_ROWS
    return _convert(rows, lambda placed: conversion.example(placed, keep=keep), bad_rows)


def row_conversion(rows: Rows, recipe: TaskRecipe, fmt: str) -> RowConversion:
    """Return the conversion of these rows, which all samples of them share.

    Raises:
        DataError: as `row_converter`.
    """
    columns = rows.columns
    convert = row_converter(columns, rows.source, recipe, fmt)
    # A sample may lack a column that decides the layout of all rows.
    names = ColumnNames.of(recipe, columns, rows.source)
    layout_columns = names.renamed(columns) if names else columns
    plain = replace(recipe, column_names={}, role_names={})
    layout = fmt if recipe.parts or fmt != "auto" else detect_format(layout_columns, plain)
    key = id(recipe), layout
    if key not in rows.conversions:
        rows.conversions[key] = RowConversion(recipe, convert)
    conversion: RowConversion = rows.conversions[key]
    return conversion


def to_prompts(rows: Rows, recipe: TaskRecipe, bad_rows: str = "error") -> Examples:
    """Convert rows that are only to be answered, like `to_examples`: the gold answer may be missing.

    Raises:
        DataError: as `to_examples`.
    """
    names = ColumnNames.of(recipe, rows.columns, rows.source, complete=False)
    prompt_example = partial(_prompt_example, recipe=recipe)
    convert = names.converter(prompt_example) if names else prompt_example
    return _convert(rows, lambda placed: convert(placed.row), bad_rows)


def _prompt_example(row: Row, recipe: TaskRecipe) -> Example:
    if recipe.parts:
        part = task_of([name for name, value in row.items() if value is not None], recipe.parts, complete=False)
        return replace(_prompt_example(row, part), part=part.name)
    if recipe.columns:
        return recipe.to_example(row)
    if row.get("input_ids") is not None and not any(row.get(name) is not None for name in PROMPT_COLUMNS):
        return example_from_tokens(row)
    layouts = PAIR_LAYOUTS.values()
    if pair := next((pair for pair in layouts if all(row.get(name) is not None for name in pair.columns)), None):
        converted = pair.normal(row)
        assert not isinstance(converted, Example)
        return recipe.to_example({**converted, "messages": converted["messages"][:-1]})
    return recipe.to_example(prompt_row(row))


def _convert(rows: Rows, convert: Callable[[RowWithPlace], Example], bad_rows: str) -> Examples:
    examples, where, problems = [], [], []
    for index, placed in enumerate(rows.placed()):
        try:
            examples.append(convert(placed))
            where.append(rows.where(index))
        except DataError as error:
            path, line = rows.place(index)
            problems.append(
                DataError(error.message, code=error.code, path=path, line=line, field=error.field, help=error.help)
            )
        except RecipeError as error:
            error.path, error.line = rows.place(index)
            raise
    if problems and (bad_rows != "skip" or not examples):
        way_out = "" if bad_rows == "refuse" else SKIP_ROWS_HELP
        raise bad_rows_error(problems, len(rows), rows.source, way_out)
    return Examples(examples, where, [f"{problem.where}: {problem.message}" for problem in problems])


def without_undesirable(examples: Examples) -> Examples:
    """Return the examples without answers that are labelled as bad: a model's answer must not be compared with them.

    Raises:
        DataError: no others are there.
    """
    kept = [n for n, example in enumerate(examples) if example.desirable is not False]
    if len(kept) == len(examples):
        return examples
    if not kept:
        raise DataError(
            f"all {len(examples):,} held-out answers are labelled as bad ones: there is none to compare answers with",
            code="E4505",
            field="data.eval",
            help="hold out more rows, or name a file that has good answers, too",
        )
    return replace(examples.subset(kept), skipped=examples.skipped)


def with_place(error: DataError, where: str) -> DataError:
    """Return the error with the place of its row, which is `file:line` or words."""
    file, _, number = where.rpartition(":")
    path, line = (file, int(number)) if number.isdecimal() else (where, None)
    return DataError(error.message, code=error.code, path=path, line=line, field=error.field, help=error.help)


def refusal_reasons(refused: Mapping[int, DataError]) -> dict[int, str]:
    """Return why examples cannot be used, in the form that `Examples.without` accepts."""
    return {n: f"{error.field}: {error.message}" if error.field else error.message for n, error in refused.items()}


def bad_rows_error(problems: Sequence[DataError], total: int, source: str, way_out: str) -> DataError:
    """Return one error for all bad rows: the only one itself, or the count followed by the first ones."""
    otherwise = f", or {way_out}" if way_out else ""
    if len(problems) == 1:
        problem = problems[0]
        help_text = "; ".join(part for part in (problem.help, f"fix the row{otherwise}") if part)
        return DataError(
            problem.message,
            code=problem.code,
            path=problem.path,
            line=problem.line,
            field=problem.field,
            help=help_text,
        )
    shown = f", the first {SHOWN} of them" if len(problems) > SHOWN else ""
    return DataError(
        f"{len(problems):,} of {total:,} rows cannot be used{shown}:",
        code="E4022",
        path=source,
        help=f"fix them{otherwise}",
        also=_helped_once(problems[:SHOWN]),
    )


def _helped_once(problems: Sequence[DataError]) -> list[DataError]:
    """Return the problems, each different help text only with the first problem that has it."""
    seen_helps: set[str | None] = set()
    shown = []
    for problem in problems:
        help_text = None if problem.help in seen_helps else problem.help
        seen_helps.add(problem.help)
        shown.append(
            DataError(
                problem.message,
                code=problem.code,
                path=problem.path,
                line=problem.line,
                field=problem.field,
                help=help_text,
            )
        )
    return shown


def read_splits(
    section: DataSection,
    recipe: TaskRecipe,
    seed: int,
    rows: Rows | None = None,
    mixed: Mapping[str, Rows] | None = None,
    load: LoadRows = load_rows,
) -> tuple[Examples, Examples]:
    """Return the training and the held-out examples of a config; with `data.tokenized` only the held-out ones. With
    `data.eval` 0 there are no held-out examples.

    Args:
        section: the config's `data`.
        recipe: the task.
        seed: `train.seed`; decides which rows are held out where `data.eval` is a share, and which rows of `data.mix`
            make the share that an epoch sees.
        rows: the training rows, where they have been read already.
        mixed: the rows of `data.mix` by source, where they have been read already.
        load: reads the others.

    Raises:
        DataError: as `load_rows`, `to_examples`, `split_eval` and `add_mixed_source`.
    """
    if section.tokenized is not None:
        if section.holds_nothing_out:
            return Examples([], [], []), Examples([], [], [])
        source = section.eval if isinstance(section.eval, str) else str(Path(section.tokenized) / HELD_OUT)
        scored = load_held_out(source, section.split, None, load)
        held_out = to_examples(scored, recipe, section.format, section.bad_rows)
        return Examples([], [], []), apply_reasoning_mode(held_out, section.thinking)
    rows = rows if rows is not None else load_training_rows(section, load)
    train = to_examples(rows, recipe, section.format, section.bad_rows)
    if isinstance(section.eval, str):
        held_out_rows = load_held_out(section.eval, section.split, rows, load)
        held_out = to_examples(held_out_rows, recipe, section.format, section.bad_rows)
    elif section.share:
        train, held_out = split_eval(train, section.share, seed)
    else:
        held_out = Examples([], [], [])
    for source, passes in section.mix.items():
        source_rows = (mixed or {}).get(source)
        source_rows = source_rows if source_rows is not None else load_mixed(source, section, load)
        source_examples = to_examples(source_rows, recipe, section.format, section.bad_rows)
        if recipe.parts and section.share:  # a source may hold all rows of a task
            source_examples, source_held_out = split_eval(source_examples, section.share, seed)
            held_out = Examples(
                held_out.examples + source_held_out.examples, held_out.where + source_held_out.where, []
            )
        train = add_mixed_source(train, source_examples, source, passes, held_out, seed)
    # Applied last: the choice of held-out rows must not depend on the reasoning mode.
    return apply_reasoning_mode(train, section.thinking), apply_reasoning_mode(held_out, section.thinking)


def load_training_rows(section: DataSection, load: LoadRows = load_rows) -> Rows:
    """Load the rows of `data.train`, at most `data.limit`.

    Raises:
        DataError, MachineError: as `load_rows`.
    """
    rows = load(section.train, split=section.split)
    return rows if section.limit is None else rows.sample(section.limit)


def load_mixed(source: str, section: DataSection, load: LoadRows = load_rows) -> Rows:
    """Load the rows of one source of `data.mix`.

    Raises:
        DataError: as `load_rows`, with the source's own config key; and where they are the held-out rows.
    """
    try:
        if source == section.eval:
            raise DataError("the same rows as data.eval", code="E4023", path=source, help="remove it from data.mix")
        return load(source, split=section.split)
    except SureFitError as error:
        error.about(f"data.mix.{source}")
        raise


def add_mixed_source(
    train: Examples, more: Examples, source: str, passes: float, held_out: Sequence[Example], seed: int
) -> Examples:
    """Append the examples of a `data.mix` source to the training examples, repeated for the number of passes per epoch.

    2.25 passes are all of them twice and a quarter once more. Which quarter is decided by the hash of each whole row
    and `seed`, so it is about a quarter, and the same in every epoch and after a resume. A row whose prompt is held out
    is left out, and listed as skipped.

    Raises:
        DataError: no row of the source is left to train on.
    """
    key = f"data.mix.{source}"
    held_out_prompts = {prompt_position(example, seed) for example in held_out}
    usable = [i for i, example in enumerate(more) if prompt_position(example, seed) not in held_out_prompts]
    if not usable:
        help_text = "remove it from data.mix: its rows are what the model is scored on"
        raise DataError(
            f"every prompt of its {len(more)} examples is held out",
            code="E4024",
            path=source,
            field=key,
            help=help_text,
        )
    full_passes, share = divmod(passes, 1)
    places = {i: row_position(more.examples[i], seed) for i in usable} if share else {}
    chosen = usable * int(full_passes) + [i for i in places if places[i] < share]
    if not chosen:
        enough = (math.floor(min(places.values()) * 1000) + 1) / 1000
        raise DataError(
            f"{passes:g} of {len(usable)} examples selects none",
            code="E4025",
            path=source,
            field=key,
            help=f"write {enough:g} or more",
        )
    added, used = more.subset(chosen), set(usable)
    leaked = [f"{more.where[i]}: its prompt is held out" for i in range(len(more)) if i not in used]
    return Examples(
        train.examples + added.examples, train.where + added.where, [*train.skipped, *more.skipped, *leaked]
    )


def load_held_out(source: str, split: str, train: Rows | None, load: LoadRows = load_rows) -> Rows:
    """Load the rows that `data.eval` names.

    Raises:
        DataError: as `load_rows`; and where they are the training rows.
    """
    rows = load(source, split=split)
    if train is not None and rows.sha256 == train.sha256:
        help_text = "name other rows, or a share such as 0.02 to set aside"
        raise DataError("the same rows as data.train", code="E4026", path=source, field="data.eval", help=help_text)
    return rows


def split_eval(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Split into training and held-out examples by the hash of each prompt.

    A row's side depends on its own prompt, `share` and `seed` only: rows added later move no old row across, and equal
    prompts stay on one side. So the held-out number is near `share`, not exactly it.

    Raises:
        DataError: one side would be empty.
    """
    positions = [prompt_position(example, seed) for example in examples]
    if len(set(positions)) == 1:
        problem = f"all {len(examples):,} examples have the same prompt, and examples with equal prompts stay together"
        if len(examples) == 1:
            problem = "there is only one example"
        problem += ": none can be held out"
        raise DataError(
            problem,
            code="E4351",
            field="data.eval",
            help="move some of the rows to a separate file, and name it in data.eval",
        )
    train = examples.subset([i for i, position in enumerate(positions) if position >= share])
    held_out = examples.subset([i for i, position in enumerate(positions) if position < share])
    if not held_out:
        least = (math.floor(min(positions) * 1000) + 1) / 1000
        enough = max(least, enough_share(len(examples)) or least)
        raise DataError(
            f"{share:g} of {len(examples)} examples holds out none",
            code="E4027",
            field="data.eval",
            help=f"set data.eval to {enough:g} or more, or to a file with rows to be scored on",
        )
    if not train:
        raise DataError(
            f"holding out {share:g} of {len(examples)} examples leaves none to train on",
            code="E4028",
            field="data.eval",
            help=f"equal prompts stay together: set data.eval to {_below(max(positions)):g} or less, or to a file with "
            "rows to be scored on",
        )
    return replace(train, skipped=examples.skipped), held_out


def _below(position: float) -> float:
    """Return a share that leaves the prompt at this position, the last one, in the training split."""
    return math.floor(position * 1000) / 1000


def prompt_position(example: Example, seed: int) -> float:
    """Return the position of the prompt's hash in [0, 1)."""
    prompt = [example.text] if example.text is not None else [example.prompt, example.tools]
    return _fraction(json.dumps([seed, prompt], default=str))


def row_position(example: Example, seed: int) -> float:
    """Return the position of the whole row's hash in [0, 1)."""
    row = [seed, "mix", example.messages, example.tools, example.text]
    return _fraction(json.dumps(row, default=str))


def _fraction(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
