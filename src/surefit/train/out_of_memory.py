"""Out-of-memory errors that say what used the memory, and which setting needs less and learns the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from surefit.config.oom_ladder import as_arguments, next_rung
from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig
from surefit.config.world import count_accumulation_steps, count_processes
from surefit.core import env
from surefit.core.errors import MachineError
from surefit.core.units import bytes_text, plural
from surefit.facts.memory_per_rank import memory_terms, peak_bytes
from surefit.facts.model import ModelFacts
from surefit.model.memory_errors import is_out_of_memory


class OutOfMemory(MachineError):
    """Memory ran out while training.

    Attributes:
        changes: dotted key → value: the next configuration to try, which learns the same; empty if there is none.
    """

    changes: dict[str, Any]


@contextlib.contextmanager
def explain_out_of_memory(
    when: str, config: SureFitConfig, model: ModelFacts | None, kind: str, longest: int
) -> Iterator[None]:
    """Turn an out-of-memory exception into an error that names the cause and the remedy.

    Args:
        when: clause such as "in step 3".
        config: resolved: no setting is "auto".
        model: facts about the base model, for the estimate of its memory; None omits the estimate.
        kind: device type, cpu or cuda.
        longest: tokens of the longest row.

    Raises:
        OutOfMemory: with the next configuration to try.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise _explanation(when, config, model, kind, longest) from error


def _explanation(when: str, config: SureFitConfig, model: ModelFacts | None, kind: str, longest: int) -> OutOfMemory:
    micro = config.train.per_device_train_batch_size
    assert isinstance(micro, int)
    changes = next_rung(config, kind)
    learning = ", ".join(_what_changes_learning(config))
    advice = f"the remaining options change the training result: {learning}, or a smaller model"
    if changes:
        by_itself = "; --adapt does it automatically" if count_processes(config) == 1 or env.launched_here() else ""
        advice = f"try {as_arguments(changes)} (same training result{by_itself}), with --resume if steps "
        advice += f"were taken; {learning} also save memory, but change the training result"
    error = OutOfMemory(
        f"the {'GPU' if kind == 'cuda' else 'machine'}'s memory ran out {when}, with micro batches of "
        f"{plural(micro, 'row')} of up to {longest:,} tokens{_largest(config, model, longest, kind) if model else ''}",
        field=next(iter(changes), None),
        help=advice,
    )
    error.changes = changes
    return error


def _largest(config: SureFitConfig, model: ModelFacts, longest: int, kind: str) -> str:
    """Return the largest term of the memory estimate, as a clause; empty if the estimate knows none."""
    resolved = ResolvedConfig(config, {}, count_accumulation_steps(config), None)
    budget = peak_bytes(resolved, model, longest)
    terms = budget.terms if budget else memory_terms(resolved, model)
    if kind == "cpu":
        terms = [term for term in terms if term.term != "workspace"]  # only a GPU's libraries need it
    if not terms:
        return ""
    largest = max(terms, key=lambda term: term.bytes)
    return f"; the largest part is {largest.term}, {bytes_text(largest.bytes)} ({largest.why})"


def _what_changes_learning(config: SureFitConfig) -> list[str]:
    """Return settings that need less memory and are not set yet, as command line arguments; they change what is
    learned."""
    shorter = as_arguments({"data.max_length": config.data.max_length // 2})
    if config.train.method == "full":
        smaller = "--set train.optim=adamw_8bit" if config.train.optim == "adamw_torch" else "--set train.method=lora"
        return [shorter, smaller]
    return [shorter, *(["--set model.quantization=nf4"] if config.model.quantization == "none" else [])]
