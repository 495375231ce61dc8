"""Beams, draws, stop texts and prompts read in parts: each against its definition, and none of them up to batching."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from surefit.core.errors import ConfigError
from surefit.generate import engine
from surefit.generate.engine import DecodingConfig, generate, stop_token_ids
from surefit.generate.processors import SamplingProcessor, StopTextCriteria

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts_of(lengths, vocabulary=290, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(5, vocabulary) for _ in range(length)] for length in lengths]


PROMPTS = prompts_of([3, 17, 9, 1, 30, 9, 22])


@pytest.fixture(scope="module")
def speaker(make_tiny, tiny_tokenizer):
    """A random model whose answers end at different lengths."""
    model = make_tiny(seed=3, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[tiny_tokenizer.convert_tokens_to_ids("<|end|>")] *= 1.2
    return model


def next_logs(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1].double().log_softmax(0)


def beams_by_hand(model, prompt, beams, limit, stops):
    """The definition: keep the best `beams` beginnings; an answer that ends is worth its mean log-probability."""
    running, ended = [(0.0, [])], []
    for _ in range(limit):
        grown = [
            (score + float(log), [*tokens, token])
            for score, tokens in running
            for token, log in enumerate(next_logs(model, prompt + tokens))
        ]
        best = sorted(grown, key=lambda pair: -pair[0])[: 2 * beams]
        ended += [(score / len(tokens), tokens) for score, tokens in best[:beams] if tokens[-1] in stops]
        ended = sorted(ended, key=lambda pair: -pair[0])[:beams]
        running = [pair for pair in best if pair[1][-1] not in stops][:beams]
        if len(ended) == beams and ended[-1][0] >= running[0][0] / len(running[0][1]):
            return ended[0][1]
    left = [(score / len(tokens), tokens) for score, tokens in running]
    return max([*ended, *left], key=lambda pair: pair[0])[1]


def test_beams_find_what_the_definition_finds_in_any_batch(speaker, tiny_tokenizer):
    stops = stop_token_ids(speaker, tiny_tokenizer)
    batched = generate(speaker, tiny_tokenizer, PROMPTS, DecodingConfig(8, 3, num_beams=3))
    assert batched == generate(speaker, tiny_tokenizer, PROMPTS, DecodingConfig(8, 1, num_beams=3))
    assert batched != generate(speaker, tiny_tokenizer, PROMPTS, DecodingConfig(8, 3))
    for prompt, answer in zip(PROMPTS, batched, strict=True):
        tokens = beams_by_hand(speaker, prompt, 3, 8, stops)
        assert answer.text == tiny_tokenizer.decode(tokens, skip_special_tokens=True)
        assert answer.truncated == (tokens[-1] not in stops)
        assert answer.tokens == len(tokens)


def test_a_draw_depends_on_the_seed_and_the_prompts_number_only(speaker, tiny_tokenizer):
    prompts = [PROMPTS[4]] * 6 + PROMPTS
    drawn = generate(speaker, tiny_tokenizer, prompts, DecodingConfig(12, 4, temperature=1.0, seed=7))
    torch.manual_seed(99)
    assert drawn == generate(speaker, tiny_tokenizer, prompts, DecodingConfig(12, 1, temperature=1.0, seed=7))
    assert drawn[:4] == generate(speaker, tiny_tokenizer, prompts[:4], DecodingConfig(12, 4, temperature=1.0, seed=7))
    assert len({answer.text for answer in drawn[:6]}) > 1, "every repetition of a prompt draws anew"
    assert drawn != generate(speaker, tiny_tokenizer, prompts, DecodingConfig(12, 4, temperature=1.0, seed=8))
    state = torch.random.get_rng_state()
    generate(speaker, tiny_tokenizer, prompts[:1], DecodingConfig(2, 1, temperature=1.0))
    assert torch.equal(state, torch.random.get_rng_state()), "nobody else's random numbers are used up"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_probable(temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -torch.inf, -1.0])
    draws = 20_000
    scores = SamplingProcessor(temperature, 1, range(draws))(None, logits.repeat(draws, 1))
    counts = Counter(scores.argmax(dim=1).tolist())
    assert torch.isfinite(scores).sum() == draws, "one token is left of each row"
    for token, p in enumerate((logits / temperature).softmax(0).tolist()):
        assert abs(counts[token] - draws * p) <= 4 * math.sqrt(draws * p * (1 - p)), token
    assert counts[3] == 0


def test_a_cold_draw_is_greedy(speaker, tiny_tokenizer):
    cold = generate(speaker, tiny_tokenizer, PROMPTS, DecodingConfig(12, 4, temperature=1e-6))
    assert cold == generate(speaker, tiny_tokenizer, PROMPTS, DecodingConfig(12, 4))


def test_a_stop_text_ends_an_answer_wherever_tokens_divide_it(speaker, tiny_tokenizer):
    free = generate(speaker, tiny_tokenizer, PROMPTS, DecodingConfig(24, 4))
    whole = max((answer for answer in free if answer.truncated), key=lambda answer: len(answer.text))
    number = free.index(whole)
    for start, length in ((0, 1), (1, 3), (5, 2), (8, 4)):
        stop = whole.text[start : start + length]
        decoding = DecodingConfig(24, 4, stop=("never in it", stop))
        cut = generate(speaker, tiny_tokenizer, PROMPTS, decoding)
        assert cut == generate(speaker, tiny_tokenizer, PROMPTS, DecodingConfig(24, 1, stop=decoding.stop))
        assert cut[number].text == whole.text[: whole.text.index(stop)]
        assert not cut[number].truncated, "it ended as asked"
        assert cut[number].tokens < whole.tokens
        for answer, other in zip(cut, free, strict=True):
            assert answer.text == other.text.partition(stop)[0]


def test_generation_stops_at_a_stop_text_and_not_at_the_limit(speaker, tiny_tokenizer, monkeypatch):
    (free,) = generate(speaker, tiny_tokenizer, PROMPTS[:1], DecodingConfig(24, 1))
    widths = []
    original = StopTextCriteria.__call__
    monkeypatch.setattr(
        StopTextCriteria,
        "__call__",
        lambda self, ids, *a, **k: widths.append(ids.shape[1]) or original(self, ids, *a, **k),
    )
    (cut,) = generate(speaker, tiny_tokenizer, PROMPTS[:1], DecodingConfig(24, 1, stop=(free.text[2],)))
    assert max(widths) == len(PROMPTS[0]) + cut.tokens


def test_a_stop_text_with_beams_and_one_in_the_prompt(speaker, tiny_tokenizer):
    prompt = tiny_tokenizer("STOP here: STOP").input_ids
    with_stop = DecodingConfig(10, 2, num_beams=2, stop=("STOP",))
    assert generate(speaker, tiny_tokenizer, [prompt], with_stop) == generate(
        speaker, tiny_tokenizer, [prompt], DecodingConfig(10, 2, num_beams=2)
    ), "only the answer counts"
    (free,) = generate(speaker, tiny_tokenizer, [prompt], DecodingConfig(10, 1, num_beams=2))
    (cut,) = generate(speaker, tiny_tokenizer, [prompt], DecodingConfig(10, 1, num_beams=2, stop=(free.text[:1],)))
    assert not cut.truncated


@pytest.mark.parametrize("chunk", [1, 4, 7, 16, 29, 30, 500])
@pytest.mark.parametrize("beams", [1, 2])
def test_a_prompt_that_is_read_in_parts_gets_the_same_answer(speaker, tiny_tokenizer, chunk, beams):
    widths = []
    hook = speaker.model.embed_tokens.register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    read = generate(speaker, tiny_tokenizer, PROMPTS, DecodingConfig(12, 7, num_beams=beams, prefill_chunk=chunk))
    hook.remove()
    assert max(widths) == min(chunk, 30)
    assert read == generate(speaker, tiny_tokenizer, PROMPTS, DecodingConfig(12, 7, num_beams=beams))


def test_what_excludes_each_other():
    with pytest.raises(ConfigError, match=r"4 beams cannot be combined with a temperature of 0\.7"):
        DecodingConfig(8, 1, num_beams=4, temperature=0.7)
    with pytest.raises(ConfigError, match="stop string is empty"):
        DecodingConfig(8, 1, stop=("\n", ""))


def test_the_end_of_the_answer_wins_over_a_stop_text_behind_it(make_tiny, tiny_tokenizer):
    decoder = engine._Decoder(make_tiny(), tiny_tokenizer, DecodingConfig(9, 1, stop=("z",)))
    stop = StopTextCriteria(tiny_tokenizer, ("z",), 0)
    ids = tiny_tokenizer("abc<|end|>z").input_ids
    assert decoder._finish(ids, stop).text == "abc"
    assert decoder._finish(ids, stop).tokens == 4
