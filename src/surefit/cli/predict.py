"""The verb `predict`: rows or one prompt in, answers out, each portion on the disk before the next is asked for.

Rows are read twice and never held all at once: first every one is checked and counted, then they are answered in
portions. What was answered before a kill is not asked again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.checkpoint.manager import list_steps
from surefit.cli.answering import PredictOptions
from surefit.config.inputs import input_files, row_files
from surefit.core.errors import EXIT_OK, ConfigError, DataError
from surefit.core.output import json_with, output_file
from surefit.core.progress import OnProgress, ignore_progress
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
from surefit.evaluate.rows import EvalRows, GeneratedAnswer, build_prediction_line, predictions_from_answer
from surefit.evaluate.runner import open_prompt_models
from surefit.evaluate.variants import VARIANTS, select_variants, variant_location, variant_sha256
from surefit.parallel.process_group import World, broadcast_from_rank0
from surefit.stages.run_context import CheckedRun
from surefit.task import Example

if TYPE_CHECKING:
    from surefit.cli.render import Output

READ = 1_024
"""Rows that are held at once while all of them are checked."""


def predict_rows(out: Output, run: CheckedRun, asked: PredictOptions, world: World | None = None) -> int:
    """Answer new rows or one prompt; with gold answers in the rows, score them too.

    Args:
        world: the processes that share each portion, of which this is one; the first alone reads, writes and speaks.
    """
    world = world or World()
    if not world.is_first:
        _help_answering(run, world)
        return EXIT_OK
    config = run.resolved.config
    if run.model.has_chat_template is False:
        out.note("the model has no chat template: prompts are continued as plain text")
    output = asked.output
    if output is not None:
        _require_writable(run, asked, output)
    rows = _rows(run, asked.data, asked.prompt)
    (chosen,) = select_variants(config, run.run, [asked.variant or best_variant(run)])
    way = list_generation_settings(config, run.recipe)[0]
    target = _AnswerFile(output, _about(run, chosen, way, rows), asked.overwrite) if output else None
    done = target.open() if target else 0
    if done:
        out.note(f"{plural(done, 'answer')} of {rows.count:,} are there already: going on behind them")
    records: list[dict[str, Any]] = []
    broadcast_from_rank0(chosen if done < rows.count else None, world)
    if done < rows.count:
        with out.progress("answering") as on_progress:
            for _, respondent in open_prompt_models(config, run.recipe, run.hardware, run.run, [chosen]):
                for portion in _portions(way, rows, done, world):
                    broadcast_from_rank0(portion, world)
                    part = _shift_progress(on_progress, portion.indices[0], rows.count)
                    lines = _answer_portion(run, respondent, way, portion, world, part)
                    target.add(lines) if target else _show(out, records, lines, asked.prompt)
                broadcast_from_rank0(None, world)
                del respondent
    if target:
        out.say(f"Wrote {output}: {plural(rows.count, 'answer')} by {way.of(chosen)}")
    if rows.skipped:
        out.note(f"{plural(rows.skipped, 'bad row')} left out (data.bad_rows: skip)")
    out.result({"variant": way.of(chosen), "n": rows.count, "output": str(output) if output else None,
                "answers": None if output else records})  # fmt: skip
    return EXIT_OK


def _require_writable(run: CheckedRun, asked: PredictOptions, output: Path) -> None:
    """Find an output that may not be written before anything else is done; earlier answers are looked at by `_File`."""
    inputs = input_files(run.resolved.config, run.loaded.path)
    inputs |= row_files("the rows", asked.data) if asked.data is not None else {}
    written = {f"the run's {place.name}": place for place in run.run.artefacts() if place.exists()}
    output_file(output, inputs, asked.overwrite, as_rows=True, earlier=lambda _: True)
    output_file(output, written, asked.overwrite, earlier=lambda _: True)
    output_file(_about_file(output), inputs, asked.overwrite, earlier=json_with("rows_sha256", "variant"))


def _about_file(output: Path) -> Path:
    """What the answers in a file belong to."""
    return output.with_name(f"{output.name}.about")


def _help_answering(run: CheckedRun, world: World) -> None:
    """What a process behind the first does: its part of every portion that the first one reads."""
    chosen: str | None = broadcast_from_rank0(None, world)
    if chosen is None:
        return
    way = list_generation_settings(run.resolved.config, run.recipe)[0]
    for _, respondent in open_prompt_models(run.resolved.config, run.recipe, run.hardware, run.run, [chosen]):
        picked: EvalRows | None
        while (picked := broadcast_from_rank0(None, world)) is not None:
            _answer_portion(run, respondent, way, picked, world, ignore_progress)
        del respondent


def _show(out: Output, records: list[dict[str, Any]], lines: Sequence[dict[str, Any]], prompt: str | None) -> None:
    for line in lines:
        out.say(line["text"] if prompt is not None else json.dumps(line, ensure_ascii=False, default=str))
    if out.as_json:
        records.extend(lines)


def best_variant(run: CheckedRun) -> str:
    """The last of the run's variants that exists: merged, else the adapter, else the base of a run that never trained.

    Raises:
        ConfigError: training has begun here, and its result is not there.
    """
    there = {
        "base": True,
        "adapter": run.run.adapter.exists(),
        "merged": run.run.merged.exists(),
        "model": run.run.model.exists(),
    }
    best = [name for name in VARIANTS[run.resolved.config.train.method] if there[name]][-1]
    steps = [path.name for _, path in list_steps(run.run.checkpoints)]
    if best == "base" and run.resolved.config.evaluate.server is None and (steps or run.run.metrics.exists()):
        result = run.run.model if run.resolved.config.train.method == "full" else run.run.adapter
        resume = f" {shell_quote(run.run.path)} --resume" if steps else ""
        others = " or ".join(f"--variant {name}" for name in (*steps[-1:], "base"))
        raise ConfigError(
            f"training began in this run, and there is no {result.name}/ in it",
            code="E1851",
            path=run.run.path,
            help=f"`surefit train{resume}` writes it; without it, choose what answers: {others}",
        )
    return best


@dataclass(frozen=True)
class _RowsToAnswer:
    """Rows that have been looked at.

    Attributes:
        read: the usable ones again, at most so many at a time.
        count, skipped: of usable rows, and of those left out.
        source: as the user named them.
        sha256: of their bytes; None for a prompt.
    """

    read: Callable[[int], Iterable[Examples]]
    count: int
    skipped: int
    source: str
    sha256: str | None


def _rows(run: CheckedRun, data: str | None, prompt: str | None) -> _RowsToAnswer:
    """The rows of `data`, with or without gold answers, or `prompt` as one user message."""
    if (data is None) == (prompt is None):
        raise ConfigError(
            "name either DATA or --prompt", code="E1033", help="surefit predict TARGET rows.jsonl -o answers.jsonl"
        )
    if data is None:
        question = Example(messages=({"role": "user", "content": prompt},))
        asked = _to_plain_prompts(run, Examples([question], ["--prompt"], []))
        return _RowsToAnswer(lambda size: [asked], 1, 0, "--prompt", None)
    rows, placed = _row_reader(data)
    bad_rows = run.resolved.config.data.bad_rows

    def read(size: int) -> Iterator[Examples]:
        every = iter(placed())
        while portion := list(islice(every, size)):
            try:
                yield _to_plain_prompts(run, to_prompts(Rows(data, portion, (), ""), run.recipe, bad_rows))
            except DataError as error:
                if bad_rows == "error":
                    raise
                yield Examples([], [], [str(error)] * len(portion))

    try:
        counts = [(len(examples), len(examples.skipped)) for examples in read(READ)]
    except DataError:
        to_prompts(load_rows(data), run.recipe, bad_rows)  # says of the whole file what is wrong
        raise
    count = sum(usable for usable, _ in counts)
    if count == 0:
        to_prompts(load_rows(data), run.recipe, bad_rows)
    sha256 = rows.sha256 if rows is not None else file_sha256(Path(data).expanduser())
    return _RowsToAnswer(read, count, sum(skipped for _, skipped in counts), data, sha256)


def _to_plain_prompts(run: CheckedRun, asked: Examples) -> Examples:
    """Turn each single question into text to continue where the model has no chat template: it was trained on plain
    text. Longer conversations stay, and are an error when they are rendered."""
    if run.model.has_chat_template is not False:
        return asked

    def as_text(example: Example) -> Example:
        turns = example.prompt
        if len(turns) != 1 or turns[0]["role"] != "user" or example.tools:
            return example
        return replace(example, messages=(), text=turns[0]["content"])

    return replace(asked, examples=[as_text(example) for example in asked])


def _row_reader(data: str) -> tuple[Rows | None, Callable[[], Iterable[RowWithPlace]]]:
    """How to read every row: from its file each time, or from memory where it is no file of rows."""
    source = resolve_source(data)
    if source.kind == "file":
        return None, lambda: stream_rows(data)
    rows = load_rows(data)
    return rows, lambda: (RowWithPlace(row, *rows.place(number)) for number, row in enumerate(rows))


def _portions(way: GenerationSettings, rows: _RowsToAnswer, done: int, world: World) -> Iterator[EvalRows]:
    """The rows behind the first `done`, as many at a time as are answered before they are written."""
    index = 0
    for examples in rows.read(max(1, world.size * PORTION * way.decoding.batch_size // way.samples)):
        numbers = range(index, index + len(examples))
        index += len(examples)
        picked = EvalRows(list(numbers), examples.examples, examples.where)
        picked = picked.subset([place for place, number in enumerate(numbers) if number >= done])
        if picked:
            yield picked


def _answer_portion(
    run: CheckedRun,
    respondent: PromptModel,
    way: GenerationSettings,
    picked: EvalRows,
    world: World,
    on_progress: OnProgress,
) -> list[dict[str, Any]]:
    """The lines of a portion, each process having answered its part of it."""
    places = local_row_indices(picked, world)
    mine = picked.subset(places)
    prompts = respondent.prompts(mine)
    part = scale_progress(on_progress, world, len(picked))
    answers = respondent.answer(mine, prompts, way, part) if mine else []
    lines = [
        _line(run, way, mine, place, respondent.shown(prompt), answer)
        for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    return gather_in_order(places, lines, world)


def _shift_progress(on_progress: OnProgress, before: int, total: int) -> OnProgress:
    return lambda done, _, text: on_progress(before + done, total, text)


def _line(
    run: CheckedRun, way: GenerationSettings, rows: EvalRows, place: int, prompt: str, answer: GeneratedAnswer
) -> dict[str, Any]:
    example = rows.examples[place]
    # Without a gold answer there is nothing to judge by.
    recipe = run.recipe if example.completion is not None else None
    found = predictions_from_answer(run.recipe, example, answer)
    line = build_prediction_line(recipe, rows.indices[place], rows.where[place], example, found, way.samples)
    return {"index": line.pop("index"), "where": line.pop("where"), "prompt": prompt, **line}


def _about(run: CheckedRun, variant: str, way: GenerationSettings, rows: _RowsToAnswer) -> dict[str, Any]:
    """All that answers depend on: what a later call must agree with to go on."""
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
    """Answers as they come, and beside them what they answer: FILE and FILE.about."""

    def __init__(self, path: Path, about: Mapping[str, Any], overwrite: bool) -> None:
        self.path, self.about, self.overwrite = path, about, overwrite
        self.beside = _about_file(path)

    def open(self) -> int:
        """Make the file ready for more; returns the answers that are in it already.

        Raises:
            ConfigError: there is a file that answers something else, or nobody knows what.
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
        """Append lines, on the disk when this returns."""
        with machine_errors(self.path), open(self.path, "ab") as file:
            file.write("".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def _require_same(self) -> None:
        ways_out = "name another file with --output, or replace it with --overwrite"
        if not self.beside.exists():
            raise ConfigError(
                "is there already, and nothing says whose answers it holds", code="E1034", path=self.path, help=ways_out
            )
        before = read_json(self.beside)
        for key, value in self.about.items():
            if before.get(key) != value:
                problem = f"holds answers with another {key.replace('_', ' ')}: {before.get(key)}, not {value}"
                raise ConfigError(problem, code="E1035", path=self.path, help=ways_out)

    def _whole_lines(self) -> int:
        """Count the answers, and take away a last one that was cut short."""
        count = size = 0
        with machine_errors(self.path), open(self.path, "rb+") as file:
            for line in file:
                if line.endswith(b"\n"):
                    count, size = count + 1, size + len(line)
            file.truncate(size)
        return count
