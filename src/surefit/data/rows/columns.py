"""The columns and roles of rows by the names that the config gives them (`data.columns`, `data.roles`)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surefit.core.errors import DataError, did_you_mean
from surefit.data.rows.conversion import RecordingRow
from surefit.facts.pair_scores import REWARD_ACCURACY
from surefit.metrics.strict_json import strict_json
from surefit.task import Example, Row, TaskRecipe

if TYPE_CHECKING:
    from surefit.config.schema import SureFitConfig

CONVERSATIONS = ("messages", "conversations", "contents")
"""Columns that hold a list of turns, or the list as JSON text."""
TURN_KEYS = ("role", "content")
"""Keys of `data.columns` that name a message's own keys."""
READ = (
    "messages", "conversations", "contents", "prompt", "completion", "instruction", "input", "output", "history",
    "text", "system", "tools", "input_ids", "labels", *TURN_KEYS,
    "chosen", "rejected", "preferred_output", "non_preferred_output", "completions", "rejected_response",
    "label",
)  # fmt: skip
"""Columns that the general formats read, and so can be given another name."""


def recipe_for(recipe: TaskRecipe, config: SureFitConfig) -> TaskRecipe:
    """Return the recipe, reading the columns and roles that `data.columns` and `data.roles` name, and pairs or
    labelled answers for an objective that learns from preferences.

    Raises:
        DataError: the objective needs pairs or labels, and the recipe reads columns of its own.
    """
    section, name = config.data, config.objective.name
    pairs, labelled = config.objective.paired, config.objective.labelled
    if (pairs or labelled) and (recipe.columns or recipe.parts):
        needs = (
            f"compares two answers, but rows of the recipe {recipe.name} have one"
            if pairs
            else f"needs a label for each answer, which rows of the recipe {recipe.name} do not have"
        )
        reads = "pairs (prompt, chosen, rejected)" if pairs else "labelled answers (prompt, completion, label)"
        raise DataError(
            f"objective: {name} {needs}",
            code="E4820",
            field="recipe",
            help=f"write recipe: chat, which reads {reads}, or remove objective",
        )
    if not section.columns and not section.roles and not pairs and not labelled:
        return recipe
    return replace(
        recipe,
        column_names=dict(section.columns),
        role_names={str(role): name for role, name in section.roles.items()},
        pairs=pairs,
        labelled=labelled,
        metrics=(*recipe.metrics, REWARD_ACCURACY) if pairs else recipe.metrics,
    )


@dataclass(frozen=True)
class ColumnNames:
    """Names of the columns, message keys and roles in the rows of one source.

    Attributes:
        columns: column that SureFit reads → column of the rows.
        turn_keys: `role` and `content` → the keys of a message.
        roles: role in the rows → role of a chat template.
    """

    columns: Mapping[str, str]
    turn_keys: Mapping[str, str]
    roles: Mapping[str, str]

    @classmethod
    def of(cls, recipe: TaskRecipe, columns: Sequence[str], source: str, complete: bool = True) -> ColumnNames | None:
        """Return the names for rows with these columns; None where the rows have none of the named columns, such as
        another source in a layout of its own, or where nothing is renamed.

        Args:
            complete: the rows must have every named column; rows that are only to be answered lack the answer.

        Raises:
            DataError: some of the named columns are missing.
        """
        names = {name: column for name, column in recipe.column_names.items() if name not in TURN_KEYS}
        turn_keys = {name: key for name, key in recipe.column_names.items() if name in TURN_KEYS}
        roles = {theirs: role for role, theirs in recipe.role_names.items()}
        _require_known(recipe, columns, names if not recipe.columns else recipe.column_names)
        _require_messages(recipe)
        existing = {name: column for name, column in names.items() if column in columns}
        if complete and existing and len(existing) < len(names):
            name, missing = next((n, c) for n, c in names.items() if n not in existing)
            raise DataError(
                f"no column {missing!r}{did_you_mean(missing, columns)}; the columns are {', '.join(columns)}",
                code="E4141",
                path=source,
                field=f"data.columns.{name}",
            )
        # With several tasks, a source may have the roles and lack the columns, which are another task's.
        applies_to_turns = (turn_keys or roles) and (not names or recipe.parts)
        return cls(existing, turn_keys, roles) if existing or applies_to_turns else None

    def renamed(self, columns: Sequence[str]) -> list[str]:
        """Return the columns under the names that SureFit reads."""
        theirs = {column: name for name, column in self.columns.items()}
        return [theirs.get(column, column) for column in columns if column in theirs or column not in self.columns]

    def row(self, row: Row) -> dict[str, Any]:
        """Return a row under the names that SureFit reads. A column whose name another column takes is left out."""
        theirs = {column: name for name, column in self.columns.items()}
        values = {
            theirs.get(column, column): value
            for column, value in dict.items(row if isinstance(row, dict) else dict(row))
            if column in theirs or column not in self.columns
        }
        if self.turn_keys or self.roles:
            for name in (*CONVERSATIONS, "prompt", "completion", "chosen", "rejected"):
                turns = _parsed_turns(values[name]) if name in CONVERSATIONS and name in values else values.get(name)
                if isinstance(turns, list):
                    values[name] = [self._turn(turn) for turn in turns]
                elif isinstance(turns, Mapping):
                    values[name] = self._turn(turns)
        return values

    def _turn(self, turn: Any) -> Any:
        if not isinstance(turn, Mapping):
            return turn
        theirs = {key: name for name, key in self.turn_keys.items()}
        replaced = {name for name, key in self.turn_keys.items() if key in turn}
        renamed = {theirs.get(k, k): value for k, value in turn.items() if k in theirs or k not in replaced}
        for key in ("role", "from"):
            if isinstance(renamed.get(key), str | int):
                renamed[key] = self.roles.get(str(renamed[key]), renamed[key])
        return renamed

    def converter(self, convert: Callable[[Row], Example]) -> Callable[[Row], Example]:
        """Return the conversion of rows with these names, whose errors name the columns of the rows."""

        def convert_renamed(row: Row) -> Example:
            renamed = RecordingRow(self.row(row))
            try:
                return convert(renamed)
            except DataError as error:
                raise self._with_their_column(error) from None
            finally:
                if isinstance(row, RecordingRow):
                    row.columns_read |= {self.columns.get(name, name) for name in renamed.columns_read}

        return convert_renamed

    def _with_their_column(self, error: DataError) -> DataError:
        field = error.field or ""
        head = re.split(r"[.\[]", field, maxsplit=1)[0]
        if head in self.columns:
            error.field = self.columns[head] + field.removeprefix(head)
        return error


def _parsed_turns(value: Any) -> Any:
    """Return a conversation that is JSON text, as in a CSV cell, as a list; any other value as it is."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):  # reported where the row is converted
        return strict_json(value)
    return value


def _require_messages(recipe: TaskRecipe) -> None:
    """Raise if the config names roles, and no task of it reads messages."""
    reads_messages = not recipe.columns if not recipe.parts else any(not part.columns for part in recipe.parts.values())
    if recipe.role_names and not reads_messages:
        raise DataError(
            f"the recipe {recipe.name} reads columns of its own, not messages: nothing reads the roles",
            code="E4152",
            field="data.roles",
            help="remove data.roles, or write recipe: chat",
        )


def _require_known(recipe: TaskRecipe, columns: Sequence[str], names: Mapping[str, str]) -> None:
    """Raise for a name that nothing reads: the column would not be read, and nothing would say so."""
    known = recipe.columns or tuple(dict.fromkeys((*READ, *(c for p in recipe.parts.values() for c in p.columns))))
    for name, column in names.items():
        if name not in known:
            is_reversed = name in columns and column in known
            raise DataError(
                f"nothing reads a column {name!r}{'' if is_reversed else did_you_mean(name, known)}",
                code="E4142",
                field=f"data.columns.{name}",
                help=f"the other way round: data.columns: {{{column}: {name}}}"
                if is_reversed
                else f"the name that SureFit reads stands first, then your column: {', '.join(known)}",
            )
