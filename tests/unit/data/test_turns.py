"""Every published template, turn by turn: trained behind what the model is given, on what it has to write."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from surefit.core.errors import DataError
from surefit.data.rows.sample_checks import mean_token_examples
from surefit.data.tokens.dataset import build_dataset
from surefit.data.tokens.light_template import LightTemplate
from surefit.data.tokens.tokenize import conversation_segments, encode_turns, tokenize_prompt
from surefit.facts.tokenizer import TokenizerFacts
from surefit.generate.engine import stop_token_ids
from surefit.task import Example

from .conftest import as_examples, chat

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from chat_templates import (
    byte_tokenizer,
    conversation,
    conversations,
    differences,
    judge,
    rendered,
    templates,
)

trl = pytest.importorskip("trl")
PUBLISHED = templates(Path(trl.__file__).parent / "chat_templates")


def tokenizer_with(template: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_there_are_enough_of_them():
    assert len(PUBLISHED) >= 40
    assert {"qwen3", "gptoss", "deepseek_r1_distill", "glm4moe", "nemotron_3_nano", "gemma4_v5"} <= set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_byte_for_byte(name):
    judged = judge(PUBLISHED[name])
    assert judged.wrong == []
    assert judged.equal == judged.made
    assert judged.made >= 9
    assert judged.scored


def one_text(example, tokenizer):
    """What was trained before conversations were divided: one rendering, cut where its own beginnings end; None where
    they are not its beginnings."""
    whole = rendered(tokenizer, example, len(example.messages), False)
    borders = [0]
    for n, turn in enumerate(example.messages):
        if turn["role"] == "assistant":
            given, upto = rendered(tokenizer, example, n, True), rendered(tokenizer, example, n + 1, False)
            if not (upto.startswith(given) and whole.startswith(upto) and borders[-1] <= len(given)):
                return None
            borders += [len(given), len(upto)]
    pieces = [whole[start:end] for start, end in pairwise([*borders, len(whole)])]
    return [(text, bool(n % 2)) for n, text in enumerate(pieces) if text]


def test_nothing_changes_for_templates_that_grow():
    compared = 0
    for template in PUBLISHED.values():
        tokenizer = tokenizer_with(template)
        for _, example, read in conversations(template):
            try:
                before = one_text(read, tokenizer)
            except Exception:  # templates raise what they like
                continue
            if before is not None:
                compared += 1
                assert conversation_segments(example, tokenizer) == [before]
    assert compared > 500


def test_the_comparison_notices_a_difference():
    tokenizer = tokenizer_with(PUBLISHED["qwen3"])
    own = conversation(2, "reasoning_content", system=False, tools=False, reasoning="field")
    assert differences(own, own, tokenizer) == (2, [])
    turns = list(own.messages)
    turns[1] = {**turns[1], "reasoning_content": "another"}
    count, found = differences(own, replace(own, messages=tuple(turns)), tokenizer)
    assert count == 2
    assert len(found) == 1
    assert "another" in found[0]
    unlearnt = [{**turn, "weight": 0} if n == 1 else turn for n, turn in enumerate(own.messages)]
    assert differences(replace(own, messages=tuple(unlearnt)), own, tokenizer)[1] == []


def parts(example: Example, template: str) -> list[str]:
    """Each token example as text, what is learnt between brackets."""
    segments = conversation_segments(example, tokenizer_with(template))
    return ["".join(f"⟦{text}⟧" if learnt else text for text, learnt in own) for own in segments]


def ask(n: int) -> dict[str, str]:
    return {"role": "user", "content": f"q{n}"}


def say(n: int, **more: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"a{n}", **more}


def test_qwen3_thinks_in_every_turn_and_forgets():
    turns = (ask(1), say(1, reasoning_content="t1"), ask(2), say(2, reasoning_content="t2"))
    user, assistant = "<|im_start|>user\n", "<|im_start|>assistant\n"
    assert parts(Example(turns), PUBLISHED["qwen3"]) == [
        f"{user}q1<|im_end|>\n{assistant}⟦<think>\nt1\n</think>\n\na1<|im_end|>\n⟧",
        f"{user}q1<|im_end|>\n{assistant}a1<|im_end|>\n{user}q2<|im_end|>\n{assistant}"
        "⟦<think>\nt2\n</think>\n\na2<|im_end|>\n⟧",
    ]


def test_qwen3_keeps_its_thoughts_while_it_calls_tools():
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    turns = (
        ask(1), {**say(1, reasoning_content="t1"), "tool_calls": [call]}, {"role": "tool", "content": "7"},
        say(2, reasoning_content="t2"),
    )  # fmt: skip
    (text,) = parts(Example(turns), PUBLISHED["qwen3"])
    assert text.count("⟦<think>\nt") == 2


def test_a_thought_that_the_prompt_opens_is_gone_on_with():
    turns = (ask(1), {"role": "assistant", "content": "<think>\nt1\n</think>\n\na1"})
    (text,) = parts(Example(turns), PUBLISHED["deepseek_r1_distill"])
    assert text.partition("⟦")[0].endswith("<think>\n")
    assert text.partition("⟦")[2].startswith("t1\n</think>\n\na1<")


def test_a_prompt_shows_earlier_turns_that_could_not_be_trained():
    tokenizer = tokenizer_with(PUBLISHED["deepseek_r1_distill"])
    turns = (ask(1), say(1), ask(2))
    with pytest.raises(DataError, match="generation prompt for turn 1"):
        encode_turns(tokenizer, [Example((*turns, say(2)))])
    given = tokenizer.decode(tokenize_prompt(Example((*turns, say(2))), tokenizer))
    assert given == rendered(tokenizer, Example(turns), 3, True)


CLOSED = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant><think>\n</think>\n' }}{% endif %}"
)


def test_an_empty_thought_in_the_prompt_is_given():
    assert parts(Example((ask(1), say(1))), CLOSED) == ["<user>q1<end><assistant><think>\n</think>\n⟦a1<end>⟧"]


def test_a_thought_behind_an_empty_one_is_refused():
    turns = (ask(1), {"role": "assistant", "content": "<think>\nt1\n</think>\n\na1"})
    with pytest.raises(DataError, match="generation prompt for turn 1") as caught:
        parts(Example(turns), CLOSED)
    assert "data.thinking: drop" in caught.value.help


MISTRAL = (
    "{% set told = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}{{ '[INST]' + (told + '\n' if loop.last and told else '') + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
"""The system message stands before the last question, and nowhere once there is an answer."""


def test_a_system_message_that_moves():
    turns = ({"role": "system", "content": "S"}, ask(1), say(1), ask(2), say(2))
    assert parts(Example(turns), MISTRAL) == [
        "[INST]S\nq1[/INST]⟦a1</s>⟧",
        "[INST]q1[/INST]a1</s>[INST]S\nq2[/INST]⟦a2</s>⟧",
    ]


def test_a_row_becomes_several_examples_of_the_data_set(tmp_path):
    tokenizer = tokenizer_with(PUBLISHED["qwen3"])
    rows = as_examples(chat("q", "a"), chat("q1", "a1", "q2", "a2", "q3", "a3"))
    made = build_dataset(rows, tokenizer, max_length=1000, cache=tmp_path)
    stats = made.stats
    assert (stats.rows, stats.kept, stats.split) == (2, 4, 2)
    assert stats.rows + stats.split == stats.kept + stats.dropped_too_long + stats.dropped_unsupervised
    wanted = [one for own in encode_turns(tokenizer, list(rows)) for one in own]
    assert [made[n][0].tolist() for n in range(4)] == [ids for ids, _ in wanted]
    assert stats.supervised_tokens == sum(sum(mask) for _, mask in wanted)
    limit = max(len(ids) for ids, _ in wanted) - 1
    shorter = build_dataset(rows, tokenizer, max_length=limit, cache=tmp_path).stats
    assert (shorter.rows, shorter.kept, shorter.dropped_too_long, shorter.split) == (2, 3, 1, 2)
    with pytest.raises(DataError, match=r"rows\.jsonl:2") as caught:
        build_dataset(rows, tokenizer, max_length=limit, too_long="error", cache=tmp_path)
    assert "over max_length" in str(caught.value)


def test_how_many_examples_a_sample_makes():
    many = [chat("q1", "a1", "q2", "a2", "q3", "a3")] * 3
    one = [chat("q", "a"), Example(text="plain")]
    qwen3, llama3 = light(PUBLISHED["qwen3"]), light(PUBLISHED["llama3"])
    assert mean_token_examples([*many, *one], qwen3) == (3 * 3 + 2) / 5
    assert mean_token_examples([*many, *one], llama3) == 1.0
    assert mean_token_examples(one, qwen3) == 1.0
    assert mean_token_examples(many, light("{{ raise_exception('no') }}")) == 1.0
    assert mean_token_examples([], qwen3) == 1.0
    long = [chat(*(f"{'qa'[n % 2]}{n}" for n in range(400)))]
    assert mean_token_examples(long, qwen3) == 200  # by its beginning: all of it would be 40,000 rendered turns
    assert mean_token_examples(long, llama3) == 1.0


def light(template: str) -> LightTemplate:
    return LightTemplate(TokenizerFacts(bos_token="<s>", eos_token="</s>", chat_template=template), {})


TINY = LlamaConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, eos_token_id=None
)
CALLED = {"type": "function", "function": {"name": "look", "arguments": {"word": "x"}}}


def with_tokens(template: str, *tokens: str):
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer


def test_a_turn_that_the_next_one_ends_is_learnt_with_what_ends_it():
    """GLM has no end of turn: https://huggingface.co/zai-org/GLM-4.6 stops at <|user|> and <|observation|>."""
    tokenizer = with_tokens(PUBLISHED["glm4moe"], "<|user|>", "<|assistant|>", "<|observation|>")
    turns = (ask(1), {**say(1), "tool_calls": [CALLED]}, {"role": "tool", "content": "7"}, say(2), ask(3), say(3))
    (segments,) = conversation_segments(Example(turns), tokenizer)
    learnt = [text for text, own in segments if own]
    assert [text[-len("<|observation|>") :] for text in learnt[:1]] == ["<|observation|>"]
    assert [text[-len("2<|user|>") :] for text in learnt[1:]] == ["2<|user|>", "3<|user|>"]
    # Nothing is there twice: all but the last token is transformers' own rendering.
    assert "".join(text for text, _ in segments) == rendered(tokenizer, Example(turns), 6, False) + "<|user|>"
    assert stop_token_ids(LlamaForCausalLM(TINY), tokenizer) == sorted(
        tokenizer.convert_tokens_to_ids(["</s>", "<|user|>", "<|observation|>"])
    )


def test_a_turn_whose_end_is_written_with_the_next_one_is_learnt_with_it():
    template = (
        "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}"
        "{% if not loop.last or m.role == 'user' %}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    tokenizer = with_tokens(template, "<u>", "<a>", "<end>")
    (segments,) = conversation_segments(Example((ask(1), say(1), ask(2), say(2))), tokenizer)
    assert segments == [("<u>q1<end><a>", False), ("a1<end>", True), ("<u>q2<end><a>", False), ("a2<end>", True)]


def test_words_that_begin_the_next_turn_end_none():
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (segments,) = conversation_segments(Example((ask(1), say(1))), with_tokens(template, "<u>"))
    assert segments == [("user: q1 assistant: ", False), ("a1 ", True)]


def test_a_comparison_without_the_end_is_noticed(monkeypatch):
    assert judge(PUBLISHED["glm4moe"]).wrong == []
    monkeypatch.setattr("surefit.data.tokens.tokenize.find_turn_ends", lambda tokenizer, tools: {})
    assert all("without the '<|" in what for what in judge(PUBLISHED["glm4moe"]).wrong)
    assert judge(PUBLISHED["glm4moe"]).wrong
