"""The stage `train`: checks, tokenizes, loads and trains; adapts the configuration when memory runs out.

torch is imported by the modules that these functions import when they run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.config.oom_ladder import as_arguments, oom_changes
from surefit.config.oom_ladder import with_oom_changes as adapted_config
from surefit.config.resolve import write_resolved
from surefit.config.trackers import TRACKERS
from surefit.core.errors import ConfigError, DataError, ShortOfMemory
from surefit.core.gc_pause import freeze_objects
from surefit.core.malloc import keep_what_is_freed, return_freed_memory
from surefit.core.rundir import RunDir, read_jsonl, write_json
from surefit.core.units import count_text, shell_quote
from surefit.stages.checking import require_no_errors, run_check
from surefit.stages.events import is_trained, record_stage
from surefit.stages.placing import require_inputs_apart, require_new_or_run
from surefit.stages.planning import build_run_plan
from surefit.stages.progress_listener import ProgressListener
from surefit.stages.run_context import CheckedRun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefit.data.rows.layouts import Examples
    from surefit.data.tokens.cache import TokenDataset
    from surefit.data.tokens.dataset_index_cache import CachedTrainingData
    from surefit.data.tokens.shard_manifest import ShardedTokens
    from surefit.evaluate.labelled import HeldOutLabels
    from surefit.evaluate.pairs import HeldOutPairs
    from surefit.parallel.process_group import World
    from surefit.train.inputs import TrainingData


def train_run(
    run: CheckedRun,
    watcher: ProgressListener,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    adapt: bool = False,
    planned: dict[str, Any] | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Check, then train; errors of the check prevent training.

    Args:
        resume: continue from the newest checkpoint, if there is one.
        overwrite: delete an existing run.
        dry_run: prepare everything, run no step, write nothing.
        adapt: when memory runs out, continue with a configuration that needs less and learns the same; with several
            processes, exit so that the launcher does so.
        planned: the plan, if it was already made.
        world: the run's processes, connected; only the first one checks and writes.

    Returns:
        The result; for a dry run, its predicted fields.

    Raises:
        CheckFailed: the check has findings of severity error.
    """
    options = _TrainOptions(resume, dry_run, adapt)
    with return_freed_memory(), contextlib.ExitStack() as stack:
        if world is not None and not world.is_first:
            return _train(watcher, run, options, planned, world)
        for line in run.gathered.adopted.lines():
            watcher.note(line)
        report = run_check(run.gathered)
        require_no_errors(report)
        from surefit.plan.loading import import_libraries

        import_libraries()  # before the tokenizer imports them in the slow way
        stack.enter_context(freeze_objects())
        if dry_run:
            return _train(watcher, run, options, planned, world)
        from surefit.model.tokenizer import load_tokenizer

        # Before anything is written or, with overwrite, deleted: the existing run may be at work.
        with run.run.locked("train", watcher.note):
            # A missing model is reported before planning, and leaves no run behind.
            load_tokenizer(run.resolved.config.model)
            _open_run(run, report, resume, overwrite)
            watcher.log_to(run.run.log)
            planned = planned or build_run_plan(run)
            write_json(run.run.plan, planned)
            with record_stage(run.run, "train"):
                return _train(watcher, run, options, planned, world)


@dataclasses.dataclass(frozen=True)
class _TrainOptions:
    """Arguments of `train_run`."""

    resume: bool
    dry_run: bool
    adapt: bool


def _open_run(run: CheckedRun, report: dict[str, Any], resume: bool, overwrite: bool) -> None:
    """Make the run directory, or take over an existing one, and write the run's initial files."""
    from surefit.facts.record import environment_record

    directory = run.run
    require_inputs_apart(run)
    if overwrite and not resume:
        _delete_run(directory)
    elif not resume and directory.resolved.exists() and (directory.checkpoints.exists() or is_trained(directory)):
        raise ConfigError(
            "the directory already contains a run",
            code="E8040",
            path=directory.path,
            field="output_dir",
            help="--resume continues it, --overwrite deletes it first, or choose another output_dir",
        )
    require_new_or_run(directory)
    directory.create()
    if run.loaded.path != directory.resolved or oom_changes(run.resolved):
        write_resolved(run.resolved, directory.resolved)
    write_json(directory.check, report)
    write_json(directory.environment, environment_record(run.hardware, run.model.parameters))


def _delete_run(directory: RunDir) -> None:
    """Delete SureFit's files in the directory; raise if it is not a run's."""
    if not directory.path.exists() or all(path == directory.lock for path in directory.path.iterdir()):
        return
    if not directory.resolved.exists() and not directory.events.exists():
        raise ConfigError(
            "not a run directory, so --overwrite does not delete it",
            code="E8041",
            path=directory.path,
            field="output_dir",
            help="choose another output_dir, or delete this one yourself",
        )
    tracker_files = (directory.path / tracker.leaves for tracker in TRACKERS.values() if tracker.leaves)
    for path in (*directory.artefacts(), *tracker_files):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def tokenize_dataset(watcher: ProgressListener, run: CheckedRun, world: World | None) -> TrainingData:
    """Tokenize the rows, which do not change when a run is adapted.

    Of several processes the first tokenizes, and the others read its files; prepared data are read by all alike.
    """
    from surefit.data.tokens.cache import TokenDataset
    from surefit.data.tokens.shard_manifest import ShardedTokens
    from surefit.model.tokenizer import load_tokenizer
    from surefit.train.inputs import TrainingData

    if world is None:
        return _tokenize_all_rows(watcher, run)
    from surefit.parallel.process_group import broadcast_from_rank0

    local_data = _tokenize_all_rows(watcher, run) if world.is_first else None
    token_rows: Any = (local_data.rows, local_data.eval_rows) if local_data else ()
    parts = [(type(rows), rows.path, rows.stats) for rows in token_rows]
    files, conversations = broadcast_from_rank0((parts, local_data.conversations) if local_data else None, world)
    rows, eval_rows = (
        ShardedTokens(path) if kind is ShardedTokens else TokenDataset(path, stats) for kind, path, stats in files
    )
    return local_data or TrainingData(load_tokenizer(run.resolved.config.model), rows, eval_rows, conversations)


def _tokenize_all_rows(watcher: ProgressListener, run: CheckedRun) -> TrainingData:
    from surefit.data.rows.layouts import read_splits
    from surefit.data.tokens.dataset import build_dataset, build_empty_dataset, eval_key, require_both_labels
    from surefit.model.tokenizer import load_tokenizer
    from surefit.train.inputs import TrainingData

    config = run.resolved.config
    tokenizer = load_tokenizer(config.model)
    shards = _open_token_shards(run, tokenizer)
    sources = run.gathered.sources
    sources.forget({*config.evaluate.extra_sets.values()} - {config.data.eval})
    with watcher.progress("tokenizing") as on_progress:
        build = partial(
            build_dataset,
            tokenizer=tokenizer,
            max_length=config.data.max_length,
            too_long=config.data.too_long,
            bad_rows=config.data.bad_rows,
            on_progress=on_progress,
            paired=config.objective.paired,
            labelled=config.objective.labelled,
        )
        rows: TokenDataset | ShardedTokens
        if shards is None:
            start = _load_or_tokenize(run, tokenizer, build)
            rows, skipped, conversations, held_out = start.rows, start.skipped, start.conversations, start.held_out
            if config.objective.labelled:
                require_both_labels(rows, config.data.train)
        else:
            if uncompared := shards.compare():
                watcher.note(uncompared)
            _, held_out = read_splits(config.data, run.recipe, config.train.seed, load=sources.load_rows)
            rows, skipped, conversations = shards, shards.manifest.skipped, shards.manifest.conversations
        try:
            eval_rows = (
                build_empty_dataset()
                if config.data.holds_nothing_out
                else build(held_out, source=eval_key(config.data))
            )
        except DataError as error:
            error.message = f"the held-out rows: {error.message}"
            raise
        sources.held_out = held_out
        sources.close([run.rows, *run.mixed.values()])
        held_out = held_out.without(eval_rows.refused)
    _say_what_was_left_out(watcher, rows, skipped)
    _say_what_was_left_out(watcher, eval_rows, (), "of the held-out rows, ")
    return TrainingData(tokenizer, rows, eval_rows, conversations, held_out)


def _load_or_tokenize(
    run: CheckedRun, tokenizer: PreTrainedTokenizerBase, build: Callable[[Examples], TokenDataset]
) -> CachedTrainingData:
    """Return the tokenized rows, from the cache of an earlier start if nothing has changed since."""
    from surefit import recipes
    from surefit.data.rows.layouts import load_training_rows, read_splits
    from surefit.data.tokens.dataset_index_cache import (
        CachedTrainingData,
        load_training_data,
        start_key,
        store_training_data,
    )

    config = run.resolved.config
    section, seed = config.data, config.train.seed
    load = run.gathered.sources.load_rows
    source = run.rows if run.rows is not None else load_training_rows(section)
    key = None
    if recipes.is_own(config.recipe) and not section.mix:
        key = start_key(source, section, run.recipe, seed, tokenizer)
        if (cached := load_training_data(key, source, section, run.recipe, load=load)) is not None:
            return cached
    examples, held_out = read_splits(section, run.recipe, seed, source, run.mixed, load)
    tokens = build(examples)
    examples = examples.without(tokens.refused)
    conversations = all(example.text is None for example in examples)
    start = CachedTrainingData(tokens, held_out, examples.skipped, conversations)
    if key is not None:
        store_training_data(key, source, section, start)
    return start


def _open_token_shards(run: CheckedRun, tokenizer: PreTrainedTokenizerBase) -> ShardedTokens | None:
    """Open the token shards of `data.tokenized`, if the config names them.

    Raises:
        ConfigError: they were made with another tokenizer.
    """
    from surefit.data.tokens.cache import tokenizer_digest
    from surefit.data.tokens.shard_manifest import ShardedTokens
    from surefit.data.tokens.shard_settings import require_tokenizer

    manifest, directory = run.gathered.prepared, run.resolved.config.data.tokenized
    if manifest is None or directory is None:
        return None
    require_tokenizer(manifest.tokenizer, tokenizer_digest(tokenizer), Path(directory))
    return ShardedTokens(Path(directory), manifest)


def _train(
    watcher: ProgressListener,
    run: CheckedRun,
    wishes: _TrainOptions,
    planned: dict[str, Any] | None,
    world: World | None,
) -> dict[str, Any]:
    """Train; with `adapt`, repeat with less memory as long as it runs out and something is left to change.

    Raises:
        ShortOfMemory: memory ran out in one of several processes, which must be restarted.
    """
    from surefit.train.out_of_memory import OutOfMemory

    data, resume = tokenize_dataset(watcher, run, world), wishes.resume
    while True:
        try:
            result = _train_once(watcher, run, data, wishes.dry_run, resume, planned, world)
        except OutOfMemory as error:
            changes = error.changes
            if not (wishes.adapt and changes):
                raise
            if world is not None:
                raise ShortOfMemory(error.message, code=error.code) from error
            watcher.note(f"{error.message}; adapting: {as_arguments(changes)}")
        else:
            return result | {"adapted": oom_changes(run.resolved)}
        # Outside of the handler: the error's traceback held the tensors that filled the memory.
        _free_memory()
        run, planned = _adapt(run, changes, wishes.dry_run)
        resume = resume or run.run.checkpoints.exists()


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _adapt(run: CheckedRun, changes: dict[str, Any], dry_run: bool) -> tuple[CheckedRun, dict[str, Any] | None]:
    """Return the run with other settings and its new plan, and write both to the run directory."""
    run = dataclasses.replace(run, resolved=adapted_config(run.resolved, changes))
    if dry_run:
        return run, None
    planned = build_run_plan(run)
    write_resolved(run.resolved, run.run.resolved)
    write_json(run.run.plan, planned)
    run.run.note("train", "adapted", changes=changes)
    return run, planned


def _stays_small(planned: dict[str, Any] | None, kind: str) -> bool:
    """Return whether the plan predicts a small process; for a GPU run the plan is about the GPU's memory."""
    estimate = planned["estimate"] if planned and kind == "cpu" else None
    return estimate is not None and bool(estimate["keeps_freed_memory"])


def _train_once(
    watcher: ProgressListener,
    run: CheckedRun,
    data: TrainingData,
    dry_run: bool,
    resume: bool,
    planned: dict[str, Any] | None,
    world: World | None,
) -> dict[str, Any]:
    from surefit.evaluate.labelled import summarize_held_out_labels
    from surefit.evaluate.pairs import summarize_held_out_pairs
    from surefit.generate.save import require_savable
    from surefit.model.adapter import trainable_parameters
    from surefit.model.identity import base_directory
    from surefit.model.load import load_model
    from surefit.model.prepare import prepare_for_training
    from surefit.parallel.engine import build_engine
    from surefit.parallel.process_group import World
    from surefit.telemetry.memory import reset_peak
    from surefit.telemetry.sinks import make_sinks
    from surefit.train.inputs import Callbacks, TrainingEnvironment
    from surefit.train.loop import Trainer

    config = run.resolved.config
    if _stays_small(planned, run.hardware.kind):
        keep_what_is_freed()
    engine = build_engine(config.parallel, world or World())
    sinks = make_sinks(config.telemetry, run.run) if engine.world.is_first else ()
    reset_peak()
    base = load_model(config.model, run.hardware, engine.loading_device(run.hardware.kind))
    if config.train.method == "full":
        require_savable(base, base_directory(config.model))
    model, notes = prepare_for_training(base, config, run.hardware)
    trained, total = trainable_parameters(model)
    for note in notes:
        watcher.note(note)
    per, what = config.objective.answers_per_example, config.objective.examples_name
    held_out = f"{len(data.eval_rows) // per:,} held out"
    watcher.note(
        f"training {count_text(trained)} of {count_text(total)} parameters on {len(data.rows) // per:,} {what}, "
        + ("none held out (data.eval is 0)" if config.data.holds_nothing_out else held_out)
    )
    target = run.run.path  # its resolved.yaml also contains the --set values
    with watcher.training_progress() as on_step:
        resume_command = f"surefit {run.verb} {shell_quote(target)} --resume"
        environment = TrainingEnvironment(engine, run.model, run.hardware, planned, resume_command)
        callbacks = Callbacks(on_step, watcher.note, _scorer(run, data), sinks, watcher.training_phase)
        job = Trainer(model, data, config, run.run, environment, callbacks)
        stats = dataclasses.asdict(data.rows.stats)  # type: ignore[attr-defined]
        summary = {"rows": stats, "total_steps": job.total_steps, "dry_run": dry_run}
        if dry_run:
            job.audit(write=False)
            job.dry_pass(write=False)
            return summary
        result = job.fit(resume)
    events = read_jsonl(run.run.events) if config.objective.name != "sft" else []
    pairs: HeldOutPairs | HeldOutLabels | None = (
        summarize_held_out_labels(job.held_out.lines, events)
        if config.objective.labelled
        else summarize_held_out_pairs(job.held_out.lines, events)
    )
    return summary | {
        "output": str(result.output),
        "steps": result.counters.step,
        "seconds": result.counters.seconds,
        "loss": result.loss,
        "eval_loss": result.eval_loss,
        **({} if pairs is None else _held_out_preferences(pairs)),
        "rejected": result.counters.rejected,
        "resumed_from": result.resumed_from,
        "best_step": result.best_step,
        "stopped_early": result.stopped_early,
        "notes": result.notes,
    }


def _held_out_preferences(measured: HeldOutPairs | HeldOutLabels) -> dict[str, Any]:
    """Return what the result says of held-out pairs or labelled answers."""
    from surefit.evaluate.pairs import HeldOutPairs

    name = "held_out_pairs" if isinstance(measured, HeldOutPairs) else "held_out_labels"
    return {name: dataclasses.asdict(measured), f"{name}_text": measured.text}


def _scorer(run: CheckedRun, data: TrainingData) -> Any:
    """Return the scorer for evaluation in training, or None; of several processes only the first calls it."""
    from surefit.data.rows.layouts import without_undesirable
    from surefit.evaluate.in_training import build_scorer

    config = run.resolved.config
    if not config.evaluate.in_training or len(data.eval_rows) == 0:
        return None
    held_out = without_undesirable(data.held_out) if len(data.held_out) else data.held_out
    return build_scorer(config, run.recipe, data.tokenizer, held_out)


def _say_what_was_left_out(watcher: ProgressListener, rows: Any, skipped: Sequence[str], which: str = "") -> None:
    stats = rows.stats
    left_out = (
        (stats.skipped, "rows could not be used"),
        (stats.dropped_too_long, "examples are over data.max_length"),
        (stats.dropped_unsupervised, "examples have no supervised token"),
    )
    for number, reason in left_out:
        if number:
            total = stats.rows + (stats.split if "examples" in reason else 0)
            watcher.note(f"left out: {which}{number:,} of {total:,} {reason}")
    for location in skipped[:3]:
        watcher.note(f"  {location}")
    if stats.split and rows.desirable is not None:
        watcher.note(f"{which}{stats.split:,} pairs are two labelled answers each")
    elif stats.split and not which:
        watcher.note(
            f"{stats.split:,} more examples than rows: the chat template rewrites earlier turns, so conversations are "
            "split at those turns"
        )
    if stats.cut:
        watcher.note(
            f"truncated: the documents of {stats.cut:,} of {stats.rows:,} examples, to fit into data.max_length"
        )
