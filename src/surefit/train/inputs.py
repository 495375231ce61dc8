"""Inputs of a `Trainer`: data, environment and callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefit.config.resolve import HardwareLike
from surefit.facts.model import ModelFacts
from surefit.train.progress import OnNote, OnPhase, OnStep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefit.parallel.engine import Engine
    from surefit.telemetry.sink import Sink
    from surefit.train.heldout import ScoreFunction
    from surefit.train.sampler import TokenizedRows


@dataclass(frozen=True)
class TrainingData:
    """Tokenized training and held-out rows.

    Attributes:
        tokenizer: saved beside the result; its padding token pads micro batches.
        rows: the training rows, each (input ids, labels) with at least one supervised token.
        eval_rows: the held-out rows; may be empty.
        conversations: whether the rows are conversations, with prompts that must be masked, and not plain text.
        held_out: the examples of `eval_rows`, for `evaluate.in_training`; with several processes, only rank 0 has them.
    """

    tokenizer: PreTrainedTokenizerBase
    rows: TokenizedRows
    eval_rows: TokenizedRows
    conversations: bool = False
    held_out: Any = ()


@dataclass(frozen=True)
class TrainingEnvironment:
    """Processes, hardware and plan of a training run.

    Attributes:
        engine: execution engine, which distributes the run over processes; None for a single process. Every process
            creates a `Trainer` and calls `fit`; only rank 0 writes and reports.
        model, hardware: facts about base model and device, for the MFU and for out-of-memory messages.
        planned: content of plan.json, which the dry pass is compared with.
        resume_command: command line that continues the run after an interruption.
    """

    engine: Engine | None = None
    model: ModelFacts | None = None
    hardware: HardwareLike | None = None
    planned: Mapping[str, Any] | None = None
    resume_command: str = "surefit train --resume"


@dataclass(frozen=True)
class Callbacks:
    """Functions and sinks that are called during a run.

    Attributes:
        on_progress: called after every step.
        on_note: called with a sentence after the dry pass, and when something unusual happened.
        score: measures the task's scores of the model (`evaluate.in_training`); None leaves them out.
        sinks: get a copy of every line of metrics.jsonl.
        on_phase: called when something else than a step begins, such as the dry pass, and when training goes on.
    """

    on_progress: OnStep = lambda progress: None
    on_note: OnNote = lambda text: None
    score: ScoreFunction | None = None
    sinks: Sequence[Sink] = ()
    on_phase: OnPhase = lambda name, step, total_steps: None
