"""Settings that the table of config/capabilities.py refuses are named by `check`, and all that it allows train.

Each combination is a file as a user would type it, for one of seven kinds of hardware; what is "auto" in it is decided
for that hardware. Then it takes two steps on a CPU, from the dry pass to the exported result, in as many processes as
it has. There is no third outcome: an engine that refuses what `check` allows is a failure here.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import covering
import pytest
import sharing
import yaml
from combination_run import on_tiny, tried
from tiny_run import save_base

from surefit import samples
from surefit.config.capabilities import CONFLICTS, NOT_ADAMW, QUANTIZED, Conflict, Trait
from surefit.config.modes import GROUPED, NAMES
from surefit.lint.engine import choose_rules
from surefit.parallel.process_group import World
from surefit.plan.planner import Planner
from surefit.stages.checking import run_check
from surefit.stages.run_context import RunContext, load_run_context

BASE = "Qwen/Qwen2.5-0.5B-Instruct"
"""Its facts come with SureFit; what trains is far smaller."""
ALL = 400
SCRIPT = Path(covering.__file__).with_name("combination_run.py")
PLACED: dict[Trait, dict[str, Any]] = {
    "all weights": {"train": {"method": "full"}},
    "DoRA": {"lora": {"use_dora": True}},
    "experts": {"lora": {"experts": True}},
    "dropout": {"lora": {"lora_dropout": 0.05}},
    "fused LoRA": {"speed": {"fused_lora": True}},
    "fused kernels": {"speed": {"kernels": True}},
    "compiled layers": {"speed": {"compile": True}},
    "new tokens": {"model": {"add_tokens": ["<call>"]}},
    "NEFTune": {"train": {"neftune_noise_alpha": 5}},
    "flash attention": {"speed": {"attention": "flash_attention_2"}},
    "answers in training": {"evaluate": {"in_training": True}},
    "shared tokens": {"parallel": {"mode": "cp", "cp": 2}},
    "pairs": {"objective": {"name": "orpo"}},
    "shared prompts": {"objective": {"name": "orpo"}, "speed": {"shared_prompts": True}},
    "labelled answers": {"objective": {"name": "kto"}},
    "reference": {"objective": {"name": "dpo"}},
    "truncated documents": {"data": {"too_long": "truncate"}},
    "prepared data": {"data": {"tokenized": "shards"}},
} | {kind: {"model": {"quantization": kind}} for kind in QUANTIZED} | {
    name: {"train": {"optim": name}} for name in NOT_ADAMW
} | {mode: {"parallel": {"mode": mode} | ({mode: 2} if mode in GROUPED else {})} for mode in NAMES}  # fmt: skip
"""What a user writes to have a trait."""


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    lines = (Path(samples.__file__).parent / "function-calling-train.jsonl").read_text().splitlines()
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines[:40]))
    return path


@functools.cache
def rows(at_least: int) -> list[dict[str, Any]]:
    return covering.rows(at_least)


def typed(settings: dict[str, Any], folder: Path) -> RunContext:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return load_run_context(path)


def errors(found: RunContext) -> list[dict[str, Any]]:
    """Of this config; that nothing can be fetched here is not its fault."""
    report = run_check(found, choose_rules(None, "ENV001,STK"))
    return [finding for finding in report["findings"] if finding["severity"] == "error"]


def decided(row: dict[str, Any], data: Path, folder: Path) -> dict[str, Any]:
    """The row's config with every "auto" decided for its hardware; `check` has no error."""
    found = typed(covering.as_config(row, BASE, str(data), str(folder / "run")), folder)
    assert errors(found) == [], row
    assert found.resolved is not None
    return found.resolved.config.model_dump(mode="json")


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda row: f"{row.one}-{row.other}".replace(" ", "_"))
def test_check_names_every_conflict(conflict: Conflict, tmp_path: Path, rows_file: Path) -> None:
    settings: dict[str, Any] = {
        "recipe": "function_calling", "model": {"name_or_path": BASE}, "data": {"train": str(rows_file)},
        "hardware": {"gpu": "h100", "count": 2}, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    for trait in (conflict.one, conflict.other):
        for section, values in PLACED[trait].items():
            settings[section] = settings.get(section, {}) | values
    found = errors(typed(settings, tmp_path))
    assert conflict.code in {finding["code"] for finding in found}
    if conflict.code != "ADP003":  # which judges other tools' files too, in words of its own
        assert conflict.message in [finding["message"] for finding in found]


def test_every_pair_is_there_or_refused() -> None:
    made = rows(0)
    seen = {pair for row in made for pair in covering.pairs(row)}
    for a, b in itertools.combinations(covering.FACTORS, 2):
        for i, j in itertools.product(covering.FACTORS[a], covering.FACTORS[b]):
            if (a, i, b, j) not in seen | {covering.TOO_OLD}:
                assert {a, b} <= set(covering.DECIDING), (a, i, b, j)


def test_one_process_takes_what_check_allows(tmp_path: Path, rows_file: Path) -> None:
    base = str(save_base(tmp_path / "base"))
    chosen = [row for row in rows(0) if row["mode"] == "single" and not row["compile"]]
    assert len(chosen) >= 3
    for number, row in enumerate(chosen):
        settings = decided(row, rows_file, tmp_path)
        assert tried(on_tiny(settings, base, str(tmp_path / f"run-{number}")), World()) is None, row


@pytest.mark.slow
def test_the_plan_takes_a_step_on_tensors_of_a_gpu(tmp_path: Path, rows_file: Path) -> None:
    """DoRA over 4 bits is read again for the certificate; tokens shared within fsdp are proved on real values only."""
    dora = next(row for row in rows(0) if (row["adapter"], row["quantization"]) == ("dora", "nf4"))
    shared = next(row for row in rows(0) if row["mode"] == "fsdp cp" and row["packing"] is False)
    assert all(simulated(row, rows_file, tmp_path) for row in (dora, shared))


@pytest.mark.long
@pytest.mark.parametrize("hardware", [name for name in covering.FACTORS["hardware"] if name != "cpu"])
def test_the_plan_takes_every_pair_on_tensors_of_its_gpu(hardware: str, tmp_path: Path, rows_file: Path) -> None:
    """What is calculated instead says why: DeepSpeed, shards in the host's memory."""
    chosen = [row for row in rows(0) if row["hardware"] == hardware]
    assert sum(simulated(row, rows_file, tmp_path) for row in chosen) >= len(chosen) / 3


def simulated(row: dict[str, Any], data: Path, folder: Path) -> bool:
    """The row's steps, checkpoint and merge run on fake tensors of its GPU: the operators that a GPU would run."""
    found = typed(covering.as_config(row, BASE, str(data), str(folder / "run")), folder)
    assert found.resolved is not None
    assert found.hardware is not None
    planner = Planner(found.model)
    if planner.too_long(found.resolved):
        return False
    return planner.memory(found.resolved, found.hardware).allocated > 2**28


@pytest.mark.slow
@pytest.mark.parametrize("mode", covering.FACTORS["mode"])
def test_every_pair_that_check_allows_trains(mode: str, tmp_path: Path, rows_file: Path) -> None:
    """Compiled ones are left to the long suite: to trace a sharded layer takes two minutes."""
    all_train([row for row in rows(0) if row["mode"] == mode and not row["compile"]], tmp_path, rows_file)


@pytest.mark.long
@pytest.mark.parametrize("mode", covering.FACTORS["mode"])
def test_four_hundred_that_check_allows_train(mode: str, tmp_path: Path, rows_file: Path) -> None:
    all_train([row for row in rows(ALL) if row["mode"] == mode], tmp_path, rows_file)


def all_train(chosen: list[dict[str, Any]], tmp_path: Path, rows_file: Path) -> None:
    jobs = [decided(row, rows_file, tmp_path) for row in chosen]
    ended = together(jobs, tmp_path, 1 if chosen[0]["mode"] == "single" else 2)
    failed = [(row, end) for row, end in zip(chosen, ended, strict=False) if end is not None]
    assert not failed, f"{len(failed)} of {len(chosen)}: {failed[0]}"
    assert len(ended) == len(chosen), f"no answer from {chosen[len(ended)]}"


def together(jobs: list[dict[str, Any]], folder: Path, processes: int) -> list[Any]:
    """What each job ended with; as many as were tried."""
    base, result, listed = save_base(folder / "base"), folder / "result.jsonl", folder / "jobs.json"
    listed.write_text(json.dumps(jobs))
    command = [sys.executable, str(SCRIPT), str(base), str(folder / "runs"), str(result), str(listed)]
    running = [
        subprocess.Popen(command, env=os.environ | place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for place in (sharing.places(processes) if processes > 1 else [{"OMP_NUM_THREADS": "1"}])
    ]
    try:
        for process in running:
            process.wait(timeout=1_200)
    finally:
        for process in running:
            process.kill()
    return [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
