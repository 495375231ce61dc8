"""Writes a run directory such as the stages leave behind, for the tests of the report; nothing in it was measured."""

from __future__ import annotations

import json
import math
import random
from itertools import combinations
from pathlib import Path
from typing import Any

from surefit.core.rundir import RunDir, append_jsonl, write_atomic, write_json

START = 1_795_266_000.0
REJECTED, RESUMED = 173, 200
METRICS = ("ast_accuracy", "exact_match", "json_valid", "name_accuracy", "argument_accuracy", "irrelevance")
RESOLVED = """\
# Written by SureFit 0.1.0: every value of the run, and where it came from.

recipe: function_calling  # user function-calling-nano.yaml:3
model:
  name_or_path: {model}  # user function-calling-nano.yaml:5
  revision: null  # default
  dtype: float32  # auto: on a CPU float32 is exact and no slower for small models
  trust_remote_code: false  # default
lora:
  r: 16  # user function-calling-nano.yaml:8
  lora_alpha: 32.0  # user function-calling-nano.yaml:9
  lora_dropout: 0.0  # default
  target_modules: all-linear  # default
data:
  train: surefit/function-calling-train  # user function-calling-nano.yaml:12
  eval: surefit/function-calling-eval  # user function-calling-nano.yaml:13
  format: auto  # default
  split: train  # default
  max_length: 512  # user function-calling-nano.yaml:14
  too_long: drop  # default
  bad_rows: error  # default
train:
  method: {kind}  # user function-calling-nano.yaml:7
  num_train_epochs: 4.0  # user function-calling-nano.yaml:17
  max_steps: 400  # --set
  learning_rate: 0.003  # user function-calling-nano.yaml:18
  global_batch_size: 32  # user function-calling-nano.yaml:19
  per_device_train_batch_size: 32  # auto: the largest divisor of 32 whose logits stay within 1.00 GiB
  gradient_checkpointing: false  # auto: on a CPU time is short, not memory
  optim: adamw_torch  # default
  lr_scheduler_type: cosine  # default
  warmup_steps: 0.03  # default
  weight_decay: 0.0  # default
  max_grad_norm: 1.0  # default
  seed: 0  # default
hardware:
  gpu: auto  # default
checkpoint:
  save_steps: 100  # auto: a quarter of 400 steps
  save_total_limit: 2  # default
evaluate:
  max_examples: null  # default
  max_new_tokens: 128  # user function-calling-nano.yaml:24
  batch_size: 64  # auto: answers are short and the prompts are sorted by length
  extra_sets:
    old_tools: surefit/function-calling-old-tools  # user function-calling-nano.yaml:26
  gate:
    metric: null  # default
    min: null  # default
    not_worse_than: base  # user function-calling-nano.yaml:28
output_dir: runs/function-calling-nano  # user function-calling-nano.yaml:30
"""


def write_run(path: Path, *, kind: str = "lora", steps: int = 400, model: str = "surefit/nano") -> RunDir:
    """A complete run: LoRA or full, with a rejected step, a kill and a resume on the way."""
    run = RunDir(path)
    run.create()
    write_atomic(run.resolved, RESOLVED.format(kind=kind, model=model))
    write_json(run.check, CHECK)
    write_json(run.plan, plan(kind))
    write_json(run.passport, PASSPORT)
    write_json(run.environment, ENVIRONMENT)
    write_events(run)
    write_metrics(run, steps)
    write_json(run.certificate, CERTIFICATE)
    write_scores(run, ("base", "adapter", "merged") if kind == "lora" else ("base", "model"))
    return run


CHECK: dict[str, Any] = {
    "surefit": "0.1.0",
    "seconds": 0.41,
    "rules": 23,
    "findings": [
        {
            "code": "CFG012",
            "name": "seed-left-at-default",
            "severity": "info",
            "path": "function-calling-nano.yaml",
            "line": 17,
            "field": "train.seed",
            "message": "one seed only: the difference between two seeds is not known",
            "help": "run it again with --set train.seed=1 before comparing settings",
            "evidence": {"train.seed": 0},
        },
        {
            "code": "DAT007",
            "name": "train-eval-overlap",
            "severity": "warning",
            "path": "surefit/function-calling-eval",
            "line": 118,
            "field": "query",
            "message": "2 of 200 held-out prompts are also in the training data",
            "help": "remove them from one of the two files",
            "evidence": "rows 118 and 164",
        },
    ],
}

PASSPORT: dict[str, Any] = {
    "source": "surefit/function-calling-train", "sha256": "5ac0ffee" * 8, "rows": 3200, "audited": 3200, "usable": 3198,
    "unit": "tokens", "supervised_share": 0.12,
    "lengths": {"whole": {
        "total": 668_800, "min": 104, "mean": 209.0, "p50": 207, "p95": 269, "p99": 300, "max": 321,
        "histogram": {"width": 50, "counts": [0, 0, 40, 900, 1500, 700], "over": 58},
    }},
    "observations": {
        "near_duplicate": {"rows": 194, "of": 3200, "examples": ["train.jsonl:234: 96% the same as train.jsonl:21"]},
        "duplicate": {"rows": 0, "of": 3200, "examples": []},
    },
    "findings": [{
        "code": "AUD007", "severity": "warning", "name": "some-scored-rows-leak",
        "message": "the prompts of 2 of 200 scored rows are in the training rows", "help": "take those rows out",
    }],
}  # fmt: skip

ENVIRONMENT: dict[str, Any] = {
    "python": "3.11.7",
    "platform": "Linux-6.1.0-x86_64-with-glibc2.36",
    "cpu_count": 2,
    "memory_bytes": 25769803776,
    "gpus": [],
    "packages": {
        "datasets": "5.2.0", "numpy": "2.4.1", "peft": "0.21.2", "safetensors": "0.8.0",
        "tokenizers": "0.23.3", "torch": "2.13.0+cpu", "transformers": "5.23.0",
    },
    "surefit": "0.1.0",
}  # fmt: skip

CERTIFICATE: dict[str, Any] = {
    "passed": True,
    "reason": "every check within its threshold",
    "checks": [
        {"name": "base_identity", "value": "9f2c4a7d" * 8, "threshold": "9f2c4a7d" * 8, "comparison": "==",
         "passed": True, "why": "adapter/ was trained from surefit/nano with this hash"},
        {"name": "weights_off_disk", "value": 0, "threshold": 0, "comparison": "==", "passed": True,
         "why": "loaded as written"},
        {"name": "on_disk_logit_error_max", "value": 3.8e-06, "threshold": 1.2e-05, "comparison": "<=", "passed": True,
         "why": "the largest of 2,021,280 such errors is within 5.4 times that"},
        {"name": "on_disk_top1_agreement", "value": 1.0, "threshold": 0.999, "comparison": ">=", "passed": True,
         "why": "the two best tokens are so close that such errors change 1.3 of 4,211 answers"},
    ],
    "prompts": 32,
    "positions": 4211,
    "base": {"name": "surefit/nano", "sha256": "9f2c4a7d" * 8},
    "adapter_sha256": "0b5e77c1" * 8,
    "merged_sha256": "d41d8cd9" * 8,
    "dtype": "float32",
    "seconds": 2.7,
}  # fmt: skip


def plan(kind: str) -> dict[str, Any]:
    trainable = 368_640 if kind == "lora" else 1_835_136
    memory = [
        {"term": "weights", "bytes": 7_340_544, "why": "1.84M parameters in float32", "moment": "always"},
        {"term": "optimizer", "bytes": 8 * trainable, "why": "AdamW's two moments in float32", "moment": "always"},
        {"term": "logits", "bytes": 94_371_840, "why": "32 examples of 512 tokens", "moment": "loss"},
        {"term": "update", "bytes": 4 * trainable, "why": "AdamW's update in float32", "moment": "step"},
    ]
    return {
        "surefit": "0.1.0",
        "device": {"name": "CPU, 2 cores", "kind": "cpu", "memory_bytes": 25769803776, "source": "detected"},
        "model": {"name": "surefit/nano", "parameters": 1_835_136, "trainable": trainable, "architecture": "Llama"},
        "memory": memory,
        "memory_total_bytes": sum(term["bytes"] for term in memory[:3]),
        "does_not_fit": [],
        "left_out": ["activations of the blocks", "the allocator's fragmentation"],
        "disk": [
            {"term": "checkpoints", "bytes": 8_912_896, "why": "2 kept, adapter and optimizer"},
            {"term": "merged model", "bytes": 7_352_320, "why": "all weights in float32"},
        ],
        "disk_total_bytes": 16_265_216,
        "disk_free_bytes": 61_000_000_000,
        "steps": {
            "rows": 3200,
            "total_steps": 400,
            "global_batch_size": 32,
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 1,
        },
    }


def write_events(run: RunDir) -> None:
    """check, plan, a training that is killed and resumed, and the stages after it."""
    clock = START
    lines: list[tuple[float, str, str, dict[str, Any]]] = [
        (0, "check", "started", {}), (0.4, "check", "finished", {"seconds": 0.41}),
        (0.1, "plan", "started", {}), (0.2, "plan", "finished", {"seconds": 0.22}),
        (0.1, "train", "started", {}),
        (95, "train", "started", {}), (0.9, "train", "resumed", {"step": RESUMED, "skipped": []}),
        (31, "train", "finished", {"seconds": 31.2, "step": 400}),
        (0.2, "merge", "started", {}), (2.7, "merge", "finished", {"seconds": 2.72}),
        (0.3, "evaluate", "started", {}),
        (9, "evaluate", "failed", {"seconds": 9.1, "error": "cannot write: No space left on device"}),
        (80, "evaluate", "started", {}), (48, "evaluate", "finished", {"seconds": 48.3}),
        (0.1, "report", "started", {}),
    ]  # fmt: skip
    for wait, stage, event, details in lines:
        clock += wait
        append_jsonl(run.events, {"time": clock, "stage": stage, "event": event, **details})


def write_metrics(run: RunDir, steps: int) -> None:
    """A loss that falls, a cosine schedule, one rejected step, and the held-out loss every quarter."""
    draw = random.Random(0)
    lines = []
    for step in range(1, steps + 1):
        done, rejected = step / steps, step == REJECTED
        loss = 0.06 + 3.4 * math.exp(-9 * done) + draw.gauss(0, 0.05) * (0.3 + math.exp(-4 * done))
        rate = 0.003 * min(1, step / (0.03 * steps)) * (0.5 + 0.5 * math.cos(math.pi * done))
        lines.append({
            "step": step, "epoch": 4 * done, "loss": None if rejected else max(loss, 0.02),
            "grad_norm": None if rejected else 0.25 + 2.2 * math.exp(-5 * done) * (1 + 0.3 * draw.random()),
            "learning_rate": rate, "tokens": 9_800 + draw.randrange(900), "supervised_tokens": 1_150,
            "tokens_per_second": 78_000 + draw.gauss(0, 3_500) - (30_000 if draw.random() < 0.03 else 0),
            "seconds": 0.13, "memory_bytes": 402_653_184 + draw.randrange(9_000_000), "rejected": rejected,
            "disk_free_bytes": 50 * 2**30 - step * 2**20,
        })  # fmt: skip
        if step % max(1, steps // 8) == 0:
            lines.append({"step": step, "eval_loss": 0.09 + 3.2 * math.exp(-8.5 * done), "eval_tokens": 23_000})
    write_atomic(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))


CITIES = ["Zurich", "Lusaka", "Porto", "Tbilisi", "Cusco", "Oulu"]
TOOLS = json.dumps([
    {"name": "buy_train_ticket", "description": "Rail ticket", "parameters": {
        "origin": {"type": "str", "description": "Departure station"},
        "destination": {"type": "str", "description": "Arrival station"},
        "carriage": {"type": "str, optional", "description": "Coach class"}}},
    {"name": "water_plants", "description": "Garden irrigation", "parameters": {
        "zone": {"type": "str", "description": "Garden bed"}, "litres": {"type": "int", "description": "Volume"}}},
])  # fmt: skip


def write_scores(run: RunDir, variants: tuple[str, ...]) -> None:
    """Two sets: the held-out one, where the tuned variants win, and old_tools, where they lose a little."""
    chance = {"eval": {"base": 0.02, "tuned": 0.915}, "old_tools": {"base": 0.945, "tuned": 0.86}}
    sets = {}
    for name, rates in chance.items():
        rows = {v: predictions(name, v, rates["base" if v == "base" else "tuned"]) for v in variants}
        for variant, lines in rows.items():
            write_json(run.eval / name / f"{variant}.json", evaluation(name, variant, lines))
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            write_atomic(run.eval / name / f"{variant}.predictions.jsonl", text)
        sets[name] = {
            "n": 200,
            "variants": {v: metrics_of(lines) for v, lines in rows.items()},
            "comparisons": [compare(rows, a, b, m) for a, b in combinations(variants, 2) for m in METRICS],
        }
    gate = {"passed": True, "reason": "ast_accuracy is not worse than the base's"}
    write_json(run.eval_summary, {"primary_metric": METRICS[0], "sets": sets, "left_out": [], "gate": gate})


def predictions(name: str, variant: str, chance: float) -> list[dict[str, Any]]:
    """200 answers; a share of about `chance` is right, the same rows for every tuned variant."""
    draw = random.Random(f"{name} {variant == 'base'}")
    lines = []
    for index in range(200):
        origin, destination = CITIES[index % 6], CITIES[(index // 6 + index + 1) % 6]
        call = [{"name": "buy_train_ticket", "arguments": {"origin": origin, "destination": destination}}]
        gold = json.dumps(call)
        right = draw.random() < chance
        confused = ("buy_train_ticket", "book_taxi") if variant == "base" else (destination, origin)
        wrong = gold.replace(*confused)
        score = dict.fromkeys(METRICS, float(right)) | {"json_valid": float(right or draw.random() > 0.2)}
        if index % 10:
            del score["irrelevance"]
        lines.append({
            "index": index, "where": f"function-calling-{name}.jsonl:{index + 1}",
            "prompt": f"<|system|>\nAnswer with a JSON list of calls of these tools: {TOOLS}\n"
                      f"<|user|>\nOne ticket {origin} to {destination}, please\n<|assistant|>\n",
            "gold": gold, "text": gold if right else wrong, "truncated": not right and index % 40 == 0,
            "parsed": call, "scores": score,
        })  # fmt: skip
    return lines


def metrics_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for metric in METRICS:
        values = [line["scores"][metric] for line in lines if metric in line["scores"]]
        mean = sum(values) / len(values)
        half = 1.96 * math.sqrt(mean * (1 - mean) / len(values))
        found[metric] = {"mean": mean, "ci95": [max(0.0, mean - half), min(1.0, mean + half)], "n": len(values)}
    return found


def evaluation(name: str, variant: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "set": name,
        "variant": variant,
        "model": "surefit/nano",
        "recipe": "function_calling",
        "recipe_version": 1,
        "n": 200,
        "primary_metric": METRICS[0],
        "metrics": metrics_of(lines),
        "truncated": sum(line["truncated"] for line in lines),
        "unparsed": 3,
        "seconds": 7.8,
        "tokens_per_second": 1432.0,
        "decoding": {"strategy": "greedy", "max_new_tokens": 128, "batch_size": 64},
    }


def compare(rows: dict[str, list[dict[str, Any]]], a: str, b: str, metric: str) -> dict[str, Any]:
    pairs = zip(rows[a], rows[b], strict=True)
    gains = [new["scores"][metric] - old["scores"][metric] for old, new in pairs if metric in old["scores"]]
    mean = sum(gains) / len(gains)
    half = 1.96 * math.sqrt(sum((gain - mean) ** 2 for gain in gains)) / len(gains)
    return {
        "a": a,
        "b": b,
        "metric": metric,
        "difference": mean,
        "ci95": [max(-1.0, mean - half), min(1.0, mean + half)],
        "wins": sum(gain > 0 for gain in gains),
        "losses": sum(gain < 0 for gain in gains),
        "ties": sum(gain == 0 for gain in gains),
    }
