"""Finding D15 of 2026-11-25: plain text on a tokenizer that has a BOS token and does not add it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.findings.conftest import write_rows
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import RobertaProcessing, Sequence, TemplateProcessing
from transformers import AutoTokenizer

from surefit import nano
from surefit.data.tokens.tokenize import encode_turns, special_tokens_from_tokenizer
from surefit.stages.checking import run_check
from surefit.stages.run_context import load_run_context
from surefit.task import Example

BOS, EOS = "<bos>", "<|end|>"
TEXTS = [{"text": f"Once upon a time there were {n} bears."} for n in range(40)]
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
IM_START = CHAT.replace("[", "<bos>").replace("]", "\n")


def model(folder: Path, template: str | None = None, adds: Any = None, **config: Any) -> Path:
    """surefit/nano with a BOS token, which its post-processor adds where `adds` is one that does."""
    folder.mkdir()
    for file in nano.PATH.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(nano.PATH / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(BOS, special=True)])
    if adds is not None:
        tokenizer.post_processor = adds(tokenizer.token_to_id(BOS))
    tokenizer.save(str(folder / "tokenizer.json"))
    written = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": BOS} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def found(folder: Path, rows: list[dict[str, Any]], more: str = "", data: str = "") -> list[tuple[str, str]]:
    """The findings about what the texts begin with and hold."""
    write_rows(folder / "rows.jsonl", rows)
    (folder / "run.yaml").write_text(
        f"model: {{name_or_path: model{more}}}\ndata: {{train: rows.jsonl, eval: 0.3{data}}}\noutput_dir: out\n"
    )
    report = run_check(load_run_context(folder / "run.yaml", None))
    return [(one["code"], one["field"]) for one in report["findings"] if one["code"].startswith("AUD04")]


def once(bos: int) -> Any:
    return TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)])


CASES = [
    pytest.param(None, None, {}, TEXTS, True, id="D15"),
    pytest.param(None, None, {"add_bos_token": True}, TEXTS, True, id="D15-a-key-that-transformers-does-not-read"),
    pytest.param("{{ bos_token }}" + CHAT, None, {}, TEXTS, True, id="D15-template-with-bos"),
    pytest.param(CHAT, None, {}, TEXTS, False, id="template-without-bos"),
    pytest.param(IM_START, None, {}, TEXTS, False, id="bos-begins-turns"),
    pytest.param(None, once, {}, TEXTS, False, id="added"),
    pytest.param(None, lambda n: Sequence([once(n)]), {}, TEXTS, False, id="added-in-a-sequence"),
    pytest.param(None, lambda n: RobertaProcessing((EOS, 1), (BOS, n)), {}, TEXTS, False, id="added-by-roberta"),
    pytest.param(None, None, {"bos_token": EOS}, TEXTS, False, id="bos-is-eos"),
    pytest.param(None, None, {"bos_token": None}, TEXTS, False, id="no-bos"),
    pytest.param(None, None, {}, [{"text": BOS + row["text"]} for row in TEXTS], False, id="D15-advice-texts"),
]


@pytest.mark.parametrize(("template", "adds", "config", "rows", "lacks"), CASES)
def test_texts_that_begin_without_bos(
    tmp_path: Path, template: str | None, adds: Any, config: dict[str, Any], rows: list[dict[str, Any]], lacks: bool
) -> None:
    place = model(tmp_path / "model", template, adds, **config)
    if template is None:
        (place / "chat_template.jinja").unlink(missing_ok=True)
    assert found(tmp_path, rows) == ([("AUD049", "data.train")] if lacks else [])
    # The audit, with transformers' own tokenizer, sees the same.
    tokenizer = AutoTokenizer.from_pretrained(place)
    seen = dict(special_tokens_from_tokenizer(tokenizer).sights(Example(text=rows[0]["text"])))
    assert list(seen) == (["no_begin"] if lacks else [])
    begins = encode_turns(tokenizer, [Example(text=rows[0]["text"])])[0][0][0][0] == tokenizer.bos_token_id
    assert not (lacks and begins)


def test_d15_plain_template(tmp_path: Path) -> None:
    """The case of the finding: a base model, plain text, and roles in words for what is asked elsewhere."""
    model(tmp_path / "model")
    assert found(tmp_path, TEXTS, more=", chat_template: plain") == [("AUD049", "data.train")]


def test_d15_the_advice_for_the_tokenizer(tmp_path: Path) -> None:
    place = model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(place)
    assert found(tmp_path, TEXTS) == []
    again = AutoTokenizer.from_pretrained(place)
    ids, learnt = encode_turns(again, [Example(text="Once")])[0][0]
    assert ids[0] == again.bos_token_id
    assert ids.count(again.bos_token_id) == 1
    assert not learnt[0]


def test_twice_is_still_said(tmp_path: Path) -> None:
    model(tmp_path / "model", adds=once)
    assert found(tmp_path, [{"text": BOS + row["text"]} for row in TEXTS]) == [("AUD044", "data.train")]


def test_in_other_sources(tmp_path: Path) -> None:
    model(tmp_path / "model")
    write_rows(tmp_path / "other.jsonl", [{"text": f"{n} wolves came."} for n in range(20)])
    rows = [{"text": BOS + row["text"]} for row in TEXTS]
    assert found(tmp_path, rows, data=", mix: {other.jsonl: 1.0}") == [("AUD049", "data.mix.other.jsonl")]
