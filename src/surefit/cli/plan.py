"""The verb `plan`: a run's needs, faster settings, the limit of one setting, and the plan compared with a finished
run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.options import Gpus, Overrides, Target, repeat_option
from surefit.cli.render import Output
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, ConfigError
from surefit.core.rundir import RunDir, write_atomic
from surefit.core.units import bytes_text, count_text, duration_text, plural

if TYPE_CHECKING:
    from surefit.plan.verify import PlannedVersusActual
    from surefit.stages.run_context import CheckedRun

VERDICT_STYLE = {"fits": "bold green", "does not fit": "bold red"}


@verb
def plan(
    out: Output,
    config: Target,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Plan for this GPU: 4090, h100, or its memory, 12GB; or cpu.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Arithmetic only: nothing is simulated.")] = False,
    optimize: Annotated[bool, typer.Option("--optimize", help="Look for the fastest way that fits.")] = False,
    compare: Annotated[str | None, typer.Option(metavar="GPUS", help="On each of these, e.g. t4,l4,h200.")] = None,
    price: Annotated[str | None, typer.Option(metavar="GPU=PRICE,…", help="What an hour costs you.")] = None,
    solve: Annotated[str | None, typer.Option(metavar="FIELD", help="max_length, batch, rank or model.")] = None,
    against: Annotated[Path | None, typer.Option(metavar="RUN", help="Beside what this run really took.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the memory as SVG.")] = None,
    gpus: Gpus = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also each phase, term and assumption.")] = False,
) -> int:
    """Say whether the run fits, and what it needs: memory, time, disk; and what to change if it does not."""
    from surefit.cli import plan_search
    from surefit.config.inputs import input_files
    from surefit.core.gc_pause import pause_gc
    from surefit.core.svg import picture_file
    from surefit.stages.planning import build_run_plan
    from surefit.stages.run_context import load_checked_run

    options = {"--optimize": optimize, "--solve": solve, "--against": against, "--quick": quick}
    options |= {"--compare": compare and not optimize, "--plot": plot and not quick}
    names = [name for name, value in options.items() if value]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} cannot be combined", code="E1030", help="choose one of them")
    changes = [*(overrides or ()), *([] if gpu is None else [f"hardware.gpu={gpu!r}"])]
    changes += [f"hardware.count={gpus}"] if gpus else []
    with pause_gc():  # also between simulations: their garbage is freed when the process ends
        run = load_checked_run(config, changes)
        if optimize:
            return plan_search.find_fastest_config(out, run, compare, price)
        if compare:
            return plan_search.compare_gpus(out, run, compare, price)
        if solve:
            return plan_search.solve_setting(out, run, solve)
        if against:
            return say_plan_deviations(out, run, against)
        if plot is not None:
            picture_file(plot, input_files(run.resolved.config, run.loaded.path))
        planned = build_run_plan(run, quick=quick, needs_rows=True, advise=True)
        if plot is not None:
            _write_plot(out, planned, plot)
        code = say_plan(out, planned, verbose=verbose)
        words: list[object] = [config, *repeat_option("--set", overrides or ())]
        words += ["--gpus", gpus] if gpus else []
        card = ["--gpu", gpu] if gpu else []  # not for train: the card may be another machine's
        out.next_step(["plan", *words, *card, "--optimize"] if code else ["train", *words])
        return code


def say_plan(out: Output, planned: dict[str, Any], *, verbose: bool | None = False) -> int:
    """Print the answer of a plan; return the exit code.

    Args:
        verbose: print all of the plan; None in a verb that has no such option, which is then not mentioned.
    """
    from surefit.plan.summary import headline, summary_lines

    verdict = headline(planned).partition(":")[0].lower()
    style = next((style for name, style in VERDICT_STYLE.items() if verdict.startswith(name)), "bold yellow")
    out.paragraph(headline(planned), style)
    for label, text in summary_lines(planned):
        out.paragraph(f"{label:8} {text}", indent=9)
    if verbose:
        out.say("")
        _say_details(out, planned)
    elif verbose is not None:
        out.paragraph("--verbose shows every phase, term and assumption", "dim")
    out.result(planned)
    return EXIT_FINDINGS if planned["does_not_fit"] else EXIT_OK


def _say_details(out: Output, planned: dict[str, Any]) -> None:
    device, estimate = planned["device"], planned["estimate"]
    memory = bytes_text(device["memory_bytes"]) if device["memory_bytes"] else "unknown"
    out.paragraph(f"{planned['model']['name']} on {device['name']} ({memory} of memory, {device['source']})", "bold")
    _say_assumptions(out, planned["assumptions"], device["name"])
    out.paragraph(_steps(planned["steps"], estimate))
    _say_ranks(out, planned["ranks"], device["kind"])
    if estimate and estimate["phases"]:
        _say_memory(out, estimate, device, planned["ranks"]["processes"] if planned["ranks"] else 1)
    elif planned["memory"]:
        _say_terms(out, planned, device["memory_bytes"])
    if estimate:
        _say_verdict(out, estimate, device)
    _say_answering(out, planned["answering"])
    _say_host(out, planned["host"])
    _say_time(out, planned["time"])
    _say_scoring(out, planned["scoring"], planned["time"])
    _say_disk(out, planned)
    out.say("Not counted:")
    for text in planned["left_out"]:
        out.paragraph(f"  - {text}", indent=4)
    for text in planned["does_not_fit"]:
        out.paragraph(f"Does not fit: {text}", "bold red", indent=2)


def _say_assumptions(out: Output, assumed: Sequence[dict[str, Any]], device: str) -> None:
    """Print the assumptions about a machine that is not this one."""
    from surefit.plan.assumptions import assumption_text

    if assumed:
        assumptions = "; ".join(assumption_text(assumption) for assumption in assumed)
        out.paragraph(f"Assumed of the machine with the {device}: {assumptions}", "bold", indent=2)


def _say_ranks(out: Output, ranks: dict[str, Any] | None, kind: str) -> None:
    """Print the rank that the memory figures describe, and the bytes that the ranks exchange."""
    if ranks is None:
        return
    unit = "process" if kind == "cpu" else "GPU"
    many = plural(ranks["processes"], unit)
    out.paragraph(
        f"Per {unit} of {many}, {ranks['mode']} ({ranks['share']}): memory is that of {ranks['which']}",
        "bold",
        indent=2,
    )
    if ranks["exchanged"] is None:
        return
    seconds = ranks["exchange_seconds_per_step"]
    duration = f"{seconds:.2g} s if nothing hides it, {ranks['link']}" if seconds is not None else ranks["link"]
    out.paragraph(
        f"Each sends and receives {bytes_text(ranks['exchanged_bytes_per_step'])} per step: {ranks['exchanged']}; "
        f"{duration}",
        indent=2,
    )


def _steps(steps: dict[str, Any], estimate: dict[str, Any] | None) -> str:
    text = (
        f"{plural(steps['total_steps'], 'optimizer step') if steps['total_steps'] else 'an unknown number of steps'} "
        f"of {plural(steps['global_batch_size'], 'example')} "
        f"({steps['per_device_train_batch_size']} per micro batch × {steps['gradient_accumulation_steps']})"
    )
    if not estimate:
        return text
    held_out = estimate["held_out_length"]
    held_out_text = f", and the longest held-out row {held_out:,}" if held_out else ""
    return f"{text}; {estimate['setting']}; {_longest(estimate)}{held_out_text}"


def _longest(estimate: dict[str, Any]) -> str:
    """Return, in words, the length of the longest row as far as the plan knows it."""
    tokens, longest = f"{estimate['length']:,} tokens", estimate["longest_row"]
    if longest is not None and longest > estimate["length"] and estimate["lengths_known"] != "text":
        return f"rows of up to {tokens} are trained on, and the longest has {longest:,}"
    match estimate["lengths_known"]:
        case "text":
            return f"the longest row has at most {tokens}, by {estimate['lengths']}"
        case "all":
            return f"the longest row has {tokens}"
        case "sample":
            return f"the longest row has {tokens}, by {estimate['lengths']}"
    return f"rows are taken to be {tokens} long ({estimate['lengths']})"


def _say_memory(out: Output, estimate: dict[str, Any], device: dict[str, Any], count: int) -> None:
    """Print every phase's memory, and the tensors at the peak.

    The figures are of one of `count` processes, each on a device of its own or all on one CPU.
    """
    cpu, capacity = device["kind"] == "cpu", device["memory_bytes"]
    rows = [
        [phase["name"], bytes_text(phase["allocated_bytes"]), bytes_text(phase["reserved_bytes"])]
        for phase in estimate["phases"]
    ]
    many = f"{count} {'processes' if cpu else 'GPUs'}"
    title = "Peak memory by phase" if count == 1 else f"Peak memory by phase, of one of {many}"
    out.table(title, ["phase", "in tensors", f"held from the {'system' if cpu else 'driver'}"], rows)
    peak = estimate["peak"]
    terms = [(term["term"], term["bytes"]) for term in peak["terms"]]
    total, whole = sum(size for _, size in terms), _bar_scale(terms, capacity)
    bar = (
        f"; the bar is {f'one of the {many}' if count > 1 and not cpu else 'the whole device'}"
        if whole == capacity
        else ""
    )
    out.say(f"The fullest moment of a step: {bytes_text(total)} in tensors{bar}", "bold")
    out.stacked(terms, whole, bytes_text)
    out.paragraph(
        f"It is reached in {_module(peak)}, where {peak['operator'].partition('.')[0]} makes "
        f"{bytes_text(peak['made_bytes'])}: {' × '.join(f'{size:,}' for size in peak['shape'])} of {peak['dtype']}"
    )


def _module(peak: dict[str, Any]) -> str:
    return str(peak["module"]) or "the loss or the update, outside the model's modules"


def _say_terms(out: Output, planned: dict[str, Any], capacity: int | None) -> None:
    """Print the memory terms of the closed form."""
    rows = [[term["term"], bytes_text(term["bytes"]), term["moment"]] for term in planned["memory"] if term["bytes"]]
    out.table("Memory, the terms of the closed form", ["term", "size", "held"], rows)
    out.say(f"The fullest moment of a step: {bytes_text(planned['memory_total_bytes'])} in tensors", "bold")


def _bar_scale(parts: Sequence[tuple[str, float]], capacity: int | None) -> float:
    """Return the size of a bar's full width: the device's memory, unless the parts would be too small to see on it."""
    total = sum(size for _, size in parts)
    return capacity if capacity is not None and total > capacity / 20 else total


def _say_verdict(out: Output, estimate: dict[str, Any], device: dict[str, Any]) -> None:
    """Print the memory interval beside the device's capacity, and the verdict."""
    capacity = estimate["capacity_bytes"]
    capacity_text = bytes_text(capacity) if capacity else "an unknown amount"
    capacity_text += " for each process" if capacity != device["memory_bytes"] else ""
    verdict = estimate["verdict"]
    out.paragraph(
        f"{verdict.capitalize()}: {bytes_text(estimate['low_bytes'])} to {bytes_text(estimate['high_bytes'])} needed "
        f"({estimate['spread']}, and {estimate['beside']}) of {capacity_text}",
        VERDICT_STYLE.get(verdict, "bold yellow"),
        indent=2,
    )
    if estimate.get("disagreement"):
        out.paragraph(f"note: {estimate['disagreement']}", indent=2)


def _say_time(out: Output, time: dict[str, Any] | None) -> None:
    if time is None:
        return
    step = _between(time["seconds_per_step_low"], time["seconds_per_step"], time["seconds_per_step_high"])
    total_text = ""
    if time["total_seconds"] is not None:
        total = _between(time["total_seconds_low"], time["total_seconds"], time["total_seconds_high"])
        total_text = f"; the whole run: {total}"
    out.paragraph(
        f"Time per step: {step}{total_text}; {count_text(time['tokens_per_second'])} tokens/s, {time['mfu']:.0%} MFU, "
        f"with rows of {time['length']:,} tokens; limited by {time['limit']}",
        indent=2,
    )


def _between(low: float, middle: float, high: float) -> str:
    return f"{duration_text(middle)} ({duration_text(low)} to {duration_text(high)})"


def _say_answering(out: Output, answers: dict[str, Any] | None) -> None:
    """Print the memory of scoring, and a batch size that fits if the config's may not."""
    if answers is None:
        return
    fewer = answers["fewer"]
    parts = f"weights {bytes_text(answers['weights'])}, KV cache {bytes_text(answers['cache'])}"
    advice = {None: "", 0: "; not even one prompt at a time fits"}.get(fewer, f"; evaluate.batch_size: {fewer} fits")
    training_bytes = answers["in_training_bytes"]
    training_text = (
        f"; up to {bytes_text(training_bytes)} beside what training keeps" if training_bytes is not None else ""
    )
    out.paragraph(
        f"Scoring: up to {bytes_text(answers['bytes'])} for {plural(answers['rows'], 'prompt')} at a time, of up to "
        f"{answers['prompt']:,} tokens, with answers of {answers['answer']:,} ({parts}){training_text}{advice}",
        None if fewer is None else "bold yellow",
        indent=2,
    )


def _say_scoring(out: Output, scoring: dict[str, Any] | None, time: dict[str, Any] | None) -> None:
    """Print the time of scoring: from answers as long as the gold ones to answers cut at the token limit."""
    if scoring is None:
        return
    prompts = " and ".join(
        plural(eval_set["prompts"], "prompt") + f" of {eval_set['name']}" for eval_set in scoring["sets"]
    )
    modes = ", free and constrained" if scoring["ways"] == 2 else ""
    draws = f", {scoring['samples']} draws of each" if scoring["samples"] > 1 else ""
    out.paragraph(
        f"Time of scoring: {_range(scoring, 'seconds')} in one process, {duration_text(scoring['loading_seconds'])} of "
        f"them loading, for {plural(scoring['answers'], 'answer')} ({prompts}: {', '.join(scoring['variants'])}{modes}"
        f"{draws}) of {scoring['answer_tokens_low']:.0f} to {scoring['answer_tokens_high']:,.0f} tokens",
        indent=2,
    )
    if interim := scoring["in_training"]:
        training_text = (
            f" beside {duration_text(time['total_seconds'])} of training" if time and time["total_seconds"] else ""
        )
        out.paragraph(
            f"While training: {_range(interim, 'seconds')} at each of {plural(interim['checkpoints'], 'checkpoint')}, "
            f"{_range(interim, 'total_seconds')} in all{training_text}",
            indent=2,
        )


def _range(found: dict[str, Any], name: str) -> str:
    low, high = duration_text(found[f"{name}_low"]), duration_text(found[f"{name}_high"])
    return low if low == high else f"{low} to {high}"


def _say_host(out: Output, host: dict[str, Any] | None) -> None:
    """Print the host's RAM and PCIe traffic, if the plan counts any."""
    if host is None or not host["memory"]:
        return
    parts = ", ".join(f"{term['term']} {bytes_text(term['bytes'])}" for term in host["memory"])
    ram = f" of {bytes_text(host['ram_bytes'])}" if host["ram_bytes"] else ""
    out.paragraph(
        f"Host: {bytes_text(host['memory_total_bytes'])}{ram} of RAM beside the process ({parts}); "
        f"{bytes_text(host['pcie_total_bytes_per_step'])} over PCIe per step",
        indent=2,
    )


def _say_disk(out: Output, planned: dict[str, Any]) -> None:
    if planned["disk_total_bytes"] is None:
        return
    parts = ", ".join(f"{term['term']} {bytes_text(term['bytes'])}" for term in planned["disk"])
    free = planned["disk_free_bytes"]
    source_text = {"detected": "free", "config": "on the machine that trains (hardware.disk)"}.get(
        planned["disk_source"]
    )
    free_text = (
        f"{bytes_text(free)} {source_text}"
        if free is not None
        else "how much is free on the machine that trains is not known"
    )
    out.paragraph(f"Disk: {bytes_text(planned['disk_total_bytes'])} ({parts}); {free_text}", indent=2)


def _write_plot(out: Output, planned: dict[str, Any], path: Path) -> None:
    from surefit.plan.plot import plan_svg

    if not (planned["estimate"] and planned["estimate"]["phases"]):
        raise ConfigError("there are no phases to plot: nothing was simulated", code="E1032", help="leave --quick out")
    write_atomic(path, plan_svg(planned))
    out.note(f"wrote {path}")


def say_plan_deviations(out: Output, run: CheckedRun, directory: Path) -> int:
    """Print the plan compared with a finished run."""
    from surefit.plan.verify import measure_plan_deviations
    from surefit.stages.planning import build_run_plan

    planned = build_run_plan(run)
    deviations = measure_plan_deviations(planned, run.resolved, RunDir(directory))
    rows = [[row.what, _size(row.planned, row), _size(row.actual, row), _error(row)] for row in deviations.rows]
    out.table(f"Planned against actual: {directory}", ["quantity", "planned", "actual", "plan is off by"], rows)
    if deviations.widest is not None:
        out.paragraph(f"They part most in: {deviations.widest.what} ({_error(deviations.widest)})")
    for note in deviations.notes:
        out.paragraph(f"  - {note}", indent=4)
    out.result({"rows": [row.as_dict() for row in deviations.rows], "notes": list(deviations.notes)})
    return EXIT_OK


def _size(value: float | None, row: PlannedVersusActual) -> str:
    if value is None:
        return "–"
    match row.unit:
        case "bytes":
            return bytes_text(value)
        case "seconds":
            return f"{value:.3f} s" if value < 10 else duration_text(value)
        case "steps":
            return f"{value:,.0f}"


def _error(row: PlannedVersusActual) -> str:
    return "–" if row.error is None else f"{row.error:+.1%}"
