"""Greedy decoding: batching changes nothing, the model's own sampling settings change nothing, ends are told apart."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from surefit.core.errors import DataError, MachineError, ModelError
from surefit.generate import engine
from surefit.generate.engine import DecodingConfig, generate, stop_token_ids

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts_of(lengths, vocabulary=290, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(5, vocabulary) for _ in range(length)] for length in lengths]


def greedy_by_hand(model, prompt, limit, stops):
    """The definition: no cache, no batch, no `generate`."""
    ids = list(prompt)
    for _ in range(limit):
        with torch.no_grad():
            token = int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        ids.append(token)
        if token in stops:
            break
    return ids[len(prompt) :]


@pytest.fixture
def speaker(make_tiny, tiny_tokenizer):
    """A random model whose answers end at different lengths: the row of <|end|> in the head is made likelier."""
    model = make_tiny(seed=3, tie_word_embeddings=False)
    end = tiny_tokenizer.convert_tokens_to_ids("<|end|>")
    with torch.no_grad():
        model.lm_head.weight[end] *= 1.2
    return model


def test_batched_answers_are_those_of_the_definition_in_input_order(speaker, tiny_tokenizer):
    prompts = prompts_of([3, 17, 9, 1, 30, 9, 22, 5, 12, 40, 2])
    stops = stop_token_ids(speaker, tiny_tokenizer)
    batched = generate(speaker, tiny_tokenizer, prompts, DecodingConfig(24, 4))
    single = generate(speaker, tiny_tokenizer, prompts, DecodingConfig(24, 1))
    assert batched == single
    for prompt, answer in zip(prompts, batched, strict=True):
        tokens = greedy_by_hand(speaker, prompt, 24, stops)
        assert answer.tokens == len(tokens)
        assert answer.truncated == (tokens[-1] not in stops)
        assert answer.text == tiny_tokenizer.decode(tokens, skip_special_tokens=True)
    assert {answer.truncated for answer in batched} == {True, False}, "the fixture shows both kinds of ends"


def test_an_answer_that_ends_at_the_very_limit_is_not_truncated(speaker, tiny_tokenizer):
    prompts = prompts_of([3, 17, 9, 1, 30, 9, 22, 5, 12, 40, 2])
    ended = next(
        (prompt, answer)
        for prompt, answer in zip(
            prompts, generate(speaker, tiny_tokenizer, prompts, DecodingConfig(24, 4)), strict=True
        )
        if not answer.truncated and answer.tokens > 1
    )
    prompt, answer = ended
    assert generate(speaker, tiny_tokenizer, [prompt], DecodingConfig(answer.tokens, 1)) == [answer]
    assert generate(speaker, tiny_tokenizer, [prompt], DecodingConfig(answer.tokens - 1, 1))[0].truncated


def test_the_longest_prompts_are_answered_first_and_progress_reaches_the_total(speaker, tiny_tokenizer, monkeypatch):
    widths, seen = [], []
    original = engine._Decoder.answer
    monkeypatch.setattr(
        engine._Decoder,
        "answer",
        lambda self, numbers, batch: widths.append([*map(len, batch)]) or original(self, numbers, batch),
    )
    generate(
        speaker, tiny_tokenizer, prompts_of([3, 9, 1, 7, 5]), DecodingConfig(2, 2), lambda *step: seen.append(step)
    )
    assert widths == [[9, 7], [5, 3], [1]]
    assert [(done, total) for done, total, _ in seen] == [(0, 5), (2, 5), (4, 5), (5, 5)]
    assert "tokens/s" in seen[-1][2]


def test_the_models_own_sampling_settings_do_not_leak_in(speaker, tiny_tokenizer):
    prompts = prompts_of([4, 8, 15])
    plain = generate(speaker, tiny_tokenizer, prompts, DecodingConfig(20, 3))
    speaker.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.5, no_repeat_ngram_size=2
    )
    own = speaker.generation_config
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generate(speaker, tiny_tokenizer, prompts, DecodingConfig(20, 3)) == plain
    assert speaker.generation_config is own, "and they are still there afterwards"


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_model_is_left_as_it_was(speaker, tiny_tokenizer, wrapped):
    prompts = prompts_of([4, 8])
    plain = generate(speaker, tiny_tokenizer, prompts, DecodingConfig(8, 2))
    speaker.generation_config.repetition_penalty = 1.7
    model = get_peft_model(speaker, LoraConfig(target_modules=["q_proj"], lora_dropout=0.5)) if wrapped else speaker
    model.config.use_cache = False  # as training leaves it
    model.train()
    model.get_submodule("base_model.model.model.norm" if wrapped else "model.norm").eval()
    before = [module.training for module in model.modules()]
    assert generate(model, tiny_tokenizer, prompts, DecodingConfig(8, 2)) == plain, (
        "no dropout, a cache, the base under a fresh LoRA"
    )
    assert [module.training for module in model.modules()] == before
    assert speaker.generation_config.repetition_penalty == 1.7
    assert tiny_tokenizer.padding_side == "right"


def test_the_cache_is_used_although_training_switched_it_off(speaker, tiny_tokenizer):
    speaker.config.use_cache = False
    widths = []
    hook = speaker.model.embed_tokens.register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    generate(speaker, tiny_tokenizer, prompts_of([12]), DecodingConfig(5, 1))
    hook.remove()
    assert widths[0] == 12
    assert set(widths[1:]) == {1}, "each further step reads one token"


def test_stops_come_from_generation_config_tokenizer_and_chat_template(make_tiny, tiny_tokenizer):
    model = make_tiny()
    end, text_end = (tiny_tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|text_end|>"))
    assert stop_token_ids(model, tiny_tokenizer) == sorted([end, text_end])
    model.generation_config.eos_token_id = [7, 8]
    assert stop_token_ids(model, tiny_tokenizer) == sorted([end, text_end, 7, 8])
    model.generation_config.eos_token_id = 7
    assert stop_token_ids(model, tiny_tokenizer) == sorted([end, text_end, 7])


def test_a_template_that_refuses_the_probe_or_is_missing_adds_no_stop(make_tiny, tiny_tokenizer, monkeypatch):
    text_end = tiny_tokenizer.convert_tokens_to_ids("<|text_end|>")
    monkeypatch.setattr(tiny_tokenizer, "chat_template", "{{ raise_exception('a system turn is needed') }}")
    assert stop_token_ids(make_tiny(), tiny_tokenizer) == [text_end]
    monkeypatch.setattr(tiny_tokenizer, "chat_template", None)
    assert stop_token_ids(make_tiny(), tiny_tokenizer) == [text_end]


def test_a_tokenizer_without_a_pad_token_gives_the_same_answers(speaker, tiny_tokenizer):
    prompts = prompts_of([4, 8, 2])
    padless = copy.deepcopy(tiny_tokenizer)
    padless.pad_token = None
    assert padless.pad_token_id is None
    assert generate(speaker, padless, prompts, DecodingConfig(8, 3)) == generate(
        speaker, tiny_tokenizer, prompts, DecodingConfig(8, 3)
    )


def test_the_end_of_the_context_cuts_only_the_rows_that_reach_it(make_tiny, tiny_tokenizer):
    model = make_tiny(seed=3, max_position_embeddings=40)
    wide = make_tiny(seed=3)
    prompts = prompts_of([35, 10, 40, 38, 12])
    answers = generate(model, tiny_tokenizer, prompts, DecodingConfig(12, 5))
    free = generate(wide, tiny_tokenizer, prompts, DecodingConfig(12, 5))
    assert [answers[1], answers[4]] == [free[1], free[4]]
    assert [answer.tokens for answer in (answers[0], answers[2], answers[3])] == [5, 0, 2]
    assert all(answers[i].truncated for i in (0, 2, 3))


def test_spaces_that_the_model_wrote_are_kept(make_tiny, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(tiny_tokenizer, "clean_up_tokenization_spaces", True)
    decoder = engine._Decoder(make_tiny(), tiny_tokenizer, DecodingConfig(4, 1))
    assert decoder._finish(tiny_tokenizer("3 , 14 .").input_ids).text == "3 , 14 ."


def test_nan_logits_are_an_error_and_not_an_answer(make_tiny, tiny_tokenizer):
    model = make_tiny()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        generate(model, tiny_tokenizer, prompts_of([4]), DecodingConfig(4, 1))


def test_out_of_memory_names_the_setting_to_change(make_tiny, tiny_tokenizer, monkeypatch):
    model = make_tiny().train()

    def exhausted(**_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "generate", exhausted)
    with pytest.raises(MachineError, match=r"4 prompts of up to 17 tokens") as caught:
        generate(model, tiny_tokenizer, prompts_of([9, 8, 7, 6]), DecodingConfig(8, 4))
    assert caught.value.help == "set evaluate.batch_size to 2"
    assert model.training


def test_no_prompts_and_empty_prompts(make_tiny, tiny_tokenizer):
    assert generate(make_tiny(), tiny_tokenizer, [], DecodingConfig(4, 2)) == []
    with pytest.raises(DataError, match="prompt 1 has no tokens"):
        generate(make_tiny(), tiny_tokenizer, [[5], []], DecodingConfig(4, 2))
