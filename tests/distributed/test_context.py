"""Two real processes that share the tokens of every example learn what one process learns."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed
HELPERS = Path(__file__).parents[1] / "helpers"
SCENARIOS = (
    "llama", "llama, whole logits", "qwen3, padded", "mistral, window of 4", "mistral, window of 4, padded",
    "gemma2, softcap", "phi3, rotary factors by the longest position", "qwen3, LoRA", "LoRA, checkpointing",
    "LoRA, selective checkpointing, padded", "LoRA, fused, tiled, checkpoints on the host", "mixture of experts",
)  # fmt: skip


def launched(out: Path, processes: int, size: int, *names: str) -> list[dict[str, Any]]:
    """What each of some processes found, in groups of `size`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1, "PYTHONPATH": HELPERS,
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, str(HELPERS / "context_run.py"), str(out), str(size), *names],
            env=os.environ
            | {name: str(value) for name, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        said = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(said)[-4000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launched(tmp_path_factory.mktemp("two"), 2, 2)


def assert_same(found: list[dict[str, Any]], name: str) -> None:
    (differences,) = [part[name] for part in found if name in part]
    assert differences["fell"] < -0.05, "it learns"
    assert differences["loss"] <= 1e-5
    assert differences["held_out"] <= 1e-5
    assert differences["gradient"] <= 1e-5, differences["worst"]
    assert differences["norm"] <= 1e-4, "the norms of twenty steps"
    assert len({part["weights"][name] for part in found}) == 1, "all processes have the same weights, bit by bit"


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_learns_what_one_process_learns(found: list[dict[str, Any]], name: str) -> None:
    assert_same(found, name)


def test_every_scenario_is_here(found: list[dict[str, Any]]) -> None:
    assert set(found[0]["weights"]) == set(SCENARIOS)


@pytest.mark.parametrize("kind", ["plain", "checkpointed"])
def test_each_process_keeps_about_half(found: list[dict[str, Any]], kind: str) -> None:
    """Of activations; what is above it are the keys and values of all."""
    for part in found:
        shared, alone = part["memory"][kind], part["memory alone"][kind]
        assert 0.45 < shared["kept"] / alone["kept"] < 0.6
        assert 0.45 < shared["peak"] / alone["peak"] < 0.62


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("groups", "2 processes cannot be divided into groups of 3"),
        ("alibi", "ALiBi"),
        ("state", "llama cannot be trained with context parallelism: the logits are off by"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_every_process(found: list[dict[str, Any]], what: str, says: str) -> None:
    assert all(says in part["refused"][what] for part in found)


def test_groups_that_share_tokens_may_share_the_examples_too(tmp_path: Path) -> None:
    """Four processes: two groups of two, each with half of the micro batches."""
    names = ("llama", "qwen3, padded")
    four = launched(tmp_path, 4, 2, *names)
    for name in names:
        assert_same(four, name)
