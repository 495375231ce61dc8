"""Shards made on a Ray cluster: the same as here, also where a worker is killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefit.core.errors import DataError, MachineError
from surefit.core.processes import own_command
from surefit.launch.cluster import run_on_ray

CONFIG = """recipe: chat
model: {name_or_path: surefit/nano}
data: {train: rows, tokenized: PREPARED, max_length: 256, eval: 0.1}
output_dir: run
"""
FILES = 6


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MachineError) as told:
        list(run_on_ray(len, ["job"]))
    assert "'.[scale]'" in (told.value.help or "")


@pytest.fixture(scope="module")
def cluster():
    """Two machines of one core each, as Ray sees it; yields the environment of who uses them."""
    pytest.importorskip("ray", reason="needs the extra scale")
    from ray.cluster_utils import Cluster

    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    machines.add_node(num_cpus=1)
    yield {**os.environ, "RAY_ADDRESS": machines.address}
    machines.shutdown()


def sources(place: Path) -> None:
    """Rows of several files, which are a shard each, and a config for them."""
    (place / "rows").mkdir()
    for number in range(FILES):
        rows = [{"prompt": f"{number} {i} " + "word " * (i % 40), "completion": "yes " * 9} for i in range(12_000)]
        (place / "rows" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("here", "cluster"):
        (place / f"{name}.yaml").write_text(CONFIG.replace("PREPARED", name))


def contents(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".lock")]
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != "plan.json"  # both have the same; the times of the sources are in it
    }


def working(directory: Path) -> int | None:
    """A process that is writing a shard, by the name of what it writes."""
    names = (path.name.split(".") for path in directory.glob(".shard-*.tmp"))
    return next((int(name[2].partition("-")[0]) for name in names), None)


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(cluster: dict[str, str], tmp_path: Path) -> None:
    sources(tmp_path)
    subprocess.run(own_command("prepare", "here.yaml"), cwd=tmp_path, check=True, capture_output=True)
    command = own_command("prepare", "cluster.yaml", "--engine", "ray", "--json")
    child = subprocess.Popen(command, cwd=tmp_path, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while (killed := working(tmp_path / "cluster")) is None:
        assert child.poll() is None, child.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert killed != child.pid
    os.kill(killed, signal.SIGKILL)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err.decode()
    assert json.loads(out)["complete"] == FILES
    assert f"PID: {killed}" in err.decode()  # Ray has seen it die
    assert contents(tmp_path / "cluster") == contents(tmp_path / "here")
    assert not list((tmp_path / "cluster").glob(".shard-*"))


@pytest.mark.slow
def test_what_a_task_raises_arrives_as_it_was(cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster["RAY_ADDRESS"])
    with pytest.raises(DataError, match="not found") as told:
        list(run_on_ray(_refuse, [Path("a.jsonl")]))
    assert told.value.path == "a.jsonl"


def _refuse(path: Path) -> None:
    raise DataError("not found", path=str(path))
