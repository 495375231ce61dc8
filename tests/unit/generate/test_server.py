"""The client against a real HTTP server: what it asks for, and every way in which a server can let it down."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from surefit.core.errors import ConfigError, MachineError
from surefit.data.tokens.tokenize import TEMPLATE_DATE
from surefit.generate.engine import DecodingConfig, Generation
from surefit.generate.server import ServedModel
from surefit.task import Grammar

GREEDY = DecodingConfig(32, 4)
QUESTION = [{"role": "user", "content": "say 7", "weight": 1}]


class Server(ThreadingHTTPServer):
    """Speaks the protocol: says the number in the last message. `script` holds what to do instead, in turn."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = [{"id": "tuned", "owned_by": "vllm"}]
        self.script, self.seen, self.keys = [], [], []
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        self.pause = 0.0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):
        """A client that has gone away is what some tests are about."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, status, body, **headers):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(raw), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        self.server.keys.append(self.headers.get("Authorization"))
        if self.path != "/v1/models":
            return self.reply(404, {"detail": "Not Found"})
        return self.reply(200, {"object": "list", "data": self.server.models})

    def do_POST(self):
        server, request = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append(request)
            step = server.script.pop(0) if server.script else None
            server.now += 1
            server.most = max(server.most, server.now)
        time.sleep(server.pause)
        with server.lock:
            server.now -= 1
        if callable(step):
            return step(self)
        return self.reply(*(step or (200, completion(request["messages"][-1]["content"].removeprefix("say ")))))


def completion(text, reason="stop", tokens=2):
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("SUREFIT_API_KEY", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


def client(server, **options):
    return ServedModel(server.url, **{"timeout": 5.0, "waits": (0.01, 0.01), **options})


def say(*numbers):
    return [[{"role": "user", "content": f"say {number}"}] for number in numbers]


def test_answers_come_in_order_and_so_many_at_a_time(server):
    server.pause = 0.05
    seen = []
    answers = client(server).answer(say(*range(10)), GREEDY, on_progress=lambda *step: seen.append(step))
    assert [answer.text for answer in answers] == [str(n) for n in range(10)]
    assert answers[0] == Generation("0", truncated=False, tokens=2)
    assert server.most == 4
    assert [step[:2] for step in seen] == [(n, 10) for n in range(11)]
    assert "tokens/s" in seen[-1][2]


def test_what_is_asked_for(server):
    decoding = DecodingConfig(64, 1, temperature=0.7, seed=3, stop=("\n\n",))
    client(server).answer([QUESTION] * 2, decoding)
    client(server).answer([QUESTION], GREEDY)
    drawn, again, greedy = server.seen
    assert drawn["messages"] == [{"role": "user", "content": "say 7"}], "without our own key weight"
    wanted = {"model": "tuned", "max_tokens": 64, "temperature": 0.7, "stop": ["\n\n"], "top_p": 1.0}
    assert wanted.items() <= drawn.items()
    assert drawn["seed"] != again["seed"], "one draw per prompt"
    assert greedy["temperature"] == 0
    assert "seed" not in greedy
    assert greedy["repetition_penalty"] == 1.0, "vLLM and SGLang would take the model's own otherwise"
    assert "date_string" in greedy["chat_template_kwargs"]
    server.models = [{"id": "other", "owned_by": "someone"}]
    client(server).answer([QUESTION], GREEDY)
    assert server.seen[-1].keys() == {"model", "messages", "max_tokens", "temperature", "top_p"}


def test_switches_of_the_chat_template_are_handed_on_or_refused(server):
    off = {"enable_thinking": False}
    ServedModel(server.url, switches=off, waits=(0.01,) * 5).answer([QUESTION], GREEDY)
    assert server.seen[-1]["chat_template_kwargs"] == {"date_string": TEMPLATE_DATE, **off}
    server.models = [{"id": "other", "owned_by": "llamacpp"}]
    with pytest.raises(ConfigError, match="pass enable_thinking to the chat template") as caught:
        ServedModel(server.url, switches=off, waits=(0.01,) * 5).answer([QUESTION], GREEDY)
    assert caught.value.field == "evaluate.chat_template_kwargs"


@pytest.mark.parametrize(
    ("owner", "grammar", "asked"),
    [
        ("vllm", Grammar("ebnf", 'root ::= "a"'), {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ("vllm", Grammar("regex", "[ab]"), {"structured_outputs": {"regex": "[ab]"}}),
        ("vllm", Grammar("choices", ("a", "b")), {"structured_outputs": {"choice": ["a", "b"]}}),
        ("sglang", Grammar("ebnf", 'root ::= "a"'), {"ebnf": 'root ::= "a"'}),
        ("sglang", Grammar("regex", "[ab]"), {"regex": "[ab]"}),
        ("sglang", Grammar("choices", ("a", "b")), {"ebnf": 'root ::= "a" | "b"'}),
        (
            "anyone",
            Grammar("json_schema", '{"type": "object"}'),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
    ],
)
def test_grammars_are_asked_for_in_the_servers_own_words(server, owner, grammar, asked):
    server.models = [{"id": "tuned", "owned_by": owner}]
    client(server).answer([QUESTION, QUESTION], DecodingConfig(8, 1), [grammar, None])
    assert asked.items() <= server.seen[0].items()
    assert not asked.keys() & server.seen[1].keys()


def test_a_grammar_that_this_server_has_no_word_for(server):
    server.models = [{"id": "tuned", "owned_by": "someone"}]
    with pytest.raises(ConfigError, match="support a grammar of kind ebnf"):
        client(server).answer([QUESTION], GREEDY, [Grammar("ebnf", 'root ::= "a"')])
    assert server.seen == []


def test_what_the_limit_cut_is_truncated_and_no_text_is_an_empty_answer(server):
    server.script = [(200, completion("[1,", "length")), (200, completion(None)), (200, completion("x", "abort"))]
    answers = client(server).answer([QUESTION] * 3, DecodingConfig(8, 1))
    assert answers == [Generation("[1,", True, 2), Generation("", False, 2), Generation("x", True, 2)]


def hang_up(handler):
    handler.connection.close()


def half(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.connection.close()


@pytest.mark.parametrize(
    "failure",
    [
        (429, {"error": {"message": "busy"}}),
        (500, {"object": "error", "message": "worker died"}),
        (503, b"<html>restarting</html>"),
        (200, b"<html>a proxy's page</html>"),
        (200, {"choices": []}),
        (200, {"choices": [{"message": {"content": 7}, "finish_reason": "stop"}]}),
        (200, ["?"]),
        hang_up,
        half,
    ],
)
def test_a_failure_that_passes_is_asked_again(server, failure):
    server.script = [failure, failure]
    (answer,) = client(server).answer([QUESTION], GREEDY)
    assert answer.text == "7"
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ((429, {"error": {"message": "busy"}}), "429: busy"),
        ((502, b""), "502: Bad Gateway"),
        ((200, b"<html>"), "not JSON: <html>"),
        ((200, {"no": "choices"}), "not a completion"),
        (hang_up, "cannot be reached"),
    ],
)
def test_a_failure_that_stays_is_said_in_its_own_words(server, failure, said):
    server.script = [failure] * 20
    with pytest.raises(MachineError, match=said) as caught:
        client(server).answer([QUESTION] * 5, DecodingConfig(8, 1))
    assert "(3 tries)" in caught.value.message
    assert len(server.seen) <= 8, "the other prompts are not asked any more"


def test_a_server_that_says_how_long_to_wait_is_believed(server):
    server.script = [lambda handler: handler.reply(429, {}, Retry_After=1)]
    started = time.perf_counter()
    client(server).answer([QUESTION], GREEDY)
    assert 1 <= time.perf_counter() - started < 3


def test_a_server_that_is_too_slow(server):
    model = client(server, timeout=0.1)
    server.pause = 0.3
    with pytest.raises(MachineError, match=r"not answered within 0\.1 s"):
        model.answer([QUESTION], GREEDY)


def test_nobody_there(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(MachineError, match=r"cannot be reached: .*refused"):
        client(server)


@pytest.mark.parametrize("field", ["evaluate.server", "--judge"])
def test_what_is_wrong_is_said_where_the_url_was_named(server, field):
    with pytest.raises(ConfigError, match="is not the address of a server") as refused:
        ServedModel("localhost:8000", field=field)
    assert refused.value.field == field
    server.shutdown()
    server.server_close()
    with pytest.raises(MachineError) as unreachable:
        ServedModel(f"http://127.0.0.1:{server.server_port}", waits=(), field=field)
    assert unreachable.value.field == field


@pytest.mark.parametrize(("status", "problem"), [(400, "maximum context length"), (422, "rejected a request")])
def test_a_refused_request_is_not_repeated(server, status, problem):
    server.script = [(status, {"error": {"message": "the maximum context length is 10"}})]
    with pytest.raises(ConfigError, match=problem):
        client(server).answer([QUESTION], GREEDY)
    assert len(server.seen) == 1


def test_the_key_is_sent_and_never_shown(server, monkeypatch):
    server.script = [(401, {"error": {"message": "wrong key"}})]
    with pytest.raises(ConfigError, match="SUREFIT_API_KEY is not set"):
        client(server).answer([QUESTION], GREEDY)
    monkeypatch.setenv("SUREFIT_API_KEY", "a-very-secret-word")
    server.script = [(403, {"error": {"message": "no: a-very-secret-word"}})]
    with pytest.raises(ConfigError, match="rejected the key") as caught:
        client(server).answer([QUESTION], GREEDY)
    assert "secret" not in str(caught.value)
    assert server.keys == [None, "Bearer a-very-secret-word"]


def test_redirects_are_not_followed_with_a_key(server):
    server.script = [lambda handler: handler.reply(302, {}, Location="http://127.0.0.1:1/")]
    with pytest.raises(ConfigError, match="302"):
        client(server).answer([QUESTION], GREEDY)


def test_which_model(server):
    server.models.append({"id": "base"})
    with pytest.raises(ConfigError, match="has 2 models: tuned, base"):
        client(server)
    assert client(server, model="base").model == "base"
    with pytest.raises(ConfigError, match="no model 'tunde': tuned, base"):
        client(server, model="tunde")


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/models"])
def test_the_address_in_every_form(server, suffix):
    assert ServedModel(server.url + suffix).url == server.url + "/v1"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "", "http://"])
def test_what_is_no_address(url):
    with pytest.raises(ConfigError, match="not the address of a server"):
        ServedModel(url)


def test_another_path_is_no_such_server(server):
    with pytest.raises(ConfigError, match="no OpenAI-compatible server"):
        ServedModel(server.url + "/api")


def test_beams_are_refused(server):
    with pytest.raises(ConfigError, match="beam search"):
        client(server).answer([QUESTION], DecodingConfig(8, 1, num_beams=2))
