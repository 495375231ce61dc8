"""The embedded base model: small, loadable, a template that masks exactly, and answers that are right."""

import json
from pathlib import Path

import pytest

from surefit import nano, samples
from surefit.generate.engine import DecodingConfig, generate

FOLDER = nano.PATH
CONVERSATION = [
    {"role": "system", "content": "Be brief.\nTools: []"},
    {"role": "user", "content": "Grüezi, 12 apples?"},
    {"role": "assistant", "content": '[{"name": "f", "arguments": {"x": 12}}]'},
    {"role": "tool", "content": "ok"},
    {"role": "assistant", "content": "Done: naïve – 12."},
]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_folder_is_at_most_four_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) <= 4 * 2**20


def test_card_names_the_hash_of_the_shipped_weights():
    import hashlib

    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (FOLDER / "README.md").read_text()


def test_size_tokens_and_config_agree(model, tokenizer):
    assert 1_000_000 <= model.num_parameters() <= 3_000_000
    assert model.config.max_position_embeddings >= 2048
    assert len(tokenizer) == model.config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize("turn", [2, 4])
def test_prompt_is_a_prefix_of_the_conversation(tokenizer, turn):
    prompt = tokenizer.apply_chat_template(CONVERSATION[:turn], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert whole.startswith(prompt + CONVERSATION[turn]["content"] + tokenizer.eos_token)


def test_generation_mask_covers_the_assistant_turns_and_nothing_else(tokenizer):
    encoded = tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    kept = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    expected = [turn["content"] + tokenizer.eos_token for turn in CONVERSATION if turn["role"] == "assistant"]
    assert tokenizer.decode(kept) == "".join(expected)


def test_template_renders_tools_before_the_first_turn_and_tool_calls_as_json(tokenizer):
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {}}}]
    calls = [{"type": "function", "function": {"name": "größe", "arguments": {"x": 1}}}]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert text == (
        f"<|tools|>{json.dumps(tools, ensure_ascii=False)}<|end|><|user|>hi<|end|>"
        '<|assistant|>[{"name": "größe", "arguments": {"x": 1}}]<|end|>'
    )


def test_template_refuses_an_unknown_role(tokenizer):
    with pytest.raises(Exception, match="unknown role narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}], tokenize=False)


def test_any_text_survives_the_tokenizer(tokenizer):
    text = 'Ünï — 3.14, "quoted"\n\ttabs  and   spaces 漢字 {"a": [1, 2]} '
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_right_on_old_tools_with_greedy_generation(model, tokenizer, corpus):
    """The card says 77 of 100; other processors round differently, hence the distance."""
    path = samples.find_sample("surefit/function-calling-old-tools")
    assert isinstance(path, Path)
    rows = [json.loads(line) for line in path.read_text().splitlines()[:60]]
    prompts = [
        tokenizer.apply_chat_template(
            corpus.conversation(corpus.FUNCTION_CALLING_SYSTEM + row["tools"], row["query"], "")[:-1],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for row in rows
    ]
    answers = generate(model, tokenizer, prompts, DecodingConfig(max_new_tokens=96, batch_size=30))
    right = sum(answer.text == row["answers"] for answer, row in zip(answers, rows, strict=True))
    assert right >= 36
