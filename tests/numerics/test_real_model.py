"""A pretrained model of 30 layers, grouped heads and a large vocabulary: packed, killed, merged, converted.

Slow, and only where the extra `real` has brought the model; what holds for a random model of two layers is in the
other files of this folder and in tests/unit/merge.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surefit.config.schema import ModelSection
from surefit.core.errors import GateError, SureFitError
from surefit.core.rundir import RunDir, read_json
from surefit.data.tokens.collate import collate_packed
from surefit.facts.safetensors import weight_files
from surefit.merge import quantised
from surefit.merge.export import export_quantized, load_certified_model
from surefit.merge.merge import MergeJob, certify_merged, merge_and_certify
from surefit.merge.quantised import Conversion
from surefit.model import load
from surefit.model.attention import require_packable, use_varlen
from surefit.model.tokenizer import load_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

NAME = "surefit/smollm2-135m-instruct"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROUNDING = 1e-4
"""Of a gradient's largest number: 30 layers in float32, summed in another order (docs/merge.md has the estimate)."""
TEXTS = (
    "Gravity is a force by which all things with mass are brought toward one another.",
    "Two plus two is four.",
    "A cook in Lyon writes down every price of the market, every morning, in a small red book.",
)


@pytest.fixture(scope="module")
def base() -> Path:
    try:
        found = Path(load.model_path(NAME))
    except SureFitError as error:
        pytest.skip(str(error))
    if not found.is_dir():
        pytest.skip(f"{NAME} is not on this machine: the extra real")
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread_here() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sequences(base: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(ModelSection(name_or_path=str(base), dtype="float32"))
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """trained(dtype, quantization) → the config of a run of three steps."""
    made: dict[tuple[str, str], Any] = {}

    def get(dtype: str = "float32", quantization: str = "none") -> Any:
        if (dtype, quantization) not in made:
            out = tmp_path_factory.mktemp("run")
            config = tiny_run.config(base, out, dtype=dtype, num_train_epochs=1.0, learning_rate=1e-3)
            model = config.model.model_copy(update={"quantization": quantization})
            made[dtype, quantization] = config.model_copy(update={"model": model})
            tiny_run.training(made[dtype, quantization]).fit()
        return made[dtype, quantization]

    return get


def run_of(config: Any) -> RunDir:
    return RunDir(Path(config.output_dir))


def test_packed_documents_teach_what_they_teach_alone(base: Path, sequences: list[list[int]]) -> None:
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    parts = [torch.tensor(ids) for ids in sequences]

    def learnt(inputs: dict[str, Any], rows: torch.Tensor, targets: torch.Tensor) -> float:
        logits = model(**inputs, use_cache=False).logits[0]
        loss = F.cross_entropy(logits[rows], targets, reduction="sum")
        loss.backward()
        return float(loss)

    def gradients() -> dict[str, torch.Tensor]:
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    alone = sum(learnt({"input_ids": part[None]}, torch.arange(len(part) - 1), part[1:]) for part in parts)
    expected = gradients()
    use_varlen(model)
    require_packable(model)
    batch = collate_packed([(part.numpy(), part.numpy()) for part in parts])
    together = learnt(
        {name: value for name, value in batch.items() if name not in ("labels", "loss_rows", "targets")},
        batch["loss_rows"], batch["targets"],
    )  # fmt: skip
    assert together == pytest.approx(alone, rel=1e-5)
    found = gradients()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= ROUNDING * float(gradient.abs().max()), name


def test_kill_9_at_ten_moments_loses_nothing_but_time(base: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "kill_resume.py"), "--model", str(base), "--kills", "10", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["kills"] == 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merge_is_certified_and_a_damaged_one_is_not(
    base: Path, trained: Any, sequences: list[list[int]], dtype: str
) -> None:
    config = trained(dtype)
    run = run_of(config)
    assert merge_and_certify(config, tiny_run.CPU, run, sequences)["passed"]
    file = min(run.merged.glob("*.safetensors"))
    merged = load_file(file)
    name = "model.layers.17.mlp.up_proj.weight"
    before = {name: tensor for each in weight_files(base) for name, tensor in load_file(each).items()}[name]
    save_file(merged | {name: before.to(merged[name].dtype)}, file, {"format": "pt"})
    job = MergeJob(config.model, run.adapter, run.merged, run.certificate, config.adapter)
    found = certify_merged(job, tiny_run.CPU, sequences)
    assert not found["passed"]
    assert "merge_rounding" in found["reason"]


@pytest.mark.parametrize("into", ["dequantized", "original"])
def test_an_adapter_that_was_trained_beside_nf4_belongs_to_the_weights_it_saw(
    trained: Any, sequences: list[list[int]], into: Any
) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra quant is not installed")
    config = trained("float32", "nf4")
    if into == "dequantized":
        found = merge_and_certify(config, tiny_run.CPU, run_of(config), sequences, into=into)
        assert (found["passed"], found["quantization"], found["into"]) == (True, "nf4", "dequantized")
    else:
        with pytest.raises(GateError, match="reloaded_") as refused:
            merge_and_certify(config, tiny_run.CPU, run_of(config), sequences, into=into)
        assert "--into dequantized" in str(refused.value.help)


@pytest.mark.parametrize(
    ("format", "outtype", "packages"),
    [
        ("nf4", "q8_0", ["bitsandbytes"]),
        ("int8", "q8_0", ["torchao"]),
        ("fp8", "q8_0", ["torchao"]),
        ("gguf", "q8_0", ["gguf", "sentencepiece"]),
        ("gguf", "q4_k_m", ["gguf", "sentencepiece", "llama_cpp"]),
    ],
)
def test_a_conversion_is_certified(
    trained: Any, sequences: list[list[int]], tmp_path: Path, format: str, outtype: Any, packages: list[str]
) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    if format == "gguf" and not os.environ.get("LLAMA_CPP"):
        pytest.skip("LLAMA_CPP names no checkout of llama.cpp")
    config = trained()
    run = run_of(config)
    merge_and_certify(config, tiny_run.CPU, run, sequences)
    section = ModelSection(name_or_path=str(run.merged), dtype="float32")
    job = Conversion(format, run.merged, section, tiny_run.CPU, outtype)
    export_quantized(
        load_certified_model(run), job, tmp_path / "out", sequences, lambda certificate, folder: "# a card\n"
    )
    found = read_json(tmp_path / "out/certificate.json")
    assert found["passed"]
    assert found["measured"]["logit_error_mean"] > 0
    assert quantised.reload_converted(job, tmp_path / "out")[1] == []
