"""What trains must also start and end: resumes with other held-out rows, weights that are not finite."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit import nano
from surefit.cli.app import app
from surefit.core.rundir import read_json, read_jsonl


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def surefit(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """A verb with `--json`: its exit code, its last line, and all that it said."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    last = result.stdout.strip().splitlines()[-1:] or ["{}"]
    return result.exit_code, json.loads(last[0]) if last[0].startswith("{") else {}, result.output


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def pairs(start: int, number: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Say the number {n}.", "completion": f"It is {n}."} for n in range(start, start + number)]


RUN = """recipe: chat
model: {name_or_path: surefit/nano, dtype: float32}
lora: {r: 4}
data: {train: train.jsonl, eval: eval.jsonl, max_length: 128}
train: {max_steps: 6, learning_rate: 3e-3, global_batch_size: 8, early_stopping_patience: 5}
checkpoint: {save_steps: 2, metric_for_best_model: eval_loss, save_total_limit: 10}
evaluate: {max_examples: 2, max_new_tokens: 3}
hardware: {gpu: cpu}
output_dir: run
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of six steps that were killed after the second, by their config: what came later is not there."""
    found = {}
    scored = RUN.replace("evaluate: {", "evaluate: {in_training: true, ").replace("eval_loss", "exact_match")
    with pytest.MonkeyPatch.context() as patch:
        for name, config in (("loss", RUN), ("scored", scored)):
            place = tmp_path_factory.mktemp(name)
            patch.chdir(place)
            patch.setenv("SUREFIT_CACHE", str(place / "cache"))
            write(place / "train.jsonl", pairs(0, 40))
            write(place / "eval.jsonl", pairs(100, 8))
            (place / "run.yaml").write_text(config, encoding="utf-8")
            assert surefit("train", "run.yaml")[0] == 0
            shutil.rmtree(place / "run/adapter")
            for path in (place / "run/checkpoints").glob("step-[3-6]"):
                shutil.rmtree(path)
            found[name] = place
    return found


def changed_rows(place: Path) -> list[str]:
    write(
        place / "eval.jsonl",
        [{"prompt": f"Name the color {n}.", "completion": "Violet, or so, and nothing else."} for n in range(8)],
    )
    return []


def added_rows(place: Path) -> list[str]:
    write(place / "eval.jsonl", pairs(100, 12))
    return []


def other_file(place: Path) -> list[str]:
    write(place / "other.jsonl", pairs(100, 7))
    return ["--set", "data.eval=other.jsonl"]


@pytest.mark.parametrize(
    "change", [changed_rows, added_rows, other_file], ids=["R5-changed", "R5-added-rows", "R5-another-file"]
)
@pytest.mark.parametrize("old", [False, True], ids=["", "checkpoint-without-the-hash"])
def test_other_held_out_rows_are_an_error_at_resume(
    place: Path, made: dict[str, Path], change: Callable[[Path], list[str]], old: bool
) -> None:
    shutil.copytree(made["loss"], place, dirs_exist_ok=True)
    trainer = place / "run/checkpoints/step-2/trainer.json"
    if old:
        forget(trainer)
    log = (place / "run/metrics.jsonl").read_bytes()
    code, said, _ = surefit("train", "run.yaml", "--resume", *change(place))
    assert (code, said["field"], said["code"]) == (2, "data.eval", "E5350" if old else "E5104")
    assert (place / "run/metrics.jsonl").read_bytes() == log
    assert not (place / "run/adapter").exists()


def forget(trainer: Path) -> None:
    """Make a checkpoint one of a release that kept nothing of the held-out rows."""
    content = read_json(trainer)
    content["identity"] = {key: value for key, value in content["identity"].items() if not key.startswith("data.eval")}
    trainer.write_text(json.dumps(content), encoding="utf-8")
    manifest = read_json(trainer.parent / "manifest.json")
    data = trainer.read_bytes()
    manifest["files"][trainer.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (trainer.parent / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_the_same_rows_in_another_file_resume(place: Path, made: dict[str, Path]) -> None:
    shutil.copytree(made["loss"], place, dirs_exist_ok=True)
    shutil.copy(place / "eval.jsonl", place / "copy.jsonl")
    code, said, output = surefit("train", "run.yaml", "--resume", "--set", "data.eval=copy.jsonl")
    assert (code, said.get("resumed_from"), said.get("steps")) == (0, 2, 5), output
    tokens = {line["eval_tokens"] for line in read_jsonl(place / "run/metrics.jsonl") if "eval_tokens" in line}
    assert len(tokens) == 1


@pytest.mark.parametrize("key", ["max_examples", "max_new_tokens"], ids=["R5-max_examples", "R5-max_new_tokens"])
def test_scores_in_training_are_of_the_same_rows(place: Path, made: dict[str, Path], key: str) -> None:
    shutil.copytree(made["scored"], place, dirs_exist_ok=True)
    code, said, _ = surefit("train", "run.yaml", "--resume", "--set", f"evaluate.{key}=4")
    assert (code, said["code"], said["field"]) == (2, "E5104", f"evaluate.{key}")


def test_without_scores_in_training_they_may_change(place: Path, made: dict[str, Path]) -> None:
    shutil.copytree(made["loss"], place, dirs_exist_ok=True)
    assert surefit("train", "run.yaml", "--resume", "--set", "evaluate.max_examples=4")[0] == 0


def altered(place: Path, change: Callable[[dict[str, Any]], None], config: dict[str, Any] | None = None) -> None:
    """The packaged model with other weights."""
    from safetensors.torch import load_file, save_file

    base = place / "base"
    shutil.copytree(nano.PATH, base, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tensors = load_file(base / "model.safetensors")
    change(tensors)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    if config:
        (base / "config.json").write_text(json.dumps(read_json(base / "config.json") | config))
    write(place / "train.jsonl", pairs(0, 16))
    write(place / "eval.jsonl", pairs(100, 4))


def nan_row(tensors: dict[str, Any]) -> None:
    tensors["model.embed_tokens.weight"][700] = float("nan")


def nan_layer(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.self_attn.q_proj.weight"][0, :3] = float("nan")


def all_nan(tensors: dict[str, Any]) -> None:
    for tensor in tensors.values():
        tensor.fill_(float("nan"))


def infinite(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"][5] = float("inf")


def large_weight(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 70_000.0


def large_activations(tensors: dict[str, Any]) -> None:
    """No weight is beyond float16; what the MLP makes of them is."""
    tensors["model.layers.1.mlp.up_proj.weight"].mul_(2000)
    tensors["model.layers.1.mlp.gate_proj.weight"].mul_(2000)


@pytest.mark.parametrize(
    ("change", "dtype", "packing", "expected"),
    [
        (nan_row, "float32", "auto", ("model.name_or_path", "model.embed_tokens.weight", "160 NaN")),
        (nan_layer, "bfloat16", "auto", ("model.name_or_path", "layers.1.self_attn.q_proj.weight", "3 NaN")),
        (nan_layer, "float32", "false", ("model.name_or_path", "layers.1.self_attn.q_proj.weight", "3 NaN")),
        (all_nan, "float32", "auto", ("model.name_or_path", "model.embed_tokens.weight", "0 infinite")),
        (infinite, "float32", "auto", ("model.name_or_path", "model.norm.weight", "1 infinite")),
        (large_weight, "float16", "auto", ("model.dtype", "layers.1.mlp.up_proj.weight", "1 infinite")),
        (large_activations, "float16", "auto", ("model.dtype", "overflow float16", "all weights are")),
        (large_activations, "float16", "false", ("model.dtype", "overflow float16", "all weights are")),
    ],
    ids=["R9-embedding-row", "R9-layer", "R9-unpacked", "S2-15", "R9-infinite", "R9-weight-in-float16", "R9-overflow",
         "R9-overflow-unpacked"],
)  # fmt: skip
def test_what_is_not_finite_is_named(
    place: Path, change: Callable[[dict[str, Any]], None], dtype: str, packing: str, expected: tuple[str, str, str]
) -> None:
    altered(place, change)
    config = RUN.replace("surefit/nano, dtype: float32", f"base, dtype: {dtype}").replace(
        "max_steps: 6", "max_steps: 1"
    )
    (place / "run.yaml").write_text(config.replace("max_length", f"packing: {packing}, max_length"))
    code, said, output = surefit("train", "run.yaml")
    field, name, numbers = expected
    assert (code != 0, said["field"]) == (True, field), output
    assert name in said["message"]
    assert numbers in said["message"]
    assert said["code"] == ("E5100" if packing == "false" else said["code"])
    assert said["code"] not in ("E5043", "E5044")


def test_a_model_that_cannot_run_is_not_called_unpackable(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """M4: its rotary embedding is narrower than the heads that it turns."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    write(place / "train.jsonl", pairs(0, 16))
    write(place / "eval.jsonl", pairs(100, 4))
    (place / "run.yaml").write_text(RUN.replace("surefit/nano", "base"))
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=1600, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, eos_token_id=1, pad_token_id=0,
        bos_token_id=1,
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=8,
        v_head_dim=16,
    )  # fmt: skip
    config.head_dim = 8
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place / "base")
    AutoTokenizer.from_pretrained(nano.PATH).save_pretrained(place / "base")
    code, said, output = surefit("train", "run.yaml")
    assert (code, said["code"], said["field"]) == (2, "E5351", "model.name_or_path"), output
    assert "fake_tensor" not in output + "".join(capfd.readouterr())
