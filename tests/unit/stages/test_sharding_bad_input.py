"""What can go wrong while shards are made: named, nothing lost, and fixed by the same command."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from functools import partial
from pathlib import Path

import pytest
from small_disk import room

from surefit.config.load import load_config
from surefit.core.errors import DataError, MachineError
from surefit.data.read import file_io, readers
from surefit.stages.progress_listener import ProgressListener
from surefit.stages.tokenize_shards import LAYOUT_ROWS, ShardOptions, prepare_shards

from .test_sharding import contents, write_rows

CONFIG = """recipe: chat
model: {{name_or_path: surefit/nano}}
data: {{train: "{train}", tokenized: {prepared}, max_length: 64, eval: surefit/requests-eval}}
output_dir: {output}
"""


def make(tmp_path: Path, train: object, prepared: Path) -> dict[str, object]:
    """`surefit prepare` of a config as typed."""
    path = tmp_path / f"{prepared.name}.yaml"
    path.write_text(CONFIG.format(train=train, prepared=prepared, output=tmp_path / "run"))
    return prepare_shards(load_config(path, ()).config, ProgressListener(), ShardOptions())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of rows, the first with more of them than the plan looks at."""
    place = tmp_path / "rows"
    place.mkdir()
    for name in "abc":
        write_rows(place / f"{name}.jsonl", name, LAYOUT_ROWS + 100 if name == "a" else 40)
    return place


def test_a_gzip_that_is_damaged_in_the_middle(tmp_path: Path, folder: Path) -> None:
    whole = gzip.compress((folder / "b.jsonl").read_bytes())
    (folder / "b.jsonl").unlink()
    packed = folder / "b.jsonl.gz"
    packed.write_bytes(whole[: len(whole) // 2] + b"\xff" * 40 + whole[len(whole) // 2 + 40 :])
    with pytest.raises(DataError, match=r"b\.jsonl\.gz: damaged: .* the first [\d,]+ bytes of compressed data"):
        make(tmp_path, folder, tmp_path / "shards")
    first = tmp_path / "shards" / "shard-000000" / "meta.json"
    kept = first.stat().st_mtime_ns
    assert [path.name for path in (tmp_path / "shards").glob("*shard-*")] == ["shard-000000"]
    packed.write_bytes(whole)
    assert make(tmp_path, folder, tmp_path / "shards")["manifest"]
    assert first.stat().st_mtime_ns == kept
    make(tmp_path, folder, tmp_path / "fresh")
    assert without_places(tmp_path / "shards") == without_places(tmp_path / "fresh")


def without_places(directory: Path) -> dict[str, str]:
    """Hashes of the tokens: times of change are in the manifest."""
    return {name: value for name, value in contents(directory).items() if name.endswith(".npy")}


def test_parquet_whose_schema_changes_between_files(tmp_path: Path, folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for path in folder.iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if path.stem == "c":
            rows = [{"prompt": row["prompt"], "completion": [row["completion"]]} for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_suffix(".parquet"))
        path.unlink()
    with pytest.raises(DataError, match=r"c\.parquet: its columns differ from .*a\.parquet: 'completion' is list"):
        make(tmp_path, folder, tmp_path / "shards")
    assert not list((tmp_path / "shards").glob("*shard-*"))


def test_a_row_that_is_too_long_to_be_one(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "ROW_BYTES", 2_000)
    with (folder / "b.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a", "completion": "b " * 2_000}) + "\n")
    with pytest.raises(DataError, match=r"b\.jsonl:41: a row of more than 2.0 KiB"):
        make(tmp_path, folder, tmp_path / "shards")
    assert (tmp_path / "shards" / "shard-000000").is_dir()


class Sleepy(http.server.SimpleHTTPRequestHandler):
    """A web server that says nothing until it is told to."""

    awake = threading.Event()

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.endswith("b.jsonl") and not self.awake.is_set():
            self.awake.wait()  # for whom it was is gone by then
        else:
            super().do_GET()


def test_a_server_that_times_out(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_io, "READ_SECONDS", 0.3)
    monkeypatch.setattr(Sleepy, "awake", threading.Event())
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Sleepy, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/b.jsonl"
        with pytest.raises(MachineError, match=r"b\.jsonl: no answer.*timed out"):
            make(tmp_path, url, tmp_path / "shards")
        Sleepy.awake.set()
        monkeypatch.setattr(file_io, "READ_SECONDS", 30)
        assert make(tmp_path, url, tmp_path / "shards")["manifest"]
    finally:
        Sleepy.awake.set()
        server.shutdown()
        server.server_close()
    make(tmp_path, folder / "b.jsonl", tmp_path / "local")
    assert without_places(tmp_path / "shards") == without_places(tmp_path / "local")


@pytest.mark.slow
def test_a_disk_that_is_full_at_each_write(tmp_path: Path, folder: Path, small_disk: Path) -> None:
    """Room grows by a page until all fits: at each size the command ends with an error, or is done."""
    make(tmp_path, folder, tmp_path / "roomy")
    done, errors = False, []
    for pages in range(2, 80):
        room(small_disk, pages * 4096)
        try:
            done = bool(make(tmp_path, folder, small_disk / "shards")["manifest"])
        except MachineError as error:
            errors.append(error.message)
            assert not [path for path in (small_disk / "shards").glob(".*") if not path.name.startswith(".lock")]
        if done:
            break
    assert done
    assert len(errors) > 5
    assert all("No space left" in message for message in errors), errors
    assert without_places(small_disk / "shards") == without_places(tmp_path / "roomy")
