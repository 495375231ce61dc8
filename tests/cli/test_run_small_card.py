"""`run` on a card that trains in 4 bits and does not hold the merged model: base and adapter are scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefit.cli.render import Output
from surefit.cli.run import run_all_stages
from surefit.config.load import load_text
from surefit.core.errors import EXIT_OK
from surefit.stages.run_context import load_checked_run

CONFIG = """\
model: {name_or_path: Qwen/Qwen2.5-7B-Instruct, quantization: QUANTIZATION}
data: {train: rows.jsonl, eval: 0.2}
hardware: {gpu: GPU}
output_dir: runs/one
"""


@pytest.mark.parametrize(
    ("gpu", "quantization", "gate", "scored"),
    [
        ("12GB", "nf4", "", ("base", "adapter")),
        ("24GB", "nf4", "", None),
        ("24GB", "none", "", None),
        ("12GB", "nf4", "evaluate: {gate: {min: 0.5}}\n", None),
    ],
)
def test_the_merged_model_is_left_out_where_it_does_not_fit(tmp_path, monkeypatch, gpu, quantization, gate, scored):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Where is {n}?", "completion": f"In {n}."} for n in range(100)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: list[object] = []
    for name in ("check_and_show", "train_and_show", "merge_run_and_show", "report_run_and_show", "say_plan"):
        monkeypatch.setattr(f"surefit.cli.run.{name}", lambda *_, **__: EXIT_OK)
    monkeypatch.setattr("surefit.stages.planning.build_run_plan", lambda *_, **__: {})
    monkeypatch.setattr(
        "surefit.cli.run.evaluate_and_show", lambda out, run, variants: asked.append(variants) or EXIT_OK
    )
    text = CONFIG.replace("GPU", gpu).replace("QUANTIZATION", quantization) + gate
    run = load_checked_run(load_text(text, Path("run.yaml")))
    assert run_all_stages(Output(), run, resume=False, overwrite=False) == EXIT_OK
    assert asked == [scored]
