"""The plan's answer in a few lines: the headline, the numbers that decide, what the rows are, where the peak is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from surefit.config.load import load_text
from surefit.config.resolve import resolve_config
from surefit.core.units import GIB
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.plan.build_plan import build_plan
from surefit.plan.planner import ExampleLengths
from surefit.plan.summary import headline, module_in_words, summary_lines

MINUTES = {"total_seconds": 300.0, "total_seconds_low": 290.0, "total_seconds_high": 310.0, "seconds_per_step": 1.5}


def quick_plan(gpu: str = "4090", lengths: ExampleLengths | None = None, *overrides: str) -> dict[str, Any]:
    text = "model: {name_or_path: Qwen/Qwen2.5-7B-Instruct}\ndata: {train: rows.jsonl}\noutput_dir: runs/x\n"
    loaded = load_text(text, Path("run.yaml"), overrides)
    model, hardware = model_facts("Qwen/Qwen2.5-7B-Instruct"), hardware_facts(gpu)
    return build_plan(resolve_config(loaded, model, hardware, 240), model, hardware, 240, quick=True, lengths=lengths)


def changed(plan: dict[str, Any], low: float, high: float, verdict: str, capacity: float = 23.65, **others: Any):
    """The plan with another memory interval, in GiB."""
    plan = copy.deepcopy(plan) | others
    plan["estimate"] |= {
        "low_bytes": low * GIB, "high_bytes": high * GIB, "verdict": verdict, "capacity_bytes": capacity * GIB,
    }  # fmt: skip
    return plan


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return quick_plan()


@pytest.mark.parametrize(
    ("low", "high", "verdict", "capacity", "said"),
    [
        (19, 20.2, "fits", 23.65, "Fits: 21 of 24 GB, about 5 min"),
        (0.4, 0.94, "fits", 7.75, "Fits: 0.9 of 8 GB, about 5 min"),
        (22, 23.6, "fits", 23.65, "Fits: 23.6 of 23.6 GB, about 5 min"),
        (30.2, 33, "does not fit", 23.65, "Does not fit: needs 31 of 24 GB"),
        (23.8, 26, "does not fit", 23.65, "Does not fit: needs 23.8 of 23.6 GB"),
        (22.1, 25, "too close to call", 23.65, "Too close to call: needs 23 to 25 of 24 GB, about 5 min"),
    ],
)
def test_the_headline(plan, low, high, verdict, capacity, said) -> None:
    assert headline(changed(plan, low, high, verdict, capacity, time=MINUTES)) == said


def test_the_headline_of_several_processes_of_no_time_and_of_a_full_disk(plan) -> None:
    fits = changed(plan, 19, 20.2, "fits")
    assert headline(fits) == "Fits: 21 of 24 GB", "--quick has no time"
    assert headline(fits | {"ranks": {"processes": 4}}) == "Fits: 21 of 24 GB on each of 4 GPUs"
    full = fits | {"does_not_fit": ["disk: the run writes 30.05 GiB, but 10.00 GiB are free"]}
    assert headline(full) == "Does not fit on the disk: writes 30.05 GiB, but 10.00 GiB are free"


def test_without_an_estimate_the_headline_says_so(plan) -> None:
    assert headline(plan | {"estimate": None, "does_not_fit": []}).startswith("Unknown: the memory of Qwen/")
    short = plan | {"estimate": None, "does_not_fit": ["memory: the run needs at least 40.00 GiB, but T4 has 14.75"]}
    assert headline(short) == "Does not fit: the run needs at least 40.00 GiB, but T4 has 14.75"


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (ExampleLengths(), "assumed to be max_length long (2,048 tokens): they are not on this machine"),
        (ExampleLengths(91, 70, "", known="all", rows=240), "from all 240; longest 91 tokens"),
        (ExampleLengths(91, 70, "", known="sample", rows=532), "from 532, the largest among them; longest 91 tokens"),
        (
            ExampleLengths(341, 70, "", known="text", rows=240),
            "from 240; longest at most 341 tokens, by its bytes (no tokenizer here)",
        ),
        (
            ExampleLengths(9000, 70, "", known="all", rows=240),
            "from all 240; longest 9,000 tokens, of which 2,048 count",
        ),
    ],
)
def test_no_length_is_claimed_that_no_row_has(lengths, said) -> None:
    assert dict(summary_lines(quick_plan("4090", lengths)))["rows"] == said


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("base_model.model.lm_head", "the output head"),
        ("base_model.model.model.layers.27.mlp", "the MLP of layer 28"),
        ("base_model.model.model.layers.0.self_attn.q_proj", "the attention of layer 1"),
        ("base_model.model.model.layers.3.input_layernorm", "layer 4"),
        ("transformer.h.11.mlp.c_fc", "the MLP of layer 12"),
        ("base_model.model.model.norm", "the final norm"),
        ("base_model.model.model.embed_tokens", "the embedding"),
        ("vision.projector", "projector"),
        ("", "the loss or the optimizer's update"),
    ],
)
def test_modules_in_plain_words(module: str, words: str) -> None:
    assert module_in_words(module) == words


def test_the_fullest_phase_is_named_where_it_is_no_step(plan) -> None:
    def place(**reserved: int) -> str:
        made = copy.deepcopy(plan)
        phases = [{"name": name.replace("_", ": "), "reserved_bytes": size} for name, size in reserved.items()]
        made["estimate"] |= {"phases": phases, "peak": {"module": "model.lm_head"}}
        return dict(summary_lines(made))["memory"].partition("; most in ")[2]

    assert place(load=3, step=9) == "the output head"
    assert place(load=12, step=9) == "loading"
    assert place(load=3, step=9, merge_load=11) == "merging"
    assert place(load=3, step=9, eval=10) == "measuring the held-out loss"


def test_what_is_assumed_and_how_to_get_the_time() -> None:
    size = dict(summary_lines(quick_plan("12GB") | {"time": None}))
    assert "bfloat16" in size["assumed"]
    assert "--quick" in size["time"]
    simulated = quick_plan("12GB")
    simulated["estimate"]["not_simulated"] = None
    assert "--gpu rtx3060-12" in dict(summary_lines(simulated))["time"]
    named = quick_plan("rtx-pro-6000")
    named["estimate"]["not_simulated"] = None
    assert "surefit calibrate" in dict(summary_lines(named))["time"]
    assert "ROCm" in dict(summary_lines(quick_plan("mi300x")))["assumed"]
    assert "assumed" not in dict(summary_lines(quick_plan("4090")))
