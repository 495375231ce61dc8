"""The content of plan.json: terms that arithmetic knows, the memory by simulation or closed form, the verdict, the
time.

Arithmetic alone can show that a run does not fit, never that it fits: `left_out` lists what is not counted. Torch is
imported only where something is simulated; `quick` leaves that out. docs/reference/plan-json.md explains the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit import __version__
from surefit.config.memory import WORDS
from surefit.config.resolve import ResolvedConfig
from surefit.config.world import count_processes
from surefit.core.errors import MachineError, SureFitError
from surefit.core.packaging import explain_import_error, require_extra
from surefit.core.units import bytes_text, plural
from surefit.facts.disk import disk_terms, download_term
from surefit.facts.eval_prompts import EvalPromptFacts
from surefit.facts.generation import (
    estimate_generation_memory,
    generation_room_bytes,
    held_by_training,
    largest_fitting_eval_batch,
    merged_weights_too_large,
)
from surefit.facts.hardware import HardwareFacts
from surefit.facts.memory_formula import (
    ACTIVATIONS_LEFT_OUT,
    LEFT_OUT,
    MemoryTerm,
    activations_known,
    count_trainable_parameters,
    fullest_moment_bytes,
)
from surefit.facts.memory_per_rank import memory_terms
from surefit.facts.model import ModelFacts
from surefit.facts.step_shape import micro_batch_shape
from surefit.plan.assumptions import list_assumptions
from surefit.plan.host import build_host_plan
from surefit.plan.memory_interval import judge_fit, require_plannable
from surefit.plan.planner import (
    ExampleLengths,
    Planner,
    estimates_from_simulation,
    memory_per_process,
    pytorch_peak_bytes,
)
from surefit.plan.rank_summary import summarize_ranks
from surefit.plan.scoring import build_scoring_plan

if TYPE_CHECKING:
    from surefit.plan.simulate import SimulatedMemory


def build_plan(
    resolved: ResolvedConfig,
    model: ModelFacts,
    hardware: HardwareFacts,
    rows: int | None = None,
    *,
    quick: bool = False,
    lengths: ExampleLengths | None = None,
    planner: Planner | None = None,
    scored: EvalPromptFacts | None = None,
) -> dict[str, Any]:
    """Return the content of plan.json.

    `memory_total_bytes` is the fullest moment of a training step, not the sum of all terms: the logits are gone when
    the optimizer updates. The `moment` of a memory term is the time at which it is held. Totals are None where the
    model's size is not known; `does_not_fit` lists, in words, what exceeds this device or disk.

    Args:
        resolved: the config without "auto".
        model: facts about the base model.
        hardware: the device.
        rows: training rows, None where they are not counted yet.
        quick: arithmetic only.
        lengths: what is known about the rows' lengths.
        planner: estimates for the model, possibly with simulations in its cache.
        scored: facts about the prompts of the evaluation; without them there is no time of scoring.

    Raises:
        MachineError, ConfigError: no plan can be made for these inputs.
    """
    require_plannable(resolved, model, hardware)
    planner = planner or Planner(model, lengths or ExampleLengths())
    resolved = replace(resolved, shared=planner.lengths.shared)
    memory, disk = memory_terms(resolved, model, hardware.compute_capability), disk_terms(resolved, model)
    if disk and (download := download_term(model, hardware, Path(resolved.config.output_dir))):
        disk.append(download)
    only_formula = "--quick was given" if quick else _missing_packages()
    estimate, not_simulated = _estimate(planner, resolved, hardware, only_formula)
    time = None if only_formula else _time(planner, resolved, hardware, rows)
    no_prompts = scored is not None and scored.nothing_to_score
    generation = None if no_prompts else _generation_entry(resolved, model, hardware, planner, scored)
    scoring = None
    if time and scored and not no_prompts:
        scoring = build_scoring_plan(resolved, model, hardware, scored, planner.typical(resolved))
    left_out = [
        *_unknown(resolved, model, hardware, memory, estimate),
        *_unknown_disk(model, hardware, disk),
        *_missing_simulation_notes(estimate, None if quick else not_simulated),
        *_rows_left_out(planner.lengths),
        *_unplanned_notes(
            resolved, time, bool(only_formula), no_prompts or generation is not None, no_prompts or scoring is not None
        ),
    ]
    return {
        "surefit": __version__,
        "device": {
            name: getattr(hardware, name) for name in ("name", "kind", "memory_bytes", "source", "figure", "assumed")
        },
        "assumptions": [asdict(assumption) for assumption in list_assumptions(resolved, hardware)],
        "model": _describe_model(resolved, model),
        "memory": [_entry(term) | {"moment": term.moment} for term in memory],
        "memory_total_bytes": fullest_moment_bytes(memory) if memory else None,
        "left_out": left_out,
        "disk": [_entry(term) for term in disk],
        "disk_total_bytes": fullest_moment_bytes(disk) if disk else None,
        "disk_free_bytes": hardware.disk_free_bytes,
        "disk_source": hardware.disk_source,
        "steps": _describe_steps(resolved, rows),
        "does_not_fit": [*_too_much_memory(memory, estimate, hardware), *_too_much_disk(disk, hardware)],
        "estimate": estimate,
        "time": time,
        "answering": generation,
        "scoring": scoring,
        "host": build_host_plan(resolved, model, hardware, planner.length(resolved)),
        "ranks": summarize_ranks(resolved, model, hardware, planner.typical(resolved)),
    }


def _describe_model(resolved: ResolvedConfig, model: ModelFacts) -> dict[str, Any]:
    trainable = count_trainable_parameters(model, resolved.config.adapter, resolved.config.model.dtype)
    return {
        "name": model.name,
        "parameters": model.parameters,
        "trainable": trainable.parameters if trainable else None,
        "architecture": model.architecture,
        "source": model.source,
    }


def _describe_steps(resolved: ResolvedConfig, rows: int | None) -> dict[str, Any]:
    train = resolved.config.train
    return {
        "rows": rows,
        "total_steps": resolved.total_steps,
        "global_batch_size": train.global_batch_size,
        "per_device_train_batch_size": train.per_device_train_batch_size,
        "gradient_accumulation_steps": resolved.gradient_accumulation_steps,
    }


def _entry(term: MemoryTerm) -> dict[str, Any]:
    return {"term": term.term, "bytes": term.bytes, "why": term.why}


def _missing_packages() -> str | None:
    """Return why nothing can be simulated on this machine: torch or another package is not installed."""
    try:
        require_extra("train")
    except MachineError as error:
        return error.message
    return None


def _estimate(
    planner: Planner, resolved: ResolvedConfig, hardware: HardwareFacts, only_formula: str | None
) -> tuple[dict[str, Any] | None, str | None]:
    """Return the estimate, None where there is neither a simulation nor a closed form, and the reason why there is no
    simulation.

    Args:
        only_formula: such a reason that is known already.
    """
    why = only_formula or planner.too_long(resolved)
    simulation: dict[str, Any] = {}
    if why is None:
        try:
            simulated = estimates_from_simulation(planner.memory(resolved, hardware), hardware, resolved)
            simulation = _simulated_entry(simulated.memory)
            needed, training = simulated.whole, simulated.training
            simulation["first_step"] = {"low_bytes": simulated.first_step.low, "high_bytes": simulated.first_step.high}
            simulation["disagreement"] = _disagreement(planner, resolved, hardware, simulated.memory)
            simulation["keeps_freed_memory"] = simulated.kept
        except Exception as error:  # a model's own code may do anything with tensors that hold no data
            why = _one_line_error(error)
    if why is not None:
        closed = planner.closed_form(resolved, hardware)
        if closed is None:
            return None, why
        needed = training = closed
        simulation = {
            "peak_bytes": closed.bytes, "phases": [], "peak": None, "layers_simulated": None, "disagreement": None,
            "keeps_freed_memory": False, "first_step": None,
        }  # fmt: skip
    micro, length = resolved.config.train.per_device_train_batch_size, planner.length(resolved)
    estimate = {
        "how": needed.how,
        "not_simulated": why,
        "setting": _setting(resolved),
        "micro_batch": micro,
        "length": length,
        "tokens": micro_batch_shape(resolved, length).tokens,
        "lengths": planner.lengths.source,
        "longest_row": planner.lengths.longest,
        "lengths_known": planner.lengths.known,
        "lengths_rows": planner.lengths.rows,
        "held_out_length": planner.eval_length(resolved),
        **simulation,
        "low_bytes": needed.low,
        "high_bytes": needed.high,
        "training": {"likely_bytes": training.likely, "low_bytes": training.low, "high_bytes": training.high},
        "margin": needed.margin,
        "margin_above": needed.above,
        "spread": needed.spread,
        "beside": needed.beside,
        "capacity_bytes": memory_per_process(resolved, hardware),
        "verdict": judge_fit(needed, memory_per_process(resolved, hardware)),
    }
    return estimate, why


def _one_line_error(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, SureFitError):
        return error.message
    if (package_problem := explain_import_error(error)) is not None:
        return package_problem.message
    first = next((f": {line[:200]}" for line in str(error).splitlines() if line.strip()), "")
    return f"the model's code does not run on tensors without data ({type(error).__name__}{first})"


def _setting(resolved: ResolvedConfig) -> str:
    """Return, in words, the settings besides the batch that decide the memory."""
    config = resolved.config
    kind = "DoRA" if config.lora.use_dora else "LoRA"
    trained = f"{kind} r {config.lora.r}" if config.train.method == "lora" else "all weights"
    dtype: str = config.model.dtype
    if config.model.quantization != "none":
        dtype += f" on {config.model.quantization}"
    words = [f"{trained} in {dtype}", "packed" if config.data.packing is True else "padded"]
    words += ["prompts shared"] if config.speed.shared_prompts is True else []
    words += [] if config.train.optim == "adamw_torch" else [config.train.optim]
    words += [] if config.speed.chunked_loss else ["full logits"]
    words += ["tiled MLPs"] if config.speed.tiled_mlp is True else []
    return ", ".join([*words, WORDS[config.train.gradient_checkpointing]])


def closed_form_disagreement(closed: int, simulated: int, limit: float = 0.03) -> str | None:
    """Return a sentence where the closed form and the simulation, in bytes, differ by more than `limit`; else None."""
    error = closed / simulated - 1
    if abs(error) <= limit:
        return None
    return (
        f"the closed form estimates {bytes_text(closed)}, the simulation {bytes_text(simulated)} ({error:+.1%}): "
        "trust the simulation, and please report this config"
    )


def _disagreement(
    planner: Planner, resolved: ResolvedConfig, hardware: HardwareFacts, memory: SimulatedMemory
) -> str | None:
    """Return a sentence where closed form and simulation differ by more than they should; None on a CPU, since the
    closed form is for GPUs."""
    closed = planner.closed_form(resolved, hardware) if hardware.kind == "cuda" else None
    training = max(phase.allocated for phase in memory.phases if phase.name != "merge")
    return closed_form_disagreement(closed.bytes, training) if closed else None


def _simulated_entry(memory: SimulatedMemory) -> dict[str, Any]:
    return {
        "peak_bytes": pytorch_peak_bytes(memory),
        "phases": [
            {"name": name, "allocated_bytes": phase.allocated, "reserved_bytes": phase.reserved}
            for name, phase in zip(_names(memory), memory.phases, strict=True)
        ],
        "peak": {
            "phase": memory.peak.phase,
            "bytes": sum(memory.terms.values()),
            "terms": [
                {"term": name, "bytes": size} for name, size in sorted(memory.terms.items(), key=lambda term: -term[1])
            ],
            "operator": memory.peak.op,
            "module": memory.peak.module,
            "shape": list(memory.peak.shape),
            "dtype": memory.peak.dtype,
            "made_bytes": memory.peak.bytes,
        },
        "layers_simulated": memory.layers_simulated,
    }


def _names(memory: SimulatedMemory) -> Iterator[str]:
    """Yield the phases' names; merging is a process of its own, which loads a second time."""
    earlier_names: set[str] = set()
    for phase in memory.phases:
        yield f"merge: {phase.name}" if phase.name in earlier_names else phase.name
        earlier_names.add(phase.name)


def _time(
    planner: Planner, resolved: ResolvedConfig, hardware: HardwareFacts, rows: int | None
) -> dict[str, Any] | None:
    step = planner.step(resolved, hardware)
    if step is None:
        return None
    run = planner.run(resolved, step, rows)
    return {
        "seconds_per_step": step.seconds,
        "seconds_per_step_low": step.low,
        "seconds_per_step_high": step.high,
        "total_seconds": run.seconds if run else None,
        "total_seconds_low": run.low if run else None,
        "total_seconds_high": run.high if run else None,
        "parts": run.parts if run else None,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "limit": run.limit if run else step.limit,
        "length": planner.typical(resolved),
        "rates": step.source,
    }


def _generation_entry(
    resolved: ResolvedConfig,
    model: ModelFacts,
    hardware: HardwareFacts,
    planner: Planner,
    scored: EvalPromptFacts | None,
) -> dict[str, Any] | None:
    """Return the most memory that generation for scoring needs, in its own process and beside training, and a batch
    that fits where this one may not."""
    config, length = resolved.config, planner.length(resolved)
    longest = scored.longest(length) if scored else length
    generation = estimate_generation_memory(config, model, hardware.kind, longest, hardware.compute_capability)
    if generation is None:
        return None
    room = generation_room_bytes(generation, config, hardware)
    fits = room is None or generation.bytes <= room
    smaller_batch = None if fits or room is None else largest_fitting_eval_batch(config, model, hardware, room, longest)
    beside = None
    if config.evaluate.in_training:
        held_out = (scored.held_out.longest if scored else None) or length
        weights, kept = held_by_training(memory_terms(resolved, model, hardware.compute_capability))
        in_training = estimate_generation_memory(config, model, hardware.kind, held_out, hardware.compute_capability)
        beside = (
            None if in_training is None or weights is None else in_training.bytes - in_training.weights + weights + kept
        )
    return (
        asdict(generation)
        | {"bytes": generation.bytes, "fewer": smaller_batch, "in_training_bytes": beside}
        | {"without_merged": merged_weights_too_large(config, model, hardware)}
    )


def _too_much_memory(
    terms: Sequence[MemoryTerm], estimate: dict[str, Any] | None, hardware: HardwareFacts
) -> Iterator[str]:
    """Yield a sentence where the estimate does not fit or, without an estimate, where the known terms alone exceed the
    memory."""
    if hardware.memory_bytes is None:
        return
    if estimate is None and fullest_moment_bytes(terms) > hardware.memory_bytes:
        yield (
            f"memory: the run needs at least {bytes_text(fullest_moment_bytes(terms))}, "
            f"but {hardware.name} has {bytes_text(hardware.memory_bytes)}"
        )
    elif estimate is not None and estimate["verdict"] == "does not fit":
        capacity = estimate["capacity_bytes"]
        yield (
            f"memory: {bytes_text(estimate['low_bytes'])} to {bytes_text(estimate['high_bytes'])} are needed for "
            f"{plural(estimate['micro_batch'], 'row')} of {estimate['length']:,} tokens, but {hardware.name} has "
            f"{bytes_text(capacity)}{' per process' if capacity != hardware.memory_bytes else ''}"
        )


def _too_much_disk(terms: Sequence[MemoryTerm], hardware: HardwareFacts) -> Iterator[str]:
    free = hardware.disk_free_bytes
    if free is not None and fullest_moment_bytes(terms) > free:
        origin = " (hardware.disk)" if hardware.disk_source == "config" else ""
        yield f"disk: the run writes {bytes_text(fullest_moment_bytes(terms))}, but {bytes_text(free)} are free{origin}"


def _unknown(
    resolved: ResolvedConfig,
    model: ModelFacts,
    hardware: HardwareFacts,
    memory: Sequence[MemoryTerm],
    estimate: dict[str, Any] | None,
) -> Iterator[str]:
    """Yield what is not in the memory total, what comes before the run, and the GPUs of the machine that stay idle."""
    config = resolved.config
    if not memory:
        yield f"all memory and disk terms: the size of {model.name} is unknown on this machine"
    if estimate is None:
        yield from (() if activations_known(config, model) else ACTIVATIONS_LEFT_OUT)
        yield LEFT_OUT
    if model.source == "gguf" and model.path is None and model.weight_bytes:
        yield f"the converted GGUF file, written once into SureFit's cache: {bytes_text(model.weight_bytes)}"
    if model.dequantized_from and model.weight_bytes:
        yield f"the dequantized copy of the base, written once into SureFit's cache: {bytes_text(model.weight_bytes)}"
    if hardware.gpu_count > (count := count_processes(config)):
        idle = plural(hardware.gpu_count - count, "other GPU")
        yield f"{idle} of this machine: --gpus {hardware.gpu_count} uses all"


def _unknown_disk(model: ModelFacts, hardware: HardwareFacts, disk: Sequence[MemoryTerm]) -> Iterator[str]:
    """Yield a download to another disk, and a note where the free disk space is not known."""
    elsewhere = not any(term.term == "base model" for term in disk)
    if model.source in ("catalogue", "hub") and model.weight_bytes and elsewhere:
        yield f"the download of the base model into the Hugging Face cache, {bytes_text(model.weight_bytes)}"
    if hardware.disk_source == "unknown":
        yield f"the free disk space of the machine with the {hardware.name}: set hardware.disk, such as 100GB"


def _missing_simulation_notes(estimate: dict[str, Any] | None, why: str | None) -> Iterator[str]:
    """Yield a note that the memory is not simulated, with what stands in its place, and why."""
    if why:
        instead = "is by closed form" if estimate else "has only the terms with a formula"
        yield f"the simulation: {why}; the memory shown {instead}"


LEFT_OUT_SHARE = 0.01
"""Smallest share of left-out rows that is reported."""


def _rows_left_out(lengths: ExampleLengths) -> Iterator[str]:
    """Yield a line where rows will be left out: the number of steps does not account for that."""
    if lengths.left_out >= LEFT_OUT_SHARE:
        yield (
            f"rows longer than data.max_length, about {100 * lengths.left_out:.0f} %: training drops them, so it "
            "has fewer steps and needs less time"
        )


def _unplanned_notes(
    resolved: ResolvedConfig,
    time: dict[str, Any] | None,
    untimed: bool,
    answered: bool,
    scored: bool,
) -> Iterator[str]:
    """Yield what was not timed, and what no plan counts."""
    if time is None:
        yield "time" if untimed else "time: the speed of this device is unknown; `surefit calibrate` measures it"
    else:
        yield "time of merging" if scored else "time of merging and scoring"
        if time["parts"] and not time["parts"]["evaluations"] and not resolved.config.data.holds_nothing_out:
            yield "time of the held-out loss: its number of rows is unknown"
    if not answered:
        yield "memory for generating the scored answers"
    yield "other processes on the device"
    if resolved.config.speed.compile:
        yield "the effect of compilation: the plan is for uncompiled layers"
