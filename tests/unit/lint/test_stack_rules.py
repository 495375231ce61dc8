"""STK and ENV004 to ENV006: silent where the run does not use what is installed here, and on values that are odd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefit.config.trackers import TRACKERS
from surefit.facts.hardware import HardwareFacts, hardware_facts
from surefit.facts.model import model_facts
from surefit.facts.setup import Setup
from surefit.facts.stack import StackFacts, stack_facts
from surefit.lint.engine import all_rules, run_rules
from surefit.lint.rule import Finding, LintContext

RULES = [rule for rule in all_rules() if rule.code.startswith("STK") or rule.code in ("ENV004", "ENV005", "ENV006")]
GPU = replace(hardware_facts("h100"), source="detected", cpu_count=16)
CPU = replace(hardware_facts("cpu"), cpu_count=16)
OLD = StackFacts(
    versions={"numpy": "2.1.0", "pandas": "2.0.0", "torch": "2.15.0", "surefit": "1.0", "vllm": "0.33.0"},
    requires={"surefit": ("torch<2.14",)},
)


def judge(
    stack: StackFacts, hardware: HardwareFacts | None = CPU, tool: str = "surefit", **setup: Any
) -> list[Finding]:
    context = LintContext(None, Path("run.yaml"), setup=Setup(tool, **setup), hardware=hardware, stack=stack)
    return run_rules(context, RULES).findings


def codes(*arguments: Any, **setup: Any) -> set[str]:
    return {finding.code for finding in judge(*arguments, **setup)}


def test_this_environment_has_no_finding() -> None:
    assert judge(stack_facts()) == []
    assert judge(stack_facts(), trackers=("all",)) == []


def test_a_tracker_may_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "csv", replace(TRACKERS["tensorboard"], packages=()))
    assert judge(stack_facts(), trackers=("csv",)) == []


def test_a_run_for_another_machine_or_of_a_tool_that_is_not_here_is_not_judged_by_this_stack() -> None:
    assert codes(OLD) == {"STK001", "STK010", "STK012"}
    assert codes(OLD, None) == {"STK001", "STK010", "STK012"}
    assert codes(OLD, hardware_facts("h100")) == set()
    assert codes(OLD, CPU, "axolotl", attention="flash_attention_2") == set()
    here = replace(OLD, versions={**OLD.versions, "axolotl": "0.13.0"})
    assert codes(here, CPU, "axolotl", attention="flash_attention_2") == {"STK001", "STK003", "STK010"}


@pytest.mark.parametrize(
    ("attention", "installed", "missing"),
    [
        ("flash_attention_2", "flash-attn", False),
        ("flash_attention_2", "flash-attn-3", True),
        ("flash_attention_3", "flash-attn-3", False),
        ("flash_attention_3", "kernels", True),
        ("sdpa", "numpy", False),
    ],
)
def test_which_package_serves_which_attention(attention: str, installed: str, missing: bool) -> None:
    assert codes(StackFacts(versions={installed: "1.0"}), attention=attention) == ({"STK003"} if missing else set())


def test_only_surefit_takes_no_downloaded_kernel_for_an_attention() -> None:
    stack = StackFacts(versions={"kernels": "1.0", "trl": "1.16.0"})
    assert codes(stack, CPU, "trl", attention="flash_attention_2") == set()
    assert codes(stack, attention="flash_attention_2") == {"STK003"}


def test_build_tags_of_torch_and_torchvision() -> None:
    assert codes(StackFacts(versions={"torch": "2.13.0+cu130", "torchvision": "0.28.0+cpu"})) == {"STK004"}
    assert codes(StackFacts(versions={"torch": "2.13.0", "torchvision": "0.28.0+cpu"})) == set()


def test_trl_counts_where_a_tool_uses_it() -> None:
    stack = StackFacts(
        versions={"trl": "0.9.0", "transformers": "5.23.0"}, requires={"trl": ("transformers<5",)}
    )  # fmt: skip
    assert codes(stack) == set()
    assert codes(stack, CPU, "trl") == {"STK005"}


def test_only_a_merge_that_reads_the_weights_again_is_ruined() -> None:
    stack = StackFacts(versions={"bitsandbytes": "0.50.2", "trl": "1.16.0"}, cpu_flags={"avx512_bf16"})
    assert codes(stack, CPU, "trl", quantization="nf4", merge_into="dequantized") == {"STK007"}
    assert codes(stack, CPU, "trl", quantization="nf4", merge_into="original") == set()
    assert codes(stack, GPU, "trl", quantization="nf4", merge_into="dequantized") == set()
    assert codes(stack, quantization="nf4", merge_into="dequantized") == set(), "SureFit keeps the layout"


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"])
def test_what_needs_bitsandbytes(optimizer: str) -> None:
    (found,) = judge(StackFacts(versions={"torch": "2.13.0"}), optimizer=optimizer)
    assert (found.code, found.help) == (
        "STK014",
        "in the clone of SureFit: pip install -c constraints.txt '.[quant]', or train with adamw",
    )
    assert codes(StackFacts(versions={"torch": "2.13.0"}), optimizer="adamw_torch") == set()


def test_a_driver_is_compared_by_its_branch() -> None:
    stack = StackFacts(torch_cuda="12.8", driver="525.60.13")
    assert codes(stack, GPU) == set()
    assert codes(replace(stack, driver="470.1"), GPU) == {"STK013"}
    assert codes(replace(stack, driver="470.1"), CPU) == set()


@pytest.mark.parametrize(
    ("threads", "hardware", "setup", "message"),
    [
        ("32", CPU, {}, "OMP_NUM_THREADS=32: 32 threads on 16 cores"),
        ("16", CPU, {}, None),
        ("4", GPU, {"processes": 8}, "OMP_NUM_THREADS=4: 8 processes × 4 threads on 16 cores"),
        ("4", GPU, {"processes": 8, "machines": 2}, None),
        ("1", GPU, {}, None),
        ("1", replace(CPU, cpu_count=2), {}, None),
        ("1", CPU, {}, "OMP_NUM_THREADS=1: only one of 16 cores would be used"),
        ("a,b", CPU, {}, None),
        ("0", CPU, {"processes": 0, "machines": 0, "processes_per_machine": 0}, None),
        ("99999999999999999999", CPU, {"processes": -3}, "OMP_NUM_THREADS=99999999999999999999: 99999999999999999999"),
    ],
)
def test_threads(threads: str, hardware: HardwareFacts, setup: dict[str, Any], message: str | None) -> None:
    model = replace(model_facts("surefit/nano"), parameters=500_000_000)
    stack = StackFacts(variables={"OMP_NUM_THREADS": threads})
    context = LintContext(
        None, Path("run.yaml"), setup=Setup("surefit", **setup), hardware=hardware, stack=stack, model=model
    )
    findings = run_rules(context, RULES).findings
    assert [finding.code for finding in findings] == ([] if message is None else ["ENV004"])
    assert all(finding.message.startswith(message or "") for finding in findings)


def test_a_small_model_needs_one_thread() -> None:
    assert codes(StackFacts(variables={"OMP_NUM_THREADS": "1"})) == set()


def test_what_keeps_gpus_from_talking() -> None:
    off = StackFacts(variables={"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"})
    assert judge(off, GPU) == []
    assert [finding.help for finding in judge(off, GPU, processes=8)] == ["unset NCCL_P2P_DISABLE"]
    assert [finding.help for finding in judge(off, GPU, processes=8, machines=2)] == [
        "unset NCCL_P2P_DISABLE", "unset NCCL_SOCKET_IFNAME",
    ]  # fmt: skip
    assert len(judge(replace(off, infiniband=True), GPU, processes=8, machines=2)) == 3
    assert judge(off, replace(GPU, name="NVIDIA GeForce RTX 4090"), processes=8) == []
    gloo = StackFacts(variables={"GLOO_SOCKET_IFNAME": "lo"})
    assert codes(gloo, CPU, processes=2, machines=2) == {"ENV005"}
    assert codes(gloo, CPU, processes=2) == set()


def test_debugging_switches_matter_on_a_gpu() -> None:
    told = StackFacts(variables={"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "trace", "TORCH_DISTRIBUTED_DEBUG": "INFO"})
    assert judge(told) == []
    assert [finding.help for finding in judge(told, GPU)] == ["unset CUDA_LAUNCH_BLOCKING"]
    assert len(judge(told, GPU, processes=4)) == 2
    assert judge(told, GPU, on_cpu=True) == []
