"""Predicted against published GPU memory: the results of PEFT's method comparison, one row each.

    python benchmarks/plan_published.py --data FILE [--json]

FILE has JSON rows with `name`, `train_config`, `peft_config` (null for full training) and
`accelerator_memory_max_reserved` (bytes, torch.cuda.max_memory_reserved), as published in huggingface/peft,
method_comparison/MetaMathQA. What they do not publish is how long their longest batch was: it is fitted on one row,
LoRA of rank 32, and all others are predicted with it.

Each row's own training loop is simulated: that of the benchmark (labels given to the model, logits held until the next
step, foreach AdamW, float32 adapters, the allocator's cache emptied every ten steps), not SureFit's.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import AutoConfig, AutoModelForCausalLM

from surefit.core.units import GIB
from surefit.facts.model import catalogue
from surefit.plan.extrapolate_layers import SHALLOW, extrapolate_trace
from surefit.plan.simulate import record_run
from surefit.plan.trace import Recorder, Trace

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers"))
from replay import replay_allocations

FITTED_ROW = "lora--llama-3.2-3B-rank32"
L40S = (8, 9)
"""Compute capability of the GPU that was measured on."""
SHORT = 110
"""Tokens of the batch before the longest one. 80 rows are sorted, the longest first, and cut into batches of 4; every
tenth batch the cache is emptied. So the longest batch finds what the shortest of the bucket before it still holds. An
assumption, as is that the batches after the longest are too short to need new segments (docs/plan-method.md)."""
PER_LAYER = {"num_layers", "adapter_layers"}
"""Keys of methods that state the model's depth themselves."""
LEFT_OUT = {
    "peft_type", "auto_mapping", "peft_version", "eva_config", "corda_config", "arrow_config", "loftq_config",
    "lora_ga_config", "velora_config", "monteclora_config", "layers_pattern",
}  # fmt: skip
"""Keys of a saved adapter_config.json that its class does not take back, or that need data."""


def predict(row: dict[str, Any], longest: int) -> int:
    """Peak reserved bytes of one row, its longest batch having `longest` tokens."""
    trace = _trace(row, longest)
    starts = [position for phase, position in trace.phases if phase == "step"]
    weights = sum(trace.allocations[number - 1].bytes for number, tag in trace.tags.items() if tag == "weights")
    # from_pretrained with a device_map first asks for one block of the whole model's size, and gives it back to the
    # cache (transformers' `caching_allocator_warmup`): the weights then lie in one segment.
    sizes, events = [weights, *trace.sizes], [1, -1, *(event + 1 if event > 0 else event - 1 for event in trace.events)]
    return replay_allocations(events, sizes, empty_at={starts[-1] + 2}).peak_reserved


def _trace(row: dict[str, Any], longest: int) -> Trace:
    """The allocations of a row's run: of a few layers, deepened, where the method treats all alike."""
    train, adapter = row["train_config"], row["peft_config"]

    def run(model: torch.nn.Module, recorder: Recorder) -> None:
        with recorder.naming(model):
            _loop(model, recorder, train, longest)

    def record(layers: int | None) -> Trace:
        return record_run(build(train, adapter, layers), run, padded=True, cuda=True, capability=L40S)

    layers = catalogue()[train["model_id"]]["config"]["num_hidden_layers"]
    if adapter is None or not PER_LAYER & adapter.keys():
        deep = extrapolate_trace(record(SHALLOW), layers)
        if deep is not None:
            return deep
    return record(None)


def build(train: dict[str, Any], adapter: dict[str, Any] | None, layers: int | None = None) -> torch.nn.Module:
    """The model of a row with its adapter, on meta; raises what a PEFT method that needs data raises.

    Args:
        train, adapter: `train_config` and `peft_config` of the row.
        layers: of the model; all of them where it is not given.
    """
    shape = dict(catalogue()[train["model_id"]]["config"])
    if layers is not None:
        shape["num_hidden_layers"] = layers
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, train["dtype"]), attn_implementation=train["attn_implementation"] or "sdpa"
        )
        model.tie_weights()
        if adapter is None:
            return model
        kind = PEFT_TYPE_TO_CONFIG_MAPPING[adapter["peft_type"]]
        known = {field.name for field in dataclasses.fields(kind)} - LEFT_OUT
        settings = {key: value for key, value in adapter.items() if key in known and value is not None}
        return get_peft_model(model, kind(**settings), autocast_adapter_dtype=train["autocast_adapter_dtype"])


def _loop(model: torch.nn.Module, recorder: Recorder, train: dict[str, Any], longest: int) -> None:
    """method_comparison/MetaMathQA/run.py: the loss on other texts, a bucket's last batch, the longest batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
    gc.collect()
    recorder.start("other texts")
    model.eval()
    with torch.no_grad():
        _forget_nothing(model, train)
    model.train()
    for length in (SHORT, longest):
        recorder.start("step")
        batch = _batch(train, length)
        batch["labels"] = batch["input_ids"].clone()
        tokens = int(batch["attention_mask"].sum())
        optimizer.zero_grad()
        # `output` and `loss` live until the next step's replace them: the logits are held.
        output = model(**batch, num_items_in_batch=tokens)
        loss = output.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train["grad_norm_clip"], foreach=True)
        optimizer.step()


def _forget_nothing(model: torch.nn.Module, train: dict[str, Any]) -> None:
    """The loss of every token of texts cut at `max_seq_length`, before the training starts."""
    for _ in range(2):
        batch = _batch(train, train["max_seq_length"])
        logits = model(**batch).logits
        for row, target in zip(logits, batch["input_ids"], strict=True):
            torch.nn.functional.cross_entropy(row[-len(target) :], target, reduction="none")


def _batch(train: dict[str, Any], length: int) -> dict[str, torch.Tensor]:
    shape = (train["batch_size"], length)
    return {key: torch.empty(shape, dtype=torch.long) for key in ("input_ids", "attention_mask")}


def fit(row: dict[str, Any]) -> int:
    """The length with which the prediction of `row` comes closest to what was measured.

    Reserved memory grows with the length, but not evenly: a bisection finds the neighbourhood, where every length is
    tried.
    """
    measured = row["accelerator_memory_max_reserved"]
    low, high = 2 * SHORT, row["train_config"]["max_seq_length"]
    while high - low > 8:
        middle = (low + high) // 2
        low, high = (middle, high) if predict(row, middle) < measured else (low, middle)
    return min(range(low - 4, high + 5), key=lambda length: abs(predict(row, length) - measured))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="rows of published measurements, JSON lines")
    parser.add_argument("--length", type=int, help="tokens of the longest batch, instead of fitting it")
    parser.add_argument("--fit-on", default=FITTED_ROW, help="the row to fit it on")
    parser.add_argument("--only", help="comma-separated parts of names")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    asked = parser.parse_args()
    rows = [json.loads(line) for line in asked.data.read_text(encoding="utf-8").splitlines() if line.strip()]
    fitted = [row for row in rows if row["name"] == asked.fit_on]
    if asked.length is None and not fitted:
        sys.exit(f"{asked.data}: no row is named {asked.fit_on}; give --length")
    longest = asked.length or fit(fitted[0])
    print(f"longest batch: {longest} tokens" + ("" if asked.length else f", fitted on {asked.fit_on}"))
    parts = asked.only.split(",") if asked.only else [""]
    results = [_compare(row, longest) for row in rows if any(part in row["name"] for part in parts)]
    summary = _summary(results)
    print("\n".join(f"{key}: {value}" for key, value in summary.items()))
    if asked.json:
        print(json.dumps({"length": longest, "rows": results, **summary}))
    return 0


def _compare(row: dict[str, Any], longest: int) -> dict[str, Any]:
    start, measured = time.perf_counter(), row["accelerator_memory_max_reserved"]
    result: dict[str, Any] = {"name": row["name"], "measured_bytes": measured}
    try:
        predicted = predict(row, longest)
    except Exception as error:  # a PEFT method may ask for data while it is built
        result["not_simulated"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
        print(f"{row['name']:48} {measured / GIB:8.3f} GiB   not simulated: {result['not_simulated']}", flush=True)
        return result
    result |= {"predicted_bytes": predicted, "error": predicted / measured - 1, "seconds": time.perf_counter() - start}
    print(
        f"{row['name']:48} {measured / GIB:8.3f} GiB measured {predicted / GIB:8.3f} predicted "
        f"{result['error']:+8.2%}  {result['seconds']:5.1f} s",
        flush=True,
    )
    return result


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    errors = sorted(abs(result["error"]) for result in results if "error" in result)
    if not errors:
        return {"simulated": 0, "of": len(results)}
    return {
        "simulated": len(errors),
        "of": len(results),
        "median_error": round(statistics.median(errors), 5),
        "mean_error": round(statistics.fmean(errors), 5),
        "within_1_percent": round(sum(error <= 0.01 for error in errors) / len(errors), 3),
        "worst_error": round(errors[-1], 4),
    }


if __name__ == "__main__":
    sys.exit(main())
