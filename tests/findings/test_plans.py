"""Plans that depend neither on the planner's machine nor on the models they were fitted to (kind 5 of the findings)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from surefit import nano
from surefit.cli.app import app
from surefit.core.units import GIB
from surefit.facts.gpus import GPUS
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts

LLAMA = "meta-llama/Llama-3.2-3B-Instruct"
CONFIG = """recipe: chat
model: {{name_or_path: {model}}}
data: {{train: rows.jsonl, eval: 0.1, max_length: 2048}}
train: {{per_device_train_batch_size: 8, gradient_checkpointing: false}}
hardware: {{{hardware}}}
output_dir: runs/one
"""

Call = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """call(verb, *arguments, model=…, hardware=…) → (exit code, the last line's JSON) beside 240 short rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}." + " Yes." * (n % 9)} for n in range(240)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

    def run(verb: str, *arguments: str, model: str = LLAMA, hardware: str = "gpu: h100") -> tuple[int, dict[str, Any]]:
        Path("run.yaml").write_text(CONFIG.format(model=model, hardware=hardware), encoding="utf-8")
        ran = CliRunner().invoke(app, [verb, "run.yaml", "--json", *arguments])
        lines = ran.stdout.splitlines()
        return ran.exit_code, json.loads(lines[-1]) if lines else {}

    return run


@pytest.mark.parametrize("method", ["train.method=lora", "train.method=full"], ids="TA1-{}".format)
def test_a_plan_for_another_machine_is_the_same_whatever_is_installed_here(
    call: Call, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plans = []
    for missing in (None, "liger-kernel>=0.8.5,<0.9"):
        monkeypatch.setattr("surefit.config.resolve.missing_for_kernels", lambda missing=missing: missing)
        plans.append(call("plan", "--quick", "--set", method)[1])
    assert plans[0] == plans[1]
    (assumed,) = plans[0]["assumptions"]
    assert (assumed["package"], assumed["installed"]) == ("liger-kernel", False)
    _, other = call("plan", "--quick", "--set", method, "--set", "speed.kernels=true")
    assert {(each["package"], each["installed"]) for each in other["assumptions"]} >= {("liger-kernel", True)}
    assert other["estimate"]["high_bytes"] < plans[0]["estimate"]["high_bytes"], "the worse case decides"


@pytest.mark.parametrize(
    ("hardware", "overrides", "packages"),
    [
        ("gpu: t4", (), set()),
        ("gpu: t4", ("model.quantization=nf4",), {"bitsandbytes"}),
        ("gpu: h100", ("train.optim=paged_adamw_8bit",), {"bitsandbytes", "liger-kernel"}),
        ("gpu: h100, count: 2", ("parallel.mode=zero2",), {"deepspeed"}),
        ("gpu: cpu", (), set()),
    ],
    ids=["TA1-turing", "TA1-nf4", "TA1-optimizer", "TA1-zero", "TA1-here"],
)
def test_packages_on_the_other_machine_are_assumptions(
    call: Call, hardware: str, overrides: tuple[str, ...], packages: set[str]
) -> None:
    _, plan = call("plan", "--quick", *(part for one in overrides for part in ("--set", one)), hardware=hardware)
    assert {each["package"] for each in plan["assumptions"]} == packages


def test_assumptions_are_in_the_text_of_a_plan(call: Call) -> None:
    call("plan", "--quick")
    text = CliRunner().invoke(app, ["plan", "run.yaml", "--quick", "--verbose"]).stdout
    assert "liger-kernel" in text.partition("optimizer steps")[0]


@pytest.mark.parametrize(
    "spelling", ["4090", "RTX 4090", "rtx 4090", "rtx4090", "NVIDIA GeForce RTX 4090"], ids="RF12-{}".format
)
@pytest.mark.parametrize("way", ["option", "set", "file"])
def test_a_gpu_is_known_by_what_people_call_it(call: Call, spelling: str, way: str) -> None:
    given = {"option": ("--gpu", spelling), "set": ("--set", f"hardware.gpu={spelling}"), "file": ()}[way]
    code, plan = call("plan", "--quick", *given, hardware=f"gpu: {spelling if way == 'file' else 'h100'}")
    assert plan["device"]["name"] == GPUS["rtx4090"].name
    assert code in (0, 1)


@pytest.mark.parametrize(
    ("disk", "code", "free"),
    [("100GB", 0, 100 * 10**9), ("100GiB", 0, 100 * GIB), ("1 TB", 0, 10**12), ("10GB", 1, 10 * 10**9)],
    ids="TA9-{}".format,
)
def test_the_disk_of_the_machine_to_be_rented(call: Call, disk: str, code: int, free: int) -> None:
    given = ("--set", "train.gradient_checkpointing=true", "--set", "train.per_device_train_batch_size=1")
    found, plan = call("plan", "--quick", *given, hardware=f"gpu: h100, disk: {disk}")
    assert (found, plan["disk_free_bytes"], plan["disk_source"]) == (code, free, "config")
    download = {term["term"]: term["bytes"] for term in plan["disk"]}["base model"]
    assert download == model_facts(LLAMA).weight_bytes
    assert plan["disk_total_bytes"] == sum(term["bytes"] for term in plan["disk"])
    found, checked = call("check", *given, hardware=f"gpu: h100, disk: {disk}")
    assert ("DSK001" in [each["code"] for each in checked["findings"]]) == bool(code)


def test_this_machine_s_disk_is_not_taken_for_another_s(call: Call) -> None:
    _, plan = call("plan", "--quick")
    assert (plan["disk_free_bytes"], plan["disk_source"]) == (None, "unknown")
    assert any("hardware.disk" in text for text in plan["left_out"])
    assert hardware_facts("cpu").disk_source == "detected"


@pytest.mark.parametrize("size", ["100", "'100'", "lots", "-5GB"], ids="TA9-{}".format)
def test_a_size_needs_a_unit(call: Call, size: str) -> None:
    code, error = call("plan", "--quick", hardware=f"gpu: h100, disk: {size}")
    assert code == 2
    assert error["field"] == "hardware.disk"


def test_lengths_are_those_of_the_rows(call: Call) -> None:
    """RF2: the same with and without an audit before, quick or not."""
    cpu = {"model": "surefit/nano", "hardware": "gpu: rtx4090"}
    _, before = call("plan", "--quick", **cpu)
    assert before["estimate"]["lengths_known"] == "all"
    call("audit", **cpu)
    _, after = call("plan", "--quick", **cpu)
    assert before["estimate"]["length"] == after["estimate"]["length"] < 100
    longest = json.loads(Path("runs/one/passport.json").read_text(encoding="utf-8"))["lengths"]["whole"]["max"]
    assert before["estimate"]["length"] == longest
    assert before["answering"]["prompt"] == after["answering"]["prompt"] < 100


def test_the_largest_row_is_among_those_that_are_looked_at(call: Call) -> None:
    """RF2: of many rows some are tokenized, and the longest is one of them."""
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(2_000)]
    rows[1_234]["completion"] += " Yes, indeed." * 40
    call("plan", "--quick", model="surefit/nano")
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    _, plan = call("plan", "--quick", model="surefit/nano")
    call("audit", model="surefit/nano")
    longest = json.loads(Path("runs/one/passport.json").read_text(encoding="utf-8"))["lengths"]["whole"]["max"]
    assert (plan["estimate"]["lengths_known"], plan["estimate"]["length"]) == ("sample", longest)


def test_rows_that_nobody_has_read_are_not_said_to_have_a_length(call: Call) -> None:
    """RF2: without a tokenizer on this machine they have at most as many tokens as bytes."""
    _, plan = call("plan", "--quick")
    _, with_tokenizer = call("plan", "--quick", model="surefit/nano")
    estimate, exact = plan["estimate"], with_tokenizer["estimate"]
    assert (estimate["lengths_known"], exact["lengths_known"]) == ("text", "all")
    assert exact["longest_row"] < estimate["longest_row"] == estimate["length"] < 2048
    assert estimate["lengths_rows"] == exact["lengths_rows"]
    _, plan = call("plan", "--quick", "--set", "data.train=someone/rows")
    assert (plan["estimate"]["lengths_known"], plan["estimate"]["length"]) == ("none", 2048)
    assert (plan["estimate"]["longest_row"], plan["estimate"]["lengths_rows"]) == (None, None)


@pytest.mark.slow
def test_time_is_that_of_the_rows(call: Call) -> None:
    """RF2: not of rows of max_length."""
    _, plan = call("plan", model="surefit/nano")
    assert plan["time"]["length"] < 60
    assert plan["time"]["length"] <= plan["estimate"]["length"]


def test_experts_that_lie_one_by_one_are_read_into_stacks(tmp_path: Path) -> None:
    """M1: the pages of their files stay beside the stacks, on a CPU."""
    config = json.loads((nano.PATH / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    layer = "model.layers.0.block_sparse_moe"
    experts = {
        f"{layer}.experts.{n}.{name}.weight": np.zeros((8, 6), np.float32) for n in range(4) for name in ("w1", "w3")
    }
    save_file(experts | {f"{layer}.gate.weight": np.zeros((4, 6), np.float32)}, tmp_path / "model.safetensors")
    assert model_facts(str(tmp_path)).lone_expert_parameters == 4 * 2 * 8 * 6
    assert model_facts("surefit/nano").lone_expert_parameters == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["train.method=lora", "train.method=full"], ids=["M3-lora", "M5-full"])
def test_the_process_is_measured_and_nothing_heavy_is_imported_for_a_run_of_one_process(
    call: Call, method: str
) -> None:
    """DeepSpeed takes 60 to 190 MiB where it is installed, MLflow, which it imports, among it."""
    call("plan", "--quick", model="surefit/nano", hardware="gpu: cpu")
    script = (
        "import sys, json\n"
        "sys.argv = ['surefit', 'train', 'run.yaml', '--set', 'train.max_steps=1', '--set',"
        f" 'train.per_device_train_batch_size=1', '--set', 'train.global_batch_size=1', '--set', '{method}']\n"
        "try:\n    from surefit.cli.app import main; main()\nexcept SystemExit: pass\n"
        "print(json.dumps(sorted({'deepspeed', 'ray', 'mlflow', 'wandb', 'datasets'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
    plan = json.loads(Path("runs/one/plan.json").read_text(encoding="utf-8"))["estimate"]
    dry = json.loads(Path("runs/one/dry_pass.json").read_text(encoding="utf-8"))["phases"]["dry step"]
    assert plan["first_step"]["low_bytes"] < dry["resident"] < plan["first_step"]["high_bytes"]


@pytest.mark.parametrize("words", [900], ids="T22-{}".format)
def test_held_out_rows_that_are_longer_are_planned(call: Call, words: int) -> None:
    plans = []
    for length in (9, words):
        row = {"prompt": "What is it?", "completion": "It is. " + "Yes. " * length}
        Path("held.jsonl").write_text(f"{json.dumps(row)}\n", encoding="utf-8")
        values = ("data.eval=held.jsonl", "model.dtype=float32", "data.packing=false")
        code, plan = call("plan", *(part for value in values for part in ("--set", value)), model=str(nano.PATH))
        assert code == 0
        plans.append(
            (plan["estimate"], {phase["name"]: phase["allocated_bytes"] for phase in plan["estimate"]["phases"]})
        )
    (_, short), (estimate, long) = plans
    assert estimate["held_out_length"] > words > estimate["length"]
    assert long.pop("eval") > 2 * short.pop("eval")
    assert long == short, "the other phases do not read held-out rows"
