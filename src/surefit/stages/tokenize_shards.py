"""The stage `prepare`: tokenizes rows into shards, in one process, in several, in an array job's tasks, or on a
cluster.

The work is a list of tasks that depends on the files alone, kept in DIR/plan.json. Each task becomes one shard, by a
function of the task alone. When all exist the manifest is written, and training can start.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surefit.config.capabilities import conflict_with_trait
from surefit.core import env
from surefit.core.errors import ConfigError, DataError, MachineError
from surefit.core.lock import hold_lock
from surefit.core.processes import pool
from surefit.core.rundir import machine_errors, read_json, write_json
from surefit.data.read.file_io import display_name, filesystem, is_url, remote_file_errors
from surefit.data.read.sources import list_source_files, resolve_source
from surefit.data.read.stream import RowRange, split_into_ranges, stream_rows
from surefit.data.rows.layouts import HELD_OUT
from surefit.data.tokens.cache import TokenizationStats
from surefit.data.tokens.shard_manifest import MANIFEST, ShardManifest, held_out_file
from surefit.data.tokens.shard_settings import (
    build_shard_settings,
    fingerprint,
    refuse_limit,
    require_shard_settings,
    require_tokenizer,
)
from surefit.data.tokens.shards import (
    ShardContext,
    ShardTask,
    find_damaged_file,
    read_complete_shard,
    shard_path,
    shard_sha256,
    source_sha256,
    write_shard,
)
from surefit.facts.gguf_source import gguf_source
from surefit.launch.cluster import run_on_ray
from surefit.stages.placing import require_shards_apart
from surefit.stages.progress_listener import ProgressListener
from surefit.stages.shard_lock import lock_shard_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefit.config.schema import SureFitConfig
    from surefit.task import TaskRecipe

PLAN = "plan.json"
ShardEngine = Literal["local", "ray"]
LAYOUT_ROWS = 1000
"""Rows of a source whose columns determine its layout."""


@dataclass(frozen=True)
class ShardPlan:
    """The tasks of a config's shards.

    Attributes:
        settings, fingerprint, tokenizer: as in `shard_manifest.ShardManifest`.
        files: the sources' files on this machine: path, bytes, time of change.
        tasks: one task for each shard.
    """

    settings: Mapping[str, Any]
    fingerprint: str
    tokenizer: str
    files: Sequence[Mapping[str, Any]]
    tasks: Sequence[ShardTask]


@dataclass(frozen=True)
class ShardJob:
    """One shard to make, in any process."""

    config: SureFitConfig
    task: ShardTask
    directory: Path
    fingerprint: str


@dataclass(frozen=True)
class ShardOptions:
    """Options from the command line.

    Attributes:
        workers: number of processes.
        group: (i, n): make every n-th shard from the i-th, from 0. The group that ends last writes the manifest.
        overwrite: delete shards of other settings.
        verify: compare the hash of every existing file, and remake damaged shards.
        dry_run: only report the work.
        engine: "local", processes on this machine, or "ray", the cores of a cluster.
    """

    workers: int = 1
    group: tuple[int, int] | None = None
    overwrite: bool = False
    verify: bool = False
    dry_run: bool = False
    engine: ShardEngine = "local"


def prepare_shards(config: SureFitConfig, watcher: ProgressListener, wishes: ShardOptions) -> dict[str, Any]:
    """Make every missing shard of `data.tokenized` and, once all exist, the manifest.

    Returns:
        Counts of shards, rows and tokens.

    Raises:
        ConfigError: `data.tokenized` is not set, or holds shards of other settings.
        DataError: rows that cannot be used. MachineError: no disk space; another process makes the same shards.
    """
    directory = tokenized_directory(config)
    if wishes.dry_run:
        return _summary(build_shard_plan(config, directory, wishes.overwrite, write=False), directory, wishes.group)
    with machine_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with lock_shard_directory(directory, wishes.group, watcher):
        with hold_lock(
            directory / ".lock-plan", "prepare", watcher.note, wait=True
        ):  # one process scans all files, not each one
            plan = build_shard_plan(config, directory, wishes.overwrite)
        group_tasks = _of_group(plan.tasks, wishes.group)
        missing_tasks = [
            task for task in group_tasks if not _usable(directory, task, plan.fingerprint, wishes.verify, watcher)
        ]
        if len(group_tasks) > len(missing_tasks):
            watcher.note(
                f"{len(group_tasks) - len(missing_tasks):,} of {len(group_tasks):,} shards are already complete"
            )
        if missing_tasks:
            (directory / MANIFEST).unlink(missing_ok=True)
        _make(
            missing_tasks,
            [ShardJob(config, task, directory, plan.fingerprint) for task in missing_tasks],
            watcher,
            wishes,
        )
        if wishes.group is None or _all_there(plan, directory):
            _finish(plan, directory, config)
        return _summary(plan, directory, wishes.group)


def tokenized_directory(config: SureFitConfig) -> Path:
    """Return the directory `data.tokenized`.

    Raises:
        ConfigError: it is not set, or cannot be combined with another setting.
    """
    paired = conflict_with_trait(config, "prepared data")
    if paired is not None:
        raise ConfigError(paired.message, code="E8880", field=paired.field, help=paired.help)
    if config.data.tokenized is None:
        raise ConfigError(
            "is not set", code="E8033", field="data.tokenized", help="set it to a directory for the shards"
        )
    refuse_limit(config)
    names = {PLAN: False, MANIFEST: False, HELD_OUT: False, "shard-000000": True}
    require_shards_apart(config, names, PLAN)
    return Path(config.data.tokenized)


def build_shard_plan(config: SureFitConfig, directory: Path, overwrite: bool = False, write: bool = True) -> ShardPlan:
    """Return the tasks of a config: the directory's plan if nothing has changed, else a new one from the files.

    Raises:
        ConfigError: the directory holds shards of other settings, and `overwrite` is not set.
    """
    from surefit import recipes
    from surefit.data.rows.columns import recipe_for

    recipe = recipe_for(recipes.get_recipe(config.recipe), config)
    _, digest = load_cached_tokenizer(config.model.model_dump_json())
    settings = build_shard_settings(config, recipe)
    files = source_files(config)
    existing_plan = _read_plan(directory)
    if existing_plan is not None and existing_plan.fingerprint != fingerprint(settings, digest):
        if not overwrite:
            require_shard_settings(existing_plan.settings, config, recipe, directory)
            require_tokenizer(existing_plan.tokenizer, digest, directory)
        if write:
            _delete(directory)
        existing_plan = None
    if existing_plan is not None and existing_plan.files == files:
        return existing_plan
    tasks = list(_tasks(config, recipe))
    if existing_plan is not None and write:
        _drop_changed(directory, existing_plan, files)
    plan = ShardPlan(settings, fingerprint(settings, digest), digest, files, tasks)
    if write:
        write_json(directory / PLAN, asdict(plan))
    return plan


def _tasks(config: SureFitConfig, recipe: TaskRecipe) -> Iterator[ShardTask]:
    """Yield the tasks of `data.train`, then of every source of `data.mix`: for each range of rows a shard with the rows
    that an epoch sees a whole number of times, and one with the share that it sees once more.
    """
    section = config.data
    number = 0
    for source, passes in [(section.train, 1.0), *section.mix.items()]:
        whole_passes, share = divmod(passes, 1)
        holds_out = source == section.train or (bool(recipe.parts) and section.share is not None)
        parts = [(int(whole_passes), 1.0)] * (whole_passes > 0) + [(1, share)] * (share > 0)
        columns = tuple(
            dict.fromkeys(
                name for item in islice(stream_rows(source, split=section.split), LAYOUT_ROWS) for name in item.row
            )
        )
        for rows in split_into_ranges(source, split=section.split):
            for part_number, (repeat, part_share) in enumerate(parts):
                yield ShardTask(number, source, columns, rows, repeat, part_share, part_number == 0, holds_out)
                number += 1


def source_files(config: SureFitConfig) -> list[dict[str, Any]]:
    """Return the files of `data.train` and `data.mix` with bytes and time of change, without the hub's data sets.

    Raises:
        DataError: a file does not exist, or its address contains a secret. MachineError: a URL cannot be reached.
    """
    sources = (config.data.train, *config.data.mix)
    return [file_record for source in sources for file_record in _files(source, config.data.split)]


def _files(source: str, split: str) -> list[dict[str, Any]]:
    records = []
    for file in list_source_files(resolve_source(source), split):
        if display_name(file) != file:
            raise DataError(
                "the URL seems to contain a signature or a password, and shards record their source",
                code="E8034",
                path=display_name(file),
                help="put the credentials in the environment, or download the file",
            )
        if is_url(file):
            system, path = filesystem(file)
            with remote_file_errors(file):
                info = system.info(path)
            version = next((str(info[key]) for key in ("ETag", "LastModified", "mtime") if info.get(key)), None)
            records.append({"path": file, "bytes": info.get("size"), "version": version})
        else:
            status = os.stat(file)
            records.append({"path": file, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns})
    return records


def _read_plan(directory: Path) -> ShardPlan | None:
    if not (directory / PLAN).is_file():
        return None
    try:
        values = read_json(directory / PLAN)
        tasks = [
            ShardTask(**{**task, "columns": tuple(task["columns"]), "rows": RowRange(**task["rows"])})
            for task in values["tasks"]
        ]
        return ShardPlan(**{**values, "tasks": tasks})
    except (DataError, TypeError, KeyError):
        help_text = "delete it; complete shards are kept"
        raise DataError("not a shard plan", code="E8035", path=directory / PLAN, help=help_text) from None


def _delete(directory: Path) -> None:
    """Delete everything that this stage has written in the directory; nothing else."""
    for path in (directory / MANIFEST, held_out_file(directory), directory / PLAN):
        path.unlink(missing_ok=True)
    for path in directory.glob("shard-*/"):
        shutil.rmtree(path)


def _drop_changed(directory: Path, before: ShardPlan, files: Sequence[Mapping[str, Any]]) -> None:
    """Remove the shards of changed files, except those whose own range is unchanged."""
    unchanged = {file["path"] for file in files if file in before.files}
    for task in before.tasks:
        meta = None if task.rows.file in unchanged else read_complete_shard(directory, task, before.fingerprint)
        if meta is not None and meta["source_sha256"] != source_sha256(task.rows):
            shutil.rmtree(shard_path(directory, task.number))


def _of_group(tasks: Sequence[ShardTask], group: tuple[int, int] | None) -> list[ShardTask]:
    first, step = group or (0, 1)
    return list(tasks[first::step])


def _usable(directory: Path, task: ShardTask, made: str, verify: bool, watcher: ProgressListener) -> bool:
    meta = read_complete_shard(directory, task, made)
    if meta is None or not verify:
        return meta is not None
    path = shard_path(directory, task.number)
    name = find_damaged_file(path, meta)
    if name is not None:
        watcher.note(f"{path / name} is damaged; rebuilding the shard")
    return name is None


def _make(todo: Sequence[ShardTask], jobs: Sequence[ShardJob], watcher: ProgressListener, wishes: ShardOptions) -> None:
    """Make shards, and report the progress."""
    start, tokens = time.monotonic(), 0
    on_cluster = jobs and wishes.engine == "ray"
    shard_metas = (
        run_on_ray(make_shard, jobs) if on_cluster else _iterate_made_shards(jobs, min(wishes.workers, len(jobs)))
    )
    with watcher.progress("shards") as on_progress:
        on_progress(0, len(todo), "")
        for completed, meta in enumerate(shard_metas, start=1):
            tokens += meta["stats"]["tokens"]
            tokens_per_second = tokens / max(1e-9, time.monotonic() - start)
            on_progress(completed, len(todo), f"{tokens:,} tokens, {tokens_per_second:,.0f} tokens/s")


def _iterate_made_shards(jobs: Sequence[ShardJob], workers: int) -> Iterable[dict[str, Any]]:
    if workers <= 1:
        yield from map(make_shard, jobs)
        return
    from concurrent.futures import as_completed

    with pool(workers, _start_worker, (_needs_torch(jobs[0].config),)) as executor:
        futures = [executor.submit(make_shard, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            help_text = "run the same command again, with fewer --workers if memory ran out: complete shards are kept"
            raise MachineError("a worker was killed", code="E8036", help=help_text) from None
        finally:
            executor.shutdown(cancel_futures=True)


def _needs_torch(config: SureFitConfig) -> bool:
    """Return whether a worker may have to import torch: for a model's or a recipe's own code, or to find the conversion
    of a GGUF file.
    """
    from surefit import recipes

    has_external_code = config.model.trust_remote_code or not recipes.is_own(config.recipe)
    return has_external_code or gguf_source(config.model.name_or_path) is not None


def _start_worker(with_torch: bool) -> None:
    env.quiet_libraries()
    env.one_tokenizer_thread()
    if not with_torch:
        # transformers imports torch wherever it is installed; an entry of None marks it as not installed.
        sys.modules["torch"] = None  # type: ignore[assignment]


def make_shard(job: ShardJob) -> dict[str, Any]:
    """Make one shard; a function of the job and its files, which any process may call.

    Raises:
        ConfigError: this process has another tokenizer than the plan.
        DataError, MachineError: as `shards.write_shard`.
    """
    from surefit import recipes
    from surefit.data.rows.columns import recipe_for

    config = job.config
    recipe = recipe_for(recipes.get_recipe(config.recipe), config)
    tokenizer, digest = load_cached_tokenizer(config.model.model_dump_json())
    if fingerprint(build_shard_settings(config, recipe), digest) != job.fingerprint:
        require_tokenizer("", digest, job.directory)
    held_out_positions = frozenset() if job.task.holds_out else _held_out_positions(config, recipe)
    context = ShardContext(config.data, config.train.seed, recipe, tokenizer, job.fingerprint, held_out_positions)
    return write_shard(job.task, context, job.directory)


@lru_cache(maxsize=1)
def load_cached_tokenizer(section: str) -> tuple[PreTrainedTokenizerBase, str]:
    """Load the tokenizer of a config's `model`, given as JSON, and its digest."""
    from surefit.config.schema import ModelSection
    from surefit.data.tokens.cache import tokenizer_digest
    from surefit.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ModelSection.model_validate_json(section))
    return tokenizer, tokenizer_digest(tokenizer)


def _held_out_positions(config: SureFitConfig, recipe: TaskRecipe) -> frozenset[float]:
    """Return the positions of the prompts in `data.eval`, if that is a file."""
    from surefit.data.rows.layouts import load_held_out, prompt_position, to_examples

    section = config.data
    if not isinstance(section.eval, str):
        return frozenset()
    rows = load_held_out(section.eval, section.split, None)
    examples = to_examples(rows, recipe, section.format, section.bad_rows)
    return frozenset(prompt_position(example, config.train.seed) for example in examples)


def _all_there(plan: ShardPlan, directory: Path) -> bool:
    existing_names = set(os.listdir(directory))
    return all(shard_path(directory, task.number).name in existing_names for task in plan.tasks)


def _finish(plan: ShardPlan, directory: Path, config: SureFitConfig) -> None:
    """Combine the shards' records; the manifest is written last."""
    metas = [
        meta for task in plan.tasks if (meta := read_complete_shard(directory, task, plan.fingerprint)) is not None
    ]
    if len(metas) < len(plan.tasks):
        raise DataError(
            f"{len(plan.tasks) - len(metas):,} of {len(plan.tasks):,} shards disappeared while others were written",
            code="E8037",
            path=directory,
            help="run the same command again",
        )
    shards = [_entry(task, meta) for task, meta in zip(plan.tasks, metas, strict=True)]
    stats = _total(plan.tasks, metas)
    held_out = sum(meta["held_out"] for meta in metas)
    _require_rows(stats, held_out, config)
    paths = [shard_path(directory, task.number) for task in plan.tasks]
    _join([path / HELD_OUT for path in paths], held_out_file(directory))
    lengths: Counter[str] = Counter()
    for task, meta in zip(plan.tasks, metas, strict=True):
        lengths.update({upto: count * task.repeat for upto, count in meta["lengths"].items()})
    manifest = ShardManifest(
        settings=plan.settings,
        fingerprint=plan.fingerprint,
        tokenizer=plan.tokenizer,
        shards=shards,
        stats=stats,
        lengths={upto: lengths[upto] for upto in sorted(lengths, key=int)},
        held_out=held_out,
        conversations=all(meta["conversations"] for meta in metas),
        skipped=[line for meta in metas for line in meta["skipped"]][:3],
        files=plan.files,
    )
    for path in set(directory.glob("shard-*/")) - set(paths):
        shutil.rmtree(path)
    write_json(directory / MANIFEST, asdict(manifest))


def _join(parts: Sequence[Path], path: Path) -> None:
    """Concatenate files atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with machine_errors(path):
        try:
            with open(temporary, "wb") as file:
                for part in parts:
                    with open(part, "rb") as content:
                        shutil.copyfileobj(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _entry(task: ShardTask, meta: Mapping[str, Any]) -> dict[str, Any]:
    stats = meta["stats"]
    return {
        "rows": stats["kept"],
        "tokens": stats["tokens"],
        "longest": stats["longest"],
        "repeat": task.repeat,
        "sha256": shard_sha256(meta["sha256"]),
    }


def _total(tasks: Sequence[ShardTask], metas: Sequence[Mapping[str, Any]]) -> TokenizationStats:
    """Sum the statistics of all shards, as an epoch sees them; a skipped row counts once, whatever its repetitions."""
    total: Counter[str] = Counter()
    for task, meta in zip(tasks, metas, strict=True):
        stats = meta["stats"]
        weighted = {
            key: value * task.repeat for key, value in stats.items() if key not in ("rows", "skipped", "longest")
        }
        total.update(weighted | {"skipped": stats["skipped"]})
        total["rows"] += (stats["rows"] - stats["skipped"]) * task.repeat + stats["skipped"]
    longest = max(meta["stats"]["longest"] for meta in metas)
    return TokenizationStats(
        **{field.name: total[field.name] for field in fields(TokenizationStats)} | {"longest": longest}
    )


def _require_rows(stats: TokenizationStats, held_out: int, config: SureFitConfig) -> None:
    if not stats.kept:
        raise DataError(
            f"no example is left: of {stats.rows:,}, {stats.dropped_too_long:,} are longer than max_length "
            f"{config.data.max_length:,} tokens and {stats.dropped_unsupervised:,} have no supervised token",
            code="E8038",
            field="data.max_length",
            help="raise data.max_length, as far as the model's context allows",
        )
    if config.data.share and not held_out:
        raise DataError(
            f"{config.data.share:g} of {stats.rows:,} rows holds out no row",
            code="E8039",
            field="data.eval",
            help="raise data.eval, or set it to a file with rows to score on",
        )


def _summary(plan: ShardPlan, directory: Path, group: tuple[int, int] | None) -> dict[str, Any]:
    group_tasks = _of_group(plan.tasks, group)
    metas = [
        meta for task in group_tasks if (meta := read_complete_shard(directory, task, plan.fingerprint)) is not None
    ]
    return {
        "directory": str(directory),
        "shards": len(group_tasks),
        "complete": len(metas),
        "rows": sum(meta["stats"]["kept"] for meta in metas),
        "tokens": sum(meta["stats"]["tokens"] for meta in metas),
        "held_out": sum(meta["held_out"] for meta in metas),
        "manifest": (directory / MANIFEST).is_file(),
        "bytes": sum(file["bytes"] for file in plan.files),
    }
