"""Prepared data: the same bytes however it is made, and the rows that training reads from memory otherwise."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_disk import room

from surefit import recipes
from surefit.config.load import load_config
from surefit.config.schema import ModelSection
from surefit.core.errors import ConfigError, DataError, MachineError
from surefit.core.lock import hold_lock
from surefit.core.processes import pool
from surefit.data.read.stream import split_into_ranges
from surefit.data.rows.layouts import read_splits
from surefit.data.tokens import shard_manifest, shards
from surefit.data.tokens.dataset import build_dataset
from surefit.data.tokens.shard_manifest import ShardedTokens, read_shard_manifest
from surefit.data.tokens.shard_settings import open_prepared_data
from surefit.model.tokenizer import load_tokenizer
from surefit.stages import shard_lock, tokenize_shards
from surefit.stages.progress_listener import LineListener, ProgressListener
from surefit.stages.tokenize_shards import ShardOptions, prepare_shards
from surefit.stages.training import _say_what_was_left_out
from surefit.train.sampler import fingerprint_training_rows

RANGE = 1500
CONFIG = """recipe: chat
model: {{name_or_path: surefit/nano}}
data: {{train: {train}, tokenized: {prepared}, max_length: 64, {more}}}
output_dir: {output}
"""


def write_rows(path: Path, name: str, count: int) -> Path:
    rows = [{"prompt": f"{name} {i} " + "word " * (i % 7), "completion": "yes " * (i % 5 + 1)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_shards, "split_into_ranges", partial(split_into_ranges, range_bytes=RANGE))


@pytest.fixture
def config(tmp_path: Path):
    """config(name, more) → a config whose shards belong in tmp_path/name."""
    train = write_rows(tmp_path / "rows.jsonl", "own", 120)

    def make(name: str = "shards", more: str = "eval: 0.2", place: Path = tmp_path):
        path = tmp_path / f"{name}.yaml"
        path.write_text(CONFIG.format(train=train, prepared=place / name, more=more, output=tmp_path / "run"))
        return load_config(path, ()).config

    return make


def contents(directory: Path) -> dict[str, str]:
    """The hash of every file but the locks."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".lock")]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def in_memory(config, tmp_path: Path):
    """(training rows, held-out examples), as without `data.tokenized`."""
    section = config.data.model_copy(update={"tokenized": None})
    train, held_out = read_splits(section, recipes.get_recipe("chat"), config.train.seed)
    tokenizer = load_tokenizer(config.model)
    return build_dataset(train, tokenizer, max_length=64, cache=tmp_path / "cache"), held_out


def as_lists(rows) -> list[tuple[list[int], list[int]]]:
    return [(ids.tolist(), labels.tolist()) for ids, labels in (rows[i] for i in range(len(rows)))]


def test_shards_hold_the_rows_that_training_reads_from_memory(config, tmp_path: Path) -> None:
    one = config()
    result = prepare_shards(one, ProgressListener(), ShardOptions())
    rows = ShardedTokens(tmp_path / "shards", open_prepared_data(one, recipes.get_recipe("chat")))
    expected, held_out = in_memory(one, tmp_path)
    assert result["shards"] > 3
    assert as_lists(rows) == as_lists(expected)
    assert rows.stats == expected.stats
    assert rows.lengths[range(len(rows))].tolist() == expected.lengths.tolist()
    assert rows.lengths.max() == expected.lengths.max()
    longest = np.argsort(-expected.lengths, kind="stable")[:9]
    assert rows.lengths.longest(9) == longest.tolist()
    _, again = read_splits(one.data, recipes.get_recipe("chat"), one.train.seed)
    assert [example.messages for example in again] == [example.messages for example in held_out]


def test_prepared_conversations_that_a_template_splits_are_told(config, tmp_path: Path) -> None:
    prepare_shards(config(), ProgressListener(), ShardOptions())
    rows, said = ShardedTokens(tmp_path / "shards"), []
    rows.stats = replace(rows.stats, split=3)
    _say_what_was_left_out(SimpleNamespace(note=said.append), rows, ())
    assert said == [
        "3 more examples than rows: the chat template rewrites earlier turns, so conversations are split at those turns"
    ]


@pytest.mark.parametrize("passes", [0.3, 1, 2.25])
def test_a_mix_is_seen_as_often_as_in_memory(config, tmp_path: Path, passes: float) -> None:
    more = write_rows(tmp_path / "more.jsonl", "more", 80)
    scored = write_rows(tmp_path / "scored.jsonl", "more", 3)  # these prompts must not be learnt
    one = config("mixed", f"eval: {scored}, mix: {{{more}: {passes}}}")
    prepare_shards(one, ProgressListener(), ShardOptions())
    rows = ShardedTokens(tmp_path / "mixed")
    expected, _ = in_memory(one, tmp_path)
    assert sorted(as_lists(rows)) == sorted(as_lists(expected))
    assert rows.stats == expected.stats


@pytest.mark.slow
def test_workers_and_groups_write_the_same_bytes(config, tmp_path: Path) -> None:
    for name in ("one", "two", "grouped"):
        tokenize_shards.build_shard_plan(config(name), _made(tmp_path / name))
    prepare_shards(config("one"), ProgressListener(), ShardOptions())
    prepare_shards(config("two"), ProgressListener(), ShardOptions(workers=2))
    for number in (2, 0, 1):
        part = prepare_shards(config("grouped"), ProgressListener(), ShardOptions(group=(number, 3)))
        assert part["manifest"] == (number == 1)  # the last one writes it
    kept = contents(tmp_path / "grouped")
    assert prepare_shards(config("grouped"), ProgressListener(), ShardOptions())["manifest"]
    assert contents(tmp_path / "grouped") == kept
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "grouped")


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


KILLED = """
import sys
from surefit.config.load import load_config
from surefit.config.schema import ModelSection
from surefit.stages.tokenize_shards import ShardOptions, prepare_shards
from surefit.stages.progress_listener import ProgressListener
from pathlib import Path
prepare_shards(load_config(Path(sys.argv[1]), ()).config, ProgressListener(), ShardOptions())
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(config, tmp_path: Path) -> None:
    whole, again = config("whole"), config("again")
    prepare_shards(whole, ProgressListener(), ShardOptions())
    directory = _made(tmp_path / "again")
    tokenize_shards.build_shard_plan(again, directory)
    killed = 0
    for made, delay in ((1, 0.0), (2, 0.004), (4, 0.01), (5, 0.017)):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "again.yaml")])
        deadline = time.monotonic() + 120
        while len(list(directory.glob("shard-*"))) < made and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        killed += child.wait() == -signal.SIGKILL
    assert killed >= 2
    kept = {path: path.stat().st_mtime_ns for path in directory.glob("shard-*/meta.json")}
    prepare_shards(again, ProgressListener(), ShardOptions())
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert contents(directory) == contents(tmp_path / "whole")


def test_a_full_disk_leaves_whole_shards_and_the_command_goes_on(config, tmp_path: Path, small_disk: Path) -> None:
    one = config("full", place=small_disk)
    expected = config("roomy")
    prepare_shards(expected, ProgressListener(), ShardOptions())
    tokenize_shards.build_shard_plan(one, _made(small_disk / "full"))
    room(small_disk, 60 * 1024)
    with pytest.raises(MachineError, match="No space left") as told:
        prepare_shards(one, ProgressListener(), ShardOptions())
    assert "same command again" in str(told.value.help)
    there = list((small_disk / "full").glob("shard-*"))
    assert 0 < len(there) < len(list((tmp_path / "roomy").glob("shard-*")))
    assert not list((small_disk / "full").glob(".shard-*"))
    room(small_disk, 2**24)
    prepare_shards(one, ProgressListener(), ShardOptions())
    assert contents(small_disk / "full") == contents(tmp_path / "roomy")


def test_two_at_once_are_refused(config, tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from surefit.core.lock import hold_lock
from surefit.core.processes import pool
with hold_lock(Path({str(tmp_path / "shards" / ".lock-0-of-2")!r}), "prepare"):
    print("held", flush=True)
    input()
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    with pytest.raises(MachineError, match=f"process {child.pid}"):
        prepare_shards(config(), ProgressListener(), ShardOptions())
    with pytest.raises(MachineError, match="in use"):
        prepare_shards(config(), ProgressListener(), ShardOptions(group=(0, 2)))
    with pytest.raises(MachineError, match=f"process {child.pid}"):  # it would make shards of the other division
        prepare_shards(config(), ProgressListener(), ShardOptions(group=(0, 3)))
    assert prepare_shards(config(), ProgressListener(), ShardOptions(group=(1, 2)))["complete"] > 0
    child.communicate("\n")


LEFT_BY = """
import sys
from multiprocessing import get_context
from pathlib import Path
from surefit.stages.shard_lock import lock_shard_directory
from surefit.stages.progress_listener import ProgressListener

def group(number):
    start.wait()
    with lock_shard_directory(Path(sys.argv[1]), (number, 16), ProgressListener()):
        start.wait()
    return number

def begin(barrier):
    global start
    start = barrier

context = get_context("fork")
with context.Pool(16, begin, (context.Barrier(16, timeout=60),)) as pool:
    print(sum(pool.map(group, range(16), chunksize=1)))
"""


def test_groups_start_beside_each_other_where_another_division_has_worked(tmp_path: Path) -> None:
    for number in range(8):  # as `--shard I/8` leaves them
        (tmp_path / f".lock-{number}-of-8").write_text('{"pid": 1, "host": "gone", "stage": "prepare"}')
    done = subprocess.run([sys.executable, "-c", LEFT_BY, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{sum(range(16))}\n"


def test_of_two_divisions_that_start_at_once_one_sees_the_other(
    config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = tmp_path / "shards"
    with contextlib.ExitStack() as other:

        def with_another(path: Path, *args: object, **how: object) -> contextlib.AbstractContextManager[None]:
            if path.name == ".lock-0-of-2":  # in this moment a process begins with 0/3
                file = other.enter_context((shards / ".lock-0-of-3").open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
            return hold_lock(path, *args, **how)

        monkeypatch.setattr(shard_lock, "hold_lock", with_another)
        with pytest.raises(MachineError, match="in use"):
            prepare_shards(config(), ProgressListener(), ShardOptions(group=(0, 2)))
    assert not list(shards.glob("shard-*"))


def test_a_group_is_refused_while_all_are_made_and_the_other_way_round(config, tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from surefit.core.lock import hold_lock
with hold_lock(Path(sys.argv[1]), "prepare", shared=sys.argv[2] == "shared"):
    print("held", flush=True)
    input()
"""
    lock = str(tmp_path / "shards" / ".lock")
    for how, group in (("alone", (0, 2)), ("shared", None)):
        command = [sys.executable, "-c", program, lock, how]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "held\n"
        with pytest.raises(MachineError, match="in use"):
            prepare_shards(config(), ProgressListener(), ShardOptions(group=group))
        child.communicate("\n")


def test_rows_that_are_written_while_they_are_read_make_no_shard(
    config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, real = tmp_path / "rows.jsonl", shards.read_range

    def changing(one):
        yield from real(one)
        with rows.open("a") as file:
            file.write("\n")

    monkeypatch.setattr(shards, "read_range", changing)
    with pytest.raises(DataError, match=r"rows\.jsonl: the file changed while it was being read"):
        prepare_shards(config(), ProgressListener(), ShardOptions())
    assert not list((tmp_path / "shards").glob("shard-*"))
    monkeypatch.undo()
    assert prepare_shards(config(), ProgressListener(), ShardOptions())["manifest"]


def test_what_is_missing_or_damaged_is_named_and_mended(config, tmp_path: Path) -> None:
    one, directory, recipe = config(), tmp_path / "shards", recipes.get_recipe("chat")
    with pytest.raises(DataError, match="no prepared data") as told:
        open_prepared_data(one, recipe)
    assert "surefit prepare CONFIG" in str(told.value.help)
    prepare_shards(one, ProgressListener(), ShardOptions(group=(0, 2)))
    with pytest.raises(DataError, match="unfinished"):
        open_prepared_data(one, recipe)
    prepare_shards(one, ProgressListener(), ShardOptions())
    before = contents(directory)

    (directory / "shard-000001").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"1 of .* shards are missing: shard-000001"):
        open_prepared_data(one, recipe)
    prepare_shards(one, ProgressListener(), ShardOptions())
    assert contents(directory) == before

    ids = directory / "shard-000002" / "input_ids.npy"
    ids.write_bytes(ids.read_bytes()[:-4])
    rows = ShardedTokens(directory)
    with pytest.raises(DataError, match=r"shard-000002.*damaged"):
        as_lists(rows)
    prepare_shards(one, ProgressListener(), ShardOptions())
    assert contents(directory) == before

    turned = bytearray(ids.read_bytes())
    turned[-1] ^= 1
    ids.write_bytes(turned)
    said: list[str] = []
    prepare_shards(one, LineListener(said.append), ShardOptions(verify=True))
    assert any("input_ids.npy is damaged" in line for line in said)
    assert contents(directory) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_length": 32}, "data.max_length 64 [(]now 32[)]"),
        ({"eval": 0.3}, "data.eval 0.2 [(]now 0.3[)]"),
        ({"too_long": "error"}, "data.too_long 'drop'"),
    ],
)
def test_shards_of_other_settings_are_refused(config, tmp_path: Path, change, named: str) -> None:
    one = config()
    prepare_shards(one, ProgressListener(), ShardOptions())
    other = one.model_copy(update={"data": one.data.model_copy(update=change)})
    with pytest.raises(ConfigError, match=named):
        open_prepared_data(other, recipes.get_recipe("chat"))
    with pytest.raises(ConfigError, match=named):
        prepare_shards(other, ProgressListener(), ShardOptions())
    assert read_shard_manifest(tmp_path / "shards").settings["data.max_length"] == 64
    if change != {"too_long": "error"}:
        prepare_shards(other, ProgressListener(), ShardOptions(overwrite=True))
        open_prepared_data(other, recipes.get_recipe("chat"))


def test_rows_that_change_are_made_anew_and_the_others_are_kept(config, tmp_path: Path) -> None:
    one, directory = config(), tmp_path / "shards"
    prepare_shards(one, ProgressListener(), ShardOptions())
    kept = {path.parent.name: path.stat().st_mtime_ns for path in directory.glob("shard-*/meta.json")}
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(rows.read_bytes().replace(b"own 60 ", b"new 60 "))
    prepare_shards(one, ProgressListener(), ShardOptions())
    changed = [name for name, when in kept.items() if (directory / name / "meta.json").stat().st_mtime_ns != when]
    assert len(changed) == 1
    fresh = config("fresh")
    prepare_shards(fresh, ProgressListener(), ShardOptions())
    assert ShardedTokens(directory).sha256 == ShardedTokens(tmp_path / "fresh").sha256


def test_bad_rows_are_named_or_counted(config, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = rows.read_text().splitlines()
    lines[7] = '{"prompt": "no answer"}'
    rows.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:8: completion: missing"):
        prepare_shards(config(), ProgressListener(), ShardOptions())
    one = config("skipping", "eval: 0.2, bad_rows: skip")
    prepare_shards(one, ProgressListener(), ShardOptions())
    manifest = read_shard_manifest(tmp_path / "skipping")
    assert manifest.stats.skipped == 1
    assert manifest.skipped == [f"{rows}:8: completion: missing"]


def test_few_shards_are_open_at_once(config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_manifest, "MAX_OPEN_SHARDS", 2)
    prepare_shards(config(), ProgressListener(), ShardOptions())
    rows = ShardedTokens(tmp_path / "shards")
    files = len(os.listdir("/proc/self/fd"))
    for index in np.random.default_rng(0).integers(len(rows), size=200):
        rows[int(index)]
    assert len(rows._open) == 2
    assert len(os.listdir("/proc/self/fd")) <= files + 6


def test_the_survey_reads_no_row(config, tmp_path: Path) -> None:
    prepare_shards(config(), ProgressListener(), ShardOptions())
    rows = ShardedTokens(tmp_path / "shards")
    found = fingerprint_training_rows(rows)
    assert found.sha256 == read_shard_manifest(tmp_path / "shards").sha256
    assert len(found.lengths) == len(rows)
    assert not rows._open


def test_a_lock_of_our_own_is_no_hindrance(config, tmp_path: Path) -> None:
    with hold_lock(tmp_path / "shards" / ".lock-0-of-2", "prepare"):
        pass
    assert prepare_shards(config(), ProgressListener(), ShardOptions())["manifest"]


def test_files_of_every_format_become_shards(config, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    expected, directory = config(), _made(tmp_path / "several")
    (directory / "a.json").write_text(json.dumps(lines[:30]))
    (directory / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[30:80]))
    parquet.write_table(pyarrow.Table.from_pylist(lines[80:]), directory / "c.parquet")
    prepare_shards(expected, ProgressListener(), ShardOptions())
    section = expected.data.model_copy(update={"train": str(directory), "tokenized": str(tmp_path / "other")})
    prepare_shards(expected.model_copy(update={"data": section}), ProgressListener(), ShardOptions())
    assert as_lists(ShardedTokens(tmp_path / "other")) == as_lists(ShardedTokens(tmp_path / "shards"))
    held_out = [(tmp_path / name / "heldout.jsonl").read_text() for name in ("shards", "other")]
    assert held_out[0] == held_out[1]


@pytest.mark.slow
def test_a_worker_says_what_is_wrong_and_a_killed_one_is_told(
    config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    good = rows.read_text()
    rows.write_text(good.replace('{"prompt": "own 3 ', '{"wrong": "own 3 '))
    with pytest.raises(DataError, match=r"rows\.jsonl:4: prompt: missing"):
        prepare_shards(config(), ProgressListener(), ShardOptions(workers=2))
    rows.write_text(good)
    monkeypatch.setattr(tokenize_shards, "_start_worker", _die)
    with pytest.raises(MachineError, match="a worker was killed"):
        prepare_shards(config(), ProgressListener(), ShardOptions(workers=2))
    monkeypatch.undo()
    assert prepare_shards(config(), ProgressListener(), ShardOptions())["manifest"]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def answers_without_torch(section: str) -> tuple[str, bool]:
    """(digest of the tokenizer, whether torch was imported), in a worker."""
    return tokenize_shards.load_cached_tokenizer(section)[1], sys.modules.get("torch") is not None


@pytest.mark.slow
def test_a_worker_does_without_torch(config):
    section = config().model.model_dump_json()
    with pool(1, tokenize_shards._start_worker, (False,)) as executor:
        digest, imported = executor.submit(answers_without_torch, section).result()
    assert not imported
    assert digest == tokenize_shards.load_cached_tokenizer(section)[1]
    with pool(1, tokenize_shards._start_worker, (True,)) as executor:  # the counter-example
        assert executor.submit(answers_without_torch, section).result() == (digest, True)


@pytest.mark.parametrize(
    ("model", "needed"),
    [({"name_or_path": "surefit/nano"}, False), ({"name_or_path": "a/b", "trust_remote_code": True}, True),
     ({"name_or_path": "some.gguf"}, True)],
)  # fmt: skip
def test_which_models_a_worker_needs_torch_for(config, tmp_path, monkeypatch, model, needed):
    monkeypatch.chdir(tmp_path)
    Path("some.gguf").touch()
    changed = config().model_copy(update={"model": ModelSection(**model)})
    assert tokenize_shards._needs_torch(changed) is needed
    assert tokenize_shards._needs_torch(
        changed.model_copy(update={"recipe": "somebody_elses"})
    )  # its code may ask for torch
