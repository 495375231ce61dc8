"""The batch audit: a good batch passes, and every way of breaking one is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from surefit.data.audit.batches import Item, audit_batches, prompt_ends
from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.collate import collate
from surefit.data.tokens.shared_prompts import collate_shared
from surefit.data.tokens.tokenize import encode
from surefit.facts.batch import BatchFacts
from surefit.task import Example

from .conftest import MARKED_TEMPLATE, chat

PAD = 0
CHATML = (
    "{% for m in messages %}{{ '<|begin|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '<|end|>' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
SILENT_AFTER_TOOLS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% if m.role == 'tool' %}{{ '<|tools|>' }}{% elif m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|assistant|>' }}{% endif %}"
)
"""As DeepSeek's: after a tool's result nothing asks for the answer."""


def items(tokenizer: Any, *examples: Example) -> list[Item]:
    encoded = encode(tokenizer, examples)
    return [(np.array(ids), np.where(learnt, ids, MASKED)) for ids, learnt in encoded]


@pytest.fixture
def rows(tokenizer) -> list[Item]:
    return items(
        tokenizer,
        chat("what is the weather in Oslo", "sunny", "and on Monday", "rain, all day long"),
        chat("1 + 1", "2"),
        chat("grüße", "你好"),
    )


@pytest.fixture
def audit(tokenizer, rows) -> Callable[..., BatchFacts]:
    """audit(batch) → what the audit sees of `rows` in a batch; `collate`'s own by default, changed by `change`."""

    def look(change: Callable[[dict[str, torch.Tensor]], None] = lambda batch: None) -> BatchFacts:
        batch = collate(rows, PAD)
        change(batch)
        return audit_batches([(batch, rows)], tokenizer, conversations=True)

    return look


def seen(facts: BatchFacts) -> dict[str, int]:
    return {name: found.rows for name, found in facts.observations.items() if found.rows}


def test_a_good_batch_passes(audit, rows, tokenizer) -> None:
    facts = audit()
    assert seen(facts) == {}
    assert facts.observations["misplaced_mask"].of == 4, "every answer was looked at"
    assert (facts.micro_batches, facts.examples, facts.longest) == (1, 3, max(len(ids) for ids, _ in rows))
    assert facts.tokens == sum(len(ids) for ids, _ in rows)
    assert facts.supervised_tokens == sum(int((labels != MASKED).sum()) for _, labels in rows)
    assert facts.shown[0]["before"].endswith("<|assistant|>")
    assert facts.shown[0]["begins"].startswith("sunny<|end|>")
    assert facts.shown[0]["ends"].endswith("rain, all day long<|end|>")


def test_a_collator_that_copies_the_ids_is_seen(audit) -> None:
    def copy(batch: dict[str, torch.Tensor]) -> None:
        batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == PAD, MASKED)

    facts = audit(copy)
    assert seen(facts) == {"overwritten": 3, "misplaced_mask": 3}
    assert "of " in facts.observations["overwritten"].examples[0]


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("all masked", lambda b: b["labels"].fill_(MASKED), {"dead": 3}),
        ("padding learnt", lambda b: b["labels"].masked_fill_(b["attention_mask"] == 0, PAD), "supervised_padding"),
        ("moved by one", lambda b: b.update(labels=b["labels"].roll(1, 1)), "overwritten"),
        ("tokens hidden", lambda b: b["attention_mask"][0, 3].zero_(), {"attention": 1}),
        ("ids changed", lambda b: b["input_ids"][1, 2].add_(1), {"overwritten": 1}),
    ],
)
def test_broken_batches_are_seen(name: str, change: Any, expected: Any, audit) -> None:
    found = seen(audit(change))
    assert found == expected if isinstance(expected, dict) else expected in found, name


def test_a_mask_by_the_padding_token_hides_the_end_of_turns(tokenizer, rows) -> None:
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    batch = collate(rows, end)
    batch["attention_mask"] = (batch["input_ids"] != end).long()
    assert seen(audit_batches([(batch, rows)], tokenizer, True)) == {"attention": 3}


@pytest.mark.parametrize("masked", [True, False])
def test_padding_on_the_left_is_fine_where_it_is_masked(masked: bool, tokenizer, rows) -> None:
    right = collate(rows, PAD)
    lengths = right["attention_mask"].sum(1).tolist()
    width = right["input_ids"].shape[1]
    left = {
        name: torch.stack([row.roll(width - n) for row, n in zip(right[name], lengths, strict=True)])
        for name in ("input_ids", "attention_mask", "labels")
    }
    if not masked:
        del left["attention_mask"]
    found = seen(audit_batches([(left, rows)], tokenizer, True))
    assert found == ({} if masked else {"attention": 2})


@pytest.mark.parametrize("by", [-1, 1])
def test_a_mask_that_starts_a_token_off_is_seen(by: int, tokenizer, rows) -> None:
    ids, labels = rows[1]
    start = int(np.flatnonzero(labels != MASKED)[0])
    moved = labels.copy()
    moved[start + min(by, 0) : start + max(by, 0)] = ids[start + min(by, 0) : start] if by < 0 else MASKED
    broken = [(ids, moved)]
    facts = audit_batches([(collate(broken, PAD), broken)], tokenizer, True)
    assert seen(facts) == {"misplaced_mask": 1}
    assert "the loss starts after" in facts.observations["misplaced_mask"].examples[0]


def test_a_row_that_begins_like_the_one_before_it(tokenizer) -> None:
    """The shorter example is looked for in its own row, though the longer one's starts with the same tokens."""
    longer, shorter = (np.arange(5, 5 + n) for n in (12, 7))
    pair = [(ids, np.where(np.arange(len(ids)) < 2, MASKED, ids)) for ids in (longer, shorter)]
    facts = audit_batches([(collate(pair, 0), pair)], tokenizer)
    assert not any(seen(facts).values())


def test_plain_text_has_no_prompt(tokenizer) -> None:
    text = items(tokenizer, Example(text="what is <|assistant|> the weather"), Example(text="ja"))
    facts = audit_batches([(collate(text, PAD), text)], tokenizer)
    assert seen(facts) == {}
    assert "misplaced_mask" not in facts.observations


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (MARKED_TEMPLATE, ["<|assistant|>"]),
        (CHATML, ["<|begin|>assistant\n"]),
        (BRACKETS, [" [/INST]"]),
        (SILENT_AFTER_TOOLS, ["<|assistant|>", "<|tools|>"]),
        ("{{ raise_exception('never') }}", []),
        ("{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}!", []),
        (None, []),
    ],
)
def test_where_prompts_end(template: str | None, ends: list[str], make_tokenizer) -> None:
    assert prompt_ends(make_tokenizer(template)) == ends


@pytest.mark.parametrize("template", [CHATML, BRACKETS, SILENT_AFTER_TOOLS])
def test_other_templates_pass_too(template: str, make_tokenizer) -> None:
    own = make_tokenizer(template)
    examples = [chat("the weather", "sunny", "and on Monday", "rain"), chat("\n\nx", "y")]
    if template is SILENT_AFTER_TOOLS:
        turns = ("user", "assistant", "tool", "assistant")
        examples.append(Example(tuple({"role": role, "content": f"{role}s"} for role in turns)))
    made = items(own, *examples)
    facts = audit_batches([(collate(made, PAD), made)], own, True)
    assert seen(facts) == {}
    assert facts.observations["misplaced_mask"].of == sum(len(example.messages) // 2 for example in examples)


def packed(rows: list[Item], **more: torch.Tensor) -> dict[str, torch.Tensor]:
    joined = {
        "input_ids": torch.as_tensor(np.concatenate([ids for ids, _ in rows]))[None],
        "labels": torch.as_tensor(np.concatenate([labels for _, labels in rows]))[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in rows])[None],
    }
    return joined | more


def test_packed_examples_are_found_and_must_be_kept_apart(tokenizer, rows) -> None:
    ones = {"attention_mask": torch.ones(1, sum(len(ids) for ids, _ in rows), dtype=torch.int64)}
    borders = {"cu_seq_lens_q": torch.tensor(np.cumsum([0, *(len(ids) for ids, _ in rows)]))}
    counted = {"position_ids": torch.arange(len(ones["attention_mask"][0]))[None]}

    def look(batch: dict[str, torch.Tensor]) -> dict[str, int]:
        return seen(audit_batches([(batch, rows)], tokenizer, True))

    assert look(packed(rows)) == {}
    assert look(packed(rows, **ones, **borders)) == {}
    assert look(packed(rows, **ones)) == {"run_together": 3}, "transformers ignores positions beside a 2-D mask"
    assert look(packed(rows, **counted)) == {"run_together": 2, "positions": 2}


def shared_pairs(tokenizer: Any) -> list[Item]:
    asked = {"what is the weather in Oslo": ("sunny", "rain, all day long"), "1 + 1": ("2", "two or three")}
    return items(tokenizer, *(chat(question, answer) for question, answers in asked.items() for answer in answers))


def test_pairs_that_share_their_prompts_pass(tokenizer) -> None:
    pairs = shared_pairs(tokenizer)
    batch = collate_shared(pairs)
    assert batch["input_ids"].numel() < sum(len(ids) for ids, _ in pairs)
    facts = audit_batches([(batch, pairs)], tokenizer, conversations=True)
    assert seen(facts) == {}
    assert (facts.examples, facts.observations["misplaced_mask"].of) == (4, 4)


@pytest.mark.parametrize("damage", ["order", "positions", "labels"])
def test_what_is_wrong_with_a_shared_prompt_is_seen(tokenizer, damage: str) -> None:
    pairs = shared_pairs(tokenizer)
    batch = collate_shared(pairs)
    prompt = next(n for n, label in enumerate(pairs[0][1]) if label != MASKED)
    second = len(pairs[0][0])
    if damage == "order":  # the rejected answer reads the prompt from its second token on
        batch["key_order"][second : second + prompt] += 1
    elif damage == "positions":  # it counts on behind the chosen answer
        batch["position_ids"] = torch.arange(batch["input_ids"].numel())[None]
    else:
        batch["labels"][0, second] = MASKED
    assert seen(audit_batches([(batch, pairs)], tokenizer, conversations=True))
