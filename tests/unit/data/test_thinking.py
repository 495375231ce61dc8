"""Reasoning in rows: found wherever it stands, handed to the template as it reads it, and learnt as asked for."""

from __future__ import annotations

import pytest

from surefit.config.schema import DataSection
from surefit.data.rows.layouts import read_splits
from surefit.data.rows.reasoning import convert_reasoning
from surefit.data.tokens.tokenize import conversation_segments, tokenize_prompt
from surefit.facts.thinking import (
    FIELDS,
    probe_template_reasoning,
    reasoning_of_message,
    remove_reasoning,
    split_think_tags,
)
from surefit.recipes.chat import RECIPE
from surefit.task import Example, Prediction

from .test_turns import PUBLISHED, ask, parts, say, tokenizer_with

TAGGED = {"role": "assistant", "content": "<think>\nt1\n</think>\n\na1"}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_and_the_tags_are_one_thing(field):
    assert reasoning_of_message(say(1, **{field: "t1"})) == "t1"
    assert remove_reasoning(say(1, **{field: "t1"})) == say(1)
    assert reasoning_of_message(TAGGED) == "\nt1\n"
    assert remove_reasoning(TAGGED) == say(1)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [("a", "", "a"), ("<think></think>a", "", "a"), ("t\n</think>\n\na", "t\n", "a"), ("", "", "")],
)
def test_what_a_model_wrote_is_divided(text, thought, answer):
    assert split_think_tags(text) == (thought, answer)


def test_what_templates_read():
    assert probe_template_reasoning(PUBLISHED["qwen3"]).fields == ("reasoning_content",)
    assert probe_template_reasoning(PUBLISHED["gptoss"]).fields == ("thinking",)
    assert probe_template_reasoning(PUBLISHED["qwen3"]).moves
    assert not probe_template_reasoning(PUBLISHED["gptoss"]).moves
    llama, r1 = (
        probe_template_reasoning(PUBLISHED["llama3"]),
        probe_template_reasoning(PUBLISHED["deepseek_r1_distill"]),
    )
    assert (llama.fields, llama.tags, llama.opens) == ((), True, False)
    assert (r1.fields, r1.tags, r1.opens) == ((), False, True)
    assert probe_template_reasoning(PUBLISHED["qwen3"]).empties
    assert not probe_template_reasoning("{%- set enable_thinking = false %}\n" + PUBLISHED["qwen3"]).empties
    assert not llama.empties
    assert probe_template_reasoning("{{ raise_exception('no') }}").fields == ()


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "glm4moe", "nemotron_3_nano", "lfm2_2_5", "gemma4_v5"])
@pytest.mark.parametrize("answer", [say(1, **{field: "t1"}) for field in FIELDS] + [TAGGED], ids=[*FIELDS, "tags"])
def test_reasoning_is_learnt_under_whatever_name_it_comes(name, answer):
    wanted = say(1, **{probe_template_reasoning(PUBLISHED[name]).fields[0]: "t1"})
    assert parts(Example((ask(1), answer)), PUBLISHED[name]) == parts(Example((ask(1), wanted)), PUBLISHED[name])
    assert "t1" in parts(Example((ask(1), answer)), PUBLISHED[name])[0].partition("⟦")[2]


def test_a_template_without_a_field_writes_the_tags_as_they_are():
    (text,) = parts(Example((ask(1), TAGGED)), PUBLISHED["llama3"])
    assert f"⟦{TAGGED['content']}<|eot_id|>⟧" in text


def test_drop_takes_the_reasoning_out_of_every_turn():
    example = Example((ask(1), TAGGED, ask(2), say(2, reasoning="t2")), completion="a2", reference="a2")
    dropped = convert_reasoning(example, "drop")
    assert dropped.messages == (ask(1), say(1), ask(2), say(2))
    assert "t1" not in "".join(parts(dropped, PUBLISHED["qwen3"]))
    last = Example((ask(1), TAGGED), completion=TAGGED["content"], reference=TAGGED["content"])
    assert (convert_reasoning(last, "drop").completion, convert_reasoning(last, "drop").reference) == ("a1", "a1")


def test_drop_without_a_thinking_prompt_learns_the_answer_alone():
    off = "{%- set enable_thinking = false %}\n" + PUBLISHED["qwen3"]
    (text,) = parts(convert_reasoning(Example((ask(1), TAGGED)), "drop"), off)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n⟦a1<|im_end|>\n⟧")


def test_only_last_learns_one_turn():
    example = convert_reasoning(Example((ask(1), TAGGED, ask(2), say(2, reasoning_content="t2"))), "only_last")
    (text,) = parts(example, PUBLISHED["qwen3"])
    assert text.count("⟦") == 1
    assert text.endswith("⟦<think>\nt2\n</think>\n\na2<|im_end|>\n⟧")
    unweighted = convert_reasoning(Example((ask(1), say(1), ask(2), say(2, weight=0))), "only_last")
    assert [turn.get("weight") for turn in unweighted.messages] == [None, None, None, 0]


def test_the_prompt_of_an_evaluation_is_what_was_trained_behind():
    tokenizer = tokenizer_with(PUBLISHED["qwen3"])
    whole = Example((ask(1), TAGGED, ask(2), say(2, reasoning="t2")))
    for mode in ("keep", "drop", "only_last"):
        example = convert_reasoning(whole, mode)
        given = conversation_segments(example, tokenizer)[-1][0][0]
        assert tokenizer.decode(tokenize_prompt(example, tokenizer)) == given


def test_which_rows_are_held_out_does_not_depend_on_it(tmp_path):
    import json

    file = tmp_path / "rows.jsonl"
    rows = [{"messages": [ask(n), say(n, reasoning_content="t"), ask(n), say(n)]} for n in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sides = []
    for mode in ("keep", "drop", "only_last"):
        section = DataSection(train=str(file), eval=0.2, thinking=mode)
        sides.append([[e.messages[0] for e in side] for side in read_splits(section, RECIPE, 0)])
    assert sides[0] == sides[1] == sides[2]
    assert sides[0][1]


def test_thoughts_are_not_part_of_the_answer_that_is_scored():
    example = RECIPE.to_example({"messages": [ask(1), TAGGED]})
    for text in ("a1", "<think>\nother\n</think>\n\na1", "other\n</think>\n\na1"):
        prediction = Prediction(text, parsed=RECIPE.parse(text))
        assert RECIPE.score(example, prediction) == {"exact_match": 1.0}
    wrong = "<think>\na1\n</think>\n\nno"
    assert RECIPE.score(example, Prediction(wrong, parsed=RECIPE.parse(wrong))) == {"exact_match": 0.0}
