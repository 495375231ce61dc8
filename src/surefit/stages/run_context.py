"""Starting point of every stage: the config, the recipe, the facts and the decisions. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from surefit.config.by_rows import needs_row_count
from surefit.config.load import OVERRIDE, LoadedConfig, is_overridden, load_config
from surefit.config.resolve import ResolvedConfig, resolve_config
from surefit.config.world import LaunchedProcesses
from surefit.core import env
from surefit.core.errors import ConfigError, SureFitError
from surefit.core.rundir import RunDir, read_json
from surefit.core.units import shell_quote
from surefit.stages.events import require_trained
from surefit.stages.run_sources import RunSources

if TYPE_CHECKING:
    from surefit.config.schema import ModelSection, SureFitConfig
    from surefit.data.read.load import Rows
    from surefit.data.rows.layouts import Examples
    from surefit.data.tokens.shard_manifest import ShardManifest
    from surefit.facts.hardware import HardwareFacts
    from surefit.facts.model import ModelFacts
    from surefit.importers.adopt import AdoptedConfig
    from surefit.plan.planner import ExampleLengths
    from surefit.task import TaskRecipe

T = TypeVar("T")


@dataclass(frozen=True)
class RunContext:
    """Everything known about a run; what is unknown is None, with the reason in `problems`.

    Attributes:
        rows: the training rows; None also where they are on the hub, which is not read before training, and where
            `data.tokenized` replaces them.
        mixed: the rows of `data.mix` that are on this machine and can be read, by source.
        adopted: the config's changes from other tools' files that it names.
        prepared: the manifest of `data.tokenized`.
        looked: whether large data sets were only sampled (`Rows.total` is the full number).
        sources: the rows that were read; every stage takes them from there.
        counted: examples of `data.train`, None while not all rows are counted, and those of `data.mix` in one epoch.
    """

    loaded: LoadedConfig
    run: RunDir
    recipe: TaskRecipe | None
    model: ModelFacts | None
    hardware: HardwareFacts | None
    rows: Rows | None
    mixed: dict[str, Rows]
    resolved: ResolvedConfig | None
    problems: tuple[SureFitError, ...]
    adopted: AdoptedConfig
    prepared: ShardManifest | None = None
    looked: bool = False
    sources: RunSources = field(default_factory=RunSources)
    counted: tuple[int | None, float] = (None, 0.0)


@dataclass(frozen=True)
class CheckedRun:
    """A run without problems, which any stage can work on.

    Attributes:
        gathered: the run context, for the rules.
        verb: the command that trains it, and that continues with --resume.
    """

    loaded: LoadedConfig
    run: RunDir
    recipe: TaskRecipe
    model: ModelFacts
    hardware: HardwareFacts
    rows: Rows | None
    mixed: dict[str, Rows]
    resolved: ResolvedConfig
    gathered: RunContext
    verb: Literal["train", "run"] = "train"

    @property
    def row_count(self) -> int | None:
        """Number of training rows before any is held out; None while they are not counted."""
        if (prepared := self.gathered.prepared) is not None:
            return prepared.stats.kept + prepared.held_out
        return len(self.rows) if self.rows is not None else None


def load_run_context(
    target: Path | LoadedConfig,
    overrides: Sequence[str] | None = None,
    *,
    training: bool = True,
    patience: float | None = None,
    look: bool = False,
    resume: bool = False,
) -> RunContext:
    """Read a config file, or the resolved config of a run directory, and collect the facts of everything it names.

    Args:
        target: path of either, or a loaded config, which already includes its overrides.
        training: whether the launched processes train together; otherwise they do not determine the run's devices.
        patience: seconds to wait for the hub's first response about a model that is not on this machine.
        look: read only a sample of large data sets, which needs less than a second.
        resume: take what an existing run decided at its start from its resolved.yaml.

    Raises:
        ConfigError: the config itself is not valid; every other problem is returned.
    """
    from surefit import recipes
    from surefit.data.read.sources import is_local
    from surefit.data.rows.columns import recipe_for
    from surefit.data.tokens.shard_settings import open_prepared_data
    from surefit.evaluate.settings import require_evaluation_settings
    from surefit.facts.hardware import hardware_facts
    from surefit.importers.adopt import apply_launcher_files
    from surefit.stages.recorded import with_recorded_decisions

    adopted = apply_launcher_files(
        target if isinstance(target, LoadedConfig) else _load_own_config(find_config_file(target), overrides or ())
    )
    loaded, started = adopted.loaded, _read_started_processes() if training else None
    run = RunDir(target if isinstance(target, Path) and target.is_dir() else Path(loaded.config.output_dir))
    if resume:
        loaded = with_recorded_decisions(loaded, run, started)
    config = loaded.config
    problems: list[SureFitError] = []
    sources = RunSources()

    def attempt(look: Callable[[], T], key: str | None = None) -> T | None:
        try:
            return look()
        except SureFitError as error:
            if key is not None:
                error.about(key)
            problems.append(error)
            return None

    recipe = attempt(lambda: recipe_for(recipes.get_recipe(config.recipe), config))
    if recipe is not None:
        attempt(lambda: require_evaluation_settings(config.evaluate, recipe))
    model = _configured_model(config.model, patience, attempt)
    hardware = attempt(lambda: hardware_facts(config.hardware.gpu, run.path, config.hardware.disk))
    shards = None
    if config.data.tokenized is not None and recipe is not None:
        shards = attempt(partial(open_prepared_data, config, recipe))
    reads_rows = config.data.tokenized is None
    rows = (
        attempt(partial(_training_rows, config, look, sources), "data.train")
        if reads_rows and is_local(config.data.train)
        else None
    )
    if reads_rows:
        problems += _unreadable_urls(config)
    local_sources = [source for source in config.data.mix if reads_rows and is_local(source)]
    rows_by_source = {source: attempt(partial(_mixed_rows, source, config, look, sources)) for source in local_sources}
    mixed = {source: source_rows for source, source_rows in rows_by_source.items() if source_rows is not None}
    # Shards are an epoch's rows: none of them is held out any more.
    count, mixed_rows = (0, shards.stats.kept) if shards else count_training_rows(config, rows, mixed)
    examples_per = examples_per_row(config, recipe, model, rows)
    count, mixed_rows = count and round(count * examples_per), mixed_rows * examples_per
    if count is None and not problems and needs_row_count(config):
        problems.append(_uncounted_rows(loaded))
    resolved = None
    if model and hardware:
        resolve = _resolver(model, hardware, count, mixed_rows, started)
        resolved = attempt(lambda: resolve(loaded))
        if resolved is None:
            with contextlib.suppress(ConfigError):  # the error is among the problems already
                resolved = resolve(with_auto_micro_batch(loaded))
    for problem in problems:
        point_at_config(problem, loaded)
    return RunContext(
        loaded, run, recipe, model, hardware, rows, mixed, resolved, tuple(problems), adopted, shards, look, sources,
        counted=(count, mixed_rows),
    )  # fmt: skip


def _resolver(
    model: ModelFacts, hardware: HardwareFacts, rows: int | None, mixed: float, started: LaunchedProcesses | None
) -> Callable[[LoadedConfig], ResolvedConfig]:
    """Return a function that resolves a config for this model, machine and number of examples."""
    from surefit.facts.generation import eval_batch_chooser
    from surefit.plan.memory_interval import closed_form_upper_bound

    needed, fitting = closed_form_upper_bound(model, hardware), eval_batch_chooser(model, hardware)

    def resolve(loaded: LoadedConfig) -> ResolvedConfig:
        return resolve_config(loaded, model, hardware, rows, mixed, needed, started, fitting)

    return resolve


def point_at_config(error: SureFitError, loaded: LoadedConfig) -> None:
    """Move an error about a file that does not exist to the line of the config that names it, where it can be mended;
    the message then names the file."""
    field, path = error.field or "", error.path
    if path is None or error.line is not None or "://" in path or Path(path).exists():
        return
    overridden = is_overridden(field, loaded.overridden)
    if not overridden and field not in loaded.lines:
        return
    error.message = f"{path}: {error.message}"
    error.path, error.line = (OVERRIDE, None) if overridden else (str(loaded.path), loaded.lines[field])


def _load_own_config(path: Path, overrides: Sequence[str]) -> LoadedConfig:
    """Load a config; a file of another tool is named as such, instead of its keys one by one.

    Raises:
        ConfigError: it is not a valid config of SureFit's.
    """
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        if error.code == "E2018" and error.also and (other := _other_tools_config(path)) is not None:
            raise other from None
        raise


def _other_tools_config(path: Path) -> ConfigError | None:
    """Return the error for a config of another tool, or for one without sections; None if it is meant for SureFit."""
    from surefit.importers import TOOL_NAMES, detect_tool

    try:
        tool = detect_tool(path)
    except ConfigError as error:
        return error if error.code == "E3550" else None
    if tool == "surefit":
        return None
    written = f"{path.stem}-surefit.yaml"
    return ConfigError(
        f"this is a config of {TOOL_NAMES.get(tool, tool)}, not of SureFit",
        code="E8702",
        path=path,
        help=f"surefit import {shell_quote(path)} --output {shell_quote(written)} makes a config of it; "
        f"surefit check {shell_quote(path)} checks it as it is",
    )


def _uncounted_rows(loaded: LoadedConfig) -> ConfigError:
    """Return the error of a batch or epochs that are "auto" with rows that nobody has counted."""
    train, source = loaded.config.train, loaded.config.data.train
    name = "global_batch_size" if train.global_batch_size == "auto" else "num_train_epochs"
    return ConfigError(
        f"auto depends on the number of rows, and those of {source} are not counted before training",
        code="E8050",
        path=loaded.path,
        line=loaded.lines.get(f"train.{name}"),
        field=f"train.{name}",
        help=f"write a number; `surefit init --data {shell_quote(source)}` counts the rows and chooses",
    )


def _configured_model(section: ModelSection, patience: float | None, attempt: Callable[..., Any]) -> ModelFacts | None:
    """Read the model's facts, then replace its chat template and add the config's new tokens."""
    from surefit.facts.chat_template import load_chat_templates
    from surefit.facts.model import model_facts
    from surefit.facts.named_templates import DEFAULT, TOOL_USE
    from surefit.facts.tokenizer import facts_of_tokenizer
    from surefit.facts.vocabulary import with_new_tokens

    model: ModelFacts | None = attempt(
        lambda: model_facts(section.name_or_path, section.revision, patience), "model.name_or_path"
    )
    if model is None:
        return None
    if (template_setting := section.chat_template) is not None:
        texts = attempt(lambda: load_chat_templates(template_setting)) or {}
        model = replace(
            model,
            chat_template=texts.get(DEFAULT),
            tool_template=texts.get(TOOL_USE),
            has_chat_template=True,
            other_template=model.chat_template,
        )
    if section.add_tokens:
        model = with_new_tokens(model, section.add_tokens, attempt(partial(facts_of_tokenizer, model)))
    return model


def _unreadable_urls(config: SureFitConfig) -> list[SureFitError]:
    """Return the errors that prevent this machine from reading the config's URLs, without accessing them."""
    from surefit.data.read.file_io import require_file_system
    from surefit.data.read.sources import resolve_source

    sources = {"data.train": config.data.train, **{f"data.mix.{source}": source for source in config.data.mix}}
    if isinstance(config.data.eval, str):
        sources["data.eval"] = config.data.eval
    sources |= {f"evaluate.extra_sets.{name}": source for name, source in config.evaluate.extra_sets.items()}
    problems: list[SureFitError] = []
    for key, source in sources.items():
        try:
            if "://" in source and resolve_source(source).kind == "url":
                require_file_system(source)
        except SureFitError as error:
            error.about(key)
            problems.append(error)
    return problems


def _training_rows(config: SureFitConfig, look: bool, sources: RunSources) -> Rows | None:
    from surefit.data.read.load import load_rows
    from surefit.data.read.quick_sample import read_quick_sample
    from surefit.data.rows.layouts import load_training_rows

    section = config.data
    # With a limit, the other rows need not stay in memory.
    load = partial(load_training_rows, section, sources.load_rows if section.limit is None else load_rows)
    if not look:
        return load()
    rows = read_quick_sample(section.train, section.split, load)
    return rows if rows is None or section.limit is None else rows.sample(section.limit)


def _mixed_rows(source: str, config: SureFitConfig, look: bool, sources: RunSources) -> Rows | None:
    from surefit.data.read.quick_sample import read_quick_sample
    from surefit.data.rows.layouts import load_mixed

    load = partial(load_mixed, source, config.data, sources.load_rows)
    if not look or source == config.data.eval:
        return load()
    try:
        return read_quick_sample(source, config.data.split, load)
    except SureFitError as error:
        error.about(f"data.mix.{source}")
        raise


def _read_started_processes() -> LaunchedProcesses | None:
    _, size, _, per_node = env.distributed_env()
    return LaunchedProcesses(per_node, -(-size // per_node)) if size > 1 else None


def count_training_rows(
    config: SureFitConfig, rows: Rows | None, mixed: Mapping[str, Rows]
) -> tuple[int | None, float]:
    """Return (rows of `data.train`, rows of `data.mix` in one epoch); (None, 0) while not all of them are counted."""
    if rows is None or len(mixed) < len(config.data.mix):
        return None, 0
    return rows.total, sum(passes * mixed[source].total for source, passes in config.data.mix.items())


def examples_per_row(
    config: SureFitConfig, recipe: TaskRecipe | None, model: ModelFacts | None, rows: Rows | None
) -> float:
    """Estimate the examples per row of `data.train` from a sample; 1 where that is impossible, and of pairs and
    labelled answers, of whose conversations only the last turn is supervised. For kto a pair is two labelled answers.
    """
    from surefit.data.rows.layouts import to_examples
    from surefit.data.rows.reasoning import apply_reasoning_mode
    from surefit.data.rows.sample_checks import DIVIDED, mean_token_examples
    from surefit.data.tokens.light_template import LightTemplate
    from surefit.facts.chat_template import SPECIAL
    from surefit.facts.tokenizer import TokenizerFacts

    if recipe is None or rows is None:
        return 1.0
    if config.objective.labelled:
        return labelled_answers_per_row(config, recipe, rows)
    if model is None or not model.chat_template or config.objective.paired:
        return 1.0
    try:
        sample = to_examples(rows.sample(2 * DIVIDED), recipe, config.data.format, "skip")
    except SureFitError:  # the check reports this
        return 1.0
    facts = TokenizerFacts(
        bos_token=SPECIAL["bos_token"],
        eos_token=SPECIAL["eos_token"],
        pad_token=SPECIAL["pad_token"],
        chat_template=model.chat_template,
        tool_template=model.tool_template,
    )
    template = LightTemplate(facts, config.model.chat_template_kwargs)
    return mean_token_examples(apply_reasoning_mode(sample, config.data.thinking), template)


def labelled_answers_per_row(config: SureFitConfig, recipe: TaskRecipe, rows: Rows) -> float:
    """Return 2 where the rows of a run on labelled answers are pairs, else 1."""
    from surefit.data.rows.columns import ColumnNames
    from surefit.data.rows.layouts import LABELLED, detect_format

    with contextlib.suppress(SureFitError):  # the check reports this
        names = ColumnNames.of(recipe, rows.columns, rows.source)
        columns = names.renamed(rows.columns) if names else rows.columns
        fmt = detect_format(columns, recipe) if config.data.format == "auto" else config.data.format
        return 1.0 if fmt in LABELLED else 2.0
    return 1.0


def load_checked_run(
    target: Path | LoadedConfig, overrides: Sequence[str] | None = None, *, training: bool = True, resume: bool = False
) -> CheckedRun:
    """Load the run context, and raise if it has problems.

    Args:
        training, resume: as `load_run_context` takes them.

    Raises:
        SureFitError: the first problem; the others are in `also`.
    """
    context = load_run_context(target, overrides, training=training, resume=resume)
    if context.problems:
        first, *others = context.problems
        first.also = (*first.also, *others)
        raise first
    # Each of these is set, or its error is among the problems.
    assert context.recipe
    assert context.model
    assert context.hardware
    assert context.resolved
    return CheckedRun(
        context.loaded,
        context.run,
        context.recipe,
        context.model,
        context.hardware,
        context.rows,
        context.mixed,
        context.resolved,
        context,
    )


def load_example_lengths(run: CheckedRun) -> ExampleLengths:
    """Return the lengths of the rows: those that `surefit audit` wrote into the run directory, if it read these very
    rows; for prepared data those in its manifest; else the lengths of a sample with the largest rows. They include the
    longest of a separate file of held-out rows, whose loss is measured between the steps.
    """
    lengths = _training_lengths(run)
    return replace(lengths, held_out=_longest_held_out(run)) if lengths.longest is not None else lengths


def _training_lengths(run: CheckedRun) -> ExampleLengths:
    from surefit.plan.planner import ExampleLengths

    if run.gathered.prepared is not None:
        stats = run.gathered.prepared.stats
        supervised = stats.supervised_tokens / stats.tokens
        source = "the manifest of the prepared rows"
        return ExampleLengths(stats.longest, stats.tokens / stats.kept, source, supervised, "all", rows=stats.kept)
    if run.run.passport.is_file() and run.rows is not None:
        passport = read_json(run.run.passport)
        row_lengths = passport.get("lengths", {}).get("whole", {})
        if passport.get("sha256") == run.rows.sha256 and passport.get("unit") == "tokens" and "max" in row_lengths:
            source = "the lengths in passport.json"
            config = run.resolved.config
            sampled = row_lengths["max"] > config.data.max_length or config.speed.shared_prompts is True
            short = _sample_lengths(run) if sampled else None
            supervised = passport.get("supervised_share") or 1.0
            shortest = short.shortest if short else None
            return ExampleLengths(
                row_lengths["max"], row_lengths["mean"], source, supervised, "all", shortest, rows=len(run.rows),
                shared=short.shared if short else 0.0,
            )  # fmt: skip
    return _sample_lengths(run) or ExampleLengths()


def _longest_held_out(run: CheckedRun) -> int | None:
    """Return the tokens of the longest held-out row in a sample; None where the rows are a share of the training rows,
    not on this machine, or unreadable, which the check reports.
    """
    from surefit.data.read.sources import is_local
    from surefit.data.rows.layouts import load_held_out
    from surefit.data.tokens.lengths import sample_lengths
    from surefit.facts.tokenizer import facts_of_tokenizer

    config = run.resolved.config
    if not isinstance(config.data.eval, str) or not is_local(config.data.eval):
        return None
    try:
        rows = load_held_out(config.data.eval, config.data.split, run.rows, run.gathered.sources.load_rows)
        lengths = sample_lengths(rows, run.recipe, config, facts_of_tokenizer(run.model))
    except SureFitError:
        return None
    return None if lengths is None else lengths.longest


def _sample_lengths(run: CheckedRun) -> ExampleLengths | None:
    """Return the lengths of a sample of each source, by their text where the tokenizer is not on this machine; None
    where a source is not."""
    from surefit.data.tokens.lengths import bound_lengths, sample_lengths
    from surefit.facts.tokenizer import facts_of_tokenizer
    from surefit.plan.planner import ExampleLengths

    config, sources = run.resolved.config, [(run.rows, 1.0)]
    if run.rows is None or len(run.mixed) < len(config.data.mix):
        return None
    sources += [(run.mixed[source], passes) for source, passes in config.data.mix.items()]
    try:
        tokenizer = facts_of_tokenizer(run.model)
    except SureFitError:  # the check reports this
        return None
    without = tokenizer is None or tokenizer.file is None
    measure = bound_lengths if without else partial(sample_lengths, tokenizer=tokenizer)
    lengths_by_source = [(measure(rows, run.recipe, config), passes) for rows, passes in sources if rows]
    known_lengths = [(lengths, lengths.total * passes) for lengths, passes in lengths_by_source if lengths is not None]
    if not known_lengths or len(known_lengths) < len(sources):
        return None
    sampled_rows, total = (sum(getattr(lengths, name) for lengths, _ in known_lengths) for name in ("rows", "total"))
    mean, too_long, shared = (
        sum(getattr(lengths, name) * weight for lengths, weight in known_lengths)
        / sum(weight for _, weight in known_lengths)
        for name in ("mean", "too_long", "shared")
    )
    left_out = too_long if config.data.too_long == "drop" else 0.0
    source = f"a sample of {sampled_rows:,} of {total:,} rows, including the longest"
    longest = max(lengths.longest for lengths, _ in known_lengths)
    shortest_lengths = [lengths.shortest for lengths, _ in known_lengths if lengths.shortest is not None]
    shortest = min(shortest_lengths) if len(shortest_lengths) == len(known_lengths) else None
    coverage: Literal["all", "sample", "text"] = "all" if sampled_rows >= total else "sample"
    if without:
        coverage, source = "text", f"the text of {source}: the tokenizer is not on this machine"
    return ExampleLengths(
        longest, mean, source, known=coverage, shortest=shortest, left_out=left_out, rows=sampled_rows, shared=shared
    )


def load_held_out_examples(run: CheckedRun) -> Examples:
    """Return the held-out examples of a run: the ones that training selected, or selected now.

    Raises:
        DataError: as `data.rows.layouts.read_splits`.
    """
    from surefit.data.rows.layouts import read_splits

    config, sources = run.resolved.config, run.gathered.sources
    if sources.held_out is None:
        _, sources.held_out = read_splits(
            config.data, run.recipe, config.train.seed, run.rows, run.mixed, sources.load_rows
        )
        sources.close([run.rows, *run.mixed.values()])
    return sources.held_out


def find_run_directory(target: Path) -> RunDir:
    """Return the run directory that a config file names, or `target` itself; nothing else in the config is read.

    Raises:
        ConfigError: there is no run in it.
    """
    if target.is_dir():
        _resolved_config(target)
        return RunDir(target)
    run = RunDir(Path(load_config(target).config.output_dir))
    if not run.resolved.exists():
        require_trained(run, target)
    return run


def with_auto_micro_batch(loaded: LoadedConfig) -> LoadedConfig:
    """Return the config with an automatic micro batch, so that one that does not divide the global batch hides no other
    finding.
    """
    train = loaded.config.train.model_copy(update={"per_device_train_batch_size": "auto"})
    return replace(loaded, config=loaded.config.model_copy(update={"train": train}))


def find_config_file(target: Path) -> Path:
    """Return a config file itself, or a run directory's resolved config.

    Raises:
        ConfigError: there is no run in it.
    """
    return _resolved_config(target) if target.is_dir() else target


def _resolved_config(directory: Path) -> Path:
    run = RunDir(directory)
    if not run.resolved.exists():
        configs = sorted(directory.glob("*.y*ml"))
        help_text = f"name the config in it: {configs[0]}" if configs else "name a config file, or a run's directory"
        raise ConfigError(
            "this is not a run directory: there is no resolved.yaml", code="E8031", path=directory, help=help_text
        )
    return run.resolved
