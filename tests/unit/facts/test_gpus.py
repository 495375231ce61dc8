"""The catalogue of GPUs: its figures agree with each other, its names are found, the page shows it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from surefit.core.errors import ConfigError
from surefit.core.units import GIB
from surefit.facts.gpus import GPUS, find_gpu, generic_gpu
from surefit.facts.hardware import hardware_facts

OLDER = {"Pascal", "Volta", "Turing"}
WITHOUT_BF16 = {key for key, gpu in GPUS.items() if gpu.architecture in OLDER}


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
        ("4060 Ti 16GB", "rtx4060ti-16"),
        ("rtx4060ti16", "rtx4060ti-16"),
        ("3090ti", "rtx3090ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"),
        ("RTX 3060 12 GB", "rtx3060-12"),
        ("NVIDIA RTX A2000 12GB", "rtx-a2000-12"),
        ("RTX A2000 6 GB", "rtx-a2000-6"),
        ("a2000-12", "rtx-a2000-12"),
        ("A2000-6", "rtx-a2000-6"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("AMD Instinct MI250", "mi250"),
        ("MI250X", "mi250x"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("5080", "rtx5080"),
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
    assert len(GPUS) >= 60
    for gpu in GPUS.values():
        assert gpu.source
        assert gpu.rates_source
        assert 5 * GIB < gpu.memory_bytes <= 288 * GIB


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
        assert gpu.bandwidth is None or 224e9 <= gpu.bandwidth <= 8000e9, key


def test_who_multiplies_bfloat16() -> None:
    for key, gpu in GPUS.items():
        assert gpu.multiplies_bf16 == (key not in WITHOUT_BF16)
        assert (gpu.bf16 is None) == (key in WITHOUT_BF16)
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


def test_geforce_rates_follow_from_cores_and_clock() -> None:
    """The ratios that `_geforce` uses give the white papers' own figures, to their rounding."""
    for key, cores, boost, fp32, half in (
        ("rtx3070", 5888, 1725, 20.3, 40.6),
        ("rtx4080", 9728, 2505, 48.7, 97.5),
        ("rtx5080", 10752, 2617, 56.3, 112.6),
        ("rtx2070", 2304, 1620, 7.5, 29.9),
    ):
        gpu = GPUS[key]
        assert gpu.fp32 == pytest.approx(2 * cores * boost / 1e6, rel=0.005)
        assert (gpu.fp32, gpu.fp16) == (pytest.approx(fp32, rel=0.005), pytest.approx(half, rel=0.005)), key


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("3080", ("rtx3080-10", "rtx3080-12")),
        ("RTX 3060", ("rtx3060-8", "rtx3060-12")),
        ("4060 Ti", ("rtx4060ti-8", "rtx4060ti-16")),
        ("A100", ("a100-40", "a100-80")),
        ("a2000", ("rtx-a2000-6", "rtx-a2000-12")),
        ("NVIDIA RTX A2000", ("rtx-a2000-6", "rtx-a2000-12")),
    ],
)
def test_a_name_of_several_sizes_is_not_guessed_but_a_drivers_is(written: str, meant: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as raised:
        hardware_facts(written)
    assert raised.value.code == "E2400"
    assert all(key in str(raised.value.help) for key in meant)
    for key in meant:
        assert find_gpu(written, GPUS[key].memory_bytes + 200 * 2**20) is GPUS[key]


@pytest.mark.parametrize(("written", "gib"), [("12GB", 12), ("8 gb", 8), ("24GiB", 24), ("80G", 80), ("10.5GB", 10.5)])
def test_a_size_is_a_card_of_that_size_and_says_what_it_assumes(written: str, gib: float) -> None:
    facts = hardware_facts(written)
    assert facts.memory_bytes == pytest.approx(0.92 * gib * GIB, rel=1e-6)
    assert (facts.kind, facts.source, facts.bf16, facts.compute_capability) == ("cuda", "catalogue", True, (8, 6))
    assert facts.name == f"{'an' if gib in (8, 80) else 'a'} {gib:g} GB card"
    assert "bfloat16" in facts.assumed
    assert find_gpu(facts.name) is None, "its speed is unknown"


@pytest.mark.parametrize("written", ["0GB", "12MB", "9999GB", "0.5GB", "1.5TB"])
def test_a_size_that_no_card_has_is_an_error(written: str) -> None:
    with pytest.raises(ConfigError) as raised:
        hardware_facts(written)
    assert raised.value.field == "hardware.gpu"
    assert "12GB" in str(raised.value.help)


@pytest.mark.parametrize(("written", "proposed"), [("9999", "rtx4090"), ("12", "12GB"), ("", "h100"), ("-8GB", "12GB")])
def test_an_unknown_card_is_an_error_with_names_to_choose_from(written: str, proposed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        hardware_facts(written)
    assert raised.value.code == "E2068"
    assert proposed in str(raised.value.help)
    assert len(str(raised.value.help)) < 200, "not the whole catalogue"


def test_amd_is_said_to_be_untested() -> None:
    assert "ROCm" in hardware_facts("mi300x").assumed
    assert hardware_facts("h100").assumed == ""


@pytest.mark.parametrize(("written", "meant"), [("h10o", "h100"), ("rtx4900", "rtx4090"), ("mi300", "mi300x")])
def test_an_unknown_name_suggests_a_known_one(written: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        hardware_facts(written, tmp_path)


def test_a_size_counts_no_more_than_any_card_of_that_size_shows() -> None:
    """`--gpu 16GB` may be a T4: what is planned for the size must fit the card that shows least of it."""
    sizes = {
        "rtx-a2000-6": 6, "rtx3060-8": 8, "rtx4060": 8, "rtx3080-10": 10, "rtx4070": 12, "t4": 16, "rtx-a4000": 16,
        "a10": 24, "l4": 24, "rtx4090": 24, "rtx5090": 32, "v100-32": 32, "a100-40": 40, "a40": 48, "l40s": 48,
        "rtx6000-ada": 48, "a100-80": 80, "h100": 80, "rtx-pro-6000": 96, "h200": 141, "b200": 192, "b300": 288,
    }  # fmt: skip
    for key, size in sizes.items():
        generic = generic_gpu(f"{size}GB")
        assert generic is not None
        assert generic.memory_bytes <= GPUS[key].memory_bytes, key


def test_one_name_with_two_sizes_is_told_apart_by_the_memory() -> None:
    for mib, key in ((5754, "rtx-a2000-6"), (12282, "rtx-a2000-12")):
        assert find_gpu("NVIDIA RTX A2000", mib * 1024**2) is GPUS[key]
