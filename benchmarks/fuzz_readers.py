"""Every file that SureFit reads, damaged, through the function that reads it: a message with the file, within bounds.

    python benchmarks/fuzz_readers.py [--n 2000] [--seed 0] [--only 17] [--reader merge] [--json]

A case is one sound file of one kind (config, model config, weight index, safetensors header, tokenizer files, adapter,
rows in each format, manifest, logs, artefacts of a run) of which a value was replaced or bytes were changed, read in a
process of its own that is forked from one with everything imported. A failure is an exception that is no
`SureFitError`, a message without a path, a signal, more than 5 s of CPU, or more than 1.5 GB above what was there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_inputs import BYTE_CHANGES, CONFIG, OTHERS, TEXT_CHANGES, rows, with_rows, write_data

CPU_LIMIT = 5.0
MEMORY_LIMIT = 1_500 * 1000 * 1000
BRAKE_SECONDS = 20

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 10**9, 10**18, 2**64, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"), "",
    " ", "a", "../../etc/passwd", "x" * 100_000, "(", "(a+)+$", "((((x*)*)*)*)*y", "\0", "\ud800", "{{", "{% raw",
    "-1", "true", [], [[]], [None], ["a", 1], [1] * 50_000, {}, {"": None}, {"a": {"b": {"c": [1]}}},
)  # fmt: skip


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, the first items of long lists and objects only."""
    found = [here] if here else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(inner)[:60]:
        found += places(item, (*here, key))
    return found


def other_json(data: bytes, draw: random.Random) -> bytes:
    """One value of a JSON text replaced, removed or nested; or a text in its place that no parser likes."""
    value = json.loads(data)
    chosen = places(value)
    if not chosen or draw.random() < 0.05:
        return draw.choice([b"[" * 100_000, b'{"a":' * 20_000, b"null", b"[]", b"1e999", b'"\\ud800"', b"9" * 5_000])
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        *parents, key = draw.choice(chosen)
        holder = value
        try:
            for parent in parents:
                holder = holder[parent]
            if draw.random() < 0.15:
                del holder[key]
            else:
                holder[key] = deep(draw.choice([60, 150, 400])) if draw.random() < 0.05 else draw.choice(ODD)
        except (KeyError, IndexError, TypeError):
            continue
    return json.dumps(value).encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Reader:
    """A kind of file.

    Attributes:
        make: (folder, draw) → the sound files of a case; returns those of which one is damaged.
        read: reads them all.
        kind: json, text, rows or bytes: how they may be damaged.
        heavy: needs torch, or a run that was trained.
    """

    make: Callable[[Path, random.Random], list[Path]]
    read: Callable[[Path], object]
    kind: str = "json"
    heavy: bool = False


def _copied(names: tuple[str, ...]) -> Callable[[Path, random.Random], list[Path]]:
    def make(folder: Path, draw: random.Random) -> list[Path]:
        from surefit.nano import PATH

        shutil.copytree(PATH, folder / "model")
        return [folder / "model" / name for name in names if (folder / "model" / name).is_file()]

    return make


def _index(folder: Path, draw: random.Random) -> list[Path]:
    _copied(())(folder, draw)
    from surefit.facts.safetensors import INDEX, SINGLE, read_header

    names = read_header(folder / "model" / SINGLE)
    (folder / "model" / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, SINGLE)})
    )
    return [folder / "model" / INDEX]


def _adapter(folder: Path, draw: random.Random) -> list[Path]:
    shutil.copytree(SOUND["adapter"], folder / "adapter")
    return [folder / "adapter" / "adapter_config.json"]


def _adapter_weights(folder: Path, draw: random.Random) -> list[Path]:
    _adapter(folder, draw)
    return [folder / "adapter" / "adapter_model.safetensors"]


def _run(*names: str) -> Callable[[Path, random.Random], list[Path]]:
    def make(folder: Path, draw: random.Random) -> list[Path]:
        shutil.copytree(SOUND["run"], folder / "run")
        return [path for name in names for path in (folder / "run").glob(name)]

    return make


def _rows(ending: str) -> Callable[[Path, random.Random], list[Path]]:
    def make(folder: Path, draw: random.Random) -> list[Path]:
        path = folder / f"rows{ending}"
        if ending == ".parquet":  # written once: it takes a process of its own
            if "parquet" not in WRITTEN:
                write_data(path, rows(random.Random(1)))
                WRITTEN["parquet"] = path.read_bytes()
            path.write_bytes(WRITTEN["parquet"])
        else:
            write_data(path, rows(draw))
        return [path]

    return make


def _config(folder: Path, draw: random.Random) -> list[Path]:
    (folder / "run.yaml").write_text(CONFIG.format(recipe="chat", data="rows.jsonl"))
    return [folder / "run.yaml"]


def _other(folder: Path, draw: random.Random) -> list[Path]:
    name = draw.choice(list(OTHERS))
    (folder / name).write_text(OTHERS[name])
    return [folder / name]


def _dotenv(folder: Path, draw: random.Random) -> list[Path]:
    (folder / ".env").write_text("HF_TOKEN=abc\nexport WANDB_API_KEY='d e'\n# a comment\nHF_HOME=${HOME}/x\n")
    return [folder / ".env"]


def read_facts(folder: Path) -> object:
    from surefit.facts.model import model_facts
    from surefit.facts.tokenizer import tokenizer_facts

    return model_facts(str(folder / "model")), tokenizer_facts(folder / "model")


def read_model(folder: Path) -> object:
    """As training does: tokenizer and weights."""
    from surefit.config.schema import ModelSection
    from surefit.facts.hardware import hardware_facts
    from surefit.model.load import load_model
    from surefit.model.tokenizer import load_tokenizer

    section = ModelSection(name_or_path=str(folder / "model"), dtype="float32")
    tokenizer = load_tokenizer(section)
    return tokenizer, load_model(section, hardware_facts("cpu"))


def read_merge(folder: Path) -> object:
    from surefit.stages.merging import AdapterOptions, merge_external_adapter
    from surefit.stages.progress_listener import ProgressListener

    return merge_external_adapter(folder / "adapter", ProgressListener(), "auto", AdapterOptions(base="surefit/nano"))


def read_rows(folder: Path) -> object:
    from surefit.data.read.load import load_rows

    return load_rows(str(next((path for path in folder.iterdir() if path.stem == "rows"), folder / "rows.jsonl")))


def read_checkpoints(folder: Path) -> object:
    from surefit.checkpoint.manager import latest_complete, load_checkpoint

    found = latest_complete(folder / "run" / "checkpoints")
    return load_checkpoint(found.path) if found.path else None


def read_run(folder: Path) -> object:
    """All that looks at a run without a model: the list of runs, one run, the report."""
    from surefit.cli.render import Output
    from surefit.cli.report import report
    from surefit.cli.runs.prune import prune
    from surefit.cli.runs.show import show
    from surefit.cli.runs.summary import find_runs, summarize_runs
    from surefit.core.errors import SureFitError

    out, run, problem = Output(True, False), folder / "run", None
    summarize_runs(find_runs(folder))  # one damaged run is no reason to hide the others
    for look in (
        lambda: unwrap(show)(out, run),
        lambda: unwrap(prune)(out, run),
        lambda: unwrap(report)(out, [run]),
    ):
        try:
            look()
        except SureFitError as error:
            problem = error
    if problem is not None:
        raise problem
    return None


def read_config(folder: Path) -> object:
    from surefit.config.load import load_config

    return load_config(folder / "run.yaml")


def read_other(folder: Path) -> object:
    from surefit.importers import read_tool_config

    return read_tool_config(next((path for path in folder.iterdir() if path.name in OTHERS), folder / "axolotl.yml"))


def read_dotenv(folder: Path) -> object:
    from surefit.core.env import load_dotenv

    return load_dotenv(folder)


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
READERS: dict[str, Reader] = {
    "config": Reader(_config, read_config, "text"),
    "other tools": Reader(_other, read_other, "text"),
    "dotenv": Reader(_dotenv, read_dotenv, "text"),
    "model config": Reader(_copied(("config.json",)), read_facts),
    "index": Reader(_index, read_facts),
    "tokenizer": Reader(_copied(TOKENIZER), read_facts),
    "weights": Reader(_copied(("model.safetensors",)), read_facts, "bytes"),
    "loaded config": Reader(_copied(("config.json",)), read_model, heavy=True),
    "loaded tokenizer": Reader(_copied(TOKENIZER), read_model, heavy=True),
    "loaded weights": Reader(_copied(("model.safetensors",)), read_model, "bytes", heavy=True),
    "adapter": Reader(_adapter, read_merge, heavy=True),
    "adapter weights": Reader(_adapter_weights, read_merge, "bytes", heavy=True),
    "jsonl": Reader(_rows(".jsonl"), read_rows, "rows"),
    "json": Reader(_rows(".json"), read_rows, "rows"),
    "csv": Reader(_rows(".csv"), read_rows, "rows"),
    "parquet": Reader(_rows(".parquet"), read_rows, "bytes"),
    "manifest": Reader(_run("checkpoints/*/manifest.json"), read_checkpoints, heavy=True),
    "trainer": Reader(_run("checkpoints/*/*.safetensors"), read_checkpoints, "bytes", heavy=True),
    "metrics": Reader(_run("metrics.jsonl", "events.jsonl"), read_run, "rows", heavy=True),
    "artefacts": Reader(_run("*.json"), read_run, heavy=True),
    "resolved": Reader(_run("resolved.yaml"), read_run, "text", heavy=True),
}
WRITTEN: dict[str, bytes] = {}
SOUND: dict[str, Path] = {}
"""What cases copy: a run, and its adapter."""


def prepare(folder: Path, names: list[str]) -> None:
    """Train for a few steps, if a reader needs a run; and import all that the readers import."""
    os.environ.update(HF_HUB_OFFLINE="1", SUREFIT_CACHE=str(folder / "cache"), OMP_NUM_THREADS="1")
    from surefit.cli.app import app
    from surefit.core import env

    env.quiet_libraries()
    env.one_tokenizer_thread()  # a forked process would wait for the threads that are not there
    if any(READERS[name].heavy for name in names):
        _train(folder, app)
    with tempfile.TemporaryDirectory() as name:
        for number, reader in enumerate(map(READERS.__getitem__, names)):
            place = Path(name) / str(number)
            place.mkdir()
            reader.make(place, random.Random(number))
            reader.read(place)  # a sound one is fine, or nothing that follows says anything


def _train(folder: Path, app: Any) -> None:
    """One of everything that a run has."""
    write_data(folder / "rows.jsonl", rows(random.Random(0)) * 3)
    (folder / "run.yaml").write_text(
        "recipe: chat\nmodel: {name_or_path: surefit/nano}\n"
        f"data: {{train: {folder / 'rows.jsonl'}, eval: 0.3, max_length: 256}}\n"
        "train: {max_steps: 4, global_batch_size: 4, learning_rate: 0.01}\n"
        "checkpoint: {save_steps: 2}\nhardware: {gpu: cpu}\n"
        f"output_dir: {folder / 'run'}\n"
    )
    for verb in ("check", "train"):
        app([verb, str(folder / "run.yaml")], standalone_mode=False)
    SOUND.update(run=folder / "run", adapter=folder / "adapter")
    shutil.copytree(folder / "run" / "adapter", folder / "adapter")


def damage(path: Path, kind: str, draw: random.Random) -> str:
    """Damage one file; returns how."""
    data = path.read_bytes()
    if draw.random() < 0.03:
        path.unlink()
        what = draw.choice(["a pipe", "a directory", "gone", "a dangling link"])
        if what == "a pipe":
            os.mkfifo(path)
        elif what == "a directory":
            path.mkdir()
        elif what == "a dangling link":
            path.symlink_to("nowhere")
        return what
    if kind == "json" and draw.random() < 0.75:
        path.write_bytes(other_json(data, draw))
        return "another value"
    if kind == "rows" and draw.random() < 0.5:
        path.write_bytes(with_rows(data.decode("utf-8", "replace"), draw).encode("utf-8", "surrogatepass"))
        return "odd rows"
    if kind == "text" and draw.random() < 0.6:
        name = draw.choice(list(TEXT_CHANGES))
        path.write_bytes(TEXT_CHANGES[name](data.decode("utf-8", "replace"), draw).encode("utf-8", "surrogatepass"))
        return name
    if path.suffix == ".safetensors" and draw.random() < 0.7:
        length = int.from_bytes(data[:8], "little")
        header = other_json(data[8 : 8 + length], draw)
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        return "another header"
    name = draw.choice(list(BYTE_CHANGES))
    path.write_bytes(BYTE_CHANGES[name](data, draw))
    return name


@dataclass(frozen=True)
class Case:
    """What happened to one."""

    number: int
    reader: str
    what: str
    said: str
    signal: int
    cpu_seconds: float
    grown_bytes: int

    @property
    def failure(self) -> str | None:
        if self.signal:
            return f"signal {self.signal}"
        if self.said.startswith("BUG"):
            return self.said.strip().splitlines()[-1][:200]
        if self.cpu_seconds > CPU_LIMIT:
            return f"{self.cpu_seconds:.1f} s of CPU"
        return f"{self.grown_bytes / 1e6:.0f} MB" if self.grown_bytes > MEMORY_LIMIT else None


def run_case(number: int, seed: int, names: list[str]) -> Case:
    draw = random.Random(f"{seed}/{number}")
    name = names[number % len(names)]
    reader = READERS[name]
    with tempfile.TemporaryDirectory(prefix="surefit-fuzz-") as temporary:
        folder = Path(temporary)
        victim = draw.choice(reader.make(folder, draw))
        what = f"{victim.name}: {damage(victim, reader.kind, draw)}"
        said = folder / "said.log"
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()  # not the peak so far
        child = os.fork()
        if child == 0:
            _read(reader, folder, said)
        _, status, used = os.wait4(child, 0)
        text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
    grown = max(0, used.ru_maxrss * 1024 - before)
    stopped = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return Case(number, name, what, text, stopped, used.ru_utime + used.ru_stime, grown)


def _read(reader: Reader, folder: Path, said: Path) -> None:
    """In the child, which ends here."""
    from surefit.core.errors import SureFitError

    resource.setrlimit(resource.RLIMIT_CPU, (BRAKE_SECONDS, BRAKE_SECONDS + 1))
    signal.alarm(30)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.chdir(folder)
    try:
        reader.read(folder)
        text = "read"
    except SureFitError as error:
        text = str(error)
    except BaseException:
        text = "BUG\n" + traceback.format_exc()
    said.write_bytes(text.encode("utf-8", "backslashreplace"))
    os._exit(0)


def fuzz(count: int, seed: int, names: list[str], only: int | None = None) -> list[Case]:
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), names)
        return [run_case(number, seed, names) for number in (range(count) if only is None else [only])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", choices=list(READERS))
    parser.add_argument("--light", action="store_true", help="only the readers that need neither torch nor a run")
    parser.add_argument("--only", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    names = [name for name, reader in READERS.items() if not (options.light and reader.heavy)]
    names = [options.reader] if options.reader else names
    cases = fuzz(options.n, options.seed, names, options.only)
    failed = [case for case in cases if case.failure]
    summary = {
        "cases": len(cases), "readers": len({case.reader for case in cases}), "failed": len(failed),
        "refused": sum(case.said not in ("read", "") and not case.failure for case in cases), "seed": options.seed,
        "cpu_seconds_max": round(max(case.cpu_seconds for case in cases), 2),
        "grown_megabytes_max": round(max(case.grown_bytes for case in cases) / 1e6),
        "wall_seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    if options.json:
        print(json.dumps(summary | {"failures": [[c.number, c.reader, c.what, c.failure] for c in failed]}))
    else:
        for case in failed:
            print(f"FAILED {case.number} ({case.reader}, {case.what}): {case.failure}")
            if options.only is not None:
                print(case.said)
        for (reader, reason), times in Counter((case.reader, case.failure) for case in failed).most_common():
            print(f"{times:5} {reader}: {reason}")
        if options.only is not None and not failed:
            print(cases[0].said)
        print(", ".join(f"{key} {value}" for key, value in summary.items()))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
