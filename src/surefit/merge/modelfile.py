"""Ollama's Modelfile beside an exported GGUF file: its chat template in Go's language, system prompt and settings.

Ollama never runs the Jinja template that a GGUF file holds. Where a Modelfile has no TEMPLATE, it takes the one of its
own templates whose Jinja text is nearly the same (a Levenshtein distance below 100), or else `{{ .Prompt }}`, which
drops the roles (ollama: server/model.go, template/template.go). So a template is written, or nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefit.core.errors import ModelError
from surefit.facts.gguf import GgufHeader
from surefit.facts.gguf_tokenizer import SPLITS
from surefit.facts.turn_texts import Conversation, TurnTexts, find_turn_texts

MODELFILE = "Modelfile"
LEAST_CONTEXT = 4096
"""num_ctx where rows are short: Ollama's own default, as far as the model reads."""
PLAIN = "{{ .Prompt }}"
"""The template of a model that continues text."""


@dataclass(frozen=True)
class OllamaSettings:
    """What a Modelfile says beside the weights.

    Attributes:
        texts: the chat template; None for a model that continues plain text.
        bos: the token that begins a text, if the tokenizer has one.
        system: the system prompt that all rows have.
        stops: texts that end an answer.
        max_length: most tokens of prompt and answer in training.
        temperature: as in `evaluate`.
    """

    texts: TurnTexts | None
    bos: str | None
    system: str | None
    stops: Sequence[str]
    max_length: int
    temperature: float


def require_turn_texts(tokenizer: object, path: str) -> TurnTexts | None:
    """Return the texts of a tokenizer's chat template; None if it has none.

    Raises:
        ModelError: its conversations cannot be written by a template of Ollama's in this form.
    """
    from surefit.facts.chat_template import TEMPLATE_DATE

    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None

    def render(messages: Conversation) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(  # type: ignore[attr-defined]
                    list(messages), add_generation_prompt=True, tokenize=False, date_string=TEMPLATE_DATE
                )
            )
        except Exception as error:  # a template is foreign code: it can fail in any way
            raise ValueError(str(error)) from error

    texts = find_turn_texts(render)
    writes_today = "strftime_now" in str(template) and "date_string" not in str(template)
    if texts is None or writes_today:
        why = "it writes today's date" if writes_today else "it changes or moves turns"
        raise ModelError(
            f"this model's chat template cannot be written exactly for Ollama: {why}",
            code="E6971",
            path=path,
            help="Ollama would write the prompts differently than in training. llama.cpp runs the template as it is: "
            "`surefit export RUN --format gguf`, then `llama-server -m model.gguf --jinja`",
        )
    return texts


def modelfile_text(settings: OllamaSettings, file: str, header: GgufHeader) -> str:
    """Return the Modelfile for a GGUF file beside it.

    Raises:
        ModelError: the system prompt or a stop text cannot be quoted.
    """
    texts = settings.texts
    if texts is not None and settings.bos and adds_bos(header):
        texts = texts.without_start(settings.bos)
    lines = [f"FROM ./{file}", f'TEMPLATE """{texts.go_template() if texts else PLAIN}"""']
    system, stops = quoted_texts(settings, file)
    lines += [f"SYSTEM {text}" for text in system] + [f"PARAMETER stop {text}" for text in stops]
    most = header.of_model("context_length")
    context = max(settings.max_length, LEAST_CONTEXT)
    lines += [
        f"PARAMETER num_ctx {min(context, most) if isinstance(most, int) else context}",
        f"PARAMETER temperature {settings.temperature:g}",
        "PARAMETER repeat_penalty 1",  # Ollama's default of 1.1 changes greedy answers
    ]
    if settings.temperature > 0:  # evaluate samples from all tokens; Ollama's defaults keep 40 of them, and 0.9
        lines += ["PARAMETER top_k 0", "PARAMETER top_p 1", "PARAMETER min_p 0"]
    return "\n".join(lines) + "\n"


def quoted_texts(settings: OllamaSettings, path: str) -> tuple[list[str], list[str]]:
    """Return the system prompt, if there is one, and the stop texts, as a Modelfile quotes them.

    Raises:
        ModelError: one cannot be quoted; without it the model would answer otherwise than in training.
    """
    texts = {"system prompt": [] if settings.system is None else [settings.system],
             "stop text": list(dict.fromkeys(settings.stops))}  # fmt: skip
    for kind, ones in texts.items():
        for text in ones:
            if quoted(text) is None:
                raise ModelError(
                    f"a Modelfile cannot quote this {kind}: {text[:80]!r}",
                    code="E6890",
                    path=path,
                    help="quotation marks cannot stand at its ends, nor three together. Change the text in the rows or "
                    "run `surefit export RUN --format gguf` and give the text with each request",
                )
    system, stops = ([str(quoted(text)) for text in ones] for ones in texts.values())
    return system, stops


def adds_bos(header: GgufHeader) -> bool:
    """Return whether llama.cpp begins a text with the token for that, which a template then must not write."""
    split = SPLITS.get(str(header.metadata.get("tokenizer.ggml.pre")))
    default = header.metadata.get("tokenizer.ggml.model") == "llama" or (split is not None and split.starts)
    return bool(header.metadata.get("tokenizer.ggml.add_bos_token", default))


def quoted(text: str) -> str | None:
    """Return a text as a Modelfile quotes it, which has no escapes; None where none of its two quotes can hold it.

    >>> quoted("a"), quoted('say "a" twice'), quoted('a "b"')
    ('"a"', '\"\"\"say "a" twice\"\"\"', None)
    """
    if '"' not in text:
        return f'"{text}"'
    if '"""' in text or text.startswith('"') or text.endswith('"'):
        return None
    return f'"""{text}"""'
