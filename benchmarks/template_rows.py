"""Real chat templates and shapes of rows: is everything said that a template leaves out, and nothing else?

PYTHONPATH=src:. python benchmarks/template_rows.py FOLDER ... [--templates 60] [--show 20]

FOLDER holds *.jinja files, such as those of an installed package. Each shape is a conversation with a word of its own
in each text; transformers' own `apply_chat_template` renders it, the words that are not in its result are the
expectation, and SureFit's renderer has no part in that. A template that raises an error is expected to be refused. What
`surefit check` says of the row is compared with it: agreed, silent (lost, and nothing is said), false alarm.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from surefit.core.errors import DataError
from surefit.data.rows.rendered_turns import LOST, TemplateLossFinder
from surefit.data.tokens.light_template import LightTemplate
from surefit.facts.thinking import probe_template_reasoning
from surefit.facts.tokenizer import TokenizerFacts
from surefit.task import Example, Message

CALL_ID = "surefit01"


def word(number: int) -> str:
    """A text that no template has by itself."""
    return f"Wq{number:02d}z"


def _ask(number: int = 1) -> Message:
    return {"role": "user", "content": word(number)}


def _say(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def _call(name: str, argument: str) -> dict[str, Any]:
    return {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": {"city": argument}}}


def _tool(number: int) -> dict[str, Any]:
    properties = {"city": {"type": "string", "description": word(number + 2)}}
    return {
        "type": "function",
        "function": {
            "name": word(number),
            "description": word(number + 1),
            "parameters": {"type": "object", "properties": properties, "required": ["city"]},
        },
    }


def _result(number: int) -> Message:
    return {"role": "tool", "name": word(3), "tool_call_id": CALL_ID, "content": word(number)}


def shapes() -> dict[str, Example]:
    """Twenty conversations by name."""
    system: Message = {"role": "system", "content": word(0)}
    calling = [_ask(), _say("", tool_calls=[_call(word(3), word(15))]), _result(16), _say(word(6))]
    tools = (_tool(3) | {}, _tool(10))
    return {
        "one turn": Example((_ask(), _say(word(2)))),
        "two turns": Example((_ask(), _say(word(2)), _ask(3), _say(word(4)))),
        "system": Example((system, _ask(), _say(word(2)))),
        "system, two turns": Example((system, _ask(), _say(word(2)), _ask(3), _say(word(4)))),
        "system alone": Example((system, _say(word(2)))),
        "two system turns": Example((system, {"role": "system", "content": word(9)}, _ask(), _say(word(2)))),
        "late system": Example((_ask(), _say(word(2)), {"role": "system", "content": word(9)}, _ask(3), _say(word(4)))),
        "two users": Example((_ask(), _ask(2), _say(word(3)))),
        "two answers": Example((_ask(), _say(word(2)), _say(word(3)))),
        "tools, no call": Example((_ask(), _say(word(2))), tools),
        "call": Example(tuple(calling[:2]), tools),
        "call and result": Example(tuple(calling), tools),
        "call without tools": Example(tuple(calling)),
        "two calls": Example((_ask(), _say("", tool_calls=[_call(word(3), word(15)), _call(word(7), word(8))])), tools),
        "text and call": Example((_ask(), _say(word(2), tool_calls=[_call(word(3), word(15))])), tools),
        "thought in a field": Example((_ask(), _say(word(2), reasoning_content=word(3)))),
        "thought in tags": Example((_ask(), _say(f"<think>\n{word(3)}\n</think>\n\n{word(2)}"))),
        "text before a thought": Example((_ask(), _say(f"{word(4)} <think>\n{word(3)}\n</think>\n\n{word(2)}"))),
        "two thoughts": Example(
            (_ask(), _say(f"<think>{word(3)}</think>\n\n{word(4)}\n<think>{word(5)}</think>\n\n{word(2)}"))
        ),
        "indentation": Example((_ask(), _say(f"    {word(2)}\n    {word(3)}\n"))),
    }


def words_of(example: Example) -> set[str]:
    """Every word in a conversation."""
    text = repr([example.messages, example.tools])
    return {word(number) for number in range(20) if word(number) in text}


def expected(example: Example, template: str) -> set[str] | None:
    """By transformers alone: the words that are left out ("    " where the indentation is); None for an error."""
    backend = Tokenizer(models.BPE())  # nothing is tokenized
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = template
    reads = probe_template_reasoning(template)
    turns = [dict(turn) for turn in example.messages]
    for turn in turns:
        if reads.fields and "reasoning_content" in turn:  # the name under which the template looks for it
            turn[reads.fields[0]] = turn.pop("reasoning_content")
        if reads.parts:
            turn["content"] = [{"type": "text", "text": turn["content"]}]
    tools: Any = list(example.tools) if example.tools else None
    asked = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
    try:  # what is given and what has to be written, turn by turn: some templates move the system message each time
        text = "".join(
            str(tokenizer.apply_chat_template(turns[:n], tools=tools, tokenize=False, add_generation_prompt=asks))
            for turn in asked
            for n, asks in ((turn, True), (turn + 1, False))
        )
    except Exception:  # templates raise what they like
        return None
    lost = {one for one in words_of(example) if one not in text}
    if reads.opens:  # the prompt opens a thought, which SureFit completes with the row's own (docs/data.md)
        lost -= {word(3)}
    indented = f"    {word(2)}"
    return lost | ({"    "} if indented in repr(example.messages) and indented not in text else set())


def said(example: Example, template: str) -> bool | None:
    """Whether SureFit says that something is left out; None where it says that the template does not take the row."""
    facts = TokenizerFacts(bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template)
    light = LightTemplate(facts, {})
    try:
        found = TemplateLossFinder(light.segments).losses(example, light.segments(example))
    except DataError:
        return None
    return any(name in LOST for name, _ in found)


def outcomes(template: str) -> Iterator[tuple[str, str, str]]:
    """(shape, outcome, what) of each shape with one template."""
    for name, example in shapes().items():
        due, own = expected(example, template), said(example, template)
        if own is None:
            # No error, but no answer follows the generation prompt either: training stops there, and says so.
            yield name, "agreed" if due is None else "stopped", ""
        elif due is None:
            yield name, "missed error", ""
        elif bool(due) == own:
            yield name, "agreed", ""
        else:
            yield name, "silent" if due else "false alarm", ", ".join(sorted(due))


def templates(folder: Path) -> dict[str, str]:
    """Name → text of the templates in a folder; copies that TRL has marked for training are left out."""
    files = sorted(folder.glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files if not file.stem.endswith("_training")}


def chosen(folders: list[str], count: int) -> dict[str, str]:
    """Up to so many different templates, evenly spread over the folders' names."""
    every = {
        f"{Path(folder).name}/{name}": text for folder in folders for name, text in templates(Path(folder)).items()
    }
    different = list({text: name for name, text in reversed(every.items())}.items())[::-1]
    step = max(1.0, len(different) / count)
    return {different[int(n * step)][1]: different[int(n * step)][0] for n in range(min(count, len(different)))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--templates", type=int, default=60)
    parser.add_argument("--show", type=int, default=20)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    wrong = []
    used = chosen(arguments.folders, arguments.templates)
    for name, template in used.items():
        for shape, outcome, what in outcomes(template):
            counts[outcome] += 1
            if outcome not in ("agreed", "stopped"):
                wrong.append(f"{name}: {shape}: {outcome} {what}")
    for line in wrong[: arguments.show]:
        print(line)
    print(
        f"{len(used)} templates, {len(shapes())} shapes: {counts['agreed']:,} agreed, {counts['stopped']:,} stopped by "
        f"an error of SureFit's own, {counts['silent']:,} silent losses, {counts['missed error']:,} missed errors, "
        f"{counts['false alarm']:,} false alarms"
    )


if __name__ == "__main__":
    main()
