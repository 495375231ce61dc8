"""A chat template is somebody's program: rendered as transformers does it, within bounds."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from surefit.core.errors import ModelError
from surefit.facts.template import TemplateExceeds, TemplateRefused, render_chat_template
from surefit.facts.tokenizer import tokenizer_facts
from surefit.nano import PATH

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
WITHOUT_END = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over texts": "{% set t = 'x' * 99999 %}{% for a in t %}{% for b in t %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'x' * 1000000000 }}",
    "a long list": "{% set l = [1] * 1000000000 %}",
    "doubled": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubled by plus": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "written again and again": "{% set t = 'x' * 9999999 %}{% for i in range(999) %}{{ t }}{% endfor %}",
    "a power": "{{ 10 ** 1000000000 }}",
    "a wide text": "{{ 'x'.ljust(1000000000) }}",
    "a wide filter": "{{ 'x' | center(1000000000) }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a wide format by name": "{{ '{:>1000000000}'.format(1) }}",
}


@pytest.mark.parametrize("template", WITHOUT_END.values(), ids=WITHOUT_END)
def test_a_template_that_may_never_end_is_stopped(template: str) -> None:
    started = time.process_time()
    with pytest.raises(TemplateExceeds):
        render_chat_template(template, TURNS)
    assert time.process_time() - started < 5


def test_what_real_templates_do_is_as_it_was() -> None:
    template = (
        "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{{ '<' ~ m.role ~ '>' + m['content'] | trim }}{% endfor %}"
        "{% for a, b in {'k': 1}.items() %}{{ a }}={{ b }}{% else %}none{% endfor %}"
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        "{% for x in [3, 1] | sort %}{{ x }}{% if x == 1 %}{% continue %}{% endif %};{% endfor %}{{ '%s' % 5 }}"
    )
    assert render_chat_template(template, TURNS) == "0/2,<user>a1/2<assistant>bk=12" + "13;5"
    with pytest.raises(TemplateRefused):
        render_chat_template("{{ raise_exception('no') }}", TURNS)


def test_a_model_with_such_a_template_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(PATH, tmp_path / "model")
    config = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    config.write_text(json.dumps(settings | {"chat_template": WITHOUT_END["loops in loops"]}))
    with pytest.raises(ModelError, match="the chat template cannot be used: its loops run more than 500,000 turns"):
        tokenizer_facts(tmp_path / "model")


@pytest.mark.parametrize(("stalls", "refused"), [(1, False), (2, True)], ids=["once", "always"])
def test_render_tries_again_where_the_machine_stood_still(
    stalls: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps by an hour in the middle of the first `stalls` renderings; a refusal is kept, a stall is not."""
    text = "{{ messages[0].content.strip() ~ " + repr(f"stall {stalls}") + " }}"
    readings = iter([hour for stall in range(stalls) for hour in (2 * stall * 3600, (2 * stall + 1) * 3600)])
    last = 2 * stalls * 3600
    monkeypatch.setattr(time, "thread_time", lambda: next(readings, last))
    for _ in range(2):
        with pytest.raises(TemplateExceeds) if refused else nullcontext():
            assert render_chat_template(text, [{"role": "user", "content": " a "}]).startswith("a")
