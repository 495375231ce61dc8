"""Answers from a server with OpenAI's chat protocol: vLLM, SGLang, and any other as far as the protocol goes.

The server renders the chat template and decodes; the settings are the same as in `generate.engine`. Only the standard
library is used.
"""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit, urlunsplit

from surefit.core.env import api_key, redact
from surefit.core.errors import ConfigError, MachineError
from surefit.core.progress import OnProgress, ignore_progress
from surefit.core.units import truncate_text
from surefit.facts.chat_template import TEMPLATE_DATE
from surefit.generate.constrained import choices_ebnf
from surefit.generate.engine import DecodingConfig, Generation
from surefit.task import Grammar, Message

TRANSIENT_STATUS_CODES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which another try may succeed: busy, restarting, a proxy's timeout."""
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each further try; a server's Retry-After replaces them, up to `LONGEST_WAIT`."""
LONGEST_WAIT = 60.0


Read = TypeVar("Read")


class _TransientError(Exception):
    """A failed try after which another one may succeed."""

    def __init__(self, problem: str, wait: float | None = None) -> None:
        super().__init__(problem)
        self.wait = wait


@dataclass(frozen=True)
class _Kind:
    """Parameters of one kind of server that OpenAI's protocol does not define; `name` is the server's own name."""

    name: str

    def neutral(self, switches: Mapping[str, Any]) -> dict[str, Any]:
        """Return parameters that keep the model's `generation_config.json` out of scores and the date out of Llama's
        prompts.

        Raises:
            ConfigError: this kind of server passes no switches to its chat template.
        """
        if self.name not in ("vllm", "sglang"):
            if switches:
                raise ConfigError(
                    "the server does not identify as vLLM or SGLang, and only these pass "
                    f"{', '.join(switches)} to the chat template",
                    code="E7060",
                    field="evaluate.chat_template_kwargs",
                    help="serve the model with one of them, or remove the switch",
                )
            return {}
        template_switches = {"date_string": TEMPLATE_DATE, **switches}
        return {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "chat_template_kwargs": template_switches}

    def constraint(self, grammar: Grammar) -> dict[str, Any]:
        """Return the parameters that constrain an answer to a grammar.

        Raises:
            ConfigError: this kind of server has none for it.
        """
        source = grammar.source
        if grammar.kind == "json_schema":
            assert isinstance(source, str)
            schema = {"name": "answer", "schema": json.loads(source), "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        if self.name == "vllm":  # since 0.12 these are the only names; 0.11 knows them too
            key = {"ebnf": "grammar", "regex": "regex", "choices": "choice"}[grammar.kind]
            return {"structured_outputs": {key: source if isinstance(source, str) else list(source)}}
        if self.name == "sglang":
            if grammar.kind == "regex":
                return {"regex": source}
            return {"ebnf": source if isinstance(source, str) else choices_ebnf(source)}
        raise ConfigError(
            f"the server does not identify as vLLM or SGLang, and only these support a grammar of kind {grammar.kind}",
            code="E7061",
            field="evaluate.constrained",
            help="set evaluate.constrained to none, or serve the model with vLLM or SGLang",
        )


class ServedModel:
    """A model behind a URL.

    Args:
        url: URL of the server, with or without /v1.
        model: its name there; None for the only one that is served.
        timeout: seconds until an answer must have begun to arrive; a later one is requested again.
        waits: seconds before each further try.
        field: config field of the URL, for errors about it.
        switches: chat template switches that differ from the saved model's.

    Raises:
        ConfigError: the URL is not valid, the key is wrong, or the server has no such model.
        MachineError: no server answers in any of the tries.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        timeout: float = 600.0,
        waits: Sequence[float] = WAITS,
        field: str = "evaluate.server",
        switches: Mapping[str, Any] | None = None,
    ) -> None:
        self.switches = switches or {}
        self.url, self.timeout, self.waits, self.field = _endpoint(url, field), timeout, tuple(waits), field
        # Redirects are not followed: the key would be sent to their target.
        self._opener = urllib.request.build_opener(_NoRedirect)
        served = self._tried("/models", None, _models, threading.Event())
        if model is None and len(served) != 1:
            raise ConfigError(
                f"the server at {self.shown} has {len(served)} models{_named(served)}",
                code="E7062",
                field=self.field,
                help="name one",
            )
        self.model = model or next(iter(served))
        if served and self.model not in served:
            raise ConfigError(
                f"the server at {self.shown} has no model {self.model!r}{_named(served)}",
                code="E7063",
                field=self.field,
            )
        self.kind = _Kind(served.get(self.model, "").lower())

    @property
    def shown(self) -> str:
        """URL without its password."""
        return redact(self.url)

    def answer(
        self,
        messages_list: Sequence[Sequence[Message]],
        decoding: DecodingConfig,
        grammars: Sequence[Grammar | None] | None = None,
        on_progress: OnProgress = ignore_progress,
    ) -> list[Generation]:
        """Answer every conversation, `decoding.batch_size` of them at a time.

        Args:
            messages_list: conversations, each up to where the model has to answer.
            decoding: as for `engine.generate`, without beams; `prefill_chunk` is up to the server.
            grammars: grammar of each conversation's answer, None for any answer.
            on_progress: called before the first answer and after each one.

        Returns:
            One `Generation` per conversation, in their order. Every finish reason except "stop" counts as truncated.

        Raises:
            ConfigError: beams, a grammar that this server does not support, a wrong key, or a request that it rejects.
            MachineError: the server does not answer in any of the tries, or with something else.
        """
        if decoding.num_beams > 1:
            raise ConfigError(
                "OpenAI-compatible servers do not support beam search",
                code="E7064",
                field="evaluate.num_beams",
                help="set it to 1",
            )
        row_grammars = grammars if grammars is not None else [None] * len(messages_list)
        pairs = enumerate(zip(messages_list, row_grammars, strict=True))
        requests = [self._request(number, messages, decoding, grammar) for number, (messages, grammar) in pairs]
        answers: dict[int, Generation] = {}
        started, tokens = time.perf_counter(), 0
        on_progress(0, len(requests), "")
        for number, answer in self._all(requests, decoding.batch_size):
            answers[number] = answer
            tokens += answer.tokens
            on_progress(len(answers), len(requests), f"{tokens / (time.perf_counter() - started):,.0f} tokens/s")
        return [answers[number] for number in range(len(requests))]

    def _request(
        self, number: int, messages: Sequence[Message], decoding: DecodingConfig, grammar: Grammar | None
    ) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self.model,
            "messages": [{key: value for key, value in turn.items() if key != "weight"} for turn in messages],
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "top_p": 1.0,
        }
        if decoding.temperature > 0:
            request["seed"] = (decoding.seed * 1_000_003 + number) % 2**31  # every prompt has its own seed
        if decoding.stop:
            request["stop"] = list(decoding.stop)
        request |= self.kind.neutral(self.switches)
        return request | (self.kind.constraint(grammar) if grammar else {})

    def _all(self, requests: Sequence[Mapping[str, Any]], at_once: int) -> Iterator[tuple[int, Generation]]:
        stopped = threading.Event()
        with ThreadPoolExecutor(at_once, thread_name_prefix="server") as pool:
            futures = {
                pool.submit(self._tried, "/chat/completions", request, _generation, stopped): number
                for number, request in enumerate(requests)
            }
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:  # after an error, or Ctrl-C, no request is sent any more
                stopped.set()
                pool.shutdown(cancel_futures=True)

    def _tried(
        self, path: str, body: Mapping[str, Any] | None, read: Callable[[Any], Read], over: threading.Event
    ) -> Read:
        for wait in (*self.waits, None):
            try:
                return read(self._once(path, body))
            except _TransientError as failure:
                if wait is None or over.is_set():
                    raise MachineError(
                        f"the server at {self.shown} {failure} ({len(self.waits) + 1} tries)",
                        code="E7065",
                        field=self.field,
                        help="check that it runs, and its log; a smaller evaluate.batch_size lowers its load",
                    ) from None
                over.wait(wait if failure.wait is None else min(failure.wait, LONGEST_WAIT))
        raise AssertionError("the last try returns or raises")

    def _once(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        key = api_key()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                raw = response.read()
        except urllib.error.HTTPError as error:
            self._refused(error)
        except TimeoutError:
            raise _TransientError(f"has not answered within {self.timeout:g} s") from None
        except (OSError, HTTPException) as error:  # refused, reset, closed before the end of an answer
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise _TransientError(f"has not answered within {self.timeout:g} s") from None
            raise _TransientError(f"cannot be reached: {redact(str(reason)) or type(reason).__name__}") from None
        try:
            return json.loads(raw)
        except ValueError:
            raise _TransientError(f"returned something that is not JSON: {_shown(raw)}") from None

    def _refused(self, error: urllib.error.HTTPError) -> NoReturn:
        text = _shown(_message(error))
        if error.code in TRANSIENT_STATUS_CODES:
            after = error.headers.get("Retry-After", "")
            raise _TransientError(f"returned {error.code}: {text}", float(after) if after.isdecimal() else None)
        if error.code in (401, 403):
            problem = (
                "rejected the key in SUREFIT_API_KEY" if api_key() else "requires a key, and SUREFIT_API_KEY is not set"
            )
            raise ConfigError(
                f"the server at {self.shown} {problem} ({error.code}: {text})",
                code="E7066",
                field=self.field,
                help="set SUREFIT_API_KEY in the environment or in .env",
            ) from None
        if error.code == 404 or 300 <= error.code < 400:
            raise ConfigError(
                f"there is no OpenAI-compatible server at {self.shown} ({error.code}: {text})",
                code="E7067",
                field=self.field,
                help="give its address as http://HOST:PORT/v1",
            ) from None
        raise ConfigError(
            f"the server at {self.shown} rejected a request ({error.code}): {text}",
            code="E7068",
            field=self.field,
            help="if it is the length, serve with a longer context or lower evaluate.max_new_tokens",
        ) from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _endpoint(url: str, field: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{redact(url)!r} is not the address of a server",
            code="E7069",
            field=field,
            help="write http://HOST:PORT/v1",
        )
    path = re.sub(r"/(chat/completions|completions|models)?/*$", "", parts.path)
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", ""))


def _models(answer: Any) -> dict[str, str]:
    try:
        return {str(model["id"]): str(model.get("owned_by") or "") for model in answer["data"]}
    except (KeyError, TypeError, AttributeError):
        raise _TransientError(f"returned no list of models but {_shown(json.dumps(answer))}") from None


def _named(served: Mapping[str, str]) -> str:
    return f": {', '.join(list(served)[:8])}{', …' if len(served) > 8 else ''}" if served else ""


def _generation(answer: Any) -> Generation:
    try:
        choice = answer["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        tokens = (answer.get("usage") or {}).get("completion_tokens") or 0
        if not (text is None or isinstance(text, str)) or not isinstance(tokens, int):
            raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError):
        raise _TransientError(f"returned something that is not a completion: {_shown(json.dumps(answer))}") from None
    return Generation(text or "", truncated=reason != "stop", tokens=tokens)


def _message(error: urllib.error.HTTPError) -> bytes | str:
    """Return the message in an error's body, in the form of OpenAI's or vLLM's errors, or the body itself."""
    try:
        raw = error.read()
        answer = json.loads(raw)
        inner = answer.get("error", answer)
        return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        return raw or error.reason
    except (OSError, HTTPException):
        return error.reason


def _shown(said: bytes | str) -> str:
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    return truncate_text(redact(" ".join(text.split()))) or "nothing"
