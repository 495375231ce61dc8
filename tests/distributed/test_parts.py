"""Checkpoints that two and four real processes write together under FSDP (tests/helpers/parts_run.py)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import parts_run
import pytest
import sharing
import tiny_run
from safetensors import safe_open

from surefit.checkpoint import manager
from surefit.core.errors import EXIT_ENVIRONMENT, EXIT_LOST
from surefit.core.rundir import RunDir

pytestmark = pytest.mark.distributed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BOUND = 1e-5
"""Relative, in float32, where another number of processes adds up in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts")
    tiny_run.save_base(path / "base", **parts_run.SHAPE)
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    result = folder / "result.json"
    command = [sys.executable, parts_run.__file__, str(folder / "base"), str(folder / "runs"), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(result.read_text())


def outcome(folder: Path, run: str) -> dict[str, Any]:
    return sharing.outcome(parts_run.settings(folder / "base", folder / "runs" / run))


def model(folder: Path, run: str) -> bytes:
    return (RunDir(folder / "runs" / run).model / "model.safetensors").read_bytes()


def test_each_process_writes_its_part_and_all_cover_every_number_once(folder: Path, found: dict[str, Any]) -> None:
    path = folder / "runs/bfloat16/checkpoints/step-8"
    names = [f"{kind}-0000{n}-of-00002.safetensors" for kind in ("optimizer", "weights") for n in (1, 2)]
    assert sorted(file.name for file in path.iterdir()) == sorted([*names, "manifest.json", "trainer.json"])
    for kind in ("weights", "optimizer"):
        parts_of: dict[str, list[range]] = {}
        shapes = {}
        held = []
        for n in (1, 2):
            with safe_open(path / f"{kind}-0000{n}-of-00002.safetensors", "pt") as file:
                ranges = json.loads(file.metadata()["ranges"])
                held.append(0)
                for name, (offset, *shape) in ranges.items():
                    (count,) = file.get_slice(name).get_shape()
                    parts_of.setdefault(name, []).append(range(offset, offset + count))
                    shapes[name] = shape
                    held[-1] += count
        for name, parts in parts_of.items():
            covered = [number for part in parts for number in part]
            assert sorted(covered) == list(range(math.prod(shapes[name]))), name
        assert held[0] == pytest.approx(held[1], rel=0.05), "no process writes much more than another"
    assert found["saved_is_trained"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_in_the_same_mode_it_is_bit_identical(folder: Path, found: dict[str, Any], dtype: str) -> None:
    assert outcome(folder, f"{dtype}-again") == outcome(folder, dtype)
    assert model(folder, f"{dtype}-again") == model(folder, dtype)
    ours, theirs = (
        manager.load_checkpoint(folder / "runs" / run / "checkpoints/step-8") for run in (dtype, f"{dtype}-again")
    )
    assert all(ours.optimizer[name].equal(theirs.optimizer[name]) for name in ours.optimizer)


@pytest.mark.parametrize("way", ["alone", "ddp"])
def test_one_process_and_another_mode_go_on_and_hand_back(folder: Path, found: dict[str, Any], way: str) -> None:
    """`alone`: two processes, then one, then two again."""
    assert outcome(folder, way)["loss"] == pytest.approx(outcome(folder, "float32")["loss"], rel=BOUND)
    assert found["alone_wrote_it_whole"]
    whole = (folder / "runs" / way / "checkpoints/step-8/weights.safetensors").exists()
    assert whole == (way == "ddp")


def test_four_processes_go_on_from_what_two_have_written(folder: Path, found: dict[str, Any]) -> None:
    assert outcome(folder, "four")["loss"] == pytest.approx(outcome(folder, "float32")["loss"], rel=BOUND)
    assert len(list((folder / "runs/four/checkpoints/step-8").glob("weights-*-of-00004.safetensors"))) == 4


@pytest.mark.parametrize("replicas", ["2", "4"])
def test_those_that_hold_the_same_share_the_writing(found: dict[str, Any], replicas: str) -> None:
    written = found["replicas"][replicas]
    assert written["equal"]
    assert max(written["numbers"]) < 1.1 * min(written["numbers"])


def test_a_process_that_cannot_write_ends_the_run_and_nobody_waits(folder: Path, found: dict[str, Any]) -> None:
    """The first process notices that the other has gone; nothing of the checkpoint is left."""
    assert found["faulty"] == [EXIT_LOST, EXIT_ENVIRONMENT]
    left = [path.name for path in (folder / "runs/faulty/checkpoints").iterdir()]
    assert not [name for name in left if not name.startswith(".")]
    assert not (folder / "runs/faulty/model").exists()


def test_kill_nine_of_one_or_all_while_they_write_loses_nothing(tmp_path: Path) -> None:
    """A handful; `benchmarks/kill_resume.py --processes 2` does as many as are wanted."""
    command = [sys.executable, str(BENCHMARKS / "kill_resume.py"), "--processes", "2", "--kills", "6", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] >= 6
    assert not any(row["differences"] for row in result["rows"])


@pytest.mark.slow
def test_a_disk_that_fills_up_makes_both_wait_and_go_on() -> None:
    command = [sys.executable, str(BENCHMARKS / "disk_full.py"), "--processes", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr + done.stdout
