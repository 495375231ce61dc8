"""plan.json by arithmetic: its numbers, what it admits to leave out, and what it says does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from surefit.config.load import load_config
from surefit.config.resolve import resolve_config
from surefit.core.units import GIB
from surefit.facts.hardware import HardwareFacts, hardware_facts
from surefit.facts.model import ModelFacts, model_facts
from surefit.plan.build_plan import build_plan
from surefit.plan.planner import Planner


@pytest.fixture
def plan(tmp_path) -> Callable[..., dict[str, Any]]:
    """plan(*overrides, model="...", gpu="h100", rows=None, change=...) → the plan of a small config."""

    def make(
        *overrides: str,
        model: str = "meta-llama/Llama-3.2-3B-Instruct",
        gpu: str = "h100",
        rows: int | None = None,
        quick: bool = True,
        change_model: Callable[[ModelFacts], ModelFacts] = lambda facts: facts,
        change_hardware: Callable[[HardwareFacts], HardwareFacts] = lambda facts: facts,
    ) -> dict[str, Any]:
        path = tmp_path / "run.yaml"
        path.write_text("model: {name_or_path: x}\ndata: {train: rows.jsonl}\noutput_dir: runs/x\n")
        loaded = load_config(path, [f"model.name_or_path={model}", *overrides])
        facts, hardware = change_model(model_facts(model)), change_hardware(hardware_facts(gpu, tmp_path))
        return build_plan(resolve_config(loaded, facts, hardware, rows), facts, hardware, rows, quick=quick)

    return make


def test_the_shape_of_plan_json(plan) -> None:
    made = plan(rows=60_000)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["device"] == {
        "name": "H100 80 GB", "kind": "cuda", "memory_bytes": round(79.11 * GIB), "source": "catalogue",
        "figure": made["device"]["figure"], "assumed": "",
    }  # fmt: skip
    assert (made["model"]["parameters"], made["model"]["architecture"]) == (3_212_749_824, "LlamaForCausalLM")
    assert made["steps"]["total_steps"] == 919
    steps = made["steps"]
    assert steps["per_device_train_batch_size"] * steps["gradient_accumulation_steps"] == steps["global_batch_size"]
    assert {term["moment"] for term in made["memory"]} <= {"always", "loss", "backward", "step"}
    assert all(term["why"] for term in made["memory"] + made["disk"])
    assert made["disk_total_bytes"] == sum(term["bytes"] for term in made["disk"])


def test_trainable_is_what_lora_adds(plan) -> None:
    made = plan("lora.r=8", model="meta-llama/Llama-3.1-8B")
    assert made["model"]["trainable"] == 20_971_520
    assert plan("train.method=full", model="meta-llama/Llama-3.1-8B")["model"]["trainable"] == 8_030_261_248


def test_what_is_left_out_is_said(plan) -> None:
    left_out = " ".join(plan()["left_out"])
    for word in ("other processes", "time", "hardware.disk"):
        assert word in left_out
    assert "base model" in [term["term"] for term in plan()["disk"]], "the download is in the sum"
    assert "generating answers" not in left_out, "their memory is in `answering`"
    assert "activations" not in left_out
    assert "CUDA context" not in left_out, "the interval of the estimate has it"
    other = plan(change_model=lambda facts: replace(facts, architecture="OtherForCausalLM"))
    for word in ("activations", "allocator", "CUDA context"):
        assert word in " ".join(other["left_out"])
    assert "activations" not in [term["term"] for term in other["memory"]]
    assert "download" not in " ".join(plan(model="surefit/nano", gpu="cpu")["left_out"])
    two = plan(change_hardware=lambda facts: replace(facts, gpu_count=2))
    assert "1 other GPU of this machine: --gpus 2" in " ".join(two["left_out"])


def test_why_nothing_was_simulated_is_said(plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("\nno such product\nand more")

    monkeypatch.setattr(Planner, "memory", refuse)
    known = plan(quick=False)
    assert known["estimate"]["how"] == "closed form"
    (said,) = [text for text in known["left_out"] if text.startswith("the simulation: ")]
    assert "(RuntimeError: no such product); the memory shown is by closed form" in said
    unknown = plan(quick=False, change_model=lambda facts: replace(facts, architecture="", linear_modules={}))
    assert unknown["estimate"] is None
    (said,) = [text for text in unknown["left_out"] if text.startswith("the simulation: ")]
    assert said.endswith("has only the terms with a formula")
    assert not any(text.startswith("the simulation: ") for text in plan()["left_out"])


def test_only_what_certainly_exceeds_the_device_does_not_fit(plan) -> None:
    assert plan()["does_not_fit"] == []
    whole = {"model": "meta-llama/Llama-3.1-8B"}
    (memory,) = plan("train.method=full", **whole)["does_not_fit"]
    assert memory.startswith("memory: 14"), memory
    assert "H100" in memory
    other = plan("train.method=full", **whole, change_model=lambda f: replace(f, architecture="OtherForCausalLM"))
    (memory,) = other["does_not_fit"]
    assert memory.startswith("memory: the run needs at least "), "of weights, gradients and optimizer alone"
    full = replace
    (disk,) = plan(model="surefit/nano", gpu="cpu", change_hardware=lambda f: full(f, disk_free_bytes=1))[
        "does_not_fit"
    ]
    assert disk.startswith("disk: ")


def test_this_machine_s_disk_does_not_judge_a_plan_for_another_machine(plan) -> None:
    made = plan()
    assert (made["disk_free_bytes"], made["disk_source"], made["does_not_fit"]) == (None, "unknown", [])


def test_terms_alone_never_say_that_something_fits(plan) -> None:
    made = plan(change_model=lambda facts: replace(facts, architecture="OtherForCausalLM"))
    assert made["estimate"] is None
    text = json.dumps(made).replace('"does_not_fit"', "")
    assert "fits" not in text
    assert "will fit" not in text


def test_an_unknown_model_has_no_totals_and_says_why(plan) -> None:
    made = plan(change_model=lambda facts: replace(facts, parameters=None, linear_modules={}))
    assert (made["memory"], made["memory_total_bytes"], made["disk_total_bytes"]) == ([], None, None)
    assert "is unknown on this machine" in made["left_out"][0]
    assert made["does_not_fit"] == []


def test_the_published_plan_for_a_quarter_million_tokens_left_out_most_of_it(plan) -> None:
    """Qwen3-4B at 262,144 tokens was planned at 59 GB per GPU; its loss alone takes eight times as much."""
    whole = ("data.max_length=262144", "train.global_batch_size=1", "speed.chunked_loss=false")
    made = plan(*whole, model="Qwen/Qwen3-4B", gpu="a100-80")
    logits = next(term["bytes"] for term in made["memory"] if term["term"] == "logits")
    assert logits == 12 * 262_143 * 151_936, "nothing comes before the first token"
    assert made["does_not_fit"]
