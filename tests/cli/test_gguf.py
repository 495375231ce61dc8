"""A GGUF file through every stage: from the config to what is pushed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf

from surefit.core.rundir import RunDir, file_sha256, read_json

pytest.importorskip("gguf", reason="llama.cpp's library gguf is not installed")


@pytest.fixture
def of_gguf(config: Path, tmp_path: Path) -> Path:
    """The config of `config`, its base a GGUF file."""
    write_gguf(tmp_path / "tiny.gguf", "Q4_1")
    config.write_text(config.read_text().replace("surefit/nano", "tiny.gguf"))
    return config


def test_check_needs_no_conversion_and_leaves_none(surefit: Any, of_gguf: Path, tmp_path: Path) -> None:
    answer = surefit("check", of_gguf)
    assert (answer.code, "no problem found" in answer.text) == (0, True)
    assert not (tmp_path / "cache").exists()


def test_check_counts_tokens_with_the_files_own_tokenizer(surefit: Any, of_gguf: Path) -> None:
    answer = surefit("check", of_gguf, "--set", "data.max_length=16", "--json")
    assert "LAB010" in {finding["code"] for finding in answer.json["findings"]}


def test_check_says_what_is_wrong_with_the_file(surefit: Any, of_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(file.read_bytes()[:-100])
    answer = surefit("check", of_gguf)
    assert answer.code == 1
    assert "MOD001" in answer.text
    assert "its header describes" in answer.text
    refused = surefit("train", of_gguf)
    assert refused.code != 0
    assert not (tmp_path / "runs").exists()
    assert "Traceback" not in refused.text


@pytest.mark.slow
def test_all_stages_say_what_was_merged_into_what(surefit: Any, of_gguf: Path, tmp_path: Path) -> None:
    sha256 = file_sha256(tmp_path / "tiny.gguf")
    planned = surefit("plan", of_gguf, "--json").json
    assert any("the converted GGUF file" in text for text in planned["left_out"])
    done = surefit("run", of_gguf)
    assert done.code in (0, 1), done.text
    assert "converting tiny.gguf (911.3 KiB, Q4_1) to float32, once" in done.stderr
    run = RunDir(Path("runs/one"))
    of = {"file": "tiny.gguf", "sha256": sha256, "quantization": "Q4_1", "dequantized_to": "float32", "converter": 1}
    assert read_json(run.adapter / "surefit.json")["base"]["gguf"] == of
    certificate = read_json(run.certificate)
    assert (certificate["passed"], certificate["base"]["gguf"]) == (True, of)
    page = run.report.read_text()
    assert "tiny.gguf, Q4_1, dequantized to float32" in page
    assert sha256 in page
    assert surefit("plan", of_gguf, "--json").json["model"]["source"] == "gguf"

    (tmp_path / "one.txt").write_text("Ring me\n")
    assert surefit("predict", run.path, "--prompt", "Ring person 3").code == 0
    assert surefit("merge", run.adapter, "--output", "again").code == 0
    assert read_json(Path("again/certificate.json"))["base"]["gguf"] == of
    assert surefit("export", run.path).code == 0
    card = (run.exports / "hub" / "README.md").read_text()
    assert "The base is a GGUF file, `tiny.gguf`" in card
    assert sha256 in card
    assert "license: apache-2.0" in card
    assert str(tmp_path) not in card
    served = surefit("serve-check", run.path)
    assert served.code == 0
    assert str(tmp_path / "cache/gguf") in served.text
    assert surefit("push", run.exports / "hub", "me/one", "--dry-run").code == 0
