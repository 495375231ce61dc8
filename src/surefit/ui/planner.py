"""The fit planner: a run's needs, computed anew at every change by the closed form, in milliseconds.

Its time is that of the matrix products alone, at the rate that training reaches of a data sheet's: nothing is simulated
for it, so it is a lower bound. The button runs `surefit plan` (`simulation.py`), which simulates the step, also counts
memory traffic, and has the interval.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from surefit.config.by_rows import decide_by_rows, needs_row_count
from surefit.config.load import LoadedConfig, load_config
from surefit.config.modes import GROUPED, MODES
from surefit.config.resolve import ResolvedConfig, epoch_rows, optimizer_steps, resolve_config, with_changes
from surefit.config.schema import SureFitConfig, decided
from surefit.config.world import count_processes
from surefit.core.errors import ConfigError, MachineError, SureFitError
from surefit.core.units import bytes_text, count_text, duration_text, plural
from surefit.data.read.sources import is_local
from surefit.data.rows.layouts import load_mixed, load_training_rows
from surefit.facts.flops import FORWARD, TRAINED, training_flops
from surefit.facts.generation import eval_batch_chooser
from surefit.facts.gpus import GPUS
from surefit.facts.hardware import HardwareFacts, hardware_facts
from surefit.facts.memory_per_rank import peak_bytes
from surefit.facts.model import NANO, ModelFacts, catalogue, model_facts
from surefit.facts.vocabulary import with_new_tokens
from surefit.plan.assumptions import assumption_text
from surefit.plan.build_plan import build_plan
from surefit.plan.memory_interval import closed_form_upper_bound
from surefit.plan.profile import find_device_speed, interpolate_speed, to_device_rates
from surefit.stages.run_context import count_training_rows
from surefit.ui.pages import UiContext, require_posted_text

SCRATCH: dict[str, Any] = {
    "recipe": "function_calling",
    "model": {"name_or_path": "meta-llama/Llama-3.1-8B"},
    "data": {"train": "surefit/function-calling-train", "max_length": 2048},
    "train": {"num_train_epochs": 1e6, "max_steps": 1000},
    "hardware": {"gpu": "h100"},
    "output_dir": "runs/planned",
}
"""The config behind the form if none is opened: its rows are not planned for, its number of steps is."""
NUMBERS = ("data.max_length", "train.global_batch_size", "lora.r", "hardware.count", "train.max_steps")
CHOICES = (
    "model.name_or_path", "hardware.gpu", "train.per_device_train_batch_size", "train.gradient_checkpointing",
    "model.quantization", "train.method", "data.packing", "parallel.mode",
)  # fmt: skip
MAX_PRICE = 1_000_000
"""Maximum price of an hour of one device, in any currency."""
MOMENTS = {"gather": "gathering shards", "loss": "the loss", "backward": "the backward pass", "step": "the update"}


def planner_page(ui: UiContext, request: Request) -> Response:
    """Show the form, with the values of a config (`?config=PATH`) or of an 8B model."""
    chosen = request.query_params.get("config", "")
    config = _base(ui, chosen)
    if config.train.max_steps is None:
        config = with_changes(config, {"train.max_steps": _steps(config)})
    if config.train.global_batch_size == "auto":  # the form has a number
        config = with_changes(config, _changes_by_rows(config, _count_rows(config)))
    models = dict.fromkeys([config.model.name_or_path, NANO, *catalogue()])
    # One device, or modes with a degree of their own: the form has no field for it.
    sized_modes = {"single", *GROUPED}
    return ui.page(
        "planner", opened=chosen, config=config, configs=ui.workspace.configs(), models=list(models), gpus=list(GPUS),
        modes=[mode for mode in MODES if mode not in sized_modes],
    )  # fmt: skip


def estimate_fit(ui: UiContext, body: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of the form's values, by the closed form."""
    start = time.perf_counter()
    config = config_from_form(ui, body)
    answer = format_plan(build_closed_form_plan(config), config, parse_price(body))
    return answer | {"milliseconds": 1000 * (time.perf_counter() - start)}


def config_from_form(ui: UiContext, body: dict[str, Any]) -> SureFitConfig:
    """Return the opened config, or the built-in one, with the form's values.

    Raises:
        ConfigError: an invalid value.
    """
    changes = body.get("changes")
    if not isinstance(changes, dict) or not changes.keys() <= {*NUMBERS, *CHOICES}:
        raise HTTPException(400, "changes must be a JSON object with fields of the form")
    try:
        config = with_changes(_base(ui, require_posted_text(body, "config")), changes)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc'][:2]))}: {first['msg']}", code="E1067") from None
    _require_inside(ui, config)
    return config


def parse_price(body: dict[str, Any]) -> float | None:
    """Return the price of an hour of one device, or None."""
    price = body.get("price")
    if price is None:
        return None
    if not isinstance(price, int | float) or not 0 <= price <= MAX_PRICE:
        raise ConfigError(f"a price is a number from 0 to {MAX_PRICE:,}", code="E1068")
    return float(price)


def _base(ui: UiContext, opened: str) -> SureFitConfig:
    if not opened:
        return SureFitConfig.model_validate(SCRATCH)
    path = ui.workspace.config(opened)
    if not path.is_file():
        raise HTTPException(404, "There is no such file in the workspace.")
    config = load_config(path).config
    _require_inside(ui, config)
    return config


def _require_inside(ui: UiContext, config: SureFitConfig) -> None:
    for problem in ui.workspace.refuse(config):
        raise problem


def _steps(config: SureFitConfig) -> int:
    """Return the optimizer steps of a config whose rows are local; otherwise a round number to start from."""
    rows = _count_rows(config)
    if rows is None:
        return 1000
    train = with_changes(config, _changes_by_rows(config, rows)).train
    return optimizer_steps(rows, decided(train.num_train_epochs), decided(train.global_batch_size), None)


def _count_rows(config: SureFitConfig) -> int | None:
    """Return the rows that an epoch trains on; None where they are not on this machine, or cannot be read."""
    data = config.data
    if not all(is_local(source) for source in (data.train, *data.mix)):
        return None
    try:
        mixed = {source: load_mixed(source, data) for source in data.mix}
        count, mixed_rows = count_training_rows(config, load_training_rows(data), mixed)
    except SureFitError:
        return None
    return epoch_rows(config, count, mixed_rows)


def _changes_by_rows(config: SureFitConfig, rows: int | None) -> dict[str, Any]:
    """Return the batch and the epochs where the number of rows decides them."""
    if not needs_row_count(config):
        return {}
    return {dotted: value for dotted, (value, _) in decide_by_rows(config, rows, count_processes(config)).items()}


@lru_cache(maxsize=64)
def _model(name: str, revision: str | None) -> ModelFacts:
    return model_facts(name, revision)


@lru_cache(maxsize=64)
def _hardware(gpu: str, disk: str | None) -> HardwareFacts:
    return hardware_facts(gpu, disk=disk)


def build_closed_form_plan(config: SureFitConfig) -> dict[str, Any]:
    """Return plan.json computed by arithmetic alone, with the bytes of the phases and the arithmetic's time added."""
    model = _model(config.model.name_or_path, config.model.revision)
    hardware = _hardware(config.hardware.gpu, config.hardware.disk)
    model = with_new_tokens(model, config.model.add_tokens, None)
    loaded = LoadedConfig(config, Path("config.yaml"), {}, frozenset())
    steps = config.train.max_steps
    resolved = resolve_config(
        loaded,
        model,
        hardware,
        None,
        needed=closed_form_upper_bound(model, hardware),
        fitting=eval_batch_chooser(model, hardware),
    )
    resolved = replace(resolved, total_steps=steps)
    document = build_plan(resolved, model, hardware, quick=True)
    budget = peak_bytes(resolved, model, capability=hardware.compute_capability)
    document["budget"] = budget.phases if budget else None
    document["time"] = _time(resolved, model, hardware)
    document["decided"] = {
        key: f"{getattr(getattr(resolved.config, section), name)}".lower()
        for key in ("train.per_device_train_batch_size", "train.gradient_checkpointing", "data.packing", "model.dtype",
                    "parallel.mode")
        for section, name in [key.split(".")]
    }  # fmt: skip
    return document


def _time(resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts) -> dict[str, Any] | None:
    """Return the time of the matrix products of full rows; None if the model's or the device's numbers are not
    known."""
    config = resolved.config
    flops, device = training_flops(model, config), find_device_speed(hardware)
    full_flops = training_flops(model, with_changes(config, {"train.method": "full"}))
    if flops is None or full_flops is None or device is None:
        return None
    try:
        rates = to_device_rates(device)
    except MachineError:
        return None
    length, rows = config.data.max_length, decided(config.train.global_batch_size)
    step_flops = flops.of([length] * rows, length * rows)
    recompute_flops = (
        0 if config.train.gradient_checkpointing is False else FORWARD / TRAINED * full_flops.of([length] * rows, 0)
    )
    curve = rates.matmul.get(config.model.dtype) or rates.matmul["float32"]
    seconds = (step_flops + recompute_flops) / interpolate_speed(curve, math.inf) / count_processes(config)
    steps = resolved.total_steps
    return {
        "seconds_per_step": seconds,
        "total_seconds": steps * seconds if steps else None,
        "tokens_per_second": length * rows / seconds,
        "rates": rates.source,
    }


def format_plan(document: dict[str, Any], config: SureFitConfig, price: float | None) -> dict[str, Any]:
    """Return a plan as the page draws it: bytes for the bars, and every number as text too."""
    estimate, device, seconds = document["estimate"], document["device"], document["time"]
    total = seconds["total_seconds"] if seconds else None
    hours = count_processes(config) * total / 3600 if total is not None else None
    bound = "" if seconds and "total_seconds_low" in seconds else "at least "
    return {
        "verdict": estimate["verdict"] if estimate else "unknown",
        "how": estimate["how"] if estimate else "",
        "device": device["name"],
        "capacity": device["memory_bytes"],
        "capacity_text": bytes_text(device["memory_bytes"]) if device["memory_bytes"] else "an unknown amount",
        "low": estimate["low_bytes"] if estimate else None,
        "high": estimate["high_bytes"] if estimate else None,
        "needed_text": _span(estimate, "low_bytes", "high_bytes", bytes_text) if estimate else "not known",
        "bars": _bars(document),
        "steps_text": _steps_text(document["steps"]),
        "time_text": _span(seconds, "total_seconds_low", "total_seconds_high", duration_text, "total_seconds"),
        "scoring_text": _scoring_text(document["scoring"]),
        "step_text": bound + _seconds(seconds["seconds_per_step"]) if seconds else "not known",
        "speed_text": f"{count_text(seconds['tokens_per_second'])} tokens/s" if seconds else "not known",
        "rates": seconds["rates"] if seconds else "",
        "cost_text": f"{bound}{price * hours:,.2f}" if price is not None and hours is not None else "–",
        "disk_text": bytes_text(document["disk_total_bytes"]) if document["disk_total_bytes"] else "not known",
        "disk": [term | {"text": bytes_text(term["bytes"])} for term in document["disk"]],
        "free_text": _free_text(document),
        "assumed": "; ".join(assumption_text(assumption) for assumption in document["assumptions"]),
        "decided": document.get("decided"),
        "ranks": document["ranks"]["which"] if document["ranks"] else None,
        "does_not_fit": document["does_not_fit"],
        "left_out": document["left_out"],
    }


def _free_text(document: dict[str, Any]) -> str:
    free = document["disk_free_bytes"]
    where = "here" if document["disk_source"] == "detected" else "by hardware.disk"
    return "free space not known" if free is None else f"{bytes_text(free)} free {where}"


def _scoring_text(scoring: dict[str, Any] | None) -> str:
    """Return the time of scoring in words; empty if it is not known."""
    if scoring is None:
        return ""
    text = f"{_span(scoring, 'seconds_low', 'seconds_high', duration_text)}, {plural(scoring['answers'], 'answer')}"
    if interim := scoring["in_training"]:
        text += f"; during training {_span(interim, 'total_seconds_low', 'total_seconds_high', duration_text)}"
    return text


def _span(found: dict[str, Any] | None, low: str, high: str, text: Any, middle: str = "") -> str:
    """Return `a (b to c)`, with the values that are known."""
    if found is None or (middle and found[middle] is None):
        return "not known"
    interval = f"{text(found[low])} to {text(found[high])}" if low in found else ""
    if not middle:
        return interval
    return f"{text(found[middle])} ({interval})" if interval else f"at least {text(found[middle])}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration_text(seconds)


def _steps_text(steps: dict[str, Any]) -> str:
    micro, accumulation = steps["per_device_train_batch_size"], steps["gradient_accumulation_steps"]
    return f"{steps['total_steps'] or '?'} steps of {steps['global_batch_size']} examples, {micro} × {accumulation}"


def _bars(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one bar per phase: its terms if they are known, else its bytes."""
    if document["estimate"] and document["estimate"]["phases"]:
        peak = document["estimate"]["peak"]
        return [_bar("the peak", peak["terms"])] + [
            _bar(phase["name"], [{"term": "held", "bytes": phase["reserved_bytes"] or phase["allocated_bytes"]}])
            for phase in document["estimate"]["phases"]
        ]
    terms, budget = document["memory"], document.get("budget") or {}
    moments = dict.fromkeys(term["moment"] for term in terms if term["moment"] != "always" and term["bytes"])
    bars = [
        _bar(f"training: {MOMENTS[moment]}", [term for term in terms if term["moment"] in ("always", moment)])
        for moment in moments
    ] or [_bar("training", terms)]
    other_phases = {"loading": budget.get("load"), "held-out loss": budget.get("eval")}
    return bars + [_bar(name, [{"term": "held", "bytes": size}]) for name, size in other_phases.items() if size]


def _bar(name: str, terms: list[dict[str, Any]]) -> dict[str, Any]:
    term_rows = [
        {"term": term["term"], "bytes": term["bytes"], "text": bytes_text(term["bytes"]), "why": term.get("why", "")}
        for term in terms
        if term["bytes"]
    ]
    total = sum(term["bytes"] for term in term_rows)
    return {"name": name, "bytes": total, "text": bytes_text(total), "terms": term_rows}
