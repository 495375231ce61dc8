"""The GPUs, and what the installed PyTorch can do with them, tested in another process, which may crash or hang."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import surefit
from surefit.core import env
from surefit.core.packaging import EXTRAS, install_extra
from surefit.core.units import MIB, bytes_text
from surefit.doctor.probe import Probe
from surefit.doctor.torch_builds import OF_CUDA_13, TORCH, install_command
from surefit.facts.hardware import BF16_CAPABILITY, DetectedGpu, detect_gpus, installed_version, usable_gpus
from surefit.facts.sdpa import describe_kernels

TRY_SECONDS = 180
"""Timeout of the test: enough to import torch from a slow network disk."""
SELF_TEST = Path(surefit.__file__).parent / "model" / "self_test.py"
FLASH_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
"""FlashAttention-2 needs Ampere, FP8 multiplication Ada or Hopper: docs.nvidia.com/cuda, "Compute Capabilities"."""
_REINSTALL = f"pip install --force-reinstall '{TORCH}'"
_NO_BUILD = f"update the NVIDIA driver to {OF_CUDA_13} or newer: no build of torch {TORCH[5:]} supports this one"


def gpu_probes() -> Iterator[Probe]:
    """Yield probes of the GPUs, of the features they support, and of the installed PyTorch's use of them."""
    cards = detect_gpus()
    free = free_memory() if cards else []
    for number, card in enumerate(cards):
        yield gpu_probe(card, free[number] if number < len(free) else None)
    if not cards:
        yield Probe("gpu", "none (nvidia-smi is missing or lists nothing): training runs on the CPU")
    usable = usable_gpus(cards)
    if len(usable) < len(cards):
        yield Probe("gpu", f"CUDA_VISIBLE_DEVICES allows {len(usable)} of {len(cards)}")
    yield from attention_probes(usable)
    yield from torch_probes(usable)


def gpu_probe(card: DetectedGpu, free_bytes: int | None) -> Probe:
    """Return a probe of one GPU: its memory, the free part of it, and the formats its architecture computes
    natively."""
    capability = card.compute_capability
    limits = {"bf16": BF16_CAPABILITY, "fp8": FP8_CAPABILITY, "flash-attention": FLASH_CAPABILITY}
    supported = [name for name, lowest in limits.items() if capability >= lowest]
    memory = bytes_text(card.memory_bytes) if card.memory_bytes else "memory not reported"
    free_text = f" ({bytes_text(free_bytes)} free)" if free_bytes is not None else ""
    fact = (
        f"{card.name}, {memory}{free_text}, compute capability {capability[0]}.{capability[1]} "
        f"({', '.join(supported) if supported else 'no bf16: float16 only'}), driver {card.driver}"
    )
    if free_bytes is not None and card.memory_bytes and 2 * free_bytes < card.memory_bytes:
        return Probe("gpu", fact, "warn", "another process uses its memory: nvidia-smi names it")
    return Probe("gpu", fact)


def attention_probes(cards: Sequence[DetectedGpu]) -> Iterator[Probe]:
    """Yield the kernels of torch's attention that SureFit uses on each GPU generation present (facts/sdpa.py).

    Nothing for a GPU of which nvidia-smi does not report the generation.
    """
    for capability in sorted({card.compute_capability for card in cards} - {(0, 0)}):
        yield Probe(
            "attention policy", f"compute capability {capability[0]}.{capability[1]}: {describe_kernels(capability)}"
        )


def free_memory() -> list[int | None]:
    """Return the free bytes of each GPU; empty if nvidia-smi does not report them."""
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            [shutil.which("nvidia-smi") or "nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, errors="replace", timeout=10, check=True,
        )  # fmt: skip
        lines = [line.strip() for line in answer.stdout.splitlines()]
        return [int(line) * MIB if line.isdigit() else None for line in lines if line]
    return []


def torch_probes(cards: Sequence[DetectedGpu], interpreter: str = sys.executable) -> Iterator[Probe]:
    """Yield probes of importing torch, the GPUs it can use, and the attention kernels and collectives that run here."""
    if installed_version("torch") is None and interpreter == sys.executable:
        if any(installed_version(name) for name in EXTRAS["train"]):
            yield Probe("torch works", "not installed", "fail", f"pip install '{TORCH}'", True)
        else:  # the core alone, which is no fault
            fact = "not installed: this machine checks, audits and plans, and cannot train"
            yield Probe("torch works", fact, "warn", install_extra("train"))
        return
    results, ending = _self_test(interpreter)
    first = results.pop("torch", None)
    if first is None or not first["ok"]:
        problem = first["detail"] if first else ending
        yield Probe("torch works", f"import fails: {env.redact(problem)[:200]}", "fail", _REINSTALL, True)
        return
    yield _torch_works(first["detail"], cards)
    for name, result in results.items():
        probe_name = name if name in ("gloo", "nccl") else f"attention {name}"
        yield _attempted(probe_name, result or {"ok": False, "detail": ending})


def _self_test(interpreter: str) -> tuple[dict[str, dict[str, Any] | None], str]:
    """Return (attempt → its result, or None for the attempt that crashed the process; how the process ended)."""
    try:
        # -P: the script's folder holds SureFit's modules, which must not shadow the modules that torch imports.
        process = subprocess.run([interpreter, "-P", str(SELF_TEST)], capture_output=True, timeout=TRY_SECONDS)
        output, error = process.stdout, process.stderr.decode(errors="replace")
        ending = (error.strip().splitlines() or [""])[-1] if process.returncode == 1 else _exit_text(process.returncode)
    except subprocess.TimeoutExpired as stopped:
        output, ending = stopped.stdout or b"", f"no answer in {TRY_SECONDS} s"
    except OSError as error:
        output, ending = b"", f"{type(error).__name__}: {error.strerror}"
    results: dict[str, dict[str, Any] | None] = {}
    for line in output.decode(errors="replace").splitlines():
        with suppress(json.JSONDecodeError, AttributeError):
            record = json.loads(line)
            results[record.get("try") or record["name"]] = None if "try" in record else record
    return results, ending


def _exit_text(code: int) -> str:
    return f"crashed by signal {-code}" if code < 0 else f"exit code {code}"


def _torch_works(found: dict[str, Any], cards: Sequence[DetectedGpu]) -> Probe:
    build = f"built for CUDA {found['cuda']}" if found["cuda"] else "built for the CPU"
    fact = f"{found['version']}, {build}"
    if cards and not found["available"]:
        command = install_command(cards[0])
        fact += f": it cannot use the installed GPU (driver {cards[0].driver})"
        return Probe("torch works", fact, "warn", command or _NO_BUILD, command is not None)
    return Probe("torch works", fact + (f", sees {found['gpus']} GPU(s)" if found["available"] else ""))


def _attempted(name: str, result: dict[str, Any]) -> Probe:
    detail = env.redact(str(result["detail"]))
    if result["ok"]:
        return Probe(name, detail)
    if name == "attention flash-attn":
        return Probe(name, detail, "warn", "use sdpa, or install a flash-attn build for this torch")
    if name in ("attention sdpa", "gloo"):
        return Probe(name, detail, "fail", _REINSTALL, True)
    # One kernel of several: each was built for some GPUs only, and sdpa chooses the next.
    need = "use sdpa, which runs" if name.startswith("attention") else "train on one GPU, or reinstall torch"
    return Probe(name, detail, "warn", need)
