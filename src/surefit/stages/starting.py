"""A short config for somebody's own rows: every value is chosen from the rows, the model and the card, with its reason.

Memory is judged by the formula, in a second; where that leaves less than a tenth of the card, by simulation.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from surefit.config.by_objective import LABEL_EPOCHS, PAIR_EPOCHS
from surefit.config.by_rows import (
    BATCH_RULE,
    EPOCHS_RULE,
    LABELLED_BATCH_RULE,
    SMALLEST_BATCH,
    SMALLEST_LABELLED_BATCH,
    choose_epochs,
    choose_global_batch_size,
)
from surefit.config.load import read_config_text
from surefit.config.resolve import optimizer_steps
from surefit.config.schema import SureFitConfig
from surefit.config.starter import commented_yaml
from surefit.core.errors import ConfigError, DataError, SureFitError
from surefit.core.units import bytes_text, plural, shell_quote
from surefit.facts.fit_advice import PROPOSED_MODELS

if TYPE_CHECKING:
    from surefit.config.resolve import ResolvedConfig
    from surefit.data.read.load import Rows
    from surefit.data.rows.layouts import Examples
    from surefit.data.tokens.lengths import SampledLengths
    from surefit.facts.hardware import HardwareFacts
    from surefit.facts.model import ModelFacts
    from surefit.plan.memory_interval import MemoryEstimate, Verdict

FEWEST_HELD_OUT, MOST_HELD_OUT, MOST_SHARE = 20, 500, 0.2
"""Rows to hold out, and the largest share of the rows."""
LENGTHS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
LENGTH_MARGIN = 1.25
"""Rows outside the sample may be longer than its longest row."""
MOST_TOKENS = 2**20
"""`max_length` while rows are measured."""
TRIED_ROWS = 64
"""Rows that are converted before the config is written."""
CHARACTERS_PER_TOKEN = 3.0
"""Where the tokenizer is not on this machine: English has about four characters per token, code and other languages
fewer."""
NANO_PARAMETERS, LARGE_PARAMETERS = 20e6, 30e9
PROPOSED = 3
LONG_RUN, FIRST_LOOK = 500, 100
"""Optimizer steps above which a shorter run is proposed beside the whole one, and the steps of that run."""
OUTPUT_DIR = re.compile(r"""^output_dir:[ \t]*["']?([^"'#\s]+)""", re.MULTILINE)
PAIRS_WHY = "each row has a better and a worse answer: train on the preference (direct preference optimization)"
LABELS_WHY = "each row says whether its answer is a good one: learn from both kinds (Kahneman-Tversky optimization)"


ROOMY = 0.9
"""Share of the card's memory within which the formula is trusted; beyond it a config is simulated, and a model is not
proposed."""


class FoundRows(NamedTuple):
    """Rows, and how they are read.

    Attributes:
        rows: all of them, or a sample.
        recipe: the task.
        names: `data.columns` and `data.roles`, where the columns have other names than the layout's.
        layout: the layout, in words.
        unread: columns with text that belongs to prompts or answers by its name, and that nothing reads.
        objective: sft, dpo for pairs of answers, or kto for labelled answers.
    """

    rows: Rows
    recipe: str
    names: Mapping[str, Mapping[str, str]]
    layout: str
    unread: Sequence[str] = ()
    objective: str = "sft"

    @property
    def row_count(self) -> str:
        """Number of rows in words."""
        return f"about {self.rows.total:,}" if self.rows.estimated else f"{self.rows.total:,}"


class Line(NamedTuple):
    """A line of the config: a dotted key, its value, and the reason."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class StartingConfig:
    """A config for somebody's rows.

    Attributes:
        lines: the settings, in the order of the file.
        seen: what was found, a sentence each: rows, model and card, training.
        verdict: "fits" by the formula or by simulation; "unknown" where the formula knows no size.
        roomy: whether it would fit `ROOMY` of the card's memory, by the formula.
        proposals: models that fit the card, where none was named: (id, parameters, license).
        columns: the rows' columns.
    """

    lines: Sequence[Line]
    seen: Sequence[str]
    verdict: Verdict
    roomy: bool = False
    proposals: Sequence[tuple[str, str, str]] = field(default_factory=tuple)
    columns: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The YAML file, a comment with the reason behind every value."""
        return commented_yaml(self.lines)

    @property
    def values(self) -> dict[str, Any]:
        """Values by dotted key."""
        return {line.key: line.value for line in self.lines}


def choose_held_out_share(rows: int) -> float:
    """Return the share of the rows to hold out: a tenth, at least 20 rows and at most 500.

    >>> [choose_held_out_share(rows) for rows in (40, 60, 240, 1_000, 50_000, 10_000_000)]
    [0.2, 0.2, 0.1, 0.1, 0.01, 0.0001]
    """
    wanted = min(max(rows / 10, FEWEST_HELD_OUT), MOST_HELD_OUT) / rows
    share = min(MOST_SHARE, float(f"{wanted:.1g}"))
    return max(share, 0.0001)


def choose_learning_rate(parameters: int | None) -> tuple[float, str]:
    """Return the peak learning rate of LoRA for a model of this size, and its source."""
    if parameters is not None and parameters < NANO_PARAMETERS:
        return 5e-3, "for a model of a few million parameters only"
    large = parameters is not None and parameters > LARGE_PARAMETERS
    return (1e-4 if large else 2e-4), "LoRA: QLoRA's (arXiv:2305.14314, table 9), half of it above 30B"


def name_after_rows(source: str) -> str:
    """Return a name for a run or a config: that of its rows, without ending and without what a shell reads otherwise.

    >>> name_after_rows("a/my rows.jsonl.gz"), name_after_rows("owner/chat-1.5"), name_after_rows("rows.d/")
    ('my-rows', 'chat-1.5', 'rows.d')
    """
    from surefit.data.read.file_io import file_extensions
    from surefit.data.read.readers import ENDINGS

    last = source.rstrip("/").split("/")[-1]
    kind, packing = file_extensions(last)
    stem = last[: len(last) - len(kind + packing)] if kind in ENDINGS else last
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "rows"


def choose_run_name(folder: Path, source: str, *, for_config: bool) -> str:
    """Return the first of NAME, NAME-2, … whose run directory, `runs/NAME`, is new and belongs to no config.

    Args:
        folder: where configs are, and `runs/`.
        source: the rows that the name comes from.
        for_config: `NAME.yaml` must be new, too.
    """
    stem, taken = name_after_rows(source), set(_output_dirs(folder))
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(
        name
        for name in names
        if f"runs/{name}" not in taken
        and not os.path.lexists(folder / "runs" / name)
        and not (for_config and os.path.lexists(folder / f"{name}.yaml"))
    )


def _output_dirs(folder: Path) -> Iterator[str]:
    """Yield the `output_dir` of the configs in a folder, as written."""
    for path in folder.glob("*.y*ml"):
        with contextlib.suppress(OSError, SureFitError):
            text = read_config_text(path)
            yield from (os.path.normpath(match[1]) for match in OUTPUT_DIR.finditer(text))


def build_starting_config(
    source: str,
    model: str | None = None,
    gpu: str = "auto",
    recipe: str | None = None,
    *,
    name: str | None = None,
    simulate: bool = True,
) -> StartingConfig:
    """Return a config for the rows of a file, a directory or a hub data set.

    Args:
        model: hub id, directory or GGUF file; None proposes one that fits the card.
        gpu: as `hardware.gpu`.
        recipe: None recognizes it by the columns.
        name: of the run, which is `runs/NAME`; by default that of the rows.
        simulate: simulate the memory where the formula leaves little room, which imports torch. Otherwise a model that
            may not fit by the formula is accepted, and not proposed.

    Raises:
        SureFitError: the rows, the model or the card cannot be used, or the model does not fit the card.
    """
    from surefit.facts.hardware import hardware_facts

    found = _recognize(_read(source), recipe)
    _require_enough(found)
    hardware = hardware_facts(gpu)
    if model is None and hardware.kind == "cpu":
        model = PROPOSED_MODELS[-1][0]
    draft = _draft(found, model, hardware, gpu, name, confirm=simulate) if model is not None else None
    if draft is not None and draft.verdict in ("fits", "unknown", *(() if simulate else ("too close to call",))):
        return draft
    fitting = _fitting(found, hardware, gpu, name, simulate)
    names = ", ".join(proposal[0] for proposal, _ in fitting[:PROPOSED])
    if draft is not None or not fitting:
        raise ConfigError(
            draft.seen[1] if draft else f"no model of the catalogue fits {hardware.name} with these rows",
            code="E8046",
            field="--model",
            help=f"these fit: {names}; or name a larger card with --gpu"
            if fitting
            else "name a larger card with --gpu",
        )
    return replace(fitting[0][1], proposals=[proposal for proposal, _ in fitting[:PROPOSED]])


def _fitting(
    found: FoundRows, hardware: HardwareFacts, gpu: str, name: str | None, simulate: bool
) -> list[tuple[tuple[str, str, str], StartingConfig]]:
    """Return the proposed models that fit and leave room, the largest first, each with its config; where none leaves
    room, those that fit by simulation, or by the formula where nothing is simulated."""
    drafts = [(each, _draft(found, each[0], hardware, gpu, name, confirm=False)) for each in PROPOSED_MODELS]
    roomy = [(proposal, draft) for proposal, draft in drafts if draft.verdict == "fits" and draft.roomy]
    if roomy or hardware.kind == "cpu":
        return roomy
    confirmed = [(each, _draft(found, each[0], hardware, gpu, name)) for each, _ in drafts] if simulate else drafts
    return [(proposal, draft) for proposal, draft in confirmed if draft.verdict == "fits"]


def describe_rows(source: str) -> str:
    """Return the number of rows and their layout in words.

    Raises:
        SureFitError: the rows cannot be read, nothing reads them, or they are too few.
    """
    found = _recognize(_read(source), None)
    _require_enough(found)
    return f"{found.row_count} rows, {found.layout}"


def _require_enough(found: FoundRows) -> None:
    """Raise if the rows are too few to hold some out, which merging and scoring need.

    Raises:
        DataError: there are fewer than `FEWEST_HELD_OUT` rows.
    """
    if found.rows.total < FEWEST_HELD_OUT:
        raise DataError(
            f"{plural(found.rows.total, 'row')}: too few to train on and to hold some out",
            code="E8049",
            path=found.rows.source,
            field="--data",
            help=f"collect {FEWEST_HELD_OUT} rows or more; hundreds are usual",
        )


def _read(source: str) -> Rows:
    from surefit.data.read.load import load_rows
    from surefit.data.read.quick_sample import read_quick_sample

    rows = read_quick_sample(source, "train", lambda: load_rows(source)) or load_rows(source)
    if not len(rows):
        raise ConfigError("there are no rows", code="E8047", path=source, field="--data", help="name a file of rows")
    return rows


def _recognize(rows: Rows, recipe: str | None) -> FoundRows:
    """Find the recipe that reads the rows, and the names of their columns.

    Raises:
        DataError: no recipe reads these rows.
    """
    from surefit import recipes
    from surefit.data.rows.columns import recipe_for
    from surefit.data.rows.layouts import detect_format, to_examples
    from surefit.data.rows.other_layouts import propose_names
    from surefit.data.rows.unread_fields import UNREAD_PROMPTS, find_unread_columns
    from surefit.stages.checking import find_fitting_recipe

    columns = rows.columns
    if recipe in (None, recipes.GENERAL):
        preferences = _recognize_labels(rows) or _recognize_pairs(rows)
        if preferences is not None:
            return preferences
    name = recipe or find_fitting_recipe(columns, rows) or "chat"
    task = recipes.get_recipe(name)
    if task.columns:
        _require_prompts(to_examples(rows.sample(TRIED_ROWS), task), rows)
        return FoundRows(rows, name, {}, f"columns {', '.join(task.columns_in(columns))}")
    try:
        layout = detect_format(columns, task)
        examples = to_examples(rows.sample(TRIED_ROWS), task)
    except DataError:
        names = {key: named for key, named in propose_names(rows).items() if named}
        if not names:
            raise
        config = SureFitConfig.model_validate(_values(FoundRows(rows, name, names, ""), "surefit/nano"))
        task = recipe_for(task, config)
        examples, layout = to_examples(rows.sample(TRIED_ROWS), task), _layout_of(names, columns)
    else:
        names = {}
    _require_prompts(examples, rows)
    unread = find_unread_columns(rows.sample(TRIED_ROWS), task, "auto", None)[UNREAD_PROMPTS].examples
    return FoundRows(rows, name, names, layout, unread)


def _recognize_labels(rows: Rows) -> FoundRows | None:
    """Return how rows of labelled answers are read; None for other rows, such as those whose label is a class.

    Raises:
        DataError: a row has a label that says which answers are good, and cannot be used.
    """
    from surefit import recipes
    from surefit.data.rows.columns import recipe_for
    from surefit.data.rows.labelled import find_verdicts, label_column
    from surefit.data.rows.layouts import LABELLED, LAYOUTS, to_examples
    from surefit.data.rows.other_layouts import propose_columns
    from surefit.data.rows.unread_fields import UNREAD_PROMPTS, find_unread_columns

    sample = rows.sample(TRIED_ROWS)
    label, verdicts = label_column(rows.columns), find_verdicts(rows.columns, sample)
    if verdicts is None:
        return None
    known = any(set(LAYOUTS[name].columns) <= set(rows.columns) for name in LABELLED)
    columns = {} if known else propose_columns([name for name in rows.columns if name != label])
    if not known and not columns:
        return None
    names = {"columns": columns} if columns else {}
    counts = f"{verdicts.count(True)} desirable and {verdicts.count(False)} undesirable"
    found = FoundRows(
        rows, recipes.GENERAL, names, f"labelled answers: {counts} among {len(verdicts)} tried", objective="kto"
    )
    task = recipe_for(recipes.get_recipe(recipes.GENERAL), SureFitConfig.model_validate(_values(found, "surefit/nano")))
    examples = to_examples(sample, task)
    _require_prompts(examples, rows)
    unread = find_unread_columns(sample, task, "auto", None)[UNREAD_PROMPTS].examples
    return found._replace(unread=unread)


def _recognize_pairs(rows: Rows) -> FoundRows | None:
    """Return how rows of a better and a worse answer are read; None for other rows.

    Raises:
        DataError: the rows have both answers, and cannot be used as pairs.
    """
    from surefit import recipes
    from surefit.data.rows.columns import recipe_for
    from surefit.data.rows.layouts import PAIR_LAYOUTS, to_examples
    from surefit.data.rows.other_layouts import pair_columns
    from surefit.data.rows.unread_fields import UNREAD_PROMPTS, find_unread_columns

    columns = rows.columns
    layout = next((name for name, pair in PAIR_LAYOUTS.items() if set(pair.columns) <= set(columns)), None)
    names = {"columns": pair_columns(columns)}
    names = {key: named for key, named in names.items() if named}
    if layout is None and not names:
        return None
    described = "pairs of a chosen and a rejected answer"
    if layout == "scored_answers":
        described = "pairs of each row's answers with the highest and the lowest score"
    found = FoundRows(rows, recipes.GENERAL, names, described, objective="dpo")
    config = SureFitConfig.model_validate(_values(found, "surefit/nano"))
    task = recipe_for(recipes.get_recipe(recipes.GENERAL), config)
    try:
        examples = to_examples(rows.sample(TRIED_ROWS), task)
    except DataError as error:
        if layout == "scored_answers" and error.code != "E4827":  # a column with this name may hold anything
            return None
        raise
    _require_prompts(examples, rows)
    unread = find_unread_columns(rows.sample(TRIED_ROWS), task, "auto", None)[UNREAD_PROMPTS].examples
    return found._replace(unread=unread)


def _require_prompts(examples: Examples, rows: Rows) -> None:
    """Raise if all prompts are the same: equal prompts stay together, and so no row could be held out."""
    from surefit.data.rows.layouts import prompt_position

    if len(examples) > 1 and len({prompt_position(example, 0) for example in examples}) == 1:
        raise DataError(
            f"all of {len(examples)} rows have the same prompt, so that none can be held out",
            code="E8051",
            path=rows.source,
            field="--data",
            help="name rows with different prompts; if they are meant to be like this, rename the column to text",
        )


def _layout_of(names: Mapping[str, Mapping[str, str]], columns: Sequence[str]) -> str:
    """Return the layout of rows whose columns or roles have other names, in words."""
    renamed = (*names.get("columns", ()), *columns)
    layout = next((name for name in ("messages", "conversations") if name in renamed), "question and answer")
    assistant = names.get("roles", {}).get("assistant")
    return f"{layout} in which {assistant} is the assistant" if assistant else layout


def _values(found: FoundRows, model: str) -> dict[str, Any]:
    """Return a config of these rows with nothing decided."""
    data = {"train": found.rows.source, "max_length": MOST_TOKENS, **found.names}
    values = {"recipe": found.recipe, "model": {"name_or_path": model}, "data": data, "output_dir": "runs/rows"}
    return values | ({"objective": found.objective} if found.objective != "sft" else {})


def _draft(
    found: FoundRows, model: str, hardware: HardwareFacts, gpu: str, name: str | None, *, confirm: bool = True
) -> StartingConfig:
    """Return a config for a model, which may not fit.

    Args:
        name: of the run; None takes that of the rows.
        confirm: simulate where the formula leaves little room.
    """
    from surefit.facts.model import model_facts

    facts = model_facts(model)
    total = found.rows.total
    name = name or name_after_rows(found.rows.source)
    share = choose_held_out_share(total)
    held_out = round(total * share)
    kept = max(1, total - held_out)
    pairs, labelled = found.objective != "sft", found.objective == "kto"
    batch = choose_global_batch_size(kept, smallest=SMALLEST_LABELLED_BATCH if labelled else SMALLEST_BATCH)
    one_epoch = LABEL_EPOCHS if labelled else PAIR_EPOCHS
    epochs = int(one_epoch[0]) if pairs else choose_epochs(kept, batch)
    steps = optimizer_steps(kept, epochs, batch, None)
    rate, rate_why = choose_learning_rate(facts.parameters)
    epochs_why = f"{steps:,} steps: {one_epoch[1] if pairs else EPOCHS_RULE}"
    batch_why = f"rows per step: {LABELLED_BATCH_RULE if labelled else BATCH_RULE}"
    length, length_why = _choose_length(found, facts)
    before = [
        Line("recipe", found.recipe, found.layout),
        *([Line("objective", found.objective, LABELS_WHY if labelled else PAIRS_WHY)] if pairs else []),
        Line("model.name_or_path", model, _size_text(facts)),
    ]
    after = [
        Line("data.train", found.rows.source, f"{found.row_count} rows"),
        *(Line(f"data.{key}", dict(names), "SureFit's name: the rows' name") for key, names in found.names.items()),
        Line("data.eval", share, f"about {held_out:,} rows are held out, to measure what was learned"),
        Line("data.max_length", length, length_why),
        Line("train.num_train_epochs", epochs, epochs_why),
        Line("train.global_batch_size", batch, batch_why),
        # The rate above is one of SFT; that of a preference objective is the objective's own default.
        *([] if pairs else [Line("train.learning_rate", rate, rate_why)]),
        *([Line("hardware.gpu", gpu, hardware.name)] if gpu != "auto" else ()),
        Line("output_dir", f"runs/{name}", "checkpoints, adapter, merged model and report"),
    ]  # fmt: skip
    lines, fit = _choose_quantization(before, after, facts, hardware, total, confirm)
    seen = [
        f"{found.rows.source}: {found.row_count} rows, {found.layout}; {length_why}"
        + (f"; not read: {', '.join(found.unread)}" if found.unread else ""),
        f"{model}: {_size_text(facts)}; {_fit_text(fit, hardware)}",
        f"{plural(epochs, 'epoch')} of {kept:,} rows in batches of {batch}: {steps:,} steps; {held_out:,} held out"
        + (f"; for a first look, add `{_first_look(name)}` to `surefit run`" if steps > LONG_RUN else ""),
    ]
    return StartingConfig(lines, seen, fit.verdict, fit.roomy, columns=found.rows.columns)


def _first_look(name: str) -> str:
    """Return the options of a run of few steps, which leaves the whole run's directory alone."""
    return f"--set train.max_steps={FIRST_LOOK} --set output_dir=runs/{name}-first-look"


class Fit(NamedTuple):
    """What is known of a config's memory: the verdict, the estimate it is from, and whether there is room to spare."""

    verdict: Verdict
    estimate: MemoryEstimate | None = None
    roomy: bool = False


def _choose_quantization(
    before: list[Line], after: list[Line], facts: ModelFacts, hardware: HardwareFacts, rows: int, confirm: bool
) -> tuple[list[Line], Fit]:
    """Return the lines with the first quantization that fits, and how well."""
    lines = [*before, *after]
    fit = _judge(lines, facts, hardware, rows, confirm)
    if fit.verdict in ("fits", "unknown") or facts.quantization is not None:
        return lines, fit
    reason = f"the base in 4 bits: in 16 it {'may not' if fit.verdict == 'too close to call' else 'does not'} fit"
    lines = [*before, Line("model.quantization", "nf4", reason), *after]
    return lines, _judge(lines, facts, hardware, rows, confirm, last=True)


def _judge(
    lines: Sequence[Line], facts: ModelFacts, hardware: HardwareFacts, rows: int, confirm: bool, last: bool = False
) -> Fit:
    """Return whether a config fits a GPU: by the formula or, where little room is left, by simulation.

    Args:
        confirm: simulate at all.
        last: simulate also where the formula cannot tell, since nothing that needs less will be tried.
    """
    if hardware.kind != "cuda" or hardware.memory_bytes is None:
        return Fit("unknown")
    fit = _judge_by_formula(lines, facts, hardware, rows)
    if fit.verdict == "fits":
        tight = replace(hardware, memory_bytes=int(ROOMY * hardware.memory_bytes))
        fit = fit._replace(roomy=_judge_by_formula(lines, facts, tight, rows).verdict == "fits")
    if confirm and not fit.roomy and (fit.verdict == "fits" or (last and fit.verdict == "too close to call")):
        return _judge_by_simulation(lines, facts, hardware, rows) or fit
    return fit


def _resolve(lines: Sequence[Line], facts: ModelFacts, hardware: HardwareFacts, rows: int) -> ResolvedConfig:
    from surefit.config.load import load_text
    from surefit.config.resolve import resolve_config
    from surefit.plan.memory_interval import closed_form_upper_bound

    loaded = load_text(StartingConfig(lines, (), "unknown").text, Path("init"))
    return resolve_config(loaded, facts, hardware, rows, needed=closed_form_upper_bound(facts, hardware))


def _judge_by_formula(lines: Sequence[Line], facts: ModelFacts, hardware: HardwareFacts, rows: int) -> Fit:
    from surefit.plan.memory_interval import closed_form_estimate, judge_fit

    estimate = closed_form_estimate(_resolve(lines, facts, hardware, rows), facts, hardware)
    return Fit(judge_fit(estimate, hardware.memory_bytes), estimate) if estimate else Fit("unknown")


def _judge_by_simulation(lines: Sequence[Line], facts: ModelFacts, hardware: HardwareFacts, rows: int) -> Fit | None:
    """Return what a simulation says, which takes seconds; None where the model's code does not run without data."""
    from surefit.plan.memory_interval import judge_fit
    from surefit.plan.planner import Planner

    try:
        estimate = Planner(facts, stored=True).simulated(_resolve(lines, facts, hardware, rows), hardware)
    except Exception:  # a model's own code may do anything with tensors that hold no data
        return None
    return Fit(judge_fit(estimate, hardware.memory_bytes), estimate)


def _choose_length(found: FoundRows, facts: ModelFacts) -> tuple[int, str]:
    """Return `data.max_length` and its reason: the longest sampled row with a margin, within the model's context."""
    from surefit.data.read.readers import count_characters

    context = facts.max_position_embeddings or LENGTHS[-1]
    if (lengths := _sample_lengths(found, facts)) is not None:
        longest = lengths.longest
        reason = f"the longest of {lengths.rows:,} sampled rows has {longest:,} tokens, the mean {lengths.mean:,.0f}"
    else:
        longest = math.ceil(max(count_characters(row) for row in found.rows) / CHARACTERS_PER_TOKEN)
        reason = f"the longest row has about {longest:,} tokens, by its characters"
    possible = [length for length in LENGTHS if length <= context] or [context]
    fitting = next((length for length in possible if length >= longest * LENGTH_MARGIN), possible[-1])
    return fitting, reason if fitting >= longest else f"{reason}; longer rows are left out"


def _sample_lengths(found: FoundRows, facts: ModelFacts) -> SampledLengths | None:
    """Return the lengths of a sample in the model's tokens; None where its tokenizer is not on this machine."""
    from surefit import recipes
    from surefit.data.rows.columns import recipe_for
    from surefit.data.tokens.lengths import sample_lengths
    from surefit.facts.tokenizer import facts_of_tokenizer

    config = SureFitConfig.model_validate(_values(found, facts.name))
    try:
        tokenizer = facts_of_tokenizer(facts)
    except SureFitError:
        return None
    return sample_lengths(found.rows, recipe_for(recipes.get_recipe(found.recipe), config), config, tokenizer)


def _size_text(facts: ModelFacts) -> str:
    if facts.parameters is None:
        return facts.architecture
    millions = facts.parameters / 1e6
    return f"{millions / 1e3:.1f}B parameters" if millions >= 1e3 else f"{millions:,.1f}M parameters"


def _fit_text(fit: Fit, hardware: HardwareFacts) -> str:
    if fit.estimate is None or hardware.memory_bytes is None:
        return f"on {hardware.name}; `surefit plan` simulates the memory"
    words = "may not fit" if fit.verdict == "too close to call" else fit.verdict
    needed, capacity = bytes_text(fit.estimate.high), bytes_text(hardware.memory_bytes)
    how = "the formula" if fit.estimate.how == "closed form" else "simulation"
    open_question = how == "the formula" and fit.verdict == "too close to call"
    advice = "; `surefit plan` simulates it" if open_question else ""
    return f"{words} on {hardware.name}: up to {needed} of {capacity} by {how}{advice}"


def next_command(path: Path) -> str:
    """Return the command that follows `init`."""
    return f"surefit run {shell_quote(path)}"
