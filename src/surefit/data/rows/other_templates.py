"""Prompts and answers that still have what another model's prompt template wrote around them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from surefit.data.rows.messages import is_trained_on
from surefit.task import Example

PROMPT, END = "prompt_of_another_template", "end_of_another_model"
"""Observations: a whole prompt has the marks of a template that is not the model's; an answer ends with a token for the
end of a turn that this tokenizer does not have."""
_TAIL = 80
"""Characters at the end of a text that are searched."""
_ASKS_AT_END = re.compile(
    r"(?:^|\n)[^\S\n]*(?:#{2,3} ?(?:Response|Assistant|Answer|Output)|Assistant|ASSISTANT):[^\S\n]*\Z"
    r"|[\s>](?:ASSISTANT|GPT4 Correct Assistant):[^\S\n]*\Z"
)
"""What such a prompt ends with: Alpaca's, Anthropic's HH's, Vicuna's, OpenChat's."""
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
"""In the names of tokens that end something else."""


def find_foreign_templates(example: Example, own: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the first prompt of an example that is written for another template, and the last answer that ends with
    another model's token: the name of the observation, and what was seen.

    Args:
        own: the special tokens of the tokenizer, which others look for.
    """
    asked = next((n for n, turn in enumerate(example.messages) if _is_whole_prompt(turn)), None)
    if asked is not None:
        prompt = str(example.messages[asked]["content"]).strip()
        yield PROMPT, f"messages[{asked}] ends with {prompt[-_TAIL:].splitlines()[-1].strip()!r}: {prompt[:60]!r}"
    answers = [
        (f"messages[{n}]", turn.get("content")) for n, turn in enumerate(example.messages) if is_trained_on(turn)
    ]
    place, text = answers[-1] if answers else ("text", example.text if example.tokens is None else None)
    if isinstance(text, str) and (token := _end_of(text, own)):
        yield END, f"{place} ends with {token}, which this tokenizer does not have as a special token"


def _is_whole_prompt(turn: dict[str, object]) -> bool:
    text = turn.get("content")
    if turn["role"] not in ("user", "system") or not isinstance(text, str):
        return False
    return _ASKS_AT_END.search(text.rstrip()[-_TAIL:]) is not None and _ASKED.search(text) is not None


def _end_of(text: str, own: Collection[str]) -> str | None:
    """The token at the end of an answer that is none of this tokenizer's; in HTML `</s>` ends what `<s>` begins."""
    found = _END.search(text.rstrip()[-_TAIL:])
    if found is None or found[0] in own or _NO_END.search(found[0]):
        return None
    return None if found[0] == "</s>" and "<s>" in text.lstrip()[3:] else found[0]
