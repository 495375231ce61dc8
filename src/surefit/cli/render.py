"""Output on a terminal, in a pipe and as JSON: the only file that uses rich.

Results go to stdout, progress and notes to stderr. With `--json`, stdout carries one JSON object on its last line and
nothing else; without a terminal there are no bars and no colors, only lines.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shlex
import string
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from surefit.core.env import redact
from surefit.core.errors import SET_OPTION, SureFitError
from surefit.core.progress import OnProgress
from surefit.core.run_log import RunLog
from surefit.core.units import duration_text, printable
from surefit.stages.progress_listener import PlainProgress, ProgressListener
from surefit.train.progress import OnStep, TrainingProgress

BAR_WIDTH = 76
"""Cells of a bar: with its ends it fits in a line of 80."""
BAR_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red", "white")
SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "info": "cyan"}


LEAST_BAR, LARGEST_BAR = 6, 24
"""Cells of the bar on a terminal of up to 48, and of 192 and more columns."""
SEPARATOR = " · "


class ProgressLine(NamedTuple):
    """The parts of a line, in order: the label, the bar's two parts in cells, and the text after it."""

    label: str
    filled: int
    empty: int
    text: str


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise if the reader went away (`| head`), for `exits.run_verb` to handle; rich would exit with 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Output(ProgressListener):
    """Output of a verb.

    Args:
        as_json: only JSON on stdout.
        with_result: print the JSON object; a verb that runs other verbs prints only its own.
        rank: of this process; ranks > 0 print only their errors.
        log: gets a copy of rank 0's output, for the run directory.
    """

    def __init__(
        self, as_json: bool = False, with_result: bool = True, rank: int = 0, log: RunLog | None = None
    ) -> None:
        self.log = log or RunLog()
        self.as_json, self.rank = as_json and rank == 0, rank
        self.with_result = with_result
        self.started = time.monotonic()
        self._training: _ProgressDisplay | None = None
        self.out = _Console(highlight=False, soft_wrap=True, quiet=rank > 0)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True, quiet=rank > 0)

    def without_result(self) -> Output:
        """Return an output without the JSON object, for the parts of a larger verb."""
        return Output(self.as_json, with_result=False, rank=self.rank, log=self.log)

    def log_to(self, path: Path) -> None:
        if not self.rank:
            self.log.open(path)

    def say(self, text: str, style: str | None = None) -> None:
        """Print one line of the result for people."""
        self.log.say(_sanitize_text(text))
        if not self.as_json:
            self.out.print(Text(_sanitize_text(text), style=style or ""))

    def write(self, text: str) -> None:
        """Print a part of a line of the result at once, such as an answer while it is generated."""
        if not self.as_json:
            self.out.print(Text(_sanitize_text(text)), end="")
            self.out.file.flush()

    def own_address(self, text: str, address: str) -> None:
        """Print one line of the result with this server's address, in which the token stays: the reader needs it."""
        self.out.print(Text(f"{_sanitize_text(text)} {address}"))

    def paragraph(self, text: str, style: str | None = None, indent: int = 0) -> None:
        """Print text of the result, wrapped between words on a terminal, with its further lines indented."""
        if self.as_json:
            return
        lines = [text]
        if self.out.is_terminal:
            lines = textwrap.wrap(text, self.out.width, subsequent_indent=" " * indent, break_on_hyphens=False)
        self.say("\n".join(lines), style)

    def stacked(self, parts: Sequence[tuple[str, float]], whole: float, text: Callable[[float], str]) -> None:
        """Print a bar of parts, each with a letter and (on a terminal) a color, and a line per part with its size.

        Args:
            parts: (name, size), in drawing order.
            whole: the size that the bar's full width represents; the part not covered is drawn as dots.
            text: formats a size.
        """
        if self.as_json or not parts:
            return
        whole = max(whole, sum(size for _, size in parts))
        bar, cumulative, drawn_cells = Text("["), 0.0, 0
        letters = _letters([name for name, _ in parts])
        styles = {name: f"black on {BAR_STYLES[n % len(BAR_STYLES)]}" for n, (name, _) in enumerate(parts)}
        for name, size in parts:
            cumulative += size
            end = round(BAR_WIDTH * cumulative / whole)
            bar.append(letters[name] * (end - drawn_cells), style=styles[name])
            drawn_cells = end
        self.out.print(bar.append("." * (BAR_WIDTH - drawn_cells)).append("]"))
        name_width = max(len(name) for name, _ in parts)
        for name, size in parts:
            line = Text("  ").append(letters[name], style=styles[name])
            self.out.print(line.append(f" {_sanitize_text(name):{name_width}}  {text(size):>10}  {size / whole:6.1%}"))

    def note(self, text: str) -> None:
        """Print one line on stderr: progress, or something to look at."""
        text = _sanitize_text(text)
        self.log.say(text)
        if self.err.is_terminal:
            text = "\n".join(
                textwrap.wrap(
                    text, self.err.width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
                )
            )
        self.err.print(Text(text, style="dim"), soft_wrap=True)  # a long path stays whole

    def note_of_rank(self, text: str) -> None:
        """Print one line on stderr from any rank."""
        line = Text(_sanitize_text(f"rank {self.rank}: {text}"), style="dim")
        Console(stderr=True, highlight=False, soft_wrap=True).print(line)

    def heading(self, text: str) -> None:
        """Print the heading of a stage."""
        self.log.say(_sanitize_text(text))
        self.err.print(Text(_sanitize_text(text), style="bold"))

    def next_step(self, *commands: Sequence[object]) -> None:
        """Print, as the last line of a verb, the commands that may follow it: each the words after `surefit`.

        Nothing is printed with --json, and for a part of a larger verb.
        """
        if self.with_result and not self.as_json:
            self.say(f"Next: {', or '.join(f'surefit {shlex.join(map(str, words))}' for words in commands)}", "dim")

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table; the columns after the first are right-aligned if they hold numbers."""
        rows = [[_sanitize_text(cell) for cell in row] for row in rows]
        table = Table(box=None, pad_edge=False)
        for index, column in enumerate(columns):
            numeric = index > 0 and all(_is_numeric(row[index]) for row in rows)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*[escape(cell) for cell in row])
        # A pipe has no width of its own: do not wrap lines that scripts and logs will read.
        plain_console = Console(width=200, highlight=False, file=io.StringIO(), color_system=None)
        with plain_console.capture() as copy:
            plain_console.print(table)
        self.log.say("\n".join([_sanitize_text(title), *(line.rstrip() for line in copy.get().splitlines())]).strip())
        if self.as_json:
            return
        console = self.out if self.out.is_terminal else _Console(width=200, highlight=False)
        if title:  # rich would wrap the table's own title to the table's width
            console.print(Text(_sanitize_text(title), style="bold"))
        console.print(table)

    def segments(self, segments: Iterable[tuple[str, bool, bool]]) -> None:
        """Print runs of (text, whether it is trained on, whether it differs from the other answer of a pair).

        On a terminal trained text is green and differing text underlined; elsewhere they stand in ⟦ ⟧ and ⟪ ⟫.
        """
        if self.as_json:
            return
        text = Text()
        for trained, group in groupby(segments, key=lambda segment: segment[1]):
            text.append("⟦" if trained and not self.out.is_terminal else "")
            for part, _, differs in group:
                if self.out.is_terminal:
                    style = "bold green" if trained else "dim"
                    text.append(printable(part), style=f"{style} underline" if differs else style)
                else:
                    text.append(f"⟪{printable(part)}⟫" if differs else printable(part))
            text.append("⟧" if trained and not self.out.is_terminal else "")
        self.out.print(text)

    def findings(self, findings: Sequence[dict[str, Any]]) -> None:
        """Print findings the way compilers do: place, code, problem; then the help."""
        for finding in findings:
            place = ":".join(str(finding[key]) for key in ("path", "line") if finding[key])
            place, field = _place_and_field(place, finding["field"])
            head = Text()
            head.append(f"{_sanitize_text(place)}: " if place else "", style="bold")
            head.append(f"{finding['severity']}[{finding['code']}]", style=SEVERITY_STYLE[finding["severity"]])
            head.append(f" {_sanitize_text(field)}: " if field else " ")
            head.append(_sanitize_text(finding["message"]))
            help_text = f"  help: {_sanitize_text(finding['help'])}" if finding["help"] else ""
            self.log.say(f"{head.plain}\n{help_text}")
            if self.as_json:
                continue
            self.out.print(head)
            if help_text:
                self.out.print(Text(help_text, style="dim"))

    def document(self, text: str) -> None:
        """Print the whole of stdout, in a format that another program reads."""
        if text and not self.rank:
            sys.stdout.write(_encodable(redact(text)) + "\n")
            sys.stdout.flush()

    def error(self, error: SureFitError) -> None:
        """Print a user's error as findings are printed: place, code, problem; then the help. Never a traceback."""
        if self.as_json and self.with_result:
            self.log.say(_sanitize_text(str(error)))
            self.result(error.as_dict())
            return
        err = Console(stderr=True, highlight=False, soft_wrap=True) if self.rank else self.err
        for problem in (error, *error.also):
            place, field = _place_and_field(problem.place, problem.field)
            line = Text(f"{_sanitize_text(place)}: " if place else "", style="bold")
            line.append(f"error[{problem.code}]" if problem.code else "error", style="bold red")
            line.append(f" [rank {self.rank}]" if self.rank else "")
            line.append(f" {_sanitize_text(field)}:" if field else "" if problem.code else ":")
            line.append(f" {_sanitize_text(problem.message)}", style="not bold default")
            help_text = f"  help: {_sanitize_text(problem.help)}" if problem.help else ""
            self.log.say(f"{line.plain}\n{help_text}")
            err.print(line)
            if help_text:
                err.print(Text(help_text, style="dim"))

    def result(self, value: dict[str, Any]) -> None:
        """Print the one JSON object of `--json`."""
        if self.as_json and self.with_result:
            ascii_only = not sys.stdout.encoding.lower().startswith("utf")
            sys.stdout.write(_encodable(redact(json.dumps(value, ensure_ascii=ascii_only, default=str))) + "\n")
            sys.stdout.flush()

    @contextlib.contextmanager
    def training_progress(self) -> Iterator[OnStep]:
        """Yield `on_step(state)`: progress of training, with the ETA that the training loop computes."""
        with self._display("preparing", with_eta=False) as display:
            self._training = display

            def on_step(state: TrainingProgress) -> None:
                display.rename("training")
                display(state.step, state.total_steps, f"{state.eta_text}{SEPARATOR}{state.text}")

            try:
                yield on_step
            finally:
                self._training = None

    def training_phase(self, label: str, step: int, total_steps: int) -> None:
        if self._training is not None:
            self._training.begin(label, step, total_steps)

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[OnProgress]:
        """Yield `on_progress(done, total, text)`: a bar with ETA on a terminal, occasional lines elsewhere."""
        with self._display(label) as display:
            yield display

    @contextlib.contextmanager
    def _display(self, label: str, with_eta: bool = True) -> Iterator[_ProgressDisplay]:
        """Yield a display; without `with_eta`, the text of each call begins with the time left."""
        if not self.err.is_terminal or self.as_json:
            yield _ProgressDisplay(PlainProgress(label, self.note, with_eta))
            return
        from rich.progress import Progress, ProgressColumn, Task
        from rich.table import Column

        console = self.err

        class Line(ProgressColumn):
            """The whole line: columns of rich's own would all shrink alike, the counter too."""

            def render(self, task: Task) -> Text:
                return _progress_text(task, console.width, with_eta)

        lines = PlainProgress(label, lambda text: self.log.say(_sanitize_text(text)), with_eta)
        with Progress(Line(table_column=Column(no_wrap=True)), console=console, transient=True) as bar:
            yield _ProgressDisplay(lines, bar, bar.add_task(label, total=None, detail=""))


class _ProgressDisplay:
    """A piece of work on the screen: a bar on a terminal, and lines in a pipe or in the run's log."""

    def __init__(self, lines: PlainProgress, bar: Any = None, task: Any = None) -> None:
        self.lines, self.bar, self.task = lines, bar, task

    def __call__(self, done: int, total: int, text: str) -> None:
        if self.bar is not None:
            ends = done == total
            self.bar.update(self.task, completed=done, total=total, detail=_sanitize_text(text), refresh=ends)
        self.lines(done, total, text)

    def rename(self, label: str) -> None:
        self.lines.label = label
        if self.bar is not None:
            self.bar.update(self.task, description=label)

    def begin(self, label: str, done: int, total: int) -> None:
        """Show that a part of the work begins, of which nothing but the time it takes is known."""
        self.rename(label)
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total, detail="", refresh=True)


def _progress_text(task: Any, width: int, with_eta: bool) -> Text:
    left, _, details = task.fields["detail"].partition(SEPARATOR)
    if with_eta:
        left, details = "", task.fields["detail"]
        if task.time_remaining is not None and task.completed:
            left = f"ETA {duration_text(task.time_remaining)}"
    left = left or duration_text(task.elapsed or 0.0)
    line = fit_progress_line(width, task.description, task.completed, task.total, left, details)
    text = Text(line.label, no_wrap=True)
    text.append("━" * line.filled, style="green").append("━" * line.empty, style="bright_black")
    return text.append(line.text)


def fit_progress_line(
    width: int, label: str, done: float, total: float | None, left: str, details: str = ""
) -> ProgressLine:
    """Return the parts of a progress line of at most `width` cells.

    Args:
        total: None while it is not known; there is no counter then.
        left: the time left or spent; it stays at any width, as the bar and the counter do.
        details: further parts, joined by ` · `, the most important first; those that do not fit are left out.

    >>> fit_progress_line(40, "training", 6, 12, "ETA 17.9 s", "loss 1.8906 · held-out 2.1129 (step 4)")
    ProgressLine(label='training ', filled=3, empty=3, text=' 6/12 ETA 17.9 s')
    >>> fit_progress_line(80, "training", 6, 12, "ETA 17.9 s", "loss 1.8906 · held-out 2.1129 (step 4)").text
    ' 6/12 ETA 17.9 s · loss 1.8906 · held-out 2.1129 (step 4)'
    """
    bar = min(LARGEST_BAR, max(LEAST_BAR, width // 8))
    text = f" {left}" if total is None else f" {done:.0f}/{total:.0f} {left}"
    room = width - bar - cell_len(text)
    shown = f"{label} " if cell_len(label) < room else ""
    room -= cell_len(shown)
    for part in filter(None, details.split(SEPARATOR)):
        if cell_len(SEPARATOR + part) <= room:
            text += SEPARATOR + part
            room -= cell_len(SEPARATOR + part)
            continue
        if part == details and room > 3 * len(SEPARATOR):  # a file's name, say: its beginning is better than nothing
            text += set_cell_size(SEPARATOR + part, room - 1).rstrip() + "…"
        break
    filled = round(bar * done / total) if total else 0
    return ProgressLine(shown, min(bar, filled), bar - min(bar, filled), text)


def make_encodable() -> None:
    """Let stdout write characters missing in its encoding (`PYTHONIOENCODING`, a C locale) as `\\u2192`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _place_and_field(place: str, field: str | None) -> tuple[str, str | None]:
    """Return what stands before the code and after it: only a file is a place, and --set is none.

    >>> _place_and_field("run.yaml:3", "train.max_steps"), _place_and_field("--set", "train.max_steps")
    (('run.yaml:3', 'train.max_steps'), ('', '--set train.max_steps'))
    """
    return ("", f"{SET_OPTION} {field}" if field else SET_OPTION) if place == SET_OPTION else (place, field)


def _sanitize_text(text: str) -> str:
    """Return a text fit for a terminal: without secrets and without control characters that a terminal would obey."""
    return printable(redact(text))


def _encodable(text: str) -> str:
    """Return the text with lone surrogates (from names that are not UTF-8) escaped the way JSON and YAML write them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _is_numeric(cell: str) -> bool:
    return bool(cell) and (cell[0].isdigit() or cell[0] in "+-−.–" or cell == "n/a")


def _letters(names: Sequence[str]) -> dict[str, str]:
    """Assign each name a letter of its own, taken from the name if one is left.

    >>> _letters(["weights", "activations", "adapter"])
    {'weights': 'W', 'activations': 'A', 'adapter': 'D'}
    """
    assigned: dict[str, str] = {}
    for name in names:
        candidates = f"{name.upper()}{string.ascii_uppercase}"
        assigned[name] = next((c for c in candidates if c.isalpha() and c not in assigned.values()), "#")
    return assigned
