"""The contract between a task and the stages: rows become `Example`s, generated text becomes scores.

A task is one frozen `TaskRecipe`, without inheritance: `recipes/function_calling.py` is the one to imitate, and
docs/write-a-recipe.md is the guide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from surefit.core.errors import DataError
from surefit.facts.free_text import LIKELIHOOD

Row = Mapping[str, Any]
Message = dict[str, Any]
"""`{"role": "system" | "user" | "assistant" | "tool", "content": str, …}`, as in Hugging Face chat templates."""
Scores = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """One row, ready for the chat template.

    Attributes:
        messages: the conversation, the prompt's turns first; the turns that are trained on have role "assistant".
        tools: JSON-schema functions for the template's `tools` argument, or None.
        completion: the gold answer to `prompt`; None where the row has none.
        reference: anything that `score` needs to judge an answer (parsed gold, schemas…).
        text: plain text to continue, for rows that are not a conversation; then `messages` is empty.
        tokens: for tokenized rows, the token ids and whether each is supervised; `text` then holds the ids.
        document: the part of the last user turn that may be truncated when the example is too long (`data.too_long`).
        part: the name of the row's task, where the recipe has several (`TaskRecipe.parts`).
        rejected: for a pair, the whole conversation again with the answer that was not preferred: the turns of
            `prompt`, then the other answer. `messages` holds the preferred one.
        desirable: the label of a labelled answer: whether it is a good one. None for other rows.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    completion: str | None = None
    reference: Any = None
    text: str | None = None
    document: str | None = None
    part: str | None = None
    tokens: tuple[tuple[int, ...], tuple[bool, ...]] | None = None
    rejected: tuple[Message, ...] | None = None
    desirable: bool | None = None

    @property
    def has_answer(self) -> bool:
        """Return whether there is anything to compare a model's answer with; otherwise the row is not scored."""
        return self.completion is not None or self.reference is not None

    @property
    def rejected_text(self) -> str | None:
        """Return the rejected answer of a pair, as text; a turn without text, such as a call, as JSON."""
        if self.rejected is None:
            return None
        content = self.rejected[-1].get("content")
        return (
            content if isinstance(content, str) else json.dumps(self.rejected[-1], ensure_ascii=False, sort_keys=True)
        )

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Turns before the last assistant turn, which the model is prompted with in evaluation."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[:-1]
        return self.messages


@dataclass(frozen=True)
class Prediction:
    """A model's answer to one `Example`.

    Attributes:
        text: the raw decoded answer, special tokens removed.
        truncated: the answer hit the token limit before the model ended it.
        parsed: the result of `TaskRecipe.parse` on `text`; None where it does not parse.
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
    """Return the mean of every metric over the rows that contain it. A row that could not be parsed contains zeros; a
    row to which a metric does not apply leaves it out. Names that begin with "_" are no metrics but counts for other
    aggregates.

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
    """A task: how its rows are shown to a model, and how the answers are scored.

    Attributes:
        name: the value of `recipe` in the config.
        version: raised whenever a change makes scores incomparable with earlier ones.
        citation: where the task, its data format and its scoring rules come from.
        columns: the row's columns; empty when the general data formats are used.
        aliases: column → other names that it may have in the rows, the most usual first; `to_example` accepts them too.
        to_example: row → `Example`; raises `DataError` (with `field`) on an unusable row.
        parse: raw answer → parsed object, or None where it does not parse; must not evaluate it as code.
        score: (example, prediction) → metric name → value in [0, 1].
        primary_metric: the metric that decides "did it help".
        metrics: every name that the scores of a row or of the corpus can have; `check` compares the config's metrics
            with them. If empty, only `evaluate` finds unknown names. With `answer_likelihood` among them, the model's
            probability of each row's own answer is measured, too (`evaluate.likelihood`).
        chance_level: the primary metric's value for a random answer.
        grammar: example → constraint for constrained decoding, where the task has one.
        aggregate: per-row scores → corpus scores; the mean by default.
        choices: example → labels. The model answers such a task in one forward pass that ranks the labels, without
            generating: `Prediction.parsed` is {label: log-probability}, most probable first, and `text` the first
            label.
        score_samples: (example, several sampled predictions) → scores, for metrics over several samples (pass@k).
        score_many: `score` for many rows at once, for scorers slow enough to need several processes.
        baselines: name → an answer without a model, scored like the models' answers: leading sentences, a retriever's
            order.
        to_gold: row → `Example` with `reference` only, for rows with a gold answer but no prompt (`surefit score`).
        stop: texts that end an answer; the answer is cut before them.
        thoughts: whether `parse` and the scorers see the reasoning before the answer; by default they see the final
            answer alone (`facts.thinking.answer_of`).
        parts: name → task, where this recipe is several tasks in one run (`recipes.mixed`): its metrics are theirs,
            each prefixed with the task's name and a dot, and its primary metric is the mean of their primary metrics.
        free_text: whether answers are free text, which can be right in many words. Then `answer_likelihood` is measured
            and decides where the answers are long (`evaluate.free_text`). It needs scores whose means are the corpus
            scores (no `aggregate` of its own).
        column_names: column that the recipe reads → column of the rows, where the config renames some (`data.columns`).
        role_names: role → its name in the rows (`data.roles`).
        pairs: whether rows must be pairs of a chosen and a rejected answer (`objective.name`).
        labelled: whether rows must be answers with a label, or pairs, of which each makes two (`objective.name`).
        purpose: what a model learns by it, in a sentence.
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
    free_text: bool = False
    parts: Mapping[str, TaskRecipe] = field(default_factory=dict)
    column_names: Mapping[str, str] = field(default_factory=dict)
    role_names: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    labelled: bool = False
    purpose: str = ""

    @property
    def measures_likelihood(self) -> bool:
        """Return whether the model's probability of the rows' own answers is measured, of some tasks at least."""
        own = self.free_text or LIKELIHOOD in self.metrics
        return own or any(part.measures_likelihood for part in self.parts.values())

    def of(self, example: Example) -> TaskRecipe:
        """Return the task of an example: one of the parts, or this one."""
        return self.parts[example.part] if example.part is not None else self

    def columns_in(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the task's columns, each under its name (renamed, or an alias) in `names`."""
        return tuple(
            self.column_names.get(column)
            or next((name for name in (column, *self.aliases.get(column, ())) if name in names), column)
            for column in self.columns
        )


def task_of(columns: Sequence[str], parts: Mapping[str, TaskRecipe], complete: bool = True) -> TaskRecipe:
    """Return the task to which a row with these columns belongs: the one whose columns it has; otherwise the one that
    reads the general formats.

    Args:
        complete: whether the row must have all columns of a task; a row without its gold answer has only some.

    Raises:
        DataError: no task fits, or more than one.
    """
    candidates: list[TaskRecipe] = []
    for quantifier in (all,) if complete else (all, any):
        matches = [
            part
            for part in parts.values()
            if part.columns and quantifier(c in columns for c in part.columns_in(columns))
        ]
        candidates = candidates or matches
    candidates = candidates or [part for part in parts.values() if not part.columns]
    if len(candidates) == 1:
        return candidates[0]
    task_columns = "; ".join(f"{part.name}: {', '.join(part.columns)}" for part in candidates or parts.values())
    raise DataError(
        f"the row has the columns of {'two tasks' if candidates else 'no task of this run'}: {', '.join(columns)}",
        code="E7157",
        field="recipe",
        help=f"a row belongs to the task whose columns it has ({task_columns})",
    )


def add_task_prefix(part: str, scores: Mapping[str, T]) -> dict[str, T]:
    """Prefix a part's metric names with its task name, as in recipes of several tasks; counts keep their underscore.

    >>> add_task_prefix("graphs", {"smatch": 0.5, "_matched": 3.0})
    {'graphs.smatch': 0.5, '_graphs.matched': 3.0}
    """
    return {f"_{part}.{name[1:]}" if name[0] == "_" else f"{part}.{name}": value for name, value in scores.items()}


def strip_task_prefix(part: str, scores: Mapping[str, T]) -> dict[str, T]:
    """Return the scores of one part under their unprefixed names; the inverse of `add_task_prefix`."""
    part_scores = {name: value for name, value in scores.items() if name.removeprefix("_").startswith(f"{part}.")}
    return {name.replace(f"{part}.", "", 1): value for name, value in part_scores.items()}


def select_task_rows(part: str, rows: Iterable[Scores]) -> list[Scores]:
    """Return the scores of the rows that belong to one part, under their unprefixed names.

    >>> select_task_rows("graphs", [{"graphs.smatch": 1.0}, {"code.passed": 0.0}])
    [{'smatch': 1.0}]
    """
    return [part_scores for row in rows if (part_scores := strip_task_prefix(part, row))]
