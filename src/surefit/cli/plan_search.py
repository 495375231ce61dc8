"""Searches of `plan`: the fastest configuration that fits, the same config on other GPUs, and the limit of one
setting."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli.render import Output
from surefit.config.resolve import resolve_config
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, ConfigError, did_you_mean
from surefit.core.units import GIB, bytes_text, duration_text, plural
from surefit.stages.planning import require_rows_left
from surefit.stages.run_context import CheckedRun, load_example_lengths

if TYPE_CHECKING:
    from surefit.plan.planner import Planner
    from surefit.plan.search import Candidate, DeviceConfig, SearchResult


def find_fastest_config(out: Output, run: CheckedRun, gpus: str | None = None, prices: str | None = None) -> int:
    """Find the fastest configuration that fits, on this device or on any of several; return the exit code."""
    from surefit.plan.planner import Planner
    from surefit.plan.search import find_fastest

    start, costs = time.monotonic(), _prices(prices)
    planner = Planner(run.model, require_rows_left(run))
    result = find_fastest(
        planner, _places(run, gpus) if gpus else [_current_device_config(run)], _current_device_config(run)
    )
    seconds = time.monotonic() - start
    out.say(
        f"{plural(result.considered, 'candidate')} considered, {result.fitting} fit by the closed form, "
        f"{plural(len(result.simulated), 'candidate')} simulated, in {duration_text(seconds)}"
    )
    out.result(
        {
            "considered": result.considered, "fitting": result.fitting, "seconds": seconds,
            "best": _as_dict(result.best, costs, planner, run) if result.best else None,
            "given": _as_dict(result.given, costs, planner, run),
            "simulated": [_as_dict(candidate, costs, planner, run) for candidate in result.simulated],
        }
    )  # fmt: skip
    if result.best is None:
        _say_nothing_fits(out, result)
        return EXIT_FINDINGS
    _say_choice(out, result, result.best)
    return EXIT_OK


def _where(one: Candidate) -> str:
    if one.processes == 1:
        return one.place.hardware.name
    return f"{one.processes} × {one.place.hardware.name} ({_way(one.sharing)}; per GPU, the one with most)"


def _way(sharing: dict[str, Any]) -> str:
    """Return the parallel mode with its degrees: `cp`, or `fsdp with cp 4`."""
    mode = sharing["mode"]
    degrees = [
        f"{name} {sharing[name]}" for name in ("cp", "dp_replicate") if name != mode and sharing.get(name, 1) > 1
    ]
    return f"{mode} with {' and '.join(degrees)}" if degrees else str(mode)


def _say_nothing_fits(out: Output, chosen: SearchResult) -> None:
    smallest = min((chosen.given, *chosen.simulated), key=lambda one: one.need.high)
    memory = smallest.place.hardware.memory_bytes
    out.paragraph(
        f"Nothing fits for certain: the least that was found needs {bytes_text(smallest.need.low)} to "
        f"{bytes_text(smallest.need.high)} of {bytes_text(memory) if memory else 'an unknown amount'} on "
        f"{_where(smallest)}",
        "bold red",
        indent=2,
    )
    out.paragraph("Ask `--solve max_length` or `--solve rank` what would, or name a larger GPU.")


def _say_choice(out: Output, chosen: SearchResult, best: Candidate) -> None:
    hardware, needed = best.place.hardware, best.need
    assert hardware.memory_bytes is not None
    out.paragraph(
        f"Fits {_where(best)}: {bytes_text(needed.low)} to {bytes_text(needed.high)} needed "
        f"({needed.spread}) of {bytes_text(hardware.memory_bytes)}; "
        f"{bytes_text(hardware.memory_bytes - needed.high)} to spare",
        "bold green",
        indent=2,
    )
    out.paragraph(f"Why: {_reason(chosen, best)}", indent=2)
    out.say("The lines to write:")
    out.say(
        "train:\n"
        f"  per_device_train_batch_size: {best.micro_batch}  # × {best.accumulation} = the same global batch\n"
        f"  gradient_checkpointing: {str(best.checkpointing).lower()}"
    )
    if best.packed != chosen.given.packed:
        out.say(f"data:\n  packing: {str(best.packed).lower()}")
    if best.tiled != chosen.given.tiled:
        out.say(f"speed:\n  tiled_mlp: {str(best.tiled).lower()}")
    if best.sharing != chosen.given.sharing:
        lines = "".join(f"\n  {name}: {value}" for name, value in best.sharing.items())
        out.say(f"parallel:{lines}")
    if best.place.hardware.name != chosen.given.place.hardware.name:
        out.say(f"hardware:\n  gpu: {best.place.resolved.config.hardware.gpu}")


def _reason(chosen: SearchResult, best: Candidate) -> str:
    """Return why this candidate was chosen, compared with the config as it is."""
    from surefit.plan.search import RESOLUTION

    current = chosen.given
    if best is current:
        return f"it is the config as it is: nothing that fits is faster by more than {RESOLUTION:.0%}"
    if best.step and current.step and current.verdict == "fits":
        return (
            f"{duration_text(best.step.seconds)} per step instead of {duration_text(current.step.seconds)} "
            f"({best.step.seconds / current.step.seconds - 1:+.0%}); the global batch and the optimisation are the same"
        )
    if current.verdict != "fits":
        return f"the config as it is: {current.verdict}; this is the fastest that fits, with the same global batch"
    return "nothing is recomputed that fits in memory, in as few micro batches as fit"


def compare_gpus(out: Output, run: CheckedRun, gpus: str, prices: str | None) -> int:
    """Compare the config on several GPUs: whether it fits, the time, the cost."""
    from surefit.plan.planner import Planner
    from surefit.plan.search import simulate_on_devices

    costs = _prices(prices)
    planner = Planner(run.model, require_rows_left(run))
    devices = _places(run, gpus)
    results = [_as_dict(result, costs, planner, run) for result in simulate_on_devices(planner, devices)]
    rows = [
        [
            _which(result), result["verdict"], f"{result['high_bytes'] / GIB:.1f}",
            f"{result['memory_bytes'] / GIB:.1f}" if result["memory_bytes"] else "n/a",
            f"{result['micro_batch']} × {result['accumulation']}{recompute_letters(result)}",
            duration_text(result["seconds"]) if result["seconds"] is not None else "–",
            f"{result['cost']:.2f}" if result["cost"] is not None else "–",
        ]
        for result in results
    ]  # fmt: skip
    out.table(
        "The config on each GPU (s, c, o: selective checkpointing, whole, offloaded; t: tiles)",
        ["GPU", "verdict", "≤ GiB", "of", "batch", "time", "cost"],
        rows,
    )
    if any(result["dtype"] != results[0]["dtype"] for result in results):
        types = ", ".join(f"{result['dtype']} on {result['gpu']}" for result in results)
        out.paragraph(f"note: model.dtype is auto, so they compute in different types: {types}", indent=2)
    if not costs:
        out.paragraph("For the cost give what an hour costs you: --price h100=2.5,a100-80=1.6", indent=2)
    out.result({"gpus": results})
    return EXIT_OK if any(result["verdict"] == "fits" for result in results) else EXIT_FINDINGS


def _which(one: dict[str, Any]) -> str:
    return f"{one['processes']} × {one['gpu']} {_way(one)}" if one["processes"] > 1 else str(one["gpu"])


def recompute_letters(one: dict[str, Any]) -> str:
    """Return the letters for checkpointing and tiling in the table of `--compare`, after a space, or an empty text."""
    letters = {False: "", "selective": "s", True: "c", "offload": "o"}[one["checkpointing"]] + "t" * one["tiled_mlp"]
    return f" {letters}" if letters else ""


def solve_setting(out: Output, run: CheckedRun, field: str) -> int:
    """Find the largest value of one setting that fits this device."""
    from surefit.plan.planner import Planner
    from surefit.plan.search import FIELDS, find_largest

    solvable = next((candidate for candidate in FIELDS if candidate == field), None)
    if solvable is None:
        raise ConfigError(
            f"{field!r} cannot be solved for{did_you_mean(field, FIELDS)}",
            code="E1042",
            help=f"one of {', '.join(FIELDS)}",
        )
    solution = find_largest(solvable, Planner(run.model, load_example_lengths(run)), _current_device_config(run))
    name, memory = run.hardware.name, bytes_text(run.hardware.memory_bytes or 0)
    if solution.value is None:
        out.paragraph(f"Nothing fits: not even the least {field} does on {name} ({memory})", "bold red")
    else:
        assert solution.need is not None
        value = f"{solution.value:,}" if isinstance(solution.value, int) else solution.value
        out.paragraph(
            f"{field}: {value} fits {name}, {bytes_text(solution.need.high)} at most of {memory}",
            "bold green",
            indent=2,
        )
    if solution.beyond_need is not None:
        value = f"{solution.beyond:,}" if isinstance(solution.beyond, int) else str(solution.beyond)
        out.paragraph(
            f"{value} does not fit for certain: {bytes_text(solution.beyond_need.low)} to "
            f"{bytes_text(solution.beyond_need.high)}",
            indent=2,
        )
    elif solution.value is not None:
        out.paragraph(f"Beyond it is nothing: {solution.limit}", indent=2)
    out.note(f"{plural(solution.simulations, 'simulation')}; everything else is as the config says")
    out.result(
        {
            "field": field, "value": solution.value, "beyond": solution.beyond, "limit": solution.limit,
            "high_bytes": solution.need.high if solution.need else None,
            "beyond_high_bytes": solution.beyond_need.high if solution.beyond_need else None,
            "simulations": solution.simulations,
        }
    )  # fmt: skip
    return EXIT_OK if solution.value is not None else EXIT_FINDINGS


def _current_device_config(run: CheckedRun) -> DeviceConfig:
    from surefit.plan.search import DeviceConfig

    return DeviceConfig(run.hardware, run.resolved)


def _places(run: CheckedRun, gpus: str) -> list[DeviceConfig]:
    """Return the named GPUs, each with every "auto" of the config decided for it.

    Raises:
        ConfigError: an unknown GPU, or none.
    """
    from surefit.facts.generation import eval_batch_chooser
    from surefit.facts.hardware import hardware_facts
    from surefit.plan.memory_interval import closed_form_upper_bound
    from surefit.plan.search import DeviceConfig

    devices = []
    for name in _names(gpus):
        hardware = hardware_facts(name, Path(run.run.path))
        config = run.loaded.config
        config_for_gpu = config.model_copy(update={"hardware": config.hardware.model_copy(update={"gpu": name})})
        needed = closed_form_upper_bound(run.model, hardware)
        loaded = replace(run.loaded, config=config_for_gpu)
        fitting = eval_batch_chooser(run.model, hardware)
        devices.append(
            DeviceConfig(
                hardware,
                resolve_config(loaded, run.model, hardware, *run.gathered.counted, needed=needed, fitting=fitting),
            )
        )
    return devices


def _names(text: str) -> list[str]:
    """Return the names between commas; "all" is every GPU of the catalog."""
    from surefit.facts.gpus import GPUS

    names = list(GPUS) if text.strip() == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("no GPU is named", code="E1043", help="--compare t4,l4,a100-80,h200, or all")
    return names


def _prices(text: str | None) -> dict[str, float]:
    """Parse `h100=2.5,l4=0.7` → the price of an hour by GPU.

    Raises:
        ConfigError: a part that is not NAME=NUMBER, an unknown GPU, a negative price.
    """
    from surefit.facts.gpus import GPUS, find_gpu

    price_by_gpu: dict[str, float] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, _, amount = part.partition("=")
        gpu = find_gpu(name.strip())
        if gpu is None:
            raise ConfigError(
                f"--price: no GPU named {name.strip()!r} is known{did_you_mean(name.strip(), GPUS)}",
                code="E1044",
                help=f"one of {', '.join(GPUS)}",
            )
        try:
            price_by_gpu[gpu.name] = float(amount)
        except ValueError:
            price_by_gpu[gpu.name] = -1.0
        if not 0 <= price_by_gpu[gpu.name] < float("inf"):
            raise ConfigError(
                f"--price: {part.strip()!r} is not NAME=PRICE", code="E1045", help="--price h100=2.5,l4=0.7"
            )
    return price_by_gpu


def _as_dict(one: Candidate, prices: dict[str, float], planner: Planner, run: CheckedRun) -> dict[str, Any]:
    """Return a candidate for JSON; `seconds` and `cost` are of the whole run, if it fits."""
    rows = run.row_count
    run_time = planner.run(one.place.resolved, one.step, rows) if one.step and one.verdict != "does not fit" else None
    price = prices.get(one.place.hardware.name)
    return {
        "gpu": one.place.hardware.name,
        "memory_bytes": one.place.hardware.memory_bytes,
        "dtype": one.place.resolved.config.model.dtype,
        "verdict": one.verdict,
        "how": one.need.how,
        "low_bytes": one.need.low,
        "high_bytes": one.need.high,
        "micro_batch": one.micro_batch,
        "accumulation": one.accumulation,
        "checkpointing": one.checkpointing,
        "tiled_mlp": one.tiled,
        "packing": one.packed,
        "seconds_per_step": one.step.seconds if one.step else None,
        "seconds": run_time.seconds if run_time else None,
        "cost": run_time.cost(price, one.processes)[0] if run_time and price is not None else None,
        "processes": one.processes,
        **{"mode": None, "tp": 1, "cp": 1, "pp": 1, "dp_replicate": 1},
        **one.sharing,
    }
