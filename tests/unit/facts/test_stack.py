"""What is installed, read from metadata files, and which of it does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from surefit.core import env
from surefit.facts import stack as stack_module
from surefit.facts.stack import StackFacts, UnmetRequirement, stack_facts


def install(folder: Path, name: str, version: str, *requires: str) -> Path:
    """What pip leaves behind of a package, without the package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    (info / "METADATA").write_text("\n".join([*lines, "", "Requires-Dist: not-a-header", "Some text."]))
    return info


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where packages are installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_versions_agree_with_importlib_metadata() -> None:
    found = stack_facts()
    assert {"torch", "transformers", "numpy"} <= found.versions.keys()
    assert found.versions == {name: metadata.version(name) for name in found.versions}
    assert list(found.requires["transformers"]) == metadata.requires("transformers")


def test_it_is_quick_and_imports_nothing_heavy() -> None:
    stack_facts()
    best = min(_seconds() for _ in range(5))
    assert best < 0.05
    code = (
        "import sys; from surefit.facts.stack import stack_facts; stack_facts(); "
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def _seconds() -> float:
    start = time.process_time()
    stack_facts()
    return time.process_time() - start


def test_a_made_up_site(site: Path) -> None:
    install(site, "torch", "2.13.0+cu130", "numpy")
    install(site, "flash_attn", "2.8.3")
    (site / "torch").mkdir()
    (site / "torch/version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    (install(site, "peft", "0.21.2") / "METADATA").write_bytes(b"Name: peft\nVersion: \xff\n")
    (install(site, "trl", "1.0") / "METADATA").unlink()
    found = stack_facts()
    assert found.versions == {"torch": "2.13.0+cu130", "flash-attn": "2.8.3"}
    assert found.torch_cuda == "13.0"
    assert (found.build("torch"), found.build("flash-attn")) == ("cu130", "")
    assert (found.release("torch"), found.release("peft")) == ((2, 13, 0), ())


def test_a_build_without_cuda_and_one_without_its_file(site: Path) -> None:
    install(site, "torch", "2.13.0+cpu")
    assert stack_facts().torch_cuda is None
    (site / "torch").mkdir()
    (site / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    assert stack_facts().torch_cuda is None


def test_unmet_requirements_as_packaging_reads_them() -> None:
    found = StackFacts(
        versions={"peft": "0.9.0", "torch": "2.13.0+cpu", "huggingface-hub": "2.4.0", "numpy": "odd"},
        requires={
            "peft": (
                "huggingface_hub<1.0,>=0.17.0",
                "torch>=1.13.0",
                "Numpy>=1.17",
                'torch<2; extra == "old"',
                'torch<2; python_version < "3"',
                "safetensors",
                "??",
            ),
            "trl": ("torch<1",),
        },
    )
    everything = ("torch", "huggingface-hub", "numpy", "safetensors")
    assert list(found.unmet(("peft", "trl"), everything)) == [
        UnmetRequirement("peft", "huggingface-hub<1.0,>=0.17.0", "huggingface-hub", "2.4.0"),
        UnmetRequirement("peft", "safetensors", "safetensors", None),
    ]


def test_the_kernel_modules_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(stack_module, "_DRIVER", file)
    assert stack_facts().driver is None
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 13"
    )
    assert stack_facts().driver == "580.65.06"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n")
    assert stack_facts().driver == "535.129.03"


def test_processor_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(stack_module, "_CPU", file)
    assert stack_facts().cpu_flags == frozenset()
    file.write_text("model name : x\nflags\t\t: fpu avx2 avx512_bf16 hle\nflags\t\t: fpu\n")
    assert stack_facts().cpu_flags == {"avx2", "avx512_bf16"}


def test_variables_that_steer_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_DEBUG": "TRACE", "OMP_NUM_THREADS": "", "HF_TOKEN": "x", "HOME": "/h"})
    assert stack_facts().variables == {"NCCL_DEBUG": "TRACE"}
    assert not set(env.STEERING) & set(env.SECRET_NAMES)
