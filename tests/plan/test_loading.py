"""The heavy libraries are imported without what no simulation uses, and the process ends without taking them apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """\
data: {train: some/rows, max_length: 512}
model: {name_or_path: Qwen/Qwen3-0.6B}
train: {max_steps: 10}
hardware: {gpu: t4}
output_dir: runs/x
"""


@pytest.mark.slow
def test_what_no_simulation_uses_is_left_out_until_it_is_called() -> None:
    """In a process of its own: what bitsandbytes compiles on import is compiled when it is called."""
    pytest.importorskip("bitsandbytes")
    code = (
        "import sys, torch; from surefit.plan.loading import import_libraries; import_libraries();"
        "import bitsandbytes, transformers.modeling_utils, peft;"
        "assert 'torch._inductor.compile_fx' not in sys.modules and 'scipy' not in sys.modules;"
        "assert torch.compile.__module__.startswith('torch');"
        "from transformers.utils import is_scipy_available; assert is_scipy_available.__module__ != '__main__';"
        "from transformers import LlamaForCausalLM"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(("memory", "code"), [("", 0), ("--set data.max_length=0", 2)])
def test_a_plan_ends_with_its_code_and_all_it_said(tmp_path: Path, memory: str, code: int) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "surefit", "plan", "run.yaml", "--quick", "--json", *memory.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    if not code:
        assert json.loads(done.stdout)["estimate"]["verdict"] == "fits"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_plan_that_cannot_be_written_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "surefit", "plan", "run.yaml", "--quick", "--json"]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(command, cwd=tmp_path, stdout=full, stderr=full, timeout=60).returncode
