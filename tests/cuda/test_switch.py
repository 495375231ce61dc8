"""cuDNN's attention is off from the moment a model is put on a GPU, whoever does it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import sdpa_attention

import surefit
from surefit.config.schema import ModelSection
from surefit.core.errors import SureFitError
from surefit.facts.hardware import HardwareFacts
from surefit.merge import quantised
from surefit.model import compat, layerwise_forward, load, sdpa

SOURCE = Path(surefit.__file__).parent
GPU = HardwareFacts("cuda", "a GPU", 2**34, True, 1, 2**34, 2**34, "detected", "", (9, 0), 1)
CPU = HardwareFacts("cpu", "a CPU", 2**34, True, 1, 2**34, 2**34, "detected")


@pytest.fixture(autouse=True)
def as_torch_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", compat._USE_GQA)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_it_is_off_after_cuda_is_started_and_the_others_stay() -> None:
    sdpa.start_cuda()
    sdpa.start_cuda()
    cuda = torch.backends.cuda
    assert not cuda.cudnn_sdp_enabled()
    assert cuda.flash_sdp_enabled()
    assert cuda.mem_efficient_sdp_enabled()
    assert cuda.math_sdp_enabled()


def test_loading_on_a_gpu_starts_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Training, evaluating, answering and merging in memory all load through this."""
    section = ModelSection(name_or_path=str(tmp_path), dtype="bfloat16")
    with pytest.raises(SureFitError):
        load.load_model(section, CPU)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SureFitError, match=r"config\.json"):
        load.load_model(section, GPU)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_model_read_from_its_files_starts_cuda(tmp_path: Path) -> None:
    with pytest.raises(SureFitError):
        layerwise_forward.LayerwiseModel(ModelSection(name_or_path="x", dtype="bfloat16"), tmp_path, "cuda")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_an_export_read_again_starts_cuda(tmp_path: Path) -> None:
    section = ModelSection(name_or_path="x", dtype="bfloat16")
    conversion: Any = type("C", (), {"format": "nf4", "section": section, "hardware": GPU})
    with pytest.raises(SureFitError):
        quantised.reload_converted(conversion, tmp_path)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_whoever_loads_a_model_starts_cuda() -> None:
    """`model/gguf.py` loads on the CPU; `model/multimodal_wrapper.py` and `plan/building.py` build without data."""
    loading = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"(AutoModelForCausalLM|auto_class\(.*\))\.from_(pretrained|config)\(", path.read_text())
    }
    starting = {path for path in loading if "start_cuda()" in (SOURCE / path).read_text()}
    assert starting == {"merge/quantised.py", "model/load.py", "model/layerwise_forward.py"}
    assert loading - starting <= {"model/gguf.py", "model/multimodal_wrapper.py", "plan/building.py"}


def test_no_other_place_sets_the_switch() -> None:
    """The self-test and calibration choose a kernel for as long as they run it."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                if re.fullmatch(r"enable_\w*_sdp|sdpa_kernel|sdp_kernel", name):
                    found.add(path.relative_to(SOURCE).as_posix())
    assert found == {"model/sdpa.py", "model/self_test.py", "plan/calibrate.py"}
