"""Answer rows or one prompt for `predict`; each portion of answers is on disk before the next one is generated.

Rows are read twice and never held all at once: first all rows are checked and counted, then they are answered in
portions. Answers from before a kill are not generated again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from surefit.checkpoint.files import list_steps
from surefit.cli.render import Output
from surefit.config.inputs import input_files, row_files
from surefit.core.errors import EXIT_OK, ConfigError, DataError
from surefit.core.output import json_with, output_file
from surefit.core.progress import OnProgress, ignore_progress, offset_progress
from surefit.core.rundir import file_sha256, machine_errors, read_json, write_json
from surefit.core.units import plural, shell_quote
from surefit.data.read.load import Rows, load_rows
from surefit.data.read.readers import RowWithPlace
from surefit.data.read.sources import resolve_source
from surefit.data.read.stream import stream_rows
from surefit.data.rows.layouts import Examples, to_prompts
from surefit.evaluate.distributed import gather_in_order, local_row_indices, scale_progress
from surefit.evaluate.generation_settings import GenerationSettings, list_generation_settings
from surefit.evaluate.inference import PORTION, PromptModel
from surefit.evaluate.rows import EvalRows, build_prediction_line, predictions_from_answers, score_rows
from surefit.evaluate.runner import open_prompt_models
from surefit.evaluate.variants import VARIANTS, select_variants, variant_location, variant_sha256
from surefit.parallel.process_group import World, broadcast_from_rank0
from surefit.stages.run_context import CheckedRun
from surefit.task import Example

READ = 1_024
"""Number of rows held at once while all of them are checked."""


@dataclass(frozen=True)
class PredictOptions:
    """Options of `predict`: the rows to answer, and the destination.

    Attributes:
        data: rows laid out like the training rows; alternatively `prompt`, one user message.
        output: JSONL file; None prints the answers.
        variant: the model that answers; None: the best available.
        overwrite: replace the contents of `output`.
    """

    data: str | None = None
    prompt: str | None = None
    output: Path | None = None
    variant: str | None = None
    overwrite: bool = False


def predict_rows(out: Output, run: CheckedRun, options: PredictOptions, world: World | None = None) -> int:
    """Answer new rows or one prompt; with gold answers in the rows, score them too.

    Args:
        world: the processes that share each portion, of which this is one; the first alone reads, writes and prints.
    """
    world = world or World()
    if not world.is_first:
        _help_answering(run, world)
        return EXIT_OK
    config = run.resolved.config
    if run.model.has_chat_template is False:
        out.note("the model has no chat template: prompts are continued as plain text")
    output = options.output
    if output is not None:
        _require_writable(run, options, output)
    rows = _rows(run, options.data, options.prompt)
    (variant,) = select_variants(config, run.run, [options.variant or best_variant(run)])
    if options.variant is None:
        is_untrained = variant == "base"
        out.note(f"answers by {variant}{': nothing is trained yet' if is_untrained else ''}")
    settings = list_generation_settings(config, run.recipe)[0]
    target = _AnswerFile(output, _about(run, variant, settings, rows), options.overwrite) if output else None
    done_rows = target.open() if target else 0
    if done_rows:
        out.note(f"{plural(done_rows, 'answer')} of {rows.count:,} are there already: going on behind them")
    records: list[dict[str, Any]] = []
    broadcast_from_rank0(variant if done_rows < rows.count else None, world)
    if done_rows < rows.count:
        with out.progress("answering") as on_progress:
            for _, respondent in open_prompt_models(config, run.recipe, run.hardware, run.run, [variant]):
                for portion in _portions(settings, rows, done_rows, world):
                    broadcast_from_rank0(portion, world)
                    portion_progress = offset_progress(on_progress, portion.indices[0], rows.count)
                    lines = _answer_portion(run, respondent, settings, portion, world, portion_progress)
                    target.add(lines) if target else _show(out, records, lines, options.prompt)
                broadcast_from_rank0(None, world)
                del respondent
    if target:
        out.say(f"Wrote {output}: {plural(rows.count, 'answer')} by {settings.of(variant)}")
    if rows.skipped:
        out.note(f"{plural(rows.skipped, 'bad row')} left out (data.bad_rows: skip)")
    out.result({"variant": settings.of(variant), "n": rows.count, "output": str(output) if output else None,
                "answers": None if output else records})  # fmt: skip
    return EXIT_OK


def _require_writable(run: CheckedRun, options: PredictOptions, output: Path) -> None:
    """Raise for an output that may not be written, before any other work; `_AnswerFile` checks earlier answers."""
    inputs = input_files(run.resolved.config, run.loaded.path)
    inputs |= row_files("the rows", options.data) if options.data is not None else {}
    artefacts = {f"the run's {place.name}": place for place in run.run.artefacts() if place.exists()}
    output_file(output, inputs, options.overwrite, as_rows=True, earlier=lambda _: True)
    output_file(output, artefacts, options.overwrite, earlier=lambda _: True)
    output_file(_about_file(output), inputs, options.overwrite, earlier=json_with("rows_sha256", "variant"))


def _about_file(output: Path) -> Path:
    """Return the file that records the inputs of the answers in `output`."""
    return output.with_name(f"{output.name}.about")


def _help_answering(run: CheckedRun, world: World) -> None:
    """Answer, as a process of rank > 0, this rank's part of every portion that rank 0 reads."""
    variant: str | None = broadcast_from_rank0(None, world)
    if variant is None:
        return
    settings = list_generation_settings(run.resolved.config, run.recipe)[0]
    for _, respondent in open_prompt_models(run.resolved.config, run.recipe, run.hardware, run.run, [variant]):
        portion: EvalRows | None
        while (portion := broadcast_from_rank0(None, world)) is not None:
            _answer_portion(run, respondent, settings, portion, world, ignore_progress)
        del respondent


def _show(out: Output, records: list[dict[str, Any]], lines: Sequence[dict[str, Any]], prompt: str | None) -> None:
    for line in lines:
        out.say(line["text"] if prompt is not None else json.dumps(line, ensure_ascii=False, default=str))
    if out.as_json:
        records.extend(lines)


def best_variant(run: CheckedRun) -> str:
    """Return the run's last existing variant: merged, else the adapter, else the base of a run that was never trained.

    Raises:
        ConfigError: training has begun in this run, and its result is missing.
    """
    exists = {
        "base": True,
        "adapter": run.run.adapter.exists(),
        "merged": run.run.merged.exists(),
        "model": run.run.model.exists(),
    }
    best = [name for name in VARIANTS[run.resolved.config.train.method] if exists[name]][-1]
    steps = [path.name for _, path in list_steps(run.run.checkpoints)]
    if best == "base" and run.resolved.config.evaluate.server is None and (steps or run.run.metrics.exists()):
        result = run.run.model if run.resolved.config.train.method == "full" else run.run.adapter
        resume = f" {shell_quote(run.run.path)} --resume" if steps else ""
        alternatives = " or ".join(f"--variant {name}" for name in (*steps[-1:], "base"))
        raise ConfigError(
            f"training began in this run, and there is no {result.name}/ in it",
            code="E1851",
            path=run.run.path,
            help=f"`surefit train{resume}` writes it; without it, choose what answers: {alternatives}",
        )
    return best


@dataclass(frozen=True)
class _RowsToAnswer:
    """Rows that have been checked and counted.

    Attributes:
        read: reads the usable rows again, in portions of at most the given size.
        count, skipped: numbers of usable rows, and of rows left out.
        source: the name that the user wrote.
        sha256: hash of the rows' bytes; None for a prompt.
    """

    read: Callable[[int], Iterable[Examples]]
    count: int
    skipped: int
    source: str
    sha256: str | None


def _rows(run: CheckedRun, data: str | None, prompt: str | None) -> _RowsToAnswer:
    """Return the rows of `data`, with or without gold answers, or `prompt` as one user message."""
    if (data is None) == (prompt is None):
        raise ConfigError(
            "name either DATA or --prompt", code="E1033", help="surefit predict TARGET rows.jsonl -o answers.jsonl"
        )
    if data is None:
        question = Example(messages=({"role": "user", "content": prompt},))
        single_prompt = _to_plain_prompts(run, Examples([question], ["--prompt"], []))
        return _RowsToAnswer(lambda size: [single_prompt], 1, 0, "--prompt", None)
    rows, read_rows = _row_reader(data)
    bad_rows = run.resolved.config.data.bad_rows

    def read(size: int) -> Iterator[Examples]:
        all_rows = iter(read_rows())
        while portion := list(islice(all_rows, size)):
            try:
                yield _to_plain_prompts(run, to_prompts(Rows(data, portion, (), ""), run.recipe, bad_rows))
            except DataError as error:
                if bad_rows == "error":
                    raise
                yield Examples([], [], [str(error)] * len(portion))

    try:
        counts = [(len(examples), len(examples.skipped)) for examples in read(READ)]
    except DataError:
        to_prompts(load_rows(data), run.recipe, bad_rows)  # raises with the errors of the whole file
        raise
    count = sum(usable for usable, _ in counts)
    if count == 0:
        to_prompts(load_rows(data), run.recipe, bad_rows)
    sha256 = rows.sha256 if rows is not None else file_sha256(Path(data).expanduser())
    return _RowsToAnswer(read, count, sum(skipped for _, skipped in counts), data, sha256)


def _to_plain_prompts(run: CheckedRun, asked: Examples) -> Examples:
    """Turn each single question into text to continue if the model has no chat template: it was trained on plain text.

    Longer conversations stay, and raise when they are rendered.
    """
    if run.model.has_chat_template is not False:
        return asked

    def as_text(example: Example) -> Example:
        turns = example.prompt
        if len(turns) != 1 or turns[0]["role"] != "user" or example.tools:
            return example
        return replace(example, messages=(), text=turns[0]["content"])

    return replace(asked, examples=[as_text(example) for example in asked])


def _row_reader(data: str) -> tuple[Rows | None, Callable[[], Iterable[RowWithPlace]]]:
    """Return a reader of all rows: from their file each time, or from memory if the source is no file of rows."""
    source = resolve_source(data)
    if source.kind == "file":
        return None, lambda: stream_rows(data)
    rows = load_rows(data)
    return rows, lambda: (RowWithPlace(row, *rows.place(number)) for number, row in enumerate(rows))


def _portions(way: GenerationSettings, rows: _RowsToAnswer, done: int, world: World) -> Iterator[EvalRows]:
    """Yield the rows after the first `done`, in the portions that are answered before they are written."""
    index = 0
    for examples in rows.read(max(1, world.size * PORTION * way.decoding.batch_size // way.samples)):
        numbers = range(index, index + len(examples))
        index += len(examples)
        portion = EvalRows(list(numbers), examples.examples, examples.where)
        portion = portion.subset([place for place, number in enumerate(numbers) if number >= done])
        if portion:
            yield portion


def _answer_portion(
    run: CheckedRun,
    respondent: PromptModel,
    way: GenerationSettings,
    picked: EvalRows,
    world: World,
    on_progress: OnProgress,
) -> list[dict[str, Any]]:
    """Return the lines of a portion, of which each process answers its part."""
    places = local_row_indices(picked, world)
    rank_rows = picked.subset(places)
    prompts = respondent.prompts(rank_rows)
    rank_progress = scale_progress(on_progress, world, len(picked))
    answers = respondent.answer(rank_rows, prompts, way, rank_progress) if rank_rows else []
    predictions = predictions_from_answers(run.recipe, rank_rows, answers)
    # Without a gold answer there is nothing to score.
    scored = [place for place, example in enumerate(rank_rows.examples) if example.completion is not None]
    row_scores = score_rows(run.recipe, rank_rows.subset(scored), [predictions[place] for place in scored])
    scores = dict(zip(scored, row_scores, strict=True))
    lines = [
        build_prediction_line(rank_rows, place, predictions[place], scores.get(place), prompt=respondent.shown(prompt))
        for place, prompt in enumerate(prompts)
    ]
    return gather_in_order(places, lines, world)


def _about(run: CheckedRun, variant: str, way: GenerationSettings, rows: _RowsToAnswer) -> dict[str, Any]:
    """Return everything that the answers depend on: a later call must agree with it to continue the file."""
    config = run.resolved.config
    return {
        "rows": rows.source,
        "rows_sha256": rows.sha256,
        "count": rows.count,
        "variant": way.of(variant),
        "model": variant_location(config, run.run, variant),
        "model_sha256": variant_sha256(config, run.run, variant),
        "recipe": run.recipe.name,
        "recipe_version": run.recipe.version,
        "decoding": way.settings,
    }


class _AnswerFile:
    """File of answers, written as they come, and beside it the record of their inputs: FILE and FILE.about."""

    def __init__(self, path: Path, about: Mapping[str, Any], overwrite: bool) -> None:
        self.path, self.about, self.overwrite = path, about, overwrite
        self.beside = _about_file(path)

    def open(self) -> int:
        """Prepare the file for appending; return the number of answers that it already holds.

        Raises:
            ConfigError: the existing file has answers to other inputs, or has no record of its inputs.
        """
        done = 0
        if self.path.exists() and not self.overwrite:
            self._require_same()
            done = self._whole_lines()
        elif self.path.exists():
            self.path.unlink()
        if not done:
            write_json(self.beside, self.about)
        return done

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines; they are on disk when this returns."""
        with machine_errors(self.path), open(self.path, "ab") as file:
            file.write("".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def _require_same(self) -> None:
        help_text = "name another file with --output, or replace it with --overwrite"
        if not self.beside.exists():
            raise ConfigError(
                "is there already, and nothing says whose answers it holds",
                code="E1034",
                path=self.path,
                help=help_text,
            )
        recorded = read_json(self.beside)
        for key, value in self.about.items():
            if recorded.get(key) != value:
                problem = f"holds answers with another {key.replace('_', ' ')}: {recorded.get(key)}, not {value}"
                raise ConfigError(problem, code="E1035", path=self.path, help=help_text)

    def _whole_lines(self) -> int:
        """Count the answers, and remove a last line that was cut short."""
        count = size = 0
        with machine_errors(self.path), open(self.path, "rb+") as file:
            for line in file:
                if line.endswith(b"\n"):
                    count, size = count + 1, size + len(line)
            file.truncate(size)
        return count
