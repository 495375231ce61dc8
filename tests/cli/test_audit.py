"""`surefit audit` on configs and on bare data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Surefit, row

NAMES = ["Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald", "Tony", "Leslie", "Robin", "John"]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


@pytest.fixture
def leaky(tmp_path: Path) -> Path:
    """A config whose evaluation rows are half in the training rows."""
    write(tmp_path / "train.jsonl", [row(f"{a} {b} {a}son") for a in NAMES for b in NAMES])
    write(tmp_path / "eval.jsonl", [row(name) for name in NAMES] + [row(f"{a} Ada {a}son") for a in NAMES])
    path = tmp_path / "leaky.yaml"
    path.write_text(
        "recipe: function_calling\nmodel: {name_or_path: surefit/nano}\ndata: {train: train.jsonl, eval: eval.jsonl}\n"
        "train: {global_batch_size: 8}\noutput_dir: runs/leaky\n"
    )
    return path


def test_a_leak_is_an_error_and_the_passport_is_in_the_run_directory(surefit: Surefit, leaky: Path) -> None:
    answer = surefit("audit", leaky, "--json")
    assert answer.code == 1, answer.text
    passport = json.loads(Path("runs/leaky/passport.json").read_text())
    assert passport == answer.json
    (finding,) = passport["findings"]
    assert (finding["code"], finding["severity"]) == ("AUD001", "error")
    assert finding["path"].endswith("leaky.yaml")
    assert finding["line"] == 3
    assert finding["message"].startswith("10 of 20 evaluation rows (50.0%) have their prompt in the training rows")
    assert passport["scored"]["data.eval"]["leak_exact"] == 10
    assert passport["lengths"]["whole"]["total"] > 1000
    assert passport["unit"] == "tokens"

    text = surefit("audit", leaky, "--max-rows", "50").stdout
    assert "train.jsonl: 50 of 100 rows, 50 usable as examples of function_calling" in text
    assert "█" in text
    assert "error[AUD001] data.eval:" in text
    assert json.loads(Path("runs/leaky/passport.json").read_text())["audited"] == 50


def test_bare_data_needs_no_model_and_writes_only_where_told(surefit: Surefit, tmp_path: Path) -> None:
    rows = write(
        tmp_path / "rows.jsonl", [{"prompt": f"What is {n} times {n}?", "completion": str(n * n)} for n in range(30)]
    )
    answer = surefit("audit", rows)
    assert answer.code == 0, answer.text
    assert "rows.jsonl: 30 rows, 30 usable as examples of chat" in answer.stdout
    assert "Length in characters" in answer.stdout
    assert list(tmp_path.rglob("passport.json")) == []
    assert surefit("audit", rows, "--passport", "out/passport.json", "--json").code == 0
    assert json.loads(Path("out/passport.json").read_text())["rows"] == 30


def test_rows_that_training_would_stop_at_are_an_error(surefit: Surefit, tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {n} about {n * 31}?", "completion": f"Answer {n}"} for n in range(9)]
    path = write(tmp_path / "rows.jsonl", [*rows, {"prompt": "Why?", "completion": None}])
    answer = surefit("audit", path)
    assert answer.code == 1
    assert "error[DAT001]" in answer.stdout
    assert "1 of 10 rows cannot be used, the first: " in answer.stdout
    assert "rows.jsonl:10: completion: missing" in answer.stdout


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("absent.jsonl", None, "no such file or directory"),
        ("empty.jsonl", b"", "the file is empty"),
        ("broken.jsonl", b'{"prompt": "a"\n', "not valid JSON"),
        ("latin.jsonl", b'{"text": "\xe9"}\n', "not UTF-8 text"),
        ("cut.jsonl", b'{"text": "\xc3', "not UTF-8 text"),
        ("broken.yaml", b"recipe: [", "broken.yaml"),
    ],
)
def test_bad_input_is_a_message(
    surefit: Surefit, tmp_path: Path, name: str, content: bytes | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    answer = surefit("audit", name)
    assert answer.code == 2, answer.text
    assert problem in answer.stderr
    assert "Traceback" not in answer.text


def test_a_secret_in_a_row_does_not_reach_the_passport(surefit: Surefit, tmp_path: Path) -> None:
    secret = "hf_" + "a1" * 20
    write(tmp_path / "rows.jsonl", [{"prompt": f"Question {n}?", "completion": secret} for n in range(25)])
    answer = surefit("audit", "rows.jsonl", "--passport", "passport.json", "--json")
    assert "DAT004" in answer.text, "the finding that quotes the answer"
    assert secret not in answer.text
    assert secret not in Path("passport.json").read_text()


def test_audit_before_a_run_does_not_stand_in_its_way(surefit: Surefit, leaky: Path) -> None:
    surefit("audit", leaky)
    assert "AUD001" in surefit("train", leaky, "--json").text
    ignored = ("--set", "lint.ignore={AUD001: on purpose}")
    dry = surefit("train", leaky, *ignored, "--set", "train.max_steps=1", "--overwrite", "--json")
    assert "not a run directory" not in dry.text
    assert dry.code == 0, dry.text
    assert not Path("runs/leaky/passport.json").exists()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_fix_leaves_out_what_is_repeated_empty_leaked_or_too_long(surefit: Surefit, leaky: Path) -> None:
    train = lines(Path("train.jsonl"))
    extra = [train[51], {**train[51], "query": f"{train[51]['query']}!"}, {**train[52], "query": " ", "answers": None}]
    write(Path("train.jsonl"), [*train, *extra])
    before = Path("train.jsonl").read_bytes()
    options = ("audit", leaky, "--fix", "--set", "data.max_length=300", "--json")
    shown = surefit(*options, "--dry-run").json["fix"]
    assert not Path("train.clean.jsonl").exists()
    answer = surefit(*options)
    assert answer.code == 0, answer.text
    done = answer.json["fix"]
    assert {**shown, "dry_run": False} == done
    kept, gone = lines(Path("train.clean.jsonl")), lines(Path("train.clean.removed.jsonl"))
    assert (len(kept), len(gone)) == (done["kept"], sum(done["removed"].values()))
    assert len(kept) + len(gone) == 103
    reasons = {one["line"]: one["reason"] for one in gone}
    assert (reasons[101], reasons[103]) == ("duplicate", "empty")
    assert reasons[102] == "near_duplicate"
    # The scored set asks what ten rows of the training set ask: "Ada Ada Adason" and the like.
    leaks = [one for one in gone if one["reason"] == "leak_exact"]
    assert len(leaks) == 10
    assert all("eval.jsonl:" in str(one["what"]) for one in leaks)
    assert all(one["file"] == "train.jsonl" and one["row"] == one["line"] for one in gone)
    assert kept == [one for number, one in enumerate([*train, *extra], start=1) if number not in reasons]
    assert Path("train.jsonl").read_bytes() == before

    again = surefit("audit", leaky, "--fix", "--set", "data.train=train.clean.jsonl", "--dry-run", "--json").json
    assert again["fix"]["removed"] == {}
    short = surefit("audit", leaky, "--fix", "--set", "data.max_length=20", "--dry-run", "--json")
    assert short.code == 2
    assert "would have no rows" in short.text


def test_fix_never_replaces_its_source_and_takes_no_part(surefit: Surefit, tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} times {n}?", "completion": str(n * n)} for n in range(30)]
    path = write(tmp_path / "rows.jsonl", [*rows, rows[3]])
    for options, code in (
        (("--clean-copy", path), "E1605"),
        (("--clean-copy", tmp_path / "rows.csv"), "E4002"),
        (("--max-rows", "5"), "E1005"),
    ):
        answer = surefit("audit", path, "--fix", *options, "--json")
        assert (answer.code, answer.json["code"]) == (2, code)
    assert surefit("audit", path, "--dry-run").code == 2
    assert surefit("audit", tmp_path / "*.jsonl", "--fix", "--json").json["code"] == "E4001"
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "rows.jsonl", rows)
    into = surefit("audit", folder, "--fix", "--clean-copy", folder / "new.jsonl", "--json")
    assert into.json["code"] == "E4003"
    assert surefit("audit", folder, "--fix").code == 0
    assert lines(tmp_path / "folder.clean.jsonl") == rows
    assert surefit("audit", path, "--fix", "--clean-copy", tmp_path / "other.jsonl").code == 0
    assert lines(tmp_path / "other.jsonl") == rows
    assert not [name for name in tmp_path.iterdir() if name.name.endswith(".tmp")]
