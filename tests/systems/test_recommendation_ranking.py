"""A published project, its failures one by one: an LLM ranker on MovieLens, two 15 GB cards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from surefit.data.audit.sample import run_file_detectors
from surefit.facts.audit import AuditFacts
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.facts.setup import Setup
from surefit.lint.engine import run_rules
from surefit.lint.rule import LintContext
from surefit.recipes import get_recipe
from surefit.task import Prediction

SHARED = Path(__file__).parents[2] / "../shared/data"
ON_T4 = """
recipe: chat
model: {name_or_path: meta-llama/Llama-3.2-1B-Instruct, dtype: DTYPE}
data: {train: rows.jsonl, max_length: 256}
train: {global_batch_size: 16, per_device_train_batch_size: 4}
hardware: {gpu: t4}
output_dir: runs/ranker
"""


def ratings(users: int, count: int) -> str:
    """A MovieLens file of so many users and ratings."""
    lines = [f"{n % users + 1},{n // users + 1},{n % 5 + 0.5},{964982703 + n}" for n in range(count)]
    return "userId,movieId,rating,timestamp\n" + "\n".join(lines) + "\n"


def test_a_different_movielens_file_under_the_same_name(audit, tmp_path: Path) -> None:
    """The release is told from its users and ratings, whatever the file is called."""
    file = SHARED / "recommendation/ml-latest-small/ratings.csv"
    if not file.exists():
        pytest.skip("the collected data is not here")
    appended = "611,74089,5.0,1544527023\r\n611,31162,2.0,1544527402\r\n"
    official = file.read_text(encoding="utf-8")
    assert "AUD035" in audit("ratings.csv", official + appended)
    for text, wrong in ((ratings(671, 100_004), True), (official, False)):
        other = tmp_path / "ratings.csv"
        other.write_text(text, encoding="utf-8")
        seen = AuditFacts(str(other), 100_000, 100_000, run_file_detectors(str(other)))
        found = run_rules(LintContext(config=None, path=other, audit=seen)).findings
        assert ("AUD035" in {finding.code for finding in found}) == wrong


def test_bf16_compute_on_a_card_that_emulates_it(check) -> None:
    assert "PRC001" in check(ON_T4.replace("DTYPE", "bfloat16"))
    assert check(ON_T4.replace("DTYPE", "float32")) == set()


def test_the_batch_was_not_divided_by_the_number_of_gpus(judge) -> None:
    faulty = {"tool": "trl", "parallel": "dp", "gpus": 2, "micro_batch": 4, "accumulation": 4, "global_batch": 16}
    assert judge(**faulty) == {"BAT004"}
    assert judge(**faulty | {"parallel": "ddp", "world_size": 2, "processes": 2, "accumulation": 2}) == set()


def test_four_bit_and_ddp_with_a_device_map(judge) -> None:
    faulty = {"tool": "trl", "quantization": "nf4", "parallel": "ddp", "processes": 2, "device_map": "auto"}
    assert judge(**faulty) == {"PAR002"}
    assert judge(**faulty | {"device_map": None}) == set()


def test_out_of_memory_at_eval(tmp_path) -> None:
    """The held-out rows are measured in larger batches than the card takes."""
    model, card = model_facts("meta-llama/Llama-3.2-1B-Instruct"), hardware_facts("t4")

    def codes(batch: int) -> set[str]:
        setup = Setup(tool="axolotl", dtype="bfloat16", max_length=4096, micro_batch=1, eval_micro_batch=batch)
        context = LintContext(None, tmp_path / "axolotl.yml", setup=setup, model=model, hardware=card)
        return {finding.code for finding in run_rules(context).findings}

    assert codes(16) - codes(1) == {"MEM004"}


@pytest.mark.slow
def test_deprecated_imports() -> None:
    """Nothing that SureFit imports is on its way out: every module loads with such warnings as errors.

    The default suite loads them all too, where it looks for examples in docstrings, and under the same filter.
    """
    code = (
        "import pkgutil, importlib, warnings\n"
        "warnings.filterwarnings('error', module=r'surefit\\b')\n"
        "import surefit\n"
        "for module in pkgutil.walk_packages(surefit.__path__, 'surefit.'):\n"
        "    if not module.name.endswith(('__main__', 'self_test')): importlib.import_module(module.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_suite_loads_every_module_with_warnings_as_errors(pytestconfig: pytest.Config) -> None:
    """What the test above does, done by the way; a run of this file alone loads fewer modules."""
    assert "error:::surefit" in pytestconfig.getini("filterwarnings")
    assert pytestconfig.getoption("doctestmodules")
    assert "src" in pytestconfig.getini("testpaths")


def test_tracker_prompts_blocked_a_run(check) -> None:
    trl = """
model_name_or_path: surefit/nano
dataset_name: rows.jsonl
max_length: 256
per_device_train_batch_size: 4
num_train_epochs: 1
learning_rate: 2.0e-4
use_peft: true
save_total_limit: 2
report_to: TRACKER
output_dir: out
"""
    assert "TRK001" in check(trl.replace("TRACKER", "wandb"), "trl.yaml")
    assert check(trl.replace("TRACKER", "none"), "trl.yaml") == set()


def test_a_gated_model_with_no_way_in(check, monkeypatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    here = ON_T4.replace("DTYPE", "float32").replace("gpu: t4", "gpu: cpu")
    assert "MOD005" in check(here)
    assert check(here.replace("meta-llama/Llama-3.2-1B-Instruct", "surefit/nano")) == set()


def test_numpy_2_and_protobuf_conflicts(check, installed) -> None:
    run = "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl}\noutput_dir: runs/x\n"
    installed({"numpy": "2.4.6", "pandas": "2.1.4", "pyarrow": "25.0.1"})
    assert "STK001" in check(run)
    installed({"numpy": "2.4.6", "pandas": "2.3.3", "pyarrow": "25.0.1"})
    assert check(run) == set()
    asks = {"tensorboard": ["protobuf<3.20,>=3.9.2"]}
    trl = "model_name_or_path: surefit/nano\ndataset_name: rows.jsonl\nreport_to: tensorboard\nsave_total_limit: 2\n"
    installed({"trl": "1.16.0", "tensorboard": "2.10.1", "protobuf": "5.29.6"}, asks)
    assert "STK002" in check(trl, "trl.yaml")


def test_users_outside_the_retrievers_top_20_still_count() -> None:
    """A row that nothing can be right about scores 0 and stays in the mean: no metric drops it."""
    recipe = get_recipe("chat")
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "(C)"}]
    example = recipe.to_example({"messages": turns})
    metric = recipe.primary_metric
    missed, hit = (recipe.score(example, Prediction(text, parsed=recipe.parse(text))) for text in ("", "(C)"))
    assert (missed[metric], hit[metric]) == (0.0, 1.0)
    assert recipe.aggregate([missed, hit])[metric] == 0.5
