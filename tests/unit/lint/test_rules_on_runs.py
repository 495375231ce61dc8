"""Rules about what several tools can set: the cases beyond their fixtures, and that no value makes them fail."""

from __future__ import annotations

import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from surefit.facts.environment import EnvironmentFacts, environment_facts
from surefit.facts.job_script import JobScript, read_job_script, setup_of_job
from surefit.facts.setup import SettingLocation, Setup
from surefit.lint.engine import all_rules, run_rules
from surefit.lint.rule import Finding, LintContext

FAMILIES = ("SCH", "BAT", "PAR", "SLM", "CKP", "ARG", "TRK")


def found(job: JobScript | None = None, logged_in: tuple[str, ...] = (), **values: Any) -> list[Finding]:
    rules = [rule for rule in all_rules() if rule.code[:3] in FAMILIES]
    setup = Setup(**{"tool": "trl", **values})
    context = LintContext(
        config=None, path=Path("run.yaml"), setup=setup, job=job, environment=EnvironmentFacts(trackers=logged_in)
    )
    return run_rules(context, rules).findings


def codes(**values: Any) -> set[str]:
    return {finding.code for finding in found(**values)}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"warmup_steps": 100, "max_steps": 86}, {"SCH001"}),
        ({"warmup_steps": 1, "max_steps": 1}, set()),
        ({"eval_strategy": "no", "eval_rows": True}, {"SCH005"}),
        ({"eval_strategy": "no", "eval_rows": False}, set()),
        ({"eval_strategy": "epoch", "eval_steps": 200, "total_steps": 86}, set()),
        ({"save_strategy": "no", "save_steps": 500, "total_steps": 86}, set()),
        ({"save_steps": 500, "total_steps": 20}, set()),
        ({"best_model": True, "eval_strategy": "steps", "save_strategy": "epoch"}, {"SCH007"}),
        ({"best_model": True, "eval_strategy": "steps", "save_strategy": "best"}, set()),
        ({"best_model": True, "eval_strategy": "epoch", "save_strategy": "epoch", "eval_steps": 3}, set()),
        ({"global_batch": 30, "micro_batch": 4, "accumulation": 2}, {"BAT003"}),
        ({"global_batch": 32, "micro_batch": 4, "accumulation": 2}, set()),
        ({"global_batch": 30, "micro_batch": 4, "world_size": 2}, {"BAT003"}),
        ({"global_batch": 30}, set()),
        ({"parallel": "fsdp", "quantization": "nf4"}, set()),
        ({"parallel": "zero3", "quantization": "nf4", "quant_storage": "float16", "dtype": "bfloat16"}, {"PAR001"}),
        ({"parallel": "fsdp", "quantization": "nf4", "quant_storage": "float32", "weights_dtype": "float32"}, set()),
        ({"parallel": "ddp", "quantization": "nf4", "quant_storage": "uint8"}, set()),
        ({"parallel": "zero3", "device_map": "cuda:0"}, {"PAR002"}),
        ({"device_map": "auto", "gpus": 2, "processes": 1, "machines": 1}, set()),
        ({"processes": 6, "machines": 4, "gpus": 1}, {"PAR004"}),
        ({"processes_per_machine": 4, "gpus": 4}, set()),
        ({"processes_per_machine": 8, "gpus": 4, "on_cpu": True}, set()),
        ({"fsdp_efficient_loading": True, "fsdp_sync_states": False, "fsdp_version": 2}, set()),
        ({"fsdp_efficient_loading": True}, set()),
        ({"find_unused_parameters": True, "gradient_checkpointing": True}, set()),
        ({"tool": "axolotl", "save_steps": 10, "total_steps": 1000}, set()),
        ({"save_strategy": "epoch", "epochs": 20.0}, {"CKP002"}),
        ({"save_strategy": "epoch", "epochs": 3.0}, set()),
        ({"save_only_model": True, "resume": True, "tool": "peft"}, {"CKP003"}),
        ({"save_only_model": True}, set()),
        ({"trackers": ("wandb", "mlflow")}, {"TRK001"}),
        ({"trackers": ("tensorboard",)}, set()),
    ],
)
def test_a_setup(values: dict[str, Any], expected: set[str]) -> None:
    assert codes(**values) == expected


def test_findings_use_the_users_own_keys_and_lines() -> None:
    places = {"warmup_ratio": SettingLocation("warmup_ratio", "args.yaml", 7)}
    (finding,) = found(gone={"warmup_ratio": "write warmup_steps: 3"}, places=places)
    assert (finding.path, finding.line, finding.field) == ("args.yaml", 7, "warmup_ratio")
    assert finding.message == "warmup_ratio is no longer accepted by TRL"
    (finding,) = found(unknown=("lora_alpah",), meant={"lora_alpah": "lora_alpha"})
    assert finding.message == "TRL has no lora_alpah; did you mean 'lora_alpha'?"


def test_the_numbers_are_in_the_message() -> None:
    (finding,) = found(processes=1, machines=2, gpus=4, tool="accelerate")
    assert finding.message.startswith("1 process for 2 machines")
    assert finding.help == "write 8 (2 machines × 4 per machine)"
    (finding,) = found(global_batch=64, micro_batch=4, accumulation=8, world_size=1)
    assert finding.message == "4 per device × 8 accumulated × 1 process is 32, but global_batch is 64"
    assert finding.help == "accumulate 16 micro batches, or write 32"


def test_a_batch_script_may_answer_wandbs_question(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH --nodes=1\nexport WANDB_MODE=offline\ntorchrun --standalone train.py\n")
    assert not found(job=read_job_script(path), trackers=("wandb",))
    assert not found(logged_in=("wandb",), trackers=("wandb",))


def test_wandb_is_known_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert "wandb" not in environment_facts().trackers
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "wandb" in environment_facts().trackers


HEAD = "#!/bin/bash\n#SBATCH --nodes={nodes} --ntasks-per-node={tasks}\n#SBATCH --gres=gpu:4\n"


@pytest.mark.parametrize(
    ("nodes", "tasks", "command", "expected"),
    [
        (1, 1, "torchrun --standalone --nproc_per_node=4 train.py", set()),
        (1, 1, "torchrun --standalone train.py", {"SLM002"}),
        (1, 1, "torchrun --standalone --nproc_per_node=8 train.py", {"PAR006"}),
        (1, 1, "python train.py", set()),
        (1, 2, "srun python train.py", {"SLM002"}),
        (1, 4, "srun python train.py", set()),
        (2, 1, "srun torchrun --nproc_per_node=4 train.py", {"SLM007"}),
        (2, 1, "srun accelerate launch --num_processes 1 --num_machines 2 train.py", {"PAR003"}),
        (2, 1, "srun accelerate launch --num_processes 7 --num_machines 2 train.py", {"PAR004"}),
        (2, 1, "srun accelerate launch --num_processes 4 --num_machines 2 train.py", {"SLM002"}),
        (2, 1, "srun accelerate launch --config_file two_nodes.yaml train.py", set()),
        (
            2,
            1,
            "srun accelerate launch --num_processes 8 --num_machines 2 --main_process_ip localhost t.py",
            {"SLM006"},
        ),
        (2, 4, "srun torchrun --nnodes=8 --nproc_per_node=1 train.py", set()),
        (2, 4, "srun torchrun --nnodes=2 --nproc_per_node=4 train.py", {"SLM003"}),
        (2, 1, "for host in $HOSTS; do ssh $host torchrun --nnodes=2 --nproc_per_node=4 t.py & done", set()),
        (2, 1, "torchrun --nnodes=2 --nproc_per_node=4 train.py", {"SLM007"}),
        (1, 1, "MASTER_PORT=29500 torchrun --nproc_per_node=4 train.py", {"SLM010"}),
    ],
)
def test_a_batch_script(nodes: int, tasks: int, command: str, expected: set[str], tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(HEAD.format(nodes=nodes, tasks=tasks) + command + "\n")
    job = read_job_script(path)
    context = LintContext(config=None, path=path, setup=setup_of_job(job), job=job)
    assert {finding.code for finding in run_rules(context).findings} == expected


ODD = {
    "bool": (True, False),
    "int": (0, 1, -1, 3, 100, 10**9),
    "float": (0.0, -1.0, 0.5, 1e300),
    "str": ("", "no", "steps", "epoch", "auto", "fsdp", "ddp", "dp", "zero3", "nf4", "uint8", "trl"),
    "tuple[str, ...]": ((), ("",), ("all",), ("wandb", "wandb")),
}


def test_no_value_makes_a_rule_fail() -> None:
    rng = random.Random(0)
    kinds = {field.name: str(field.type).removesuffix(" | None") for field in fields(Setup) if field.default is None}
    spoke = set()
    for _ in range(300):
        values = {name: rng.choice(ODD[kinds[name]]) for name in rng.sample(sorted(kinds), 30)}
        spoke |= (said := codes(**values))
        assert "INT001" not in said, values
    assert len(spoke) > 15, "the odd values reach the rules"
