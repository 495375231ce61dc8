"""A published project, its failures one by one: distilling math and code into an 8B model, merged and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefit.config.load import load_config
from surefit.config.resolve import resolve_config
from surefit.core.units import GIB
from surefit.evaluate.stats import paired_bootstrap
from surefit.facts import hardware
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.recipes import get_recipe
from surefit.task import Prediction

SHARED = Path(__file__).parents[2] / "../shared/data"

TRL = """
model_name_or_path: surefit/nano
dataset_name: rows.jsonl
max_length: 256
per_device_train_batch_size: 4
num_train_epochs: 1
learning_rate: 2.0e-4
use_peft: true
save_steps: 100
{}
output_dir: out
"""


def test_lora_trained_on_a_4_bit_base_then_merged(judge) -> None:
    """Ties fell from 70 % to 28 %: the adapter belongs to weights that the merge does not have."""
    faulty = {"tool": "trl", "adapter": "lora", "quantization": "nf4", "merge_into": "quantized"}
    assert judge(**faulty) == {"MRG001"}
    assert judge(**faulty | {"merge_into": "dequantized"}) == set()


def test_an_export_onto_a_quantised_base(check) -> None:
    export = "model_name_or_path: surefit/nano\nadapter_name_or_path: out\nexport_dir: merged\n{}"
    assert "MRG001" in check(export.format("quantization_bit: 4\n"), "llamafactory.yaml")
    assert "MRG001" not in check(export.format(""), "llamafactory.yaml")


def test_checkpoints_filled_the_disk(check, tmp_path, monkeypatch) -> None:
    """What is kept, what is being written and what is merged must fit before step 1."""
    from surefit.facts import hardware

    run = """
recipe: chat
model: {name_or_path: meta-llama/Llama-3.1-8B-Instruct}
data: {train: rows.jsonl, max_length: 256}
train: {method: full, learning_rate: 1e-5}
checkpoint: {save_total_limit: 3}
output_dir: runs/x
"""
    monkeypatch.setattr(hardware, "disk_free_bytes", lambda path: 300 * 2**30)
    assert "DSK001" in check(run)
    monkeypatch.setattr(hardware, "disk_free_bytes", lambda path: 4_000 * 2**30)
    assert "DSK001" not in check(run)


def test_nothing_limited_the_checkpoints(check) -> None:
    steps = TRL.replace("num_train_epochs: 1\n", "")
    assert check(steps.format("max_steps: 9000"), "trl.yaml") == {"CKP002"}
    assert check(steps.format("max_steps: 9000\nsave_total_limit: 3"), "trl.yaml") == set()


def test_flash_attn_had_to_be_compiled(check, installed, monkeypatch) -> None:
    card = hardware.DetectedGpu("NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0), "580.00")
    monkeypatch.setattr(hardware, "detect_gpus", lambda: [card])
    monkeypatch.setattr(hardware, "torch_is_cpu_build", lambda: False)
    faulty = TRL.format("save_total_limit: 3\nattn_implementation: flash_attention_2")
    installed({"trl": "1.16.0", "transformers": "5.23.0"})
    assert check(faulty, "trl.yaml") == {"STK003"}
    assert check(TRL.format("save_total_limit: 3\nattn_implementation: sdpa"), "trl.yaml") == set()


def test_numpy_2(check, installed) -> None:
    run = "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl}\noutput_dir: runs/x\n"
    installed({"numpy": "2.4.6", "scipy": "1.11.4"})
    assert check(run) == {"STK001"}
    installed({"numpy": "2.4.6", "scipy": "1.17.0"})
    assert check(run) == set()


def test_wins_that_were_wrong_answers() -> None:
    """Gold answers decide: a wrong answer scores 0 however well it is written, and in whatever position it stands."""
    recipe = get_recipe("chat")
    turns = [{"role": "user", "content": "7 × 8?"}, {"role": "assistant", "content": "56"}]
    example = recipe.to_example({"messages": turns})
    wrong = "Let us think step by step. Seven times eight is 54."
    fluent = Prediction(text=wrong, parsed=recipe.parse(wrong))
    right = Prediction(text="56", parsed=recipe.parse("56"))
    assert recipe.score(example, fluent)[recipe.primary_metric] == 0.0
    assert recipe.score(example, right)[recipe.primary_metric] == 1.0


def test_three_wins_are_no_result() -> None:
    """The comparison is paired and has an interval: three rows won of ten is not yet a difference."""
    paired = paired_bootstrap([0.0] * 10, [1.0] * 3 + [0.0] * 7)
    assert (paired.wins, paired.losses, paired.ties) == (3, 0, 7)
    assert paired.low <= 0.0 < paired.high


def test_math_was_the_test_set_of_gsm8k(audit) -> None:
    """A benchmark under another benchmark's name is told by its questions, by their hashes."""
    file = SHARED / "math_code/gsm8k/gsm8k_test.jsonl"
    if not file.exists():
        pytest.skip("the collected data is not here")
    rows = file.read_text(encoding="utf-8")
    assert "AUD036" in audit("math.jsonl", rows)
    assert "AUD036" not in audit("gsm8k_test.jsonl", rows)


def test_the_gate_is_an_exit_code(tmp_path) -> None:
    """The next phase may start only if the merged model holds its score; tests/cli/test_verbs.py sees the exit code."""
    run = tmp_path / "run.yaml"
    run.write_text(
        "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl}\n"
        "evaluate: {gate: {not_worse_than: base}}\noutput_dir: runs/x\n",
        encoding="utf-8",
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "x"}) + "\n", encoding="utf-8")
    loaded = load_config(run)
    resolved = resolve_config(loaded, model_facts("surefit/nano"), hardware_facts("cpu"), 100)
    assert resolved.config.evaluate.gate is not None
    assert resolved.config.evaluate.gate.not_worse_than == "base"


def test_mathematics_and_code_are_one_run_with_one_gate(tmp_path) -> None:
    """The shipped config: rows of both kinds, each scored by its own rules; a loss at either closes the gate."""
    from surefit.evaluate.gate import evaluate_gate
    from surefit.stages.checking import run_check
    from surefit.stages.run_context import load_run_context

    config = Path(__file__).parents[2] / "configs/distillation-llama-3.1-8b.yaml"
    found = load_run_context(config, ["output_dir=" + str(tmp_path / "run")])
    assert found.recipe is not None
    assert list(found.recipe.parts) == ["math_reasoning", "code_generation"]
    assert [f for f in run_check(found)["findings"] if f["severity"] == "error"] == []
    base = [{"math_reasoning.exact_match": 0.0}] * 60 + [{"code_generation.pass@1": 1.0}] * 60
    tuned = [{"math_reasoning.exact_match": 1.0}] * 60 + [{"code_generation.pass@1": 0.0}] * 30
    tuned += [{"code_generation.pass@1": 1.0}] * 30
    gate = found.loaded.config.evaluate.gate
    assert gate is not None
    assert not evaluate_gate(gate, found.recipe, {"base": base, "merged": tuned}, None)["passed"]
    assert evaluate_gate(gate, found.recipe, {"base": base, "merged": tuned[:60] + base[60:]}, None)["passed"]
