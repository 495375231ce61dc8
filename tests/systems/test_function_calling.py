"""A published project, its failures one by one: function calling on SLURM."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from surefit.cli.app import app

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
num_machines: 2
num_processes: PROCESSES
"""
JOB = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun torchrun --nnodes=2 --nproc-per-node=NPROC \\
  --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT \\
  train.py
"""
TOOLS = json.dumps([{"name": "ring", "description": "Call", "parameters": {"who": {"type": "str"}}}])


def rows(column: str) -> str:
    """xLAM rows whose answers are in a column of this name."""
    made = []
    for n in range(1_000):
        answer = json.dumps([{"name": "ring", "arguments": {"who": f"Ann {n}"}}])
        made.append({"query": f"Ring Ann {n}", "tools": TOOLS, column: answer})
    return "".join(json.dumps(row) + "\n" for row in made)


RUN = """
recipe: function_calling
model: {name_or_path: surefit/nano}
data: {train: calls.jsonl, max_length: 512}
output_dir: runs/x
"""


def test_lora_modules_in_fp32_under_a_bf16_base(judge) -> None:
    """PEFT keeps them in float32 and copies every input; SureFit's factors have the base's type (next test)."""
    faulty = {"tool": "trl", "adapter": "lora", "quantization": "nf4", "dtype": "bfloat16", "adapter_dtype": "float32"}
    assert judge(**faulty) == {"PRC003"}
    assert judge(**faulty | {"adapter_dtype": "bfloat16"}) == set()


def test_lora_modules_have_the_type_of_their_base() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from surefit.config.schema import LoraSection
    from surefit.model.adapter import add_adapter

    shape = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    adapted = add_adapter(LlamaForCausalLM(shape).to(torch.bfloat16), LoraSection(r=4))
    assert {p.dtype for name, p in adapted.named_parameters() if "lora_" in name} == {torch.bfloat16}


def test_trailing_spaces_after_a_backslash(check) -> None:
    sound = JOB.replace("NPROC", "4")
    assert "SLM001" in check(sound.replace("c10d", "c10d").replace("=4 \\\n", "=4 \\ \n"), "job.sh")
    assert check(sound, "job.sh") == set()


def test_gpu_counting(check, judge) -> None:
    assert "SLM002" in check(JOB.replace("NPROC", "1"), "job.sh")
    assert judge(tool="slurm", processes=16, machines=2, processes_per_machine=8, gpus=4) == {"PAR006"}


def test_trl_argument_changes(check) -> None:
    trl = "model_name_or_path: surefit/nano\ndataset_name: rows.jsonl\nsave_total_limit: 2\n{}"
    for gone in ("max_seq_length: 1024\n", "response_template: '### Answer'\n", "evaluation_strategy: epoch\n"):
        assert "ARG001" in check(trl.format(gone), "trl.yaml"), gone
    assert check(trl.format("max_length: 1024\n"), "trl.yaml") == set()


def test_answer_is_read_and_the_data_says_answers(check) -> None:
    """The mapping read `answer`: every completion became null."""
    faulty = check(RUN, calls__jsonl=rows("answer"))
    assert faulty & {"DAT001", "DAT002"}
    assert check(RUN, calls__jsonl=rows("answers")) == set()


def test_every_completion_was_null(check) -> None:
    nulls = "".join(json.dumps({"prompt": f"Ring Ann {n}", "completion": "null"}) + "\n" for n in range(1_000))
    assert "DAT004" in check(RUN.replace("function_calling", "chat"), calls__jsonl=nulls)


def test_one_process_over_two_machines(check) -> None:
    """Zero processes for each node."""
    assert "PAR003" in check(ACCELERATE.replace("PROCESSES", "1"), "accelerate.yaml")
    assert "PAR004" in check(ACCELERATE.replace("PROCESSES", "3"), "accelerate.yaml")
    assert check(ACCELERATE.replace("PROCESSES", "8"), "accelerate.yaml") == set()


def test_a_flag_that_no_parser_defines(check) -> None:
    """An option or a key that nothing reads is refused, not ignored."""
    result = CliRunner().invoke(app, ["train", "run.yaml", "--metrics-port", "9100"])
    assert result.exit_code == 2
    assert "E1706" in result.output
    (said,) = check(RUN + "metrics_port: 9100\n", calls__jsonl=rows("answers"))
    assert "metrics_port: unknown key" in said
