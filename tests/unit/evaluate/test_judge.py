"""Judges over a real HTTP server: a fair one, one that always says A, one that likes length, one that says nothing."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.evaluate.judge import AnswerPair, CachedJudge, parse_verdict

SECTION = re.compile(r"\[(Task|Reference answer|Answer A|Answer B)\]\n(.*?)(?=\n\n\[|\Z)", re.DOTALL)


def parts(messages):
    return dict(SECTION.findall(messages[-1]["content"]))


def fair(messages):
    shown = parts(messages)
    right = [shown[name] == shown["Reference answer"] for name in ("Answer A", "Answer B")]
    return "VERDICT: " + ("TIE" if right[0] == right[1] else "A" if right[0] else "B")


def always_a(messages):
    return "The first is clearer. VERDICT: A"


def likes_length(messages):
    shown = parts(messages)
    return "VERDICT: A" if len(shown["Answer A"]) > len(shown["Answer B"]) else "VERDICT: B"


@pytest.fixture
def serve():
    servers = []

    def start(judge):
        calls = []

        class Handler(BaseHTTPRequestHandler):
            wbufsize = -1  # a reply is one packet: the second of two would wait for the first to be acknowledged

            def do_GET(self):
                self.reply({"object": "list", "data": [{"id": "referee", "owned_by": "test"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                calls.append(body)
                message = {"role": "assistant", "content": judge(body["messages"])}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                self.reply({"choices": [choice], "usage": {"completion_tokens": 5, "prompt_tokens": 5}})

            def reply(self, value):
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}/v1", calls

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def sides(tmp_path, monkeypatch):
    """60 rows: b wins 30 on gold, a wins 10, both right on 10 (same text), both wrong on 10 (other texts)."""
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    paths = []
    for name, right in (("a", lambda n: 30 <= n < 50), ("b", lambda n: n < 30 or 40 <= n < 50)):
        lines = [
            {
                "index": n, "where": f"d:{n}", "prompt": f"user: question {n}", "gold": f"gold {n}",
                "text": f"gold {n}" if right(n) else f"wrong {n} {name * (9 if name == 'a' else 4)}",
                "scores": {"exact_match": float(right(n))}, "recipe": "function_calling", "recipe_version": 1,
            }
            for n in range(60)
        ]  # fmt: skip
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        paths.append(str(path))
    return paths


def compare(*arguments):
    done = CliRunner().invoke(app, ["compare", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_a_fair_judge_finds_what_the_gold_answers_say(serve, sides):
    url, calls = serve(fair)
    found = compare(*sides, "--judge", url, "--judge-model", "referee")
    judged = found["judge"]
    assert (judged["wins"], judged["losses"], judged["ties"], judged["asked"]) == (30, 10, 20, 50)
    assert judged["orders_agree"]["mean"] == judged["agrees_with_gold"]["mean"] == 1.0
    assert judged["first_place"]["mean"] == 0.5
    assert not judged["biased"]
    assert judged["gold_tied"] == {"wins": 0, "losses": 0, "ties": 10}
    assert len(calls) == judged["calls"] == 100
    assert {body["model"] for body in calls} == {"referee"}
    assert "gold 3" in parts(calls[6]["messages"])["Reference answer"] or any("gold 3" in str(body) for body in calls)


def test_a_judge_that_always_says_a_wins_nothing_and_is_found_out(serve, sides):
    url, _ = serve(always_a)
    judged = compare(*sides, "--judge", url)["judge"]
    assert (judged["wins"], judged["losses"]) == (0, 0)
    assert judged["first_place"]["mean"] == 1.0
    assert judged["first_place"]["ci95"][0] > 0.9
    assert judged["biased"]
    assert judged["orders_agree"]["mean"] == judged["agrees_with_gold"]["mean"] == 0.0
    assert judged["ci95"][0] < 0 < judged["ci95"][1]
    text = CliRunner().invoke(app, ["compare", *sides, "--judge", url]).output
    assert "The judge favours a place" in text


def test_a_judge_that_likes_length_is_not_biased_by_place_but_by_length(serve, sides):
    url, _ = serve(likes_length)
    judged = compare(*sides, "--judge", url)["judge"]
    assert judged["longer"]["mean"] == 1.0
    assert not judged["biased"]
    assert judged["gold_longer"]["mean"] == 0.0
    assert judged["agrees_with_gold"]["mean"] == 0.0


def test_a_judge_without_verdicts(serve, sides):
    url, _ = serve(lambda messages: "I cannot decide.")
    judged = compare(*sides, "--judge", url)["judge"]
    assert (judged["unreadable"], judged["ties"]) == (100, 60)
    assert judged["orders_agree"] is None
    assert judged["first_place"] is None


def test_a_second_time_costs_nothing_and_a_dry_run_asks_nobody(serve, sides):
    url, calls = serve(fair)
    planned = compare(*sides, "--judge", url, "--dry-run")["judge"]
    assert (planned["calls"], planned["cached"], len(calls)) == (100, 0, 0)
    first = compare(*sides, "--judge", url)["judge"]
    again = compare(*sides, "--judge", url)["judge"]
    assert len(calls) == 100
    assert again["cached"] == 100
    assert {**again, "cached": 0} == first
    few = compare(*sides, "--judge", url, "--judge-rows", "6")["judge"]
    assert (few["rows"], len(calls)) == (6, 100)


def test_an_interruption_keeps_what_was_answered(tmp_path):
    pairs = [AnswerPair(None, None, f"a{n}", f"b{n}", None) for n in range(40)]
    asked = []

    def ask(questions, on_progress):
        if asked:
            raise KeyboardInterrupt
        asked.extend(questions)
        return ["VERDICT: TIE"] * len(questions)

    with pytest.raises(KeyboardInterrupt):
        CachedJudge(ask, "x", tmp_path / "c.jsonl").judge(pairs)
    assert CachedJudge(ask, "x", tmp_path / "c.jsonl").would_call(pairs).cached == len(asked) == 64
    assert CachedJudge(ask, "other", tmp_path / "d.jsonl").would_call(pairs).cached == 0


def test_the_gold_answer_and_both_orders_are_in_the_prompt():
    pair = AnswerPair("the task", "the gold", "from a", "from b", "a")
    first, second = parts(pair.messages(False)), parts(pair.messages(True))
    assert first == {"Task": "the task", "Reference answer": "the gold", "Answer A": "from a", "Answer B": "from b"}
    assert (second["Answer A"], second["Answer B"]) == ("from b", "from a")
    assert "reference answer" in pair.messages(False)[0]["content"]
    without = AnswerPair(None, None, "x", "y", None).messages(False)
    assert "Reference" not in without[1]["content"]
    assert "reference" not in without[0]["content"]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("VERDICT: A", "a"), ("verdict - **B**", "b"), ("Verdict: Tie.", "tie"), ("VERDICT: A\n… VERDICT: B", "b"),
        ("B", "b"), ("(a)", "a"), ("A is better", None), ("", None), ("VERDICT: neither", None),
        ("VERDICT: Absolutely", None),
    ],
)  # fmt: skip
def test_reading_verdicts(text, verdict):
    assert parse_verdict(text) == verdict
