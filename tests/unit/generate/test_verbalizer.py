"""Labels are ranked by exact probabilities, whatever their tokens and however prompts are batched."""

from __future__ import annotations

import math
import random

import pytest
import torch
from peft import LoraConfig, get_peft_model

from surefit.core.errors import DataError, ModelError
from surefit.generate.engine import stop_token_ids
from surefit.generate.verbalizer import rank_labels

pytestmark = pytest.mark.usefixtures("one_thread")

LABELS = [
    ["A", "B", "C"],
    ["1", "10", "12", "2", "120"],
    ["weather", "the city", "Monday on the day", "A"],
    [" A", "A"],
    ["only"],
]


@pytest.fixture
def model(make_tiny):
    return make_tiny(seed=5)


@pytest.fixture
def prompts():
    rng = random.Random(1)
    return [[rng.randrange(5, 290) for _ in range(length)] for length in (7, 30, 1, 12, 3)]


def by_hand(model, tokenizer, prompt, labels):
    """The definition: labels written behind the prompt, no cache, no batch; ends read where one begins another."""
    tokens = {label: tokenizer(label, add_special_tokens=False).input_ids for label in labels}
    ends = any(a != b and b[: len(a)] == a for a in tokens.values() for b in tokens.values())
    scores = {}
    for label, ids in tokens.items():
        with torch.no_grad():
            logs = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0].double().log_softmax(-1)
        scores[label] = sum(float(logs[len(prompt) - 1 + n, token]) for n, token in enumerate(ids))
        if ends:
            scores[label] += float(logs[-1, stop_token_ids(model, tokenizer)].logsumexp(0))
    total = math.log(sum(map(math.exp, scores.values())))
    return {label: score - total for label, score in sorted(scores.items(), key=lambda pair: -pair[1])}


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_probabilities_are_those_of_the_definition(model, tiny_tokenizer, prompts, batch_size):
    ranked = rank_labels(model, tiny_tokenizer, prompts, LABELS, batch_size)
    for prompt, labels, found in zip(prompts, LABELS, ranked, strict=True):
        expected = by_hand(model, tiny_tokenizer, prompt, labels)
        assert list(found) == list(expected)
        assert found == pytest.approx(expected, abs=1e-4)
        assert math.fsum(map(math.exp, found.values())) == pytest.approx(1)


def test_letters_are_read_in_one_forward_pass_per_batch(model, tiny_tokenizer, prompts):
    calls = []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs["input_ids"].shape), with_kwargs=True)
    seen = []
    rank_labels(model, tiny_tokenizer, prompts, [["A", "B"]] * 5, 2, lambda *step: seen.append(step[:2]))
    assert calls == [(2, 30), (2, 7), (1, 1)]
    assert seen == [(0, 5), (2, 5), (4, 5), (5, 5)]


def test_the_prompt_is_read_once_and_common_beginnings_of_labels_too(model, tiny_tokenizer):
    calls = []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs["input_ids"].shape), with_kwargs=True)
    rank_labels(model, tiny_tokenizer, [[9] * 20], [["11", "12", "13", "21"]], 8)
    assert calls == [(1, 20), (2, 1)], "the labels' first digits, once each"


def test_a_label_is_tokenised_as_it_stands_behind_the_prompt(make_tiny):
    """SentencePiece's kind writes "A" alone as "▁A"; behind a line break no tokenizer does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1, "▁": 2, "\n": 3, "A": 4, "▁A": 5, "B": 6, "▁B": 7}
    raw = Tokenizer(models.BPE(vocabulary, [("▁", "A"), ("▁", "B")], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    raw.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")
    assert tokenizer("A", add_special_tokens=False).input_ids == [5]
    model = make_tiny(seed=1, vocab_size=8)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 3]])).logits[0, -1].double()
    (ranked,) = rank_labels(model, tokenizer, [[5, 3]], [["A", "B"]], 1)
    expected = logits[[4, 6]].log_softmax(0).tolist()
    assert [ranked["A"], ranked["B"]] == pytest.approx(expected, abs=1e-5)


def test_an_adapter_in_training_mode_and_half_precision(model, tiny_tokenizer, prompts):
    plain = rank_labels(model, tiny_tokenizer, prompts, LABELS, 3)
    tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_dropout=0.5)).train()
    # The factors add zeros; that a matrix product sums in another order from call to call is MKL's, not ours.
    for ours, theirs in zip(plain, rank_labels(tuned, tiny_tokenizer, prompts, LABELS, 3), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-6), "no dropout"
    assert tuned.training
    half = rank_labels(tuned.to(torch.bfloat16), tiny_tokenizer, prompts, LABELS, 3)
    for ours, theirs in zip(plain, half, strict=True):
        assert theirs == pytest.approx(ours, abs=0.5)
        assert math.fsum(map(math.exp, theirs.values())) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("prompt", "labels", "problem"),
    [
        ([], ["A"], "prompt 0 has no tokens"),
        ([5], [], "row 0 has no labels"),
        ([5], ["A", ""], "an empty label"),
        ([5], ["A", "A"], "'A' of row 0 occurs twice"),
        ([5] * 256, ["12"], "257 tokens with its longest label; the model's context is 256"),
    ],
)
def test_unusable_rows(model, tiny_tokenizer, prompt, labels, problem):
    with pytest.raises(DataError, match=problem):
        rank_labels(model, tiny_tokenizer, [prompt], [labels], 1)


def test_a_prompt_may_fill_the_context(model, tiny_tokenizer):
    (ranked,) = rank_labels(model, tiny_tokenizer, [[5] * 256], [["A", "B"]], 1)
    assert len(ranked) == 2


def test_nan_logits_are_an_error(model, tiny_tokenizer):
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        rank_labels(model, tiny_tokenizer, [[5]], [["A", "B"]], 1)


def test_no_rows(model, tiny_tokenizer):
    assert rank_labels(model, tiny_tokenizer, [], [], 4) == []
