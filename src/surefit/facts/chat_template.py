"""The chat template that a config sets in place of the model's own (`model.chat_template`)."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path

from surefit.core.errors import ModelError, did_you_mean
from surefit.core.units import KIB
from surefit.facts.named_templates import DEFAULT, template_files
from surefit.facts.template import TemplateRefused, render_chat_template

FIELD = "model.chat_template"
PLAIN_NAME = "plain"
MAX_BYTES = 256 * KIB
TEMPLATE_DATE = "26 Jul 2024"
"""Date that Llama's templates write, their own fallback; without it they would write today's, and the tokens would
change every day."""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""Placeholders for a first check: the model's own tokens are not known where only the file is read."""
_FOLDER = Path(__file__).parent / "chat_templates"
PLAIN = (_FOLDER / "plain.jinja").read_text(encoding="utf-8")
"""For a base model: roles in words, and its own token of the end of a text after every answer. It needs no token that
the model has never seen, so nothing but the adapter has to be trained."""
NAMED = {PLAIN_NAME: PLAIN} | {
    name: (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in ("chatml", "llama3")
}
_HELP = (
    "name a Jinja file or a directory with chat_template.jinja, "
    f"or write one of {', '.join(NAMED)} for a base model without a template"
)
TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""Texts that a template needs as one token each: split into several tokens, users could write them as well."""


def bake_template_defaults(template: str, switches: Mapping[str, bool | int | str]) -> str:
    """Return the template with other defaults for switches that are not set on rendering: servers of the saved model
    then prompt it as it was trained, and can still set the switches otherwise.

    >>> bake_template_defaults("{{ enable_thinking }}", {"enable_thinking": False})
    '{%- if enable_thinking is not defined %}{% set enable_thinking = false %}{% endif %}\\n{{ enable_thinking }}'
    """
    # Templates are rendered with trim_blocks, which takes the line break, and lstrip_blocks, which needs it.
    defaults = "".join(
        f"{{%- if {name} is not defined %}}{{% set {name} = {json.dumps(value)} %}}{{% endif %}}\n"
        for name, value in switches.items()
    )
    # A trained model's template has them already.
    return template if template.startswith(defaults) else defaults + template


def require_tokens(wanted: str | None, vocabulary: Container[str] | None, eos_token: str | None) -> None:
    """Check that the tokenizer has the tokens of a named template; `vocabulary` is None where it is not known.

    Raises:
        ModelError: a token is missing.
    """
    missing = [token for token in TOKENS.get(wanted or "", ()) if vocabulary is not None and token not in vocabulary]
    if missing:
        problem = f"{wanted} needs {' and '.join(missing)}, which the tokenizer does not have"
        help_text = (
            f"write {PLAIN_NAME}, which needs no special tokens, or add them to the model and train its embeddings"
        )
        raise ModelError(problem, code="E2029", field=FIELD, help=help_text)
    if wanted == PLAIN_NAME and eos_token is None:
        problem = f"{PLAIN_NAME} ends answers with the tokenizer's end-of-text token, but this tokenizer has none"
        raise ModelError(problem, code="E2030", field=FIELD, help="name a Jinja file that ends answers another way")


def load_chat_templates(wanted: str) -> dict[str, str]:
    """Return the templates that `model.chat_template` names, by their names: all in a directory, such as a run's
    adapter; else the one text as the default.

    Raises:
        ModelError: it does not exist, is not a text, or is not a Jinja template.
    """
    if wanted in NAMED or not (files := _files_in(wanted)):
        return {DEFAULT: template_text(wanted)}
    # Only the default one has to write a conversation without tools.
    return {name: template_text(str(path)) if name == DEFAULT else _text_in(str(path)) for name, path in files.items()}


def _files_in(wanted: str) -> dict[str, Path]:
    """Return the template files of a directory that has a default one; empty for anything else."""
    try:
        files = template_files(Path(wanted).expanduser())
    except (OSError, RuntimeError):
        return {}
    return files if DEFAULT in files else {}


def template_text(wanted: str) -> str:
    """Return the template that `model.chat_template` names.

    Raises:
        ModelError: no such file, not a text, or not a Jinja template.
    """
    if wanted in NAMED:
        return NAMED[wanted]
    text = _text_in(wanted)
    try:
        render_chat_template(
            text, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}], special=SPECIAL
        )
    except TemplateRefused as error:
        problem = f"it cannot write a question and an answer: {error}"
        raise ModelError(problem, code="E2036", path=wanted, field=FIELD, help=_HELP) from None
    return text


def _text_in(wanted: str) -> str:
    try:
        path = Path(wanted).expanduser()
    except RuntimeError:  # ~somebody, a user without a home directory on this machine
        raise ModelError("no such file", code="E2031", path=wanted, field=FIELD, help=_HELP) from None
    try:
        if path.exists() and not path.is_file():
            raise ModelError("not a regular file", code="E2032", path=path, field=FIELD, help=_HELP)
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        not_found = f"no such file{did_you_mean(wanted, list(NAMED))}"
        problem = not_found if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise ModelError(problem, code="E2033", path=path, field=FIELD, help=_HELP) from None
    except UnicodeDecodeError:
        raise ModelError("not UTF-8 text", code="E2034", path=path, field=FIELD, help=_HELP) from None
    if len(data) > MAX_BYTES:
        raise ModelError(f"larger than {MAX_BYTES // KIB} KiB", code="E2035", path=path, field=FIELD, help=_HELP)
    return text
