"""`surefit export RUN --for ollama`: its Modelfile, and what is an error before anything is written.

The run is surefit/nano in the place of a merged model, certified as it is; nothing is trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.cli.conftest import Surefit
from tests.helpers.llama_writer import WRITER

from surefit import nano
from surefit.cli.export import _only_system_prompt
from surefit.core.rundir import RunDir, read_json
from surefit.model.identity import base_identity

CONFIG = """\
recipe: chat
model: {name_or_path: surefit/nano, dtype: float32}
data: {train: rows.jsonl, eval: 0.2, max_length: 256}
train: {max_steps: 3, global_batch_size: 4}
evaluate: {temperature: 0.5}
output_dir: runs/My Run
"""
Certify = Callable[[Sequence[str | None]], RunDir]


def write_rows(path: Path, systems: Sequence[str | None]) -> None:
    """Write 20 rows, with these system prompts in turn; None has none."""
    rows = []
    for number in range(20):
        system = systems[number % len(systems)]
        turns = [] if system is None else [{"role": "system", "content": system}]
        turns += [{"role": "user", "content": f"Ring {number}"}, {"role": "assistant", "content": f"Rang {number}"}]
        rows.append({"messages": turns})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def certify(surefit: Surefit, tmp_path: Path) -> Certify:
    """certify(system prompts) → a run whose merged model has a certificate; in the directory of `surefit`."""
    from surefit.config.resolve import write_resolved
    from surefit.stages.run_context import load_checked_run

    def make(systems: Sequence[str | None]) -> RunDir:
        write_rows(tmp_path / "rows.jsonl", systems)
        (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
        run = load_checked_run(Path("run.yaml"))
        shutil.copytree(nano.PATH, run.run.merged, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        write_resolved(run.resolved, run.run.resolved)
        give_certificate(run.run)
        return run.run

    return make


def give_certificate(run: RunDir) -> None:
    merge = {"passed": True, "checks": [], "merged_sha256": base_identity(run.merged), "reason": "every check passed"}
    run.certificate.write_text(json.dumps(merge), encoding="utf-8")


@pytest.fixture
def llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose converter notes that it was called and then fails."""
    pytest.importorskip("gguf", reason="llama.cpp's library gguf is not installed")
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('called').touch()\nraise SystemExit('no')\n"
    )
    monkeypatch.setenv("LLAMA_CPP", str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("systems", "line"), [(["Be brief."], 'SYSTEM "Be brief."'), (["Be brief.", "Be kind."], None)]
)
def test_a_modelfile_stands_beside_the_gguf_file(
    surefit: Surefit, certify: Certify, llama_cpp: Path, systems: list[str], line: str | None
) -> None:
    (llama_cpp / "convert_hf_to_gguf.py").write_text(WRITER)
    run = certify(systems)
    made = surefit("export", run.path, "--for", "ollama", "--outtype", "f16")
    assert made.code == 0, made.text
    assert "ollama create my-run -f 'runs/My Run/export/ollama/Modelfile'" in made.stdout
    out = run.exports / "ollama"
    assert {"model.gguf", "Modelfile", "README.md", "certificate.json"} <= read_json(out / "export.json")[
        "files"
    ].keys()
    lines = (out / "Modelfile").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "FROM ./model.gguf"
    assert [text for text in lines if text.startswith("SYSTEM")] == ([line] if line else [])
    assert 'PARAMETER stop "<|end|>"' in lines
    assert {"PARAMETER temperature 0.5", "PARAMETER num_ctx 2048"} <= set(lines)
    assert read_json(out / "export.json")["format"] == "gguf"


@pytest.mark.parametrize(
    ("systems", "only"),
    [
        (["Be brief."], "Be brief."),
        (["Be brief.", "Be kind."], None),
        (["Be brief.", None], None),
        ([None], None),
    ],
)
def test_only_a_system_prompt_that_all_training_rows_share(
    surefit: Surefit, tmp_path: Path, systems: list[str | None], only: str | None
) -> None:
    from surefit.stages.run_context import load_checked_run

    write_rows(tmp_path / "rows.jsonl", systems)
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    assert _only_system_prompt(load_checked_run(Path("run.yaml")))[0] == only


def test_a_template_that_ollama_cannot_have_is_an_error_before_the_conversion(
    surefit: Surefit, certify: Certify, llama_cpp: Path
) -> None:
    run = certify(["Be brief."])
    template = run.merged / "chat_template.jinja"
    last_only = "{{ messages[-1]['content'] }}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    template.write_text(last_only, encoding="utf-8")
    give_certificate(run)
    said = surefit("export", run.path, "--for", "ollama", "--json")
    assert (said.code, said.json["code"]) == (2, "E6971")
    assert not run.exports.exists()
    assert not (llama_cpp / "called").exists()
    assert surefit("export", run.path, "--for", "ollama", "--dry-run").code == 2

    as_it_is = surefit("export", run.path, "--format", "gguf", "--json")  # the help's way does reach the converter
    assert (as_it_is.json["code"], (llama_cpp / "called").exists()) == ("E6033", True)


def test_an_adapter_is_merged_first(surefit: Surefit, certify: Certify, llama_cpp: Path) -> None:
    run = certify(["Be brief."])
    run.merged.rename(run.adapter)
    run.certificate.unlink()
    said = surefit("export", run.path, "--for", "ollama", "--json")
    assert (said.code, said.json["code"]) == (1, "E6007")
    assert "surefit merge" in said.json["help"]
    assert not run.exports.exists()
    assert not (llama_cpp / "called").exists()


def test_what_else_is_in_the_output_directory_stays(surefit: Surefit, certify: Certify, llama_cpp: Path) -> None:
    run = certify(["Be brief."])
    Path("mine").mkdir()
    Path("mine/Modelfile").write_text("FROM llama3", encoding="utf-8")
    said = surefit("export", run.path, "--for", "ollama", "--output", "mine", "--json")
    assert (said.code, said.json["code"]) == (2, "E1604")
    assert Path("mine/Modelfile").read_text(encoding="utf-8") == "FROM llama3"
    assert not (llama_cpp / "called").exists()


def test_ollama_reads_gguf_alone(surefit: Surefit, certify: Certify) -> None:
    run = certify(["Be brief."])
    said = surefit("export", run.path, "--for", "ollama", "--format", "nf4", "--json")
    assert (said.code, said.json["code"], said.json["field"]) == (2, "E1971", "--format")


def test_a_dry_run_names_the_files_and_writes_none(surefit: Surefit, certify: Certify, llama_cpp: Path) -> None:
    run = certify(["Be brief."])
    said = surefit("export", run.path, "--for", "ollama", "--dry-run", "--json")
    assert (said.code, said.json["format"], said.json["output"]) == (0, "gguf", str(run.exports / "ollama"))
    assert not run.exports.exists()


@pytest.mark.parametrize(
    ("systems", "said"), [(["Be brief.", "Be kind."], True), (["Be brief."], False), ([None], False)]
)
def test_rows_with_several_system_prompts_are_told_so(
    surefit: Surefit, certify: Certify, llama_cpp: Path, systems: list[str | None], said: bool
) -> None:
    run = certify(systems)
    assert ("has no SYSTEM" in surefit("export", run.path, "--for", "ollama", "--dry-run").stdout) == said
