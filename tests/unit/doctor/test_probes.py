"""The doctor in good and in broken environments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefit.doctor import probes
from surefit.doctor.probes import Probe, probe_all, torch_probe
from surefit.facts.hardware import DetectedGpu

TOKEN = "hf_" + "s3cr3t" * 5


def named(found: Iterator[Probe] | list[Probe], name: str) -> Probe:
    return next(probe for probe in found if probe.name == name)


def interpreter(tmp_path: Path, script: str) -> str:
    """A program that stands for a Python in another state."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_every_probe_has_a_fact_and_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    found = probe_all()
    names = {probe.name for probe in found}
    assert {"python", "surefit", "gpu", "torch works", "cpu", "memory", "working directory", "model cache"} <= names
    assert {"hub token", "offline mode", "clock", "text encoding"} <= names
    for probe in found:
        assert probe.fact
        assert (probe.fix is not None) == (probe.verdict != "ok")
    assert TOKEN not in json.dumps([probe.as_dict() for probe in found])
    assert named(found, "hub token").fact == "set"
    assert named(found, "torch works").verdict == "ok"


def test_a_probe_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Probe]:
        yield Probe("first", "fine")
        raise RuntimeError(f"no {TOKEN}")

    monkeypatch.setattr(probes, "GROUPS", (broken, probes.clock))
    found = probe_all()
    assert named(found, "broken").verdict == "warn"
    assert TOKEN not in named(found, "broken").fact
    assert named(found, "clock").verdict == "ok"


@pytest.mark.parametrize(
    ("script", "gpu", "verdict", "says"),
    [
        ("echo 2.13.0+cpu none False", False, "ok", "built for the CPU"),
        ("echo 2.13.0+cpu none False", True, "warn", "cannot use the GPU"),
        ("echo 2.13.0+cu130 13.0 True", True, "ok", "built for CUDA 13.0, sees the GPU"),
        ("echo 2.13.0+cu130 13.0 False", True, "warn", "cannot use the GPU"),
        ("echo 'ImportError: libcudart.so.13: no such file' >&2; exit 1", True, "fail", "libcudart"),
        ("exit 139", False, "fail", "exit code 139"),
        ("printf '\\377' >&2; exit 1", False, "fail", "import fails"),
    ],
)
def test_torch_in_every_state(tmp_path: Path, script: str, gpu: bool, verdict: str, says: str) -> None:
    probe = torch_probe(gpu, interpreter(tmp_path, script))
    assert probe.verdict == verdict
    assert says in probe.fact
    assert (probe.fix is None) == (verdict == "ok")


def test_torch_that_hangs_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "IMPORT_SECONDS", 0.2)
    assert torch_probe(False, interpreter(tmp_path, "exec sleep 30")).verdict == "fail"
    monkeypatch.setattr(probes, "installed_version", lambda name: None)
    assert torch_probe(False).fact == "not installed"


def test_versions_against_the_tested_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"surefit": "0.1.0", "torch": "2.13.0+cpu", "transformers": "4.57.0"}
    wanted = ["torch<2.14,>=2.11", "transformers>=5.17", "peft>=0.19", 'wandb>=0.28; extra == "wandb"']
    monkeypatch.setattr(probes, "installed_version", installed.get)
    monkeypatch.setattr(probes.metadata, "requires", lambda name: wanted)
    found = {probe.name: probe for probe in probes.packages()}
    assert set(found) == {"surefit", "torch", "transformers", "peft"}
    assert found["torch"].verdict == "ok"
    assert (found["transformers"].verdict, found["transformers"].fix) == ("warn", "pip install 'transformers>=5.17'")
    assert (found["peft"].verdict, found["peft"].fact) == ("fail", "not installed (needs >=0.19)")


def test_a_python_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_metadata", lambda field: ">=3.99")
    assert named(probes.python(), "python").verdict == "fail"


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [DetectedGpu("NVIDIA H200", 143771 * 2**20, (9, 0), "580.65.06")]
    monkeypatch.setattr(probes, "detect_gpus", lambda: cards)
    monkeypatch.setattr(probes, "torch_probe", lambda present: Probe("torch works", str(present)))
    card, works = list(probes.gpu())
    assert card.fact == "NVIDIA H200, 140.40 GiB, compute capability 9.0, driver 580.65.06"
    assert works.fact == "True"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, hidden, works = list(probes.gpu())
    assert (hidden.fact, works.fact) == ("CUDA_VISIBLE_DEVICES leaves 0 of 1 to use", "False")


def test_a_full_disk_and_one_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "disk_free_bytes", lambda place: 10**9)
    assert probes._disk("d", tmp_path / "later").verdict == "warn"
    monkeypatch.setattr(probes, "disk_free_bytes", lambda place: 0)
    assert probes._disk("d", tmp_path).verdict == "fail"
    if Path("/proc").is_dir():
        assert "not writable" in probes._disk("d", Path("/proc/surefit")).fact


def test_little_memory_and_no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "ram_bytes", lambda: 2 * 2**30)
    assert named(probes.machine(), "memory").verdict == "warn"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert named(probes.hub(), "hub token").fact.startswith("not set")
    assert named(probes.hub(), "offline mode").verdict == "warn"


def test_a_clock_in_the_past_and_another_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    future = tmp_path / "__init__.py"
    future.touch()
    os.utime(future, (4e9, 4e9))
    monkeypatch.setattr(probes.surefit, "__file__", str(future))
    assert named(probes.clock(), "clock").verdict == "warn"
    monkeypatch.setattr(probes.locale, "getpreferredencoding", lambda do_setlocale: "ISO-8859-1")
    assert named(probes.text_encoding(), "text encoding").verdict == "warn"


def test_it_runs_in_an_interpreter_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: undefined symbol')\n")
    code = (
        "from surefit.doctor.probes import probe_all; print([p.fact for p in probe_all() if p.name == 'torch works'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "undefined symbol" in done.stdout
