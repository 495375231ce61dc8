"""How long scoring takes: what is counted beside what the engine really runs, and what the command says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.config.load import load_config
from surefit.config.resolve import ResolvedConfig, resolve_config
from surefit.core.units import GIB, KIB
from surefit.evaluate.likelihood import read_answer_likelihoods, reference_tokens
from surefit.evaluate.rows import EvalRows
from surefit.facts.answering_time import answering_seconds, checkpoints_against_training
from surefit.facts.eval_prompts import EvalPromptFacts, EvalPromptSet
from surefit.facts.gpus import find_gpu
from surefit.facts.hardware import HardwareFacts, hardware_facts
from surefit.facts.model import ModelFacts, model_facts
from surefit.generate.engine import DecodingConfig, generate
from surefit.model.load import load_model
from surefit.model.tokenizer import load_tokenizer
from surefit.plan.operations import OperatorCounter
from surefit.plan.profile import DeviceProfile, DeviceRates, profile_folder
from surefit.plan.scoring_time import ValueRange, estimate_scoring_time
from surefit.plan.time import roofline
from surefit.plan.trace import Recorder
from surefit.task import Example

RATES = DeviceRates({"float32": [(1, 1e11)]}, [(1, 1e10)], 20e-6, {"float32": 1e11}, 0.0, "made up", overlaps=False)
LLAMA = "meta-llama/Llama-3.1-8B"


def run(
    here: Path, model: str = "surefit/nano", gpu: str = "cpu", dtype: str = "auto", **sections: Any
) -> tuple[ResolvedConfig, ModelFacts, HardwareFacts]:
    """A config as a user writes it, decided for a device."""
    evaluate = {"batch_size": 8, "max_new_tokens": 24} | sections.pop("evaluate", {})
    content = {
        "model": {"name_or_path": model, "dtype": dtype},
        "data": {"train": "rows.jsonl", "max_length": 2048},
        "hardware": {"gpu": gpu},
        "evaluate": evaluate,
        "output_dir": "run",
    }
    (here / "run.yaml").write_text(json.dumps(content | sections))
    facts, hardware = model_facts(model), hardware_facts(gpu, here)
    return resolve_config(load_config(here / "run.yaml"), facts, hardware, 1000), facts, hardware


def timed(
    made: tuple[ResolvedConfig, ModelFacts, HardwareFacts],
    *sets: EvalPromptSet,
    rates: DeviceRates = RATES,
    ranked: bool = False,
    likelihood: bool = False,
):
    found = estimate_scoring_time(*made, EvalPromptFacts(sets, ranked, likelihood), 100, rates)
    assert found is not None
    return found


def test_it_is_what_the_engine_runs(tmp_path: Path) -> None:
    """The base model's answers, counted on tensors that hold data: what `generate` does around a pass is little."""
    made = run(tmp_path, train={"method": "full"})
    config = made[0].config
    model, tokenizer = load_model(config.model, made[2]), load_tokenizer(config.model)
    tally, recorder = OperatorCounter({"answering"}), Recorder()
    recorder.watch = tally.note
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = tokenizer.chat_template = None  # so that every answer is as long as it may be
    with recorder:
        recorder.start("answering")
        answers = generate(model, tokenizer, [[5 + n] * (96 - n % 2) for n in range(16)], DecodingConfig(24, 8))
    assert [answer.tokens for answer in answers] == [24] * 16
    real = roofline(tally.operations, RATES)[0]
    planned = timed(made, EvalPromptSet("eval", 16, 96, 96.0, 5.0)).answering.high / 2  # base and model
    assert planned == pytest.approx(real, rel=0.1), "all but what chooses the token"


def test_more_of_anything_takes_longer(tmp_path: Path) -> None:
    usual = EvalPromptSet("eval", 40, 96, 96.0, 5.0)
    least = timed(run(tmp_path), usual)
    assert (least.variants, least.answers, least.in_training) == (("base", "adapter", "merged"), 120, None)
    assert 0 < least.answering.low < least.answering.high
    both = timed(run(tmp_path, evaluate={"constrained": "both", "samples": 2, "temperature": 0.5}), usual)
    assert both.answers == 4 * least.answers
    assert both.answering.high == pytest.approx(4 * least.answering.high)
    more = timed(run(tmp_path), usual, EvalPromptSet("old", 40, 96, 96.0, 5.0))
    assert more.answering.high == pytest.approx(2 * least.answering.high)
    assert timed(run(tmp_path), usual, ranked=True).answering.high < least.answering.low


def test_reading_the_rows_own_answers_is_counted(tmp_path: Path) -> None:
    """The two passes of `evaluate.likelihood`, counted on tensors that hold data."""
    made = run(tmp_path, train={"method": "full"})
    model, tokenizer = load_model(made[0].config.model, made[2]), load_tokenizer(made[0].config.model)
    answer = "We will replace the kettle within three days and refund the full price."
    turns = [({"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": answer}) for n in range(16)]
    examples = [Example(messages, completion=answer) for messages in turns]
    prompts = [[5 + n] * 96 for n in range(16)]
    tokens = len(reference_tokens(examples[0], tokenizer).ids)  # type: ignore[union-attr]
    tally, recorder = OperatorCounter({"reading"}), Recorder()
    recorder.watch = tally.note
    rows = EvalRows(list(range(16)), examples, [str(n) for n in range(16)])
    with recorder:
        recorder.start("reading")
        read_answer_likelihoods(model, tokenizer, rows, prompts, prompts[::-1], 8)
    real = roofline(tally.operations, RATES)[0]
    rows_set = EvalPromptSet("eval", 16, 96, 96.0, float(tokens))
    planned = timed(made, rows_set, likelihood=True).answering.high - timed(made, rows_set).answering.high
    assert planned / 2 == pytest.approx(real, rel=0.15), "of base and model; all but the logits of the answers"


def test_one_checkpoint_is_scored_by_the_adapter_on_the_held_out_rows(tmp_path: Path) -> None:
    sets = EvalPromptSet("eval", 40, 96, 96.0, 5.0), EvalPromptSet("old", 900, 96, 96.0, 5.0)
    found = timed(run(tmp_path, evaluate={"in_training": True, "constrained": "both"}), *sets).in_training
    adapter = timed(run(tmp_path), sets[0]).answering
    assert found is not None
    assert adapter.high / 3 < found.high < adapter.high / 2, "the factors cost launches, beside base and merged"


def test_what_is_not_known_is_not_said(tmp_path: Path) -> None:
    uncounted = EvalPromptFacts((EvalPromptSet("eval", None),))
    assert estimate_scoring_time(*run(tmp_path), uncounted, 100, RATES) is None
    served = run(tmp_path, evaluate={"server": "http://localhost:8000/v1"})
    assert estimate_scoring_time(*served, EvalPromptFacts((EvalPromptSet("eval", 9, 96, 96.0),)), 100, RATES) is None


def test_the_worked_example(tmp_path: Path) -> None:
    """Bandwidth alone: no arithmetic, no launches."""
    made = run(tmp_path, LLAMA, "h100", "bfloat16", evaluate={"batch_size": 16, "max_new_tokens": 256})
    bandwidth = 3.35e12 * 0.588
    rates = DeviceRates(
        {"bfloat16": [(1, 1e30)], "float32": [(1, 1e30)]}, [(1, bandwidth)], 0.0, {"bfloat16": 1e30}, 0.0, ""
    )
    short, long = (
        timed(made, EvalPromptSet("eval", 16, 2048, 2048.0, tokens), rates=rates).answering.low
        for tokens in (1.0, 256.0)
    )
    each = (long - short) / 255 / 3  # seconds of a pass of each variant
    assert each == pytest.approx((14.96 * GIB + 16 * 2176 * 128 * KIB) / bandwidth, rel=0.06)
    assert round(1000 * each) in (10, 11)


def test_the_closed_form(tmp_path: Path) -> None:
    h100 = find_gpu("h100")
    assert h100 is not None
    settings = {"batch_size": 16, "max_new_tokens": 256, "in_training": True}
    words = {
        "train": {"num_train_epochs": 99, "max_steps": 100, "global_batch_size": 64},
        "checkpoint": {"save_steps": 10},
        "evaluate": settings,
    }
    resolved, model, _ = run(tmp_path, LLAMA, "h100", "bfloat16", **words)
    assert answering_seconds(resolved.config, model, h100, 16, 2048, 256) == pytest.approx(0.53 + 2.27, rel=0.01)
    found = checkpoints_against_training(resolved, model, h100, EvalPromptSet("eval", 400, 2048, 1792.0, 256.0))
    assert found is not None
    assert found[0] == 10
    assert found[1] == pytest.approx(10 * 25 * 2.7 / (100 * 4.3 * 1.5), rel=0.15), "recomputed: half as much again"


def test_the_command_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": f"What is {n} plus one?", "completion": str(n + 1)} for n in range(60)]
    for name in ("train", "old"):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.yaml").write_text(
        "model: {name_or_path: surefit/nano}\n"
        "data: {train: train.jsonl, eval: 0.2, max_length: 64}\n"
        "train: {max_steps: 8, global_batch_size: 4}\n"
        "checkpoint: {save_steps: 3}\n"
        "evaluate: {max_new_tokens: 16, batch_size: 8, in_training: true, max_examples: 10, "
        "extra_sets: {old: old.jsonl}}\n"
        "hardware: {gpu: cpu}\n"
        "output_dir: run\n"
    )
    processor = hardware_facts("cpu", tmp_path).name
    curve = [(1.0, 1e10)]
    profile = DeviceProfile(
        f"{processor}, 1 thread", "cpu", 1, "2", None, {"float32": curve}, curve, 1e-5, None, None, None, 1.0
    )
    profile_folder().mkdir(parents=True, exist_ok=True)
    profile.save(profile.stored_at)
    scoring = json.loads(CliRunner().invoke(app, ["plan", "run.yaml", "--json"]).stdout.splitlines()[-1])["scoring"]
    assert [(each["name"], each["prompts"]) for each in scoring["sets"]] == [("eval", 10), ("old", 10)]
    assert scoring["answers"] == 60
    assert (scoring["answer_tokens_high"], scoring["in_training"]["checkpoints"]) == (16, 3)
    assert scoring["seconds_low"] < scoring["seconds_high"]
    said = " ".join(CliRunner().invoke(app, ["plan", "run.yaml", "--verbose"]).stdout.split())
    assert "for 60 answers (10 prompts of eval and 10 prompts of old: base, adapter, merged)" in said
    assert "at each of 3 checkpoints" in said
    assert "time of merging and scoring" not in said


def test_spans() -> None:
    assert ValueRange(1, 2) + ValueRange(3, 5) == ValueRange(4, 7)
    assert ValueRange(1, 2) * 3 == ValueRange(3, 6)
