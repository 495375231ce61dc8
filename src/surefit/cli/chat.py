"""The verb `chat`: talk to a run's model, with the base beside it on request."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.options import Overrides, Target
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK, ConfigError, SureFitError
from surefit.core.units import plural

if TYPE_CHECKING:
    from surefit.generate.engine import Generation
    from surefit.stages.chatting import Chat, ChatModel
    from surefit.stages.run_context import CheckedRun

COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system prompt, and forget the conversation; without TEXT: none",
    "/save FILE": "append the conversation to a .jsonl file, as a training row",
    "/help": "list these commands",
    "/quit": "leave (also Ctrl-D)",
}
NAMES = {"/exit", *(usage.partition(" ")[0] for usage in COMMANDS)}
"""Without a terminal, a line that begins with another word is a message, such as a path."""


@verb
def chat(
    out: Output,
    target: Target,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Send this message and end; repeatable."),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="base, adapter, merged, model or step-N; default: the best there is.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="The base model answers too, side by side.")] = False,
    system: Annotated[
        str | None, typer.Option(help="System prompt; default: the one that all training rows have. '' for none.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per answer; default: evaluate.max_new_tokens.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature; default: evaluate.temperature, 0 is greedy.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="At the end append the conversation to this .jsonl file.")
    ] = None,
    overrides: Overrides = None,
) -> int:
    """Talk to a trained model. Messages come from the terminal, from -p, or line by line from standard input."""
    from surefit.stages.chatting import open_chat_models, require_rows_file
    from surefit.stages.run_context import load_checked_run

    run = load_checked_run(target, overrides, training=False)
    if save is not None:
        require_rows_file(run, save)
    models = open_chat_models(run, _wanted_variants(run, variant, compare))
    conversation = start_conversation(out, run, models, system, max_new_tokens, temperature)
    records: list[dict[str, Any]] = []
    try:
        _converse(out, run, conversation, prompt, records)
    finally:  # what was said before a failure is not lost
        if save is not None and conversation.turns.get(models[-1].name):
            _save(out, run, conversation, save)
    out.result({"variants": [model.name for model in models], "system": conversation.system, "turns": records})
    return EXIT_OK


def _converse(
    out: Output, run: CheckedRun, conversation: Chat, prompt: list[str] | None, records: list[dict[str, Any]]
) -> None:
    """Answer every message, and add the answers to `records`."""
    for message in _messages(out, prompt):
        if prompt is None and (message.partition(" ")[0] in NAMES or (message[0] == "/" and sys.stdin.isatty())):
            if not _obey(out, run, conversation, message):
                break
            continue
        try:
            answers = _answer_all(out, conversation, message)
            records.append({"prompt": message, "answers": {name: asdict(answer) for name, answer in answers.items()}})
        except KeyboardInterrupt:
            out.write("\n")
            if prompt is not None or not sys.stdin.isatty():
                raise
            out.note("interrupted: this message is forgotten")
        except SureFitError as error:
            if prompt is not None or not sys.stdin.isatty():
                raise
            out.error(error)


def _wanted_variants(run: CheckedRun, variant: str | None, compare: bool) -> list[str]:
    from surefit.cli.answer_rows import best_variant

    name = variant or best_variant(run)
    if compare and name == "base":
        raise ConfigError(
            "there is only the base model to compare", code="E1008", path=run.run.path, help="`surefit train` first"
        )
    return ["base", name] if compare else [name]


def start_conversation(
    out: Output,
    run: CheckedRun,
    models: list[ChatModel],
    system: str | None,
    max_new_tokens: int | None,
    temperature: float | None,
) -> Chat:
    """Return the conversation, and say which models answer under which settings."""
    from surefit.evaluate.generation_settings import list_generation_settings
    from surefit.evaluate.variants import variant_location
    from surefit.stages.chatting import Chat, training_system_prompt

    config = run.resolved.config
    settings = list_generation_settings(config, run.recipe)[0].decoding
    changes: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    decoding = replace(settings, batch_size=1, num_beams=1, **{k: v for k, v in changes.items() if v is not None})
    templated = run.model.has_chat_template is not False
    from_rows = training_system_prompt(run) if system is None and templated else None
    for model in models:
        out.note(f"{model.name}: {variant_location(config, run.run, model.name)}")
    if models[-1].name == "base":
        out.note("nothing is trained yet: the base model answers")
    if not templated:
        out.note("the model has no chat template: each message is continued as plain text")
        if system:
            raise ConfigError("a model without a chat template has no system prompt", code="E1022", field="--system")
    if from_rows:
        out.note(f"system prompt of the training rows: {from_rows}")
    if run.recipe.columns and not run.recipe.parts:
        out.note(f"recipe {run.recipe.name} builds its prompts from {', '.join(run.recipe.columns)}; here you write "
                 "the prompt yourself. `surefit predict` answers such rows")  # fmt: skip
    if sys.stdin.isatty() and not out.as_json:
        out.note("/help lists the commands; Ctrl-C ends an answer, Ctrl-D the conversation")
    return Chat(models, decoding, from_rows or system or "", templated)


def _messages(out: Output, prompts: list[str] | None) -> Iterator[str]:
    """Yield the user's messages: from `--prompt`, from the terminal, or from the lines of standard input."""
    if prompts is not None:
        yield from prompts
        return
    if not sys.stdin.isatty():
        yield from (text for line in sys.stdin if (text := line.strip()))
        return
    import readline  # noqa: F401  `input` then edits lines and recalls earlier ones

    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            out.write("\n")
            return
        except KeyboardInterrupt:
            out.write("\n")
            continue
        if text:
            yield text


def _answer_all(out: Output, conversation: Chat, message: str) -> dict[str, Generation]:
    """Print every model's answer while it is generated, and return them by variant."""
    answers: dict[str, Generation] = {}
    for model in conversation.models:
        if len(conversation.models) > 1:
            out.say(f"{model.name}:", "bold")
        generation = conversation.answer(message, model, out.write)
        out.write("\n")
        if generation.truncated:
            out.note(
                f"cut after {generation.tokens:,} tokens: --max-new-tokens allows more"
                if generation.tokens
                else "the conversation fills the model's context: /reset begins a new one"
            )
        answers[model.name] = generation
    conversation.keep(message, answers)
    return answers


def _obey(out: Output, run: CheckedRun, conversation: Chat, message: str) -> bool:
    """Follow a command of `COMMANDS`; return whether the conversation goes on."""
    name, _, argument = message.partition(" ")
    argument = argument.strip()
    if name in ("/quit", "/exit"):
        return False
    if name == "/reset":
        conversation.reset()
        out.note("the conversation is forgotten")
    elif name == "/system" and not conversation.templated:
        out.note("the model has no chat template, so no system prompt")
    elif name == "/system":
        conversation.reset()
        conversation.system = argument
        out.note(f"system prompt: {argument or 'none'}")
    elif name == "/save" and argument:
        try:
            _save(out, run, conversation, Path(argument))
        except SureFitError as error:
            out.error(error)
    else:
        if name not in ("/help", "/save"):
            out.note(f"no command {name}")
        for usage, effect in COMMANDS.items():
            out.note(f"  {usage:<14}  {effect}")
    return True


def _save(out: Output, run: CheckedRun, conversation: Chat, path: Path) -> None:
    """Append the tuned model's conversation to a file of rows."""
    from surefit.stages.chatting import append_conversation

    name = conversation.models[-1].name
    messages, cut = conversation.conversation(name), len(conversation.cut.get(name, ()))
    if cut:
        out.note(f"{plural(cut, 'answer')} cut by the token limit: not saved as answers to train on")
        if not any(turn["role"] == "assistant" and turn.get("weight") != 0 for turn in messages):
            out.note(f"nothing saved to {path}: --max-new-tokens allows longer answers")
            return
    out.note(f"Saved to {path}: {plural(append_conversation(run, path, messages), 'row')}")
