"""Chat templates as published, turn by turn: what is trained equals what the model is given and has to write.

PYTHONPATH=src python benchmarks/chat_templates.py FOLDER ... [--page docs/chat-templates.md]

FOLDER holds *.jinja files, such as those of an installed package; its name in the page is what stands before `=`
(`"trl 1.16.0=.venv/…/trl/chat_templates"`). Copies that TRL has marked for training are left out: they are the same.

Each template writes 36 conversations: one, two and three answers, with and without a system message, tools and
reasoning, in a field of its own and as tags in the content (18 where the template speaks of no tools). Of each learnt
stretch of each token example two things are compared, by transformers' own rendering and not by SureFit's: the ids
before it are those that `tokenize_prompt` gives the model when it is asked for that turn, and decode to the rendering
of the earlier turns with a generation prompt; the stretch is what rendering one turn more adds.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby, product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surefit.core.errors import DataError
from surefit.core.rundir import write_atomic
from surefit.data.rows.reasoning import convert_reasoning
from surefit.data.tokens.tokenize import conversation_segments, encode_turns, tokenize_prompt
from surefit.facts.chat_template import TEMPLATE_DATE
from surefit.facts.thinking import probe_template_reasoning, strip_reasoning
from surefit.generate.processors import decode_answer
from surefit.task import Example, Message

TOOLS = ({
    "type": "function",
    "function": {
        "name": "look", "description": "Looks it up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "What."}}},
    },
},)  # fmt: skip
CALL_ID = "surefit01"
REASONING = ("none", "field", "tags")
CALLING: dict[str, Any] = {"system": False, "tools": True, "reasoning": "none"}
MARKS = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|\[\|\w+\|\]|\[e~\[")
"""What templates write that tokenizers have as one token."""


@lru_cache(maxsize=1)
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte: any text decodes to itself."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def conversation(answers: int, name: str, *, system: bool, tools: bool, reasoning: str) -> Example:
    """Questions and answers; with tools, the first answer is a call, its result, and what is made of it.

    Args:
        name: the field that holds reasoning.
        reasoning: of `REASONING`, how the answers have it.
    """
    turns: list[Message] = [{"role": "system", "content": "Be brief."}] if system else []
    for n in range(answers):
        turns.append({"role": "user", "content": f"question {n}"})
        if tools and n == 0:
            call = {"id": CALL_ID, "type": "function", "function": {"name": "look", "arguments": {"word": "x"}}}
            own = {name: "a thought before the call"} if reasoning == "field" else {}
            turns.append({"role": "assistant", "content": "", "tool_calls": [call], **own})
            turns.append({"role": "tool", "name": "look", "tool_call_id": CALL_ID, "content": "found 7"})
        thought = f"thought {n}"
        content = f"<think>\n{thought}\n</think>\n\nanswer {n}" if reasoning == "tags" else f"answer {n}"
        turns.append({"role": "assistant", "content": content, **({name: thought} if reasoning == "field" else {})})
    return Example(tuple(turns), TOOLS if tools else None)


def conversations(template: str) -> Iterator[tuple[tuple[Any, ...], Example, Example]]:
    """(what it has, the conversation, the same with its reasoning where the template looks for it)."""
    fields = probe_template_reasoning(template).fields
    name = fields[0] if fields else "reasoning_content"
    for shape in product((1, 2, 3), (False, True), (False, True) if "tool" in template else (False,), REASONING):
        answers, system, tools, reasoning = shape
        own = conversation(answers, name, system=system, tools=tools, reasoning=reasoning)
        twin = "field" if fields and reasoning == "tags" else reasoning
        read = conversation(answers, name, system=system, tools=tools, reasoning=twin)
        if tools and twin != reasoning:  # tags have no room for the thought before the call
            read = replace(read, messages=tuple(
                {key: value for key, value in turn.items() if key != name or "tool_calls" not in turn}
                for turn in read.messages
            ))  # fmt: skip
        yield shape, own, read


def rendered(tokenizer: PreTrainedTokenizerFast, example: Example, turns: int, asks: bool) -> str:
    """By transformers alone."""
    turned = list(example.messages[:turns])
    if tokenizer.chat_template and probe_template_reasoning(tokenizer.chat_template).parts:
        turned = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turned]
    return str(
        tokenizer.apply_chat_template(
            turned, tools=list(example.tools) if example.tools else None,
            add_generation_prompt=asks, tokenize=False, date_string=TEMPLATE_DATE,
        )
    )  # fmt: skip


def differences(example: Example, read: Example, tokenizer: PreTrainedTokenizerFast) -> tuple[int, list[str]]:
    """(token examples, what is trained otherwise than the model is given it or has to write it).

    Args:
        read: the conversation as transformers is to render it.

    Raises:
        DataError: the conversation is refused.
    """
    made = encode_turns(tokenizer, [example])[0]
    asked = [n for n, turn in enumerate(example.messages) if turn["role"] == "assistant" and turn.get("weight") != 0]
    found = []
    for ids, mask in made:
        end = 0
        for learnt, group in groupby(mask):
            start, end = end, end + len(list(group))
            if learnt:
                if not asked:
                    return len(made), ["more stretches are learnt than there are answers"]
                found += _compared(example, read, asked.pop(0), ids[:start], ids[start:end], tokenizer)
    return len(made), [*found, *(f"turn {turn} is not learnt" for turn in asked)]


def _compared(
    example: Example, read: Example, turn: int, before: list[int], learnt: list[int], tokenizer: PreTrainedTokenizerFast
) -> Iterator[str]:
    given, whole = rendered(tokenizer, read, turn, True), rendered(tokenizer, read, turn + 1, False)
    text, written = str(tokenizer.decode(before)), str(tokenizer.decode(learnt))
    if end := next_begins(tokenizer, bool(read.messages[turn].get("tool_calls"))):
        if not written.endswith(end):
            yield f"turn {turn} is {written!r}, without the {end!r} that ends it"
        written = written.removesuffix(end)
    if text != given:
        yield f"turn {turn} is trained behind {text[-60:]!r}, asked for with {given[-60:]!r}"
    if before != tokenize_prompt(Example(example.messages[:turn], example.tools), tokenizer):
        yield f"turn {turn} is trained behind other ids than it is asked for with"
    if whole.startswith(given):
        if written != whole[len(given) :]:
            yield f"turn {turn} is {written!r}, written as {whole[len(given) :]!r}"
    elif not _accounted(read.messages[turn - 1], read.messages[turn], given, whole, written):
        yield f"turn {turn} is {written!r}, which nothing accounts for"


def next_begins(tokenizer: PreTrainedTokenizerFast, calls: bool) -> str:
    """Of a template that writes nothing behind an answer: the mark with which the next turn begins, behind a call that
    of a result. Empty for all others, and where no mark does."""
    asked: Message = {"role": "user", "content": "?"}
    own: Message = {"role": "assistant", "content": "answer"}
    try:
        if not rendered(tokenizer, Example((asked, own)), 2, False).rstrip().endswith("answer"):
            return ""
        turns = (asked, own, asked) if not calls else (asked, *conversation(1, "", **CALLING).messages[1:3])
        before, longer = (rendered(tokenizer, Example(turns), n, False) for n in (2, 3))
        if calls and (end := next_begins(tokenizer, False)) and before.endswith(end):
            return ""
    except Exception:  # templates raise what they like
        return ""
    rest = longer.removeprefix(before)
    mark = MARKS.match(rest.lstrip()) if longer.startswith(before) else None
    return rest[: len(rest) - len(rest.lstrip())] + mark[0] if mark else ""


def with_marks(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer, with everything that the template marks turns with as a token of its own."""
    marks = set()
    for calls in (False, True):
        with suppress(Exception):  # templates raise what they like
            turns = conversation(2, "", **CALLING | {"tools": calls}).messages
            marks |= set(MARKS.findall(rendered(tokenizer, Example(turns), len(turns), False)))
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    return tokenizer


def said(written: str, plain: Sequence[str] = ()) -> str:
    """What the engine makes of an answer of these tokens; every mark is a special token but for those in `plain`."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    marks = [mark for mark in dict.fromkeys(MARKS.findall(written)) if mark not in plain]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return decode_answer(tokenizer, tokenizer(written, add_special_tokens=False).input_ids)


def scored(template: str, tokenizer: PreTrainedTokenizerFast) -> bool | None:
    """Whether of an answer as the template has it written, with reasoning where it takes some, the answer alone is
    scored; None where it takes no answer."""
    fields = probe_template_reasoning(template).fields
    for reasoning in ("field" if fields else "tags", "none"):
        own = conversation(1, *fields[:1] or ("",), system=False, tools=False, reasoning=reasoning)
        try:
            segments = conversation_segments(own, tokenizer)[0]
        except DataError:
            continue
        written = next(text for text, learnt in segments if learnt)
        return all(
            strip_reasoning(said(written, plain)).strip() == "answer 0" for plain in ((), ("<think>", "</think>"))
        )
    return None


def _accounted(last: Message, own: Message, given: str, whole: str, written: str) -> bool:
    """Of a text with the answer that does not start with its prompt: whether it ends with what is learnt, right behind
    the last turn and what asks for an answer; and with the row's thought in between where the prompt has opened one."""
    thought = re.search(r"(<think>|<\|channel>thought|<\|START_THINKING\|>)([^!-~]*)(</?[^!-~]*\S+>)?\s*$", given)
    base = given[: thought.start()] if thought else given
    end = base[base.rfind(last["content"]) :]
    if thought is None or thought[3] is not None:
        start = whole.removesuffix(written)
        return whole.endswith(written) and start.removesuffix("</think>").endswith(end)
    answer = whole[whole.rfind(end) + len(end) :].rpartition("</think>")[2].lstrip("\n")
    inner = next((text for key, text in own.items() if key not in ("role", "content", "tool_calls")), None)
    inner = inner or own["content"].removeprefix("<think>\n").partition("\n</think>")[0]
    return written == inner + ("\n</think>\n\n" if thought[2] else "</think>") + answer


@dataclass
class Judged:
    """A template after all conversations.

    Attributes:
        kinds: name of a column → "one", the number of token examples, or "refused".
        equal: conversations whose every turn is what it has to be; of `made`.
        refused: conversations, and `why` with how often.
        wrong: what is not equal.
        scored: as `scored` says of the template.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    made: int = 0
    equal: int = 0
    refused: int = 0
    why: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    scored: bool | None = None


COLUMNS = {
    "no reasoning": (3, False, False, "none"),
    "tools": (3, False, True, "none"),
    "reasoning": (3, False, False, "field"),
    "in content": (3, False, False, "tags"),
}


def judge(template: str) -> Judged:
    """All conversations with one template."""
    tokenizer, judged = copy.deepcopy(byte_tokenizer()), Judged()
    tokenizer.chat_template = template
    tokenizer = with_marks(tokenizer)
    for shape, example, read in conversations(template):
        try:
            count, wrong = differences(example, read, tokenizer)
        except DataError as error:
            kind = "refused"
            judged.refused += 1
            judged.why[error.message.partition(":")[0] if "refuses" in error.message else "no answer to train"] += 1
        else:
            kind = "one" if count == 1 else str(count)
            judged.made += 1
            judged.equal += not wrong
            judged.wrong += [f"{shape}: {what}" for what in wrong]
        judged.kinds |= {name: kind for name, wanted in COLUMNS.items() if wanted == shape}
    judged.scored = scored(template, tokenizer)
    dropped = convert_reasoning(
        conversation(3, "reasoning_content", system=False, tools=False, reasoning="tags"), "drop"
    )
    try:
        judged.kinds["drop"] = {1: "one"}.get(n := len(encode_turns(tokenizer, [dropped])[0]), str(n))
    except DataError:
        judged.kinds["drop"] = "refused"
    return judged


def templates(folder: Path) -> dict[str, str]:
    """Name → text of the templates in a folder."""
    files = sorted(folder.glob("*.jinja"))
    return {f.stem: f.read_text(encoding="utf-8") for f in files if not f.stem.endswith("_training")}


def read_as(template: str) -> str:
    """Where a template finds reasoning, in words."""
    reads = probe_template_reasoning(template)
    words = [f"`{name}`" for name in reads.fields] + ["tags"] * reads.tags + ["always open"] * reads.opens
    return ", ".join(words) or "nowhere"


def table(sources: dict[str, Path]) -> tuple[list[str], Counter[str]]:
    """The page's lines, and sums."""
    sums: Counter[str] = Counter()
    lines = []
    for source, folder in sources.items():
        names = [*COLUMNS, "drop"]
        head = ["template", "reasoning from", *names, "bytes equal", "answer scored"]
        lines += ["", f"### {source}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for name, text in templates(folder).items():
            judged = judge(text)
            sums += Counter(
                templates=1, made=judged.made, equal=judged.equal, refused=judged.refused,
                split=any(kind.isdigit() for kind in judged.kinds.values()), unusable=not judged.made,
                scored=judged.scored is True, thought=judged.scored is not None,
            )  # fmt: skip
            cells = [judged.kinds.get(column, "–") for column in names]
            share = f"{judged.equal} of {judged.made}" if judged.made else "none made"
            cells += [share, {True: "yes", False: "no", None: "–"}[judged.scored]]
            lines.append(f"| {name} | {read_as(text)} | {' | '.join(cells)} |")
            for what in judged.wrong[:3]:
                print(f"{source}: {name}: {what}")
    return lines, sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    pairs = (folder.rpartition("=") for folder in arguments.folders)
    lines, sums = table({name or Path(place).name: Path(place) for name, _, place in pairs})
    print(
        f"{sums['templates']} templates, {sums['split']} of them divide some conversation; {sums['equal']:,} of "
        f"{sums['made']:,} conversations byte for byte, {sums['refused']:,} refused; "
        f"{sums['unusable']} templates take none; the answer alone is scored in {sums['scored']} of {sums['thought']}"
    )
    if arguments.page:
        head = arguments.page.read_text(encoding="utf-8").partition(BEGIN)[0] + BEGIN
        write_atomic(arguments.page, head + "\n" + "\n".join(lines) + "\n")


BEGIN = "<!-- benchmarks/chat_templates.py writes what follows -->"

if __name__ == "__main__":
    main()
