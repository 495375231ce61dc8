"""The train stage: config in, adapter or model out."""

from __future__ import annotations

from surefit.config.resolve import HardwareLike
from surefit.config.schema import Config
from surefit.core.rundir import RunDir
from surefit.data.cache import TokenDataset
from surefit.data.formats import read_splits
from surefit.data.load import Rows
from surefit.data.tokenize import build_dataset
from surefit.model.adapter import add_adapter
from surefit.model.load import load_model, load_tokenizer
from surefit.task import TaskRecipe
from surefit.train.loop import Training
from surefit.train.progress import OnNote, OnProgress, TrainResult


def train(
    config: Config,
    recipe: TaskRecipe,
    hardware: HardwareLike,
    run: RunDir,
    resume: bool = False,
    rows: Rows | None = None,
    resume_command: str = "surefit train --resume",
    on_progress: OnProgress = lambda progress: None,
    on_note: OnNote = lambda text: None,
) -> TrainResult:
    """Tokenise, load, train; write checkpoints, metrics.jsonl and `adapter/` or `model/` into the run directory.

    Args:
        config: nothing in it is "auto".
        recipe: how rows become messages.
        hardware: `kind` says where to train.
        run: its directory exists.
        resume: continue from the newest complete checkpoint, if there is one.
        rows: the training rows, where they have been read already.
        resume_command: what a person types to continue after an interruption.
        on_progress: called after every optimizer step.
        on_note: called with a sentence when something unusual happened.

    Raises:
        DataError, ModelError, MachineError: the data, the model or the machine cannot be used.
        Interrupted, GateError, ConfigError: see `Training.fit`.
    """
    tokenizer = load_tokenizer(config.model)
    examples, held_out = read_splits(config.data, recipe, config.train.seed, rows)
    limits = {"max_length": config.data.max_length, "too_long": config.data.too_long}
    datasets = [build_dataset(part, tokenizer, **limits) for part in (examples, held_out)]
    for name, dataset in zip(("training", "held-out"), datasets, strict=True):
        _say_what_is_left_out(name, dataset, config.data.max_length, on_note)
    model = load_model(config.model, hardware)
    subject = add_adapter(model, config.adapter, config.train.seed) if config.adapter.kind == "lora" else model
    training = Training(
        subject, tokenizer, *datasets, config, run, resume_command, on_progress=on_progress, on_note=on_note
    )
    return training.fit(resume)


def _say_what_is_left_out(name: str, dataset: TokenDataset, max_length: int, on_note: OnNote) -> None:
    stats = dataset.stats
    for count, why in (
        (stats.skipped, "could not be used"),
        (stats.dropped_too_long, f"are longer than max_length {max_length:,}"),
        (stats.dropped_unsupervised, "have no token to learn"),
    ):
        if count:
            on_note(f"{count:,} of {stats.rows:,} {name} rows {why} and are left out")
