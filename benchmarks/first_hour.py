"""What a new user reaches in three commands: `init --data`, `run`, `chat`, on twelve data sets, with nothing edited.

    PYTHONPATH=src python benchmarks/first_hour.py --out DIR [--data ../shared/data] [--only NAME]
        [--no-control] [--trl]

Seven sets are rows that somebody has published, where `--data` holds them; the others are written here from a seed.
Each is tuned on the built-in model and then once more as a control, whose answers are shuffled among the rows: its
prompts and answers look the same and have nothing to do with each other. A set passes if all three commands end well
and the verdict claims a gain whose interval excludes zero; its control passes if nothing of the kind is claimed.
Finished sets are kept in DIR and not repeated. A run takes half a minute to a minute and a half of processor time; the
two with 50,000 rows take 12 minutes each.

With `--trl`, each set's files are also given to TRL's command line as they are, with the same model as a transformers
directory and the fewest flags that train on a CPU, for three steps: the column says whether TRL reads the rows. It does
not say that the run would be the same: TRL then trains all weights on all rows, with its own learning rate, and neither
holds rows out nor scores.
"""

from __future__ import annotations

import argparse
import csv
import importlib.resources
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SEED = 17
MODEL = "surefit/nano"
PROMPT = "Hello, can you help me?"
TRL_FLAGS = ("--output_dir", "out", "--use_cpu", "--report_to", "none", "--max_steps", "3")
"""Beside model and rows. Without `--use_cpu` TRL stops on a CPU, as its default is bfloat16 on a GPU."""
MOST_ROWS = 300
"""Rows taken of a published set: one on which the smallest model needs an hour tells nothing more."""
MOST_CHARACTERS = 1_200
"""Characters of a row that is taken: the built-in model reads 2,048 tokens at most."""

Row = dict[str, Any]


@dataclass(frozen=True)
class DataSet:
    """Rows as a user has them.

    Attributes:
        name: what the user would call them.
        rows: reads or makes them; an empty list where they are not on this machine.
        write: writes them into a folder, and returns the path to give to `--data`.
        swap: exchanges the answers (or else the prompts) of the rows for each other's; None where a row has no answer.
    """

    name: str
    rows: Callable[[Path], list[Row]]
    write: Callable[[Sequence[Row], Path], Path]
    swap: Callable[[list[Row]], list[Row]] | None


@dataclass
class Command:
    """One command as it was typed, and how it ended."""

    typed: list[str]
    code: int
    seconds: float
    processor_seconds: float
    output: str


@dataclass
class Hour:
    """One data set, from rows to an answer."""

    name: str
    control: bool
    commands: list[Command] = field(default_factory=list)
    config_lines: int = 0
    verdict: dict[str, Any] = field(default_factory=dict)
    trl: str = ""

    @property
    def ended(self) -> bool:
        """Whether all three commands were run and ended well."""
        return len(self.commands) == 3 and all(command.code == 0 for command in self.commands)


# --- rows -----------------------------------------------------------------------------------------------------------

PRODUCTS = ("kettle", "lamp", "chair", "bicycle", "toaster", "desk", "radio", "printer", "heater", "mixer")
TROUBLES = {
    "is broken": "We are sorry that the {product} is broken. A new {product} will reach you within {days} days.",
    "has not arrived": "Your {product} left our store. It will arrive within {days} days.",
    "is too loud": "Please switch the {product} off and on again. If it stays loud, send it back within {days} days.",
    "has the wrong color": "Send the {product} back within {days} days and tell us the color that you want.",
    "was too expensive": "We return the difference for the {product} to your account within {days} days.",
}
CITIES = ("Bern", "Lyon", "Graz", "Porto", "Gent", "Turin", "Bergen", "Krakow")


def requests(count: int) -> list[tuple[str, str]]:
    """Requests to a shop and their answers: what is wrong decides the answer, and the city how many days it takes."""
    chance = random.Random(SEED)
    made = []
    for _ in range(count):
        product, trouble, city = chance.choice(PRODUCTS), chance.choice(list(TROUBLES)), chance.choice(CITIES)
        days = 2 + CITIES.index(city)
        asked = f"Hello, I live in {city} and my {product} {trouble}. What can I do?"
        made.append((asked, TROUBLES[trouble].format(product=product, days=days)))
    return made


def jsonl_rows(path: Path, most: int = MOST_ROWS) -> list[Row]:
    """The first short rows of a JSON Lines file; none where the file is not here."""
    if not path.is_file():
        return []
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if len(line) <= MOST_CHARACTERS)
    return [json.loads(line) for line, _ in zip(lines, range(most), strict=False)]


def made_rows(shape: Callable[[str, str], Row], count: int = 240) -> Callable[[Path], list[Row]]:
    return lambda data: [shape(asked, answer) for asked, answer in requests(count)]


def chat_row(asked: str, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def openai_row(asked: str, answer: str) -> Row:
    system = {"role": "system", "content": "You answer for a shop, in two sentences."}
    return {"messages": [system, *chat_row(asked, answer)["messages"]]}


def csv_row(asked: str, answer: str) -> Row:
    return {"Ticket": asked, "Our reply": answer, "Agent": "Kim"}


def paragraphs(data: Path) -> list[Row]:
    """Paragraphs of a novel, as rows of plain text."""
    path = data / "text" / "gutenberg" / "The-Time-Machine_35.txt"
    if not path.is_file():
        return []
    blocks = [" ".join(block.split()) for block in path.read_text(encoding="utf-8").split("\n\n")]
    return [{"text": block} for block in blocks if 100 < len(block) < MOST_CHARACTERS][:MOST_ROWS]


def dolly_rows(data: Path) -> list[Row]:
    """Contracts in dolly's columns: a clause, and what it says in plain English."""
    rows = jsonl_rows(data / "legal_summarization" / "manor_plain_english_contracts_all_v1.jsonl")
    return [
        {"instruction": "Say this clause in plain English.", "context": row["original_text"],
         "response": row["reference_summary"], "category": "summarization"}
        for row in rows
    ]  # fmt: skip


# --- files ----------------------------------------------------------------------------------------------------------


def write_jsonl(rows: Sequence[Row], folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(rows: Sequence[Row], folder: Path) -> Path:
    path = folder / "tickets.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(rows: Sequence[Row], folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def write_directory(rows: Sequence[Row], folder: Path) -> Path:
    inside = folder / "export"
    inside.mkdir()
    for part in range(4):
        write_jsonl(rows[part::4], inside).rename(inside / f"part-{part}.jsonl")
    return inside


# --- controls -------------------------------------------------------------------------------------------------------


def swap_column(column: str) -> Callable[[list[Row]], list[Row]]:
    """Exchange a column among the rows, so that none keeps its own."""

    def swapped(rows: list[Row]) -> list[Row]:
        order = derangement(len(rows))
        return [row | {column: rows[other][column]} for row, other in zip(rows, order, strict=True)]

    return swapped


def swap_last_turns(key: str) -> Callable[[list[Row]], list[Row]]:
    """Exchange the last turn among the rows."""

    def swapped(rows: list[Row]) -> list[Row]:
        order = derangement(len(rows))
        return [
            row | {key: [*row[key][:-1], rows[other][key][-1]]} for row, other in zip(rows, order, strict=True)
        ]  # fmt: skip

    return swapped


def derangement(count: int) -> list[int]:
    """For each row another one: a random cycle through all rows."""
    order = list(range(count))
    random.Random(SEED).shuffle(order)
    return [following for _, following in sorted(zip(order, order[1:] + order[:1], strict=True))]


SETS = (
    DataSet("chats", made_rows(chat_row), write_jsonl, swap_last_turns("messages")),
    DataSet("questions and answers", lambda data: jsonl_rows(data / "math_code/gsm8k/gsm8k_train.jsonl"), write_jsonl,
            swap_column("answer")),
    DataSet("dolly", dolly_rows, write_jsonl, swap_column("response")),
    DataSet("CSV with odd columns", made_rows(csv_row), write_csv, swap_column("Our reply")),
    DataSet("OpenAI", made_rows(openai_row), write_jsonl, swap_last_turns("messages")),
    DataSet("ShareGPT", lambda data: jsonl_rows(data / "function_calling/glaive/glaive_toolcall_en_demo.jsonl"),
            write_jsonl, swap_last_turns("conversations")),
    DataSet("tools", lambda data: jsonl_rows(data / "function_calling/xlam/xlam_shape_from_bfcl.jsonl"), write_jsonl,
            swap_column("query")),
    DataSet("plain text", paragraphs, write_jsonl, None),
    DataSet("60 rows", made_rows(chat_row, 60), write_jsonl, swap_last_turns("messages")),
    DataSet("50,000 rows", made_rows(chat_row, 50_000), write_jsonl, swap_last_turns("messages")),
    DataSet("Parquet", made_rows(lambda asked, answer: {"prompt": asked, "completion": answer}), write_parquet,
            swap_column("completion")),
    DataSet("a directory", lambda data: [{"instruction": row["text"], "output": row["code"]}
                                         for row in jsonl_rows(data / "math_code/mbpp/mbpp.jsonl")],
            write_directory, swap_column("output")),
)  # fmt: skip


# --- the hour -------------------------------------------------------------------------------------------------------


def surefit(folder: Path, *arguments: str) -> Command:
    """Type one command in a folder."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "surefit", *arguments],
        cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Command(
        ["surefit", *arguments], done.returncode, time.perf_counter() - start, used, done.stdout + done.stderr
    )


def first_hour(data_set: DataSet, rows: list[Row], folder: Path, control: bool) -> Hour:
    """Type the three commands; the first that fails ends the hour."""
    folder.mkdir(parents=True)
    path = data_set.write(rows, folder)
    hour = Hour(data_set.name, control)
    config = f"{path.stem}.yaml"
    run = f"runs/{path.stem}"
    for arguments in (
        ("init", "--data", path.name, "--model", MODEL),
        ("run", config),
        ("chat", run, "-p", PROMPT),
    ):
        hour.commands.append(surefit(folder, *arguments))
        if hour.commands[-1].code:
            return hour
    hour.config_lines = len((folder / config).read_text(encoding="utf-8").splitlines())
    hour.verdict = read_verdict(folder / run)
    return hour


def read_verdict(run: Path) -> dict[str, Any]:
    """What the run's page says first, and the interval that it rests on."""
    from surefit.core.rundir import RunDir
    from surefit.report.artefacts import read_artefacts
    from surefit.report.build import build_page

    page = build_page(read_artefacts(RunDir(run)))
    held_out = next((effect for effect in page.effects if effect.set == "eval"), None)
    comparison = held_out.comparison if held_out else None
    told = {"headline": page.verdict.headline, "sentences": page.verdict.sentences}
    if held_out and comparison and held_out.beside:  # the metric shows nothing, and the likelihood beside it does
        found = json.loads((run / "eval" / "summary.json").read_text(encoding="utf-8"))["sets"]["eval"]["comparisons"]
        pair = (comparison.a, comparison.b, "answer_likelihood")
        interval = next(line["ci95"] for line in found if (line["a"], line["b"], line["metric"]) == pair)
        gain = held_out.beside.outcome == "better"
        return told | {"claims_gain": gain, "metric": "answer_likelihood", "ci95": interval}
    return told | {
        "claims_gain": page.verdict.tone == "good",
        "metric": held_out.metric if held_out else None,
        "ci95": list(comparison.ci95) if comparison else None,
    }


def try_trl(data_set: DataSet, rows: list[Row], out: Path) -> str:
    """Give the rows to `trl sft` as they are; return "as is", or the error that it ends with."""
    folder = out / f"{folder_name(data_set)}-trl"
    kept = folder.with_suffix(".txt")
    if not kept.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "data").mkdir(parents=True)
        data_set.write(rows, folder / "data")
        nano = Path(str(importlib.resources.files("surefit"))) / "nano"
        shutil.copytree(nano, folder / "model", ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))
        trl = Path(sys.executable).parent / "trl"
        typed = [str(trl), "sft", "--model_name_or_path", "model", "--dataset_name", "data", *TRL_FLAGS]
        done = subprocess.run(typed, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        errors = re.findall(r"^(?:\w+\.)*\w*Error: .*", done.stderr, re.MULTILINE)
        own = [error for error in errors if "CalledProcessError" not in error]
        kept.write_text("as is" if done.returncode == 0 else (own or errors or ["it failed"])[-1], encoding="utf-8")
    return kept.read_text(encoding="utf-8")


def folder_name(data_set: DataSet) -> str:
    return data_set.name.replace(" ", "-").replace(",", "")


def passes(hour: Hour) -> bool:
    """Whether a set ends with a gain clear of zero, or its control without one."""
    claimed = bool(hour.verdict.get("claims_gain"))
    return hour.ended and (claimed is not hour.control)


def line(hour: Hour) -> str:
    """One line of the table."""
    interval = hour.verdict.get("ci95")
    span = f"[{interval[0]:+.3f}, {interval[1]:+.3f}]" if interval else "-"
    cost = sum(command.seconds for command in hour.commands), sum(c.processor_seconds for c in hour.commands)
    name = f"{hour.name}, shuffled" if hour.control else hour.name
    said = (
        hour.verdict.get("headline") or f"`{' '.join(hour.commands[-1].typed[:2])}` ended with {hour.commands[-1].code}"
    )
    verdict = "yes" if passes(hour) else "NO"
    trl = f"{hour.trl[:27]:<28}" if hour.trl else ""
    return f"{name:<32}{len(hour.commands):>4}{cost[0]:>8.0f}{cost[1]:>8.0f}  {span:<18}{verdict:<5}{trl}{said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs; what has finished is kept")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--only", action="append", help="name of a set; repeatable")
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--trl", action="store_true", help="whether `trl sft` takes the same files")
    arguments = parser.parse_args()
    trl = f"{'trl sft':<28}" if arguments.trl else ""
    print(f"{'set':<32}{'cmds':>4}{'s':>8}{'cpu s':>8}  {'95 % interval':<18}{'as':<5}{trl}verdict")
    hours = []
    for data_set in SETS:
        if arguments.only and data_set.name not in arguments.only:
            continue
        rows = data_set.rows(arguments.data)
        if not rows:
            print(f"{data_set.name:<32}its rows are not in {arguments.data}")
            continue
        for control in (False, True):
            if control and (arguments.no_control or data_set.swap is None):
                continue
            hour = kept_or_made(data_set, rows, arguments.out, control)
            if arguments.trl:
                hour.trl = "-" if control else try_trl(data_set, rows, arguments.out)
            hours.append(hour)
            print(line(hour), flush=True)
    for control, name in ((False, "sets"), (True, "controls")):
        these = [hour for hour in hours if hour.control is control]
        print(f"{sum(map(passes, these))} of {len(these)} {name} as they should be")
    return 0 if all(map(passes, hours)) else 1


def kept_or_made(data_set: DataSet, rows: list[Row], out: Path, control: bool) -> Hour:
    """Read an hour that an earlier call has finished, or live through it."""
    folder = out / (folder_name(data_set) + ("-shuffled" if control else ""))
    kept = folder.with_suffix(".json")
    if kept.is_file():
        found = json.loads(kept.read_text(encoding="utf-8"))
        hour = Hour(**found | {"commands": [Command(**command) for command in found["commands"]]})
        if hour.ended:  # the verdict is read from the run as today's code words it
            hour.verdict = read_verdict(folder / hour.commands[2].typed[2])
        return hour
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    swapped = data_set.swap(rows) if control and data_set.swap else rows
    hour = first_hour(data_set, swapped, folder, control)
    kept.write_text(json.dumps(asdict(hour), indent=1), encoding="utf-8")
    return hour


if __name__ == "__main__":
    sys.exit(main())
