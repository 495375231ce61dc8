"""A model with random weights writes what the grammar allows and nothing else."""

from __future__ import annotations

import copy
import json
import random
import re
import sys

import pytest
import torch

from surefit.core.errors import ConfigError, MachineError, ModelError
from surefit.generate import constrained
from surefit.generate.constrained import GrammarCompiler, GrammarLogitsProcessor, choices_ebnf
from surefit.generate.engine import DecodingConfig, generate, stop_token_ids
from surefit.task import Grammar

pytest.importorskip("xgrammar", reason="the extra `constrained` is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "São Paulo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
PLACES = ("Oslo", "Oslo East", "Zürich", 'the "North"\n', "😀")
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "[0-9]{3}-[a-c]{1,4}"),
    None,
    Grammar("choices", PLACES),
    Grammar("ebnf", 'root ::= "(" root ")" | "x"'),
    Grammar("regex", "[0-9]{3}-[a-c]{1,4}"),
]
WAYS = [
    DecodingConfig(60, 6),
    DecodingConfig(60, 1),
    DecodingConfig(60, 4, num_beams=3),
    DecodingConfig(60, 3, temperature=1.0),
    DecodingConfig(60, 3, temperature=3.0, seed=1),
    DecodingConfig(60, 6, prefill_chunk=3),
]


def allowed(grammar, text):
    if grammar.kind == "json_schema":
        value = json.loads(text)
        return (
            value.keys() == {"city", "days"} and value["city"] in ("Oslo", "São Paulo") and type(value["days"]) is int
        )
    if grammar.kind == "regex":
        return re.fullmatch(grammar.source, text) is not None
    if grammar.kind == "choices":
        return text in grammar.source
    return re.fullmatch(r"(\(*)x(\)*)", text) is not None and text.count("(") == text.count(")")


def prompts_of(count, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(5, 290) for _ in range(rng.randrange(1, 20))] for _ in range(count)]


@pytest.fixture(scope="module")
def model(make_tiny, tiny_tokenizer):
    """A vocabulary with padding behind it, as many models have; the padding is what it would like to write most."""
    found = make_tiny(seed=3, tie_word_embeddings=False, vocab_size=len(tiny_tokenizer) + 84)
    with torch.no_grad():
        found.lm_head.weight[len(tiny_tokenizer) :] *= 3
    return found


@pytest.mark.parametrize("decoding", WAYS, ids=str)
def test_every_row_of_a_batch_keeps_to_its_own_grammar(model, tiny_tokenizer, decoding):
    grammars = GRAMMARS * 2
    answers = generate(model, tiny_tokenizer, prompts_of(len(grammars)), decoding, grammars=grammars)
    ended = [(g, a) for g, a in zip(grammars, answers, strict=True) if g is not None and not a.truncated]
    assert len(ended) >= 4
    for grammar, answer in ended:
        assert allowed(grammar, answer.text), (grammar, answer)


def test_grammars_change_nothing_for_the_rows_that_have_none(model, tiny_tokenizer):
    prompts = prompts_of(6)
    free = generate(model, tiny_tokenizer, prompts, DecodingConfig(20, 6))
    mixed = generate(model, tiny_tokenizer, prompts, DecodingConfig(20, 6), grammars=GRAMMARS)
    assert mixed[2] == free[2]
    assert all(mixed[n] != free[n] for n in (0, 1, 3, 4, 5))
    assert generate(model, tiny_tokenizer, prompts, DecodingConfig(20, 6), grammars=[None] * 6) == free
    for size in (1, 2):
        assert generate(model, tiny_tokenizer, prompts, DecodingConfig(20, size), grammars=GRAMMARS) == mixed


def test_the_most_probable_choice_is_the_definitions(model, tiny_tokenizer):
    """Greedy under a grammar: at each step the best token among those that some choice can go on with."""
    stops = stop_token_ids(model, tiny_tokenizer)
    for prompt in prompts_of(3, seed=5):
        (answer,) = generate(
            model, tiny_tokenizer, [prompt], DecodingConfig(30, 1), grammars=[Grammar("choices", PLACES)]
        )
        ids: list[int] = []
        while not ids or ids[-1] not in stops:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, -1]
            order = logits.argsort(descending=True).tolist()
            ids.append(next(i for i in order if goes_on(tiny_tokenizer, ids, i, stops)))
        assert answer.text == tiny_tokenizer.decode(ids[:-1])


def goes_on(tokenizer, ids, token, stops):
    if token in stops:
        return tokenizer.decode(ids) in PLACES
    if token >= len(tokenizer) or token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder:
        return False
    pieces = tokenizer.convert_ids_to_tokens([*ids, token])
    text = "".join(pieces)
    return any(byte_level(tokenizer, place).startswith(text) for place in PLACES)


def byte_level(tokenizer, text):
    return "".join(tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids))


def test_special_tokens_are_no_way_to_write_their_own_text(make_tiny, tiny_tokenizer):
    """Decoding drops them, so the answer would lose what the grammar counted."""
    model = make_tiny(seed=3, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[tiny_tokenizer.convert_tokens_to_ids("<|user|>")] *= 100
    grammar = Grammar("regex", "[a-z<>|]{6,9}")
    answers = generate(model, tiny_tokenizer, prompts_of(6), DecodingConfig(30, 6), grammars=[grammar] * 6)
    assert all(re.fullmatch(grammar.source, answer.text) for answer in answers)


def test_what_the_limit_cuts_is_truncated(model, tiny_tokenizer):
    grammar = Grammar("regex", "[a-z]{50}")
    (answer,) = generate(model, tiny_tokenizer, [[9]], DecodingConfig(3, 1), grammars=[grammar])
    assert answer.truncated


def test_stop_texts_end_a_constrained_answer_too(model, tiny_tokenizer):
    grammar = Grammar("regex", "[a-z]{8}X[a-z]{50}")
    (answer,) = generate(model, tiny_tokenizer, [[9]], DecodingConfig(30, 1, stop=("X",)), grammars=[grammar])
    assert re.fullmatch("[a-z]{8}", answer.text)
    assert not answer.truncated


def test_a_grammar_is_compiled_once(model, tiny_tokenizer):
    compiler = GrammarCompiler(model, tiny_tokenizer, [1, 4])
    sizes = []
    for source in ("[a-z]+", "[a-z]+", "[0-9]+"):
        compiler.compile(Grammar("regex", source))
        sizes.append(compiler._compiler.get_cache_size_bytes())
    assert 0 < sizes[0] == sizes[1] < sizes[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_in_every_dtype_of_logits(model, tiny_tokenizer, dtype):
    compiler = GrammarCompiler(model, tiny_tokenizer, [1, 4])
    constrain = GrammarLogitsProcessor(compiler, [Grammar("choices", ("A", "B")), None], width=2)
    scores = constrain(torch.zeros((2, 2), dtype=torch.long), torch.zeros((2, compiler.vocabulary), dtype=dtype))
    a, b = (tiny_tokenizer.convert_tokens_to_ids(letter) for letter in "AB")
    assert torch.isfinite(scores[0]).nonzero().flatten().tolist() == sorted([a, b])
    assert torch.isfinite(scores[1]).all()


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar("ebnf", 'root ::= "a" | unknown'), "the ebnf grammar cannot be compiled"),
        (Grammar("regex", "[a"), "the regex grammar cannot be compiled"),
        (Grammar("json_schema", "{"), "the json_schema grammar cannot be compiled"),
        (Grammar("choices", ()), "no choices, or an empty one"),
        (Grammar("choices", ("a", "")), "no choices, or an empty one"),
    ],
)
def test_grammars_that_are_none(model, tiny_tokenizer, grammar, problem):
    with pytest.raises(ConfigError, match=problem):
        generate(model, tiny_tokenizer, [[5]], DecodingConfig(4, 1), grammars=[grammar])


def test_a_model_without_an_end(make_tiny, tiny_tokenizer):
    endless = copy.deepcopy(tiny_tokenizer)
    endless.eos_token, endless.chat_template = None, None
    with pytest.raises(ModelError, match="no token that ends an answer"):
        generate(make_tiny(), endless, [[5]], DecodingConfig(4, 1), grammars=[GRAMMARS[1]])


def test_without_the_package(model, tiny_tokenizer, monkeypatch):
    constrained._xgrammar.cache_clear()
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(MachineError, match="needs the package xgrammar") as caught:
        generate(model, tiny_tokenizer, [[5]], DecodingConfig(4, 1), grammars=[GRAMMARS[1]])
    assert "'.[constrained]'" in caught.value.help
    assert generate(model, tiny_tokenizer, [[5]], DecodingConfig(4, 1), grammars=[None]), "not needed for free answers"
    monkeypatch.undo()
    constrained._xgrammar.cache_clear()


def test_choices_are_literals():
    assert choices_ebnf(['a"b', "c\\"]) == r'root ::= "a\"b" | "c\\"'
