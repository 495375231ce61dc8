"""The terminal of a first hour: what is typed wrong is named, and every verb says what comes next."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cli.conftest import Surefit, call

from surefit.cli.app import VERBS
from surefit.cli.command_line import OPTIONS, OTHER_WORDS
from surefit.cli.train import describe_run
from surefit.config.load import is_key
from surefit.core.rundir import RunDir, read_jsonl
from surefit.recipes import _RECIPES, get_recipe
from surefit.stages.run_context import load_checked_run

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(?:(?P<file>[^:]+)(?::(?P<line>\d+))?: )?(?P<severity>error|warning|info)\[(?P<code>[A-Z]+\d+)\] ")
"""A problem as an editor parses it."""


def load_mistakes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_mistakes", ROOT / "benchmarks/first_mistakes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["first_mistakes"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


FIRST = load_mistakes()
CODES = {
    1: "E2018", 2: "E2018", 3: "DAT001", 5: "DAT001", 6: "DAT001", 7: "DAT001", 8: "E2012", 9: "E2012", 12: "E2008",
    13: "E2017", 15: "E8021", 16: "E8021", 17: "E8021", 18: "E2100", 19: "E7001", 20: "E1040", 21: "MOD001",
    22: "E1021", 24: "E2018", 25: "E2068", 26: "E2018", 31: "E2018", 33: "E2018", 34: "CFG004", 35: "E2018",
    39: "DAT001", 40: "DAT001", 41: "E2018", 42: "E2018", 43: "E3550", 46: "E2068", 47: "DAT006", 48: "MEM001",
    50: "DAT001", 52: "E8031", 53: "DAT001", 54: "E2012", 56: "E2018", 57: "E2018", 58: "E2018", 59: "E2018",
}  # fmt: skip
"""Number of a mistake → the code of a problem that it shows; the others are no error, or have a code of this file."""
LOADS_A_MODEL = {49}


@pytest.mark.parametrize("number", [n for n in range(1, 61) if n not in LOADS_A_MODEL])
def test_a_first_mistake(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = FIRST.MISTAKES[number - 1]
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    for file, text in {"run.yaml": mistake.config, "rows.jsonl": FIRST.ROWS, **mistake.files}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8", newline="")
    answer = call(*shlex.split(mistake.command))
    assert answer.code in (0, 1, 2, 3)
    assert "Traceback" not in answer.text
    problems = [line for line in answer.text.splitlines() if re.search(r"\b(error|warning|info)\[", line)]
    assert all(LINE.match(line) for line in problems), problems
    if number in CODES:
        found = [match["code"] for line in problems if (match := LINE.match(line))]
        assert CODES[number] in found
    helps = re.findall(r"^  help: .*known here: .*$", answer.text, re.MULTILINE)
    assert len(helps) == len(set(helps))


def said(*words: object) -> tuple[int, str, str]:
    """The exit code, the code of the error and its text."""
    answer = call(*words)
    match = LINE.match(answer.stderr)
    assert match, answer.text
    return answer.code, match["code"], answer.stderr


@pytest.mark.parametrize("verb", [word for words in OTHER_WORDS.values() for word in words.split()])
def test_another_tools_verb(verb: str) -> None:
    meant = next(name for name, words in OTHER_WORDS.items() if verb in words.split())
    code, number, text = said(verb, "run.yaml")
    assert (code, number, f"'{meant}'" in text) == (2, "E1701", True)
    assert meant in {command.__name__.strip("_") for command in VERBS} | {"runs"}


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["--lr", "1e-4"], "--set train.learning_rate=1e-4"),
        (["--lr=1e-4"], "--set train.learning_rate=1e-4"),
        (["--learning_rate", "1e-4"], "--set train.learning_rate=1e-4"),
        (["--train.max_steps=3"], "--set train.max_steps=3"),
        (["--load_in_4bit"], "--set model.quantization=nf4"),
        (["--fp16"], "--set model.dtype=float16"),
        (["--model", "my model"], "--set 'model.name_or_path=my model'"),
        (["--dataset"], "--set data.train=…"),
        (["--force"], "'--overwrite'"),
        (["--num-gpus", "2"], "'--gpus'"),
        (["--resum"], "'--resume'"),
        (["--config", "my run.yaml"], "surefit train 'my run.yaml'"),
        (["--verbose"], "log.txt"),
    ],
)
def test_another_tools_option(words: list[str], written: str) -> None:
    code, number, text = said("train", "run.yaml", *words)
    assert (code, number[:3], written in text) == (2, "E17", True), text


def test_every_translated_option_is_one() -> None:
    settings = [text.removeprefix("--set ").rstrip("=") for text in OPTIONS.values() if text.startswith("--set ")]
    assert settings
    assert all(is_key(key) for key in settings)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["gnome"], "E1701"),
        (["run.yaml"], "E1700"),
        (["train"], "E1708"),
        (["train", "a.yaml", "b.yaml"], "E1709"),
        (["check", "run.yaml", "--format", "xml"], "E1710"),
        (["check", "run.yaml", "--dry-run"], "E1710"),
        (["check", "run.yaml", "--set", "train.max_steps", "5"], "E1711"),
        (["train", "run.yaml", "--gnome"], "E1706"),
        (["--gnome"], "E1706"),
        (["runs", "list", "--gnome"], "E1706"),
        (["plan", "run.yaml", "--gpus", "0"], "E1710"),
        (["train", ""], "E1710"),
    ],
)
def test_a_usage_error_is_printed_as_all_errors(words: list[str], number: str) -> None:
    code, found, text = said(*words)
    assert (code, found, "\n  help: " in text, len(text.splitlines())) == (2, number, True, 2)


def test_without_arguments_the_help() -> None:
    answer = call()
    assert (answer.code, "Usage: surefit" in answer.text) == (2, True)


def test_the_help_needs_no_schema() -> None:
    """What only a config needs is not imported for `surefit --help`."""
    code = "import sys, surefit.cli.app; print([m for m in ('pydantic', 'yaml', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", ["check", "train", "runs list"])
def test_flags_show_no_type(verb: str) -> None:
    text = call(*verb.split(), "--help").stdout
    assert "<bool>" not in text
    assert "--help" in text


@pytest.mark.parametrize("verb", ["check", "train", "plan", "import", "run"])
@pytest.mark.parametrize(("name", "number"), [("rows.jsonl", "E2700"), ("rows.csv.gz", "E2700"), ("README.md", "E2701"),
                                              ("base.safetensors", "E2701")])  # fmt: skip
def test_what_is_no_config(verb: str, name: str, number: str, surefit: Surefit) -> None:
    Path(name).write_text('{"text": "x"}\n{"text": "y"}\n', encoding="utf-8")
    assert said(verb, name)[:2] == (2, number)


def test_another_tools_config_is_named_once(surefit: Surefit) -> None:
    Path("a b.yaml").write_text(FIRST.AXOLOTL, encoding="utf-8")
    code, number, text = said("train", "a b.yaml")
    assert (code, number, "Axolotl" in text) == (2, "E8702", True)
    assert "surefit import 'a b.yaml' --output 'a b-surefit.yaml'" in text


def test_a_config_without_sections_is_none_of_trl(surefit: Surefit) -> None:
    Path("flat.yaml").write_text(FIRST.FLAT, encoding="utf-8")
    assert said("check", "flat.yaml")[:2] == said("train", "flat.yaml")[:2] == (2, "E3550")


def test_known_keys_are_listed_once_per_section(config: Path, surefit: Surefit) -> None:
    text = config.read_text(encoding="utf-8").replace("max_steps: 3", "max_steps: 3, gnome: 1, elf: 2, bf16: true")
    config.write_text(text + "lora: {gnome: 1}\n", encoding="utf-8")
    answer = surefit("check", config, "--json")
    problems = [answer.json, *answer.json["also"]]
    helps = {problem["field"]: problem["help"] for problem in problems}
    listed = [field for field, text in helps.items() if text]
    assert sorted(helps) == ["lora.gnome", "train.bf16", "train.elf", "train.gnome"]
    assert sorted(listed) in (["lora.gnome", "train.elf"], ["lora.gnome", "train.gnome"])


def test_a_missing_output_dir_is_named_after_the_config(config: Path, surefit: Surefit) -> None:
    path = config.with_name("my first.yaml")
    path.write_text(config.read_text(encoding="utf-8").replace("output_dir: runs/one\n", ""), encoding="utf-8")
    answer = surefit("check", path, "--json").json
    assert (answer["field"], answer["help"].split()[-1]) == ("output_dir", "runs/my-first")


def test_a_check_says_what_it_could_not_look_at(config: Path, surefit: Surefit) -> None:
    assert "skipped" not in surefit("check", config).stdout
    away = surefit("check", config, "--set", "data.train=owner/name")
    first, *_ = away.stdout.splitlines()
    assert re.search(
        r"no problem found by \d+ rules in .*; \d+ checks skipped: the dataset is not on this machine", first
    )
    missing = surefit("check", config, "--set", "data.train=rws.jsonl")
    assert (missing.code, "the dataset could not be read" in missing.stdout) == (1, True)


def test_a_check_ends_with_the_next_command(config: Path, surefit: Surefit) -> None:
    last = surefit("check", config, "--set", "train.max_steps=2").stdout.splitlines()[-1]
    again = "run.yaml --set train.max_steps=2"
    assert last.replace(str(config), "run.yaml") == f"Next: surefit plan {again}, or surefit train {again}"
    wrong = surefit("check", config, "--set", "train.warmup_steps=50").stdout.splitlines()[-1]
    assert wrong == "Next: surefit explain SCH001"
    assert call(*wrong.split()[2:]).code == 0
    for style in ("json", "github", "sarif"):
        assert "Next:" not in surefit("check", config, "--format", style).text


def test_an_audit_ends_with_the_next_command(config: Path, surefit: Surefit) -> None:
    line = surefit("audit", "rows.jsonl").stdout.splitlines()[-1]
    assert line == "Next: surefit init --data rows.jsonl"
    made = call(*line.split()[2:])
    assert made.code == 0
    following = made.stdout.splitlines()[-1].partition("Next: surefit ")[2].split()
    assert call("check", *following[1:]).code == 0


def test_an_import_ends_with_the_next_command(config: Path, surefit: Surefit) -> None:
    Path("axolotl.yaml").write_text(FIRST.AXOLOTL, encoding="utf-8")
    Path("rows.jsonl").write_text(FIRST.ROWS, encoding="utf-8")
    line = surefit("import", "axolotl.yaml").stderr.splitlines()[-1]
    written = call(*line.partition("Next: surefit ")[2].split())
    assert written.code == 0
    checked = call(*written.stdout.splitlines()[-1].partition("Next: surefit ")[2].split())
    assert checked.code == 0, checked.text


def test_advice_that_leads_somewhere(config: Path, surefit: Surefit) -> None:
    full = ["--set", "train.method=full", "--set", "hardware.gpu=rtx4090", "--select", "MEM001", "--json", "--set"]
    helps = {}
    for model in ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"):
        (finding,) = surefit("check", config, *full, f"model.name_or_path={model}").json["findings"]
        helps[model] = finding["help"]
    assert "method: lora" in helps["meta-llama/Llama-3.1-8B-Instruct"]
    assert "a 48 GB card (--gpu rtx-a6000)" in helps["meta-llama/Llama-3.3-70B-Instruct"]
    (finding,) = surefit("check", config, "--select", "DSK001", "--json", "--set", "output_dir=/proc/x").json[
        "findings"
    ]
    assert finding["field"] == "output_dir"
    other, near = (surefit("plan", config, "--gpu", gpu, "--json").json for gpu in ("rtx4081", "rtx4090x"))
    assert ("did you mean" in other["message"], "did you mean" in near["message"]) == (False, True)


def test_every_recipe_says_what_it_is_for(surefit: Surefit) -> None:
    purposes = {name: get_recipe(name).purpose for name in _RECIPES}
    assert len(set(purposes.values())) == len(purposes)
    assert all(len(text) < 100 and "arXiv" not in text for text in purposes.values())
    answer = surefit("init", "--list")
    assert all(text.split()[0] in answer.stdout for text in purposes.values())
    command = answer.stdout.splitlines()[-1].partition("Next: surefit ")[2]
    assert call(*command.split()).code == 0


def test_training_says_at_once_what_it_will_do(config: Path, surefit: Surefit) -> None:
    model, steps = describe_run(load_checked_run(config, ["train.max_steps=null"]))
    assert "surefit/nano (1.41M parameters): LoRA r 16 trains " in model
    assert "in float32" in model
    assert "about 20 rows (20 held out) × 1 epoch = 5 optimizer steps of 4 rows" in steps
    assert steps.endswith("writes runs/one")
    _, limited = describe_run(load_checked_run(config))
    assert "3 optimizer steps of 4 rows (max_steps)" in limited
    full, one = describe_run(load_checked_run(config, ["train.method=full", "train.max_steps=1"]))
    assert "all weights are trained" in full
    assert "1 optimizer step of 4 rows" in one


def test_it_says_so_before_torch_is_imported(config: Path, tmp_path: Path) -> None:
    """The first lines come before the imports: a process that cannot import torch prints them too."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit(77)\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run([sys.executable, "-m", "surefit", "train", config], cwd=tmp_path, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 77
    assert "optimizer steps of 4 rows" in done.stderr


WATCH = """
import fcntl, os, pty, struct, sys, termios
pid, terminal = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, {width}, 0, 0))
    os.environ.pop("COLUMNS", None)
    os.execv(sys.executable, [sys.executable, "-m", "surefit", *{words!r}])
shown = b""
while True:
    try:
        part = os.read(terminal, 65536)
    except OSError:
        break
    if not part:
        break
    shown += part
sys.stdout.buffer.write(shown)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


EPOCHS = ("--set", "train.num_train_epochs=3")


def watch(words: list[str], width: int) -> tuple[int, str]:
    """Run a command on a terminal of so many columns; return its exit code and all that was drawn."""
    environment = os.environ | {"TERM": "xterm-256color"}
    done = subprocess.run([sys.executable, "-c", WATCH.format(width=width, words=words)], env=environment,
                          capture_output=True, timeout=600, check=False)  # fmt: skip
    return done.returncode, done.stdout.decode()


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 80])
def test_training_on_a_narrow_terminal(config: Path, surefit: Surefit, width: int) -> None:
    code, shown = watch(
        ["train", str(config), *EPOCHS, "--set", "train.max_steps=12", "--set", "checkpoint.save_steps=4"], width
    )
    assert code == 0, shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"dry pass ━+ 0/12 ", text)
    assert re.search(r"training ━+ 12/12 ETA 0 s", text)
    assert "training 0/1 " not in text
    assert all(re.search(r" \d+/12 (ETA )?[\d.]+", line) for line in text.splitlines() if line.startswith("training ━"))
    assert ("· loss " in text) == (width == 80)


@pytest.mark.slow
def test_the_whole_way_by_the_next_commands(config: Path, surefit: Surefit) -> None:
    """From check to report, each command is the first one that the last printed."""
    line, seen = f"Next: surefit check {config}", []
    while len(seen) < 6 and line:
        words = shlex.split(line.partition("Next: surefit ")[2].split(", or ")[0])
        answer = call(*words)
        assert answer.code == 0, answer.text
        seen.append(words[0])
        line = next((said for said in reversed(answer.text.splitlines()) if said.startswith("Next: ")), "")
    assert seen == ["check", "plan", "train", "merge", "evaluate", "report"]
    assert "surefit chat runs/one, or surefit export runs/one" in line
    ended = next(text for text in reversed((Path("runs/one/log.txt")).read_text().splitlines()) if "Trained 3" in text)
    whole = [event for event in read_jsonl(RunDir(Path("runs/one")).events) if event.get("stage") == "train"]
    assert whole
    assert re.search(r"Trained 3 steps in .* s \(.* s of it in optimizer steps\): loss", ended)


def test_the_script_judges_and_fails_on_a_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["first_mistakes.py", "--only", "36"])
    assert FIRST.main() == 0
    page = capsys.readouterr().out
    assert "## 36. The verb finetune" in page
    assert "exit code 2" in page
    outcomes: dict[str, Any] = {"a bug": (4, "x"), "a traceback": (1, "Traceback (most recent call last):")}
    for outcome in outcomes.values():
        monkeypatch.setattr(FIRST, "run", lambda mistake, outcome=outcome: outcome)
        assert FIRST.main() == 1
    assert json.dumps(len(FIRST.MISTAKES)) == "60"
