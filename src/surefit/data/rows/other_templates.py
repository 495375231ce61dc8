"""Detection of prompts and answers that still contain the text of another model's prompt template."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from surefit.data.rows.messages import is_trained_on
from surefit.task import Example

PROMPT, END = "prompt_of_another_template", "end_of_another_model"
"""Observations: a whole prompt has the marks of a template that is not the model's; an answer ends with an end-of-turn
token that this tokenizer does not have."""
_TAIL = 80
"""Characters at the end of a text that are searched."""
_ASKS_AT_END = re.compile(
    r"(?:^|\n)[^\S\n]*(?:#{2,3} ?(?:Response|Assistant|Answer|Output)|Assistant|ASSISTANT):[^\S\n]*\Z"
    r"|[\s>](?:ASSISTANT|GPT4 Correct Assistant):[^\S\n]*\Z"
)
"""The end of such a prompt: Alpaca's, Anthropic's HH's, Vicuna's, OpenChat's."""
_ASKED = re.compile(
    r"(?:^|\n)[^\S\n]*(?:#{2,3} ?(?:Instruction|Human|User|Question|Input)|Human|User|USER|GPT4 Correct User): *\S"
    r"|(?:^|\n)#{2,3} ?(?:Instruction|Human|User|Question|Input):[^\S\n]*\n|[.>] USER: \S"
)
"""The text that such a template writes before the question."""
_END = re.compile(
    r"(?:</s>|<eos>|<EOS>|\[EOS\]|<end_of_(?:turn|utterance)>|<turn\|>|<EOT>|<EOD>"
    r"|<[|\uff5c](?=[^<>]*(?:end|END|eo[a-z]{1,2}(?:_id)?[|\uff5c]|EO[A-Z]|return|im_sep))[^<>\s]{1,40}[|\uff5c]>)\Z"
)
"""Tokens that end an answer in some family of models."""
_NO_END = re.compile(r"think|tool|call|section|channel|start", re.IGNORECASE)
"""Words in the names of tokens that end something else."""


def find_foreign_templates(example: Example, own: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (observation, what was seen) for the first prompt of an example that is written for another template, and
    for the last answer that ends with another model's token.

    Args:
        own: the special tokens of this tokenizer, which are detected elsewhere.
    """
    prompt_turn = next((n for n, turn in enumerate(example.messages) if _is_whole_prompt(turn)), None)
    if prompt_turn is not None:
        prompt = str(example.messages[prompt_turn]["content"]).strip()
        yield PROMPT, f"messages[{prompt_turn}] ends with {prompt[-_TAIL:].splitlines()[-1].strip()!r}: {prompt[:60]!r}"
    answers = [
        (f"messages[{n}]", turn.get("content")) for n, turn in enumerate(example.messages) if is_trained_on(turn)
    ]
    place, text = answers[-1] if answers else ("text", example.text if example.tokens is None else None)
    if isinstance(text, str) and (token := _end_of(text, own)):
        yield END, f"{place} ends with {token}, which is not a special token of this tokenizer"


def _is_whole_prompt(turn: dict[str, object]) -> bool:
    text = turn.get("content")
    if turn["role"] not in ("user", "system") or not isinstance(text, str):
        return False
    return _ASKS_AT_END.search(text.rstrip()[-_TAIL:]) is not None and _ASKED.search(text) is not None


def _end_of(text: str, own: Collection[str]) -> str | None:
    """Return the end token of an answer if this tokenizer does not have it; in HTML `</s>` ends what `<s>` begins."""
    match = _END.search(text.rstrip()[-_TAIL:])
    if match is None or match[0] in own or _NO_END.search(match[0]):
        return None
    return None if match[0] == "</s>" and "<s>" in text.lstrip()[3:] else match[0]
