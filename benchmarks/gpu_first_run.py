"""The GPU day's walk of a newcomer: `surefit init --data`, then `surefit run`, on a model of 7B's shape in NF4.

The weights are random and written to disk, since no model hub is reachable; the tokenizer is surefit/nano's. What is
recorded is what the plan said beforehand, and what the run then took; the same for `surefit train` with dpo. Random
weights answer nothing, so a gate that fails (exit code 1) is a result here and no error.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

SHAPE = "Qwen/Qwen2.5-7B-Instruct"
STEPS = 10
RUN_SECONDS = 360.0
"""Fewer than the stage has, so that what was measured is written and the weights are removed before its end."""
GATES = (0, 1, 5)
"""Exit codes of a run that went through: its gates passed, one failed, or was undecided."""


def write_base(folder: Path, miniature: bool) -> None:
    """Write a base model with random weights, drawn on the device; in miniature it has the shape of surefit/nano."""
    import torch
    from throughput_stack import DEVICE, draw_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from surefit import nano
    from surefit.facts.model import catalogue

    values = dict(json.loads((nano.PATH / "config.json").read_text()) if miniature else catalogue()[SHAPE]["config"])
    values |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}  # those of the tokenizer
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if miniature else torch.bfloat16)
    draw_weights(model)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(nano.PATH / name, folder / name)


def measure_first_run(folder: Path, miniature: bool) -> dict[str, Any]:
    """Return what the plan said and what the run took; with `error` if it did not train, or broke off later."""
    from first_fit import write_rows
    from gpu_stages import run_group

    rows, config, run = folder / "chats.jsonl", folder / "run.yaml", folder / "run"
    write_rows(rows, 20 if miniature else 400)
    start = time.monotonic()
    write_base(folder / "base", miniature)
    written = time.monotonic() - start
    surefit = [sys.executable, "-m", "surefit"]
    code, said = run_group(
        [*surefit, "init", "--data", str(rows), "--model", str(folder / "base"), "--output", str(config)], 90
    )
    if code != 0:
        return {"error": f"init: exit {code}: {_last(said)}"}
    settings = {
        "output_dir": str(run), "train.max_steps": 2 if miniature else STEPS, "evaluate.max_examples": 8,
        "evaluate.max_new_tokens": 8, **({} if miniature else {"model.quantization": "nf4"}),
    }  # fmt: skip
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    code, said = run_group([*surefit, "run", str(config), *changes], RUN_SECONDS)
    print(said, flush=True)
    found = planned_and_measured(run) | {"write_seconds": round(written, 1), "exit_code": code}
    if code is None:
        found["error"] = f"run: not done after {RUN_SECONDS:.0f} s"
    elif code not in GATES:
        found["error"] = f"run: exit {code}: {_last(said)}"
    elif "train" not in found["seconds_by_stage"]:
        found["error"] = f"run: it did not train: {_last(said)}"
    return found


def measure_dpo_run(folder: Path, miniature: bool) -> dict[str, Any]:
    """As `measure_first_run`, of `surefit train` with dpo; its first batch is at ln 2, or it does not train."""
    from gpu_stages import run_group

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
    from preference_rows import make_rows

    pairs, config, run = folder / "pairs.jsonl", folder / "run.yaml", folder / "run"
    pairs.write_text(
        "".join(json.dumps(row) + "\n" for row in make_rows(32 if miniature else 400, 0)), encoding="utf-8"
    )
    write_base(folder / "base", miniature)
    model: dict[str, Any] = {"name_or_path": str(folder / "base")}
    model |= {"dtype": "float32"} if miniature else {"quantization": "nf4"}
    settings = {
        "recipe": "chat", "model": model, "objective": {"name": "dpo", "beta": 0.1},
        "data": {"train": str(pairs), "eval": 0.1, "max_length": 256},
        "train": {"global_batch_size": 8, "max_steps": 2 if miniature else STEPS},
        "hardware": {"gpu": "cpu" if miniature else "auto"}, "output_dir": str(run),
    }  # fmt: skip
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    code, said = run_group([sys.executable, "-m", "surefit", "train", str(config)], RUN_SECONDS)
    print(said, flush=True)
    found = planned_and_measured(run) | {"exit_code": code}
    first = run / "first_batch.json"
    found["first_batch"] = json.loads(first.read_text()) if first.exists() else None
    if code != 0:
        found["error"] = f"train: {'not done in time' if code is None else f'exit {code}: {_last(said)}'}"
    return found


def planned_and_measured(run: Path) -> dict[str, Any]:
    """Return a run's memory and time, planned and measured, as far as it came; values that it lacks are None.

    Bytes are those in tensors at the peak of a step on a GPU, all of the process on a CPU; seconds are of optimizer
    steps.
    """
    from gpu_lines import lines

    plan = json.loads((run / "plan.json").read_text()) if (run / "plan.json").exists() else {}
    steps = [line for line in lines(run / "metrics.jsonl") if line.get("eval_loss") is None]
    events = lines(run / "events.jsonl")
    phases: dict[str, dict[str, int]] = next((e["phases"] for e in reversed(events) if e["event"] == "memory"), {})
    resident = [phase.get("resident", 0) for phase in phases.values()]
    estimate, times = plan.get("estimate") or {}, (plan.get("time") or {}).get("parts") or {}
    return {
        "device": plan.get("device", {}).get("name"),
        "setting": estimate.get("setting"),
        "planned": {
            "low_bytes": estimate.get("low_bytes"), "high_bytes": estimate.get("high_bytes"),
            "seconds": times.get("steps"), "parts": times,
        },
        "measured": {
            "bytes": max([*(line.get("memory_bytes") or 0 for line in steps), *resident], default=0) or None,
            "seconds": sum(line.get("seconds") or 0.0 for line in steps) or None, "steps": len(steps),
            "phases": phases,
        },
        "seconds_by_stage": {e["stage"]: round(e["seconds"], 1) for e in events if e["event"] == "finished"},
    }  # fmt: skip


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was said"])[-1][:200]
