"""Rewards of held-out pairs: the numbers by hand, what is said of them, and log-probabilities of the built-in model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tests.helpers.rows_config import rows_config

from surefit.config.schema import ModelSection, ObjectiveSection
from surefit.core.rundir import RunDir
from surefit.data.rows.columns import recipe_for
from surefit.data.tokens.tokenize import encode_pairs
from surefit.evaluate.inference import LocalModel
from surefit.evaluate.likelihood import pair_with_other_prompts
from surefit.evaluate.pair_likelihoods import read_pair_log_probabilities
from surefit.evaluate.rewards import (
    LOG_PROBS,
    MARGIN,
    REWARDS,
    TOKENS,
    WORDS,
    add_rewards,
    reference_rows,
    stored_reference,
    summarize_pairs,
)
from surefit.evaluate.rows import EvalRows
from surefit.facts.pair_scores import REWARD_ACCURACY
from surefit.model.load import load_model
from surefit.model.tokenizer import load_tokenizer
from surefit.recipes import get_recipe
from surefit.task import Example

DPO = ObjectiveSection(name="dpo", beta=0.1)
CONFIG = SimpleNamespace(objective=DPO, lora=SimpleNamespace(start_from=None))
NANO = ModelSection(name_or_path="surefit/nano", dtype="float32")


def row(chosen, rejected, words=10.0, tokens=(5.0, 10.0)):
    return {
        **dict(zip(LOG_PROBS, (chosen, rejected), strict=True)),
        **dict(zip(TOKENS, tokens, strict=True)),
        WORDS: words,
    }


@pytest.mark.parametrize(
    ("objective", "rewards"),
    [
        (DPO, (0.3, -0.2)),
        (ObjectiveSection(name="dpo", loss_type="ipo", beta=0.1), (0.06, -0.02)),
        (ObjectiveSection(name="simpo", beta=2.0), (2 * -17 / 5, 2 * -42 / 10)),
    ],
)
def test_a_reward_is_what_the_objective_compares(objective, rewards):
    (found,) = add_rewards(objective, [row(-17.0, -42.0)], [row(-20.0, -40.0)])
    assert [found[name] for name in REWARDS] == pytest.approx(rewards)
    assert found[MARGIN] == pytest.approx(rewards[0] - rewards[1])
    assert found[REWARD_ACCURACY] == 1.0


def test_before_training_every_pair_is_a_tie_and_a_swapped_pair_is_wrong():
    base = [row(-20.0, -40.0)]
    assert add_rewards(DPO, base, base)[0][REWARD_ACCURACY] == 0.5
    assert add_rewards(DPO, [row(-21.0, -40.0)], base)[0][REWARD_ACCURACY] == 0.0


def test_without_a_reference_or_without_a_pair_there_is_no_reward():
    assert REWARD_ACCURACY not in add_rewards(DPO, [row(-1.0, -2.0)], None)[0]
    assert add_rewards(DPO, [{"exact_match": 1.0}], [{}]) == [{"exact_match": 1.0}]


def test_both_log_probabilities_falling_is_named_and_lengths_are_told():
    base = [row(-20.0 - n % 2, -40.0, words=12.0 + n % 2) for n in range(20)]
    fell = [row(-30.0 - n % 3, -90.0 - n % 2, words=5.0 + n % 2) for n in range(20)]
    rose = [row(-10.0 - n % 3, -90.0 - n % 2, words=5.0 + n % 2) for n in range(20)]

    def said(after):
        found = summarize_pairs(CONFIG, {"base": add_rewards(DPO, base, base), "merged": add_rewards(DPO, after, base)})
        return " ".join(found["sentences"])

    assert "both fell" in said(fell)
    assert "both fell" not in said(rose)
    assert "in 100.0 % of 20 held-out pairs" in said(fell)
    assert "12.5 → 5.5 words" in said(fell)


def test_a_model_without_rewards_is_named_also_beside_a_base_that_has_them():
    base = [row(-20.0, -40.0)]
    found = summarize_pairs(CONFIG, {"base": add_rewards(DPO, base, base), "merged": [row(-10.0, -50.0)]})
    assert any("score base, too" in sentence for sentence in found["sentences"])


def test_the_stored_reference_is_that_of_the_held_out_rows_alone(tmp_path):
    config = SimpleNamespace(
        lora=SimpleNamespace(start_from="first/adapter"), evaluate=SimpleNamespace(max_examples=None)
    )
    save_file({"eval": np.array([[-1.0, -2.0]], np.float32)}, RunDir(tmp_path).reference)
    rows = [row(-5.0, -6.0)]
    assert reference_rows(config, RunDir(tmp_path), "eval", "merged", rows, None)[0][LOG_PROBS[0]] == -1.0
    assert reference_rows(config, RunDir(tmp_path), "other", "merged", rows, None) is None


def test_rows_without_pairs_are_not_described():
    assert summarize_pairs(CONFIG, {"base": [{"exact_match": 1.0}]}) is None


def test_a_stored_reference_of_other_pairs_is_not_taken(tmp_path):
    config = SimpleNamespace(evaluate=SimpleNamespace(max_examples=None))
    save_file({"eval": np.array([[-1.0, -2.0]], np.float32)}, RunDir(tmp_path).reference)
    found = stored_reference(config, RunDir(tmp_path), [{}, row(-5.0, -6.0)])
    assert found == [{}, dict(zip(LOG_PROBS, (-1.0, -2.0), strict=True))]
    assert stored_reference(config, RunDir(tmp_path), [row(-5.0, -6.0)] * 2) is None


def test_log_probabilities_are_those_of_the_tokens_that_training_compares(one_thread):
    tokenizer, model = load_tokenizer(NANO), load_model(NANO, SimpleNamespace(kind="cpu"))
    asked = {"role": "user", "content": "Is the lamp in stock?"}
    turns = [
        (asked, {"role": "assistant", "content": text}) for text in ("Yes, four.", "I am pleased to say: yes, four.")
    ]
    pair = Example(turns[0], rejected=turns[1], completion="Yes, four.")
    found = read_pair_log_probabilities(model, tokenizer, [Example(turns[0], completion="Yes, four."), pair], 2)
    assert found[0] == {}
    for (ids, supervised), value, count in zip(encode_pairs(tokenizer, [pair])[0], LOG_PROBS, TOKENS, strict=True):
        with torch.no_grad():
            logs = model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)
        by_hand = sum(logs[n - 1, ids[n]].item() for n in range(1, len(ids)) if supervised[n])
        assert found[1][value] == pytest.approx(by_hand, abs=1e-3)
        assert found[1][count] == sum(map(bool, supervised))
    assert read_pair_log_probabilities(model, tokenizer, [pair], 2, max_length=8) == [{}]


def test_a_local_model_reads_both_answers_though_its_prompt_has_none(one_thread):
    tokenizer, model = load_tokenizer(NANO), load_model(NANO, SimpleNamespace(kind="cpu"))
    recipe = recipe_for(get_recipe("chat"), rows_config(objective="dpo"))
    asked = {"role": "user", "content": "Is the lamp in stock?"}
    sides = [(asked, {"role": "assistant", "content": text}) for text in ("Yes, four.", "No, none at all.")]
    pair = Example(sides[0], rejected=sides[1], completion="Yes, four.")
    local = LocalModel(model, tokenizer, recipe, lambda example: Example(example.prompt), 256)
    rows = pair_with_other_prompts(EvalRows([0], [pair], ["r:1"]))
    way = SimpleNamespace(decoding=SimpleNamespace(batch_size=2))
    (scores,) = local.likelihoods(rows, local.prompts(rows), way).scores
    assert set(LOG_PROBS) <= scores.keys()
