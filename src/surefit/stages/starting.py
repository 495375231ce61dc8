"""A short config for somebody's own rows: every value is chosen from the rows, the model and the card, with its reason.

Memory is judged by the formula alone, in a second; `surefit plan` confirms it by simulation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from surefit.config.resolve import one_line_yaml, optimizer_steps
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError, DataError, SureFitError
from surefit.core.sampling import evenly_spaced_indices
from surefit.core.units import bytes_text, plural, shell_quote

if TYPE_CHECKING:
    from surefit.data.read.load import Rows
    from surefit.data.tokens.lengths import SampledLengths
    from surefit.facts.hardware import HardwareFacts
    from surefit.facts.model import ModelFacts
    from surefit.plan.memory_interval import MemoryEstimate, Verdict

EPOCHS, FEWEST_STEPS, MOST_EXAMPLES, MOST_EPOCHS = 3, 100, 25_000, 10
"""Three passes over the rows, more if that is fewer steps, fewer if it is more examples: the rule of OpenAI's
"Data preparation and analysis for chat model fine-tuning" (cookbook.openai.com, 2023), which stops at 25 passes."""
SMALLEST_BATCH, LARGEST_BATCH, BATCHES_PER_EPOCH = 4, 64, 50
FEWEST_HELD_OUT, MOST_HELD_OUT, MOST_SHARE = 20, 500, 0.2
"""Rows to hold out, and the largest share of the rows."""
LENGTHS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
LENGTH_MARGIN = 1.25
"""Rows outside the sample may be longer than its longest row."""
MOST_TOKENS = 2**20
"""`max_length` while rows are measured."""
TRIED_ROWS = 64
"""Rows that are converted before the config is written."""
ROLES = ("system", "user", "assistant", "tool", "human", "gpt")
ROLE_KEYS = ("role", "from", "speaker", "author", "sender", "who")
ASSISTANTS = ("assistant", "agent", "ai", "bot", "chatbot", "gpt", "model", "support", "operator", "advisor")
USERS = ("user", "customer", "client", "human", "visitor", "caller", "patient", "student", "guest")
"""Names of speakers in other people's rows."""
CONTENT_KEYS = ("content", "value", "text", "message", "body", "says")
"""Names of a message's keys in other layouts."""
CHARACTERS_PER_TOKEN = 3.0
"""Where the tokenizer is not on this machine: English has about four characters per token, code and other languages
fewer."""
NANO_PARAMETERS, LARGE_PARAMETERS = 20e6, 30e9
MODELS = (
    ("Qwen/Qwen3-32B", "32.8B", "Apache-2.0"),
    ("Qwen/Qwen3-14B", "14.8B", "Apache-2.0"),
    ("Qwen/Qwen2.5-7B-Instruct", "7.6B", "Apache-2.0"),
    ("Qwen/Qwen3-4B-Instruct-2507", "4.0B", "Apache-2.0"),
    ("Qwen/Qwen3-0.6B", "0.6B", "Apache-2.0"),
    ("Qwen/Qwen2.5-0.5B-Instruct", "0.5B", "Apache-2.0"),
)
"""Models that are proposed where none is named, the largest first, with parameters and license; all of them are in the
catalogue and need no permission."""
PROPOSED = 3


ROOMY = 0.9
"""Share of the card's memory within which a model is proposed before larger ones."""


class FoundRows(NamedTuple):
    """Rows, and how they are read.

    Attributes:
        rows: all of them, or a sample.
        recipe: the task.
        names: `data.columns` and `data.roles`, where the columns have other names than the layout's.
        layout: the layout, in words.
    """

    rows: Rows
    recipe: str
    names: Mapping[str, Mapping[str, str]]
    layout: str

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
        verdict: "fits" by the formula; "unknown" where it knows no size.
        memory_share: upper end of the estimate, as a share of the card's memory; 0 where it is not estimated.
        proposals: models that fit the card, where none was named: (id, parameters, license).
        columns: the rows' columns.
    """

    lines: Sequence[Line]
    seen: Sequence[str]
    verdict: Verdict
    memory_share: float = 0.0
    proposals: Sequence[tuple[str, str, str]] = field(default_factory=tuple)
    columns: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The YAML file, a comment with the reason behind every value."""
        lines, section = [], ""
        for key, value, why in self.lines:
            head, _, name = key.rpartition(".")
            if head != section and head:
                lines.append(f"{head}:")
            section = head
            setting = f"{'  ' if head else ''}{name}: {one_line_yaml(value)}"
            lines.append(f"{setting:<40} # {why}" if why else setting)
        return "\n".join(lines) + "\n"

    @property
    def values(self) -> dict[str, Any]:
        """Values by dotted key."""
        return {line.key: line.value for line in self.lines}


def choose_global_batch_size(rows: int) -> int:
    """Return the examples per step: a power of two near a fiftieth of the rows.

    >>> [choose_global_batch_size(rows) for rows in (60, 240, 1_000, 50_000)]
    [4, 4, 16, 64]
    """
    power: int = 2 ** int(math.log2(max(1, rows / BATCHES_PER_EPOCH)))
    return min(max(power, SMALLEST_BATCH), LARGEST_BATCH)


def choose_epochs(rows: int, batch: int) -> int:
    """Return the passes over the rows.

    >>> [choose_epochs(rows, choose_global_batch_size(rows)) for rows in (20, 60, 240, 1_000, 10_000, 50_000)]
    [10, 7, 3, 3, 2, 1]
    """
    if rows * EPOCHS > MOST_EXAMPLES:
        return max(1, MOST_EXAMPLES // rows)
    return min(max(EPOCHS, math.ceil(FEWEST_STEPS * batch / rows)), MOST_EPOCHS)


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


def build_starting_config(
    source: str, model: str | None = None, gpu: str = "auto", recipe: str | None = None
) -> StartingConfig:
    """Return a config for the rows of a file, a directory or a hub data set.

    Args:
        model: hub id, directory or GGUF file; None proposes one that fits the card.
        gpu: as `hardware.gpu`.
        recipe: None recognizes it by the columns.

    Raises:
        SureFitError: the rows, the model or the card cannot be used, or the model does not fit the card.
    """
    from surefit.facts.hardware import hardware_facts

    found = _recognize(_read(source), recipe)
    _require_enough(found)
    hardware = hardware_facts(gpu)
    if model is None and hardware.kind == "cpu":
        model = MODELS[-1][0]
    draft = _draft(found, model, hardware, gpu) if model is not None else None
    if draft is not None and draft.verdict in ("fits", "unknown"):
        return draft
    fitting = _fitting(found, hardware, gpu)
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


def _fitting(found: FoundRows, hardware: HardwareFacts, gpu: str) -> list[tuple[tuple[str, str, str], StartingConfig]]:
    """Return the proposed models that fit, each with its config: those that leave room first, the largest first."""
    drafts = [(proposal, _draft(found, proposal[0], hardware, gpu)) for proposal in MODELS]
    fitting = [(proposal, draft) for proposal, draft in drafts if draft.verdict == "fits"]
    return sorted(fitting, key=lambda choice: choice[1].memory_share > ROOMY)


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
    from surefit.stages.checking import find_fitting_recipe

    columns = rows.columns
    name = recipe or find_fitting_recipe(columns, rows) or "chat"
    task = recipes.get_recipe(name)
    if task.columns:
        to_examples(rows.sample(TRIED_ROWS), task)
        return FoundRows(rows, name, {}, f"columns {', '.join(task.columns_in(columns))}")
    names: dict[str, dict[str, str]] = {}
    try:
        layout = detect_format(columns, task)
    except SureFitError:
        names = _propose_names(rows)
        if not names:
            raise
        layout = "messages" if "messages" in names["columns"] else "question and answer"
        if "roles" in names:
            layout += f" in which {names['roles']['assistant']} is the assistant"
    section = SureFitConfig.model_validate(_values(FoundRows(rows, name, names, layout), "surefit/nano")).data
    to_examples(rows.sample(TRIED_ROWS), recipe_for(task, section))
    return FoundRows(rows, name, names, layout)


def _propose_names(rows: Rows) -> dict[str, dict[str, str]]:
    """Return `data.columns` and `data.roles` for columns that fit no layout; empty where they remain unknown."""
    from surefit.data.rows.other_layouts import propose_columns

    if columns := propose_columns(rows.columns):
        return {"columns": columns}
    row = rows.row(0)
    for column, value in row.items():
        turns = [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list) else []
        keys = [key for key, text in turns[0].items() if isinstance(text, str)] if turns else []
        role = next((key for key in keys if key.lower() in ROLE_KEYS), None)
        content = next((key for key in keys if key.lower() in CONTENT_KEYS), None)
        if role is None or content is None:
            continue
        names = {"messages": column, "role": role, "content": content}
        sample = (rows.row(n).get(column) or [] for n in evenly_spaced_indices(len(rows), TRIED_ROWS))
        speakers = list(dict.fromkeys(str(t.get(role)) for part in sample for t in part if isinstance(t, Mapping)))
        roles = {} if set(speakers) <= set(ROLES) else _propose_roles(speakers)
        if not roles and not set(speakers) <= set(ROLES):
            raise DataError(
                f"the speakers are {', '.join(speakers[:8])}, and it is not known which of them is the assistant",
                code="E8048",
                path=rows.source,
                field="data.roles",
                help="rename the assistant's turns to assistant and the others to user, or write a config with "
                f"data.columns: {{messages: {column}, role: {role}, content: {content}}} and data.roles: "
                "{user: NAME, assistant: NAME}",
            )
        kept = {name: theirs for name, theirs in names.items() if name != theirs}
        return {"columns": kept} | ({"roles": roles} if roles else {})
    return {}


def _propose_roles(speakers: Sequence[str]) -> dict[str, str]:
    """Return `data.roles` for two speakers, by their names; empty where the names do not tell who answers.

    >>> _propose_roles(["system", "agent", "customer"]), _propose_roles(["Ann", "Bo"])
    ({'user': 'customer', 'assistant': 'agent'}, {})
    """
    others = [speaker for speaker in speakers if speaker not in ("system", "tool")]
    if len(others) != 2:
        return {}
    for assistant, user in (others, others[::-1]):
        answers, asks = assistant.lower() in ASSISTANTS, user.lower() in USERS
        if (answers or asks) and assistant.lower() not in USERS and user.lower() not in ASSISTANTS:
            return {"user": user, "assistant": assistant}
    return {}


def _values(found: FoundRows, model: str) -> dict[str, Any]:
    """Return a config of these rows with nothing decided."""
    data = {"train": found.rows.source, "max_length": MOST_TOKENS, **found.names}
    return {"recipe": found.recipe, "model": {"name_or_path": model}, "data": data, "output_dir": "runs/rows"}


def _draft(found: FoundRows, model: str, hardware: HardwareFacts, gpu: str) -> StartingConfig:
    from surefit.facts.model import model_facts

    facts = model_facts(model)
    total = found.rows.total
    share = choose_held_out_share(total)
    held_out = round(total * share)
    kept = max(1, total - held_out)
    batch = choose_global_batch_size(kept)
    epochs = choose_epochs(kept, batch)
    steps = optimizer_steps(kept, epochs, batch, None)
    rate, rate_why = choose_learning_rate(facts.parameters)
    epochs_why = (
        f"{steps:,} steps: {EPOCHS} epochs, up to {MOST_EPOCHS} to reach {FEWEST_STEPS} steps, fewer above "
        f"{MOST_EXAMPLES:,} rows"
    )
    batch_why = f"rows per step: 1/{BATCHES_PER_EPOCH} of the rows, from {SMALLEST_BATCH} to {LARGEST_BATCH}"
    length, length_why = _choose_length(found, facts)
    name = re.sub(r"[^\w.-]+", "-", Path(found.rows.source.rstrip("/")).stem).strip("-.") or "rows"
    before = [
        Line("recipe", found.recipe, found.layout),
        Line("model.name_or_path", model, _size_text(facts)),
    ]
    after = [
        Line("data.train", found.rows.source, f"{found.row_count} rows"),
        *(Line(f"data.{key}", dict(names), "SureFit's name: the rows' name") for key, names in found.names.items()),
        Line("data.eval", share, f"about {held_out:,} rows are held out, to measure what was learned"),
        Line("data.max_length", length, length_why),
        Line("train.num_train_epochs", epochs, epochs_why),
        Line("train.global_batch_size", batch, batch_why),
        Line("train.learning_rate", rate, rate_why),
        *([Line("hardware.gpu", gpu, hardware.name)] if gpu != "auto" else ()),
        Line("output_dir", f"runs/{name}", "checkpoints, adapter, merged model and report"),
    ]  # fmt: skip
    lines, verdict, estimate = _choose_quantization(before, after, facts, hardware, total)
    seen = [
        f"{found.rows.source}: {found.row_count} rows, {found.layout}; {length_why}",
        f"{model}: {_size_text(facts)}; {_fit_text(verdict, estimate, hardware)}",
        f"{plural(epochs, 'epoch')} of {kept:,} rows in batches of {batch}: {steps:,} steps; {held_out:,} held out",
    ]
    share_of_memory = estimate.high / hardware.memory_bytes if estimate and hardware.memory_bytes else 0.0
    return StartingConfig(lines, seen, verdict, share_of_memory, columns=found.rows.columns)


def _choose_quantization(
    before: list[Line], after: list[Line], facts: ModelFacts, hardware: HardwareFacts, rows: int
) -> tuple[list[Line], Verdict, MemoryEstimate | None]:
    """Return the lines with the first quantization that fits by the formula, its verdict and its estimate."""
    lines = [*before, *after]
    verdict, estimate = _judge(lines, facts, hardware, rows)
    if verdict in ("fits", "unknown") or facts.quantization is not None:
        return lines, verdict, estimate
    reason = f"the base in 4 bits: in 16 it {'may not' if verdict == 'too close to call' else 'does not'} fit"
    lines = [*before, Line("model.quantization", "nf4", reason), *after]
    return lines, *_judge(lines, facts, hardware, rows)


def _judge(
    lines: Sequence[Line], facts: ModelFacts, hardware: HardwareFacts, rows: int
) -> tuple[Verdict, MemoryEstimate | None]:
    """Return what the formula says about the memory of a config on a GPU."""
    from surefit.config.load import load_text
    from surefit.config.resolve import resolve_config
    from surefit.plan.memory_interval import closed_form_estimate, closed_form_upper_bound, judge_fit

    loaded = load_text(StartingConfig(lines, (), "unknown").text, Path("init"))
    resolved = resolve_config(loaded, facts, hardware, rows, needed=closed_form_upper_bound(facts, hardware))
    estimate = closed_form_estimate(resolved, facts, hardware) if hardware.kind == "cuda" else None
    return (judge_fit(estimate, hardware.memory_bytes), estimate) if estimate else ("unknown", None)


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
    return sample_lengths(found.rows, recipe_for(recipes.get_recipe(found.recipe), config.data), config, tokenizer)


def _size_text(facts: ModelFacts) -> str:
    if facts.parameters is None:
        return facts.architecture
    millions = facts.parameters / 1e6
    return f"{millions / 1e3:.1f}B parameters" if millions >= 1e3 else f"{millions:,.1f}M parameters"


def _fit_text(verdict: Verdict, estimate: MemoryEstimate | None, hardware: HardwareFacts) -> str:
    if estimate is None or hardware.memory_bytes is None:
        return f"on {hardware.name}; `surefit plan` simulates the memory"
    words = "may not fit" if verdict == "too close to call" else verdict
    needed, capacity = bytes_text(estimate.high), bytes_text(hardware.memory_bytes)
    return f"{words} on {hardware.name}: up to {needed} of {capacity} by the formula"


def next_command(path: Path) -> str:
    """Return the command that follows `init`."""
    return f"surefit run {shell_quote(path)}"
