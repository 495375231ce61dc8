"""The five teams' first days: their own files checked, their own settings planned for their own cards, and the run
on the built-in model with real rows, from the config to a score, typed as the teams would type it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Answer, call

from surefit.core.rundir import RunDir, read_json

SHARED = Path(__file__).parents[2] / "../shared/data"
CONFIGS = Path(__file__).parents[2] / "configs"
HERE = {
    "model.name_or_path": "surefit/nano", "model.dtype": "auto", "model.quantization": "none", "hardware.gpu": "cpu",
    "hardware.count": 1, "hardware.nodes": 1, "parallel.mode": "single", "parallel.cp": 1, "parallel.dp_replicate": 1,
    "lora.r": 4, "train.max_steps": 2, "train.global_batch_size": 2, "checkpoint.save_steps": 1,
    "evaluate.max_examples": 3, "evaluate.max_new_tokens": 12, "output_dir": "run",
}  # fmt: skip
"""What turns a run on eight cards into one that two cores end in a minute; everything else stays the team's."""

pytestmark = pytest.mark.slow
Type = Callable[..., Answer]


@pytest.fixture
def surefit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Type:
    """`surefit(...)` in an empty directory, without a network; a call that ends otherwise says what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(CONFIGS, tmp_path / "configs")

    def typed(*words: object, code: int = 0) -> Answer:
        answer = call(*words)
        assert answer.code == code, answer.text
        return answer

    return typed


def here(**more: object) -> list[object]:
    values = HERE | {name.replace("__", "."): value for name, value in more.items()}
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def shared(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip("the collected data is not here")
    return SHARED / name


def lines_of(path: Path, count: int) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True)[:count]


def scores() -> dict[str, dict[str, dict[str, float]]]:
    """Variant → metric → mean and interval, on the held-out rows."""
    found: dict[str, dict[str, dict[str, float]]] = read_json(RunDir(Path("run")).eval / "summary.json")["sets"][
        "eval"
    ]["variants"]
    return found


def test_recommendation_ranking(surefit: Type) -> None:
    """Requirements, an Accelerate file, two 15 GB cards; MovieLens to NDCG@10, against the retriever's own order."""
    Path("requirements.txt").write_text("numpy>=1.26.0,<2.0.0\ntorch>=2.5.0\npeft>=0.13.0\nprotobuf>=3.20.3,<5.0.0\n")
    surefit("check", "requirements.txt")
    Path("accelerate_config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 1\n"
        "num_processes: 2\nmachine_rank: 0\ngpu_ids: all\nuse_cpu: false\n"
    )
    surefit("check", "accelerate_config.yaml")
    config = "configs/rec-ranking-llama-2-7b.yaml"
    assert "has no bfloat16 arithmetic" in surefit("check", config, "--set", "model.dtype=bfloat16").text
    planned = surefit("plan", config, "--json").json
    assert planned["estimate"]["verdict"] == "fits", planned["estimate"]
    data = shared("recommendation/ml-latest-small")
    surefit("retrieve", data, "-o", "rows", "--retriever", "window5", "--train-rows", 40)
    ended = call("run", config, *here(data__train="rows/train.jsonl", data__eval="rows/valid.jsonl"))
    assert ended.code in (0, 1, 5), ended.text  # the gate, on three rows
    found = scores()
    assert set(found) >= {"base", "merged", "baseline:retriever"}
    assert 0 <= found["merged"]["ndcg@10"]["mean"] <= 1


def test_distillation(surefit: Type) -> None:
    """The adapter that cost them a phase; a teacher's mathematics and code to one gate; two checkpoints at most."""
    Path("final").mkdir()
    base = {"base_model_name_or_path": "unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit", "peft_type": "LORA"}
    Path("final/adapter_config.json").write_text(
        json.dumps(base | {"r": 64, "lora_alpha": 16, "target_modules": ["q_proj"]})
    )
    told = surefit("check", "final/adapter_config.json").text
    assert "warning[MRG005]" in told
    assert "--base unsloth/meta-llama-3.1-8b-instruct --trained-on nf4" in told, "the name is as unsloth writes it"
    refused = surefit("merge", "final", "-o", "merged", code=2).text
    assert "unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit" in refused
    assert not Path("merged").exists()
    config = "configs/distillation-llama-3.1-8b.yaml"
    surefit("check", config)
    assert surefit("plan", config, "--json").json["estimate"]["verdict"] == "fits"
    teacher, code = shared("math_code/gsm8k/gsm8k_train.jsonl"), shared("math_code/mbpp/mbpp.jsonl")
    Path("teacher.jsonl").write_text("".join(lines_of(teacher, 30)))
    Path("mbpp.jsonl").write_text("".join(lines_of(code, 30)))
    mix = "{mbpp.jsonl: 1}"
    settings = here(data__train="teacher.jsonl", data__mix=mix, data__eval=0.2)
    ended = call("run", config, *settings)
    assert ended.code in (0, 1, 5), ended.text  # the gate, on three rows
    metrics = scores()["merged"]
    assert {"math_reasoning.exact_match", "code_generation.pass@1", "mean_of_tasks"} <= metrics.keys()
    assert read_json(RunDir(Path("run")).certificate)["passed"]
    assert len(list(RunDir(Path("run")).checkpoints.glob("step-*"))) <= 2


def test_amr_parsing(surefit: Type) -> None:
    """float16 on a 24 GB Turing card; the bank's own blocks to Smatch, unparsed graphs counted."""
    config = "configs/amr-parsing-qwen2.5-7b.yaml"
    surefit("check", config, *("--set", "data.max_length=512"))
    assert "has no bfloat16 arithmetic" in surefit("check", config, "--set", "model.dtype=bfloat16").text
    planned = surefit("plan", config, "--set", "data.max_length=512", "--json").json
    assert planned["estimate"]["verdict"] == "fits", "20 of 24 GB was an estimate that nobody had checked"
    surefit("run", config, *here(data__max_length=512, train__num_train_epochs=1))
    metrics = scores()["merged"]
    assert "smatch" in metrics
    assert {"base", "adapter", "merged"} <= scores().keys()


def test_long_summaries(surefit: Type) -> None:
    """The DeepSpeed file and the learning script's tuple; 200k tokens on four cards; ROUGE of every checkpoint."""
    Path("ds_config_zero2.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}})
    )
    surefit("check", "ds_config_zero2.json")
    Path("train_cluster.py").write_text(
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "MAX_SEQ_LENGTH = 262144,\n"
        "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-4B')\n"
        "arguments = TrainingArguments(output_dir='out', max_seq_length=MAX_SEQ_LENGTH)\n"
        "Trainer(model=model, args=arguments).train()\n"
    )
    told = surefit("check", "train_cluster.py", code=1).text
    assert "train_cluster.py:4: error" in told
    assert "max_seq_length" in told
    config = "configs/legal-summaries-qwen3-4b.yaml"
    surefit("check", config)
    planned = surefit("plan", config, "--json").json
    assert planned["estimate"]["verdict"] == "fits"
    rows = []
    for line in lines_of(shared("legal_summarization/govreport_minilongbench_12.jsonl"), 6):
        row = json.loads(line)
        rows.append({"document": row["origin_prompt"], "summary": row["gold"][0][:200]})
    Path("reports.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = here(data__train="reports.jsonl", data__eval=0.3, data__max_length=512, data__too_long="truncate_middle")
    surefit("train", config, *changed)
    surefit("merge", "run")
    surefit("evaluate", "run", "--all-checkpoints")
    found = read_json(RunDir(Path("run")).eval / "checkpoints.json")
    assert [point["step"] for point in found["checkpoints"]] == [1, 2]
    surefit("report", "run")


def test_function_calling(surefit: Type) -> None:
    """Two machines by SLURM, the xLAM rows with their own column's name; free and constrained answers to one score."""
    rows = shared("function_calling/xlam/xlam_shape_from_bfcl.jsonl")
    Path("rows.jsonl").write_text("".join(lines_of(rows, 40)), encoding="utf-8")
    config = "configs/function-calling-llama-3.2-3b-slurm.yaml"
    wrong = [json.loads(line) for line in lines_of(rows, 5)]
    Path("wrong.jsonl").write_text(
        "".join(json.dumps({("answer" if k == "answers" else k): v for k, v in row.items()}) + "\n" for row in wrong)
    )
    told = surefit("check", config, "--set", "data.train=wrong.jsonl", code=1)
    assert "did you mean 'answer'" in told.text
    assert "completion was null" not in told.text
    script = surefit("slurm", config, "--set", "data.train=rows.jsonl").stdout
    assert "#SBATCH --nodes=2" in script
    changed = here(data__train="rows.jsonl", data__eval=0.2, evaluate__constrained="both", data__max_length=1024)
    ended = call("run", config, *changed)
    assert ended.code in (0, 1, 5), ended.text  # the gate, on three rows
    assert {"merged", "merged+grammar", "base"} <= scores().keys()
    constrained = read_json(RunDir(Path("run")).eval / "eval/merged+grammar.json")
    assert constrained["recipe"] == "function_calling"
