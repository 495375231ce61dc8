"""The contract between a task and everything else: rows become `Example`s, generated text becomes scores.

A task is one frozen `TaskRecipe`, no inheritance: `recipes/function_calling.py` is the one to imitate and
docs/write-a-recipe.md the guide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from surefit.core.errors import DataError

Row = Mapping[str, Any]
Message = dict[str, Any]
"""`{"role": "system" | "user" | "assistant" | "tool", "content": str, …}` as Hugging Face chat templates take it."""
Scores = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """One row, ready for the chat template.

    Attributes:
        messages: the conversation, the prompt's turns first; the turns that are trained on have role "assistant".
        tools: JSON-schema functions for the template's `tools` argument, or None.
        completion: the text the model should answer to `prompt` with; None where the row has no gold answer.
        reference: whatever `score` needs to judge an answer (parsed gold, schemas…).
        text: plain text to continue, for rows that are not a conversation; then `messages` is empty.
        tokens: of rows that are tokens already, the ids and for each whether it is learnt; `text` has the ids then.
        document: the part of the last user turn that may be cut where the example is too long (`data.too_long`).
        part: the name of the task it belongs to, where the recipe is several (`TaskRecipe.parts`).
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    completion: str | None = None
    reference: Any = None
    text: str | None = None
    document: str | None = None
    part: str | None = None
    tokens: tuple[tuple[int, ...], tuple[bool, ...]] | None = None

    @property
    def has_answer(self) -> bool:
        """Whether there is anything that a model's answer can be compared with; without, the row is not scored."""
        return self.completion is not None or self.reference is not None

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The turns before the last assistant turn: what the model is shown when it is evaluated."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[:-1]
        return self.messages


@dataclass(frozen=True)
class Prediction:
    """What a model answered to one `Example`.

    Attributes:
        text: the raw decoded answer, special tokens removed.
        truncated: the answer hit the token limit before the model ended it.
        parsed: what `TaskRecipe.parse` made of `text`; None where it does not parse.
    """

    text: str
    truncated: bool = False
    parsed: Any = None


@dataclass(frozen=True)
class Grammar:
    """The answers that constrained decoding allows for one row.

    Attributes:
        kind: the language `source` is written in; "choices" is a closed list of answers.
        source: a JSON schema, an EBNF grammar or a regular expression as text; for "choices" the answers.
    """

    kind: Literal["json_schema", "ebnf", "regex", "choices"]
    source: str | tuple[str, ...]


def mean_scores(rows: Sequence[Scores]) -> Scores:
    """The mean of every metric over the rows that have it. A row that could not be parsed has its zeros; a row to which
    a metric does not apply leaves it out. Names that begin with "_" are no metrics but counts for other aggregates.

    >>> mean_scores([{"exact_match": 1.0}, {"exact_match": 0.0, "irrelevance": 1.0}])
    {'exact_match': 0.5, 'irrelevance': 1.0}
    """
    names = list(dict.fromkeys(name for row in rows for name in row if not name.startswith("_")))
    means = {}
    for name in names:
        values = [row[name] for row in rows if name in row]
        means[name] = math.fsum(values) / len(values)
    return means


@dataclass(frozen=True)
class TaskRecipe:
    """A task: how its rows are shown to a model and how its answers are judged.

    Attributes:
        name: as written in the config's `recipe`.
        version: raised whenever a change makes scores incomparable with earlier ones.
        citation: where the task, its data format and its scoring rules come from.
        columns: the row's columns; empty when the general data formats are used.
        aliases: column → other names under which rows may have it, the most usual first; `to_example` knows them too.
        to_example: row → `Example`; raises `DataError` (with `field`) on a row it cannot use.
        parse: raw answer → parsed object, or None where it does not parse; never evaluates it.
        score: (example, prediction) → metric name → value in [0, 1].
        primary_metric: the metric that decides "did it help".
        metrics: every name that the scores of a row or of the corpus can have; `check` compares the metrics that a
            config names with them, and leaves them to `evaluate` where none are said.
        chance_level: the primary metric's value for an answer drawn at random.
        grammar: example → constraint for constrained decoding, where the task has one.
        aggregate: per-row scores → corpus scores; the mean by default.
        choices: example → labels. Such a task is answered by one forward pass that ranks the labels, not by generating:
            `Prediction.parsed` is {label: log-probability}, most probable first, and `text` the first label.
        score_samples: (example, several sampled predictions) → scores, for tasks that are judged so (pass@k).
        score_many: what `score` gives for each of many rows, for scorers so slow that they want several processes.
        baselines: name → an answer without a model, scored beside the models: leading sentences, a retriever's order.
        to_gold: row → `Example` with `reference` only, for rows with a gold answer but no prompt (`surefit score`).
        stop: texts that end an answer; they are cut off.
        thoughts: `parse` and the scorers are given answers with the reasoning before them; as a rule they see the final
            answer alone (`facts.thinking.answer_of`).
        parts: name → task, where this recipe is several in one run (`recipes.mixed`): its metrics are theirs, each
            behind the task's name and a dot, and its primary metric is the mean of their primary metrics.
    """

    name: str
    version: int
    citation: str
    columns: tuple[str, ...]
    to_example: Callable[[Row], Example]
    parse: Callable[[str], Any]
    score: Callable[[Example, Prediction], Scores]
    primary_metric: str
    chance_level: float = 0.0
    grammar: Callable[[Example], Grammar] | None = None
    aggregate: Callable[[Sequence[Scores]], Scores] = field(default=mean_scores)
    choices: Callable[[Example], Sequence[str]] | None = None
    score_samples: Callable[[Example, Sequence[Prediction]], Scores] | None = None
    baselines: Mapping[str, Callable[[Example], Prediction]] = field(default_factory=dict)
    to_gold: Callable[[Row], Example] | None = None
    stop: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    score_many: Callable[[Sequence[tuple[Example, Prediction]]], Sequence[Scores]] | None = None
    metrics: tuple[str, ...] = ()
    thoughts: bool = False
    parts: Mapping[str, TaskRecipe] = field(default_factory=dict)

    def of(self, example: Example) -> TaskRecipe:
        """The task that an example belongs to: one of the parts, or this one."""
        return self.parts[example.part] if example.part is not None else self

    def columns_in(self, names: Sequence[str]) -> tuple[str, ...]:
        """Its columns, each under the name that rows with these columns have it."""
        return tuple(
            next((name for name in (column, *self.aliases.get(column, ())) if name in names), column)
            for column in self.columns
        )


def task_of(columns: Sequence[str], parts: Mapping[str, TaskRecipe], complete: bool = True) -> TaskRecipe:
    """The task of several that a row with these columns belongs to: the one whose columns it has; the one that reads
    the general formats where it has no other's.

    Args:
        complete: whether all columns of a task must be there; a row without its gold answer has only some.

    Raises:
        DataError: none, or more than one.
    """
    fitting: list[TaskRecipe] = []
    for has in (all,) if complete else (all, any):
        own = [part for part in parts.values() if part.columns and has(c in columns for c in part.columns_in(columns))]
        fitting = fitting or own
    fitting = fitting or [part for part in parts.values() if not part.columns]
    if len(fitting) == 1:
        return fitting[0]
    asked = "; ".join(f"{part.name}: {', '.join(part.columns)}" for part in fitting or parts.values())
    raise DataError(
        f"the row has the columns of {'two tasks' if fitting else 'no task of this run'}: {', '.join(columns)}",
        code="E7157",
        field="recipe",
        help=f"a row belongs to the task whose columns it has ({asked})",
    )


def add_task_prefix(part: str, scores: Mapping[str, T]) -> dict[str, T]:
    """A part's scores under the names that a recipe of several tasks gives them; counts keep their underscore.

    >>> add_task_prefix("graphs", {"smatch": 0.5, "_matched": 3.0})
    {'graphs.smatch': 0.5, '_graphs.matched': 3.0}
    """
    return {f"_{part}.{name[1:]}" if name[0] == "_" else f"{part}.{name}": value for name, value in scores.items()}


def strip_task_prefix(part: str, scores: Mapping[str, T]) -> dict[str, T]:
    """Those of the scores that are the part's, under its own names; the opposite of `add_task_prefix`."""
    own = {name: value for name, value in scores.items() if name.removeprefix("_").startswith(f"{part}.")}
    return {name.replace(f"{part}.", "", 1): value for name, value in own.items()}


def select_task_rows(part: str, rows: Iterable[Scores]) -> list[Scores]:
    """The scores of the rows that are a part's, under its own names.

    >>> select_task_rows("graphs", [{"graphs.smatch": 1.0}, {"code.passed": 0.0}])
    [{'smatch': 1.0}]
    """
    return [own for row in rows if (own := strip_task_prefix(part, row))]
