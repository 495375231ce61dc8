"""`check --fix` writes what removes its finding, and nothing else; help that names a place is true."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.lint.engine import all_rules
from surefit.lint.rule import ConfigFix, Finding
from surefit.stages import checking

RULES = Path(__file__).parents[1] / "rules"
RANKING = """recipe: chat
model: {name_or_path: surefit/nano}
data: {train: rows.jsonl, eval: 0.5, max_length: 64}
train: {max_steps: 30, global_batch_size: 8}
hardware: {gpu: t4}
parallel: {accelerate_config: launch/accelerate_config.yaml}
output_dir: run
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 1
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": f"Say the number {n}.", "completion": f"It is {n}."} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def surefit(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    document: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return document


def of(document: dict[str, Any], code: str) -> list[dict[str, Any]]:
    return [found for found in document["findings"] if found["code"] == code]


def adopting(place: Path) -> None:
    (place / "run.yaml").write_text(RANKING)
    (place / "launch").mkdir()
    (place / "launch/accelerate_config.yaml").write_text(ACCELERATE)


def test_a_value_of_another_file_is_mended_there(place: Path) -> None:
    """TA2: the finding stands where the value is said, --fix writes nothing, and both ways of its help work."""
    adopting(place)
    before = (place / "run.yaml").read_bytes()
    document = surefit("check", "run.yaml", "--fix")
    (found,) = of(document, "PRC001")
    assert (found["path"], found["line"], found["fix"]) == ("launch/accelerate_config.yaml", 4, None)
    assert (document["fixed"], document["written"]) == ([], False)
    assert (place / "run.yaml").read_bytes() == before
    for text in (ACCELERATE.replace("mixed_precision: bf16\n", ""), ACCELERATE.replace("bf16", "fp16")):
        (place / "launch/accelerate_config.yaml").write_text(text)
        assert of(surefit("check", "run.yaml"), "PRC001") == []


def test_the_same_value_in_the_config_is_fixed(place: Path) -> None:
    text = RANKING.replace("surefit/nano", "surefit/nano, dtype: bfloat16").replace("parallel:", "# parallel:")
    (place / "run.yaml").write_text(text)
    document = surefit("check", "run.yaml", "--fix")
    assert [(each["code"], each["field"], each["value"]) for each in document["fixed"]] == [
        ("PRC001", "model.dtype", "auto")
    ]
    assert (document["written"], of(document, "PRC001")) == (True, [])


def test_a_fix_without_effect_is_not_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TA2: whatever a rule promises, what it promises is judged again; a fix that works is still made."""
    text = RANKING.replace("surefit/nano", "surefit/nano, dtype: bfloat16").replace("parallel:", "# parallel:")
    (place / "run.yaml").write_text(text)
    real = checking.run_check

    def promising(found: Any, rules: Any = None) -> dict[str, Any]:
        report = real(found, rules)
        promise = Finding(
            field="data.max_length", message="it stays", fix=ConfigFix("data.max_length", 32), code="XYZ001"
        )
        report["findings"].append(promise.as_dict())
        return report

    monkeypatch.setattr(checking, "run_check", promising)
    for dry in (["--dry-run"], []):
        document = surefit("check", "run.yaml", "--fix", *dry)
        assert [each["code"] for each in document["fixed"]] == ["PRC001"]
        assert [each["code"] for each in document["not_fixed"]] == ["XYZ001"]
    written = (place / "run.yaml").read_text()
    assert ("dtype: auto" in written, "max_length: 64" in written) == (True, True)


WITH_FIX = sorted(
    rule.code for rule in all_rules() if any(word in rule.check.__code__.co_names for word in ("ConfigFix", "fix"))
)


@pytest.mark.parametrize("code", [code for code in WITH_FIX if (RULES / code / "bad.yaml").exists()])
def test_what_is_called_fixed_is_gone(code: str, place: Path) -> None:
    """TA2: for each rule that writes a fix, on its own bad config, by the command itself."""
    shutil.copytree(RULES / code, place, dirs_exist_ok=True)
    document = surefit("check", "bad.yaml", "--fix")
    left = {(found["code"], found["field"]) for found in document["findings"] if found["fix"]}
    assert not left & {(each["code"], each["field"]) for each in document["fixed"]}
    assert (place / "bad.yaml").read_bytes() == (RULES / code / "bad.yaml").read_bytes() or document["written"]
