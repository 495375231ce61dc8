"""The catalogue of GPUs: its figures agree with each other, its names are found, the page shows it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from surefit.core.errors import ConfigError
from surefit.core.units import GIB
from surefit.facts.gpus import GPUS, find_gpu
from surefit.facts.hardware import hardware_facts

WITHOUT_BF16 = {"t4", "rtx6000-turing", "rtx2080ti", "v100-16", "v100-32"}


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla V100-PCIE-32GB", "v100-32"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("a6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI210", "mi210"),
    ],
)
def test_names_that_drivers_and_people_use(written: str, key: str) -> None:
    assert find_gpu(written) is GPUS[key]


def test_every_key_and_name_finds_its_own_card() -> None:
    for key, gpu in GPUS.items():
        assert find_gpu(key) is gpu
        assert find_gpu(key.upper()) is gpu
        assert find_gpu(gpu.name) is gpu


def test_there_are_many_and_every_figure_has_a_source() -> None:
    assert len(GPUS) >= 25
    for gpu in GPUS.values():
        assert gpu.source
        assert gpu.rates_source
        assert 10 * GIB < gpu.memory_bytes <= 288 * GIB


def test_the_rates_agree_with_each_other() -> None:
    """Tensor cores double their rate as the type halves, and a data sheet's sparse figure would break the ratio."""
    for key, gpu in GPUS.items():
        if gpu.fp8 is not None and gpu.bf16 is not None:
            assert gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=0.02), key
        if gpu.tf32 is not None and gpu.bf16 is not None:
            assert gpu.tf32 == pytest.approx(gpu.bf16 / 2, rel=0.03), key
        if gpu.bf16 is not None:
            assert gpu.bf16 == gpu.fp16, key
        if gpu.fp32 is not None and gpu.fp16 is not None:
            assert 1.9 < gpu.fp16 / gpu.fp32 < 31, key
        assert gpu.bandwidth is None or 300e9 <= gpu.bandwidth <= 8000e9, key


def test_who_multiplies_bfloat16() -> None:
    for key, gpu in GPUS.items():
        assert gpu.multiplies_bf16 == (key not in WITHOUT_BF16)
        assert (gpu.bf16 is None) == (key in WITHOUT_BF16 | {"rtx-pro-6000"})
        assert hardware_facts(key).bf16 == gpu.multiplies_bf16


@pytest.mark.parametrize(
    ("key", "features"),
    [
        ("t4", ()),
        ("a100-80", ("bf16", "flash-attention-2")),
        ("l40s", ("bf16", "fp8", "flash-attention-2")),
        ("h100", ("bf16", "fp8", "flash-attention-2", "flash-attention-3")),
        ("b200", ("bf16", "fp8", "flash-attention-2")),
        ("mi300x", ("bf16", "fp8", "flash-attention-2")),
    ],
)
def test_features(key: str, features: tuple[str, ...]) -> None:
    assert GPUS[key].features == features


def test_a_card_without_bfloat16_computes_it_in_float32() -> None:
    assert GPUS["t4"].flops("bfloat16") == GPUS["t4"].flops("float32") == 8.1e12
    assert GPUS["h100"].flops("bfloat16") == 989e12


def test_an_amd_card_can_be_planned_for(tmp_path: Path) -> None:
    facts = hardware_facts("mi300x", tmp_path)
    assert (facts.kind, facts.compute_capability, facts.bf16) == ("cuda", None, True)


@pytest.mark.parametrize("memory", [0, -1])
def test_a_gpu_without_memory_is_refused(memory: int) -> None:
    with pytest.raises(ConfigError, match="nothing can be trained"):
        dataclasses.replace(GPUS["t4"], memory_bytes=memory)


@pytest.mark.parametrize(("written", "meant"), [("h10o", "h100"), ("rtx4900", "rtx4090"), ("mi300", "mi300x")])
def test_an_unknown_name_suggests_a_known_one(written: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        hardware_facts(written, tmp_path)
