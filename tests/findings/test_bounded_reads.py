"""Templates, tokenizers, weights, shards and rows that nobody should wait for, and that no command may die of."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.config.load import load_config
from surefit.core import limited
from surefit.core.errors import EXIT_ENVIRONMENT, EXIT_FINDINGS, EXIT_USAGE, DataError, ModelError
from surefit.core.limited import ExceedsLimit, run_limited
from surefit.core.units import MIB
from surefit.data.read.load import load_rows
from surefit.data.read.quick_sample import SHOWN_BYTES, read_quick_sample
from surefit.data.read.sources import resolve_source
from surefit.data.tokens.shard_manifest import ShardedTokens
from surefit.facts.model import model_facts
from surefit.facts.safetensors import read_header
from surefit.facts.template import (
    TemplateExceeds,
    TemplateRefused,
    _environment,
    _is_plain,
    _readable,
    render_chat_template,
)
from surefit.facts.tokenizer import tokenizer_facts
from surefit.nano import PATH
from surefit.stages.checking import CheckFailed
from surefit.stages.run_context import load_run_context

ROWS: list[dict[str, object]] = [
    {"messages": [{"role": "user", "content": f"What is {n} + 1?"}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(24)
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PATH, tmp_path / "model"))


TRIED, SHAPE, CHANGED, BOMBS = "E2650", "E2654", "E4652", ("E4653", "E4654")


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(path: Path, model: str = "surefit/nano", data: str = "train: rows.jsonl") -> Path:
    path.write_text(
        f"recipe: chat\nmodel: {{name_or_path: {model}}}\ndata: {{{data}, eval: 0.2, max_length: 128}}\n"
        "train: {max_steps: 2}\noutput_dir: runs/a\n"
    )
    return path


def found(path: Path) -> tuple[int, dict[str, Any]]:
    ended = CliRunner().invoke(app, ["check", str(path), "--json"])
    return ended.exit_code, json.loads(ended.stdout.splitlines()[-1])


# ---------------------------------------------------------------- chat templates

SLOW = {
    "S2-14 wordwrap": "{{ ('x '*10000000)|wordwrap(1) }}",
    "S2-14 strftime": "{{ strftime_now('%Y'*10000000) }}",
    "S2-14 lipsum": "{{ lipsum(100000) }}",
    "S2-14 urlize": "{% set x = 'ab ' * 10000000 %}{{ x|list|sort|join|urlize }}",
    "S2-14 replace": "{% set x = 'x' * 60000000 %}{{ x.replace('', 'y' * 100000) }}",
    "S2-14 doubled": "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x.replace('a', 'aa') %}"
    "{% endfor %}{{ n.x }}",
}


@pytest.mark.parametrize("template", SLOW.values(), ids=SLOW)
def test_a_template_ends_in_time(template: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(3):
        with pytest.raises(TemplateRefused):
            render_chat_template(template, [{"role": "user", "content": "?"}])
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 4


def test_a_slow_template_is_an_error_of_check(model: Path, tmp_path: Path) -> None:
    """S2-14."""
    (model / "chat_template.jinja").write_text(SLOW["S2-14 lipsum"])
    with pytest.raises(ModelError) as caught:
        tokenizer_facts(model)
    assert caught.value.code == "E2097"


def test_an_ordinary_template_is_not_tried() -> None:
    from surefit.facts.chat_template import NAMED

    for text in (*NAMED.values(), json.loads((PATH / "tokenizer_config.json").read_text()).get("chat_template") or ""):
        assert _is_plain(_environment().parse(_readable(text)))
    assert not _is_plain(_environment().parse(SLOW["S2-14 wordwrap"]))


def test_a_long_rendering_ends_in_time() -> None:
    """A plain template, and a conversation that makes it long."""
    text = (
        "{% for m in messages %}{% for n in messages %}{% set x = m.content | upper | lower %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(TemplateExceeds):
        render_chat_template(text, [{"role": "user", "content": "word " * 20_000}] * 600)


def test_a_limited_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_limited("math:factorial", 5) == 120
    with pytest.raises(ExceedsLimit) as caught:
        run_limited("os:abort")
    assert caught.value.ended
    monkeypatch.setattr(limited, "SECONDS", 0)
    with pytest.raises(ExceedsLimit) as caught:
        run_limited("math:factorial", 10**7)
    assert not caught.value.ended


# ---------------------------------------------------------------- tokenizers


@pytest.mark.parametrize(
    "pattern",
    ["(a|a|aa|e|e|ee|.|.)*(?=ZZZZ)$", "(a+)+$", r"(\w+\s?)+$", "(x+x+)+y"],
    ids=lambda pattern: f"S2-12 {pattern}",
)
def test_a_tokenizer_that_panics_is_an_error(model: Path, tmp_path: Path, pattern: str) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError) as caught:
        tokenizer_facts(model)
    assert caught.value.code == TRIED
    assert caught.value.path == str(model / "tokenizer.json")
    write_rows(tmp_path / "rows.jsonl", ROWS)
    code, report = found(config(tmp_path / "run.yaml", str(model)))
    assert code == EXIT_FINDINGS
    assert any(finding["path"] == str(model / "tokenizer.json") for finding in report["findings"])


@pytest.mark.parametrize("damage", ["empty", "negative", "negative added"], ids=lambda damage: f"S3-16 {damage}")
def test_token_numbers_are_judged(model: Path, damage: str) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    if damage == "empty":
        content["model"]["vocab"] = {}
    elif damage == "negative":
        vocabulary[next(iter(vocabulary))] = -1
    else:
        content["added_tokens"][0]["id"] = -5
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError) as caught:
        tokenizer_facts(model)
    assert caught.value.field == ("added_tokens" if damage == "negative added" else "model.vocab")


# ---------------------------------------------------------------- weights


def weights(path: Path, header: dict[str, Any], data: int) -> Path:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data))
    return path


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: dict[str, tuple[dict[str, Any], int]] = {
    "overlap": ({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, 12),
    "same bytes": ({"a": ONE, "b": ONE}, 8),
    "gap": ({"a": ONE, "b": {**ONE, "data_offsets": [12, 20]}}, 20),
    "trailing": ({"a": ONE}, 9),
    "unknown type": ({"a": {**ONE, "dtype": "Q9"}}, 8),
    "null type": ({"a": {**ONE, "dtype": None}}, 8),
    "size": ({"a": {**ONE, "shape": [3]}}, 8),
    "metadata number": ({"__metadata__": {"a": 1}, "a": ONE}, 8),
    "metadata list": ({"__metadata__": [1], "a": ONE}, 8),
}


@pytest.mark.parametrize("name", HEADERS, ids=[f"S3-16 {name}" for name in HEADERS])
def test_a_header_is_judged_as_the_library_does(tmp_path: Path, name: str) -> None:
    file = weights(tmp_path / "model.safetensors", *HEADERS[name])
    with pytest.raises(SafetensorError), safe_open(file, framework="np"):
        pass
    with pytest.raises(ModelError) as caught:
        read_header(file)
    assert caught.value.path == str(file)


def test_a_sound_header_is_read(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": {**ONE, "data_offsets": [8, 16]}, "a": ONE}
    header["none"] = {"dtype": "F16", "shape": [0, 4], "data_offsets": [16, 16]}
    file = weights(tmp_path / "model.safetensors", header, 16)
    with safe_open(file, framework="np") as tensors:
        assert set(tensors.keys()) == set(read_header(file))


def test_a_shape_is_compared_with_the_config(model: Path) -> None:
    """S3-16: transposed, so that all sums are right."""
    file = next(model.glob("*.safetensors"))
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    name = "model.layers.0.mlp.down_proj.weight"
    header[name]["shape"].reverse()
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])
    with pytest.raises(ModelError) as caught:
        model_facts(str(model))
    assert caught.value.code == SHAPE


# ---------------------------------------------------------------- shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", ROWS)
    path = config(tmp_path / "run.yaml", data="train: rows.jsonl, tokenized: shards")
    ended = CliRunner().invoke(app, ["prepare", str(path)])
    assert ended.exit_code == 0, ended.output
    return path


CHANGES: dict[str, Any] = {
    "S2-11 rows x": lambda m: m["shards"][0].update(rows="x"),
    "S2-11 rows nan": lambda m: m["shards"][0].update(rows=float("nan")),
    "S3-17 rows -1": lambda m: m["shards"][0].update(rows=-1),
    "S3-17 rows 10^15": lambda m: m["shards"][0].update(rows=10**15),
    "S3-17 rows 10^6": lambda m: (m["shards"][0].update(rows=10**6), m["stats"].update(kept=10**6)),
    "S3-17 tokens": lambda m: m["shards"][0].update(tokens=10**6),
    "S3-17 repeat": lambda m: m["shards"][0].update(repeat=0),
    "S3-17 no shards": lambda m: m.update(shards=[]),
    "S3-17 held_out": lambda m: m.update(held_out=-1),
    "S3-17 lengths": lambda m: m.update(lengths={"x": "y"}),
    "S3-17 stats": lambda m: m["stats"].update(tokens=None),
    "S3-17 list": lambda m: m.update(settings=[]),
}


@pytest.mark.parametrize("name", CHANGES, ids=str)
def test_a_manifest_is_judged_alike_by_every_command(shards: Path, tmp_path: Path, name: str) -> None:
    manifest = tmp_path / "shards" / "manifest.json"
    content = json.loads(manifest.read_text())
    CHANGES[name](content)
    manifest.write_text(json.dumps(content))
    gathered = load_run_context(load_config(shards))
    assert [problem.field for problem in gathered.problems] == ["data.tokenized"]
    assert found(shards)[0] == EXIT_FINDINGS
    assert CliRunner().invoke(app, ["plan", str(shards)]).exit_code in (EXIT_FINDINGS, EXIT_USAGE)


@pytest.mark.parametrize("damage", ["S3-17 one id", "S2-11 offsets", "S3-17 one mark"])
def test_a_shard_is_compared_with_its_hash(shards: Path, tmp_path: Path, damage: str) -> None:
    assert ShardedTokens(tmp_path / "shards").compare() is None
    shard = next((tmp_path / "shards").glob("shard-*"))
    name = {"one id": "input_ids", "offsets": "offsets", "one mark": "supervised"}[damage.partition(" ")[2]]
    array = np.load(shard / f"{name}.npy")
    if name == "offsets":
        array = array[::-1].copy()
    else:
        array[3] ^= 1
    np.save(shard / f"{name}.npy", array)
    with pytest.raises(DataError) as caught:
        ShardedTokens(tmp_path / "shards").compare()
    assert (caught.value.code, caught.value.field) == (CHANGED, "data.tokenized")
    assert CliRunner().invoke(app, ["train", str(shards)]).exit_code == EXIT_USAGE


# ---------------------------------------------------------------- rows


def columns(path: Path, texts: list[str], **options: Any) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table(
        {"prompt": pa.array(texts).dictionary_encode().cast(pa.string()), "completion": ["y"] * len(texts)}
    )
    if path.suffix == ".parquet":
        parquet.write_table(table, path, **options)
    else:
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
            file.write_table(table)
    return path


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("many", [1_500, 200], ids=["S2-13 bomb", "S2-13 large"])
def test_columns_are_bounded_by_what_they_decode_to(tmp_path: Path, ending: str, many: int) -> None:
    file = columns(tmp_path / f"rows.{ending}", ["word " * 200_000] * many)
    assert file.stat().st_size < MIB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    if many == 1_500:
        for read in (
            lambda: read_quick_sample(str(file), "train", lambda: load_rows(str(file))),
            lambda: load_rows(str(file)),
        ):
            with pytest.raises(DataError) as caught:
                read()
            assert caught.value.code in BOMBS
    else:
        rows = read_quick_sample(str(file), "train", lambda: load_rows(str(file)))
        assert rows is not None
        assert rows.total == many
        assert len(rows) <= SHOWN_BYTES // 1_000_000 + 2
    assert time.process_time() - started < 4
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 500 * MIB


# ---------------------------------------------------------------- disk, URLs


def test_a_full_disk_is_the_machines(tmp_path: Path) -> None:
    """S3-18."""

    def finding(code: str) -> dict[str, Any]:
        return {"severity": "error", "code": code, "message": "", "path": None, "line": None, "field": None, "help": ""}

    assert CheckFailed([finding("DSK001")]).exit_code == EXIT_ENVIRONMENT
    assert CheckFailed([finding("DSK001"), finding("DAT001")]).exit_code == EXIT_FINDINGS


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    """S3-19."""
    file = write_rows(tmp_path / "my rows.jsonl", ROWS)
    assert resolve_source(f"file://{tmp_path}/my%20rows.jsonl").path == file
    assert len(load_rows(f"file://{tmp_path}/my%20rows.jsonl")) == len(ROWS)
    with pytest.raises(DataError):
        resolve_source("file:///no/such/file.jsonl")


@pytest.mark.parametrize("field", ["data.train", "data.eval"], ids=lambda field: f"S3-19 {field}")
@pytest.mark.parametrize(("url", "code"), [("s3://bucket/rows.jsonl", "E4077"), ("nowhere://a/b.jsonl", "E4078")])
def test_a_url_that_this_machine_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, url: str, code: str
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    path = config(tmp_path / "run.yaml")
    loaded = load_config(path, [f"{field}={url}"])
    assert [(problem.code, problem.field) for problem in load_run_context(loaded).problems] == [(code, field)]
