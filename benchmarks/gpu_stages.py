"""The stages of benchmarks/gpu_day.py, each in a process of its own: `gpu_stages.py NAME --out DIR --kit DIR`.

What is measured goes to DIR/items.jsonl at once, so a stage that was ended goes on where it was. Exit code 3 and a last
line that says why: the stage cannot run here. Models are random and drawn on the device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu_lines import append, lines
from gpu_site import installed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SKIPPED = 3
FILE_SECONDS = {"tests/distributed/test_one_card.py": 240.0}
OTHER_FILE_SECONDS = 90.0
POLICY = "tests/cuda/test_policy.py"
"""Run by the stage `attention`."""
WAYS: dict[str, list[str]] = {
    "eager": ["speed.kernels=false"], "kernels": ["speed.kernels=true"], "compile": ["speed.compile=true"],
}  # fmt: skip
PACKAGES = ("torch", "transformers", "peft", "accelerate", "triton", "bitsandbytes", "trl", "liger-kernel", "datasets")


class Skip(Exception):
    """Why a stage cannot run here."""


class Here:
    """This machine and this day."""

    def __init__(self, stage: str, out: Path, kit: Path, miniature: bool) -> None:
        import torch

        self.stage, self.out, self.kit, self.miniature = stage, out, kit, miniature
        self.gpu = torch.cuda.is_available() and not miniature
        if not (self.gpu or miniature):
            raise Skip("no GPU")
        self.failed: list[str] = []

    def has(self, item: str) -> bool:
        """Whether it has been measured."""
        known = lines(self.out / "items.jsonl")
        return any(line["stage"] == self.stage and line["item"] == item and "error" not in line for line in known)

    def note(self, item: str, values: dict[str, Any]) -> None:
        if "error" in values:
            self.failed.append(f"{item}: {values['error']}")
        append(self.out / "items.jsonl", {"stage": self.stage, "item": item, **values})

    def once(self, item: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure what has not been measured; an error is an item too, and the next is tried."""
        if self.has(item):
            return
        try:
            self.note(item, measure())
        except Exception as error:
            traceback.print_exc()
            self.note(item, {"error": f"{type(error).__name__}: {error}"[:300]})

    def need(self, *packages: str) -> None:
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if missing:
            raise Skip(f"{', '.join(missing)} not installed")

    def need_gpu(self) -> None:
        if not self.gpu:
            raise Skip("no GPU")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--miniature", action="store_true")
    asked = parser.parse_args()
    try:
        here = Here(asked.stage, asked.out, asked.kit, asked.miniature)
        STAGES[asked.stage](here)
    except Skip as reason:
        print(reason)
        return SKIPPED
    print("\n".join(here.failed), file=sys.stderr)
    return 1 if here.failed else 0


def run_group(command: list[str], seconds: float) -> tuple[int | None, str]:
    """(exit code or None after so many seconds, what was said); everything that it started in its session is ended."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return code, said.read().decode(errors="replace")


# What is there


def environment(here: Here) -> None:
    import torch

    def record() -> dict[str, Any]:
        found = {name: installed(name) for name in PACKAGES}
        device = torch.cuda.get_device_name() if here.gpu else "CPU"
        cudnn = torch.backends.cudnn.version() if here.gpu else None
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        return {
            "device": device, "python": sys.version.split()[0], "versions": found, "cuda": torch.version.cuda,
            "cudnn": cudnn, "commit": commit.stdout.strip() or None, "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }  # fmt: skip

    def doctor() -> dict[str, Any]:
        _, said = run_group([sys.executable, "-m", "surefit", "doctor", "--json"], 90)
        last = (said.strip().splitlines() or [""])[-1]
        if not last.startswith("{"):
            return {"error": last[:300] or "doctor said nothing"}
        found = json.loads(last)
        return {"failed": found["failed"], "probes": {probe["name"]: probe["fact"] for probe in found["probes"]}}

    here.once("record", record)
    here.once("doctor", doctor)


# Tests


def tests(here: Here) -> None:
    here.need("pytest", "hypothesis")
    if not here.gpu:  # they can be imported at least, with what the kit brings
        here.once("collection", lambda: run_pytest([*gpu_files(), "--collect-only"], 2 * OTHER_FILE_SECONDS))
        if here.failed:
            return
    here.need_gpu()
    for file in gpu_files():
        if file != POLICY:
            here.once(file, lambda file=file: run_pytest([file], FILE_SECONDS.get(file, OTHER_FILE_SECONDS)))


def gpu_files() -> list[str]:
    """Those with a test marked gpu, the quick ones first."""
    found = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    names = [path.relative_to(ROOT).as_posix() for path in found if path.parent.name != "benchmarks"]
    return sorted(names, key=lambda name: FILE_SECONDS.get(name, 0.0))


def run_pytest(arguments: list[str], seconds: float) -> dict[str, Any]:
    """The tests marked gpu among what is named."""
    command = [sys.executable, "-m", "pytest", *arguments, "-m", "gpu", "-q", "-p", "no:cacheprovider", "--color=no"]
    start = time.monotonic()
    code, said = run_group(command, seconds)
    last = said.strip().splitlines()
    result: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1), "summary": last[-1][:200] if last else ""}
    if code is None:
        result["error"] = f"not done after {seconds:.0f} s"
    elif code != 0:
        result |= {"error": result["summary"] or f"exit {code}", "tail": last[-40:]}
    return result


# Attention


def attention(here: Here) -> None:
    import gpu_attention

    if here.gpu:
        here.once("policy", lambda: run_pytest([POLICY], 90))
        for length in gpu_attention.NAN_LENGTHS:
            here.once(f"grad_q at {length}", lambda length=length: gpu_attention.non_finite(length))
        for cudnn in (True, False):
            here.once(f"new shape, {_cudnn(cudnn)}", lambda cudnn=cudnn: gpu_attention.new_shapes(cudnn))
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        job = made_job(Path(folder), workload_of("cpu-mini" if here.miniature else "lora-1b", 1, 1))
        for cudnn in (True, False) if here.gpu else (False,):
            here.once(f"decode, {_cudnn(cudnn)}", lambda cudnn=cudnn: gpu_attention.decode(job, cudnn))


def _cudnn(on: bool) -> str:
    return "cuDNN on" if on else "cuDNN off"


# Calibration


def calibration(here: Here) -> None:
    import gpu_attention

    from surefit.plan.calibrate import calibrate_device

    def rates() -> dict[str, Any]:
        profile = calibrate_device(lambda text: print(text, flush=True), 0.01 if here.miniature else 0.3)
        profile.save(here.out / "profile.json")
        return asdict(profile)

    here.once("rates", rates)
    for width, length, kernel in gpu_attention.rates_wanted(here.gpu):
        item = f"attention {kernel}, head {width}, {length} tokens"
        here.once(item, lambda w=width, n=length, k=kernel: gpu_attention.rate(w, n, k, here.gpu))


# Throughput


def workload_of(name: str, warmup: int, steps: int) -> Any:
    """One of throughput.py's, with so many steps."""
    from throughput import WORKLOADS

    return replace(WORKLOADS[name], warmup=warmup, steps=steps)


def made_job(folder: Path, workload: Any, **more: Any) -> dict[str, Any]:
    """What throughput_stack.py reads, with the token ids in the folder."""
    from throughput import write_tokens

    write_tokens(folder, workload, "full")
    return {"workload": asdict(workload), "folder": str(folder), "set": [], "seed": 0, "in_memory": True, **more}


def throughput_items(here: Here, workload: Any, ways: dict[str, tuple[str, list[str]]], profiled: bool) -> None:
    """An item for each way: (the stack of throughput_stack.py, settings of SureFit's)."""
    from throughput import run_child

    def measure(way: str, stack: str, settings: list[str]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
            table = str(here.out / f"profile-{here.stage}-{way}.txt") if profiled else None
            job = made_job(Path(folder), workload, set=settings, profile=table)
            found = run_child(stack, job, loud=True)
        return found if "error" in found else figures(found, workload)

    for way, (stack, settings) in ways.items():
        here.once(way, lambda w=way, s=stack, x=settings: measure(w, s, x))


def figures(found: dict[str, Any], workload: Any) -> dict[str, Any]:
    """What is worth a line."""
    return {
        "tokens_per_second": sum(found["tokens"]) / sum(found["seconds"]), "slowest_step": max(found["seconds"]),
        "seconds": [round(each, 4) for each in found["seconds"]], "tokens_per_step": found["tokens"][0],
        "peak_bytes": found["peak_bytes"], "loss": found["loss"], "grad_norm": found["grad_norm"],
        "last_loss": found["losses"][-1], "flops_per_token": found.get("flops_per_token"), "how": found["how"],
        "goal": workload.goal,
    }  # fmt: skip


def lora(here: Here, name: str) -> None:
    """5 + 10 steps each way, and what the device can do at most."""
    workload = workload_of("cpu-mini", 1, 2) if here.miniature else workload_of(name, 5, 10)
    if workload.quantization == "nf4":
        here.need("bitsandbytes")
    if here.stage == "lora-1b":
        ceiling(here, workload)
    ways = {way: ("surefit", settings) for way, settings in WAYS.items()}
    if here.miniature or workload.quantization == "nf4":
        ways.pop("compile")
    throughput_items(here, workload, ways, True)


def ceiling(here: Here, workload: Any) -> None:
    from throughput import run_child

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
            return run_child("ceiling", made_job(Path(folder), workload))

    here.once("ceiling", measure)


def qlora(here: Here) -> None:
    here.need_gpu()
    lora(here, "qlora-7b")


def trl(here: Here) -> None:
    here.need("trl", "datasets", "pyarrow", "pandas")
    names = ("cpu-mini",) if here.miniature else ("lora-1b", "lora-8b")
    for name in names:
        workload = workload_of(name, 1, 2) if here.miniature else workload_of(name, 5, 6)
        throughput_items(here, workload, {f"{name}, tuned": ("trl-tuned", [])}, False)


def plan(here: Here) -> None:
    """plan_accuracy.py keeps its own lines; a case that failed is one of them, and no failure of the day."""
    predictions = here.kit / "predictions.json"
    command = [sys.executable, str(HERE / "plan_accuracy.py"), "--twelve", "--limit", "90", "--json"]
    command += ["--results", str(here.out / "plan.jsonl")]
    if not predictions.is_file():
        raise Skip("the kit has no predictions.json")
    done = subprocess.run([*command, "--predictions", str(predictions)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == SKIPPED:
        raise Skip(done.stdout.strip())
    if done.returncode != 0:
        here.failed.append(f"plan_accuracy.py: exit {done.returncode}")
    else:
        here.note("summary", json.loads(done.stdout.splitlines()[-1]))


def long(here: Here) -> None:
    workload = workload_of("cpu-mini", 0, 1) if here.miniature else workload_of("long-4b", 0, 1)
    if here.miniature:
        workload = replace(workload, length=1024, batch=1, micro=1)
    ways = {"one step": ("surefit", ["train.gradient_checkpointing=selective"])}
    throughput_items(here, workload, ways, False)


def shared_prompts(here: Here) -> None:
    """Both layouts of a pair; on a GPU `speed.shared_prompts: auto` waits for these numbers."""
    import shared_prompts as layouts

    asked = argparse.Namespace(
        model="surefit/nano" if here.miniature else "random-1b", pairs=1 if here.miniature else 4,
        device="cpu" if here.miniature else "cuda", dtype="float32" if here.miniature else "bfloat16", repeat=3,
    )  # fmt: skip
    lengths = [(32, 8)] if here.miniature else [(p, a) for p in (64, 256, 1_000, 4_000) for a in (50, 200, 800)]
    for prompt, answer in lengths:
        here.once(f"prompt {prompt}, answers {answer}", partial(layouts.compare, asked, prompt, answer))


def dpo(here: Here) -> None:
    """SureFit and, where it is installed, TRL, on the same pairs and factors."""
    names = ("mini",) if here.miniature else ("dpo-1b", "dpo-8b")
    stacks = ["surefit"] + ["trl-tuned"] * (importlib.util.find_spec("trl") is not None)
    for name in names:
        for stack in stacks:
            here.once(f"{name}, {stack}", partial(dpo_item, name, stack))


def qlora_dpo(here: Here) -> None:
    if here.gpu:
        here.need("bitsandbytes")
    name = "mini" if here.miniature else "qlora-dpo-7b"
    here.once("surefit", partial(dpo_item, name, "surefit"))


def dpo_item(name: str, stack: str) -> dict[str, Any]:
    """One stack on one workload; an error where SureFit's first batch is not at ln 2."""
    import preference_speed

    workload = preference_speed.GPU_WORKLOADS[name]
    found = preference_speed.run_stack(stack, workload)
    if "error" in found:
        return found
    first = found.get("first_batch")
    if first is not None and not first["passed"]:
        return {"error": f"the first batch is at {first['loss']:.6f}, not at {first['expected']:.6f}"}
    total = workload.warmup + workload.steps
    speeds = preference_speed.figures(found, total)
    return speeds | {"loss": found["losses"][0], "losses": found["losses"], "first_batch": first, "how": found["how"]}


def first_run(here: Here) -> None:
    import gpu_first_run

    run_in_folder(here, gpu_first_run.measure_first_run)


def dpo_plan(here: Here) -> None:
    import gpu_first_run

    run_in_folder(here, gpu_first_run.measure_dpo_run)


def run_in_folder(here: Here, measure: Callable[[Path, bool], dict[str, Any]]) -> None:
    """Measure in a folder of the stage, and remove what the run wrote: 15 GB and the merged model."""
    if here.gpu:
        here.need("bitsandbytes")
    folder = here.out / here.stage
    shutil.rmtree(folder, ignore_errors=True)  # of a day that was killed
    folder.mkdir()
    try:
        here.once("run", lambda: measure(folder, here.miniature))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


STAGES: dict[str, Callable[[Here], None]] = {
    "environment": environment,
    "tests": tests,
    "attention": attention,
    "calibration": calibration,
    "lora-1b": lambda here: lora(here, "lora-1b"),
    "lora-8b": lambda here: lora(here, "lora-8b"),
    "qlora-7b": qlora,
    "trl": trl,
    "dpo": dpo,
    "qlora-dpo": qlora_dpo,
    "dpo-plan": dpo_plan,
    "shared": shared_prompts,
    "plan": plan,
    "first-run": first_run,
    "long": long,
}


if __name__ == "__main__":
    sys.exit(main())
