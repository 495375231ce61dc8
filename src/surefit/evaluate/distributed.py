"""One variant evaluated by several processes: each has its own model and a part of the rows.

The result does not depend on the distribution of the rows: an answer depends on its row alone (a sampled one on the
row's number in its set), so a single process would write the same.
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
    """Return the positions of the rows that this process answers: dealt out in turn, the longest first, so that all
    processes read about equally many tokens."""
    longest_first = sorted(range(len(rows)), key=lambda place: -_length(rows.examples[place]))
    return sorted(longest_first[world.rank :: world.size])


def _length(example: Example) -> int:
    """Estimate the prompt's length in characters: good enough to distribute rows, without a tokenizer."""
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
    """Run `score_variant` with the rows shared between the processes; every process gets the full result.

    Args:
        kept: cache of this process's rank.
        on_progress: called with the rows of all processes, estimated from this one's.
    """
    local_rows = rows.subset(local_row_indices(rows, world))
    part = score_variant(
        variant, respondent, recipe, local_rows, way, kept, scale_progress(on_progress, world, len(rows))
    )
    return merge_results(all_gather(part, world))


def merge_results(parts: Sequence[VariantResult]) -> VariantResult:
    """Merge the results of all processes: the rows in their order, the time of the slowest process."""
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
        {name: sum(part.read_counts.get(name, 0) for part in parts) for name in first.read_counts},
        first.read_with,
    )


def gather_in_order(places: Sequence[int], values: Sequence[T], world: World) -> list[T]:
    """Gather the values of all processes, sorted by their places."""
    parts = all_gather(list(zip(places, values, strict=True)), world)
    pairs = [pair for part in parts for pair in part]
    return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]


def scale_progress(on_progress: OnProgress, world: World, total: int) -> OnProgress:
    """Scale this process's progress to all processes, which have equal parts."""
    return lambda done, _, text: on_progress(min(total, done * world.size), total, text)
