"""A conversation with the models of a run, rendered with the template and the stop tokens of its training."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from surefit.config.inputs import input_files
from surefit.core.errors import ConfigError, SureFitError
from surefit.core.output import json_lines_with, output_file
from surefit.core.rundir import machine_errors
from surefit.data.rows.layouts import to_prompts
from surefit.data.tokens.tokenize import tokenize_beginning, tokenize_prompt
from surefit.evaluate.variants import SERVED, open_variants, select_variants
from surefit.facts.thinking import strip_reasoning
from surefit.generate.engine import DecodingConfig, Generation, generate
from surefit.generate.streaming import OnText
from surefit.model.saved import load_adapted, load_run_tokenizer
from surefit.stages.run_context import CheckedRun
from surefit.task import Example, Message

SAMPLED_ROWS = 64
"""Training rows that are read for their system prompt."""


class ChatModel(NamedTuple):
    """A variant of the run that answers.

    Attributes:
        name: the variant.
        active: context in which the model is this variant: base and adapter are one model, with the factors off and on.
    """

    name: str
    model: Any
    tokenizer: PreTrainedTokenizerBase
    active: Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Chat:
    """A conversation in which every model continues its own answers.

    Attributes:
        system: the system prompt; empty for none.
        templated: whether the models have a chat template; otherwise each message is plain text to continue.
        turns: variant → the messages so far, without the system prompt.
        cut: variant → numbers of the turns that are answers which the token limit ended.
    """

    models: Sequence[ChatModel]
    decoding: DecodingConfig
    system: str = ""
    templated: bool = True
    turns: dict[str, list[Message]] = field(default_factory=dict)
    cut: dict[str, set[int]] = field(default_factory=dict)

    def answer(self, text: str, model: ChatModel, on_text: OnText) -> Generation:
        """Return a model's answer to the next user message; `keep` adds them to the turns once all have answered.

        Raises:
            DataError: the chat template does not support the conversation, such as a system prompt.
            MachineError: the conversation does not fit in memory.
        """
        history = self.turns.get(model.name, [])
        question: Message = {"role": "user", "content": text}
        if self.templated:
            prompt = tokenize_prompt(Example((*self._system_turns(), *history, question)), model.tokenizer)
        else:
            prompt = tokenize_beginning(Example(text=text), model.tokenizer)
        with model.active():
            (generation,) = generate(model.model, model.tokenizer, [prompt], self.decoding, on_text=on_text)
        return generation

    def keep(self, text: str, answers: Mapping[str, Generation]) -> None:
        """Add a user message and the answers to it, by variant; an empty answer is not kept."""
        for name, answer in answers.items():
            if self._add(name, text, answer.text) and answer.truncated:
                self.cut.setdefault(name, set()).add(len(self.turns[name]) - 1)

    def replace(self, exchanges: Iterable[tuple[str, Mapping[str, str]]]) -> None:
        """Forget all turns, and take these instead: user messages, each with the answers to it by variant."""
        self.reset()
        for text, answers in exchanges:
            for name, answer in answers.items():
                self._add(name, text, answer)

    def _add(self, name: str, text: str, answer: str) -> bool:
        """Add a message and a variant's answer to it; return whether there is an answer to keep."""
        final = strip_reasoning(answer)  # templates remove the thoughts of earlier turns
        if final.strip():
            turns: list[Message] = [{"role": "user", "content": text}, {"role": "assistant", "content": final}]
            self.turns.setdefault(name, []).extend(turns)
        return bool(final.strip())

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns.clear()
        self.cut.clear()

    def conversation(self, variant: str) -> list[Message]:
        """Return a variant's conversation as the `messages` of a training row, without answers that were cut: at its
        end they are left out, before it they are only context."""
        turns, cut = list(self.turns.get(variant, [])), self.cut.get(variant, set())
        while len(turns) - 1 in cut:
            del turns[-2:]
        messages = [{**turn, "weight": 0} if number in cut else turn for number, turn in enumerate(turns)]
        return [*self._system_turns(), *messages]

    def _system_turns(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []


def open_chat_models(run: CheckedRun, wanted: Sequence[str]) -> list[ChatModel]:
    """Load the wanted variants, all at once; base and adapter share one model.

    Raises:
        ConfigError: a variant that does not exist, or one behind a server.
    """
    config = run.resolved.config
    if SERVED in wanted:
        raise ConfigError(
            "a served model does not stream here", code="E8044", help="talk to it with the server's own client"
        )
    chosen = select_variants(config, run.run, wanted)
    if {"base", "adapter"} <= set(chosen):
        model = load_adapted(config.answering, run.run.adapter, run.hardware)
        tokenizer = load_run_tokenizer(config.model, run.run, config.answering)
        shared = [
            ChatModel("base", model, tokenizer, model.disable_adapter),
            ChatModel("adapter", model, tokenizer, contextlib.nullcontext),
        ]
        return shared + _open_each(run, [name for name in chosen if name not in ("base", "adapter")])
    return _open_each(run, chosen)


def _open_each(run: CheckedRun, variants: Sequence[str]) -> list[ChatModel]:
    return [
        ChatModel(name, model, tokenizer, contextlib.nullcontext)
        for variant in variants
        for name, model, tokenizer in open_variants(run.resolved.config, run.hardware, run.run, [variant])
    ]


def training_system_prompt(run: CheckedRun) -> str | None:
    """Return the system prompt that all sampled training rows have, exactly the same; None if there is none, or the
    rows are not on this machine."""
    if run.rows is None:
        return None
    try:
        examples = to_prompts(run.rows.sample(SAMPLED_ROWS), run.recipe, "skip").examples
    except SureFitError:  # the check reports this
        return None
    first_turns = [example.messages[0] for example in examples if example.messages]
    prompts = {turn["content"] if turn["role"] == "system" else None for turn in first_turns}
    (prompt,) = prompts if len(prompts) == 1 else {None}
    return prompt if isinstance(prompt, str) else None


def require_rows_file(run: CheckedRun, path: Path) -> Path:
    """Return the path of a file to append conversations to.

    Raises:
        ConfigError: it is an input of the run, or a file of another kind.
    """
    path = path.expanduser()
    inputs = input_files(run.resolved.config, run.loaded.path)
    inputs |= {f"the run's {artefact.name}": artefact for artefact in run.run.artefacts()}
    help_text = "name a .jsonl file of messages rows, or a new file"
    return output_file(path, inputs, earlier=json_lines_with("messages"), as_rows=True, option="/save", help=help_text)


def append_conversation(run: CheckedRun, path: Path, messages: Sequence[Message]) -> int:
    """Append a conversation to a JSON Lines file of `messages` rows, and return the file's number of rows.

    Raises:
        ConfigError: there is nothing to save; and as `require_rows_file`.
    """
    path = require_rows_file(run, path)
    if not any(turn["role"] == "assistant" for turn in messages):
        raise ConfigError("there is no answer to save yet", code="E8045", help="ask something first")
    with machine_errors(path), open(path, "a+b") as file:
        file.seek(0)
        content = file.read()
        separator = b"" if not content or content.endswith(b"\n") else b"\n"
        line = json.dumps({"messages": list(messages)}, ensure_ascii=False)
        file.write(separator + line.encode("utf-8", "backslashreplace") + b"\n")
    return content.count(b"\n") + len(separator) + 1
