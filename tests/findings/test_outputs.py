"""Nothing is overwritten by accident: every option that names an output, against the inputs of its command."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.core.errors import ConfigError
from surefit.core.output import json_with, output_file

CONFIG = """\
recipe: chat
model: {name_or_path: surefit/nano}
data: {train: rows.jsonl, eval: held.jsonl, max_length: 64}
train: {max_steps: 2, global_batch_size: 4, per_device_train_batch_size: 2}
hardware: {gpu: cpu}
output_dir: runs/a
"""
AXOLOTL = "base_model: NousResearch/Llama-3.2-1B\ndatasets:\n  - path: rows.jsonl\n    type: alpaca\n"
REVIEWS = [{"user": f"u{n % 7}", "item": f"i{n % 5}", "timestamp": n} for n in range(70)]


@dataclass(frozen=True)
class Output:
    """An option that names what a command writes.

    Attributes:
        command: the command line before the option.
        inputs: files of the folder that this command reads, and may not write over.
        other: the ending that the option wants.
        again: a second call replaces what the first one wrote.
    """

    command: tuple[str, ...]
    inputs: tuple[str, ...]
    other: str = ".out"
    again: bool = True


OUTPUTS = {
    "init --output": Output(("init", "--data", "rows.jsonl", "--model", "surefit/nano"), ("rows.jsonl",), again=False),
    "import --output": Output(("import", "axolotl.yaml"), ("axolotl.yaml",), again=False),
    "audit --passport": Output(("audit", "run.yaml"), ("run.yaml",), ".json"),
    "audit --clean-copy": Output(("audit", "rows.jsonl", "--fix"), ("rows.jsonl",), ".jsonl", again=False),
    "plan --plot": Output(("plan", "run.yaml"), (), ".svg"),
    "slurm --output": Output(("slurm", "run.yaml"), ("run.yaml", "rows.jsonl", "held.jsonl")),
    "score --output": Output(
        ("score", "--recipe", "chat", "--predictions", "pred.jsonl", "--references", "held.jsonl"),
        ("pred.jsonl", "held.jsonl"),
    ),
    "predict --output": Output(
        ("predict", "run.yaml", "held.jsonl", "--base"), ("held.jsonl", "rows.jsonl", "run.yaml")
    ),
    "compare --plot": Output(("compare", "a.jsonl", "b.jsonl"), (), ".svg"),
    "doctor file": Output(("doctor", "--fix-script"), (), again=False),
}
"""What runs in a folder without a trained model. The rest of the options is below, with the test that looks at each."""
ELSEWHERE = {
    "merge --output": "test_merge_never_replaces_its_base_or_a_model_of_others",
    "retrieve --output": "test_retrieve_replaces_only_what_it_made",
    "report --output": "test_a_page_replaces_only_a_page",
    "export --output": "test_an_export_replaces_only_an_export",
    "calibrate --output": "test_a_profile_replaces_only_a_profile",
    "demo --output-dir": "test_the_demo_replaces_only_a_demo",
    "chat --save": "test_a_conversation_is_added_to_no_file_of_the_run",
}
READ = {
    "audit --output", "audit --out",  # the old spellings, which only say the new ones
    "check config", "audit target", "import source", "plan config", "plan --against", "train config", "prepare config",
    "slurm config", "merge target", "merge --base", "merge --prompts", "certify adapter", "certify merged",
    "certify --prompts", "evaluate target", "predict target", "predict data", "chat target", "chat-worker run",
    "score --predictions",
    "score --references", "compare a", "compare b", "retrieve data", "report targets", "run config", "demo --data",
    "export target", "export --llama-cpp", "push target", "serve-check target", "runs list directory", "runs show run",
    "runs diff a", "runs diff b", "runs prune target", "runs reproduce run", "ui --workspace",
}  # fmt: skip


def options(command: Any, above: str = "") -> Iterator[str]:
    """Every option and argument of the command line that takes a path, or whose name says so: COMMAND OPTION."""
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from options(each, f"{above}{name} ")
        return
    for option in command.params:
        name = option.opts[0] if option.opts[0].startswith("-") else option.name
        if "Path" in str(option.type_descriptor.annotation) or re.search(r"\b(out|output)\b", name):
            yield above + name


def call(*command: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, [*map(str, command), "--json"])
    return result.exit_code, json.loads(result.stdout.strip().splitlines()[-1])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    def jsonl(name: str, rows: list[Any]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    rows = [{"prompt": f"What is {n} and {n}?", "completion": f"It is {2 * n}."} for n in range(24)]
    jsonl("rows.jsonl", rows)
    jsonl("held.jsonl", [{"prompt": f"And {n}?", "completion": str(n)} for n in range(4)])
    jsonl("pred.jsonl", [{"text": str(n)} for n in range(4)])
    for name in ("a", "b"):
        lines = [{"index": n, "text": str(n), "scores": {"exact_match": 1.0}, "recipe": "chat"} for n in range(4)]
        jsonl(f"{name}.jsonl", lines)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.is_symlink()}


def name_option(name: str, path: object) -> list[object]:
    option = name.split()[-1]
    return [option, path] if option.startswith("-") else [path]


def test_every_option_of_the_command_line_that_names_a_path_is_sorted() -> None:
    """A new option with a path is either an input, or has a test here of what it may write over."""
    known = {*OUTPUTS, *ELSEWHERE, *READ}
    found = set(options(typer.main.get_command(app)))
    assert found - known == set()
    assert {*OUTPUTS, *ELSEWHERE} - found == set()
    assert all(test in globals() for test in ELSEWHERE.values())


QUICK = ("score --output", "slurm --output")
"""Whose inputs are named in every way; that all commands ask the same function is what the others show."""
WAYS: dict[str, Callable[[Path], Path]] = {
    "its name": lambda path: Path(path.name),
    "a relative path": lambda path: Path("runs/../..") / path.parent.name / path.name,
    "a link": lambda path: _linked(path, os.symlink),
    "a second name": lambda path: _linked(path, os.link),
}


def _linked(path: Path, link: Callable[[Path, Path], None]) -> Path:
    (path.parent / "links").mkdir(exist_ok=True)
    other = path.parent / "links" / path.name
    link(path, other)
    return other


FINDINGS = {
    "audit --passport": "OB1", "audit --clean-copy": "OB2", "score --output": "OB3", "predict --output": "OB4",
    "slurm --output": "OB5",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "read", "way"),
    [
        pytest.param(name, read, way, id=f"{FINDINGS.get(name, 'OB')}-{name}-{read}-{way}")
        for name, output in OUTPUTS.items()
        for read in output.inputs
        for way in (WAYS if name in QUICK else ["its name"])
    ],
)
def test_no_command_writes_over_its_input(files: Path, name: str, read: str, way: str) -> None:
    (files / "runs").mkdir()
    place = WAYS[way](files / read)
    before = content(files)
    overwrite = ["--overwrite"] if name in ("predict --output", "audit --clean-copy") else []
    code, said = call(*OUTPUTS[name].command, *name_option(name, place), *overwrite)
    assert (code, said["code"] in ("E1604", "E1605", "E1600", "E4002"), content(files)) == (2, True, before), said


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name not in ("plan --plot", "predict --output")])
def test_a_file_of_others_stays_and_an_own_one_is_replaced_where_that_is_harmless(files: Path, name: str) -> None:
    output = OUTPUTS[name]
    mine = files / f"mine{output.other}"
    mine.write_text('{"not": "ours"}\n')
    code, said = call(*output.command, *name_option(name, mine.name))
    assert (code, said["code"], mine.read_text()) == (2, "E1604", '{"not": "ours"}\n')
    mine.unlink()
    assert call(*output.command, *name_option(name, mine.name))[0] in (0, 3)
    assert call(*output.command, *name_option(name, mine.name))[0] == (0 if output.again else 2)
    mine.unlink()
    mine.touch()  # as `mktemp` makes one: there is nothing to lose
    assert call(*output.command, *name_option(name, mine.name))[0] in (0, 3)


def test_plots_are_looked_at_before_anything_is_simulated(files: Path) -> None:
    (files / "logo.svg").write_text("<svg/>")
    (files / "run.svg").write_text(CONFIG)
    for name in ("logo.svg", "run.svg"):
        assert call("plan", "run.yaml", "--plot", name)[1]["code"] == "E1604"
    assert call("plan", "run.yaml", "--plot", "rows.jsonl")[1]["code"] == "E1031"


@pytest.mark.parametrize("flag", ["-o", "--output", "--out"], ids=["OB2-o", "OB2-output", "OB2-out"])
def test_the_old_spellings_of_audit_write_nothing_and_say_the_new_ones(files: Path, flag: str) -> None:
    before = content(files)
    code, said = call("audit", "rows.jsonl", "--fix", flag, "clean.jsonl")
    assert (code, said["code"], content(files)) == (2, "E1601", before)
    assert ("--clean-copy" if flag == "--out" else "--passport") in said["message"]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "jsonl.gz", "arrow"])
def test_a_passport_is_not_written_as_rows(files: Path, ending: str) -> None:
    code, said = call("audit", "rows.jsonl", "--passport", f"new.{ending}")
    assert (code, said["code"], (files / f"new.{ending}").exists()) == (2, "E1600", False)


def test_a_clean_copy_is_replaced_when_that_is_asked_for(files: Path) -> None:
    assert call("audit", "rows.jsonl", "--fix")[0] == 0
    (files / "rows.clean.jsonl").write_text("edited by hand\n")
    assert call("audit", "rows.jsonl", "--fix")[1]["code"] == "E1604"
    assert (files / "rows.clean.jsonl").read_text() == "edited by hand\n"
    assert call("audit", "rows.jsonl", "--fix", "--overwrite")[0] == 0
    assert (files / "rows.clean.jsonl").read_bytes() == (files / "rows.jsonl").read_bytes()


def test_the_list_of_removed_rows_is_an_output_too(files: Path) -> None:
    (files / "x.removed.jsonl").write_text((files / "rows.jsonl").read_text())
    code, said = call("audit", "x.removed.jsonl", "--fix", "--clean-copy", "x.jsonl", "--overwrite")
    assert (code, said["code"]) == (2, "E1605")
    assert (files / "x.removed.jsonl").read_bytes() == (files / "rows.jsonl").read_bytes()


def test_what_answers_belong_to_is_an_output_too(files: Path) -> None:
    (files / "x.jsonl.about").write_text((files / "held.jsonl").read_text())
    code, said = call("predict", "run.yaml", "x.jsonl.about", "--base", "-o", "x.jsonl", "--overwrite")
    assert (code, said["code"]) == (2, "E1605")


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("data.eval", "out/eval/held.jsonl"), ("model.name_or_path", "out/model"),
        ("lora.start_from", "out/adapter"), ("data.train", "out/metrics.jsonl"),
    ],
)  # fmt: skip
def test_a_run_never_deletes_what_it_reads(files: Path, key: str, place: str) -> None:
    source = files / place
    source.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix:
        source.write_bytes((files / "rows.jsonl").read_bytes())
    else:
        source.mkdir()
        (source / "config.json").write_text("{}")
    (files / "out/resolved.yaml").write_text(CONFIG)  # what --overwrite takes for a run
    (files / "out/events.jsonl").touch()
    overrides = ["--set", "output_dir=out", "--set", f"{key}={place}"]
    code, said = call("check", "run.yaml", *overrides)
    assert (code, [f["field"] for f in said["findings"] if f["code"] == "CFG001"]) == (1, ["output_dir"])
    assert call("train", "run.yaml", *overrides, "--overwrite")[0] != 0
    assert source.exists()


def test_a_new_run_leaves_alone_what_no_run_has_written(files: Path) -> None:
    (files / "model").mkdir()
    (files / "model/precious.safetensors").write_text("weights")
    code, said = call("train", "run.yaml", "--set", "output_dir=.")
    assert (code, said["code"], said["field"]) == (2, "E8601", "output_dir")
    assert (files / "model/precious.safetensors").read_text() == "weights"


def test_shards_are_not_written_among_the_rows(files: Path) -> None:
    (files / "data").mkdir()
    (files / "rows.jsonl").rename(files / "data/rows.jsonl")
    code, said = call("prepare", "run.yaml", "--set", "data.train=data", "--set", "data.tokenized=data")
    assert (code, said["field"]) == (2, "data.tokenized")
    (files / "data/held_out.jsonl").write_text("mine\n")
    for name in ("plan.json", "manifest.json"):
        file = files / "data" / name
        file.write_text((files / "held.jsonl").read_text())
        given = ["--set", f"data.train={file.relative_to(files)}", "--set", "data.tokenized=data", "--overwrite"]
        code, said = call("prepare", "run.yaml", *given)
        assert (code, file.read_text()) == (2, (files / "held.jsonl").read_text())


def test_merge_never_replaces_its_base_or_a_model_of_others(files: Path) -> None:
    (files / "adapter").mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": "./merged", "r": 4, "target_modules": ["q_proj"]}
    (files / "adapter/adapter_config.json").write_text(json.dumps(settings))
    (files / "merged").mkdir()
    (files / "merged/config.json").write_text("{}")
    assert call("merge", "adapter", "-o", ".")[1]["code"] == "E1605"
    assert call("merge", "adapter", "--base", "surefit/nano", "-o", ".")[1]["code"] == "E1604"
    (files / "merged").rename(files / "adapter/merged")
    assert call("merge", "adapter", "--base", "surefit/nano")[1]["code"] == "E1604"
    assert (files / "adapter/merged/config.json").read_text() == "{}"


def test_retrieve_replaces_only_what_it_made(files: Path) -> None:
    (files / "in").mkdir()
    (files / "in/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in REVIEWS))
    for data in ("in", "in/train.jsonl"):
        assert call("retrieve", data, "-o", "in")[1]["code"] == "E1605"
    (files / "out").mkdir()
    (files / "out/train.jsonl").write_text("mine\n")
    assert call("retrieve", "in/train.jsonl", "-o", "out")[1]["code"] == "E1604"
    assert (files / "out/train.jsonl").read_text() == "mine\n"


def test_a_page_replaces_only_a_page(files: Path) -> None:
    for name in ("one", "two"):
        (files / name).mkdir()
        (files / name / "resolved.yaml").write_text(CONFIG)
        (files / name / "events.jsonl").touch()
    assert call("report", "one", "two", "-o", "rows.jsonl")[1]["code"] == "E1604"
    assert call("report", "one", "two", "-o", "one/resolved.yaml")[1]["code"] == "E1604"
    assert call("report", "one", "two", "-o", "page.html")[0] == 0
    assert call("report", "one", "two", "-o", "page.html")[0] == 0
    assert call("report", "one", "two", "-o", "one/report.html")[1]["code"] == "E1604"  # another kind of page


def test_an_export_replaces_only_an_export(files: Path) -> None:
    from surefit.core.rundir import RunDir
    from surefit.merge.export import CertifiedModel, require_export_directory

    model = files / "run/merged"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    source = CertifiedModel(RunDir(files / "run"), model, {})
    for place in (model, files / "run", model / "below", files / "rows.jsonl", files):
        with pytest.raises(ConfigError) as caught:
            require_export_directory(source, place)
        assert caught.value.code in ("E1603", "E1604", "E1605")
    require_export_directory(source, files / "run/export/hub")
    made = files / "export"
    made.mkdir()
    for name in ("export.json", "certificate.json"):
        (made / name).write_text("{}")
    require_export_directory(source, made)


def test_a_profile_replaces_only_a_profile(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "surefit.plan.calibrate.calibrate_device", lambda note: pytest.fail("measured before it was looked at")
    )
    assert call("calibrate", "-o", "run.yaml")[1]["code"] == "E1604"
    assert call("calibrate", "-o", ".")[1]["code"] == "E1603"
    (files / "profile.json").write_text(json.dumps({"device": "x", "matmul": {}, "copy": []}))
    output_file(files / "profile.json", earlier=json_with("device", "matmul", "copy"))


def test_the_demo_replaces_only_a_demo(files: Path) -> None:
    (files / "mine").mkdir()
    (files / "mine/resolved.yaml").write_text(CONFIG)
    code, said = call("demo", "--output-dir", "mine")
    assert (code, said["field"], (files / "mine/resolved.yaml").read_text()) == (2, "--output-dir", CONFIG)


def test_devices_and_directories_are_no_files(files: Path) -> None:
    for place in ("/dev/null", "."):
        assert call("init", "chat", "-o", place)[1]["code"] == "E1603"
    os.symlink("nowhere", files / "dangling")
    assert call("init", "chat", "-o", "dangling")[1]["code"] in ("E1603", "E1604")


def test_a_conversation_is_added_to_no_file_of_the_run(files: Path) -> None:
    before = content(files)
    for read in ("run.yaml", "rows.jsonl", "a.jsonl"):
        command = ("chat", "run.yaml", "-p", "Hello", "--max-new-tokens", 1, "--save", read)
        code, said = call(*command)
        assert (code, said["code"] in ("E1604", "E1605"), content(files)) == (2, True, before), said
