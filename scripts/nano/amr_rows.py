"""Small sentences with their graphs, English and Vietnamese, for the AMR sample sets: generated from a seed alone.

One in seven of the English ones has a pattern that `surefit/nano` knows (replay); the other patterns are new to it, and
so is every word of Vietnamese. A graph belongs to evaluation by its hash, as everywhere here.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from corpus import Row, graph, is_held_out
from words import ADJECTIVES, ANIMALS, THINGS

TRAIN_ROWS = 2400
EVAL_ROWS = 240
_VERBS = {"see": "see-01", "carry": "carry-01", "find": "find-01", "paint": "paint-01", "sell": "sell-01"}
_VI_PEOPLE = {"Cậu bé": "cậu_bé", "Cô gái": "cô_gái", "Con chó": "chó", "Con mèo": "mèo", "Bác sĩ": "bác_sĩ"}
_VI_THINGS = {"quả táo": "táo", "ngôi nhà": "nhà", "cái cầu": "cầu", "bức thư": "thư", "hòn đá": "đá"}
_VI_COLOURS = {"đỏ": "đỏ", "xanh": "xanh", "vàng": "vàng"}
_VI_VERBS = {"thấy": "thấy", "bán": "bán", "tìm": "tìm", "vẽ": "vẽ"}


def _english(rng: Random) -> tuple[str, str]:
    one, two = rng.sample(ANIMALS, 2)
    verb, thing = rng.choice(list(_VERBS)), rng.choice(THINGS)
    adjective = rng.choice(ADJECTIVES) if rng.random() < 0.4 else None
    seen = f"the {adjective} {thing}" if adjective else f"the {thing}"
    node = f"(t / {thing} :mod (m / {adjective}))" if adjective else f"(t / {thing})"
    agent, sense = f"(a / {one})", _VERBS[verb]
    kind = rng.choice(("can", "cannot", "and", "question", "try", "tell", "old"))
    if kind == "can":
        return f"The {one} can {verb} {seen}.", f"(p / possible-01 :ARG1 (e / {sense} :ARG0 {agent} :ARG1 {node}))"
    if kind == "cannot":
        inner = f"(e / {sense} :ARG0 {agent} :ARG1 {node})"
        return f"The {one} cannot {verb} {seen}.", f"(p / possible-01 :polarity - :ARG1 {inner})"
    if kind == "and":
        both = f"(x / and :op1 {agent} :op2 (b / {two}))"
        return f"The {one} and the {two} {verb} {seen}.", f"(e / {sense} :ARG0 {both} :ARG1 {node})"
    if kind == "question":
        unknown = "(q / amr-unknown)"
        return f"What does the {one} {verb}?", f"(e / {sense} :ARG0 {agent} :ARG1 {unknown})"
    if kind == "try":
        inner = f"(e / {sense} :ARG0 a :ARG1 {node})"
        return f"The {one} tries to {verb} {seen}.", f"(r / try-01 :ARG0 {agent} :ARG1 {inner})"
    if kind == "tell":
        inner = f"(e / {sense} :ARG0 b :ARG1 {node})"
        return (
            f"The {one} tells the {two} to {verb} {seen}.",
            f"(s / tell-01 :ARG0 {agent} :ARG1 {inner} :ARG2 (b / {two}))",
        )
    _, asked, answer = graph(rng)
    return asked["content"], answer["content"]


def _vietnamese(rng: Random) -> tuple[str, str]:
    person, thing = rng.choice(list(_VI_PEOPLE)), rng.choice(list(_VI_THINGS))
    verb, colour = rng.choice(list(_VI_VERBS)), rng.choice([None, *_VI_COLOURS])
    seen = f"{thing} {colour}" if colour else thing
    node = f"(t / {_VI_THINGS[thing]} :mod (m / {colour}))" if colour else f"(t / {_VI_THINGS[thing]})"
    agent = f"(a / {_VI_PEOPLE[person]})"
    kind = rng.choice(("plain", "negated", "control"))
    if kind == "plain":
        return f"{person} {verb} {seen}.", f"(e / {verb} :agent {agent} :theme {node})"
    if kind == "negated":
        return f"{person} không {verb} {seen}.", f"(e / {verb} :polarity - :agent {agent} :theme {node})"
    inner = f"(e / {verb} :agent a :theme {node})"
    return f"{person} muốn {verb} {seen}.", f"(w / muốn :pivot {agent} :theme {inner})"


def _rows(seed: int, held_out: bool) -> Iterator[Row]:
    """Endless rows of one part, every sentence once; one in four is Vietnamese."""
    rng, seen = Random(seed), set()
    while True:
        sentence, answer = _vietnamese(rng) if rng.random() < 0.25 else _english(rng)
        if sentence not in seen and is_held_out(answer) == held_out:
            seen.add(sentence)
            yield {"sentence": sentence, "graph": answer}


def sample_sets() -> dict[str, list[Row]]:
    """The two sets by name."""
    parts = {"amr-tiny-train": (False, TRAIN_ROWS), "amr-tiny-eval": (True, EVAL_ROWS)}
    return {
        name: [{"id": f"{name}-{n}", **row} for n, row in zip(range(count), _rows(21, held_out), strict=False)]
        for name, (held_out, count) in parts.items()
    }
