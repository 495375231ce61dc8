"""What a run will be asked when it is scored, from files as a user writes them, and what MEM009 makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefit.facts.eval_prompts import EvalPromptFacts
from surefit.lint.engine import find_rule
from surefit.stages.checking import run_check
from surefit.stages.eval_prompts import load_eval_prompt_facts
from surefit.stages.run_context import load_run_context

SHORT = "What is the capital of Norway?"
RUN = """\
model: {{name_or_path: {model}, dtype: {dtype}}}
data: {{train: train.jsonl, eval: {held_out}, max_length: 512}}
hardware: {{gpu: {gpu}}}
evaluate: {{batch_size: {batch}, max_new_tokens: 64, max_examples: 30, in_training: {in_training}{also}}}
checkpoint: {{save_steps: 10}}
output_dir: run
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, prompt, count in (("train", SHORT, 40), ("held", SHORT, 25), ("old", 400 * SHORT, 50)):
        rows = [{"prompt": f"{n} {prompt}", "completion": "Oslo"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def written(here: Path, also: str = "", **words: object) -> Path:
    defaults = {"model": "surefit/nano", "dtype": "auto", "held_out": "held.jsonl", "gpu": "cpu", "batch": 8}
    text = RUN.format(**(defaults | {"in_training": "false", "also": also and f", extra_sets: {also}"} | words))
    (here / "run.yaml").write_text(text)
    return here / "run.yaml"


def facts(path: Path, *, counted: bool = False) -> EvalPromptFacts:
    from surefit.facts.tokenizer import facts_of_tokenizer

    found = load_run_context(path)
    assert found.model is not None
    tokenizer = facts_of_tokenizer(found.model)
    asked, problems = load_eval_prompt_facts(
        found.loaded.config, found.recipe, found.rows, None, tokenizer, counted=counted
    )
    assert asked is not None, problems
    return asked


def warned(path: Path) -> list[str]:
    return [finding["message"] for finding in run_check(load_run_context(path), [find_rule("MEM009")])["findings"]]


def test_every_set_is_looked_at(here: Path) -> None:
    asked = facts(written(here, "{old: old.jsonl}"), counted=True)
    assert [(each.name, each.prompts) for each in asked.sets] == [("eval", 25), ("old", 30)]
    held, old = asked.sets
    assert held.longest is not None
    assert old.longest is not None
    assert held.longest < 100 < 1000 < old.longest == asked.longest(1) < 400 * len(SHORT)
    assert held.mean is not None
    assert held.mean <= held.longest
    assert held.answer is not None
    assert 1 < held.answer < 8, "the word and what ends it"


def test_the_tokens_are_those_that_the_model_is_asked(here: Path) -> None:
    from surefit.data.tokens.tokenize import tokenize_prompt
    from surefit.model.tokenizer import load_tokenizer
    from surefit.task import Example

    asked = facts(written(here), counted=True).held_out
    tokenizer = load_tokenizer(load_run_context(here / "run.yaml").loaded.config.model)
    prompt = Example(({"role": "user", "content": f"24 {SHORT}"},))
    assert asked.longest == len(tokenize_prompt(prompt, tokenizer))


def test_short_prompts_are_not_tokenised(here: Path) -> None:
    asked = facts(written(here)).held_out
    assert asked.longest == len(f"24 {SHORT}")
    assert asked.mean == pytest.approx(len(SHORT) / 4, abs=1), "a quarter of the bytes"
    assert asked.answer == 1


def test_a_set_with_long_prompts_may_not_fit(here: Path) -> None:
    """Only training drops rows over `data.max_length`."""
    model = "Qwen/Qwen3-0.6B"
    words = {"model": model, "dtype": "float16", "gpu": "t4", "batch": 32}
    assert warned(written(here, **words)) == []
    (message,) = warned(written(here, "{old: old.jsonl}", **words))
    longest = len(f"49 {400 * SHORT}")
    assert message.startswith(f"a batch of 32 prompts with up to {longest:,} tokens needs up to "), "as many as bytes"


def test_logits_are_counted_where_no_kernel_spares_them(here: Path) -> None:
    """A T4 has no attention kernel for bfloat16."""
    rows = [{"prompt": SHORT * 60, "completion": "Oslo"}] * 9
    (here / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {"model": "Qwen/Qwen3-0.6B", "batch": 24}
    assert warned(written(here, gpu="t4", dtype="float16", **words)) == []
    assert len(warned(written(here, gpu="t4", dtype="bfloat16", **words))) == 1
    assert warned(written(here, gpu="l4", dtype="bfloat16", **words)) == []


def test_in_training_the_held_out_rows_and_afterwards_all(here: Path) -> None:
    words = {"model": "Qwen/Qwen3-0.6B", "dtype": "float16", "gpu": "t4", "in_training": "true"}
    assert warned(written(here, batch=16, **words)) == []
    (message,) = warned(written(here, "{old: old.jsonl}", batch=16, **words))
    assert "that training keeps" not in message, "these are scored when training is over"


def test_a_set_that_cannot_be_read_is_named(here: Path) -> None:
    found = load_run_context(written(here, "{old: gone.jsonl}"))
    asked, (problem,) = load_eval_prompt_facts(found.loaded.config, found.recipe, found.rows, None, None)
    assert asked is None
    assert problem.field == "evaluate.extra_sets.old"


def test_check_says_that_scoring_takes_longer_than_training(here: Path) -> None:
    """Answers of 65,536 tokens at every checkpoint."""
    text = RUN.format(model="meta-llama/Llama-3.1-8B", dtype="bfloat16", held_out="held.jsonl", gpu="h100", batch=8,
                      in_training="true", also="")  # fmt: skip
    config = here / "run.yaml"
    rule = [find_rule("EVL008")]
    config.write_text(text.replace("max_new_tokens: 64", "max_new_tokens: 65536"))
    (finding,) = run_check(load_run_context(config), rule)["findings"]
    assert finding["message"].startswith("answers of up to 65,536 tokens to 25 prompts at 1 checkpoint take up to ")
    assert "max_new_tokens" in finding["help"]
    config.write_text(text.replace("max_new_tokens: 64", "max_new_tokens: 65536").replace("true", "false"))
    assert run_check(load_run_context(config), rule)["findings"] == []
    config.write_text(
        text.replace("max_new_tokens: 64", "max_new_tokens: 1").replace("max_examples: 30", "max_examples: 1")
    )
    assert run_check(load_run_context(config), rule)["findings"] == []
