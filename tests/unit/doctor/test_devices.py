"""GPUs as nvidia-smi lists them, and a PyTorch in every state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefit.doctor import devices
from surefit.doctor.devices import attention_probes, gpu_probe, torch_probes
from surefit.doctor.probe import Probe
from surefit.facts.hardware import DetectedGpu

H200 = DetectedGpu("NVIDIA H200", 143771 * 2**20, (9, 0), "580.65.06")


def interpreter(tmp_path: Path, script: str) -> str:
    """A program that stands for a Python in another state."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def says(name: str, detail: object, ok: bool = True) -> str:
    """The line of a script that reports one attempt."""
    records = [{"try": name}, {"name": name, "ok": ok, "detail": detail}]
    return "\n".join(f"echo '{json.dumps(record)}'" for record in records)


def torch_of(cuda: str | None = None, available: bool = False) -> str:
    return says("torch", {"version": "2.13.0", "cuda": cuda, "available": available, "gpus": int(available)})


@pytest.mark.parametrize(
    ("script", "gpu", "verdict", "fact"),
    [
        (torch_of(), False, "ok", "built for the CPU"),
        (torch_of(), True, "warn", "cannot use the installed GPU"),
        (torch_of("13.0", True), True, "ok", "built for CUDA 13.0, sees 1 GPU"),
        (torch_of("13.0"), True, "warn", "cannot use the installed GPU"),
        (says("torch", "ImportError: libcudart.so.13", False), True, "fail", "libcudart"),
        ("echo 'SyntaxError: in sitecustomize' >&2; exit 1", True, "fail", "sitecustomize"),
        ("exit 139", False, "fail", "exit code 139"),
        ("kill -SEGV $$", False, "fail", "crashed by signal 11"),
        ("printf '\\377' >&2; exit 1", False, "fail", "import fails"),
    ],
)
def test_torch_in_every_state(tmp_path: Path, script: str, gpu: bool, verdict: str, fact: str) -> None:
    (probe,) = torch_probes([H200] if gpu else [], interpreter(tmp_path, script))
    assert probe.verdict == verdict
    assert fact in probe.fact
    assert (probe.fix is None) == (verdict == "ok")


def test_torch_that_hangs_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "TRY_SECONDS", 0.5)
    (probe,) = torch_probes([], interpreter(tmp_path, "exec sleep 30"))
    assert (probe.verdict, probe.fact) == ("fail", "import fails: no answer in 0.5 s")
    (probe,) = torch_probes([], str(tmp_path / "no-such-python"))
    assert probe.verdict == "fail"
    monkeypatch.setattr(devices, "installed_version", {"transformers": "5.23.0"}.get)
    (probe,) = torch_probes([])
    assert (probe.verdict, probe.fact, probe.is_command) == ("fail", "not installed", True)
    monkeypatch.setattr(devices, "installed_version", lambda name: None)
    (probe,) = torch_probes([])
    assert probe.verdict == "warn", "the core alone is no fault"
    assert ".[train]" in str(probe.fix)


def test_a_crash_is_known_by_the_attempt_that_it_ended(tmp_path: Path) -> None:
    script = "\n".join([torch_of("13.0", True), says("sdpa", "runs"), 'echo \'{"try": "varlen"}\'', "kill -ABRT $$"])
    found = {probe.name: probe for probe in torch_probes([H200], interpreter(tmp_path, script))}
    assert found["attention sdpa"] == Probe("attention sdpa", "runs")
    assert found["attention varlen"].fact == "crashed by signal 6"
    assert (found["attention varlen"].verdict, found["attention varlen"].is_command) == ("warn", False)


def test_without_any_attention_or_gloo_nothing_trains(tmp_path: Path) -> None:
    script = torch_of() + "\n" + says("sdpa", "RuntimeError: x", False) + "\n" + says("gloo", "OSError: y", False)
    found = list(torch_probes([], interpreter(tmp_path, script)))
    assert [probe.verdict for probe in found] == ["ok", "fail", "fail"]
    assert all(probe.is_command for probe in found[1:])


@pytest.mark.parametrize(
    ("driver", "capability", "build"),
    [
        ("580.65.06", (9, 0), "'torch>=2.11,<2.14'"),
        ("535.183.01", (8, 0), "'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/cu126"),
        ("575.57.08", (12, 0), "'torch==2.11.*' --index-url https://download.pytorch.org/whl/cu128"),
        ("550.90.07", (10, 0), None),
        ("470.256.02", (7, 5), None),
        ("[N/A]", (8, 0), None),
    ],
)
def test_the_torch_that_a_driver_can_run(
    tmp_path: Path, driver: str, capability: tuple[int, int], build: str | None
) -> None:
    card = DetectedGpu("a GPU", None, capability, driver)
    (probe,) = torch_probes([card], interpreter(tmp_path, torch_of("13.0")))
    assert f"(driver {driver})" in probe.fact
    assert probe.is_command == (build is not None)
    expected = f"pip install --force-reinstall {build}" if build else "update the NVIDIA driver to 580 or newer"
    assert expected in str(probe.fix)


def test_what_an_architecture_supports() -> None:
    assert gpu_probe(H200, 140 * 2**30) == Probe(
        "gpu", "NVIDIA H200, 140.40 GiB (140.00 GiB free), compute capability 9.0 (bf16, fp8, flash-attention), "
        "driver 580.65.06",
    )  # fmt: skip
    assert "(no bf16: float16 only)" in gpu_probe(DetectedGpu("T4", None, (7, 5), "535.1"), None).fact
    assert "(bf16, flash-attention)" in gpu_probe(DetectedGpu("A100", None, (8, 0), "535.1"), None).fact
    assert gpu_probe(H200, 2**30).verdict == "warn"


def test_which_attention_runs_is_said_once_for_each_generation() -> None:
    turing = DetectedGpu("T4", None, (7, 5), "580.1")
    unknown = DetectedGpu("a GPU", None, (0, 0), "580.1")
    old, new = attention_probes([H200, turing, H200, unknown])
    assert (old.name, old.verdict) == (new.name, new.verdict) == ("attention policy", "ok")
    assert old.fact.startswith("compute capability 7.5: bfloat16: math, which holds all logits; float16, float32: effi")
    assert "cudnn is off (github.com/pytorch/pytorch/issues/196678)" in new.fact
    assert list(attention_probes([])) == []


def test_gpus_are_listed_with_what_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 143000\necho '[N/A]'\n")
    smi.chmod(0o755)
    monkeypatch.setattr(devices.shutil, "which", lambda name: str(smi))
    assert devices.free_memory() == [143000 * 2**20, None]
    monkeypatch.setattr(devices, "detect_gpus", lambda: [H200, H200])
    monkeypatch.setattr(devices, "torch_probes", lambda present: iter([Probe("torch works", str(bool(present)))]))
    first, second, policy, works = devices.gpu_probes()
    assert policy.name == "attention policy"
    assert "139.65 GiB free" in first.fact
    assert "free" not in second.fact
    assert works.fact == "True"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    *_, hidden, works = devices.gpu_probes()  # no policy: no GPU that is used
    assert (hidden.fact, works.fact) == ("CUDA_VISIBLE_DEVICES allows 0 of 2", "False")
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert devices.free_memory() == []
