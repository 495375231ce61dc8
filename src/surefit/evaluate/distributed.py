"""One variant, asked by several processes: each has a model of its own and a part of the rows.

Which process answers a row decides nothing: an answer depends on the row alone (a draw on the row's number in its set),
so that the whole is what one process would have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from surefit.core.progress import OnProgress, ignore_progress
from surefit.evaluate.answer_cache import AnswerCache
from surefit.evaluate.generation_settings import GenerationSettings
from surefit.evaluate.inference import PromptModel
from surefit.evaluate.judging import score_variant
from surefit.evaluate.record import VariantResult
from surefit.evaluate.rows import EvalRows
from surefit.parallel.process_group import World, all_gather
from surefit.task import Example, TaskRecipe

T = TypeVar("T")


def local_row_indices(rows: EvalRows, world: World) -> list[int]:
    """The places of the rows that this process answers: dealt out in turn, the longest first, so that all have about
    as much to read."""
    longest_first = sorted(range(len(rows)), key=lambda place: -_length(rows.examples[place]))
    return sorted(longest_first[world.rank :: world.size])


def _length(example: Example) -> int:
    """About how long the prompt is, in characters: close enough to deal rows out by, and no tokenizer is needed."""
    return len(example.text or "") + sum(len(str(turn)) for turn in (*example.prompt, *(example.tools or ())))


def score_distributed(
    variant: str,
    respondent: PromptModel,
    recipe: TaskRecipe,
    rows: EvalRows,
    way: GenerationSettings,
    kept: AnswerCache,
    world: World,
    on_progress: OnProgress = ignore_progress,
) -> VariantResult:
    """`score_variant`, its rows shared between the processes; every one of them gets the whole result.

    Args:
        kept: of this process (its rank's).
        on_progress: called with rows of all processes, as far as this one can tell.
    """
    mine = rows.subset(local_row_indices(rows, world))
    part = score_variant(variant, respondent, recipe, mine, way, kept, scale_progress(on_progress, world, len(rows)))
    return merge_results(all_gather(part, world))


def merge_results(parts: Sequence[VariantResult]) -> VariantResult:
    """The parts of all processes as one: the rows in their order, the time of the slowest."""
    first = parts[0]
    lines = sorted((line for part in parts for line in part.lines), key=lambda line: int(line["index"]))
    return VariantResult(
        first.variant,
        lines,
        first.settings,
        first.costs,
        sum(part.truncated for part in parts),
        sum(part.unparsed for part in parts),
        max(part.seconds or 0.0 for part in parts),
        sum(part.tokens or 0 for part in parts),
    )


def gather_in_order(places: Sequence[int], values: Sequence[T], world: World) -> list[T]:
    """What all processes have made of their places, by place."""
    parts = all_gather(list(zip(places, values, strict=True)), world)
    pairs = [pair for part in parts for pair in part]
    return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]


def scale_progress(on_progress: OnProgress, world: World, total: int) -> OnProgress:
    """Count for all processes what this one has done: they have equal parts."""
    return lambda done, _, text: on_progress(min(total, done * world.size), total, text)
