"""A chat template that is edited after training is noticed wherever the trained model is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from low_bits_files import nano_copy
from tests.cli.conftest import Surefit

from surefit import nano

CONFIG = """\
recipe: chat
model: {name_or_path: surefit/nano, chat_template: chat.jinja}
data: {train: rows.jsonl, eval: 0.3, max_length: 128}
train: {max_steps: 1, global_batch_size: 2}
checkpoint: {save_steps: 1}
evaluate: {max_new_tokens: 4, max_examples: 2}
hardware: {gpu: cpu}
output_dir: run
"""


def test_an_edited_template_is_not_used(surefit, tmp_path: Path) -> None:
    template = (Path(nano.PATH) / "chat_template.jinja").read_text(encoding="utf-8")
    file = tmp_path / "chat.jinja"
    file.write_text(template, encoding="utf-8")
    rows = [{"prompt": f"Say {number}.", "completion": str(number)} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert surefit("train", "run.yaml").code == 0
    file.write_text(template.replace("<|user|>", "<|user|> ") + "{# edited #}", encoding="utf-8")
    for verb in (
        ["merge", "run"],
        ["evaluate", "run", "--variant", "adapter"],
        ["evaluate", "run.yaml", "--variant", "step-1"],
    ):
        said = surefit(*verb)
        assert said.code == 2, said.text
        assert "] model.chat_template: the chat template has changed since training" in said.stderr
    assert not (tmp_path / "run/merged").exists()
    kept = "model.chat_template=run/adapter/chat_template.jinja"
    assert surefit("merge", "run", "--set", kept).code == 0
    assert (tmp_path / "run/merged/chat_template.jinja").read_text(encoding="utf-8") == template
    file.write_text(template, encoding="utf-8")
    assert surefit("evaluate", "run", "--variant", "adapter").code == 0


OTHER = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>Well: "


@pytest.mark.parametrize(
    ("entry", "option", "said"),
    [
        (OTHER, None, "training uses chat_template.jinja"),
        (None, "plain", "training uses plain"),
        (None, None, None),
        ("the same", None, None),
        (None, "the same", None),
    ],
)
def test_two_templates_of_one_model_are_said(
    surefit: Surefit, config: Path, tmp_path: Path, entry: str | None, option: str | None, said: str | None
) -> None:
    base = nano_copy(tmp_path / "base")
    own = base / "chat_template.jinja"
    tokenizer = base / "tokenizer_config.json"
    same = own.read_text() + "\n"
    if entry:
        text = same if entry == "the same" else entry
        tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": text}))
    set_to = [] if option is None else ["--set", f"model.chat_template={own if option == 'the same' else option}"]
    found = surefit("check", config, "--set", f"model.name_or_path={base}", *set_to)
    text = " ".join(found.text.split())
    assert ("TPL012" in text, found.code) == (said is not None, 0)
    assert (said or "") in text
    if entry == OTHER:
        assert "Well:" in text
