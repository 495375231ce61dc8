"""The process behind the chat of `surefit ui`: messages come and answers go as lines of JSON, until its input ends.

A message comes with the conversation before it, so that this process remembers none: it may be a new one, and several
pages may talk to it.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefit.cli.chat import start_conversation
from surefit.cli.exits import verb
from surefit.cli.options import RunPath
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK, SureFitError

if TYPE_CHECKING:
    from surefit.generate.engine import Generation
    from surefit.stages.chatting import Chat


class LineOutput(Output):
    """Output whose notes are lines of JSON, too."""

    def note(self, text: str) -> None:
        """Write one note as a line."""
        self.result({"note": text})


@verb
def chat_worker(
    out: Output,
    run: RunPath,
    variant: Annotated[list[str], typer.Option(help="A variant that answers; repeatable.")],
) -> int:
    """Answer messages that a program sends as lines of JSON: {"message": TEXT, "turns": [[TEXT, ANSWERS]]}."""
    from surefit.stages.chatting import open_chat_models
    from surefit.stages.run_context import load_checked_run

    checked = load_checked_run(run, training=False)
    lines = LineOutput(as_json=True)
    conversation = start_conversation(lines, checked, open_chat_models(checked, variant), None, None, None)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        conversation.replace(request["turns"])
        lines.result({"done": True} | _answer(lines, conversation, request["message"]))
    return EXIT_OK


def _answer(lines: Output, conversation: Chat, message: str) -> dict[str, Any]:
    """Write every model's answer part by part; return them whole, with which were cut by the token limit, or why there
    is none."""
    answers: dict[str, Generation] = {}
    try:
        for model in conversation.models:

            def write(part: str, name: str = model.name) -> None:
                lines.result({"variant": name, "text": part})

            answers[model.name] = conversation.answer(message, model, write)
    except KeyboardInterrupt:
        return {"interrupted": True}
    except SureFitError as error:
        return {"error": error.message, "help": error.help}
    full = [name for name, answer in answers.items() if answer.truncated and not answer.tokens]
    cut = [name for name, answer in answers.items() if answer.truncated and answer.tokens]
    return {"answers": {name: answer.text for name, answer in answers.items()}, "cut": cut, "full": full}
