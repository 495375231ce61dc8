"""On a real SLURM of two nodes (tests/slurm/run): saved, requeued, resumed, and the weights of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SKIPPED = 77
pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What scenario.py saw; the cluster is up for as long as it runs."""
    result = tmp_path_factory.mktemp("slurm") / "result.json"
    command = [str(HERE / "run"), sys.executable, str(HERE / "scenario.py"), str(result)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = process.communicate(timeout=1800)
    finally:
        process.terminate()  # and wait: it takes the cluster down
        process.wait()
    if process.returncode == SKIPPED:
        pytest.skip(stderr.strip().splitlines()[-1])
    assert process.returncode == 0, stdout + stderr
    value: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return value


@pytest.mark.parametrize("nodes", ["one", "two"])
def test_a_requeued_run_ends_with_the_weights_of_an_undisturbed_one(found: dict[str, Any], nodes: str) -> None:
    told, undisturbed = found[nodes]["told"], found[nodes]["undisturbed"]
    assert (undisturbed["state"], undisturbed["restarts"]) == ("COMPLETED", 0)
    assert (told["state"], told["restarts"]) == ("COMPLETED", 1), told["log"]
    assert [event for event in told["events"] if event in ("interrupted", "resumed", "finished")] == [
        "interrupted", "resumed", "finished",
    ]  # fmt: skip
    assert told["losses"] == undisturbed["losses"]
    assert told["weights"] == undisturbed["weights"] is not None


def test_two_nodes_learn_what_one_process_learns(found: dict[str, Any]) -> None:
    one, two = found["one"]["undisturbed"], found["two"]["undisturbed"]
    assert (one["mode"], two["mode"]) == (["single"], ["ddp"])
    assert "torchrun --nnodes" in found["two"]["script"]
    # A step has two packed bins, one for each process: as many roundings, in another order.
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)


def test_a_cancelled_run_saves_and_is_not_started_again(found: dict[str, Any]) -> None:
    cancelled = found["cancelled"]
    assert (cancelled["state"], cancelled["restarts"]) == ("CANCELLED", 0)
    assert cancelled["events"][-1] == "interrupted"
    assert cancelled["weights"] is None


def test_a_failing_run_is_not_started_again(found: dict[str, Any]) -> None:
    failing = found["failing"]
    assert (failing["state"], failing["restarts"]) == ("FAILED", 0)
    assert "error[E4119] data.train:" in failing["log"]
    assert "gone.jsonl: no such file" in failing["log"]


def test_sbatch_says_when_a_written_job_could_start_and_why_never(found: dict[str, Any]) -> None:
    assert "to start at" in found["judged"]["possible"]
    assert "invalid partition" in found["judged"]["impossible"].lower()


def test_runs_shows_the_state_of_a_job(found: dict[str, Any]) -> None:
    cancelled = found["cancelled"]
    assert cancelled["shown"] == {"job_id": cancelled["number"], "state": "RUNNING"}


def test_an_array_of_two_tasks_scores_every_checkpoint_once(found: dict[str, Any]) -> None:
    scored = found["scored"]
    assert scored["job"] == {"job_id": scored["number"], "states": {"COMPLETED": 2}}, scored["log"]
    points = scored["summary"]["checkpoints"]
    assert sorted(f"step-{point['step']}" for point in points) == scored["checkpoints"]
    assert len(points) > 1


def test_merging_and_scoring_wait_until_training_has_succeeded(found: dict[str, Any]) -> None:
    chained = found["chained"]
    assert chained["between"] == {stage: ["PENDING", "Dependency"] for stage in ("merge", "evaluate")}
    assert set(chained["states"].values()) == {"COMPLETED"}, chained["log"]
    ends = [event for event in chained["events"] if event[1] in ("interrupted", "finished", "failed")]
    assert ends == [["train", "interrupted"], *([stage, "finished"] for stage in ("train", "merge", "evaluate"))]
    assert chained["scored"] == ["adapter", "base", "merged"]


def test_nothing_waits_for_ever_for_a_training_that_failed(found: dict[str, Any]) -> None:
    assert found["broken"] == {"train": "FAILED", "merge": "CANCELLED", "evaluate": "CANCELLED"}
