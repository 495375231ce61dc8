"""Labels: exactly what the model has to write, and before it exactly what the model is given."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.tokens import tokenize_example
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from surefit.core.errors import DataError, ModelError
from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.tokenize import TEMPLATE_DATE, conversation_segments, encode, encode_turns, tokenize_prompt
from surefit.task import Example

from .conftest import CORPUS, SPECIAL, chat

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}},)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
LONG_CHAT = Example(
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "grüße 你好"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "\n3\n"},
        {"role": "assistant", "content": "\n\n3 is it."},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "  yes "},
    ),
    TOOLS,
)


def learnt_text(example, tokenizer):
    tokenized = tokenize_example(example, tokenizer)
    return tokenizer.decode([label for label in tokenized.labels if label != MASKED])


@pytest.mark.parametrize("example", [chat("2+2?", "4"), chat("a", "b", "c", "d"), LONG_CHAT])
def test_labels_are_those_that_the_template_marks(tokenizer, example):
    official = tokenizer.apply_chat_template(
        list(example.messages),
        tools=list(example.tools) if example.tools else None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    tokenized = tokenize_example(example, tokenizer)
    assert tokenized.input_ids == official["input_ids"]
    marked = zip(official["input_ids"], official["assistant_masks"], strict=True)
    assert tokenized.labels == [token if mark else MASKED for token, mark in marked]
    assert sum(official["assistant_masks"]) > 0


@pytest.mark.parametrize("example", [chat("2+2?", "4"), chat("a", "b", "c", "d"), LONG_CHAT])
def test_what_is_trained_starts_with_what_the_model_is_given(tokenizer, example):
    prompt = tokenize_prompt(example, tokenizer)
    tokenized = tokenize_example(example, tokenizer)
    assert tokenized.input_ids[: len(prompt)] == prompt
    assert MASKED not in tokenized.labels[len(prompt) :]
    official = tokenizer.apply_chat_template(
        list(example.prompt),
        tools=list(example.tools) if example.tools else None,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert prompt == official


def test_the_end_of_the_turn_is_learnt(tokenizer):
    assert learnt_text(chat("2+2?", "4"), tokenizer) == "4<|end|>"


def test_the_first_token_is_never_learnt(make_tokenizer):
    """Nothing predicts it, so a label there would be counted and never trained."""
    tokenizer = make_tokenizer("{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}")
    tokenized = tokenize_example(chat("a", "xyz"), tokenizer)
    assert tokenized.labels == [MASKED, *tokenized.input_ids[1:]]
    assert len(tokenized.labels) > 1


def test_the_weight_is_not_shown_to_the_template(make_tokenizer):
    tokenizer = make_tokenizer("{{ messages | tojson }}{% if add_generation_prompt %}>{% endif %}")
    example = chat("a", "b", "c")
    example.messages[1]["weight"] = 0
    assert "weight" not in tokenizer.decode(tokenize_prompt(example, tokenizer))


def test_weight_0_is_given_and_not_learnt(tokenizer):
    example = chat("a", "b", "c", "d")
    example.messages[1]["weight"] = 0
    assert learnt_text(example, tokenizer) == "d<|end|>"
    unweighted = chat("a", "b", "c", "d")
    assert tokenize_example(example, tokenizer).input_ids == tokenize_example(unweighted, tokenizer).input_ids


NEWLINE_TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':\\n' + m.content + '\\n<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def test_an_answer_does_not_merge_into_the_prompt(make_tokenizer):
    """The prompt ends with one newline, the answer starts with two: tokenised whole, the first two are one token, which
    the model is never given."""
    tokenizer = make_tokenizer(NEWLINE_TEMPLATE)
    example = chat("a", "\n\nyes")
    whole = tokenizer.apply_chat_template(list(example.messages), return_dict=False)
    tokenized = tokenize_example(example, tokenizer)
    prompt = tokenize_prompt(example, tokenizer)
    assert whole[: len(prompt)] != prompt, "the fixture shows the merge"
    assert tokenized.input_ids[: len(prompt)] == prompt
    assert tokenizer.decode(tokenized.input_ids) == tokenizer.decode(whole)


LLAMA_TEMPLATE = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ '<|system|>Today: ' + date_string + '<|end|>' }}"
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n\\n' + m.content | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n\\n' }}{% endif %}"
)


def test_one_begin_token_and_the_same_date_every_day(make_tokenizer):
    tokenizer = make_tokenizer(LLAMA_TEMPLATE)
    ids = tokenize_example(chat("a", " b "), tokenizer).input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert f"Today: {TEMPLATE_DATE}<|end|>" in tokenizer.decode(ids)
    assert learnt_text(chat("a", " b "), tokenizer) == "b<|end|>"


QWEN3_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Thoughts are written before the last answer only."""


def test_thoughts_that_the_model_has_to_write_are_learnt(make_tokenizer):
    tokenizer = make_tokenizer(QWEN3_TEMPLATE)
    assert learnt_text(chat("a", "b"), tokenizer) == "<think>\n\n</think>\n\nb<|end|>\n"


def test_a_template_that_rewrites_earlier_turns_makes_an_example_of_each(make_tokenizer):
    tokenizer = make_tokenizer(QWEN3_TEMPLATE)
    example = chat("a", "b", "c", "d")
    with pytest.raises(DataError, match="several token examples") as caught:
        tokenize_example(example, tokenizer)
    assert "only_last" in caught.value.help
    first, second = (
        (tokenizer.decode(ids), tokenizer.decode([i for i, learnt in zip(ids, mask, strict=True) if learnt]))
        for ids, mask in encode_turns(tokenizer, [example])[0]
    )
    empty = "<think>\n\n</think>\n\n"
    assert first == (f"<|user|>\na<|end|>\n<|assistant|>\n{empty}b<|end|>\n", f"{empty}b<|end|>\n")
    shown = "<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n"
    assert second == (f"{shown}{empty}d<|end|>\n", f"{empty}d<|end|>\n")
    example.messages[1]["weight"] = 0
    assert learnt_text(example, tokenizer) == "<think>\n\n</think>\n\nd<|end|>\n"
    prompt = tokenize_prompt(example, tokenizer)
    assert tokenize_example(example, tokenizer).input_ids[: len(prompt)] == prompt


FORCED_THINKING = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
)


def test_a_generation_prompt_that_the_answer_lacks_is_refused(make_tokenizer):
    with pytest.raises(DataError, match=r"generation prompt for turn 1 \(assistant\) ends with '<think>\\n'") as caught:
        tokenize_example(chat("a", "b"), make_tokenizer(FORCED_THINKING))
    assert caught.value.field == "messages[1]"
    assert "add reasoning to the rows" in caught.value.help


def test_a_template_that_refuses_the_conversation(make_tokenizer):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="does not accept this conversation: roles must alternate"):
        tokenize_example(chat("a", "b"), make_tokenizer(template))


def test_a_tokenizer_without_a_template(make_tokenizer):
    with pytest.raises(ModelError, match="no chat template") as caught:
        tokenize_example(chat("a", "b"), make_tokenizer(None))
    assert "instruct" in caught.value.help


def test_text_ends_with_the_end_of_text(tokenizer):
    tokenized = tokenize_example(Example(text="what is it"), tokenizer)
    assert tokenizer.decode(tokenized.input_ids) == "what is it<|text_end|>"
    assert tokenized.labels == [MASKED, *tokenized.input_ids[1:]], "nothing predicts the first token"


def test_text_needs_an_end_of_text_token(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="would never stop"):
        tokenize_example(Example(text="x"), tokenizer)


def test_text_has_no_prompt(tokenizer):
    with pytest.raises(DataError, match="no prompt to answer"):
        tokenize_prompt(Example(text="x"), tokenizer)


def sentencepiece_like() -> Tokenizer:
    """Puts a space before a text, as Llama 2's and Mistral's do."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    corpus = [*CORPUS, "[INST] 2+2? [/INST] 4 yes no"]
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL))
    return tokenizer


INST_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [INST_TEMPLATE, INST_TEMPLATE.removeprefix("{{ bos_token }}")])
def test_no_space_is_invented_inside_a_conversation(make_tokenizer, template):
    tokenizer = make_tokenizer(template, sentencepiece_like())
    example = chat("what is it", "yes", "2", "no 4")
    whole = tokenizer.apply_chat_template(list(example.messages), return_dict=False)
    tokenized = tokenize_example(example, tokenizer)
    assert tokenized.input_ids == whole
    alone = [i for text, _ in conversation_segments(example, tokenizer)[0] for i in tokenizer(text)["input_ids"]]
    assert alone != whole, "the fixture shows the fault"
    prompt = tokenize_prompt(example, tokenizer)
    assert whole[: len(prompt)] == prompt


TURNS = st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=2, max_size=6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TURNS)
def test_any_conversation_decodes_to_what_the_template_writes(tokenizer, turns):
    example = chat(*turns[: len(turns) // 2 * 2])
    text = tokenizer.apply_chat_template(list(example.messages), tokenize=False)
    tokenized = tokenize_example(example, tokenizer)
    assert tokenizer.decode(tokenized.input_ids) == text
    prompt = tokenize_prompt(example, tokenizer)
    assert tokenized.input_ids[: len(prompt)] == prompt


def test_a_batch_is_what_its_examples_are_alone(tokenizer):
    examples = [chat("a", "b"), Example(text="plain text"), LONG_CHAT, Example(text="x"), chat("c", "d", "e", "f")]
    assert encode(tokenizer, examples) == [encode(tokenizer, [example])[0] for example in examples]


def test_what_an_earlier_call_left_in_the_backend_changes_nothing(tokenizer):
    examples = [chat("2+2?", "4"), LONG_CHAT, Example((), text="plain")]
    before = encode_turns(tokenizer, examples)
    tokenizer(["a", "long " * 9], padding=True, truncation=True, max_length=4)
    assert encode_turns(tokenizer, examples) == before


def test_tokens_that_a_row_brings_stay_as_they_are(tokenizer):
    brought = Example(text="5 6 7", tokens=((5, 6, 7), (True, False, True)))
    around = [chat("2+2?", "4"), brought, Example(text="plain")]
    alone = [encode(tokenizer, [one])[0] for one in around]
    assert encode(tokenizer, around) == alone
    assert alone[1] == ([5, 6, 7], [False, False, True])
    with pytest.raises(DataError, match=f"token id 10,000 is outside the tokenizer's vocabulary of {len(tokenizer):,}"):
        encode(tokenizer, [Example(text="10000", tokens=((10_000,), (True,)))])
