"""What the pages say: the same as the command line, and at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from surefit import recipes
from surefit.config.starter import starter_config
from surefit.core.rundir import RunDir, append_jsonl, write_atomic
from surefit.ui.configs import FORM, list_form_fields
from surefit.ui.workspace import Workspace

CHANGES: dict[str, Any] = {
    "model.name_or_path": "meta-llama/Llama-3.1-8B", "hardware.gpu": "h100", "hardware.count": 1,
    "data.max_length": 2048, "train.global_batch_size": 64, "lora.r": 16, "train.max_steps": 1000,
}  # fmt: skip


def surefit(workspace: Path, *command: str) -> Any:
    """The last line of a command of the command line, in the workspace."""
    answer = subprocess.run(
        [sys.executable, "-m", "surefit", *command, "--json"],
        cwd=workspace, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return json.loads(answer.stdout.splitlines()[-1])


def fit(server: Any, price: float | None = None, **changes: Any) -> Any:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return server.post("/api/fit", {"config": "", "changes": CHANGES | named, "price": price}).json


@pytest.mark.parametrize("change", [("seed: 0", "sed: 0"), ("r: 16", "r: 999999")])
def test_the_findings_are_those_of_surefit_check(server: Any, change: tuple[str, str]) -> None:
    text = (server.workspace / "configs" / "nano.yaml").read_text().replace(*change)
    name = f"changed-{abs(hash(change))}.yaml"
    (server.workspace / name).write_text(text)
    expected = surefit(server.workspace, "check", name)
    found = server.post("/api/check", {"name": name, "text": text}).json["findings"]
    if "findings" not in expected:  # the config itself is not usable
        assert [(one["line"], one["message"], one["help"]) for one in found] == [
            (expected["line"], expected["message"], expected["help"])
        ]
        return
    keys = ("code", "severity", "path", "line", "field", "message", "help")
    assert [[one[key] for key in keys] for one in found] == [[one[key] for key in keys] for one in expected["findings"]]
    assert found


@pytest.mark.parametrize(
    ("rows", "skipped"),
    [
        ("surefit/function-calling-train", ""),
        ("owner/name", "the dataset is not on this machine"),
        ("no.jsonl", "the dataset could not be read"),
        ("owner/name}\nlora: {target_modules: [v_porj]", "the dataset is not on this machine"),
    ],
)
def test_what_was_not_checked_is_counted(server: Any, rows: str, skipped: str) -> None:
    """An error elsewhere does not make rows unreadable that are only on another machine."""
    model = "model: {name_or_path: surefit/nano}"
    text = f"recipe: function_calling\n{model}\ndata: {{train: {rows}}}\noutput_dir: runs/x\n"
    answer = server.post("/api/check", {"name": "x.yaml", "text": text}).json
    assert answer["rules"] > 100
    assert (answer["skipped"] == "", skipped in answer["skipped"]) == (skipped == "", True)


def test_a_temporary_path_is_in_no_finding(server: Any) -> None:
    for text in (
        "",
        "a: [",
        "x: 1",
        "model: {name_or_path: surefit/nano}\ndata: {train: no.jsonl}\noutput_dir: runs/x\n",
    ):
        answer = server.post("/api/check", {"name": "../../x.yaml", "text": text})
        assert answer.json["findings"]
        assert "surefit-ui-" not in answer.text
        assert "/tmp" not in answer.text


def test_the_form_changes_one_value_and_nothing_else(server: Any) -> None:
    text = (server.workspace / "configs" / "nano.yaml").read_text()
    edited = server.post("/api/edit", {"text": text, "key": "lora.r", "value": "8"}).json["text"]
    assert edited == text.replace("r: 16", "r: 8")
    without = server.post("/api/edit", {"text": text, "key": "train.seed", "value": ""}).json["text"]
    assert "seed:" not in without
    assert server.post("/api/edit", {"text": text, "key": "slurm.options", "value": "[x]"}).status == 400
    assert server.post("/api/edit", {"text": text, "key": "lora.r", "value": "!!python/none"}).status == 400


def test_the_form_is_made_of_the_schema() -> None:
    made = {field["key"]: field for field in list_form_fields()}
    assert list(made) == list(FORM)
    assert made["train.method"]["choices"] == ["lora", "full"]
    assert made["lora.r"]["choices"] == []
    assert made["lora.r"]["help"] == "The rank of the LoRA factors."
    assert made["train.gradient_checkpointing"]["choices"] == ["auto", "true", "false", "selective", "offload"]
    assert made["data.train"]["required"]


def test_saving_never_overwrites_what_was_not_opened(server: Any) -> None:
    path = server.workspace / "configs" / "saved.yaml"
    first = server.post("/api/save", {"name": "configs/saved.yaml", "text": "a: 1\n", "known": None})
    assert (first.status, path.read_text()) == (200, "a: 1\n")
    assert server.post("/api/save", {"name": "configs/saved.yaml", "text": "a: 2\n", "known": None}).status == 409
    path.write_text("a: 3\n")
    stale = {"name": "configs/saved.yaml", "text": "a: 4\n", "known": first.json["known"]}
    assert server.post("/api/save", stale).status == 409
    assert path.read_text() == "a: 3\n"
    path.write_bytes(b"a: 3\r\nb: 4\r\n")
    known = re.search(r'data-known="(\w+)"', server.get("/config?open=configs/saved.yaml").text)
    assert known
    answer = server.post("/api/save", {"name": "configs/saved.yaml", "text": "a: 5\nb: 4\n", "known": known[1]})
    assert (answer.status, path.read_bytes()) == (200, b"a: 5\r\nb: 4\r\n")
    assert server.post("/api/save", {"name": "x.yaml", "text": "x" * 300_000, "known": None}).status == 400
    assert not list(server.workspace.rglob("*.tmp"))


def test_a_fit_takes_milliseconds_and_follows_every_setting(server: Any) -> None:
    fit(server)
    times = [fit(server, lora__r=r)["milliseconds"] for r in (4, 8, 16, 32, 64)]
    assert min(times) < 500  # a busy machine takes its time
    base = fit(server, price=2.0)
    assert base["verdict"] == "fits"
    assert fit(server, hardware__gpu="t4")["verdict"] == "does not fit"
    one = {"train__per_device_train_batch_size": 1}  # auto would take less where more does not fit
    assert fit(server, lora__r=256, **one)["high"] > fit(server, **one)["high"]
    assert fit(server, model__quantization="nf4")["high"] < base["high"]
    assert fit(server, train__gradient_checkpointing=True)["bars"][0]["bytes"] > 0
    assert fit(server, hardware__count=8, parallel__mode="fsdp")["high"] < base["high"]
    assert base["cost_text"].startswith("at least ")
    whole = next(bar for bar in base["bars"] if bar["name"] == "training: the loss")
    assert whole["bytes"] == sum(term["bytes"] for term in whole["terms"])


def test_the_fit_of_a_config_is_that_of_surefit_plan(server: Any) -> None:
    expected = surefit(server.workspace, "plan", "configs/nano.yaml", "--quick", "--set", "hardware.gpu=l4")
    changes = {"hardware.gpu": "l4"}
    found = server.post("/api/fit", {"config": "configs/nano.yaml", "changes": changes, "price": None}).json
    # The page reads no rows: they are as long as data.max_length there, and as long as they are in the command's plan.
    for end in ("low", "high"):
        planned = expected["estimate"][f"{end}_bytes"]
        assert planned <= found[end] <= 1.001 * planned
    assert found["verdict"] == expected["estimate"]["verdict"]


@pytest.mark.parametrize(("key", "value"), [
    ("train.per_device_train_batch_size", 7), ("lora.r", 0), ("lora.r", "many"), ("hardware.gpu", "abacus"),
    ("model.name_or_path", "/etc"), ("model.name_or_path", "../models"), ("data.max_length", 1e300),
    ("lora.r", 10**9),
])  # fmt: skip
def test_a_value_that_cannot_be_is_said(server: Any, key: str, value: Any) -> None:
    answer = server.post("/api/fit", {"config": "", "changes": CHANGES | {key: value}, "price": None})
    assert answer.status == 400
    assert answer.json["error"]


def test_the_planner_counts_mixed_rows_and_devices(server: Any, rows: bytes) -> None:
    """48 of 60 rows and 60 mixed ones twice are an epoch; the batch of 3 GPUs is a multiple of 3."""
    (server.workspace / "mine.jsonl").write_bytes(rows)
    (server.workspace / "more.jsonl").write_bytes(rows.replace(b"replace", b"mend"))
    (server.workspace / "mixed.yaml").write_text(
        "recipe: chat\nmodel: {name_or_path: surefit/nano}\n"
        "data: {train: mine.jsonl, eval: 0.2, mix: {more.jsonl: 2}}\n"
        "train: {num_train_epochs: 2, global_batch_size: auto}\nhardware: {gpu: t4, count: 3}\noutput_dir: runs/x\n"
    )
    page = server.get("/planner?config=mixed.yaml").text
    values = {
        key: re.search(rf'data-key="{re.escape(key)}"[^>]* value="(\d+)"', page)
        for key in ("train.global_batch_size", "train.max_steps")
    }
    assert [match and match[1] for match in values.values()] == ["6", "56"], "(48 + 120) * 2 / 6"


def test_only_the_form_can_be_planned(server: Any) -> None:
    for changes in ({"output_dir": "/"}, {"model.trust_remote_code": True}, [], None):
        assert server.post("/api/fit", {"config": "", "changes": changes, "price": None}).status == 400
    assert server.post("/api/fit", {"config": "", "changes": CHANGES, "price": -1}).status == 400


def test_code_that_a_model_brings_is_not_run_for_a_page(server: Any) -> None:
    text = (server.workspace / "configs" / "nano.yaml").read_text()
    trusting = text.replace("  name_or_path: surefit/nano", "  name_or_path: surefit/nano\n  trust_remote_code: true")
    assert trusting != text
    (server.workspace / "configs" / "trusting.yaml").write_text(trusting)
    answer = server.post("/api/simulate", {"config": "configs/trusting.yaml", "changes": {}, "price": None})
    assert answer.status == 400
    assert "does not run" in answer.text


@pytest.mark.slow
def test_the_button_simulates(server: Any) -> None:
    body = {"config": "configs/nano.yaml", "changes": {"train.max_steps": 10}, "price": 1.0}
    answer = server.post("/api/simulate", body).json
    assert answer.get("how") == "simulation", answer
    assert answer["bars"][0]["name"] == "the peak"


def test_watching_reads_on_from_where_it_was_and_begins_anew_after_a_rewind(server: Any) -> None:
    run = RunDir(server.workspace / "runs" / "live")
    run.create()
    run.note("train", "started")
    watch = "/api/watch?path=runs/live&from="
    assert server.get(watch).json["lines"] == []
    for step in (1, 2):
        append_jsonl(run.metrics, {"step": step, "loss": 1.0 / step})
    first = server.get(watch).json
    assert [line["step"] for line in first["lines"]] == [1, 2]
    assert first["event"] == {"stage": "train", "event": "started"}
    with open(run.metrics, "ab") as file:
        file.write(b'{"step": 3, "lo')
    assert server.get(watch + first["next"]).json["lines"] == []
    with open(run.metrics, "ab") as file:
        file.write(b'ss": 0.25}\nnonsense\n{"step": 4, "loss": NaN}\n')
    following = server.get(watch + first["next"]).json
    assert [(line["step"], line["loss"]) for line in following["lines"]] == [(3, 0.25), (4, None)]
    assert not following["anew"]
    write_atomic(run.metrics, '{"step": 1, "loss": 1.0}\n')
    again = server.get(watch + following["next"]).json
    assert again["anew"]
    assert [line["step"] for line in again["lines"]] == [1]
    for place in ("x", "1:2:3", "0:99999999999999999999999", ":"):
        assert server.get(watch + place).status == 200


def test_examples_are_paged_and_filtered(server: Any) -> None:
    page = server.get("/run/examples?path=runs/first").text
    assert page.count('<article class="example">') == 20
    assert "Page 1 of" in page
    for odd in ("page=0", "page=-1", "page=99999999999", "page=x", "filter=nothing"):
        assert server.get(f"/run/examples?path=runs/first&{odd}").status == 200
    won = server.get("/run/examples?path=runs/first&filter=won").text
    assert won.count('tone-good">won') == won.count('<article class="example">') > 0


def test_a_workspace_with_nothing_in_it(start: Any, tmp_path: Path) -> None:
    with start(tmp_path) as server:
        assert "There is no run in this workspace yet" in server.get("/runs").text
        assert "This workspace has no config yet" in server.get("/config").text


def test_configs_of_runs_and_of_environments_are_not_listed(tmp_path: Path) -> None:
    for name in ("a.yaml", "deep/er/b.yml", ".hidden/c.yaml", "runs/x/resolved.yaml", "env/pyvenv.cfg", "env/d.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x: 1\n")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert Workspace(tmp_path.resolve()).configs() == ["a.yaml", "deep/er/b.yml"]


def test_without_the_extra_the_command_to_install_it_is_said(tmp_path: Path) -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from surefit.cli.app import main; main()"
    command = [sys.executable, "-c", code, "ui"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 3
    assert "'.[ui]'" in answer.stderr


def test_starters_say_what_they_are_for_and_only_those_that_run_say_so(server: Any) -> None:
    text = unescape(server.get("/config").text)
    complete, _, own_rows = text.partition("These do not run as they are")
    for name in recipes.list_recipes():
        starter = starter_config(name)
        found = server.post("/api/check", {"name": "starter.yaml", "text": starter}).json["findings"]
        errors = [finding["code"] for finding in found if finding["severity"] == "error"]
        assert recipes.get_recipe(name).purpose in (own_rows if errors else complete), (name, errors)
        assert f"/config?recipe={name}" in (own_rows if errors else complete)
