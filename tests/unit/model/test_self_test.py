"""The doctor's attempts: right results pass, wrong ones do not, and every error is a line of output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from surefit.model import self_test


def records(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_attempt_is_announced_before_it_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> str:
        raise RuntimeError("no kernel image\nis available")

    assert self_test.attempt("good", lambda: "runs")
    assert not self_test.attempt("bad", broken)
    assert records(capsys) == [
        {"try": "good"},
        {"name": "good", "ok": True, "detail": "runs"},
        {"try": "bad"},
        {"name": "bad", "ok": False, "detail": "RuntimeError: no kernel image"},
    ]


def test_a_kernel_that_runs_and_is_wrong_is_found() -> None:
    query, key, value = self_test.inputs()
    right = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert self_test.against_reference(right, query, key, value) == "runs"
    for wrong in (right.roll(1, 2), torch.full_like(right, float("nan"))):
        with pytest.raises(ValueError, match="off by"):
            self_test.against_reference(wrong, query, key, value)
    seeing_the_future = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    with pytest.raises(ValueError, match="off by"):
        self_test.against_reference(seeing_the_future, query, key, value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU they are tried")
def test_on_a_cpu_the_gpu_only_attempts_say_so() -> None:
    assert self_test.sdpa() == "runs"
    assert self_test.varlen() == self_test.flash_attn() == self_test.nccl() == "not for CPUs"
    assert self_test.gpu_kernels() == ()


@pytest.mark.gpu
def test_on_a_gpu_every_attempt_has_a_result() -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(Path(self_test.__file__))], capture_output=True, text=True, check=True
    )
    found = {record["name"]: record for line in done.stdout.splitlines() if "name" in (record := json.loads(line))}
    assert found["sdpa"]["ok"]
    assert found["varlen"]["detail"] == "runs"
    assert found["nccl"]["detail"] == "runs"
