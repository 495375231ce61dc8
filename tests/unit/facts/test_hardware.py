"""GPUs of the catalogue and of a driver that answers as nvidia-smi does, with no GPU anywhere near."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefit.core.errors import ConfigError
from surefit.core.units import GIB, MIB
from surefit.facts import hardware
from surefit.facts.hardware import detect_gpus, find_gpu, hardware_facts

ANSWER = "NVIDIA H200, 143771, 580.65.06, 9.0\nNVIDIA H200, 143771, 580.65.06, 9.0\n"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH: put an nvidia-smi there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    return folder


def install(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def cuda_build(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(hardware, "installed_version", lambda package: version)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "H100 80 GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80 GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80 GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40 GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("rtx_4090", "RTX 4090"),
        ("Quadro RTX 6000", "Quadro RTX 6000 (Turing)"),
        ("NVIDIA A10G", "A10G"),
        ("L40S", "L40S"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_names_as_people_and_drivers_write_them(written: str, name: str) -> None:
    found = find_gpu(written)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("written", ["", "h1000", "NVIDIA RTX 6000", "A100-SXM4-96GB", "T400"])
def test_other_names_are_not_guessed(written: str) -> None:
    assert find_gpu(written) is None


def test_an_unknown_name_suggests_a_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100'") as caught:
        hardware_facts("h10o")
    assert caught.value.field == "hardware.gpu"
    assert "h100" in str(caught.value.help)


def test_a_gpu_of_the_catalogue(driver: Path) -> None:
    facts = hardware_facts("t4")
    assert (facts.kind, facts.source, facts.compute_capability, facts.bf16) == ("cuda", "catalogue", (7, 5), False)
    assert facts.memory_bytes == round(14.75 * GIB)


def test_a_detected_gpu(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(driver, f"printf '{ANSWER}'")
    cuda_build(monkeypatch, "2.13.0+cu130")
    for name in ("auto", "h200"):
        facts = hardware_facts(name)
        assert (facts.kind, facts.source, facts.name, facts.gpu_count) == ("cuda", "detected", "NVIDIA H200", 2)
        assert (facts.memory_bytes, facts.bf16) == (143771 * MIB, True)
    assert hardware_facts("t4").source == "catalogue"
    assert hardware_facts("cpu").kind == "cpu"


@pytest.mark.parametrize(
    ("visible", "kind", "count"), [("1", "cuda", 1), ("", "cpu", 0), ("-1", "cpu", 0), ("7", "cpu", 0)]
)
def test_hidden_gpus_are_not_used(
    driver: Path, monkeypatch: pytest.MonkeyPatch, visible: str, kind: str, count: int
) -> None:
    install(driver, f"printf '{ANSWER}'")
    cuda_build(monkeypatch, "2.13.0+cu130")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    facts = hardware_facts("auto")
    assert (facts.kind, facts.gpu_count, facts.unused_gpu) == (kind, count, None)
    assert len(detect_gpus()) == 2
    assert hardware_facts("h200").source == ("detected" if count else "catalogue")


def test_a_gpu_that_a_cpu_build_of_torch_cannot_use(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(driver, f"printf '{ANSWER}'")
    cuda_build(monkeypatch, "2.13.0+cpu")
    facts = hardware_facts("auto")
    assert (facts.kind, facts.unused_gpu) == ("cpu", "NVIDIA H200")


def test_an_old_driver_that_does_not_know_compute_cap(driver: Path) -> None:
    install(driver, 'case "$1" in *compute_cap*) exit 2;; esac; echo "Tesla T4, 15109, 418.87.00"')
    (card,) = detect_gpus()
    assert (card.compute_capability, card.memory_bytes, card.driver) == ((7, 5), 15109 * MIB, "418.87.00")


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", "echo", "printf '\\377\\376'; exit 1"])
def test_a_driver_that_does_not_work_is_no_gpu(driver: Path, script: str) -> None:
    install(driver, script)
    assert detect_gpus() == []
    assert hardware_facts("auto").kind == "cpu"


def test_a_partition_without_memory_of_its_own(driver: Path) -> None:
    install(driver, "echo 'NVIDIA H200 MIG 1g.18gb, [N/A], 580.65.06, 9.0'")
    assert detect_gpus()[0].memory_bytes is None


def test_the_cpu(driver: Path, tmp_path: Path) -> None:
    facts = hardware_facts("auto", tmp_path / "not" / "there" / "yet")
    assert (facts.kind, facts.source, facts.gpu_count, facts.unused_gpu) == ("cpu", "detected", 0, None)
    assert facts.cpu_count >= 1
    assert facts.name
    assert facts.memory_bytes == facts.ram_bytes
    assert facts.disk_free_bytes > 0
