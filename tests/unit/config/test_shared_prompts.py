"""Whether pairs share their prompts: what auto decides and says, and what is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefit.config.resolve import ResolvedConfig
from surefit.core.errors import ConfigError
from surefit.facts.attention import shares_prompts
from surefit.stages.checking import run_check
from surefit.stages.run_context import load_run_context

KEY = "speed.shared_prompts"
RUN = """model: {{name_or_path: surefit/nano}}
data: {{train: surefit/shorter-answers, eval: 0.1, max_length: 128}}
objective: dpo
train: {{global_batch_size: 16, per_device_train_batch_size: 4}}
output_dir: {folder}/run
"""


def resolved(folder: Path, *changes: str, gpu: str = "cpu") -> ResolvedConfig:
    path = folder / "run.yaml"
    path.write_text(RUN.format(folder=folder), encoding="utf-8")
    found = load_run_context(path, [f"hardware.gpu={gpu}", *changes])
    if found.resolved is None:
        raise found.problems[0]
    return found.resolved


def test_on_a_cpu_packed_pairs_share_their_prompts(tmp_path: Path) -> None:
    found = resolved(tmp_path)
    assert found.config.speed.shared_prompts is True
    assert "fast" in found.provenance[KEY].detail


@pytest.mark.parametrize(
    ("changes", "gpu", "says"),
    [
        (("objective.name=sft", "data.format=prompt_completion", "data.columns.completion=chosen"), "cpu", "single"),
        (("data.packing=false",), "cpu", "padded"),
        (("speed.attention=sdpa",), "cpu", "sdpa"),
        (("objective.name=orpo", "lora.lora_dropout=0.1"), "cpu", "random numbers"),
        (("speed.compile=true",), "cpu", "proved"),
        ((), "h100", "not measured on a GPU"),
    ],
    ids=["sft", "padded", "mask", "dropout", "compiled", "gpu"],
)
def test_elsewhere_it_is_two_documents_with_the_reason(
    tmp_path: Path, changes: tuple[str, ...], gpu: str, says: str
) -> None:
    found = resolved(tmp_path, *changes, gpu=gpu)
    assert found.config.speed.shared_prompts is False
    assert says in found.provenance[KEY].detail


def test_on_a_gpu_it_can_be_asked_for(tmp_path: Path) -> None:
    found = resolved(tmp_path, f"{KEY}=true", gpu="h100")
    assert found.config.speed.shared_prompts is True
    assert found.provenance[KEY].kind != "auto"


@pytest.mark.parametrize(
    "changes",
    [("data.packing=false",), ("speed.attention=eager",)],
    ids=["padded", "mask"],
)
def test_asking_for_the_impossible_is_an_error(tmp_path: Path, changes: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(tmp_path, f"{KEY}=true", *changes)
    assert error.value.field == KEY
    assert error.value.code == "E2620"


def test_what_it_cannot_be_combined_with_is_found_by_the_check(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(folder=tmp_path), encoding="utf-8")
    changes = ["hardware.gpu=cpu", f"{KEY}=true", "objective.name=simpo", "lora.lora_dropout=0.1"]
    findings = run_check(load_run_context(path, changes))["findings"]
    assert [(f["code"], f["field"]) for f in findings if f["severity"] == "error"] == [("CFG009", KEY)]


def test_types_of_models_that_were_not_tested_are_not_known_to_share() -> None:
    assert shares_prompts({"model_type": "llama"})
    assert shares_prompts({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})
    for kind in ("stablelm", "nemotron", "mamba", "bloom", "jamba", "new_type"):
        assert not shares_prompts({"model_type": kind})
    assert not shares_prompts({"model_type": "llama", "layer_types": ["linear_attention"]})
