"""What is tokenised to something else is stored under another name: caches and shards are known by `CODE_VERSION`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from surefit.config.schema import ModelSection
from surefit.data.tokens.cache import CODE_VERSION, Encoded
from surefit.data.tokens.tokenize import encode_turns
from surefit.model.tokenizer import load_tokenizer
from surefit.task import Example

GOLDEN = (3, "6629e3873c104784")
"""`CODE_VERSION`, and the hash of the tokens of `EXAMPLES` that it stands for."""
REWRITES = (Path(__file__).parents[1] / "model" / "thinking.jinja").read_text()
"""Earlier turns, once another follows, without their reasoning."""
GROWS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Without an end of turn, as GLM's."""
TEMPLATES = {"nano": None, "grows": GROWS, "rewrites": REWRITES, "endless": ENDLESS}


def asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answered(text: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


SUM = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
EXAMPLES = [
    Example((asked("2+2?"), answered("4"))),
    Example(
        ({"role": "system", "content": "Count."}, asked("2+2?"), answered("4"), asked("grüße 你好"), answered(" b\n"))
    ),
    Example((asked("a"), answered("b", weight=0), asked("c"), answered("d"))),
    Example((asked("1?"), answered("1", reasoning="one"), asked("2?"), answered("2", reasoning="two"))),
    Example((asked("2+2?"), answered("", tool_calls=[SUM]), {"role": "tool", "content": "4"}, answered("4")), (TOOL,)),
    Example((), text="Once upon a time"),
    Example((), text="5 6 7", tokens=((5, 6, 7), (True, False, True))),
]


def made_by(template: str | None) -> list[list[Encoded]]:
    tokenizer = load_tokenizer(ModelSection(name_or_path="surefit/nano"))
    tokenizer.chat_template = template or tokenizer.chat_template
    return encode_turns(tokenizer, EXAMPLES)


def test_other_tokens_have_another_version() -> None:
    made = {name: made_by(template) for name, template in TEMPLATES.items()}
    assert {name: len(own[3]) for name, own in made.items()} == {"nano": 1, "grows": 1, "rewrites": 2, "endless": 1}
    digest = hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]
    assert (CODE_VERSION, digest) == GOLDEN, (
        "the examples' tokens are not those that GOLDEN stands for: raise CODE_VERSION in data/tokens/cache.py, so"
        " that tokens stored before are not taken for these, and write the new version and hash into GOLDEN"
    )
