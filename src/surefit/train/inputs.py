"""What a `Training` is given: data, the machine it is on, and who hears of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefit.config.resolve import HardwareLike
from surefit.facts.model import ModelFacts
from surefit.train.progress import OnNote, OnStep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefit.parallel.engine import Engine
    from surefit.telemetry.sink import Sink
    from surefit.train.heldout import ScoreFunction
    from surefit.train.sampler import TokenizedRows


@dataclass(frozen=True)
class TrainingData:
    """Tokenised rows.

    Attributes:
        tokenizer: saved beside the result; its padding token fills up micro batches.
        rows: the training rows, each (input ids, labels), every one with a supervised token.
        eval_rows: the held-out rows; may be empty.
        conversations: the rows are conversations, whose prompts must be masked; plain text has none.
        held_out: the examples of `eval_rows`, for `evaluate.in_training`; of several processes the first has them.
    """

    tokenizer: PreTrainedTokenizerBase
    rows: TokenizedRows
    eval_rows: TokenizedRows
    conversations: bool = False
    held_out: Any = ()


@dataclass(frozen=True)
class TrainingEnvironment:
    """Where a run trains.

    Attributes:
        engine: how several processes share it; None: one process with everything. All of them make a `Training` and
            call `fit`; the first alone writes and reports.
        model, hardware: about base model and device, for the MFU, and for what took the memory when it runs out.
        planned: the content of plan.json, to compare the dry pass with.
        resume_command: what the user types to continue after an interruption.
    """

    engine: Engine | None = None
    model: ModelFacts | None = None
    hardware: HardwareLike | None = None
    planned: Mapping[str, Any] | None = None
    resume_command: str = "surefit train --resume"


@dataclass(frozen=True)
class Callbacks:
    """Who hears of a run.

    Attributes:
        on_progress: called after every step.
        on_note: called with a sentence after the dry pass, and when something unusual happened.
        score: measures the task's scores of the model (`evaluate.in_training`); None leaves them out.
        sinks: get a copy of every line of metrics.jsonl.
    """

    on_progress: OnStep = lambda progress: None
    on_note: OnNote = lambda text: None
    score: ScoreFunction | None = None
    sinks: Sequence[Sink] = ()
